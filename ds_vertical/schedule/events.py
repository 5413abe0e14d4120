"""The schedule as a value: events and their text form. What each event waits for is in `dependencies`."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import Final

from ds_vertical.errors import ScheduleError
from ds_vertical.types import PRE, SUF, Unit

ORDERS: Final = ("vertical", "horizontal", "forward")
FORM: Final = (
    "[LAYER|pre|suf]OP[MICRO_BATCH][.eN|.dN|.cN][@STEPS]: 3FETCH, preF0, sufHEAD0, NORM, 3STEP.d0@-1, 0FETCH@+1, 3F0.c1"
)

EARLY: Final = "e0"  # the early parts of a unit, together
DELAYED: Final = "d0"
EVERYTHING: Final = "all"  # of a unit; events that are about it have no part
MAX_SAVES: Final = 3  # of kept values under way at a time: one fills its host buffer while two are written
MAX_STEPS: Final = 2  # units whose steps may be under way at a time: each holds a host buffer for its new parameters
LEAD: Final = 2  # layers by which a delayed step is ahead of its use

Key = tuple["Op", "Unit | None", "int | None"]
Cell = tuple[int, int]  # a layer and a micro-batch
Needs = Sequence[Sequence[int]]  # per event of a schedule the events that it waits for


class Op(StrEnum):
    """What an event does; the value is its name in the text form."""

    FETCH = "FETCH"
    SPREAD = "SPREAD"
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
    KSAVE = "KSAVE"
    KLOAD = "KLOAD"
    KDROP = "KDROP"
    REDUCE = "REDUCE"
    CROSS = "CROSS"
    HOLD = "HOLD"
    NORM = "NORM"
    STEP = "STEP"
    COMMIT = "COMMIT"
    MAKE = "MAKE"


# Op -> the units it may name ("layer" is any layer number, "none" is no unit at all).
_UNITS: Final[dict[Op, str]] = {
    **dict.fromkeys((Op.FETCH, Op.SPREAD, Op.RELEASE, Op.REDUCE, Op.CROSS), "layer pre suf"),
    Op.B: "layer pre",
    **dict.fromkeys((Op.F, Op.SAVE, Op.LOAD, Op.DROP, Op.GSAVE, Op.GLOAD, Op.GDROP), "layer pre suf"),
    **dict.fromkeys((Op.KSAVE, Op.KLOAD, Op.KDROP), "layer"),
    **dict.fromkeys((Op.HOLD, Op.STEP, Op.MAKE), "layer pre suf"),
    Op.COMMIT: "layer pre none",
    Op.HEAD: "suf",
    Op.NORM: "none",
}
_KINDS: Final = {op: frozenset(kinds.split()) for op, kinds in _UNITS.items()}
_MOVES: Final = frozenset((Op.SAVE, Op.LOAD, Op.DROP, Op.GSAVE, Op.GLOAD, Op.GDROP, Op.KSAVE, Op.KLOAD, Op.KDROP))
_PER_MICRO_BATCH: Final = _MOVES | {Op.F, Op.HEAD, Op.B}
_PER_PART: Final = frozenset((Op.HOLD, Op.STEP, Op.COMMIT))
_OPTIMIZER: Final = _PER_PART | {Op.NORM, Op.MAKE}
# Op -> the sign of the step offsets it may have, and their name; the others take none.
_OFFSETS: Final[dict[Op, tuple[int, str]]] = {
    **dict.fromkeys((*_PER_PART, Op.NORM), (-1, "a step offset <= 0")),
    **dict.fromkeys((Op.FETCH, Op.SPREAD, Op.CROSS), (1, "a step offset >= 0")),
}
_ASIDE: Final = _MOVES | {Op.RELEASE, Op.HEAD}
_NUMBER = "(?:0|[1-9][0-9]*)"
_PART = re.compile(f"[ed]{_NUMBER}")
_CALL = re.compile("c[1-9][0-9]*")
# Op -> the form of the parts that it may have, and their name; the others take none.
_PARTS_OF: Final[dict[Op, tuple[re.Pattern[str], str]]] = {
    **dict.fromkeys(_PER_PART, (_PART, "e<chunk> or d<chunk> as part")),
    Op.F: (_CALL, "c<call>, from c1 on, as part"),
}
_EVENT = re.compile(
    f"(?P<layer>{_NUMBER}|pre|suf)?(?P<op>{'|'.join(Op)})(?P<micro_batch>{_NUMBER})?"
    f"(?:\\.(?P<part>{_PART.pattern}|{_CALL.pattern}))?(?:@(?P<step_offset>[+-][1-9][0-9]*))?"
)
_HEADER = re.compile(
    "# ds_vertical schedule v1 order=(?P<order>[a-z]+) layers=(?P<layers>[0-9]+)"
    " micro_batches=(?P<micro_batches>[0-9]+) snake=(?P<snake>[01]) window=(?P<window>[0-9]+) delayed=(?P<delayed>[01])"
    " early=(?P<early>[01])(?:(?: moved=(?P<moved>[0-9,]+))?(?: kept=(?P<kept>[0-9,-]+))? ahead=(?P<ahead>[0-9]+))?"
    "(?: calls=(?P<calls>[0-9]+))?(?P<suf> suf=1)?(?: apart=(?P<apart>pre|suf|pre,suf))?"
    "(?: levels=(?P<levels>none|[0-9a-z,-]+))?(?: standing=(?P<standing>none|[0-9a-z,-]+))?"
)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of a schedule: an operation on a layer, on `pre` or `suf`, or (NORM) on none of them.

    `part` is "e<chunk>" (early) or "d<chunk>" (delayed), of an F "c<call>": a further call of the model by the micro-batch's
    code, its first one being call 0, without a part; `step_offset` is 0, -1 for what the step before left, or +1 for
    what the next step fetches or waits for. Raises ScheduleError when the fields do not fit the operation.
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

    @property
    def ahead(self) -> bool:
        """Whether it is issued for the next step, whose schedule waits for it: what that step fetches, a reduction that ends
        there, and a delayed part that is stepped in its own step."""
        delayed = self.op is Op.STEP and self.part is not None and self.part.startswith("d")
        return self.step_offset > 0 or (delayed and self.step_offset == 0)

    @property
    def call(self) -> int:
        """Of an F: which of the micro-batch's calls of the model it belongs to."""
        return int(self.part[1:]) if self.op is Op.F and self.part is not None else 0

    def __str__(self) -> str:
        layer, micro_batch = ("" if x is None else x for x in (self.layer, self.micro_batch))
        part = "" if self.part is None else f".{self.part}"
        offset = f"@{self.step_offset:+d}" if self.step_offset else ""
        return f"{layer}{self.op}{micro_batch}{part}{offset}"


def _misfit(event: Event) -> str | None:
    """Why the event's fields do not fit its operation; None when they do."""
    op, layer = event.op, event.layer
    if not isinstance(op, Op):
        return f"op must be one of {', '.join(Op)}"
    kind = "none" if layer is None else layer if layer in (PRE, SUF) else "layer"
    if kind == "layer" and not _is_count(layer):
        return f"layer must be a number >= 0, 'pre' or 'suf', got {layer!r}"
    if kind not in _KINDS[op]:
        return f"{op} goes with {' or '.join(_UNITS[op].split())}, got {'none' if layer is None else layer}"
    if op in _PER_MICRO_BATCH and not _is_count(event.micro_batch):
        return f"{op} needs a micro-batch number >= 0, got {event.micro_batch!r}"
    if op not in _PER_MICRO_BATCH and event.micro_batch is not None:
        return f"{op} takes no micro-batch, got {event.micro_batch!r}"
    if event.part is not None:
        form, parts = _PARTS_OF.get(op, (None, "no part")) if (op, layer) != (Op.F, SUF) else (None, "no part")
        if form is None or not form.fullmatch(event.part):
            return f"{op} takes {parts}, got {event.part!r}"
    if event.step_offset:
        sign, offsets = _OFFSETS.get(op, (0, "no step offset"))
        if not (sign and _is_count(sign * event.step_offset)):
            return f"{op} takes {offsets}, got {event.step_offset!r}"
    return None


def part_of(call: int) -> str | None:
    """The part of an F that belongs to one of its micro-batch's calls of the model."""
    return f"c{call}" if call else None


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


def error_at(events: Sequence[Event], index: int, problem: str) -> ScheduleError:
    """A ScheduleError that names an event and shows the events around it."""
    where = f"event {index} ({events[index]})" if index < len(events) else "at the end of the schedule"
    return ScheduleError(f"{where}: {problem}\n{format_window(events, index)}")


def coming_steps(events: Sequence[Event]) -> dict[Event, Event]:
    """Which STEP comes next: told by the STEP before it as that is issued; where there is none, by the first HEAD.

    Across NORM nothing is told: it decides what is stepped.
    """
    coming: dict[Event, Event] = {}
    before: Event | None = None
    for event in events:
        if event.op is Op.NORM:
            before = None
        elif event.op is Op.HEAD and before is None:
            before = event
        elif event.op is Op.STEP:
            if before is not None:
                coming[before] = event
            before = event
    return coming


def teller_of_rest(events: Sequence[Event]) -> Event | None:
    """The event that tells all steps behind NORM, for what reads their state before it is decided what they do: the last early
    STEP; where there is none, the first HEAD. None where there is no NORM."""
    found: Event | None = None
    for event in events:
        if event == Event(Op.NORM):
            return found
        if (event.op is Op.HEAD and found is None) or (event.op is Op.STEP and event.step_offset == 0):
            found = event
    return None


@dataclass(frozen=True)
class Outside:
    """The parameters outside the layers, as a schedule moves them.

    `has_suf`: those that the code behind the last layer alone uses are a unit of their own, SUF; the others are PRE. `apart`:
    the units of which no other code uses anything than the prefix (PRE) or the suffix (SUF): they are fetched for it and
    released behind it. The others are there from end to end, since the glue between two layers may use them. Raises
    ScheduleError.
    """

    has_suf: bool = False
    apart: tuple[Unit, ...] = ()

    def __post_init__(self) -> None:
        if any(unit not in self.units for unit in self.apart):
            raise ScheduleError(f"apart must name units outside the layers, got {self.apart}: write some of {self.units}")

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units outside the layers."""
        return (PRE, SUF) if self.has_suf else (PRE,)

    @property
    def staying(self) -> tuple[Unit, ...]:
        """The units that are there from end to end."""
        return tuple(unit for unit in self.units if unit not in self.apart)

    @property
    def added_by_head(self) -> tuple[Unit, ...]:
        """The units to whose gradient sums a HEAD adds: what stays may be used in the suffix, too."""
        return self.units[1:] if PRE in self.apart else self.units

    def around(self, layers: Iterable[int]) -> tuple[Unit, ...]:
        """All units, in the order in which a forward needs them."""
        ahead = self.units if SUF in self.staying else (PRE,)
        return (*ahead, *layers, *(unit for unit in self.units if unit not in ahead))

    def to_text(self) -> str:
        """The fields of a schedule's header; none where all is one unit that stays."""
        apart = f" apart={','.join(map(str, self.apart))}" if self.apart else ""
        return f"{' suf=1' if self.has_suf else ''}{apart}"


@dataclass(frozen=True)
class Schedule:
    """A step (or a forward-only pass) over `num_layers` layers and `num_micro_batches` micro-batches.

    `window` is the number of layers fetched ahead of the one in use; `delayed` says that optimizer steps of this step are left
    to the next schedule, `early` that some are taken during the backward. `moved`: the micro-batches whose layer inputs and
    gradients leave memory between their uses, loaded again `look_ahead` uses ahead; `kept`: the layers and micro-batches of
    which what the forward keeps for the backward does. `calls`: how often each micro-batch's code calls the model; each call
    is a forward through all layers, and one backward is of all calls. `outside`: the parameters outside the layers. `copied`:
    with collectives over levels, the units whose copy each node keeps from one use to the next; None: there is one level.
    `standing`: of those, the units whose copy is there when the step begins; None: no copy outlives a step.
    Construction checks the header only; validate() checks the events. Raises ScheduleError."""

    num_layers: int
    num_micro_batches: int
    events: tuple[Event, ...]
    order: str = "vertical"
    snake: bool = False
    window: int = 1
    delayed: bool = False
    early: bool = False
    moved: tuple[int, ...] = ()
    look_ahead: int = 0
    kept: tuple[Cell, ...] = ()
    calls: int = 1
    outside: Outside = Outside()
    copied: tuple[Unit, ...] | None = None
    standing: tuple[Unit, ...] | None = None

    def __post_init__(self) -> None:
        if any(not _is_count(m) or m >= self.num_micro_batches for m in self.moved) or not _is_count(self.look_ahead):
            raise ScheduleError(f"moved must name micro-batches, look_ahead be >= 0, got {self.moved} and {self.look_ahead!r}")
        if any(m >= self.num_micro_batches or layer >= self.num_layers for layer, m in self.kept):
            raise ScheduleError(f"kept must name layers and micro-batches of the schedule, got {self.kept}")
        if not _is_count(self.window):
            raise ScheduleError(f"window must be a number of layers >= 0, got {self.window!r}")
        for name in ("num_layers", "num_micro_batches", "calls"):
            value = getattr(self, name)
            if not _is_count(value) or value == 0:
                raise ScheduleError(f"{name} must be at least 1, got {value!r}")
        every = self.outside.around(range(self.num_layers))
        if strangers := [unit for unit in self.copied or () if unit not in every]:
            raise ScheduleError(f"copied must name units of the schedule, got {strangers[0]}: write some of {every}")
        if strangers := [unit for unit in self.standing or () if unit not in (self.copied or ())]:
            raise ScheduleError(f"standing must name units of copied, got {strangers[0]}: write some of {self.copied}")
        if self.order not in ORDERS:
            raise ScheduleError(f"order must be one of {', '.join(ORDERS)}, got {self.order!r}")
        if self.snake and self.order != "vertical":
            raise ScheduleError(f"snake turns the micro-batches at each layer: write order vertical, got {self.order}")
        if self.moved and self.calls > 1:
            raise ScheduleError(f"moved names micro-batches of one call each, got {self.calls} calls: write moved ()")
        if self.outside.apart and (self.order != "vertical" or self.calls > 1):
            raise ScheduleError(
                f"apart={','.join(map(str, self.outside.apart))} needs order vertical and one call, got order {self.order} with"
                f" {self.calls} call(s): leave apart out"
            )

    @cached_property
    def coming(self) -> dict[Event, Event]:
        """`coming_steps` of the events."""
        return coming_steps(self.events)

    @cached_property
    def teller_of_rest(self) -> Event | None:
        """`teller_of_rest` of the events."""
        return teller_of_rest(self.events)

    @cached_property
    def fused(self) -> frozenset[Event]:
        """The layers' F whose own B is the next F or B of any layer, whatever stands between on `pre` and `suf`.

        Such a forward keeps its autograd graph for that backward, one at a time; every other backward recomputes.
        """
        work = [event for event in self.events if event.op in (Op.F, Op.B) and isinstance(event.layer, int)]
        return frozenset(
            before
            for before, event in pairwise(work)
            if (before.op, event.op) == (Op.F, Op.B) and (before.layer, before.micro_batch) == (event.layer, event.micro_batch)
        )

    @cached_property
    def next_backward(self) -> dict[Event, Unit]:
        """By REDUCE, the unit of the next B behind it. The REDUCEs behind the last B have none."""
        found: dict[Event, Unit] = {}
        unit: Unit | None = None
        for event in reversed(self.events):
            if event.op is Op.B:
                unit = event.layer
            elif event.op is Op.REDUCE and unit is not None:
                found[event] = unit
        return found

    def to_text(self) -> str:
        """A header line, then about one line per visit of a layer; Schedule.from_text() gives an equal schedule."""
        header = (
            f"# ds_vertical schedule v1 order={self.order} layers={self.num_layers} "
            f"micro_batches={self.num_micro_batches} snake={int(self.snake)} window={self.window}"
            f" delayed={int(self.delayed)} early={int(self.early)}"
        )
        if self.moved:
            header += f" moved={','.join(map(str, self.moved))}"
        if self.kept:
            header += f" kept={_cells_text(self.kept, self.num_micro_batches)}"
        if self.moved or self.kept:
            header += f" ahead={self.look_ahead}"
        if self.calls > 1:
            header += f" calls={self.calls}"
        header += self.outside.to_text()
        header += "" if self.copied is None else f" levels={_units_text(self.copied)}"
        header += "" if self.standing is None else f" standing={_units_text(self.standing)}"
        # Long words and hyphens stay whole: "3STEP.d0@-1" is one event.
        wrap = textwrap.TextWrapper(width=120, break_long_words=False, break_on_hyphens=False).wrap
        return "\n".join([header, *(part for line in _visit_lines(self.events) for part in wrap(line))]) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Reads to_text(); further lines that start with # are comments. Raises ScheduleError; does not validate()."""
        header, _, body = text.lstrip().partition("\n")
        match = _HEADER.fullmatch(header.rstrip())
        if match is None:
            form = "# ds_vertical schedule v1 order=vertical layers=3 micro_batches=2 snake=0 window=1 delayed=0 early=0"
            raise ScheduleError(f"not a schedule header: {header[:120]!r}; write {form!r}")
        lines = (line for line in body.splitlines() if not line.lstrip().startswith("#"))
        layers, micro_batches, window = (int(match[name]) for name in ("layers", "micro_batches", "window"))
        snake, delayed, early = (match[name] == "1" for name in ("snake", "delayed", "early"))
        moved = tuple(int(m) for m in (match["moved"] or "").split(",") if m)
        kept = _cells(match["kept"] or "", micro_batches)
        moves = (moved, int(match["ahead"] or 0), kept)
        apart = match["apart"]
        outside = Outside(bool(match["suf"]), tuple(unit for unit in (PRE, SUF) if apart and unit in apart))
        calls = int(match["calls"] or 1)
        copied, standing = (None if match[key] is None else _units(match[key]) for key in ("levels", "standing"))
        given = (match["order"], snake, window, delayed, early, *moves, calls, outside, copied, standing)
        return cls(layers, micro_batches, parse_events("\n".join(lines)), *given)


def _cells_text(cells: Sequence[Cell], num_micro_batches: int) -> str:
    """Cells by their numbers, counted layer by layer, such as 0-7,9: a run of numbers by its two ends."""
    runs: list[list[int]] = []
    for number in sorted(layer * num_micro_batches + m for layer, m in cells):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _cells(text: str, num_micro_batches: int) -> tuple[Cell, ...]:
    """The cells of `_cells_text`."""
    found: list[Cell] = []
    for run in filter(None, text.split(",")):
        first, _, last = run.partition("-")
        found += (divmod(number, num_micro_batches) for number in range(int(first), int(last or first) + 1))
    return tuple(found)


def _units_text(units: Sequence[Unit]) -> str:
    """Units such as pre,0-7: layers as `_cells_text` has cells."""
    layers = _cells_text([(unit, 0) for unit in units if isinstance(unit, int)], 1)
    return ",".join([*(str(unit) for unit in units if not isinstance(unit, int)), *filter(None, [layers])]) or "none"


def _units(text: str) -> tuple[Unit, ...]:
    """The units of `_units_text`."""
    words = [word for word in text.split(",") if word != "none"]
    layers = _cells(",".join(word for word in words if word not in (PRE, SUF)), 1)
    return (*(unit for unit in (PRE, SUF) if unit in words), *(layer for layer, _ in layers))


def _is_aside(event: Event) -> bool:
    return event.op in _ASIDE or (event.op in (Op.REDUCE, Op.CROSS) and event.layer == SUF)


def _visit_lines(events: Sequence[Event]) -> list[str]:
    """A FETCH opens the line of the work that follows it, a SPREAD does likewise; a RELEASE, a HEAD with its REDUCE, and moves
    stand on the line of the work before."""
    lines: list[list[str]] = []
    ahead: list[str] = []
    current: Unit | str | None = None
    for event in events:
        unit = "optimizer" if event.op in _OPTIMIZER else event.layer
        if event.op in (Op.FETCH, Op.SPREAD):
            ahead.append(str(event))
            continue
        if ahead or not lines or (unit != current and not _is_aside(event)):
            lines.append(ahead)
            ahead, current = [], unit
        lines[-1].append(str(event))
    return [" ".join(line) for line in [*lines, ahead] if line]
