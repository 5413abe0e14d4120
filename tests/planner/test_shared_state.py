"""Plans with a share of the optimizer's state in host memory: where it gains, how much memory it takes, and what is written."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from ds_vertical.cli.plan.deepspeed_json import TrainingOptions, write_config
from ds_vertical.config.cross_check import check
from ds_vertical.config.section import load_section
from ds_vertical.planner import search
from ds_vertical.planner.candidate import Candidate, difference, simplicity, with_state_in_memory
from ds_vertical.planner.linear_program import tier_bytes
from ds_vertical.planner.machine import Machine
from ds_vertical.planner.memory_budget import norm_copy
from ds_vertical.planner.model_shape import ModelShape, ModelSpec, SufShape, estimated, state_elements
from ds_vertical.planner.search import PlanError, Task, choose
from ds_vertical.types import PRE, SUF, Placement, TensorKind, Tier

MODEL = ModelSpec(
    "eight", 512, "bf16", 20_000_000, (50_000_000,) * 8, 10_000_000, 5.2e10, 0.0, 1e10, 4_194_304, 90_000_000, 60_000_000
)
SLOW_SSD = Machine(5e8, 3e8, 1e9, 16, False, 2e10, 2e10, 4e8, 2.4e8, ssd_latency_s=1e-4, copy_latency_s=1e-5)
STATE_BYTES = 12 * MODEL.num_elements


@cache
def plan(host_bytes: float, machine: Machine = SLOW_SSD, ssd_bytes: float = 100e9, **changes: Any) -> Candidate:
    given = {"clip": 0.0, "micro_batch_size": 1} | changes
    task = Task(MODEL, 8192, lambda size: estimated(MODEL, size, 2e13), **given)
    return choose(task, machine, dict(zip(Tier, (8e9, host_bytes, ssd_bytes), strict=True))).chosen


def in_memory(candidate: Candidate) -> float:
    return candidate.choice.placement.share(TensorKind.STATE, Tier.HOST)


# ---- where it lies


def test_what_is_outside_the_layers_comes_first_then_as_much_of_every_layer() -> None:
    shape = ModelShape(1000, (4000, 2000), 0.0, 0.0, 0, num_shards=2, suf=SufShape(3000, 3000))
    shared = with_state_in_memory(shape, 0.3)  # 1500 of this rank's 5000: `pre` takes 500, and `suf` has no room
    places: dict[Any, Any] = {PRE: (0.0, 500.0), SUF: (1500.0, 0.0), 0: (4000 / 3, 2000 / 3), 1: (2000 / 3, 1000 / 3)}
    for unit, place in places.items():
        assert state_elements(shared, unit) == pytest.approx(place)
    assert shared.in_files(TensorKind.STATE) == pytest.approx(0.7)
    for share in (0.0, 1.0):
        assert with_state_in_memory(shared, share).state_places == () and shape.generations == 1
        assert with_state_in_memory(shared, share).in_files(TensorKind.STATE) == 1 - share


# ---- whether it gains


@pytest.mark.parametrize("clip", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_more_host_memory_holds_more_state_and_the_step_takes_less_time(clip: float) -> None:
    """A slow SSD decides. The bytes to and from it fall by the share."""
    plans = [plan(host, clip=clip) for host in (5.0e9, 6.5e9, 7.5e9)]
    shares = [in_memory(each) for each in plans]
    assert shares == sorted(shares) and 0 < shares[1] < shares[2] < 1, shares
    steps = [each.step_s for each in plans]
    assert steps == sorted(steps, reverse=True) and steps[2] < 0.9 * steps[0], steps
    for each, share in zip(plans, shares, strict=True):
        traffic = each.traffic
        assert traffic.state_read == pytest.approx((1 - share) * STATE_BYTES, rel=0.01)
        assert traffic.state_written == pytest.approx((1 - share) * STATE_BYTES, rel=0.01)


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_the_state_leaves_a_part_of_what_all_else_leaves(clip: float) -> None:
    limit = 6.5e9
    found = plan(limit, clip=clip)
    share, case = in_memory(found), found.case
    assert 0 < share < 1
    needed = tier_bytes(case, found.shape.placement, Tier.HOST)
    rest = needed - share * STATE_BYTES - found.choice.read_ahead_bytes  # which has what the state leaves
    assert share * STATE_BYTES <= 0.8 * (limit - rest) and needed <= limit
    items = {item.what: (item.num_bytes, item.key) for item in found.items if item.tier is Tier.HOST}
    assert items["optimizer state at rest"] == (round(share * STATE_BYTES), "vertical_schedule.optimizer_host_share")


def test_where_computation_decides_all_state_stays_on_the_ssd() -> None:
    fast = replace(SLOW_SSD, ssd_read_bytes_per_s=5e10, ssd_write_bytes_per_s=5e10, adam_elements_per_s=2e9)
    assert in_memory(plan(6.5e9, fast)) == 0.0


def test_a_share_is_planned_where_neither_tier_holds_all_of_the_state() -> None:
    """One generation of everything takes 5.9 GB of the SSD, and all state in memory 5 GB beside 2.5 GB of the rest."""
    host, ssd = 5.5e9, 4.0e9
    found = plan(host, ssd_bytes=ssd, clip=1.0)
    assert 0 < in_memory(found) < 1 and found.ssd_bytes <= ssd
    state_bytes = in_memory(found) * STATE_BYTES
    assert state_bytes <= 0.8 * (host - tier_bytes(found.case, found.shape.placement, Tier.HOST) + state_bytes)
    with pytest.raises(PlanError, match="MiB short"):
        plan(3e9, ssd_bytes=2e9, clip=1.0)


def test_a_refusal_says_the_least_that_is_lacking_wherever_the_state_is() -> None:
    """All of it on SSD takes the least host memory, and shares of it are tried last."""
    limits = dict(zip(Tier, (8e9, 1e9, 100e9), strict=True))
    task = Task(MODEL, 8192, lambda size: estimated(MODEL, size, 2e13), clip=1.0, micro_batch_size=1)
    norm = norm_copy(MODEL.largest_parameter, SLOW_SSD.one_memory)
    whole = search._Search(task, SLOW_SSD, limits, (search._LIBRARIES, norm), window=0)
    with pytest.raises(PlanError, match="MiB short") as refused:
        choose(task, SLOW_SSD, limits)
    assert str(refused.value) == search.refusal(whole)


# ---- what is written


def test_the_share_is_written_and_told() -> None:
    found = plan(6.5e9)
    share = in_memory(found)
    config = write_config(found, MODEL, TrainingOptions(0.0, ("/ssd",), locked=True))
    section = load_section(config)
    assert section is not None and section.optimizer_host_share == share and check(config, section) == []
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "nvme"
    beside = replace(found.choice, placement=found.choice.placement.with_shares(TensorKind.STATE, {Tier.SSD: 1.0}))
    assert difference(found.choice, beside) == "optimizer state on SSD"
    assert difference(beside, found.choice) == f"optimizer state on SSD {1 - share:.0%}"
    assert simplicity(replace(found, choice=beside)) < simplicity(found)
    whole = replace(found, choice=replace(found.choice, placement=Placement.of(state_on_ssd=0.0)))
    config = write_config(whole, MODEL, TrainingOptions(0.0, ("/ssd",), locked=True))
    section = load_section(config)
    assert section is not None and section.optimizer_host_share == 1.0 and check(config, section) == []
