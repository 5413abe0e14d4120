"""The units outside the layers, apart or from end to end: where schedules fetch, sum and step them, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from ds_vertical.errors import ScheduleError
from ds_vertical.schedule.dependencies import dependencies, validate
from ds_vertical.schedule.events import Op, Outside, Schedule, parse_events
from ds_vertical.schedule.passes import TrainingStep, build_evaluation, build_training

BOTH = Outside(True, ("pre", "suf"))
ALL = (BOTH, Outside(True, ("suf",)), Outside(True, ("pre",)), Outside(True), Outside(False, ("pre",)), Outside())
PLAIN = build_training(TrainingStep(3, 2, outside=BOTH))


def text(schedule: Schedule) -> str:
    return " ".join(map(str, schedule.events))


def needs_of(schedule: Schedule, event: str) -> str:
    index = [str(each) for each in schedule.events].index(event)
    return " ".join(str(schedule.events[i]) for i in dependencies(schedule.events)[index])


def test_both_ends_apart_are_away_between_them() -> None:
    assert PLAIN.to_text().splitlines() == [
        "# ds_vertical schedule v1 order=vertical layers=3 micro_batches=2 snake=0 window=1 delayed=0 early=0 suf=1"
        " apart=pre,suf",
        "preFETCH preF0 preF1 preRELEASE",
        "0FETCH 1FETCH 0F0 0F1 0RELEASE",
        "2FETCH sufFETCH 1F0 1F1",
        "2F0 sufHEAD0 2B0 2F1 sufHEAD1 sufREDUCE sufRELEASE 2B1 2REDUCE 2RELEASE",
        "0FETCH 1B0 1B1 1REDUCE 1RELEASE",
        "0B0 0B1 0REDUCE 0RELEASE",
        "preFETCH preB0 preB1 preREDUCE preRELEASE",
        "NORM preSTEP 0STEP 1STEP 2STEP sufSTEP",
    ]


def test_steps_of_the_suffix_stand_where_its_use_asks_for_them() -> None:
    due = frozenset({"pre", 0, 1, 2, "suf"})
    step = TrainingStep(3, 1, delayed=True, early=True, due=due, hold="d0", outside=BOTH)
    assert text(build_training(step)) == (
        "preSTEP.d0@-1 0STEP.d0@-1 1STEP.d0@-1 preFETCH preF0 preRELEASE 2STEP.d0@-1 sufSTEP.d0@-1 0FETCH 0F0 0RELEASE"
        " 1FETCH 1F0 2FETCH sufFETCH 2F0 sufHEAD0 sufREDUCE sufHOLD.d0 sufRELEASE sufSTEP.e0 2B0 2REDUCE 2HOLD.d0"
        " 2RELEASE 2STEP.e0 0FETCH 1B0 1REDUCE 1HOLD.d0 1RELEASE 1STEP.e0 0B0 0REDUCE 0HOLD.d0 0RELEASE 0STEP.e0 preFETCH"
        " preB0 preREDUCE preHOLD.d0 preRELEASE preSTEP.e0 NORM COMMIT"
    )


def test_units_that_stay_are_fetched_first_and_reduced_last() -> None:
    schedule = build_training(TrainingStep(2, 1, ahead=True, delayed=True, outside=Outside(True)))
    assert text(schedule).startswith("preFETCH sufFETCH preF0 ")
    assert text(schedule).endswith(
        "preB0 preREDUCE sufREDUCE preRELEASE sufRELEASE NORM preSTEP.d0 sufSTEP.d0 0STEP.d0 1STEP.d0 preFETCH@+1 sufFETCH@+1"
        " 0FETCH@+1"
    )
    assert needs_of(schedule, "1B0") == "preFETCH sufFETCH 1FETCH 1F0 sufHEAD0"


def test_an_evaluation_has_both_ends_from_end_to_end() -> None:
    assert text(build_evaluation(1, 1, outside=BOTH)) == (
        "preFETCH sufFETCH preF0 0FETCH 0F0 0RELEASE sufF0 preRELEASE sufRELEASE"
    )


@pytest.mark.parametrize("outside", ALL, ids=lambda outside: outside.to_text().strip() or "one")
def test_every_regime_is_valid_and_has_a_text(outside: Outside) -> None:
    regimes: tuple[dict[str, Any], ...] = (
        {},
        {"delayed": True, "early": True, "due": "all", "hold": "d0"},
        {"delayed": True, "ahead": True, "hold": "all"},
        {"early": True, "ahead": True},
        {"moved": (0,), "kept": ((0, 0),), "snake": True},
    )
    for layers, count, window, regime in product((1, 2, 5), (1, 3), (0, 1, 4), regimes):
        due = outside.around(range(layers)) if regime.get("due") else ()
        step = TrainingStep(layers, count, window=window, outside=outside, **regime | {"due": frozenset(due)})
        schedule = build_training(step)
        assert Schedule.from_text(schedule.to_text()) == schedule
        assert sum(e.op is Op.REDUCE for e in schedule.events) == len(outside.around(range(layers)))


@pytest.mark.parametrize(
    ("event", "needs"),
    [
        ("preF0", "preFETCH"),
        ("0F0", "preF0 0FETCH"),
        ("sufHEAD0", "sufFETCH 2F0"),
        ("sufREDUCE", "sufHEAD0 sufHEAD1"),
        ("preREDUCE", "0REDUCE preB0 preB1"),
        ("NORM", "sufREDUCE 2REDUCE 1REDUCE 0REDUCE preREDUCE"),
    ],
)
def test_only_an_ends_own_code_waits_for_it(event: str, needs: str) -> None:
    assert needs_of(PLAIN, event) == needs


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (" sufREDUCE sufRELEASE 2B1", " 2B1", "NORM): needs sufREDUCE before it"),
        ("2F1 sufHEAD1 sufREDUCE sufRELEASE", "2F1 sufREDUCE sufHEAD1 sufRELEASE", "sufREDUCE): needs sufHEAD1 before it"),
        ("sufREDUCE sufRELEASE 2B1", "sufREDUCE sufRELEASE sufFETCH 2B1", "sufFETCH): stands here a second time"),
        ("preFETCH preB0", "preB0", "the header says of units outside the layers: suf=1 apart=pre,suf; the events:"),
        ("preFETCH preB0 preB1", "preB0 preFETCH preB1", "preB0): needs the parameters of pre"),
        ("2FETCH sufFETCH 1F0 1F1 2F0 sufHEAD0", "2FETCH 1F0 1F1 2F0 sufHEAD0 sufFETCH", "needs the parameters of suf"),
        ("preREDUCE preRELEASE", "preREDUCE preRELEASE preFETCH preRELEASE", "preFETCH): stands here a third time"),
        ("NORM", "NORM sufB0", "B goes with layer or pre"),
    ],
)
def test_what_an_end_lacks_is_refused(old: str, new: str, told: str) -> None:
    assert old in text(PLAIN)
    with pytest.raises(ScheduleError) as caught:
        validate(replace(PLAIN, events=parse_events(text(PLAIN).replace(old, new))))
    assert told in str(caught.value)


def test_the_norm_waits_for_the_suffix() -> None:
    events = [event for event in PLAIN.events if str(event) != "sufREDUCE"]
    with pytest.raises(ScheduleError, match="needs sufREDUCE before it"):
        dependencies(events)


@pytest.mark.parametrize("options", [{"order": "horizontal"}, {"calls": 2}])
def test_where_micro_batches_use_both_ends_in_turn_none_is_apart(options: dict[str, Any]) -> None:
    with pytest.raises(ScheduleError, match="leave apart out"):
        build_training(TrainingStep(2, 2, outside=BOTH, **options))
    build_training(TrainingStep(2, 2, outside=Outside(True), **options))
    with pytest.raises(ScheduleError, match="apart must name units outside the layers"):
        Outside(False, ("suf",))
