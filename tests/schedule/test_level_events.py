"""SPREAD and CROSS in a schedule: which units cross the link again, what waits for what, and what validate() refuses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_vertical.errors import ScheduleError
from ds_vertical.schedule.dependencies import dependencies, validate
from ds_vertical.schedule.events import Event, Op, Outside, Schedule, parse_events
from ds_vertical.schedule.levels import arrivals, place_levels, units_to_copy
from ds_vertical.schedule.passes import TrainingStep, build_evaluation, build_training


def text(events: Iterable[Event]) -> str:
    return " ".join(map(str, events))


def without_levels(schedule: Schedule) -> list[Event]:
    return [event for event in schedule.events if event.op not in (Op.SPREAD, Op.CROSS)]


@st.composite
def steps(draw: st.DrawFn) -> TrainingStep:
    layers, window = draw(st.integers(1, 7)), draw(st.integers(0, 3))
    outside = draw(st.sampled_from([Outside(), Outside(True), Outside(True, ("pre", "suf"))]))
    order = "vertical" if outside.apart else draw(st.sampled_from(["vertical", "horizontal"]))
    flags = {name: draw(st.booleans()) for name in ("early", "delayed", "ahead", "reduces_beside")}
    share = draw(st.sampled_from([0.0, 0.4, 0.5, 1.0]))
    due = draw(st.frozensets(st.sampled_from(outside.around(range(layers)))))
    settings = {"window": window, "outside": outside, "due": due, "copy_share": share}
    return TrainingStep(layers, draw(st.integers(1, 3)), order, **settings, **flags)


@settings(max_examples=60, deadline=None)
@given(steps())
def test_levels_add_events_and_move_none(step: TrainingStep) -> None:
    step = replace(step, due=frozenset())
    schedule = build_training(step)
    assert without_levels(schedule) == [*build_training(replace(step, copy_share=None)).events]
    assert Schedule.from_text(schedule.to_text()) == schedule
    fetches = [event.layer for event in schedule.events if event.op is Op.FETCH and not event.ahead]
    spreads = [event.layer for event in schedule.events if event.op is Op.SPREAD]
    assert schedule.copied is not None
    for unit in set(fetches):
        assert spreads.count(unit) == (1 if unit in schedule.copied else fetches.count(unit))


@settings(max_examples=60, deadline=None)
@given(steps())
def test_who_needs_a_unit_or_its_gradients_waits_for_what_crosses_the_link(step: TrainingStep) -> None:
    events = build_training(step).events
    arrives: dict[object, int] = {}
    for index, (event, needs) in enumerate(zip(events, dependencies(events), strict=True)):
        unit = event.layer
        if event.op in (Op.FETCH, Op.SPREAD) and not event.ahead:
            assert event.op is Op.FETCH or arrives[unit] in needs
            arrives[unit] = index
        elif event.op in (Op.F, Op.B, Op.RELEASE) and isinstance(unit, int):
            assert arrives[unit] in needs
        elif event.op is Op.CROSS:
            assert events[index - 1] == Event(Op.REDUCE, unit) and index - 1 in needs
        elif event.op in (Op.HOLD, Op.NORM) or (event.op is Op.STEP and event.part == "e0"):
            assert not any(events[need].op is Op.REDUCE for need in needs)
            assert unit is None or any(events[need] == Event(Op.CROSS, unit) for need in needs)


@settings(max_examples=60, deadline=None)
@given(steps())
def test_a_unit_on_its_way_from_its_step_is_fetched_ahead_and_few_are_in_memory(step: TrainingStep) -> None:
    schedule = build_training(step)
    events = [event for event in schedule.events if event.op in (Op.FETCH, Op.STEP, Op.F, Op.RELEASE) and not event.ahead]
    there: set[object] = set()
    for index, event in enumerate(events):
        if not isinstance(event.layer, int):
            continue
        if event.op is Op.STEP and event.step_offset:
            assert Event(Op.FETCH, event.layer) in events[index:] and event.layer not in there
            there.add(event.layer)
        elif event.op is Op.FETCH:
            there.add(event.layer)
        elif event.op is Op.RELEASE:
            there.discard(event.layer)
        assert len(there) <= max(step.window + 2, 2) + 1, "buffers, as `memory_budget.layer_buffers` counts them"


def test_the_last_layers_keep_their_copies_first_and_units_outside_the_layers_last() -> None:
    events = build_training(TrainingStep(6, 1, outside=Outside(True, ("pre", "suf")), copy_share=0.0)).events
    again = ("pre", 0, 1, 2, 3)  # the last two are still there when the backward begins
    assert units_to_copy(events, 1.0) == again
    assert units_to_copy(events, 0.8) == again[1:]
    assert units_to_copy(events, 0.4) == (2, 3)
    assert units_to_copy(events, 0.0) == ()


def test_how_a_unit_comes_to_each_fetch() -> None:
    events = place_levels(parse_events("0FETCH 0F0 0RELEASE 1FETCH 1F0 1B0 1REDUCE 1RELEASE 0FETCH 0B0 0FETCH@+1"), [0])
    assert text(events).startswith("0FETCH 0SPREAD 0F0 0RELEASE 1FETCH 1SPREAD 1F0 1B0 1REDUCE 1CROSS 1RELEASE 0FETCH 0B0")
    found = {unit: [(a.spreads, a.from_copy, a.keeps) for a in each] for unit, each in arrivals(events, True).items()}
    assert found == {0: [(True, False, True), (False, True, False)], 1: [(True, False, False)]}
    flat = parse_events("0FETCH 0F0 0RELEASE 0FETCH 0B0")
    assert {any((a.spreads, a.from_copy, a.keeps)) for each in arrivals(flat, False).values() for a in each} == {False}


def test_an_evaluation_spreads_each_unit_and_keeps_none() -> None:
    schedule = build_evaluation(3, 2, calls=2, standing=frozenset())
    assert all(a.spreads and not a.keeps for each in arrivals(schedule.events, True).values() for a in each)
    assert schedule.to_text().splitlines()[0].endswith(" levels=none")


def test_an_evaluation_takes_a_copy_that_stands_and_leaves_it() -> None:
    schedule = build_evaluation(3, 2, calls=2, standing=frozenset([2, 0, "pre"]))
    assert schedule.to_text().splitlines()[0].endswith(" levels=pre,0,2 standing=pre,0,2")
    for unit, each in arrivals(schedule.events, True).items():
        assert {(a.spreads, a.from_copy, a.keeps) for a in each} == (
            {(True, False, False)} if unit == 1 else {(False, True, True)}
        )


@settings(max_examples=60, deadline=None)
@given(steps(), st.data())
def test_a_copy_that_stands_is_taken_by_each_fetch_and_made_again_behind_its_step(
    step: TrainingStep, data: st.DataObject
) -> None:
    """Where the next schedule begins with what this one has made, no forward crosses the link."""
    assert step.copy_share is not None
    units = step.outside.around(range(step.num_layers))
    step = replace(step, standing=data.draw(st.frozensets(st.sampled_from(units))))
    schedule = build_training(step)
    assert Schedule.from_text(schedule.to_text()) == schedule and schedule.copied is not None and schedule.standing is not None
    assert len(schedule.copied) == round(step.copy_share * len(units)) and set(schedule.standing) <= set(schedule.copied)
    renewed = [event.layer for event in schedule.events if event.op is Op.SPREAD and event.ahead]
    assert sorted(map(str, renewed)) == sorted(map(str, schedule.copied))
    for unit, each in arrivals(schedule.events, True).items():
        spread = [a.spreads for a in each]
        assert spread == (
            [unit not in schedule.standing] + [False] * (len(each) - 1) if unit in schedule.copied else [True] * len(each)
        )
        assert not each[-1].keeps, "its values are about to change"
    needs = dependencies(schedule.events)
    for index, event in enumerate(schedule.events):
        if event.op is Op.SPREAD and event.ahead:
            waited = {schedule.events[need].op for need in needs[index]}
            assert {Op.NORM, Op.RELEASE} <= waited
            assert (Op.COMMIT in waited) == step.early and (Op.STEP in waited) == (not step.delayed)
            assert not any(e.op is Op.STEP and e.layer == event.layer and not e.part for e in schedule.events[index:])
    plain = build_training(replace(step, standing=None))
    assert without_levels(schedule) == without_levels(plain)


def test_steps_overlap_though_their_copies_are_made_behind_them() -> None:
    events = build_training(TrainingStep(4, 1, copy_share=1.0, standing=(0, 1, 2, 3, "pre"))).events
    assert text(events[-10:]) == ("preSTEP 0STEP 1STEP preSPREAD@+1 2STEP 0SPREAD@+1 3STEP 1SPREAD@+1 2SPREAD@+1 3SPREAD@+1")
    early = build_training(TrainingStep(1, 1, early=True, delayed=True, copy_share=1.0, standing=())).events
    assert text(early[-4:]) == "NORM COMMIT preSPREAD@+1 0SPREAD@+1"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("0FETCH 0SPREAD", "0FETCH", "0 was fetched and never spread"),
        ("2CROSS 2RELEASE", "2RELEASE", "never happened: 2CROSS"),
        ("0FETCH 1B0", "0FETCH 0SPREAD 1B0", r"the node's copy of 0 is there \(levels=\)"),
        ("0FETCH 0SPREAD", "0SPREAD 0FETCH", "needs 0FETCH before it"),
        ("0SPREAD", "0SPREAD 0SPREAD", "has spread 0 already"),
        ("0FETCH 0SPREAD 1FETCH 1SPREAD 0F0", "0FETCH 1FETCH 1SPREAD 0F0 0SPREAD", "uses 0 before it"),
        ("2REDUCE 2CROSS 2RELEASE", "2REDUCE 2RELEASE 2CROSS", "stands between 2REDUCE and its CROSS"),
        (" levels=0", "", "1SPREAD|preSPREAD"),
        ("0STEP", "0SPREAD@+1 0STEP", "has no place in a schedule"),
    ],
)
def test_what_comes_from_nowhere_or_crosses_in_vain_is_refused(old: str, new: str, told: str) -> None:
    right = build_training(TrainingStep(3, 1, copy_share=1.0)).to_text()
    assert old in right, right
    with pytest.raises(ScheduleError, match=told):
        validate(Schedule.from_text(right.replace(old, new, 1)))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("2STEP 0SPREAD@+1 1SPREAD@+1 2SPREAD@+1", "2SPREAD@+1 2STEP", "has spread 2 for the next step; step it before that"),
        ("0SPREAD@+1", "0SPREAD@+1 0SPREAD@+1", "a second time"),
        (
            "NORM preSTEP 0STEP 1STEP preSPREAD@+1 2STEP 0SPREAD@+1",
            "0SPREAD@+1 NORM preSTEP 0STEP 1STEP 2STEP",
            "needs NORM before",
        ),
        ("standing=0,2", "standing=0", "2 was fetched and never spread"),
        ("standing=0,2", "standing=0,2,pre", "preSPREAD.*the node's copy of pre is there"),
    ],
)
def test_a_copy_that_stands_in_vain_or_has_old_values_is_refused(old: str, new: str, told: str) -> None:
    right = build_training(TrainingStep(3, 1, copy_share=1.0, standing=(0, 2))).to_text()
    header, _, events = right.partition("\n")
    events = " ".join(events.split())
    assert (old in header) != (old in events), right
    with pytest.raises(ScheduleError, match=told):
        validate(Schedule.from_text(f"{header.replace(old, new)}\n{events.replace(old, new, 1)}"))


def test_a_copy_is_of_a_unit_of_the_schedule() -> None:
    with pytest.raises(ScheduleError, match="standing must name units of copied, got 1"):
        Schedule(3, 1, (), copied=(0,), standing=(1,))
    with pytest.raises(ScheduleError, match="copied must name units of the schedule, got 7"):
        Schedule(3, 1, (), copied=(7,))
