"""Schedules on costs: small cases by hand, then what must hold for every machine, model and schedule."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from ds_vertical.errors import CostsError, ScheduleError
from ds_vertical.planner.bound import step_bound
from ds_vertical.planner.costs import event_costs
from ds_vertical.planner.machine import Machine
from ds_vertical.planner.memory_timeline import changes
from ds_vertical.planner.model_shape import ModelShape
from ds_vertical.planner.simulate import SimulatedRun, SimulatedSpan, SimulationSettings, simulate
from ds_vertical.schedule.dependencies import dependencies
from ds_vertical.schedule.events import PRE, Event, Op, Schedule, coming_steps, parse_event, parse_events
from ds_vertical.schedule.passes import TrainingStep, build_evaluation, build_training
from ds_vertical.types import Placement, TensorKind

MACHINE = Machine(
    ssd_read_bytes_per_s=1000.0,
    ssd_write_bytes_per_s=500.0,
    adam_elements_per_s=100.0,
    host_cores=2,
    one_memory=False,
    copy_in_bytes_per_s=4000.0,
    copy_out_bytes_per_s=2000.0,
)
ONE_MEMORY = replace(MACHINE, one_memory=True, schedule_forward_s=0.0, schedule_backward_s=0.0)
SHAPE = ModelShape(100, (1000,), 1.0, 2.0, 400, pre_forward_s=0.25, pre_backward_s=0.5, head_s=3.0)
IN_MEMORY = Placement.of(parameters_on_ssd=0.0, state_on_ssd=0.0)


def free(text: str, layers: int = 1) -> tuple[Schedule, list[tuple[int, ...]]]:
    """A list of events that do not depend on each other."""
    events = parse_events(text)
    return Schedule(layers, 1, events), [()] * len(events)


def longest_chain_s(
    schedule: Schedule, machine: Machine, shape: ModelShape, needs: Sequence[Sequence[int]] | None = None
) -> float:
    """Seconds of the longest chain of events that depend on each other: what no number of resources shortens.

    A delayed step counts without its write, since what follows takes its values from memory; one that is told by another
    event without the read of its state.
    """
    told = set(schedule.coming.values())
    ends: list[float] = []
    costs = event_costs(schedule.events, machine, shape)
    for event, cost, earlier in zip(schedule.events, costs, needs or dependencies(schedule.events), strict=True):
        delayed = event.step_offset or event.ahead
        jobs = [
            sum(s.seconds for s in job if not (delayed and s.lane == "ssd_write" or event in told and s.reads_state))
            for job in cost
        ]
        ends.append(max((ends[j] for j in earlier), default=0.0) + max(jobs, default=0.0))
    return max(ends, default=0.0)


def ends(timeline: SimulatedRun) -> dict[str, float]:
    return {str(event): end for event, end in zip(timeline.events, timeline.end_s, strict=True)}


# --------------------------------------------------------------------------------------------------------------- by hand


def test_one_layer_on_a_device_of_its_own() -> None:
    timeline = simulate(build_training(TrainingStep(1, 1)), MACHINE, SHAPE)
    expected = {
        "preFETCH": 0.25,  # read 0.2, copy 0.05
        "preF0": 0.5,
        "0FETCH": 2.75,  # issued beside preF0: read 2, copy 0.5
        "0F0": 3.75,
        "sufHEAD0": 6.75,
        "0B0": 9.75,
        "0REDUCE": 11.75,
        "0RELEASE": 9.75,  # beside the copy of its gradients
        "preB0": 10.25,
        "preREDUCE": 11.95,  # behind the other's
        "preRELEASE": 11.75,
        "NORM": 11.95,
        "preSTEP": 16.95,  # read 1.2, Adam 1, write 2.8
        "0STEP": 63.15,  # read behind the other's, 13.15 to 25.15, Adam 10, write 28
    }
    assert ends(timeline) == pytest.approx(expected)
    assert timeline.makespan_s == timeline.step_s == pytest.approx(63.15)
    assert timeline.busy_s == pytest.approx(
        {"ssd_read": 2.2 + 13.2, "copy_in": 0.55, "compute": 7.75, "copy_out": 2.2, "adam": 11.0, "ssd_write": 30.8}
    )


def test_one_layer_where_the_thread_itself_computes() -> None:
    found = ends(simulate(build_training(TrainingStep(1, 1)), ONE_MEMORY, SHAPE))
    assert found["0FETCH"] == pytest.approx(0.2 + 0.25 + 2.0)  # issued after preF0
    assert found["NORM"] == pytest.approx(2.45 + 1 + 3 + 3 + 0.5)
    assert found["0STEP"] == pytest.approx(9.95 + 1.2 + 12 + 10 + 28)


def test_two_fetches_ahead_hide_the_ssd_behind_computation() -> None:
    shape = replace(SHAPE, layer_elements=(1000,) * 6, forward_s=2.6)
    waiting = simulate(build_evaluation(6, 1, window=0), MACHINE, shape).makespan_s
    ahead = simulate(build_evaluation(6, 1, window=1), MACHINE, shape).makespan_s
    assert waiting == pytest.approx(0.25 + 0.25 + 6 * (2.5 + 2.6) - 0.25 + 1.0)  # the first fetch runs beside preF0
    assert ahead == pytest.approx(0.25 + 2.5 + 6 * 2.6 + 1.0)


def _starts(timeline: SimulatedRun, event: str) -> float:
    return next(span.start_s for span in timeline.spans if str(span.event) == event)


@pytest.mark.parametrize(("ranks", "window", "beside"), [(1, 0, False), (1, 1, True), (2, 0, True)])
def test_where_no_layer_is_fetched_ahead_one_rank_waits_for_gradients_that_leave(ranks: int, window: int, beside: bool) -> None:
    """As `OutgoingStream` does; of several ranks the copy stands behind a collective, for which no thread waits."""
    shape = replace(SHAPE, layer_elements=(1000, 1000), num_shards=ranks, placement=IN_MEMORY)
    schedule = build_training(TrainingStep(2, 1, window=window, reduces_beside=ranks > 1))
    timeline = simulate(schedule, replace(MACHINE, copy_in_bytes_per_s=1e9), shape)
    assert (_starts(timeline, "0B0") < ends(timeline)["1REDUCE"]) == beside


@pytest.mark.parametrize(("factor", "expected"), [(1.0, 28.0), (0.75, 32.0), (0.5, 40.0)])
def test_reads_and_writes_slow_each_other_down_as_measured(factor: float, expected: float) -> None:
    machine = replace(MACHINE, ssd_read_together_bytes_per_s=1000 * factor, ssd_write_together_bytes_per_s=500 * factor)
    schedule, needs = free("0FETCH 1HOLD", 2)  # a read of 12 s and a write of 28 s alone
    shape = replace(SHAPE, layer_elements=(6000, 3500), placement=Placement.of(gradients_on_ssd=1.0))
    assert simulate(schedule, machine, shape, needs=needs).makespan_s == pytest.approx(expected)
    bound = step_bound(schedule, machine, shape, needs=needs)
    assert bound.seconds == pytest.approx(expected)


@pytest.mark.parametrize(("adam_cores", "forward_ends", "adam_ends"), [(None, 2.0, 11.0), (1, 1.5, 10.5)])
def test_adam_and_compute_share_the_host_cores(adam_cores: int | None, forward_ends: float, adam_ends: float) -> None:
    schedule, needs = free("0STEP 0F0")
    shape = replace(SHAPE, placement=IN_MEMORY)
    timeline = simulate(schedule, replace(ONE_MEMORY, adam_cores=adam_cores), shape, needs=needs)
    assert ends(timeline) == pytest.approx({"0F0": forward_ends, "0STEP": adam_ends})
    assert ends(simulate(schedule, MACHINE, shape, needs=needs)) == pytest.approx({"0F0": 1.0, "0STEP": 10.0})


@pytest.mark.parametrize(("slots", "expected"), [(1, 50.0), (2, 33.5), (3, 33.5)])
def test_pieces_of_a_step_go_through_slots(slots: int, expected: float) -> None:
    """Four pieces: read 3, Adam 2.5, write 7 each."""
    schedule, needs = free("0STEP")
    timeline = simulate(schedule, MACHINE, replace(SHAPE, part_elements=250), SimulationSettings(slots=slots), needs=needs)
    assert timeline.makespan_s == pytest.approx(expected)


def test_a_fetch_does_not_stand_behind_state_that_waits_for_a_slot() -> None:
    schedule, needs = free("0STEP 0FETCH")
    shape = replace(SHAPE, part_elements=250)
    timeline = simulate(schedule, MACHINE, shape, SimulationSettings(slots=1), needs=needs)
    assert ends(timeline)["0FETCH"] == pytest.approx(4.5)  # 2 s of reading, shared with a piece's 3 s, then 0.5 s of copy


# ------------------------------------------------------------------------------------------------------------ the boundary


def delayed(num_layers: int, num_micro_batches: int) -> tuple[Schedule, list[tuple[int, ...]]]:
    """All steps delayed into the next forward, at its start, and handed over in memory."""
    base = build_training(TrainingStep(num_layers, num_micro_batches))
    events = [event for event in base.events if event.op is not Op.STEP]
    units = [PRE, *range(num_layers)]
    steps = [parse_event(f"{unit}STEP.d0@-1") for unit in units]
    count = len(steps)
    needs: list[tuple[int, ...]] = [()] * count
    for event, earlier in zip(events, dependencies(events), strict=True):
        own = [units.index(event.layer)] if event.op is Op.F and event.layer in units else []
        needs.append(tuple([*own, *(j + count for j in earlier)]))
    return Schedule(num_layers, num_micro_batches, (*steps, *events)), needs


def test_a_delayed_step_hands_over_values_and_its_files_are_read_later() -> None:
    schedule, needs = delayed(3, 1)
    shape = replace(SHAPE, layer_elements=(1000,) * 3)
    timeline = simulate(schedule, MACHINE, shape, needs=needs)
    first = {event: index for index, event in reversed(list(enumerate(timeline.events)))}
    lanes = {(str(span.event), span.stage.lane): span for span in timeline.spans}
    adam, write = lanes["0STEP.d0@-1", "adam"], lanes["0STEP.d0@-1", "ssd_write"]
    forward = lanes["0F0", "compute"]
    assert adam.end_s <= forward.start_s < write.end_s
    fetches = [index for index, event in enumerate(timeline.events) if str(event) == "0FETCH"]
    reads = [[s for s in timeline.spans if s.index == index and s.stage.lane == "ssd_read"] for index in fetches]
    assert not reads[0] and reads[1][0].start_s >= write.end_s
    assert timeline.end_s[first[parse_event("preF0")]] < write.start_s


def test_steps_follow_their_norm_across_the_boundary() -> None:
    schedule, needs = delayed(2, 2)
    shape = replace(SHAPE, layer_elements=(1000,) * 2)
    timeline = simulate(schedule, MACHINE, shape, SimulationSettings(steps=3), needs=needs)
    count = len(schedule.events)
    for step in (1, 2):
        norm = timeline.end_s[(step - 1) * count + schedule.events.index(Event(Op.NORM))]
        starts = [s.start_s for s in timeline.spans if s.event.step_offset and s.index // count == step]
        assert len(starts) == 9 and min(starts) >= norm


def test_what_is_issued_ahead_is_there_when_the_next_step_needs_it() -> None:
    shape = replace(SHAPE, layer_elements=(1000,) * 3)
    schedule = build_training(TrainingStep(3, 2, delayed=True, due=frozenset({2}), ahead=True))
    timeline = simulate(schedule, MACHINE, shape, SimulationSettings(steps=2))
    second = timeline.num_steps * len(schedule.events) // 2
    spans = {(s.index, s.stage.lane): s for s in timeline.spans}

    def at(text: str, step: int) -> int:
        return step * second + [str(event) for event in schedule.events].index(text)

    for unit in ("pre", 0, 1):
        fetch = at(f"{unit}FETCH", 1)
        assert (fetch, "ssd_read") not in spans, "read once more, or not handed over"
        assert spans[at(f"{unit}STEP.d0", 0), "adam"].end_s <= timeline.issued_s[at(f"{unit}F0", 1)]
    again = [i for i, event in enumerate(timeline.events) if str(event) == "0FETCH" and i > second][1]
    assert spans[again, "ssd_read"].start_s >= spans[at("0STEP.d0", 0), "ssd_write"].end_s
    assert spans[at("preSTEP.d0", 0), "ssd_write"].end_s > timeline.issued_s[at("preF0", 1)], "the values are enough"


def test_a_read_ahead_holds_its_buffer_until_its_fetch_is_complete() -> None:
    schedule = build_training(TrainingStep(3, 2, ahead=True))
    shape = replace(SHAPE, pre_elements=100, layer_elements=(1000,) * 3)
    timeline = simulate(schedule, MACHINE, shape, SimulationSettings(steps=2))
    held = [c for c in changes(timeline, MACHINE, shape) if c.owner == "parameters" and c.tier == "host"]
    left = shape.param_bytes * 1100
    assert sum(c.num_bytes for c in held) == left, "the last step's reads ahead, and no other"


@pytest.mark.parametrize("seed", range(10))
def test_delayed_steps_keep_to_the_bound(seed: int) -> None:
    _, machine, shape = draw(seed)
    schedule, needs = delayed(shape.num_layers, 2)
    bound = step_bound(schedule, machine, shape, needs=needs)
    chain = longest_chain_s(schedule, machine, shape, needs)
    one = simulate(schedule, machine, shape, needs=needs)
    assert one.makespan_s >= max(bound.seconds, chain) * (1 - 1e-9)
    assert one.makespan_s <= simulate(schedule, machine, shape, SimulationSettings(overlap=False), needs=needs).makespan_s * (
        1 + 1e-9
    )
    many = simulate(schedule, machine, shape, SimulationSettings(steps=3), needs=needs)
    assert many.makespan_s >= 3 * max(bound.busy_s.values()) * (1 - 1e-9)


def test_consecutive_steps_overlap() -> None:
    shape = replace(SHAPE, layer_elements=(1000,) * 3)
    schedule = build_training(TrainingStep(3, 2))
    one = simulate(schedule, MACHINE, shape).makespan_s
    flowing = simulate(schedule, MACHINE, shape, SimulationSettings(steps=4))
    assert flowing.makespan_s < 4 * one - 1
    fetch = [i for i, event in enumerate(flowing.events) if str(event) == "0FETCH"]
    step = flowing.events.index(parse_event("0STEP"))
    assert flowing.issued_s[fetch[2]] <= flowing.end_s[step] <= min(s.start_s for s in flowing.spans if s.index == fetch[2])


# --------------------------------------------------------------------------------------------------- what holds for all


def draw(seed: int) -> tuple[Schedule, Machine, ModelShape]:
    rng = random.Random(seed)
    layers, micro_batches = rng.randint(1, 6), rng.randint(1, 4)
    together = rng.choice([None, 0.5, 0.75])
    read, write = 10 ** rng.uniform(2, 4), 10 ** rng.uniform(2, 4)
    machine = Machine(
        ssd_read_bytes_per_s=read,
        ssd_write_bytes_per_s=write,
        adam_elements_per_s=10 ** rng.uniform(2, 4),
        host_cores=4,
        one_memory=rng.random() < 0.5,
        copy_in_bytes_per_s=10 ** rng.uniform(2, 5),
        copy_out_bytes_per_s=10 ** rng.uniform(2, 5),
        ssd_read_together_bytes_per_s=together and together * read,
        ssd_write_together_bytes_per_s=together and together * write,
        adam_cores=rng.choice([None, 1]),
        adam_core_share=rng.choice([None, 0.0, 0.7, 1.0]),  # above 1 a step may take longer than in turn
        ssd_core_s_per_byte=rng.choice([None, 1e-5, 1e-4]),
        ssd_latency_s=rng.choice([0.0, 0.1]),
        compute_latency_s=rng.choice([0.0, 0.1]),
    )
    shape = ModelShape(
        rng.randint(0, 500),
        tuple(rng.randint(1, 1000) for _ in range(layers)),
        rng.uniform(0, 2),
        rng.uniform(0, 3),
        400,
        head_s=rng.uniform(0, 1),
        part_elements=rng.choice([None, 300]),
        placement=Placement.of(
            parameters_on_ssd=rng.choice([0.0, 1.0]),
            state_on_ssd=rng.choice([0.5, 1.0]),
            gradients_on_ssd=rng.choice([0.0, 1.0]),
        ),
    )
    order = rng.choice(["vertical", "horizontal"])
    return build_training(TrainingStep(layers, micro_batches, order=order, window=rng.randint(0, 3))), machine, shape


SEEDS = range(40)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_faster_than_the_bound_nor_than_the_longest_chain(seed: int) -> None:
    schedule, machine, shape = draw(seed)
    timeline = simulate(schedule, machine, shape, SimulationSettings(slots=2))
    assert timeline.makespan_s >= step_bound(schedule, machine, shape).seconds * (1 - 1e-9)
    assert timeline.makespan_s >= longest_chain_s(schedule, machine, shape) * (1 - 1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_waiting_for_every_event_adds_up_and_overlap_is_never_slower(seed: int) -> None:
    schedule, machine, shape = draw(seed)
    total = sum(s.seconds for cost in event_costs(schedule.events, machine, shape) for job in cost for s in job)
    serial = simulate(schedule, machine, shape, SimulationSettings(overlap=False)).makespan_s
    assert serial == pytest.approx(total)
    assert simulate(schedule, machine, shape).makespan_s <= serial * (1 + 1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_faster_machine_or_a_freer_thread_is_never_slower(seed: int) -> None:
    schedule, machine, shape = draw(seed)
    fixed = {"ssd_read_together_bytes_per_s": None, "ssd_write_together_bytes_per_s": None, "one_memory": False}
    machine = replace(machine, **fixed)
    shape = replace(shape, placement=shape.placement.with_shares(TensorKind.GRADIENTS, {}))  # one queue per lane: see its note
    before = simulate(schedule, machine, shape).makespan_s
    assert simulate(schedule, machine, shape, SimulationSettings(slots=4)).makespan_s <= before * (1 + 1e-9)
    lanes = ("ssd_read", "ssd_write", "copy_in", "copy_out")
    rates = [*(f"{lane}_bytes_per_s" for lane in lanes), "adam_elements_per_s"]
    for rate in rates:
        faster = replace(machine, **{rate: getattr(machine, rate) * 1.7})
        assert simulate(schedule, faster, shape).makespan_s <= before * (1 + 1e-9), rate


@pytest.mark.parametrize("seed", SEEDS)
def test_every_event_waits_for_what_it_needs_and_queues_keep_their_order(seed: int) -> None:
    schedule, machine, shape = draw(seed)
    timeline = simulate(schedule, machine, shape)
    starts = {}
    for span in timeline.spans:
        if not reads_ahead(span):
            starts.setdefault(span.index, span.start_s)
    for index, earlier in enumerate(dependencies(schedule.events)):
        start = starts.get(index, timeline.end_s[index])
        assert all(timeline.end_s[j] <= start + 1e-9 for j in earlier)
        assert timeline.issued_s[index] <= start + 1e-9
    assert list(timeline.issued_s) == sorted(timeline.issued_s)
    queues: dict[tuple[str, str], list] = {}
    for span in timeline.spans:
        queues.setdefault((span.stage.lane, span.stage.purpose), []).append(span)
    for spans in queues.values():
        ordered = sorted(spans, key=lambda span: (span.index, span.start_s))
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(ordered))


def reads_ahead(span: SimulatedSpan) -> bool:
    return span.event.op is Op.STEP and (span.stage.lane, span.stage.purpose) == ("ssd_read", "state")


def test_state_is_read_from_when_its_step_is_told_by_hand() -> None:
    """Layer 0's from the first HEAD on, `pre`'s once layer 0's step is issued; computed is when the gradients are there."""
    timeline = simulate(build_training(TrainingStep(1, 2, early=True)), MACHINE, SHAPE)
    found = {(str(span.event), span.stage.lane): (span.start_s, span.end_s) for span in timeline.spans}
    assert found["sufHEAD0", "compute"][0] == 3.75 and ends(timeline)["0REDUCE"] == 18.75
    assert found["0STEP.e0", "ssd_read"] == pytest.approx((3.75, 9.75)) and found["0STEP.e0", "adam"][0] == 18.75
    assert found["preSTEP.e0", "ssd_read"][0] == 18.75 and ends(timeline)["preREDUCE"] == pytest.approx(18.95)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_state_is_read_before_its_step_is_told(seed: int) -> None:
    schedule, machine, shape = draw(seed)
    told = {step: schedule.events.index(by) for by, step in coming_steps(schedule.events).items()}
    timeline = simulate(schedule, machine, shape)
    for span in filter(reads_ahead, timeline.spans):
        assert span.start_s >= timeline.issued_s[told.get(span.event, span.index)] - 1e-9


def test_steps_are_told_by_the_one_before_and_not_across_the_norm() -> None:
    schedule = parse_events("sufHEAD0 sufHEAD1 1STEP.e0 0STEP.e0 NORM COMMIT preSTEP.d0 0STEP.d0")
    assert {str(by): str(step) for by, step in coming_steps(schedule).items()} == {
        "sufHEAD0": "1STEP.e0",
        "1STEP.e0": "0STEP.e0",
        "preSTEP.d0": "0STEP.d0",
    }
    later = parse_events("preSTEP.d0@-1 preF0 sufHEAD0 0STEP.e0")
    assert {str(by): str(step) for by, step in coming_steps(later).items()} == {"preSTEP.d0@-1": "0STEP.e0"}


@pytest.mark.parametrize("seed", SEEDS[:10])
def test_several_steps_do_all_their_work(seed: int) -> None:
    schedule, machine, shape = draw(seed)
    timeline = simulate(schedule, machine, shape, SimulationSettings(steps=3))
    assert timeline.makespan_s >= 3 * max(step_bound(schedule, machine, shape).busy_s.values()) * (1 - 1e-9)
    assert len(timeline.spans) == 3 * len(simulate(schedule, machine, shape).spans)
    assert all(busy <= timeline.makespan_s * (1 + 1e-9) for busy in timeline.busy_s.values())


# ------------------------------------------------------------------------------------------------------------- the bound


def resources(machine: Machine, shape: ModelShape = SHAPE, needs: Sequence[tuple[int, ...]] | None = None) -> dict[str, tuple]:
    bound = step_bound(build_training(TrainingStep(1, 1)), machine, shape, needs=needs)
    return {name: (bound.busy_s[name], bound.fill_s[name], bound.drain_s[name]) for name in bound.busy_s}


def test_the_bound_by_hand() -> None:
    found = resources(MACHINE)
    assert found["compute"] == pytest.approx((7.75, 0.25, 28.0))  # after pre's fetch, before the last chunk's write
    assert found["ssd_read"] == pytest.approx((15.4, 0.0, 2.8))
    assert found["copy_in"] == pytest.approx((0.55, 0.2, 28.0))
    assert found["ssd_write"] == pytest.approx((30.8, 2.5, 0.0))  # no gradient before layer 0 has been fetched
    assert found["adam"] == pytest.approx((11.0, 2.5, 2.8))
    bound = step_bound(build_training(TrainingStep(1, 1)), MACHINE, SHAPE)
    assert (bound.resource, bound.seconds) == ("compute", pytest.approx(36.0))
    assert bound.lines()[1].split() == ["compute", "7.750", "0.250", "28.000", "36.000"]


def test_host_cores_count_once() -> None:
    assert resources(ONE_MEMORY)["host_cores"][0] == pytest.approx(7.75 + 11.0)
    assert resources(replace(ONE_MEMORY, adam_cores=1))["host_cores"][0] == pytest.approx(7.75 + 5.5)
    assert "compute" not in resources(ONE_MEMORY) and "adam" not in resources(ONE_MEMORY)
    measured = replace(ONE_MEMORY, adam_cores=1, adam_core_share=0.9)
    assert resources(measured)["host_cores"][0] == pytest.approx(7.75 + 0.9 * 11.0)
    slower = replace(measured, adam_core_share=1.4)  # than in turn, which a better order would do
    assert resources(slower)["host_cores"][0] == pytest.approx(7.75 + 11.0) and slower.adam_share == 1.4
    assert replace(measured, one_memory=False).adam_share == 1 / measured.host_cores  # beside a device Adam has them alone
    # not what the work itself takes
    own_code = replace(measured, compute_latency_s=0.5, copy_host_bytes_per_s=10.0, schedule_forward_s=0.5)
    assert resources(own_code) == resources(measured)
    cast = replace(ONE_MEMORY, cast_elements_per_s=1100.0)
    assert resources(cast)["host_cores"][0] == pytest.approx(7.75 + 12.0)


def test_transfers_take_cores_from_the_computation() -> None:
    machine = replace(ONE_MEMORY, ssd_core_s_per_byte=4e-4)  # of its cores: see ONE_MEMORY; 1000 bytes/s read
    load = 4e-4 * 1000 / machine.host_cores
    schedule, needs = free("0FETCH 0F0")  # 12 s and 1 s alone
    shape = replace(SHAPE, layer_elements=(6000,))
    assert ends(simulate(schedule, machine, shape, needs=needs)) == pytest.approx({"0F0": 1 / (1 - load), "0FETCH": 12.0})
    bound = step_bound(schedule, machine, shape, needs=needs)
    assert bound.busy_s["host_cores"] == pytest.approx(1 + 12 * load)
    elsewhere = replace(machine, one_memory=False)  # the device computes
    assert step_bound(schedule, elsewhere, shape, needs=needs).busy_s["compute"] == pytest.approx(1.0)


def test_what_the_cores_have_nothing_else_to_do_for_is_no_work_of_theirs() -> None:
    machine = replace(ONE_MEMORY, ssd_core_s_per_byte=4e-4)
    schedule = Schedule(1, 1, parse_events("0FETCH 0F0"))  # the forward waits for the fetch, during which nothing computes
    bound = step_bound(schedule, machine, SHAPE, needs=[(), (0,)])
    assert bound.of("host_cores") == pytest.approx(simulate(schedule, machine, SHAPE, needs=[(), (0,)]).makespan_s)


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(CostsError, match="the schedule has 2 layers, the model 1"):
        simulate(build_training(TrainingStep(2, 1)), MACHINE, SHAPE)
    with pytest.raises(CostsError, match="steps and slots must be 1 or more, got 0 and 3"):
        simulate(build_training(TrainingStep(1, 1)), MACHINE, SHAPE, SimulationSettings(steps=0))
    schedule, _ = free("0FETCH 0F0")
    with pytest.raises(ScheduleError, match=r"event 0 \(0FETCH\): never ends"):
        simulate(schedule, MACHINE, SHAPE, needs=[(1,), ()])
