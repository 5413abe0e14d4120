"""One call of a block: what its backward needs of it, and the tensors that it takes and gives."""

from __future__ import annotations

import contextvars
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ds_vertical.model.state.block_state import BlockState, replace_in_objects, tensors_in_objects
from ds_vertical.model.tensor_refs import key_of
from ds_vertical.model.thread_state import ThreadState

Position = tuple[int, ...]


@dataclass(frozen=True)
class BlockGraph:
    """A block's autograd graph from end to end: the twins of its inputs by the inputs' ids, and its outputs (flattened)."""

    twins: dict[int, torch.Tensor]
    outputs: list[Any]


@dataclass
class BlockCall:
    """What backward needs of one block call: its arguments (flattened), leaves made of its outputs, state at its entry.

    `args`: the first `num_given` are arguments, the others tensors that the block found in `found`, the modules' state.
    `leaves`: those of returned values, then those of what the block has written elsewhere, at the places `written`. `graph` is
    None where backward recomputes.
    """

    args: list[Any]
    num_given: int
    spec: pytree.TreeSpec
    found: BlockState | None
    written: list[Position]
    leaves: list[Any]
    state: ThreadState
    context: contextvars.Context
    versions: list[int]
    graph: BlockGraph | None

    def drop_leaf_grads(self) -> list[torch.Tensor | None]:
        grads = [leaf.grad if isinstance(leaf, torch.Tensor) else None for leaf in self.leaves]
        self.leaves = []
        return grads


def tensors_among(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among the values, each once."""
    return list({id(value): value for value in values if isinstance(value, torch.Tensor)}.values())


def is_given_as_it_is(kwargs: dict[str, Any], value: Any) -> bool:
    """Whether a block gets an argument as the object that it is: it may write into a list or a dict."""
    return isinstance(value, list | dict) and value is not kwargs


def with_state(flat: list[Any], found: BlockState | None) -> list[Any]:
    """A block's arguments and, behind them, the tensors that it finds elsewhere."""
    given = set(map(id, flat))
    return flat if found is None else [*flat, *(tensor for tensor in found.inputs() if id(tensor) not in given)]


def written_by(found: BlockState | None, outputs: Sequence[Any], but: Collection[int] = ()) -> dict[Position, torch.Tensor]:
    """What a block has written that requires grad, by position: into what it found, then into objects that it returned. `but`:
    ids of tensors that were there before."""
    written = {(0, *place): tensor for place, tensor in found.written(but).items()} if found is not None else {}
    return written | {(1, *place): tensor for place, tensor in tensors_in_objects(outputs) if id(tensor) not in but}


def put_leaves(found: BlockState | None, outputs: Sequence[Any], leaves: dict[int, torch.Tensor]) -> None:
    if found is not None:
        found.replace(leaves)
    replace_in_objects(outputs, leaves)


def requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def versions_of(values: Sequence[Any]) -> list[int]:
    """How often each tensor has been written in place; inference tensors keep no count (nor does autograd save them)."""
    return [value._version for value in values if isinstance(value, torch.Tensor) and not value.is_inference()]


def changed(values: Sequence[Any], versions: Sequence[int], kept: Collection[int]) -> bool:
    """Whether one of the tensors has been written in place since, but those over storages that are `kept`."""
    now = versions_of(values)
    if now == versions:
        return False
    counted = [value for value in values if isinstance(value, torch.Tensor) and not value.is_inference()]
    return any(a != b and key_of(t.untyped_storage()) not in kept for t, a, b in zip(counted, now, versions, strict=True))


def leaf_of(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def twins_of(values: Sequence[Any], twins: dict[int, torch.Tensor]) -> list[Any]:
    return [twin_of(value, twins) for value in values]


def twin_of(value: Any, twins: dict[int, torch.Tensor]) -> Any:
    """A detached copy (same storage) of a boundary tensor, the same copy for the same tensor."""
    if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
        return value
    if not value.requires_grad:
        return value.detach()
    if id(value) not in twins:
        twins[id(value)] = value.detach().requires_grad_()
    return twins[id(value)]
