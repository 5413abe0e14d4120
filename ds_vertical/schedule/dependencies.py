"""What each event of a schedule waits for, and the check of a whole schedule.

[Note: issue and wait] Only issuing is an event. What has to be complete before an event may start is the answer of
dependencies(), the one truth that validator, executor and simulator share.

[Note: order and timing] `order` and `snake` in the header fix in which order gradients are summed, hence the bits of
the result. Everything else (window, where a FETCH or a RELEASE stands, which forward comes first) is timing and never
changes values. validate() refuses sums in another order and leaves timing free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from ds_vertical.errors import ScheduleError
from ds_vertical.schedule.activations import DROPS, Moves, find_fault, is_work
from ds_vertical.schedule.checks import check_ahead, check_outside, check_sums, check_window, outside_of
from ds_vertical.schedule.events import (
    DELAYED,
    EARLY,
    MAX_SAVES,
    MAX_STEPS,
    Event,
    Key,
    Op,
    Outside,
    Schedule,
    error_at,
    part_of,
)
from ds_vertical.schedule.halves import left_by, own_events
from ds_vertical.schedule.levels import check_levels, refuse_spread
from ds_vertical.types import PRE, SUF, Unit

_TOO_OFTEN: Final = {1: "a second time; it must happen once", 2: "a third time; it must happen twice"}
_REPEATED: Final = frozenset((Op.FETCH, Op.SPREAD, Op.RELEASE, Op.LOAD))
_KEPT_MOVES: Final = (Op.KSAVE, Op.KLOAD, Op.KDROP)
_MOVES: Final = (Op.SAVE, Op.LOAD, Op.DROP, Op.GSAVE, Op.GLOAD, Op.GDROP)


class _Walk:
    """What has happened while a list of events is read from left to right; refuses what could not be run."""

    def __init__(self, num_layers: int, num_micro_batches: int, num_calls: int, outside: Outside) -> None:
        self.num_layers = num_layers
        self.outside = outside
        self.num_calls = num_calls
        self.micro_batches = range(num_micro_batches)
        self.index = 0
        self.done: dict[Key, int] = {}
        self.forwards: dict[tuple[Unit | None, int | None, int], int] = {}
        self.fetched: dict[Unit | None, int] = {}
        self.uses: dict[Unit | None, list[int]] = {}
        self.last_sum: dict[Unit | None, int] = {}
        self.steps: dict[Unit | None, list[int]] = {}
        self.delayed: dict[Unit | None, list[int]] = {}
        self.early: list[int] = []
        self.ahead: dict[Unit | None, int] = {}
        self.spread: dict[Unit | None, int] = {}
        self.made: dict[Unit | None, int] = {}
        self.decided: list[int] = []
        self.under_way: list[int] = []
        self.holds: list[int] = []
        self.reduces: list[int] = []
        self.left: dict[Unit | None, int] = {}
        self.kept_saves: list[int] = []
        self.moves = Moves()

    def need(self, op: Op, layer: Unit | None = None, micro_batch: int | None = None) -> int:
        """The latest such event's index."""
        index = self.done.get((op, layer, micro_batch))
        if index is None:
            raise ScheduleError(f"needs {Event(op, layer, micro_batch)} before it")
        return index

    def forward(self, unit: Unit, micro_batch: int | None, call: int) -> int:
        """The index of the F of a unit in one of the micro-batch's calls of the model."""
        index = self.forwards.get((unit, micro_batch, call))
        if index is None:
            raise ScheduleError(f"needs {Event(Op.F, unit, micro_batch, part_of(call))} before it")
        return index

    def use(self, unit: Unit | None) -> int:
        """The index of the FETCH under which the event at hand reads the unit's parameters."""
        if unit not in self.fetched:
            raise ScheduleError(f"needs the parameters of {unit}, which are not fetched here")
        self.uses[unit].append(self.index)
        return self.fetched[unit]

    def refuse_read(self, unit: Unit | None, what: str) -> None:
        """Refuse what makes parameters that were read for the next step others, or not the next."""
        if unit in self.ahead:
            raise ScheduleError(f"event {self.ahead[unit]} has read {unit} for the next step; {what} before that")

    def take_turn(self) -> list[int]:
        """The step that must be over before another one may begin; see MAX_STEPS."""
        before = self.under_way[-MAX_STEPS] if len(self.under_way) >= MAX_STEPS else None
        self.under_way.append(self.index)
        return [] if before is None else [before]

    def make(self, unit: Unit | None) -> list[int]:
        """As `take_turn`, of values for the next schedule: this one computes with others (`halves`). Where it decides what
        they are made of, behind that."""
        self.made[unit] = self.index
        return [*self.decided, *self.take_turn()]

    def concluded(self) -> list[int]:
        """The COMMIT that must be over before anything uses what early steps made or left."""
        return [self.need(Op.COMMIT)] if self.early else []

    def glue(self) -> list[int]:
        """The FETCHes of the units that the code between two layers may use: those that are there from end to end."""
        return [self.use(unit) for unit in self.outside.staying]

    def values(self, unit: Unit | None) -> list[int]:
        """FETCH of the unit, and the delayed step that made the values it brings."""
        return [self.use(unit), *self.delayed.get(unit, ())]

    def add_gradient(self, unit: Unit | None) -> list[int]:
        """The event that last added to the unit's gradient sum, if any: a sum in another order has other bits."""
        before = self.last_sum.get(unit)
        self.last_sum[unit] = self.index
        return [] if before is None else [before]

    def take(self, index: int, event: Event) -> tuple[int, ...]:
        """The indices that `event`, standing at `index`, depends on."""
        part = None if event.op is Op.F else event.part
        rule = _RULES_BY_PART.get((part, event.step_offset), {}).get(event.op)
        if rule is None:
            raise ScheduleError("no rule says what it depends on; add one to _RULES in ds_vertical/schedule/dependencies.py")
        self.index = index
        if is_work(event):
            self.moves.begin_work()
        needs = tuple(sorted(set(rule(self, event))))
        if not event.step_offset:  # else it is another step's
            self.done[event.op, event.layer, event.micro_batch] = index
        if event.op is Op.F:
            self.forwards[event.layer, event.micro_batch, event.call] = index
        return needs


def _fetch(walk: _Walk, event: Event) -> list[int]:
    unit = event.layer
    if unit in walk.fetched:
        raise ScheduleError(f"{unit} is already fetched, by event {walk.fetched[unit]}")
    walk.refuse_read(unit, "fetch it")
    walk.fetched[unit] = walk.index
    walk.uses[unit] = []
    released = walk.done.get((Op.RELEASE, unit, None))
    return [*([] if released is None else [released]), *walk.steps.pop(unit, [])]


def _fetch_ahead(walk: _Walk, event: Event) -> list[int]:
    """The read of what the next step fetches: once the step is known to count or not, and the unit's new values are there."""
    unit = event.layer
    if unit in walk.fetched:
        raise ScheduleError(f"{unit} is still fetched, by event {walk.fetched[unit]}; release it before")
    walk.refuse_read(unit, "read it once")
    walk.ahead[unit] = walk.index
    return [walk.need(Op.NORM), walk.need(Op.RELEASE, unit), *walk.concluded(), *walk.steps.get(unit, ())]


def _spread(walk: _Walk, event: Event) -> list[int]:
    """It ends what the FETCH has begun: from here on whoever uses the unit waits for this event."""
    unit, fetch = event.layer, walk.need(Op.FETCH, event.layer)
    refuse_spread(unit, fetch, walk.fetched.get(unit), walk.uses[unit])
    walk.fetched[unit] = walk.index
    return [fetch]


def _spread_ahead(walk: _Walk, event: Event) -> list[int]:
    """The copy for the next step: of no value that may still be discarded, and behind what else changes it."""
    unit = event.layer
    if unit in walk.made:  # of other values than those that are fetched here
        return [walk.made[unit]]
    if unit in walk.fetched:
        raise ScheduleError(f"{unit} is still fetched, by event {walk.fetched[unit]}; release it before")
    walk.spread[unit] = walk.index
    return [walk.need(Op.NORM), walk.need(Op.RELEASE, unit), *walk.concluded(), *walk.steps.get(unit, ())]


def _release(walk: _Walk, event: Event) -> list[int]:
    unit = event.layer
    if unit not in walk.fetched:
        raise ScheduleError(f"{unit} is not fetched here")
    if not walk.uses[unit]:
        raise ScheduleError(f"nothing used {unit} since event {walk.fetched[unit]} fetched it")
    return [walk.fetched.pop(unit), *walk.uses[unit]]


# What stays outside the layers may be used by the prefix, the suffix and the code between two layers. So every compute event,
# on whatever layer, uses it. What is apart is used by the prefix alone, or by the suffix alone.
def _forward(walk: _Walk, event: Event) -> list[int]:
    layer, micro_batch, last = event.layer, event.micro_batch, walk.num_layers - 1
    if layer == PRE:  # of a further call: the code from the call before on, and the prefix
        used = [need for unit in dict.fromkeys((PRE, *walk.outside.staying)) for need in walk.values(unit)]
        return [*used, *([walk.forward(last, micro_batch, event.call - 1)] if event.call else [])]
    if layer == SUF:
        return [*walk.glue(), walk.forward(last, micro_batch, walk.num_calls - 1)]
    assert isinstance(layer, int)
    before = walk.forward(layer - 1 if layer else PRE, micro_batch, event.call)
    return [*walk.values(layer), *walk.glue(), before, *walk.moves.use(Op.SAVE, layer, micro_batch, walk.index)]


def _head(walk: _Walk, event: Event) -> list[int]:
    last = walk.forward(walk.num_layers - 1, event.micro_batch, walk.num_calls - 1)
    used = walk.values(SUF) if SUF in walk.outside.apart else []
    return [*used, *walk.glue(), last, *(need for unit in walk.outside.added_by_head for need in walk.add_gradient(unit))]


def _backward(walk: _Walk, event: Event) -> list[int]:
    layer, micro_batch = event.layer, event.micro_batch
    moved = walk.moves.use(Op.GSAVE, layer, micro_batch, walk.index)
    if layer == PRE:
        used = [walk.use(unit) for unit in dict.fromkeys((PRE, *walk.outside.staying))]
        return [*used, walk.need(Op.B, 0, micro_batch), *walk.add_gradient(PRE), *moved]
    assert isinstance(layer, int)
    last = layer == walk.num_layers - 1
    after = walk.need(Op.HEAD, SUF, micro_batch) if last else walk.need(Op.B, layer + 1, micro_batch)
    for save in (Op.SAVE, Op.KSAVE):
        moved += walk.moves.use(save, layer, micro_batch, walk.index)
    made = walk.forward(layer, micro_batch, walk.num_calls - 1)
    return [made, after, walk.use(layer), *walk.glue(), *walk.add_gradient(layer), *moved]


def _save(walk: _Walk, event: Event) -> list[int]:
    """The input of a layer, once it is there; where the layer's F has taken it by then, after that."""
    layer, micro_batch = event.layer, event.micro_batch
    if not isinstance(layer, int):
        raise ScheduleError("only layers have an input that moves")
    made = walk.need(Op.F, layer - 1 if layer else PRE, micro_batch)
    taken = walk.done.get((Op.F, layer, micro_batch))
    walk.moves.save(event, walk.index)
    return [made] if taken is None else [made, taken]


def _save_gradient(walk: _Walk, event: Event) -> list[int]:
    unit = event.layer
    made = walk.need(Op.B, unit + 1 if isinstance(unit, int) else 0, event.micro_batch)
    walk.moves.save(event, walk.index)
    return [made]


def _save_kept(walk: _Walk, event: Event) -> list[int]:
    """What a layer's F keeps for its B: see MAX_SAVES."""
    if (Op.B, event.layer, event.micro_batch) in walk.done:
        raise ScheduleError(f"needs to stand before {Event(Op.B, event.layer, event.micro_batch)}, which uses it up")
    made = walk.need(Op.F, event.layer, event.micro_batch)
    before = walk.kept_saves[-MAX_SAVES] if len(walk.kept_saves) >= MAX_SAVES else made
    walk.kept_saves.append(walk.index)
    walk.moves.save(event, walk.index)
    return [made, before]


def _drop(walk: _Walk, event: Event) -> list[int]:
    used = walk.need(Op.B, event.layer, event.micro_batch)
    save = next(save for save, drop in DROPS.items() if drop is event.op)
    return [used, *walk.moves.drop(save, event)]


def _reduce(walk: _Walk, event: Event) -> list[int]:
    """The unit's gradients are complete, and the reduction before it is over: one is under way at a time. It reads no
    parameters, so their RELEASE does not wait for it."""
    unit = event.layer
    glued = unit in walk.outside.staying  # glue adds to what stays
    last: list[Unit | None] = [PRE] if glued else [] if unit == SUF else [unit]
    sums = [walk.need(Op.B, each, m) for each in last for m in walk.micro_batches]
    if unit in walk.outside.added_by_head:
        sums += [walk.need(Op.HEAD, SUF, m) for m in walk.micro_batches]
    walk.reduces.append(walk.index)
    return [*sums, *walk.reduces[-2:-1]]


def _cross(walk: _Walk, event: Event) -> list[int]:
    """It ends what the REDUCE has begun: from here on whoever needs the unit's gradients waits for this event."""
    reduced = walk.need(Op.REDUCE, event.layer)
    walk.done[Op.REDUCE, event.layer, None] = walk.index
    walk.reduces[-1] = walk.index
    return [reduced]


def _cross_ahead(walk: _Walk, event: Event) -> list[int]:
    """The next schedule waits for the unit's gradients. Nothing of this one may, and the reductions behind it do not."""
    reduced = walk.need(Op.REDUCE, event.layer)
    walk.left[event.layer] = walk.index
    walk.reduces.remove(reduced)
    del walk.done[Op.REDUCE, event.layer, None]
    return [reduced]


def _hold(walk: _Walk, event: Event) -> list[int]:
    """As many at a time as steps (MAX_STEPS): each keeps the memory that it is written from."""
    before = walk.holds[-MAX_STEPS:][:1] if len(walk.holds) >= MAX_STEPS else []
    walk.holds.append(walk.index)
    return [walk.need(Op.REDUCE, event.layer), *before]


def _norm(walk: _Walk, event: Event) -> list[int]:
    """A step is decided once what it has made is where it waits: a transfer that fails then fails the step as a whole."""
    for unit, index in walk.left.items():
        raise ScheduleError(f"event {index} leaves the gradients of {unit} to the next schedule: leave NORM to that one")
    units = walk.outside.around(range(walk.num_layers))
    return [*(walk.need(Op.REDUCE, unit) for unit in units), *walk.holds, *walk.early]


def _norm_before(walk: _Walk, event: Event) -> list[int]:
    """Of gradients that the schedule before has reduced or left: whoever issues the event waits for those. Their norms are
    taken before any of this schedule's."""
    if before := [*walk.reduces, *walk.left.values(), *walk.made.values()]:
        raise ScheduleError(f"event {min(before)} stands before it: write it ahead of each REDUCE and MAKE")
    walk.decided.append(walk.index)
    return []


def _step(walk: _Walk, event: Event) -> list[int]:
    unit = event.layer
    if unit in walk.fetched:
        raise ScheduleError(f"{unit} is still fetched, by event {walk.fetched[unit]}; release it before its step")
    walk.refuse_read(unit, "step it")
    if unit in walk.spread:
        raise ScheduleError(f"event {walk.spread[unit]} has spread {unit} for the next step; step it before that")
    needs = [walk.need(Op.NORM), walk.need(Op.RELEASE, unit), *walk.take_turn()]
    walk.steps.setdefault(unit, []).append(walk.index)
    return needs


def _early_step(walk: _Walk, event: Event) -> list[int]:
    """Before the norm: the unit's gradient is complete and nobody uses its parameters until the next step."""
    unit = event.layer
    if (Op.NORM, None, None) in walk.done:
        raise ScheduleError("NORM came before it, by which an early step must be over")
    if unit in walk.fetched:
        raise ScheduleError(f"{unit} is still fetched, by event {walk.fetched[unit]}; release it before its step")
    needs = [walk.need(Op.REDUCE, unit), walk.need(Op.RELEASE, unit), *walk.take_turn()]
    walk.early.append(walk.index)
    return needs


def _commit(walk: _Walk, event: Event) -> list[int]:
    return [walk.need(Op.NORM)]  # which waits for the early steps


def _delayed_step(walk: _Walk, event: Event) -> list[int]:
    """A step that the last schedule left: its unit must not have been fetched yet. The FETCH need not wait for it, since
    the values are handed over in memory; their first use does."""
    unit = event.layer
    if unit in walk.uses:
        raise ScheduleError(f"{unit} was fetched before the step that makes its values")
    if unit in walk.delayed:
        raise ScheduleError(f"{unit} has taken this step already")
    walk.delayed[unit] = [walk.index]
    return []


def _step_ahead(walk: _Walk, event: Event) -> list[int]:
    """The delayed part of this very step, for the next forward; the next schedule's FETCH of the unit takes its values."""
    unit = event.layer
    if unit in walk.fetched:
        raise ScheduleError(f"{unit} is still fetched, by event {walk.fetched[unit]}; release it before its step")
    walk.refuse_read(unit, "step it")
    return [walk.need(Op.NORM), walk.need(Op.RELEASE, unit), *walk.concluded()]


_RULES: Final[dict[Op, Callable[[_Walk, Event], list[int]]]] = {
    Op.FETCH: _fetch,
    Op.SPREAD: _spread,
    Op.RELEASE: _release,
    Op.F: _forward,
    Op.HEAD: _head,
    Op.B: _backward,
    Op.REDUCE: _reduce,
    Op.CROSS: _cross,
    Op.HOLD: _hold,
    Op.NORM: _norm,
    Op.STEP: _step,
    Op.COMMIT: _commit,
    Op.MAKE: lambda walk, event: walk.make(event.layer),
    Op.SAVE: _save,
    Op.LOAD: lambda walk, event: walk.moves.load(Op.SAVE, event, walk.index),
    Op.DROP: _drop,
    Op.GSAVE: _save_gradient,
    Op.GLOAD: lambda walk, event: walk.moves.load(Op.GSAVE, event, walk.index),
    Op.GDROP: _drop,
    Op.KSAVE: _save_kept,
    Op.KLOAD: lambda walk, event: walk.moves.load(Op.KSAVE, event, walk.index),
    Op.KDROP: _drop,
}


_RULES_BY_PART: Final[dict[tuple[str | None, int], dict[Op, Callable[[_Walk, Event], list[int]]]]] = {
    (None, 0): _RULES,
    (EARLY, 0): {Op.STEP: _early_step},
    (DELAYED, -1): {Op.STEP: _delayed_step},
    (None, -1): {Op.NORM: _norm_before},
    (DELAYED, 0): {Op.HOLD: _hold, Op.STEP: _step_ahead},
    (None, 1): {Op.FETCH: _fetch_ahead, Op.SPREAD: _spread_ahead, Op.CROSS: _cross_ahead},
}


def dependencies(events: Sequence[Event]) -> tuple[tuple[int, ...], ...]:
    """For each event the ascending indices of the earlier events that must be complete before it may start.

    Raises ScheduleError, with the events around, at the first event that lacks something it depends on.
    """
    layers = (event.layer for event in events if isinstance(event.layer, int))
    micro_batches = (event.micro_batch for event in events if event.micro_batch is not None)
    shape = 1 + max(layers, default=-1), 1 + max(micro_batches, default=-1), 1 + max((e.call for e in events), default=0)
    return _dependencies(events, _Walk(*shape, outside_of(events)))


def _dependencies(events: Sequence[Event], walk: _Walk) -> tuple[tuple[int, ...], ...]:
    found: list[tuple[int, ...]] = []
    for index, event in enumerate(events):
        try:
            found.append(walk.take(index, event))
        except ScheduleError as error:
            raise error_at(events, index, str(error)) from None
    return tuple(found)


def validate(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """`dependencies` of the events. Raises ScheduleError, naming one and its neighbours, unless they can be run.

    Checked: what an event depends on comes before it; F, HEAD, B, REDUCE, NORM, STEP and the prefix's FETCH stand there once;
    at most window + 1 layers are fetched at a time, those read for the next step included, and no other at the end; nothing
    is read that is still to be stepped; gradients are summed in the order of the header; only its micro-batches and kept cells
    move, at most look_ahead + 1 inputs, gradients and kept cells each are loaded and not yet used, and all saved is dropped.
    """
    _check_once(schedule)
    walk = _Walk(schedule.num_layers, schedule.num_micro_batches, schedule.calls, schedule.outside)
    needs = _dependencies(schedule.events, walk)
    _check_complete(schedule)
    for check in (check_window, check_ahead, check_sums, check_levels):
        check(schedule)
    if (fault := find_fault(schedule.events, schedule.moved, schedule.look_ahead, set(schedule.kept))) is not None:
        raise error_at(schedule.events, *fault)
    return needs


def _once(schedule: Schedule) -> list[Event]:
    """The events that stand exactly once in every schedule of this order and shape, in no particular order."""
    layers, micro_batches = range(schedule.num_layers), range(schedule.num_micro_batches)
    units = schedule.outside.around(layers)
    run: list[Unit] = [PRE, *layers]
    events = [Event(op, unit) for op in (Op.FETCH, Op.RELEASE) for unit in schedule.outside.units]
    events += [Event(Op.F, unit, m, part_of(call)) for unit in run for m in micro_batches for call in range(schedule.calls)]
    if schedule.order == "forward":
        return events + [Event(Op.F, SUF, m) for m in micro_batches]
    events += [Event(Op.HEAD, SUF, m) for m in micro_batches]
    events += [Event(Op.B, unit, m) for unit in run for m in micro_batches]
    left = left_by(schedule)
    events += [*([] if left else [Event(Op.NORM)]), *(Event(Op.REDUCE, unit) for unit in units)]
    events += [Event(Op.CROSS, unit, step_offset=int(unit in left)) for unit in units if schedule.copied is not None]
    if schedule.early:
        events += [Event(Op.COMMIT), *(Event(Op.STEP, unit, part=EARLY) for unit in units)]
    return events if schedule.delayed else [*events, *(Event(Op.STEP, unit) for unit in units)]


def _check_once(schedule: Schedule) -> None:
    allowed = set(_once(schedule))
    allowed |= {Event(op, layer) for op in (Op.FETCH, Op.RELEASE) for layer in range(schedule.num_layers)}
    if schedule.copied is not None:
        allowed |= {Event(Op.SPREAD, unit) for unit in schedule.outside.around(range(schedule.num_layers))}
    if schedule.order != "forward":
        units = schedule.outside.around(range(schedule.num_layers))
        allowed |= {e for u in units for e in (Event(Op.STEP, u, None, DELAYED, -1), Event(Op.FETCH, u, step_offset=1))}
        allowed |= {Event(Op.SPREAD, u, step_offset=1) for u in schedule.copied or () if schedule.standing is not None}
        allowed |= {Event(Op.STEP, u, part=DELAYED) for u in units if schedule.delayed}
        allowed |= own_events(schedule)
        allowed |= {Event(Op.HOLD, u, part=part) for u in units for part in (None, DELAYED)}
        allowed |= {Event(op, *cell) for op in _KEPT_MOVES for cell in schedule.kept}
    seen: Counter[Event] = Counter()
    for index, event in enumerate(schedule.events):
        seen[event] += 1
        if event not in allowed and not _is_move(schedule, event):
            shape = f"{schedule.num_layers} layers, {schedule.num_micro_batches} micro-batches"
            raise error_at(schedule.events, index, f"has no place in a schedule of order {schedule.order} with {shape}")
        most = 2 if event.layer == PRE and PRE in schedule.outside.apart else 1
        once = event.op not in _REPEATED or event.ahead
        if (once and seen[event] > 1) or (event.layer in (PRE, SUF) and seen[event] > most):
            raise error_at(schedule.events, index, f"stands here {_TOO_OFTEN[1 if once else most]}")
    check_outside(schedule)


def _is_move(schedule: Schedule, event: Event) -> bool:
    """Whether the event moves what passes between layers, of a layer or micro-batch of a training schedule."""
    if event.op not in _MOVES or schedule.order == "forward" or event.micro_batch is None:
        return False
    has_unit = event.layer == PRE or (isinstance(event.layer, int) and event.layer < schedule.num_layers)
    return has_unit and event.micro_batch < schedule.num_micro_batches


def _check_complete(schedule: Schedule) -> None:
    present = set(schedule.events)
    missing = [str(event) for event in _once(schedule) if event not in present]
    if missing:
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise error_at(schedule.events, len(schedule.events), f"never happened: {' '.join(missing[:8])}{more}")
