"""Bytes per tier: by closed formulas before a run, and in use in a simulated one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from ds_vertical.errors import MemoryBudgetError
from ds_vertical.planner.budget.check import check_budget
from ds_vertical.planner.kept_activations import KeptShare, PolicyPoint
from ds_vertical.planner.linear_program import LpProblem, tier_bytes
from ds_vertical.planner.machine import Machine
from ds_vertical.planner.memory_budget import (
    SLOTS,
    BudgetItem,
    BudgetTerms,
    budget,
    budget_lines,
    kept_bytes,
    reduce_bytes,
    ssd_items,
    total_bytes,
)
from ds_vertical.planner.memory_timeline import changes
from ds_vertical.planner.model_shape import FreedBytes, ModelShape, SufShape
from ds_vertical.planner.simulate import SimulatedRun, SimulationSettings, simulate
from ds_vertical.schedule.dependencies import dependencies
from ds_vertical.schedule.events import Event, Op, Schedule, parse_events
from ds_vertical.schedule.passes import TrainingStep, build_evaluation, build_training
from ds_vertical.types import Placement, Tier

DEVICE = Machine(1e6, 5e5, 1e5, 2, False, 4e6, 2e6)
ONE_MEMORY = replace(DEVICE, one_memory=True)
SHAPE = ModelShape(100, (1000,) * 4, 1.0, 2.0, 700, head_s=1.0, part_elements=500)


APART = replace(SHAPE, pre_elements=900, suf=SufShape(800, 800), apart=("pre", "suf"))


def settings(machine: Machine, num_micro_batches: int, window: int, **others: float) -> BudgetTerms:
    return replace(BudgetTerms(num_micro_batches, window, one_memory=machine.one_memory), **others)


# ------------------------------------------------------------------------------------------------------ closed formulas


def sizes(shape: ModelShape, given: BudgetTerms) -> dict[tuple[str, str], int]:
    return {(item.tier, item.what): item.num_bytes for item in budget(shape, given)}


def test_the_items_by_hand() -> None:
    assert sizes(SHAPE, BudgetTerms(num_micro_batches=3, window=1, slots=3)) == {
        ("host", "parameter buffers"): (4 * 1000 + 100) * 2,
        ("host", "optimizer slots"): 3 * 500 * 12,
        ("host", "gradients"): 4100 * 4,
        ("device", "parameters"): (2 * 1000 + 100) * 2,
        ("device", "gradient sums"): (1000 + 100) * 4,
        ("device", "activations between layers"): (3 * 4 + 2) * 700,
        ("device", "gradients on their way"): 1000 * 4,
    }


def test_without_layers_ahead_no_gradients_leave_beside_the_next_ones() -> None:
    assert ("device", "gradients on their way") not in sizes(SHAPE, BudgetTerms(num_micro_batches=3, window=0))
    of_two = sizes(replace(SHAPE, num_shards=2), BudgetTerms(num_micro_batches=3, window=0))
    assert of_two["device", "gradients on their way"] == 1000 * 4  # their reduction


def test_what_rests_on_the_ssd_by_hand() -> None:
    """Of 4100 elements half have their parameters there, and 3000 are trained; the sum is what the linear program counts."""
    placed = Placement.of(parameters_on_ssd=0.5, gradients_on_ssd=0.25, activations_on_ssd=0.5)
    kept = KeptShare(PolicyPoint("everything", 600.0, 1.0), ssd=1.0)
    shape = replace(SHAPE, placement=placed, generations=2, kept=kept, gradients=(0, 1000, 1000, 1000, 0))
    terms = BudgetTerms(num_micro_batches=3, held_share=0.5)
    found = ssd_items(shape, terms)
    assert {item.what: item.num_bytes for item in found} == {
        "optimizer state": 3000 * 12,
        "parameters": 4100 * 2 // 2,
        "second generation of both": 3000 * (12 + 1),
        "waiting gradients": 3000 * 4 // 8,
        "inputs of layers": 3 * (4 + 2) * 700 // 2,
        "kept for the backward": 3 * (3 - 1) * 600,  # of the layer before the last nothing goes there
    }
    assert {item.tier for item in found} == {Tier.SSD} and all(item.key for item in found)
    problem = LpProblem(shape, DEVICE, terms, dict.fromkeys(Tier), 0.0, True)
    assert tier_bytes(problem, placed, Tier.SSD) == sum(item.num_bytes for item in found)
    shared = replace(shape, placement=Placement.of(parameters_on_ssd=0.5, state_on_ssd=0.25))
    assert {item.what: item.num_bytes for item in ssd_items(shared, terms)}["second generation of both"] == 3000 * (12 + 1) // 4
    alone = replace(SHAPE, placement=Placement.of(parameters_on_ssd=0.0, state_on_ssd=0.0))
    assert ssd_items(alone, terms) == ()


def test_ends_that_are_away_count_where_they_are_used() -> None:
    """The device holds most at the last layer, with the suffix; no moment has both ends."""
    terms = BudgetTerms(num_micro_batches=3, window=1)
    apart, together = sizes(APART, terms), sizes(replace(SHAPE, pre_elements=1700), terms)
    assert apart["device", "parameters"] == (2 * 1000 + 800) * 2
    assert apart["device", "gradient sums"] == (1000 + 800) * 4
    assert together["device", "parameters"] == (2 * 1000 + 1700) * 2
    assert together["device", "gradient sums"] == (1000 + 1700) * 4
    for item in ("parameter buffers", "gradients", "optimizer slots"):
        assert apart["host", item] == together["host", item]
    small = sizes(replace(APART, pre_elements=90, suf=SufShape(80, 80)), terms)
    assert (small["device", "parameters"], small["device", "gradient sums"]) == (2080 * 2, 1080 * 4)
    prefix = sizes(replace(APART, pre_elements=2900, suf=SufShape(80, 80)), terms)
    assert (prefix["device", "parameters"], prefix["device", "gradient sums"]) == ((1000 + 2900) * 2, 2900 * 4)
    stays = sizes(replace(APART, pre_elements=90, apart=("suf",)), terms)
    assert (stays["device", "parameters"], stays["device", "gradient sums"]) == ((2890) * 2, (1890) * 4)


def test_one_micro_batch_has_no_sums_beside_its_gradients() -> None:
    """Outside the layers there are: tied weights have two gradients."""
    assert sizes(SHAPE, BudgetTerms(1))["device", "gradient sums"] == 1000 * 2 + 100 * 4


def test_a_norm_counts_as_far_as_it_needs_more_than_a_backward() -> None:
    large = replace(SHAPE, working_bytes=700, reduce_bytes=900)
    assert sizes(large, BudgetTerms(3))["device", "norm of a gradient"] == 200
    assert ("device", "norm of a gradient") not in sizes(replace(large, working_bytes=900), BudgetTerms(3))
    assert reduce_bytes(1000, 1, one_memory=False) == 12_000 and reduce_bytes(1000, 1, one_memory=True) == 0
    assert reduce_bytes(1000, 4, one_memory=False) == 4 * 2**22 + 2000 and reduce_bytes(1000, 4, one_memory=True) == 4 * 2**22
    assert reduce_bytes(10**7, 4, one_memory=True) == 4 * 10**7
    assert reduce_bytes(10**9, 1, one_memory=False) == 4 * 10**9 + 8 * 250_000_000, "stock copies no more at a time"


def test_what_a_forward_keeps_counts_in_its_tier_with_the_buffers_on_its_way() -> None:
    """Of nine cells of 30 bytes three are for each tier; of those for SSD one is of the last layer but one, and in the host."""
    keeping = replace(SHAPE, kept=KeptShare(PolicyPoint("products", 30, 0.5), 1 / 3, 1 / 3, 1 / 3))
    found = sizes(keeping, BudgetTerms(num_micro_batches=3, slots=3))
    assert {key: count for key, count in found.items() if key[1].startswith("kept")} == {
        ("host", "kept for the backward"): 4 * 30,
        ("host", "kept values on their way"): 6 * 30,
        ("device", "kept for the backward"): 3 * 30,
        ("device", "kept values on their way"): 4 * 30,
    }
    resting = sizes(replace(SHAPE, kept=KeptShare(PolicyPoint("products", 30, 0.5), device=1.0)), BudgetTerms(3))
    assert resting["device", "kept for the backward"] == 9 * 30 and ("device", "kept values on their way") not in resting


def test_one_memory_counts_parameters_and_sums_once() -> None:
    assert sizes(SHAPE, BudgetTerms(3, slots=3, one_memory=True)) == {
        ("host", "optimizer slots"): 3 * 500 * 12,
        ("host", "gradients"): 4100 * 4,
        ("host", "parameter buffers"): 4100 * 2,
        ("host", "activations between layers"): 14 * 700,
        ("host", "one layer's backward"): 2 * 1000 * 2,  # gradients that wait for the next micro-batch's, and those
    }
    assert ("host", "one layer's backward") not in sizes(SHAPE, BudgetTerms(1, slots=3, one_memory=True))
    assert ("host", "one layer's backward") not in sizes(SHAPE, BudgetTerms(3, slots=3, one_memory=True, pairs=False))


def test_gradients_that_wait_are_not_there_with_those_made_outside_the_layers_where_freed_memory_goes_back() -> None:
    def needed(in_layers: int, **lean: bool) -> int:
        shape = replace(SHAPE, working_bytes=9000, freed=FreedBytes(9000, 2000, in_layers))
        return sizes(shape, BudgetTerms(3, one_memory=True, **lean))["host", "one layer's backward"]

    pair = 2 * 1000 * 2
    assert needed(2500) == 9000 + pair
    assert needed(2500, keeps_freed=False) == 9000 > 2500 + pair
    assert needed(6000, keeps_freed=False) == 6000 + pair
    assert needed(6000, keeps_freed=False, pairs=False) == 9000


def test_a_device_of_its_own_makes_no_copy_of_a_gradient_in_fp32() -> None:
    """`in_layers` has those that kernels of the host make."""
    shape = replace(SHAPE, working_bytes=9000, freed=FreedBytes(9000, 2000, 20_000))
    assert sizes(shape, BudgetTerms(3, keeps_freed=False))["device", "one layer's backward"] == 9000


def test_the_heap_keeps_at_its_end_what_waits_and_maps_larger_pieces_than_a_layers_anew_where_memory_is_short() -> None:
    shape, terms = replace(SHAPE, working_bytes=9000, freed=FreedBytes(9000, 2000, 2500)), BudgetTerms(3, one_memory=True)
    assert kept_bytes(shape, terms) == (9000 + 4000, 2 * (9000 + 4000))
    assert kept_bytes(shape, replace(terms, keeps_freed=False)) == (2000, 2 * (2000 + 4000))
    assert kept_bytes(shape, replace(terms, keeps_freed=False, pairs=False)) == (2000, 2 * 2000)


@pytest.mark.parametrize(("window", "buffers"), [(0, 3), (1, 4), (2, 5), (30, 8)])
def test_a_buffer_for_each_layer_of_the_window_for_the_one_that_computes_and_for_those_being_stepped(
    window: int, buffers: int
) -> None:
    shape = replace(SHAPE, layer_elements=(1000,) * 8)
    assert sizes(shape, BudgetTerms(3, window=window))["host", "parameter buffers"] == (buffers * 1000 + 100) * 2


def test_what_is_measured_replaces_what_the_elements_say() -> None:
    exact = replace(SHAPE, files=(512, 4096, 0, 1024, 1024), gradients=(100, 10, 20, 30, 40), slot_bytes=777)
    found = sizes(exact, BudgetTerms(3, window=0, slots=2))
    assert found["host", "parameter buffers"] == 3 * 4096 + 512
    assert found["host", "optimizer slots"] == 2 * 777
    assert found["host", "gradients"] == 200 * 4


def test_further_items_count_and_are_not_what_to_change() -> None:
    further = (BudgetItem("host", "interpreter", 10**9, "(measured)"),)
    assert total_bytes(budget(SHAPE, BudgetTerms(3), further), "host") == 10**9 + total_bytes(
        budget(SHAPE, BudgetTerms(3)), "host"
    )
    with pytest.raises(MemoryBudgetError, match=r"most is optimizer slots: \d+\)"):
        check_budget(SHAPE, BudgetTerms(3), further, {Tier.HOST: 10**6})


def test_early_steps_hold_a_few_layers_only() -> None:
    assert sizes(SHAPE, BudgetTerms(3, held_share=0.0))["host", "gradients"] == (3 * 1000 + 100) * 4
    mixed = sizes(SHAPE, BudgetTerms(3, held_share=0.25))["host", "gradients"]
    assert mixed == 4100 + 0.75 * 3100 * 4
    # the sums themselves, whole units of them, and a copy of what waits
    assert sizes(SHAPE, BudgetTerms(3, held_share=0.25, one_memory=True))["host", "gradients"] == 4100 + 3100 * 4


def test_gradients_that_wait_on_ssd_pass_through_memory() -> None:
    on_ssd = replace(SHAPE, placement=Placement.of(gradients_on_ssd=0.75))
    assert sizes(on_ssd, BudgetTerms(3))["host", "gradients"] == (0.25 * 4100 + 0.75 * 3100) * 4
    assert sizes(on_ssd, BudgetTerms(3, one_memory=True))["host", "gradients"] == (0.25 * 4100 + 0.75 * 3100 + 1100) * 4
    assert sizes(on_ssd, BudgetTerms(3))["host", "optimizer slots"] == SLOTS * 500 * (12 + 4)
    assert sizes(on_ssd, BudgetTerms(3, held_share=0.0)) == sizes(SHAPE, BudgetTerms(3, held_share=0.0))


def test_a_slot_is_as_large_as_the_largest_piece() -> None:
    for part, piece in ((None, 1000), (999, 999), (334, 334), (50, 50)):  # the sizes of its parameters may leave one whole
        found = sizes(replace(SHAPE, part_elements=part), BudgetTerms(3, slots=3))["host", "optimizer slots"]
        assert found == round(3 * piece * 12)


def test_shards_tiers_and_working_memory() -> None:
    placed = Placement.of(
        parameters_on_ssd=0.5, state_on_ssd=0.0, gradients_on_ssd=1.0, activations_on_host=0.5, activations_on_ssd=0.5
    )
    found = sizes(replace(SHAPE, placement=placed, num_shards=2, working_bytes=9000), BudgetTerms(3))
    assert found == {
        ("host", "parameter buffers"): 4100,  # of whole units, whatever share of them rests in memory
        ("host", "parameters at rest"): 2050,
        ("host", "optimizer state at rest"): 2050 * 12,
        ("host", "optimizer slots"): SLOTS * 500 * 4,
        ("host", "gradients"): 1550 * 4,
        ("host", "activations"): 3 * 4 * 350,
        ("device", "parameters"): 4200,
        ("device", "gradient sums"): 4400,
        ("device", "activations between layers"): (3 * 2 + 1) * 700,
        ("device", "one layer's backward"): 9000,
        ("device", "gradients on their way"): 4000 + 4000 // 2,  # being reduced, and this rank's shares of those before
    }


def test_the_table_has_each_tier_with_its_sum() -> None:
    items = budget(replace(SHAPE, layer_elements=(1 << 20,) * 4, pre_elements=0), BudgetTerms(3))
    lines = budget_lines(items)
    assert lines[0].split() == ["tier", "what", "MiB", "decided", "by"]
    assert "host    gradients                           16.0  vertical_schedule.gradient_host_share" in lines
    assert [line.split()[:2] for line in lines if " total " in line] == [["device", "total"], ["host", "total"]]


def test_a_budget_that_fits_is_given_back() -> None:
    given = BudgetTerms(3)
    items = budget(SHAPE, given)
    limits = {tier: total_bytes(items, tier) for tier in (Tier.HOST, Tier.DEVICE)}
    assert check_budget(SHAPE, given, (), limits) == items == check_budget(SHAPE, given)


def test_a_budget_that_does_not_fit_names_keys_and_numbers_that_do() -> None:
    given = BudgetTerms(num_micro_batches=8, window=3)
    needed = total_bytes(budget(SHAPE, given), "device")
    with pytest.raises(MemoryBudgetError) as caught:
        check_budget(SHAPE, given, (), {Tier.DEVICE: needed - 3000, Tier.HOST: 10**9})
    first = str(caught.value).splitlines()[0]
    assert first == (
        f"device memory: needs {needed} bytes, {needed - 3000} are allowed, 3000 too few"
        " (most is activations between layers: 23800); write "
        '"vertical_schedule.prefetch_layers": 1 (now 3) or "gradient_accumulation_steps": 6 (now 8)'
    )
    for changed in (replace(given, window=1), replace(given, num_micro_batches=6)):
        check_budget(SHAPE, changed, (), {Tier.DEVICE: needed - 3000})
    with pytest.raises(MemoryBudgetError):
        check_budget(SHAPE, replace(given, window=2), (), {Tier.DEVICE: needed - 3000})


def test_no_number_is_advised_that_the_set_up_makes_useless() -> None:
    """A smaller window takes less once steps run, and nothing of what stock's set-up takes ahead of them."""
    wide, narrow = (total_bytes(budget(SHAPE, BudgetTerms(3, window=window)), "host") for window in (2, 0))
    assert narrow < wide
    with pytest.raises(MemoryBudgetError, match='"vertical_schedule.prefetch_layers": [01] .now 2'):
        check_budget(SHAPE, BudgetTerms(3, window=2), (), {Tier.HOST: wide - 1})
    with pytest.raises(MemoryBudgetError) as caught:
        check_budget(SHAPE, BudgetTerms(3, window=2), (), {Tier.HOST: wide}, setup_bytes=wide + 500)
    first, *table = str(caught.value).splitlines()
    assert f"needs {wide + 500} bytes, {wide} are allowed, 500 too few" in first and "; write" not in first
    assert any(line.startswith("host    stock's set-up beyond the rest") for line in table)


def test_a_budget_that_nothing_mends_says_what_is_largest_and_what_is_left() -> None:
    with pytest.raises(MemoryBudgetError) as caught:
        check_budget(SHAPE, BudgetTerms(8, window=2), (), {Tier.HOST: 1000, Tier.DEVICE: 1000})
    host, device = str(caught.value).splitlines()[:2]
    assert '"vertical_schedule.prefetch_layers": 0 and "gradient_accumulation_steps": 1 would need' in host
    assert "too few (most is optimizer slots: 24000); " in host
    assert device.startswith("device memory: needs ")


# ------------------------------------------------------------------------------------------------------ a simulated run


@dataclass(frozen=True)
class Peak:
    """The most bytes a tier held, and whose they were. `owner`: who held the most of them."""

    num_bytes: float
    owners: dict[str, float]

    @property
    def owner(self) -> str:
        return max(self.owners, key=lambda name: self.owners[name], default="")


def peaks(timeline: SimulatedRun, machine: Machine, shape: ModelShape) -> dict[str, Peak]:
    """The peak of each tier over the whole run; where device and host are one memory, all of it is the host's."""
    found: dict[str, Peak] = {tier: Peak(0.0, {}) for tier in Tier}
    held: dict[str, dict[str, float]] = {tier: {} for tier in Tier}
    # What is given up at a moment makes room for what is taken at the same moment.
    for change in sorted(changes(timeline, machine, shape), key=lambda change: (change.at_s, change.num_bytes)):
        tier = Tier.HOST if machine.one_memory and change.tier is Tier.DEVICE else change.tier
        held[tier][change.owner] = held[tier].get(change.owner, 0.0) + change.num_bytes
        if (total := sum(held[tier].values())) > found[tier].num_bytes:
            found[tier] = Peak(total, dict(held[tier]))
    return found


@pytest.mark.parametrize("machine", [DEVICE, ONE_MEMORY], ids=["device", "one memory"])
@pytest.mark.parametrize("window", [0, 1, 2])
@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_what_is_in_use_stays_within_the_formulas(machine: Machine, window: int, num_micro_batches: int) -> None:
    timeline = simulate(
        build_training(TrainingStep(4, num_micro_batches, window=window)), machine, SHAPE, SimulationSettings(steps=2)
    )
    items = budget(SHAPE, settings(machine, num_micro_batches, window))
    found = peaks(timeline, machine, SHAPE)
    for tier in ("host", "device"):
        assert found[tier].num_bytes <= total_bytes(items, tier)
    if not machine.one_memory:
        by_item = {(item.tier, item.what): item.num_bytes for item in items}
        owners = found["device"].owners
        activations = owners["activations"] + owners["activation gradients"]
        assert activations <= by_item["device", "activations between layers"]
        leaving = by_item.get(("device", "gradients on their way"), 0)  # which the run as it is simulated has left at once
        assert found["device"].num_bytes >= 0.7 * (total_bytes(items, "device") - leaving)


@pytest.mark.parametrize("window", [0, 1, 2])
@pytest.mark.parametrize("early", [False, True])
def test_ends_in_use_stay_within_the_formulas(window: int, early: bool) -> None:
    step = TrainingStep(4, 3, window=window, early=early, outside=APART.outside)
    timeline = simulate(build_training(step), DEVICE, APART, SimulationSettings(steps=2))
    terms = settings(DEVICE, 3, window)
    found = peaks(timeline, DEVICE, APART)
    for tier in ("host", "device"):
        assert found[tier].num_bytes <= total_bytes(budget(APART, terms), tier)
    staying = replace(APART, apart=())
    stayed = simulate(build_training(replace(step, outside=staying.outside)), DEVICE, staying, SimulationSettings(steps=2))
    assert found["device"].num_bytes < peaks(stayed, DEVICE, staying)["device"].num_bytes


def test_activations_peak_at_the_turn_as_the_formula_says() -> None:
    shape = replace(SHAPE, activation_bytes=10**7)
    found = peaks(simulate(build_training(TrainingStep(4, 3)), DEVICE, shape), DEVICE, shape)["device"]
    owners = found.owners
    assert owners["activations"] + owners["activation gradients"] == (3 * 4 + 2) * 10**7
    assert found.owner == "activations"


def test_gradients_own_the_host_while_they_wait_and_state_owns_the_disk() -> None:
    found = peaks(simulate(build_training(TrainingStep(4, 2)), DEVICE, SHAPE, SimulationSettings(slots=1)), DEVICE, SHAPE)
    assert 4000 * 4 <= found["host"].owners["gradients"] <= 4100 * 4 and found["host"].owner == "gradients"
    assert found["ssd"].num_bytes == 4100 * 14 and found["ssd"].owner == "state"
    twice = replace(SHAPE, generations=2)
    assert peaks(simulate(build_training(TrainingStep(4, 2)), DEVICE, twice), DEVICE, twice)["ssd"].num_bytes == 4100 * 28
    half = replace(twice, placement=Placement.of(state_on_ssd=0.5))
    assert peaks(simulate(build_training(TrainingStep(4, 2)), DEVICE, half), DEVICE, half)["ssd"].num_bytes == 4100 * (3 + 12)


def test_in_an_evaluation_one_layer_s_inputs_and_outputs_are_alive() -> None:
    found = peaks(simulate(build_evaluation(4, 3, window=0), DEVICE, SHAPE), DEVICE, SHAPE)
    assert found["device"].num_bytes == (1000 + 100) * 2 + (3 + 1) * 700
    assert found["ssd"].num_bytes == 4100 * 2


def test_early_parts_give_their_gradients_up() -> None:
    """The early half of each layer is stepped right after its REDUCE, the rest after NORM."""
    base = build_training(TrainingStep(4, 1))
    events: list[Event] = []
    needs: list[tuple[int, ...]] = []
    place: list[int] = []
    for event, earlier in zip(base.events, dependencies(base.events), strict=True):
        place.append(len(events))
        events += parse_events(f"{event.layer}STEP.d0") if event.op is Op.STEP else [event]
        needs.append(tuple(place[j] for j in earlier))
        if event.op is Op.REDUCE:
            events += parse_events(f"{event.layer}STEP.e0")
            needs.append((place[-1],))
    schedule = Schedule(4, 1, tuple(events))
    found = peaks(simulate(schedule, DEVICE, SHAPE, needs=needs), DEVICE, SHAPE)["host"]
    # The delayed halves, and the whole of the one layer that is on its way when the machine is this fast.
    assert 4000 * 2 <= found.owners["gradients"] <= 4100 * 2 + 1000 * 2
    assert found.num_bytes <= total_bytes(budget(SHAPE, BudgetTerms(1, held_share=0.5)), "host")


# ---- activations in other tiers


def saving(num_layers: int, num_micro_batches: int) -> tuple[Schedule, list[tuple[int, ...]]]:
    """Every layer's input is saved after its forward, loaded before its backward and dropped after it."""
    base = build_training(TrainingStep(num_layers, num_micro_batches))
    events: list[Event] = []
    needs: list[tuple[int, ...]] = []
    place: dict[int, int] = {}

    def put(event: Event, *earlier: int) -> int:
        events.append(event)
        needs.append(tuple(earlier))
        return len(events) - 1

    saved: dict[tuple[object, object], int] = {}
    for index, (event, earlier) in enumerate(zip(base.events, dependencies(base.events), strict=True)):
        key = (event.layer, event.micro_batch)
        layer = isinstance(event.layer, int)
        loaded = [put(Event(Op.LOAD, *key), saved[key])] if event.op is Op.B and layer else []  # pyright: ignore
        place[index] = put(event, *(place[j] for j in earlier), *loaded)
        if event.op is Op.F and layer:
            saved[key] = put(Event(Op.SAVE, *key), place[index])  # pyright: ignore
        if event.op is Op.B and layer:
            put(Event(Op.DROP, *key), place[index])  # pyright: ignore
    return Schedule(num_layers, num_micro_batches, tuple(events)), needs


def test_saved_activations_leave_the_device() -> None:
    placed = replace(SHAPE, placement=Placement.of(activations_on_host=0.25, activations_on_ssd=0.75), activation_bytes=10**6)
    fast = replace(
        DEVICE, ssd_read_bytes_per_s=1e9, ssd_write_bytes_per_s=1e9, copy_in_bytes_per_s=1e9, copy_out_bytes_per_s=1e9
    )
    schedule, needs = saving(4, 4)
    found = peaks(simulate(schedule, fast, placed, needs=needs), fast, placed)
    saved = (3, 9)  # of one micro-batch and of three; of the last layer one more: its backward follows
    assert found["host"].owners["activations"] in (saved[0] * 10**6, (saved[0] + 1) * 10**6)
    assert found["ssd"].owners["activations"] in (saved[1] * 10**6, (saved[1] + 1) * 10**6)
    on_device = found["device"].owners["activations"] + found["device"].owners.get("activation gradients", 0.0)
    assert on_device <= (4 * 2 + 1) * 10**6
    kept = peaks(simulate(build_training(TrainingStep(4, 4)), fast, placed), fast, placed)["device"].owners
    assert kept["activations"] + kept["activation gradients"] == (4 * 4 + 2) * 10**6


def test_a_slow_disk_keeps_them_on_the_device_longer() -> None:
    placed = replace(SHAPE, placement=Placement.of(activations_on_ssd=1.0), activation_bytes=10**6)
    schedule, needs = saving(4, 3)
    slow = replace(DEVICE, ssd_write_bytes_per_s=2e5)
    held = [peaks(simulate(schedule, m, placed, needs=needs), m, placed)["device"].num_bytes for m in (DEVICE, slow)]
    assert held[0] < held[1]


def test_only_held_parts_go_to_ssd() -> None:
    """The early half is stepped out of memory; of the delayed one the placement's share waits on SSD, from its HOLD on."""
    shape = replace(SHAPE, placement=Placement.of(gradients_on_ssd=1.0))
    schedule = build_training(TrainingStep(4, 1, delayed=True, early=True, due=("pre", 0, 1, 2, 3), hold="d0"))
    found = peaks(simulate(schedule, DEVICE, shape, SimulationSettings(steps=2)), DEVICE, shape)
    assert found["ssd"].owners["gradients"] == 4100 * 4 / 2
    assert found["host"].owners["gradients"] <= (3 * 1000 + 100) * 4


@pytest.mark.parametrize("machine", [DEVICE, ONE_MEMORY], ids=["device", "one memory"])
@pytest.mark.parametrize("shares", [(1.0, 0.0, 0.0), (0.25, 0.25, 0.5), (0.0, 0.0, 1.0)])
def test_what_forwards_keep_rests_as_the_formula_says_and_is_given_up(machine: Machine, shares: tuple[float, ...]) -> None:
    kept = KeptShare(PolicyPoint("products", 10**6, 0.5), *shares)
    fast = replace(machine, ssd_read_bytes_per_s=1e9, ssd_write_bytes_per_s=1e9)
    fast = replace(fast, copy_in_bytes_per_s=1e9, copy_out_bytes_per_s=1e9)
    shape, cells = replace(SHAPE, kept=kept), kept.cells(4, 4, machine.one_memory)
    away = tuple(cell for cell, tier in cells.items() if tier is not Tier.DEVICE)
    timeline = simulate(build_training(TrainingStep(4, 4, kept=away)), fast, shape)
    found, items = peaks(timeline, fast, shape), budget(shape, BudgetTerms(4, one_memory=machine.one_memory))
    assert found["ssd"].owners.get("kept", 0.0) == shares[2] * 8 * 10**6
    assert kept.resting_bytes(4, 4)[Tier.SSD] == pytest.approx(shares[2] * 8 * 10**6)
    for tier in (Tier.HOST, Tier.DEVICE):
        assert found[tier].num_bytes <= total_bytes(items, tier)
    left: dict[str, float] = {}
    for change in changes(timeline, fast, shape):
        if change.owner == "kept":
            left[change.tier] = left.get(change.tier, 0.0) + change.num_bytes
    assert set(left.values()) == {0.0}


def runs() -> Iterator[tuple[Schedule, list[tuple[int, ...]] | None]]:
    yield build_training(TrainingStep(4, 3)), None
    yield build_training(TrainingStep(4, 3, order="horizontal")), None
    yield build_evaluation(4, 3), None
    yield saving(4, 3)
    yield build_training(TrainingStep(4, 3, hold="all")), None


@pytest.mark.parametrize("machine", [DEVICE, ONE_MEMORY], ids=["device", "one memory"])
@pytest.mark.parametrize("run", list(runs()), ids=["vertical", "horizontal", "evaluation", "saving", "holding"])
def test_what_is_taken_is_given_up(machine: Machine, run: tuple[Schedule, list[tuple[int, ...]] | None]) -> None:
    schedule, needs = run
    shape = replace(SHAPE, placement=Placement.of(activations_on_host=0.5, activations_on_ssd=0.25, gradients_on_ssd=0.5))
    timeline = simulate(schedule, machine, shape, SimulationSettings(steps=2), needs=needs)
    left: dict[tuple[str, str], float] = {}
    for change in changes(timeline, machine, shape):
        left[change.tier, change.owner] = left.get((change.tier, change.owner), 0.0) + change.num_bytes
    resting = {("ssd", "parameters"): 8200.0} | ({} if schedule.order == "forward" else {("ssd", "state"): 49200.0})
    assert {key: num_bytes for key, num_bytes in left.items() if abs(num_bytes) > 1e-6} == resting
