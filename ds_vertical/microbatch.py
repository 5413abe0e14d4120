"""Run one micro-batch's own forward as a coroutine that parks at layer calls, and its backward layer by layer.

What the model does outside its blocks keeps its autograd graph and runs backward by segments: see `segments`.

[Note: grad mode] A block's forward runs with the grad mode and the requires_grad of its inputs that it has in stock, though
most graphs are dropped at once: torch picks kernels by them (attention with a mask that requires grad takes another one),
and modules ask for them. Only so does F give the bits of stock's forward and of the recompute in B, and only so has B
the same bits with the graph that F made as with one that it makes anew.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import torch
from greenlet import GreenletExit, getcurrent
from torch import nn
from torch.utils import _pytree as pytree

from ds_vertical.buffers import buffers_kept
from ds_vertical.layers import LayerError, LayerMap, Unit
from ds_vertical.segments import Segments, Taken, take_as_it_comes
from ds_vertical.stubs import Coroutine, Stubs
from ds_vertical.threadstate import ThreadState, applied, inference_guard

_NOTHING = range(0)  # no block may run: prefix and suffix


@dataclass(frozen=True)
class BlockGraph:
    """A block's autograd graph from end to end: the twins of its inputs by the inputs' ids, and its outputs (flattened)."""

    twins: dict[int, torch.Tensor]
    outputs: list[Any]


@dataclass
class BlockCall:
    """What backward needs of one block call: its arguments (flattened), leaves made of its outputs, state at its entry.

    `graph` is None where backward recomputes.
    """

    args: list[Any]
    spec: pytree.TreeSpec
    leaves: list[Any]
    state: ThreadState
    context: contextvars.Context
    versions: list[int]
    graph: BlockGraph | None

    def drop_leaf_grads(self) -> list[torch.Tensor | None]:
        grads = [leaf.grad if isinstance(leaf, torch.Tensor) else None for leaf in self.leaves]
        self.leaves = []
        return grads


class MicroBatch:
    """One micro-batch's pass over the model.

    `body` runs the user's unmodified forward and returns anything; `advance` runs it up to a layer's end, `finish` to
    its own end. `keep` says whether block inputs are kept for backward (training) or not (evaluation). `run_on`: run the
    glue after a layer, up to the next one's call, at once; so that nobody holds a layer's inputs while the forward is parked.
    """

    def __init__(
        self,
        body: Callable[[], Any],
        layers: LayerMap,
        stubs: Stubs,
        state: ThreadState,
        keep: bool,
        run_on: bool = False,
    ) -> None:
        self.layers = layers
        self.stubs = stubs
        self.keep = keep
        self.calls: dict[int, BlockCall] = {}
        self.result: Any = None
        self._state = state.without_autocast_cache()
        self._guard: Any = None
        self._target = _NOTHING
        self._keep_graph = False
        self._done_block = -1
        self._parked_at = -1
        self._run_on = run_on
        self.parked_call: list[Any] = []
        self._first_node = 0
        self._segments = Segments()
        self._coroutine = Coroutine(lambda: self._run(body))
        self._coroutine.micro_batch = self
        self._coroutine.gr_context = contextvars.copy_context()

    # ---- forward: the hub's side

    def start(self) -> None:
        """Run the prefix: up to the first block call."""
        self._first_node = torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]
        self._switch(_NOTHING)

    def advance(self, layer: int, keep_graph: bool = False) -> None:
        """Run the glue before layer `layer` and the layer itself. Raises LayerError when the model calls another one.

        `keep_graph`: its backward takes the graph made here instead of a recompute.
        """
        blocks = self.layers.layers[layer]
        self._keep_graph = keep_graph
        self._switch(blocks)
        if self._done_block != blocks[-1]:
            if not self._coroutine.dead:
                self._wrong_order(f"the model called block {self._path(self._parked_at)} out of turn")
            self._wrong_order(f"the model's forward ended before block {self._path(blocks[-1])}")

    def finish(self) -> Any:
        """Run the suffix to the end of the forward and return what `body` returned."""
        self._switch(_NOTHING)
        if not self._coroutine.dead:
            self._wrong_order("the model called a block once more after its last layer")
        result, self.result = self.result, None
        return result

    def close(self) -> None:
        """End a parked forward (after an error) so that nothing of it outlives the step."""
        if self._coroutine and not self._coroutine.dead:
            with self._entered():
                self._coroutine.throw(GreenletExit)
        self.calls.clear()
        self._segments.clear()

    def _switch(self, target: range) -> None:
        self._target = target
        self._coroutine.parent = getcurrent()
        with self._entered():
            self._coroutine.switch()

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        """The forward's thread state for the block, the hub's afterwards."""
        outer = ThreadState.capture()
        self._guard = None  # back to the inference mode in which the forward parked
        guard = inference_guard(self._state.inference)
        self._state.apply()
        try:
            yield
        finally:
            self._state = ThreadState.capture()
            del guard
            # A forward may park inside its own inference mode: the hub's holds until it is entered again.
            self._guard = inference_guard(outer.inference)
            outer.apply()

    def _run(self, body: Callable[[], Any]) -> None:
        self.result = body()

    def _wrong_order(self, what: str) -> None:
        raise LayerError(
            f"{what}; the schedule runs every block exactly once, in the order"
            f" {', '.join(block.path for block in self.layers.blocks[:6])}, ...:"
            " name the layers in their order of execution in vertical_schedule.layers, without those that some micro-batch does"
            " not call"
        )

    def _path(self, block: int) -> str:
        return self.layers.blocks[block].path

    # ---- forward: the coroutine's side

    def call_block(self, block: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called in place of a block's forward: park until the schedule reaches the block, run it, park at the layer's end."""
        if block not in self._target or block <= self._done_block:
            self._parked_at = block
            self.parked_call = [args, kwargs]
            self._park()
            self.parked_call = []
            if block not in self._target or block != self._done_block + 1:
                self._wrong_order(f"the model called block {self._path(block)} out of turn")
        run = self._run_kept if self.keep else self._run_plain
        result = run(block, args, kwargs)
        self._done_block = block
        if block == self._target[-1] and not (self._run_on and block + 1 < len(self.layers.blocks)):
            self._park()
        return result

    def _park(self) -> None:
        parent = self._coroutine.parent
        assert parent is not None
        parent.switch()

    def _run_plain(self, block: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.stubs.raw[block](*args, **kwargs)

    def _run_kept(self, block: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        flat, spec = pytree.tree_flatten((args, kwargs))
        self._refuse_cache(block, flat)
        state = ThreadState.capture()
        context = contextvars.copy_context()
        versions = _versions(flat)
        twins: dict[int, torch.Tensor] = {}
        given = _twins(flat, twins)
        args, kwargs = pytree.tree_unflatten(given, spec)
        try:
            output = self.stubs.raw[block](*args, **kwargs)  # see [Note: grad mode]
        except RuntimeError as error:
            if "in-place operation" in str(error):
                self._refuse_in_place(block, error)
            raise
        if versions != _versions(flat):
            self._refuse_in_place(block, None)
        left = pytree.tree_leaves((args, kwargs))
        if len(left) != len(given) or any(a is not b for a, b in zip(left, given, strict=True)):
            raise LayerError(
                f"block {self._path(block)} writes into a list or dict that it was given; what it hands on that way would be"
                " lost: change the block to return it"
            )
        outputs, out_spec = pytree.tree_flatten(output)
        self._refuse_opaque(block, outputs)
        leaves = [_leaf(value) for value in outputs]
        if any(map(_requires_grad, leaves)):
            graph = BlockGraph(twins, outputs) if self._keep_graph else None
            self.calls[block] = BlockCall(flat, spec, leaves, state, context, versions, graph)
        self._segments.begin(leaves)
        return pytree.tree_unflatten(leaves, out_spec)

    def _refuse_opaque(self, block: int, values: Sequence[Any]) -> None:
        for value in values:
            if not isinstance(value, torch.Tensor) and any(map(_requires_grad, getattr(value, "__dict__", {}).values())):
                raise LayerError(
                    f"block {self._path(block)} returned a {type(value).__name__}, whose tensors cannot be told apart; return a"
                    " tensor, tuple, list, dict or a class registered with torch.utils._pytree"
                )

    def _refuse_in_place(self, block: int, cause: Exception | None) -> NoReturn:
        raise LayerError(
            f"block {self._path(block)} writes one of its inputs in place; its recompute would start from the changed"
            " input: change the block to write a copy"
        ) from cause

    def _refuse_cache(self, block: int, flat: Sequence[Any]) -> None:
        for value in flat:
            if any(cls.__name__ == "Cache" for cls in type(value).__mro__):
                raise LayerError(
                    f"block {self._path(block)} got a {type(value).__name__}: a recompute would append to the KV cache"
                    " twice; set model.config.use_cache = False for training"
                )

    # ---- backward (on the hub)

    def backward_suffix(self, loss: torch.Tensor) -> None:
        """Run backward through the suffix, from the (scaled) loss."""
        self._segments.run_suffix(loss)

    def backward_layer(self, layer: int) -> None:
        """Run backward through a layer's blocks, last first, and through the glue before each; recompute what kept no graph."""
        for block in reversed(self.layers.layers[layer]):
            self._backward_block(block)
            if block > 0:
                self._segments.run(block)

    def backward_prefix(self) -> None:
        """Run backward through the prefix."""
        self._segments.run(0)
        self._segments.clear()

    # ---- what passes between layers, for whoever moves it

    @property
    def frame(self) -> FrameType | None:
        """The innermost frame of a parked forward."""
        return self._coroutine.gr_frame

    def handed_over(self, layer: int) -> list[torch.Tensor]:
        """The tensors with which a parked forward calls a layer; none unless it is parked there."""
        there = self.parked_call and self._parked_at == self.layers.layers[layer][0]
        return _tensors(pytree.tree_leaves(self.parked_call)) if there else []

    def inputs(self, layer: int) -> list[torch.Tensor]:
        """The tensors that the backward of a layer's blocks takes; none before its forward."""
        calls = (self.calls.get(block) for block in self.layers.layers[layer])
        return _tensors(value for call in calls if call is not None for value in call.args)

    def has_made(self, tensor: torch.Tensor) -> bool:
        """Whether this forward made the tensor: as a block's output, or by a node of its own."""
        if tensor.grad_fn is not None:
            return tensor.grad_fn._sequence_nr() >= self._first_node  # type: ignore[attr-defined]
        return any(leaf is tensor for call in self.calls.values() for leaf in call.leaves)

    def lists(self, layer: int) -> list[list[Any]]:
        """The lists in which the inputs of a layer are held for backward: its blocks' and those of the block before."""
        blocks = self.layers.layers[layer]
        calls = [call for b in range(blocks[0] - 1, blocks[-1] + 1) if (call := self.calls.get(b)) is not None]
        return [values for call in calls for values in (call.args, call.leaves)]

    def take_gradients(self, unit: Unit, wanted: Callable[[torch.Tensor], bool]) -> list[Taken]:
        """Take the wanted ones of the gradients that wait for a unit's backward, each with what puts it back."""
        if not isinstance(unit, int):
            return self._segments.take_waiting(wanted)
        call = self.calls.get(self.layers.layers[unit][-1])
        taken: list[Taken] = []
        for leaf in _tensors(call.leaves if call is not None else ()):
            if leaf.grad is not None and wanted(leaf.grad):
                taken.append((leaf.grad, partial(setattr, leaf, "grad")))
                leaf.grad = None
        return taken

    def _backward_block(self, block: int) -> None:
        call = self.calls.pop(block, None)
        if call is None:
            return
        grads = call.drop_leaf_grads()
        if all(grad is None for grad in grads):
            return
        if call.versions != _versions(call.args):
            raise LayerError(
                f"an input of block {self._path(block)} was changed in place after the block had run; its backward would take"
                " the changed input: change a copy"
            )
        if call.graph is not None:
            self._run_graph(call, call.graph, grads)
            return
        with buffers_kept(self.layers.blocks[block].module):
            self._run_graph(call, self._recompute(block, call), grads)

    def _recompute(self, block: int, call: BlockCall) -> BlockGraph:
        twins: dict[int, torch.Tensor] = {}
        args, kwargs = pytree.tree_unflatten(_twins(call.args, twins), call.spec)
        with applied(call.state), torch.enable_grad():
            output = call.context.run(self.stubs.raw[block], *args, **kwargs)
        return BlockGraph(twins, pytree.tree_leaves(output))

    def _run_graph(self, call: BlockCall, graph: BlockGraph, grads: Sequence[torch.Tensor | None]) -> None:
        pairs = [
            (value, grad)
            for value, grad in zip(graph.outputs, grads, strict=True)
            if grad is not None and _requires_grad(value)
        ]
        if not pairs:
            return
        twins = graph.twins
        received = {id(value): value for value in call.args if id(value) in twins}
        for key, value in received.items():
            waiting = self._segments.take(value)
            if waiting is not None:  # sums of later blocks start this block's sums: see [Note: segments]
                pairs.append((twins[key], waiting))
        nodes = [take_as_it_comes(twins[key]) for key in received]  # held as long as backward runs
        torch.autograd.backward([value for value, _ in pairs], [grad for _, grad in pairs])
        for key, value in received.items():
            grad = twins[key].grad
            if grad is not None:
                self._segments.wait(value, grad)
        del nodes


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among the values, each once."""
    return list({id(value): value for value in values if isinstance(value, torch.Tensor)}.values())


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _versions(values: Sequence[Any]) -> list[int]:
    """How often each tensor has been written in place; inference tensors keep no count (nor does autograd save them)."""
    return [value._version for value in values if isinstance(value, torch.Tensor) and not value.is_inference()]


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _twins(values: Sequence[Any], twins: dict[int, torch.Tensor]) -> list[Any]:
    return [_twin(value, twins) for value in values]


def _twin(value: Any, twins: dict[int, torch.Tensor]) -> Any:
    """A detached copy (same storage) of a boundary tensor, the same copy for the same tensor."""
    if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
        return value
    if not value.requires_grad:
        return value.detach()
    if id(value) not in twins:
        twins[id(value)] = value.detach().requires_grad_()
    return twins[id(value)]
