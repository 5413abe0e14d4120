"""The least time of a step of stock ZeRO-Infinity, which runs micro-batches one after another, on the same machine.

For each micro-batch every parameter comes in twice, and the sum of gradients leaves the device and comes in again, after the
first: (2M - 1) G over the copies (GreedySnake, arXiv 2512.17570; DeepSpeed 0.19.8 adds on the device). Within a sweep all
resources work at once; the optimizer's step comes after the last backward, read, computed and written at once too. Stock does
worse than that where its own pipeline stalls, so a ratio to it is a lower bound of the gain.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_vertical.costs import ModelShape, Placement
from ds_vertical.machine import Machine


@dataclass(frozen=True)
class HorizontalStep:
    """Seconds of a step: all forwards, all backwards, the optimizer; `resource` that takes most of the sweeps."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    resource: str

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s


def stock_placement(shape: ModelShape, host_bytes: float | None) -> Placement:
    """Stock keeps 4 bytes per parameter of gradients in host memory where they fit, then parameters; the rest is on SSD."""
    rank = shape.num_elements / shape.num_shards
    gradients, parameters = rank * shape.gradient_bytes, rank * shape.param_bytes
    if host_bytes is None:
        return Placement(0.0, 1.0, 0.0)
    on_ssd = 0.0 if gradients <= host_bytes else 1.0
    room = host_bytes - gradients * (1 - on_ssd)
    return Placement(1 - min(1.0, room / parameters), 1.0, on_ssd)


def horizontal_step(shape: ModelShape, machine: Machine, num_micro_batches: int) -> HorizontalStep:
    """The best that stock can do with everything where `shape.placement` puts it; state on SSD."""
    rank, placement = shape.num_elements / shape.num_shards, shape.placement
    parameters, gradients = rank * shape.param_bytes, rank * shape.gradient_bytes
    layers = sum(shape.layer_elements) / (max(shape.layer_elements) or 1)
    read = parameters * placement.parameters_on_ssd / machine.ssd_read_bytes_per_s
    forward = {"compute": layers * shape.forward_s + shape.pre_forward_s, "SSD": read}
    backward = {"compute": layers * (shape.forward_s + shape.backward_s) + shape.head_s + shape.pre_backward_s, "SSD": read}
    count = num_micro_batches
    if not machine.one_memory and machine.copy_in_bytes_per_s and machine.copy_out_bytes_per_s:
        activations = shape.num_layers * shape.activation_bytes * placement.activations_on_host
        out, into = machine.copy_out_bytes_per_s, machine.copy_in_bytes_per_s
        forward |= {"copies in": parameters / into, "copies out": activations / out}
        added = gradients * (count - 1) / count
        backward |= {"copies in": (parameters + activations + added) / into, "copies out": gradients / out}
    seconds = {name: forward[name] + backward[name] for name in forward}
    optimizer = _optimizer_s(shape, machine, gradients * placement.gradients_on_ssd)
    slowest = max(seconds, key=seconds.__getitem__)
    return HorizontalStep(count * max(forward.values()), count * max(backward.values()), optimizer, slowest)


def _optimizer_s(shape: ModelShape, machine: Machine, waiting_bytes: float) -> float:
    """Gradients on SSD are written once and read once; state is read and written, with the parameters."""
    rank, placement = shape.num_elements / shape.num_shards, shape.placement
    state = rank * shape.state_bytes * placement.state_on_ssd
    read = (state + waiting_bytes) / machine.ssd_read_bytes_per_s
    write = (state + rank * shape.param_bytes * placement.parameters_on_ssd) / machine.ssd_write_bytes_per_s
    both = max(read / machine.read_together, write / machine.write_together)
    adam = rank / machine.adam_elements_per_s
    return waiting_bytes / machine.ssd_write_bytes_per_s + max(min(both, read + write), adam)
