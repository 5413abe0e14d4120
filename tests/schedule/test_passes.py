"""Each pass as text in, text out; whole schedules against golden files; properties over many shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import GOLDEN

from ds_vertical.errors import ScheduleError
from ds_vertical.schedule.dependencies import dependencies, validate
from ds_vertical.schedule.events import Event, Op, Outside, Schedule, Unit, parse_events
from ds_vertical.schedule.passes import (
    TrainingStep,
    build_evaluation,
    build_training,
    forward_order,
    horizontal_order,
    place_ahead,
    place_behind,
    place_delayed,
    place_early,
    place_gradients,
    place_optimizer,
    place_parameters,
    vertical_order,
)

ORDERS = {"vertical": {}, "snake": {"snake": True}, "horizontal": {"order": "horizontal"}}
DUE = frozenset({"pre", 0, 1, 2})
HALVES = {"delayed": True, "reduces_beside": True, "copy_share": 1.0, "standing": DUE, "halves": True, "made": DUE}
STEPS = {
    "delayed": {"delayed": True},
    "delayed_due": {"delayed": True, "due": DUE},
    "early_delayed": {"delayed": True, "early": True, "due": frozenset({"pre", 1, 2})},
    "ahead": {"ahead": True},
    "ahead_delayed": {"ahead": True, "delayed": True, "early": True, "due": frozenset({2})},
    "holding": {"delayed": True, "early": True, "due": DUE, "hold": "d0"},
    "levels": {"early": True, "ahead": True, "reduces_beside": True, "copy_share": 1.0},
    "levels_without_copies": {"hold": "all", "copy_share": 0.0},
    "kept": {"early": True, "kept": ((0, 0), (1, 1))},
    "halves": HALVES,  # of a half by itself, such as benchmarks/delayed_steps.py has it
    "halves_first": {**HALVES, "leaves": True},
    "halves_second": {**HALVES, "left": 2.0},
}
SETTINGS = ORDERS | STEPS


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    layers, micro_batches, window = draw(st.integers(1, 8)), draw(st.integers(1, 6)), draw(st.integers(0, 4))
    order = draw(st.sampled_from(["evaluation", *ORDERS]))
    if order == "evaluation":
        return build_evaluation(layers, micro_batches, window=window)
    steps = {"delayed": draw(st.booleans()), "early": draw(st.booleans()), "lead": draw(st.integers(1, 3))}
    due = draw(st.frozensets(st.sampled_from(["pre", *range(layers)])))
    return build_training(
        TrainingStep(layers, micro_batches, window=window, due=due, ahead=draw(st.booleans()), **steps, **ORDERS[order])
    )


def text(events: Iterable[Event]) -> str:
    return " ".join(str(event) for event in events)


@pytest.mark.parametrize("window", [0, 1])
@pytest.mark.parametrize("order", ["evaluation", *SETTINGS])
def test_whole_schedule_is_the_golden_one(order: str, window: int) -> None:
    golden = (GOLDEN / f"{order}_w{window}.txt").read_text()
    if order == "evaluation":
        built = build_evaluation(3, 2, window=window)
    else:
        built = build_training(TrainingStep(3, 2, window=window, **SETTINGS[order]))
    assert built.to_text() == golden
    assert built == Schedule.from_text(golden)


def test_every_golden_file_is_used() -> None:
    expected = {f"{order}_w{window}.txt" for order in ("evaluation", *SETTINGS) for window in (0, 1)}
    assert {path.name for path in GOLDEN.glob("*.txt")} >= expected


def test_orders() -> None:
    assert text(vertical_order(2, 2)) == "preF0 preF1 0F0 0F1 1F0 sufHEAD0 1B0 1F1 sufHEAD1 1B1 0B0 0B1 preB0 preB1"
    assert text(horizontal_order(2, 2)) == ("preF0 0F0 1F0 sufHEAD0 1B0 0B0 preB0 preF1 0F1 1F1 sufHEAD1 1B1 0B1 preB1")
    assert text(forward_order(2, 2)) == "preF0 preF1 0F0 0F1 1F0 1F1 sufF0 sufF1"


def test_orders_of_two_calls() -> None:
    assert text(vertical_order(2, 2, calls=2)) == (
        "preF0 preF1 0F0 0F1 1F0 1F1 preF0.c1 preF1.c1 0F0.c1 0F1.c1"
        " 1F0.c1 sufHEAD0 1B0 1F1.c1 sufHEAD1 1B1 0B0 0B1 preB0 preB1"
    )
    assert text(horizontal_order(2, 1, calls=2)) == "preF0 0F0 1F0 preF0.c1 0F0.c1 1F0.c1 sufHEAD0 1B0 0B0 preB0"
    assert text(forward_order(2, 1, calls=2)) == "preF0 0F0 1F0 preF0.c1 0F0.c1 1F0.c1 sufF0"


@pytest.mark.parametrize(
    ("missing", "told"), [("1F0.c1", "2F0.c1): needs 1F0.c1"), ("preF1.c1", "0F1.c1): needs preF1.c1"), ("2F0", "needs 2F0")]
)
def test_each_call_is_a_forward_of_its_own_behind_the_one_before(missing: str, told: str) -> None:
    built = build_training(TrainingStep(3, 2, calls=2))
    assert [*map(str, sorted(built.fused, key=str))] == ["2F0.c1", "2F1.c1"]
    assert Schedule.from_text(built.to_text()) == built
    with pytest.raises(ScheduleError) as caught:
        validate(replace(built, events=tuple(event for event in built.events if str(event) != missing)))
    assert told in str(caught.value)


def test_snake_turns_every_second_layer_before_the_last_in_both_sweeps_and_nothing_else() -> None:
    assert text(vertical_order(3, 3, snake=True)) == (
        "preF0 preF1 preF2 0F0 0F1 0F2 1F2 1F1 1F0 2F0 sufHEAD0 2B0 2F1 sufHEAD1 2B1 2F2 sufHEAD2 2B2 "
        "1B2 1B1 1B0 0B0 0B1 0B2 preB0 preB1 preB2"
    )
    assert text(vertical_order(2, 2, snake=True)) == (
        "preF0 preF1 0F1 0F0 1F0 sufHEAD0 1B0 1F1 sufHEAD1 1B1 0B1 0B0 preB0 preB1"
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("1B0 1B1 0B0 0B1 preB0 preB1", "1B0 1B1 1REDUCE 0B0 0B1 0REDUCE preB0 preB1 preREDUCE"),
        ("1B0 0B0 preB0 1B1 0B1 preB1", "1B0 0B0 preB0 1B1 1REDUCE 0B1 0REDUCE preB1 preREDUCE"),
        ("0B1 0B0 preB0 preB1", "0B1 0B0 0REDUCE preB0 preB1 preREDUCE"),
        ("preF0 0F0 sufF0", "preF0 0F0 sufF0"),
    ],
)
def test_place_gradients_reduces_after_the_last_backward(before: str, after: str) -> None:
    assert text(place_gradients(parse_events(before))) == after


@pytest.mark.parametrize(
    ("window", "before", "after"),
    [
        (0, "preF0 0F0 1F0 sufF0", "preFETCH preF0 0FETCH 0F0 0RELEASE 1FETCH 1F0 1RELEASE sufF0 preRELEASE"),
        (1, "preF0 0F0 1F0 sufF0", "preFETCH preF0 0FETCH 1FETCH 0F0 0RELEASE 1F0 1RELEASE sufF0 preRELEASE"),
        # The turn: one visit across HEAD, and with a window the layer before it stays.
        (0, "1F0 sufHEAD0 1B0 0B0", "preFETCH 1FETCH 1F0 sufHEAD0 1B0 1RELEASE 0FETCH 0B0 0RELEASE preRELEASE"),
        (0, "0F0 1F0 1B0 0B0", "preFETCH 0FETCH 0F0 0RELEASE 1FETCH 1F0 1B0 1RELEASE 0FETCH 0B0 0RELEASE preRELEASE"),
        (1, "0F0 1F0 1B0 0B0", "preFETCH 0FETCH 1FETCH 0F0 1F0 1B0 1RELEASE 0B0 0RELEASE preRELEASE"),
        # Released after its REDUCE, and pre after its own.
        (0, "0B0 0REDUCE preB0 preREDUCE", "preFETCH 0FETCH 0B0 0REDUCE 0RELEASE preB0 preREDUCE preRELEASE"),
        # A window as wide as the model fetches everything once, in the order of use.
        (9, "0F0 1F0 1B0 0B0 preB0", "preFETCH 0FETCH 1FETCH 0F0 1F0 1B0 1RELEASE 0B0 0RELEASE preB0 preRELEASE"),
    ],
)  # fmt: skip
def test_place_parameters_fetches_ahead_and_releases(window: int, before: str, after: str) -> None:
    assert text(place_parameters(parse_events(before), window)) == after


def test_place_optimizer_steps_everything_after_the_norm() -> None:
    before = "2B0 2REDUCE 1B0 1REDUCE 0B0 0REDUCE preB0 preREDUCE preRELEASE"
    assert text(place_optimizer(parse_events(before), False)) == f"{before} NORM preSTEP 0STEP 1STEP 2STEP"
    assert text(place_optimizer(parse_events(before), True)) == f"{before} NORM"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "1REDUCE 1RELEASE 0B0 0REDUCE 0RELEASE preREDUCE preRELEASE NORM",
            "1REDUCE 1RELEASE 1STEP.e0 0B0 0REDUCE 0RELEASE 0STEP.e0 preREDUCE preRELEASE preSTEP.e0 NORM COMMIT",
        ),
        # Only the RELEASE after the REDUCE: the forward's is too soon, and the device copy must be gone.
        ("0FETCH 0F0 0RELEASE 0FETCH 0B0 0REDUCE 0RELEASE", "0FETCH 0F0 0RELEASE 0FETCH 0B0 0REDUCE 0RELEASE 0STEP.e0"),
        ("1REDUCE 0B0 1RELEASE 0REDUCE 0RELEASE", "1REDUCE 0B0 1RELEASE 1STEP.e0 0REDUCE 0RELEASE 0STEP.e0"),
        ("0REDUCE preREDUCE NORM preSTEP", "0REDUCE preREDUCE NORM COMMIT preSTEP"),
    ],
)
def test_place_early_steps_released_units_whose_gradient_is_complete(before: str, after: str) -> None:
    assert text(place_early(parse_events(before))) == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "1REDUCE 1HOLD 1RELEASE 1STEP.e0 0FETCH 0B0 0B1 0REDUCE 0RELEASE 0STEP.e0 preB0 preREDUCE preSTEP.e0 NORM COMMIT",
            "1REDUCE 1RELEASE 0FETCH 0B0 0B1 1HOLD 1STEP.e0 0REDUCE 0RELEASE preB0 0STEP.e0 preREDUCE preSTEP.e0 NORM COMMIT",
        ),
        ("0B0 0REDUCE preB0 preREDUCE NORM 0STEP", "0B0 0REDUCE preB0 preREDUCE NORM 0STEP"),
    ],
)
def test_place_behind_leaves_a_reduction_the_next_units_backward(before: str, after: str) -> None:
    assert text(place_behind(parse_events(before))) == after


@pytest.mark.parametrize("hold", [None, "d0"])
@pytest.mark.parametrize("outside", [Outside(), Outside(True, ("pre", "suf"))])
def test_a_step_whose_reductions_run_beside_the_backward_is_valid(hold: str | None, outside: Outside) -> None:
    step = TrainingStep(3, 2, delayed=True, early=True, hold=hold, ahead=True, outside=outside, reduces_beside=True)
    events, needs = build_training(step).events, dependencies(build_training(step).events)
    for index, event in enumerate(events):
        if event.op is Op.B and event.layer != "pre":
            assert not [needed for needed in needs[index] if events[needed].op is Op.REDUCE], "no backward waits for one"
    assert [e for e in build_training(replace(step, reduces_beside=False)).events if e not in events] == []


FORWARD = "preFETCH preF0 0FETCH 0F0 1FETCH 1F0 2FETCH 2F0 3FETCH 3F0"


@pytest.mark.parametrize(
    ("due", "lead", "after"),
    [
        ([], 1, FORWARD),
        (["pre"], 2, f"preSTEP.d0@-1 {FORWARD}"),
        (
            ["pre", 0, 1, 2, 3],
            1,
            "preSTEP.d0@-1 0STEP.d0@-1 preFETCH preF0 1STEP.d0@-1 0FETCH 0F0 2STEP.d0@-1 1FETCH 1F0"
            " 3STEP.d0@-1 2FETCH 2F0 3FETCH 3F0",
        ),
        (
            ["pre", 0, 1, 2, 3],
            2,
            "preSTEP.d0@-1 0STEP.d0@-1 1STEP.d0@-1 preFETCH preF0 2STEP.d0@-1 0FETCH 0F0 3STEP.d0@-1 1FETCH 1F0"
            " 2FETCH 2F0 3FETCH 3F0",
        ),
        ([3], 2, "preFETCH preF0 0FETCH 0F0 3STEP.d0@-1 1FETCH 1F0 2FETCH 2F0 3FETCH 3F0"),
        ([3, 0], 9, f"0STEP.d0@-1 3STEP.d0@-1 {FORWARD}"),
    ],
)
def test_place_delayed_steps_lead_visits_ahead(due: list[Unit], lead: int, after: str) -> None:
    assert text(place_delayed(parse_events(FORWARD), due, lead)) == after


def test_place_delayed_counts_first_visits_only() -> None:
    before = "0FETCH 0F0 0RELEASE 1FETCH 1F0 1B0 0FETCH 0B0"
    assert text(place_delayed(parse_events(before), [0, 1], 1)) == f"0STEP.d0@-1 1STEP.d0@-1 {before}"


@pytest.mark.parametrize(
    ("window", "lead", "delayed", "after"),
    [
        (1, 2, False, "preFETCH@+1 0FETCH@+1"),
        (2, 1, False, "preFETCH@+1 0FETCH@+1 1FETCH@+1"),
        (9, 1, False, "preFETCH@+1 0FETCH@+1 1FETCH@+1 2FETCH@+1"),
        (1, 2, True, "preSTEP.d0 0STEP.d0 1STEP.d0 preFETCH@+1 0FETCH@+1"),
        (3, 1, True, "preSTEP.d0 0STEP.d0 preFETCH@+1 0FETCH@+1"),
    ],
)
def test_place_ahead_issues_what_comes_first_in_the_next_forward(window: int, lead: int, delayed: bool, after: str) -> None:
    before = "2REDUCE 1REDUCE 0REDUCE preREDUCE NORM"
    assert text(place_ahead(parse_events(before), window, lead, delayed)) == f"{before} {after}"


def test_what_is_read_for_the_next_step_must_have_taken_this_one() -> None:
    schedule = build_training(TrainingStep(3, 2, delayed=True, ahead=True))
    assert text(schedule.events).endswith("NORM preSTEP.d0 0STEP.d0 1STEP.d0 preFETCH@+1 0FETCH@+1")
    events = tuple(event for event in schedule.events if str(event) != "0STEP.d0")
    with pytest.raises(ScheduleError, match=r"reads what a delayed step is to change; write 0STEP.d0 before it"):
        validate(replace(schedule, events=events))
    with pytest.raises(ScheduleError, match="has no place in a schedule"):
        validate(replace(schedule, delayed=False))


@pytest.mark.parametrize(
    ("handed_over", "after"),
    [
        ([], "preFETCH 0FETCH 1FETCH 0F0 2FETCH 1F0 2F0 2B0 2RELEASE 0FETCH 1B0 1RELEASE 0B0 0RELEASE preRELEASE"),
        ([1], "preFETCH 0FETCH 0F0 1FETCH 2FETCH 1F0 2F0 2B0 2RELEASE 0FETCH 1B0 1RELEASE 0B0 0RELEASE preRELEASE"),
        ([0, 1, 2], "preFETCH 0FETCH 0F0 1FETCH 1F0 2FETCH 2F0 2B0 2RELEASE 0FETCH 1B0 1RELEASE 0B0 0RELEASE preRELEASE"),
    ],
)  # fmt: skip
def test_place_parameters_does_not_read_ahead_what_a_step_hands_over(handed_over: list[int], after: str) -> None:
    placed = text(place_parameters(parse_events("0F0 1F0 2F0 2B0 1B0 0B0"), 1, handed_over))
    assert placed.replace("0F0 0RELEASE", "0F0") == after


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            lambda: build_training(TrainingStep(2, 2, order="horizontal", snake=True)),
            "snake .* write order vertical, got horizontal",
        ),
        (lambda: build_training(TrainingStep(2, 2, order="diagonal")), "order must be one of vertical, horizontal, forward"),
        (lambda: build_training(TrainingStep(2, 2, order="forward")), "'forward' has no backward"),
        (lambda: build_training(TrainingStep(0, 2)), "num_layers must be at least 1, got 0"),
        (lambda: build_training(TrainingStep(2, 0)), "num_micro_batches must be at least 1, got 0"),
        (lambda: build_training(TrainingStep(2, 2, window=-1)), "window must be a number of layers >= 0, got -1"),
        (lambda: build_evaluation(2, 0), "num_micro_batches must be at least 1, got 0"),
        (lambda: place_parameters(forward_order(1, 1), -1), "window must be a number of layers >= 0, got -1"),
        (lambda: build_training(TrainingStep(2, 2, due=frozenset({0}), lead=0)), "lead must be a number of layers >= 1, got 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(call: Callable[[], object], told: str) -> None:
    with pytest.raises(ScheduleError, match=told):
        call()


@settings(max_examples=40, deadline=None)
@given(schedules())
def test_built_schedules_are_valid_and_survive_their_text(schedule: Schedule) -> None:
    validate(schedule)
    assert Schedule.from_text(schedule.to_text()) == schedule
    assert all(len(line) <= 120 for line in schedule.to_text().splitlines())


@settings(max_examples=40, deadline=None)
@given(schedules())
def test_the_last_layers_forwards_keep_their_graphs_and_no_others(schedule: Schedule) -> None:
    micro_batches = range(0 if schedule.order == "forward" else schedule.num_micro_batches)
    assert schedule.fused == {Event(Op.F, schedule.num_layers - 1, m) for m in micro_batches}


@pytest.mark.parametrize(
    ("events", "fused"),
    [
        ("0F0 1F0 sufHEAD0 1B0 0F1 1F1 sufHEAD1 1B1 0B0 0B1", "1F0 1F1"),
        ("0F0 preF1 sufHEAD0 0RELEASE 0FETCH 0B0", "0F0"),
        ("0F0 0F1 sufHEAD0 sufHEAD1 0B0 0B1", ""),
        ("0F1 0F0 sufHEAD0 sufHEAD1 0B0 0B1", "0F0"),
        ("0F0 1F0 0B0", ""),
        ("0F0 0B1", ""),
        ("0F0 1B0", ""),
        ("preF0 preB0", ""),
    ],
)
def test_a_forward_is_fused_when_its_backward_is_the_next_work_on_a_layer(events: str, fused: str) -> None:
    assert Schedule(2, 2, parse_events(events)).fused == set(parse_events(fused))


@settings(max_examples=40, deadline=None)
@given(schedules())
def test_fetched_layers_stay_within_the_window(schedule: Schedule) -> None:
    fetched, most = set(), 0
    for event in schedule.events:
        if isinstance(event.layer, int) and event.op is Op.FETCH and not event.ahead:
            fetched.add(event.layer)
        if isinstance(event.layer, int) and event.op is Op.RELEASE:
            fetched.remove(event.layer)
        most = max(most, len(fetched))
    # The bound is reached, not just kept: a window that fetched less ahead would be no window.
    assert most == min(schedule.num_layers, schedule.window + 1)
    assert not fetched


@settings(max_examples=40, deadline=None)
@given(schedules())
def test_number_of_fetches(schedule: Schedule) -> None:
    fetches = [event.layer for event in schedule.events if event.op is Op.FETCH and not event.ahead]
    counts = [fetches.count(layer) for layer in range(schedule.num_layers)]
    assert fetches.count("pre") == 1
    if schedule.order == "forward":
        assert counts == [1] * schedule.num_layers
    if schedule.order == "vertical":
        # Whatever M: once per sweep, and only once for a layer that comes back within window + 1 visits of the turn.
        visits_until_back = [2 * (schedule.num_layers - 1 - layer) for layer in range(schedule.num_layers)]
        assert counts == [2 if visits > schedule.window + 1 else 1 for visits in visits_until_back]


@settings(max_examples=40, deadline=None)
@given(schedules())
def test_each_compute_event_has_what_it_needs(schedule: Schedule) -> None:
    """Written from the rules of the model (what is computed from what), not from the code of dependencies()."""
    events, depends = schedule.events, dependencies(schedule.events)
    last = schedule.num_layers - 1
    for index, (event, needs) in enumerate(zip(events, depends, strict=True)):
        assert all(0 <= need < index for need in needs)
        names, layer, m = {str(events[need]) for need in needs}, event.layer, event.micro_batch
        if event.op in (Op.F, Op.B, Op.HEAD):
            assert "preFETCH" in names
            assert not isinstance(layer, int) or f"{layer}FETCH" in names
        stepped = f"{layer}STEP.d0@-1"
        if event.op is Op.F and stepped in map(str, events):
            assert stepped in names
        if event.op is Op.F and layer != "pre":
            before = layer - 1 if isinstance(layer, int) and layer > 0 else last if layer == "suf" else "pre"
            assert f"{before}F{m}" in names
        if event.op is Op.HEAD:
            assert f"{last}F{m}" in names
        if event.op is Op.B:
            following = layer + 1 if isinstance(layer, int) else 0
            after = "sufHEAD" if layer == last else f"{following}B"
            assert f"{after}{m}" in names


@settings(max_examples=60, deadline=None)
@given(schedules())
def test_delayed_steps_come_once_ahead_of_their_fetch_and_early_ones_before_the_commit(schedule: Schedule) -> None:
    events = [str(event) for event in schedule.events]
    units = ["pre", *range(schedule.num_layers)]
    due = [unit for unit in units if f"{unit}STEP.d0@-1" in events]
    assert all(events.index(f"{unit}STEP.d0@-1") < events.index(f"{unit}FETCH") for unit in due)
    if schedule.order != "forward":
        after_norm = [str(event) for event in schedule.events[events.index("NORM") + 1 :] if not event.ahead]
        commit = ["COMMIT"] if schedule.early else []
        assert after_norm == commit + ([] if schedule.delayed else [f"{unit}STEP" for unit in units])
    for unit in units if schedule.early else ():
        end = len(events) - 1 - events[::-1].index(f"{unit}RELEASE")
        assert events.index(f"{unit}REDUCE") < end
        assert events[end + 1] == f"{unit}STEP.e0"


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(0, 3), st.integers(1, 4), st.sampled_from(["vertical", "horizontal"]))
def test_at_most_lead_layers_are_stepped_and_not_yet_fetched(layers: int, window: int, lead: int, order: str) -> None:
    due = frozenset({"pre", *range(layers)})
    schedule = build_training(TrainingStep(layers, 2, order=order, window=window, delayed=True, due=due, lead=lead))
    stepped, most = set(), 0
    for event in schedule.events:
        if isinstance(event.layer, int) and event.op is Op.STEP:
            stepped.add(event.layer)
        elif event.op is Op.FETCH:
            stepped.discard(event.layer)
        most = max(most, len(stepped))
    assert most == min(lead, layers) + (1 if layers > lead else 0)
