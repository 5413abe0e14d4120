"""Two ranks whose models keep state that is not the same on both: what one rank finds, all ranks act on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import SUPPORT
from processes import free_port
from stateful import M


def on_two_ranks(folder: Path, case: str) -> list[Any]:
    """What `state_worker.py` prints on each rank."""
    worker = SUPPORT / "state_worker.py"
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = []
    for rank in range(2):
        env = os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(worker), str(folder), case]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        ends = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(err[-3000:] for _, err in ends)
    return [json.loads(out.splitlines()[-1]) for out, _ in ends]


@pytest.mark.slow
def test_all_ranks_start_over_where_one_has_found_new_state(tmp_path: Path) -> None:
    first, second = on_two_ranks(tmp_path, "late")
    assert first["losses"] == second["losses"] and first["weights"] == second["weights"]
    assert first["calls"] == second["calls"] == [3 * M] * 4
    assert first["seen"] == [2 * M] * 4 and second["seen"] == [0] * 4


@pytest.mark.slow
def test_no_rank_starts_over_or_refuses_alone(tmp_path: Path) -> None:
    """Another one would wait for it in the next collective."""
    first, second = on_two_ranks(tmp_path, "alone")
    kinds = [[each.partition(":")[0] for each in rank["told"]] for rank in (first, second)]
    no, own, other, failed = "nothing", "LayerError", "OtherRankError", "ArithmeticError"
    assert kinds[0] == [other, no, other, own, no, own, own, no, no], first["told"]
    assert kinds[1] == [failed, no, failed, other, no, other, other, no, no], second["told"]
    assert "table (70000 elements)" in first["told"][3] and "table (70000 elements)" in second["told"][3]
    assert "blocks.1.lines: holds a count" in first["told"][5] and "blocks.1.lines: holds a count" in second["told"][6]
    assert first["steps"] == second["steps"] == 3 and first["calls"] == second["calls"] == [M] * 4
    assert (first["seen"], second["seen"]) == (0, 3 * M), "two steps and an evaluation"


@pytest.mark.slow
def test_evaluations_of_unequal_numbers_of_micro_batches_are_checked_on_all_ranks(tmp_path: Path) -> None:
    """A rank with one micro-batch takes part in the check of the others'."""
    for rank, said in enumerate(on_two_ranks(tmp_path, "evaluations")):
        assert said.keys() == {"(1, 1)", "(3, 1)", "(1, 2)", "(3, 2)"}
        for counts, (told, counter) in said.items():
            if counts == "(1, 1)":
                assert told == "nothing" and counter == 4, said
                continue
            wrong = ("(3, 1)", "(3, 2)") if rank == 0 else ("(1, 2)", "(3, 2)")
            assert told.startswith("SelfCheckError" if counts in wrong else "OtherRankError"), (counts, told)
            assert counter == 0


@pytest.mark.slow
def test_first_evaluations_of_unequal_numbers_of_micro_batches_have_torchs_losses(tmp_path: Path) -> None:
    """A rank that has run its last one reads the layers with the other, and counts nothing."""
    first, second = on_two_ranks(tmp_path, "first evaluations")
    for order in ("vertical", "horizontal"):
        ours, others = first[order], second[order]
        assert ours["told"] == ["nothing", "OtherRankError", "OtherRankError", "nothing"], ours
        assert others["told"] == ["nothing", "ArithmeticError", "ArithmeticError", "nothing"], others
        # the losses of a pass that has failed are taken back, as all state that is followed
        assert (ours["right"], others["right"]) == ([M, 0, 1, 1], [1, 0, M - 1, M])
        assert (ours["forwards"], others["forwards"]) == (M + 3, 2 * M + 2)
        wrong = order == "vertical"
        assert (ours["trained"], others["trained"]) == (("SelfCheckError",) * 2 if wrong else ("nothing",) * 2)


@pytest.mark.slow
def test_a_first_step_with_fewer_micro_batches_than_elastic_brings_does_not_end_the_check(tmp_path: Path) -> None:
    assert on_two_ranks(tmp_path, "shorter first step") == [["nothing", "SelfCheckError"]] * 2
