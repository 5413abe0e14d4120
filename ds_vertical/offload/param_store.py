"""Fetch and release the parameters of one unit at a time over ZeRO-3's partitions.

[Note: versions] What is read ahead of its fetch may meanwhile become old: somebody writes a parameter's file, or the
optimizer makes new values. Each such event counts the unit's version up; a copy of an older version is dropped, and read again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from ds_vertical.compat import pinned_memory, zero_params
from ds_vertical.io import files
from ds_vertical.io.aio import DiskQueue, Transfer, complete
from ds_vertical.io.buffers import BufferPool, HostBuffer
from ds_vertical.io.checksums import Checksums
from ds_vertical.io.streams import CopyStream, EventWindow, recorder
from ds_vertical.io.ticket import Ticket
from ds_vertical.offload.param_shards import Copy, ElementRange, Resident, Shard, ShardPiece, Update, lay_out
from ds_vertical.schedule.events import Unit


class ParamStore:
    """Parameters per unit: SSD -> host buffer -> device (and all-gather). `generations`: of each file; with one, early steps
    are written in place. `checksums`: those of the files.

    `num_buffers` layers may be fetched at a time, besides `pre`. A unit arrives once the device has computed all but the
    last `most_behind` released before it: their memory is not free yet. `reads`: the queue of all reads, None where no shard
    is on SSD. A failed read raises DiskError where the unit's ticket is waited for. A parameter that is gathered already
    (persistent ones, small enough to stay on the device) is left alone.
    """

    def __init__(
        self,
        units: Mapping[Unit, Sequence[nn.Parameter]],
        new_queue: Callable[[], DiskQueue],
        num_buffers: int,
        device: torch.device,
        writer: DiskQueue,
        most_behind: int,
        generations: int,
        checksums: Checksums,
    ) -> None:
        self._checksums = checksums
        self._units = units
        self._shards = {unit: lay_out(params, generations) for unit, params in units.items()}
        self._unit_of: dict[int, Unit] = {id(param): unit for unit, params in units.items() for param in params}
        self._resident: dict[Unit, Resident] = {}
        self._ahead: dict[Unit, Copy] = {}
        self._versions: Counter[Unit] = Counter()
        self._lane = CopyStream(device)
        self._backlog = EventWindow(recorder(device), most_behind)
        self._writer = writer
        self._updates: dict[Unit, Update] = {}  # new shards that no fetch has taken over yet
        self._unwritten: dict[Unit, Update] = {}  # new shards that are not all there yet
        self._writes: dict[Unit, list[Transfer]] = {}
        self._drained: dict[Unit, list[Update]] = {}  # early updates, until commit or discard
        self._copies: list[tuple[nn.Parameter, torch.Tensor, ElementRange]] = []  # early values of parameters in memory

        sizes = {unit: sum(shard.num_bytes for shard in shards) for unit, shards in self._shards.items()}
        largest = max((size for unit, size in sizes.items() if unit != "pre"), default=0)
        count = min(num_buffers, sum(1 for unit, size in sizes.items() if unit != "pre" and size))
        self.host_bytes = largest * count + sizes["pre"]
        self.reads: DiskQueue | None = new_queue() if self.host_bytes else None
        self.num_gathers = 0  # so far, by this rank
        self._closed = False
        self._num_moves = 0
        self._unused: list[Path] = []  # files aside that nobody needs any more, perhaps in use until the next checkpoint
        self._buffers: list[HostBuffer] = []
        self._layer_buffers = BufferPool(self._new_buffers(largest, count))
        self._pre_buffers = BufferPool(self._new_buffers(sizes["pre"], 1))

    def _new_buffers(self, num_bytes: int, count: int) -> list[HostBuffer]:
        if self.reads is None or num_bytes == 0:
            return []
        check = self._checksums.check if self._checksums.verify else None
        buffers = [HostBuffer(pinned_memory.lock_host_bytes(num_bytes), self.reads, check) for _ in range(count)]
        self._buffers += buffers
        return buffers

    @property
    def error(self) -> BaseException | None:
        """The first write of new values that failed: their parameters are lost."""
        return self._writer.write_error

    @property
    def fetched(self) -> list[Unit]:
        return list(self._resident)

    def fetch(self, unit: Unit) -> Ticket:
        """Start reading a unit's shards; the ticket's wait gathers the full parameters on the device."""
        self._check_absent(unit)
        shards = [shard for shard in self._shards[unit] if zero_params.needs_read(shard.param)]
        buffer = self._in_memory(unit)
        missing = shards if buffer is None else []
        if missing:
            buffer = self._take(unit)
        ticket = Ticket(f"fetch {unit}", lambda: self._arrive(unit, shards), sum(s.num_bytes for s in missing))
        self._resident[unit] = Resident(buffer, [p for p in self._units[unit] if zero_params.is_partitioned(p)], [], ticket)
        if buffer is not None:
            self._read(unit, missing, buffer)
        return ticket

    def fetch_ahead(self, unit: Unit) -> Ticket | None:
        """Start reading a unit's shards for its next `fetch`; the parameters are left as they are. See [Note: versions].

        None where nothing is on SSD, or where its values are in memory anyway. The ticket's wait raises DiskError.
        """
        self._check_absent(unit)
        shards = self._shards[unit]
        if not shards or unit in self._updates or unit in self._ahead:
            return None
        buffer = self._take(unit)
        self._ahead[unit] = Copy(buffer, self._versions[unit])
        self._read(unit, shards, buffer)

        def wait() -> None:
            if unit in self._ahead and self._ahead[unit].buffer is buffer:  # otherwise somebody else has waited, or will
                buffer.wait_reads()

        return Ticket(f"fetch {unit} ahead", wait, sum(shard.num_bytes for shard in shards))

    def note_write(self, params: Iterable[nn.Parameter]) -> None:
        """Somebody has written the files of these parameters: what was read of their units before is old."""
        written = {id(param) for param in params}
        for shard in self.shards():
            if id(shard.param) in written:
                self._versions[self._unit_of[id(shard.param)]] += 1
                self._checksums.forget(shard.path)

    def note_writing(self, params: Iterable[nn.Parameter]) -> None:
        """Somebody is about to write the whole files of these parameters: not those that a checkpoint shares."""
        written = {id(param) for param in params}
        for shard in self.shards():
            if id(shard.param) in written:
                self._leave(shard)

    def shards(self) -> Iterator[Shard]:
        """Every shard on SSD."""
        for shards in self._shards.values():
            yield from shards

    def set_aside(self, shared: Collection[Path]) -> None:
        """Files of `shared` that hold current values are read only from now on. No write may be in flight. Raises
        StorageError, with nothing changed, where there is no room for those that take their place."""
        files.remove_files(self._unused)
        self._unused.clear()
        self._num_moves += 1
        found = [shard for shard in self.shards() if shard.aside is None and Path(shard.path) in shared]
        moves = {shard: Path(f"{shard.path}.{self._num_moves}") for shard in found}
        idle = {Path(shard.path) for shard in found if shard.is_idle}
        files.set_aside({Path(shard.path): aside for shard, aside in moves.items()}, vacated=idle)
        for shard, aside in moves.items():
            self._checksums.move(shard.path, aside)
            self._versions[self._unit_of[id(shard.param)]] += 1  # a read ahead may open the new file by the old name
            shard.set_aside(aside)

    def _leave(self, shard: Shard) -> None:
        """The current values of a shard are, or will be, in the file of its generation."""
        aside = shard.aside
        shard.leave()
        if aside is not None:
            self._unused.append(Path(aside))
            self._checksums.forget(aside)

    def check_open(self) -> None:
        """Raise RuntimeError after `close`: stock's buffers are gone then as well."""
        if self._closed:
            raise RuntimeError("the engine was destroyed; build a new one with ds_vertical.initialize")

    def _check_absent(self, unit: Unit) -> None:
        self.check_open()
        if unit in self._resident:
            raise RuntimeError(f"unit {unit} is fetched already")

    def _in_memory(self, unit: Unit) -> HostBuffer | None:
        """The buffer with the unit's values of now: from its step, or read ahead. Whoever asks has it."""
        copy = self._ahead.get(unit)
        if copy is not None and (unit in self._updates or copy.version != self._versions[unit]):
            self._drop_ahead(unit)
        entry = self._updates.pop(unit, None) or self._ahead.pop(unit, None)
        return None if entry is None else entry.buffer

    def _drop_ahead(self, unit: Unit) -> None:
        buffer = self._ahead[unit].buffer
        buffer.complete_reads()
        del self._ahead[unit]  # not before: an interrupted wait must not forget a read in flight
        self._pool(unit).put_back(buffer)

    def _read(self, unit: Unit, shards: Sequence[Shard], buffer: HostBuffer) -> None:
        if shards:
            self._wait_writes(unit)
        for shard in shards:
            buffer.issue_read(shard.path, shard.start, shard.num_bytes)

    def _arrive(self, unit: Unit, shards: Sequence[Shard]) -> None:
        resident = self._resident[unit]
        if resident.buffer is not None:
            resident.buffer.wait_reads()
            resident.buffer.check_reads()
            for shard in shards:
                zero_params.bind_shard(shard.param, shard.view(resident.buffer.data))
        self._backlog.wait()
        resident.gathered = [param for param in self._units[unit] if zero_params.is_partitioned(param)]
        wait_copies = self._lane.run(lambda: zero_params.gather(resident.gathered))
        self.num_gathers += 1  # not before: an error ahead of the collective leaves the other ranks alone in it
        if resident.buffer is not None:
            resident.buffer.wait_copies = wait_copies

    def gather_for_others(self, unit: Unit) -> None:
        """Take part in the gather of a unit with values that nobody will use: this rank's part of the pass has failed."""
        for shard in self._shards[unit]:
            if zero_params.needs_read(shard.param):
                zero_params.bind_shard(shard.param, torch.zeros(shard.numel, dtype=shard.param.dtype))
        gathered = [param for param in self._units[unit] if zero_params.is_partitioned(param)]
        self._lane.run(lambda: zero_params.gather(gathered))
        zero_params.partition(param for param in gathered if not zero_params.is_persistent(param))

    def release(self, unit: Unit) -> None:
        """Give up the full parameters of a unit; its shards on SSD are unchanged."""
        resident = self._resident[unit]
        zero_params.partition(param for param in resident.gathered if not zero_params.is_persistent(param))
        if resident.buffer is not None:
            self._pool(unit).put_back(resident.buffer)
        self._backlog.mark()
        del self._resident[unit]  # not before: an interrupt must not forget what is full

    # ---- new values from the optimizer

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
        changed = [shard for shard in self._shards[unit] if shard.param in ranges]
        if changed:
            update = Update(self._take(unit), [ShardPiece.of(shard, ranges[shard.param]) for shard in changed], early)
            targets |= {id(shard.param): shard.view(update.buffer.data) for shard in changed}
            self._unwritten[unit] = update
            self._versions[unit] += not early
            if early:
                self._drained.setdefault(unit, []).append(update)
            else:
                self._updates[unit] = update
                self._leave_all(update)
                self._read_beside(unit, update)
        return targets

    def _leave_all(self, update: Update) -> None:
        for piece in update.pieces:
            if piece.shard.aside is not None:
                if not piece.is_whole:
                    raise RuntimeError(f"bytes {piece.start} to {piece.end} of {piece.shard.path}, which is not to be written")
                self._leave(piece.shard)

    def _read_beside(self, unit: Unit, update: Update) -> None:
        """Read the bytes of the unit that an update leaves as they are."""
        self._wait_writes(unit)
        filled = {id(piece.shard): piece for piece in update.pieces}
        for shard in self._shards[unit]:
            piece = filled.get(id(shard))
            for start, end in [(0, shard.num_bytes)] if piece is None else [(0, piece.start), (piece.end, shard.num_bytes)]:
                if start < end:
                    update.buffer.issue_read(shard.path, shard.start + start, end - start, start)

    def finish_update(self, unit: Unit) -> None:
        """Start writing the new values to their files. May be called on another thread than the rest."""
        update = self._unwritten.pop(unit, None)
        if update is None:
            return
        self._writes.setdefault(unit, []).extend(update.write(self._writer, self._checksums))
        update.finished = True

    def commit(self) -> None:
        """Make the values of early updates the parameters' own. All of them must be finished."""
        for update in (update for updates in self._drained.values() for update in updates):
            for piece in update.pieces:
                shard = piece.shard
                shard.generation = shard.other
                self._versions[self._unit_of[id(shard.param)]] += 1
                self._leave(shard)
        for param, copy, (first, count) in self._copies:
            zero_params.shard(param).narrow(0, first, count).copy_(copy.narrow(0, first, count))
        self._close_early()

    def discard(self) -> None:
        """Forget the values of early updates, and what came of their writes."""
        for unit, updates in self._drained.items():
            for update in updates:
                update.give_up(self._writer)
                self._writes[unit] = [write for write in self._writes.get(unit, ()) if write not in update.writes]
        self._close_early()

    def _close_early(self) -> None:
        self._copies.clear()
        for unit, updates in self._drained.items():
            for update in updates:
                if not update.returned:
                    self._pool(unit).put_back(update.buffer)
        self._drained.clear()

    def complete_update(self, unit: Unit) -> None:
        """Wait for all transfers of a unit's finished updates."""
        self._wait_writes(unit)
        if update := self._updates.get(unit):
            update.buffer.wait_reads()

    def close_updates(self) -> None:
        """Wait until new values are in their files and put the buffers of those that nobody fetched back."""
        for unit in list(self._writes):
            self._wait_writes(unit)
        for unit in list(self._updates):
            self._put_away(unit)

    def _take(self, unit: Unit) -> HostBuffer:
        """A free buffer; where there is none, that of the oldest finished update which nobody fetched yet, or of what was
        read ahead last."""
        pool = self._pool(unit)
        if not pool.num_free:
            drained = [update for u, updates in self._drained.items() if self._pool(u) is pool for update in updates]
            for update in [update for update in drained if update.finished and not update.returned][:1]:
                update.returned = True
                pool.put_back(update.buffer)
        if not pool.num_free:
            unused: list[Unit] = [u for u, update in self._updates.items() if update.finished and self._pool(u) is pool]
            for other in unused[:1]:
                self._put_away(other)
        if not pool.num_free:
            ahead: list[Unit] = [u for u in self._ahead if self._pool(u) is pool]
            for other in ahead[-1:]:
                self._drop_ahead(other)
        return pool.take()

    def _put_away(self, unit: Unit) -> None:
        self._wait_writes(unit)
        update = self._updates.pop(unit)
        update.buffer.wait_reads()
        self._pool(unit).put_back(update.buffer)

    def _wait_writes(self, unit: Unit) -> None:
        for write in self._writes.get(unit, ()):
            write.wait()
        self._writes.pop(unit, None)  # not before: an interrupted wait must not forget a write in flight

    # ---- the end

    def release_all(self) -> None:
        """Release whatever is fetched or on its way, after an error or an interrupt, which may have cut anything: nothing is in
        flight when the queues say so, and free buffers are those without new values. No step may be under way."""
        for queue in (self.reads, self._writer):
            if queue is not None:
                queue.settle()
        for write in [write for writes in list(self._writes.values()) for write in writes]:
            complete(write)  # a failure is `error`
        for resident in self._resident.values():
            zero_params.leave_shards(resident.partitioned)
        self._resident.clear()
        self._ahead.clear()
        self._backlog.clear()
        updates = [*self._updates.values(), *(update for updates in self._drained.values() for update in updates)]
        taken = {id(update.buffer) for update in updates if not update.returned}
        for buffer in self._buffers:
            if id(buffer) not in taken:
                buffer.complete_reads()
        for pool in (self._layer_buffers, self._pre_buffers):
            pool.reset(taken)

    def close(self) -> None:
        """Release everything and give the host buffers back. The store cannot be used afterwards."""
        self.release_all()
        self._layer_buffers, self._pre_buffers = BufferPool([]), BufferPool([])
        self._closed = True
        if self.reads is not None:
            self.reads.close()
        self._writer.close()  # completes what it is writing from the buffers
        while self._buffers:
            pinned_memory.unlock_host_bytes(self._buffers.pop().data)

    def _pool(self, unit: Unit) -> BufferPool:
        return self._pre_buffers if unit == "pre" else self._layer_buffers
