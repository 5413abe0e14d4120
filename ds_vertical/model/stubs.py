"""Stubs in the place of the blocks' forwards: each hands a block's call to the coroutine that makes it.

[Note: hooks of blocks] A block's forward runs in the block's part of the micro-batch's forward. The user's hooks on the block
run there, too, so that one part alone changes what they and the block write to, and the next micro-batch finds it as in stock.
So a second stub, in the place of what `torch.compile` makes of a module's call, stands for the call with its hooks.

As a rule the hooks belong to the code around the block: they run once, and their graph is kept. But the block's parameters are
gone by the time that graph runs backward. So where a hook computes with one of them, the block and its hooks are one
(`LayerMap.whole`): the backward runs the hooks again, as it runs the block again.

[Note: calls] The code may call the model several times, the same number of times in each micro-batch of a step. Each call is a
forward through all layers. A further call begins where the model is called once the call before has been through its last
block. Between the two the code does what it likes, and may have been parked ahead of it: so all micro-batches make their first
call, then all of them the second one. The number is verified: a call too many parks, one too few lets the code end early, and
the hub starts the step over with the number that it has seen.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import Final, NoReturn, Protocol

import torch
from greenlet import getcurrent, greenlet
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _pytree as pytree

from ds_vertical.errors import LayerError
from ds_vertical.interrupts import Changed
from ds_vertical.model.compiled_blocks import is_compiled, raw_forward
from ds_vertical.model.layers import LayerMap
from ds_vertical.model.state.containers import is_internal
from ds_vertical.model.state.restart import CallsMissed, UseMissed
from ds_vertical.types import PRE, Unit


class BlockRunner(Protocol):
    """What runs a micro-batch's blocks."""

    def run(self, block: int, function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run one block, by its number, as a call of `function`. Returns what that returned."""
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


# of a function with its own backward: the frame that runs its forward
APPLY: Final = torch.autograd.Function.apply.__func__.__code__


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
    handed over with them: see [Note: hooks of blocks]. `model`: its calls are handed over, too; None: they are not told from
    one another. `compiled`: of each block, whether it was compiled ahead of that.
    """

    def __init__(self, layers: LayerMap, model: nn.Module | None = None) -> None:
        self.blocks = blocks = layers.blocks
        self._model = None if any(block.module is model for block in blocks) else model
        self._kept_model_call = None if model is None else model._compiled_call_impl
        self.raw: list[Callable[..., object]] = [raw_forward(block.module) for block in blocks]
        self._whole = layers.whole
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
        params = list(module.parameters())
        self._ids = set(map(id, params))
        self._frozen = {param.untyped_storage().data_ptr() for param in params if not param.requires_grad}
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
                self.found = bool(self._frozen) and self._may_keep_frozen(node)
                waiting += [following for following, _ in node.next_functions]

    def _may_keep_frozen(self, node: object) -> bool:
        """Whether a node may keep a frozen parameter for its backward. What a graph of TorchScript keeps is not shown."""
        if type(node).__name__ == "DifferentiableGraphBackward":
            return True
        try:
            kept = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        except RuntimeError:  # torch does not show what has been written in place since, or freed
            return True
        tensors = (each for each in pytree.tree_leaves(kept) if isinstance(each, torch.Tensor))
        return any(each.untyped_storage().data_ptr() in self._frozen for each in tensors)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within the block it is not active: the block's own forward runs."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()


class OutsideWatch(TorchFunctionMode):
    """While active, refuses functions of torch a parameter outside the layers that is away: see `layers`, [Note: two ends].

    `apart`: the units that are away but for their own end's code. What a block does inside is not watched, what it is given is.
    """

    def __init__(self, layers: LayerMap, apart: Iterable[Unit]) -> None:
        super().__init__()
        self._layers = layers
        self._unit_of: dict[int, Unit] = {id(param): unit for unit in apart for param in layers.units[unit]}
        self._away: dict[int, Unit] = {}
        self._missed: UseMissed | None = None
        self._is_active = False

    @contextlib.contextmanager
    def watching(self, end: Unit) -> Iterator[None]:
        """Within the block code of `end` runs: PRE, SUF, or a layer with the glue ahead of it. Raises UseMissed."""
        self._away = {key: unit for key, unit in self._unit_of.items() if unit != end}
        with Changed(self._leave, self._enter):
            yield
        if self._missed is not None:  # the user's code has caught it
            raise self._missed

    @contextlib.contextmanager
    def paused(self, given: object) -> Iterator[None]:
        """Within the block, where a block of the model runs, the watch is not active. `given`: what the block gets. Raises
        UseMissed."""
        was_active, modes = self._is_active, _get_current_function_mode_stack()
        if was_active:
            self._look_at(pytree.tree_leaves(given))
            self._leave()
        try:
            yield
        finally:
            if was_active:
                self._enter()
                if modes[-1] is not self:  # the user's code is inside a mode, which it will take off as the uppermost one
                    _replace_modes(modes)

    def miss(self, unit: Unit) -> NoReturn:
        """The unit may be away no longer. Raises UseMissed."""
        self._layers.missed.add(unit)
        self._missed = UseMissed(str(unit))
        raise self._missed

    def reach_through(self) -> None:
        """A backward runs past its segment, down to the prefix. Raises UseMissed where that end's parameters are away."""
        if PRE in self._unit_of.values():
            self.miss(PRE)

    def __torch_function__(  # override
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Make one call of a function of torch."""
        kwargs = kwargs or {}
        if self._away and not _tells_no_values(func):
            self._look_at((*args, *kwargs.values()))
        return func(*args, **kwargs)

    def _look_at(self, values: Iterable[object]) -> None:
        for value in values:
            if isinstance(value, list | tuple):
                self._look_at(value)
            elif (unit := self._away.get(id(value))) is not None:
                self.miss(unit)

    def _enter(self) -> None:
        self._is_active = True
        try:
            self.__enter__()
        except BaseException:  # an interrupt, ahead of it or behind it
            self._is_active = self in _get_current_function_mode_stack()
            raise

    def _leave(self) -> None:
        """Leave the user's modes as they would be without this one: a forward may have parked inside one, or have left one,
        which takes the uppermost off. May run twice, and where the watch is not active."""
        modes = _get_current_function_mode_stack()
        if self not in modes and not self._is_active:
            return
        others = [mode for mode in modes if mode is not self] if self in modes else modes[:-1]
        try:
            _replace_modes(others)
        except BaseException:  # an interrupt: some of them may be off
            _replace_modes(others)
            raise
        finally:
            self._is_active = False


def _replace_modes(modes: Iterable[TorchFunctionMode]) -> None:
    """Let these be the function modes of this thread, the uppermost last."""
    for _ in _get_current_function_mode_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


# What may be asked of a parameter that is away: it has these whether or not its values are there.
_WITHOUT_VALUES: Final = frozenset(
    ("dtype", "device", "requires_grad", "is_leaf", "layout", "grad_fn", "grad", "is_cpu", "is_cuda", "is_meta", "is_sparse")
    + ("is_quantized", "is_nested", "is_floating_point", "is_complex", "element_size", "register_hook", "__hash__")
)


def _tells_no_values(func: Callable[..., object]) -> bool:
    name = getattr(func, "__name__", "")
    return (getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name) in _WITHOUT_VALUES


def _within_function() -> bool:
    """Whether the forward of a `torch.autograd.Function` is running, in which autograd does not follow the single operations.

    DeepSpeed's linear layer is one.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not APPLY:
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
