"""Plans: what they choose, against other choices run through the simulator; what cannot be planned."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from ds_vertical.errors import CostsError
from ds_vertical.planner import linear_program, search
from ds_vertical.planner.candidate import Candidate, Choice, fits
from ds_vertical.planner.linear_program import LpProblem
from ds_vertical.planner.machine import Machine
from ds_vertical.planner.model_shape import Division, ModelSpec, Seconds, estimated, shape_of
from ds_vertical.planner.search import PlanError, Task, choose
from ds_vertical.types import Placement, TensorKind, Tier, TierBytes

MODEL = ModelSpec(
    "eight", 512, "bf16", 20_000_000, (50_000_000,) * 8, 10_000_000, 5.2e10, 0.0, 1e10, 4_194_304, 90_000_000, 60_000_000
)
GPU = Machine(3e9, 2e9, 1e9, 16, False, 2e10, 2e10, 2e9, 1.4e9, ssd_latency_s=1e-4, copy_latency_s=1e-5)
ROOM = dict(zip(Tier, (8e9, 4.5e9, 100e9), strict=True))  # state has to be on SSD


def task(tokens: int = 8192, **changes: Any) -> Task:
    return Task(MODEL, tokens, lambda size: estimated(MODEL, size, 2e13), **changes)


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_no_other_setting_is_faster_in_the_simulator(clip: float) -> None:
    """Every regime, window, number of blocks and split of the step, all placed by the program: none beats the plan by 5 %."""
    given = task(clip=clip, micro_batch_size=1)
    plan = choose(given, GPU, ROOM)
    assert plan.chosen.choice.num_micro_batches == 16
    for case, size, blocks in list(search._Search(given, GPU, ROOM, (search._LIBRARIES,)).cases())[:: 1 if clip else 3]:
        solution = linear_program.solve(case)
        if solution is None:
            continue
        for window in search.WINDOWS:
            other = search._candidate(case, size, blocks, solution, window=window)
            if fits(other):
                assert plan.chosen.step_s <= 1.05 * other.step_s, other.choice


def test_the_best_of_every_hand_made_setting_is_not_better() -> None:
    """Not placed by the program: a grid over what can be written into the JSON."""
    given = task(clip=0.0, micro_batch_size=1)
    plan = choose(given, GPU, dict(zip(Tier, (1.2e9, 4.5e9, 100e9), strict=True)))
    assert plan.chosen.choice.placement.away(TensorKind.ACTIVATIONS) > 0
    chosen = plan.chosen
    shares = (0.0, 0.5, 1.0)
    best = chosen.step_s
    for delay, in_host, on_ssd, parameters in itertools.product((0.0, 0.25, 0.5, 0.75), shares, shares, shares):
        if in_host + on_ssd > 1:
            continue
        placement = Placement.of(parameters_on_ssd=parameters, activations_on_host=in_host, activations_on_ssd=on_ssd)
        choice = Choice(1, 16, 1, 1, delay, True, placement)
        terms = replace(chosen.case.terms, held_share=delay)
        shape = shape_of(MODEL, estimated(MODEL, 1, 2e13), Division(sequences=1, generations=2, placement=placement))
        case = replace(chosen.case, shape=shape, terms=terms, delay=delay, early=True)
        other = Candidate(choice, case, 0.0, ())
        if fits(other):
            best = min(best, other.step_s)
    assert chosen.step_s <= 1.05 * best


def test_the_program_the_bound_and_the_simulation_agree_in_order() -> None:
    chosen = choose(task(clip=0.0), GPU, ROOM).chosen
    assert chosen.program_s <= 1.02 * chosen.step_s and chosen.bound.seconds <= 1.02 * chosen.step_s
    assert max(chosen.bound.busy_s.values()) <= chosen.step_s * 1.001


def test_large_models_are_ranked_by_fewer_layers_and_come_out_the_same() -> None:
    large = replace(MODEL, block_elements=(50_000_000,) * 30)
    given = Task(large, 2048, lambda size: estimated(large, size, 2e13), clip=0.0, micro_batch_size=1)
    chosen = choose(given, GPU, dict(zip(Tier, (8e9, 12e9, 400e9), strict=True))).chosen
    assert chosen.estimate_s == pytest.approx(chosen.step_s, rel=0.03)


def test_tokens_become_micro_batches_over_all_ranks() -> None:
    assert list(task(8192).counts()) == [(1, 16), (2, 8), (4, 4), (8, 2), (16, 1)]
    assert list(task(8192, num_ranks=4, micro_batch_size=2).counts()) == [(2, 2)]
    assert list(task(5 * 512).counts()) == [(1, 5), (2, 3), (4, 2)]  # the least above what was asked for
    assert list(task(1).counts()) == [(1, 1)]


def test_clipping_without_speculation_leaves_every_step_to_the_next_forward() -> None:
    clipped, guessed = (choose(task(clip=1.0, speculation=way), GPU, ROOM).chosen for way in (False, True))
    assert not clipped.choice.early and clipped.choice.delay == 1.0 and clipped.shape.generations == 1
    assert guessed.choice.early and guessed.choice.speculation and guessed.shape.generations == 2
    assert guessed.case.terms.held_share == 1.0  # the step may have to be redone
    assert guessed.step_s <= clipped.step_s


def test_a_second_generation_needs_room_on_the_ssd() -> None:
    elements = MODEL.num_elements
    chosen = choose(task(clip=0.0), GPU, ROOM | {Tier.SSD: 20.0 * elements}).chosen
    assert chosen.shape.generations == 1 and chosen.ssd_bytes <= 20 * elements


@pytest.mark.parametrize(
    ("limits", "names"),
    [
        (dict(zip(Tier, (1e8, 24e9, 100e9), strict=True)), "device memory"),
        (dict(zip(Tier, (8e9, 1e8, 100e9), strict=True)), "host memory"),
        (dict(zip(Tier, (8e9, 2e9, 1e9), strict=True)), "ssd memory|host memory"),
    ],
)
def test_a_machine_that_is_too_small_is_told_which_tier_and_how_much(limits: TierBytes, names: str) -> None:
    with pytest.raises(PlanError, match=rf"({names}): \d+ MiB short"):
        choose(task(), GPU, limits)


def test_a_device_too_small_for_a_layer_ahead_is_planned_for_without() -> None:
    """A device of a byte less than any setting with a layer ahead needs."""
    given = task(clip=0.0, micro_batch_size=1)
    search_of = search._Search(given, GPU, ROOM, (search._LIBRARIES,))
    needed = min(
        linear_program.tier_bytes(case, all_away(case), Tier.DEVICE) for case, _, blocks in search_of.cases() if blocks == 1
    )
    plan = choose(given, GPU, ROOM | {Tier.DEVICE: needed - 1})
    assert plan.chosen.choice.window == 0
    assert linear_program.tier_bytes(plan.chosen.case, plan.chosen.shape.placement, Tier.DEVICE) < needed
    assert search._Search(given, GPU, ROOM | {Tier.DEVICE: 1.01 * needed}, search_of.further).fits()


def all_away(case: LpProblem) -> Placement:
    return Placement.of(parameters_on_ssd=1.0, state_on_ssd=case.shape.in_files(TensorKind.STATE), activations_on_ssd=1.0)


def test_runners_up_differ_in_what_they_say() -> None:
    plan = choose(task(clip=0.0), GPU, ROOM)
    differences = list(plan.differences())
    assert 0 < len(differences) <= 3 and len({what for what, _ in differences}) == len(differences)
    assert all(what and ratio > 0.9 for what, ratio in differences)


def test_timing_alone_is_tuned_within_memory_and_only_for_a_gain() -> None:
    plan = choose(task(clip=0.0, micro_batch_size=1), GPU, ROOM)
    choice, case = plan.chosen.choice, plan.chosen.case
    late = replace(choice, delay=0.9, window=1)
    slow = replace(case, delay=0.9, terms=replace(case.terms, held_share=0.9, window=1))
    best, own = search.tune_timing(slow, late, (1, 2), (0.0, 0.25, 0.5))
    assert own.choice == late and best.estimate_s < own.estimate_s
    again, same = search.tune_timing(best.case, best.choice, (1, 2), (0.0, 0.25, 0.5))
    assert again is same
    nothing = replace(slow, limits=dict(zip(Tier, (None, 1e6, None), strict=True)))
    best, own = search.tune_timing(nothing, late, (1, 2), (0.0, 0.25))
    assert best is own


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(CostsError, match="flops_per_s: got 0"):
        estimated(MODEL, 1, 0)


def test_layers_of_several_blocks_have_all_elements() -> None:
    odd = replace(MODEL, block_elements=(1, 2, 3, 4, 5))
    assert odd.layers(1) == (1, 2, 3, 4, 5) and odd.layers(2) == (3, 7, 5) and odd.layers(4) == (10, 5)
    shape = shape_of(MODEL, Seconds(1, 2, 0.1, 0.2, 0.3), Division(sequences=2, blocks_per_layer=4))
    assert shape.num_elements == MODEL.num_elements and (shape.forward_s, shape.backward_s) == (4, 8)
    assert shape.activation_bytes == 2 * MODEL.passed_bytes


def test_where_nothing_is_delayed_the_forward_is_read_ahead() -> None:
    """Then no step hands a layer over, and every layer comes from its file while the one before it computes."""
    chosen = choose(task(clip=0.0), GPU, ROOM).chosen
    on_ssd = chosen.choice.placement.with_shares(TensorKind.STATE, {Tier.SSD: 1.0})  # state in memory is stepped late
    early = replace(chosen, choice=replace(chosen.choice, window=1, delay=0.0, early=True, placement=on_ssd))
    text = " ".join(str(event) for event in early.schedule(4).events)
    assert text.index(" 2FETCH ") < text.index(" 1F0 ")
    assert "@-1" not in text
