"""What the ranks that are left must say and do where a host is lost, and what the checkpoints behind them must have."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from two_hosts import ForkedRanks, ForkedRun, Launch, results

LEVELS = ["--levels", "2"]  # with two ranks on each host
NAMED_S = 15.0  # from the loss of a host until the other one's ranks have named it
ENDED_S = 15.0  # until they have ended, as docs/multi-node.md says


def check_first_error(log: str, host: str, cause: str) -> None:
    """Of those that a host's ranks print the first names the cause, a regular expression."""
    errors = [line for line in log.splitlines() if line.startswith(host) and re.search(r"\w*Error: ", line)]
    assert errors and re.search(f"OtherRankError: {cause}", errors[0]), log


def check_own_first_errors(run: ForkedRun, ranks: Iterable[int], cause: str) -> None:
    """Each of these ranks names the cause in its own first error."""
    for rank in ranks:
        check_first_error(run.log_of(rank), "", cause)


def check_is_lost(run: Launch | ForkedRun, call: str, inside: object, lose: Callable[[], None]) -> None:
    """`lose` nodeB once its ranks stand within a call of the engine: nodeA's ranks name it, and end, within the time.
    `inside`: what the two ranks have written of where they stand."""
    notes = [run.out / f"inside{rank}" for rank in (2, 3)]
    run.wait_for(lambda: all(map(Path.exists, notes)) or not run.left(1), 400)
    assert all(map(Path.exists, notes)), run.log()
    assert [json.loads(path.read_text()) for path in notes] == inside
    start = time.monotonic()
    lose()
    run.wait_for(lambda: re.search("^nodeA.*OtherRankError: ", run.log(), re.MULTILINE) is not None, 60)
    named_s = time.monotonic() - start
    run.wait_for(lambda: not run.left(0), 60)
    ended_s = time.monotonic() - start
    print(f"named after {named_s:.1f} s, ended after {ended_s:.1f} s")
    cause = rf"{call}: host nodeB \(ranks 2, 3\) has "
    check_first_error(run.log(), "nodeA", cause)
    if isinstance(run, ForkedRun):
        check_own_first_errors(run, (0, 1), cause)
    assert named_s < NAMED_S and ended_s < ENDED_S, run.log()


@dataclass
class Saved:
    """What runs have saved behind their first step: the folders, and of each the digests behind the save by rank."""

    folders: list[Path] = field(default_factory=list)
    digests: list[list[str]] = field(default_factory=list)

    def note(self, folder: Path, run: ForkedRun) -> None:
        """A run with `--keep` has ended."""
        self.folders.append(folder)
        self.digests.append([json.loads((run.out / f"kept{rank}.json").read_text()) for rank in range(4)])

    def check_runs_go_on(self, ranks: ForkedRanks) -> None:
        """Each folder's last checkpoint loads with its digest on each rank of new processes, and the step behind the last
        folder's has the bits of a run to which nothing has happened."""
        last = ranks.start([*LEVELS, "--load", *map(str, self.folders), "--steps", "1"], "last")
        assert last.wait() == 0, last.log()
        whole = ranks.start([*LEVELS, "--steps", "2"], "whole")
        assert whole.wait() == 0, whole.log()
        for rank, (found, expected) in enumerate(zip(results(last.out, 4), results(whole.out, 4), strict=True)):
            assert found["loaded"] == [str(folder / "global_step1" / "ds_vertical.json") for folder in self.folders]
            assert found["at_load"] == [digests[rank] for digests in self.digests]
            assert (found["losses"], found["digest"]) == (expected["losses"][1:], expected["digest"])
