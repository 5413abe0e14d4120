"""What a plan has to know of a model before anybody has run it: elements, floating-point operations and bytes per sequence."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Final

from ds_vertical.errors import CostsError
from ds_vertical.types import ModelShape, Placement

DTYPE_BYTES: Final = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class ModelSpec:
    """A model and a sequence length, in tokens. `block_elements`: parameters' elements of each block in order of execution;
    `pre_elements`: those of all that is outside the blocks.

    `block_flops`: floating-point operations of one block's forward over one sequence, `pre_flops` and `head_flops` of what
    stands before and behind the blocks. `passed_bytes`: what passes between two blocks for one sequence; `block_saved_bytes`
    and `head_saved_bytes`: what autograd keeps of one block's and of the suffix's forward. `largest_parameter`: elements.

    `trained`: of the elements outside the blocks and of each block, those that are trained (None: all). `block_frozen_flops`
    and `head_frozen_flops`: of the forward's operations, those with weights that are not trained.
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
    trained: tuple[int, ...] | None = None
    block_frozen_flops: float = 0.0
    head_frozen_flops: float = 0.0

    @property
    def num_elements(self) -> int:
        """Of all parameters."""
        return self.pre_elements + sum(self.block_elements)

    @property
    def trained_elements(self) -> int:
        """Of all parameters that are trained."""
        return self.num_elements if self.trained is None else sum(self.trained)

    def layers(self, blocks_per_layer: int) -> tuple[int, ...]:
        """Elements of each layer of so many consecutive blocks; the last may have fewer."""
        return _by_layer(self.block_elements, blocks_per_layer)

    def gradients(self, blocks_per_layer: int) -> tuple[int, ...] | None:
        """Trained elements outside the blocks and of each layer; None: all."""
        return None if self.trained is None else (self.trained[0], *_by_layer(self.trained[1:], blocks_per_layer))


def _by_layer(blocks: tuple[int, ...], blocks_per_layer: int) -> tuple[int, ...]:
    return tuple(sum(blocks[i : i + blocks_per_layer]) for i in range(0, len(blocks), blocks_per_layer))


@dataclass(frozen=True)
class Seconds:
    """Seconds that one micro-batch takes in the pieces of a model: in one block's forward and backward (without recompute), in
    the prefix, in the suffix (`head`, forward and backward together)."""

    block_forward: float
    block_backward: float
    pre_forward: float
    pre_backward: float
    head: float

    def times(self, factor: float) -> Seconds:
        """All of them so much longer."""
        return Seconds(*(factor * getattr(self, field.name) for field in fields(self)))


def without_frozen(spec: ModelSpec, seconds: Seconds) -> Seconds:
    """`seconds`, of a model that is trained whole, for what of it is trained: a backward, which has twice its forward's
    operations, leaves half of those with frozen weights out, since these have no gradient."""
    if spec.trained is None:
        return seconds
    block, head = 2 * spec.block_flops, 3 * spec.head_flops
    return replace(
        seconds,
        block_backward=seconds.block_backward * (1 - spec.block_frozen_flops / block if block else 1),
        pre_backward=seconds.pre_backward if spec.trained[0] else 0.0,
        head=seconds.head * (1 - spec.head_frozen_flops / head if head else 1),
    )


def estimated(spec: ModelSpec, sequences: int, flops_per_s: float) -> Seconds:
    """Seconds at a rate of floating-point operations: a backward has twice as many as its forward, the head has both; see
    `without_frozen`."""
    if not flops_per_s > 0:
        raise CostsError(f"flops_per_s: got {flops_per_s!r}; write a rate above 0, per second")
    forward = sequences * spec.block_flops / flops_per_s
    pre, head = (sequences * flops / flops_per_s for flops in (spec.pre_flops, spec.head_flops))
    return without_frozen(spec, Seconds(forward, 2 * forward, pre, 2 * pre, 3 * head))


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


@dataclass(frozen=True)
class Division:
    """How a model and its batch are cut up: `sequences` of a micro-batch, blocks of a layer, ranks that share each parameter
    (`num_shards`); `generations`, `part_elements` and `placement` as in `ModelShape`."""

    sequences: int
    blocks_per_layer: int = 1
    num_shards: int = 1
    generations: int = 1
    part_elements: int | None = None
    placement: Placement = Placement()


def shape_of(spec: ModelSpec, seconds: Seconds, division: Division) -> ModelShape:
    """The model as the schedule sees it. `seconds`: of one micro-batch of that many sequences."""
    blocks_per_layer, sequences = division.blocks_per_layer, division.sequences
    elements = spec.layers(blocks_per_layer)
    param_bytes = DTYPE_BYTES[spec.dtype]
    gradients = spec.gradients(blocks_per_layer)
    made = max(gradients or (*elements, spec.pre_elements)) * param_bytes  # gradients as autograd makes them
    copied = 0 if gradients is None else spec.largest_parameter * param_bytes  # of a frozen one, in a kernel's order
    kept = max(blocks_per_layer * spec.block_saved_bytes, spec.head_saved_bytes + spec.block_saved_bytes)
    shape = ModelShape(
        spec.pre_elements,
        elements,
        0.0,
        0.0,
        sequences * spec.passed_bytes,
        param_bytes=param_bytes,
        num_shards=division.num_shards,
        generations=division.generations,
        part_elements=division.part_elements,
        working_bytes=made + copied + sequences * kept,
        placement=division.placement,
        gradients=gradients,
    )
    return shaped(shape, seconds, blocks_per_layer)
