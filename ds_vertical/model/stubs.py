"""Blocks whose calls go to the coroutine that makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from greenlet import getcurrent, greenlet

from ds_vertical.interrupts import Changed
from ds_vertical.model.compiled_blocks import raw_forward
from ds_vertical.model.layers import Block


class Caller(Protocol):
    """What takes a coroutine's block calls. `index`: the micro-batch's number in its step."""

    index: int

    def call_block(self, block: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class Coroutine(greenlet):
    """A greenlet that knows its micro-batch."""

    micro_batch: Caller


class Stubs:
    """While active, every block's `forward` hands its call to the coroutine that makes it.

    Outside a coroutine (a recompute runs the raw forward itself) a block's forward is its own. What compiles a block's call
    is off meanwhile, and around its raw forward: see [Note: compiled blocks].
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = blocks
        self.raw: list[Callable[..., Any]] = [raw_forward(block.module) for block in blocks]
        self._kept = [block.module.__dict__.get("forward") for block in blocks]
        self._compiled = {index: call for index, b in enumerate(blocks) if (call := b.module._compiled_call_impl) is not None}
        self._changed = Changed(self._put_back, self._take_over)

    def __enter__(self) -> Stubs:
        self._changed.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._changed.__exit__(*error)

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

    def _stub(self, index: int) -> Callable[..., Any]:
        raw = self.raw[index]

        @torch.compiler.disable  # where the user's own compiled function calls a block, its graph ends here
        def forward(*args: Any, **kwargs: Any) -> Any:
            current = getcurrent()
            if isinstance(current, Coroutine):
                return current.micro_batch.call_block(index, args, kwargs)
            return raw(*args, **kwargs)

        return forward
