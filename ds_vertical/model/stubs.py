"""Stubs in the place of the blocks' forwards: each hands a block's call to the coroutine that makes it.

[Note: hooks of blocks] A block's forward runs in the block's part of the micro-batch's forward. The user's hooks on the block
run there, too, so that one part alone changes what they and the block write to, and the next micro-batch finds it as in stock.
So a second stub, in the place of what `torch.compile` makes of a module's call, stands for the call with its hooks.

[Note: calls] The code may call the model several times, the same number of times in each micro-batch of a step. Each call is a
forward through all layers. A further call begins where the model is called once the call before has been through its last
block. Between the two the code does what it likes, and may have been parked ahead of it: so all micro-batches make their first
call, then all of them the second one. The number is verified: a call too many parks, one too few lets the code end early, and
the hub starts the step over with the number that it has seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import NoReturn, Protocol

import torch
from greenlet import getcurrent, greenlet
from torch import nn

from ds_vertical.errors import LayerError
from ds_vertical.interrupts import Changed
from ds_vertical.model.compiled_blocks import raw_forward
from ds_vertical.model.layers import Block
from ds_vertical.model.state.containers import is_internal
from ds_vertical.model.state.restart import CallsMissed


class BlockRunner(Protocol):
    """What runs a micro-batch's blocks."""

    def run(self, block: int, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run one block, by its number. Returns what the block returned."""
        ...

    def begin_call(self) -> None:
        """Take note that the blocks run from here on belong to a further call of the model."""


class ModelCalls:
    """The calls of the model by one micro-batch's code. See [Note: calls].

    `expected`: how many there should be; `park`: gives the turn to the hub. `number`: of the call that is under way, or was
    last. `done_block`: the last block that has run in it. `is_surplus`: the code is about to make a call that was not expected.
    `behind`: called in the code as each call has returned.
    """

    def __init__(self, num_blocks: int, expected: int, blocks: BlockRunner, park: Callable[[], None]) -> None:
        self.number = 0
        self.done_block = -1
        self.is_surplus = False
        self.behind: Callable[[], None] = lambda: None
        self._num_blocks = num_blocks
        self._expected = expected
        self._blocks = blocks
        self._park = park
        self._depth = 0  # calls of the model within one another

    def make(self, call: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Called in place of the model's own call, which is `call`. Returns what the call returned."""
        if self._depth == 0 and self.done_block == self._num_blocks - 1:
            self._begin()
        self._depth += 1
        try:
            result = call(*args, **kwargs)
        finally:
            self._depth -= 1
        if self._depth == 0:
            self.behind()
        return result

    def _begin(self) -> None:
        """The call before is through with its blocks: another one begins."""
        while self.number + 1 >= self._expected:
            self.is_surplus = True
            self._park()
        self.number += 1
        self.done_block = -1
        self._blocks.begin_call()

    def refuse(self, number: int, micro_batch: int) -> NoReturn:
        """The code calls the model another number of times than expected. Raises CallsMissed with `number`, or LayerError where
        an earlier micro-batch of the step has made as many as expected."""
        if micro_batch == 0:
            raise CallsMissed(number)
        raise LayerError(
            f"micro-batch {micro_batch} of the step calls the model {'more' if number > self._expected else 'fewer'} than"
            f" {self._expected} time(s), which is what micro-batch 0 did; layer-major order needs the same number of calls in"
            " each micro-batch of a step: make them equal, or set vertical_schedule.enabled to false"
        )


class Caller(Protocol):
    """What takes a coroutine's block calls, and its `calls` of the model. `index`: the micro-batch's number in its step."""

    index: int
    calls: ModelCalls

    def call_block(self, block: int, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run a block, by its number in order of execution, when the schedule reaches it. Returns what the block returned."""
        ...

    def call_hooked(
        self, block: int, call: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """Make a block's call, with its hooks, when the schedule reaches the block. Returns what the call returned."""
        ...


class Coroutine(greenlet):
    """A greenlet that runs one micro-batch's forward, and knows what takes its block calls."""

    micro_batch: Caller


class Stubs:
    """While active, every block's `forward` hands its call to the coroutine that makes it.

    Outside a coroutine (a recompute runs the raw forward itself) a block's forward is its own. What compiles a block's call
    is off meanwhile, and around its raw forward: see [Note: compiled blocks]. A call that has hooks of the user's is
    handed over whole: see [Note: hooks of blocks]. `model`: its calls are handed over, too; None: they are not told from one
    another.
    """

    def __init__(self, blocks: Sequence[Block], model: nn.Module | None = None) -> None:
        self.blocks = blocks
        self._model = None if any(block.module is model for block in blocks) else model
        self._kept_model_call = None if model is None else model._compiled_call_impl
        self.raw: list[Callable[..., object]] = [raw_forward(block.module) for block in blocks]
        self._kept = [block.module.__dict__.get("forward") for block in blocks]
        self._kept_calls = [block.module._compiled_call_impl for block in blocks]
        self._num_internal = [sum(map(is_internal, _hooks_of(block.module))) for block in blocks]
        self._changed = Changed(self._put_back, self._take_over)

    def __enter__(self) -> Stubs:
        self._changed.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._changed.__exit__(kind, error, trace)

    def _take_over(self) -> None:
        for index, block in enumerate(self.blocks):
            object.__setattr__(block.module, "forward", self._stub(index))
        for index, block in enumerate(self.blocks):
            object.__setattr__(block.module, "_compiled_call_impl", self._call_stub(index))
        if self._model is not None:
            object.__setattr__(self._model, "_compiled_call_impl", self._model_stub(self._model))

    def _put_back(self) -> None:
        if self._model is not None:
            _put_back(self._model, "_compiled_call_impl", self._kept_model_call)
        for block, call in zip(self.blocks, self._kept_calls, strict=True):
            _put_back(block.module, "_compiled_call_impl", call)
        for block, forward in zip(self.blocks, self._kept, strict=True):
            _put_back(block.module, "forward", forward)

    def _model_stub(self, model: nn.Module) -> Callable[..., object]:
        own: Callable[..., object] = model._call_impl if self._kept_model_call is None else self._kept_model_call

        def call(*args: object, **kwargs: object) -> object:
            current = getcurrent()
            return current.micro_batch.calls.make(own, args, kwargs) if isinstance(current, Coroutine) else own(*args, **kwargs)

        return call

    def _stub(self, index: int) -> Callable[..., object]:
        raw = self.raw[index]

        @torch.compiler.disable  # where the user's own compiled function calls a block, its graph ends here
        def forward(*args: object, **kwargs: object) -> object:
            current = getcurrent()
            if isinstance(current, Coroutine):
                return current.micro_batch.call_block(index, args, kwargs)
            return raw(*args, **kwargs)

        return forward

    def _call_stub(self, index: int) -> Callable[..., object]:
        module, num_internal = self.blocks[index].module, self._num_internal[index]

        @torch.compiler.disable
        def call(*args: object, **kwargs: object) -> object:
            current = getcurrent()
            num_hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
            if num_hooks > num_internal and isinstance(current, Coroutine):  # some are the user's
                return current.micro_batch.call_hooked(index, module._call_impl, args, kwargs)
            return module._call_impl(*args, **kwargs)

        return call


def _hooks_of(module: nn.Module) -> Iterator[object]:
    yield from module._forward_hooks.values()
    yield from module._forward_pre_hooks.values()


def _put_back(module: nn.Module, name: str, kept: object) -> None:
    """Let an attribute of a module be as it was before the stubs; None: that of its class."""
    if kept is None:
        module.__dict__.pop(name, None)
    else:
        object.__setattr__(module, name, kept)
