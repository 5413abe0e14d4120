"""Plans that read state before the norm: how much memory that takes, when it gains, and how steps go on in the simulation."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from ds_vertical.cli.plan.deepspeed_json import TrainingOptions, write_config
from ds_vertical.config.cross_check import check
from ds_vertical.config.section import load_section
from ds_vertical.planner.bound import step_bound
from ds_vertical.planner.candidate import Candidate, Choice, reading_ahead
from ds_vertical.planner.linear_program import tier_bytes
from ds_vertical.planner.machine import Machine
from ds_vertical.planner.memory_budget import USED_BY_READING, num_pieces, slot_bytes, slots_ahead
from ds_vertical.planner.model_shape import ModelShape, ModelSpec, estimated
from ds_vertical.planner.search import Task, choose
from ds_vertical.planner.simulate import SimulationSettings, simulate
from ds_vertical.schedule.events import Op, parse_events, teller_of_rest
from ds_vertical.schedule.passes import TrainingStep, build_training
from ds_vertical.types import Placement, Tier

MODEL = ModelSpec(
    "eight", 512, "bf16", 20_000_000, (50_000_000,) * 8, 10_000_000, 5.2e10, 0.0, 1e10, 4_194_304, 90_000_000, 60_000_000
)
SLOW_SSD = Machine(5e8, 3e8, 1e9, 16, False, 2e10, 2e10, 4e8, 2.4e8, ssd_latency_s=1e-4, copy_latency_s=1e-5)
SHAPE = ModelShape(1_000_000, (10_000_000,) * 6, 0.05, 0.1, 1000, part_elements=1_000_000)
MACHINE = Machine(1e8, 1e9, 1e9, 8, True, ssd_latency_s=1e-4)
WAITING = TrainingStep(6, 4, delayed=True, due=frozenset(("pre", *range(6))) - {"pre", 0, 1}, ahead=True)


def step_s(ahead: int, step: TrainingStep = WAITING, machine: Machine = MACHINE) -> float:
    return simulate(build_training(step), machine, SHAPE, SimulationSettings(3, 4, ahead=ahead)).step_s


# ---- what tells


def test_the_last_event_ahead_of_the_norm_tells_all_steps_behind_it() -> None:
    told = {
        "preSTEP.d0@-1 preF0 sufHEAD0 sufHEAD1 0B0 NORM preSTEP.d0": "sufHEAD0",
        "preSTEP.d0@-1 sufHEAD0 1STEP.e0 0STEP.e0 NORM COMMIT preSTEP.d0": "0STEP.e0",
        "sufHEAD0 NORM": "sufHEAD0",
        "preF0 sufHEAD0": "None",
    }
    assert {text: str(teller_of_rest(parse_events(text))) for text in told} == told


# ---- the simulation


def test_more_memory_makes_the_simulated_step_shorter_down_to_what_the_ssd_takes() -> None:
    """Steps that wait for the norm keep the SSD idle in the backward; with memory for all state it never is."""
    steps = [step_s(ahead) for ahead in (0, 8, 16, 32, 61)]
    assert steps == sorted(steps, reverse=True) and steps[-1] < 0.85 * steps[0], steps
    least = step_bound(build_training(WAITING), MACHINE, SHAPE).busy_s
    assert steps[-1] >= max(least.values()) * (1 - 1e-9)


def test_state_of_steps_behind_the_norm_is_read_from_the_first_head_on() -> None:
    schedule = build_training(WAITING)
    for ahead in (0, 61):
        run = simulate(schedule, MACHINE, SHAPE, SimulationSettings(3, 4, ahead=ahead))
        count = len(schedule.events)
        norm = count + next(i for i, event in enumerate(schedule.events) if event.op is Op.NORM)
        head = count + next(i for i, event in enumerate(schedule.events) if event.op is Op.HEAD)
        behind = [s for s in run.spans if s.event.op is Op.STEP and s.stage.reads_state and norm < s.index < norm + count]
        early = [span for span in behind if span.start_s < run.end_s[norm]]
        assert min(span.start_s for span in behind) >= run.end_s[head] - run.busy_s["compute"]
        assert len(early) > 20 if ahead else not early


def test_as_many_pieces_are_in_memory_as_there_are_slots() -> None:
    for ahead in (0, 5, 20):
        run = simulate(build_training(WAITING), MACHINE, SHAPE, SimulationSettings(2, 4, ahead=ahead))
        jobs = [span for span in run.spans if span.event.op is Op.STEP and span.stage.purpose == "state"]
        reads = sorted(span.start_s for span in jobs if span.stage.lane == "ssd_read")
        writes = sorted(span.end_s for span in jobs if span.stage.lane == "ssd_write")
        for number in range(4 + ahead, len(reads)):
            assert reads[number] >= writes[number - 4 - ahead] - 1e-9


# ---- memory


def test_the_slots_take_a_part_of_the_room_and_no_more_than_all_state_has() -> None:
    assert slots_ahead(6, 100.0, math.inf) == 6
    assert slots_ahead(6, 100.0, 6 * 100 / USED_BY_READING + 1e-6) == 6
    assert slots_ahead(6, 100.0, 5.9 * 100 / USED_BY_READING) == 5
    assert slots_ahead(6, 100.0, 1e9, 399) == 3
    assert slots_ahead(6, 100.0, 1e9, 0) == slots_ahead(6, 100.0, -5.0) == slots_ahead(0, 100.0, 1e9) == 0


def test_pieces_are_those_whose_state_is_in_files() -> None:
    assert num_pieces(SHAPE) == 61
    assert num_pieces(replace(SHAPE, placement=Placement.of(state_on_ssd=0.0))) == 0
    assert num_pieces(replace(SHAPE, part_elements=None)) == 7


# ---- plans


@cache
def plan(host_bytes: float, **changes: Any) -> Candidate:
    given = {"clip": 1.0, "micro_batch_size": 1} | changes
    task = Task(MODEL, 8192, lambda size: estimated(MODEL, size, 2e12), **given)
    return choose(task, SLOW_SSD, dict(zip(Tier, (8e9, host_bytes, 100e9), strict=True))).chosen


@pytest.mark.parametrize("host_bytes", [4.2e9, 5.5e9, 9e9, 30e9])
def test_a_plan_is_no_slower_for_it_and_fits(host_bytes: float) -> None:
    found = plan(host_bytes)
    items = {item.what: item.num_bytes for item in found.items if item.tier is Tier.HOST}
    assert items.get("state read ahead", 0) == pytest.approx(found.choice.read_ahead_bytes, abs=1)
    assert tier_bytes(found.case, found.shape.placement, Tier.HOST) <= host_bytes
    without = replace(
        found,
        choice=replace(found.choice, read_ahead_bytes=0),
        case=replace(found.case, terms=replace(found.case.terms, ahead=0)),
    )
    assert found.estimate_s <= without.estimate_s * (1 + 1e-9)
    best = min((each.estimate_s for each in reading_ahead(without)), default=math.inf)
    assert found.estimate_s <= 1.01 * best


def test_none_is_planned_where_early_steps_count_whatever_the_norm() -> None:
    assert plan(9e9, clip=0.0).choice.read_ahead_bytes == 0
    assert list(reading_ahead(plan(9e9, clip=0.0))) == []


def test_what_is_planned_is_written() -> None:
    made = next(each for size in (4.2e9, 5.5e9, 9e9, 30e9) for each in reading_ahead(plan(size)))
    options = TrainingOptions(1.0, ("/ssd",), locked=True)
    config = write_config(made, MODEL, options)
    section = load_section(config)
    assert section is not None and section.optimizer_read_ahead_bytes == made.choice.read_ahead_bytes
    assert check(config, section) == [] and Choice.from_json(made.choice.to_json()) == made.choice
    plain = write_config(replace(made, choice=replace(made.choice, read_ahead_bytes=0)), MODEL, options)
    assert plain["vertical_schedule"]["optimizer_read_ahead_bytes"] == 0  # null would take what the plan has left
    assert made.choice.read_ahead_bytes == int(made.case.terms.ahead * slot_bytes(made.shape, made.case.terms))
