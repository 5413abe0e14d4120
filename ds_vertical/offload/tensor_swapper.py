"""Bytes that leave the device for a while: to page-locked host memory, or through it to a file, and back.

[Note: swapped tensors] A SwappedTensor packs some tensors. On its way out it is copied to a host buffer and, for the SSD,
written from there; the device's memory may be given up as soon as `put` returns. On its way back it is read into a buffer and
copied to memory that the owner provides then. Copies run on a stream of their own: a write is issued once its copy is
complete, a copy back once its read is, whichever later call finds that out. Where device and host are one memory a copy is
complete at once.

What rests in the host tier may take `host_limit`, which the memory budget leaves (the buffers on the way to and from the SSD, a
few swapped tensors, are not counted): beyond it, memory of sizes that nothing uses any more is given back, then
MemoryBudgetError is raised, before anything is taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ds_vertical.errors import MemoryBudgetError, StorageError
from ds_vertical.io import streams
from ds_vertical.io.aio import DiskQueue, Transfer
from ds_vertical.io.buffers import BufferPool, HostBuffer, nothing_to_wait_for
from ds_vertical.io.extents import Extents
from ds_vertical.io.files import preallocate
from ds_vertical.types import Tier

_TIERS = (Tier.HOST, Tier.SSD)
_PAGE_BYTES = 4096
_GROWTH_BYTES = 1 << 20  # a file grows by multiples of it
_NUM_SAVES = 3  # buffers on their way out: one is filled while two are written

Land = Callable[[], Sequence[torch.Tensor]]


def moved_remedy(fewer: str | None = "fewer gradient_accumulation_steps", may_advise_ssd: bool = False) -> str:
    """What to write where host memory has no room for what passes between layers. `fewer`: how to have fewer micro-batches;
    None: there are no fewer."""
    fewer = "" if fewer is None else f"{fewer}, "
    on_ssd = '"device": "ssd", ' if may_advise_ssd else ""
    return (
        f'write {fewer}a smaller "share" (or "host_share"), {on_ssd}or, where it is set,'
        ' a larger "vertical_schedule.host_memory_bytes"'
    )


@dataclass(frozen=True)
class HostMemory:
    """Where page-locked memory comes from: `lock` gives a 1-d uint8 tensor of that many bytes, page-aligned."""

    lock: Callable[[int], torch.Tensor]
    unlock: Callable[[torch.Tensor], None]


@dataclass(eq=False)
class SwappedTensor:
    """Some tensors' bytes, one after another. `offset`: its place in the file; `host`: its memory in the host tier.

    `copied`: the event after which the copy out is complete, None where that is at once; `landed`: that of the copy back.
    `buffer`: on the way, out or back. `land` gives the memory that the bytes go back to, once.
    """

    tier: Tier
    num_bytes: int
    offset: int = -1
    host: torch.Tensor | None = None
    copied: streams.DeviceEvent | None = None
    buffer: HostBuffer | None = None
    writes: list[Transfer] = field(default_factory=list)
    land: Land | None = None
    landed: streams.DeviceEvent | None = None


class HostTier:
    """Page-locked memory of the swapped tensors that rest in host memory. `kept`: all swapped tensors, those on SSD included.

    `limit`: bytes that may rest here; None: any number. `beside`: another tier whose bytes count against the same limit.
    `what`, `remedy`: for the message where there is no room. `settle`: returns when no copy from or to the memory is under way.
    """

    what = "vertical_schedule.activations: {held} bytes of host memory hold what passes between layers"

    def __init__(self, memory: HostMemory, limit: int | None, kept: Collection[SwappedTensor]) -> None:
        self.limit = limit
        self.remedy: Callable[[], str] = moved_remedy
        self.beside: HostTier | None = None
        self.settle: Callable[[], None] = nothing_to_wait_for
        self._memory = memory
        self._kept = kept
        self._free: dict[int, list[torch.Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of what rests in the host tier, and of memory that has held such."""
        free = sum(data.numel() for sizes in self._free.values() for data in sizes)
        return free + sum(swapped.host.numel() for swapped in self._kept if swapped.host is not None)

    def take(self, num_bytes: int) -> torch.Tensor:
        """Memory of this size. Raises MemoryBudgetError, with nothing taken, where the limit leaves no room for it."""
        if sizes := self._free.get(num_bytes):
            return sizes.pop()
        others = 0 if self.beside is None else self.beside.num_bytes
        if self.limit is not None and self.num_bytes + others + num_bytes > self.limit:
            self.unlock_free()
            held = self.num_bytes + others
            if held + num_bytes > self.limit:
                raise MemoryBudgetError(
                    f"{self.what.format(held=held)}, {num_bytes} more are needed, and the memory budget (see the start) leaves"
                    f" {self.limit}; {self.remedy()}"
                )
        return self._memory.lock(num_bytes)

    def put_back(self, data: torch.Tensor) -> None:
        """Keep the memory for the next swapped tensor of its size."""
        self._free.setdefault(data.numel(), []).append(data)

    def unlock_free(self) -> None:
        """Give the memory back that no swapped tensor has. A copy that has begun before its tensor was dropped ends first."""
        if self._free:
            self.settle()
        for free in self._free.values():
            while free:
                self._memory.unlock(free.pop())
        self._free.clear()


class GrowingFile:
    """The file of the SSD tier, which grows with the swapped tensors in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.extents = Extents()
        self._num_bytes = 0

    def place(self, swapped: SwappedTensor) -> None:
        """Give the swapped tensor its place. Raises StorageError where the file cannot grow."""
        swapped.offset = self.extents.take(swapped.num_bytes)
        if (end := swapped.offset + swapped.num_bytes) > self._num_bytes:
            size = _round_up(end, _GROWTH_BYTES)
            preallocate({self.path: size})
            self._num_bytes = size


class TensorSwapper:
    """Moves tensors out to host memory or SSD, and back. `host_tier`: where they rest in host memory; `queues`: for reads and
    for writes, none without an SSD tier.

    `most_loads`: swapped tensors that may be on their way back at a time. `path`: the file of the SSD tier, None without one.
    `host_limit`: bytes that may rest in the host tier; None: any number.

    A failed read or write raises DiskError in `arrive` or `wait_written`, or in a later `put` that needs the buffer; a file
    that cannot grow raises StorageError in `put`.
    """

    def __init__(
        self,
        path: Path | None,
        new_queue: Callable[[], DiskQueue],
        memory: HostMemory,
        device: torch.device,
        most_loads: int,
        host_limit: int | None = None,
    ) -> None:
        self._memory = memory
        self._stream = streams.new_stream(device)
        self._file = None if path is None else GrowingFile(path)
        self._unwritten: list[SwappedTensor] = []
        self._coming: list[SwappedTensor] = []
        self._kept: set[SwappedTensor] = set()
        self.host_tier = HostTier(memory, host_limit, self._kept)
        if self._stream is not None:
            self.host_tier.settle = self._stream.synchronize
        self.queues = [new_queue(), new_queue()] if path is not None else []
        self._load_buffers = _buffers(self.queues[:1], most_loads)
        self._save_buffers = _buffers(self.queues[1:], _NUM_SAVES)
        self._loads, self._saves = BufferPool(self._load_buffers), BufferPool(self._save_buffers)

    @property
    def host_bytes(self) -> int:
        """Page-locked bytes: buffers, and what rests in the host tier."""
        return self.host_tier.num_bytes + sum(buffer.data.numel() for buffer in (*self._load_buffers, *self._save_buffers))

    @property
    def ssd_bytes(self) -> int:
        """Bytes of the file that swapped tensors rest in."""
        return 0 if self._file is None else self._file.extents.num_used

    # ---- out

    def put(self, tensors: Sequence[torch.Tensor], tier: Tier) -> SwappedTensor:
        """Take the bytes of 1-d uint8 tensors to host memory or SSD; their own memory may be given up afterwards."""
        if tier not in _TIERS:
            raise ValueError(f"tensors go to {' or '.join(_TIERS)}, not to {tier}")
        self._advance()
        swapped = SwappedTensor(tier, _round_up(sum(_round_up(tensor.numel(), 64) for tensor in tensors)))
        if tier is Tier.HOST:
            target = swapped.host = self.host_tier.take(swapped.num_bytes)
            self._kept.add(swapped)
        else:
            self._kept.add(swapped)
            assert self._file is not None
            try:
                self._file.place(swapped)
            except StorageError:
                self._forget(swapped)
                raise
            buffer = swapped.buffer = self._take(self._saves, swapped.num_bytes)
            target = buffer.data
        pieces = _pieces(target, tensors)
        with _copies_on(self._stream):
            for piece, tensor in zip(pieces, tensors, strict=True):
                piece.copy_(tensor, non_blocking=self._stream is not None)
                if self._stream is not None:
                    tensor.record_stream(self._stream)
            swapped.copied = streams.record_event(self._stream) if self._stream is not None else None
        if tier is Tier.SSD:
            self._unwritten.append(swapped)
            self._advance()
        return swapped

    def wait_written(self, swapped: SwappedTensor) -> None:
        """Return once the swapped tensor is where it rests. Raises DiskError."""
        if swapped.copied is not None:
            swapped.copied.synchronize()
        self._advance()
        for write in swapped.writes:
            write.wait()

    def _write(self, swapped: SwappedTensor) -> None:
        buffer, file = swapped.buffer, self._file
        assert buffer is not None and file is not None
        write = buffer.queue.write(buffer.data.data_ptr(), swapped.num_bytes, file.path, swapped.offset)
        swapped.writes = buffer.writes = [write]
        swapped.buffer = None
        self._saves.put_back(buffer)

    # ---- back

    def fetch(self, swapped: SwappedTensor, land: Land) -> None:
        """Start bringing a swapped tensor back. `land` gives 1-d uint8 tensors of the sizes that were put; it is called once,
        later."""
        swapped.land, swapped.landed = land, None
        if swapped.tier is Tier.SSD:
            self.wait_written(swapped)
            assert self._file is not None
            buffer = self._take(self._loads, swapped.num_bytes)
            swapped.buffer = buffer
            buffer.issue_read(str(self._file.path), 0, swapped.num_bytes, swapped.offset)
        self._coming.append(swapped)
        self._advance()

    def arrive(self, swapped: SwappedTensor) -> None:
        """Return once the bytes are where they belong (beside the host: for all later work of the current stream). Raises
        DiskError."""
        self._advance()
        if swapped.land is not None:
            self._land(swapped)
        if swapped.landed is not None and self._stream is not None:
            swapped.landed.wait(streams.current_stream(self._stream.device))

    def _land(self, swapped: SwappedTensor) -> None:
        self._coming.remove(swapped)
        buffer, land = swapped.buffer, swapped.land
        swapped.buffer = swapped.land = None
        assert land is not None
        try:
            if buffer is not None:
                buffer.wait_reads()
            source = buffer.data if buffer is not None else swapped.host
            assert source is not None
            targets = land()
            with _copies_on(self._stream):
                for piece, target in zip(_pieces(source, targets), targets, strict=True):
                    target.copy_(piece, non_blocking=self._stream is not None)
                if self._stream is not None:
                    swapped.landed = streams.record_event(self._stream)
                    if buffer is not None:
                        buffer.wait_copies = swapped.landed.synchronize
        finally:
            if buffer is not None:
                self._loads.put_back(buffer)

    def _advance(self) -> None:
        """Issue the writes whose copy is complete and, beside a device, the copies whose read is."""
        while self._unwritten and (self._unwritten[0].copied is None or self._unwritten[0].copied.query()):
            self._write(self._unwritten.pop(0))
        if self._stream is not None:
            for swapped in list(self._coming):
                if swapped.buffer is None or all(read.done for read in swapped.buffer.reads):
                    self._land(swapped)

    # ---- the end

    def drop(self, swapped: SwappedTensor) -> None:
        """Forget a swapped tensor, which must not be on its way back. Raises DiskError for a write of it that failed."""
        if swapped.tier is Tier.SSD:
            self.wait_written(swapped)
        self._forget(swapped)  # the next copy into its host memory stands behind this one's in the same stream

    def abandon(self) -> None:
        """Forget everything, after an error, once nothing is in flight any more."""
        if self._stream is not None:
            self._stream.synchronize()
        for queue in self.queues:
            queue.settle()
        for buffer in (*self._load_buffers, *self._save_buffers):
            for transfer in (*buffer.reads, *buffer.writes):
                _complete(transfer)
            buffer.reads, buffer.writes = [], []
        for swapped in list(self._kept):
            for write in swapped.writes:
                _complete(write)
            self._forget(swapped)
        if self._file is not None:
            self._file.extents = Extents()
        self._unwritten.clear()
        self._coming.clear()
        self._loads, self._saves = BufferPool(self._load_buffers), BufferPool(self._save_buffers)

    def close(self) -> None:
        """Give the host memory back. The swapped tensors cannot be used afterwards; twice is harmless."""
        self.abandon()
        for queue in self.queues:
            queue.close()
        self.host_tier.unlock_free()
        for buffer in (*self._load_buffers, *self._save_buffers):
            if buffer.data.numel():
                self._memory.unlock(buffer.data)
        self._load_buffers, self._save_buffers = [], []
        self._loads, self._saves = BufferPool([]), BufferPool([])

    def _forget(self, swapped: SwappedTensor) -> None:
        self._kept.discard(swapped)
        if swapped.host is not None:
            self.host_tier.put_back(swapped.host)
            swapped.host = None
        if swapped.offset >= 0 and self._file is not None:
            self._file.extents.give_back(swapped.offset, swapped.num_bytes)
            swapped.offset = -1

    def _take(self, pool: BufferPool, num_bytes: int) -> HostBuffer:
        """A free buffer of at least that size, once its earlier transfers are complete."""
        if pool is self._saves and not pool.num_free:
            copied = self._unwritten[0].copied
            assert copied is not None  # otherwise `_advance` has written it
            copied.synchronize()
            self._advance()
        buffer = pool.take()
        if buffer.data.numel() < num_bytes:
            try:
                data = self._memory.lock(num_bytes)
            except BaseException:
                pool.put_back(buffer)
                raise
            small, buffer.data = buffer.data, data  # never twice, wherever an interrupt comes
            if small.numel():
                self._memory.unlock(small)
        return buffer


@contextlib.contextmanager
def _copies_on(stream: torch.Stream | None) -> Iterator[None]:
    """Copies of the block run on a stream of their own, after what the device has been given so far; None: at once."""
    if stream is None:
        yield
        return
    stream.wait_stream(streams.current_stream(stream.device))
    with streams.given_to(stream):
        yield


def _buffers(queues: Sequence[DiskQueue], count: int) -> list[HostBuffer]:
    """Buffers of no size yet: they take that of what goes through them."""
    return [HostBuffer(torch.empty(0, dtype=torch.uint8), queue) for queue in queues for _ in range(count)]


def _round_up(number: int, multiple: int = _PAGE_BYTES) -> int:
    return -(-number // multiple) * multiple


def _pieces(data: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Places for the tensors inside a swapped tensor, one after another."""
    pieces, start = [], 0
    for tensor in tensors:
        pieces.append(data.narrow(0, start, tensor.numel()))
        start += _round_up(tensor.numel(), 64)
    return pieces


def _complete(transfer: Transfer) -> None:
    """Wait for a transfer whose failure no longer matters: an earlier one has been reported."""
    try:
        transfer.wait()
    except OSError:
        return
