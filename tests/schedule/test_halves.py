"""Schedules of the two halves of a step: what is made for the next half waits for nothing of this one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_vertical.errors import ScheduleError
from ds_vertical.schedule.dependencies import dependencies, validate
from ds_vertical.schedule.events import MAX_STEPS, Event, Op, Outside, Schedule
from ds_vertical.schedule.passes import TrainingStep, build_training
from ds_vertical.types import Unit

ONE = Outside()


def half(layers: int, outside: Outside = ONE, standing: bool = True, made: bool = True, **flags: int) -> TrainingStep:
    every: frozenset[Unit] = frozenset(outside.around(range(layers)))
    none: frozenset[Unit] = frozenset()
    values = {"standing": every if standing else none, "made": every if made else none, "halves": True, "copy_share": 1.0}
    return TrainingStep(layers, 2, delayed=True, outside=outside, **values, **flags)


@st.composite
def halves(draw: st.DrawFn) -> TrainingStep:
    outside = draw(st.sampled_from([Outside(), Outside(True), Outside(True, ("pre", "suf")), Outside(False, ("pre",))]))
    flags = {name: draw(st.booleans()) for name in ("standing", "made", "reduces_beside")}
    return half(draw(st.integers(1, 7)), outside, window=draw(st.integers(0, 3)), **flags)


@settings(max_examples=80, deadline=None)
@given(halves())
def test_every_unit_is_made_once_and_spread_behind_that(step: TrainingStep) -> None:
    schedule = build_training(step)
    assert Schedule.from_text(schedule.to_text()) == schedule
    events = schedule.events
    made = [event.layer for event in events if event.op is Op.MAKE]
    spread = [event.layer for event in events if event.op is Op.SPREAD and event.ahead]
    assert made == spread == [unit for unit in step.outside.around(range(step.num_layers)) if unit in step.made]
    for unit in made:
        assert events.index(Event(Op.MAKE, unit)) < events.index(Event(Op.SPREAD, unit, step_offset=1))
    assert max([0, *(index for index, event in enumerate(events) if event.op is Op.SPREAD)]) < events.index(Event(Op.NORM))


@settings(max_examples=80, deadline=None)
@given(halves())
def test_a_half_computes_without_waiting_for_what_it_makes(step: TrainingStep) -> None:
    events = build_training(step).events
    needs = dependencies(events)
    makes = [index for index, event in enumerate(events) if event.op is Op.MAKE]
    for index, (event, needed) in enumerate(zip(events, needs, strict=True)):
        waited = [makes.index(each) for each in needed if each in makes]
        if event.op is Op.MAKE:
            place = makes.index(index)
            assert waited == ([place - MAX_STEPS] if place >= MAX_STEPS else []) and len(needed) == len(waited)
        elif event.op is Op.SPREAD and event.ahead:
            assert [events[makes[place]].layer for place in waited] == [event.layer] and len(needed) == 1
        else:
            assert waited == []


def test_a_half_that_reads_copies_sends_nothing_to_fetch_them() -> None:
    stands, absent = (build_training(half(3, standing=standing)) for standing in (True, False))
    sent = [[event.layer for event in each.events if event.op is Op.SPREAD and not event.ahead] for each in (stands, absent)]
    assert sent == [[], ["pre", 0, 1, 2]]


def test_values_for_the_next_schedule_need_copies_that_outlive_this_one() -> None:
    schedule = build_training(half(2))
    with pytest.raises(ScheduleError, match="0MAKE.*has no place"):
        validate(replace(build_training(TrainingStep(2, 2, delayed=True)), events=(Event(Op.MAKE, 0), *schedule.events)))
    with pytest.raises(ScheduleError, match="a second time"):
        validate(replace(schedule, events=(Event(Op.MAKE, 0), *schedule.events)))
