"""How good a vertical step is: its seconds beside the bound, its bytes beside the table's, its memory beside the formula's.

`ds-vertical ab` measures the machine's rates right before and right after each run of the vertical arm, under the same disk
limit, with the run's model, micro-batch, dtype and threads. A run gets the mean of the two. The mean is corrected for each
step by how long a layer took between the run's steps (`engine.metrics`), since a shared machine changes within minutes. Where
no layer was timed, and the two measurements differ by more than _STEADY, the run's bound says little: it is left out of the
ratio if another run is steadier. The rates may also come from a file. All figures are of the schedules that really ran
(`planner.run_record`). The simulated makespan stands beside the bound: it takes queues and order into account, but it is a
prediction and no limit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from ds_vertical.cli.bench.comparison import ArmSummary, Run
from ds_vertical.cli.bench.disk_limit import LimitedGroup
from ds_vertical.cli.bench.host_speed import Conditions, Report
from ds_vertical.cli.common import JsonObject
from ds_vertical.engine.metrics import ARMS
from ds_vertical.errors import ConfigError
from ds_vertical.planner.bound import Bound, step_bound
from ds_vertical.planner.costs import event_costs
from ds_vertical.planner.machine import Machine, link_fields
from ds_vertical.planner.run_record import DTYPES, Account, ExecutedStep, read_account
from ds_vertical.planner.simulate import SimulationSettings, simulate
from ds_vertical.schedule.events import Event, Op, parse_event
from ds_vertical.schedule.trace import StepTrace, cost_share, optimizer_overlap, read_trace, record_s, summarize
from ds_vertical.types import Tier

_STEADY_STEPS = 3
_STEADY = 0.15  # by which seconds of a layer may differ ahead of a run and after it


@dataclass(frozen=True)
class Ran:
    """A repeat of the vertical arm with the account that it kept of its schedules."""

    run: Run
    account: Account

    def on(self, machine: Machine) -> Ran:
        """The same with the machine's pairs of ranks."""
        return replace(self, account=replace(self.account, facts=self.account.facts.on(machine)))

    def counted(self) -> list[tuple[ExecutedStep, int, int, float]]:
        """Each step but the first, with the bytes that all ranks read and wrote, and the slowest rank's seconds."""
        counted = []
        for index in range(1, self.run.num_steps):
            records = self.run.step(index)
            moved = sum(r.read_bytes for r in records), sum(r.write_bytes for r in records)
            counted.append((self.account.steps[index], *moved, max(r.step_s for r in records)))
        return counted


def accounts(runs: Sequence[Run], out: Path) -> list[Ran]:
    """The vertical runs that kept an account; none where the script trains with an engine of its own."""
    found = [(run, read_account(out / f"{run.name}.metrics")) for run in runs if run.arm == ARMS[1]]
    return [Ran(run, account) for run, account in found if account is not None and len(account.steps) == run.num_steps]


def kept_of(runs: Sequence[Run], out: Path) -> JsonObject | None:
    """What the forwards of the last step of the vertical arm kept for their backwards, as accounts have it; None: nothing."""
    kept = [ran.account.steps[-1].kept for ran in accounts(runs, out)]
    last = next((each for each in reversed(kept) if each is not None), None)
    return None if last is None else last.to_json()


# ---- the machine


def measure_machine(
    account: Account, out: Path, folders: Sequence[Path], group: LimitedGroup | None, links: Mapping[str, float] | None = None
) -> JsonObject:
    """The report of `ds-vertical limits` for this run's model and settings, in a process in the run's group; with `links`.

    `folders` lie on the disks to measure, which the run has used. Raises ConfigError with what the process said if it failed.
    """
    facts, target = account.facts, out / "limits.json"
    command = [
        sys.executable,
        "-m",
        "ds_vertical.cli.bench.limits",
        "--path",
        *map(str, folders),
        "--config",
        str(out / "vertical.json"),
    ]
    command += ["--threads", str(facts.threads), "--out", str(target), "--no-keep", "--no-fio"]
    if facts.model is not None:
        (out / "model.json").write_text(json.dumps(facts.model))
        command += ["--model", str(out / "model.json"), "--dtype", DTYPES[facts.dtype], "--tokens", str(facts.tokens)]
        command += ["--sequences", str(facts.sequences)]
    if group is not None:
        command += ["--limited", json.dumps(group.to_json())]
    done = subprocess.run(group.wrap(command) if group else command, capture_output=True, text=True)
    if done.returncode != 0:
        raise ConfigError(f"the machine could not be measured:\n{(done.stderr or done.stdout).strip()[-2000:]}")
    report = add_links(json.loads(target.read_text()), links)
    target.write_text(json.dumps(report, indent=2) + "\n")
    return report


def add_links(report: JsonObject, links: Mapping[str, float] | None) -> JsonObject:
    """The report of a machine that says what its links carry, too, as `limits --links` has measured it (None: it does not)."""
    if links is None:
        return report
    machine = report.get("machine", report)
    return report | {"machine": machine | link_fields(links)}


def read_machine(path: Path) -> JsonObject:
    """A file of `ds-vertical limits`. Raises ConfigError."""
    try:
        report = json.loads(path.read_text())
        Machine.from_dict(report)
    except (OSError, ValueError, AttributeError) as error:  # CostsError and a JSON fault are ValueErrors
        raise ConfigError(f"--machine {path}: {error}; write a file that `ds-vertical limits --out` has written") from error
    return report


# ---- figures


Reports = Mapping[int, Sequence[Report]]  # ahead of and after the vertical run, by its repeat


def figures(every: Sequence[Ran], reports: Reports, stock: ArmSummary | None, out: Path) -> JsonObject:
    """All figures, for ab.json. Raises CostsError for reports without the rates."""
    conditions = {repeat: Conditions(found) for repeat, found in reports.items()}
    every = [each.on(conditions[min(conditions)].machine) for each in every]
    ran, traced = [each for each in every if not each.run.traced], [each for each in every if each.run.traced]
    measured = median(seconds for each in ran for *_, seconds in each.counted())
    bounds = {each.run.repeat: _bounds(each, conditions[each.run.repeat]) for each in ran}
    every_bound = sorted((bound for found in bounds.values() for bound in found), key=lambda bound: bound.seconds)
    middle = every_bound[len(every_bound) // 2]
    ratios = {each.run.repeat: ratio for each in ran if (ratio := _over_bound(each, bounds[each.run.repeat])) is not None}
    drifts = {each.run.repeat: _drift(each, conditions) for each in ran if each.run.repeat in ratios}
    known = {repeat: drift <= _STEADY for repeat, drift in drifts.items() if drift is not None}
    steady = [ratio for repeat, ratio in ratios.items() if known.get(repeat, True)]
    found: JsonObject = {
        "step_s": measured,
        "bound_s": middle.seconds,
        "resource": middle.resource,
        "step_over_bound": median(steady or ratios.values()) if ratios else None,
        "step_over_bound_by_repeat": list(ratios.values()),
        "machine_drift_by_repeat": list(drifts.values()),
        "host_slowdown_by_repeat": [_slowdowns(each, conditions[each.run.repeat]) for each in ran],
        "steady": True if any(known.values()) else None if len(known) < len(ratios) else False,
        "resources": {
            name: {"busy_s": middle.busy_s[name], "fill_s": middle.fill_s[name], "drain_s": middle.drain_s[name]}
            for name in middle.busy_s
        },
        "without_compute": any("layer_forward_s" not in each.rates for each in conditions.values()),
        "simulated_s": median(_simulated(each, conditions[each.run.repeat]) for each in ran),
        "rates_by_repeat": [[report.get("rates", {}) for report in found] for found in reports.values()],
    }
    rates = conditions[ran[-1].run.repeat].rates
    return (
        found | {"bytes": _bytes(ran, rates), "host_memory": _memory(ran, stock)} | _traced(traced, measured, conditions, out)
    )


def _drift(ran: Ran, conditions: Mapping[int, Conditions]) -> float | None:
    """By how much the machine changed unnoticed: None where the run's own steps tell how fast the host was."""
    return None if all(step.gauge_s is not None for step in ran.account.steps) else conditions[ran.run.repeat].drift


def _slowdowns(ran: Ran, conditions: Conditions) -> list[float]:
    """Of each counted step."""
    return [conditions.slowdown(ran.account.steps, index) for index in range(1, ran.run.num_steps)]


def _bounds(ran: Ran, conditions: Conditions) -> list[Bound]:
    """Of each counted step."""
    account, found = ran.account, []
    for index, (step, *_) in enumerate(ran.counted(), start=1):
        machine, rates = conditions.during(account.steps, index)
        found.append(step_bound(step.schedule, machine, account.shape(step, rates), parts=account.parts(step)))
    return found


def _over_bound(ran: Ran, bounds: Sequence[Bound]) -> float | None:
    """A run's steps over their bounds, each at the rates of its time."""
    pairs = zip(ran.counted(), bounds, strict=True)
    ratios = [seconds / bound.seconds for (*_, seconds), bound in pairs if bound.seconds]
    return median(ratios) if ratios else None


def _simulated(ran: Ran, conditions: Conditions) -> float:
    """Seconds of a step in the steady state."""
    account, index = ran.account, ran.run.num_steps - 1
    machine, rates = conditions.during(account.steps, index)
    step = account.steps[index]
    shape, slots = account.shape(step, rates), max(1, account.facts.slots)
    settings = SimulationSettings(_STEADY_STEPS, slots, account.facts.overlap, account.facts.ahead)
    return simulate(step.schedule, machine, shape, settings, parts=account.parts(step)).step_s


def _bytes(ran: Sequence[Ran], rates: Mapping[str, float]) -> JsonObject | None:
    """SSD bytes against the table, medians over the counted steps that took a whole optimizer step or more.

    Of a run's second step only where there is no third: it may read moments that were never written, which costs no transfer.
    """
    ratios: list[tuple[float, float, float]] = []
    for each in ran:
        world = each.account.facts.num_shards
        for step, read, written, _ in each.counted()[1:] or each.counted():
            table = each.account.table(step, rates)
            if table is not None and table.read and table.written:
                both = (read + written) / (table.read + table.written)
                ratios.append((read / table.read / world, written / table.written / world, both / world))
    if not ratios:
        return None
    read, written, both = (median(column) for column in zip(*ratios, strict=True))
    return {"read_over_table": read, "written_over_table": written, "over_table": both}


def _memory(ran: Sequence[Ran], stock: ArmSummary | None) -> JsonObject:
    peak = max(sum(r.peak_host_bytes for r in each.run.step(each.run.num_steps - 1)) for each in ran)
    # Rank 0's, of all ranks. The start knows nothing of what forwards keep.
    every = [(each.account.facts.num_shards, each.account.facts.host_bytes, _kept_in_memory(each.account)) for each in ran]
    formula, kept = max((count * (at_start + kept if at_start else 0), count * kept) for count, at_start, kept in every)
    found: JsonObject = {"peak_bytes": peak, "formula_bytes": formula, "kept_bytes": kept}
    found["peak_over_formula"] = peak / formula if formula else None
    return found | {"stock_peak_bytes": stock.peak_host_bytes if stock else None}


def _kept_in_memory(account: Account) -> int:
    """Bytes of host memory that the last step's forwards kept for their backwards on this rank."""
    kept = account.steps[-1].kept
    tiers = {Tier.HOST, Tier.DEVICE} if account.facts.one_memory else {Tier.HOST}
    return sum(num_bytes for tier, num_bytes in kept.num_bytes if tier in tiers) if kept else 0


def _traced(traced: Sequence[Ran], measured: float, conditions: Mapping[int, Conditions], out: Path) -> JsonObject:
    """What needs a trace: time outside all resources, the optimizer's overlap, what tracing costs, and where the computation
    takes longer than it did by itself."""
    steps: list[tuple[Ran, int, StepTrace]] = []
    for each in traced:
        traces = read_trace(out / f"{each.run.name}.trace" / "rank0.jsonl")
        steps += [(each, index, trace) for index, trace in enumerate(traces[1:], start=1)]
    if not steps:
        return {}
    overlaps = [share for *_, step in steps if (share := optimizer_overlap(step)) is not None]
    summaries = [summarize(step) for *_, step in steps]
    each_s = record_s(out / "trace.cost")
    seconds = median(s for each in traced for *_, s in each.counted())
    operations = [_operations(each.account, index, step, conditions[each.run.repeat]) for each, index, step in steps]
    return {
        "outside_share": median(summary.outside_s / summary.step_s for summary in summaries),
        "optimizer_overlap": median(overlaps) if overlaps else None,
        "busy_s": {name: median(s.busy_s[name] for s in summaries) for name in summaries[0].busy_s},
        "waits_s": {name: median(s.waits_s.get(name, 0.0) for s in summaries) for name in summaries[-1].waits_s},
        "operations_s": {op: [median(o[op][i] for o in operations if op in o) for i in (0, 1)] for op in operations[-1]},
        "traced_over_untraced": seconds / measured,
        "trace_cost_share": median(cost_share(step, each_s) for *_, step in steps),
    }


def _operations(account: Account, index: int, trace: StepTrace, conditions: Conditions) -> dict[str, tuple[float, float]]:
    """Per kind of computing event ("F", "HEAD", "preB", "sufREDUCE", ...) and for "STEP" its seconds in the step: as traced,
    and at the machine's rates."""
    taken: dict[str, float] = defaultdict(float)
    priced: dict[str, float] = defaultdict(float)
    for span in trace.spans:
        seconds = max(0.0, min(span.end, trace.end) - max(span.start, trace.start))  # a pause behind the step is not in it
        if span.resource == "compute":
            taken[_kind(parse_event(span.name))] += seconds
        elif span.resource == "adam":
            taken["STEP"] += seconds
    machine, rates = conditions.during(account.steps, index)
    ran = account.steps[index]
    events = ran.schedule.events
    for event, cost in zip(events, event_costs(events, machine, account.shape(ran, rates), account.parts(ran)), strict=True):
        lane_s = sum(stage.seconds for job in cost for stage in job if stage.lane in ("compute", "adam"))
        priced[_kind(event)] += lane_s
    return {kind: (seconds, priced[kind]) for kind, seconds in taken.items()}


def _kind(event: Event) -> str:
    is_told_apart = isinstance(event.layer, str) and event.op not in (Op.HEAD, Op.STEP)
    return f"{event.layer if is_told_apart else ''}{event.op}"


# ---- lines


def efficiency_lines(found: JsonObject) -> list[str]:
    """The figures as lines for the terminal, below the table of the arms and what was kept."""
    if "bound_s" not in found:
        return [f"no bound: {found['missing']}"] if "missing" in found else []
    shown = []
    ratio = found["step_over_bound"]
    if ratio is not None:
        without = ", computation not measured" if found["without_compute"] else ""
        by_repeat = found["step_over_bound_by_repeat"]
        each = f" ({', '.join(f'{one:.2f}' for one in by_repeat)})" if len(by_repeat) > 1 else ""
        if found["steady"] is False:
            drifts = ", ".join(f"{drift:.0%}" for drift in found["machine_drift_by_repeat"] if drift is not None)
            each += f"; the machine's speed changed meanwhile, by {drifts}"
        bound = f"{found['bound_s']:.3f} s ({found['resource']}{without})"
        shown.append(f"bound of the vertical step: {bound}; step / bound {ratio:.2f}{each}")
        shown.append(f"simulated makespan, beside the bound: {found['simulated_s']:.3f} s")
    moved, memory = found["bytes"], found["host_memory"]
    if moved is not None:
        shown.append(f"SSD bytes / table: read {moved['read_over_table']:.3f}, written {moved['written_over_table']:.3f}")
    if memory["peak_over_formula"] is not None:
        peak, formula, kept = (memory.get(f"{name}_bytes", 0) / 1e6 for name in ("peak", "formula", "kept"))
        beside = f" with {kept:.0f} MB kept for the backward" if kept else ""
        ratio = memory["peak_over_formula"]
        shown.append(f"peak host memory: {peak:.0f} MB, formula {formula:.0f} MB{beside}, ratio {ratio:.2f}")
    if "outside_share" in found:
        overlap = found["optimizer_overlap"]
        beside = "" if overlap is None else f"; optimizer beside computation {overlap:.0%}"
        shown.append(f"outside all resources: {found['outside_share']:.1%}{beside}")
        kinds = [f"{kind} {taken:.3f} / {priced:.3f}" for kind, (taken, priced) in found["operations_s"].items()]
        shown.append(f"seconds in the step / at the rates: {', '.join(kinds)}")
        cost, ratio = found["trace_cost_share"], found["traced_over_untraced"]
        shown.append(f"tracing: {cost:.2%} of the step; traced / untraced step {ratio:.3f}")
    return shown
