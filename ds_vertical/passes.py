"""Lowering: from a bare compute order to a whole schedule, by pure passes of one policy each.

An order (vertical, horizontal, forward) lists F, HEAD and B. Then place_gradients adds REDUCE, place_parameters adds
FETCH and RELEASE, place_optimizer adds NORM and STEP. build_training() and build_evaluation() compose and validate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ds_vertical.dependencies import validate
from ds_vertical.schedule import PRE, SUF, Event, Op, Schedule, ScheduleError, Unit

Events = tuple[Event, ...]


def _sweep(op: Op, unit: Unit, micro_batches: Sequence[int]) -> Iterator[Event]:
    return (Event(op, unit, m) for m in micro_batches)


def vertical_order(num_layers: int, num_micro_batches: int, snake: bool = False) -> Events:
    """All micro-batches of a layer before the next layer; with `snake`, odd layers run them in reverse, both ways."""
    ascending = range(num_micro_batches)

    def turn(layer: int) -> Sequence[int]:
        return ascending[::-1] if snake and layer % 2 else ascending

    events = [*_sweep(Op.F, PRE, ascending)]
    for layer in range(num_layers):
        events += _sweep(Op.F, layer, turn(layer))
    events += _sweep(Op.HEAD, SUF, ascending)
    for layer in reversed(range(num_layers)):
        events += _sweep(Op.B, layer, turn(layer))
    return (*events, *_sweep(Op.B, PRE, ascending))


def horizontal_order(num_layers: int, num_micro_batches: int) -> Events:
    """One micro-batch after another, each through forward, HEAD and backward: stock's order."""
    events: list[Event] = []
    for m in range(num_micro_batches):
        events += (Event(Op.F, unit, m) for unit in (PRE, *range(num_layers)))
        events.append(Event(Op.HEAD, SUF, m))
        events += (Event(Op.B, unit, m) for unit in (*reversed(range(num_layers)), PRE))
    return tuple(events)


def forward_order(num_layers: int, num_micro_batches: int) -> Events:
    """Evaluation: one sweep, layer-major, no gradients."""
    units: tuple[Unit, ...] = (PRE, *range(num_layers), SUF)
    return tuple(event for unit in units for event in _sweep(Op.F, unit, range(num_micro_batches)))


def place_gradients(events: Sequence[Event]) -> Events:
    """REDUCE of each unit right after its last B."""
    last = {event.layer: index for index, event in enumerate(events) if event.op is Op.B}
    placed: list[Event] = []
    for index, event in enumerate(events):
        placed.append(event)
        if event.op is Op.B and last[event.layer] == index:
            placed.append(Event(Op.REDUCE, event.layer))
    return tuple(placed)


@dataclass
class _Visit:
    """A run of events on one layer; `first` and `last` are indices. Events on `pre` and `suf` do not end a visit."""

    layer: int
    first: int
    last: int


def _visits(events: Sequence[Event]) -> list[_Visit]:
    visits: list[_Visit] = []
    for index, event in enumerate(events):
        if not isinstance(event.layer, int):
            continue
        if not visits or visits[-1].layer != event.layer:
            visits.append(_Visit(event.layer, index, index))
        visits[-1].last = index
    return visits


def place_parameters(events: Sequence[Event], window: int) -> Events:
    """FETCH the layers of the next `window` visits before a visit, RELEASE after it; `pre` is there from end to end.

    A layer that comes back within the next window + 1 visits is kept (at the turn from forward to backward, for one).
    So whatever is fetched while visit i runs belongs to visits i .. i + window: at most window + 1 layers at a time.
    """
    if window < 0:
        raise ScheduleError(f"window must be a number of layers >= 0, got {window}")
    visits = _visits(events)
    before: dict[int, list[Event]] = {}
    after: dict[int, Event] = {}
    fetched: set[int] = set()
    for i, visit in enumerate(visits):
        wanted = [coming.layer for coming in visits[i : i + 1 + window]]
        missing = [layer for layer in dict.fromkeys(wanted) if layer not in fetched]
        before[visit.first] = [Event(Op.FETCH, layer) for layer in missing]
        fetched.update(missing)
        if visit.layer not in (coming.layer for coming in visits[i + 1 : i + 2 + window]):
            after[visit.last] = Event(Op.RELEASE, visit.layer)
            fetched.remove(visit.layer)
    placed = [Event(Op.FETCH, PRE)]
    for index, event in enumerate(events):
        placed += (*before.get(index, ()), event)
        if index in after:
            placed.append(after[index])
    return (*placed, Event(Op.RELEASE, PRE))


def place_optimizer(events: Sequence[Event]) -> Events:
    """All steps after NORM, at the end: `pre`, then the layers in the order in which the next forward needs them.

    This is the one regime that is right whatever the clipping and the loss scale. Another regime (early part, delayed
    part, speculation) is another pass beside this one, with its rules in dependencies.py; it is not a branch in here.
    """
    layers = sorted(event.layer for event in events if event.op is Op.REDUCE and isinstance(event.layer, int))
    return (*events, Event(Op.NORM), *(Event(Op.STEP, unit) for unit in (PRE, *layers)))


def _checked(schedule: Schedule) -> Schedule:
    validate(schedule)
    return schedule


def build_training(
    num_layers: int,
    num_micro_batches: int,
    *,
    order: str = "vertical",
    snake: bool = False,
    window: int = 1,
) -> Schedule:
    """The validated schedule of one training step; raises ScheduleError for settings that do not fit together."""
    if order == "forward":
        raise ScheduleError("order 'forward' has no backward; write 'vertical' or 'horizontal' to train")
    # An empty schedule first: its header check refuses bad settings before any pass sees them.
    Schedule(num_layers, num_micro_batches, (), order, snake, window)
    if order == "vertical":
        compute = vertical_order(num_layers, num_micro_batches, snake)
    else:
        compute = horizontal_order(num_layers, num_micro_batches)
    events = place_optimizer(place_parameters(place_gradients(compute), window))
    return _checked(Schedule(num_layers, num_micro_batches, events, order, snake, window))


def build_evaluation(num_layers: int, num_micro_batches: int, *, window: int = 1) -> Schedule:
    """The validated forward-only schedule; raises ScheduleError."""
    Schedule(num_layers, num_micro_batches, (), "forward", False, window)
    events = place_parameters(forward_order(num_layers, num_micro_batches), window)
    return _checked(Schedule(num_layers, num_micro_batches, events, "forward", False, window))
