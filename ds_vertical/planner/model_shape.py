"""What a plan has to know of a model before anybody has run it: elements, floating-point operations and bytes per sequence."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Final, Literal

from ds_vertical.errors import CostsError
from ds_vertical.planner.activation_policy import spread
from ds_vertical.planner.machine import check_number, check_share, refuse
from ds_vertical.schedule.events import PRE, Unit

DTYPE_BYTES: Final = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Outline:
    """A model and a sequence length. `block_elements` in order of execution, `pre_elements` all that is outside the blocks.

    `block_flops`: of one block's forward over one sequence, `pre_flops` and `head_flops` of what stands before and behind.
    `passed_bytes`: what passes between two blocks for one sequence; `block_saved_bytes` and `head_saved_bytes`: what autograd
    keeps of one block's and of the suffix's forward. `largest_parameter`: elements.
    """

    name: str
    sequence_length: int
    dtype: str
    pre_elements: int
    block_elements: tuple[int, ...]
    largest_parameter: int
    block_flops: float
    pre_flops: float
    head_flops: float
    passed_bytes: int
    block_saved_bytes: int
    head_saved_bytes: int

    @property
    def num_elements(self) -> int:
        return self.pre_elements + sum(self.block_elements)

    def layers(self, blocks_per_layer: int) -> tuple[int, ...]:
        """Elements of each layer of so many consecutive blocks; the last may have fewer."""
        blocks = self.block_elements
        return tuple(sum(blocks[i : i + blocks_per_layer]) for i in range(0, len(blocks), blocks_per_layer))


@dataclass(frozen=True)
class Seconds:
    """One micro-batch through the pieces of a model: one block forward and backward (without recompute), prefix, suffix."""

    block_forward: float
    block_backward: float
    pre_forward: float
    pre_backward: float
    head: float

    def times(self, factor: float) -> Seconds:
        """All of them so much longer."""
        return Seconds(*(factor * getattr(self, field.name) for field in fields(self)))


def estimated(outline: Outline, sequences: int, flops_per_s: float) -> Seconds:
    """Seconds at a rate of floating-point operations: a backward has twice as many as its forward, the head has both."""
    if not flops_per_s > 0:
        raise CostsError(f"flops_per_s: got {flops_per_s!r}; write a rate above 0, per second")
    forward = sequences * outline.block_flops / flops_per_s
    pre, head = (sequences * flops / flops_per_s for flops in (outline.pre_flops, outline.head_flops))
    return Seconds(forward, 2 * forward, pre, 2 * pre, 3 * head)


def shaped(shape: ModelShape, seconds: Seconds, blocks_per_layer: int = 1) -> ModelShape:
    """`shape` with the seconds of its pieces; its last layer is not recomputed, as in the vertical order."""
    return replace(
        shape,
        forward_s=blocks_per_layer * seconds.block_forward,
        backward_s=blocks_per_layer * seconds.block_backward,
        pre_forward_s=seconds.pre_forward,
        pre_backward_s=seconds.pre_backward,
        head_s=seconds.head,
        recompute_last=False,
    )


def shape_of(
    outline: Outline,
    seconds: Seconds,
    *,
    sequences: int,
    blocks_per_layer: int = 1,
    num_shards: int = 1,
    generations: int = 1,
    part_elements: int | None = None,
    placement: Placement | None = None,
) -> ModelShape:
    """The model as the schedule sees it, with micro-batches of `sequences`."""
    elements = outline.layers(blocks_per_layer)
    param_bytes = DTYPE_BYTES[outline.dtype]
    made = max(*elements, outline.pre_elements) * param_bytes  # gradients as autograd makes them
    kept = max(blocks_per_layer * outline.block_saved_bytes, outline.head_saved_bytes + outline.block_saved_bytes)
    shape = ModelShape(
        outline.pre_elements,
        elements,
        0.0,
        0.0,
        sequences * outline.passed_bytes,
        param_bytes=param_bytes,
        num_shards=num_shards,
        generations=generations,
        part_elements=part_elements,
        working_bytes=made + sequences * kept,
        placement=placement or Placement(),
    )
    return shaped(shape, seconds, blocks_per_layer)


@dataclass(frozen=True)
class Placement:
    """Shares in [0, 1] of what rests on SSD, or (activations) off the device; the rest is in host memory, activations on
    the device. `gradients_on_ssd` is the share of the gradients that wait for their step; shares of activations are of the
    micro-batches, each of which rests in one tier."""

    parameters_on_ssd: float = 1.0
    state_on_ssd: float = 1.0
    gradients_on_ssd: float = 0.0
    activations_on_host: float = 0.0
    activations_on_ssd: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            check_share(f"placement.{field.name}", getattr(self, field.name))
        if self.activations_off_device > 1:
            raise refuse("placement", "activations_on_ssd", self.activations_on_ssd, f"{1 - self.activations_on_host}")

    @property
    def activations_off_device(self) -> float:
        return self.activations_on_host + self.activations_on_ssd

    def activation_tiers(self, num_micro_batches: int) -> tuple[Literal["device", "host", "ssd"], ...]:
        """Where each micro-batch's activations rest."""
        tiers: tuple[Literal["host", "ssd", "device"], ...] = ("host", "ssd", "device")  # the last one: index -1
        return tuple(tiers[i] for i in spread(num_micro_batches, (self.activations_on_host, self.activations_on_ssd)))


@dataclass(frozen=True)
class ModelShape:
    """A model as the schedule sees it: elements per unit, seconds per micro-batch, bytes.

    `forward_s`, `backward_s`: one layer (of largest size), one micro-batch; backward without the recompute, with the sum
    into the gradient. Smaller layers cost in proportion to their elements. `head_s`: suffix, loss and their backward.
    `activation_bytes`: what passes from a layer to the next for one micro-batch. `num_shards`: ranks that share each
    parameter. `state_bytes`: per element, fp32 master and two moments. `generations`: copies of the files of state and
    parameters on SSD (2 where steps may be discarded). `part_elements`: most elements of a piece that
    goes through the optimizer pipeline by itself (null: a unit or its part at once). `working_bytes`: what a layer needs on
    the device while it runs backward for one micro-batch. `files`: bytes of the parameter files of `pre` and of each layer on
    this rank, `gradients`: their elements that the optimizer steps, `slot_bytes`: of the largest piece's state (null: what
    placement, elements and `part_elements` say). Raises CostsError.
    """

    pre_elements: int
    layer_elements: tuple[int, ...]
    forward_s: float
    backward_s: float
    activation_bytes: int
    pre_forward_s: float = 0.0
    pre_backward_s: float = 0.0
    head_s: float = 0.0
    param_bytes: int = 2
    gradient_bytes: int = 4
    state_bytes: int = 12
    num_shards: int = 1
    generations: int = 1
    part_elements: int | None = None
    recompute_last: bool = True
    working_bytes: int = 0
    placement: Placement = Placement()
    files: tuple[int, ...] | None = None
    gradients: tuple[int, ...] | None = None
    slot_bytes: int | None = None

    def __post_init__(self) -> None:
        if not self.layer_elements:
            raise refuse("model", "layer_elements", self.layer_elements, "the elements of each layer, at least one")
        for elements in (self.pre_elements, *self.layer_elements):
            check_number("model", "layer_elements and pre_elements", elements, 0, "whole numbers, 0 or more", whole=True)
        for key in ("forward_s", "backward_s", "pre_forward_s", "pre_backward_s", "head_s"):
            check_number("model", key, getattr(self, key), 0.0, "seconds, 0 or more")
        for key in ("activation_bytes", "gradient_bytes", "state_bytes", "working_bytes"):
            check_number("model", key, getattr(self, key), 0, "bytes, 0 or more", whole=True)
        for key in ("param_bytes", "num_shards", "generations"):
            check_number("model", key, getattr(self, key), 1, "a whole number, 1 or more", whole=True)
        if self.part_elements is not None:
            check_number("model", "part_elements", self.part_elements, 1, "elements, 1 or more, or null", whole=True)

    @property
    def num_layers(self) -> int:
        return len(self.layer_elements)

    @property
    def num_elements(self) -> int:
        return self.pre_elements + sum(self.layer_elements)

    @property
    def unit_files(self) -> tuple[float, ...]:
        """Bytes of the parameter files of `pre` and of each layer on this rank."""
        each = self.param_bytes * self.placement.parameters_on_ssd / self.num_shards
        return tuple(elements * each for elements in self._units) if self.files is None else self.files

    @property
    def written_bytes(self) -> float:
        """To SSD, for each element that is stepped: state, and the parameter."""
        placement = self.placement
        return self.state_bytes * placement.state_on_ssd + self.param_bytes * placement.parameters_on_ssd

    @property
    def unit_gradients(self) -> tuple[int, ...]:
        """Elements of `pre` and of each layer that have a gradient, on all ranks."""
        return self._units if self.gradients is None else self.gradients

    @property
    def _units(self) -> tuple[int, ...]:
        return (self.pre_elements, *self.layer_elements)

    def elements(self, unit: Unit | None) -> int:
        """All elements of `pre` or of a layer. `suf` has none of its own. Raises CostsError for a layer it lacks."""
        if not isinstance(unit, int):
            return self.pre_elements if unit == PRE else 0
        if unit >= self.num_layers:
            raise CostsError(f"the schedule names layer {unit}; the model has {self.num_layers}")
        return self.layer_elements[unit]

    def shard(self, unit: Unit | None) -> float:
        """Elements of a unit that this rank keeps."""
        return self.elements(unit) / self.num_shards
