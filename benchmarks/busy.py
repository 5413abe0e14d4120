"""Both arms beside other work on the cores: on a machine of their own, beside a busy core, with a data loader's workers.

    python benchmarks/busy.py [--rounds 3] [--stock-config configs/stock_pipelined.json] [--micro-batches 16]

Four processes take a step in turn, each arm with and without a data loader whose two workers compute without a pause; the first
two step alone, and beside a process that computes (a loop in Python), wherever the kernel puts it. Who is first changes from
round to round. Writes benchmarks/busy/NAME.json and the table in benchmarks/README.md. Nothing else may run on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any, Final

import commits
import inturn
import portable
import report
import run

ARMS: Final = ("stock", "vertical")
QUIET, BUSY, LOADERS = "nothing", "one busy core", "two data loader workers"
NUM_LOADERS: Final = 2


def measure(trainers: dict[tuple[str, bool], inturn.Trainer], rounds: int) -> dict[str, Any]:
    """{surroundings: {arm: seconds of its steps}} after a step of each that does not count; whether all losses are equal."""
    losses = {key: [step["loss"] for step in trainer.turn()] for key, trainer in trainers.items()}
    seconds: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in (QUIET, BUSY, LOADERS)}
    for number in range(rounds):
        order = ARMS if number % 2 else ARMS[::-1]
        for name, steps in seconds.items():
            for arm in order:
                with inturn.busy_cores(1 if name == BUSY else 0):
                    key = arm, name == LOADERS
                    step = trainers[key].turn()[0]
                losses[key].append(step["loss"])
                steps[arm].append(step["step_s"])
            print(f"round {number + 1}, {name}: " + ", ".join(f"{arm} {steps[arm][-1]:.2f} s" for arm in ARMS), flush=True)
    equal = all(losses["stock", loaders] == losses["vertical", loaders] for loaders in (False, True))
    return {"step_s": seconds, "losses_equal": equal}


def main() -> int:
    """Measures, and rewrites benchmarks/README.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stock-config", type=Path, default=run.ROOT / "configs" / "stock_pipelined.json")
    parser.add_argument("--benchmarks", type=Path, default=run.ROOT / "benchmarks", help="folder for result and table")
    inturn.add_options(parser)
    options = parser.parse_args()
    arms = inturn.arms(options, options.stock_config)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(inturn.scratch_folder(options, arms.vertical))
        trainers = {}
        for arm, loaders in ((arm, loaders) for loaders in (False, True) for arm in ARMS):
            name = arm + " loaders" * loaders
            given = run.ROOT, getattr(arms, arm), folder / name, options.model, options.tokens, NUM_LOADERS * loaders
            trainer = trainers[arm, loaders] = inturn.Trainer(name, *given)
            stack.callback(trainer.close)
            trainer.wait_ready()
            print(f"{name}: ready", flush=True)
        found = measure(trainers, options.rounds)
    settings = {key: getattr(options, key) for key in ("model", "micro_batches", "tokens", "clip", "rounds")}
    content = commits.made_of() | {"checkout": commits.describe(run.ROOT), "stock": options.stock_config.stem}
    content |= {**settings, **found}
    content["configs"] = {arm: inturn.placed(getattr(arms, arm), inturn.NVME_PATH) for arm in ARMS}
    date = content["date"]
    name = (
        f"{options.model}_m{options.micro_batches}_s{options.tokens}_clip{options.clip:g}_{report.instructions()}_{date[:10]}"
    )
    target = options.benchmarks / "busy" / f"{name}.json"
    portable.write(target, content, run.ROOT / "runs" / "busy", "busy")
    run.write_table(options.benchmarks / "ab")
    print(report.busy_table(content))
    for name, steps in found["step_s"].items():
        print(f"{name}: stock over vertical {median(steps['stock']) / median(steps['vertical']):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
