"""`ds-vertical ab`: one training script in both arms, losses compared before anything is said about speed."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ds_vertical.cli import ab_folder
from ds_vertical.cli.bench import disk_limit, efficiency, host_speed_server
from ds_vertical.cli.bench.arms import Arms, build_arms, ssd_folders
from ds_vertical.cli.bench.comparison import (
    ArmSummary,
    ComparisonError,
    LossVerdict,
    Run,
    check_runs,
    compare_losses,
    comparison_table,
    contract_of,
    describe_losses,
    summarize_arm,
)
from ds_vertical.cli.bench.hosts import HOSTFILE, Hosts, read_hostfile
from ds_vertical.cli.bench.launch import RunError, Script, is_same_file, terminations_raised
from ds_vertical.cli.bench.machine_info import describe_machine, versions
from ds_vertical.cli.common import JsonObject
from ds_vertical.config.section import SECTION
from ds_vertical.engine import metrics
from ds_vertical.engine.machine_cache import slowest_report
from ds_vertical.engine.metrics import ARMS, TRACED, Agreement, encode_float
from ds_vertical.errors import ConfigError, CostsError
from ds_vertical.planner.machine import read_links
from ds_vertical.planner.run_record import KeptRecord

_FAILED, _BAD_INPUT = 1, 2


@dataclass(frozen=True)
class AbPlan:
    """Everything that the command line asks for, checked. `machine`: a report of `ds-vertical limits`."""

    arms: Arms
    config: Path
    stock_config: Path | None
    num_steps: int
    num_repeats: int
    num_ranks: int
    out: Path
    script: Path
    script_arguments: tuple[str, ...]
    ssd_limit: disk_limit.Limit | None
    with_stock: bool = True
    with_trace: bool = False
    machine: JsonObject | None = None  # None: measured ahead of and after each run of the vertical arm
    with_bound: bool = True
    with_local_rank: bool = True
    hosts: Hosts | None = None
    links: Mapping[str, float] | None = None  # what ranks' links carry, for the bound; None: collectives take no time in it


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the A/B. Returns 0; 1 if a run failed or the losses differ beyond the contract; 2 for bad input."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        plan = parse(arguments)
    except (ConfigError, OSError) as error:
        print(f"ds-vertical ab: {error}", file=sys.stderr)
        return _BAD_INPUT
    try:
        with terminations_raised(), _disk_limit(plan) as group:
            return _execute(plan, group, ["ds-vertical", "ab", *arguments])
    except ConfigError as error:
        print(f"ds-vertical ab: {error}", file=sys.stderr)
        return _BAD_INPUT
    except (RunError, ComparisonError) as error:
        print(f"ds-vertical ab: {error}", file=sys.stderr)
        return _FAILED


# --- the command line ----------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ds-vertical ab",
        usage="ds-vertical ab --config CONFIG.json [options] -- SCRIPT [ARGS]",
        description="Runs SCRIPT under the deepspeed launcher with stock ZeRO-Infinity and with the vertical schedule, "
        "compares the losses, then the speed. SCRIPT may be any that trains by DeepSpeed's engine: through Hugging Face's "
        "Trainer, Accelerate, the three calls, or engine.train_batch(). Each arm's JSON stands in the place of CONFIG.json "
        "in ARGS, or as --deepspeed_config behind them where they do not name it.",
    )
    parser.add_argument("--config", type=Path, required=True, help="DeepSpeed JSON that both arms start from")
    parser.add_argument("--stock-config", type=Path, help="JSON for the stock arm; only transfer settings may differ")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="dotted key and JSON value, in both arms"
    )
    parser.add_argument("--steps", type=int, default=10, help="steps per run, 2 or more (default 10)")
    parser.add_argument("--repeat", type=int, default=1, help="runs per arm, interleaved (default 1)")
    parser.add_argument("--num-ranks", type=int, default=1, help="processes on this machine (default 1)")
    parser.add_argument(HOSTFILE, type=Path, metavar="FILE", help="train on the hosts of DeepSpeed's hostfile")
    parser.add_argument("--master-addr", metavar="ADDRESS", help="of the first host, if others do not reach its own")
    parser.add_argument(disk_limit.OPTION, metavar="READ,WRITE", help=disk_limit.HELP)
    parser.add_argument("--vertical-only", action="store_true", help="leave stock out: nothing is compared")
    parser.add_argument(
        "--trace", action="store_true", help="trace a third run: time outside all resources, and what that costs"
    )
    parser.add_argument(
        "--machine",
        type=Path,
        action="append",
        default=[],
        help="rates for the bound, from `ds-vertical limits` (default: measured); with a hostfile once for each host",
    )
    parser.add_argument(
        "--links", type=Path, help="what ranks' links carry, from `ds-vertical limits --links`: the bound counts collectives"
    )
    parser.add_argument("--no-bound", action="store_true", help="do not measure the machine, print no bound")
    parser.add_argument(
        "--no-local-rank", action="store_true", help="start SCRIPT without --local_rank, which `deepspeed` adds"
    )
    parser.add_argument("--out", type=Path, help="folder for ab.json, both JSONs and logs (default runs/ab-<date>)")
    return parser


def parse(arguments: Sequence[str]) -> AbPlan:
    """The checked plan. Raises ConfigError for bad input, SystemExit (2) where argparse finds the fault."""
    own, separator, script = _split_at_separator(arguments)
    options = _parser().parse_args(own)
    if not separator or not script:
        raise ConfigError("no script given: write `-- SCRIPT [ARGS]` at the end, e.g. -- scripts/train.py --seq 64")
    _check_counts(options)
    path = Path(script[0])
    if not path.is_file():
        raise ConfigError(f"{path}: no such script; write the path of a Python file after `--`")
    _refuse_other_config(script[1:], options.config)
    hosts = _hosts(options)
    num_ranks = options.num_ranks if hosts is None else hosts.num_ranks
    limit = disk_limit.parse_limit(options.ssd_limit) if options.ssd_limit is not None else None
    arms = build_arms(options.config, options.stock_config, options.set, num_ranks, not options.vertical_only)
    if limit is not None and not ssd_folders(arms.vertical):
        raise ConfigError(f"{disk_limit.OPTION}: {options.config} keeps nothing on SSD (no nvme_path); leave the option out")
    for nvme_path in ssd_folders(arms.vertical) if limit else []:
        disk_limit.disk_of(nvme_path)  # refused before --out is made
    links = _links(options)
    out = _take_folder(options, hosts)
    return AbPlan(
        arms=arms,
        config=options.config,
        stock_config=options.stock_config,
        num_steps=options.steps,
        num_repeats=options.repeat,
        num_ranks=num_ranks,
        out=out,
        script=path,
        script_arguments=tuple(script[1:]),
        ssd_limit=limit,
        with_stock=not options.vertical_only,
        with_trace=options.trace,
        machine=slowest_report([efficiency.read_machine(path) for path in options.machine]),
        links=links,
        with_bound=not options.no_bound and (hosts is None or bool(options.machine)),
        with_local_rank=not options.no_local_rank,
        hosts=hosts,
    )


def _hosts(options: argparse.Namespace) -> Hosts | None:
    """The hosts that the command line names; None: this machine alone. Raises ConfigError for options that do not fit."""
    given = options.machine
    if given and options.no_bound:
        raise ConfigError(f"--machine {given[0]}: it is for the bound; leave it out, or --no-bound")
    if options.hostfile is None:
        if len(given) > 1 or options.master_addr is not None:
            name = "--master-addr" if options.master_addr is not None else f"--machine {given[1]}"
            raise ConfigError(f"{name}: it is for several hosts; write {HOSTFILE} FILE beside it, or leave it out")
        return None
    hosts = read_hostfile(options.hostfile, options.master_addr)
    if options.num_ranks != 1:
        raise ConfigError(f"--num-ranks {options.num_ranks}: {HOSTFILE} says how many ranks each host has; leave it out")
    if options.ssd_limit is not None:
        raise ConfigError(f"{disk_limit.OPTION}: it limits this machine's disks, not those of {HOSTFILE}; leave it out")
    if given and len(given) != len(hosts.slots):
        raise ConfigError(
            f"--machine: got {len(given)} of them for {len(hosts.slots)} hosts; write one for each host, from `ds-vertical"
            " limits` there: the slowest rates count"
        )
    return hosts


def _take_folder(options: argparse.Namespace, hosts: Hosts | None) -> Path:
    """Where the results go, made. Raises ConfigError where the hosts do not share it."""
    out = ab_folder.take(options.out or Path("runs", f"ab-{datetime.datetime.now():%Y%m%d-%H%M%S}"))
    if hosts is not None:
        hosts.check_shared(out)
    return out


def _links(options: argparse.Namespace) -> Mapping[str, float] | None:
    """What the links carry. Raises ConfigError where no bound counts it."""
    if options.links is None:
        return None
    if options.no_bound:
        raise ConfigError(f"--links {options.links}: it is for the bound; leave it out, or --no-bound")
    try:
        return read_links(options.links)
    except CostsError as error:
        raise ConfigError(str(error)) from error


def _refuse_other_config(arguments: Sequence[str], config: Path) -> None:
    """Raise ConfigError where SCRIPT's arguments name another JSON as --deepspeed_config than the one that both arms have."""
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        named = value if equals else "".join(arguments[index + 1 : index + 2])
        if name == "--deepspeed_config" and not is_same_file(named, config):
            raise ConfigError(f"{argument} in SCRIPT's arguments: leave it out, each arm gets its own file; use --config")


def _check_counts(options: argparse.Namespace) -> None:
    counts = (("--steps", options.steps, 2), ("--repeat", options.repeat, 1), ("--num-ranks", options.num_ranks, 1))
    for name, value, least in counts:
        if value < least:
            why = "; the first step of a run is left out of the medians" if name == "--steps" else ""
            raise ConfigError(f"{name} {value}: write {least} or more{why}")


def _split_at_separator(arguments: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    if "--" not in arguments:
        return list(arguments), False, []
    at = list(arguments).index("--")
    return list(arguments[:at]), True, list(arguments[at + 1 :])


# --- running -------------------------------------------------------------------------------------------------------


def _disk_limit(plan: AbPlan) -> contextlib.AbstractContextManager[disk_limit.LimitedGroup | None]:
    if plan.ssd_limit is None:
        return contextlib.nullcontext()
    return disk_limit.limited(plan.ssd_limit, ssd_folders(plan.arms.vertical))


def _timed_host(plan: AbPlan) -> contextlib.AbstractContextManager[dict[str, str]]:
    """Variables for the runs."""

    @contextlib.contextmanager
    def serving() -> Iterator[dict[str, str]]:
        with host_speed_server.serving() as path:
            yield {metrics.VARIABLE: path}

    wanted = plan.with_bound and plan.machine is None and plan.num_ranks == 1
    return serving() if wanted else contextlib.nullcontext({})


def _execute(plan: AbPlan, group: disk_limit.LimitedGroup | None, command: Sequence[str]) -> int:
    started = datetime.datetime.now().astimezone()
    for warning in plan.arms.warnings:
        print(f"warning: {warning}")
    with _timed_host(plan) as environment:
        runs, reports = _runs(plan, group, environment)
    verdict = compare_losses(runs, contract_of(plan.arms.vertical, plan.num_ranks, *_told(runs)))
    arms = ARMS if plan.with_stock else ARMS[1:]
    summaries = {arm: summarize_arm([run for run in runs if run.arm == arm and not run.traced]) for arm in arms}
    report = _report(plan, command, started, verdict, summaries)
    report["ssd_limit"] = group.to_json() if group else None
    report["kept"] = kept = efficiency.kept_of(runs, plan.out)
    if plan.with_bound and verdict.agreement is not Agreement.DIFFERENT:
        report["yardstick"] = _yardstick(plan, reports, runs, summaries.get("stock"))
    (plan.out / "ab.json").write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
    print(describe_losses(verdict, plan.num_steps))
    if verdict.agreement is Agreement.DIFFERENT:
        print(f"ds-vertical ab: the arms do not compute the same thing; logs in {plan.out}", file=sys.stderr)
        return _FAILED
    print(comparison_table(summaries, group.describe() if group else ""))
    print("kept for the backward: " + (KeptRecord.from_json(kept).describe() if kept else "nothing"))
    print("\n".join(efficiency.efficiency_lines(report.get("yardstick", {}))))
    print(f"written: {plan.out / 'ab.json'}")
    return 0


def _runs(
    plan: AbPlan, group: disk_limit.LimitedGroup | None, environment: Mapping[str, str]
) -> tuple[list[Run], dict[int, list[_Measured]]]:
    """All runs, the arms in turn; alternating the order spreads a drift of the machine (heat, other load) over them. Beside
    them the machine as it was ahead of and after each run of the vertical arm, by repeat: ahead of it once there is an account
    of an earlier one, which says what to measure; so the traced run comes first."""
    script = Script(
        plan.script,
        plan.script_arguments,
        plan.num_steps,
        plan.num_ranks,
        group,
        environment,
        plan.config,
        plan.with_local_rank,
        plan.hosts,
    )
    kinds = [arm for arm, wanted in ((ARMS[0], plan.with_stock), (TRACED, plan.with_trace), (ARMS[1], True)) if wanted]
    runs: list[Run] = []
    reports: dict[int, list[_Measured]] = {}
    for repeat in range(plan.num_repeats):
        for kind in kinds if repeat % 2 == 0 else reversed(kinds):
            config = plan.arms.stock if kind == ARMS[0] else plan.arms.vertical
            if kind == TRACED:
                section = config[SECTION] | {"trace": str(ab_folder.make(plan.out, f"{kind}.{repeat}.trace"))}
                config = config | {SECTION: section}
            ab_folder.make(plan.out, f"{kind}.{repeat}.metrics")
            path = plan.out / f"{kind}.json"
            path.write_text(json.dumps(config, indent=2) + "\n")
            measured = kind == ARMS[1] and plan.with_bound
            earlier = [run for run in runs if run.arm == ARMS[1]]
            if measured and earlier and plan.machine is None:
                reports[repeat] = [_machine_now(plan, group, earlier[-1])]
            records = script.run(path, plan.out, f"{kind}.{repeat}", f"{kind} {repeat + 1}/{plan.num_repeats}")
            runs.append(Run(ARMS[1] if kind == TRACED else kind, repeat, records, traced=kind == TRACED))
            check_runs(runs, plan.num_steps, plan.num_ranks)  # before the next run takes its minutes for nothing
            if measured:
                reports.setdefault(repeat, []).append(_machine_now(plan, group, runs[-1]))
    return runs, reports


_Measured = JsonObject | str  # a report of `ds-vertical limits`, or why there is none


def _machine_now(plan: AbPlan, group: disk_limit.LimitedGroup | None, run: Run) -> _Measured:
    """The machine's rates for a run's model and settings, those that were given, where they were; and what its links carry."""
    if plan.machine is not None:
        return efficiency.add_links(plan.machine, plan.links)
    folders = [Path(path) for path in ssd_folders(plan.arms.vertical)] or [plan.out]
    try:
        ran = efficiency.accounts([run], plan.out)
        return efficiency.measure_machine(ran[0].account, plan.out, folders, group, plan.links) if ran else _NO_ACCOUNT
    except (OSError, ValueError) as error:  # the comparison of the arms stands without
        return str(error)


_NO_ACCOUNT = "the vertical arm kept no account of its steps"


def _yardstick(
    plan: AbPlan, measured: Mapping[int, Sequence[_Measured]], runs: Sequence[Run], stock: ArmSummary | None
) -> JsonObject:
    """The bound and what else the vertical step is measured against; {"missing": why} where it cannot be had."""
    faults = [found for reports in measured.values() for found in reports if isinstance(found, str)]
    if faults:
        return {"missing": faults[0]}
    reports = {repeat: [each for each in found if not isinstance(each, str)] for repeat, found in measured.items()}
    ran = efficiency.accounts(runs, plan.out)
    if not ran:
        return {"missing": _NO_ACCOUNT}
    try:
        return efficiency.figures(ran, reports, stock, plan.out) | {"limits": reports[max(reports)][-1]}
    except (OSError, ValueError) as error:  # faults of rates, schedules, traces: the comparison of the arms stands without
        return {"missing": str(error)}


def _told(runs: Sequence[Run]) -> tuple[bool | None, bool]:
    """What the runs say about tied weights (None as soon as one does not know), and whether all their devices' kernels repeat
    their bits."""
    records = [record for run in runs for each in run.ranks.values() for record in each]
    tied = {record.tied for record in records}
    return None if None in tied else True in tied, all(record.repeatable for record in records)


# --- the report ----------------------------------------------------------------------------------------------------


def _report(
    plan: AbPlan,
    command: Sequence[str],
    started: datetime.datetime,
    verdict: LossVerdict,
    summaries: dict[str, ArmSummary],
) -> JsonObject:
    """What ab.json holds. Speed is null where the losses differ beyond the contract."""
    comparable = verdict.agreement is not Agreement.DIFFERENT
    speedup = summaries["stock"].step_s / summaries["vertical"].step_s if comparable and plan.with_stock else None
    first = None if verdict.first is None else {key: _json(value) for key, value in asdict(verdict.first).items()}
    return {
        "arms": {arm: summary.to_json(with_speed=comparable) for arm, summary in summaries.items()},
        "speedup": speedup,
        "losses_equal": verdict.agreement is Agreement.EQUAL,
        "losses_verdict": {
            "agreement": verdict.agreement.value,
            "tolerance": verdict.contract.tolerance,
            "tolerated_because": list(verdict.contract.reasons),
            "max_relative_difference": _json(verdict.max_relative),
            "first_difference": first,
        },
        "steps": plan.num_steps,
        "repeats": plan.num_repeats,
        "ranks": plan.num_ranks,
        "hosts": None if plan.hosts is None else dict(plan.hosts.slots),
        "command": list(command),
        "date": started.isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": versions(),
        "configs": {"stock": plan.arms.stock, "vertical": plan.arms.vertical}
        if plan.with_stock
        else {"vertical": plan.arms.vertical},
    }


def _json(value: object) -> object:
    return encode_float(value) if isinstance(value, float) else value
