"""The schedule as a value: events, their text form, what each one waits for, and the check of a whole schedule.

[Note: issue and wait] Only issuing is an event. What has to be complete before an event may start is the answer of
dependencies(), the one truth that validator, executor and simulator share.

[Note: order and timing] `order` and `snake` in the header fix in which order gradients are summed, hence the bits of
the result. Everything else (window, where a FETCH or a RELEASE stands, which forward comes first) is timing and never
changes values. validate() refuses sums in another order and leaves timing free.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

PRE: Final = "pre"
SUF: Final = "suf"
ORDERS: Final = ("vertical", "horizontal", "forward")
FORM: Final = "[LAYER|pre|suf]OP[MICRO_BATCH][.eCHUNK|.dCHUNK][@-STEPS]: 3FETCH, preF0, sufHEAD0, NORM, 3STEP.d0@-1"

Unit = int | Literal["pre", "suf"]
Key = tuple["Op", "Unit | None", "int | None"]


class ScheduleError(ValueError):
    """A schedule, or a piece of its text, that cannot be run as it stands."""


class Op(StrEnum):
    """What an event does; the value is its name in the text form."""

    FETCH = "FETCH"
    RELEASE = "RELEASE"
    F = "F"
    HEAD = "HEAD"
    B = "B"
    SAVE = "SAVE"
    LOAD = "LOAD"
    DROP = "DROP"
    GSAVE = "GSAVE"
    GLOAD = "GLOAD"
    GDROP = "GDROP"
    REDUCE = "REDUCE"
    HOLD = "HOLD"
    RECALL = "RECALL"
    NORM = "NORM"
    READ = "READ"
    STEP = "STEP"
    WRITE = "WRITE"
    COMMIT = "COMMIT"
    DISCARD = "DISCARD"


# Op -> the units it may name ("layer" is any layer number, "none" is no unit at all).
_UNITS: Final[dict[Op, str]] = {
    **dict.fromkeys((Op.FETCH, Op.RELEASE, Op.B, Op.REDUCE), "layer pre"),
    **dict.fromkeys((Op.F, Op.SAVE, Op.LOAD, Op.DROP, Op.GSAVE, Op.GLOAD, Op.GDROP), "layer pre suf"),
    **dict.fromkeys((Op.HOLD, Op.RECALL, Op.READ, Op.STEP, Op.WRITE), "layer pre"),
    **dict.fromkeys((Op.COMMIT, Op.DISCARD), "layer pre none"),
    Op.HEAD: "suf",
    Op.NORM: "none",
}
_PER_MICRO_BATCH: Final = frozenset((Op.F, Op.HEAD, Op.B, Op.SAVE, Op.LOAD, Op.DROP, Op.GSAVE, Op.GLOAD, Op.GDROP))
_PER_PART: Final = frozenset((Op.HOLD, Op.RECALL, Op.READ, Op.STEP, Op.WRITE, Op.COMMIT, Op.DISCARD))
_OPTIMIZER: Final = _PER_PART | {Op.NORM}
_NUMBER = "(?:0|[1-9][0-9]*)"
_PART = re.compile(f"[ed]{_NUMBER}")
_EVENT = re.compile(
    f"(?P<layer>{_NUMBER}|pre|suf)?(?P<op>{'|'.join(Op)})(?P<micro_batch>{_NUMBER})?"
    f"(?:\\.(?P<part>{_PART.pattern}))?(?:@(?P<step_offset>-[1-9][0-9]*))?"
)
_HEADER = re.compile(
    "# ds_vertical schedule v1 order=(?P<order>[a-z]+) layers=(?P<layers>[0-9]+)"
    " micro_batches=(?P<micro_batches>[0-9]+) snake=(?P<snake>[01]) window=(?P<window>[0-9]+)"
)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of a schedule: an operation on a layer, on `pre` or `suf`, or (NORM) on none of them.

    `part` is "e<chunk>" (early) or "d<chunk>" (delayed); `step_offset` is 0, or -1 for what the step before left.
    Raises ScheduleError when the fields do not fit the operation.
    """

    op: Op
    layer: Unit | None = None
    micro_batch: int | None = None
    part: str | None = None
    step_offset: int = 0

    def __post_init__(self) -> None:
        problem = _misfit(self)
        if problem:
            raise ScheduleError(f"event {str(self)!r}: {problem}; write {FORM}")

    def __str__(self) -> str:
        layer, micro_batch = ("" if x is None else x for x in (self.layer, self.micro_batch))
        part = "" if self.part is None else f".{self.part}"
        offset = f"@{self.step_offset}" if self.step_offset else ""
        return f"{layer}{self.op}{micro_batch}{part}{offset}"


def _misfit(event: Event) -> str | None:
    """Why the event's fields do not fit its operation; None when they do."""
    op, layer = event.op, event.layer
    if not isinstance(op, Op):
        return f"op must be one of {', '.join(Op)}"
    kind = "none" if layer is None else layer if layer in (PRE, SUF) else "layer"
    if kind == "layer" and not _is_count(layer):
        return f"layer must be a number >= 0, 'pre' or 'suf', got {layer!r}"
    if kind not in _UNITS[op].split():
        return f"{op} goes with {' or '.join(_UNITS[op].split())}, got {'none' if layer is None else layer}"
    if op in _PER_MICRO_BATCH and not _is_count(event.micro_batch):
        return f"{op} needs a micro-batch number >= 0, got {event.micro_batch!r}"
    if op not in _PER_MICRO_BATCH and event.micro_batch is not None:
        return f"{op} takes no micro-batch, got {event.micro_batch!r}"
    if event.part is not None and (op not in _PER_PART or not _PART.fullmatch(event.part)):
        return f"{op} takes {'e<chunk> or d<chunk> as part' if op in _PER_PART else 'no part'}, got {event.part!r}"
    if event.step_offset and (op not in _PER_PART or not _is_count(-event.step_offset)):
        return f"{op} takes {'a step offset <= 0' if op in _PER_PART else 'no step offset'}, got {event.step_offset!r}"
    return None


def parse_event(text: str) -> Event:
    """The event whose str() is `text`; raises ScheduleError naming the text and the expected form."""
    match = _EVENT.fullmatch(text)
    if match is None:
        raise ScheduleError(f"not an event: {text!r}; write {FORM}; ops are {', '.join(Op)}")
    layer, micro_batch = match["layer"], match["micro_batch"]
    return Event(
        Op(match["op"]),
        layer if layer in (None, PRE, SUF) else int(layer),
        None if micro_batch is None else int(micro_batch),
        match["part"],
        int(match["step_offset"] or 0),
    )


def parse_events(text: str) -> tuple[Event, ...]:
    """Events separated by white space; raises ScheduleError at the first word that is none."""
    return tuple(parse_event(word) for word in text.split())


def format_window(events: Sequence[Event], index: int, radius: int = 4) -> str:
    """The events around `index`, one per line, the one at `index` marked; index == len(events) marks the end."""
    rows = [(i, str(event)) for i, event in enumerate(events)] + [(len(events), "(end)")]
    shown = [row for row in rows if abs(row[0] - index) <= radius and (row[0] < len(events) or row[0] == index)]
    return "\n".join(f"{i:>6}  {text}{'  <-- here' if i == index else ''}" for i, text in shown)


def _error(events: Sequence[Event], index: int, problem: str) -> ScheduleError:
    where = f"event {index} ({events[index]})" if index < len(events) else "at the end of the schedule"
    return ScheduleError(f"{where}: {problem}\n{format_window(events, index)}")


@dataclass(frozen=True)
class Schedule:
    """A step (or a forward-only pass) over `num_layers` layers and `num_micro_batches` micro-batches.

    `window` is the number of layers fetched ahead of the one in use. Construction checks the header only; validate()
    checks the events. Raises ScheduleError.
    """

    num_layers: int
    num_micro_batches: int
    events: tuple[Event, ...]
    order: str = "vertical"
    snake: bool = False
    window: int = 1

    def __post_init__(self) -> None:
        if not _is_count(self.window):
            raise ScheduleError(f"window must be a number of layers >= 0, got {self.window!r}")
        for name in ("num_layers", "num_micro_batches"):
            value = getattr(self, name)
            if not _is_count(value) or value == 0:
                raise ScheduleError(f"{name} must be at least 1, got {value!r}")
        if self.order not in ORDERS:
            raise ScheduleError(f"order must be one of {', '.join(ORDERS)}, got {self.order!r}")
        if self.snake and self.order != "vertical":
            raise ScheduleError(f"snake turns the micro-batches at each layer: write order vertical, got {self.order}")

    def to_text(self) -> str:
        """A header line, then about one line per visit of a layer; Schedule.from_text() gives an equal schedule."""
        header = (
            f"# ds_vertical schedule v1 order={self.order} layers={self.num_layers} "
            f"micro_batches={self.num_micro_batches} snake={int(self.snake)} window={self.window}"
        )
        # Long words and hyphens stay whole: "3STEP.d0@-1" is one event.
        wrap = textwrap.TextWrapper(width=120, break_long_words=False, break_on_hyphens=False).wrap
        return "\n".join([header, *(part for line in _visit_lines(self.events) for part in wrap(line))]) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Reads to_text(); further lines that start with # are comments. Raises ScheduleError; does not validate()."""
        header, _, body = text.lstrip().partition("\n")
        match = _HEADER.fullmatch(header.rstrip())
        if match is None:
            form = "# ds_vertical schedule v1 order=vertical layers=3 micro_batches=2 snake=0 window=1"
            raise ScheduleError(f"not a schedule header: {header[:120]!r}; write {form!r}")
        lines = (line for line in body.splitlines() if not line.lstrip().startswith("#"))
        layers, micro_batches, window = (int(match[name]) for name in ("layers", "micro_batches", "window"))
        return cls(layers, micro_batches, parse_events("\n".join(lines)), match["order"], match["snake"] == "1", window)


def _visit_lines(events: Sequence[Event]) -> list[str]:
    """A FETCH opens the line of the work that follows it, a RELEASE closes the line of the work before it."""
    lines: list[list[str]] = []
    ahead: list[str] = []
    current: Unit | str | None = None
    for event in events:
        unit = "optimizer" if event.op in _OPTIMIZER else event.layer
        if event.op is Op.FETCH:
            ahead.append(str(event))
            continue
        if ahead or not lines or (unit != current and event.op is not Op.RELEASE):
            lines.append(ahead)
            ahead, current = [], unit
        lines[-1].append(str(event))
    return [" ".join(line) for line in [*lines, ahead] if line]


class _Walk:
    """What has happened while a list of events is read from left to right; refuses what could not be run."""

    def __init__(self, num_layers: int, num_micro_batches: int) -> None:
        self.num_layers = num_layers
        self.micro_batches = range(num_micro_batches)
        self.index = 0
        self.done: dict[Key, int] = {}
        self.fetched: dict[Unit | None, int] = {}
        self.uses: dict[Unit | None, list[int]] = {}
        self.last_sum: dict[Unit | None, int] = {}
        self.steps: dict[Unit | None, list[int]] = {}

    def need(self, op: Op, layer: Unit | None = None, micro_batch: int | None = None) -> int:
        """The latest such event's index."""
        index = self.done.get((op, layer, micro_batch))
        if index is None:
            raise ScheduleError(f"needs {Event(op, layer, micro_batch)} before it")
        return index

    def use(self, unit: Unit | None) -> int:
        """The index of the FETCH under which the event at hand reads the unit's parameters."""
        if unit not in self.fetched:
            raise ScheduleError(f"needs the parameters of {unit}, which are not fetched here")
        self.uses[unit].append(self.index)
        return self.fetched[unit]

    def add_gradient(self, unit: Unit | None) -> list[int]:
        """The event that last added to the unit's gradient sum, if any: a sum in another order has other bits."""
        before = self.last_sum.get(unit)
        self.last_sum[unit] = self.index
        return [] if before is None else [before]

    def take(self, index: int, event: Event) -> tuple[int, ...]:
        """The indices that `event`, standing at `index`, depends on."""
        rule = None if event.part or event.step_offset else _RULES.get(event.op)
        if rule is None:
            raise ScheduleError("no rule says what it depends on; add one to _RULES in ds_vertical/schedule.py")
        self.index = index
        needs = tuple(sorted(set(rule(self, event))))
        self.done[event.op, event.layer, event.micro_batch] = index
        return needs


def _fetch(walk: _Walk, event: Event) -> list[int]:
    unit = event.layer
    if unit in walk.fetched:
        raise ScheduleError(f"{unit} is already fetched, by event {walk.fetched[unit]}")
    walk.fetched[unit] = walk.index
    walk.uses[unit] = []
    released = walk.done.get((Op.RELEASE, unit, None))
    return [*([] if released is None else [released]), *walk.steps.pop(unit, [])]


def _release(walk: _Walk, event: Event) -> list[int]:
    unit = event.layer
    if unit not in walk.fetched:
        raise ScheduleError(f"{unit} is not fetched here")
    if not walk.uses[unit]:
        raise ScheduleError(f"nothing used {unit} since event {walk.fetched[unit]} fetched it")
    return [walk.fetched.pop(unit), *walk.uses[unit]]


# `pre` stands for all parameters outside the layers: prefix, suffix and what the model uses between two layers. So
# every compute event, on whatever layer, uses it.
def _forward(walk: _Walk, event: Event) -> list[int]:
    layer, micro_batch = event.layer, event.micro_batch
    if layer == PRE:
        return [walk.use(PRE)]
    if layer == SUF:
        return [walk.use(PRE), walk.need(Op.F, walk.num_layers - 1, micro_batch)]
    assert isinstance(layer, int)
    return [walk.use(layer), walk.use(PRE), walk.need(Op.F, layer - 1 if layer else PRE, micro_batch)]


def _head(walk: _Walk, event: Event) -> list[int]:
    return [walk.use(PRE), walk.need(Op.F, walk.num_layers - 1, event.micro_batch), *walk.add_gradient(PRE)]


def _backward(walk: _Walk, event: Event) -> list[int]:
    layer, micro_batch = event.layer, event.micro_batch
    if layer == PRE:
        return [walk.use(PRE), walk.need(Op.B, 0, micro_batch), *walk.add_gradient(PRE)]
    assert isinstance(layer, int)
    last = layer == walk.num_layers - 1
    after = walk.need(Op.HEAD, SUF, micro_batch) if last else walk.need(Op.B, layer + 1, micro_batch)
    return [walk.need(Op.F, layer, micro_batch), after, walk.use(layer), walk.use(PRE), *walk.add_gradient(layer)]


def _reduce(walk: _Walk, event: Event) -> list[int]:
    unit = event.layer
    sums = [walk.need(Op.B, unit, m) for m in walk.micro_batches]
    if unit == PRE:
        sums += [walk.need(Op.HEAD, SUF, m) for m in walk.micro_batches]
    return [walk.use(unit), *sums]


def _norm(walk: _Walk, event: Event) -> list[int]:
    return [walk.need(Op.REDUCE, unit) for unit in (PRE, *range(walk.num_layers))]


def _step(walk: _Walk, event: Event) -> list[int]:
    unit = event.layer
    if unit in walk.fetched:
        raise ScheduleError(f"{unit} is still fetched, by event {walk.fetched[unit]}; release it before its step")
    needs = [walk.need(Op.NORM), walk.need(Op.RELEASE, unit)]
    walk.steps.setdefault(unit, []).append(walk.index)
    return needs


_RULES: Final[dict[Op, Callable[[_Walk, Event], list[int]]]] = {
    Op.FETCH: _fetch,
    Op.RELEASE: _release,
    Op.F: _forward,
    Op.HEAD: _head,
    Op.B: _backward,
    Op.REDUCE: _reduce,
    Op.NORM: _norm,
    Op.STEP: _step,
}


def dependencies(events: Sequence[Event]) -> tuple[tuple[int, ...], ...]:
    """For each event the ascending indices of the earlier events that must be complete before it may start.

    Raises ScheduleError, with the events around, at the first event that lacks something it depends on.
    """
    layers = (event.layer for event in events if isinstance(event.layer, int))
    micro_batches = (event.micro_batch for event in events if event.micro_batch is not None)
    return _dependencies(events, _Walk(1 + max(layers, default=-1), 1 + max(micro_batches, default=-1)))


def _dependencies(events: Sequence[Event], walk: _Walk) -> tuple[tuple[int, ...], ...]:
    found: list[tuple[int, ...]] = []
    for index, event in enumerate(events):
        try:
            found.append(walk.take(index, event))
        except ScheduleError as error:
            raise _error(events, index, str(error)) from None
    return tuple(found)


def validate(schedule: Schedule) -> None:
    """Raises ScheduleError, naming the event and showing those around it, unless the schedule can be run as it stands.

    Checked: everything an event depends on comes before it; each F, HEAD, B, REDUCE, NORM, STEP and the prefix's FETCH
    stands there exactly once; at most window + 1 layers are fetched at a time and none at the end; gradients are summed
    in the order that the header promises.
    """
    _check_once(schedule)
    _dependencies(schedule.events, _Walk(schedule.num_layers, schedule.num_micro_batches))
    _check_complete(schedule)
    _check_window(schedule)
    _check_sums(schedule)


def _once(schedule: Schedule) -> list[Event]:
    """The events that stand exactly once in every schedule of this order and shape, in no particular order."""
    layers, micro_batches = range(schedule.num_layers), range(schedule.num_micro_batches)
    units: tuple[Unit, ...] = (PRE, *layers)
    events = [Event(Op.FETCH, PRE), Event(Op.RELEASE, PRE)]
    events += [Event(Op.F, unit, m) for unit in units for m in micro_batches]
    if schedule.order == "forward":
        return events + [Event(Op.F, SUF, m) for m in micro_batches]
    events += [Event(Op.HEAD, SUF, m) for m in micro_batches]
    events += [Event(Op.B, unit, m) for unit in units for m in micro_batches]
    return [*events, Event(Op.NORM), *(Event(op, unit) for op in (Op.REDUCE, Op.STEP) for unit in units)]


def _check_once(schedule: Schedule) -> None:
    allowed = set(_once(schedule))
    allowed |= {Event(op, layer) for op in (Op.FETCH, Op.RELEASE) for layer in range(schedule.num_layers)}
    seen: Counter[Event] = Counter()
    for index, event in enumerate(schedule.events):
        seen[event] += 1
        if event not in allowed:
            shape = f"{schedule.num_layers} layers, {schedule.num_micro_batches} micro-batches"
            raise _error(schedule.events, index, f"has no place in a schedule of order {schedule.order} with {shape}")
        if seen[event] > 1 and not (event.op in (Op.FETCH, Op.RELEASE) and event.layer != PRE):
            raise _error(schedule.events, index, "stands here a second time; it must happen once")


def _check_complete(schedule: Schedule) -> None:
    present = set(schedule.events)
    missing = [str(event) for event in _once(schedule) if event not in present]
    if missing:
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise _error(schedule.events, len(schedule.events), f"never happened: {' '.join(missing[:8])}{more}")


def _check_window(schedule: Schedule) -> None:
    fetched: set[Unit | None] = set()
    for index, event in enumerate(schedule.events):
        if event.op is Op.RELEASE:
            fetched.discard(event.layer)
        elif event.op is Op.FETCH and event.layer != PRE:
            fetched.add(event.layer)
        if len(fetched) > schedule.window + 1:
            problem = f"is layer number {len(fetched)} fetched at once; window {schedule.window} allows"
            raise _error(schedule.events, index, f"{problem} {schedule.window + 1}: release one before")
    if fetched:
        units = ", ".join(str(unit) for unit in fetched)
        raise _error(schedule.events, len(schedule.events), f"still fetched: {units}; every FETCH needs its RELEASE")


def _check_sums(schedule: Schedule) -> None:
    """[Note: order and timing]: per unit, the events that add to its gradient come in the header's order."""
    if schedule.order == "forward":
        return
    micro_batches = range(schedule.num_micro_batches)
    heads = [Event(Op.HEAD, SUF, m) for m in micro_batches]
    prefix = [Event(Op.B, PRE, m) for m in micro_batches]
    interleaved = [event for pair in zip(heads, prefix, strict=True) for event in pair]
    expected: dict[Unit | None, list[Event]] = {PRE: interleaved if schedule.order == "horizontal" else heads + prefix}
    for layer in range(schedule.num_layers):
        turned = schedule.snake and layer % 2 == 1
        expected[layer] = [Event(Op.B, layer, m) for m in (reversed(micro_batches) if turned else micro_batches)]
    left = {unit: iter(events) for unit, events in expected.items()}
    for index, event in enumerate(schedule.events):
        if event.op in (Op.B, Op.HEAD):
            wanted = next(left[PRE if event.op is Op.HEAD else event.layer])
            if event != wanted:
                told = f"order {schedule.order}{' with snake' if schedule.snake else ''}"
                raise _error(schedule.events, index, f"adds to a gradient sum where {told} wants {wanted}")
