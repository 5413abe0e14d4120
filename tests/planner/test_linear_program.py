"""The linear program against brute force, and its rows against the events that an executor would run."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_vertical.planner import linear_program, memory_budget
from ds_vertical.planner.activation_tiers import activation_tiers
from ds_vertical.planner.budget.resting import IN_HOST
from ds_vertical.planner.closed_forms import traffic_of
from ds_vertical.planner.costs import event_costs, split_steps
from ds_vertical.planner.kept_activations import KeepMenu, KeptShare, PolicyPoint
from ds_vertical.planner.linear_program import LpProblem
from ds_vertical.planner.machine import Machine
from ds_vertical.planner.model_shape import ModelShape
from ds_vertical.schedule.events import DELAYED, EVERYTHING, LEAD
from ds_vertical.schedule.passes import TrainingStep, build_training
from ds_vertical.types import Placement, TensorKind, Tier, TierBytes

GPU = Machine(6e9, 3e9, 1e9, 16, False, 2e10, 2e10, 4e9, 2e9)
CPU = Machine(1e9, 2e9, 3e8, 2, True, norm_elements_per_s=1e9, schedule_forward_s=0.0, schedule_backward_s=0.0)
LAYERS = 6


def case(
    machine: Machine = GPU, limits: TierBytes | None = None, delay: float = 0.25, early: bool = True, **shape: Any
) -> LpProblem:
    """Six equal layers of a hundred million elements, four micro-batches, everything that can on SSD."""
    fields: dict[str, Any] = {"activation_bytes": 200_000_000, "recompute_last": False, "generations": 1 + early} | shape
    model = ModelShape(50_000_000, (100_000_000,) * LAYERS, 0.05, 0.1, head_s=0.02, part_elements=1 << 24, **fields)
    held = memory_budget.waiting_share(delay, model.in_files(TensorKind.STATE)) if early else 1.0
    own = memory_budget.BudgetTerms(4, 1, held_share=held, one_memory=machine.one_memory)
    return LpProblem(model, machine, own, limits or dict(zip(Tier, (None, None, None), strict=True)), delay, early)


NAMES = ("activations_on_host", "activations_on_ssd", "parameters_in_host", "gradients_on_ssd")


def seconds_at(given: LpProblem, points: np.ndarray, tolerance: float = 1e-6) -> np.ndarray:
    """Seconds of both sweeps at points of shares (N x 4), by evaluating every row; infinite where memory forbids them. With all
    parameters in host memory no buffers for them are there."""
    everything = points[:, NAMES.index(IN_HOST)] == 1
    found = _seconds_at(given, points, tolerance)
    in_host = _seconds_at(replace(given, fixed={IN_HOST: 1.0}), points, tolerance)
    return np.where(everything, np.minimum(found, in_host), found)


def _seconds_at(given: LpProblem, points: np.ndarray, tolerance: float) -> np.ndarray:
    sweeps = {name: np.zeros(len(points)) for name in ("forward_s", "backward_s")}
    forbidden = np.zeros(len(points), dtype=bool)
    for row in linear_program.constraints(given):
        values = points @ np.array([row.row.get(name, 0.0) for name in NAMES])
        sweep = next((name for name in sweeps if name in row.row), None)
        if sweep is not None:
            sweeps[sweep] = np.maximum(sweeps[sweep], values - row.limit)
        else:
            forbidden |= values > row.limit + tolerance * row.scale
    return np.where(forbidden, np.inf, sum(sweeps.values()))


def grid(steps: int = 10) -> np.ndarray:
    points = np.array(list(itertools.product(np.linspace(0, 1, steps + 1), repeat=4)))
    return points[points[:, 0] + points[:, 1] <= 1 + 1e-9]


POINTS = grid()
GIB = 2**30


@settings(max_examples=40, deadline=None)
@given(
    device=st.floats(2.5 * GIB, 14 * GIB),
    host=st.floats(2 * GIB, 14 * GIB),
    read=st.floats(5e8, 2e10),
    copy=st.floats(2e9, 5e10),
    delay=st.sampled_from((0.0, 0.25, 0.5)),
)
def test_no_point_of_a_grid_is_better_and_the_best_is_near(
    device: float, host: float, read: float, copy: float, delay: float
) -> None:
    machine = Machine(read, read / 2, 1e9, 16, False, copy, copy, 0.7 * read, 0.3 * read)
    given = case(machine, dict(zip(Tier, (device, host, 1e12), strict=True)), delay)
    least = seconds_at(given, POINTS).min()
    found = linear_program.solve(given)
    if found is None:
        assert seconds_at(given, POINTS, tolerance=0.0).min() == np.inf
        return
    assert found.seconds <= 1.01 * least  # what is preferred among near equals may cost as much
    own = np.array([[found.values[name] for name in NAMES]])
    assert seconds_at(given, own)[0] == pytest.approx(found.seconds, rel=1e-6)


MENU = KeepMenu("block", LAYERS, (PolicyPoint("products", 2e8, 0.02), PolicyPoint("everything", 6e8, 0.03)))


def kept_in(given: LpProblem, **shares: float) -> tuple[KeptShare, dict[str, float]]:
    """As much of the menu's last policy in each tier, and what the program's variables are then."""
    assert given.menu is not None
    kept = KeptShare(given.menu.points[-1], **shares)
    values = {name: kept.share(tier) for name, (point, tier) in given.kept.items() if point is kept.point}
    assert sum(values.values()) == kept.total
    return kept, dict.fromkeys(given.kept, 0.0) | values


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("state", [1.0, 0.4])
@pytest.mark.parametrize("shares", [(1.0, 0.0, 0.0, 0.0), (0.4, 1.0, 0.25, 0.5), (0.0, 0.5, 0.5, 0.5)])
def test_the_rows_move_the_bytes_of_the_very_schedule(early: bool, shares: tuple[float, ...], state: float) -> None:
    parameters, gradients, in_host, on_ssd = shares
    moved_away = {"activations_on_host": in_host, "activations_on_ssd": on_ssd}
    placement = Placement.of(parameters_on_ssd=parameters, gradients_on_ssd=gradients, state_on_ssd=state, **moved_away)
    given = replace(case(delay=0.5 if early else 1.0, early=early, placement=Placement.of(state_on_ssd=state)), menu=MENU)
    kept, chosen = kept_in(given, host=0.25, ssd=0.5)
    shape = replace(given.shape, placement=placement, kept=kept)
    away = tuple(kept.cells(LAYERS, 4, one_memory=False))
    tiers = activation_tiers(4, placement[TensorKind.ACTIVATIONS])
    moved = tuple(m for m, tier in enumerate(tiers) if tier is not Tier.DEVICE)
    due = frozenset(range(LEAD, LAYERS))
    hold = None if not gradients else DELAYED if early else EVERYTHING
    step = TrainingStep(LAYERS, 4, delayed=True, due=due, early=early, ahead=True, hold=hold, moved=moved, kept=away)
    schedule = build_training(step)
    parts = split_steps(shape, 0.5) if early else None
    table = traffic_of(event_costs(schedule.events, GPU, shape, parts), shape)
    values = {
        "": 1.0,
        "activations_on_host": in_host,
        "activations_on_ssd": on_ssd,
        "parameters_in_host": 1 - parameters,
        "gradients_on_ssd": gradients,
        **chosen,
    }
    forward, backward = (linear_program._read_write(given, sweep) for sweep in ("forward_s", "backward_s"))
    for row, num_bytes in ((forward[1], table.kept_written), (backward[0], table.kept_read)):
        assert sum(row[name] * share for name, share in chosen.items() if share and name in row) == num_bytes == 8 * 6e8
    sums = [0.0, 0.0]
    for sweep in ("forward_s", "backward_s"):
        for i, row in enumerate(linear_program._read_write(given, sweep)):
            sums[i] += sum(value * values[name] for name, value in row.items())
    # The program counts one load and save more at the two ends of the layers than the schedule has.
    spare = 3 * 4 * on_ssd * shape.activation_bytes
    assert table.read <= sums[0] * (1 + 1e-9) and sums[0] - spare <= table.read * 1.02
    assert table.written <= sums[1] * (1 + 1e-9) and sums[1] - spare <= table.written * 1.02


@pytest.mark.parametrize("state", [1.0, 0.4])
@pytest.mark.parametrize("machine", [GPU, CPU], ids=["gpu", "cpu"])
def test_the_rows_compute_the_seconds_of_the_very_schedule(machine: Machine, state: float) -> None:
    given = replace(case(machine, placement=Placement.of(state_on_ssd=state)), menu=MENU)
    kept, chosen = kept_in(given, device=0.25, ssd=0.5)
    shape, due = replace(given.shape, kept=kept), frozenset(range(LEAD, LAYERS))
    away = tuple(cell for cell, tier in kept.cells(LAYERS, 4, machine.one_memory).items() if tier is not Tier.DEVICE)
    schedule = build_training(TrainingStep(LAYERS, 4, delayed=True, due=due, early=True, ahead=True, kept=away))
    costs = event_costs(schedule.events, machine, shape, split_steps(shape, 0.25))
    stages = [stage for cost in costs for job in cost for stage in job]
    compute = sum(s.seconds for s in stages if s.lane == "compute")
    adam = sum(s.seconds for s in stages if s.lane == "adam")
    sweeps = ("forward_s", "backward_s")
    rows = [linear_program._saved_s(given, sweep) for sweep in sweeps]
    saved = sum(row[name] * share for row in rows for name, share in chosen.items() if name in row)
    assert saved == pytest.approx(-0.75 * 20 * 0.03)
    assert sum(linear_program._compute_s(given, sweep) for sweep in sweeps) + saved == pytest.approx(compute)
    assert sum(linear_program._adam_s(given, sweep) for sweep in sweeps) == pytest.approx(adam)


def test_what_is_scarce_decides_where_things_rest() -> None:
    roomy = linear_program.solve(case(limits=dict(zip(Tier, (1e12, 1e12, 1e13), strict=True))))
    assert roomy is not None and roomy.values["parameters_in_host"] == pytest.approx(1)
    assert roomy.values["activations_on_host"] == roomy.values["activations_on_ssd"] == 0
    small = case(limits=dict(zip(Tier, (4 * GIB, 1e12, 1e13), strict=True)))
    tight = linear_program.solve(small)
    assert tight is not None and tight.values["activations_on_host"] > 0.5 and tight.values["activations_on_ssd"] == 0
    poor = linear_program.solve(case(limits=dict(zip(Tier, (4 * GIB, 4 * GIB, 1e13), strict=True)), delay=0.0))
    assert poor is not None and poor.values["activations_on_ssd"] > 0.2
    assert tight.seconds >= roomy.seconds and poor.seconds >= tight.seconds


def test_a_tier_that_is_too_small_at_any_share_is_named_with_its_bytes() -> None:
    given = case(limits=dict(zip(Tier, (1 * GIB, 1e12, 1e13), strict=True)))
    assert linear_program.solve(given) is None
    lacking, _ = linear_program.shortage(given)
    least = min(linear_program.tier_bytes(given, Placement.of(activations_on_host=a), Tier.DEVICE) for a in (0.0, 1.0))
    assert lacking == {Tier.DEVICE: pytest.approx((least - 0.995 * GIB) / 0.995)}  # a little is left free
