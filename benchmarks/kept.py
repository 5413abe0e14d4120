"""What it gains that a layer's forward keeps what its backward reads: a policy of `activations.keep` against "none".

    python benchmarks/kept.py --list                            # the rows, with estimated minutes
    python benchmarks/kept.py --rounds 1 --turns 3              # the whole table
    python benchmarks/kept.py --only m4_s512 --rounds 3         # one row
    python benchmarks/kept.py --only m16_s8 --machine FILE      # planned with a file of `ds-vertical limits --out`

All arms of a row are processes of this very checkout, whose JSONs differ in `activations` alone. They take a step in turn, one
at a time, all others stopped. Who is first changes from turn to turn, each round starts new processes, and a ratio is the
median of those within the turns. The arm "plan" has what the planner chooses for the row, from the machine as it is measured at
the start and under the row's disk limit. The arm "null" has the JSON's default: its process chooses behind its first step, from
the same measurement and from what that step took. The record has what it has chosen, and its predicted step is that of the
choice. The machine is measured again behind the steps: an arm's predicted step is the mean of the simulator's at the rates of
before and after, and the record has both. Losses of all arms must be equal in every bit. Writes benchmarks/kept/ROW_DATE.json
with every turn, and the table in benchmarks/README.md. A row whose JSON this build does not take yet is refused by name.
Nothing else may run on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

import commits
import inturn
import portable
import predictions
import report
import run
from kept_plan import DELAY, LIBRARIES, WINDOW, Planner

from ds_vertical.cli.bench import disk_limit
from ds_vertical.cli.bench.arms import build_arms
from ds_vertical.cli.plan.fake_run import read_spec
from ds_vertical.cli.plan.pieces import time_pieces
from ds_vertical.config.section import SECTION, Activations
from ds_vertical.errors import ConfigError
from ds_vertical.model.hf import named_shape, read_fields
from ds_vertical.planner.machine import Profile, read_profile
from ds_vertical.types import HOLDING, Tier

BASE, PLAN, NULL = "none", "plan", "null"
NOTHING: Final = {"keep": "none"}
OPEN: Final = {NULL: {"keep": None}}  # chosen by the run itself
WITHIN: Final = 0.03  # of the best share's step, and of the step without keeping in the control row
PREDICTED_WITHIN: Final = 0.15  # of the measured step
PLAN_S: Final = 45.0  # measuring the machine and a block, before the steps and after them


@dataclass(frozen=True)
class Row:
    """One setting. `tiers`: where its plan may keep; `others`: further arms; `shares`: of the cells, of which the plan's policy
    keeps on SSD in further arms; `most`: of the step without keeping, by arm; `step_s`: what that step usually takes.
    `host_bytes`: of host memory that the run may take beside the interpreter and its libraries (None: what the machine has)."""

    micro_batches: int
    tokens: int
    step_s: float
    limited: bool = False
    host_bytes: int | None = None
    tiers: tuple[Tier, ...] = (Tier.DEVICE,)
    others: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    shares: tuple[float, ...] = ()
    most: Mapping[str, float] = field(default_factory=dict)
    needs: tuple[str, ...] = ()  # keys of `activations` without which its plan cannot be written

    @property
    def name(self) -> str:
        """What --only calls the row, and the start of its record's name."""
        host = f"_{self.host_bytes / 1e9:g}gb" if self.host_bytes else ""
        ssd = "_on_ssd" * (self.tiers == (Tier.SSD,))
        return f"m{self.micro_batches}_s{self.tokens}{'_300_500' * self.limited}{ssd}{host}"

    @property
    def host_limit(self) -> int | None:
        """The JSON's `host_memory_bytes`."""
        return self.host_bytes + LIBRARIES.num_bytes if self.host_bytes else None

    @property
    def is_control(self) -> bool:
        """Whether the plan is to keep nothing."""
        return not self.most

    def seconds(self, rounds: int, turns: int, warm_up: int, rest_s: float) -> float:
        """An estimate of the whole row."""
        num_arms = 2 + len(self.others) + sum(share > 0 for share in self.shares)
        return 2 * PLAN_S + rounds * num_arms * (run.SETUP_S + (warm_up + turns) * self.step_s + turns * rest_s)


ROWS: Final = (
    Row(16, 8, 2.0, others=OPEN, most={PLAN: 0.88}),
    Row(4, 512, 5.6, others={"free": {"keep": "free"}, **OPEN}, most={PLAN: 0.85, "free": 0.97}),
    Row(
        6,
        512,
        8.3,
        limited=True,
        tiers=(Tier.SSD,),
        shares=(0.0, 0.25, 0.5, 0.75, 1.0),  # none of the cells is the arm without keeping
        most={PLAN: 0.88},
        needs=("keep_share",),
    ),
    Row(
        16,
        512,
        21.7,
        limited=True,
        host_bytes=1_300_000_000,
        tiers=(Tier.DEVICE, Tier.SSD),
        most={PLAN: 0.84},
        needs=("keep_share", "keep_host_share"),
    ),
    Row(4, 8, 4.6, limited=True, tiers=(Tier.DEVICE, Tier.SSD), others=OPEN),
)


def refuse_unknown(row: Row, keys: Sequence[str]) -> None:
    """Raises ConfigError for a key of `activations` that this build does not know."""
    unknown = [key for key in keys if key not in Activations.model_fields]
    if unknown:
        raise ConfigError(
            f"{row.name}: left out: {SECTION}.activations.{unknown[0]} is no key of this build, and what the row keeps cannot"
            " be written without it; measure a checkout that has the key"
        )


# ---- the plan


def length_of(fields: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """A model's configuration with as many positions as the row's sequences have."""
    return {**fields, "max_position_embeddings": max(tokens, fields.get("max_position_embeddings", 0))}


class Plans:
    """What is measured for the rows' plans: once per disk, and once per length of a sequence."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.profile = cache(self._profile)
        self._pieces = cache(self._timed)

    def planner(self, row: Row) -> Planner:
        """Of a row, with the machine and the model as they are now."""
        spec, seconds = self._pieces(row.tokens)
        return Planner(spec, seconds, self.profile(row.limited), row.micro_batches, row.host_limit)

    def limits(self, row: Row) -> Path:
        """The file that the machine was measured into, of the row's disk."""
        given = self._options.limited_machine if row.limited else self._options.machine
        return (given or predictions.limits_path(row.limited, self._options.runs)).resolve()

    def _profile(self, limited: bool) -> Profile:
        given = self._options.limited_machine if limited else self._options.machine
        if given:
            return read_profile(str(given))
        self._options.runs.mkdir(parents=True, exist_ok=True)
        return predictions.profile_of(limited, self._options.runs)

    def _timed(self, tokens: int) -> tuple[Any, Any]:
        fields = length_of(read_fields(named_shape(self._options.model)), tokens)
        dtype = "bf16" if json.loads(self._options.config.read_text())["bf16"]["enabled"] else "fp32"
        spec = read_spec(self._options.model, fields, tokens, dtype)
        return spec, time_pieces(spec, fields, 1)


def arms_of(row: Row, planner: Planner) -> dict[str, dict[str, Any]]:
    """{arm: its `activations`}, the one without keeping first. Raises ConfigError where this build cannot be told so."""
    planned = planner.keys(planner.plan(row.tiers))
    found = {BASE: NOTHING, PLAN: planned} | {name: dict(each) for name, each in row.others.items()}
    policy = planned["keep"] if planned.get("keep_device") else planner.best_on_ssd()
    for share in filter(None, row.shares):
        found[f"share {share:g}"] = {"keep": policy, "keep_device": Tier.SSD.value, "keep_share": share}
    for activations in found.values():
        refuse_unknown(row, list(activations))
    return found


@contextlib.contextmanager
def limits_for_runs(path: Path) -> Iterator[None]:
    """Within the block processes that are started plan with this file of `ds-vertical limits`."""
    before = os.environ.get("DS_VERTICAL_LIMITS")
    os.environ["DS_VERTICAL_LIMITS"] = str(path)
    try:
        yield
    finally:
        del os.environ["DS_VERTICAL_LIMITS"]
        if before is not None:
            os.environ["DS_VERTICAL_LIMITS"] = before


_PART: Final = r"(?:, (\d+) of each block's products)?"
_CHOSEN: Final = re.compile(rf'activations\.keep = "(\w+)"{_PART}((?:, \d+% of the cells on \w+)*) \(null: (.*)\)')
_SETTLED: Final = re.compile(r"keep null: none: ([^;)\n]*)")


def chosen_in(log: str) -> dict[str, Any]:
    """What a run with the default has chosen, by its log: its `activations` and the reason; with a part of the products their
    number as "keep_outputs", which is no key of the JSON. Raises ConfigError."""
    if (found := _CHOSEN.search(log)) is not None:
        part = {} if found[2] is None else {"keep_outputs": int(found[2])}
        return {"activations": _kept_keys(found[1], found[3]) | part, "reason": found[4]}
    if (settled := _SETTLED.search(log)) is not None:
        return {"activations": NOTHING, "reason": settled[1]}
    raise ConfigError(f"{NULL}: the log does not say what the run keeps")


def _kept_keys(policy: str, told: str) -> dict[str, Any]:
    """The keys that ask for what a line of the log tells, in whole percent."""
    shares = {tier: int(share) / 100 for share, tier in re.findall(r"(\d+)% of the cells on (\w+)", told)}
    if policy not in HOLDING:
        return {"keep": policy} | ({"keep_share": sum(shares.values())} if shares else {})
    tier = next(each for each in ("ssd", "device", "host") if each in shares)
    beside = {"keep_host_share": shares["host"]} if tier != "host" and "host" in shares else {}
    return {"keep": policy, "keep_device": tier, "keep_share": shares[tier]} | beside


# ---- the steps


def config_of(row: Row, activations: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """An arm's JSON. Raises ConfigError."""
    section: dict[str, Any] = {"prefetch_layers": WINDOW, "optimizer_delay": DELAY, "gradient_host_share": 1.0}
    section |= {"self_check": False, "host_memory_bytes": row.host_limit, "activations": activations}
    keys = {"gradient_accumulation_steps": row.micro_batches, "gradient_clipping": 0.0, "train_micro_batch_size_per_gpu": 1}
    keys |= {f"{SECTION}.{key}": value for key, value in section.items()}
    assignments = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
    return build_arms(options.config, None, assignments, with_stock=False).vertical


def run_round(
    number: int,
    options: argparse.Namespace,
    configs: Mapping[str, Any],
    words: Sequence[str],
    folder: Path,
    group: disk_limit.LimitedGroup | None,
) -> dict[str, Any]:
    """New processes, a warm-up that does not count, and the turns. Raises TurnError."""
    with inturn.steppers(configs, number, folder, words, group) as steppers:
        warm_up = {arm: steppers[arm].turn(options.warm_up) for arm in configs}
        turns = []
        for index in range(options.turns):
            order = inturn.rotated([*configs], index)
            turns.append({"order": order, **{arm: _rested_step(steppers[arm], options.rest) for arm in order}})
            taken = ", ".join(f"{arm} {turns[-1][arm]['step_s']:.2f} s" for arm in configs)
            print(f"round {number + 1}, turn {index + 1}: {taken}", flush=True)
        chosen = {NULL: chosen_in(steppers[NULL].log.read_text(errors="replace"))} if NULL in configs else {}
    return {"warm_up": warm_up, "turns": turns} | ({"chosen": chosen} if chosen else {})


# ---- what is recorded


def summary(
    row: Row, rounds: Sequence[Mapping[str, Any]], predicted_s: Mapping[str, float], planned: Mapping[str, Any]
) -> dict[str, Any]:
    """The median of each arm's steps and of its ratio within the turns, both as predicted, and what the row requires.
    `planned`: the plan's `activations`."""
    turns = [turn for each in rounds for turn in each["turns"]]
    seconds = {arm: median(turn[arm]["step_s"] for turn in turns) for arm in predicted_s}
    ratios = {arm: median(turn[arm]["step_s"] / turn[BASE]["step_s"] for turn in turns) for arm in predicted_s}
    found: dict[str, Any] = {
        "plan_keeps_nothing": planned == NOTHING,
        "median_s": seconds,
        "median_ratio": ratios,
        "predicted_s": dict(predicted_s),
        "predicted_ratio": {arm: value / predicted_s[BASE] for arm, value in predicted_s.items()},
        "predicted_over_measured": {arm: predicted_s[arm] / seconds[arm] for arm in seconds},
        "losses_equal": all(inturn.losses_equal(each, [*predicted_s]) for each in rounds),
    }
    return found | {"required": list(_required(row, found))}


def _required(row: Row, found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What the row is to reach, and whether it has."""
    ratios = found["median_ratio"]
    for arm, most in row.most.items():
        yield _judged(f"{arm} over {BASE}", ratios[arm], 0.0, most)
    if row.is_control:
        yield _judged(f"{PLAN} over {BASE}", ratios[PLAN], 1 - WITHIN, 1 + WITHIN)
        yield _judged("the plan keeps nothing", float(found["plan_keeps_nothing"]), 1.0, 1.0)
    if row.shares:
        others = (BASE, *(arm for arm in ratios if arm.startswith("share ")))
        best = min(ratios[arm] for arm in others)
        yield _judged(f"{PLAN} over the best share", ratios[PLAN] / best, 0.0, 1 + WITHIN)
    for arm, value in found["predicted_over_measured"].items():
        yield _judged(f"predicted over measured, {arm}", value, 1 - PREDICTED_WITHIN, 1 + PREDICTED_WITHIN)


def _judged(what: str, value: float, least: float, most: float) -> dict[str, Any]:
    return {"what": what, "value": value, "least": least, "most": most, "met": least <= value <= most}


def _rested_step(stepper: inturn.Stepper, rest_s: float) -> dict[str, Any]:
    """One step behind a pause, in which a disk's write cache empties and its quota fills again."""
    time.sleep(rest_s)
    return stepper.turn()[0]


def measure(row: Row, options: argparse.Namespace, plans: Plans) -> dict[str, Any]:
    """One row; what is written. Raises ConfigError for what this build or machine does not allow, TurnError."""
    refuse_unknown(row, row.needs)
    planner = plans.planner(row)
    arms = arms_of(row, planner)
    for arm, activations in arms.items():
        predicted = "" if arm == NULL else f": predicted {planner.predicted_s(activations):.2f} s"
        print(f"{row.name}: {arm} {json.dumps(activations)}{predicted}", flush=True)
    configs = {arm: config_of(row, activations, options) for arm, activations in arms.items()}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(inturn.scratch_folder(options, configs[BASE]))
        limit = disk_limit.limited(disk_limit.parse_limit(run.LIMIT), [folder]) if row.limited else contextlib.nullcontext()
        group = stack.enter_context(limit)
        words = _words(row, options, folder)
        stack.enter_context(limits_for_runs(plans.limits(row)))
        rounds = [run_round(number, options, configs, words, folder, group) for number in range(options.rounds)]
    after = Plans(options).planner(row)
    content = commits.made_of() | {"checkout": commits.describe(run.ROOT), "row": row.name, "model": options.model}
    content |= {"micro_batches": row.micro_batches, "tokens": row.tokens, "clip": 0.0, "host_memory_bytes": row.host_limit}
    content |= {"ssd_limit": None if group is None else group.to_json(), "warm_up": options.warm_up, "rest_s": options.rest}
    content["planned_with"] = _planned_with(planner)
    content["configs"] = {arm: inturn.placed(config, inturn.NVME_PATH) for arm, config in configs.items()}
    chosen = {arm: found["activations"] for arm, found in rounds[-1].get("chosen", {}).items()}
    content |= {"chosen": chosen} if chosen else {}
    both = {arm: [each.predicted_s(kept) for each in (planner, after)] for arm, kept in (arms | chosen).items()}
    content["before_and_after_s"] = both
    predicted_s = {arm: mean(each) for arm, each in both.items()}
    return content | summary(row, rounds, predicted_s, arms[PLAN]) | {"rounds": rounds}


def _words(row: Row, options: argparse.Namespace, folder: Path) -> list[str]:
    """Of the training processes: the model, with as many positions as the row has tokens."""
    model = folder / "model.json"
    model.write_text(json.dumps(length_of(read_fields(named_shape(options.model)), row.tokens)))
    return ["--model", str(model), "--tokens", str(row.tokens), "--loaders", "0", "--checkout", str(run.ROOT)]


def _planned_with(planner: Planner) -> dict[str, Any]:
    """The rates, the seconds of the model's pieces and what each policy offers, from which the row was planned."""
    menus = {policy: planner.menu(policy) for policy in ("free", "products", "everything")}
    points = {policy: asdict(menu.points[0]) for policy, menu in menus.items() if menu is not None and menu.points}
    profile = planner.profile
    return {"machine": asdict(profile.machine), "date": profile.date, "seconds": asdict(planner.seconds), "cell": points}


def lines(content: Mapping[str, Any]) -> list[str]:
    """A row for the terminal."""
    equal = "equal bit for bit" if content["losses_equal"] else "DIFFERENT"
    keeps = "; the plan keeps nothing" if content["plan_keeps_nothing"] else ""
    shown = [f"{content['row']}: losses {equal}{keeps}"]
    for arm, ratio in content["median_ratio"].items():
        seconds, predicted = content["median_s"][arm], content["predicted_ratio"][arm]
        shown.append(f"  {arm:12} {seconds:7.2f} s, {ratio:.3f} of none (predicted {predicted:.3f})")
    for each in content["required"]:
        met = "met" if each["met"] else "NOT MET"
        shown.append(f"  {each['what']}: {each['value']:.3f}, required {each['least']:g} to {each['most']:g}: {met}")
    return shown


# ---- the command


def main(argv: Sequence[str] | None = None) -> int:
    """Measures the rows asked for, and rewrites benchmarks/README.md. Returns 0; 1 where a row was refused, has failed or has
    other losses with what is kept."""
    parser = _parser()
    options = parser.parse_args(argv)
    names = [row.name for row in ROWS]
    unknown = sorted(set(options.only or ()) - {*names})
    if unknown:
        parser.error(f"--only {unknown[0]}: there are {', '.join(names)}")
    if min(options.rounds, options.turns, options.warm_up) < 1:
        parser.error("--rounds, --turns and --warm-up: write 1 or more")
    if options.rest < 0:
        parser.error(f"--rest {options.rest:g}: write 0 or more seconds")
    chosen = [row for row in ROWS if not options.only or row.name in options.only]
    if options.list:
        for row in chosen:
            print(f"{row.name:28}{row.seconds(options.rounds, options.turns, options.warm_up, options.rest) / 60:6.1f} min")
        return 0
    plans = Plans(options)
    fine = [_run_row(row, options, plans) for row in chosen]
    run.write_table(options.benchmarks / "ab")
    return 0 if all(fine) else 1


def _run_row(row: Row, options: argparse.Namespace, plans: Plans) -> bool:
    """Whether the row has been measured, with equal losses; after one that fails comes the next."""
    target = options.benchmarks / "kept" / f"{row.name}_{options.model}_{report.instructions()}_{datetime.date.today()}.json"
    if target.exists() and not options.again:
        print(f"{row.name}: there is {target.name}", flush=True)
        return True
    try:
        content = measure(row, options, plans)
    except (ConfigError, inturn.TurnError) as error:
        print(error, file=sys.stderr, flush=True)
        return False
    portable.write(target, content, options.runs, "kept")
    print("\n".join([*lines(content), f"written: {target}"]), flush=True)
    return content["losses_equal"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="ROW", help="names of rows (see --list)")
    parser.add_argument("--list", action="store_true", help="rows and estimated minutes; run nothing")
    parser.add_argument("--rounds", type=int, default=1, help="each with new processes (default 1)")
    parser.add_argument("--turns", type=int, default=3, help="of each process in a round (default 3)")
    parser.add_argument("--warm-up", type=int, default=2, help="steps of each process ahead of its turns (default 2)")
    parser.add_argument("--rest", type=float, default=0.0, metavar="S", help="seconds of pause ahead of each turn (default 0)")
    parser.add_argument("--again", action="store_true", help="also rows that have a result of today")
    parser.add_argument("--config", type=Path, default=run.ROOT / "configs" / "gpt_101m_cpu.json", help="what all arms share")
    parser.add_argument("--model", default="gpt_101m", help="shape in configs/models")
    parser.add_argument("--machine", type=Path, help="rates for plans, from `ds-vertical limits --out` (default: measured)")
    parser.add_argument("--limited-machine", type=Path, help="the same under the disk limit")
    parser.add_argument("--folder", type=Path, help="on the SSD (default: the JSON's nvme_path)")
    parser.add_argument("--benchmarks", type=Path, default=run.ROOT / "benchmarks", help="folder for results and table")
    parser.add_argument("--runs", type=Path, default=run.ROOT / "runs" / "kept", help="folder for the machine's limits")
    return parser


if __name__ == "__main__":
    sys.exit(main())
