"""What dependencies() and validate() ask of early and delayed steps and of their COMMIT."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_vertical.errors import ScheduleError
from ds_vertical.schedule.dependencies import dependencies, validate
from ds_vertical.schedule.events import MAX_STEPS, Event, Op, Schedule, parse_events
from ds_vertical.schedule.passes import TrainingStep, build_training

DUE = frozenset({"pre", 0, 1})
DELAYED = build_training(TrainingStep(2, 1, delayed=True, due=DUE))
EARLY = build_training(TrainingStep(2, 1, delayed=True, early=True))
# as far as the early step of layer 1, and no further
BACKWARD = "preFETCH preF0 0FETCH 1FETCH 0F0 1F0 sufHEAD0 1B0 1REDUCE 1RELEASE"


def needs_of(schedule: Schedule, event: str) -> str:
    index = [str(each) for each in schedule.events].index(event)
    return " ".join(str(schedule.events[i]) for i in dependencies(schedule.events)[index])


@pytest.mark.parametrize(
    ("event", "needs"),
    [
        ("preSTEP.d0@-1", ""),
        ("0STEP.d0@-1", ""),
        ("1STEP.d0@-1", ""),
        # handed over in memory: the fetch goes ahead, the first use waits, and what comes after is ordered by that
        ("0FETCH", ""),
        ("1FETCH", ""),
        ("preF0", "preSTEP.d0@-1 preFETCH"),
        ("0F0", "0STEP.d0@-1 preFETCH preF0 0FETCH"),
        ("1F0", "1STEP.d0@-1 preFETCH 0F0 1FETCH"),
        ("1B0", "preFETCH 1FETCH 1F0 sufHEAD0"),
    ],
)
def test_the_first_use_of_a_unit_waits_for_its_delayed_step(event: str, needs: str) -> None:
    assert needs_of(DELAYED, event) == needs


@pytest.mark.parametrize(
    ("event", "needs"),
    [
        ("1STEP.e0", "1REDUCE 1RELEASE"),
        ("0STEP.e0", "0REDUCE 0RELEASE"),
        ("preSTEP.e0", "1STEP.e0 preREDUCE preRELEASE"),
        ("NORM", "1REDUCE 1STEP.e0 0REDUCE 0STEP.e0 preREDUCE preSTEP.e0"),
        ("COMMIT", "NORM"),
    ],
)
def test_early_steps_wait_for_their_gradient_and_the_commit_for_all_of_them(event: str, needs: str) -> None:
    assert needs_of(EARLY, event) == needs


HOLDING = build_training(TrainingStep(3, 1, delayed=True, early=True, hold="d0"))


@pytest.mark.parametrize(
    ("event", "needs"),
    [
        ("2HOLD.d0", "2REDUCE"),
        ("1HOLD.d0", "1REDUCE"),
        ("0HOLD.d0", "2HOLD.d0 0REDUCE"),  # takes turns: each keeps the memory that it is written from
        ("preHOLD.d0", "1HOLD.d0 preREDUCE"),
        (
            "NORM",
            "2REDUCE 2HOLD.d0 2STEP.e0 1REDUCE 1HOLD.d0 1STEP.e0 0REDUCE 0HOLD.d0 0STEP.e0 preREDUCE preHOLD.d0 preSTEP.e0",
        ),
        ("2STEP.e0", "2REDUCE 2RELEASE"),
    ],
)
def test_a_step_is_decided_when_what_it_made_is_where_it_waits(event: str, needs: str) -> None:
    assert needs_of(HOLDING, event) == needs


def test_holding_changes_nothing_else() -> None:
    for hold, part in (("all", None), ("d0", "d0")):
        schedule = build_training(TrainingStep(3, 1, delayed=True, early=True, hold=hold))
        held = [event for event in schedule.events if event.op is Op.HOLD]
        assert [event.part for event in held] == [part] * 4
        assert Schedule.from_text(schedule.to_text()) == schedule
        left = tuple(event for event in schedule.events if event.op is not Op.HOLD)
        assert replace(schedule, events=left) == build_training(TrainingStep(3, 1, delayed=True, early=True))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0HOLD", "event 0 (0HOLD): needs 0REDUCE before it"),
        ("preFETCH 0FETCH 0STEP.d0@-1", "event 2 (0STEP.d0@-1): 0 was fetched before the step that makes its values"),
        ("preFETCH preF0 0FETCH 0F0 0RELEASE 0STEP.d0@-1", "0 was fetched before the step that makes its values"),
        ("preFETCH preSTEP.d0@-1", "event 1 (preSTEP.d0@-1): pre was fetched before the step"),
        ("0STEP.d0@-1 0STEP.d0@-1", "event 1 (0STEP.d0@-1): 0 has taken this step already"),
        ("1STEP.e0", "event 0 (1STEP.e0): needs 1REDUCE before it"),
        (BACKWARD.replace("1REDUCE 1RELEASE", "1RELEASE 1STEP.e0"), "(1STEP.e0): needs 1REDUCE before it"),
        (BACKWARD.replace("1RELEASE", "1STEP.e0"), "(1STEP.e0): 1 is still fetched, by event 3; release it before its step"),
        (f"{BACKWARD} 1FETCH 1STEP.e0", "(1STEP.e0): 1 is still fetched, by event 10; release it before its step"),
        (f"{BACKWARD} COMMIT", "event 10 (COMMIT): needs NORM before it"),
    ],
)
def test_a_step_at_the_wrong_place_is_refused(text: str, told: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        dependencies(parse_events(text))
    assert told in str(caught.value)


def test_an_early_step_after_the_norm_is_refused() -> None:
    assert [str(event) for event in EARLY.events[-3:]] == ["preSTEP.e0", "NORM", "COMMIT"]
    for late in ("NORM COMMIT preSTEP.e0", "NORM preSTEP.e0 COMMIT"):
        with pytest.raises(ScheduleError, match=r"\(preSTEP.e0\): NORM came before it, by which an early step must be over"):
            validate(replace(EARLY, events=(*EARLY.events[:-3], *parse_events(late))))


def without(schedule: Schedule, *texts: str) -> tuple[Event, ...]:
    kept = tuple(event for event in schedule.events if str(event) not in texts)
    assert len(kept) == len(schedule.events) - len(texts)
    return kept


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        (replace(build_training(TrainingStep(2, 1)), delayed=True), "(preSTEP): has no place in a schedule"),
        (replace(DELAYED, delayed=False), "never happened: preSTEP 0STEP 1STEP"),
        (replace(EARLY, early=False), "(1STEP.e0): has no place in a schedule"),
        (replace(DELAYED, early=True), "never happened: COMMIT preSTEP.e0 0STEP.e0 1STEP.e0"),
        (replace(EARLY, events=without(EARLY, "0STEP.e0")), "never happened: 0STEP.e0"),
        (replace(EARLY, events=without(EARLY, "COMMIT")), "never happened: COMMIT"),
        (replace(EARLY, events=(*EARLY.events, Event(Op.COMMIT))), "(COMMIT): stands here a second time"),
        (replace(EARLY, events=(*EARLY.events, Event(Op.STEP, 0))), "(0STEP): has no place in a schedule"),
        (replace(DELAYED, events=parse_events("2STEP.d0@-1") + DELAYED.events), "(2STEP.d0@-1): has no place in a schedule"),
    ],
)
def test_the_flags_of_the_header_say_which_steps_stand_there(schedule: Schedule, told: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        validate(schedule)
    assert told in str(caught.value)


def test_an_evaluation_takes_no_step() -> None:
    evaluation = "preFETCH preF0 0FETCH 0F0 0RELEASE sufF0 preRELEASE"
    validate(Schedule(1, 1, parse_events(evaluation), "forward"))
    with pytest.raises(ScheduleError, match=r"event 0 \(0STEP.d0@-1\): has no place in a schedule of order forward"):
        validate(Schedule(1, 1, parse_events(f"0STEP.d0@-1 {evaluation}"), "forward"))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.booleans(), st.booleans())
def test_at_most_so_many_steps_are_under_way(num_layers: int, delayed: bool, early: bool) -> None:
    """Steps of this schedule take turns, whatever else they wait for: each but the first few waits for an earlier one."""
    schedule = build_training(TrainingStep(num_layers, 1, delayed=delayed, early=early))
    needs = dependencies(schedule.events)
    steps = [index for index, event in enumerate(schedule.events) if event.op is Op.STEP]
    assert len(steps) == (num_layers + 1) * ((not delayed) + early)
    for index, before in zip(steps[MAX_STEPS:], steps, strict=False):
        assert before in needs[index]
    assert all(not set(needs[index]) & set(steps) for index in steps[:MAX_STEPS])
