"""Which parts of the optimizer's state have their masters compressed on SSD, and what compresses and restores them.

[Note: compressed masters] Of a compressed part the file `low` has the low halves (`halves`, [Note: halves]), 2 bytes an
element in the place of the master's 4; each generation of the state's files has one. The high halves follow from the
parameter's value, which a step in the backward finds in the memory of the layer just released; any other step reads it. Of
parameters that rest in host memory, where other code may write them, the record keeps a copy of the value. Compressed are parts
in bf16 of which most is in parameters on SSD. A step compresses what it writes; where exceptions are too many it writes whole
masters.

[Note: the record] What is compressed is a record in memory, never in a file: a run's files do not outlive it, and checkpoints
hold whole masters. A record names the files in which the parameter's value is, with the checksums that the value had when the
part was compressed. A value with another checksum is never used: where the memory has another one the file is read, and where
the file has another one the state is torn (ChecksumError). What an early step writes has a record of its own, which takes the
other's place when the step counts, together with the generation of the files.

[Note: made whole] Ahead of whatever uses masters or writes parameters outside a step (saves, loads, users' calls), compressed
parts are made whole: the masters are written to their own file, which a compressed part does not use, and only once all of them
are there the records are dropped, in one assignment. Whatever is cut before that leaves every part compressed, as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, cast

import torch

from ds_vertical.compat import zero_params
from ds_vertical.compat.ops import load
from ds_vertical.io.aio import ALIGNMENT_BYTES, DiskQueue
from ds_vertical.io.checksums import ChecksumError, Piece, checksum
from ds_vertical.io.extents import Extent
from ds_vertical.offload.chunking import ALIGNMENT, Part
from ds_vertical.offload.masters import halves
from ds_vertical.offload.masters.halves import Exceptions
from ds_vertical.offload.param_shards import Shard, Update
from ds_vertical.offload.state_files import Chunk
from ds_vertical.offload.step_pipeline import StepJob

HALF_BYTES: Final = 2  # of a low half, and of a parameter in bf16
_PAGE_BYTES: Final = 4096
_ELEMENTS_PER_EXCEPTION: Final = 1 << 12  # a part with more exceptions than one in so many is written whole


class StaleRecordError(RuntimeError):
    """A job of the pipeline has met a part in another form than the one that it was made for."""


class Value(NamedTuple):
    """A parameter's value in a file: bytes [start, start + num_bytes), and their checksum. `kept`: the value itself (bf16), of
    a parameter that rests in host memory."""

    path: str
    start: int
    num_bytes: int
    digest: int
    kept: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class CompressedMaster:
    """A part's masters: where the low halves are, the values that the high ones follow from, and what does not follow."""

    low: Extent
    values: tuple[Value, ...]
    exceptions: Exceptions

    @property
    def reads(self) -> list[Extent]:
        """What to read to have the values; `found_in` takes them out of that."""
        return [_aligned(value) for value in self.values if value.kept is None]

    def found_in(self, read: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The values in bf16, out of what was read."""
        found, left = [], iter(zip(self.reads, read, strict=True))
        for value in self.values:
            if value.kept is None:
                extent, data = next(left)
                found.append(data.narrow(0, value.start - extent.offset, value.num_bytes).view(torch.bfloat16))
            else:
                found.append(value.kept)
        return found

    def beside_kept(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The values, those that the record keeps in the place of the others."""
        return [data if value.kept is None else value.kept for value, data in zip(self.values, values, strict=True)]

    def checked(self, found: Sequence[torch.Tensor], queue: DiskQueue) -> Sequence[torch.Tensor]:
        """`found`, if these are the values; else those that the files have. Raises ChecksumError, DiskError."""
        if self._odd(found) is None:
            return found
        found = self.found_in([_read(queue, extent) for extent in self.reads])
        if (odd := self._odd(found)) is not None:
            raise odd
        return found

    def _odd(self, found: Sequence[torch.Tensor]) -> ChecksumError | None:
        for value, data in zip(self.values, found, strict=True):
            if value.kept is None and (digest := _digest(data)) != value.digest:
                return ChecksumError(value.path, Piece(value.start, value.num_bytes, value.digest), digest)
        return None


class CompressedMasters:
    """The records of one rank: see [Note: the record]. `queue`: reads values that memory does not have."""

    def __init__(self, chunks: Sequence[Chunk], queue: DiskQueue) -> None:
        self._chunks = chunks
        self.queue = queue
        self._places = {part: place for chunk in chunks for part, place in _places(chunk)}
        self._current: dict[Part, CompressedMaster] = {}
        self._early: dict[Part, CompressedMaster | None] = {}  # of early steps, until they count or not
        if self._places:
            load.master_halves()  # compiled here, and not on the pipeline's thread in mid-step
        self.scratch = torch.empty(max((part.numel for part in self._places), default=0), dtype=torch.int16)

    def of(self, part: Part) -> CompressedMaster | None:
        """The record of a part; None where its masters are whole."""
        return self._current.get(part)

    @property
    def parts(self) -> list[Part]:
        """Those that are compressed."""
        return list(self._current)

    def note(self, part: Part, record: CompressedMaster | None, early: bool) -> None:
        """A step has written the part so; None: whole. Called on the pipeline's thread."""
        if early:
            self._early[part] = record
        elif record is not None:
            self._current[part] = record
        else:
            self._current.pop(part, None)

    def commit(self) -> None:
        """Early steps count."""
        kept = {part: record for part, record in self._current.items() if part not in self._early}
        self._current = kept | {part: record for part, record in self._early.items() if record is not None}
        self._early = {}

    def discard(self) -> None:
        """Early steps have not been."""
        self._early = {}

    def compress(
        self,
        steps: Iterable[tuple[Part, StepJob]],
        update: Update | None,
        targets: Mapping[int, torch.Tensor],
        generation: Callable[[Part], int],
    ) -> bool:
        """Let these steps of one unit meet whole masters and write compressed ones. `update`: of their parameters on SSD;
        `targets`: by id the memory for the new values of all; `generation`: of the files that they write. Returns whether any
        of them reads a parameter's file. Raises StaleRecordError for a compressed part of whose parameters none is updated."""
        reads = False
        for part, job in steps:
            if part in self._places and update is not None:
                chunk, num_bytes = self._chunks[part.chunk], job.targets[0].num_bytes
                low = self._low(chunk, part, generation(part), num_bytes)
                reads |= _CompressedStep(self, part, low, job, _Target(chunk, part, update, targets)).begin()
            elif self.of(part) is not None:
                raise StaleRecordError(
                    f"{job.what}: its masters are compressed, and no update of its parameters' files is open"
                )
        return reads

    def _low(self, chunk: Chunk, part: Part, generation: int, num_bytes: int) -> Extent:
        """Where a part's low halves are. In a slot they take the room of the masters, of so many bytes."""
        assert chunk.low_files is not None
        offset, size = self._places[part]
        return Extent(chunk.low_files[generation], offset, size, num_bytes - size)

    # ---- see [Note: made whole]

    def whole_jobs(
        self, parts: Iterable[Part], whole: Callable[[Part], Extent]
    ) -> dict[Part, tuple[CompressedMaster, StepJob]]:
        """For each of these parts that is compressed, its record, and what writes its masters to `whole`."""
        records = {part: record for part in parts if (record := self.of(part)) is not None}
        return {part: (record, self._whole_job(part, record, whole(part))) for part, record in records.items()}

    def _whole_job(self, part: Part, record: CompressedMaster, target: Extent) -> StepJob:
        def compute(read: Sequence[torch.Tensor]) -> None:
            views = cast("list[torch.Tensor]", read)
            values = record.checked(record.found_in(views[1:]), self.queue)
            views[0] = _restored(record, values, views[0], part)

        return StepJob("write whole masters", [record.low], compute, [target], record.reads, beside=True)

    def drop(self, records: Mapping[Part, CompressedMaster]) -> None:
        """The masters of these records are in their own file."""
        self._current = {part: found for part, found in self._current.items() if records.get(part) is not found}


class _Target:
    """The memory and the files that take the new values of a part's parameters; where `recalled`, the memory has the values of
    before until a step fills it."""

    def __init__(self, chunk: Chunk, part: Part, update: Update, targets: Mapping[int, torch.Tensor]) -> None:
        shards: dict[int, Shard] = {id(piece.shard.param): piece.shard for piece in update.pieces}
        found = [(shards.get(id(param)), id(param), first, count) for param, first, _, count in chunk.overlaps(part)]
        self.recalled, self.early = update.recalled, update.early
        self.values = [targets[key].narrow(0, first, count) for _, key, first, count in found]
        self._places = [(None if shard is None else shard.target(self.early), first) for shard, _, first, _ in found]

    def described(self) -> tuple[Value, ...]:
        """What is in the memory now, as it will be in the files."""
        described = []
        for (path, first), data in zip(self._places, self.values, strict=True):
            if path is None:
                described.append(Value("", 0, 0, 0, data.clone()))
            else:
                described.append(Value(path, HALF_BYTES * first, HALF_BYTES * data.numel(), _digest(data)))
        return tuple(described)


class _CompressedStep:
    """What becomes of one step's job: around its computation masters are restored and compressed."""

    def __init__(self, masters: CompressedMasters, part: Part, low: Extent, job: StepJob, target: _Target) -> None:
        self._masters = masters
        self._part = part
        self._low = low
        self._job = job
        self._target = target
        self._record = masters.of(part)
        self._compute = job.compute
        self._whole = list(job.targets)

    def begin(self) -> bool:
        """Change the job. Returns whether it reads a parameter's file now."""
        job = self._job
        reads = [] if self._record is None or self._target.recalled else self._record.reads
        job.inputs = [*job.inputs, *reads]
        job.outputs = [*self._whole, self._low]  # it turns out which of the two forms is written
        job.compute = self._step
        self._num_reads = len(reads)
        return bool(reads)

    def _step(self, read: Sequence[torch.Tensor]) -> None:
        """`read` becomes the state as it is to be written."""
        views, part, record = cast("list[torch.Tensor]", read), self._part, self._record
        if self._masters.of(part) is not record:
            raise StaleRecordError(f"{self._job.what}: its masters have been written since its read was planned")
        first_read = len(views) - self._num_reads
        values, views[first_read:] = views[first_read:], []
        if record is not None:
            found = record.found_in(values) if self._num_reads else record.beside_kept(self._target.values)
            views[0] = _restored(record, record.checked(found, self._masters.queue), views[0], part)
        self._compute(views)
        self._masters.note(part, self._compressed(views), self._target.early)

    def _compressed(self, views: list[torch.Tensor]) -> CompressedMaster | None:
        """The record of the part, whose low halves begin its memory now; None where that has the masters, which are written."""
        numel, scratch = self._part.numel, self._masters.scratch
        low, master = scratch.narrow(0, 0, numel), views[0].view(torch.float32).narrow(0, 0, numel)
        exceptions = halves.split(master, self._target.values, low, numel // _ELEMENTS_PER_EXCEPTION)
        if exceptions is None:
            self._job.outputs = self._whole
            return None
        views[0].view(torch.int16).narrow(0, 0, numel).copy_(low)
        views[0] = views[0].narrow(0, 0, self._low.num_bytes)
        self._job.outputs = [self._low, *self._whole[1:]]
        return CompressedMaster(self._low, self._target.described(), exceptions)


def _restored(record: CompressedMaster, values: Sequence[torch.Tensor], low: torch.Tensor, part: Part) -> torch.Tensor:
    """The bytes of a part's masters, which take the memory that `low` (of a slot) begins; padding is zero."""
    size = record.low.num_bytes + record.low.spare
    whole = torch.as_strided(low, (size,), (1,), low.storage_offset())
    master = whole.view(torch.float32)
    halves.join(low.view(torch.int16).narrow(0, 0, part.numel), values, record.exceptions, master.narrow(0, 0, part.numel))
    master.narrow(0, part.numel, master.numel() - part.numel).zero_()
    return whole


def _places(chunk: Chunk) -> Iterator[tuple[Part, tuple[int, int]]]:
    """Of each part that may be compressed, offset and size of its low halves in their file."""
    offset = 0
    for part in chunk.parts("all") if chunk.low_files is not None else ():
        if part.numel >= ALIGNMENT and _is_compressible(chunk, part):
            size = _rounded_up(HALF_BYTES * part.numel, _PAGE_BYTES)
            yield part, (offset, size)
            offset += size


def _is_compressible(chunk: Chunk, part: Part) -> bool:
    """Whether the part is in bf16, and the half of it at least in parameters on SSD."""
    found = [(param, count) for param, *_, count in chunk.overlaps(part)]
    in_files = sum(count for param, count in found if zero_params.is_on_ssd(param))
    return 2 * in_files >= part.numel and all(zero_params.shard_dtype(param) is torch.bfloat16 for param, _ in found)


def low_file_bytes(numel: int, largest: int) -> int:
    """Bytes of a file for the low halves of a chunk of `numel` elements, cut into parts of `largest` anyhow."""
    num_parts = numel // largest + 3  # of its early and of its delayed share
    return _rounded_up(HALF_BYTES * numel, _PAGE_BYTES) + _PAGE_BYTES * num_parts


def value_bytes(numel: int, num_params: int) -> int:
    """Bytes, at most, that a part's job reads of parameters' files."""
    return HALF_BYTES * numel + 2 * ALIGNMENT_BYTES * num_params


def _aligned(value: Value) -> Extent:
    start = value.start - value.start % ALIGNMENT_BYTES
    return Extent(Path(value.path), start, _rounded_up(value.start + value.num_bytes, ALIGNMENT_BYTES) - start)


def _read(queue: DiskQueue, extent: Extent) -> torch.Tensor:
    """The bytes of a file. Raises DiskError."""
    memory = torch.empty(extent.num_bytes + ALIGNMENT_BYTES, dtype=torch.uint8)
    data = memory.narrow(0, -memory.data_ptr() % ALIGNMENT_BYTES, extent.num_bytes)
    queue.read(data.data_ptr(), extent.num_bytes, extent.path, extent.offset).wait()
    return data


def _digest(values: torch.Tensor) -> int:
    return checksum(values.view(torch.uint8).numpy())


def _rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
