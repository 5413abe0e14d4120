"""The tensors and gradients that pass between the layers of one micro-batch, as an activation store sees them.

A store moves their memory to another tier and back while no code can read them. So it asks here which tensors these are, which
lists of this package hold them, and where the forward is parked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType

import torch
from torch.utils import _pytree as pytree

from ds_vertical.model.autograd_segments import Segments, Taken
from ds_vertical.model.block_call import BlockCall, tensors_among
from ds_vertical.model.forward_coroutine import ForwardCoroutine
from ds_vertical.model.kept.kept_blocks import KeptCall
from ds_vertical.model.kept.slots import KeptStorage
from ds_vertical.model.layers import LayerMap
from ds_vertical.model.recorded_blocks import RecordedBlocks
from ds_vertical.schedule.events import Unit


class BoundaryTensors:
    """What one micro-batch hands from layer to layer. It reads the records of the others, and keeps none of its own."""

    def __init__(self, layers: LayerMap, forward: ForwardCoroutine, blocks: RecordedBlocks, segments: Segments) -> None:
        self._layers = layers
        self._forward = forward
        self._calls: Mapping[int, BlockCall] = blocks.calls
        self._kept: dict[int, KeptCall] = {} if blocks.kept is None else blocks.kept.calls
        self._segments = segments

    @property
    def frame(self) -> FrameType | None:
        """The innermost frame of the parked forward; None where it is not parked."""
        return self._forward.frame

    @property
    def parked_call(self) -> list[object]:
        """The arguments of the block call ahead of which the forward is parked; empty where it is parked elsewhere."""
        return self._forward.parked_call

    def handed_over(self, layer: int) -> list[torch.Tensor]:
        """The tensors with which the parked forward calls a layer; none unless it is parked ahead of that call."""
        there = self._forward.parked_call and self._forward.parked_at == self._layers.layers[layer][0]
        return tensors_among(pytree.tree_leaves(self._forward.parked_call)) if there else []

    def inputs(self, layer: int) -> list[torch.Tensor]:
        """The tensors that the backward of a layer's blocks takes; none before the layer's forward."""
        calls = (self._calls.get(block) for block in self._layers.layers[layer])
        return tensors_among(value for call in calls if call is not None for value in call.args)

    def has_made(self, tensor: torch.Tensor) -> bool:
        """Whether this forward made the tensor: as a block's output, or by a node of its own."""
        if tensor.grad_fn is not None:
            return tensor.grad_fn._sequence_nr() >= self._forward.first_node  # type: ignore[attr-defined]
        return any(leaf is tensor for call in self._calls.values() for leaf in call.leaves)

    def lists(self, layer: int) -> list[list[object]]:
        """The lists that hold a layer's inputs for its backward: those of its blocks' calls, and of the block before."""
        blocks = self._layers.layers[layer]
        calls = [call for b in range(blocks[0] - 1, blocks[-1] + 1) if (call := self._calls.get(b)) is not None]
        lists: list[list[object]] = [values for call in calls for values in (call.args, call.leaves)]
        return lists + [kept.twins for b in blocks if (kept := self._kept.get(b)) is not None]

    def kept(self, layer: int) -> list[KeptStorage]:
        """What the forward of a layer's blocks has kept for their backward, as far as nobody else holds it."""
        calls = (self._kept.get(block) for block in self._layers.layers[layer])
        return [value for call in calls if call is not None for value in call.values]

    def forget_kept(self, layer: int) -> None:
        """Let the backward of a layer's blocks compute all again."""
        for block in self._layers.layers[layer]:
            self._kept.pop(block, None)

    def take_gradients(self, unit: Unit, wanted: Callable[[torch.Tensor], bool]) -> list[Taken]:
        """Take the wanted ones of the gradients that wait for a unit's backward, each with the call that puts it back."""
        if not isinstance(unit, int):
            return self._segments.take_waiting(wanted)
        call = self._calls.get(self._layers.layers[unit][-1])
        taken: list[Taken] = []
        for leaf in tensors_among(call.leaves if call is not None else ()):
            if leaf.grad is not None and wanted(leaf.grad):
                taken.append((leaf.grad, partial(setattr, leaf, "grad")))
                leaf.grad = None
        return taken
