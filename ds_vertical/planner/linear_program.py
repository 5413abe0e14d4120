"""Where things rest, and how long the two sweeps of a step take at least: GreedySnake's linear program (arXiv 2512.17570, its
auto-configuration) for this schedule, solved with SciPy's HiGHS.

For one micro-batch size, one M and one share alpha of delayed steps, per rank and over all layers:

    variables   a_h, a_s   shares of the micro-batches whose activations rest in host memory, on SSD
                p_h        share of the parameters that rests in host memory
                g_s        share of the waiting gradients that waits on SSD
                T_f, T_b   seconds of the forward and of the backward sweep
    least       T_f + T_b, and a little for every byte that moves
    subject to, for each sweep, T >= the busy seconds of each resource

    resource    forward                                  backward
    compute     M t_f                                    M (t_f + t_b), head, prefix, norm
    CPU Adam    alpha n / R                              (1 - alpha) n / R
    copies in   p + M A a                                p + 2 M A a
    copies out  M A a                                    g + M A a
    SSD read    (1 - alpha) p' + alpha (s + g w) + M A a_s   p' + (1 - alpha) s + 2 M A a_s
    SSD write   alpha (s + p') + M A a_s                 (1 - alpha) (s + p') + g w + M A a_s

n elements of the rank, p, g, s their bytes as parameters, gradients and state, p' = p (1 - p_h), A the bytes that pass between
two layers for one micro-batch, times the layers, a = a_h + a_s, w = alpha g_s. Where steps wait for the norm, everything
waits. Where host and device are one memory there are no copies, and CPU Adam takes its share of the cores that compute. Where
reads and writes slow each other down, both together are a resource too. Memory per tier is that of `memory_budget`, linear in
shares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, assert_never

from ds_vertical.planner import memory_budget
from ds_vertical.planner.machine import Machine
from ds_vertical.planner.model_shape import ModelShape
from ds_vertical.types import RESTING_PLACES, Placement, TensorKind, Tier, TierBytes, per_tier

# The shares that the program chooses; those of the state are tried in turn by `search`.
_CHOSEN: Final[Mapping[str, tuple[TensorKind, Tier]]] = {
    "activations_on_host": (TensorKind.ACTIVATIONS, Tier.HOST),
    "activations_on_ssd": (TensorKind.ACTIVATIONS, Tier.SSD),
    "parameters_in_host": (TensorKind.PARAMETERS, Tier.HOST),
    "gradients_on_ssd": (TensorKind.GRADIENTS, Tier.SSD),
}
_SHARES: Final[tuple[str, ...]] = tuple(_CHOSEN)
VARIABLES: Final[tuple[str, ...]] = (*_SHARES, "forward_s", "backward_s")
_PREFERENCE: Final = 1e-3  # of the busy seconds of what moves: among equals, the plan that moves least
_DISTANCES: Final = per_tier({Tier.DEVICE: 0.0, Tier.HOST: 0.5, Tier.SSD: 1.0})  # of that, by the tier moved to
_SPARE: Final = 0.005  # of a tier: formulas round pieces and micro-batches up, the program does not
Row = dict[str, float]


@dataclass(frozen=True)
class Constraint:
    """sum(row[name] x variable) <= limit; `what` it is about, `scale` of its numbers."""

    what: str
    row: Row
    limit: float
    scale: float = 1.0


@dataclass(frozen=True)
class Solution:
    """Shares in [0, 1], seconds; `binding`: the constraints that hold with equality and cost time, the dearest first."""

    values: dict[str, float]
    seconds: float
    binding: tuple[str, ...]

    def placement(self, state_on_ssd: float) -> Placement:
        """The shares as a placement."""
        values = {name: min(1.0, max(0.0, self.values[name])) for name in _SHARES}
        host, ssd = values["activations_on_host"], values["activations_on_ssd"]
        ssd = min(ssd, 1 - host)
        return Placement.of(
            parameters_on_ssd=1 - values["parameters_in_host"],
            state_on_ssd=state_on_ssd,
            gradients_on_ssd=values["gradients_on_ssd"],
            activations_on_host=host,
            activations_on_ssd=ssd,
        )


@dataclass(frozen=True)
class LpProblem:
    """What is fixed while the program is solved: no settings, but the terms of its rows.

    `limits`: bytes per tier on this rank's part of the machine. `early`: the rest beside the delayed share is stepped in the
    backward; otherwise every gradient waits for the norm, and all steps come in the next forward.
    """

    shape: ModelShape
    machine: Machine
    terms: memory_budget.BudgetTerms
    limits: TierBytes
    delay: float
    early: bool
    further: tuple[memory_budget.BudgetItem, ...] = ()

    @property
    def forward_share(self) -> float:
        """Of all optimizer steps, those taken in the next forward."""
        return self.delay if self.early else 1.0


def constraints(case: LpProblem) -> tuple[Constraint, ...]:
    """All rows: time of both sweeps on every resource, memory of every tier, shares that cannot exceed one."""
    rows = [*_sweep_rows(case, "forward_s"), *_sweep_rows(case, "backward_s"), *_memory_rows(case, _SPARE)]
    together: Row = {name: 1.0 for name, (kind, _) in _CHOSEN.items() if kind is TensorKind.ACTIVATIONS}
    return (*rows, Constraint("activations", together, 1.0))


def solve(case: LpProblem) -> Solution | None:
    """The best shares, or None where no shares fit into memory (`shortage` says by how much)."""
    from scipy.optimize import linprog

    rows = constraints(case)
    cost: dict[str, float] = dict.fromkeys(VARIABLES[4:], 1.0)
    moved = max(sum(_read_write(case, sweep)[0].get(name, 0.0) for sweep in VARIABLES[4:]) for name in _SHARES) or 1.0
    for share, (kind, tier) in _CHOSEN.items():
        if tier is not RESTING_PLACES[kind][0]:
            cost[share] = _PREFERENCE * moved / case.machine.ssd_read_bytes_per_s * _DISTANCES[tier]
    matrix = [[row.row.get(name, 0.0) / row.scale for name in VARIABLES] for row in rows]
    limits = [row.limit / row.scale for row in rows]
    most: dict[str, float | None] = {
        **dict.fromkeys(_SHARES, 1.0),
        "parameters_in_host": 1.0 if case.shape.in_files(TensorKind.PARAMETERS) else 0.0,
        "gradients_on_ssd": case.shape.in_files(TensorKind.STATE),
    }
    bounds = [(0.0, most.get(name)) for name in VARIABLES]
    found: Any = linprog([cost.get(name, 0.0) for name in VARIABLES], matrix, limits, bounds=bounds, method="highs")
    if found.status != 0:
        return None
    values: dict[str, float] = dict(zip(VARIABLES, map(float, found.x), strict=True))
    prices = sorted(zip((-m for m in found.ineqlin.marginals), rows, strict=True), key=lambda pair: -pair[0])
    binding = tuple(row.what for price, row in prices if price > 1e-9)
    return Solution(values, values["forward_s"] + values["backward_s"], binding)


def shortage(case: LpProblem) -> dict[str, float]:
    """Bytes that each tier lacks at the very least, with whatever shares suit it best; tiers that suffice are left out."""
    from scipy.optimize import linprog

    found: dict[str, float] = {}
    activations = [int(kind is TensorKind.ACTIVATIONS) for kind, _ in _CHOSEN.values()]
    for row in _memory_rows(case):
        bounds = [(0.0, 1.0)] * len(_SHARES)
        needed = [row.row.get(name, 0.0) / row.scale for name in _SHARES]
        best: Any = linprog(needed, [activations], [1.0], bounds=bounds, method="highs")
        lacking = best.fun * row.scale - row.limit
        if lacking > 0:
            found[row.what] = lacking
    return found


# ---- rows


def _sweep_rows(case: LpProblem, sweep: str) -> Iterator[Constraint]:
    machine = case.machine
    compute, adam = _compute_s(case, sweep), _adam_s(case, sweep)
    if machine.one_memory:
        yield _time("host cores", sweep, {}, compute + adam * machine.least_adam_share)
    else:
        yield _time("compute", sweep, {}, compute)
        yield _time("CPU Adam", sweep, {}, adam)
        yield from _copy_rows(case, sweep)
    read, write = _read_write(case, sweep)
    rates = machine.ssd_read_bytes_per_s, machine.ssd_write_bytes_per_s
    seconds = [{name: value / rate for name, value in row.items()} for row, rate in zip((read, write), rates, strict=True)]
    for what, row in zip(("SSD read", "SSD write"), seconds, strict=True):
        yield _time(what, sweep, {n: v for n, v in row.items() if n}, row.get("", 0.0))
    gain = machine.read_together + machine.write_together - 1
    if min(machine.read_together, machine.write_together) < 1:
        # What is left to do alone after one direction has ended: see [Note: bound] in `bound`.
        for one, share in ((0, machine.read_together), (1, machine.write_together)):
            both = {n: seconds[0].get(n, 0.0) + seconds[1].get(n, 0.0) for n in {*seconds[0], *seconds[1]}}
            if gain > 0:
                both = {n: v - gain / share * seconds[one].get(n, 0.0) for n, v in both.items()}
            yield _time("SSD", sweep, {n: v for n, v in both.items() if n}, both.get("", 0.0))


def _time(what: str, sweep: str, row: Mapping[str, float], fixed: float) -> Constraint:
    """sweep >= fixed + row: as `row - sweep <= -fixed`."""
    return Constraint(f"{what} in {sweep.removesuffix('_s')}", {**row, sweep: -1.0}, -fixed, max(fixed, 1e-6))


def _compute_s(case: LpProblem, sweep: str) -> float:
    shape, count = case.shape, case.terms.num_micro_batches
    layers = sum(shape.layer_elements) / (max(shape.layer_elements) or 1)  # smaller layers cost in proportion
    last = shape.layer_elements[-1] / (max(shape.layer_elements) or 1)
    again = 0.0 if shape.recompute_last else last
    if sweep == "forward_s":
        return count * ((layers - again) * shape.forward_s + shape.pre_forward_s)
    stepped = shape.stepped_elements / shape.num_shards
    norm = stepped / case.machine.norm_elements_per_s if case.machine.norm_elements_per_s else 0.0
    return count * (layers * (shape.forward_s + shape.backward_s) + shape.head_s + shape.pre_backward_s) + norm


def _adam_s(case: LpProblem, sweep: str) -> float:
    elements = _share(case, sweep) * case.shape.stepped_elements / case.shape.num_shards
    return case.machine.adam_s(elements, elements * case.shape.written_bytes)


def _share(case: LpProblem, sweep: str) -> float:
    """Of all steps, those taken in this sweep."""
    return case.forward_share if sweep == "forward_s" else 1 - case.forward_share


def _copy_rows(case: LpProblem, sweep: str) -> Iterator[Constraint]:
    shape, machine = case.shape, case.machine
    forward = sweep == "forward_s"
    rank = shape.num_elements / shape.num_shards
    gradients = shape.stepped_elements / shape.num_shards * shape.gradient_bytes
    moved = _activation_bytes(case)
    loads = 1.0 if forward else 2.0
    for what, rate, fixed, times in (
        ("copies in", machine.copy_in_bytes_per_s, rank * shape.param_bytes, loads),
        ("copies out", machine.copy_out_bytes_per_s, 0.0 if forward else gradients, 1.0),
    ):
        assert rate is not None  # a machine with copies has rates for them
        each = times * moved / rate
        yield _time(what, sweep, {"activations_on_host": each, "activations_on_ssd": each}, fixed / rate)


def _activation_bytes(case: LpProblem) -> float:
    return float(case.terms.num_micro_batches * case.shape.num_layers * case.shape.activation_bytes)


def _read_write(case: LpProblem, sweep: str) -> tuple[Row, Row]:
    """Bytes from and to SSD in a sweep, per variable; those that no variable changes under ""."""
    shape = case.shape
    rank, stepped = shape.num_elements / shape.num_shards, shape.stepped_elements / shape.num_shards
    each = shape.param_bytes * (1.0 if shape.in_files(TensorKind.PARAMETERS) else 0.0)
    parameters, written = rank * each, stepped * each
    state, gradients = stepped * shape.state_bytes * shape.in_files(TensorKind.STATE), stepped * shape.gradient_bytes
    steps, activations, waiting = _share(case, sweep), _activation_bytes(case), case.terms.held_share
    forward = sweep == "forward_s"
    fetched = parameters * (1 - case.forward_share if forward else 1 - _kept(case))
    read = {
        "": fetched + steps * state,
        "parameters_in_host": -fetched,
        "activations_on_ssd": activations * (1.0 if forward else 2.0),
        "gradients_on_ssd": waiting * gradients if forward else 0.0,
    }
    write = {
        "": steps * (state + written),
        "parameters_in_host": -steps * written,
        "activations_on_ssd": activations,
        "gradients_on_ssd": 0.0 if forward else waiting * gradients,
    }
    return read, write


def _kept(case: LpProblem) -> float:
    """The share of the parameters that stays at the turn: the last layers in the window, and what is outside the layers."""
    shape = case.shape
    count = 1 + (case.terms.window + 1) // 2
    return (shape.pre_elements + sum(shape.layer_elements[-count:])) / shape.num_elements


def _memory_rows(case: LpProblem, spare: float = 0.0) -> Iterator[Constraint]:
    """Bytes per tier as `memory_budget.budget` has them: at no share, and what each share adds. `spare`: share of a tier left
    free."""
    nothing = Placement.of(
        parameters_on_ssd=1.0 if case.shape.in_files(TensorKind.PARAMETERS) else 0.0,
        state_on_ssd=case.shape.in_files(TensorKind.STATE),
    )
    each = {name: _with_everything(nothing, kind, tier) for name, (kind, tier) in _CHOSEN.items()}
    for tier in Tier:
        limit = case.limits[tier]
        if limit is None or (tier is Tier.DEVICE and case.machine.one_memory):
            continue
        base = tier_bytes(case, nothing, tier)
        row = {name: tier_bytes(case, placement, tier) - base for name, placement in each.items()}
        yield Constraint(f"{tier} memory", row, limit * (1 - spare) - base, max(1.0, abs(limit)))


def _with_everything(placement: Placement, kind: TensorKind, tier: Tier) -> Placement:
    """`placement` with all of `kind` in `tier`."""
    return placement.with_shares(kind, {} if tier is RESTING_PLACES[kind][0] else {tier: 1.0})


def tier_bytes(problem: LpProblem, placement: Placement, tier: Tier) -> float:
    """Bytes in a tier with things resting as `placement` says."""
    shape = replace(problem.shape, placement=placement)
    match tier:
        case Tier.DEVICE | Tier.HOST:
            return memory_budget.total_bytes(memory_budget.budget(shape, problem.terms, problem.further), tier)
        case Tier.SSD:
            stepped, frozen = shape.stepped_elements, shape.num_elements - shape.stepped_elements
            gradients = problem.terms.held_share * shape.gradient_bytes * shape.in_files(TensorKind.GRADIENTS)
            files = stepped * (shape.written_bytes * shape.generations + gradients)
            files = (files + frozen * shape.param_bytes * shape.in_files(TensorKind.PARAMETERS)) / shape.num_shards
            return files + _ssd_activations(problem) * shape.in_files(TensorKind.ACTIVATIONS)
    assert_never(tier)


def _ssd_activations(case: LpProblem) -> float:
    """Inputs of all layers, and the gradients between two."""
    shape, count = case.shape, case.terms.num_micro_batches
    return float(count * (shape.num_layers + 2) * shape.activation_bytes)
