"""Stubs in the place of the blocks' forwards: each hands a block's call to the coroutine that makes it.

[Note: hooks of blocks] A block's forward runs in the block's part of the micro-batch's forward. The user's hooks on the block
run there, too, so that one part alone changes what they and the block write to, and the next micro-batch finds it as in stock.
So a second stub, in the place of what `torch.compile` makes of a module's call, stands for the call with its hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Protocol

import torch
from greenlet import getcurrent, greenlet
from torch import nn

from ds_vertical.interrupts import Changed
from ds_vertical.model.compiled_blocks import is_compiled, raw_forward
from ds_vertical.model.layers import Block
from ds_vertical.model.state.containers import is_internal


class Caller(Protocol):
    """What takes a coroutine's block calls. `index`: the micro-batch's number in its step."""

    index: int

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
    handed over whole: see [Note: hooks of blocks]. `compiled`: of each block, whether it was compiled ahead of that.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = blocks
        self.raw: list[Callable[..., object]] = [raw_forward(block.module) for block in blocks]
        self.compiled = [is_compiled(block.module) for block in blocks]
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

    def _put_back(self) -> None:
        for block, call in zip(self.blocks, self._kept_calls, strict=True):
            _put_back(block.module, "_compiled_call_impl", call)
        for block, forward in zip(self.blocks, self._kept, strict=True):
            _put_back(block.module, "forward", forward)

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
