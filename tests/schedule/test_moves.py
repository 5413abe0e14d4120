"""Where layer inputs and gradients between layers move, the rules for it, and the ranges of the file they rest in."""

from __future__ import annotations

import dataclasses
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_vertical.errors import ScheduleError
from ds_vertical.io.extents import Extents
from ds_vertical.planner.activation_tiers import spread
from ds_vertical.schedule.dependencies import dependencies, validate
from ds_vertical.schedule.events import MAX_SAVES, Event, Op, Schedule
from ds_vertical.schedule.passes import TrainingStep, build_training


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    layers, count = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    order = draw(st.sampled_from([{}, {"snake": True}, {"order": "horizontal"}]))
    moved = draw(st.frozensets(st.integers(0, count - 1)))
    return build_training(TrainingStep(layers, count, window=draw(st.integers(0, 2)), moved=tuple(sorted(moved)), **order))


@settings(max_examples=40, deadline=None)
@given(schedules())
def test_moves_are_written_once_and_survive_the_text(schedule: Schedule) -> None:
    assert Schedule.from_text(schedule.to_text()) == schedule
    seen = Counter(schedule.events)
    for event in seen:
        if event.op in (Op.SAVE, Op.GSAVE, Op.GLOAD, Op.DROP, Op.GDROP):
            assert seen[event] == 1
        if event.op is Op.LOAD:
            assert seen[event] <= 2
    rest = [event for event in schedule.events if event.op not in MOVES]
    plain = build_training(
        TrainingStep(
            schedule.num_layers, schedule.num_micro_batches, order=schedule.order, snake=schedule.snake, window=schedule.window
        )
    )
    assert tuple(rest) == plain.events, "moves change nothing else"


MOVES = (Op.SAVE, Op.LOAD, Op.DROP, Op.GSAVE, Op.GLOAD, Op.GDROP)


@pytest.mark.parametrize("num_micro_batches", [3, 5])
def test_in_vertical_order_inputs_are_read_twice_and_gradients_once(num_micro_batches: int) -> None:
    schedule = build_training(TrainingStep(3, num_micro_batches, moved=tuple(range(num_micro_batches))))
    counts = Counter(event.op for event in schedule.events)
    assert counts[Op.SAVE] == counts[Op.DROP] == 3 * num_micro_batches
    assert counts[Op.LOAD] == 5 * num_micro_batches  # the last layer's is used up at once
    assert counts[Op.GSAVE] == counts[Op.GLOAD] == counts[Op.GDROP] == 3 * num_micro_batches


def without(schedule: Schedule, index: int) -> Schedule:
    return dataclasses.replace(schedule, events=schedule.events[:index] + schedule.events[index + 1 :])


def test_every_load_is_needed() -> None:
    schedule = build_training(TrainingStep(3, 4, moved=(0, 1, 3)))
    for index, event in enumerate(schedule.events):
        if event.op in (Op.LOAD, Op.GLOAD, Op.SAVE, Op.GSAVE):
            with pytest.raises(ScheduleError, match=f"needs {event} before it"):
                validate(without(schedule, index))
        elif event.op in (Op.DROP, Op.GDROP):
            with pytest.raises(ScheduleError, match="never dropped"):
                validate(without(schedule, index))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_kept_values_leave_after_their_forward_and_return_ahead_of_their_backward(data: st.DataObject) -> None:
    layers, count = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    options = data.draw(st.sampled_from([{}, {"snake": True}, {"order": "horizontal"}, {"moved": (0,)}]))
    cells = [(layer, m) for layer in range(layers) for m in range(count)]
    kept = tuple(sorted(data.draw(st.frozensets(st.sampled_from(cells)))))
    schedule = build_training(TrainingStep(layers, count, kept=kept, **options))
    assert Schedule.from_text(schedule.to_text()) == schedule
    plain = build_training(TrainingStep(layers, count, **options))
    assert tuple(event for event in schedule.events if event.op not in KEPT) == plain.events, "keeping changes nothing else"
    at = {event: index for index, event in enumerate(schedule.events)}
    fused = {(event.layer, event.micro_batch) for event in schedule.fused}
    for cell in set(kept) - fused if options.get("order") != "horizontal" else ():
        order = [at[Event(op, *cell)] for op in (Op.F, Op.KSAVE, Op.KLOAD, Op.B, Op.KDROP)]
        assert order == sorted(order)
        assert at[Event(Op.KSAVE, *cell)] in dependencies(schedule.events)[at[Event(Op.KLOAD, *cell)]], "written, then read"
    for index, event in enumerate(schedule.events):
        if event.op in KEPT:
            with pytest.raises(ScheduleError, match="never dropped" if event.op is Op.KDROP else f"needs {event} before it"):
                validate(without(schedule, index))


KEPT = (Op.KSAVE, Op.KLOAD, Op.KDROP)


def test_no_more_saves_of_kept_values_are_under_way_than_have_buffers() -> None:
    schedule = build_training(TrainingStep(3, 6, kept=tuple((0, m) for m in range(6))))
    saves = [index for index, event in enumerate(schedule.events) if event.op is Op.KSAVE]
    needs = dependencies(schedule.events)
    assert all(saves[n - MAX_SAVES] in needs[index] for n, index in enumerate(saves) if n >= MAX_SAVES)
    with pytest.raises(ScheduleError, match=r"moves kept values of which the header \(kept=\) says nothing|has no place"):
        validate(dataclasses.replace(schedule, kept=schedule.kept[1:]))
    with pytest.raises(ScheduleError, match="kept must name layers and micro-batches of the schedule"):
        dataclasses.replace(schedule, kept=((3, 0),))


def test_wrong_moves_are_refused() -> None:
    schedule = build_training(TrainingStep(2, 4, moved=(0, 1, 2, 3)))
    events = list(schedule.events)
    load = next(i for i, event in enumerate(events) if event.op is Op.LOAD)
    for at, event, told in (
        (load, events[load], "is loaded already"),
        (load + 1, Event(Op.DROP, 0, 0), "needs 0B0 before it"),
        (load, Event(Op.SAVE, 0, 0), "is saved already"),
    ):
        wrong = [*events[:at], event, *events[at:]]
        with pytest.raises(ScheduleError, match=told):
            dependencies(wrong)
    with pytest.raises(ScheduleError, match="moves micro-batch 3; the header moves 0, 1, 2"):
        validate(dataclasses.replace(schedule, moved=(0, 1, 2)))
    with pytest.raises(ScheduleError, match="loaded and not yet used; ahead 1 allows 2"):
        validate(dataclasses.replace(schedule, look_ahead=1))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 64), st.integers(0, 20), st.integers(0, 20))
def test_shares_are_spread_evenly(count: int, host: int, ssd: int) -> None:
    shares = (host / 40, ssd / 40)
    chosen = spread(count, shares)
    for index, share in enumerate(shares):
        for first in range(1, count + 1):
            assert abs(chosen[:first].count(index) - share * first) <= 1 + 1e-9


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.randoms())
def test_extents_do_not_overlap_and_a_file_given_back_is_used_again(sizes: list[int], random: Random) -> None:
    extents, used = Extents(), {}
    for size in sizes:
        offset = extents.take(size)
        assert all(offset + size <= other or other + n <= offset for other, n in used.items())
        used[offset] = size
        if random.random() < 0.4:
            gone = random.choice(sorted(used))
            extents.give_back(gone, used.pop(gone))
        assert extents.num_used == sum(used.values())
    for offset, size in used.items():
        extents.give_back(offset, size)
    assert extents.take(extents.end) == 0
