"""Fetch and release the parameters of one unit at a time over ZeRO-3's partitions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn

from ds_vertical import compat
from ds_vertical.layers import Unit
from ds_vertical.transfer import AioHandle, BufferPool, HostBuffer, Lane, Ticket


@dataclass(frozen=True)
class Shard:
    """A shard's place in its unit's host buffer, in bytes."""

    param: nn.Parameter
    path: str
    start: int
    num_bytes: int
    numel: int

    def view(self, data: torch.Tensor) -> torch.Tensor:
        """The shard's elements inside a unit buffer, 1-d, in the parameter's dtype."""
        return data.narrow(0, self.start, self.num_bytes).view(self.param.dtype).narrow(0, 0, self.numel)


@dataclass
class Resident:
    """A unit that is fetched or on its way: the parameters this store gathered, and the buffer that backs them."""

    buffer: HostBuffer | None
    gathered: list[nn.Parameter]
    ticket: Ticket


class ParamStore:
    """Parameters per unit: SSD -> host buffer -> device (and all-gather).

    `num_buffers` layers may be fetched at a time, besides `pre`. A parameter that is gathered already (persistent
    ones, small enough to stay on the device) is left alone.
    """

    def __init__(
        self,
        units: Mapping[Unit, Sequence[nn.Parameter]],
        new_handle: Callable[[], AioHandle],
        num_buffers: int,
        device: torch.device,
    ) -> None:
        self._units = units
        self._shards = {unit: _lay_out(params) for unit, params in units.items()}
        self._resident: dict[Unit, Resident] = {}

        def new_buffers(num_bytes: int, count: int) -> list[HostBuffer]:
            handles = [new_handle() for _ in range(count)] if num_bytes else []
            buffers = [HostBuffer(compat.lock_host_bytes(h, num_bytes), h, Lane(device)) for h in handles]
            self._buffers += buffers
            return buffers

        self._closed = False
        self._buffers: list[HostBuffer] = []
        sizes = {unit: sum(shard.num_bytes for shard in shards) for unit, shards in self._shards.items()}
        largest = max((size for unit, size in sizes.items() if unit != "pre"), default=0)
        count = min(num_buffers, sum(1 for unit, size in sizes.items() if unit != "pre" and size))
        self.host_bytes = largest * count + sizes["pre"]
        self._layer_buffers = BufferPool(new_buffers(largest, count))
        self._pre_buffers = BufferPool(new_buffers(sizes["pre"], 1))

    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes of this rank's shards per tier, where they rest between uses."""
        tiers = {"device": 0, "host": 0, "ssd": 0}
        for params in self._units.values():
            for param in params:
                tiers[compat.shard_tier(param)] += compat.shard_bytes(param)
        return tiers

    @property
    def fetched(self) -> list[Unit]:
        return list(self._resident)

    def fetch(self, unit: Unit) -> Ticket:
        """Start reading a unit's shards; the ticket's wait gathers the full parameters on the device."""
        if self._closed:
            raise RuntimeError("the engine was destroyed; build a new one with ds_vertical.initialize")
        if unit in self._resident:
            raise RuntimeError(f"unit {unit} is fetched already")
        shards = [shard for shard in self._shards[unit] if compat.needs_read(shard.param)]
        buffer = self._pool(unit).take() if shards else None
        ticket = Ticket(f"fetch {unit}", lambda: self._arrive(unit, shards), sum(s.num_bytes for s in shards))
        self._resident[unit] = Resident(buffer, [], ticket)
        for shard in shards:
            assert buffer is not None
            buffer.issue_read(shard.path, shard.start, shard.num_bytes)
        return ticket

    def _arrive(self, unit: Unit, shards: Sequence[Shard]) -> None:
        resident = self._resident[unit]
        if resident.buffer is not None:
            resident.buffer.wait_reads()
            for shard in shards:
                compat.bind_shard(shard.param, shard.view(resident.buffer.data))
        resident.gathered = [param for param in self._units[unit] if compat.is_partitioned(param)]
        compat.gather(resident.gathered)
        if resident.buffer is not None:
            resident.buffer.lane.mark()

    def release(self, unit: Unit) -> None:
        """Give up the full parameters of a unit; its shards on SSD are unchanged."""
        resident = self._resident.pop(unit)
        try:
            compat.partition(resident.gathered)
        finally:
            if resident.buffer is not None:
                self._pool(unit).put_back(resident.buffer)

    def release_all(self) -> None:
        """Release whatever is fetched or on its way, after an error."""
        for unit in list(self._resident):
            resident = self._resident[unit]
            try:
                if resident.buffer is not None:
                    resident.buffer.wait_reads()
            finally:
                self.release(unit)

    def close(self) -> None:
        """Release everything and give the host buffers back. The store cannot be used afterwards."""
        self.release_all()
        self._layer_buffers, self._pre_buffers = BufferPool([]), BufferPool([])
        self._closed = True
        while self._buffers:
            buffer = self._buffers.pop()
            compat.unlock_host_bytes(buffer.handle, buffer.data)

    def _pool(self, unit: Unit) -> BufferPool:
        return self._pre_buffers if unit == "pre" else self._layer_buffers


def _lay_out(params: Sequence[nn.Parameter]) -> list[Shard]:
    """Neighbouring places for the shards that live on SSD; file sizes are multiples of the aio alignment already."""
    on_ssd = [(param, compat.swap_file(param)) for param in params if compat.is_on_ssd(param)]
    starts = accumulate((file.num_bytes for _, file in on_ssd), initial=0)
    return [Shard(p, str(f.path), start, f.num_bytes, f.numel) for (p, f), start in zip(on_ssd, starts, strict=False)]
