"""What it costs, and what it gains, that a script stays as it is: loops of Trainer, of the three calls and of Accelerate.

    python benchmarks/bridges.py --figure overhead [--rounds 6] [--turns 4]     # step time over that of train_batch
    python benchmarks/bridges.py --figure busy                                  # Trainer in both arms beside one busy core
    python benchmarks/bridges.py --figure reads                                 # Trainer's bytes read a step, in both arms
    python benchmarks/bridges.py --figure evaluation                            # of Trainer's evaluation and of eval_batch's

Each figure compares processes that take a step in turn, one at a time, all others stopped. Who is first changes from turn to
turn, so that a drift of the machine hits all alike; each round starts new processes. A figure is the median of the ratios
within the turns. Loops that stay as they are run through `ds_vertical.run`; the stock arm is the same script launched plainly,
with a JSON without the section, and `--stock-config`'s transfer settings. Writes benchmarks/bridges/NAME.json with every turn,
and the table in benchmarks/README.md. Nothing else may run on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import commits
import inturn
import portable
import report
import run

LOOPS: Final = Path(__file__).with_name("bridge_loops.py")
SECTION: Final = "vertical_schedule"
DIVIDED_BY: Final = {"overhead": "train_batch", "busy": "trainer", "reads": "stock trainer", "evaluation": "train_batch"}


@dataclass(frozen=True)
class Contestant:
    """One process of a figure: which loop of `bridge_loops.py` it runs, in which arm."""

    name: str
    loop: str
    stock: bool = False


TRAINERS: Final = (Contestant("trainer", "trainer"), Contestant("stock trainer", "trainer", stock=True))
CONTESTANTS: Final = {
    "overhead": tuple(Contestant(loop, loop) for loop in ("train_batch", "trainer", "three_calls", "accelerate")),
    "busy": TRAINERS,
    "reads": TRAINERS,
    "evaluation": (Contestant("train_batch", "train_batch"), Contestant("trainer", "trainer")),
}


def start(each: Contestant, options: argparse.Namespace, configs: Mapping[str, Any], folder: Path) -> inturn.Stepper:
    """Its process, which is building its model."""
    words = ["--loop", each.loop, "--model", options.model, "--tokens", str(options.tokens)]
    config = configs["stock" if each.stock else "vertical"]
    if each.stock or each.loop == "train_batch":  # of its own: it calls ds_vertical, or nobody does
        return inturn.Stepper(each.name, run.ROOT, config, folder, [str(LOOPS)], words)
    return inturn.Stepper(each.name, run.ROOT, config, folder, ["-m", "ds_vertical.run", str(LOOPS)], words)


def configs_of(options: argparse.Namespace) -> dict[str, Any]:
    """{arm: its JSON}: without a scheduler, which each library would set in its own way; stock's without the section."""
    arms = inturn.arms(options, options.stock_config)
    found = {"vertical": dict(arms.vertical), "stock": dict(arms.stock)}
    for config in found.values():
        config.pop("scheduler", None)
    del found["stock"][SECTION]
    return found


def take_turn(
    steppers: Mapping[str, inturn.Stepper], order: Sequence[str], options: argparse.Namespace, rows: int
) -> dict[str, Any]:
    """{contestant: what it has answered}: of a step, or of an evaluation of so many rows."""
    if options.figure == "evaluation":
        return {name: steppers[name].ask(f"evaluate {rows}") for name in order}
    found = {}
    for name in order:
        with inturn.busy_cores(1 if options.figure == "busy" else 0):
            found[name] = steppers[name].turn()[0]
    return found


def run_round(number: int, options: argparse.Namespace, configs: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """New processes, a warm-up that does not count, and the turns. Raises TurnError."""
    contestants = CONTESTANTS[options.figure]
    with contextlib.ExitStack() as stack:
        steppers = {}
        for each in inturn.rotated(contestants, number):
            stepper = steppers[each.name] = start(each, options, configs, folder / f"run {number} {each.name}")
            stack.callback(stepper.close)
            stepper.wait_ready()
        warm_up = {each.name: steppers[each.name].turn(options.warm_up) for each in contestants}
        turns, rows = [], options.evaluations * options.micro_batches * configs["vertical"]["train_micro_batch_size_per_gpu"]
        for index in range(options.turns):
            order = [each.name for each in inturn.rotated(contestants, index)]
            turns.append({"order": order, **take_turn(steppers, order, options, rows)})
            taken = ", ".join(f"{name} {_shown(turns[-1][name], options.figure)}" for name in sorted(order))
            print(f"round {number + 1}, turn {index + 1}: {taken}", flush=True)
    return {"warm_up": warm_up, "turns": turns}


def _shown(answer: Mapping[str, Any], figure: str) -> str:
    return f"{answer['step_s']:.2f} s" if _key(figure) == "step_s" else f"{answer['read_bytes'] / 1e6:.0f} MB"


def _key(figure: str) -> str:
    return "step_s" if figure in ("overhead", "busy") else "read_bytes"


def summary(figure: str, rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median of each contestant and of its ratio within the turns; of steps, the largest relative difference of losses."""
    key, base = _key(figure), DIVIDED_BY[figure]
    turns = [turn for each in rounds for turn in each["turns"]]
    names = [each.name for each in CONTESTANTS[figure]]
    found: dict[str, Any] = {
        "unit": key,
        "divided_by": base,
        "median": {name: median(turn[name][key] for turn in turns) for name in names},
        "median_ratio": {name: median(turn[name][key] / turn[base][key] for turn in turns) for name in names if name != base},
    }
    if figure != "evaluation":
        losses = [[float.fromhex(turn[name]["loss"]) for name in names] for turn in turns]
        found["losses_differ_by"] = max((max(each) - min(each)) / min(each) for each in losses)
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds; what is written. Raises TurnError."""
    configs = configs_of(options)
    with inturn.scratch_folder(options, configs["vertical"]) as folder:
        rounds = [run_round(number, options, configs, folder) for number in range(options.rounds)]
    names = (
        "figure",
        "model",
        "micro_batches",
        "tokens",
        "clip",
        "warm_up",
        *(["evaluations"] * (options.figure == "evaluation")),
    )
    content = commits.made_of() | {"checkout": commits.describe(run.ROOT), "stock": options.stock_config.stem}
    content |= {name: getattr(options, name) for name in names}
    content["configs"] = {arm: inturn.placed(config, inturn.NVME_PATH) for arm, config in configs.items()}
    return content | summary(options.figure, rounds) | {"rounds": rounds}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures one figure, writes it, and rewrites benchmarks/README.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", choices=CONTESTANTS, required=True)
    parser.add_argument("--rounds", type=int, default=3, help="each with new processes (default 3)")
    parser.add_argument("--turns", type=int, default=4, help="of each process in a round (default 4)")
    parser.add_argument("--warm-up", type=int, default=2, help="steps of each process ahead of its turns (default 2)")
    parser.add_argument("--evaluations", type=int, default=1, help="windows of M micro-batches in one evaluation (default 1)")
    parser.add_argument("--stock-config", type=Path, default=run.ROOT / "configs" / "stock_pipelined.json")
    parser.add_argument("--benchmarks", type=Path, default=run.ROOT / "benchmarks", help="folder for result and table")
    inturn.add_options(parser)
    options = parser.parse_args(argv)
    if min(options.rounds, options.turns, options.warm_up, options.evaluations) < 1:
        parser.error("--rounds, --turns, --warm-up and --evaluations: write 1 or more")
    content = measure(options)
    dtype = "bf16" if content["configs"]["vertical"].get("bf16", {}).get("enabled") else "fp32"
    name = f"{options.figure}_{options.model}_m{options.micro_batches}_s{options.tokens}_{dtype}_{report.instructions()}"
    target = options.benchmarks / "bridges" / f"{name}_{content['date'][:10]}.json"
    portable.write(target, content, run.ROOT / "runs" / "bridges", "bridges")
    run.write_table(options.benchmarks / "ab")
    print(report.bridges_table(content))
    print(f"written: {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
