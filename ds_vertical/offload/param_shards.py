"""Parameters' shards on SSD: their files, their places in units' host buffers, and what takes them to and fro.

A shard's bytes go from a file over a host buffer to the device, and new values from the optimizer over a buffer to a file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed import ProcessGroup

from ds_vertical.compat import pinned_memory, zero_params
from ds_vertical.distributed.gather_queue import UnitGather
from ds_vertical.io import files, streams
from ds_vertical.io.aio import DiskQueue, Transfer, complete
from ds_vertical.io.buffers import BufferPool, HostBuffer, nothing_to_wait_for
from ds_vertical.io.checksums import Checksums
from ds_vertical.io.runs import stripes
from ds_vertical.schedule.events import Unit

ElementRange = tuple[int, int]  # first element in a shard, and how many


@dataclass(eq=False)
class Shard:
    """A shard's place in its unit's host buffer, in bytes, and its files: one per generation (one or two), the current one's
    number. `aside`: the file with the current values where a checkpoint shares it (`state_files`, [Note: frozen files]);
    `is_idle`: the optimizer never steps it; then there is no file in its place meanwhile (`is_vacant`)."""

    param: nn.Parameter
    paths: tuple[str, ...]
    start: int
    num_bytes: int
    numel: int
    is_idle: bool
    generation: int = 0
    aside: str | None = None
    is_vacant: bool = False

    @property
    def other(self) -> int:
        """The generation that an early step writes."""
        return (self.generation + 1) % len(self.paths)

    @property
    def path(self) -> str:
        """The file with the current values."""
        return self.aside or self.paths[self.generation]

    def target(self, early: bool) -> str:
        """The file that a step writes."""
        return self.paths[self.other if early else self.generation]

    def leave(self) -> None:
        """The file aside holds the current values no more. Raises StorageError, with nothing changed: no room for another."""
        self.make_room()
        self.aside = None
        zero_params.set_swap_path(self.param, self.path)

    def make_room(self) -> None:
        """Have a file to write. Raises StorageError."""
        if self.is_vacant:
            files.preallocate({Path(self.paths[self.generation]): self.num_bytes})
        self.is_vacant = False

    def set_aside(self, path: Path) -> None:
        """The current values are in another file, which is not to be written."""
        self.aside, self.is_vacant = str(path), self.is_idle
        zero_params.set_swap_path(self.param, self.path)

    def view(self, data: torch.Tensor) -> torch.Tensor:
        """The shard's elements inside a unit buffer, 1-d, in the parameter's dtype."""
        return data.narrow(0, self.start, self.num_bytes).view(self.param.dtype).narrow(0, 0, self.numel)


@dataclass(frozen=True)
class ShardPiece:
    """Bytes [start, end) of a shard's file that an update fills."""

    shard: Shard
    start: int
    end: int

    @classmethod
    def of(cls, shard: Shard, changed: ElementRange) -> ShardPiece:
        """The bytes of the elements `changed`; up to the file's end, padding included, where they are the shard's last."""
        first, count = changed
        size = shard.param.element_size()
        end = shard.num_bytes if first + count == shard.numel else (first + count) * size
        return cls(shard, first * size, end)

    @property
    def is_whole(self) -> bool:
        """Whether the update fills the whole file."""
        return self.start == 0 and self.end == self.shard.num_bytes


def lay_out(params: Sequence[nn.Parameter], generations: int) -> list[Shard]:
    """Neighbouring places for the shards that live on SSD; file sizes are multiples of the aio alignment already."""
    shards: list[Shard] = []
    start = 0
    for param in params:
        if zero_params.is_on_ssd(param):
            file = zero_params.swap_file(param)
            paths = (str(file.path), str(zero_params.second_generation(file.path)))[:generations]
            shards.append(Shard(param, paths, start, file.num_bytes, file.numel, not param.requires_grad))
            start += file.num_bytes
    return shards


class ShardFiles:
    """The shards on SSD by unit, and which file of each holds its current values. `checksums`: of these files.

    `versions`: by unit, counts the events after which an earlier read of its files is old; see `param_store`, [Note: versions].
    `unit_of`: by id(param).
    """

    def __init__(self, units: Mapping[Unit, Sequence[nn.Parameter]], generations: int, checksums: Checksums) -> None:
        self.by_unit: dict[Unit, list[Shard]] = {unit: lay_out(params, generations) for unit, params in units.items()}
        self.unit_of: dict[int, Unit] = {id(param): unit for unit, params in units.items() for param in params}
        self.versions: Counter[Unit] = Counter()
        self.checksums = checksums
        self._num_moves = 0
        self._unused: list[Path] = []  # files aside without current values; a checkpoint may read them until the next one

    @property
    def sizes(self) -> dict[Unit, int]:
        """Bytes of each unit's shards on SSD."""
        return {unit: sum(shard.num_bytes for shard in shards) for unit, shards in self.by_unit.items()}

    def shards(self) -> Iterator[Shard]:
        """Every shard on SSD."""
        for shards in self.by_unit.values():
            yield from shards

    def note_write(self, params: Iterable[nn.Parameter]) -> None:
        """DeepSpeed or a load has written the files of these parameters: what was read of their units before is old."""
        written = {id(param) for param in params}
        for shard in self.shards():
            if id(shard.param) in written:
                self.versions[self.unit_of[id(shard.param)]] += 1
                self.checksums.forget(shard.path)

    def note_writing(self, params: Iterable[nn.Parameter]) -> None:
        """DeepSpeed or a load is about to write the whole files of these parameters: not those that a checkpoint shares."""
        written = {id(param) for param in params}
        for shard in self.shards():
            if id(shard.param) in written:
                self.leave(shard)

    def set_aside(self, shared: Collection[Path]) -> None:
        """Files of `shared` that hold current values are read only from now on. No write may be in flight. Raises
        StorageError, with nothing changed, where there is no room for those that take their place."""
        files.remove_files(self._unused)
        for path in self._unused:
            stripes.forget_file(path)
        self._unused.clear()
        self._num_moves += 1
        found = [shard for shard in self.shards() if shard.aside is None and Path(shard.path) in shared]
        moves = {shard: Path(f"{shard.path}.{self._num_moves}") for shard in found}
        idle = {Path(shard.path) for shard in found if shard.is_idle}
        files.set_aside({Path(shard.path): aside for shard, aside in moves.items()}, vacated=idle)
        for shard, aside in moves.items():
            self.checksums.move(shard.path, aside)
            self.versions[self.unit_of[id(shard.param)]] += 1  # a read ahead may open the new file by the old name
            shard.set_aside(aside)

    def leave(self, shard: Shard) -> None:
        """The current values of a shard are, or will be, in the file of its generation."""
        aside = shard.aside
        shard.leave()
        if aside is not None:
            self._unused.append(Path(aside))
            self.checksums.forget(aside)

    def leave_all(self, pieces: Iterable[ShardPiece]) -> None:
        """As `leave`, for every shard that an update fills. Raises RuntimeError where it fills only a part of one whose file a
        checkpoint shares."""
        for piece in pieces:
            if piece.shard.aside is not None:
                if not piece.is_whole:
                    raise RuntimeError(f"bytes {piece.start} to {piece.end} of {piece.shard.path}, which is not to be written")
                self.leave(piece.shard)


class UnitBuffers:
    """The host buffers of units' shards: one for each unit outside the layers, and up to `num_layers` for the others, each as
    large as the largest.

    `num_bytes`: of all. `reads`: the queue of all reads, None where no shard is on SSD. `every`: all buffers.
    """

    def __init__(self, files: ShardFiles, new_queue: Callable[[], DiskQueue], num_layers: int) -> None:
        sizes, checksums = files.sizes, files.checksums
        outside: dict[Unit, int] = {unit: size for unit, size in sizes.items() if not isinstance(unit, int)}
        in_layers = [size for unit, size in sizes.items() if unit not in outside]
        largest, count = max(in_layers, default=0), min(num_layers, sum(map(bool, in_layers)))
        self.num_bytes = largest * count + sum(outside.values())
        self.reads: DiskQueue | None = new_queue() if self.num_bytes else None
        self.every: list[HostBuffer] = []
        self._check = checksums.check if checksums.verify else None
        self.layers = BufferPool(self._new(largest, count))
        self.outside: dict[Unit, BufferPool] = {unit: BufferPool(self._new(size, 1)) for unit, size in outside.items()}

    def _new(self, num_bytes: int, count: int) -> list[HostBuffer]:
        if self.reads is None or num_bytes == 0:
            return []
        buffers = [HostBuffer(pinned_memory.lock_host_bytes(num_bytes), self.reads, self._check) for _ in range(count)]
        self.every += buffers
        return buffers

    def pool(self, unit: Unit) -> BufferPool:
        """The buffers that the unit may take."""
        return self.outside.get(unit, self.layers)

    def reset(self, taken: Collection[int]) -> None:
        """All buffers are free but those of these ids, whatever an interrupt has cut. No read of the others may be needed."""
        for buffer in self.every:
            if id(buffer) not in taken:
                buffer.complete_reads()
        for pool in (self.layers, *self.outside.values()):
            pool.reset(taken)

    def withdraw(self) -> None:
        """No unit may take a buffer any more."""
        self.layers = BufferPool([])
        self.outside.update({unit: BufferPool([]) for unit in self.outside})

    def unlock(self) -> None:
        """Give the memory back. No transfer may be in flight."""
        while self.every:
            pinned_memory.unlock_host_bytes(self.every.pop().data)


@dataclass
class Resident:
    """A unit that is fetched or on its way: the parameters that were `partitioned` before, and full nowhere else; those of
    them that this store gathered, and the buffer that backs them."""

    buffer: HostBuffer | None
    partitioned: list[nn.Parameter]
    gathered: list[nn.Parameter]
    gather: UnitGather | None = None

    @property
    def is_read(self) -> bool:
        """Whether nothing of the unit is being read any more."""
        return self.buffer is None or all(read.done for read in self.buffer.reads)


@dataclass(frozen=True)
class Copy:
    """A unit's shards on their way into a buffer, as they are in `version`, before anybody fetches them."""

    buffer: HostBuffer
    version: int


@dataclass(eq=False)
class Update:
    """New values of a unit in a host buffer, on their way to SSD and, unless `early`, to the unit's next fetch. `recalled`: the
    buffer has the values of before until the new ones come."""

    buffer: HostBuffer
    pieces: Sequence[ShardPiece]
    early: bool
    recalled: bool = False
    finished: bool = False  # all values are there and their writes issued
    returned: bool = False  # the buffer is in its pool again
    writes: Sequence[Transfer] = ()

    def write(self, writer: DiskQueue, checksums: Checksums) -> Sequence[Transfer]:
        """Start writing the values to their files, and note the checksums beside that."""
        writes: list[Transfer] = []
        for piece in self.pieces:
            path = piece.shard.target(self.early)
            data = self.buffer.data.narrow(0, piece.shard.start + piece.start, piece.end - piece.start)
            writes.append(writer.write(data.data_ptr(), data.numel(), path, piece.start))
            checksums.note(path, piece.start, data.numpy())
        self.buffer.writes += writes
        self.writes = writes
        return writes

    def give_up(self, writer: DiskQueue) -> None:
        """Complete the writes, whatever comes of them: the values are needed no more. None of the caller's may be under way."""
        writer.give_up(self.writes)
        self.buffer.writes = [write for write in self.buffer.writes if write not in self.writes]


class ParamUpdates:
    """New values of units from the optimizer, on their way to files and to the units' next fetches.

    `latest`: by unit, the new shards that no fetch has taken over yet. `take` gives a free buffer for a unit, `recall` the one
    with its present values, if there is one.
    """

    def __init__(self, files: ShardFiles, buffers: UnitBuffers, writer: DiskQueue, take: Callable[[Unit], HostBuffer]) -> None:
        self.latest: dict[Unit, Update] = {}
        self.unfinished: dict[Unit, Update] = {}  # new shards that are not all there yet
        self.recall: Callable[[Unit], HostBuffer | None] = lambda _: None
        self._files = files
        self._buffers = buffers
        self._writer = writer
        self._take = take
        self._writes: dict[Unit, list[Transfer]] = {}
        self._early: dict[Unit, list[Update]] = {}  # early updates, until commit or discard
        self._copies: list[tuple[nn.Parameter, torch.Tensor, ElementRange]] = []  # early values of parameters in memory

    @property
    def error(self) -> BaseException | None:
        """The first write of new values that failed: their parameters are lost."""
        return self._writer.write_error

    def open_update(self, unit: Unit, ranges: Mapping[nn.Parameter, ElementRange], early: bool) -> dict[int, torch.Tensor]:
        """Memory for the unit's new values, by id(param): each time the whole shard, of which `ranges` will be filled.

        `early`: the values go to the other generation's files, or into copies, until `commit`. Otherwise they go where
        the parameters rest, and the unit's next fetch takes them out of memory; so what does not change is read beside them.
        """
        in_memory = {param: zero_params.shard(param) for param in ranges if not zero_params.is_on_ssd(param)}
        if early:
            in_memory = {param: torch.empty_like(shard) for param, shard in in_memory.items()}
            self._copies += [(param, copy, ranges[param]) for param, copy in in_memory.items()]
        targets = {id(param): target for param, target in in_memory.items()}
        changed = [shard for shard in self._files.by_unit[unit] if shard.param in ranges]
        if changed:
            recalled = self.recall(unit) if early else None
            if recalled is not None:
                recalled.wait_reads()
                recalled.check_reads()
                recalled.wait_uses()  # a step that was redone may still be writing from it
            pieces = [ShardPiece.of(shard, ranges[shard.param]) for shard in changed]
            update = Update(recalled or self._take(unit), pieces, early, recalled is not None)
            targets |= {id(shard.param): shard.view(update.buffer.data) for shard in changed}
            self.unfinished[unit] = update
            self._files.versions[unit] += not early
            if early:
                self._early.setdefault(unit, []).append(update)
            else:
                self.latest[unit] = update
                self._files.leave_all(update.pieces)
                self._read_beside(unit, update)
        return targets

    def _read_beside(self, unit: Unit, update: Update) -> None:
        """Read the bytes of the unit that an update leaves as they are."""
        self.wait_writes(unit)
        filled = {id(piece.shard): piece for piece in update.pieces}
        for shard in self._files.by_unit[unit]:
            piece = filled.get(id(shard))
            for start, end in [(0, shard.num_bytes)] if piece is None else [(0, piece.start), (piece.end, shard.num_bytes)]:
                if start < end:
                    update.buffer.issue_read(shard.path, shard.start + start, end - start, start)

    def finish_update(self, unit: Unit) -> None:
        """Start writing the new values to their files. May be called on another thread than the rest."""
        update = self.unfinished.pop(unit, None)
        if update is None:
            return
        self._writes.setdefault(unit, []).extend(update.write(self._writer, self._files.checksums))
        update.finished = True

    def commit(self) -> None:
        """Make the values of early updates the parameters' own. All of them must be finished."""
        for update in (update for updates in self._early.values() for update in updates):
            for piece in update.pieces:
                shard = piece.shard
                shard.generation = shard.other
                self._files.versions[self._files.unit_of[id(shard.param)]] += 1
                self._files.leave(shard)
        for param, copy, (first, count) in self._copies:
            zero_params.shard(param).narrow(0, first, count).copy_(copy.narrow(0, first, count))
        self._close_early()

    def discard(self) -> None:
        """Forget the values of early updates, and what came of their writes."""
        for unit, updates in self._early.items():
            for update in updates:
                update.give_up(self._writer)
                self._writes[unit] = [write for write in self._writes.get(unit, ()) if write not in update.writes]
        self._close_early()

    def _close_early(self) -> None:
        self._copies.clear()
        for unit, updates in self._early.items():
            for update in updates:
                if not update.returned:
                    self._buffers.pool(unit).put_back(update.buffer)
        self._early.clear()

    def complete_update(self, unit: Unit) -> None:
        """Wait for all transfers of a unit's finished updates."""
        self.wait_writes(unit)
        if update := self.latest.get(unit):
            update.buffer.wait_reads()

    def close_updates(self) -> None:
        """Wait until new values are in their files and put the buffers of those that no fetch has taken back."""
        for unit in list(self._writes):
            self.wait_writes(unit)
        for unit in list(self.latest):
            self._put_away(unit)

    def make_room(self, pool: BufferPool) -> None:
        """Where no buffer of the pool is free, give that of the oldest finished update back that no fetch has taken over."""
        if not pool.num_free:
            early = [update for u, updates in self._early.items() if self._buffers.pool(u) is pool for update in updates]
            for update in [update for update in early if update.finished and not update.returned][:1]:
                update.returned = True
                pool.put_back(update.buffer)
        if not pool.num_free:
            unused: list[Unit] = [u for u, update in self.latest.items() if update.finished and self._buffers.pool(u) is pool]
            for other in unused[:1]:
                self._put_away(other)

    def _put_away(self, unit: Unit) -> None:
        self.wait_writes(unit)
        update = self.latest.pop(unit)
        update.buffer.wait_reads()
        self._buffers.pool(unit).put_back(update.buffer)

    def wait_writes(self, unit: Unit) -> None:
        """Return when no write of the unit's files is under way."""
        for write in self._writes.get(unit, ()):
            write.wait()
        self._writes.pop(unit, None)  # not before: an interrupted wait must not forget a write in flight

    def complete_writes(self) -> None:
        """Wait for all writes, whatever comes of them: a failure is `error`."""
        for write in [write for writes in list(self._writes.values()) for write in writes]:
            complete(write)

    def taken_buffers(self) -> set[int]:
        """The ids of the buffers with new values."""
        updates = [*self.latest.values(), *(update for updates in self._early.values() for update in updates)]
        return {id(update.buffer) for update in updates if not update.returned}


class Landing:
    """Brings the parameters of fetched units to the device. `most_behind`: see `ParamSettings`; `group`: of the ranks.
    `wait_last`: waits for the last copies so far. `in_line`: a gather comes behind what the device was given before.

    `is_copy`: a lone rank beside a device, whose shards are the whole parameters. The host waits for no copy of them; the
    device does, ahead of their use. So a unit's copies may begin as soon as it is read, if the device's memory has room.

    [Note: shards in place] A shard that rests in host memory is stepped there. Its step needs the gradient, which comes behind
    the computation, which comes behind the copy. Other code (a load, a user's write) may change it between two passes. So when
    nothing is fetched any more the host waits for the last copy.
    """

    def __init__(self, device: torch.device, group: ProcessGroup | None, most_behind: int) -> None:
        self.is_copy = group is None and streams.works_beside_host(device)
        self._group = group
        self._lane = streams.CopyStream(device)
        self._backlog = streams.EventWindow(streams.recorder(device), most_behind)
        self.wait_last, self.in_line = nothing_to_wait_for, False

    def has_room(self, residents: Mapping[Unit, Resident]) -> bool:
        """Whether the device has room for one more layer beside those that it holds."""
        return self._backlog.has_room(_num_landed(residents) + 1)

    def wait_room(self, residents: Mapping[Unit, Resident]) -> None:
        """Return once it has."""
        self._backlog.wait(_num_landed(residents) + 1)

    def bring(self, params: Sequence[nn.Parameter]) -> streams.IssuedCopies:
        """Assemble full parameters from shards that are in memory: whoever uses them has the copies land first."""
        issue = zero_params.copy_to_device if self.is_copy else partial(zero_params.gather, group=self._group)
        return self.carry(lambda: issue(params), self.in_line)

    def carry(self, issue: Callable[[], Sequence[torch.Tensor]], follows: bool = False) -> streams.IssuedCopies:
        """As `CopyStream.run`, in the stream in which parameters come."""
        self.wait_last = (copies := self._lane.run(issue, follows)).wait
        return copies

    def wait_copies(self) -> None:
        """Return once all copies so far are complete."""
        self.wait_last()
        self.wait_last = nothing_to_wait_for

    def release(self, residents: Mapping[Unit, Resident]) -> None:
        """The host has released a unit that the device still computes with; `residents`: the others."""
        self._backlog.mark()
        if not residents:
            self.wait_copies()

    def clear(self) -> None:
        """Forget what has been released, after an error: the device has been waited for, or has failed."""
        self.wait_copies()
        self._backlog.clear()


def _num_landed(residents: Mapping[Unit, Resident]) -> int:
    return sum(isinstance(unit, int) and bool(resident.gathered) for unit, resident in residents.items())
