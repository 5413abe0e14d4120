"""Gradients that wait for their optimizer step: in host memory, and beyond the host's budget in one file of the run.

In the file each part's fp32 elements have a place of their own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import torch

from ds_vertical.compat import pinned_memory
from ds_vertical.errors import GradientGoneError
from ds_vertical.io import streams
from ds_vertical.io.aio import DiskQueue, Transfer
from ds_vertical.io.buffers import Reserve
from ds_vertical.io.checksums import Checksums
from ds_vertical.io.extents import Extent
from ds_vertical.io.ticket import Ticket
from ds_vertical.offload.chunking import ALIGNMENT, FP32_BYTES, Part, spread_parts
from ds_vertical.schedule.events import Unit

Use = Literal["write", "early step", "step", "reader"]


class Parted(Protocol):
    """A chunk: elements of each parameter's share, and the parts that it is cut into."""

    @property
    def sizes(self) -> Sequence[int]:
        """Elements of each parameter's share."""
        ...

    @property
    def early(self) -> Sequence[Part]:
        """The parts that may be stepped early."""
        ...

    @property
    def delayed(self) -> Sequence[Part]:
        """The parts that are never stepped early."""
        ...


@dataclass(frozen=True)
class ReducedSums:
    """This rank's shares of a unit's summed gradients, one per parameter in the order of the unit's chunks.

    `flat`: the memory that the sums lie in, 1-d, which goes to `give_back`, from any thread, where it is held. None where each
    has its own: a share is then asked for when the one before has been copied, and its memory is free.
    """

    shares: Iterable[torch.Tensor]
    flat: torch.Tensor | None
    give_back: Callable[[torch.Tensor], None]


@dataclass(eq=False)
class _Memory:
    """What the gradients of `num_users` parts lie in; given back when the last one is done with."""

    tensor: torch.Tensor
    give_back: Callable[[torch.Tensor], None]
    num_users: int = 0


@dataclass(eq=False)
class _Held:
    """A part's gradient in memory, and for what it is still needed there."""

    data: torch.Tensor
    memory: _Memory
    uses: set[Use]
    copied: streams.DeviceEvent | None = None


@dataclass(eq=False)
class _Unit:
    """A unit's gradients: those in memory, and which are (or will be) in the file. `lock`: of all units, whose parts may lie
    in one memory. `unwritten`: parts that are to be written once they have arrived in host memory."""

    lock: threading.Lock
    file: GradientFile
    outgoing: streams.OutgoingStream
    parts: dict[Part, _Held] = field(default_factory=dict)
    on_ssd: set[Part] = field(default_factory=set)
    unwritten: list[Part] = field(default_factory=list)
    writes: list[tuple[Part, Transfer]] = field(default_factory=list)

    def start_writes(self, wait: bool = False) -> None:
        """Start the writes of what has arrived in host memory; all of them, with `wait`."""
        while self.unwritten:
            entry = self.parts[self.unwritten[0]]
            if entry.copied is not None and not wait and not entry.copied.query():
                return
            if entry.copied is not None:
                entry.copied.synchronize()
            self.writes.append((self.unwritten[0], self.file.write(self.unwritten[0], entry.data)))
            del self.unwritten[0]

    def wait_written(self) -> None:
        """Return when all that is to be written is on SSD, and give its memory back. Raises DiskError."""
        self.start_writes(wait=True)
        for part, transfer in self.writes:
            transfer.wait()
            self.finish(part, "write")
        self.writes.clear()

    def finish(self, part: Part, use: Use) -> None:
        """One use of a part's gradient is over; after the last one its memory is given up."""
        with self.lock:
            entry = self.parts.get(part)
            if entry is None or use not in entry.uses:
                return
            entry.uses.discard(use)
            over = not entry.uses
        if over:
            self.release(part)

    def release(self, part: Part) -> None:
        """Give a part's gradient up, and its memory back where no other part lies in it."""
        entry = self.parts.get(part)
        if entry is None:
            return
        self._let_arrive(entry)  # nobody may have read what comes: whoever takes the memory may write there at once
        with self.lock:
            if self.parts.pop(part, None) is None:
                return
            entry.memory.num_users -= 1
            last = entry.memory.num_users == 0
        if last:
            entry.memory.give_back(entry.memory.tensor)

    def _let_arrive(self, entry: _Held) -> None:
        """Return when nothing is on its way to a part's memory, or the device has failed, which copies nothing any more."""
        if entry.copied is None:  # a `hold` that was cut off has marked nothing
            self.outgoing.wait()
            return
        with contextlib.suppress(RuntimeError):
            entry.copied.synchronize()


class HeldGradients:
    """Each part's fp32 gradient (flat, of this rank's shares) from its unit's REDUCE to its last use.

    [Note: how long] A part's memory is given back when nothing needs it any more: an early step that will not be redone (of
    `hold`, `final`) is a gradient's last use; one that may be redone keeps it until `conclude`; a delayed part waits for its
    step in the next forward. Parts in `file` are written out of memory instead of waiting there, and are read by their step.
    With `keep` everything stays in memory until the unit's next gradients are summed.

    [Note: gradients in place] With one rank, sums in fp32 and one memory for device and host, the sums themselves are held
    as long as all of a unit waits, or none of it does. Otherwise what waits is copied, so that the rest need not.

    `leaves_beside`: a unit's gradients may be on their way from the device while the next unit's are summed there; else `hold`
    returns when they have arrived. Uses end on the pipeline's thread, too.
    """

    def __init__(
        self, chunks: Sequence[Parted], file: GradientFile, keep: bool, page_locked: bool, leaves_beside: bool = True
    ) -> None:
        self._chunks = chunks
        self.file = file
        self._keep = keep
        self._lock = threading.Lock()
        self._units: dict[Unit, _Unit] = {}
        self._owner: dict[int, Unit] = {}  # by chunk
        self._reserve = Reserve(_page_locked if page_locked else aligned)
        self._outgoing = streams.OutgoingStream(leaves_beside)

    @property
    def num_bytes(self) -> int:
        """Bytes of copies, spare ones included. Sums held in place are not counted: the store of the sums counts them."""
        return self._reserve.num_bytes

    # ---- from REDUCE to the last use

    def hold(self, unit: Unit, indices: Sequence[int], sums: ReducedSums, *, early: bool, final: bool) -> bool:
        """Hold a unit's shares until their step. `indices`: its chunks. `early`: its early parts are about to be stepped;
        `final`: for good. Returns whether `sums.flat` itself is held: then `sums.give_back` will be called with it.
        """
        self.drop(unit)
        held = self._units[unit] = _Unit(self._lock, self.file, self._outgoing)
        uses = {
            part: self._uses(part, is_early and early, final)
            for index in indices
            for part, is_early in _parts_of(self._chunks[index])
        }
        held.on_ssd = {part for part in uses if "write" in uses[part]}
        all_wait = all("step" in use or "reader" in use for use in uses.values())
        flat = sums.flat
        whole = None
        if flat is not None and _lie_in(flat, sums.shares, [size for index in indices for size in self._chunks[index].sizes]):
            whole = _Memory(flat, sums.give_back)
        in_place = {part for part in uses if whole is not None and (all_wait or uses[part] == {"early step"})}
        _take(held, {part: uses[part] for part in uses if part not in in_place}, self._reserve)
        start, left = 0, iter(sums.shares)
        for index in indices:
            self._owner[index] = unit
            copies: dict[Part, torch.Tensor] = {}
            for part in (part for part, _ in _parts_of(self._chunks[index])):
                if whole is not None and part in in_place:
                    whole.num_users += 1
                    held.parts[part] = _Held(whole.tensor.narrow(0, start + part.start, part.numel), whole, uses[part])
                else:
                    copies[part] = held.parts[part].data
            _fill(copies, self._chunks[index].sizes, left, self._outgoing)
            start += sum(self._chunks[index].sizes)
        copied = self._outgoing.mark()
        for part in held.parts.values():
            part.copied = copied
        next(left, None)  # what gives the shares comes to its end
        return whole is not None and whole.num_users > 0

    def write(self, unit: Unit) -> Ticket | None:
        """Start writing what of a unit waits on SSD; the ticket's wait gives its memory back. Raises DiskError there. What is
        yet to arrive in host memory is written later, when this is called for another unit, or the ticket waited for."""
        held = self._units.get(unit)
        if held is None or not held.on_ssd:
            return None
        held.unwritten = sorted(held.on_ssd, key=lambda part: (part.chunk, part.start))
        num_bytes = FP32_BYTES * sum(map(aligned_numel, held.unwritten))
        for each in self._units.values():
            each.start_writes()
        return Ticket(f"hold {unit}", held.wait_written, num_bytes)

    def extents(self, part: Part) -> list[Extent]:
        """Where the step of a part finds its gradient on SSD; nowhere if that is in memory."""
        held = self._unit(part)
        return self.file.extents(part) if held is not None and part in held.on_ssd else []

    def data(self, part: Part) -> torch.Tensor:
        """A part's gradient in memory. From any thread. Raises GradientGoneError."""
        held = self._unit(part)
        if held is None or part not in held.parts:
            raise GradientGoneError(f"the gradient of {part} is in memory no longer")
        self.wait(part)
        return held.parts[part].data

    def wait(self, part: Part) -> None:
        """Return once a part's gradient has arrived in host memory. From any thread."""
        held = self._unit(part)
        entry = None if held is None else held.parts.get(part)
        if entry is not None and entry.copied is not None:
            entry.copied.synchronize()

    def finish(self, part: Part, use: Use) -> None:
        """One use of a part's gradient is over. From any thread."""
        held = self._unit(part)
        if held is not None:
            held.finish(part, use)

    def conclude(self, due: Collection[Unit], hit: bool) -> None:
        """The step's fate is known, and no early step is under way: what is not due any more need not wait. `hit`: early
        steps count."""
        if self._keep:
            return
        for unit in list(self._units):
            if unit not in due:
                self.drop(unit)
            elif hit:
                indices = [index for index, owner in self._owner.items() if owner == unit]
                for part in [part for index in indices for part in self._chunks[index].early]:
                    self.finish(part, "step")

    # ---- the end

    def drop(self, unit: Unit) -> None:
        """Give all memory of a unit's gradients back. None of them may be in use, nor being written."""
        held = self._units.get(unit)
        if held is not None:
            held.unwritten.clear()
            for part in list(held.parts):
                held.release(part)
        self._units.pop(unit, None)

    def abandon(self, due: Collection[Unit]) -> OSError | None:
        """After an error: complete the writes in flight, and drop what belongs to no unit that is due. Returns the failure of a
        write that one waits for which is."""
        self.file.complete()
        failure: OSError | None = None
        for unit, held in list(self._units.items()):
            if unit not in due:
                self.drop(unit)
                continue
            try:
                held.wait_written()
            except OSError as error:
                failure = failure or error
        return failure

    def close(self) -> None:
        """Complete the writes and copies in flight, and give the queue back and the memory that holds nothing."""
        self.file.close()
        self._outgoing.wait()
        self._reserve.clear()

    # ---- for readers

    def share(self, index: int, place: int) -> torch.Tensor | None:
        """A copy of one parameter's gradient, the `place`-th of a chunk; None before the first. Raises GradientGoneError."""
        if index not in self._owner:
            return None
        sizes = self._chunks[index].sizes
        first, count = sum(sizes[:place]), sizes[place]
        found = torch.empty(count, dtype=torch.float32)
        for part, _ in _parts_of(self._chunks[index]):
            start, end = max(first, part.start), min(first + count, part.start + part.numel)
            if start < end:
                found[start - first : end - first] = self.data(part)[start - part.start : end - part.start]
        return found

    # ---- inside

    def _uses(self, part: Part, early: bool, final: bool) -> set[Use]:
        """What a part's gradient is needed for; see [Note: how long]. `early`: of an early step, too."""
        if self._keep:
            return {"reader"}
        stepped: set[Use] = {"early step"} if early else set()
        if stepped and final:
            return stepped
        waits: set[Use] = {"write"} if part in self.file else {"step"}
        return stepped | waits

    def _unit(self, part: Part) -> _Unit | None:
        unit = self._owner.get(part.chunk)
        return None if unit is None else self._units.get(unit)


def _parts_of(chunk: Parted) -> Iterator[tuple[Part, bool]]:
    """A chunk's parts in order, and whether each is early."""
    yield from ((part, True) for part in chunk.early)
    yield from ((part, False) for part in chunk.delayed)


def _fill(
    copies: Mapping[Part, torch.Tensor],
    sizes: Sequence[int],
    shares: Iterator[torch.Tensor],
    outgoing: streams.OutgoingStream,
) -> None:
    """Copy a chunk's shares, which come one after the other, into the memory of its parts; zeros where a share is shorter than
    its place. `outgoing` has the event that the host waits for ahead of a read."""
    start = 0
    for size in sizes:
        share = next(shares)
        for part, data in copies.items():
            first, last = max(part.start, start), min(part.start + part.numel, start + size)
            filled = max(first, min(last, start + share.numel()))
            if first < filled:
                source = share.narrow(0, first - start, filled - first)
                outgoing.copy(data.narrow(0, first - part.start, filled - first), source)
                del source
            if filled < last:
                data.narrow(0, filled - part.start, last - filled).zero_()
        del share  # ahead of the next one, whose reduction may need the memory
        start += size


def _take(held: _Unit, uses: Mapping[Part, set[Use]], reserve: Reserve) -> None:
    """Memory for these parts, each given back by itself. New memory is one piece, which a driver locks once."""
    parts = list(uses)

    def hold(index: int, tensor: torch.Tensor) -> None:
        part = parts[index]
        held.parts[part] = _Held(tensor.narrow(0, 0, part.numel), _Memory(tensor, reserve.put_back, 1), uses[part])

    reserve.take_all([aligned_numel(part) for part in parts], hold)


def _page_locked(numel: int) -> torch.Tensor:
    return pinned_memory.lock_host_bytes(numel * FP32_BYTES).view(torch.float32)


def _lie_in(flat: torch.Tensor, shares: Iterable[torch.Tensor], sizes: Sequence[int]) -> bool:
    """Whether the shares are fp32 host memory, one after the other from the start of `flat`, each in its whole size."""
    position = flat.data_ptr()
    for share, size in zip(shares, sizes, strict=True):
        whole = share.numel() == size and share.data_ptr() == position
        if not whole or share.device.type != "cpu" or share.dtype != torch.float32:
            return False
        position += share.numel() * share.element_size()
    return True


def beyond_host(waiting: Mapping[Unit, Sequence[Part]], host_share: float) -> list[Part]:
    """Of the parts whose gradients wait for their step, by unit, those beyond the share that waits in host memory. `pre`, the
    last to be reduced and the first to be stepped, waits in memory first."""
    first = waiting.get("pre", ())
    rest = [part for unit, parts in waiting.items() if unit != "pre" for part in parts]
    kept = spread_parts(first, rest, host_share)
    return [part for part in (*first, *rest) if part not in kept]


class GradientFile:
    """The gradients of `parts` in the file `path`, which the caller preallocates (`sizes`). Without parts there is no file, nor
    a queue for its writes. `checksums` notes what is written, where it verifies reads."""

    def __init__(
        self, path: Path, parts: Iterable[Part], new_queue: Callable[[], DiskQueue], checksums: Checksums | None = None
    ) -> None:
        self._checksums = checksums if checksums is not None and checksums.verify else None
        self._extents: dict[Part, Extent] = {}
        self.writer: DiskQueue | None = None
        self.num_bytes = 0
        for part in parts:
            self._extents[part] = Extent(path, self.num_bytes, aligned_numel(part) * FP32_BYTES)
            self.num_bytes += self._extents[part].num_bytes
        if self._extents:
            self.writer = new_queue()
        self.sizes = {path: self.num_bytes} if self._extents else {}

    def __contains__(self, part: object) -> bool:
        return part in self._extents

    def extents(self, part: Part) -> list[Extent]:
        """Where a part's gradient lies, and padding up to the disk's alignment; nowhere if it is none of the file's."""
        return [self._extents[part]] if part in self._extents else []

    def write(self, part: Part, data: torch.Tensor) -> Transfer:
        """Start writing a part from memory that `aligned` made."""
        extent = self._extents[part]
        assert self.writer is not None
        transfer = self.writer.write(data.data_ptr(), extent.num_bytes, extent.path, extent.offset)
        if self._checksums is not None:  # the padding, too: it is read back
            whole = data.as_strided((extent.num_bytes // FP32_BYTES,), (1,))
            self._checksums.note(extent.path, extent.offset, whole.numpy())
        return transfer

    def complete(self) -> None:
        """Return when nothing is in flight, whatever came of it."""
        if self.writer is not None:
            self.writer.settle()

    def close(self) -> None:
        """Complete the writes in flight and give the queue back."""
        if self.writer is not None:
            self.writer.close()


def aligned_numel(part: Part) -> int:
    """The part's elements, rounded up to the disk's alignment."""
    return part.numel + -part.numel % ALIGNMENT


def aligned(numel: int) -> torch.Tensor:
    """fp32 host memory for `numel` elements that starts where the disk can read it."""
    whole = torch.empty(numel + ALIGNMENT, dtype=torch.float32)
    return whole.narrow(0, -whole.data_ptr() % (ALIGNMENT * FP32_BYTES) // FP32_BYTES, numel)
