"""Stubs in the place of the blocks' forwards: each hands a block's call to the coroutine that makes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

import torch
from greenlet import getcurrent, greenlet

from ds_vertical.interrupts import Changed
from ds_vertical.model.compiled_blocks import raw_forward
from ds_vertical.model.layers import Block


class Caller(Protocol):
    """What takes a coroutine's block calls. `index`: the micro-batch's number in its step."""

    index: int

    def call_block(self, block: int, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run a block, by its number in order of execution, when the schedule reaches it. Returns what the block returned."""
        ...


class Coroutine(greenlet):
    """A greenlet that runs one micro-batch's forward, and knows what takes its block calls."""

    micro_batch: Caller


class Stubs:
    """While active, every block's `forward` hands its call to the coroutine that makes it.

    Outside a coroutine (a recompute runs the raw forward itself) a block's forward is its own. What compiles a block's call
    is off meanwhile, and around its raw forward: see [Note: compiled blocks].
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = blocks
        self.raw: list[Callable[..., object]] = [raw_forward(block.module) for block in blocks]
        self._kept = [block.module.__dict__.get("forward") for block in blocks]
        self._compiled = {index: call for index, b in enumerate(blocks) if (call := b.module._compiled_call_impl) is not None}
        self._changed = Changed(self._put_back, self._take_over)

    def __enter__(self) -> Stubs:
        self._changed.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._changed.__exit__(kind, error, trace)

    def _take_over(self) -> None:
        for index, block in enumerate(self.blocks):
            object.__setattr__(block.module, "forward", self._stub(index))
        for index in self._compiled:
            object.__setattr__(self.blocks[index].module, "_compiled_call_impl", None)

    def _put_back(self) -> None:
        for index, call in self._compiled.items():
            object.__setattr__(self.blocks[index].module, "_compiled_call_impl", call)
        for block, kept in zip(self.blocks, self._kept, strict=True):
            if kept is None:
                block.module.__dict__.pop("forward", None)
            else:
                object.__setattr__(block.module, "forward", kept)

    def _stub(self, index: int) -> Callable[..., object]:
        raw = self.raw[index]

        @torch.compiler.disable  # where the user's own compiled function calls a block, its graph ends here
        def forward(*args: object, **kwargs: object) -> object:
            current = getcurrent()
            if isinstance(current, Coroutine):
                return current.micro_batch.call_block(index, args, kwargs)
            return raw(*args, **kwargs)

        return forward
