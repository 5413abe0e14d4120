"""Collectives over two levels: the ranks of a node, and the ranks of all nodes with one number in their nodes.

[Note: levels] With one level each FETCH gathers a unit over all ranks, and each REDUCE reduces its gradients over all ranks.
With two, SPREAD stands behind a FETCH: once the rank's own shards are read, it gathers them over the nodes, and then the unit
over the ranks of the node. What has crossed the link is the node's copy of the unit. Each of its ranks has a part of the copy.

A unit whose copy is kept (`Schedule.copied`) needs no SPREAD where it is fetched again: that FETCH reads nothing, and gathers
the copy over the node alone. A node keeps the copy until no FETCH is left that needs it. REDUCE sums a unit's gradients over
the ranks of the node, and CROSS behind it sums them over the nodes. What waits for a unit's gradients waits for CROSS.

[Note: standing copies] A copy may outlive the step (`Schedule.standing`): then each FETCH of the next step comes out of it. The
last FETCH of a step gives it up, since the unit's values are about to change. SPREAD@+1 makes it again, behind the unit's STEP
and COMMIT: no value that may still be discarded crosses the link. It makes none where the unit's step is left to the next
schedule. There the unit comes by FETCH and SPREAD, behind its STEP.d0@-1. Which copies stand is known when a step begins, and
not before: a user or a load may have written parameters.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from ds_vertical.errors import ScheduleError
from ds_vertical.schedule.events import MAX_STEPS, Event, Op, Schedule, error_at
from ds_vertical.types import PRE, SUF, Unit


def units_to_copy(events: Sequence[Event], share: float, stay: bool = False) -> tuple[Unit, ...]:
    """The units whose copy is kept: of those that are fetched again the given share, the last layers first, since their copies
    wait for the shortest time. `stay`: copies outlive the step; then of all units, those that are fetched again first."""
    counts: Counter[Unit | None] = Counter(event.layer for event in events if _is_fetch(event))
    again: list[Unit] = [unit for unit, count in counts.items() if count > 1 and unit is not None]
    once: list[Unit] = [unit for unit, count in counts.items() if stay and count == 1 and unit is not None]
    chosen = _last_layers_first(again) + _last_layers_first(once)
    return in_order(chosen[: round(share * len(chosen))])


def _last_layers_first(units: Sequence[Unit]) -> list[Unit]:
    layers = sorted((unit for unit in units if isinstance(unit, int)), reverse=True)
    return [*layers, *(unit for unit in units if not isinstance(unit, int))]


def in_order(units: Iterable[Unit]) -> tuple[Unit, ...]:
    """Units as a schedule's header names them: those outside the layers, then layers by their numbers."""
    given = set(units)
    return (*(unit for unit in (PRE, SUF) if unit in given), *sorted(unit for unit in given if isinstance(unit, int)))


def place_standing(events: Sequence[Event], copied: Collection[Unit], delayed: bool) -> tuple[Event, ...]:
    """SPREAD@+1 of each copied unit: two steps behind its own STEP, which is over by then; where steps are `delayed`, behind
    the event that decides. See [Note: standing copies]."""
    if delayed:
        last = max(index for index, event in enumerate(events) if event.op in (Op.NORM, Op.COMMIT))
        fetches = (event for event in events if _is_fetch(event) and event.layer in copied)
        spreads = dict.fromkeys(replace(fetch, op=Op.SPREAD, step_offset=1) for fetch in fetches)
        return (*events[: last + 1], *spreads, *events[last + 1 :])
    placed: list[Event] = []
    waiting: deque[Event] = deque()
    ends = [index for index, event in enumerate(events) if event.op is Op.STEP and event.part is None]
    for index, event in enumerate(events):
        placed.append(event)
        if index in ends:
            waiting.append(replace(event, op=Op.SPREAD, step_offset=1))
            due = [waiting.popleft() for _ in range(len(waiting) if index == ends[-1] else len(waiting) - MAX_STEPS)]
            placed += (spread for spread in due if spread.layer in copied)
    return tuple(placed)


def place_levels(events: Sequence[Event], copied: Collection[Unit], standing: Collection[Unit] = ()) -> tuple[Event, ...]:
    """SPREAD behind each FETCH of a unit whose copy is not there, CROSS behind each REDUCE; see [Note: levels]."""
    there: set[Unit] = set(standing)
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
    neither. `keeps`: the next FETCH needs the node's copy, of this schedule or of a later one."""

    spreads: bool = False
    from_copy: bool = False
    keeps: bool = False


def arrivals(events: Sequence[Event], levels: bool) -> dict[Unit, deque[Arrival]]:
    """By unit, how it comes to each of its FETCHes, in their order. Without `levels` none spreads or keeps. A copy that stands
    is kept by a schedule that does not train."""
    spreads: dict[Unit, list[bool]] = {}
    trains = any(event.op is Op.REDUCE for event in events)
    for event in events:
        if event.layer is None:
            continue
        if _is_fetch(event):
            spreads.setdefault(event.layer, []).append(False)
        elif event.op is Op.SPREAD and not event.ahead:
            spreads[event.layer][-1] = True
    if not levels:
        return {unit: deque([Arrival()] * len(each)) for unit, each in spreads.items()}
    return {
        unit: deque(Arrival(now, not now, not later) for now, later in zip(each, [*each[1:], trains or each[-1]], strict=True))
        for unit, each in spreads.items()
    }


def check_levels(schedule: Schedule) -> None:
    """Raise ScheduleError where a unit is fetched and comes from nowhere, or crosses the link though its copy is there."""
    if schedule.copied is None:
        return
    there: set[Unit] = set(schedule.standing or ())
    missing: set[Unit | None] = set()
    reduced: Event | None = None
    for index, event in enumerate(schedule.events):
        if reduced is not None and (event.op, event.layer) != (Op.CROSS, reduced.layer):
            raise error_at(schedule.events, index, f"stands between {reduced} and its CROSS, which come one behind the other")
        reduced = event if event.op is Op.REDUCE else None
        if _is_fetch(event) and event.layer not in there:
            missing.add(event.layer)
        elif event.op is Op.SPREAD and event.ahead:
            continue
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
