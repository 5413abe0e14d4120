"""Tickets of asynchronous transfers, and the one place that knows how a device overlaps with the host.

[Note: host buffers] A buffer is filled by the SSD and then copied to the device. It may take the next read only once that
copy is complete: `HostBuffer.wait_copies`, which `Lane.run` returned. Where device and host are one memory (the CPU
accelerator) the parameters alias the buffer, nothing is asynchronous, and there is nothing to wait for.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from ds_vertical.disk import DiskQueue, Transfer

Check = Callable[[str, int, Any], None]


class Ticket:
    """A transfer in flight: `wait` completes it, once; later calls return at once."""

    def __init__(self, what: str, wait: Callable[[], None], num_bytes: int = 0) -> None:
        self.what = what
        self.num_bytes = num_bytes
        self._wait: Callable[[], None] | None = wait

    @property
    def done(self) -> bool:
        return self._wait is None

    def after(self, earlier: Ticket) -> Ticket:
        """One ticket for both, the earlier one waited for first."""

        def wait() -> None:
            earlier.wait()
            self.wait()

        return Ticket(self.what, wait, self.num_bytes)

    def wait(self) -> None:
        if self._wait is not None:
            self._wait()
            self._wait = None  # not before: an interrupted wait is no completed one


class Lane:
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
            return _nothing
        with torch.cuda.stream(self._stream):
            tensors = issue()
            copied = self._stream.record_event()
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_event(copied)
        for tensor in tensors:
            tensor.record_stream(current)  # made on the lane, freed by code that knows the current stream only
        return copied.synchronize


class Backlog:
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
    """For a `Backlog` of the device's current stream. Whoever waits for its events leaves its core to others."""
    if device.type != "cuda":
        return None

    def record() -> Any:
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(device))
        return event

    return record


def _nothing() -> None:
    """Nothing to wait for."""


class HostBuffer:
    """One page-locked host buffer that `queue` reads into.

    `data`: 1-d uint8 tensor. `reads`: issued and not waited for. `wait_copies`: returns once the copies out of the buffer
    are complete. `writes`: its contents on their way to SSD. `check`: takes file, offset and bytes of what has been read.
    """

    def __init__(self, data: torch.Tensor, queue: DiskQueue, check: Check | None = None) -> None:
        self.data = data
        self.queue = queue
        self._check = check
        self._unchecked: list[tuple[str, int, torch.Tensor]] = []
        self.reads: list[Transfer] = []
        self.wait_copies: Callable[[], None] = _nothing
        self.writes: list[Transfer] = []

    def issue_read(self, path: str, start: int, num_bytes: int, offset: int = 0) -> None:
        """Start reading `num_bytes` of `path`, from `offset` on, into bytes [start, start + num_bytes) of the buffer."""
        place = self.data.narrow(0, start, num_bytes)
        self.reads.append(self.queue.read(place.data_ptr(), num_bytes, path, offset))
        if self._check is not None:
            self._unchecked.append((path, offset, place))

    def wait_reads(self) -> None:
        """Complete the reads issued so far, all of them. Raises the first DiskError, with a note if there are more."""
        errors: list[OSError] = []
        while self.reads:
            try:
                self.reads[0].wait()
            except OSError as error:
                errors.append(error)
            del self.reads[0]
        if errors:
            if errors[1:]:
                errors[0].add_note(f"{len(errors) - 1} more reads into this buffer failed")
            raise errors[0]

    def check_reads(self) -> None:
        """Give what was read to `check`. Only for contents that are about to be used: others may be old by now."""
        while self._unchecked:
            path, offset, place = self._unchecked.pop(0)
            assert self._check is not None
            self._check(path, offset, place.numpy())

    def forget_reads(self) -> None:
        """Nobody uses what was read."""
        self._unchecked.clear()

    def complete_reads(self) -> None:
        """Complete the reads issued so far, for nobody: what failed is not needed, and whoever needs it reads it again."""
        with contextlib.suppress(OSError):
            self.wait_reads()


class BufferPool:
    """A fixed number of host buffers, taken and put back. Exhaustion is an internal error: the schedule's window bounds it."""

    def __init__(self, buffers: list[HostBuffer]) -> None:
        self.num_buffers = len(buffers)
        self._buffers = tuple(buffers)
        self._free = deque(buffers)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> HostBuffer:
        """A buffer whose earlier contents nobody needs any more: the one put back longest ago, its transfers complete."""
        if not self._free:
            raise RuntimeError(f"all {self.num_buffers} host buffers hold a layer; the schedule fetched one too many")
        buffer = self._free[0]
        buffer.wait_copies()
        for write in buffer.writes:
            write.wait()
        buffer.writes = []
        buffer.forget_reads()
        return self._free.popleft()

    def put_back(self, buffer: HostBuffer) -> None:
        """Twice is harmless: an interrupted clean-up is done again."""
        if all(free is not buffer for free in self._free):
            self._free.append(buffer)

    def reset(self, taken: Collection[int]) -> None:
        """All buffers are free but those `taken` (their ids), whatever an interrupt has forgotten."""
        for buffer in self._buffers:
            if id(buffer) not in taken:
                self.put_back(buffer)
