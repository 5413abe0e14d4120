"""Closed formulas: the SSD bytes of a step in layer-major order, and the least seconds of a step of stock ZeRO-Infinity.

SSD bytes per step and rank, with P elements, M micro-batches, L layers, A bytes of what passes between two layers for one
micro-batch, everything on SSD, bf16 parameters and fp32 Adam:

    stream              bytes
    parameters read     4P - 2P x handed over - kept layers (and what is outside) once
    gradients           4P out + 4P in of the share that waits on SSD
    optimizer state     12P in + 12P out of the share that is in files; with compressed masters 10P out, and 10P in of what is
                        stepped early
    parameters written  2P
    redo                12P in + 14P out of the share that was redone
    activations         (3L - 1)A in + 2LA out of each micro-batch on SSD
    kept                K in + K out of each layer and micro-batch on SSD, K what its forward keeps for its backward

Of a lone micro-batch only the layers' inputs have to wait: (L - 1)A each way.

Stock runs micro-batches one after another. For each of them every parameter comes in twice, and the sum of gradients leaves
the device and comes in again, after the first: (2M - 1) G over the copies (GreedySnake, arXiv 2512.17570; DeepSpeed
0.19.8 adds on the device). Within a sweep all resources work at once; the optimizer's step comes after the last backward, read,
computed and written at once too. Stock does worse than that where its own pipeline stalls, so a ratio to it is a lower bound of
the gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds_vertical.errors import CostsError
from ds_vertical.planner.activation_tiers import activation_tiers
from ds_vertical.planner.costs import Cost
from ds_vertical.planner.machine import Machine
from ds_vertical.planner.model_shape import ModelShape, outside_elements, state_read, state_written
from ds_vertical.planner.network import LINKS, seconds_of
from ds_vertical.types import IN_FILES, Placement, TensorKind, Tier, check_share


@dataclass(frozen=True)
class Traffic:
    """Bytes of one step to and from SSD, per stream."""

    parameters_read: float = 0.0
    gradients_read: float = 0.0
    state_read: float = 0.0
    activations_read: float = 0.0
    parameters_written: float = 0.0
    gradients_written: float = 0.0
    state_written: float = 0.0
    activations_written: float = 0.0
    kept_read: float = 0.0
    kept_written: float = 0.0

    @property
    def read(self) -> float:
        """Bytes of all streams from SSD."""
        return self.parameters_read + self.gradients_read + self.state_read + self.activations_read + self.kept_read

    @property
    def written(self) -> float:
        """Bytes of all streams to SSD."""
        steps = self.parameters_written + self.gradients_written + self.state_written
        return steps + self.activations_written + self.kept_written


def kept_layers(window: int) -> int:
    """Layers that stay at the turn: those that come back within the next window + 1 visits, and the last."""
    return 1 + (window + 1) // 2


def vertical_traffic(
    shape: ModelShape,
    num_micro_batches: int = 1,
    *,
    kept: int = 1,
    handed_over: float = 0.0,
    waiting: float = 0.0,
    redone: float = 0.0,
) -> Traffic:
    """Layer-major order. `kept`: `kept_layers(window)`. Shares in [0, 1]: `handed_over` in memory
    by delayed steps; `waiting`: gradients that wait for their step, of which the placement's share goes to SSD; `redone`:
    steps taken again after wrong speculation (their gradients wait, and are written whether or not they are read again).
    Of activations those of the micro-batches that the placement has on SSD count. Raises CostsError.
    """
    for name, share in (("handed_over", handed_over), ("waiting", waiting), ("redone", redone)):
        check_share(name, share)
    if kept < 0:
        raise CostsError(f"kept: got {kept!r}; write a number of layers, 0 or more")
    once = outside_elements(shape) + sum(shape.layer_elements[max(0, shape.num_layers - kept) :])
    fetches = 2.0 - once / shape.num_elements - handed_over if shape.num_elements else 0.0
    activations, kept_on_ssd = _activations_in_files(shape, num_micro_batches), _kept_in_files(shape, num_micro_batches)
    layers = shape.num_layers
    passes = (layers - 1, layers - 1) if num_micro_batches == 1 else (3 * layers - 1, 2 * layers)
    elements, stepped = shape.num_elements / shape.num_shards, shape.stepped_elements / shape.num_shards
    each = shape.param_bytes * shape.in_files(TensorKind.PARAMETERS)
    gradients = stepped * shape.gradient_bytes * (waiting * shape.in_files(TensorKind.GRADIENTS))
    in_files, steps = shape.in_files(TensorKind.STATE), 1.0 + redone  # what is redone has its state in files
    moved = stepped * (in_files + redone if in_files else 0.0)
    return Traffic(
        parameters_read=elements * each * fetches,
        gradients_read=gradients,
        state_read=moved * state_read(shape, early=False),
        activations_read=activations * passes[0],
        parameters_written=stepped * each * steps,
        gradients_written=gradients,
        state_written=moved * state_written(shape),
        activations_written=activations * passes[1],
        kept_read=kept_on_ssd,
        kept_written=kept_on_ssd,
    )


def _activations_in_files(shape: ModelShape, num_micro_batches: int) -> float:
    """Bytes of what passes between two layers of the micro-batches on SSD."""
    tiers = activation_tiers(num_micro_batches, shape.placement[TensorKind.ACTIVATIONS])
    return shape.activation_bytes * sum(IN_FILES[tier] for tier in tiers)


def _kept_in_files(shape: ModelShape, num_micro_batches: int) -> float:
    """Bytes of what forwards keep on SSD."""
    if shape.kept is None:
        return 0.0
    cells = shape.kept.cells(shape.num_layers, num_micro_batches, one_memory=False)
    return shape.kept.point.num_bytes * sum(IN_FILES[tier] for tier in cells.values())


def traffic_of(costs: Sequence[Cost], shape: ModelShape) -> Traffic:
    """What a schedule's own events move, from `costs.event_costs`. A write of state brings its parameters along."""
    moved: dict[tuple[str, str], float] = {}
    for stage in (stage for cost in costs for job in cost for stage in job):
        moved[stage.lane, stage.purpose] = moved.get((stage.lane, stage.purpose), 0.0) + stage.num_bytes
    parameters = shape.param_bytes * shape.in_files(TensorKind.PARAMETERS)
    state = state_written(shape) * shape.in_files(TensorKind.STATE)
    written = moved.get(("ssd_write", "state"), 0.0)
    share = parameters / (parameters + state) if written else 0.0
    return Traffic(
        parameters_read=moved.get(("ssd_read", "parameters"), 0.0),
        gradients_read=moved.get(("ssd_read", "gradients"), 0.0),
        state_read=moved.get(("ssd_read", "state"), 0.0),
        activations_read=moved.get(("ssd_read", "activations"), 0.0),
        parameters_written=written * share,
        gradients_written=moved.get(("ssd_write", "gradients"), 0.0),
        state_written=written * (1 - share),
        activations_written=moved.get(("ssd_write", "activations"), 0.0),
        kept_read=moved.get(("ssd_read", "kept"), 0.0),
        kept_written=moved.get(("ssd_write", "kept"), 0.0),
    )


@dataclass(frozen=True)
class HorizontalStep:
    """Seconds of a step: all forwards, all backwards, the optimizer; `resource` that takes most of the sweeps."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    resource: str

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.forward_s + self.backward_s + self.optimizer_s


def stock_placement(shape: ModelShape, host_bytes: float | None) -> Placement:
    """Stock keeps 4 bytes per trained parameter of gradients in host memory where they fit, then parameters; the rest is on
    SSD."""
    stepped, rank = (elements / shape.num_shards for elements in (shape.stepped_elements, shape.num_elements))
    gradients, parameters = stepped * shape.gradient_bytes, rank * shape.param_bytes
    if host_bytes is None:
        return Placement.of(parameters_on_ssd=0.0)
    on_ssd = 0.0 if gradients <= host_bytes else 1.0
    room = host_bytes - gradients * (1 - on_ssd)
    return Placement.of(parameters_on_ssd=1 - min(1.0, room / parameters), gradients_on_ssd=on_ssd)


def horizontal_step(shape: ModelShape, machine: Machine, num_micro_batches: int) -> HorizontalStep:
    """The best that stock can do with everything where `shape.placement` puts it; state on SSD."""
    stepped, rank = (elements / shape.num_shards for elements in (shape.stepped_elements, shape.num_elements))
    parameters, gradients = rank * shape.param_bytes, stepped * shape.gradient_bytes
    layers = sum(shape.layer_elements) / (max(shape.layer_elements) or 1)
    read = parameters * shape.in_files(TensorKind.PARAMETERS) / machine.ssd_read_bytes_per_s
    forward = {"compute": layers * shape.forward_s + shape.pre_forward_s, "SSD": read}
    backward = {"compute": layers * (shape.forward_s + shape.backward_s) + shape.head_s + shape.pre_backward_s, "SSD": read}
    count = num_micro_batches
    if not machine.one_memory and machine.copy_in_bytes_per_s and machine.copy_out_bytes_per_s:
        in_host = shape.placement.share(TensorKind.ACTIVATIONS, Tier.HOST)
        activations = shape.num_layers * shape.activation_bytes * in_host
        out, into = machine.copy_out_bytes_per_s, machine.copy_in_bytes_per_s
        forward |= {"copies in": parameters / into, "copies out": activations / out}
        added = gradients * (count - 1) / count
        backward |= {"copies in": (parameters + activations + added) / into, "copies out": gradients / out}
    for lane, name in LINKS.items():
        forward[name], backward[name] = (_link_s(shape, machine, lane, times) for times in ((1, 0), (1, 1)))
    seconds = {name: forward[name] + backward[name] for name in forward}
    optimizer = _optimizer_s(shape, machine, gradients * shape.in_files(TensorKind.GRADIENTS))
    slowest = max(seconds, key=seconds.__getitem__)
    return HorizontalStep(count * max(forward.values()), count * max(backward.values()), optimizer, slowest)


def _link_s(shape: ModelShape, machine: Machine, lane: str, times: tuple[int, int]) -> float:
    """Seconds of a link for a micro-batch's gathers and reductions of the whole model, so many `times`. Stock sends gradients
    in the parameters' dtype, for each micro-batch, over all ranks at once."""
    if shape.network is None:
        return 0.0
    network, (gathers, reductions) = replace(shape.network, levels=False), times
    hops = network.gather(gathers * shape.num_elements, shape.param_bytes)
    hops += network.reduce(reductions * shape.stepped_elements, shape.param_bytes)
    return sum(seconds_of(hop, machine) for hop in hops if hop.lane == lane)


def _optimizer_s(shape: ModelShape, machine: Machine, waiting_bytes: float) -> float:
    """Gradients on SSD are written once and read once; state is read and written, with the parameters."""
    stepped = shape.stepped_elements / shape.num_shards
    state = stepped * shape.state_bytes * shape.in_files(TensorKind.STATE)
    read = (state + waiting_bytes) / machine.ssd_read_bytes_per_s
    write = (state + stepped * shape.param_bytes * shape.in_files(TensorKind.PARAMETERS)) / machine.ssd_write_bytes_per_s
    both = max(read / machine.read_together, write / machine.write_together)
    adam = stepped / machine.adam_elements_per_s
    return waiting_bytes / machine.ssd_write_bytes_per_s + max(min(both, read + write), adam)
