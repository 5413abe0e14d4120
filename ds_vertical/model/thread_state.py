"""The state that torch keeps per thread, and settings of the whole process, captured and put back.

[Note: one thread, many forwards] The forwards of all micro-batches run as greenlets of ONE thread. What torch keeps per thread
would leak from one forward to the next: autocast still on, grad mode still off, one random stream for all. So would settings
that a forward changes for a while, as `sdpa_kernel` does. So each switch captures the state of the side that it leaves, and
applies that of the side that it enters. The modes that a forward has entered are put inside those of the hub (`Modes`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._autograd import (
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
    _top_saved_tensors_default_hooks,
)
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

from ds_vertical.interrupts import Changed
from ds_vertical.io import streams


class AutocastState(NamedTuple):
    """Autocast of one device type."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    def apply(self) -> None:
        """Set this thread's autocast for the device type: on or off, and its dtype."""
        torch.set_autocast_enabled(self.device_type, self.enabled)
        torch.set_autocast_dtype(self.device_type, self.dtype)


def autocast_device_types() -> tuple[str, ...]:
    """The device types that this process has: the processor, and what works beside it."""
    beside = streams.kind_beside_host()
    return ("cpu",) if beside is None else ("cpu", beside.type)


def _autocast_nesting() -> int:
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def _set_autocast_nesting(depth: int) -> None:
    current = _autocast_nesting()
    for _ in range(depth - current):
        torch.autocast_increment_nesting()
    for _ in range(current - depth):
        torch.autocast_decrement_nesting()


class Settings(NamedTuple):
    """Torch's settings of the process that code may change around blocks."""

    dtype: torch.dtype
    deterministic: tuple[bool, bool]  # are operations to be; is that a warning only
    attention: tuple[bool, bool, bool, bool]  # which kernels may be taken
    precision: str | None  # of products in fp32; None where the script has set torch's newer keys for it

    @classmethod
    def capture(cls) -> Settings:
        """The process's now."""
        attention = torch.backends.cuda
        return cls(
            torch.get_default_dtype(),
            (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
            (
                attention.flash_sdp_enabled(),
                attention.mem_efficient_sdp_enabled(),
                attention.math_sdp_enabled(),
                attention.cudnn_sdp_enabled(),
            ),
            _matmul_precision(),
        )

    def apply(self) -> None:
        """Put back what differs from the process's."""
        now = Settings.capture()
        if now.dtype != self.dtype:
            torch.set_default_dtype(self.dtype)
        if now.deterministic != self.deterministic:
            torch.use_deterministic_algorithms(self.deterministic[0], warn_only=self.deterministic[1])
        if now.attention != self.attention:
            for put, enabled in zip(_PUT_ATTENTION, self.attention, strict=True):
                put(enabled)
        if self.precision is not None and now.precision not in (None, self.precision):
            torch.set_float32_matmul_precision(self.precision)


def _matmul_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch's own, where `fp32_precision` of a back end has been set
        return None


SettingsValues = tuple[torch.dtype, tuple[bool, bool], tuple[bool, bool, bool, bool], str | None]

_PUT_ATTENTION: Final[tuple[Callable[[bool], None], ...]] = (
    torch.backends.cuda.enable_flash_sdp,
    torch.backends.cuda.enable_mem_efficient_sdp,
    torch.backends.cuda.enable_math_sdp,
    torch.backends.cuda.enable_cudnn_sdp,
)


class HostPart(Protocol):
    """What torch keeps per thread on the host, and its settings, at one moment: a `HostState`, or the compiled op's."""

    @property
    def grad(self) -> bool:
        """Grad mode."""
        ...

    @property
    def inference(self) -> bool:
        """Inference mode."""
        ...

    @property
    def autocast(self) -> Sequence[tuple[str, bool, torch.dtype]]:
        """Of each device type: the values of `AutocastState`."""
        ...

    @property
    def rng(self) -> torch.Tensor:
        """The random stream, as torch's `get_rng_state` gives it."""
        ...

    @property
    def settings(self) -> SettingsValues:
        """The values of `Settings`."""
        ...

    def apply(self) -> bool:
        """Put everything back except inference mode and settings. Returns whether the process's settings are those of then."""
        ...

    def apply_rng(self) -> None:
        """Put back only the random stream."""
        ...

    def with_rng_of(self, other: HostPart) -> HostPart:
        """This state with the random stream of another one, of either kind."""
        ...

    def without_autocast_cache(self) -> HostPart:
        """This state with autocast's cache off."""
        ...


@dataclass(frozen=True, slots=True)
class HostState:
    """As `HostPart`, in Python: for where the compiled op cannot be had, which gives the same in less time."""

    grad: bool
    inference: bool
    autocast: tuple[AutocastState, ...]
    autocast_cache: bool
    autocast_nesting: int
    rng: torch.Tensor
    settings: SettingsValues

    @classmethod
    def capture(cls) -> HostState:
        """The calling thread's now."""
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(
                AutocastState(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in autocast_device_types()
            ),
            autocast_cache=torch.is_autocast_cache_enabled(),
            autocast_nesting=_autocast_nesting(),
            rng=torch.get_rng_state(),
            settings=Settings.capture(),
        )

    def apply(self) -> bool:
        """See `HostPart.apply`."""
        for autocast in self.autocast:
            autocast.apply()
        torch.set_autocast_cache_enabled(self.autocast_cache)
        _set_autocast_nesting(self.autocast_nesting)
        self.apply_rng()
        torch._C._set_grad_enabled(self.grad)
        return self.settings == Settings.capture()

    def apply_rng(self) -> None:
        """See `HostPart.apply_rng`."""
        torch.set_rng_state(self.rng)

    def with_rng_of(self, other: HostPart) -> HostState:
        """See `HostPart.with_rng_of`."""
        return replace(self, rng=other.rng)

    def without_autocast_cache(self) -> HostState:
        """See `HostPart.without_autocast_cache`."""
        return replace(self, autocast_cache=False)


_capture_host: Callable[[], HostPart] = HostState.capture


def capture_host_by(capture: Callable[[], HostPart]) -> None:
    """Let this function capture the host's part of every state from now on: that of the compiled op, or `HostState.capture`."""
    global _capture_host
    _capture_host = capture


class ThreadState:
    """A snapshot: grad mode, inference mode, autocast, random streams (host and device), current device and stream, settings.
    It is not changed once it is made.

    Inference mode has no setter in torch: `applied` and the coroutines open a guard where the two sides differ.
    """

    __slots__ = ("device", "device_rng", "host", "stream")

    def __init__(
        self,
        host: HostPart,
        device_rng: torch.Tensor | None = None,
        device: int | None = None,
        stream: torch.Stream | None = None,
    ) -> None:
        self.host = host
        self.device_rng = device_rng
        self.device = device
        self.stream = stream

    @property
    def grad(self) -> bool:
        """Grad mode."""
        return self.host.grad

    @property
    def inference(self) -> bool:
        """Inference mode."""
        return self.host.inference

    @property
    def autocast(self) -> tuple[tuple[str, bool, torch.dtype], ...]:
        """Of each device type: the values of `AutocastState`."""
        return tuple(self.host.autocast)

    @classmethod
    def capture(cls) -> ThreadState:
        """This thread's state now."""
        beside = streams.module_in_use()
        if beside is None:
            return cls(_capture_host())
        return cls(_capture_host(), beside.get_rng_state(), beside.current_device(), beside.current_stream())

    def apply(self, now: ThreadState | None = None) -> None:
        """Put everything back except inference mode (see `inference_guard`). `now`: the state that has been captured just
        before; a device and a stream that are the same there are left alone."""
        is_there = now is not None and now.device == self.device and now.stream == self.stream
        if self.device is not None and self.stream is not None and not is_there:
            module = streams.module_of(self.stream.device)
            module.set_device(self.device)
            module.set_stream(self.stream)
        if not self.host.apply():
            Settings(*self.host.settings).apply()
        self._apply_device_rng()

    def apply_rng(self) -> None:
        """Put back only the random streams, of the host and of the current device."""
        self.host.apply_rng()
        self._apply_device_rng()

    def _apply_device_rng(self) -> None:
        if self.device_rng is not None and (beside := streams.module_in_use()) is not None:
            beside.set_rng_state(self.device_rng)

    def seeded(self, seed: int) -> ThreadState:
        """This state with fresh random streams seeded by `seed`."""
        outer = ThreadState.capture()
        try:
            torch.default_generator.manual_seed(seed)
            beside = streams.module_in_use()
            if outer.device_rng is not None and beside is not None:
                beside.manual_seed(seed)  # of this device alone: the others' streams would stay seeded
            now = ThreadState.capture()
        finally:
            outer.apply_rng()
        return ThreadState(self.host.with_rng_of(now.host), now.device_rng, self.device, self.stream)

    def without_autocast_cache(self) -> ThreadState:
        """This state with autocast's cache of cast weights off: it would keep a layer's weights alive past their release."""
        return ThreadState(self.host.without_autocast_cache(), self.device_rng, self.device, self.stream)


class _Packing(NamedTuple):
    """A pair of hooks for saved tensors."""

    pack: Callable[[torch.Tensor], object]
    unpack: Callable[[object], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Modes:
    """The modes of torch's functions and operations, and the hooks for saved tensors, that code has entered and not left; the
    innermost last."""

    functions: tuple[TorchFunctionMode, ...] = ()
    operations: tuple[TorchDispatchMode, ...] = ()
    packings: tuple[_Packing, ...] = ()

    @classmethod
    def capture(cls) -> Modes:
        """This thread's now."""
        functions = tuple(_get_current_function_mode_stack()) if _len_torch_function_stack() else ()
        operations = tuple(_get_current_dispatch_mode_stack()) if _len_torch_dispatch_stack() else ()
        if _top_saved_tensors_default_hooks(True) is None:
            return cls(functions, operations) if functions or operations else NO_MODES
        packings = _take_packings()
        _put_packings(packings)
        return cls(functions, operations, packings)

    def apply(self) -> None:
        """Let these be the modes of this thread."""
        now = Modes.capture()
        if now == self:
            return
        if now.functions != self.functions:
            for _ in now.functions:
                _pop_function_mode()
            for mode in self.functions:
                _push_function_mode(mode)
        if now.operations != self.operations:
            for _ in now.operations:
                _pop_dispatch_mode()
            for each in self.operations:
                _push_dispatch_mode(each)
            self.tell_compiler()
        if now.packings != self.packings:
            _take_packings()
            _put_packings(self.packings)

    def tell_compiler(self) -> None:
        """Put torch's own notes of whether a mode of operations is on, which `torch.compile` reads: within such modes it
        compiles nothing. Torch changes them where a mode is entered and left, but not where a stack of modes is put back."""
        for name, counts in _MODE_NOTES.items():
            if hasattr(_python_dispatch, name):
                setattr(_python_dispatch, name, any(map(counts, self.operations)))
        if (put := getattr(_python_dispatch, _PUT_NATIVE_NOTE, None)) is not None:
            put(any(map(_MODE_NOTES[_NATIVE_NOTE], self.operations)))

    def beyond(self, others: Modes) -> Modes:
        """Those that are not among others."""
        if self is others or self == others:
            return NO_MODES
        functions = tuple(mode for mode in self.functions if mode not in others.functions)
        operations = tuple(mode for mode in self.operations if mode not in others.operations)
        return Modes(functions, operations, self.packings[len(others.packings) :])

    def on_top_of(self, others: Modes) -> Modes:
        """The others, and inside them these. No mode is there twice."""
        if self is NO_MODES or self == NO_MODES:
            return others
        mine = self.beyond(others)
        return Modes(others.functions + mine.functions, others.operations + mine.operations, others.packings + self.packings)

    def within(self) -> contextlib.AbstractContextManager[None]:
        """Within the block these modes are on, too, inside those of the thread. No mode is there twice."""
        outer = Modes.capture()
        return Changed(outer.apply, self.on_top_of(outer).apply)


NO_MODES: Final = Modes()
_NATIVE_NOTE: Final = "_is_in_any_mode_without_ignore_compile_internals"  # torch has it outside Python once more
_PUT_NATIVE_NOTE: Final = "set_is_in_mode_without_ignore_compile_internals"
# Torch's notes, by name, and which modes count for each; older releases lack the last one
_MODE_NOTES: Final[dict[str, Callable[[TorchDispatchMode], bool]]] = {
    "_is_in_torch_dispatch_mode": lambda _: True,
    "_is_in_non_infra_torch_dispatch_mode": lambda mode: not mode.is_infra_mode(),
    _NATIVE_NOTE: lambda mode: not mode.ignore_compile_internals(),
}


def entered(*contexts: contextlib.AbstractContextManager[object]) -> contextlib.AbstractContextManager[None]:
    """Within the block these are on: modes of torch's, hooks for saved tensors.

    At its end the thread's are those of before. The ends of `contexts` are not called: each takes off whatever is uppermost by
    then.
    """
    before: list[Modes] = []

    def enter() -> None:
        before.append(Modes.capture())
        for context in contexts:
            context.__enter__()

    def leave() -> None:
        for modes in before:
            modes.apply()
            modes.tell_compiler()  # also where a context was cut between its note and its place on the stack

    return Changed(leave, enter)


def _take_packings() -> tuple[_Packing, ...]:
    found: list[_Packing] = []
    while (top := _top_saved_tensors_default_hooks(True)) is not None:
        found.append(_Packing(*top))
        _pop_saved_tensors_default_hooks()
    return tuple(reversed(found))


def _put_packings(packings: Sequence[_Packing]) -> None:
    for each in packings:
        _push_saved_tensors_default_hooks(*each)


def inference_guard(inference: bool) -> object:
    """A guard that sets inference mode while it lives, or None where nothing needs to change."""
    if torch.is_inference_mode_enabled() == inference:
        return None
    return torch._C._InferenceMode(inference)


@contextlib.contextmanager
def applied(state: ThreadState) -> Iterator[None]:
    """Run a block under `state` and put the caller's state back, after an exception too."""
    outer = ThreadState.capture()
    guards: list[object] = []

    def enter() -> None:
        guards.append(inference_guard(state.inference))
        state.apply(outer)

    def leave() -> None:
        guards.clear()
        outer.apply()

    with Changed(leave, enter):
        yield


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Put the caller's thread state back at the end, after an exception too."""
    with Changed(ThreadState.capture().apply):
        yield
