"""What a step of two halves (`vertical_schedule.acco`) would take in the place of a plan's exact step.

Two halves are simulated as one step (`planner.simulate.joined`): steady steps, one behind the other, in which each half makes
the next one's values (`schedule.halves`). Weights, state and gradients rest in host memory: acco takes them from nowhere else.
So do activations, whose folder on SSD is that of weights or state. A forward keeps nothing for its backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from ds_vertical.cli.common import JsonObject
from ds_vertical.config.cross_check import value_at
from ds_vertical.config.levels import PARTITION_SIZE
from ds_vertical.config.section import SECTION
from ds_vertical.planner import linear_program, memory_budget
from ds_vertical.planner.candidate import Candidate, without_garbage_collection
from ds_vertical.planner.model_shape import SmallTensors
from ds_vertical.planner.network import Network
from ds_vertical.planner.simulate import SimulatedRun, SimulationSettings, joined, simulate
from ds_vertical.schedule.halves import layers_left
from ds_vertical.schedule.passes import TrainingStep, training_with_needs
from ds_vertical.types import Copies, Placement, TensorKind, Tier, TierBytes

_STEADY_STEPS: Final = 3


@dataclass(frozen=True)
class HalvedStep(Candidate):
    """A step of two halves, each with the choice's number of micro-batches."""

    def halves(self, num_layers: int) -> tuple[TrainingStep, TrainingStep]:
        """The first one, and the second one."""
        shape = self.coarse(num_layers)
        units = frozenset(shape.outside.around(range(num_layers)))
        own = {"halves": True, "made": units, "standing": units, "copy_share": 1.0}
        half = replace(self._training(num_layers), **own, due=frozenset(), ahead=False, reduces_beside=True)
        left = layers_left(shape.outside, [shape.stepped(layer) for layer in range(num_layers)], shape.stepped)
        return replace(half, leaves=True), replace(half, left=left)

    @without_garbage_collection
    def simulated(self, num_layers: int) -> SimulatedRun:  # override
        """Steps of the model's first layers."""
        schedule, needs = joined(*map(training_with_needs, self.halves(num_layers)))
        settings = SimulationSettings(_STEADY_STEPS, memory_budget.SLOTS)
        return simulate(schedule, self.machine, self.coarse(num_layers), settings, needs=needs)


@dataclass(frozen=True)
class TwoHalves:
    """A step of two halves. `copies`: as the section has it. `short`: bytes that a rank lacks of a tier, by tier; where there
    are any, the step is not for this machine."""

    copies: Copies
    step_s: float
    short: TierBytes


def two_halves(exact: Candidate) -> TwoHalves | None:
    """The fastest step of two halves that fits, with the sizes of an exact plan; where none fits, the fastest. None where acco
    does not train: one rank, an odd number of micro-batches, a device with memory of its own."""
    network = exact.shape.network
    if network is None or exact.choice.num_micro_batches % 2 or not exact.machine.one_memory:
        return None
    found = [_two_halves(exact, copies, network) for copies in _all_copies(network)]
    return min(found, key=lambda each: (bool(each.short), each.step_s))


def json_changes(config: JsonObject, copies: Copies, ranks_per_node: int) -> JsonObject:
    """What is to be changed in the JSON of an exact plan, so that it trains with two halves a step: values by path, None for a
    key that is to go."""
    wanted: JsonObject = {
        f"{SECTION}.acco": {"copies": copies},
        f"{SECTION}.optimizer_delay": 1,
        f"{SECTION}.levels": None,
        f"{SECTION}.nvme_paths": None,
        f"{SECTION}.activations": {"device": Tier.DEVICE.value, "keep": "none"},  # as `_two_halves` has it
        PARTITION_SIZE: ranks_per_node if copies == "node" else None,
    }
    in_memory = {"optimizer_host_share": 1, "gradient_host_share": 1, "optimizer_read_ahead_bytes": 0}
    wanted |= {f"{SECTION}.{key}": value for key, value in in_memory.items()}
    wanted |= {f"zero_optimization.{name}.device": "cpu" for name in ("offload_param", "offload_optimizer")}
    return {path: value for path, value in wanted.items() if value_at(config, path) != value}


def _all_copies(network: Network) -> Iterator[Copies]:
    """Copies of a node are for several nodes of several ranks."""
    yield "rank"
    if network.num_nodes > 1 and network.ranks_per_node > 1:
        yield "node"


def _two_halves(exact: Candidate, copies: Copies, network: Network) -> TwoHalves:
    sharing = network.ranks_per_node if copies == "node" else 1
    placement = _in_memory(exact.shape.placement)
    apart = replace(network, levels=True, copy_share=1.0, copy_ranks=sharing, sum_ranks=sharing, stands=True)
    shape = replace(
        exact.shape, placement=placement, state_places=(), kept=None, small=SmallTensors(), generations=1, network=apart
    )
    count = exact.choice.num_micro_batches // 2
    plain = {"delay": 1.0, "early": False, "kept": None, "in_place": False, "levels": None, "speculation": False}
    choice = replace(exact.choice, num_micro_batches=count, placement=placement, **plain)
    terms = replace(exact.case.terms, num_micro_batches=count, held_share=1.0, early_share=0.0)
    case = replace(exact.case, shape=shape, terms=terms, delay=1.0, early=False, menu=None, setup_bytes=0.0, build_bytes=0.0)
    halved = HalvedStep(choice, case, 0.0, ())
    # no estimate from few layers: where NORM@-1 stands changes with their number
    return TwoHalves(copies, halved.step_s, _short(halved, network, sharing))


def _in_memory(placement: Placement) -> Placement:
    """Nothing on SSD."""
    for kind in (TensorKind.STATE, TensorKind.PARAMETERS, TensorKind.GRADIENTS, TensorKind.ACTIVATIONS):
        placement = placement.with_shares(kind, {})  # in their first tier
    return placement


def _short(halved: HalvedStep, network: Network, sharing: int) -> TierBytes:
    """The budget has the copies among what acco takes besides, and not among the levels'."""
    shape = replace(halved.shape, network=replace(network, levels=False, copy_ranks=None, sum_ranks=None))
    sizes = shape.num_elements, shape.stepped_elements
    own = memory_budget.halves_items(*sizes, shape.param_bytes, shape.gradient_bytes, network.num_ranks, sharing)
    case = replace(halved.case, shape=shape, further=(*halved.case.further, *own))
    needed = {tier: linear_program.tier_bytes(case, shape.placement, tier) for tier in halved.case.limits}
    limits = ((tier, limit) for tier, limit in halved.case.limits.items() if limit is not None)
    return {tier: needed[tier] - limit for tier, limit in limits if needed[tier] > limit}
