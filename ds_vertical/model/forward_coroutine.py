"""The user's own forward of one micro-batch, run as a coroutine that parks where it calls a layer.

Two sides take turns on one thread. The hub is the code that runs the schedule. The coroutine is a greenlet that runs the user's
forward. The hub switches to it (`start`, `advance`, `finish`), and the coroutine switches back when it parks. What torch keeps
per thread is the forward's while the coroutine runs, and the hub's otherwise: see `thread_state`.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn, Protocol

import torch
from greenlet import GreenletExit, getcurrent
from torch.utils import checkpoint

from ds_vertical.errors import LayerError
from ds_vertical.model.layers import Block, LayerMap
from ds_vertical.model.state.restart import CallsMissed
from ds_vertical.model.state.step_state import StepState
from ds_vertical.model.state.tracks import BETWEEN, PREFIX
from ds_vertical.model.stubs import Coroutine, Stubs
from ds_vertical.model.thread_state import ThreadState, inference_guard

NO_BLOCKS = range(0)  # the blocks that may run in the prefix and in the suffix


@dataclass(frozen=True)
class ForwardPass:
    """What the forwards of all micro-batches of one pass over the model share.

    `keep`: block calls are recorded for the backward (training), or not (evaluation). `modules`: the state of modules that
    belongs to one micro-batch each; None: such state is left as it comes. `num_calls`: how often each micro-batch's code calls
    the model.
    """

    layers: LayerMap
    stubs: Stubs
    keep: bool
    modules: StepState | None = None
    num_calls: int = 1


class BlockRunner(Protocol):
    """What runs a micro-batch's blocks."""

    def run(self, block: int, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run one block, by its number. Returns what the block returned."""
        ...

    def begin_call(self) -> None:
        """Take note that the blocks run from here on belong to a further call of the model."""


class ForwardCoroutine:
    """One micro-batch's forward: the hub resumes it, and it parks at the end of a layer or ahead of the next one.

    `body` runs the user's unmodified forward and returns anything. `blocks` runs one block, by its number. `index` is the
    micro-batch's number in its step. `run_on`: the forward runs the glue behind a layer at once, up to the next block's call,
    so that while it is parked no frame but its own holds what it hands to that block.

    [Note: calls] The body may call the model several times, the same number of times in each micro-batch (`num_calls`). Each
    call is a forward through all layers. A further call begins where the model is called once the call before has been through
    its last block. Between the two the body runs its own code, and may be parked by the schedule ahead of it: so all
    micro-batches make their first call, then all of them the second one. The number is verified: a call too many parks, one too
    few ends the body early, and the hub raises CallsMissed, with the number that was seen.
    """

    def __init__(
        self,
        body: Callable[[], object],
        blocks: BlockRunner,
        shared: ForwardPass,
        state: ThreadState,
        index: int,
        run_on: bool,
    ) -> None:
        self.index = index
        self.first_node = 0  # autograd's sequence number as the forward began
        self.parked_at = -1  # the block whose call the forward has parked ahead of
        self.parked_call: list[object] = []  # that call's arguments, by position and by name
        self.call = 0  # the number of the call of the model that is under way, or was last
        self.behind_call: Callable[[], None] = lambda: None  # called in the body as each call of the model has returned
        self._num_calls = shared.num_calls
        self._is_surplus = False  # the body is about to make a call that was not expected
        self._depth = 0  # calls of the model within one another
        self._modules = shared.modules
        self._layers = shared.layers
        self._blocks = shared.layers.blocks
        self._keep = shared.keep
        self._runner = blocks
        self._run_on = run_on
        self._result: Any = None
        self._state = state.without_autocast_cache()
        self._guard: object = None
        self._target = NO_BLOCKS
        self._done_block = -1
        self._hooked_block = -1  # whose call, with its hooks, is under way
        self._coroutine = Coroutine(lambda: self._run(body))
        self._coroutine.micro_batch = self
        self._coroutine.gr_context = contextvars.copy_context()

    # ---- the hub's side

    @property
    def frame(self) -> FrameType | None:
        """The innermost frame of the forward while it is parked; None before it has begun and once it is over."""
        return self._coroutine.gr_frame

    def start(self) -> None:
        """Run the prefix: up to the first block's call."""
        self.first_node = torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]
        self._switch(NO_BLOCKS, PREFIX)

    def start_call(self, call: int) -> None:
        """Run from the end of the last layer to the first block of a further call of the model.

        Raises CallsMissed, or LayerError where an earlier micro-batch has made that call, if the body ends without one.
        """
        self._switch(NO_BLOCKS, BETWEEN)
        if self._coroutine.dead:
            self._refuse_number(self.call + 1)
        if self.call != call:
            _wrong_order(self._blocks, "the model called a block once more after its last layer")

    def advance(self, layer: int) -> None:
        """Run the glue before layer `layer` and the layer itself. Raises LayerError when the model calls another one."""
        blocks = self._layers.layers[layer]
        self._switch(blocks, layer)
        if self._done_block != blocks[-1]:
            if not self._coroutine.dead:
                _wrong_order(self._blocks, f"the model called block {self._blocks[self.parked_at].path} out of turn")
            _wrong_order(self._blocks, f"the model's forward ended before block {self._blocks[blocks[-1]].path}")

    def finish(self) -> Any:
        """Run the suffix to the end of the forward. Returns what `body` returned. Raises LayerError at another block's call,
        and CallsMissed at another call of the model; see [Note: calls]."""
        self._switch(NO_BLOCKS, None)
        if self._is_surplus:
            self._refuse_number(self.call + 2)
        if not self._coroutine.dead:
            _wrong_order(self._blocks, "the model called a block once more after its last layer")
        result, self._result = self._result, None
        return result

    def _refuse_number(self, number: int) -> NoReturn:
        """The body calls the model another number of times than was expected: the first one to do so tells that number."""
        if self.index == 0:
            raise CallsMissed(number)
        raise LayerError(
            f"micro-batch {self.index} of the step calls the model {'more' if number > self._num_calls else 'fewer'} than"
            f" {self._num_calls} time(s), which is what micro-batch 0 did; layer-major order needs the same number of calls in"
            " each micro-batch of a step: make them equal, or set vertical_schedule.enabled to false"
        )

    def leave_random_numbers(self) -> None:
        """Let the caller's random streams go on where this forward, which is over, has left its own."""
        self._state.apply_rng()

    def close(self) -> None:
        """End a parked forward (after an error), so that no frame of it outlives the step."""
        if self._coroutine and not self._coroutine.dead:
            with self._entered():
                self._coroutine.throw(GreenletExit)

    def _switch(self, target: range, layer: int | None) -> None:
        """Let the forward go on, through a layer (PREFIX: up to the first, None: from the last to its end)."""
        self._target = target
        self._coroutine.parent = getcurrent()
        if self._modules is not None:
            self._modules.enter(self.index, layer, self.call)
        with self._entered():
            self._coroutine.switch()
        if self._modules is not None and not self._is_surplus:
            self._modules.leave(self.index, layer, self.call, is_recomputed=layer is None or self._state.grad)

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

    # ---- the coroutine's side

    def _run(self, body: Callable[[], object]) -> None:
        self._result = body()

    def call_model(self, call: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Called in place of the model's own call, which is `call`: see [Note: calls]. Returns what the call returned."""
        if self._depth == 0 and self._done_block == len(self._blocks) - 1:
            self._begin_call()
        self._depth += 1
        try:
            result = call(*args, **kwargs)
        finally:
            self._depth -= 1
        if self._depth == 0:
            self.behind_call()
        return result

    def _begin_call(self) -> None:
        """The call before is through with its blocks: another one begins."""
        while self.call + 1 >= self._num_calls:
            self._is_surplus = True
            self._park()
        self.call += 1
        self._done_block = -1
        self._runner.begin_call()

    def call_block(self, block: int, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Called in place of a block's forward: park until the schedule reaches the block, run it, park at the layer's end.

        Raises LayerError where the model calls a block out of turn, or within torch's gradient checkpointing.
        """
        self._park_ahead(block, args, kwargs)
        if self._keep:
            _refuse_checkpoint(self._blocks[block])
        result = self._runner.run(block, args, kwargs)
        self._done_block = block
        if block != self._hooked_block:
            self._park_behind(block)
        return result

    def call_hooked(
        self, block: int, call: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """Called in place of a block's call that has hooks of the user's: park ahead of them, and behind them.

        `call` runs the hooks, and calls the block's forward in between.
        """
        self._park_ahead(block, args, kwargs)
        self._hooked_block = block
        try:
            result = call(*args, **kwargs)
        finally:
            self._hooked_block = -1
        self._park_behind(block)
        return result

    def _park_ahead(self, block: int, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Park until the schedule reaches the block, unless it has."""
        if block in self._target and block > self._done_block:
            return
        self.parked_at = block
        self.parked_call = [args, kwargs]
        self._park()
        self.parked_call = []
        if block not in self._target or block != self._done_block + 1:
            _wrong_order(self._blocks, f"the model called block {self._blocks[block].path} out of turn")

    def _park_behind(self, block: int) -> None:
        """Park if the block, which has run, ends the layer."""
        if block == self._target[-1] and not (self._run_on and block + 1 < len(self._blocks)):
            self._park()

    def _park(self) -> None:
        parent = self._coroutine.parent
        assert parent is not None
        parent.switch()


def _wrong_order(blocks: Sequence[Block], what: str) -> NoReturn:
    raise LayerError(
        f"{what}; the schedule runs every block exactly once, in the order"
        f" {', '.join(block.path for block in blocks[:6])}, ...:"
        " name the layers in their order of execution in vertical_schedule.layers, without those that some micro-batch does"
        " not call"
    )


def _refuse_checkpoint(block: Block) -> None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            raise LayerError(
                f"block {block.path} is called within torch.utils.checkpoint.checkpoint, which would run it once"
                " more in the backward: call it directly, the schedule recomputes each block already"
            )
        frame = frame.f_back
