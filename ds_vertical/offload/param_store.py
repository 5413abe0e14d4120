"""Fetch and release the parameters of one unit at a time over ZeRO-3's partitions.

[Note: versions] What is read ahead of its fetch may meanwhile become old: DeepSpeed or a load writes a parameter's file, or the
optimizer makes new values. Each such event counts the unit's version up; a copy of an older version is dropped, and read again.
A unit that is released and comes back in the same pass leaves such a copy, too, and is not read again: its buffer is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import ProcessGroup

from ds_vertical.compat import zero_params
from ds_vertical.distributed.gather_queue import GatherQueue, UnitGather
from ds_vertical.distributed.levels import Issued
from ds_vertical.distributed.unit_levels import UnitLevels
from ds_vertical.io.aio import DiskQueue, Transfer, complete
from ds_vertical.io.buffers import BufferPool, HostBuffer, nothing_to_wait_for
from ds_vertical.io.checksums import Checksums
from ds_vertical.io.ticket import Ticket
from ds_vertical.offload import param_shards
from ds_vertical.offload.param_shards import Copy, ElementRange, Resident, Shard, ShardFiles, ShardPiece, UnitBuffers, Update
from ds_vertical.schedule.events import Unit
from ds_vertical.schedule.levels import Arrival


class ParamUpdates:
    """New values of units from the optimizer, on their way to files and to the units' next fetches.

    `latest`: by unit, the new shards that no fetch has taken over yet. `take` gives a free buffer for a unit.
    """

    def __init__(self, files: ShardFiles, buffers: UnitBuffers, writer: DiskQueue, take: Callable[[Unit], HostBuffer]) -> None:
        self.latest: dict[Unit, Update] = {}
        self._files = files
        self._buffers = buffers
        self._writer = writer
        self._take = take
        self._unwritten: dict[Unit, Update] = {}  # new shards that are not all there yet
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
            update = Update(self._take(unit), [ShardPiece.of(shard, ranges[shard.param]) for shard in changed], early)
            targets |= {id(shard.param): shard.view(update.buffer.data) for shard in changed}
            self._unwritten[unit] = update
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
        update = self._unwritten.pop(unit, None)
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


@dataclass(frozen=True)
class ParamSettings:
    """How parameters are fetched. `num_buffers`: layers that may be fetched at a time, besides what is outside them. A unit
    arrives once the device has computed all but the last `most_behind` released before it: their memory is not free yet.

    `generations`: of each file; with one, early steps are written in place. `checksums`: those of the files. `group`: of the
    ranks, for gathers alone; None: there is one rank. `overlap`: where false, a gather is issued when it is waited for.
    `levels`: gathers units over two levels; None: there is one.
    """

    device: torch.device
    num_buffers: int
    most_behind: int
    generations: int
    checksums: Checksums
    group: ProcessGroup | None = None
    overlap: bool = True
    levels: UnitLevels | None = None


class ParamStore:
    """Parameters per unit: SSD -> host buffer -> device (and all-gather).

    A failed read raises DiskError where the unit's ticket is waited for. A parameter that is gathered already (persistent ones,
    small enough to stay on the device) is left alone.

    `files`: the shards on SSD; `buffers`: what they are read into; `updates`: takes the optimizer's new values. `copies`: with
    two levels, those that stand.

    `ahead`: by unit, the shards that are read before their fetch. `host_bytes`: of the buffers. `reads`: the queue of all
    reads, None where no shard is on SSD; `writer`: of all writes. `gathers`: of the units that are fetched.
    """

    def __init__(
        self,
        units: Mapping[Unit, Sequence[nn.Parameter]],
        new_queue: Callable[[], DiskQueue],
        writer: DiskQueue,
        settings: ParamSettings,
    ) -> None:
        self.files = ShardFiles(units, settings.generations, settings.checksums)
        self._resident: dict[Unit, Resident] = {}
        self.ahead: dict[Unit, Copy] = {}
        self._landing = param_shards.Landing(settings.device, settings.group, settings.most_behind)
        self.units, self.writer = units, writer
        self.buffers = UnitBuffers(self.files, new_queue, settings.num_buffers)
        self.updates = ParamUpdates(self.files, self.buffers, writer, self._take)
        self.host_bytes, self.reads = self.buffers.num_bytes, self.buffers.reads
        self._group, self._levels = settings.group, settings.levels
        self.copies = None if settings.levels is None else StandingCopies(self, settings.levels)
        self._in_flight = settings.group is not None and settings.device.type == "cpu"
        early = settings.overlap and (self._in_flight or self._landing.is_copy)
        self.gathers = GatherQueue(in_order=settings.group is not None, early=early)
        self._closed = False

    @property
    def fetched(self) -> list[Unit]:
        """Units that are fetched or on their way."""
        return list(self._resident)

    def fetch(self, unit: Unit, step: Ticket | None = None, arrival: Arrival = Arrival()) -> Ticket:  # noqa: B008 - frozen
        """Start reading a unit's shards; once the ticket has been waited for, the full parameters are on the device. `step`:
        it makes the unit's values, and is waited for first. `arrival`: over which levels they come; from a copy nothing is
        read."""
        self._check_absent(unit)
        if arrival.from_copy and self._levels is not None:
            self._levels.check_copy(unit, self.files.versions[unit])
        shards = [] if arrival.from_copy else [s for s in self.files.by_unit[unit] if zero_params.needs_read(s.param)]
        buffer = None if arrival.from_copy else self._in_memory(unit)
        missing = shards if buffer is None else []
        if missing:
            buffer = self._take(unit)
        partitioned = [param for param in self.units[unit] if zero_params.is_partitioned(param)]
        resident = Resident(buffer, partitioned, [])
        resident.gather = gather = UnitGather(
            lambda: self._gather(unit, shards, step, arrival),
            lambda: (step is None or step.is_over) and resident.is_read and self._landing.has_room(self._resident),
        )
        self._resident[unit] = resident

        def arrive() -> None:
            self.gathers.complete(gather)
            left = [param for param in self.units[unit] if zero_params.is_partitioned(param)]
            if left:  # other code has given them up since the fetch, on all ranks
                zero_params.gather(left)
                resident.gathered += left

        ticket = Ticket(f"fetch {unit}", arrive, sum(s.num_bytes for s in missing))
        if buffer is not None:
            self._read(unit, missing, buffer)
        self.gathers.add(gather)
        return ticket

    def fetch_ahead(self, unit: Unit) -> Ticket | None:
        """Start reading a unit's shards for its next `fetch`; the parameters are left as they are. See [Note: versions].

        None where nothing is on SSD, or where its values are in memory anyway. The ticket's wait raises DiskError.
        """
        self._check_absent(unit)
        shards = self.files.by_unit[unit]
        if not shards or unit in self.updates.latest or unit in self.ahead:
            return None
        if self.copies is not None and self.copies.stands(unit):
            return None
        buffer = self._take(unit)
        self.ahead[unit] = Copy(buffer, self.files.versions[unit])
        self._read(unit, shards, buffer)

        def wait() -> None:
            if unit in self.ahead and self.ahead[unit].buffer is buffer:  # otherwise the fetch has waited, or will
                buffer.wait_reads()

        return Ticket(f"fetch {unit} ahead", wait, sum(shard.num_bytes for shard in shards))

    def check_open(self) -> None:
        """Raise RuntimeError after `close`: stock's buffers are gone then as well."""
        if self._closed:
            raise RuntimeError("the engine was destroyed; build a new one with ds_vertical.initialize")

    def _check_absent(self, unit: Unit) -> None:
        self.check_open()
        if unit in self._resident:
            raise RuntimeError(f"unit {unit} is fetched already")

    def _in_memory(self, unit: Unit) -> HostBuffer | None:
        """The buffer with the unit's values of now: from its step, or read ahead. It is the caller's from here on."""
        copy = self.ahead.get(unit)
        if copy is not None and (unit in self.updates.latest or copy.version != self.files.versions[unit]):
            self.drop_ahead(unit)
        entry = self.updates.latest.pop(unit, None) or self.ahead.pop(unit, None)
        return None if entry is None else entry.buffer

    def drop_ahead(self, unit: Unit) -> None:
        """Forget what was read of a unit ahead of its fetch."""
        buffer = self.ahead[unit].buffer
        buffer.complete_reads()
        del self.ahead[unit]  # not before: an interrupted wait must not forget a read in flight
        self.buffers.pool(unit).put_back(buffer)

    def _read(self, unit: Unit, shards: Sequence[Shard], buffer: HostBuffer) -> None:
        if shards:
            self.updates.wait_writes(unit)
        for shard in shards:
            buffer.issue_read(shard.path, shard.start, shard.num_bytes)

    def _gather(self, unit: Unit, shards: Sequence[Shard], step: Ticket | None, arrival: Arrival) -> Callable[[], None]:
        """Have the unit's shards in memory and start to gather its parameters; returns what waits for that."""
        if step is not None:
            step.wait()
        resident = self._resident[unit]
        if resident.buffer is not None:
            resident.buffer.wait_reads()
            resident.buffer.check_reads()
            for shard in shards:
                zero_params.bind_shard(shard.param, shard.view(resident.buffer.data))
        self._landing.wait_room(self._resident)
        if self._levels is not None and (arrival.spreads or arrival.from_copy):
            version = self.files.versions[unit]
            resident.gathered, wait = self._levels.start(unit, resident.partitioned, arrival, version)
            return wait
        if self._in_flight:  # what was partitioned at the fetch, on all ranks alike
            resident.gathered = list(resident.partitioned)
            return zero_params.start_gather(resident.gathered, self._group)
        resident.gathered = [param for param in self.units[unit] if zero_params.is_partitioned(param)]
        copies = self._landing.bring(resident.gathered)
        if resident.buffer is not None:
            resident.buffer.wait_copies = copies.wait
        return copies.land

    def gather_for_others(self, unit: Unit, arrival: Arrival = Arrival()) -> None:  # noqa: B008 - frozen
        """Take part in the gather of a unit with values that are used nowhere: this rank's part of the pass has failed."""
        if self._levels is not None and (arrival.spreads or arrival.from_copy):
            self._levels.join([param for param in self.units[unit] if zero_params.is_partitioned(param)], arrival)
            return
        for shard in self.files.by_unit[unit]:
            if zero_params.needs_read(shard.param):
                zero_params.bind_shard(shard.param, torch.zeros(shard.numel, dtype=shard.param.dtype))
        gathered = [param for param in self.units[unit] if zero_params.is_partitioned(param)]
        self._landing.bring(gathered).land()
        zero_params.partition(param for param in gathered if not zero_params.is_persistent(param))

    def release(self, unit: Unit, comes_back: bool = False) -> None:
        """Give up the full parameters of a unit; its shards on SSD are unchanged. `comes_back`: a unit outside the layers
        is fetched once more before its values change, and its buffer keeps them. See [Note: versions]."""
        resident = self._resident[unit]
        if resident.gather is not None:
            self.gathers.forget(resident.gather)
        zero_params.partition(param for param in resident.gathered if not zero_params.is_persistent(param))
        if resident.buffer is not None and comes_back:
            self.ahead[unit] = Copy(resident.buffer, self.files.versions[unit])
        elif resident.buffer is not None:
            self.buffers.pool(unit).put_back(resident.buffer)
        del self._resident[unit]  # not before: an interrupt must not forget what is full
        self._landing.release(self._resident)

    def _take(self, unit: Unit) -> HostBuffer:
        """A free buffer; where there is none, that of the oldest finished update which no fetch has taken, or of what was
        read ahead last."""
        pool = self.buffers.pool(unit)
        self.updates.make_room(pool)
        if not pool.num_free:
            ahead: list[Unit] = [u for u in self.ahead if self.buffers.pool(u) is pool]
            for other in ahead[-1:]:
                self.drop_ahead(other)
        return pool.take()

    # ---- the end

    def release_all(self) -> None:
        """Release whatever is fetched or on its way, after an error or an interrupt, which may have cut anything: nothing is in
        flight when the queues say so, and free buffers are those without new values. No step may be under way."""
        for queue in (self.reads, self.writer):
            if queue is not None:
                queue.settle()
        self.updates.complete_writes()
        for resident in self._resident.values():
            zero_params.leave_shards(resident.partitioned)
        self.gathers.clear()
        self._resident.clear()
        if self._levels is not None:
            self._levels.drop_all()
        self.ahead.clear()
        self._landing.clear()
        self.buffers.reset(self.updates.taken_buffers())

    def close(self) -> None:
        """Release everything and give the host buffers back. The store cannot be used afterwards."""
        self.release_all()
        self.buffers.withdraw()
        self._closed = True
        if self.reads is not None:
            self.reads.close()
        self.writer.close()  # completes what it is writing from the buffers
        self.buffers.unlock()


class StandingCopies:
    """Makes the node's copies of a store's units that are not fetched: see `schedule.levels`, [Note: standing copies].

    A rank's shards come out of the buffer of their step, or are read. Once the spread has been issued nothing needs them.
    """

    def __init__(self, store: ParamStore, levels: UnitLevels) -> None:
        self._store = store
        self._levels = levels
        self._issued: list[UnitGather] = []

    def stands(self, unit: Unit) -> bool:
        """Whether the unit's next fetch may come out of a copy."""
        return self._levels.stands(unit)

    def standing(self) -> frozenset[Unit]:
        """The units whose copy is of their present values, on all ranks alike. Collective."""
        return self._levels.standing(self._store.files.versions)

    def renew(self, unit: Unit) -> Ticket:
        """Start to make the copy of a unit. Its step must be over."""
        store, gathers = self._store, self._store.gathers
        gathers.advance()
        for gather in [gather for gather in self._issued if gather.wait is not None]:
            gathers.forget(gather)
            self._issued.remove(gather)
        if unit in store.ahead and store.ahead[unit].version != store.files.versions[unit]:
            store.drop_ahead(unit)
        if not store.buffers.pool(unit).num_free:
            gathers.issue_all()  # what was read for other copies gives way now
        if store.files.by_unit[unit]:
            store.fetch_ahead(unit)
        under_way: list[Issued[torch.Tensor]] = []

        def issue() -> Callable[[], None]:
            under_way.extend(self._issue(unit))
            return nothing_to_wait_for

        def is_read() -> bool:
            buffer = self._buffer(unit)
            return buffer is None or all(read.done for read in buffer.reads)

        gather = UnitGather(issue, is_read)
        gathers.add(gather)
        self._issued.append(gather)
        gathers.advance()

        def wait() -> None:
            gathers.complete(gather)
            for part in under_way:
                part.wait()

        return Ticket(f"spread {unit}", wait)

    def join(self, unit: Unit) -> None:
        """Take part in what `renew` does on the other ranks."""
        self._levels.join_renewal(self._partitioned(unit))

    def _partitioned(self, unit: Unit) -> list[nn.Parameter]:
        return [param for param in self._store.units[unit] if self._levels.sends(param)]

    def _buffer(self, unit: Unit) -> HostBuffer | None:
        """With the shards of the unit that are on SSD, as they are now or will be when its reads are over."""
        store = self._store
        entry = store.updates.latest.get(unit) or store.ahead.get(unit)
        return None if entry is None else entry.buffer

    def _issue(self, unit: Unit) -> list[Issued[torch.Tensor]]:
        store = self._store
        on_ssd = store.files.by_unit[unit]
        if on_ssd and self._buffer(unit) is None:  # it has given way
            store.fetch_ahead(unit)
        shards: dict[int, torch.Tensor] = {}
        if (buffer := self._buffer(unit)) is not None:
            buffer.wait_reads()
            buffer.check_reads()
            shards = {id(shard.param): shard.view(buffer.data) for shard in on_ssd}

        def shard_of(param: nn.Parameter) -> torch.Tensor:
            found = shards.get(id(param))
            return zero_params.shard(param) if found is None else found

        parts = self._levels.renew(unit, self._partitioned(unit), shard_of, store.files.versions[unit])
        self._give_back(unit)
        return parts

    def _give_back(self, unit: Unit) -> None:
        """The unit's next fetch comes out of the copy, and takes no buffer over."""
        store = self._store
        if (update := store.updates.latest.pop(unit, None)) is not None:
            store.buffers.pool(unit).put_back(update.buffer)
        elif unit in store.ahead:
            store.drop_ahead(unit)
