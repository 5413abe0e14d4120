"""What a plan has to know of a model before anybody has run it: elements, floating-point operations and bytes per sequence."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Final

from ds_vertical.costs import ModelShape, Placement
from ds_vertical.machine import CostsError

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
