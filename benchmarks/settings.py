"""What settings of the vertical arm gain: processes of this checkout whose JSONs differ in a few keys, a step of each in turn.

    python benchmarks/settings.py NAME --arm without optimizer_read_ahead_bytes=0
        --arm with optimizer_read_ahead_bytes=null host_memory_bytes=16000000000
        [--clip 1] [--micro-batches 16] [--tokens 8] [--ssd-limit 300M,500M] [--rounds 2] [--turns 4]

An arm is a name and keys of the section with their values. All others are those of `configs/gpt_101m_cpu.json`; a key with a
dot is one of the JSON itself. (Without `host_memory_bytes` null is 0 there, so that both arms above would be one.)
One process steps at a time, all others stopped. Who is first changes from turn to turn, and each round starts new processes. A
ratio is the median of an arm's step over the first arm's within the turns. Losses of all arms must be equal in every bit.
Writes benchmarks/settings/NAME_DATE.json with every turn, and the bytes that each step has moved. Nothing else may run on the
machine.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import commits
import inturn
import portable

from ds_vertical.cli.bench import disk_limit
from ds_vertical.cli.bench.arms import build_arms
from ds_vertical.config.section import SECTION

FIGURES: Final = ("step_s", "read_bytes", "write_bytes")


def config_of(settings: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """An arm's JSON. Raises ConfigError."""
    keys = [f"gradient_accumulation_steps={options.micro_batches}", f"gradient_clipping={options.clip}"]
    keys += [f"{SECTION}.self_check=false"]
    keys += [each if "." in each.partition("=")[0] else f"{SECTION}.{each}" for each in settings]
    return build_arms(options.config, None, keys, with_stock=False).vertical


def run_round(
    number: int, options: argparse.Namespace, configs: Mapping[str, Any], folder: Path, group: disk_limit.LimitedGroup | None
) -> dict[str, Any]:
    """New processes, a warm-up that does not count, and the turns. Raises TurnError."""
    words = ["--model", options.model, "--tokens", str(options.tokens), "--loaders", "0", "--checkout", str(inturn.ROOT)]
    with inturn.steppers(configs, number, folder, words, group) as steppers:
        warm_up = {arm: steppers[arm].turn(options.warm_up) for arm in configs}
        turns = []
        for index in range(options.turns):
            turns.append({arm: steppers[arm].turn()[0] for arm in inturn.rotated([*configs], index)})
            taken = ", ".join(f"{arm} {turns[-1][arm]['step_s']:.2f} s" for arm in configs)
            print(f"round {number + 1}, turn {index + 1}: {taken}", flush=True)
    return {"warm_up": warm_up, "turns": turns}


def summary(rounds: Sequence[Mapping[str, Any]], arms: Sequence[str]) -> dict[str, Any]:
    """Each arm's medians, and those of its ratios to the first arm within the turns."""
    turns = [turn for each in rounds for turn in each["turns"]]
    base = arms[0]
    taken = {arm: {figure: median(turn[arm][figure] for turn in turns) for figure in FIGURES} for arm in arms}
    ratios = {arm: {f: median(turn[arm][f] / turn[base][f] for turn in turns) for f in FIGURES} for arm in arms}
    return {"median": taken, "median_ratio": ratios, "losses_equal": all(inturn.losses_equal(each, arms) for each in rounds)}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All arms in turn; what is written. Raises ConfigError, TurnError, and DiskLimitError where no limit can be set."""
    configs = {name: config_of(settings, options) for name, *settings in options.arm}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(inturn.scratch_folder(options, next(iter(configs.values()))))
        group = None
        if options.ssd_limit:
            group = stack.enter_context(disk_limit.limited(disk_limit.parse_limit(options.ssd_limit), [folder]))
        rounds = [run_round(number, options, configs, folder, group) for number in range(options.rounds)]
    given = {key: getattr(options, key) for key in ("model", "micro_batches", "tokens", "clip", "warm_up")}
    content = commits.made_of() | {"checkout": commits.describe(inturn.ROOT), **given}
    content |= {"ssd_limit": None if group is None else group.to_json(), "arms": {name: keys for name, *keys in options.arm}}
    content["configs"] = {arm: inturn.placed(config, inturn.NVME_PATH) for arm, config in configs.items()}
    return content | summary(rounds, [*configs]) | {"rounds": rounds}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and writes the result. Returns 1 where an arm has other losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="start of the record's name")
    parser.add_argument("--arm", nargs="+", action="append", required=True, metavar="WORD", help="a name, and KEY=VALUE...")
    parser.add_argument("--rounds", type=int, default=2, help="each with new processes (default 2)")
    parser.add_argument("--turns", type=int, default=4, help="steps of each arm in a round (default 4)")
    parser.add_argument("--warm-up", type=int, default=2, help="steps of each ahead of a round's turns (default 2)")
    parser.add_argument("--ssd-limit", metavar="READ,WRITE", help="bytes/s, as `ds-vertical ab` takes it")
    inturn.add_options(parser)
    options = parser.parse_args(argv)
    if min(options.rounds, options.turns, options.warm_up) < 1:
        parser.error(f"--rounds {options.rounds} --turns {options.turns} --warm-up {options.warm_up}: write 1 or more")
    names = [name for name, *_ in options.arm]
    if len(names) < 2 or len({*names}) < len(names):
        parser.error(f"--arm {' --arm '.join(names)}: write two or more, each with a name of its own")
    content = measure(options)
    folder = inturn.ROOT / "benchmarks" / "settings"
    target = folder / f"{options.name}_{content['date'][:10]}.json"
    portable.write(target, content, inturn.ROOT / "runs" / "settings", "settings")
    for arm, figures in content["median"].items():
        ratios = content["median_ratio"][arm]
        moved = ", ".join(f"{figures[f] / 1e9:.2f} GB {f.split('_')[0]} ({ratios[f]:.3f})" for f in FIGURES[1:])
        print(f"{arm}: {figures['step_s']:.2f} s ({ratios['step_s']:.3f}), {moved}")
    print(f"losses {'equal' if content['losses_equal'] else 'DIFFERENT'}; written: {target}")
    return 0 if content["losses_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
