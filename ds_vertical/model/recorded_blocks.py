"""The block calls of one micro-batch: recorded in its forward, and run backward from the record.

[Note: grad mode] A block's forward runs with the grad mode and the requires_grad of its inputs that it has in stock, though
most graphs are dropped at once: torch picks kernels by them (attention with a mask that requires grad takes another one),
and modules ask for them. Only so does F give the bits of stock's forward and of the recompute in B, and only so has B
the same bits with the graph that F made as with one that it makes anew.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NoReturn

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ds_vertical.errors import LayerError
from ds_vertical.model.autograd_segments import Segments
from ds_vertical.model.block_call import (
    BlockCall,
    BlockGraph,
    changed,
    flattened,
    leaf_of,
    put_leaves,
    requires_grad,
    twins_of,
    versions_of,
    with_state,
    written_by,
)
from ds_vertical.model.forward_coroutine import ForwardPass
from ds_vertical.model.kept.block_backward import run_backward
from ds_vertical.model.kept.kept_blocks import Keeping, KeptBlocks
from ds_vertical.model.layers import Block
from ds_vertical.model.state.block_state import BlockState
from ds_vertical.model.state.containers import container_of
from ds_vertical.model.thread_state import Modes, ThreadState, applied

_PLAIN = frozenset({torch.Tensor, nn.Parameter, type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size})


class RecordedBlocks:
    """Runs one micro-batch's blocks forward, keeps of each call what its backward needs, and runs them backward.

    `calls`: the record by the block's number, from the block's forward to its backward; in a further call of the model the
    numbers go on where those of the call before end. `keep_graph`: set ahead of a layer's
    forward, so that its backward takes the graph made there instead of a recompute. `segments` belongs to the same micro-batch:
    where the glue begins, and the gradients that wait for it. `kept`: what else of the calls is kept; None: nothing. `index`:
    the micro-batch's number.
    """

    def __init__(self, shared: ForwardPass, segments: Segments, index: int = 0) -> None:
        self.calls: dict[int, BlockCall] = {}
        self.keep_graph = False
        self._first = 0  # the number of block 0 in the call of the model that is under way
        self._keep = shared.keep
        kinds, self._probe, self._compiled = shared.kinds, shared.probe, shared.stubs.compiled
        self.kept = None if kinds is None else KeptBlocks(kinds, shared.layers.blocks, self._compiled)
        self._keeping_blocks = frozenset[int]() if kinds is None else kinds.blocks_of(index, shared.layers)
        self._modules = shared.modules
        self._blocks = shared.layers.blocks
        self._segments = segments

    def clear(self) -> None:
        """Forget all calls, after an error."""
        self.calls.clear()
        if self.kept is not None:
            self.kept.calls.clear()

    # ---- forward

    def begin_call(self) -> None:
        """Take note that the blocks run from here on belong to a further call of the model."""
        self._first += len(self._blocks)
        self._segments.begin(())

    def run(self, block: int, function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run a block of the call under way, as a call of `function`. Returns what that returned. Raises as `run_kept` does."""
        if not self._keep:  # an evaluation, which has no backward
            return function(*args, **kwargs)
        return self.run_kept(block, function, args, kwargs)

    def run_kept(
        self, block: int, function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """Run a block of a training step and record the call. `function`: the block's forward, or its call with its hooks.

        The block gets detached copies (twins) of its tensors, and the caller gets detached leaves of its outputs: the block's
        graph and the glue's meet nowhere. Returns the block's output made of these leaves. Raises LayerError for a KV cache,
        for inputs that the block has written in place, and for outputs in which tensors cannot be found.
        """
        flat, form = flattened(args, kwargs)
        _refuse_cache(self._blocks[block], flat)
        state = ThreadState.capture()
        context = contextvars.copy_context()
        found = self._find_state(block, flat, context)
        inputs = with_state(flat, found)
        call = BlockCall(function, inputs, len(flat), form, found, state, Modes.capture(), context, versions_of(inputs))
        twins: dict[int, torch.Tensor] = {}
        given, _ = twins_of(flat, twins), twins_of(inputs[len(flat) :], twins)
        args, kwargs = form.arguments(given)
        if found is not None:
            found.lend(twins)
        try:
            with self._keeping(block, call) as keeping:
                output = function(*args, **kwargs)  # see [Note: grad mode]
        except RuntimeError as error:
            if "in-place operation" in str(error):
                _refuse_in_place(self._blocks[block], error)
            raise
        returned = self._record(block, call, twins, output, keeping)
        del output
        if self.kept is not None and keeping is not None and block in self.calls:
            self.kept.settle(block, keeping, call.leaves)
        return returned

    def _keeping(self, block: int, call: BlockCall) -> contextlib.AbstractContextManager[Keeping | None]:
        if self.kept is None or self.keep_graph or block not in self._keeping_blocks:
            return contextlib.nullcontext()
        return self.kept.keeping(block, call)

    def _record(
        self, block: int, call: BlockCall, twins: dict[int, torch.Tensor], output: object, keeping: Keeping | None
    ) -> object:
        """A block has run: complete the record of its call. Returns the output with leaves in the place of its tensors."""
        follows_state = self._modules is not None and self._modules.tracked.follows_state
        if type(output) is torch.Tensor and (call.found is None or (call.found.is_empty() and not follows_state)):
            return self._record_one(block, call, twins, output, keeping)
        outputs, out_spec = pytree.tree_flatten(output)
        _refuse_opaque(self._blocks[block], outputs)
        leaves: list[object] = [leaf_of(value) if isinstance(value, torch.Tensor) else value for value in outputs]
        returned = pytree.tree_unflatten(leaves, out_spec)
        found = call.found
        originals = {id(value): value for value in call.args if id(value) in twins and isinstance(value, torch.Tensor)}
        if found is not None:
            found.settle(twins, originals)
        kept = found.tensors() if found is not None else set[int]()
        if changed(call.args, call.versions, kept):
            _refuse_in_place(self._blocks[block], None)
        written = written_by(found, outputs, originals)
        replaced = {id(value): leaf for value, leaf in zip(outputs, leaves, strict=True) if isinstance(leaf, torch.Tensor)}
        for position, value in list(written.items()):
            if id(value) in replaced:
                del written[position]
            else:
                replaced[id(value)] = leaf_of(value)
        leaves += [replaced[id(value)] for value in written.values()]
        put_leaves(found, outputs, replaced)
        if any(map(requires_grad, leaves)):
            call.written, call.leaves = list(written), leaves
            self._complete(block, call, BlockGraph(twins, [*outputs, *written.values()]), keeping)
        self._segments.begin(leaves)
        return returned

    def _record_one(
        self, block: int, call: BlockCall, twins: dict[int, torch.Tensor], output: torch.Tensor, keeping: Keeping | None
    ) -> torch.Tensor:
        """As `_record`, for a block that has returned one tensor, and written nothing elsewhere: what most do, in less time."""
        if changed(call.args, call.versions, ()):
            _refuse_in_place(self._blocks[block], None)
        leaf = leaf_of(output)
        if leaf.requires_grad:
            call.leaves = [leaf]
            self._complete(block, call, BlockGraph(twins, [output]), keeping)
        self._segments.begin((leaf,))
        return leaf

    def _complete(self, block: int, call: BlockCall, graph: BlockGraph, keeping: Keeping | None) -> None:
        """Let a call be recorded. `graph`: that of its forward."""
        call.graph = graph if self.keep_graph else None
        self.calls[self._first + block] = call
        if keeping is not None:
            keeping.finish(graph.twins, graph.outputs, call.leaves)

    def _find_state(self, block: int, flat: Sequence[object], context: contextvars.Context) -> BlockState | None:
        """What the block finds as it is called, in modules, arguments and context variables; None where none of it changes."""
        if self._modules is None:
            return None
        carriers = [each for each in flat if type(each) not in _PLAIN and _may_be_written(each, given=True)]
        outer = self._modules.outer_context
        own = [value for value in context.values() if id(value) not in outer and type(value) not in _PLAIN]
        carriers += [value for value in own if _may_be_written(value, given=False)]
        return self._modules.at_call(block, carriers)

    # ---- backward

    def backward(self, block: int, model_call: int = 0) -> None:
        """Run backward through a block of one of the calls of the model, and forget its record. A block whose outputs got no
        gradient is left out.

        Gradients of its parameters go to their `.grad`, those of its inputs wait for their segment. Raises LayerError for an
        input that was written in place since the block's forward.
        """
        call = self.calls.pop(model_call * len(self._blocks) + block, None)
        if call is None:
            return
        grads = call.drop_leaf_grads()
        if all(grad is None for grad in grads):
            return
        if changed(call.args, call.versions, call.found.tensors() if call.found is not None else ()):
            raise LayerError(
                f"an input of block {self._blocks[block].path} was changed in place after the block had run; its backward would"
                " take the changed input: change a copy"
            )
        self._run_backward(block, call, grads)

    @contextlib.contextmanager
    def _again(self, block: int, call: BlockCall, within: contextlib.AbstractContextManager[object]) -> Iterator[BlockGraph]:
        """Run the block's forward once more, in a context; until the end of the `with` the modules hold what autograd may have
        saved of them."""
        twins: dict[int, torch.Tensor] = {}
        given = twins_of(call.args, twins)[: call.num_given]
        with call.found.replayed(twins) if call.found is not None else contextlib.nullcontext() as put_places_back:
            with call.modes.within(), within:
                outputs = self._recompute(call, given)
            if put_places_back is not None:
                put_places_back()
            yield BlockGraph(twins, outputs)

    def _recompute(self, call: BlockCall, given: list[object]) -> list[object]:
        """The block's outputs, with their graph."""
        args, kwargs = call.form.arguments(given)
        with applied(call.state), torch.enable_grad():
            output = call.context.run(call.function, *args, **kwargs)
        outputs = pytree.tree_leaves(output)
        written = written_by(call.found, outputs) if call.written else {}
        return [*outputs, *(written.get(position) for position in call.written)]

    def _run_backward(self, block: int, call: BlockCall, grads: Sequence[torch.Tensor | None]) -> None:
        """Run a block backward from the gradients of its outputs; gradients of its inputs wait for their segment."""
        inputs = {id(value): value for value in call.args if requires_grad(value) and not isinstance(value, nn.Parameter)}
        # sums of later blocks start this block's sums: see [Note: segments]
        waiting = {key: grad for key, value in inputs.items() if (grad := self._segments.take(value)) is not None}
        again = partial(self._again, block, call)
        if call.graph is not None:
            found = run_backward(call.graph, grads, waiting)
        elif self._probe is not None and self._probe.wants(self._blocks[block]):
            run = partial(run_backward, grads=grads, waiting=waiting)
            found = self._probe.backward(self._blocks[block], self._compiled[block], call.args, again, run)
        elif self.kept is not None:
            found = self.kept.backward(block, grads, waiting, again)
        else:
            with again(contextlib.nullcontext()) as graph:
                found = run_backward(graph, grads, waiting)
        for key, grad in found.items():
            self._segments.wait(inputs[key], grad)


def _may_be_written(value: object, given: bool) -> bool:
    return type(value) in (dict, list) or container_of(value, given) is not None


def _refuse_opaque(block: Block, values: Sequence[object]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor) or container_of(value, given=True) is not None:
            continue
        if any(map(requires_grad, getattr(value, "__dict__", {}).values())):
            raise LayerError(
                f"block {block.path} returned a {type(value).__name__}, in which tensors cannot be found one by one; return a"
                " tensor, tuple, list, dict or an object of a class of your own"
            )


def _refuse_in_place(block: Block, cause: Exception | None) -> NoReturn:
    raise LayerError(
        f"block {block.path} writes one of its inputs in place; its recompute would start from the changed"
        " input: change the block to write a copy"
    ) from cause


def _refuse_cache(block: Block, flat: Sequence[object]) -> None:
    for value in flat:
        if type(value) not in _PLAIN and any(cls.__name__ == "Cache" for cls in type(value).__mro__):
            raise LayerError(
                f"block {block.path} got a {type(value).__name__}: a recompute would append to the KV cache"
                " twice; set model.config.use_cache = False for training"
            )
