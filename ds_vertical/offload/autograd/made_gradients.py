"""When autograd has made a parameter's gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from torch import nn
from torch.autograd.graph import get_gradient_edge

from ds_vertical.model.kept.block_backward import is_apart

if TYPE_CHECKING:
    from torch.autograd.graph import Node
    from torch.utils.hooks import RemovableHandle


class MadeGradients:
    """Hears of the gradients of a unit's large parameters as autograd makes them, from the unit's first backward of a step to
    its REDUCE. `take`: called with a parameter's number; whether it has taken the gradient.

    [Note: as they are made] A gradient is added to its sum as soon as it is made, so that a layer's gradients are not all in
    memory beside the sum. The hook for that is on the node that sets `param.grad`, behind all hooks that users have put there
    or on the parameter: they find the gradient as ever. Hooks may also look at gradients of other parameters. So a layer in
    whose backward code of others runs has its gradients taken behind the whole backward, and so has every layer where a
    micro-batch's code calls the model several times. Autograd may come to a parameter twice in one backward (two blocks of a
    layer share it, or a checkpoint inside the block runs a backward of its own). Its two gradients are to be added in the
    model's dtype, as in stock, ahead of the sum. The second one shows that the first was taken too soon: the step starts over,
    and from then on all gradients are taken behind the whole backward of their layer.
    """

    def __init__(self, params: Mapping[int, nn.Parameter], take: Callable[[int], bool]) -> None:
        self.again = False  # whether autograd has come to a parameter twice in one backward
        self._take = take
        self._taken: set[int] = set()
        self._is_open = False
        self._nodes: list[Node] = []  # which autograd would forget with the graph, and the hooks with them
        self._handles: list[RemovableHandle] = []
        for index, param in params.items():
            node = get_gradient_edge(param).node
            self._nodes.append(node)
            self._handles.append(node.register_hook(partial(self._made, index, param)))

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Within the block one backward of the unit runs."""
        self._taken.clear()
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def end(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._nodes.clear()

    def _made(self, index: int, param: nn.Parameter, *_: object) -> None:
        if not self._is_open or is_apart(param):
            return
        if index in self._taken:
            self.again = True
        elif self._take(index):
            self._taken.add(index)
