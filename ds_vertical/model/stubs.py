"""Stubs in the place of the blocks' forwards: each hands a block's call to the coroutine that makes it.

[Note: hooks of blocks] A block's forward runs in the block's part of the micro-batch's forward. The user's hooks on the block
run there, too, so that one part alone changes what they and the block write to, and the next micro-batch finds it as in stock.
So a second stub, in the place of what `torch.compile` makes of a module's call, stands for the call with its hooks.

As a rule the hooks belong to the code around the block: they run once, and their graph is kept. But the block's parameters are
gone by the time that graph runs backward. So where a hook computes with one of them, the block and its hooks are one
(`LayerMap.whole`): the backward runs the hooks again, as it runs the block again.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import Final, Protocol

import torch
from greenlet import getcurrent, greenlet
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ds_vertical.interrupts import Changed
from ds_vertical.model.compiled_blocks import raw_forward
from ds_vertical.model.layers import LayerMap
from ds_vertical.model.state.containers import is_internal

_APPLY: Final = torch.autograd.Function.apply.__func__.__code__


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

    def call_whole(
        self, block: int, call: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """As `call_hooked`, where the hooks are part of the block: its backward runs them again."""
        ...


class Coroutine(greenlet):
    """A greenlet that runs one micro-batch's forward, and knows what takes its block calls."""

    micro_batch: Caller


class Stubs:
    """While active, every block's `forward` hands its call to the coroutine that makes it.

    Outside a coroutine (a recompute runs the raw forward itself) a block's forward is its own. What compiles a block's call
    is off meanwhile, and around its raw forward: see [Note: compiled blocks]. A call that has hooks of the user's is
    handed over with them: see [Note: hooks of blocks].

    """

    def __init__(self, layers: LayerMap) -> None:
        self.blocks = blocks = layers.blocks
        self.raw: list[Callable[..., object]] = [raw_forward(block.module) for block in blocks]
        self._whole = layers.whole
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
                made_by = current.micro_batch
                make = made_by.call_whole if index in self._whole else made_by.call_hooked
                return make(index, module._call_impl, args, kwargs)
            return module._call_impl(*args, **kwargs)

        return call


class ParameterWatch(TorchFunctionMode):
    """While active, notes whether code that autograd follows computes with a parameter of a block: see `found`.

    Functions of TorchScript and of C++ do not pass here. `look_at` finds them in the graph that they have made.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.found = False
        self._ids = set(map(id, module.parameters()))
        self._first_node = torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]

    def __torch_function__(  # override
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Make one call of a function of torch."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.found or not isinstance(result, torch.Tensor | list | tuple) or isinstance(result, torch.Size):
            return result
        if any(id(each) in self._ids for each in pytree.tree_leaves((args, kwargs))):
            self.found = torch.is_grad_enabled() or _within_function()
        return result

    def look_at(self, values: object) -> None:
        """Note whether what was computed since the watch was made leads from a tensor among the values to a parameter."""
        waiting = [value.grad_fn for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]
        seen: set[object] = set()
        while waiting and not self.found:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if type(node).__name__ == "AccumulateGrad":
                self.found = id(node.variable) in self._ids  # type: ignore[attr-defined]
            elif node._sequence_nr() >= self._first_node:  # type: ignore[attr-defined]
                waiting += [following for following, _ in node.next_functions]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within the block it is not active: the block's own forward runs."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()


def _within_function() -> bool:
    """Whether the forward of a `torch.autograd.Function` is running, in which autograd does not follow the single operations.

    DeepSpeed's linear layer is one.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _APPLY:
        frame = frame.f_back
    return frame is not None


def calls_through(module: nn.Module, around: Callable[[Callable[[], object]], object]) -> Changed:
    """Within the block of what this returns, each call of a module returns what `around(run)` does, where `run()` makes the
    call itself, with its hooks and with its forward compiled where it is. No compiler looks into `around`."""
    raw, kept, kept_call = raw_forward(module), module.__dict__.get("forward"), module._compiled_call_impl

    @torch.compiler.disable
    def forward(*args: object, **kwargs: object) -> object:
        return raw(*args, **kwargs)

    @torch.compiler.disable
    def call(*args: object, **kwargs: object) -> object:
        return around(lambda: module._call_impl(*args, **kwargs))

    def take_over() -> None:
        object.__setattr__(module, "forward", forward)
        object.__setattr__(module, "_compiled_call_impl", call)

    def put_back() -> None:
        _put_back(module, "_compiled_call_impl", kept_call)
        _put_back(module, "forward", kept)

    return Changed(put_back, take_over)


def _hooks_of(module: nn.Module) -> Iterator[object]:
    yield from module._forward_hooks.values()
    yield from module._forward_pre_hooks.values()


def _put_back(module: nn.Module, name: str, kept: object) -> None:
    """Let an attribute of a module be as it was before the stubs; None: that of its class."""
    if kept is None:
        module.__dict__.pop(name, None)
    else:
        object.__setattr__(module, name, kept)
