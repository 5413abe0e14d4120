"""The text of an event and of a schedule, dependencies(), and what validate() lets through and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_vertical.errors import ScheduleError
from ds_vertical.schedule.dependencies import dependencies, validate
from ds_vertical.schedule.events import Event, Op, Schedule, format_window, parse_event, parse_events
from ds_vertical.schedule.passes import TrainingStep, build_evaluation, build_training

ALL_DUE = frozenset({"pre", 0, 1, 2})
SMALL = {
    "vertical": build_training(TrainingStep(3, 2)),
    "vertical, window 0": build_training(TrainingStep(2, 2, window=0)),
    "snake": build_training(TrainingStep(2, 2, snake=True)),
    "horizontal": build_training(TrainingStep(2, 2, order="horizontal")),
    "horizontal, window 0": build_training(TrainingStep(2, 2, order="horizontal", window=0)),
    "evaluation": build_evaluation(3, 2),
    "one of each": build_training(TrainingStep(1, 1, window=0)),
    "delayed": build_training(TrainingStep(3, 2, delayed=True, due=ALL_DUE, lead=1)),
    "early": build_training(TrainingStep(3, 1, delayed=True, early=True, due=frozenset({"pre", 1}))),
}
HEADER_END = "micro_batches=2 snake=0 window=1 delayed=0 early=0"
small_schedules = pytest.mark.parametrize("schedule", SMALL.values(), ids=SMALL.keys())


@pytest.mark.parametrize(
    ("text", "event"),
    [
        ("3FETCH", Event(Op.FETCH, 3)),
        ("preFETCH", Event(Op.FETCH, "pre")),
        ("12F10", Event(Op.F, 12, 10)),
        ("preF0", Event(Op.F, "pre", 0)),
        ("sufHEAD0", Event(Op.HEAD, "suf", 0)),
        ("sufF0", Event(Op.F, "suf", 0)),
        ("preB0", Event(Op.B, "pre", 0)),
        ("3REDUCE", Event(Op.REDUCE, 3)),
        ("preREDUCE", Event(Op.REDUCE, "pre")),
        ("3SAVE0", Event(Op.SAVE, 3, 0)),
        ("3GSAVE0", Event(Op.GSAVE, 3, 0)),
        ("NORM", Event(Op.NORM)),
        ("NORM@-1", Event(Op.NORM, step_offset=-1)),
        ("3CROSS@+1", Event(Op.CROSS, 3, step_offset=1)),
        ("3STEP", Event(Op.STEP, 3)),
        ("3STEP.e2", Event(Op.STEP, 3, part="e2")),
        ("3STEP.d0@-1", Event(Op.STEP, 3, part="d0", step_offset=-1)),
        ("3COMMIT.e2", Event(Op.COMMIT, 3, part="e2")),
        ("COMMIT", Event(Op.COMMIT)),
    ],
)
def test_event_text(text: str, event: Event) -> None:
    assert str(event) == text
    assert parse_event(text) == event


@pytest.mark.parametrize(
    "text",
    ["", "F", "3", "3F", "F0", "3f0", "03F0", "3F00", "3F-1", "-1F0", "3FETCH0", "midFETCH", "sufB0", "preHEAD0"]
    + ["HEAD0", "3NORM", "NORM0", "3STEP.x1", "3STEP.e", "3STEP.e01", "3STEP@1", "3STEP@0", "3STEP@-0", "3F0.e1"]
    + ["3F0@-1", "3JUMP", "3F0 3F1", " 3F0", "3F0\n", "midF0"],
)  # fmt: skip
def test_bad_event_text_is_refused_with_the_text_and_the_form(text: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_event(text)
    assert repr(text) in str(caught.value)
    assert "3FETCH, preF0, sufHEAD0, NORM, 3STEP.d0@-1" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"op": "F", "layer": 0, "micro_batch": 0}, "op must be one of FETCH, SPREAD, RELEASE, F"),
        ({"op": Op.F, "layer": "mid", "micro_batch": 0}, "layer must be a number >= 0, 'pre' or 'suf', got 'mid'"),
        ({"op": Op.F, "layer": True, "micro_batch": 0}, "layer must be a number >= 0, 'pre' or 'suf', got True"),
        ({"op": Op.F, "layer": 0}, "F needs a micro-batch number >= 0, got None"),
        ({"op": Op.FETCH, "layer": 0, "micro_batch": 1}, "FETCH takes no micro-batch, got 1"),
        ({"op": Op.FETCH}, "FETCH goes with layer or pre or suf, got none"),
        ({"op": Op.HEAD, "layer": 2, "micro_batch": 0}, "HEAD goes with suf, got 2"),
        ({"op": Op.STEP, "layer": 0, "part": "2"}, "STEP takes e<chunk> or d<chunk> as part, got '2'"),
        ({"op": Op.STEP, "layer": 0, "step_offset": 1}, "STEP takes a step offset <= 0, got 1"),
        ({"op": Op.NORM, "part": "e0"}, "NORM takes no part, got 'e0'"),
        ({"op": Op.NORM, "step_offset": 1}, "NORM takes a step offset <= 0, got 1"),
        ({"op": Op.CROSS, "layer": 0, "step_offset": -1}, "CROSS takes a step offset >= 0, got -1"),
        ({"op": Op.REDUCE, "layer": 0, "step_offset": 1}, "REDUCE takes no step offset, got 1"),
        ({"op": Op.F, "layer": 0, "micro_batch": 0, "part": "c0"}, "F takes c<call>, from c1 on, as part, got 'c0'"),
        ({"op": Op.B, "layer": 0, "micro_batch": 0, "part": "c1"}, "B takes no part, got 'c1'"),
    ],
)
def test_fields_that_do_not_fit_the_operation_are_refused(fields: dict[str, object], told: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Event(**fields)
    assert told in str(caught.value)


@st.composite
def events_of_any_kind(draw: st.DrawFn) -> Event:
    """Draws fields freely and keeps what Event takes: whatever can be built must survive its text."""
    counts = st.integers(0, 200)
    fields = {
        "op": draw(st.sampled_from(Op)),
        "layer": draw(st.one_of(counts, counts, st.sampled_from(["pre", "suf", None]))),
        "micro_batch": draw(st.one_of(st.none(), counts)),
        "part": draw(st.one_of(st.none(), st.builds("{}{}".format, st.sampled_from("ed"), counts))),
        "step_offset": draw(st.sampled_from([0, 0, -1, -12])),
    }
    for dropped in ({}, {"micro_batch": None}, {"part": None, "step_offset": 0}, {"op": Op.NORM, "layer": None}):
        fields |= dropped
        try:
            return Event(**fields)
        except ScheduleError:
            continue
    return Event(Op.FETCH, 0)


@settings(max_examples=150, deadline=None)
@given(events_of_any_kind())
def test_event_text_round_trips(event: Event) -> None:
    assert parse_event(str(event)) == event


@settings(max_examples=30, deadline=None)
@given(st.lists(events_of_any_kind(), max_size=30), st.booleans(), st.booleans())
def test_schedule_text_round_trips_whatever_the_events(events: list[Event], delayed: bool, early: bool) -> None:
    schedule = Schedule(3, 2, tuple(events), "vertical", True, 4, delayed, early)
    assert Schedule.from_text(schedule.to_text()) == schedule


def test_schedule_text_takes_comments_and_any_white_space() -> None:
    text = "\n  # ds_vertical schedule v1 order=forward layers=1 micro_batches=1 snake=0 window=0 delayed=0 early=0\n"
    text += "# seen on Tuesday\n\tpreFETCH   preF0\n\n  # and 9F9 is a comment\n0FETCH"
    assert Schedule.from_text(text).events == parse_events("preFETCH preF0 0FETCH")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not a schedule header: ''"),
        ("3F0 3F1", "not a schedule header: '3F0 3F1'"),
        (f"# ds_vertical schedule v2 order=vertical layers=3 {HEADER_END}", "not a schedule header"),
        (f"# ds_vertical schedule v1 order=vertical layers=3 {HEADER_END}\n3FLY", "'3FLY'"),
        (f"# ds_vertical schedule v1 order=zigzag layers=3 {HEADER_END}", "got 'zigzag'"),
        (f"# ds_vertical schedule v1 order=forward layers=3 {HEADER_END.replace('snake=0', 'snake=1')}", "got forward"),
        (f"# ds_vertical schedule v1 order=vertical layers=0 {HEADER_END}", "num_layers must be"),
        (f"# ds_vertical schedule v1 order=vertical layers=3 {HEADER_END.replace('early=0', 'early=2')}", "not a schedule"),
        (f"# ds_vertical schedule v1 order=vertical layers=3 {HEADER_END.removesuffix(' early=0')}", "not a schedule header"),
    ],
)
def test_bad_schedule_text_is_refused(text: str, told: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_text(text)
    assert told in str(caught.value)


def test_format_window_marks_the_event_and_shows_its_neighbours() -> None:
    events = parse_events("preFETCH preF0 0FETCH 0F0 0RELEASE")
    assert format_window(events, 2, radius=1) == "     1  preF0\n     2  0FETCH  <-- here\n     3  0F0"
    assert format_window(events, 0, radius=1) == "     0  preFETCH  <-- here\n     1  preF0"
    assert format_window(events, 5, radius=1) == "     4  0RELEASE\n     5  (end)  <-- here"


def depended_on(schedule: Schedule) -> dict[str, str]:
    needs = dependencies(schedule.events)
    return {str(e): " ".join(str(schedule.events[i]) for i in n) for e, n in zip(schedule.events, needs, strict=True)}


def test_dependencies_of_a_training_step() -> None:
    assert depended_on(build_training(TrainingStep(2, 2))) == {
        "preFETCH": "",
        "preF0": "preFETCH",
        "preF1": "preFETCH",
        "0FETCH": "",
        "1FETCH": "",
        "0F0": "preFETCH preF0 0FETCH",
        "0F1": "preFETCH preF1 0FETCH",
        "1F0": "preFETCH 1FETCH 0F0",
        "1F1": "preFETCH 1FETCH 0F1",
        "sufHEAD0": "preFETCH 1F0",
        "sufHEAD1": "preFETCH sufHEAD0 1F1",
        "1B0": "preFETCH 1FETCH 1F0 sufHEAD0",
        "1B1": "preFETCH 1FETCH 1B0 1F1 sufHEAD1",
        "1REDUCE": "1B0 1B1",
        "1RELEASE": "1FETCH 1F0 1B0 1F1 1B1",
        "0B0": "preFETCH 0FETCH 0F0 1B0",
        "0B1": "preFETCH 0FETCH 0F1 1B1 0B0",
        "0REDUCE": "1REDUCE 0B0 0B1",
        "0RELEASE": "0FETCH 0F0 0F1 0B0 0B1",
        "preB0": "preFETCH sufHEAD1 0B0",
        "preB1": "preFETCH 0B1 preB0",
        "preREDUCE": "sufHEAD0 sufHEAD1 0REDUCE preB0 preB1",
        "preRELEASE": "preFETCH preF0 preF1 0F0 0F1 1F0 sufHEAD0 1B0 1F1 sufHEAD1 1B1 0B0 0B1 preB0 preB1",
        "NORM": "1REDUCE 0REDUCE preREDUCE",
        "preSTEP": "preRELEASE NORM",
        "0STEP": "0RELEASE NORM",
        "1STEP": "1RELEASE NORM preSTEP",
    }


def test_dependencies_of_an_evaluation() -> None:
    assert depended_on(build_evaluation(1, 1, window=0)) == {
        "preFETCH": "",
        "preF0": "preFETCH",
        "0FETCH": "",
        "0F0": "preFETCH preF0 0FETCH",
        "0RELEASE": "0FETCH 0F0",
        "sufF0": "preFETCH 0F0",
        "preRELEASE": "preFETCH preF0 0F0 sufF0",
    }


def test_a_second_fetch_waits_for_the_release_and_gives_to_what_follows_it() -> None:
    schedule = build_training(TrainingStep(2, 1, window=0))
    needs = dependencies(schedule.events)
    first, second = (i for i, event in enumerate(schedule.events) if str(event) == "0FETCH")
    release, backward = schedule.events.index(Event(Op.RELEASE, 0)), schedule.events.index(Event(Op.B, 0, 0))
    assert needs[second] == (release,)
    assert second in needs[backward] and first not in needs[backward]


def test_a_fetch_after_a_step_waits_for_it() -> None:
    schedule = build_training(TrainingStep(1, 1, window=0))
    events = (*schedule.events, Event(Op.FETCH, 0))
    assert dependencies(events)[-1] == (events.index(Event(Op.RELEASE, 0)), events.index(Event(Op.STEP, 0)))


def test_dependencies_refuse_an_event_that_no_rule_covers() -> None:
    with pytest.raises(ScheduleError, match=r"event 1 \(0HOLD.e0\): no rule says what it depends on"):
        dependencies(parse_events("preFETCH 0HOLD.e0"))
    for text in ("0STEP.d1@-1", "0STEP.d1", "0FETCH@+2", "0STEP.e0@-1", "0STEP.e1", "0STEP@-1", "0HOLD.d0@-1", "COMMIT.e0"):
        with pytest.raises(ScheduleError, match=r"event 0 .*: no rule says what it depends on"):
            dependencies(parse_events(text))


@pytest.mark.parametrize(
    ("end", "needs"),
    [
        ("NORM 0FETCH@+1", ("NORM", "0RELEASE")),
        ("NORM 0STEP 0FETCH@+1", ("NORM", "0RELEASE", "0STEP")),
        ("0STEP.e0 NORM COMMIT 0FETCH@+1", ("NORM", "0RELEASE", "COMMIT")),
        ("NORM 0STEP.d0", ("NORM", "0RELEASE")),
        ("0STEP.e0 NORM COMMIT 0STEP.d0", ("NORM", "0RELEASE", "COMMIT")),
        ("NORM 0STEP.d0 0FETCH@+1", ("NORM", "0RELEASE")),
    ],
)
def test_what_is_issued_for_the_next_step_comes_after_what_decides_it(end: str, needs: tuple[str, ...]) -> None:
    text = "preFETCH preF0 0FETCH 0F0 sufHEAD0 0B0 0REDUCE 0RELEASE preB0 preREDUCE preRELEASE"
    events = parse_events(f"{text} {end}")
    assert {str(events[need]) for need in dependencies(events)[-1]} == set(needs)
    assert events[-1].ahead and not any(event.ahead for event in events[:-2])
    assert Schedule.from_text(Schedule(1, 1, events).to_text()).events == events


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("0FETCH@+1", "needs NORM before it"),
        ("0STEP.e0 NORM 0FETCH@+1 COMMIT", "needs COMMIT before it"),
        ("0STEP.e0 NORM 0STEP.d0 COMMIT", "needs COMMIT before it"),
        ("NORM 0FETCH@+1 0FETCH@+1", "event 12 has read 0 for the next step; read it once before that"),
        ("NORM 0FETCH@+1 0STEP", "event 12 has read 0 for the next step; step it before that"),
        ("NORM 0FETCH@+1 0STEP.d0", "event 12 has read 0 for the next step; step it before that"),
        ("NORM 0FETCH@+1 0FETCH", "event 12 has read 0 for the next step; fetch it before that"),
        ("NORM 0FETCH 0FETCH@+1", "0 is still fetched, by event 12; release it before"),
        ("NORM 0FETCH 0STEP.d0", "0 is still fetched, by event 12; release it before its step"),
    ],
)
def test_nothing_makes_what_was_read_for_the_next_step_old(end: str, told: str) -> None:
    text = "preFETCH preF0 0FETCH 0F0 sufHEAD0 0B0 0REDUCE 0RELEASE preB0 preREDUCE preRELEASE"
    with pytest.raises(ScheduleError, match=re.escape(told)):
        dependencies(parse_events(f"{text} {end}"))


def edited(schedule: Schedule, before: str, after: str) -> Schedule:
    text = schedule.to_text()
    assert text.count(before) == 1, (before, text)
    return Schedule.from_text(text.replace(before, after))


@pytest.mark.parametrize(
    ("name", "before", "after", "told"),
    [
        ("vertical", "2FETCH ", "", "event 10 (2F0): needs the parameters of 2, which are not fetched here"),
        ("vertical", "preFETCH ", "", "event 0 (preF0): needs the parameters of pre"),
        ("vertical", "2FETCH", "2FETCH 2FETCH", "2 is already fetched, by event 8"),
        ("vertical", "2RELEASE", "2RELEASE 2RELEASE", "event 19 (2RELEASE): 2 is not fetched here"),
        ("vertical", "1REDUCE 1RELEASE", "1REDUCE", "1STEP): 1 is still fetched"),
        ("evaluation", "2RELEASE", "", "at the end of the schedule: still fetched: 2"),
        ("evaluation", "0F1 0RELEASE", "0F1", "event 7 (2FETCH): is layer number 3 fetched at once; window 1 allows 2"),
        ("vertical", "2F1 sufHEAD1", "sufHEAD1", "sufHEAD1): needs 2F1 before it"),
        ("vertical", "2F1 sufHEAD1", "2F1", "2B1): needs sufHEAD1 before it"),
        ("vertical", "1B0 1B1", "1B0", "1REDUCE): needs 1B1 before it"),
        ("vertical", "2B1", "2B1 2B1", "2B1): stands here a second time"),
        ("vertical", "2REDUCE", "", "NORM): needs 2REDUCE before it"),
        ("vertical", "2REDUCE", "2REDUCE 2REDUCE", "2REDUCE): stands here a second time"),
        ("vertical", "NORM preSTEP", "preSTEP NORM", "preSTEP): needs NORM before it"),
        ("vertical", "1STEP", "", "never happened: 1STEP"),
        ("vertical", "1STEP", "1STEP 5STEP", "5STEP): has no place in a schedule of order vertical with 3 layers"),
        ("vertical", "2F1", "2F1 2F2", "2F2): has no place"),
        ("vertical", "2STEP", "2STEP 2COMMIT", "2COMMIT): has no place"),
        ("evaluation", "sufF1", "sufF1 sufHEAD1", "sufHEAD1): has no place in a schedule of order forward"),
        ("evaluation", "sufF1 ", "", "never happened: sufF1"),
        ("vertical", "2STEP", "2STEP 2FETCH 2RELEASE", "2RELEASE): nothing used 2 since event 37 fetched it"),
        ("vertical", "preREDUCE preRELEASE\nNORM", "preREDUCE\nNORM", "preSTEP): pre is still fetched, by event 0"),
        ("vertical", "preRELEASE", "preRELEASE preFETCH", "preFETCH): stands here a second time"),
        ("vertical", "2B0 2F1 sufHEAD1 2B1", "2F1 sufHEAD1 2B1 2B0", "2B1): adds to a gradient sum where order vertical wants"),
        ("vertical", "sufHEAD0 2B0 2F1 sufHEAD1", "2F1 sufHEAD1 sufHEAD0 2B0", "order vertical wants sufHEAD0"),
        ("snake", "0B1 0B0", "0B0 0B1", "0B0): adds to a gradient sum where order vertical with snake wants 0B1"),
        ("vertical", "snake=0", "snake=1", "1B0): adds to a gradient sum where order vertical with snake wants 1B1"),
    ],
)
def test_validate_names_the_event_and_shows_its_neighbours(name: str, before: str, after: str, told: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        validate(edited(SMALL[name], before, after))
    assert told in str(caught.value)
    assert str(caught.value).count("  <-- here") == 1


def refused(schedule: Schedule, events: tuple[Event, ...]) -> bool:
    try:
        validate(replace(schedule, events=events))
    except ScheduleError:
        return True
    return False


@small_schedules
def test_a_schedule_with_one_event_less_is_refused(schedule: Schedule) -> None:
    """But for what is due from the step before, which no schedule says of itself: the optimizer refuses to lose it."""
    events = schedule.events
    kept = [events[i] for i in range(len(events)) if not refused(schedule, events[:i] + events[i + 1 :])]
    assert kept == [event for event in events if event.step_offset]


@small_schedules
def test_a_schedule_with_one_event_twice_is_refused(schedule: Schedule) -> None:
    events = schedule.events
    places = [(e, j) for e in set(events) for j in range(len(events) + 1)]
    assert [(str(e), j) for e, j in places if not refused(schedule, events[:j] + (e,) + events[j:])] == []


def moves(length: int) -> Iterator[tuple[int, int]]:
    return ((i, j) for i in range(length) for j in range(length) if i != j)


def moved(events: tuple[Event, ...], i: int, j: int) -> tuple[Event, ...]:
    rest = events[:i] + events[i + 1 :]
    return (*rest[:j], events[i], *rest[j:])


def most_fetched(events: tuple[Event, ...]) -> int:
    counts, now = [0], 0
    for event in events:
        now += (event.op is Op.FETCH) - (event.op is Op.RELEASE) if event.layer != "pre" else 0
        counts.append(now)
    return max(counts)


def related(events: tuple[Event, ...], needs: tuple[tuple[int, ...], ...], i: int, k: int) -> bool:
    """Whether two events may not pass each other. Steps and reductions take turns, so two of a kind are free; a FETCH stays
    behind the delayed step whose values it brings, although it need not wait for it."""
    one, other = events[min(i, k)], events[max(i, k)]
    if one.op is other.op and one.op in (Op.STEP, Op.REDUCE):
        return False
    handed_over = one.step_offset == -1 and other.op is Op.FETCH and one.layer == other.layer
    return handed_over or min(i, k) in needs[max(i, k)]


@small_schedules
def test_one_event_elsewhere_is_refused_unless_it_passes_nothing_related_and_the_window_holds(schedule: Schedule) -> None:
    """The moves that stay valid are exactly the free ones: timing, by the two conditions and no others."""
    events, needs = schedule.events, dependencies(schedule.events)
    wrong = []
    for i, j in moves(len(events)):
        passed = range(j, i) if j < i else range(i + 1, j + 1)
        bound = any(related(events, needs, i, k) for k in passed)
        allowed = not bound and most_fetched(moved(events, i, j)) <= schedule.window + 1
        if refused(schedule, moved(events, i, j)) is allowed:
            wrong.append((str(events[i]), i, j, "refused" if allowed else "let through"))
    assert wrong == []


def test_the_free_moves_of_the_smallest_step() -> None:
    """By hand: 0FETCH waits for nothing; 0RELEASE and preB0 do not touch, and 0RELEASE only has to come before 0STEP; a REDUCE
    touches its unit's B and NORM; preRELEASE and NORM do not touch; the steps of two units are free. All else is a chain."""
    schedule = SMALL["one of each"]
    free: dict[str, list[str]] = {}
    for i, j in moves(len(schedule.events)):
        if not refused(schedule, moved(schedule.events, i, j)):
            free.setdefault(str(schedule.events[i]), []).append(str(schedule.events[j]))
    assert free == {
        "preF0": ["0FETCH"],
        "0FETCH": ["preFETCH", "preF0"],
        "0REDUCE": ["0RELEASE", "preB0", "preREDUCE", "preRELEASE"],
        "0RELEASE": ["0REDUCE", "preB0", "preREDUCE", "preRELEASE", "NORM", "preSTEP"],
        "preB0": ["0REDUCE", "0RELEASE"],
        "preREDUCE": ["preRELEASE"],
        "preRELEASE": ["preREDUCE", "NORM"],
        "NORM": ["preRELEASE"],
        "preSTEP": ["0STEP"],
        "0STEP": ["preSTEP"],
    }
