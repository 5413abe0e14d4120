"""Steps of two halves, each with a schedule of its own: what one half computes with, and what is made for the next half.

[Note: two values] A unit has two values at a time. While a half computes with one of them, which stands in the copies, the
step that the half before has left makes the other one (MAKE). In the first half of a step these are the committed weights,
made with the gradients of the whole step before. In the second half they are the predicted ones, made with the gradients of the
first half alone. Behind a unit's MAKE its new values go to the copies (SPREAD@+1), in which the next half finds them. So no
FETCH of this half waits for a MAKE, and no MAKE for a RELEASE.

The engine says which values they are (`engine.acco`). The schedule does not.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ds_vertical.schedule.events import MAX_STEPS, Event, Op, Outside
from ds_vertical.types import Unit


def place_making(events: Sequence[Event], outside: Outside, made: Collection[Unit]) -> tuple[Event, ...]:
    """MAKE of each unit of `made` where its layer is visited first, in the order in which the next half needs them. SPREAD@+1
    stands MAX_STEPS visits behind it, when it is over, and no later than NORM."""
    starts = _starts(events)
    layers = sorted({event.layer for event in events if isinstance(event.layer, int)})
    slots: list[list[Event]] = [[] for _ in (*starts, None)]  # the last one: ahead of NORM
    units: list[Unit] = [unit for unit in outside.around(layers) if unit in made]
    for number, unit in enumerate(units):
        slots[min(number, len(layers) - 1)].append(Event(Op.MAKE, unit))
        slots[min(number + MAX_STEPS, len(starts))].append(Event(Op.SPREAD, unit, step_offset=1))
    norm = next(index for index, event in enumerate(events) if event.op is Op.NORM)
    before = dict(zip((*starts, norm), slots, strict=True))
    placed: list[Event] = []
    for index, event in enumerate(events):
        placed += (*before.get(index, ()), event)
    return tuple(placed)


def _starts(events: Sequence[Event]) -> list[int]:
    """Where the visits of layers start: the first F, or B, of a run on one layer."""
    work = [index for index, event in enumerate(events) if event.op in (Op.F, Op.B) and isinstance(event.layer, int)]
    return [index for place, index in enumerate(work) if not place or events[work[place - 1]].layer != events[index].layer]
