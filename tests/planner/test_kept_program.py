"""What is kept for the backward, in the linear program: against brute force, and against LoHan's own way to choose."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from ds_vertical.errors import CostsError
from ds_vertical.planner import linear_program, memory_budget
from ds_vertical.planner.candidate import solved_ways
from ds_vertical.planner.kept_activations import (
    IN_TRANSIT,
    KeepMenu,
    KeptShare,
    PolicyPoint,
    concave,
    kept_cells,
    mean_menu,
    rounded,
    thinned,
)
from ds_vertical.planner.linear_program import LpProblem
from ds_vertical.planner.machine import Machine
from ds_vertical.planner.model_shape import ModelShape
from ds_vertical.types import Placement, Tier

GIB = 2**30
FREE, PRODUCTS, EVERYTHING = (
    PolicyPoint("free", 0, 0.014),
    PolicyPoint("products", 2e8, 0.042),
    PolicyPoint("everything", 6e8, 0.05),
)
MENU = KeepMenu("block", 6, (FREE, PRODUCTS, EVERYTHING))


def case(machine: Machine, limits: tuple[float | None, float | None, float | None], menu: KeepMenu | None = MENU) -> LpProblem:
    """Six equal layers of a hundred million elements, eight micro-batches; steps are early but for a quarter."""
    shape = ModelShape(
        50_000_000,
        (100_000_000,) * 6,
        0.05,
        0.1,
        20_000_000,
        head_s=0.02,
        recompute_last=False,
        generations=2,
        part_elements=1 << 24,
    )
    terms = memory_budget.BudgetTerms(8, 1, held_share=0.25, one_memory=machine.one_memory)
    return LpProblem(shape, machine, terms, dict(zip(Tier, limits, strict=True)), 0.25, True, menu=menu)


def seconds_at(given: LpProblem, names: list[str], points: np.ndarray) -> np.ndarray:
    """Seconds of both sweeps at points of shares, by evaluating every row; infinite where a row forbids them."""
    sweeps = {name: np.zeros(len(points)) for name in ("forward_s", "backward_s")}
    forbidden = np.zeros(len(points), dtype=bool)
    for row in linear_program.constraints(given):
        values = points @ np.array([row.row.get(name, 0.0) for name in names])
        sweep = next((name for name in sweeps if name in row.row), None)
        if sweep is not None:
            sweeps[sweep] = np.maximum(sweeps[sweep], values - row.limit)
        else:
            forbidden |= values > row.limit + 1e-6 * row.scale
    return np.where(forbidden, np.inf, sum(sweeps.values()))


@pytest.mark.parametrize("read", [1e9, 4e9, 2e10])
@pytest.mark.parametrize("host", [9 * GIB, 20 * GIB])
@pytest.mark.parametrize("one_memory", [False, True])
def test_no_mixture_of_policies_and_tiers_is_better(read: float, host: float, one_memory: bool) -> None:
    machine = Machine(read, read / 2, 1e9, 16, one_memory, 1e10, 1e10, 0.7 * read, 0.3 * read)
    fixed = dict.fromkeys(("activations_on_host", "activations_on_ssd", "parameters_in_host", "gradients_on_ssd"), 0.0)
    given = replace(case(machine, (8 * GIB, host, 1e12)), fixed=fixed)
    names = list(given.kept)
    assert len(names) == (5 if one_memory else 7)  # "free" keeps no bytes, so no tier is chosen for it
    steps = np.linspace(0, 1, 8 if one_memory else 5)
    grid = np.array([point for point in itertools.product(steps, repeat=len(names)) if sum(point) <= 1 + 1e-9])
    found = linear_program.solve(given)
    assert found is not None
    least = seconds_at(given, names, grid).min()
    on_device = replace(given, keep_tiers=(Tier.DEVICE,))
    own = given if set(names) <= set(found.values) else on_device
    assert seconds_at(own, list(own.kept), np.array([[found.values[name] for name in own.kept]]))[0] == pytest.approx(
        found.seconds
    )
    alone = np.array([point for point in itertools.product(steps, repeat=3) if sum(point) <= 1 + 1e-9])
    least = min(least, seconds_at(on_device, list(on_device.kept), alone).min())
    assert found.seconds <= 1.002 * least
    plain = linear_program.solve(replace(given, menu=None))
    assert plain is not None and found.seconds <= plain.seconds * (1 + 1e-9)


@pytest.mark.parametrize("room", [1e9, 4.2e9, 9e9, 4e10])  # of memory, for forty cells
@pytest.mark.parametrize("tiers", [(Tier.DEVICE,), tuple(Tier)])
def test_a_run_finds_the_best_of_its_menu_parts_of_the_products_included(room: float, tiers: tuple[Tier, ...]) -> None:
    """By the program, which has one point at a time: against all shares of each point in each pair of tiers, in steps."""
    part = PolicyPoint("products", 1e8, 0.03, 1)
    menu = replace(MENU, points=(FREE, part, PRODUCTS, EVERYTHING))
    fixed = dict.fromkeys(("activations_on_host", "activations_on_ssd", "parameters_in_host", "gradients_on_ssd"), 0.0)
    machine = Machine(2e10, 1e10, 1e9, 16, True, None, None)
    open_case = replace(case(machine, (None, 1e12, 1e12), menu), fixed=fixed, keep_tiers=tiers)
    taken = linear_program.tier_bytes(open_case, open_case.shape.placement, Tier.HOST)
    given = replace(open_case, limits={**open_case.limits, Tier.HOST: taken + room})
    found = min((solution for _, solution in solved_ways(given, in_parts=True)), key=lambda each: each.seconds)
    least = np.inf
    for name, own_tiers in itertools.product(("free", "products_1", "products", "everything"), {(Tier.DEVICE,), tiers}):
        own = replace(given, menu=menu.only(name), keep_tiers=own_tiers)
        grid = np.array([each for each in itertools.product(np.linspace(0, 1, 41), repeat=len(own.kept)) if sum(each) <= 1])
        least = min(least, seconds_at(own, list(own.kept), grid).min())
    assert 0.97 * least <= found.seconds <= 1.002 * least
    without = min(solution.seconds for _, solution in solved_ways(given))
    if room == 4.2e9 and tiers == (Tier.DEVICE,):  # of the part for all cells, of all products for half of them
        assert found.kept[0][0] is part and found.seconds < 0.995 * without
    assert found.seconds <= without


@pytest.mark.parametrize("tiers", [(Tier.SSD,), (Tier.HOST, Tier.SSD)])
def test_a_share_that_is_asked_for_is_kept_whole_whatever_it_costs(tiers: tuple[Tier, ...]) -> None:
    """The program would keep none of it beside an SSD so slow, and less than host memory has no room for."""
    machine = Machine(1e8, 1e8, 1e9, 16, False, 1e10, 1e10)
    given = replace(case(machine, (8 * GIB, 20 * GIB, 1e12), MENU.only("everything")), keep_tiers=tiers)
    plain, asked = linear_program.solve(given), linear_program.solve(replace(given, keep_share=0.9))
    assert plain is not None and sum(part for _, _, part in plain.kept) < 0.8
    assert asked is not None and sum(part for _, _, part in asked.kept) == pytest.approx(0.9)
    assert asked.seconds > plain.seconds
    assert linear_program.solve(replace(given, keep_share=0.9, limits={**given.limits, Tier.SSD: 1e10})) is None


def lohan_case(host: float) -> LpProblem:
    """13B, a batch of 32 sequences of 1024 tokens, an RTX 4090 with six SSDs; M = 1, alpha = 0, nothing else to choose."""
    h, num_layers, tokens = 5120, 40, 32 * 1024
    ssd = {"ssd_read_bytes_per_s": 6 * 6.8e9, "ssd_write_bytes_per_s": 6 * 4.5e9}
    machine = Machine(**ssd, adam_elements_per_s=1.5e9, host_cores=16, one_memory=False, **COPIES)
    forward = (24 * h * h * tokens + 2 * tokens * 1024 * h) / 90e12
    elements = 12 * h * h + 13 * h
    shape = ModelShape(
        2 * 50304 * h + 1024 * h, (elements,) * num_layers, forward, 2 * forward, tokens * h * 2, recompute_last=False
    )
    terms = memory_budget.BudgetTerms(1, 1, held_share=0.0)
    limits = dict(zip(Tier, (None, host, None), strict=True))
    fixed = dict.fromkeys(("parameters_in_host", "gradients_on_ssd", "activations_on_ssd"), 0.0)
    return LpProblem(shape, machine, terms, limits, 0.0, True, menu=lohan_menu(forward), keep_tiers=MOVING, fixed=fixed)


COPIES = {"copy_in_bytes_per_s": 24e9, "copy_out_bytes_per_s": 24e9}
MOVING = (Tier.HOST, Tier.SSD)  # LoHan keeps nothing on the device


def lohan_menu(forward_s: float) -> KeepMenu:
    """Of a GPT block by operations per byte, in multiples of h: what no gradient reads, products, the rest."""
    kept = ((0, 8.0), (8, 16.0), (18, 1.2))  # (bytes in units of 2 h per token, operations in units of h^2)
    whole, unit = sum(flops for _, flops in kept), 2 * 32 * 1024 * 5120
    sums = itertools.accumulate(kept, lambda a, b: (a[0] + b[0], a[1] + b[1]))
    names = ("free", "products", "everything")
    points = [PolicyPoint(n, b * unit, f / whole * forward_s) for n, (b, f) in zip(names, sums, strict=True)]
    return KeepMenu("gpt", 40, tuple(points))


def scan_s(given: LpProblem, host: float) -> float:
    """The least seconds of a step by LoHan's way (arXiv 2403.06504): keep what saves most seconds for its bytes first, in host
    memory as far as `host` bytes go and then on SSD, and take the amount with the least time. Its formulas are written out
    here, and use no row of the program. Besides the amount, the share of the layers' inputs in host memory is tried."""
    assert given.menu is not None
    shape, machine, points = given.shape, given.machine, (PolicyPoint("none", 0, 0), *given.menu.points)
    held, last = shape.num_layers - 1, shape.layer_elements[-1]  # of the layers, the last one keeps nothing
    p, n = shape.num_elements * 2, shape.num_elements
    best = np.inf
    grid = np.linspace(0, len(points) - 1, 6001)
    lower = np.minimum(grid.astype(int), len(points) - 2)
    share = grid - lower
    bytes_of, saved_of = (np.array([getattr(point, name) for point in points]) for name in ("num_bytes", "saved_s"))
    for inputs in np.linspace(0, 1, 41):
        moved = inputs * shape.num_layers * shape.activation_bytes
        placement = Placement.of(activations_on_host=float(inputs))
        room = host - memory_budget.total_bytes(
            memory_budget.budget(replace(shape, placement=placement), given.terms), Tier.HOST
        )
        room -= IN_TRANSIT * bytes_of.max()  # buffers on the way to SSD
        if room < 0:
            continue
        in_host, on_ssd, late, saved = (np.zeros_like(grid) for _ in range(4))
        left = np.full_like(grid, room)
        for amount, index in ((1 - share, lower), (share, lower + 1)):  # the smaller cells first
            each = held * bytes_of[index]
            fits = np.minimum(amount, np.divide(left, each, out=np.ones_like(grid), where=each > 0))
            left = left - fits * each
            in_host += fits * each
            on_ssd += (amount - fits) * (held - 1) * bytes_of[index]
            late += (amount - fits) * bytes_of[index]  # of the last two layers nothing goes there
            saved += amount * held * saved_of[index]
        kept = in_host + on_ssd + late
        forward = (
            held * shape.forward_s,
            (p + moved) / 24e9,
            (moved + kept) / 24e9,
            p / machine.ssd_read_bytes_per_s,
            on_ssd / machine.ssd_write_bytes_per_s,
        )
        staying = 2 * (shape.pre_elements + 2 * last)
        backward = (
            shape.num_layers * (shape.forward_s + shape.backward_s) - saved,
            n / machine.adam_elements_per_s,
            (p + 2 * moved + kept) / 24e9,
            (4 * n + moved) / 24e9,
            (p - staying + 12 * n + on_ssd) / machine.ssd_read_bytes_per_s,
            14 * n / machine.ssd_write_bytes_per_s,
        )
        seconds = np.maximum.reduce([np.broadcast_to(s, grid.shape) for s in forward])
        seconds = seconds + np.maximum.reduce([np.broadcast_to(s, grid.shape) for s in backward])
        best = min(best, float(seconds.min()))
    return best


@pytest.mark.parametrize("host", [100e9, 150e9, 250e9])
def test_the_program_finds_what_lohans_scan_finds(host: float) -> None:
    given = lohan_case(host)
    found = linear_program.solve(given)
    assert found is not None
    assert found.seconds == pytest.approx(scan_s(given, host * 0.995), rel=1e-4)
    assert sum(share for point, _, share in found.kept if point.num_bytes) > 0.05


# ---- menus, and which cells keep


def test_a_menu_has_no_point_below_the_line_between_two_others() -> None:
    below = PolicyPoint("products", 1e8, 0.015, 1)
    assert concave((EVERYTHING, below, FREE, PRODUCTS)) == (FREE, PRODUCTS, EVERYTHING)
    useless = PolicyPoint("everything", 3e8, 0.042)
    assert concave((FREE, PRODUCTS, useless)) == (FREE, PRODUCTS)
    with pytest.raises(CostsError, match="not concave"):
        KeepMenu("block", 6, (FREE, below, PRODUCTS))


def test_a_long_menu_loses_the_points_that_matter_least() -> None:
    many = [PolicyPoint("products", 1e7 * i, 0.014 + 0.009 * (i**0.5), i) for i in range(1, 10)]
    points = concave((FREE, *many, EVERYTHING))
    few = thinned(points)
    assert len(few) == 6 and set(few) < set(points) and {FREE, EVERYTHING} <= set(few)
    assert concave(few) == few


def test_kinds_of_blocks_have_one_menu_for_one_policy() -> None:
    other = KeepMenu("other", 2, (PolicyPoint("everything", 1e8, 0.01),))
    mean = mean_menu((MENU, other))
    assert mean is not None and mean.num_layers == 8
    assert {p.policy: (p.num_bytes, p.saved_s) for p in mean.points} == {
        "free": (0.0, pytest.approx(6 * 0.014 / 8)),
        "products": (6 * 2e8 / 8, pytest.approx(6 * 0.042 / 8)),
        "everything": ((6 * 6e8 + 2 * 1e8) / 8, pytest.approx((0.3 + 0.02) / 8)),
    }
    low = mean_menu((MENU, KeepMenu("low", 2, (FREE, PRODUCTS))))  # keeps its products where the others keep everything
    point = low and low.point("everything")
    assert point is not None and point.saved_s == pytest.approx((6 * 0.05 + 2 * 0.042) / 8)
    assert point.num_bytes == (6 * 6e8 + 2 * 2e8) / 8
    assert mean_menu((MENU,)) is MENU and mean_menu(()) is None


def test_cells_that_keep_are_spread_over_the_layers_and_the_last_two_stay_off_the_ssd() -> None:
    kept = kept_cells(5, 4, {Tier.HOST: 0.25, Tier.SSD: 0.5})
    assert [sum(1 for cell in kept if cell[0] == layer) for layer in range(5)] == [3, 3, 3, 3, 0]
    assert [sum(tier is Tier.SSD for (own, _), tier in kept.items() if own == layer) for layer in range(4)] == [2, 2, 2, 0]
    share = KeptShare(PRODUCTS, host=0.25, ssd=0.5)
    count = Counter(kept.values())
    assert share.resting_bytes(5, 4) == {tier: count[tier] * PRODUCTS.num_bytes for tier in Tier}
    everywhere = {(layer, m) for layer in range(4) for m in range(4)}
    for tier in Tier:
        for one_memory in (False, True):
            cells = _only(tier).cells(5, 4, one_memory)
            late = Tier.HOST if tier is Tier.SSD else tier
            wanted = {cell: late if cell[0] == 3 else tier for cell in everywhere}
            assert cells == {c: Tier.DEVICE if one_memory and own is Tier.HOST else own for c, own in wanted.items()}
    assert kept_cells(5, 4, {}) == {} and len(kept_cells(5, 4, {Tier.DEVICE: 1.0})) == 16
    assert kept_cells(1, 4, {Tier.DEVICE: 1.0}) == {}
    assert set(share.cells(5, 4, one_memory=True).values()) == {Tier.DEVICE, Tier.SSD}


def _only(tier: Tier) -> KeptShare:
    return KeptShare(PRODUCTS, **{tier.value: 1.0})


def test_a_plan_rounds_to_whole_cells_and_never_up() -> None:
    share = rounded(KeptShare(PRODUCTS, device=0.3, ssd=0.49999), 5, 4)
    assert (share.device, share.ssd) == (4 / 16, 7 / 16)
    with pytest.raises(CostsError, match="shares add up to 1"):
        KeptShare(PRODUCTS, device=0.7, ssd=0.7)
    with pytest.raises(CostsError, match="keeps no bytes"):
        PolicyPoint("free", 100, 0.1)
