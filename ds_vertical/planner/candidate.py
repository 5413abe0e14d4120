"""One way to train a model on a machine: what the search varies, and what the simulator says of it.

[Note: shares of the state] The linear program is solved for a given share of the optimizer's state in host memory: what has its
state there is stepped in the next forward, so that the share multiplies variables of the program. Each share in steps of 5 %
makes a case with each delay. The state takes a part of the host memory that all else leaves, as where `initialize` chooses it
(`engine.autotune`): a run that starts later may find less.
"""

from __future__ import annotations

import gc
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, wraps
from typing import Any, Final, ParamSpec, Self, TypeVar

from ds_vertical.planner import linear_program, memory_budget
from ds_vertical.planner.activation_tiers import activation_tiers
from ds_vertical.planner.bound import Bound, step_bound
from ds_vertical.planner.closed_forms import Traffic, traffic_of
from ds_vertical.planner.costs import Parts, event_costs, split_steps
from ds_vertical.planner.kept_activations import NOTHING, KeepMenu, KeptShare, PolicyPoint
from ds_vertical.planner.linear_program import LpProblem, Solution
from ds_vertical.planner.machine import Machine
from ds_vertical.planner.memory_budget import STATE_SHARES, USED_BY_STATE, BudgetTerms, with_room
from ds_vertical.planner.model_shape import ModelShape
from ds_vertical.planner.network import LevelChoice, Network, level_choice
from ds_vertical.planner.simulate import SimulatedRun, SimulationSettings, simulate
from ds_vertical.schedule.events import DELAYED, EVERYTHING, LEAD, Cell, Schedule
from ds_vertical.schedule.passes import TrainingStep, build_training, training_with_needs
from ds_vertical.types import PRE, SUF, ActivationPolicy, Placement, TensorKind, Tier, TierBytes, Unit

_Given = ParamSpec("_Given")
_Found = TypeVar("_Found")
_RANKED_LAYERS: Final = 5
_PIECES: Final = 8  # of a layer in the optimizer's pipeline
_STEADY_STEPS: Final = 3
AS_GOOD: Final = 1.001  # times the seconds of the best shares, by the program: then all cells keep
POLICIES: Final[tuple[ActivationPolicy, ...]] = ("none", "free", "products", "everything")  # the simplest first


@dataclass(frozen=True)
class Choice:
    """One way to train: what the search varies, of the sizes, the timing and the tiers. Shares in [0, 1].

    `RunSettings` are what a run has been told, all of them; these are few, and most of what they say is no key of the section
    (`cli.plan.deepspeed_json` writes it as JSON). `delay`: `optimizer_delay`; `window`: `prefetch_layers`;
    `in_place`: early steps are never discarded, which is `on_nonfinite: "stop"`. `levels`: None where collectives have one
    level. `read_ahead_bytes`: `optimizer_read_ahead_bytes`."""

    micro_batch_size: int
    num_micro_batches: int
    blocks_per_layer: int
    window: int
    delay: float
    early: bool
    placement: Placement
    speculation: bool = False
    kept: KeptShare | None = None
    in_place: bool = False
    levels: LevelChoice | None = None
    read_ahead_bytes: int = 0

    @property
    def policy(self) -> ActivationPolicy:
        """What a layer's forward keeps for its backward."""
        return "none" if self.kept is None else self.kept.point.policy

    @property
    def moved(self) -> tuple[int, ...]:
        """The micro-batches whose activations leave the device."""
        tiers = activation_tiers(self.num_micro_batches, self.placement[TensorKind.ACTIVATIONS])
        return tuple(m for m, tier in enumerate(tiers) if tier is not Tier.DEVICE)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """From what `to_json` has written."""
        kept = fields.get("kept")
        if kept is not None:
            point = PolicyPoint(kept["policy"], kept["cell_bytes"], kept["cell_saved_s"])
            kept = KeptShare(point, *(kept[tier.value] for tier in Tier))
        levels = fields.get("levels") and LevelChoice(**fields["levels"])
        return cls(**{**fields, "placement": Placement.of(**fields["placement"]), "kept": kept, "levels": levels})

    def to_json(self) -> dict[str, object]:
        """As plans write it."""
        kept = self.kept and {
            "policy": self.kept.point.policy,
            "cell_bytes": self.kept.point.num_bytes,
            "cell_saved_s": self.kept.point.saved_s,
            **{tier.value: self.kept.share(tier) for tier in Tier},
        }
        levels = self.levels and dict(vars(self.levels))
        return {**vars(self), "placement": self.placement.named(), "kept": kept, "levels": levels}


def without_garbage_collection(function: Callable[_Given, _Found]) -> Callable[_Given, _Found]:
    """Run `function` with Python's garbage collector off, which would look at all objects of the process again and again. Once
    torch is imported these are many. Garbage that is in a cycle stays until the collector is on again."""

    @wraps(function)
    def called(*args: _Given.args, **kwargs: _Given.kwargs) -> _Found:
        collects = gc.isenabled()
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            if collects:
                gc.enable()

    return called


@dataclass(frozen=True)
class Candidate:
    """A choice with the case of the linear program that it comes from, and what the program says of it. `menu`: all that a
    layer may keep, where the case has the choice's policy alone."""

    choice: Choice
    case: LpProblem
    program_s: float
    binding: tuple[str, ...]
    menu: KeepMenu | None = None

    @property
    def shape(self) -> ModelShape:
        """The model, resting where the choice says."""
        return self.case.shape

    @property
    def machine(self) -> Machine:
        """One rank's part of the machine."""
        return self.case.machine

    def _kept_away(self, num_layers: int) -> tuple[Cell, ...]:
        """The layers and micro-batches of which what the forward keeps leaves the device."""
        kept = self.choice.kept
        if kept is None or not kept.point.num_bytes:
            return ()
        cells = kept.cells(num_layers, self.choice.num_micro_batches, self.machine.one_memory)
        return tuple(cell for cell, tier in cells.items() if tier is not Tier.DEVICE)

    def schedule(self, num_layers: int) -> Schedule:
        """A step in the steady state."""
        return build_training(self._training(num_layers))

    def _training(self, num_layers: int) -> TrainingStep:
        choice, placement = self.choice, self.choice.placement
        # What is issued ahead at the end of a step, of `pre` and the first layers, is no longer due in the next one.
        outside = self.shape.outside
        ahead = {*((PRE,) if SUF in outside.apart else outside.units), *range(LEAD)} if choice.window else set[Unit]()
        due = frozenset(outside.around(range(num_layers))) - ahead
        waits = placement.in_files(TensorKind.GRADIENTS) > 0
        moves = not self.machine.one_memory or placement.in_files(TensorKind.ACTIVATIONS) > 0
        return TrainingStep(
            num_layers,
            choice.num_micro_batches,
            window=choice.window,
            delayed=choice.early or choice.delay > 0,
            due=due if choice.delay > 0 or (choice.early and placement.in_files(TensorKind.STATE) < 1) else frozenset(),
            early=choice.early,
            ahead=choice.window > 0,
            hold=None if not waits else DELAYED if choice.early else EVERYTHING,
            moved=choice.moved if moves else (),
            kept=self._kept_away(num_layers),
            outside=outside,
            reduces_beside=self.shape.num_shards > 1,
            copy_share=choice.levels and choice.levels.copy_share,
        )

    def parts(self, shape: ModelShape) -> Parts | None:
        """Elements of the early and the delayed part of each unit; None where nothing is stepped early."""
        return split_steps(shape, self.choice.delay) if self.choice.early else None

    def coarse(self, num_layers: int) -> ModelShape:
        """The model's first layers, each in a few pieces."""
        elements = self.shape.layer_elements[:num_layers]
        size = max(memory_budget.PART_ELEMENTS, max(elements) // self.shape.num_shards // _PIECES)
        return replace(self.shape, layer_elements=elements, part_elements=size)

    @without_garbage_collection
    def simulated(self, num_layers: int) -> SimulatedRun:
        """Steps of the model's first layers."""
        shape, (schedule, needs) = self.coarse(num_layers), training_with_needs(self._training(num_layers))
        ahead = self.case.terms.ahead * memory_budget.PART_ELEMENTS / (shape.part_elements or 1)
        ahead = round(ahead * num_layers / self.shape.num_layers)  # of fewer layers as large a part
        settings = SimulationSettings(_STEADY_STEPS, memory_budget.SLOTS, ahead=ahead)
        return simulate(schedule, self.machine, shape, settings, parts=self.parts(shape), needs=needs)

    @cached_property
    def timeline(self) -> SimulatedRun:
        """Steps of the whole model."""
        return self.simulated(self.shape.num_layers)

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        return self.timeline.step_s

    @cached_property
    def estimate_s(self) -> float:
        """As `step_s`, from two runs with fewer layers where there are many."""
        count = self.shape.num_layers
        if count <= 2 * _RANKED_LAYERS:
            return self.step_s
        few, more = (self.simulated(n).step_s for n in (_RANKED_LAYERS, 2 * _RANKED_LAYERS))
        return few + (more - few) * (count - _RANKED_LAYERS) / _RANKED_LAYERS

    @cached_property
    @without_garbage_collection
    def bound(self) -> Bound:
        """The least time of a step, as `step_bound` has it."""
        count = self.shape.num_layers
        shape, (schedule, needs) = self.coarse(count), training_with_needs(self._training(count))
        return step_bound(schedule, self.machine, shape, parts=self.parts(shape), needs=needs)

    @cached_property
    @without_garbage_collection
    def traffic(self) -> Traffic:
        """Bytes of one step to and from this rank's SSD."""
        shape = self.coarse(self.shape.num_layers)
        events = self.schedule(shape.num_layers).events
        return traffic_of(event_costs(events, self.machine, shape, self.parts(shape)), shape)

    @property
    def items(self) -> tuple[memory_budget.BudgetItem, ...]:
        """The memory budget, and what rests on this rank's SSD."""
        case, build = self.case, self.case.build_bytes * (self.shape.in_files(TensorKind.PARAMETERS) > 0)
        own = memory_budget.budget(self.shape, case.terms, case.further)
        return memory_budget.with_setup(own, case.setup_bytes, build) + memory_budget.ssd_items(self.shape, case.terms)

    @property
    def ssd_bytes(self) -> float:
        """Bytes that rest on this rank's SSD."""
        return linear_program.tier_bytes(self.case, self.shape.placement, Tier.SSD)


def fits(candidate: Candidate) -> bool:
    """Whether every tier has room for it."""
    taken = partial(linear_program.tier_bytes, candidate.case, candidate.shape.placement)
    return all(limit is None or taken(tier) <= limit for tier, limit in candidate.case.limits.items())


def in_pairs(candidate: Candidate) -> Candidate:
    """With gradients that wait for the next micro-batch's, and freed memory kept, where there is room, as a run decides."""

    def of(terms: BudgetTerms) -> Candidate:
        return replace(candidate, case=replace(candidate.case, terms=terms))

    return of(with_room(replace(candidate.case.terms, pairs=True, keeps_freed=True), lambda terms: fits(of(terms))))


def most_micro_batches(candidate: Candidate, limits: TierBytes, most: int) -> int:
    """Of the numbers up to `most`, the largest for which a rank has room in memory and on SSD. `limits`: bytes per tier."""
    case, placement = candidate.case, candidate.shape.placement

    def is_too_large(count: int) -> bool:
        grown = replace(case, terms=replace(case.terms, num_micro_batches=count))
        needed = ((linear_program.tier_bytes(grown, placement, tier), limit) for tier, limit in limits.items())
        return any(limit is not None and num_bytes > limit for num_bytes, limit in needed)

    return bisect_left(range(1, most + 1), True, key=is_too_large)


def into_node_bytes(candidate: Candidate) -> float:
    """What comes into a node from the others in one step."""
    shape = candidate.coarse(candidate.shape.num_layers)
    events = candidate.schedule(shape.num_layers).events
    costs = event_costs(events, candidate.machine, shape, candidate.parts(shape))
    return sum(stage.num_bytes for cost in costs for job in cost for stage in job if stage.lane == "net_cross")


def with_network(candidate: Candidate, network: Network) -> Candidate:
    """The same with other collectives."""
    case = replace(candidate.case, shape=replace(candidate.shape, network=network))
    return replace(candidate, choice=replace(candidate.choice, levels=level_choice(network)), case=case)


def simplicity(candidate: Candidate) -> tuple[float, ...]:
    """Smaller is simpler: fewer things moved, smaller windows, the usual layers."""
    choice, placement = candidate.choice, candidate.choice.placement
    activations = placement[TensorKind.ACTIVATIONS]
    moves = activations[Tier.SSD], activations[Tier.HOST], placement.share(TensorKind.GRADIENTS, Tier.SSD)
    in_memory = placement.share(TensorKind.STATE, Tier.HOST)
    kept = choice.kept or KeptShare(NOTHING)
    keeping = choice.in_place, POLICIES.index(choice.policy), kept.ssd, kept.host
    levels = choice.levels
    return (
        levels.num_rounded if levels is not None else 0,
        *keeping,
        *(round(share, 2) for share in moves),
        in_memory % 1.0,  # all of it is as simple as none
        choice.window,
        choice.blocks_per_layer,
        candidate.shape.generations,
        choice.read_ahead_bytes,
        _fewer_ranks(candidate),
    )


def _fewer_ranks(candidate: Candidate) -> float:
    """By how much copies and sums are of fewer ranks than a node has, which is the usual."""
    network, levels = candidate.shape.network, candidate.choice.levels
    if network is None or levels is None:
        return 0.0
    return network.ranks_per_node / levels.ranks_per_node + network.ranks_per_node / levels.gradients - 2


def difference(chosen: Choice, other: Choice) -> str:
    """What `other` does otherwise, in the JSON's words."""
    names = {
        "micro_batch_size": "train_micro_batch_size_per_gpu",
        "num_micro_batches": "gradient_accumulation_steps",
        "blocks_per_layer": "blocks_per_layer",
        "window": "prefetch_layers",
        "delay": "optimizer_delay",
        "read_ahead_bytes": "optimizer_read_ahead_bytes",
    }
    found = [f"{key} {getattr(other, name):g}" for name, key in names.items() if getattr(other, name) != getattr(chosen, name)]
    ours, theirs = chosen.placement, other.placement
    if (away := theirs.away(TensorKind.ACTIVATIONS)) != ours.away(TensorKind.ACTIVATIONS):
        found.append(f"activations off the device {away:.0%}")
    if (on_ssd := theirs.share(TensorKind.STATE, Tier.SSD)) != ours.share(TensorKind.STATE, Tier.SSD):
        where = {1.0: "SSD", 0.0: "host"}.get(on_ssd, f"SSD {on_ssd:.0%}")
        found.append(f"optimizer state on {where}")
    if other.levels is None and chosen.levels is not None:
        found.append("collectives of all ranks at once")
    elif other.levels is not None:
        before = {} if chosen.levels is None else vars(chosen.levels)
        found += [f"levels.{key} {value}".lower() for key, value in vars(other.levels).items() if value != before.get(key)]
    if other.in_place != chosen.in_place:
        found.append(f'on_nonfinite "{"stop" if other.in_place else "skip"}"')
    if _keeping(other) != _keeping(chosen):
        found.append(_keeping(other))
    return ", ".join(found)


def _keeping(choice: Choice) -> str:
    """What is kept, in the JSON's words."""
    kept = choice.kept
    if kept is None or not kept.point.num_bytes:
        return f'activations.keep "{choice.policy}"'
    shares = [f"{kept.share(tier):.0%} on {tier}" for tier in Tier if kept.share(tier)]
    count = "" if kept.point.outputs is None else f"{kept.point.outputs} of each block's, "
    return f'activations.keep "{choice.policy}" ({count}{", ".join(shares)})'


# ---- ways to keep


def solved_ways(case: LpProblem, in_parts: bool = False) -> Iterator[tuple[LpProblem, Solution]]:
    """The case with nothing kept, and with each policy in each pair of tiers; `in_parts`: with parts of the products, too."""
    for name in (*POLICIES, *(case.menu.parts if case.menu and in_parts else ())):
        for tiers in _keep_tiers(case, name):
            given = replace(case, menu=case.menu and case.menu.only(name), keep_tiers=tiers)
            best = linear_program.solve(given)
            if len(given.kept) == 1 and best is not None and (not best.kept or best.kept[0][2] < 1):
                whole = linear_program.solve(replace(given, fixed={**case.fixed, **dict.fromkeys(given.kept, 1.0)}))
                is_good = whole is not None and whole.seconds <= AS_GOOD * best.seconds
                best = whole if is_good or not best.kept else best  # where none is best, the loss of all is what to tell
            if best is not None:
                yield given, best


def solved_tiers(case: LpProblem, share: float) -> Iterator[tuple[LpProblem, Solution, list[KeptShare]]]:
    """The case with a `share` of the cells kept by the one policy of its menu, in each tier and each pair of tiers that have
    room for it by the program; and the ways to divide whole cells between these, the nearest to the program's first."""
    assert case.menu is not None
    (point,) = case.menu.points
    for tiers in _keep_tiers(case, point.name):
        given = replace(case, keep_tiers=tiers, keep_share=share)
        solution = linear_program.solve(given)
        if solution is not None:
            divided = ([own.get(tier, 0.0) for tier in Tier] for own in _divided(given, solution))
            yield given, solution, [KeptShare(point, *shares) for shares in divided]


def _divided(given: LpProblem, solution: Solution) -> Iterator[dict[Tier, float]]:
    """See `solved_tiers`. What one tier takes alone is the share as it was asked for; a pair has cells in both."""
    (first, *others), share, count = given.keep_tiers, given.keep_share or 0.0, given.num_cells
    if not others:
        yield {first: share}
    elif len(solution.kept) == 2:
        in_first, total = count * sum(part for _, tier, part in solution.kept if tier is first), round(share * count)
        for number in (int(in_first + 1e-6), int(in_first + 1e-6) + 1):
            if 0 < number < total:
                yield {first: number / count, others[0]: (total - number) / count}


def _keep_tiers(case: LpProblem, name: str) -> Iterator[tuple[Tier, ...]]:
    """Where what a point of the menu keeps may rest, in one tier or two; the device where it keeps no bytes."""
    point = next((p for p in case.menu.points if p.name == name), None) if case.menu else None
    if name == "none" or (point is not None and not point.num_bytes):
        yield (Tier.DEVICE,)
    elif point is not None:
        here = [tier for tier in case.keep_tiers if not (tier is Tier.HOST and case.machine.one_memory)]
        beside = Tier.DEVICE if case.machine.one_memory else Tier.HOST  # of which the JSON has a share of its own
        yield from ((tier,) for tier in here)
        yield from ((beside, tier) for tier in here if beside in here and tier is not beside)


def settled(case: LpProblem, choice: Choice) -> LpProblem:
    """The case with what the choice has settled besides keeping."""
    placement, in_files = choice.placement, case.shape.in_files(TensorKind.PARAMETERS) > 0
    fixed = {
        "activations_on_host": placement.share(TensorKind.ACTIVATIONS, Tier.HOST),
        "activations_on_ssd": placement.share(TensorKind.ACTIVATIONS, Tier.SSD),
        "parameters_in_host": placement.share(TensorKind.PARAMETERS, Tier.HOST) if in_files else 0.0,
        "gradients_on_ssd": placement.share(TensorKind.GRADIENTS, Tier.SSD),
    }
    return replace(case, fixed=fixed)


def kept_so(choice: Choice, given: LpProblem, solution: Solution, kept: KeptShare | None) -> Candidate:
    """The choice with so much kept."""
    case = replace(given, shape=replace(given.shape, kept=kept))
    return Candidate(replace(choice, kept=kept), case, solution.seconds, solution.binding)


# ---- host memory that all else leaves


def reading_ahead(candidate: Candidate) -> Iterator[Candidate]:
    """The same with state read ahead of the norm into what all else leaves of host memory; none where there is no room for it,
    or early steps count whatever the norm."""
    choice, case, shape = candidate.choice, candidate.case, candidate.shape
    limit, each = case.limits[Tier.HOST], memory_budget.slot_bytes(shape, case.terms)
    room = math.inf if limit is None else limit - linear_program.tier_bytes(case, shape.placement, Tier.HOST)
    count = memory_budget.slots_ahead(memory_budget.num_pieces(shape), each, room)
    if count and not (choice.early and not choice.speculation):
        own = replace(case, terms=replace(case.terms, ahead=count))
        yield replace(candidate, choice=replace(choice, read_ahead_bytes=int(count * each)), case=own)


# ---- a share of the optimizer's state in host memory


def with_state_in_memory(shape: ModelShape, share: float) -> ModelShape:
    """`shape` with that share of the state in host memory: of what lies outside the layers first, as far as a unit fits whole,
    then as much of every layer. (A run chooses whole parameters: `engine.zero3.chunks.params_in_host`.)"""
    placement = shape.placement.with_shares(TensorKind.STATE, {Tier.SSD: 1 - share})
    if not 0 < share < 1:
        return replace(shape, placement=placement, state_places=())
    room = share * shape.stepped_elements / shape.num_shards
    places: list[tuple[Unit, float, float]] = []
    units = shape.outside.around(range(shape.num_layers))
    for unit in units:
        if not isinstance(unit, int):
            elements = shape.stepped(unit)
            in_memory = elements if elements <= room else 0.0
            room -= in_memory
            places.append((unit, elements - in_memory, in_memory))
    layers = {unit: shape.stepped(unit) for unit in units if isinstance(unit, int)}
    each = min(1.0, room / (sum(layers.values()) or 1.0))
    places += [(unit, elements * (1 - each), elements * each) for unit, elements in layers.items()]
    return replace(shape, placement=placement, state_places=tuple(places))


def beside_state(limits: TierBytes, shape: ModelShape) -> TierBytes:
    """`limits` without what a share of the state must leave of host memory."""
    share, limit = shape.placement.share(TensorKind.STATE, Tier.HOST), limits[Tier.HOST]
    if limit is None or not 0 < share < 1:
        return limits
    state_bytes = share * shape.stepped_elements / shape.num_shards * shape.state_bytes
    return {**limits, Tier.HOST: limit - (1 / USED_BY_STATE - 1) * state_bytes}


def held_share(case: LpProblem, delay: float, state_on_ssd: float) -> float:
    """Of all gradients, those that wait for their step with another delay and share: all, where early steps may be redone, and
    where there are none."""
    final = case.early and case.terms.held_share < 1
    return memory_budget.waiting_share(delay, state_on_ssd) if final else 1.0


def gaining_shares(case: LpProblem, delays: Sequence[float], less_than_s: float) -> list[tuple[LpProblem, Solution]]:
    """Of a case with all state on SSD, those with a share of it in host memory whose program takes less time, the best first;
    of each share the best of `delays`. Their limits are without what the state must leave of host memory."""
    found: list[tuple[LpProblem, Solution]] = []
    for count in range(1, STATE_SHARES):
        tried = ((given, linear_program.solve(given)) for given in _shared(case, count / STATE_SHARES, delays))
        solved = [(given, solution) for given, solution in tried if solution is not None]
        if not solved:
            break  # there is no memory for a larger share either
        found.append(min(solved, key=_seconds))
    return sorted((entry for entry in found if _seconds(entry) < less_than_s), key=_seconds)


def _seconds(entry: tuple[LpProblem, Solution]) -> float:
    return entry[1].seconds


def _shared(case: LpProblem, share: float, delays: Sequence[float]) -> Iterator[LpProblem]:
    shape = with_state_in_memory(replace(case.shape, placement=Placement.of(state_on_ssd=1.0), kept=None), share)
    setup = case.setup_bytes + memory_budget.stock_setup(0, 0, math.ceil(share * shape.stepped_elements / shape.num_shards))
    shared = replace(case.terms, shares_state=True, **memory_budget.LEAN)
    for delay in delays:
        terms = replace(shared, held_share=held_share(case, delay, 1 - share), early_share=(1 - delay) * case.early)
        yield replace(case, shape=shape, terms=terms, delay=delay, limits=beside_state(case.limits, shape), setup_bytes=setup)
