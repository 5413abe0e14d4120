"""Tickets of asynchronous transfers, and the one place that knows how a device overlaps with the host.

[Note: host buffers] A buffer is filled by the SSD and then copied to the device. It may take the next read only once that
copy is complete; `Lane.mark` / `Lane.wait` carry this. Where device and host are one memory (the CPU accelerator) the
parameters alias the buffer, nothing is asynchronous, and both are no-ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Ticket:
    """A transfer in flight: `wait` completes it, once; later calls return at once."""

    def __init__(self, what: str, wait: Callable[[], None], num_bytes: int = 0) -> None:
        self.what = what
        self.num_bytes = num_bytes
        self._wait: Callable[[], None] | None = wait

    @property
    def done(self) -> bool:
        return self._wait is None

    def wait(self) -> None:
        if self._wait is not None:
            complete, self._wait = self._wait, None
            complete()


class AioHandle(Protocol):
    """What this package uses of DeepSpeed's aio handle. `wait` completes everything issued on the handle."""

    def async_pread(self, buffer: torch.Tensor, path: str, offset: int, /) -> int: ...

    def wait(self) -> int: ...


class Lane:
    """Ordering between a device's queue and the host, hidden behind two calls. See [Note: host buffers]."""

    def __init__(self, device: torch.device) -> None:
        self.asynchronous = device.type == "cuda"
        self._event: Any = None

    def mark(self) -> None:
        """Remember the work queued on the device so far (copies out of a host buffer)."""
        if self.asynchronous:
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> None:
        """Return once the work remembered by `mark` is complete."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None


class HostBuffer:
    """One page-locked host buffer with an aio handle of its own, so that a wait covers this buffer's reads alone.

    `data`: 1-d uint8 tensor. `num_reads`: reads issued and not waited for.
    """

    def __init__(self, data: torch.Tensor, handle: AioHandle, lane: Lane) -> None:
        self.data = data
        self.handle = handle
        self.lane = lane
        self.num_reads = 0

    def issue_read(self, path: str, start: int, num_bytes: int) -> None:
        """Start reading `num_bytes` of `path` into bytes [start, start + num_bytes) of the buffer."""
        self.lane.wait()
        self.handle.async_pread(self.data.narrow(0, start, num_bytes), path, 0)
        self.num_reads += 1

    def wait_reads(self) -> None:
        """Complete the reads issued so far. Raises OSError when the handle completed another number of them."""
        if self.num_reads == 0:
            return
        issued, self.num_reads = self.num_reads, 0
        completed = self.handle.wait()
        if completed != issued:
            raise OSError(f"{completed} of {issued} reads from SSD completed")


class BufferPool:
    """A fixed number of host buffers, taken and put back. Exhaustion is an internal error: the schedule's window bounds it."""

    def __init__(self, buffers: list[HostBuffer]) -> None:
        self.num_buffers = len(buffers)
        self._free = list(buffers)

    def take(self) -> HostBuffer:
        if not self._free:
            raise RuntimeError(f"all {self.num_buffers} host buffers hold a layer; the schedule fetched one too many")
        return self._free.pop()

    def put_back(self, buffer: HostBuffer) -> None:
        self._free.append(buffer)
