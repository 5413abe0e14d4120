"""Lowering: from a bare compute order to a whole schedule, by pure passes of one policy each.

An order (vertical, horizontal, forward) lists F, HEAD and B. Then place_gradients adds REDUCE, place_parameters adds FETCH and
RELEASE, place_optimizer adds NORM and STEP, place_behind makes way for reductions beside the next backward, place_activations
(`activations`) adds what leaves memory. build_training() and build_evaluation() compose and validate; an evaluation keeps what
passes between its layers in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ds_vertical.errors import ScheduleError
from ds_vertical.schedule.activations import LOOK_AHEAD, place_activations
from ds_vertical.schedule.dependencies import validate
from ds_vertical.schedule.events import DELAYED, EARLY, EVERYTHING, LEAD, Cell, Event, Needs, Op, Outside, Schedule, part_of
from ds_vertical.schedule.halves import place_leaving, place_making
from ds_vertical.schedule.levels import in_order, place_levels, place_standing, units_to_copy
from ds_vertical.types import PRE, SUF, Unit

Events = tuple[Event, ...]
_ONE = Outside()


def _sweep(op: Op, unit: Unit, micro_batches: Sequence[int], call: int = 0) -> Iterator[Event]:
    return (Event(op, unit, m, part_of(call)) for m in micro_batches)


def vertical_order(num_layers: int, num_micro_batches: int, snake: bool = False, calls: int = 1) -> Events:
    """All micro-batches of a layer before the next layer; the last layer's F, HEAD and B per micro-batch (Schedule.fused).

    Where each micro-batch calls the model several times, all of them make their first call, then all the second one, and so on;
    one backward is of all calls.

    With `snake`, every second layer, counted back from the last, runs the micro-batches in reverse, both ways: so the last
    one ascends, as HEAD's gradient sums have to.
    """
    ascending = range(num_micro_batches)
    last = num_layers - 1

    def turn(layer: int) -> Sequence[int]:
        return ascending[::-1] if snake and (last - layer) % 2 else ascending

    events: list[Event] = []
    for call in range(calls):
        events += _sweep(Op.F, PRE, ascending, call)
        for layer in range(last if call == calls - 1 else num_layers):
            events += _sweep(Op.F, layer, turn(layer), call)
    for m in turn(last):
        events += (Event(Op.F, last, m, part_of(calls - 1)), Event(Op.HEAD, SUF, m), Event(Op.B, last, m))
    for layer in reversed(range(last)):
        events += _sweep(Op.B, layer, turn(layer))
    return (*events, *_sweep(Op.B, PRE, ascending))


def horizontal_order(num_layers: int, num_micro_batches: int, calls: int = 1) -> Events:
    """One micro-batch after another, each through its forwards, HEAD and backward: stock's order."""
    events: list[Event] = []
    for m in range(num_micro_batches):
        events += (Event(Op.F, unit, m, part_of(call)) for call in range(calls) for unit in (PRE, *range(num_layers)))
        events.append(Event(Op.HEAD, SUF, m))
        events += (Event(Op.B, unit, m) for unit in (*reversed(range(num_layers)), PRE))
    return tuple(events)


def forward_order(num_layers: int, num_micro_batches: int, calls: int = 1) -> Events:
    """Evaluation: one sweep for each call of the model, layer-major, no gradients."""
    units: tuple[Unit, ...] = (PRE, *range(num_layers))
    micro_batches = range(num_micro_batches)
    sweeps = (event for call in range(calls) for unit in units for event in _sweep(Op.F, unit, micro_batches, call))
    return (*sweeps, *_sweep(Op.F, SUF, micro_batches))


def place_gradients(events: Sequence[Event], outside: Outside = _ONE) -> Events:
    """REDUCE of each unit right after its last B; of SUF after the last HEAD where it is apart, else with `pre`."""
    makes = (Op.B, Op.HEAD) if SUF in outside.apart else (Op.B,)
    last = {event.layer: index for index, event in enumerate(events) if event.op in makes}
    beside = [Event(Op.REDUCE, SUF)] if SUF in outside.staying else []
    placed: list[Event] = []
    for index, event in enumerate(events):
        placed.append(event)
        if event.op in makes and last[event.layer] == index:
            placed += (Event(Op.REDUCE, event.layer), *(beside if event.layer == PRE else ()))
    return tuple(placed)


def place_holding(events: Sequence[Event], hold: str) -> Events:
    """HOLD what of a unit's gradient waits on SSD as soon as it is reduced; its step reads it there. `hold`: EVERYTHING, or
    DELAYED where early parts do not wait."""
    part = None if hold == EVERYTHING else hold
    placed: list[Event] = []
    for event in events:
        placed += (event, Event(Op.HOLD, event.layer, part=part)) if event.op is Op.REDUCE else (event,)
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


def place_parameters(
    events: Sequence[Event], window: int, handed_over: Collection[Unit] = (), outside: Outside = _ONE
) -> Events:
    """FETCH the layers of the next `window` visits before a visit, RELEASE after it; units outside the layers are there from
    end to end, unless `outside` has them apart (`_place_apart`).

    A layer that comes back within the next window + 1 visits is kept (at the turn from forward to backward, for one).
    So whatever is fetched while visit i runs belongs to visits i .. i + window: at most window + 1 layers at a time.
    A layer that is `handed_over` comes to its first visit from its optimizer step, in memory: there is nothing to read ahead.
    """
    if window < 0:
        raise ScheduleError(f"window must be a number of layers >= 0, got {window}")
    visits = _visits(events)
    before: dict[int, list[Event]] = {}
    after: dict[int, Event] = {}
    fetched: set[int] = set()
    in_memory = set(handed_over)
    for i, visit in enumerate(visits):
        in_memory.discard(visit.layer)
        wanted = [coming.layer for coming in visits[i : i + 1 + window] if coming.layer not in in_memory]
        missing = [layer for layer in dict.fromkeys(wanted) if layer not in fetched]
        before[visit.first] = [Event(Op.FETCH, layer) for layer in missing]
        fetched.update(missing)
        if visit.layer not in (coming.layer for coming in visits[i + 1 : i + 2 + window]):
            after[visit.last] = Event(Op.RELEASE, visit.layer)
            fetched.remove(visit.layer)
    if SUF in outside.apart:
        head = next(i for i, visit in enumerate(visits) if any(e.op is Op.HEAD for e in events[visit.first : visit.last + 1]))
        first = visits[head if SUF in handed_over else max(0, head - window)].first
        before.setdefault(first, []).append(Event(Op.FETCH, SUF))
    placed = [Event(Op.FETCH, unit) for unit in outside.staying]
    for index, event in enumerate(events):
        placed += (*before.get(index, ()), event)
        if index in after:
            placed.append(after[index])
    return _place_apart((*placed, *(Event(Op.RELEASE, unit) for unit in outside.staying)), outside)


def _place_apart(events: Events, outside: Outside) -> Events:
    """Where PRE is apart, FETCH it ahead of the prefixes' forwards and of their backwards, and RELEASE it behind each; where
    SUF is, RELEASE it once its gradient is complete. FETCH of SUF stands where layers are read ahead (`place_parameters`)."""
    first = {event.op: index for index, event in reversed(list(enumerate(events))) if event.layer == PRE}
    last = {event.op: index for index, event in enumerate(events) if event.layer == PRE}
    before, after = ({first[Op.F], first[Op.B]}, {last[Op.F], last[Op.REDUCE]}) if PRE in outside.apart else (set(), set())
    placed: list[Event] = []
    for index, event in enumerate(events):
        placed += (Event(Op.FETCH, PRE), event) if index in before else (event,)
        if index in after:
            placed.append(Event(Op.RELEASE, PRE))
        elif SUF in outside.apart and (event.op, event.layer) == (Op.REDUCE, SUF):
            placed.append(Event(Op.RELEASE, SUF))
    return tuple(placed)


def place_optimizer(events: Sequence[Event], delayed: bool, outside: Outside = _ONE) -> Events:
    """NORM at the end and, unless the steps are delayed into the next forward, all steps after it: the units in the order in
    which the next forward needs them, `pre` first.

    Right whatever the clipping and the loss scale. Another regime (early part, speculation) is another pass beside this
    one, with its rules in dependencies.py; it is not a branch in here.
    """
    layers = sorted(event.layer for event in events if event.op is Op.REDUCE and isinstance(event.layer, int))
    steps = () if delayed else (Event(Op.STEP, unit) for unit in outside.around(layers))
    return (*events, Event(Op.NORM), *steps)


def place_early(events: Sequence[Event]) -> Events:
    """STEP the early parts of a unit as soon as its gradient is complete and its parameters are released; COMMIT once
    the norm is known."""
    reduced: set[Unit | None] = set()
    placed: list[Event] = []
    for event in events:
        placed.append(event)
        if event.op is Op.REDUCE:
            reduced.add(event.layer)
        elif event.op is Op.RELEASE and event.layer in reduced:
            placed.append(Event(Op.STEP, event.layer, part=EARLY))
        elif event.op is Op.NORM:
            placed.append(Event(Op.COMMIT))
    return tuple(placed)


def place_behind(events: Sequence[Event]) -> Events:
    """What waits for a unit's reduction (HOLD, the early STEP) comes behind the next unit's backward, right ahead of its
    REDUCE: so the reduction is under way in that backward. What waits for the last unit's comes ahead of NORM."""
    placed: list[Event] = []
    waiting: list[Event] = []
    for event in events:
        if event.op is Op.HOLD or (event.op is Op.STEP and event.part == EARLY):
            waiting.append(event)
        elif event.op in (Op.REDUCE, Op.NORM):
            placed += (*waiting, event)
            waiting.clear()
        else:
            placed.append(event)
    return (*placed, *waiting)


def place_delayed(events: Sequence[Event], due: Collection[Unit], lead: int, outside: Outside = _ONE) -> Events:
    """STEP what the step before left, `lead` visits ahead of the visit that needs it; `pre` first of all, and what else stays
    outside the layers. SUF, where it is apart, goes behind the last layer, whose visit needs it.

    At most `lead` layers besides the one about to be fetched are stepped and not yet fetched.
    """
    if lead < 1:
        raise ScheduleError(f"lead must be a number of layers >= 1, got {lead}")
    order = list(dict.fromkeys(visit.layer for visit in _visits(events)))
    starts = {layer: min(i for i, e in enumerate(events) if e.layer == layer) for layer in order}
    behind: tuple[Unit, ...] = (SUF,) if SUF in outside.apart else ()
    ahead: tuple[Unit, ...] = tuple(unit for unit in outside.units if unit not in behind)
    before: dict[int, list[Event]] = {0: [Event(Op.STEP, unit, part=DELAYED, step_offset=-1) for unit in ahead if unit in due]}
    for position, layer in enumerate(order):
        index = 0 if position < lead else starts[order[position - lead]]
        units: list[Unit] = [layer, *behind] if layer == max(order) else [layer]
        steps = [Event(Op.STEP, unit, part=DELAYED, step_offset=-1) for unit in units if unit in due]
        before[index] = before.get(index, []) + steps
    placed: list[Event] = []
    for index, event in enumerate(events):
        placed += (*before.get(index, ()), event)
    return tuple(placed)


def place_ahead(events: Sequence[Event], window: int, lead: int, delayed: bool, outside: Outside = _ONE) -> Events:
    """At the end, issue what the next forward waits for first, so that it is under way while nobody trains: the delayed steps
    of `pre` and `lead` layers, the reads of `pre` and `window` layers. What else stays outside the layers goes with `pre`.

    Of what is `delayed` only those stepped here are read: another's file is about to change.
    """
    layers = sorted(event.layer for event in events if event.op is Op.REDUCE and isinstance(event.layer, int))
    first = (PRE,) if SUF in outside.apart else outside.units
    stepped: tuple[Unit, ...] = (*first, *layers[:lead]) if delayed else ()
    read = (*first, *layers[: min(window, lead) if delayed else window])
    steps = (Event(Op.STEP, unit, part=DELAYED) for unit in stepped)
    return (*events, *steps, *(Event(Op.FETCH, unit, step_offset=1) for unit in read))


def _checked(schedule: Schedule) -> Schedule:
    validate(schedule)
    return schedule


@dataclass(frozen=True)
class TrainingStep:
    """What a training step is to be; `build_training` makes its schedule.

    `early`: early parts are stepped during the backward. `delayed`: what is left of this step goes to the next schedule.
    `due`: the units of which the step before left something to this one. `lead`: how many layers ahead of its use a delayed
    step is issued. `ahead`: what the next step needs first is issued at the end. `hold`: what of the gradients may have to
    wait on SSD, see `place_holding`. `moved`: the micro-batches whose layer inputs and gradients leave memory; `kept`: the
    layers and micro-batches of which what the forward keeps for the backward does. `reduces_beside`: a unit's reduction is
    under way in the next one's backward. `copy_share`: of the units that are fetched again, the share whose copy each node
    keeps (`levels`, [Note: levels]); None: there is one level. `standing`: the units whose copy is there at the start; None: no
    copy outlives the step. `halves`: it is one of the two halves of a step, of the units
    `made` values for the next half are made (`halves`). `leaves`: it leaves its last gradients, and its norm, to the next one.
    `left`: so has the one before, gradients of so many layers; None: it has not. `order`, `snake`, `window`, `calls` and
    `outside`: as in `Schedule`."""

    num_layers: int
    num_micro_batches: int
    order: str = "vertical"
    snake: bool = False
    window: int = 1
    delayed: bool = False
    due: Collection[Unit] = frozenset()
    lead: int = LEAD
    early: bool = False
    ahead: bool = False
    hold: str | None = None
    moved: tuple[int, ...] = ()
    kept: tuple[Cell, ...] = ()
    calls: int = 1
    outside: Outside = Outside()
    reduces_beside: bool = False
    copy_share: float | None = None
    standing: Collection[Unit] | None = None
    halves: bool = False
    made: frozenset[Unit] = frozenset()
    leaves: bool = False
    left: float | None = None


def build_training(step: TrainingStep) -> Schedule:
    """The validated schedule of one training step; raises ScheduleError for settings that do not fit together."""
    return training_with_needs(step)[0]


@lru_cache(maxsize=64)
def training_with_needs(step: TrainingStep) -> tuple[Schedule, Needs]:
    """As `build_training`, with what `dependencies` has of the schedule."""
    if step.order == "forward":
        raise ScheduleError("order 'forward' has no backward; write 'vertical' or 'horizontal' to train")
    # An empty schedule first: its header check refuses bad settings before any pass sees them.
    look_ahead = LOOK_AHEAD if step.moved or step.kept else 0
    flags = (step.order, step.snake, step.window, step.delayed, step.early, step.moved, look_ahead, step.kept, step.calls)
    empty = Schedule(step.num_layers, step.num_micro_batches, (), *flags, step.outside)
    if step.order == "vertical":
        compute = vertical_order(step.num_layers, step.num_micro_batches, step.snake, step.calls)
    else:
        compute = horizontal_order(step.num_layers, step.num_micro_batches, step.calls)
    outside = step.outside
    # Over levels a unit that comes from its optimizer step is fetched ahead, too: its way over the link takes time. The step is
    # then a layer less ahead of the FETCH, so that no more layers are in memory.
    crosses = step.copy_share is not None and step.window > 0
    handed_over, lead = (frozenset[Unit](), 1) if crosses else (step.due, step.lead)
    events = place_parameters(place_gradients(compute, outside), step.window, handed_over, outside)
    events = place_optimizer(events, step.delayed, outside)
    events = place_holding(events, step.hold) if step.hold else events
    events = place_early(events) if step.early else events
    events = place_behind(events) if step.reduces_beside else events
    events = place_delayed(events, step.due, lead, outside)
    events = place_ahead(events, step.window, step.lead, step.delayed, outside) if step.ahead else events
    events, copied, standing = _over_levels(events, step)
    moved = place_activations(events, step.moved, look_ahead, step.kept)
    schedule = replace(empty, events=moved, copied=copied, standing=standing)
    return schedule, validate(schedule)


def _over_levels(events: Events, step: TrainingStep) -> tuple[Events, tuple[Unit, ...] | None, tuple[Unit, ...] | None]:
    """The events with those of levels, the units whose copy is kept, and those whose copy stands."""
    if step.copy_share is None:
        return events, None, None
    copied = units_to_copy(events, step.copy_share, step.standing is not None)
    if step.standing is None:
        return place_levels(events, copied), copied, None
    standing = in_order(set(step.standing) & set(copied))
    placed = place_levels(events, copied, standing)
    if step.halves:
        own = place_leaving(placed, step.outside) if step.leaves else placed
        return place_making(own, step.outside, step.made, step.left), copied, standing
    return place_standing(placed, copied, step.delayed), copied, standing


@lru_cache(maxsize=64)
def build_evaluation(
    num_layers: int,
    num_micro_batches: int,
    *,
    window: int = 1,
    calls: int = 1,
    outside: Outside = _ONE,
    standing: frozenset[Unit] | None = None,
) -> Schedule:
    """The validated forward-only schedule; raises ScheduleError. Units outside the layers stay from end to end. `standing`:
    over two levels, the units that come out of the node's copy, which stays; no other is kept. None: there is one level."""
    stay = replace(outside, apart=())
    empty = Schedule(num_layers, num_micro_batches, (), "forward", False, window, calls=calls, outside=stay)
    events = place_parameters(forward_order(num_layers, num_micro_batches, calls), window, outside=stay)
    if standing is None:
        return _checked(replace(empty, events=events))
    copied = in_order(standing)
    return _checked(replace(empty, events=place_levels(events, (), copied), copied=copied, standing=copied or None))
