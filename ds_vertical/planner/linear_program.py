"""Where things rest, and how long the two sweeps of a step take at least: GreedySnake's linear program (arXiv 2512.17570, its
auto-configuration) for this schedule, solved with SciPy's HiGHS.

For one micro-batch size, one M and one share alpha of delayed steps, per rank and over all layers:

    variables   a_h, a_s   shares of the micro-batches whose activations rest in host memory, on SSD
                p_h        share of the parameters that rests in host memory
                g_s        share of the waiting gradients that waits on SSD
                y_l,t      share of the C = M (L - 1) cells that keep, by policy l, what rests in tier t: see `kept_activations`
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
    links       the hops of all FETCHes                  those that come again, and of all gradients (`network`)

Each y adds, with A_l bytes and S_l saved seconds of a cell:

    compute     backward     - C S_l y_l,t
    copies out  forward      + C A_l y_l,t for host and SSD; in the backward as many copies in
    SSD write   forward      + C A_l y_l,s; in the backward as much SSD read
    memory      of tier t    + C A_l y_l,t, and buffers where anything moves; of y_l,s the last layer's part is in host memory

n elements of the rank, p, g, s their bytes as parameters, gradients and state, p' = p (1 - p_h), A the bytes that pass between
two layers for one micro-batch, times the layers, a = a_h + a_s, w = alpha g_s. Where steps wait for the norm, everything
waits; and so does what has its state in memory: s is that of the share q in files, and for CPU Adam, parameters and w
1 - (1 - alpha) q stands for alpha. Where host and device are one memory there are no copies, and CPU Adam takes its share of
the cores that compute. Where reads and writes slow each other down, both together are a resource too. Memory per tier is that
of `memory_budget`, linear in shares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

from ds_vertical.planner import memory_budget
from ds_vertical.planner.budget.resting import CHOSEN, IN_HOST, Row, resting_bytes, tier_totals
from ds_vertical.planner.kept_activations import KeepMenu, KeptShare, PolicyPoint, buffer_bytes, num_cells, rounded, tier_shares
from ds_vertical.planner.machine import Machine
from ds_vertical.planner.model_shape import ModelShape, outside_elements, state_read, state_written
from ds_vertical.planner.network import LINKS, seconds_of
from ds_vertical.types import RESTING_PLACES, Placement, TensorKind, Tier, TierBytes, per_tier

_SHARES: Final[tuple[str, ...]] = tuple(CHOSEN)
_SWEEPS: Final[tuple[str, ...]] = ("forward_s", "backward_s")
_PREFERENCE: Final = 1e-3  # of the busy seconds of what moves: among equals, the plan that moves least
_DISTANCES: Final = per_tier({Tier.DEVICE: 0.0, Tier.HOST: 0.5, Tier.SSD: 1.0})  # of that, by the tier moved to
SPARE: Final = 0.005  # of a tier: formulas round pieces and micro-batches up, the program does not
_NEARLY_NONE: Final = 1e-9  # a share that is none
_NEARLY_ALL: Final = 1 - 1e-6  # a share that is all
_TOLERANCE: Final = 1e-6  # of a row's scale: what exceeds its limit by more does so for HiGHS, too, which takes 1e-7
_LEAST_COST: Final = 1e-3  # of that, for what is kept where it is made, or left out for no bytes: nothing is done for no gain


@dataclass(frozen=True)
class Constraint:
    """sum(row[name] x variable) <= limit; `what` it is about, `scale` of its numbers."""

    what: str
    row: Row
    limit: float
    scale: float = 1.0


@dataclass(frozen=True)
class Solution:
    """Shares in [0, 1], seconds; `binding`: the constraints that hold with equality and cost time, the dearest first; `kept`:
    the shares of the cells that follow a policy, and where what they keep rests."""

    values: dict[str, float]
    seconds: float
    binding: tuple[str, ...]
    kept: tuple[tuple[PolicyPoint, Tier, float], ...] = ()

    def placement(self, state_on_ssd: float) -> Placement:
        """The shares as a placement."""
        values = {name: min(1.0, max(0.0, self.values[name])) for name in _SHARES}
        host, ssd = values["activations_on_host"], values["activations_on_ssd"]
        ssd = min(ssd, 1 - host)
        return Placement.of(
            parameters_on_ssd=0.0 if values[IN_HOST] > _NEARLY_ALL else 1 - values[IN_HOST],
            state_on_ssd=state_on_ssd,
            gradients_on_ssd=values["gradients_on_ssd"],
            activations_on_host=host,
            activations_on_ssd=ssd,
        )

    def kept_share(self, case: LpProblem) -> KeptShare | None:
        """What is kept, in whole cells; None where that is nothing. Of several policies that of most cells."""
        shares: dict[PolicyPoint, dict[Tier, float]] = {}
        for point, tier, share in self.kept:
            shares.setdefault(point, {})[tier] = min(1.0, share)
        if not shares:
            return None
        point, own = max(shares.items(), key=lambda entry: sum(entry[1].values()))
        kept = KeptShare(point, *(own.get(tier, 0.0) for tier in Tier))
        kept = rounded(kept, case.shape.num_layers, case.terms.num_micro_batches)
        return kept if kept.total else None


@dataclass(frozen=True)
class LpProblem:
    """What is fixed while the program is solved: no settings, but the terms of its rows.

    `limits`: bytes per tier on this rank's part of the machine. `early`: the rest beside the delayed share is stepped in the
    backward; otherwise every gradient waits for the norm, and all steps come in the next forward. `menu`: what a layer may keep
    of its forward; `keep_tiers`: where; `keep_share`: of the cells, those that keep (None: as many as pays). `fixed`: shares
    that are given, by name. `setup_bytes`: of host memory, while stock's optimizer is set up; `build_bytes`: while the model is
    built, where any parameters are to be on SSD.
    """

    shape: ModelShape
    machine: Machine
    terms: memory_budget.BudgetTerms
    limits: TierBytes
    delay: float
    early: bool
    further: tuple[memory_budget.BudgetItem, ...] = ()
    menu: KeepMenu | None = None
    keep_tiers: tuple[Tier, ...] = tuple(Tier)
    keep_share: float | None = None
    fixed: Mapping[str, float] = field(default_factory=dict)
    setup_bytes: float = 0.0
    build_bytes: float = 0.0

    @cached_property
    def kept(self) -> Mapping[str, tuple[PolicyPoint, Tier]]:
        """What the variables of kept activations stand for, by their names, such as products_kept_on_host. Where host and
        device are one memory, the device stands for it; what keeps no bytes is counted there."""
        points = self.menu.points if self.menu is not None and self.shape.num_layers > 1 else ()
        tiers = [tier for tier in self.keep_tiers if not (tier is Tier.HOST and self.machine.one_memory)]
        pairs = ((point, tier) for point in points for tier in (tiers if point.num_bytes else (Tier.DEVICE,)))
        return {f"{point.name}_kept_on_{tier}": (point, tier) for point, tier in pairs}

    @property
    def variables(self) -> tuple[str, ...]:
        """All names, in order."""
        return (*_SHARES, *self.kept, *_SWEEPS)

    @property
    def num_cells(self) -> int:
        """Those that can keep."""
        return num_cells(self.shape.num_layers, self.terms.num_micro_batches)

    @property
    def forward_share(self) -> float:
        """Of all optimizer steps, those taken in the next forward: what has its state in memory is not stepped early."""
        return memory_budget.waiting_share(self.delay, self.shape.in_files(TensorKind.STATE)) if self.early else 1.0


def constraints(case: LpProblem) -> tuple[Constraint, ...]:
    """All rows: time of both sweeps on every resource, memory of every tier, shares that cannot exceed one."""
    rows = [*_sweep_rows(case, "forward_s"), *_sweep_rows(case, "backward_s"), *_memory_rows(case, SPARE)]
    together: Row = {name: 1.0 for name, (kind, _) in CHOSEN.items() if kind is TensorKind.ACTIVATIONS}
    rows.append(Constraint("activations", together, 1.0))
    if case.kept:
        most = 1.0 if case.keep_share is None else case.keep_share
        rows.append(Constraint("kept activations", dict.fromkeys(case.kept, 1.0), most))
    if case.keep_share is not None:
        rows.append(Constraint("share that is kept", dict.fromkeys(case.kept, -1.0), -case.keep_share))
    return tuple(rows)


def solve(case: LpProblem) -> Solution | None:
    """The best shares, or None where no shares fit into memory (`shortage` says by how much).

    Buffers for what is kept take memory as soon as any of it moves, which no row can say: the program is solved with them, and
    without anything that moves. Buffers for parameters take it until all parameters are in host memory: where that is scarce
    the program is solved with that, too."""
    found = [_solved(case)]
    if any(tier is not Tier.DEVICE and name not in case.fixed for name, (_, tier) in case.kept.items()):
        found.append(_solved(replace(case, keep_tiers=tuple(tier for tier in case.keep_tiers if tier is Tier.DEVICE))))
    best = _fastest(found)
    in_host = _all_in_host(case)
    if in_host is not None and (best is None or any(what.startswith(f"{Tier.HOST} memory") for what in best.binding)):
        best = _fastest([best, solve(in_host)])
    return best


def _fastest(found: Sequence[Solution | None]) -> Solution | None:
    return min((each for each in found if each is not None), key=lambda solution: solution.seconds, default=None)


def _all_in_host(case: LpProblem) -> LpProblem | None:
    """The case with all parameters in host memory; None where that is settled."""
    if IN_HOST in case.fixed or not case.shape.in_files(TensorKind.PARAMETERS):
        return None
    return replace(case, fixed={**case.fixed, IN_HOST: 1.0})


def _solved(case: LpProblem) -> Solution | None:
    from scipy.optimize import linprog

    rows, names, bounds = constraints(case), case.variables, _bounds(case, case.variables)
    by_name = dict(zip(names, bounds, strict=True))
    if any(_is_out_of_reach(row, by_name) for row in rows):
        return None
    cost = _costs(case)
    matrix = [[row.row.get(name, 0.0) / row.scale for name in names] for row in rows]
    limits = [row.limit / row.scale for row in rows]
    found: Any = linprog([cost.get(name, 0.0) for name in names], matrix, limits, bounds=bounds, method="highs")
    if found.status != 0:
        return None
    values: dict[str, float] = dict(zip(names, map(float, found.x), strict=True))
    prices = sorted(zip((-m for m in found.ineqlin.marginals), rows, strict=True), key=lambda pair: -pair[0])
    binding = tuple(row.what for price, row in prices if price > 1e-9)
    kept = tuple((point, tier, values[name]) for name, (point, tier) in case.kept.items() if values[name] > _NEARLY_NONE)
    return Solution(values, sum(values[sweep] for sweep in _SWEEPS), binding, kept)


def _is_out_of_reach(row: Constraint, bounds: Mapping[str, tuple[float, float | None]]) -> bool:
    """Whether no values within the bounds keep to a row, whatever the others say. False for one with a variable that has no
    most, such as seconds."""
    least = 0.0
    for name, each in row.row.items():
        low, high = bounds[name]
        if high is None:
            return False
        least += min(each * low, each * high)
    return least - row.limit > _TOLERANCE * row.scale


def _bounds(case: LpProblem, names: Sequence[str]) -> list[tuple[float, float | None]]:
    """Least and most of each variable; seconds have no most."""
    most: dict[str, float | None] = {
        **dict.fromkeys((*_SHARES, *case.kept), 1.0),
        # a share of them is one of those that the optimizer steps: DeepSpeed leaves frozen ones on SSD
        IN_HOST: case.shape.stepped_elements / case.shape.num_elements if case.shape.in_files(TensorKind.PARAMETERS) else 0.0,
        "gradients_on_ssd": case.shape.in_files(TensorKind.STATE),
        **case.fixed,
    }
    return [(case.fixed.get(name, 0.0), most.get(name)) for name in names]


def _costs(case: LpProblem) -> Row:
    """The objective: seconds, and a little for what moves."""
    cost: Row = dict.fromkeys(_SWEEPS, 1.0)
    rows = [_read_write(case, sweep)[0] for sweep in _SWEEPS]
    moved = max(sum(row.get(name, 0.0) for row in rows) for name in _SHARES) or 1.0
    each = _PREFERENCE / case.machine.ssd_read_bytes_per_s
    for share, (kind, tier) in CHOSEN.items():
        if tier is not RESTING_PLACES[kind][0]:
            cost[share] = each * moved * _DISTANCES[tier]
    for name, (point, tier) in case.kept.items():
        moved_bytes = case.num_cells * point.num_bytes * _DISTANCES[tier]
        cost[name] = each * moved_bytes + _PREFERENCE * _LEAST_COST * case.num_cells * point.saved_s
    return cost


def is_short(case: LpProblem) -> bool:
    """Whether a tier lacks bytes whatever the shares, as `shortage` has it."""
    bounds = dict(zip(_SHARES, _bounds(case, _SHARES), strict=True))
    rows = _memory_rows(replace(case, menu=None), SPARE)
    return any(_is_out_of_reach(row, bounds) for row in rows) or bool(shortage(case)[0])


def shortage(case: LpProblem) -> tuple[dict[Tier, float], Placement]:
    """Bytes that the tiers lack, together as few of each tier's size as can be, with whatever shares suit that best, and what
    rests where with these; tiers that suffice are left out."""
    found = _shortage(case)
    in_host = _all_in_host(case) if Tier.SSD in found[1] else None  # otherwise parameters on SSD take less
    return (found if in_host is None else min(found, _shortage(in_host), key=lambda entry: entry[0]))[1:]


def _shortage(case: LpProblem) -> tuple[float, dict[Tier, float], Placement]:
    """Of each tier's size what the tiers lack, together, the bytes, and what rests where."""
    from scipy.optimize import linprog

    rows = list(_memory_rows(replace(case, menu=None), SPARE))
    none = [0.0] * len(rows)
    matrix = [[*(row.row.get(name, 0.0) / row.scale for name in _SHARES), *none] for row in rows]
    for index, row in enumerate(matrix):
        row[len(_SHARES) + index] = -1.0
    matrix.append([*(float(kind is TensorKind.ACTIVATIONS) for kind, _ in CHOSEN.values()), *none])
    limits = [*(row.limit / row.scale for row in rows), 1.0]
    bounds = [*_bounds(case, _SHARES), *([(0.0, None)] * len(rows))]
    best: Any = linprog([0.0] * len(_SHARES) + [1.0] * len(rows), matrix, limits, bounds=bounds, method="highs")
    lacking = zip(rows, best.x[len(_SHARES) :], strict=True)
    short = sorted((float(part) * row.scale / (1 - SPARE), _tier_of(row)) for row, part in lacking if part > 1e-9)
    values = dict(zip(_SHARES, map(float, best.x[: len(_SHARES)]), strict=True))
    placement = Solution(values, 0.0, ()).placement(case.shape.in_files(TensorKind.STATE))
    return float(best.fun), {tier: num_bytes for num_bytes, tier in short}, placement  # of a tier's rows that which lacks most


def _tier_of(row: Constraint) -> Tier:
    """The tier that a row of memory is about."""
    return Tier(row.what.split()[0])


# ---- rows


def _sweep_rows(case: LpProblem, sweep: str) -> Iterator[Constraint]:
    machine = case.machine
    compute, adam, saved = _compute_s(case, sweep), _adam_s(case, sweep), _saved_s(case, sweep)
    if machine.one_memory:
        yield _time("host cores", sweep, saved, compute + adam * machine.least_adam_share)
    else:
        yield _time("compute", sweep, saved, compute)
        yield _time("CPU Adam", sweep, {}, adam)
        yield from _copy_rows(case, sweep)
    yield from _link_rows(case, sweep)
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


def _saved_s(case: LpProblem, sweep: str) -> Row:
    """What kept activations take from the backward's computation; smaller layers save in proportion."""
    if sweep == "forward_s":
        return {}
    layers = case.shape.layer_elements[:-1]
    scale = sum(layers) / (max(case.shape.layer_elements) * len(layers)) if case.kept and max(layers) else 0.0
    return {name: -case.num_cells * scale * point.saved_s for name, (point, _) in case.kept.items()}


def _adam_s(case: LpProblem, sweep: str) -> float:
    shape, stepped = case.shape, case.shape.stepped_elements / case.shape.num_shards
    parameters = shape.param_bytes * shape.in_files(TensorKind.PARAMETERS)
    elements = _share(case, sweep) * stepped
    return case.machine.adam_s(elements, elements * parameters + stepped * _state_bytes(case, sweep))


def _share(case: LpProblem, sweep: str) -> float:
    """Of all steps, those taken in this sweep."""
    return case.forward_share if sweep == "forward_s" else 1 - case.forward_share


def _state_bytes(case: LpProblem, sweep: str) -> float:
    """Of an element that is stepped, the bytes of state that are written in this sweep, and read but for `_beside_bytes`."""
    forward = case.delay if case.early else 1.0
    steps = forward if sweep == "forward_s" else 1 - forward
    return steps * state_written(case.shape) * case.shape.in_files(TensorKind.STATE)


def _beside_bytes(case: LpProblem, sweep: str) -> float:
    """Of an element that is stepped, the bytes that this sweep reads beside those: what completes a compressed master."""
    shape, forward = case.shape, case.delay if case.early else 1.0
    each = state_read(shape, early=False) - state_written(shape)
    return forward * each * shape.in_files(TensorKind.STATE) if sweep == "forward_s" else 0.0


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
        row: Row = dict.fromkeys(("activations_on_host", "activations_on_ssd"), times * moved / rate)
        if (what == "copies out") is forward:
            row |= {name: value / rate for name, value in _kept_bytes(case, Tier.HOST, Tier.SSD).items()}
        yield _time(what, sweep, row, fixed / rate)


def _link_rows(case: LpProblem, sweep: str) -> Iterator[Constraint]:
    """What collectives take of each link; see `network`."""
    shape, network = case.shape, case.shape.network
    if network is None:
        return
    again = sweep != "forward_s"
    hops = network.sweep(shape.num_elements * (1 - _staying(case) * again), shape.param_bytes, again)
    if again:
        gradients = shape.stepped_elements, shape.gradient_bytes
        hops += network.reduce(*gradients) + (network.cross(*gradients) if network.levels else ())
    for lane, name in LINKS.items():
        seconds = sum(seconds_of(hop, case.machine) for hop in hops if hop.lane == lane)
        yield _time(name, sweep, {}, seconds)


def _kept_bytes(case: LpProblem, *tiers: Tier) -> Row:
    """Bytes that all cells would keep in `tiers`, by the variables for it."""
    found: Row = {}
    by_tier = {tier: tier_shares(case.shape.num_layers, {tier: 1.0}) for tier in {tier for _, tier in case.kept.values()}}
    for name, (point, tier) in case.kept.items():
        shares = by_tier[tier]
        if num_bytes := case.num_cells * point.num_bytes * sum(shares[own] for own in tiers):
            found[name] = num_bytes
    return found


def _activation_bytes(case: LpProblem) -> float:
    return float(case.terms.num_micro_batches * case.shape.num_layers * case.shape.activation_bytes)


def _read_write(case: LpProblem, sweep: str) -> tuple[Row, Row]:
    """Bytes from and to SSD in a sweep, per variable; those that no variable changes under ""."""
    shape = case.shape
    rank, stepped = shape.num_elements / shape.num_shards, shape.stepped_elements / shape.num_shards
    each = shape.param_bytes * (1.0 if shape.in_files(TensorKind.PARAMETERS) else 0.0)
    parameters, written = rank * each, stepped * each
    state, gradients = stepped * _state_bytes(case, sweep), stepped * shape.gradient_bytes
    steps, activations, waiting = _share(case, sweep), _activation_bytes(case), case.terms.held_share
    forward = sweep == "forward_s"
    copied = shape.network.copy_share if shape.network is not None and shape.network.levels else 0.0
    fetched = parameters * (1 - case.forward_share if forward else (1 - _staying(case)) * (1 - copied))
    read = {
        "": fetched + state + stepped * _beside_bytes(case, sweep),
        "parameters_in_host": -fetched,
        "activations_on_ssd": activations * (1.0 if forward else 2.0),
        "gradients_on_ssd": waiting * gradients if forward else 0.0,
    }
    write = {
        "": state + steps * written,
        "parameters_in_host": -steps * written,
        "activations_on_ssd": activations,
        "gradients_on_ssd": 0.0 if forward else waiting * gradients,
    }
    (write if forward else read).update(_kept_bytes(case, Tier.SSD))
    return read, write


def _staying(case: LpProblem) -> float:
    """The share of the parameters that stays at the turn: the last layers in the window, and what is outside the layers."""
    shape = case.shape
    count = 1 + (case.terms.window + 1) // 2
    return (outside_elements(shape) + sum(shape.layer_elements[-count:])) / shape.num_elements


def _memory_rows(case: LpProblem, spare: float = 0.0) -> Iterator[Constraint]:
    """Bytes per tier as `memory_budget.budget` has them: at no share, and what each share adds. `spare`: share of a tier left
    free."""
    settled = case.fixed.get(IN_HOST) == 1.0
    for tier, (base, each) in resting_bytes(case.shape, case.terms, case.further, settled).items():
        limit = case.limits[tier]
        if limit is None or (tier is Tier.DEVICE and case.machine.one_memory):
            continue
        row = each | _kept_bytes(case, *_counted_in(tier, case.machine.one_memory))
        base += _kept_buffers(case, tier)
        yield Constraint(f"{tier} memory", row, limit * (1 - spare) - base, max(1.0, abs(limit)))
        ahead = ahead_bytes(case, case.shape.in_files(TensorKind.PARAMETERS) > 0 and not settled)
        if tier is Tier.HOST and ahead:
            yield Constraint(f"{tier} memory at set-up", {}, limit * (1 - spare) - ahead, max(1.0, abs(limit)))


def _counted_in(tier: Tier, one_memory: bool) -> tuple[Tier, ...]:
    """The tiers whose memory is that of `tier`."""
    return (Tier.DEVICE, Tier.HOST) if one_memory and tier is Tier.HOST else (tier,)


def _kept_buffers(case: LpProblem, tier: Tier) -> float:
    """Bytes of a tier for the buffers of what is kept, for the largest of what may move."""
    largest = max((p.num_bytes for p, where in case.kept.values() if where is not Tier.DEVICE), default=0.0)
    tiers = {where for _, where in case.kept.values()}
    return sum(buffer_bytes(own, largest, tiers) for own in _counted_in(tier, case.machine.one_memory))


def tier_bytes(problem: LpProblem, placement: Placement, tier: Tier) -> float:
    """Bytes in a tier with things resting as `placement` says, while the most are there."""
    needed = tier_totals(replace(problem.shape, placement=placement), problem.terms, problem.further)[tier]
    return max(needed, ahead_bytes(problem, placement.in_files(TensorKind.PARAMETERS) > 0)) if tier is Tier.HOST else needed


def ahead_bytes(problem: LpProblem, params_in_files: bool) -> float:
    """Host memory that is taken at a time ahead of the first step."""
    return max(problem.setup_bytes, problem.build_bytes if params_in_files else 0.0)
