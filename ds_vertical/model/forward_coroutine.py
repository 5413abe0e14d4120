"""The user's own forward of one micro-batch, run as a coroutine that parks where it calls a layer.

Two sides take turns on one thread. The hub is the code that runs the schedule. The coroutine is a greenlet that runs the user's
forward. The hub switches to it (`start`, `advance`, `finish`), and the coroutine switches back when it parks. What torch keeps
per thread is the forward's while the coroutine runs, and the hub's otherwise: see `thread_state`.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import torch
from greenlet import GreenletExit, getcurrent
from torch import nn
from torch.utils import checkpoint

from ds_vertical.errors import LayerError
from ds_vertical.model.kept.kinds import KeptKinds
from ds_vertical.model.kept.probe import Probe
from ds_vertical.model.layers import Block, LayerMap, refuse_use_outside
from ds_vertical.model.state.restart import HooksMissed
from ds_vertical.model.state.step_state import StepState
from ds_vertical.model.state.tracks import BETWEEN_CALLS, PREFIX
from ds_vertical.model.stubs import APPLY, BlockRunner, Coroutine, ModelCalls, OutsideWatch, ParameterWatch, Stubs
from ds_vertical.model.thread_state import NO_MODES, Modes, ThreadState, inference_guard

NO_BLOCKS = range(0)  # the blocks that may run in the prefix and in the suffix


@dataclass(frozen=True)
class ForwardPass:
    """What the forwards of all micro-batches of one pass over the model share.

    `keep`: block calls are recorded for the backward (training), or not (evaluation). `modules`: the state of modules that
    belongs to one micro-batch each; None: such state is left as it comes. `num_calls`: how often each micro-batch's code calls
    the model. `kinds`: what else of block calls is kept for the backward; None: nothing. `probe`: measures what could be kept;
    None: nothing does. `watch`: refuses uses of parameters that are away; None: no such are.
    """

    layers: LayerMap
    stubs: Stubs
    keep: bool
    modules: StepState | None = None
    num_calls: int = 1
    kinds: KeptKinds | None = None
    probe: Probe | None = None
    watch: OutsideWatch | None = None


class ForwardCoroutine:
    """One micro-batch's forward: the hub resumes it, and it parks at the end of a layer or ahead of the next one.

    `body` runs the user's unmodified forward and returns anything. `blocks` runs one block, by its number, as a call of a
    function (its forward, or its call with hooks) with arguments. `index` is the
    micro-batch's number in its step. `run_on`: the forward runs the glue behind a layer at once, up to the next block's call,
    so that while it is parked no frame but its own holds what it hands to that block. `calls`: of the model, of which the
    body may make several.
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
        self._modules = shared.modules
        self._stubs = shared.stubs
        self._layers = shared.layers
        self._blocks = shared.layers.blocks
        self._keep = shared.keep
        self._outside = shared.watch
        self._runner = blocks
        self._run_on = run_on
        self._result: Any = None
        self._state = state.without_autocast_cache()
        self._modes = NO_MODES  # that the forward has entered, and is inside while it is parked
        self._guard: object = None
        self._target = NO_BLOCKS
        self.calls = ModelCalls(len(self._blocks), shared.num_calls, blocks, lambda: _park(self._coroutine))
        self._hooked_block = -1  # whose call, with its hooks, is under way
        self._whole_block = -1  # whose hooks are part of it, while it runs
        self._watch: ParameterWatch | None = None  # of the hooks under way
        self._missed = -1  # a block whose hooks ought to have been part of it

        def run() -> None:
            self._result = body()

        self._coroutine = Coroutine(run)
        self._coroutine.micro_batch = self
        self._coroutine.gr_context = contextvars.copy_context()

    # ---- the hub's side

    @property
    def frame(self) -> FrameType | None:
        """The innermost frame of the forward while it is parked; None before it has begun and once it is over."""
        return self._coroutine.gr_frame

    def start(self, call: int = 0) -> None:
        """Run the prefix: up to the first block's call. Of a further call of the model: from the end of the last layer on.

        Raises CallsMissed, or LayerError where an earlier micro-batch has made that call, if the body ends without one.
        """
        if call == 0:
            self.first_node = torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]
        self._switch(NO_BLOCKS, BETWEEN_CALLS if call else PREFIX)
        if call and self._coroutine.dead:
            self.calls.refuse(self.calls.number + 1, self.index)
        if self.calls.number != call:
            _wrong_order(self._blocks, "the model called a block once more after its last layer")

    def advance(self, layer: int) -> None:
        """Run the glue before layer `layer` and the layer itself. Raises LayerError when the model calls another one."""
        blocks = self._layers.layers[layer]
        self._switch(blocks, layer)
        if self.calls.done_block != blocks[-1]:
            if not self._coroutine.dead:
                _wrong_order(self._blocks, f"the model called block {self._blocks[self.parked_at].path} out of turn")
            _wrong_order(self._blocks, f"the model's forward ended before block {self._blocks[blocks[-1]].path}")

    def finish(self) -> Any:
        """Run the suffix to the end of the forward. Returns what `body` returned.

        Raises LayerError at another block's call, CallsMissed at another call of the model (see `stubs`, [Note: calls]), and
        HooksMissed where a hook was the first to compute with its block's parameter.
        """
        self._switch(NO_BLOCKS, None)
        if self.calls.is_surplus:
            self.calls.refuse(self.calls.number + 2, self.index)
        if not self._coroutine.dead:
            _wrong_order(self._blocks, "the model called a block once more after its last layer")
        if self._missed >= 0:
            raise HooksMissed(self._blocks[self._missed].path)
        result, self._result = self._result, None
        return result

    def leave_random_numbers(self) -> None:
        """Let the caller's random streams go on where this forward, which is over, has left its own."""
        self._state.apply_rng()

    def close(self) -> None:
        """End a parked forward (after an error), so that no frame and no graph of it outlives the step."""
        if self._coroutine and not self._coroutine.dead:
            self._let_go_on(partial(self._coroutine.throw, GreenletExit))
        self.parked_call, self._result = [], None

    def _switch(self, target: range, layer: int | None) -> None:
        """Let the forward go on, through a layer (PREFIX: up to the first, None: from the last to its end)."""
        self._target = target
        self._coroutine.parent = getcurrent()
        if self._modules is not None:
            self._modules.enter(self.index, layer, self.calls.number)
        try:
            self._let_go_on(self._coroutine.switch)
        except RuntimeError as error:
            refuse_use_outside(self._blocks, _held_by(error), error)
            raise
        if self._modules is not None and not self.calls.is_surplus:
            self._modules.leave(self.index, layer, self.calls.number, is_recomputed=layer is None or self._state.grad)

    def _let_go_on(self, switch: Callable[[], object]) -> None:
        """Under the forward's thread state until it parks, the hub's afterwards.

        No context manager written as a generator: one that an interrupt cuts would put the hub's state back too late.
        """
        outer, modes = ThreadState.capture(), Modes.capture()
        guard: object = None
        try:
            self._guard = None  # back to the inference mode in which the forward parked
            guard = inference_guard(self._state.inference)
            self._state.apply(outer)
            if (entered := self._modes.on_top_of(modes)) is not modes:
                entered.apply()
            switch()
        finally:
            left = Modes.capture()
            self._modes = left.beyond(modes)
            if left is not modes:  # most are in none at either end, which is one object
                modes.apply()
            self._state = ThreadState.capture()
            del guard
            # A forward may park inside its own inference mode: the hub's holds until it is entered again.
            self._guard = inference_guard(outer.inference)
            outer.apply(self._state)

    # ---- the coroutine's side

    def call_block(self, block: int, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Called in place of a block's forward: park until the schedule reaches the block, run it, park at the layer's end.

        Raises LayerError where the model calls a block out of turn, within torch's gradient checkpointing, or within another
        function with a backward of its own.
        """
        raw = self._stubs.raw[block]
        if block == self._whole_block:
            return raw(*args, **kwargs)
        if block == self._hooked_block:
            watch = self._watch
            if watch is None:
                return self._run_recorded(block, raw, args, kwargs)
            watch.look_at((args, kwargs))
            with watch.paused():
                if block == self.calls.done_block:  # a hook calls the block once more, and the record has room for one call
                    watch.found = True
                    return raw(*args, **kwargs)
                return self._run_recorded(block, raw, args, kwargs)
        self._park_ahead(block, args, kwargs)
        result = self._run_recorded(block, raw, args, kwargs)
        self._park_behind(block)
        return result

    def call_hooked(
        self, block: int, call: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """Called in place of a block's call that has hooks of the user's: park ahead of them, and behind them.

        `call` runs the hooks, and calls the block's forward in between. Where a hook computes with a parameter of the block,
        the next run of the step finds the block in `LayerMap.whole`.
        """
        self._park_ahead(block, args, kwargs)
        self._hooked_block = block
        self._watch = ParameterWatch(self._blocks[block].module) if self._keep else None
        try:
            with contextlib.nullcontext() if self._watch is None else self._watch:
                result = call(*args, **kwargs)
            if self._watch is not None:
                self._watch.look_at(result)
            if self._watch is not None and self._watch.found:
                self._layers.whole.add(block)
                self._missed = block
        finally:
            self._hooked_block, self._watch = -1, None
        self._park_behind(block)
        return result

    def call_whole(
        self, block: int, call: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """Called in place of a block's call whose hooks are part of the block: as `call_block`, with the hooks."""
        self._park_ahead(block, args, kwargs)
        self._whole_block = block
        try:
            result = self._run_recorded(block, call, args, kwargs)
        finally:
            self._whole_block = -1
        self._park_behind(block)
        return result

    def _run_recorded(
        self, block: int, function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        if self._keep:
            refuse_call_run_again(self._blocks[block])
        with contextlib.nullcontext() if self._outside is None else self._outside.paused((args, kwargs)):
            result = self._runner.run(block, function, args, kwargs)
        self.calls.done_block = block
        return result

    def _park_ahead(self, block: int, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Park until the schedule reaches the block, unless it has."""
        if block in self._target and block > self.calls.done_block:
            return
        self.parked_at = block
        self.parked_call = [args, kwargs]
        _park(self._coroutine)
        self.parked_call = []
        if block not in self._target or block != self.calls.done_block + 1:
            _wrong_order(self._blocks, f"the model called block {self._blocks[block].path} out of turn")

    def _park_behind(self, block: int) -> None:
        """Park if the block, which has run, ends the layer."""
        if block == self._target[-1] and not (self._run_on and block + 1 < len(self._blocks)):
            _park(self._coroutine)


def _park(coroutine: Coroutine) -> None:
    parent = coroutine.parent
    assert parent is not None
    parent.switch()


def _held_by(error: RuntimeError) -> Iterator[object]:
    """What the frames in which an error was raised hold, and what the modules among it hold as parameters, the last frame
    first."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        for value in list(frame.f_locals.values()):
            yield from value._parameters.values() if isinstance(value, nn.Module) else (value,)


def _wrong_order(blocks: Sequence[Block], what: str) -> NoReturn:
    raise LayerError(
        f"{what}; the schedule runs every block exactly once, in the order"
        f" {', '.join(block.path for block in blocks[:6])}, ...:"
        " name the layers in their order of execution in vertical_schedule.layers, without those that some micro-batch does"
        " not call"
    )


def refuse_call_run_again(block: Block) -> None:
    """Raises LayerError where a checkpoint, or a function with a backward of its own, calls the caller of this function for
    the block: it would run the block once more in the backward."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            raise LayerError(
                f"block {block.path} is called within torch.utils.checkpoint.checkpoint, which would run it once"
                " more in the backward: call it directly, the schedule recomputes each block already"
            )
        if frame.f_code is APPLY:
            function = frame.f_locals.get("cls")
            raise LayerError(
                f"block {block.path} is called within the forward of {getattr(function, '__name__', 'a function')}, a"
                " torch.autograd.Function, in which autograd does not follow the block: name in vertical_schedule.layers a"
                " module around that function, which then is one layer, or call the block outside"
            )
        frame = frame.f_back
