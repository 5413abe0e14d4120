"""Checks of a whole schedule, besides what each event waits for: the window, what is read ahead, the order of gradient sums,
the units outside the layers."""

from __future__ import annotations

from collections.abc import Sequence

from ds_vertical.schedule.events import DELAYED, Event, Op, Outside, Schedule, error_at
from ds_vertical.types import PRE, SUF, Unit


def check_window(schedule: Schedule) -> None:
    """At most window + 1 layers are fetched at a time, and none at the end."""
    fetched: set[Unit | None] = set()
    ahead = {event.layer for event in schedule.events if event.op is Op.FETCH and event.ahead}
    for index, event in enumerate(schedule.events):
        if event.op is Op.RELEASE:
            fetched.discard(event.layer)
        elif event.op is Op.FETCH and isinstance(event.layer, int):
            fetched.add(event.layer)
        if len(fetched) > schedule.window + 1:
            problem = f"is layer number {len(fetched)} fetched at once; window {schedule.window} allows"
            raise error_at(schedule.events, index, f"{problem} {schedule.window + 1}: release one before")
    fetched -= ahead
    if fetched:
        units = ", ".join(str(unit) for unit in fetched)
        raise error_at(schedule.events, len(schedule.events), f"still fetched: {units}; every FETCH needs its RELEASE")


def check_ahead(schedule: Schedule) -> None:
    """What is read for the next step while its step is due would be old then."""
    stepped: set[Unit | None] = set()
    for index, event in enumerate(schedule.events):
        if event.op is Op.STEP and event.ahead:
            stepped.add(event.layer)
        elif event.op is Op.FETCH and event.ahead and schedule.delayed and event.layer not in stepped:
            wanted = Event(Op.STEP, event.layer, part=DELAYED)
            raise error_at(schedule.events, index, f"reads what a delayed step is to change; write {wanted} before it")


def check_sums(schedule: Schedule) -> None:
    """See [Note: order and timing] in `dependencies`: per unit, the events that add to its gradient come in the header's
    order."""
    if schedule.order == "forward":
        return
    micro_batches = range(schedule.num_micro_batches)
    heads = [Event(Op.HEAD, SUF, m) for m in micro_batches]
    prefix = [Event(Op.B, PRE, m) for m in micro_batches]
    interleaved = [event for pair in zip(heads, prefix, strict=True) for event in pair]
    added = interleaved if schedule.order == "horizontal" else heads + prefix
    expected: dict[Unit | None, list[Event]] = {PRE: added}  # those of SUF are its HEADs
    for layer in range(schedule.num_layers):
        turned = schedule.snake and (schedule.num_layers - 1 - layer) % 2 == 1
        expected[layer] = [Event(Op.B, layer, m) for m in (reversed(micro_batches) if turned else micro_batches)]
    left = {unit: iter(events) for unit, events in expected.items()}
    for index, event in enumerate(schedule.events):
        if event.op in (Op.B, Op.HEAD):
            wanted = next(left[PRE if event.op is Op.HEAD else event.layer])
            if event != wanted:
                told = f"order {schedule.order}{' with snake' if schedule.snake else ''}"
                raise error_at(schedule.events, index, f"adds to a gradient sum where {told} wants {wanted}")


def outside_of(events: Sequence[Event]) -> Outside:
    """The units outside the layers, as the events move them: PRE is apart where it is fetched again, SUF where the first prefix
    does without it."""
    fetched = [event.layer for event in events if event.op is Op.FETCH and not event.ahead]
    ahead_of_prefix: set[Unit | None] = set()
    for event in events:
        if event.op is Op.F:
            break
        ahead_of_prefix |= {event.layer} if event.op is Op.FETCH else set()
    has_suf = SUF in fetched
    apart: tuple[Unit, ...] = (
        *((PRE,) if fetched.count(PRE) > 1 else ()),
        *((SUF,) if has_suf and SUF not in ahead_of_prefix else ()),
    )
    return Outside(has_suf, apart)


def check_outside(schedule: Schedule) -> None:
    """The executor reads off the events what the header says of the units outside the layers."""
    if (found := outside_of(schedule.events)) != schedule.outside:
        told, shown = (outside.to_text() or " nothing" for outside in (schedule.outside, found))
        said = f"the header says of units outside the layers:{told}; the events:{shown}; write in the header what the events do"
        raise error_at(schedule.events, 0, said)
