"""Copies beside the device's computation, and how far the device is behind the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

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
    """Copies from host to device, beside the device's computation. On CUDA a stream of its own; see [Note: host buffers].

    One lane serves all buffers of a store, so that copies run in the order in which they were issued.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, issue: Callable[[], Sequence[torch.Tensor]]) -> Callable[[], None]:
        """Issue copies on the lane; `issue` returns the device tensors it makes.

        The device's current stream waits for them, the host does not. Returns what the host calls before it overwrites
        the source.
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
            tensor.record_stream(current)  # made on the lane, freed by code that knows the current stream only
        return copied.synchronize


class EventWindow:
    """What the device has been given to do and has not done: the memory that this uses is free only then.

    `record`: gives the event behind what the device has been given so far; None where it does everything at once. `most`:
    marks that the device may have ahead of it.
    """

    def __init__(self, record: Callable[[], Any] | None, most: int) -> None:
        self._record = record
        self._most = most
        self._events: deque[Any] = deque()

    def mark(self) -> None:
        """Something has been released here."""
        if self._record is not None:
            self._events.append(self._record())

    def wait(self) -> None:
        """Return once the device has no more than `most` of the marks ahead of it."""
        while len(self._events) > self._most:
            self._events[0].synchronize()
            self._events.popleft()

    def clear(self) -> None:
        self._events.clear()


def recorder(device: torch.device) -> Callable[[], Any] | None:
    """For a `EventWindow` of the device's current stream. Whoever waits for its events leaves its core to others."""
    if device.type != "cuda":
        return None

    def record() -> Any:
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(device))
        return event

    return record
