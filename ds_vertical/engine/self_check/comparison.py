"""What two orders have computed over the same micro-batches, held against each other: outputs, losses, gradients, state."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ds_vertical.engine.self_check.digests import (
    Digest,
    digest,
    digests_of,
    distance_from_sum,
    largest_distance,
    wrong_gradients,
)
from ds_vertical.model.layers import LayerMap
from ds_vertical.model.state.module_state import TensorItem, key_of_item, same_bits
from ds_vertical.model.state.snapshot import StateChange


@dataclass(frozen=True)
class Difference:
    """`what` differs from torch's own order, as a sentence. `layer`: where (`num_layers`: behind the last; None: nobody's)."""

    what: str
    layer: int | None = None


@dataclass
class Record:
    """What one order has computed: digests by micro-batch and block, or parameter. `sums`: of the gradients of a layer's
    parameters, over the micro-batches, where the order makes them; `around`: of those outside the layers. `sum_dtype`: in which
    the settings have them summed."""

    sum_dtype: torch.dtype

    outputs: dict[tuple[int, int], list[Digest]] = field(default_factory=dict)
    losses: list[Digest] = field(default_factory=list)
    gradients: dict[tuple[int, int], Digest] = field(default_factory=dict)
    around: list[Digest] = field(default_factory=list)
    sums: dict[int, Digest] = field(default_factory=dict)

    def note_output(self, micro_batch: int, block: int, output: object) -> None:
        """A block has returned `output`."""
        self.outputs[micro_batch, block] = digests_of(output)

    def note_gradient(self, micro_batch: int, param: nn.Parameter) -> None:
        """A parameter has its gradient of a micro-batch."""
        assert param.grad is not None
        self.gradients[micro_batch, id(param)] = digest(param.grad)

    def note_sum(self, param: nn.Parameter, total: torch.Tensor, rounded: torch.dtype) -> None:
        """A parameter's gradients of all micro-batches are summed. `rounded`: to this dtype first, unless it is finer."""
        rounds = rounded != param.dtype and _bits(rounded) <= _bits(param.dtype)
        through = (self.sum_dtype, rounded) if rounds else (self.sum_dtype,)
        self.sums[id(param)] = digest(total, torch.float16 if torch.float16 in through else min(through, key=_bits))

    def largest(self, micro_batch: int) -> float:
        """The norm of the largest gradient of a micro-batch that has one."""
        norms = (each.norm for (number, _), each in self.gradients.items() if number == micro_batch)
        return max(filter(math.isfinite, norms), default=0.0)


class Comparison:
    """Of two orders over one model. `around`: the parameters outside the layers, whose gradients are summed."""

    def __init__(self, model: nn.Module, layers: LayerMap, around: Sequence[nn.Parameter]) -> None:
        self._layers = layers
        self._around = around
        self._names = {id(param): name for name, param in model.named_parameters()}

    def differences(self, plain: Record, ours: Record) -> Iterator[Difference]:
        """Of outputs, losses and gradients, in the order in which the forward and the backward compute them."""
        for (micro_batch, block), outputs in plain.outputs.items():
            index, distance = largest_distance(ours.outputs.get((micro_batch, block), []), outputs)
            if index >= 0:
                what = f"{where(self._layers, block)}: output tensor {index} of micro-batch {micro_batch} {_differs(distance)}"
                yield Difference(what, layer_of(self._layers, block))
        index, distance = largest_distance(ours.losses, plain.losses)
        if index >= 0:
            what = f"the loss of micro-batch {index} {_differs(distance)}; the outputs of all layers agree"
            yield Difference(what, self._layers.num_layers)
        for micro_batch in range(len(plain.losses)):
            for layer in reversed(range(self._layers.num_layers)):
                yield from self._gradient_differences(micro_batch, layer, plain, ours)
        for layer in reversed(range(self._layers.num_layers)):
            for param in self._layers.units[layer]:
                if (what := self._sum_fault(param, ours)) is not None:
                    yield Difference(f"{where(self._layers, self._layers.layers[layer][0])}: {what}", layer)
        for param in self._around:
            if (what := self._sum_fault(param, plain)) is not None:
                yield Difference(f"outside the layers: {what}")
        around = [self._names[id(param)] for param in self._around]
        sums = (dict(zip(around, record.around, strict=True)) for record in (ours, plain))
        for name, distance in wrong_gradients(
            *sums, largest=max(map(plain.largest, range(len(plain.losses))), default=0.0)
        ).items():
            what = f"outside the layers: the gradient of {name}, summed over micro-batches 0 to {len(plain.losses) - 1},"
            yield Difference(f"{what} {_differs(distance)}; outputs, losses and the layers' gradients agree")

    def _gradient_differences(self, micro_batch: int, layer: int, plain: Record, ours: Record) -> Iterator[Difference]:
        keys = {self._names.get(id(param), "?"): (micro_batch, id(param)) for param in self._layers.units[layer]}
        both = (
            {name: record.gradients[key] for name, key in keys.items() if key in record.gradients} for record in (ours, plain)
        )
        for name, distance in wrong_gradients(*both, largest=plain.largest(micro_batch)).items():
            what = f"the gradient of {name} for micro-batch {micro_batch} {_differs(distance)}; outputs and losses agree"
            yield Difference(f"{where(self._layers, self._layers.layers[layer][0])}: {what}", layer)

    def _sum_fault(self, param: nn.Parameter, record: Record) -> str | None:
        """What is wrong with a parameter's sum, by the gradients that it is made of. Those have agreed, so it is torch's own
        order's, too, and no order has to hold the sums of all layers."""
        total, count = record.sums.get(id(param)), len(record.losses)
        each = [(number, id(param)) for number in range(count)]
        parts = [record.gradients[key] for key in each if key in record.gradients]
        distance = 0.0 if total is None else distance_from_sum(total, parts)
        if total is None or distance <= total.tolerance:
            return None
        far = "has other numbers" if distance == float("inf") else f"is {distance:.1e} of their norm away from that"
        name = self._names.get(id(param), "?")
        return (
            f"what is kept as the sum of the gradients of {name} over micro-batches 0 to {count - 1} {far}; each of them agrees"
            " with torch's own order"
        )


def _bits(dtype: torch.dtype) -> int:
    return torch.finfo(dtype).bits


def layer_of(layers: LayerMap, block: int) -> int:
    """The layer that has a block, by the block's number."""
    return next(index for index, blocks in enumerate(layers.layers) if block in blocks)


def where(layers: LayerMap, block: int) -> str:
    """A block's layer and path, for messages."""
    return f"layer {layer_of(layers, block)} ({layers.blocks[block].path})"


def _differs(distance: float) -> str:
    if distance == float("inf"):
        return "differs wholly from torch's own order: one of both is missing, of another shape or not finite"
    return f"differs by {distance:.1e} of its norm from torch's own order"


def state_differences(
    left: Sequence[tuple[StateChange, Any]], own: Sequence[Any], but: Collection[Hashable]
) -> Iterator[Difference]:
    """What modules hold after both orders: numbers and tensors; other objects are each order's own. `but`: not compared."""
    for (change, plain), ours in zip(left, own, strict=True):
        if key_of_item(change.item) not in but and not agrees(change, plain, ours):
            what = f"{change.item.path}, which the forward changes, holds something else afterwards than in torch's own order"
            yield Difference(f"{what}; outputs, losses and gradients agree")


def agrees(change: StateChange, plain: Any, ours: Any) -> bool:
    """Whether an item of state holds the same in two captures of it, tensors up to rounding."""
    item = change.item
    if item.is_generator:
        return item.is_global or item.same(plain, ours)
    if isinstance(item, TensorItem):
        return _close(plain.copy, ours.copy)
    values = [[value for _, contents in pairs for value in contents.values()] for pairs in (plain, ours)]
    return len(values[0]) == len(values[1]) and all(map(_agree, *values))


def _agree(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _close(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_agree, one, other))
    if isinstance(one, bool | int | float | complex | str | bytes):
        return type(one) is type(other) and one == other
    return type(one) is type(other)


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if same_bits(one, other):
        return True
    index, _ = largest_distance([digest(one)], [digest(other)])
    return index < 0
