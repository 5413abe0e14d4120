"""A run's steps, measured or simulated, in one form; what kind of work a span is; seconds and bytes per kind.

[Note: one form] The form is the tracer's own (`trace.StepTrace`): spans per resource, waits, counters. A simulated run is put
into it, so that export, charts and tables ask nobody where a timeline comes from. A simulated wait is a time in which the
compute lane stood still, named after what ended when it went on.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from ds_vertical.errors import ScheduleError
from ds_vertical.planner.costs import Parts
from ds_vertical.planner.machine import Machine
from ds_vertical.planner.memory_timeline import changes
from ds_vertical.planner.model_shape import ModelShape
from ds_vertical.planner.run_record import Account, ExecutedStep
from ds_vertical.planner.simulate import SimulatedRun as Simulated
from ds_vertical.planner.simulate import SimulatedSpan as Stage
from ds_vertical.planner.simulate import SimulationSettings, simulate
from ds_vertical.schedule.events import Event, Op, parse_event
from ds_vertical.schedule.trace import Count, Span, StepTrace, Wait, union
from ds_vertical.types import Tier

MAIN: Final = "MainThread"
OPTIMIZER: Final = "ds_vertical optimizer"
_PIPELINE: Final = frozenset((Op.STEP, Op.MAKE))
_DISK: Final = {
    **dict.fromkeys((Op.FETCH,), "FETCH"),
    **dict.fromkeys((Op.SAVE, Op.GSAVE), "SAVE"),
    **dict.fromkeys((Op.LOAD, Op.GLOAD), "LOAD"),
    Op.KSAVE: "KSAVE",
    Op.KLOAD: "KLOAD",
    **dict.fromkeys((Op.REDUCE, Op.HOLD), "HOLD"),
}
_MOVES: Final = {
    **{Op.LOAD: "load", Op.GLOAD: "load gradient", Op.KLOAD: "load kept"},
    **{Op.SAVE: "save", Op.GSAVE: "save gradient", Op.KSAVE: "save kept"},
}
_LINKS: Final = {"net_pair": "pair", "net_local": "local", "net_cross": "cross"}
_OWN_LINK: Final = {("net_cross", Op.SPREAD), ("net_cross", Op.CROSS)}  # events that are named for what they do there
_PARAMETERS: Final = re.compile(r".*_param\.tensor\.swp(\.\d+)?")  # with a number where a checkpoint shares the file
_GRADIENTS: Final = "gradients.swp"
_ACTIVATIONS: Final = re.compile(r"rank\d+\.bin")
_KEPT: Final = re.compile(r"kept\d+\.bin")
_LANE: Final = re.compile(r"\.ssd\d+$")  # behind the name of a file's part, where it lies on several SSDs


@dataclass(frozen=True)
class Timeline:
    """The steps of one rank, in order. `name`: the run's; `host`: the name of the rank's, empty where nobody knows; `host_id`:
    what tells it from hosts of the same name."""

    name: str
    kind: Literal["measured", "simulated"]
    rank: int
    steps: tuple[StepTrace, ...]
    host: str = ""
    host_id: str = ""

    def within(self, first: int, last: int) -> Timeline:
        """Only the steps of these numbers, both included."""
        return replace(self, steps=tuple(step for step in self.steps if first <= step.step <= last))


def by_time(steps: Sequence[StepTrace]) -> list[StepTrace]:
    """The same steps, each with all that overlaps it: the tracer writes what ended late, or was seen to have ended late, with
    a later step. A record over a step's end is in both."""
    found = []
    for step in steps:
        near = [other for other in steps if step.step <= other.step <= step.step + 1]
        spans = [span for other in near for span in other.spans if span.end > step.start and span.start < step.end]
        waits = [wait for other in near for wait in other.waits if wait.end > step.start and wait.start < step.end]
        found.append(replace(step, spans=spans, waits=waits))
    return found


# ---- kinds of work


def kind_of(span: Span) -> str:
    """What kind of event a span works for: "F", "B", "HEAD", "preF", "sufREDUCE", "STEP read", "STEP adam", "STEP write", ...

    A measured transfer is known by its file, a simulated one by its event. Raises ScheduleError for computation of no event.
    """
    if span.resource == "adam":
        return "STEP adam"
    if span.resource in ("ssd_read", "ssd_write"):
        verb = span.resource.removeprefix("ssd_")
        event = _event(span.name)
        return _file_kind(span.name, verb) if event is None else _DISK.get(event.op, f"STEP {verb}")
    event = parse_event(span.name)
    if span.resource in _LINKS:
        return str(event.op) if (span.resource, event.op) in _OWN_LINK else f"{event.op} {_LINKS[span.resource]}"
    if span.resource in ("copy_in", "copy_out"):
        return f"{event.op} copy"
    return f"{event.layer if isinstance(event.layer, str) and event.op is not Op.HEAD else ''}{event.op}"


def _event(name: str) -> Event | None:
    try:
        return parse_event(name)
    except ScheduleError:
        return None  # a file's name


def _file_kind(name: str, verb: str) -> str:
    name = _LANE.sub("", name)
    if _PARAMETERS.fullmatch(name):
        return "FETCH" if verb == "read" else "STEP write"
    if name == _GRADIENTS:
        return "STEP read" if verb == "read" else "HOLD"
    if _ACTIVATIONS.fullmatch(name):
        return "LOAD" if verb == "read" else "SAVE"
    if _KEPT.fullmatch(name):
        return "KLOAD" if verb == "read" else "KSAVE"
    return f"STEP {verb}"


@dataclass(frozen=True)
class Work:
    """The work of one kind in one step: its resource, the seconds in which any of it was under way, its bytes, its spans."""

    resource: str
    seconds: float
    bytes: int
    count: int


def work_by_kind(step: StepTrace) -> dict[str, Work]:
    """The step's work by kind. Seconds are unions of intervals, cut to the step; work of no resource is left out."""
    spans: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in step.spans:
        if span.resource:
            spans[kind_of(span), span.resource].append(span)
    return {
        kind: Work(resource, union(cut(step, each)), round(sum(bytes_within(step, span) for span in each)), len(each))
        for (kind, resource), each in spans.items()
    }


def bytes_within(step: StepTrace, span: Span) -> float:
    """Of a span's bytes, those of its time within the step, at one pace."""
    inside = min(span.end, step.end) - max(span.start, step.start)
    return span.bytes * max(0.0, inside) / (span.end - span.start) if span.end > span.start else float(span.bytes)


def cut(step: StepTrace, records: Iterable[Span | Wait]) -> list[tuple[float, float]]:
    """The intervals of spans or waits within the step."""
    pairs = ((max(record.start, step.start), min(record.end, step.end)) for record in records)
    return [(start, end) for start, end in pairs if end > start]


# ---- simulated


def simulated(account: Account, machine: Machine, rates: dict[str, float], *, name: str = "", steps: int = 2) -> Timeline:
    """The account's last schedule, simulated at these rates, over so many steps; the first finds nothing under way.

    A further step is simulated and left out, so that the last one ends as a step does that has one after it. Raises CostsError
    and ScheduleError as `simulate` does.
    """
    ran = account.steps[-1]
    shape, parts = account.shape(ran, rates), account.parts(ran)
    line = _run(account, ran, machine, shape, parts, steps + 1)
    count = len(ran.schedule.events)
    starts = [line.issued_s[index * count] for index in range(steps + 1)]
    made = [StepTrace(index + 1, starts[index], starts[index + 1]) for index in range(steps)]
    for span in line.spans:
        _keep(made, span.end_s, lambda step, span=span: step.spans.append(_span(step.step, span, line.issued_s[span.index])))
    for wait in _waits(line):
        for step in made:
            step.waits.extend(replace(wait, step=step.step, start=start, end=end) for start, end in cut(step, [wait]))
    for time, tier, held in _held(line, machine, shape, parts):
        _keep(made, time, lambda step, each=(tier, time, held): step.counts.append(Count(step.step, MAIN, *each)))
    return Timeline(name, "simulated", 0, tuple(made))


def _run(account: Account, ran: ExecutedStep, machine: Machine, shape: ModelShape, parts: Parts, steps: int) -> Simulated:
    settings = SimulationSettings(steps, max(1, account.facts.slots), account.facts.overlap, account.facts.ahead)
    return simulate(ran.schedule, machine, shape, settings, parts=parts)


def _keep(steps: Sequence[StepTrace], time: float, keep: Callable[[StepTrace], None]) -> None:
    """Calls `keep` with the step in which `time` is, as the tracer writes what has ended; a time before all is the first's."""
    step = next((step for step in steps if time <= step.end), None)
    if step is not None:
        keep(step)


def _span(step: int, span: Stage, issued_s: float) -> Span:
    lane, num_bytes, event = span.stage.lane, round(span.stage.num_bytes), span.event
    if event.op is Op.STEP and lane == "ssd_read" and span.stage.purpose == "parameters":
        event = Event(Op.FETCH, event.layer)  # what a delayed step leaves as it is, read for the next forward
    thread = OPTIMIZER if event.op in _PIPELINE else MAIN
    return Span(step, thread, lane, str(event), min(issued_s, span.start_s), span.start_s, span.end_s, num_bytes)


def _waits(line: Simulated) -> Iterator[Wait]:
    """The times in which nothing was computed, between two computations; see [Note: one form]."""
    ended: dict[float, Stage] = {}
    for span in line.spans:
        if span.stage.lane != "compute":
            ended[span.end_s] = span
    reached = 0.0
    for span in sorted((s for s in line.spans if s.stage.lane == "compute"), key=lambda s: s.start_s):
        if span.start_s > reached and span.start_s in ended:
            yield Wait(0, MAIN, _what(ended[span.start_s].event), str(span.event), reached, span.start_s)
        reached = max(reached, span.end_s)


def _what(event: Event) -> str:
    """As the runtime's tickets are called."""
    if event.op in _PIPELINE:
        return f"step {event.layer}"
    if event.op in _MOVES:
        return f"{_MOVES[event.op]} {event.layer} of {event.micro_batch}"
    return f"{event.op.lower()} {event.layer}"


def _held(line: Simulated, machine: Machine, shape: ModelShape, parts: Parts) -> Iterator[tuple[float, str, float]]:
    """(seconds, tier, bytes in it from then on); where device and host are one memory, all of it is the host's."""
    totals: dict[str, float] = defaultdict(float)
    for change in sorted(changes(line, machine, shape, parts), key=lambda change: (change.at_s, change.num_bytes)):
        tier = Tier.HOST if machine.one_memory and change.tier is Tier.DEVICE else change.tier
        totals[tier] += change.num_bytes
        yield change.at_s, tier, totals[tier]
