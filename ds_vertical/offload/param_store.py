"""Fetch and release the parameters of one unit at a time over ZeRO-3's partitions.

[Note: versions] What is read ahead of its fetch may meanwhile become old: DeepSpeed or a load writes a parameter's file, or the
optimizer makes new values. Each such event counts the unit's version up; a copy of an older version is dropped, and read again.
A unit that is released and comes back in the same pass leaves such a copy, too, and is not read again: its buffer is its own.
So does a unit whose early step is next, where masters are compressed: the new values take the place of the old ones.
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
from ds_vertical.io.aio import DiskQueue
from ds_vertical.io.buffers import HostBuffer, nothing_to_wait_for
from ds_vertical.io.checksums import Checksums
from ds_vertical.io.ticket import Ticket
from ds_vertical.offload import param_shards
from ds_vertical.offload.param_shards import Copy, ParamUpdates, Resident, Shard, ShardFiles, UnitBuffers
from ds_vertical.schedule.events import Unit
from ds_vertical.schedule.levels import Arrival


@dataclass(frozen=True)
class ParamSettings:
    """How parameters are fetched. `num_buffers`: layers that may be fetched at a time, besides what is outside them. A unit
    arrives once the device has computed all but the last `most_behind` released before it: their memory is not free yet.

    `generations`: of each file; with one, early steps are written in place. `checksums`: those of the files. `group`: of the
    ranks, for gathers alone; None: there is one rank. `overlap`: where false, a gather is issued when it is waited for.
    `levels`: gathers units over two levels; None: there is one. `recalls`: early steps find the values of before in memory.
    """

    device: torch.device
    num_buffers: int
    most_behind: int
    generations: int
    checksums: Checksums
    group: ProcessGroup | None = None
    overlap: bool = True
    levels: UnitLevels | None = None
    recalls: bool = False


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
        self.recalls = settings.recalls
        if self.recalls:
            self.updates.recall = self._in_memory
        self.host_bytes, self.reads = self.buffers.num_bytes, self.buffers.reads
        self._group, self._levels = settings.group, settings.levels
        self.copies = None if settings.levels is None else StandingCopies(self, settings.levels, self._landing)
        if settings.levels is not None and settings.levels.beside is not None:
            settings.levels.beside.carry, self._landing.in_line = self._landing.carry, True
        self._in_flight = settings.group is not None and settings.device.type == "cpu"
        early = settings.overlap and (self._in_flight or self._landing.is_copy)
        several = settings.group is not None
        leads = settings.overlap and several and not self._in_flight and settings.levels is None
        self.gathers = GatherQueue(in_order=several, early=early, leads=leads)
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
            unit,
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
            if resident.buffer is not None:
                resident.buffer.wait_copies = self._landing.wait_last
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
        """Give up the full parameters of a unit; its shards on SSD are unchanged. `comes_back`: its values are needed once more
        before they change (by a fetch of a unit outside the layers, or by its early step), and its buffer keeps them. See
        [Note: versions]."""
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
        if self._levels is not None and self.copies is not None:
            self._levels.drop_all()
            self.copies.forget_issued()
        self.ahead.clear()
        self._landing.clear()
        self.buffers.reset(self.updates.taken_buffers())

    def close(self) -> None:
        """Release everything and give the host buffers back. The store cannot be used afterwards."""
        self.release_all()
        self.buffers.withdraw()
        self._closed = True
        if self._levels is not None:
            self._levels.close()
        if self.reads is not None:
            self.reads.close()
        self.writer.close()  # completes what it is writing from the buffers
        self.buffers.unlock()


class StandingCopies:
    """Makes the node's copies of a store's units that are not fetched: see `schedule.levels`, [Note: standing copies].

    A rank's shards come out of the buffer of their step, or are read. Once the spread has been issued nothing needs them.
    Beside a device the host waits then for the copies that take them there: other code may write them between two passes.
    """

    def __init__(self, store: ParamStore, levels: UnitLevels, landing: param_shards.Landing) -> None:
        self._store = store
        self._levels = levels
        self._landing = landing
        self._issued: list[UnitGather] = []

    @property
    def shares_memory(self) -> bool:
        """Whether the ranks of a host share memory for the copies that are kept."""
        return self._levels.memory is not None

    def stands(self, unit: Unit) -> bool:
        """Whether the unit's next fetch may come out of a copy."""
        return self._levels.stands(unit)

    def standing(self) -> frozenset[Unit]:
        """The units whose copy is of their present values, on all ranks alike. Collective."""
        return self._levels.standing(self._store.files.versions)

    def forget_issued(self) -> None:
        """Nobody waits for the copies that are being made, or asks for those that were."""
        self._issued.clear()

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

        gather = UnitGather(unit, issue, is_read)
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
        for spread in self._levels.join_renewal(self._partitioned(unit)):
            spread.wait()

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
        self._landing.wait_copies()
        self._give_back(unit)
        return parts

    def _give_back(self, unit: Unit) -> None:
        """The unit's next fetch comes out of the copy, and takes no buffer over."""
        store = self._store
        if (update := store.updates.latest.pop(unit, None)) is not None:
            store.buffers.pool(unit).put_back(update.buffer)
        elif unit in store.ahead:
            store.drop_ahead(unit)
