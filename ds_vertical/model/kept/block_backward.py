"""The backward of one block's graph, from the gradients of its outputs to those of its inputs and parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge, Node

from ds_vertical.interrupts import Changed
from ds_vertical.model.autograd_segments import take_as_it_comes
from ds_vertical.model.block_call import BlockGraph, requires_grad

InputGradients = dict[int, torch.Tensor]  # of a block's inputs, by the inputs' ids
_apart: set[int] = set()  # ids of leaves that `Leaves.apart` holds


def roots_of(graph: BlockGraph, grads: Sequence[torch.Tensor | None]) -> list[tuple[torch.Tensor | GradientEdge, torch.Tensor]]:
    """The outputs from which the backward starts, with their gradients."""
    pairs: list[tuple[torch.Tensor | GradientEdge, torch.Tensor]] = []
    for value, grad in zip(graph.outputs, grads, strict=True):
        if grad is not None and (isinstance(value, GradientEdge) or requires_grad(value)):
            pairs.append((value, grad))
    return pairs


def run_backward(
    graph: BlockGraph, grads: Sequence[torch.Tensor | None], waiting: Mapping[int, torch.Tensor]
) -> InputGradients:
    """Run a block's graph backward; gradients of parameters go to their `.grad`, those of the inputs are returned.

    `waiting`: by the inputs' ids, the sums of later blocks, with which this block's sums start.
    """
    pairs = [*roots_of(graph, grads), *((graph.twins[key], grad) for key, grad in waiting.items())]
    if not pairs:
        return {}
    nodes = [take_as_it_comes(twin) for twin in graph.twins.values()]  # held as long as backward runs
    torch.autograd.backward([value for value, _ in pairs], [grad for _, grad in pairs])
    del nodes
    return {key: twin.grad for key, twin in graph.twins.items() if twin.grad is not None}


@dataclass(frozen=True)
class Leaves:
    """The parameters and other leaves that a block's graph leads to, but the twins of its inputs."""

    tensors: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, graph: BlockGraph) -> Leaves:
        """Found by a walk over the graph, ahead of its backward."""
        twins = set(map(id, graph.twins.values()))
        edges = (
            each if isinstance(each, GradientEdge) else torch.autograd.graph.get_gradient_edge(each)
            for each in graph.outputs
            if isinstance(each, GradientEdge) or requires_grad(each)
        )
        stack: list[Node] = [edge.node for edge in edges]
        seen, found = set(stack), dict[int, torch.Tensor]()
        while stack:
            node = stack.pop()
            variable = getattr(node, "variable", None)
            if isinstance(variable, torch.Tensor) and id(variable) not in twins:
                found[id(variable)] = variable
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    stack.append(following)
        return cls(tuple(found.values()))

    @contextlib.contextmanager
    def apart(self, made: list[torch.Tensor | None]) -> Iterator[None]:
        """Within the block the leaves have no gradient; what they have at its end goes to `made`, and they have theirs back.
        `is_apart` says so of each leaf meanwhile."""
        before = [leaf.grad for leaf in self.tensors]

        def take_apart() -> None:
            for leaf in self.tensors:
                leaf.grad = None
            _apart.update(map(id, self.tensors))

        def put_back() -> None:
            _apart.clear()
            for leaf, grad in zip(self.tensors, before, strict=True):
                leaf.grad = grad

        with Changed(put_back, take_apart):
            yield
            made += (leaf.grad for leaf in self.tensors)

    def add(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Let gradients that were made apart be the leaves'."""
        for leaf, grad in zip(self.tensors, grads, strict=True):
            if grad is not None:
                leaf.grad = grad if leaf.grad is None else leaf.grad + grad


def is_apart(leaf: torch.Tensor) -> bool:
    """Whether the gradient that a leaf gets now is only compared, and no part of the step's."""
    return id(leaf) in _apart


def same_gradients(mine: Sequence[torch.Tensor | None], theirs: Sequence[torch.Tensor | None]) -> bool:
    """Whether two lists of gradients are the same: which there are, how they lie in memory, and each bit."""
    return len(mine) == len(theirs) and all(map(_same, mine, theirs))


def all_finite(grads: Sequence[torch.Tensor | None]) -> bool:
    """Whether no element of the gradients is infinite or NaN."""
    dense = (grad if grad.layout is torch.strided else grad.to_dense() for grad in grads if grad is not None)
    return all(bool(torch.isfinite(grad).all()) for grad in dense)


def _same(mine: torch.Tensor | None, theirs: torch.Tensor | None) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    if mine.layout is not torch.strided or theirs.layout is not torch.strided:
        return mine.layout is theirs.layout and _same(mine.to_dense(), theirs.to_dense())
    alike = mine.size() == theirs.size() and mine.stride() == theirs.stride() and mine.dtype == theirs.dtype
    return alike and torch.equal(_bytes(mine), _bytes(theirs))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
