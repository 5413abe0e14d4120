"""Rates and sizes to seconds and bytes; bytes of a step against the architecture's table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ds_vertical.errors import CostsError
from ds_vertical.planner.activation_tiers import activation_tiers
from ds_vertical.planner.closed_forms import kept_layers, traffic_of, vertical_traffic
from ds_vertical.planner.costs import event_costs, split_steps
from ds_vertical.planner.kept_activations import KeptShare, PolicyPoint
from ds_vertical.planner.machine import Machine
from ds_vertical.planner.model_shape import ModelShape
from ds_vertical.schedule.events import PRE, Event, Unit, parse_event, parse_events
from ds_vertical.schedule.passes import TrainingStep, build_training
from ds_vertical.types import Placement, TensorKind, Tier

RATES = {
    "ssd_read_bytes_per_s": 1000.0,
    "ssd_write_bytes_per_s": 500.0,
    "adam_elements_per_s": 100.0,
    "host_cores": 2,
    "one_memory": False,
    "copy_in_bytes_per_s": 4000.0,
    "copy_out_bytes_per_s": 2000.0,
}
MACHINE = Machine.from_dict(RATES)
SHAPE = ModelShape(
    pre_elements=100,
    layer_elements=(1000, 1000, 500),
    forward_s=1.0,
    backward_s=2.0,
    activation_bytes=400,
    pre_forward_s=0.25,
    pre_backward_s=0.5,
    head_s=3.0,
)
P = SHAPE.num_elements


def seconds(text: str, machine: Machine = MACHINE, shape: ModelShape = SHAPE, beside: str = "") -> dict[str, float]:
    """Seconds per lane of the first event of `text`, in a schedule with the events of `beside`."""
    events = parse_events(f"{text} {beside}")
    found: dict[str, float] = {}
    for job in event_costs(events, machine, shape)[0]:
        for stage in job:
            found[stage.lane] = found.get(stage.lane, 0.0) + stage.seconds
    return found


# One element: 2 bytes of parameter, 4 of gradient, 12 of state. All by hand.
@pytest.mark.parametrize(
    ("text", "beside", "expected"),
    [
        ("0FETCH", "", {"ssd_read": 2.0, "copy_in": 0.5}),
        ("preFETCH", "", {"ssd_read": 0.2, "copy_in": 0.05}),
        ("0F0", "", {"compute": 1.0}),
        ("2F0", "", {"compute": 0.5}),
        ("preF0", "", {"compute": 0.25}),
        ("sufHEAD0", "", {"compute": 3.0}),
        ("0B0", "", {"compute": 3.0}),
        ("preB0", "", {"compute": 0.5}),
        ("0REDUCE", "", {"copy_out": 2.0}),
        ("0RELEASE", "", {}),
        ("NORM", "", {}),
        ("0STEP", "", {"ssd_read": 12.0, "adam": 10.0, "ssd_write": 28.0}),
        ("0STEP.e0", "0STEP.e1", {"ssd_read": 6.0, "adam": 5.0, "ssd_write": 14.0}),
        ("0STEP.d0@-1", "0STEP.e0", {"ssd_read": 7.0, "adam": 5.0, "ssd_write": 14.0}),  # and the rest
        ("0HOLD", "", {}),
        ("0SAVE0", "", {}),
    ],
)
def test_seconds_of_events(text: str, beside: str, expected: dict[str, float]) -> None:
    assert seconds(text, beside=beside) == pytest.approx(expected)


def test_placement_decides_what_moves() -> None:
    waits = replace(SHAPE, placement=Placement.of(gradients_on_ssd=0.5, activations_on_host=0.5, activations_on_ssd=0.25))
    assert seconds("0REDUCE", shape=waits) == pytest.approx({"copy_out": 2.0, "ssd_write": 4.0})
    assert seconds("0REDUCE", shape=waits, beside="0HOLD") == pytest.approx({"copy_out": 2.0})
    assert seconds("0HOLD", shape=waits) == pytest.approx({"ssd_write": 4.0})
    assert seconds("0STEP", shape=waits)["ssd_read"] == pytest.approx(14.0)
    assert seconds("0STEP", shape=waits, beside="0HOLD")["ssd_read"] == pytest.approx(14.0)
    assert seconds("0STEP.e0", shape=waits, beside="0HOLD 0STEP.d0@-1")["ssd_read"] == pytest.approx(6.0)
    assert seconds("0HOLD.d0", shape=waits, beside="0STEP.e0 0STEP.d0@-1") == pytest.approx({"ssd_write": 2.0})
    tiers = activation_tiers(4, waits.placement[TensorKind.ACTIVATIONS])
    assert sorted(tiers) == ["device", "host", "host", "ssd"]
    for tier, saved, loaded in (
        ("device", {}, {}),
        ("host", {"copy_out": 0.2}, {"copy_in": 0.1}),
        ("ssd", {"copy_out": 0.2, "ssd_write": 0.8}, {"copy_in": 0.1, "ssd_read": 0.4}),
    ):
        m = tiers.index(Tier(tier))
        assert seconds(f"1SAVE{m}", shape=waits, beside="0F3") == pytest.approx(saved)
        assert seconds(f"1GLOAD{m}", shape=waits, beside="0F3") == pytest.approx(loaded)
    in_memory = replace(SHAPE, placement=Placement.of(parameters_on_ssd=0.0, state_on_ssd=0.0))
    assert seconds("0FETCH", shape=in_memory) == pytest.approx({"copy_in": 0.5})
    assert seconds("0STEP", shape=in_memory) == pytest.approx({"adam": 10.0})


def test_shards_latencies_casts_and_one_memory() -> None:
    assert seconds("0FETCH", shape=replace(SHAPE, num_shards=2)) == pytest.approx({"ssd_read": 1.0, "copy_in": 0.25})
    slow = replace(MACHINE, ssd_latency_s=0.5, copy_latency_s=0.25, compute_latency_s=0.125)
    assert seconds("0FETCH", slow) == pytest.approx({"ssd_read": 2.5, "copy_in": 0.75})
    assert seconds("0F0", slow) == pytest.approx({"compute": 1.125})
    assert (MACHINE.schedule_forward_s, MACHINE.schedule_backward_s) == (0.0006, 0.0009)  # as measured, where none are given
    # a device beside the host waits for the host where that takes longer
    launched = replace(MACHINE, launch_s=1.5, schedule_forward_s=0.0, schedule_backward_s=0.0)
    forward_s, backward_s = (seconds(event)["compute"] for event in ("0F0", "0B0"))
    assert seconds("0F0", launched) == pytest.approx({"compute": 1.5}) and forward_s < 1.5
    assert seconds("0B0", launched)["compute"] == pytest.approx(max(4.5, backward_s))
    assert seconds("2B0", launched, replace(SHAPE, recompute_last=False)) == pytest.approx({"compute": 3.0})
    assert seconds("0F0", replace(launched, launch_s=0.25)) == pytest.approx({"compute": forward_s})
    assert seconds("0F0", replace(launched, one_memory=True)) == pytest.approx({"compute": forward_s})
    assert seconds("0F0", launched.slowed(2.0)) == pytest.approx({"compute": 3.0})
    scheduled = replace(launched, schedule_forward_s=0.5, schedule_backward_s=backward_s)  # the schedule's own code, on top
    assert seconds("0F0", scheduled) == pytest.approx({"compute": 2.0})
    assert seconds("0B0", scheduled) == pytest.approx({"compute": 4.5 + backward_s})
    of_four = replace(SHAPE, blocks_per_layer=4)  # of each block; layer 2 has half of them
    assert seconds("0F0", scheduled, of_four) == pytest.approx({"compute": 8.0})
    assert seconds("2F0", scheduled, of_four) == pytest.approx({"compute": 4.0})
    assert seconds("0B0", scheduled, of_four) == pytest.approx({"compute": 4 * (4.5 + backward_s)})
    assert seconds("0F0", scheduled.slowed(2.0)) == pytest.approx({"compute": 4.0})
    # the host's own thread computes between its lines; of four ranks on two cores each waits for its turn
    on_host = replace(scheduled, one_memory=True, host_cores=2)
    assert seconds("0F0", on_host) == pytest.approx({"compute": forward_s + 0.5})
    assert seconds("0B0", on_host)["compute"] == pytest.approx(2 * backward_s)
    assert seconds("0F0", on_host.shared(4)) == pytest.approx({"compute": forward_s + 1.0})
    assert on_host.shared(2).schedule_forward_s == scheduled.shared(64).schedule_forward_s == 0.5
    smallest = replace(on_host, compute_latency_s=0.25)  # of an event, which that code has in it
    assert seconds("0F0", smallest) == pytest.approx({"compute": forward_s + 0.5})
    assert seconds("0F0", replace(smallest, schedule_forward_s=0.0).shared(4)) == pytest.approx({"compute": forward_s + 0.5})
    assert seconds("0STEP", replace(MACHINE, cast_elements_per_s=200.0))["adam"] == pytest.approx(15.0)
    summed, resting = replace(MACHINE, checksum_bytes_per_s=7000.0), Placement.of(parameters_on_ssd=0.0, state_on_ssd=0.0)
    assert seconds("0STEP", summed)["adam"] == pytest.approx(12.0)  # 14000 bytes
    assert seconds("0STEP", summed, replace(SHAPE, placement=resting))["adam"] == pytest.approx(10.0)
    assert seconds("0STEP", summed.slowed(2.0))["adam"] == pytest.approx(24.0)
    assert seconds("0REDUCE", replace(MACHINE, norm_elements_per_s=4000.0)) == pytest.approx({"compute": 0.25, "copy_out": 2.0})
    assert seconds("0FETCH", replace(MACHINE, one_memory=True)) == pytest.approx({"ssd_read": 2.0})
    assert seconds("2B0", shape=replace(SHAPE, recompute_last=False)) == pytest.approx({"compute": 1.0})


def test_a_step_is_cut_into_pieces_and_keeps_its_bytes() -> None:
    whole = event_costs([parse_event("0STEP")], MACHINE, SHAPE)[0]
    pieces = event_costs([parse_event("0STEP")], MACHINE, replace(SHAPE, part_elements=300))[0]
    assert (len(whole), len(pieces)) == (1, 4)
    assert sum(s.num_bytes for job in pieces for s in job) == pytest.approx(sum(s.num_bytes for s in whole[0]))


def test_given_sizes_of_parts() -> None:
    events = parse_events("0STEP.e0 0STEP.d0@-1")
    early, delayed = event_costs(events, MACHINE, SHAPE, {(0, "e0"): 700, (0, "d0"): 300})
    assert [early[0][1].seconds, delayed[-1][1].seconds] == [7.0, 3.0]
    with pytest.raises(CostsError, match=r"event 0STEP.d0@-1: parts has no \(0, 'd0'\)"):
        event_costs(events, MACHINE, SHAPE, {(0, "e0"): 700})


def test_gradients_that_wait_beside_others_are_copied_within_host_memory() -> None:
    host = replace(MACHINE, one_memory=True, copy_host_bytes_per_s=1000.0)
    parts: dict[tuple[Unit, str], float] = {(0, "e0"): 700, (0, "d0"): 300}

    def reduce_s(text: str, machine: Machine = host, shape: ModelShape = SHAPE) -> list[float]:
        return [stage.seconds for job in event_costs(parse_events(text), machine, shape, parts)[0] for stage in job]

    assert reduce_s("0REDUCE 0STEP.e0 0STEP.d0@-1") == pytest.approx([1.2])  # 4 bytes each
    assert reduce_s("0REDUCE 0STEP.d0@-1") == []  # all of them wait, where they are
    assert reduce_s("0REDUCE 0STEP.e0 0STEP.d0@-1", replace(host, copy_host_bytes_per_s=None)) == []
    assert reduce_s("0REDUCE 0STEP.d0@-1", shape=replace(SHAPE, num_shards=2)) == pytest.approx([2.0])  # out of a collective


def test_a_step_without_part_beside_others_takes_the_rest() -> None:
    events = parse_events("0REDUCE 0STEP.e0 0STEP")
    halves = event_costs(events, MACHINE, SHAPE)
    assert [halves[0][0][0].num_bytes, halves[1][0][1].seconds, halves[2][0][1].seconds] == [4000, 5.0, 5.0]
    given = event_costs(events, MACHINE, SHAPE, split_steps(SHAPE, 0.25))
    assert [given[1][0][1].seconds, given[2][0][1].seconds] == [7.5, 2.5]
    assert event_costs(events, MACHINE, SHAPE, {(0, "e0"): 1000})[2] == ()
    with pytest.raises(CostsError, match="event 0STEP: the parts of 0 have 100 elements more than it"):
        event_costs(events, MACHINE, SHAPE, {(0, "e0"): 1100})
    with pytest.raises(CostsError, match="optimizer_delay: got 1.5; write a share from 0 to 1"):
        split_steps(SHAPE, 1.5)


def test_what_a_delayed_step_hands_over_is_not_read() -> None:
    """What it leaves of the unit is read with it, not by the unit's FETCH."""
    events = parse_events("0STEP.d0@-1 0STEP.e0 0FETCH 0FETCH preFETCH")
    costs = event_costs(events, MACHINE, SHAPE)
    stages = [[stage for job in cost for stage in job if stage.lane == "ssd_read"] for cost in costs]
    read = [sum(stage.num_bytes for stage in found if stage.purpose == "parameters") for found in stages]
    assert read == [1000, 0, 0, 2000, 200]
    nothing_delayed = event_costs(events, MACHINE, SHAPE, {(0, "d0"): 0.0, (0, "e0"): 1000.0})
    assert [len(cost) for cost in nothing_delayed[:3]] == [0, 1, 1]


def test_what_is_read_for_the_next_step_is_not_read_in_it() -> None:
    events = parse_events("preFETCH 0FETCH 0RELEASE 0FETCH 0RELEASE 1FETCH NORM 1STEP.d0 preFETCH@+1 0FETCH@+1")
    costs = event_costs(events, MACHINE, SHAPE)
    moved = {
        lane: [sum(s.num_bytes for job in cost for s in job if (s.lane, s.purpose) == (lane, "parameters")) for cost in costs]
        for lane in ("ssd_read", "copy_in")
    }
    assert moved["ssd_read"] == [0, 0, 0, 2000, 0, 0, 0, 0, 200, 2000]
    assert moved["copy_in"] == [200, 2000, 0, 2000, 0, 2000, 0, 0, 0, 0]


# ------------------------------------------------------------------------------------------------------ bytes per step


@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("steps", [{}, {"early": True}, {"delayed": True, "due": frozenset({2})}], ids=str)
def test_issuing_ahead_moves_no_byte_more(window: int, steps: dict[str, Any]) -> None:
    """`due`: with LEAD layers stepped ahead, the third is left to the next forward."""
    ahead = build_training(TrainingStep(3, 2, window=window, ahead=True, **steps))
    plain = build_training(
        TrainingStep(3, 2, window=window, **steps | ({"due": frozenset({"pre", 0, 1, 2})} if steps.get("due") else {}))
    )
    moved = [traffic_of(event_costs(built.events, MACHINE, SHAPE, split_steps(SHAPE, 0.25)), SHAPE) for built in (ahead, plain)]
    assert vars(moved[0]) == pytest.approx(vars(moved[1]))


@pytest.mark.parametrize("waiting_on_ssd", [0.0, 1.0])
@pytest.mark.parametrize("window", [0, 1, 2, 5])
@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_a_schedule_moves_the_bytes_of_the_table(window: int, num_micro_batches: int, waiting_on_ssd: float) -> None:
    shape = replace(SHAPE, placement=Placement.of(gradients_on_ssd=waiting_on_ssd))
    schedule = build_training(TrainingStep(3, num_micro_batches, window=window))
    table = vertical_traffic(shape, num_micro_batches, kept=kept_layers(window), waiting=1.0)
    moved = traffic_of(event_costs(schedule.events, MACHINE, shape), shape)
    for name, expected in vars(table).items():
        assert getattr(moved, name) == pytest.approx(expected), name


def test_a_schedule_that_holds_moves_the_bytes_of_the_table() -> None:
    """Half of every unit is stepped early, and does not wait; the other half is written once and read once."""
    shape = replace(SHAPE, placement=Placement.of(gradients_on_ssd=1.0))
    for hold, early, waiting in (("d0", True, 0.5), ("all", False, 1.0)):
        schedule = build_training(TrainingStep(3, 2, delayed=True, early=early, due=("pre", 0, 1, 2), hold=hold))
        moved = traffic_of(event_costs(schedule.events, MACHINE, shape), shape)
        table = vertical_traffic(shape, 2, kept=kept_layers(1), waiting=waiting)
        assert (moved.gradients_read, moved.gradients_written) == pytest.approx((table.gradients_read, table.gradients_written))


@pytest.mark.parametrize("state", [1.0, 0.4])
def test_state_in_memory_is_stepped_late_and_moves_no_bytes(state: float) -> None:
    shape = replace(SHAPE, placement=Placement.of(state_on_ssd=state))
    schedule = build_training(TrainingStep(3, 2, delayed=True, early=True, due=("pre", 0, 1, 2)))
    costs = event_costs(schedule.events, MACHINE, shape, split_steps(shape, 0.25))
    moved = traffic_of(costs, shape)
    table = vertical_traffic(shape, 2, kept=kept_layers(1), handed_over=1 - 0.75 * state)
    for name, expected in vars(table).items():
        assert getattr(moved, name) == pytest.approx(expected), name
    steps = [(event, cost) for event, cost in zip(schedule.events, costs, strict=True) if event.part == "e0"]
    read = sum(stage.num_bytes for _, cost in steps for job in cost for stage in job if stage.reads_state)
    assert read == pytest.approx(0.75 * state * 12 * P) and table.state_read == pytest.approx(state * 12 * P)
    redone = vertical_traffic(shape, 2, redone=0.25)
    assert redone.state_read == redone.state_written == pytest.approx((state + 0.25) * 12 * P)


def test_of_compressed_masters_half_is_written_and_early_steps_read_half() -> None:
    shape = replace(SHAPE, compressed=True)
    schedule = build_training(TrainingStep(3, 2, delayed=True, early=True, due=("pre", 0, 1, 2)))
    moved = traffic_of(event_costs(schedule.events, MACHINE, shape, split_steps(shape, 0.25)), shape)
    assert moved.state_read == pytest.approx((0.75 * 10 + 0.25 * 12) * P)
    assert (moved.state_written, moved.parameters_written) == pytest.approx((10 * P, 2 * P))
    after_norm = vertical_traffic(shape, 2)
    assert (after_norm.state_read, after_norm.state_written) == (12 * P, 10 * P)
    assert replace(SHAPE, generations=2).second_bytes + 2 == replace(shape, generations=2).second_bytes


def test_units_may_have_other_shares_of_their_state_in_memory() -> None:
    shape = replace(SHAPE, placement=Placement.of(state_on_ssd=0.4), state_places=((PRE, 0.0, 100.0), (0, 600.0, 400.0)))
    for parts, expected in ((None, [0, 7200, 4800]), ({(0, "e0"): 450, (0, "d0"): 550}, [5400, 1800])):
        events = parse_events("preSTEP 0STEP 1STEP" if parts is None else "0STEP.e0 0STEP.d0@-1")
        costs = event_costs(events, MACHINE, shape, parts)
        found = [sum(stage.num_bytes for job in cost for stage in job if stage.reads_state) for cost in costs]
        assert found == pytest.approx(expected)


def test_the_table_in_multiples_of_p() -> None:
    on_ssd = replace(SHAPE, placement=Placement.of(gradients_on_ssd=1.0), pre_elements=0)
    p = on_ssd.num_elements
    plain = vertical_traffic(on_ssd, 4, kept=0)
    assert (plain.read, plain.written) == (4 * p + 12 * p, 12 * p + 2 * p)
    waiting = vertical_traffic(on_ssd, 4, kept=0, waiting=1.0)
    assert (waiting.read - plain.read, waiting.written - plain.written) == (4 * p, 4 * p)
    redone = vertical_traffic(on_ssd, 4, kept=0, redone=1.0)
    assert (redone.read - plain.read, redone.written - plain.written) == (12 * p, 14 * p)
    handed = vertical_traffic(on_ssd, 4, kept=0, handed_over=0.25)
    assert plain.read - handed.read == pytest.approx(0.25 * 2 * p)
    kept = vertical_traffic(on_ssd, 4, kept=1)
    assert plain.read - kept.read == pytest.approx(2 * 500)


def test_the_table_has_the_bytes_measured_in_the_prototype() -> None:
    """8 layers of 12.6 M and 0.5 M outside, M = 4 (design, prototype.md): 1593 MB read and 1417 written. The size of the parts
    is known to 0.1 M only."""
    shape = replace(SHAPE, pre_elements=500_000, layer_elements=(12_600_000,) * 8)
    own = vertical_traffic(shape, 4)
    assert [x / 1e6 for x in (own.read, own.written)] == pytest.approx([1593, 1417], rel=0.01)


@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize(("count", "share"), [(1, 1.0), (2, 1.0), (5, 0.4), (4, 0.25)])
def test_activations_move_the_bytes_of_the_table(count: int, share: float, window: int) -> None:
    shape = replace(SHAPE, placement=Placement.of(activations_on_host=0.25, activations_on_ssd=min(share, 0.75)))
    tiers = activation_tiers(count, shape.placement[TensorKind.ACTIVATIONS])
    moved = tuple(m for m, tier in enumerate(tiers) if tier != "device")
    schedule = build_training(TrainingStep(3, count, window=window, moved=moved))
    found = traffic_of(event_costs(schedule.events, MACHINE, shape), shape)
    table = vertical_traffic(shape, count, kept=kept_layers(window))
    assert found.activations_written == table.activations_written == tiers.count("ssd") * 400 * (2 if count == 1 else 6)
    assert found.activations_read == table.activations_read == tiers.count("ssd") * 400 * (2 if count == 1 else 8)


@pytest.mark.parametrize("shares", [(0.0, 0.0, 1.0), (0.25, 0.25, 0.5), (1.0, 0.0, 0.0)])
def test_what_forwards_keep_moves_the_bytes_of_the_table_and_spares_the_recompute(shares: tuple[float, ...]) -> None:
    kept = KeptShare(PolicyPoint("products", 300, 0.25), *shares)
    shape, cells = replace(SHAPE, kept=kept), kept.cells(3, 4, MACHINE.one_memory)
    away = tuple(cell for cell, tier in cells.items() if tier is not Tier.DEVICE)
    schedule = build_training(TrainingStep(3, 4, kept=away))
    costs, plain = (event_costs(schedule.events, MACHINE, given) for given in (shape, SHAPE))
    found, table = traffic_of(costs, shape), vertical_traffic(shape, 4, kept=kept_layers(1))
    assert found.kept_written == found.kept_read == table.kept_written == table.kept_read == 300 * 4 * shares[2]
    assert found.written == table.written
    seconds = [sum(s.seconds for cost in own for job in cost for s in job if s.lane == "compute") for own in (plain, costs)]
    assert seconds[0] - seconds[1] == pytest.approx(0.25 * len(cells)) and len(cells) == 8
    with pytest.raises(CostsError, match="keeps nothing of it"):
        event_costs(parse_events("2KSAVE0"), MACHINE, shape)


# -------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssd_read_bytes_per_s": 0}, r"machine.ssd_read_bytes_per_s: got 0; write a rate above 0"),
        ({"ssd_read_bytes_per_s": "fast"}, r"machine.ssd_read_bytes_per_s: got 'fast'"),
        ({"adam_elements_per_s": float("nan")}, r"machine.adam_elements_per_s: got nan"),
        ({"adam_elements_per_s": None}, r"machine.adam_elements_per_s: got None"),
        ({"host_cores": 1.5}, r"machine.host_cores: got 1.5; write a number of cores"),
        ({"one_memory": 1}, r"machine.one_memory: got 1; write true or false"),
        ({"ssd_latency_s": -1}, r"machine.ssd_latency_s: got -1; write seconds, 0 or more"),
        ({"copy_in_bytes_per_s": None}, r"machine.copy_in_bytes_per_s: got None; write bytes per second, or one_memory: true"),
        ({"ssd_write_together_bytes_per_s": 501}, r"write at most the rate alone, 500"),
        ({"adam_cores": 3}, r"machine.adam_cores: got 3; write at most host_cores, 2"),
        ({"ssd_read": 1}, r"machine.ssd_read: no such key; there are ssd_read_bytes_per_s"),
    ],
)
def test_a_machine_that_is_none_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CostsError, match=message):
        Machine.from_dict({"date": "2026-11-21", "machine": RATES | changes})


def test_a_machine_is_read_with_and_without_what_is_around_it() -> None:
    assert Machine.from_dict({"date": "today", "machine": RATES}) == Machine.from_dict(RATES) == MACHINE
    with pytest.raises(CostsError, match="machine.host_cores: missing; run `ds-vertical limits` again"):
        Machine.from_dict({key: value for key, value in RATES.items() if key != "host_cores"})
    with pytest.raises(CostsError, match="limits.machine: got 3; write an object"):
        Machine.from_dict({"machine": 3})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_elements": ()}, "model.layer_elements"),
        ({"pre_elements": -1}, "pre_elements: got -1"),
        ({"forward_s": -0.5}, "model.forward_s: got -0.5"),
        ({"num_shards": 0}, "model.num_shards: got 0"),
        ({"part_elements": 0}, "model.part_elements: got 0"),
    ],
)
def test_a_shape_that_is_none_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CostsError, match=message):
        replace(SHAPE, **changes)  # pyright: ignore


def test_shares_and_layers_out_of_range_are_refused() -> None:
    with pytest.raises(CostsError, match="placement.state_on_ssd: got 1.5; write a share from 0 to 1"):
        Placement.of(state_on_ssd=1.5)
    with pytest.raises(CostsError, match="placement.activations_on_ssd: got 0.75; write 0.5"):
        Placement.of(activations_on_host=0.5, activations_on_ssd=0.75)
    with pytest.raises(CostsError, match="the schedule names layer 3; the model has 3"):
        event_costs([parse_event("3FETCH")], MACHINE, SHAPE)
    with pytest.raises(CostsError, match="handed_over: got 2"):
        vertical_traffic(SHAPE, handed_over=2)
    assert SHAPE.elements(PRE) == 100 and SHAPE.elements("suf") == 0 and P == 2600


def test_every_op_has_a_price() -> None:
    from ds_vertical.schedule.events import Op

    texts = {Op.NORM: "NORM", Op.HEAD: "sufHEAD0"}
    plain = {Op.FETCH, Op.SPREAD, Op.RELEASE, Op.REDUCE, Op.CROSS, Op.HOLD, Op.STEP, Op.COMMIT, Op.MAKE}
    for op in Op:
        event: Event = parse_event(texts.get(op, f"0{op}{'' if op in plain else 0}"))
        event_costs([event], MACHINE, SHAPE)
