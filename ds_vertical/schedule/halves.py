"""Steps of two halves, each with a schedule of its own: what one half computes with, and what is made for the next half.

[Note: two values] A unit has two values at a time. While a half computes with one of them, which stands in the copies, the
step that the half before has left makes the other one (MAKE). In the first half of a step these are the committed weights,
made with the gradients of the whole step before. In the second half they are the predicted ones, made with the gradients of the
first half alone. Behind a unit's MAKE its new values go to the copies (SPREAD@+1), in which the next half finds them. So no
FETCH of this half waits for a MAKE, and no MAKE for a RELEASE.

[Note: gradients left] The first half ends while its last gradients are on their way: those of the first layer, and of what is
reduced behind it (CROSS@+1). It has no NORM either. The second half waits for them, and decides what is predicted (NORM@-1),
behind the forwards of some layers. Its MAKEs follow. Its own NORM, which decides the step, stands at its end.

[Note: where NORM@-1 stands] In a backward the gradients of a layer have the time of the next layer's backward: where they take
longer, the next REDUCE waits for them. What is left gets as much time behind the end of its half, by its size: for each layer's
worth the forwards that a backward takes at least (FORWARDS_IN_A_BACKWARD). So the second half waits for it only where the link
is so slow that the backwards have waited, too, apart from two limits. NORM@-1 stands no later than so that each MAKE has a
visit of its own, and the last SPREAD stands ahead of the last visit: with few layers, or large embeddings, the second half may
wait. And NORM@-1 stands behind one visit at least, if there are several.

The engine says which values they are (`engine.acco`). The schedule does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import chain
from typing import Final

from ds_vertical.schedule.events import MAX_STEPS, Event, Op, Outside, Schedule
from ds_vertical.types import PRE, SUF, Unit

FORWARDS_IN_A_BACKWARD: Final = 2  # forwards that take as long as a backward which computes no forward again


def place_leaving(events: Sequence[Event], outside: Outside) -> tuple[Event, ...]:
    """CROSS@+1 in the place of the CROSS of each unit that is left, and no NORM. See [Note: gradients left]."""
    left = units_left(outside)
    return tuple(
        replace(event, step_offset=1) if event.op is Op.CROSS and event.layer in left else event
        for event in events
        if event.op is not Op.NORM
    )


def units_left(outside: Outside) -> tuple[Unit, ...]:
    """Those whose gradients are reduced last: the first layer, and what stands outside the layers until then."""
    return (0, PRE, SUF) if SUF in outside.staying else (0, PRE)


def layers_left(outside: Outside, layers: Sequence[float], size_of: Callable[[Unit], float]) -> float:
    """The size of the gradients that are left, over that of a layer's. `layers`: the sizes of all layers; `size_of`: of any
    unit."""
    return sum(map(size_of, units_left(outside))) * len(layers) / (sum(layers) or math.inf)


def visit_of_norm(left: float, num_visits: int, num_units: int) -> int:
    """The visit of a layer, from 0 on, ahead of which NORM@-1 stands. `left`: see `layers_left`. See
    [Note: where NORM@-1 stands]."""
    wanted, latest = math.ceil(FORWARDS_IN_A_BACKWARD * left), num_visits - num_units - MAX_STEPS
    return min(max(1, min(wanted, latest)), num_visits - 1)


def place_making(
    events: Sequence[Event], outside: Outside, made: Collection[Unit], left: float | None = None
) -> tuple[Event, ...]:
    """MAKE of a unit of `made` ahead of each visit of a layer, in the order in which the next half needs them. SPREAD@+1 stands
    MAX_STEPS visits behind it, when it is over, and ahead of the end. `left`: of the half before, see `layers_left`: then
    NORM@-1 stands ahead of the first MAKE. None: the half before has left nothing."""
    starts = _starts(events)
    layers = sorted({event.layer for event in events if isinstance(event.layer, int)})
    units: list[Unit] = [unit for unit in outside.around(layers) if unit in made]
    slots: list[list[Event]] = [[] for _ in (*starts, None)]  # the last one: at the end, ahead of NORM
    first = 0
    if left is not None:
        first = visit_of_norm(left, len(starts), len(outside.around(layers)))
        slots[first].append(Event(Op.NORM, step_offset=-1))
    for number, unit in enumerate(units):
        place = min(first + number, len(starts) - 1)
        slots[place].append(Event(Op.MAKE, unit))
        slots[min(place + MAX_STEPS, len(starts))].append(Event(Op.SPREAD, unit, step_offset=1))
    ends = (index for index, event in enumerate(events) if event.op is Op.NORM)
    before = dict(zip((*starts, next(ends, len(events))), slots, strict=True))
    placed: list[Event] = []
    for index, event in enumerate(events):
        placed += (*before.pop(index, ()), event)
    return (*placed, *chain(*before.values()))


# ---- for the validator


def own_events(schedule: Schedule) -> set[Event]:
    """What a half may have besides, once each. Empty where values for a next schedule have no place: steps are not left to it,
    or no copy outlives this one."""
    if not _has_next(schedule):
        return set()
    units = schedule.outside.around(range(schedule.num_layers))
    return {Event(Op.NORM), Event(Op.NORM, step_offset=-1), *(Event(Op.MAKE, unit) for unit in units)}


def left_by(schedule: Schedule) -> frozenset[Unit | None]:
    """The units whose gradients the next schedule waits for (CROSS@+1)."""
    crosses = (event for event in schedule.events if event.op is Op.CROSS and event.ahead)
    return frozenset(event.layer for event in crosses) if _has_next(schedule) else frozenset()


def _has_next(schedule: Schedule) -> bool:
    return schedule.delayed and schedule.standing is not None


# ---- details


def _starts(events: Sequence[Event]) -> list[int]:
    """Where the visits of layers start: the first F, or B, of a run on one layer."""
    work = [index for index, event in enumerate(events) if event.op in (Op.F, Op.B) and isinstance(event.layer, int)]
    return [index for place, index in enumerate(work) if not place or events[work[place - 1]].layer != events[index].layer]
