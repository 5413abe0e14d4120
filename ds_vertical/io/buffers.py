"""Host buffers: those that the SSD fills, taken and put back, and tensors that are kept for the next one of their size.

[Note: host buffers] A buffer is filled by the SSD and then copied to the device. It may take the next read only once that
copy is complete: `HostBuffer.wait_copies`, of what `CopyStream.run` returned. Where device and host are one memory (the CPU
accelerator) the parameters alias the buffer, nothing is asynchronous, and there is nothing to wait for.

[Note: kept tensors] Memory that is given back to the system and asked for again in every step would be faulted in page by page
each time. A `Reserve` keeps it for the next tensor of its size.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import torch

from ds_vertical.io.aio import DiskQueue, Transfer

if TYPE_CHECKING:
    from ds_vertical.io.checksums import Data

ReadCheck = Callable[[str, int, "Data"], None]


def nothing_to_wait_for() -> None:
    """The `wait_copies` of a buffer from which no copies are under way."""


class HostBuffer:
    """One page-locked host buffer that `queue` reads into.

    `data`: 1-d uint8 tensor. `reads`: issued and not waited for. `wait_copies`: returns once the copies out of the buffer
    are complete. `writes`: its contents on their way to SSD. `check`: takes file, offset and bytes of what has been read.
    """

    def __init__(self, data: torch.Tensor, queue: DiskQueue, check: ReadCheck | None = None) -> None:
        self.data = data
        self.queue = queue
        self._check = check
        self._unchecked: list[tuple[str, int, torch.Tensor]] = []
        self.reads: list[Transfer] = []
        self.wait_copies: Callable[[], None] = nothing_to_wait_for
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

    def wait_uses(self) -> None:
        """Return when nobody reads the contents any more: no copy and no write is under way. Raises a write's DiskError."""
        self.wait_copies()
        for write in self.writes:
            write.wait()
        self.writes = []

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
        """Buffers that `take` would give out."""
        return len(self._free)

    def take(self) -> HostBuffer:
        """A buffer whose earlier contents nobody needs any more: the one put back longest ago, its transfers complete."""
        if not self._free:
            raise RuntimeError(f"all {self.num_buffers} host buffers hold a layer; the schedule fetched one too many")
        buffer = self._free[0]
        buffer.wait_uses()
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


class Reserve:
    """1-d tensors that `make(numel)` makes, taken by their size and put back by whoever is done with them, from any thread.

    [Note: best fit] A tensor of the very size asked for is preferred, then the smallest one below twice that size. So a new
    one is made only while all that would fit are taken, and a reserve holds no more of a size than were ever taken at a time.
    """

    def __init__(self, make: Callable[[int], torch.Tensor]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._spare: list[torch.Tensor] = []
        self.num_bytes = 0  # of all tensors, taken or not

    def take(self, numel: int) -> torch.Tensor:
        """A tensor of `numel` elements or somewhat more, contents undefined."""
        found: list[torch.Tensor] = []
        self.take_all([numel], lambda _, tensor: found.append(tensor))
        return found[0]

    def take_all(self, numels: Sequence[int], hand: Callable[[int, torch.Tensor], None]) -> None:
        """As `take`, a tensor for each: `hand(index, tensor)` holds it before it leaves the reserve, so that an interrupt loses
        none. What was handed before an error stays the holder's. Those that have to be made are made in one piece, whose memory
        goes with the last."""
        missing: dict[int, int] = {}
        with self._lock:
            for index, numel in enumerate(numels):
                fitting = [spare for spare in self._spare if numel <= spare.numel() <= 2 * numel]
                if fitting:
                    self._hand(index, min(fitting, key=torch.Tensor.numel), hand)
                else:
                    missing[index] = numel
        if not missing:
            return
        made = self._make(sum(missing.values()))
        pieces = made.split(list(missing.values()))
        with self._lock:
            self._spare, self.num_bytes = [*self._spare, *pieces], self.num_bytes + made.numel() * made.element_size()
            for index, piece in zip(missing, pieces, strict=True):
                self._hand(index, piece, hand)

    def _hand(self, index: int, tensor: torch.Tensor, hand: Callable[[int, torch.Tensor], None]) -> None:
        hand(index, tensor)
        self._spare = [spare for spare in self._spare if spare is not tensor]

    def put_back(self, tensor: torch.Tensor) -> None:
        """The tensor's contents are wanted no longer. Twice is harmless as long as nobody took it between: an interrupt may
        leave a tensor with two owners, who both give it up."""
        with self._lock:
            if not any(spare is tensor for spare in self._spare):
                self._spare.append(tensor)

    def clear(self) -> None:
        """Give up what is not taken."""
        with self._lock:
            self.num_bytes -= sum(spare.numel() * spare.element_size() for spare in self._spare)
            self._spare = []
