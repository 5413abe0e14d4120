"""One micro-batch's pass over the model: forward up to a layer's end, backward layer by layer.

Three objects share the work. `ForwardCoroutine` runs the user's forward and parks it at layer calls. `RecordedBlocks` records
the block calls and runs them backward. `Segments` runs the model's own code between the blocks backward, whose autograd graph
is kept: see `autograd_segments`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ds_vertical.errors import LayerError
from ds_vertical.model.autograd_segments import OWN_BACKWARD, Segments
from ds_vertical.model.batch import LossOf, own_loss
from ds_vertical.model.block_call import requires_grad
from ds_vertical.model.boundary_tensors import BoundaryTensors
from ds_vertical.model.forward_coroutine import ForwardCoroutine, ForwardPass
from ds_vertical.model.layers import refuse_parameter_hooks, refuse_use_outside
from ds_vertical.model.recorded_blocks import RecordedBlocks
from ds_vertical.model.state.tracks import PREFIX
from ds_vertical.model.thread_state import ThreadState
from ds_vertical.types import PRE


@dataclass(frozen=True)
class Body:
    """One micro-batch's forward: `run` is the user's unmodified code; `seed` of its random streams (None: the caller's).

    `form`: equal for micro-batches of the same structure; `functions`: the user's that it calls besides the model. `checked`:
    makes what the self-check runs in place of `run`; None: `run` itself. `loss_of`: what the hub calls where the suffix is due,
    with what runs the suffix and returns what `run` returns; it returns the loss. `weight`: the loss's own in the step's.
    """

    run: Callable[[], Any]
    seed: int | None
    form: Hashable = None
    functions: tuple[Any, ...] = ()
    checked: Callable[[], Callable[[], torch.Tensor]] | None = None
    loss_of: LossOf = own_loss
    weight: float = 1.0


class MicroBatch:
    """One micro-batch's pass over the model, which a schedule's events drive: each method is one event's work.

    `body`, `index` and `run_on` are the forward's: see `ForwardCoroutine`. `state` is the thread state that it begins with.
    `boundary`: the tensors that pass between layers, for a store that moves them.
    """

    def __init__(
        self, body: Callable[[], object], shared: ForwardPass, state: ThreadState, index: int = 0, run_on: bool = False
    ) -> None:
        self.index = index
        self._layers = shared.layers
        self._modules = shared.modules
        self._calls = range(shared.num_calls)
        if shared.keep and shared.num_calls > 1:
            refuse_parameter_hooks(shared.layers)
        through = None if shared.watch is None else shared.watch.reach_through
        explain = partial(refuse_use_outside, shared.layers.blocks)
        outside = frozenset(map(id, shared.layers.units[PRE]))
        self._segments = Segments(len(shared.layers.blocks), shared.num_calls, through, explain, outside)
        self._blocks = RecordedBlocks(shared, self._segments, index)
        self._forward = ForwardCoroutine(body, self._blocks, shared, state, index, run_on)
        self.boundary = BoundaryTensors(shared.layers, self._forward, self._blocks, self._segments)

    # ---- forward

    def start(self, call: int = 0) -> None:
        """Run the prefix of a call of the model: up to the first block call. Raises CallsMissed or LayerError where that call
        is not made."""
        self._forward.start(call)

    def advance(self, layer: int, keep_graph: bool = False) -> None:
        """Run the glue before layer `layer` and the layer itself. Raises LayerError when the model calls another one.

        `keep_graph`: the layer's backward takes the graph made here instead of a recompute.
        """
        self._blocks.keep_graph = keep_graph
        self._forward.advance(layer)

    def finish(self) -> Any:
        """Run the suffix to the end of the forward and return what `body` returned."""
        return self._forward.finish()

    def leave_random_numbers(self) -> None:
        """Let the caller's random streams go on where the forward, which is over, has left its own."""
        self._forward.leave_random_numbers()

    def close(self) -> None:
        """End a parked forward (after an error) so that nothing of it outlives the step."""
        self._forward.close()
        self._blocks.clear()
        self._segments.clear()

    # ---- backward (on the hub)

    def backward_suffix(self, loss: torch.Tensor) -> None:
        """Run backward through the suffix, from the (scaled) loss. Raises LayerError where user code has run it before."""
        calls = self._blocks.calls.values()
        if any(leaf.grad is not None for call in calls for leaf in call.leaves if requires_grad(leaf)):
            raise LayerError(OWN_BACKWARD)
        self._segments.run_suffix(loss)
        self._note_backward()

    def backward_layer(self, layer: int) -> None:
        """Run backward through a layer's blocks, last first, and through the glue before each; recompute what kept no graph.

        Of several calls of the model the last one comes first, as autograd has it. Raises LayerError where what a call was
        given depends on an earlier call's results.
        """
        self._hold_own_state(layer)
        for call in reversed(self._calls):
            for block in reversed(self._layers.layers[layer]):
                with self._segments.apart(call):
                    self._blocks.backward(block, call)
                    if block > 0:
                        self._segments.run(block, call)
        self._note_backward()

    def backward_prefix(self) -> None:
        """Run backward through the prefix of each call of the model. Raises LayerError as `backward_layer` does."""
        self._hold_own_state(PREFIX)
        for call in reversed(self._calls):
            with self._segments.apart(call):
                self._segments.run(0, call)
        self._segments.hooks.call()
        self._segments.clear()
        self._note_backward()

    def _hold_own_state(self, layer: int) -> None:
        """Let modules hold this micro-batch's state: autograd may have saved it without a copy in the forward."""
        if self._modules is not None:
            self._modules.enter(self.index, layer)

    def _note_backward(self) -> None:
        """Let what hooks of the backward have written be this micro-batch's state."""
        if self._modules is not None:
            self._modules.note_backward(self.index)
