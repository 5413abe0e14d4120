"""Run one micro-batch's own forward as a coroutine that parks at layer calls, and its backward layer by layer.

What the model does outside its blocks keeps its autograd graph and runs backward by segments: see `autograd_segments`.

[Note: grad mode] A block's forward runs with the grad mode and the requires_grad of its inputs that it has in stock, though
most graphs are dropped at once: torch picks kernels by them (attention with a mask that requires grad takes another one),
and modules ask for them. Only so does F give the bits of stock's forward and of the recompute in B, and only so has B
the same bits with the graph that F made as with one that it makes anew.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import torch
from greenlet import GreenletExit, getcurrent
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from ds_vertical.errors import LayerError
from ds_vertical.model.autograd_segments import OWN_BACKWARD, Segments, Taken, take_as_it_comes
from ds_vertical.model.block_call import (
    BlockCall,
    BlockGraph,
    changed,
    is_given_as_it_is,
    leaf_of,
    put_leaves,
    requires_grad,
    tensors_among,
    twins_of,
    versions_of,
    with_state,
    written_by,
)
from ds_vertical.model.layers import LayerMap
from ds_vertical.model.state.block_state import BlockState
from ds_vertical.model.state.containers import container_of
from ds_vertical.model.state.forward_state import StepState
from ds_vertical.model.stubs import Coroutine, Stubs
from ds_vertical.model.thread_state import ThreadState, applied, inference_guard
from ds_vertical.schedule.events import Unit

_NOTHING = range(0)  # no block may run: prefix and suffix
_PREFIX = -1
_PLAIN = frozenset({torch.Tensor, nn.Parameter, type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size})


class MicroBatch:
    """One micro-batch's pass over the model.

    `body` runs the user's unmodified forward and returns anything; `advance` runs it up to a layer's end, `finish` to
    its own end. `keep` says whether block inputs are kept for backward (training) or not (evaluation). `run_on`: run the
    glue after a layer, up to the next one's call, at once; so that nobody holds a layer's inputs while the forward is parked.
    `modules`: what the modules hold for each micro-batch, of which this is number `index`; None: nothing of it is handled.
    """

    def __init__(
        self,
        body: Callable[[], Any],
        layers: LayerMap,
        stubs: Stubs,
        state: ThreadState,
        keep: bool,
        run_on: bool = False,
        modules: StepState | None = None,
        index: int = 0,
    ) -> None:
        self._modules = modules
        self.index = index
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
        self._switch(_NOTHING, _PREFIX)

    def advance(self, layer: int, keep_graph: bool = False) -> None:
        """Run the glue before layer `layer` and the layer itself. Raises LayerError when the model calls another one.

        `keep_graph`: its backward takes the graph made here instead of a recompute.
        """
        blocks = self.layers.layers[layer]
        self._keep_graph = keep_graph
        self._switch(blocks, layer)
        if self._done_block != blocks[-1]:
            if not self._coroutine.dead:
                self._wrong_order(f"the model called block {self._path(self._parked_at)} out of turn")
            self._wrong_order(f"the model's forward ended before block {self._path(blocks[-1])}")

    def finish(self) -> Any:
        """Run the suffix to the end of the forward and return what `body` returned."""
        self._switch(_NOTHING, None)
        if not self._coroutine.dead:
            self._wrong_order("the model called a block once more after its last layer")
        result, self.result = self.result, None
        return result

    def leave_random_numbers(self) -> None:
        """Let this thread's random streams go on where the forward, which is over, has left its own."""
        self._state.apply_rng()

    def close(self) -> None:
        """End a parked forward (after an error) so that nothing of it outlives the step."""
        if self._coroutine and not self._coroutine.dead:
            with self._entered():
                self._coroutine.throw(GreenletExit)
        self.calls.clear()
        self._segments.clear()

    def _switch(self, target: range, layer: int | None) -> None:
        """Let the forward go on, through a layer (_PREFIX: up to the first, None: from the last to its end)."""
        self._target = target
        self._coroutine.parent = getcurrent()
        if self._modules is not None:
            self._modules.enter(self.index, layer)
        with self._entered():
            self._coroutine.switch()
        if self._modules is not None:
            self._modules.leave(self.index, layer)

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
        if self.keep:
            self._refuse_checkpoint(block)
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
        flat, spec = pytree.tree_flatten((args, kwargs), is_leaf=partial(is_given_as_it_is, kwargs))
        self._refuse_cache(block, flat)
        state = ThreadState.capture()
        context = contextvars.copy_context()
        found = self._find_state(block, flat, context)
        inputs = with_state(flat, found)
        versions = versions_of(inputs)
        twins: dict[int, torch.Tensor] = {}
        given, _ = twins_of(flat, twins), twins_of(inputs[len(flat) :], twins)
        args, kwargs = pytree.tree_unflatten(given, spec)
        if found is not None:
            found.lend(twins)
        try:
            output = self.stubs.raw[block](*args, **kwargs)  # see [Note: grad mode]
        except RuntimeError as error:
            if "in-place operation" in str(error):
                self._refuse_in_place(block, error)
            raise
        outputs, out_spec = pytree.tree_flatten(output)
        self._refuse_opaque(block, outputs)
        leaves = [leaf_of(value) for value in outputs]
        returned = pytree.tree_unflatten(leaves, out_spec)
        originals = {id(value): value for value in inputs if id(value) in twins}
        if found is not None:
            found.settle(twins, originals)
        kept = found.tensors() if found is not None else set[int]()
        if changed(inputs, versions, kept):
            self._refuse_in_place(block, None)
        written = written_by(found, outputs, originals)
        replaced = {id(value): leaf for value, leaf in zip(outputs, leaves, strict=True) if isinstance(value, torch.Tensor)}
        for position, value in list(written.items()):
            if id(value) in replaced:
                del written[position]
            else:
                replaced[id(value)] = leaf_of(value)
        leaves += [replaced[id(value)] for value in written.values()]
        put_leaves(found, outputs, replaced)
        if any(map(requires_grad, leaves)):
            graph = BlockGraph(twins, [*outputs, *written.values()]) if self._keep_graph else None
            self.calls[block] = BlockCall(
                inputs, len(flat), spec, found, list(written), leaves, state, context, versions, graph
            )
        self._segments.begin(leaves)
        return returned

    def _find_state(self, block: int, flat: Sequence[Any], context: contextvars.Context) -> BlockState | None:
        if self._modules is None:
            return None
        carriers = [value for value in flat if type(value) not in _PLAIN and container_of(value, given=True) is not None]
        own = (value for value in context.values() if id(value) not in self._modules.outer_context)
        carriers += [value for value in own if type(value) not in _PLAIN and container_of(value) is not None]
        return self._modules.at_call(block, carriers)

    def _refuse_opaque(self, block: int, values: Sequence[Any]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor) or container_of(value, given=True) is not None:
                continue
            if any(map(requires_grad, getattr(value, "__dict__", {}).values())):
                raise LayerError(
                    f"block {self._path(block)} returned a {type(value).__name__}, whose tensors cannot be told apart; return a"
                    " tensor, tuple, list, dict or an object of a class of your own"
                )

    def _refuse_in_place(self, block: int, cause: Exception | None) -> NoReturn:
        raise LayerError(
            f"block {self._path(block)} writes one of its inputs in place; its recompute would start from the changed"
            " input: change the block to write a copy"
        ) from cause

    def _refuse_checkpoint(self, block: int) -> None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename == checkpoint.__file__:
                raise LayerError(
                    f"block {self._path(block)} is called within torch.utils.checkpoint.checkpoint, which would run it once"
                    " more in the backward: call it directly, the schedule recomputes each block already"
                )
            frame = frame.f_back

    def _refuse_cache(self, block: int, flat: Sequence[Any]) -> None:
        for value in flat:
            if any(cls.__name__ == "Cache" for cls in type(value).__mro__):
                raise LayerError(
                    f"block {self._path(block)} got a {type(value).__name__}: a recompute would append to the KV cache"
                    " twice; set model.config.use_cache = False for training"
                )

    # ---- backward (on the hub)

    def backward_suffix(self, loss: torch.Tensor) -> None:
        """Run backward through the suffix, from the (scaled) loss. Raises LayerError where somebody has done so before."""
        if any(leaf.grad is not None for call in self.calls.values() for leaf in call.leaves if requires_grad(leaf)):
            raise LayerError(OWN_BACKWARD)
        self._segments.run_suffix(loss)
        self._note_backward()

    def backward_layer(self, layer: int) -> None:
        """Run backward through a layer's blocks, last first, and through the glue before each; recompute what kept no graph."""
        self._hold_own_state(layer)
        for block in reversed(self.layers.layers[layer]):
            self._backward_block(block)
            if block > 0:
                self._segments.run(block)
        self._note_backward()

    def backward_prefix(self) -> None:
        """Run backward through the prefix."""
        self._hold_own_state(_PREFIX)
        self._segments.run(0)
        self._segments.clear()
        self._note_backward()

    # ---- what passes between layers, for whoever moves it

    @property
    def frame(self) -> FrameType | None:
        """The innermost frame of a parked forward."""
        return self._coroutine.gr_frame

    def handed_over(self, layer: int) -> list[torch.Tensor]:
        """The tensors with which a parked forward calls a layer; none unless it is parked there."""
        there = self.parked_call and self._parked_at == self.layers.layers[layer][0]
        return tensors_among(pytree.tree_leaves(self.parked_call)) if there else []

    def inputs(self, layer: int) -> list[torch.Tensor]:
        """The tensors that the backward of a layer's blocks takes; none before its forward."""
        calls = (self.calls.get(block) for block in self.layers.layers[layer])
        return tensors_among(value for call in calls if call is not None for value in call.args)

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
        for leaf in tensors_among(call.leaves if call is not None else ()):
            if leaf.grad is not None and wanted(leaf.grad):
                taken.append((leaf.grad, partial(setattr, leaf, "grad")))
                leaf.grad = None
        return taken

    def _hold_own_state(self, layer: int) -> None:
        """What the modules hold is what autograd has saved of it, without a copy, in this micro-batch's forward."""
        if self._modules is not None:
            self._modules.enter(self.index, layer)

    def _note_backward(self) -> None:
        if self._modules is not None:
            self._modules.note_backward(self.index)

    def _backward_block(self, block: int) -> None:
        call = self.calls.pop(block, None)
        if call is None:
            return
        grads = call.drop_leaf_grads()
        if all(grad is None for grad in grads):
            return
        if changed(call.args, call.versions, call.found.tensors() if call.found is not None else ()):
            raise LayerError(
                f"an input of block {self._path(block)} was changed in place after the block had run; its backward would take"
                " the changed input: change a copy"
            )
        if call.graph is not None:
            self._run_graph(call, call.graph, grads)
            return
        twins: dict[int, torch.Tensor] = {}
        given = twins_of(call.args, twins)[: call.num_given]
        # until the backward is through: autograd may have saved what the modules hold
        with call.found.replayed(twins) if call.found is not None else contextlib.nullcontext() as put_places_back:
            outputs = self._recompute(block, call, given)
            if put_places_back is not None:
                put_places_back()
            self._run_graph(call, BlockGraph(twins, outputs), grads)

    def _recompute(self, block: int, call: BlockCall, given: list[Any]) -> list[Any]:
        """The block's outputs, with their graph."""
        args, kwargs = pytree.tree_unflatten(given, call.spec)
        with applied(call.state), torch.enable_grad():
            output = call.context.run(self.stubs.raw[block], *args, **kwargs)
        outputs = pytree.tree_leaves(output)
        written = written_by(call.found, outputs) if call.written else {}
        return [*outputs, *(written.get(position) for position in call.written)]

    def _run_graph(self, call: BlockCall, graph: BlockGraph, grads: Sequence[torch.Tensor | None]) -> None:
        pairs = [
            (value, grad) for value, grad in zip(graph.outputs, grads, strict=True) if grad is not None and requires_grad(value)
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
