"""Copies beside the device's computation, and how far the device is behind the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ds_vertical.io.buffers import nothing_to_wait_for


class CopyEvent(Protocol):
    """The event behind a copy that a device makes while the host goes on."""

    def query(self) -> bool:
        """Whether the copy is complete."""
        ...

    def synchronize(self) -> None:
        """Return once the copy is complete."""
        ...


class CopyStream:
    """Copies from host to device, beside the device's computation. On CUDA it has a stream of its own; see `buffers`, [Note:
    host buffers].

    One CopyStream serves all buffers of a store, so that copies run in the order in which they were issued.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, issue: Callable[[], Sequence[torch.Tensor]]) -> Callable[[], None]:
        """Call `issue`, which issues copies and returns the device tensors that it makes, on the stream.

        The device's current stream waits for the copies, the host does not. Returns the function that the host calls before it
        overwrites the copies' source.
        """
        if self._stream is None:
            issue()
            return nothing_to_wait_for
        with torch.cuda.stream(self._stream):
            tensors = issue()
            copied = self._stream.record_event()
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_event(copied)
        for tensor in tensors:
            tensor.record_stream(current)  # made on the copy stream, freed by code that knows the current stream only
        return copied.synchronize


class DeviceEvent(Protocol):
    """A point in the device's work."""

    def synchronize(self) -> None:
        """Return once the device has come to it."""
        ...


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

    def wait(self) -> None:
        """Return once the device has no more than `most` of the marks ahead of it."""
        while len(self._events) > self._most:
            self._events[0].synchronize()
            self._events.popleft()

    def clear(self) -> None:
        """Forget the marks: the device has been waited for, or has failed."""
        self._events.clear()


def recorder(device: torch.device) -> Callable[[], DeviceEvent] | None:
    """The `record` of an `EventWindow` over the device's current stream; None for a device without streams. A thread that waits
    for such an event sleeps, so that other threads have its core."""
    if device.type != "cuda":
        return None

    def record() -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(device))
        return event

    return record
