"""Collectives over two levels: the ranks of a node, and the ranks of all nodes with one number in their nodes.

[Note: levels] With one level each FETCH gathers a unit over all ranks, and each REDUCE reduces its gradients over all ranks.
With two, SPREAD stands behind a FETCH: once the rank's own shards are read, it gathers them over the nodes, and then the unit
over the ranks of the node. What has crossed the link is the node's copy of the unit. Each of its ranks has a part of the copy.

A unit whose copy is kept (`Schedule.copied`) needs no SPREAD where it is fetched again: that FETCH reads nothing, and gathers
the copy over the node alone. A node keeps the copy until no FETCH is left that needs it. REDUCE sums a unit's gradients over
the ranks of the node, and CROSS behind it sums them over the nodes. What waits for a unit's gradients waits for CROSS.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ds_vertical.errors import ScheduleError
from ds_vertical.schedule.events import Event, Op, Schedule, error_at
from ds_vertical.types import Unit


def units_to_copy(events: Sequence[Event], share: float) -> tuple[Unit, ...]:
    """The units whose copy is kept: of those that are fetched again the given share, the last layers first, since their copies
    wait for the shortest time."""
    counts: Counter[Unit | None] = Counter(event.layer for event in events if _is_fetch(event))
    again: list[Unit] = [unit for unit, count in counts.items() if count > 1 and unit is not None]
    layers = sorted((unit for unit in again if isinstance(unit, int)), reverse=True)
    outside: list[Unit] = [*filter(lambda unit: not isinstance(unit, int), again)]
    chosen = [*layers, *outside][: round(share * len(again))]
    return (*(unit for unit in outside if unit in chosen), *sorted(unit for unit in chosen if isinstance(unit, int)))


def place_levels(events: Sequence[Event], copied: Collection[Unit]) -> tuple[Event, ...]:
    """SPREAD behind each FETCH of a unit whose copy is not there, CROSS behind each REDUCE; see [Note: levels]."""
    there: set[Unit] = set()
    placed: list[Event] = []
    for event in events:
        placed.append(event)
        if _is_fetch(event) and event.layer not in there:
            placed.append(Event(Op.SPREAD, event.layer))
            there.update(unit for unit in copied if unit == event.layer)
        elif event.op is Op.REDUCE:
            placed.append(Event(Op.CROSS, event.layer))
    return tuple(placed)


@dataclass(frozen=True)
class Arrival:
    """How a unit comes to a FETCH. `spreads`: a SPREAD of it follows. `from_copy`: out of the node's copy. With one level it is
    neither. `keeps`: the next FETCH needs the node's copy."""

    spreads: bool = False
    from_copy: bool = False
    keeps: bool = False


def arrivals(events: Sequence[Event]) -> dict[Unit, deque[Arrival]]:
    """By unit, how it comes to each of its FETCHes, in their order. With one level none spreads or keeps."""
    spreads: dict[Unit, list[bool]] = {}
    for event in events:
        if event.layer is None:
            continue
        if _is_fetch(event):
            spreads.setdefault(event.layer, []).append(False)
        elif event.op is Op.SPREAD:
            spreads[event.layer][-1] = True
    levels = any(map(any, spreads.values()))
    if not levels:
        return {unit: deque([Arrival()] * len(each)) for unit, each in spreads.items()}
    return {
        unit: deque(Arrival(now, not now, not later) for now, later in zip(each, [*each[1:], True], strict=True))
        for unit, each in spreads.items()
    }


def check_levels(schedule: Schedule) -> None:
    """Raise ScheduleError where a unit is fetched and comes from nowhere, or crosses the link though its copy is there."""
    if schedule.copied is None:
        return
    there: set[Unit] = set()
    missing: set[Unit | None] = set()
    reduced: Event | None = None
    for index, event in enumerate(schedule.events):
        if reduced is not None and event != Event(Op.CROSS, reduced.layer):
            raise error_at(schedule.events, index, f"stands between {reduced} and its CROSS, which come one behind the other")
        reduced = event if event.op is Op.REDUCE else None
        if _is_fetch(event) and event.layer not in there:
            missing.add(event.layer)
        elif event.op is Op.SPREAD and event.layer not in missing:
            raise error_at(schedule.events, index, f"the node's copy of {event.layer} is there (levels=); leave it out")
        elif event.op is Op.SPREAD:
            missing.discard(event.layer)
            there.update(unit for unit in schedule.copied if unit == event.layer)
        elif event.op is Op.RELEASE and event.layer in missing:
            raise error_at(schedule.events, index, f"{event.layer} was fetched and never spread; write {event.layer}SPREAD")


def _is_fetch(event: Event) -> bool:
    return event.op is Op.FETCH and not event.ahead


def refuse_spread(unit: Unit | None, fetched: int, at: int | None, used: Sequence[int]) -> None:
    """Raise ScheduleError unless the unit's FETCH, event `fetched`, is what brought it `at`, and nothing has `used` it
    since."""
    if at is None:
        raise ScheduleError(f"{unit} is not fetched here")
    if at != fetched:
        raise ScheduleError(f"event {at} has spread {unit} already")
    if used:
        raise ScheduleError(f"event {used[0]} uses {unit} before it")
