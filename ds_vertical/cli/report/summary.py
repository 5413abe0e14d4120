"""What a report says of one run, as numbers: a step as measured and as simulated, the bound, rates, memory, losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low

from ds_vertical.cli.common import JsonObject
from ds_vertical.cli.report.run_folder import RecordedRun
from ds_vertical.cli.report.timeline import Timeline, Work, by_time, bytes_within, simulated, work_by_kind
from ds_vertical.engine.metrics import ARMS, TRACED, Agreement
from ds_vertical.errors import ConfigError
from ds_vertical.planner.bound import Bound, step_bound
from ds_vertical.schedule.trace import RESOURCES, StepTrace, intersection, summarize, union

_SIMULATED_STEPS = 2  # the first finds nothing under way
_BINS = 160


@dataclass(frozen=True)
class Rate:
    """One direction of the SSD in a step, bytes per second. `over_time`: of equal parts of the step; limits: None without."""

    num_bytes: float
    busy_s: float
    step_s: float
    over_time: tuple[float, ...]
    alone: float | None
    together: float | None

    @property
    def while_busy(self) -> float:
        """Over the time in which the direction moved anything."""
        return self.num_bytes / self.busy_s if self.busy_s else 0.0

    @property
    def over_step(self) -> float:
        """Over the whole step."""
        return self.num_bytes / self.step_s


@dataclass(frozen=True)
class Overlap:
    """Seconds in which the optimizer moved state or computed, and those of them beside computation."""

    total_s: float
    beside_s: float

    @property
    def share(self) -> float:
        """Of the optimizer's seconds those beside computation."""
        return self.beside_s / self.total_s


@dataclass(frozen=True)
class Findings:
    """All that the report knows of one run.

    `measured`, `predicted`: the step that is shown, with all that overlaps it in time; None without a trace, or without an
    account and rates. `seconds`, `losses`: per arm, step by step of one run. `steady_s`: per arm, the median step of all
    untraced runs without their first steps. `seconds` and `steady_s` are empty where the arms' losses differ beyond their
    contract.
    """

    name: str
    folder: RecordedRun
    measured: StepTrace | None
    predicted: StepTrace | None
    bound: Bound | None
    seconds: dict[str, list[float]]
    steady_s: dict[str, float]
    losses: dict[str, list[float]]
    peak_bytes: dict[str, int]

    @property
    def ab(self) -> JsonObject:
        """What `ds-vertical ab` wrote; {} where it did not run."""
        return self.folder.ab or {}

    @property
    def agreement(self) -> str | None:
        """What `ds-vertical ab` found of the losses; None where it has compared none."""
        return _agreement(self.folder) if len(self.ab.get("arms", {})) > 1 else None

    @property
    def step_over_bound(self) -> float | None:
        """The vertical arm's steady step over the bound; None where one of them is not known."""
        step_s = self.steady_s.get(ARMS[1])
        return step_s / self.bound.seconds if self.bound and self.bound.seconds and step_s else None


def summarize_run(folder: RecordedRun, name: str, step: int | None = None) -> Findings:
    """The findings of a folder. `step`: the number of the one to show, None: the middle one by length, never the first where
    there are more. Raises ConfigError for a step that was not traced, and for what is broken in the folder."""
    lines = folder.timelines()
    predicted, bound = _predicted(folder)
    runs = {arm: _untraced(names) for arm, names in folder.arms.items()}
    timed = {} if _agreement(folder) == Agreement.DIFFERENT.value else runs
    steady = {arm: [s for run in names for s in _seconds(folder, run)[1:]] for arm, names in timed.items()}
    told = (folder.ab or {}).get("arms", {})
    return Findings(
        name=name,
        folder=folder,
        measured=_chosen(folder, lines[0], step) if lines else None,
        predicted=predicted,
        bound=bound or _bound_told(folder),
        seconds={arm: _seconds(folder, names[0]) for arm, names in timed.items()},
        steady_s={arm: median(values) for arm, values in steady.items() if values}
        or {arm: each["step_s"] for arm, each in told.items() if "step_s" in each},
        losses={arm: _losses(folder, names[0]) for arm, names in runs.items()}
        or {arm: [float(loss) for loss in each["losses"]] for arm, each in told.items()},
        peak_bytes={arm: max(_peak(folder, run) for run in names) for arm, names in runs.items()}
        or {arm: each["peak_host_bytes"] for arm, each in told.items()},
    )


def _agreement(folder: RecordedRun) -> str | None:
    return ((folder.ab or {}).get("losses_verdict") or {}).get("agreement")


def _untraced(names: Sequence[str]) -> list[str]:
    return [name for name in names if not name.startswith(f"{TRACED}.")] or list(names)


def _seconds(folder: RecordedRun, run: str) -> list[float]:
    """The slowest rank's, step by step."""
    return [max(record.step_s for record in step) for step in zip(*folder.records[run].values(), strict=False)]


def _losses(folder: RecordedRun, run: str) -> list[float]:
    steps = zip(*folder.records[run].values(), strict=False)
    return [sum(record.loss for record in step) / len(step) for step in steps]


def _peak(folder: RecordedRun, run: str) -> int:
    return sum(max(record.peak_host_bytes for record in records) for records in folder.records[run].values())


def _chosen(folder: RecordedRun, line: Timeline, number: int | None) -> StepTrace:
    steps = by_time(line.steps)
    if not steps:
        raise ConfigError(f"{folder.path}: no step in its trace; run again, and let a step come to its end")
    if number is not None:
        found = next((step for step in steps if step.step == number), None)
        if found is None:
            raise ConfigError(f"--step {number}: not in {folder.path}; write one from {steps[0].step} to {steps[-1].step}")
        return found
    later = steps[1:] or steps
    middle = median_low(step.end - step.start for step in later)
    return next(step for step in later if step.end - step.start == middle)


def _predicted(folder: RecordedRun) -> tuple[StepTrace | None, Bound | None]:
    account, limits = folder.account, folder.limits
    if account is None or limits is None:
        return None, None
    ran = account.steps[-1]
    try:
        line = simulated(account, limits.machine, limits.rates, name=folder.name, steps=_SIMULATED_STEPS)
        shape, parts = account.shape(ran, limits.rates), account.parts(ran)
        bound = step_bound(ran.schedule, limits.machine, shape, parts=parts)
    except ValueError as error:  # CostsError, ScheduleError
        raise ConfigError(f"{folder.path}: {error}") from error
    return by_time(line.steps)[-1], bound


def _bound_told(folder: RecordedRun) -> Bound | None:
    """What ab.json says of it, for a folder without the account."""
    told = (folder.ab or {}).get("yardstick") or {}
    if "bound_s" not in told:
        return None
    parts = ({name: each[key] for name, each in told["resources"].items()} for key in ("busy_s", "fill_s", "drain_s"))
    return Bound(told["resource"], *parts)


# ---- of a step


def step_s(step: StepTrace) -> float:
    """Seconds from the step's begin to its end."""
    return step.end - step.start


def work_compared(found: Findings) -> dict[str, tuple[Work | None, Work | None]]:
    """Per kind of event what was measured and what was predicted, by resource, then by seconds."""
    both = [work_by_kind(step) if step else {} for step in (found.measured, found.predicted)]
    names = {*both[0], *both[1]}
    pairs = {name: (both[0].get(name), both[1].get(name)) for name in names}

    def order(name: str) -> tuple[bool, int, float]:
        works = [work for work in pairs[name] if work is not None]
        resource = works[0].resource
        place = RESOURCES.index(resource) if resource in RESOURCES else 0
        return resource not in RESOURCES, place, -max(work.seconds for work in works)

    return {name: pairs[name] for name in sorted(names, key=order)}


def measured_rates(step: StepTrace, found: Findings) -> dict[str, Rate]:
    """The rates of "ssd_read" and "ssd_write", for those in which the step moved anything."""
    limits = found.folder.limits
    known: Mapping[str, float] = vars(limits.machine) if limits else {}
    rates = {}
    for lane in ("ssd_read", "ssd_write"):
        spans = [span for span in step.spans if span.resource == lane]
        if not spans:
            continue
        busy_s = union((max(span.start, step.start), min(span.end, step.end)) for span in spans)
        alone, together = (known.get(f"{lane}{way}_bytes_per_s") for way in ("", "_together"))
        over_time = _over_time(step, [(span.start, span.end, span.bytes) for span in spans])
        moved = sum(bytes_within(step, span) for span in spans)
        rates[lane] = Rate(moved, busy_s, step_s(step), over_time, alone, together)
    return rates


def _over_time(step: StepTrace, moved: Sequence[tuple[float, float, int]]) -> tuple[float, ...]:
    """Bytes per second in each of `_BINS` equal parts of the step; a transfer goes at one pace."""
    width = step_s(step) / _BINS
    bins = [0.0] * _BINS
    for start, end, num_bytes in moved:
        first, last = (start - step.start) / width, (end - step.start) / width
        for index in range(max(0, int(first)), min(_BINS, int(last) + 1)):
            inside = min(last, index + 1) - max(first, index)
            bins[index] += num_bytes * max(0.0, inside) / (last - first) if last > first else 0.0
    return tuple(count / width for count in bins)


def overlap_of(step: StepTrace) -> Overlap | None:
    """The optimizer's seconds in the step, as `trace.optimizer_overlap` counts them; None where it did nothing there."""
    work = [s for s in step.spans if s.resource and (s.resource == "adam" or "optimizer" in s.thread)]
    compute = [s for s in step.spans if s.resource == "compute"]
    taken, beside = ([(max(s.start, step.start), min(s.end, step.end)) for s in spans] for spans in (work, compute))
    total = union(taken)
    return Overlap(total, intersection(taken, beside)) if total else None


def memory_points(step: StepTrace) -> dict[str, list[tuple[float, float]]]:
    """The bytes in each tier, as (seconds into the step, bytes from then on)."""
    found: dict[str, list[tuple[float, float]]] = {}
    for count in step.counts:
        if step.start <= count.time <= step.end:
            found.setdefault(count.name, []).append((count.time - step.start, count.value))
    return found


@dataclass(frozen=True)
class RunSummary:
    """A run in one row; None where a number cannot be had. Times are seconds. `busiest`: the resource that sets the bound."""

    run: str
    stock_s: float | None
    vertical_s: float | None
    speedup: float | None
    bound_s: float | None
    busiest: str | None
    step_over_bound: float | None
    simulated_s: float | None
    outside_share: float | None
    compute_share: float | None
    optimizer_overlap: float | None
    peak_host_bytes: int | None
    last_loss: float | None


def summary(found: Findings) -> RunSummary:
    """The row of a run's findings."""
    stock, vertical = (found.steady_s.get(arm) for arm in ARMS)
    shown = summarize(found.measured) if found.measured else None
    taken = overlap_of(found.measured) if found.measured else None
    return RunSummary(
        run=found.name,
        stock_s=stock,
        vertical_s=vertical,
        speedup=stock / vertical if stock and vertical and found.agreement else None,
        bound_s=found.bound.seconds if found.bound else None,
        busiest=found.bound.resource if found.bound else None,
        step_over_bound=found.step_over_bound,
        simulated_s=step_s(found.predicted) if found.predicted else None,
        outside_share=shown.outside_s / shown.step_s if shown else None,
        compute_share=shown.busy_s["compute"] / shown.step_s if shown else None,
        optimizer_overlap=taken.share if taken else None,
        peak_host_bytes=found.peak_bytes.get(ARMS[1]),
        last_loss=found.losses[ARMS[1]][-1] if found.losses.get(ARMS[1]) else None,
    )
