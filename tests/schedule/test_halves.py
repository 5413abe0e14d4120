"""Schedules of the two halves of a step: what is made for the next half waits for nothing that this one computes; the first one
leaves its last gradients to the second one, which decides with them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_vertical.errors import ScheduleError
from ds_vertical.schedule.dependencies import dependencies, validate
from ds_vertical.schedule.events import MAX_STEPS, Event, Op, Outside, Schedule, parse_events
from ds_vertical.schedule.halves import FORWARDS_IN_A_BACKWARD, layers_left, units_left, visit_of_norm
from ds_vertical.schedule.passes import TrainingStep, build_training
from ds_vertical.types import Unit

ONE = Outside()
BEFORE = Event(Op.NORM, step_offset=-1)
FIRST, SECOND = {"leaves": True}, {"left": 2.0}


def half(layers: int, outside: Outside = ONE, standing: bool = True, made: bool = True, **flags: float) -> TrainingStep:
    every: frozenset[Unit] = frozenset(outside.around(range(layers)))
    none: frozenset[Unit] = frozenset()
    values = {"standing": every if standing else none, "made": every if made else none, "halves": True, "copy_share": 1.0}
    return TrainingStep(layers, 2, delayed=True, outside=outside, **values, **flags)


@st.composite
def halves(draw: st.DrawFn) -> TrainingStep:
    outside = draw(st.sampled_from([Outside(), Outside(True), Outside(True, ("pre", "suf")), Outside(False, ("pre",))]))
    flags = {name: draw(st.booleans()) for name in ("standing", "made", "reduces_beside")}
    place = draw(st.sampled_from([{}, FIRST, SECOND, {"left": 0.5}, {"left": 9.0}]))
    return half(draw(st.integers(1, 9)), outside, window=draw(st.integers(0, 3)), **flags, **place)


def visits(events: tuple[Event, ...]) -> list[int]:
    """Where the visits of layers start: the first F, or B, of a run on one layer."""
    work = [index for index, event in enumerate(events) if event.op in (Op.F, Op.B) and isinstance(event.layer, int)]
    return [index for place, index in enumerate(work) if not place or events[work[place - 1]].layer != events[index].layer]


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
    end = len(events) if step.leaves else events.index(Event(Op.NORM))
    assert max([0, *(index for index, event in enumerate(events) if event.op is Op.SPREAD)]) < end


@settings(max_examples=80, deadline=None)
@given(halves())
def test_a_half_computes_without_waiting_for_what_it_makes(step: TrainingStep) -> None:
    """Nor for the norm by which that is made: what else stands behind it waits for it by its place alone."""
    events = build_training(step).events
    needs = dependencies(events)
    makes = [index for index, event in enumerate(events) if event.op is Op.MAKE]
    decided = [index for index, event in enumerate(events) if event == BEFORE]
    assert len(decided) == (step.left is not None)
    for index, (event, needed) in enumerate(zip(events, needs, strict=True)):
        waited = [makes.index(each) for each in needed if each in makes]
        if event.op is Op.MAKE:
            place = makes.index(index)
            assert waited == ([place - MAX_STEPS] if place >= MAX_STEPS else [])
            assert sorted(needed) == sorted([*decided, *(makes[each] for each in waited)])
        elif event.op is Op.SPREAD and event.ahead:
            assert [events[makes[place]].layer for place in waited] == [event.layer] and len(needed) == 1
        else:
            assert waited == [] and not set(decided) & set(needed)


@settings(max_examples=80, deadline=None)
@given(halves())
def test_the_first_half_ends_without_its_norm_and_nothing_waits_for_its_last_gradients(step: TrainingStep) -> None:
    first = build_training(replace(step, leaves=True, left=None)).events
    needs = dependencies(first)
    left = [index for index, event in enumerate(first) if event.op is Op.CROSS and event.ahead]
    assert not any(event.op is Op.NORM for event in first)
    assert {first[index].layer for index in left} == set(units_left(step.outside)) >= {0, "pre"}
    behind = [event.layer for event in first[first.index(Event(Op.REDUCE, 0)) :] if event.op is Op.REDUCE]
    assert set(behind) == set(units_left(step.outside)), "those that are reduced last"
    assert not {index for each in needs for index in each} & set(left)
    crossed = [index for index, event in enumerate(first) if event.op is Op.CROSS and not event.ahead]
    for index in (first.index(Event(Op.REDUCE, unit)) for unit in behind):
        assert not crossed or crossed[-1] in needs[index], "all but those are over by then"


@settings(max_examples=80, deadline=None)
@given(halves())
def test_the_second_half_decides_behind_some_forwards_and_ahead_of_what_it_makes_and_reduces(step: TrainingStep) -> None:
    events = build_training(replace(step, leaves=False, left=step.left or 2.0)).events
    at = events.index(BEFORE)
    assert events.count(BEFORE) == events.count(Event(Op.NORM)) == 1 and events[-1] == Event(Op.NORM)
    behind = [index for index, event in enumerate(events) if event.op in (Op.MAKE, Op.REDUCE) or event == Event(Op.NORM)]
    assert at < min(behind)
    starts = visits(events)
    assert (starts[0] < at) == (len(starts) > 1), "behind one visit at least, where there are several"
    makes = [index for index, event in enumerate(events) if event.op is Op.MAKE]
    if step.made and len(starts) >= len(makes) + MAX_STEPS + 1:
        spreads = [index for index, event in enumerate(events) if event.op is Op.SPREAD and event.ahead]
        assert spreads[-1] < starts[-1], "the last one has the last visit to travel in"
        for first, second in zip(makes, makes[1:], strict=False):
            assert any(first < start < second for start in starts), "each has a visit of its own"


def test_the_norm_stands_as_late_as_the_gradients_that_are_left_need_it() -> None:
    """Of 12 layers: 23 visits, 13 units."""
    places = [visit_of_norm(left, 23, 13) for left in (0.1, 0.5, 1.0, 1.2, 2.0, 4.0, 99.0)]
    assert places == [1, 1, 2, 3, 4, 8, 8] and FORWARDS_IN_A_BACKWARD == 2
    assert [visit_of_norm(2.0, 2 * layers - 1, layers + 1) for layers in (1, 2, 3, 5, 6, 7, 8)] == [0, 1, 1, 1, 2, 3, 4]
    sizes = {"pre": 30.0, "suf": 20.0, 0: 10.0, 1: 10.0, 2: 40.0}
    assert layers_left(ONE, [10.0, 10.0, 40.0], sizes.__getitem__) == pytest.approx(2.0)
    assert layers_left(Outside(True), [10.0, 10.0, 40.0], sizes.__getitem__) == pytest.approx(3.0)
    assert layers_left(Outside(True, ("pre", "suf")), [10.0, 10.0, 40.0], sizes.__getitem__) == pytest.approx(2.0)
    assert layers_left(ONE, [0.0], lambda _: 0.0) == 0.0, "all are frozen"


def test_a_half_that_reads_copies_sends_nothing_to_fetch_them() -> None:
    stands, absent = (build_training(half(3, standing=standing)) for standing in (True, False))
    sent = [[event.layer for event in each.events if event.op is Op.SPREAD and not event.ahead] for each in (stands, absent)]
    assert sent == [[], ["pre", 0, 1, 2]]


def test_values_for_the_next_schedule_need_copies_that_outlive_this_one() -> None:
    schedule, plain = build_training(half(2)), build_training(TrainingStep(2, 2, delayed=True))
    for word in ("0MAKE", "NORM@-1"):
        with pytest.raises(ScheduleError, match=f"{word}.*has no place"):
            validate(replace(plain, events=(*parse_events(word), *plain.events)))
    with pytest.raises(ScheduleError, match="a second time"):
        validate(replace(schedule, events=(Event(Op.MAKE, 0), *schedule.events)))


def test_gradients_are_left_by_halves_alone() -> None:
    step = TrainingStep(2, 2, copy_share=1.0)
    crosses = (Event(Op.CROSS, 0), replace(Event(Op.CROSS, 0), step_offset=1))
    events = build_training(step).events
    with pytest.raises(ScheduleError, match=r"0CROSS@\+1.*has no place"):
        validate(replace(build_training(step), events=tuple(crosses[1] if each == crosses[0] else each for each in events)))


@pytest.mark.parametrize(
    ("given", "moved", "ahead_of", "problem"),
    [
        (SECOND, "NORM@-1", "1CROSS", "write it ahead of each REDUCE and MAKE"),
        (SECOND, "NORM@-1", "0MAKE", "write it ahead of each REDUCE and MAKE"),
        (SECOND, "preMAKE", "0FETCH", "write it ahead of each REDUCE and MAKE"),
        (FIRST, "NORM", "", "leaves the gradients of 0 to the next schedule: leave NORM to that one"),
        (FIRST, "0HOLD", "", "needs 0REDUCE before it"),
        (SECOND, "NORM", "", "NORM.*stands here a second time"),
    ],
)
def test_an_event_of_the_halves_in_another_place_is_refused(
    given: dict[str, float], moved: str, ahead_of: str, problem: str
) -> None:
    """`moved`: taken from where it stands; ahead of nothing: at the end, besides."""
    schedule = build_training(half(2, **given))
    (event,) = parse_events(moved)
    others = [each for each in schedule.events if each != event or not ahead_of]
    place = others.index(parse_events(ahead_of)[0]) if ahead_of else len(others)
    with pytest.raises(ScheduleError, match=problem):
        validate(replace(schedule, events=(*others[:place], event, *others[place:])))


def test_a_first_half_with_a_gradient_that_nobody_waits_for_is_refused() -> None:
    schedule = build_training(half(2, **FIRST))
    for gone in ("0CROSS@+1", "preCROSS@+1"):
        with pytest.raises(ScheduleError):
            validate(replace(schedule, events=tuple(each for each in schedule.events if str(each) != gone)))
