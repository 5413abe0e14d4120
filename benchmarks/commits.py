"""Step times of two checkouts against each other: one process of each trains, a step of one, then a step of the other.

    python benchmarks/commits.py A B [--rounds 6] [--pairs 4] [--micro-batches 16] [--tokens 8] [--clip 0] [--busy N]

A and B: commits of this repository, or folders of checkouts (of uncommitted changes, too). Both train the vertical arm of
`configs/gpt_101m_cpu.json` on the full disk, one at a time; who is first changes from pair to pair, so that a drift of the
machine hits both. Each round starts a new process of either: two processes of the same checkout differed by 4 % for as long
as they lived. The figure is the median of all paired ratios, B over A. `--busy`: beside so many processes that compute without
a pause. Writes benchmarks/commits/A_B_DATE.json with every pair. Nothing else may run on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import inturn
import portable

NAMES = ("A", "B")


@contextlib.contextmanager
def checked_out(what: str, scratch: Path) -> Iterator[Path]:
    """A folder with that checkout: the folder itself, or a worktree of the commit for as long as the block runs."""
    if Path(what).is_dir():
        yield Path(what).resolve()
        return
    _git(inturn.ROOT, "worktree", "add", "--quiet", "--detach", str(scratch), what)
    try:
        yield scratch
    finally:
        _git(inturn.ROOT, "worktree", "remove", "--force", str(scratch))


def describe(checkout: Path) -> dict[str, Any]:
    """The checkout's commit, and whether its package differs from it; both are None in a copy without its history."""
    if not (checkout / ".git").exists():
        return {"commit": None, "changed": None}
    changed = _git(checkout, "status", "--porcelain", "--", "ds_vertical")
    return {"commit": _git(checkout, "rev-parse", "--short=12", "HEAD"), "changed": bool(changed)}


def made_of() -> dict[str, Any]:
    """When, where and with which packages. Without our own: this process imports the one that is installed, which may be of
    another checkout than those whose steps are measured."""
    from ds_vertical.cli.bench import machine_info

    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found = machine_info.versions().items()
    versions = {package: version for package, version in found if package not in ("commit", "ds-vertical")}
    return {"date": date, "machine": machine_info.describe_machine(), "versions": versions}


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(folder), *words], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def measure(trainers: Mapping[str, inturn.Trainer], num_pairs: int, warm_up: int, num_busy: int) -> dict[str, Any]:
    """One round: pairs of steps, after a warm-up that does not count. `losses_equal`: those of the warm-up, too."""
    first = {name: trainer.turn(warm_up) for name, trainer in trainers.items()}
    losses = {name: [step["loss"] for step in steps] for name, steps in first.items()}
    pairs = []
    with inturn.busy_cores(num_busy):
        for number in range(num_pairs):
            order = NAMES if number % 2 == 0 else NAMES[::-1]
            steps = {name: trainers[name].turn()[0] for name in order}
            for name, step in steps.items():
                losses[name].append(step["loss"])
            seconds = {name: steps[name]["step_s"] for name in NAMES}
            pairs.append({"order": "".join(order), **seconds, "ratio": seconds["B"] / seconds["A"]})
            print(f"pair {number + 1}: {seconds['A']:.2f} s, {seconds['B']:.2f} s: {pairs[-1]['ratio']:.3f}", flush=True)
    warm = {name: [step["step_s"] for step in steps] for name, steps in first.items()}
    return {"warm_up_s": warm, "pairs": pairs, "losses_equal": losses["A"] == losses["B"]}


def run_round(
    number: int, options: argparse.Namespace, paths: Mapping[str, Path], config: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Start a process of A and one of B (of B first where `number` is odd), let them step, and end them. Raises TurnError."""
    with contextlib.ExitStack() as stack:
        trainers = {}
        for name in NAMES if number % 2 == 0 else NAMES[::-1]:
            place = folder / f"run {number} {name}"
            trainer = inturn.Trainer(name, paths[name], config, place, options.model, options.tokens)
            stack.callback(trainer.close)
            trainer.wait_ready()
            trainers[name] = trainer
        return measure(trainers, options.pairs, options.warm_up, options.busy)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Both checkouts in turn; what is written. Raises CalledProcessError for a commit that is none, TurnError."""
    config = inturn.arms(options).vertical
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(inturn.scratch_folder(options, config))
        paths = {
            name: stack.enter_context(checked_out(what, folder / name))
            for what, name in zip(options.checkouts, NAMES, strict=True)
        }
        rounds = []
        for number in range(options.rounds):
            print(f"round {number + 1}", flush=True)
            rounds.append(run_round(number, options, paths, config, folder))
        commits = {name: describe(path) for name, path in paths.items()}
    pairs = [pair for each in rounds for pair in each["pairs"]]
    settings = {key: getattr(options, key) for key in ("model", "micro_batches", "tokens", "clip", "busy")}
    return made_of() | {
        "commits": commits,
        **settings,
        "config": inturn.placed(config, inturn.NVME_PATH),
        "rounds": rounds,
        "median_s": {name: median(pair[name] for pair in pairs) for name in NAMES},
        "median_ratio": median(pair["ratio"] for pair in pairs),
        "losses_equal": all(each["losses_equal"] for each in rounds),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs=2, metavar="CHECKOUT", help="a commit, or a folder")
    parser.add_argument("--rounds", type=int, default=6, help="each with new processes (default 6)")
    parser.add_argument("--pairs", type=int, default=4, help="of steps in each round (default 4)")
    parser.add_argument("--warm-up", type=int, default=2, help="steps of each ahead of a round's pairs (default 2)")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="processes that compute beside the steps")
    parser.add_argument("--out", type=Path, metavar="FILE", help="for the result (default benchmarks/commits/A_B_DATE.json)")
    inturn.add_options(parser)
    options = parser.parse_args(argv)
    if min(options.rounds, options.pairs, options.warm_up) < 1:
        given = f"--rounds {options.rounds} --pairs {options.pairs} --warm-up {options.warm_up}"
        parser.error(f"{given}: write 1 or more")
    content = run(options)
    commits = [content["commits"][name]["commit"] + "-changed" * content["commits"][name]["changed"] for name in NAMES]
    name = "_".join([*commits, *([f"busy{options.busy}"] if options.busy else []), content["date"][:10]])
    target = options.out or inturn.ROOT / "benchmarks" / "commits" / f"{name}.json"
    portable.write(target, content, inturn.ROOT / "runs" / "commits", "commits")
    seconds, num_pairs = content["median_s"], options.rounds * options.pairs
    print(
        f"median of {num_pairs} paired ratios {content['median_ratio']:.3f} (B over A; {seconds['A']:.2f} s,"
        f" {seconds['B']:.2f} s), losses {'equal' if content['losses_equal'] else 'DIFFERENT'}; written: {target}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
