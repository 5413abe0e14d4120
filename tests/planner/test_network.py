"""What collectives take of the links between ranks: volumes by hand, in costs, in the program, in plans."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_vertical.cli import main
from ds_vertical.config.cross_check import check
from ds_vertical.config.resolve import resolve
from ds_vertical.config.section import Levels, load_section
from ds_vertical.distributed.topology import Level, Topology
from ds_vertical.distributed.unit_levels import topology_on
from ds_vertical.errors import CostsError
from ds_vertical.model.hf import named_shape, read_fields
from ds_vertical.planner import linear_program, memory_budget
from ds_vertical.planner import machine as profile
from ds_vertical.planner.bound import step_bound
from ds_vertical.planner.candidate import Choice, difference
from ds_vertical.planner.costs import event_costs
from ds_vertical.planner.linear_program import LpProblem
from ds_vertical.planner.machine import Machine, read_links
from ds_vertical.planner.model_shape import ModelShape
from ds_vertical.planner.network import Hop, LevelChoice, Network, level_choice, other_networks, seconds_of
from ds_vertical.planner.simulate import SimulationSettings, simulate
from ds_vertical.schedule.events import Event, Op, Schedule, parse_events
from ds_vertical.schedule.passes import TrainingStep, build_training
from ds_vertical.types import Placement, Tier

MACHINE = Machine(
    ssd_read_bytes_per_s=1e6,
    ssd_write_bytes_per_s=1e6,
    adam_elements_per_s=1e6,
    host_cores=2,
    one_memory=True,
    schedule_forward_s=0.0,
    schedule_backward_s=0.0,
    net_local_bytes_per_s=4000.0,
    net_cross_bytes_per_s=1000.0,
)
FLAT = Network(2, 2, reduces_twice=True)
LEVELS = replace(FLAT, levels=True)
SHAPE = ModelShape(0, (1000,) * 6, 0.001, 0.002, 4, num_shards=4, network=FLAT)
LINKS = {"local_bytes_per_s": 5e9, "local_latency_s": 1e-5, "cross_bytes_per_s": 1e9, "cross_latency_s": 2e-5}


def training(network: Network, num_micro_batches: int = 2) -> Any:
    share = network.copy_share if network.levels else None
    standing = ("pre", *range(6)) if network.stands else None
    step = TrainingStep(6, num_micro_batches, reduces_beside=True, copy_share=share, standing=standing)
    return build_training(step)


def moved(network: Network, num_micro_batches: int = 2) -> dict[str, float]:
    """Bytes on each lane in a step."""
    found: dict[str, float] = {}
    for cost in event_costs(training(network, num_micro_batches).events, MACHINE, replace(SHAPE, network=network)):
        for stage in (stage for job in cost for stage in job):
            found[stage.lane] = found.get(stage.lane, 0.0) + stage.num_bytes
    return found


def step_s(network: Network, machine: Machine = MACHINE) -> float:
    settings = SimulationSettings(3)
    return simulate(training(network), machine, replace(SHAPE, network=network), settings).step_s


def test_a_step_moves_what_the_table_says_whatever_m_is() -> None:
    weights, again, gradients = 6 * 2000, 4 * 2000, 6 * 4000  # the last two layers stay from forward to backward
    for count in (2, 16):
        flat, levels = moved(FLAT, count), moved(LEVELS, count)
        assert flat["net_cross"] == pytest.approx(3 / 4 * (weights + again) + 2 * 3 / 4 * gradients)
        assert "net_local" not in flat
        assert levels["net_cross"] == pytest.approx(1 / 2 * weights + 1 / 2 * gradients)
        assert levels["net_local"] == pytest.approx(1 / 2 * (weights + again + gradients))
        none = moved(replace(LEVELS, copy_share=0.0), count)
        assert none["net_cross"] == pytest.approx(levels["net_cross"] + again / 2)


def test_what_a_node_keeps_is_not_read_again() -> None:
    read, again = 6 * 500, 4 * 500  # bytes of this rank's shards
    assert moved(FLAT)["ssd_read"] - moved(LEVELS)["ssd_read"] == pytest.approx(again)
    half = moved(replace(LEVELS, copy_share=0.5))
    assert half["ssd_read"] - moved(LEVELS)["ssd_read"] == pytest.approx(again / 2)
    assert moved(LEVELS)["ssd_read"] >= read


def test_a_copy_that_stands_crosses_once_too_and_behind_the_step() -> None:
    stands = replace(LEVELS, stands=True)
    found, kept = moved(stands), moved(LEVELS)
    assert found["net_cross"] == kept["net_cross"]
    assert found["net_local"] == kept["net_local"], "the forward gathers out of the copy, and the spread does not"
    events = training(stands).events
    costs = event_costs(events, MACHINE, replace(SHAPE, network=stands))
    crossing = {
        (event.op.name, event.ahead)
        for event, cost in zip(events, costs, strict=True)
        for job in cost
        for stage in job
        if stage.lane == "net_cross"
    }
    assert crossing == {("SPREAD", True), ("CROSS", False)}
    assert kept["ssd_read"] - found["ssd_read"] == 6 * 500, "its step hands its values on"
    on_device = memory_budget.budget(replace(SHAPE, network=stands), memory_budget.BudgetTerms(2))
    items = {item.what: (item.tier, item.num_bytes) for item in on_device}
    assert items["standing copies of the weights"] == (Tier.DEVICE, 6 * 2000 // 2)
    assert step_s(stands) < step_s(FLAT) / 2


@st.composite
def shapes_of_levels(draw: st.DrawFn) -> tuple[Network, Topology]:
    copy_ranks, parts, nodes = (draw(st.integers(1, 4)) for _ in range(3))
    per_node = copy_ranks * parts
    ranks = per_node * nodes
    sums = [g for g in range(copy_ranks, ranks + 1, copy_ranks) if not ranks % g and not (g % per_node and per_node % g)]
    sum_ranks = draw(st.sampled_from(sums))
    network = Network(nodes, per_node, levels=True, copy_ranks=copy_ranks, sum_ranks=sum_ranks)
    return network, Topology(ranks, sum_ranks, copy_ranks)


@settings(max_examples=100, deadline=None)
@given(shapes_of_levels())
def test_hops_bring_what_is_sent_message_by_message(shape: tuple[Network, Topology]) -> None:
    """Whatever w and g are: of each collective the bytes into a node from the others, counted over all messages of its hops,
    and what all its ranks receive."""
    network, topology = shape
    elements = 1.0 * topology.world  # a byte each
    per_node = network.ranks_per_node

    def counted(levels: Sequence[Level], *, ring: bool) -> tuple[float, float]:
        into_node = received = 0.0
        for level in levels:
            # of a rank's part of the result: what one rank of the hop brings
            held = {Level.PAIR: topology.pair, Level.NODE: topology.node, Level.WORLD: topology.world}[level]
            for hop in topology.hops(level):
                for place, rank in enumerate(hop):
                    senders = [hop[place - 1]] * (len(hop) - 1) if ring else [other for other in hop if other != rank]
                    for sender in senders if rank < per_node else ():
                        received += elements / held
                        into_node += elements / held * (sender // per_node > 0)
        return into_node, received

    def said(hops: Sequence[Hop]) -> tuple[float, float]:
        return sum(hop.num_bytes for hop in hops if hop.lane == "net_cross"), sum(hop.received for hop in hops)

    every = (Level.WORLD, Level.NODE, Level.PAIR)
    assert said(network.spread(elements, 1)) == pytest.approx(counted(every, ring=True))
    assert said(network.local_gather(elements, 1)) == pytest.approx(counted((Level.PAIR,), ring=True))
    assert said(network.reduce(elements, 1)) == pytest.approx(counted((Level.PAIR, Level.NODE), ring=False))
    assert said(network.cross(elements, 1)) == pytest.approx(counted((Level.WORLD,), ring=False))


def test_pairs_of_a_node_cross_as_few_bytes_as_the_node() -> None:
    """Eight ranks as two nodes of four: pairs share a copy, nodes add gradients."""
    four = Network(2, 4, levels=True)
    pairs = replace(four, copy_ranks=2)

    def across(hops: Sequence[Hop]) -> float:
        return sum(hop.num_bytes for hop in hops if hop.lane == "net_cross")

    for name in ("spread", "reduce", "cross"):
        assert (
            across(getattr(pairs, name)(1000, 2)) == across(getattr(four, name)(1000, 2)) == (0 if name == "reduce" else 1000)
        )
    assert [hop.num_bytes for hop in four.local_gather(1000, 2)] == [1500]
    assert [hop.num_bytes for hop in pairs.local_gather(1000, 2)] == [1000]
    with pytest.raises(CostsError, match="copy_ranks 3 and sum_ranks 4 do not fit 2 nodes of 4 ranks"):
        Network(2, 4, levels=True, copy_ranks=3)


PAIRS = replace(MACHINE, net_pair_ranks=2, net_pair_bytes_per_s=8000.0, net_pair_latency_s=0.5)


def test_a_pair_with_a_link_of_its_own_has_a_lane_of_its_own() -> None:
    """Two nodes of four ranks: a hop of a pair is on its link, one of more ranks on the node's, with what passes in pairs."""
    four = Network(2, 4, levels=True, pair_ranks=2)
    pairs = replace(four, copy_ranks=2)

    def lanes(hops: Sequence[Hop]) -> list[tuple[str, float]]:
        return [(hop.lane, hop.num_bytes) for hop in hops]

    assert lanes(pairs.local_gather(1000, 2)) == [("net_pair", 1000)] and lanes(four.local_gather(1000, 2)) == [
        ("net_local", 1500)
    ]
    assert lanes(pairs.spread(1000, 2)) == [("net_cross", 1000), ("net_local", 500), ("net_pair", 1000)]
    assert lanes(pairs.reduce(1000, 4)) == [("net_pair", 2000), ("net_local", 1000)]
    assert lanes(pairs.cross(1000, 4)) == lanes(replace(pairs, pair_ranks=1).cross(1000, 4)) == [("net_cross", 2000)]
    without = replace(pairs, pair_ranks=1)
    assert lanes(without.reduce(1000, 4)) == [("net_local", 2000), ("net_local", 1000)]
    assert seconds_of(pairs.local_gather(1000, 2)[0], PAIRS) == 0.5 + 1000 / 8000
    assert four.with_ranks(3).pair_ranks == 1 and four.with_ranks(6).pair_ranks == 2


def test_simulator_bound_and_program_have_the_lane_of_pairs() -> None:
    network = Network(2, 4, levels=True, copy_ranks=2, pair_ranks=2)
    shape, schedule = replace(SHAPE, num_shards=8, network=network), training(network)
    fetches = sum(event.op is Op.FETCH and isinstance(event.layer, int) for event in schedule.events)  # the ends are empty
    slow = replace(PAIRS, net_pair_bytes_per_s=10.0)
    for machine, decides in ((PAIRS, "net_cross"), (slow, "net_pair")):
        bound = step_bound(schedule, machine, shape)
        assert bound.resource == decides
        ran = simulate(schedule, machine, shape)
        # at each fetch half of a unit's 2000 bytes comes from the other rank of the pair, and once half of its gradients' 4000
        expected = 0.5 * (fetches + 6) + (1000 * fetches + 2000 * 6) / (machine.net_pair_bytes_per_s or 0)
        assert ran.busy_s["net_pair"] == pytest.approx(expected)
        assert bound.busy_s["net_pair"] == pytest.approx(expected)
    terms, limits = memory_budget.BudgetTerms(2, one_memory=True), {Tier.DEVICE: None, Tier.HOST: 1e9, Tier.SSD: 1e9}
    solution = linear_program.solve(LpProblem(shape, slow, terms, limits, 0.0, True))
    assert solution is not None and solution.binding[0].startswith("links within a pair")


@pytest.mark.parametrize("fields", [{"net_pair_ranks": 2}, {"net_pair_bytes_per_s": 1e9}, {"net_pair_ranks": 1}])
def test_half_of_what_is_said_of_pairs_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(CostsError, match="net_pair_ranks"):
        replace(MACHINE, **fields)


def test_fewer_bits_cross() -> None:
    bits = replace(LEVELS, weight_bytes=1 + 4 / 256, gradient_bytes=(None, 0.5 + 4 / 256))
    found, exact = moved(bits), moved(LEVELS)
    assert found["net_cross"] == pytest.approx(6000 / 2 * (1 + 4 / 256) + 6000 / 2 * (0.5 + 4 / 256))
    assert exact["net_cross"] / found["net_cross"] > 3.7
    assert exact["net_local"] == found["net_local"]  # a node's copy has the dtype of the weights again


def test_what_is_rounded_for_a_hop_takes_cores_ahead_of_it() -> None:
    bits = replace(LEVELS, weight_bytes=1 + 4 / 256, gradient_bytes=(None, 0.5 + 4 / 256))
    machine = replace(MACHINE, net_round_core_s_per_element=1e-6)
    events = training(bits).events
    costs = dict(zip(events, event_costs(events, machine, replace(SHAPE, network=bits)), strict=True))
    spread, cross = (next(cost for event, cost in costs.items() if event == Event(op, 0))[0] for op in (Op.SPREAD, Op.CROSS))
    # of 1000 numbers each node rounds its 500 and reads all; of each gradient it rounds its sum, and reads half of two
    assert [stage.lane for stage in spread] == ["compute", "net_cross", "net_local"]
    assert spread[0].seconds == pytest.approx(1500e-6 / 2) and cross[0].seconds == pytest.approx(2000e-6 / 2)
    within = replace(bits, gradient_bytes=(0.5 + 4 / 256, None))
    assert within.reduce(1000, 4)[0].rounded == 4000 and within.cross(1000, 4)[0].rounded == 0
    exact = zip(events, event_costs(training(LEVELS).events, machine, replace(SHAPE, network=LEVELS)), strict=True)
    spreads = [stage for event, cost in exact if event.op is Op.SPREAD for job in cost for stage in job]
    assert not any(stage.lane == "compute" for stage in spreads)


def test_sums_are_copied_ahead_of_their_collective_and_units_behind_theirs() -> None:
    machine = replace(MACHINE, copy_host_bytes_per_s=1e6)
    for network in (FLAT, LEVELS):
        events = training(network).events
        costs = dict(zip(events, event_costs(events, machine, replace(SHAPE, network=network)), strict=True))
        reduce = next(cost for event, cost in costs.items() if event == Event(Op.REDUCE, 0))[0]
        assert (reduce[0].lane, reduce[0].purpose, reduce[0].seconds) == ("compute", "compute", pytest.approx(4000 / 1e6))
        gathers = [Op.SPREAD, Op.FETCH] if network.levels else [Op.FETCH]
        for op in gathers:
            (joined,) = [s for s in costs[Event(op, 0)][0] if s.lane == "compute"]
            assert (joined.purpose, joined.seconds) == ("parameters", pytest.approx(2000 / 1e6))


def test_copies_that_are_kept_in_memory_of_the_node_move_over_no_link_and_are_copied_as_before() -> None:
    machine, network = replace(MACHINE, copy_host_bytes_per_s=1e6), replace(LEVELS, in_memory=True)
    events = training(network).events
    costs = dict(zip(events, event_costs(events, machine, replace(SHAPE, network=network)), strict=True))
    (joined,) = costs[Event(Op.FETCH, 0)][0]
    assert (joined.lane, joined.purpose, joined.seconds) == ("compute", "parameters", pytest.approx(2000 / 1e6))
    assert [stage.lane for stage in costs[Event(Op.SPREAD, 0)][0]] == ["net_cross", "compute"]
    assert [stage.lane for stage in costs[Event(Op.SPREAD, 5)][0]] == ["net_cross", "net_local", "compute"], "it is not kept"
    assert moved(LEVELS)["net_local"] - moved(network)["net_local"] == 4 * 2 * 1000, "the last two layers are fetched once"
    assert moved(LEVELS)["net_cross"] == moved(network)["net_cross"]
    none_kept = replace(network, copy_share=0.0)
    assert moved(none_kept) == moved(replace(none_kept, in_memory=False))
    own = replace(network, copy_ranks=1, sum_ranks=1)
    assert own.spread(1000, 2, kept=True) == own.spread(1000, 2) and not own.local_gather(1000, 2)
    for again, less in ((False, 1000), (True, 1000)):
        sweeps = [sum(h.num_bytes for h in each.sweep(1000, 2, again) if h.lane == "net_local") for each in (LEVELS, network)]
        assert sweeps == [less, 0]


def test_sums_in_memory_of_the_node_move_over_no_link_and_are_one_copy_more() -> None:
    machine, network = replace(MACHINE, copy_host_bytes_per_s=1e6), replace(LEVELS, sums_in_memory=True)
    events = training(network).events
    costs = dict(zip(events, event_costs(events, machine, replace(SHAPE, network=network)), strict=True))
    (added,) = costs[Event(Op.REDUCE, 0)][0]
    assert (added.lane, added.purpose, added.seconds) == ("compute", "compute", pytest.approx(2 * 4000 / 1e6))
    assert moved(LEVELS)["net_local"] - moved(network)["net_local"] == 6 * 2000
    assert moved(LEVELS)["net_cross"] == moved(network)["net_cross"]
    rounded = replace(network, gradient_bytes=(0.5, 0.5))
    assert rounded.reduce(1000, 4) == replace(rounded, sums_in_memory=False).reduce(1000, 4)
    flat = replace(network, levels=False)
    assert flat.reduce(1000, 4) == FLAT.reduce(1000, 4)
    pairs = replace(network, ranks_per_node=4, copy_ranks=2, sum_ranks=4)
    assert pairs.reduce(1000, 4) == replace(pairs, sums_in_memory=False).reduce(1000, 4)[1:], "the second hop is sent"


def test_one_node_and_one_rank() -> None:
    assert [hop.lane for hop in Network(1, 4).gather(1000, 2)] == ["net_local"]
    assert Network().gather(1000, 2) == () and Network().reduce(1000, 4) == ()
    assert seconds_of(FLAT.gather(1000, 2)[0], replace(MACHINE, net_cross_bytes_per_s=None)) == 0.0
    assert seconds_of(FLAT.gather(1000, 2)[0], replace(MACHINE, net_cross_latency_s=0.5)) == pytest.approx(0.5 + 1.5)
    with pytest.raises(CostsError, match="num_nodes: got 0"):
        Network(0, 2)


def test_a_step_is_as_long_as_its_link_is_busy() -> None:
    assert step_s(FLAT) == pytest.approx(moved(FLAT)["net_cross"] / 1000, rel=0.1)
    assert step_s(FLAT) / step_s(LEVELS) > 2
    assert step_s(replace(LEVELS, copy_share=0.0)) > 1.1 * step_s(LEVELS)
    unlimited = replace(MACHINE, net_local_bytes_per_s=None, net_cross_bytes_per_s=None)
    assert step_s(FLAT, unlimited) < 0.05 * step_s(FLAT)


def test_memory_that_ranks_share_has_a_price_of_its_own() -> None:
    """By hand: 2 ranks of a node have each 2000 bytes of a unit to gather, and 4000 to add, at 3 us a byte on a core each."""
    machine = replace(MACHINE, copy_host_bytes_per_s=1e6, net_memory_core_s_per_byte=3e-6)
    for network, seconds in (
        (replace(LEVELS, in_memory=True, sums_in_memory=True), {Op.FETCH: 6e-3, Op.REDUCE: 4e-3 + 12e-3, Op.SPREAD: 6e-3}),
        (LEVELS, {Op.FETCH: 2e-3, Op.REDUCE: 4e-3, Op.SPREAD: 2e-3}),
    ):
        events = training(network).events
        costs = dict(zip(events, event_costs(events, machine, replace(SHAPE, network=network)), strict=True))
        for op, expected in seconds.items():
            computed = [stage.seconds for stage in costs[Event(op, 0)][0] if stage.lane == "compute"]
            assert sum(computed) == pytest.approx(expected), op
    memory = replace(LEVELS, in_memory=True, sums_in_memory=True)
    shape = replace(SHAPE, network=memory)
    bounds = [
        step_bound(training(memory), each, shape) for each in (machine, replace(machine, net_memory_core_s_per_byte=None))
    ]
    assert bounds[0] == bounds[1], "another order would do without copies within host memory"
    fetch = dict(zip(events, event_costs(events, replace(machine, host_cores=64), shape), strict=True))[Event(Op.FETCH, 0)]
    assert fetch[0][0].seconds == pytest.approx(6e-3), "a rank's thread has one core of 64"


def test_cores_are_divided_between_a_computation_and_collectives() -> None:
    assert MACHINE.divided(0.0, 0.5, computes=True) == pytest.approx((0.75, 1.0))  # of 2 cores they need a quarter, and have it
    assert MACHINE.divided(0.0, 1.5, computes=True) == pytest.approx((0.5, 2 / 3))  # they need three quarters, and have two
    assert MACHINE.divided(0.0, 1.5, computes=False)[1] == pytest.approx(1.0)
    assert MACHINE.divided(0.0, 4.0, computes=False)[1] == pytest.approx(0.5)  # they need all cores twice
    assert MACHINE.divided(0.0, 0.0, computes=True) == (1.0, 1.0)


def test_cores_of_collectives_over_all_ranks_at_once_have_a_price_of_their_own() -> None:
    machine = replace(MACHINE, net_core_s_per_byte=2e-6)
    assert machine.net_core_s(1e6, levels=True) == machine.net_core_s(1e6, levels=False) == pytest.approx(2.0)
    apart = replace(machine, net_one_level_core_s_per_byte=1e-6)
    assert (apart.net_core_s(1e6, levels=True), apart.net_core_s(1e6, levels=False)) == pytest.approx((2.0, 1.0))
    slowed = apart.slowed(3.0)
    assert (slowed.net_core_s(1e6, levels=True), slowed.net_core_s(1e6, levels=False)) == pytest.approx((6.0, 3.0))


def test_a_collective_beside_a_computation_by_hand() -> None:
    """A gather of 1 s that alone needs both cores, beside a forward of 0.5 s: each has half of them until the forward ends."""
    in_memory = Placement.of(parameters_on_ssd=0.0, state_on_ssd=0.0)
    shape = ModelShape(0, (1000,), 0.5, 0.0, 4, num_shards=2, network=Network(1, 2), placement=in_memory)
    machine = replace(MACHINE, net_local_bytes_per_s=1000.0, net_core_s_per_byte=1e-3)
    schedule = Schedule(1, 1, parse_events("0FETCH 0F0"))
    found = simulate(schedule, machine, shape, needs=[(), ()])
    assert found.end_s == pytest.approx((1.5, 1.0))
    assert simulate(schedule, replace(machine, net_core_s_per_byte=None), shape, needs=[(), ()]).end_s == (1.0, 0.5)


def test_a_link_is_slower_while_ranks_compute() -> None:
    """A gather of 1 s, beside a forward of 0.5 s at half of its speed."""
    in_memory = Placement.of(parameters_on_ssd=0.0, state_on_ssd=0.0)
    shape = ModelShape(0, (1000,), 0.5, 0.0, 4, num_shards=2, network=Network(1, 2), placement=in_memory)
    machine = replace(MACHINE, net_local_bytes_per_s=1000.0, net_local_beside_bytes_per_s=500.0)
    elsewhere = replace(machine, one_memory=False, copy_in_bytes_per_s=1e9, copy_out_bytes_per_s=1e9)
    schedule = Schedule(1, 1, parse_events("0FETCH 0F0"))
    found = [simulate(schedule, each, shape, needs=[(), ()]).end_s for each in (machine, elsewhere)]
    assert found[0] == pytest.approx((1.25, 0.5)) and found[1] == pytest.approx((1.0, 0.5), rel=1e-4)
    loaded = replace(machine, net_core_s_per_byte=4e-4)  # the bytes take no more of the cores for being slow: 0.2 of both
    assert simulate(schedule, loaded, shape, needs=[(), ()]).end_s == pytest.approx((1.3125, 0.625))
    assert [machine.link_beside(lane) for lane in ("net_local", "net_pair", "net_cross")] == [0.5, 0.5, 1.0]
    old = {"local_bytes_per_s": 400.0, "cross_beside_bytes_per_s": 10.0}
    assert machine.with_links(old).link_beside("net_local") == 1.0 and machine.with_links(old).link_beside("net_cross") == 0.01
    for beside, alone in ((1001.0, 1000.0), (500.0, None)):
        with pytest.raises(CostsError, match="machine.net_local_beside_bytes_per_s: got"):
            replace(machine, net_local_bytes_per_s=alone, net_local_beside_bytes_per_s=beside)


def test_bytes_that_ranks_receive_take_cores_from_the_computation() -> None:
    fast = replace(MACHINE, net_local_bytes_per_s=1e9, net_cross_bytes_per_s=2e6)
    busy = replace(fast, net_core_s_per_byte=0.8e-6)  # at 2 MB/s and two ranks 3.2 cores: as many as there are
    assert step_s(FLAT, busy) > 1.15 * step_s(FLAT, fast)


def test_a_step_takes_the_price_of_its_own_collectives() -> None:
    """Both prices load the cores to the full, where they count."""
    fast = replace(MACHINE, net_local_bytes_per_s=1e9, net_cross_bytes_per_s=2e6)
    for network in (FLAT, LEVELS):
        both = {
            levels: replace(fast, net_core_s_per_byte=levels, net_one_level_core_s_per_byte=0.8e-6)
            for levels in (1e-12, 0.8e-6)
        }
        over_levels = step_s(network, both[0.8e-6]) / step_s(network, both[1e-12])
        assert over_levels > 1.05 if network.levels else over_levels == 1.0


def test_the_program_knows_the_links() -> None:
    terms = memory_budget.BudgetTerms(2, one_memory=True)
    limits = {Tier.DEVICE: None, Tier.HOST: 1e9, Tier.SSD: 1e9}
    found = {}
    for name, network in (("flat", FLAT), ("levels", LEVELS)):
        solution = linear_program.solve(LpProblem(replace(SHAPE, network=network), MACHINE, terms, limits, 0.0, True))
        assert solution is not None and solution.binding[0].startswith("links between nodes")
        found[name] = solution.seconds
    assert found["flat"] == pytest.approx(moved(FLAT)["net_cross"] / 1000, rel=0.05)
    assert found["levels"] == pytest.approx(moved(LEVELS)["net_cross"] / 1000, rel=0.05)


def test_copies_take_host_memory() -> None:
    terms = memory_budget.BudgetTerms(2, one_memory=True)
    items = {item.what: item.num_bytes for item in memory_budget.budget(replace(SHAPE, network=LEVELS), terms)}
    assert items["copies of the weights"] == 6 * 2000 // 2
    half = replace(SHAPE, network=replace(LEVELS, copy_share=0.5))
    assert {i.what: i.num_bytes for i in memory_budget.budget(half, terms)}["copies of the weights"] == 6 * 2000 // 4


# ---- the command


def plan(capsys: pytest.CaptureFixture[str], machine: str, *words: str) -> tuple[int, dict[str, Any], str]:
    fixed = ("plan", "--model", "gpt_13m", "--tokens-per-step", "65536", "--machine", machine, "--json")
    status = main.main([*fixed, "--nodes", "2", "--num-ranks", "4", *words])
    out, err = capsys.readouterr()
    return status, json.loads(out) if status == 0 else {}, err


def test_several_nodes_need_links_and_plans_have_levels_where_runs_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = plan(capsys, "a100_server")
    assert status == 2 and "--nodes 2: a100_server says nothing of the links between machines" in err
    links, on_cpu = tmp_path / "links.json", tmp_path / "on_cpu.json"
    links.write_text(json.dumps({"links": {**LINKS, "cross_bytes_per_s": 1e7}}))
    report = json.loads((profile.SHIPPED / "a100_server.json").read_text())
    report["machine"] = {**report["machine"], "one_memory": True}
    on_cpu.write_text(json.dumps(report))
    for machine, copied in ((str(on_cpu), 1.0), ("a100_server", None)):
        status, found, err = plan(capsys, machine, "--links", str(links))
        assert status == 0, err
        assert found["resource"] == "net_cross" and found["tokens_per_step"] == 65536
        assert found["step_s"] == pytest.approx(found["into_node_bytes"] / 1e7, rel=0.15)
        assert found["stock"]["step_s"] > found["step_s"] * (1 if copied else 0.9)  # its gradients travel in bf16
        section = load_section(found["config"])
        assert section is not None
        levels = section.levels
        assert (levels.ranks_per_node, levels.copy_share) == ((4, 1.0) if copied else (1, None))
        assert any(item["what"] == "copies of the weights" for item in found["memory"]) is bool(copied)
        if copied:  # all weights and fp32 gradients cross once, half of them into each node
            assert found["into_node_bytes"] == pytest.approx(found["model"]["elements"] * (2 + 4) / 2, rel=0.02)


def on_cpu(folder: Path, **rates: float) -> tuple[str, ...]:
    """The words for a machine that computes in host memory, and its links."""
    report = json.loads((profile.SHIPPED / "a100_server.json").read_text())
    report["machine"] = {**report["machine"], "one_memory": True}
    for name, content in (("machine.json", report), ("links.json", {"links": {**LINKS, **rates}})):
        (folder / name).write_text(json.dumps(content))
    return str(folder / "machine.json"), "--links", str(folder / "links.json")


def levels_of(found: dict[str, Any]) -> Levels:
    """Of a plan's JSON, which `initialize` takes."""
    section = load_section(found["config"])
    assert section is not None
    check(found["config"], section)
    topology_on([f"host{rank // 4}" for rank in range(8)], resolve(section).levels)
    return section.levels


def test_on_a_slow_local_link_fewer_ranks_share_a_copy_unless_they_read_it_in_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy of two ranks is gathered from one other rank, and not from three. Adapters alone are trained, so that nearly all
    bytes are weights; of many layers, which are fetched twice. On CPUs no copy that is kept is sent."""
    fields = read_fields(named_shape("gpt_13m")) | {"num_hidden_layers": 32, "hidden_size": 256}
    (tmp_path / "deep.json").write_text(json.dumps(fields))
    words = ("--model", str(tmp_path / "deep.json"), "--lora", "4")
    rate = 1.25e7
    machine, *links = on_cpu(tmp_path, local_bytes_per_s=rate, cross_bytes_per_s=1e7)
    found = {}
    for name, pair in ((machine, 4), ("a100_server", 2)):
        status, found[pair], err = plan(capsys, name, *links, *words, *(("--assume-levels",) if pair == 2 else ()))
        assert status == 0, err
        levels = levels_of(found[pair])
        assert (levels.ranks_per_node, levels.gradients, levels.copy_share) == (pair, 4, 1.0)
        assert not levels.quantized_weights and not levels.quantized_gradients
    by_four_s = 2 * found[2]["model"]["elements"] * (3 / 4 + 3 / 4) / rate  # of the local link, with copies of four ranks
    assert found[2]["busy_s"]["net_local"] < 0.9 * by_four_s
    assert found[4]["busy_s"]["net_local"] < 0.1 * by_four_s


def test_plans_round_where_they_may_and_gain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for local, cross, gains in ((5e9, 1e7, True), (1e13, 1e13, False)):
        words = on_cpu(tmp_path, local_bytes_per_s=local, cross_bytes_per_s=cross)
        status, exact, err = plan(capsys, *words)
        status, rounded, err = plan(capsys, *words, "--allow-rounding")
        assert status == 0, err
        levels = levels_of(rounded)
        assert levels.quantized_weights == levels.quantized_gradients == gains
        assert not levels_of(exact).quantized_weights and not levels_of(exact).quantized_gradients
        if gains:  # INT8 of bf16, INT4 of fp32
            assert rounded["into_node_bytes"] / exact["into_node_bytes"] == pytest.approx((1 + 0.5) / (2 + 4), rel=0.05)
            assert rounded["step_s"] < 0.5 * exact["step_s"]


def test_levels_on_gpus_are_planned_where_they_are_assumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("a100_server", *on_cpu(tmp_path, cross_bytes_per_s=1e7)[1:])
    (status, without, err), (_, found, _) = plan(capsys, *words), plan(capsys, *words, "--assume-levels")
    assert status == 0, err
    assert found["into_node_bytes"] < 0.8 * without["into_node_bytes"]
    assert levels_of(found).ranks_per_node > 1 and levels_of(without).ranks_per_node == 1
    assert [text for text in found["machine"]["assumed"] if text not in without["machine"]["assumed"]] == [
        "that levels on GPUs run beside the computation, which they do not so far"
    ]


@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 8])
def test_a_search_tries_all_ways_to_divide_a_node(ranks: int) -> None:
    network = Network(3, ranks, levels=ranks > 1)
    found = [(each.w, each.g) for each in other_networks(network, "ranks")]
    assert len(set(found)) == len(found) and (ranks, ranks) not in found
    for w in range(2, ranks + 1):
        for g in range(w, ranks + 1):
            fits = not ranks % g and not g % w and (w, g) != (ranks, ranks)
            assert ((w, g) in found) == fits
    for each in other_networks(network, "ranks"):
        Topology(each.num_ranks, each.g, each.w)  # which refuses what a run has not


def test_what_a_plan_says_of_levels_is_read_back() -> None:
    assert level_choice(FLAT) is None and level_choice(LEVELS) == LevelChoice(2, 2, 1.0)
    odd = replace(LEVELS, ranks_per_node=4, copy_ranks=2, weight_bytes=1.0, copy_share=0.5)
    chosen = level_choice(odd)
    assert chosen is not None and chosen == LevelChoice(2, 4, 0.5, True)
    assert chosen.keys == {"ranks_per_node": 2, "copy_share": 0.5, "gradients": 4, "quantized_weights": True}
    choice = Choice(1, 2, 1, 1, 0.0, True, Placement.of(), levels=chosen)
    again = json.loads(json.dumps(choice.to_json()))
    assert Choice.from_json(again) == choice
    assert level_choice(LEVELS).keys == {"ranks_per_node": 2, "copy_share": 1.0, "gradients": 2}  # type: ignore[union-attr]
    assert "levels.gradients 4" in difference(replace(choice, levels=LevelChoice(2, 2, 0.5, True)), choice)


@pytest.mark.parametrize("pairs", [0, -2, 3, 2.0])
def test_pairs_that_do_not_divide_a_node_are_refused(pairs: Any) -> None:
    with pytest.raises(CostsError, match="pair_ranks"):
        Network(2, 4, pair_ranks=pairs)


def test_links_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    broken = tmp_path / "links.json"
    for text in ("", "[]", '{"links": 3}', '{"links": {"cross_bytes_per_s": "fast"}}'):
        broken.write_text(text)
        with pytest.raises(CostsError, match="write the path of a file of `ds-vertical limits --links --out`"):
            read_links(broken)
    broken.write_text(json.dumps({"links": LINKS}))
    assert MACHINE.with_links(read_links(broken)) == replace(MACHINE, **{f"net_{name}": each for name, each in LINKS.items()})
    pair = {"pair_ranks": 2, "pair_bytes_per_s": 8000, "pair_latency_s": 0.5}
    broken.write_text(json.dumps({"links": pair}))
    assert MACHINE.with_links(read_links(broken)) == PAIRS
    for name, value in {"cross_bytes_per_s": 0, "local_bytes_per_s": -1.0, "cross_latency_s": -1e-6, "pair_ranks": 2.5}.items():
        broken.write_text(json.dumps({"links": LINKS | {name: value}}))
        with pytest.raises(CostsError, match=f"net_{name}: got {value}"):
            read_links(broken)
    with pytest.raises(CostsError, match="links.speed: no such key"):
        MACHINE.with_links({"speed": 1.0})
