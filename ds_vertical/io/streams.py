"""Streams and events of whatever device torch has; copies beside its computation; how far it is behind the host.

[Note: any device] The rest of this package names no kind of device. One that is not the processor works beside the host, in
streams. Its module in torch has them: `torch.cuda` for NVIDIA and AMD, `torch.xpu`, that of the tests' late device. Streams and
events are the module's own: torch's general ones are not to be mixed with those of `torch.cuda`.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class DeviceModule(Protocol):
    """What this package calls of torch's module of a device."""

    def Stream(self, device: torch.device) -> torch.Stream:  # noqa: N802 - torch's name
        """A new stream."""
        ...

    def current_stream(self, device: torch.device | None = None) -> torch.Stream:
        """The stream to which the calling thread gives work."""
        ...

    def set_stream(self, stream: torch.Stream) -> None:
        """Give work to another one from now on."""
        ...

    def stream(self, stream: torch.Stream) -> contextlib.AbstractContextManager[object]:
        """Give the work of a block to another one."""
        ...

    def current_device(self) -> int:
        """The device that the calling thread uses."""
        ...

    def set_device(self, device: torch.device | int) -> None:
        """Use another one from now on."""
        ...

    def is_initialized(self) -> bool:
        """Whether this process has set the device up."""
        ...

    def synchronize(self) -> None:
        """Return once the device has done all that it was given."""
        ...

    def get_device_name(self, device: int) -> str:
        """What its maker calls it."""
        ...

    def memory_allocated(self) -> int:
        """Bytes of the device's memory that tensors of this process take."""
        ...

    def memory_reserved(self) -> int:
        """Bytes of the device's memory that torch has taken, tensors' and those that it holds for later ones."""
        ...

    def mem_get_info(self) -> tuple[int, int]:
        """Free bytes of the device's memory, and all."""
        ...

    def get_rng_state(self) -> torch.Tensor:
        """Of the random numbers of the device in use."""
        ...

    def set_rng_state(self, new_state: torch.Tensor) -> None:
        """Put one back."""
        ...

    def manual_seed(self, seed: int) -> None:
        """Begin the random numbers of the device in use anew."""
        ...


def works_beside_host(device: torch.device) -> bool:
    """Whether the device computes while the host goes on, in memory of its own."""
    return device.type not in ("cpu", "meta")  # the latter holds shapes alone


def module_of(device: torch.device) -> DeviceModule:
    """Torch's module of such a device."""
    return _module(device.type)


@functools.cache
def _module(kind: str) -> DeviceModule:
    module: Any = torch.get_device_module(kind)
    return module


def free_for_tensors(device: torch.device) -> int:
    """Bytes of a device's memory that tensors may take: what is free of it, and what torch holds for later tensors."""
    module = module_of(device)
    return module.mem_get_info()[0] + max(0, module.memory_reserved() - module.memory_allocated())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device has had no memory left for a tensor: torch has one error for all devices."""
    return isinstance(error, torch.OutOfMemoryError)


@functools.cache
def kind_beside_host() -> torch.device | None:
    """The kind of device beside the host that this process has; None where there is none."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def module_in_use() -> DeviceModule | None:
    """The module of the device beside the host, once this process has set that up: until then it has no state."""
    found = kind_beside_host()
    if found is None:
        return None
    module = module_of(found)
    return module if module.is_initialized() else None


def new_stream(device: torch.device) -> torch.Stream | None:
    """A stream of its own; None on the processor, which does everything at once."""
    return module_of(device).Stream(device) if works_beside_host(device) else None


def current_stream(device: torch.device) -> torch.Stream:
    """The stream to which the calling thread gives work for a device beside the host."""
    return module_of(device).current_stream(device)


def given_to(stream: torch.Stream) -> contextlib.AbstractContextManager[object]:
    """The block's work for the device is the stream's."""
    return module_of(stream.device).stream(stream)


def record_event(stream: torch.Stream) -> DeviceEvent:
    """The event behind all that a stream has been given so far. A thread that waits for it sleeps where the device's module can
    do that, so that other threads have its core."""
    module: Any = module_of(stream.device)
    event = module.Event(blocking=True) if stream.device.type == "cuda" else module.Event()
    event.record(stream)
    return event


class DeviceEvent(Protocol):
    """A point in the work of a device, which goes on while the host does."""

    def query(self) -> bool:
        """Whether the device has come to it."""
        ...

    def synchronize(self) -> None:
        """Return once the device has come to it."""
        ...

    def wait(self, stream: torch.Stream) -> None:
        """Have the stream go on behind it only."""
        ...


@dataclass(frozen=True)
class IssuedCopies:
    """Copies that a CopyStream has been given. `copied`: the event behind them; None where they are complete."""

    copied: DeviceEvent | None = None
    device: torch.device | None = None

    def land(self) -> None:
        """What the device's current stream is given from now on comes behind the copies. Ahead of their use, and not earlier:
        what was to be computed meanwhile would wait for them."""
        if self.copied is not None and self.device is not None:
            self.copied.wait(current_stream(self.device))

    def wait(self) -> None:
        """Return once they are complete: ahead of overwriting their source."""
        if self.copied is not None:
            self.copied.synchronize()


class CopyStream:
    """Copies from host to device, beside the device's computation. A device beside the host has a stream for them; see
    `buffers`, [Note: host buffers].

    One CopyStream serves all buffers of a store, so that copies run in the order in which they were issued.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = new_stream(device)

    def follow(self) -> None:
        """Have what is issued next come behind what the device's current stream has been given so far."""
        if self._stream is not None:
            self._stream.wait_stream(current_stream(self._stream.device))

    def run(self, issue: Callable[[], Sequence[torch.Tensor]], follows: bool = False) -> IssuedCopies:
        """Call `issue`, which issues copies and returns the device tensors that it makes, on the stream. Neither the host nor
        the device's current stream waits for them: see `IssuedCopies`. `follows`: see `follow`."""
        if follows:
            self.follow()
        if self._stream is None:
            issue()
            return IssuedCopies()
        with given_to(self._stream):
            tensors = issue()
            copied = record_event(self._stream)
        current = current_stream(self._stream.device)
        for tensor in tensors:
            tensor.record_stream(current)  # made on the copy stream, freed by code that knows the current stream only
        return IssuedCopies(copied, self._stream.device)


class OutgoingStream:
    """Copies from a device to page-locked host memory, beside its computation, in a stream that is made for the first of them.
    Where the device is the host a copy is complete at once.

    What is copied takes device memory until then. So the copies up to one mark may be under way, and no more. `beside` False:
    none may, and `mark` waits for all.
    """

    def __init__(self, beside: bool = True) -> None:
        self._beside = beside
        self._stream: torch.Stream | None = None
        self._marked: DeviceEvent | None = None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy what the device has computed by then; `source` may be given up at once."""
        if not works_beside_host(source.device):
            target.copy_(source)
            return
        if self._stream is None:
            self._stream = new_stream(source.device)
            assert self._stream is not None
        self._stream.wait_stream(current_stream(source.device))
        with given_to(self._stream):
            target.copy_(source, non_blocking=True)
        source.record_stream(self._stream)

    def mark(self) -> DeviceEvent | None:
        """The event behind all copies so far; None where the device is the host. Waits for those up to the mark before, or for
        all: see the class."""
        if self._stream is None:
            return None
        before, self._marked = self._marked, record_event(self._stream)
        last = before if self._beside else self._marked
        if last is not None:
            last.synchronize()
        return self._marked

    def wait(self) -> None:
        """Return when all copies are complete, or the device has failed, which copies nothing any more."""
        if self._stream is not None:
            with contextlib.suppress(RuntimeError):
                self._stream.synchronize()


class EventWindow:
    """How far the device may be behind the host, which releases memory that the device still uses: a number of releases.

    `record`: makes the event behind all that the device has been given so far; None for a device that does its work at once.
    `most`: releases that the device may have ahead of it.
    """

    def __init__(self, record: Callable[[], DeviceEvent] | None, most: int) -> None:
        self._record = record
        self._most = most
        self._events: deque[DeviceEvent] = deque()

    def mark(self) -> None:
        """The host has released memory that the work issued so far uses."""
        if self._record is not None:
            self._events.append(self._record())

    def wait(self, num_held: int = 1) -> None:
        """Return once the device has no more than `most` of the marks ahead of it; less by one for each piece of memory beyond
        the first that the host holds beside them."""
        while self._events and len(self._events) + num_held > self._most + 1:
            self._events[0].synchronize()
            self._events.popleft()

    def has_room(self, num_held: int) -> bool:
        """Whether `wait` would return at once."""
        while self._events and len(self._events) + num_held > self._most + 1 and self._events[0].query():
            self._events.popleft()
        return not self._events or len(self._events) + num_held <= self._most + 1

    def clear(self) -> None:
        """Forget the marks: the device has been waited for, or has failed."""
        self._events.clear()


def recorder(device: torch.device) -> Callable[[], DeviceEvent] | None:
    """The `record` of an `EventWindow` over the device's current stream; None for a device without streams."""
    return (lambda: record_event(current_stream(device))) if works_beside_host(device) else None
