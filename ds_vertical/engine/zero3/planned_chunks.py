"""The optimizer's chunks before there is an optimizer: as DeepSpeed and `chunks` will lay them out, and where each will be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from ds_vertical.compat import stock_config, zero_params
from ds_vertical.distributed import ranks as distributed_ranks
from ds_vertical.engine.zero3.chunks import leading, members_in_order, params_in_host
from ds_vertical.model.layers import LayerMap
from ds_vertical.offload.chunking import FP32_BYTES, chunk_layout
from ds_vertical.schedule.events import Unit


@dataclass(frozen=True)
class PlannedChunk:
    """A sub-group of one unit's parameters: elements of each one's shard, whether its state and parameters are in files."""

    unit: Unit
    params: tuple[nn.Parameter, ...]
    sizes: tuple[int, ...]
    state_in_files: bool
    params_in_files: bool
    persistent: bool

    @property
    def numel(self) -> int:
        """Elements of this rank's shards."""
        return sum(self.sizes)


class PlannedShards:
    """Where this rank's shards of parameters and state will rest, as DeepSpeed and the optimizer will lay them out.

    `chunks`: in the optimizer's order. `param_bytes`: of one element. `host_share`: of the state that is to be on SSD, the
    share that rests in host memory.
    """

    def __init__(
        self,
        layers: LayerMap,
        groups: Sequence[Sequence[nn.Parameter]],
        json: stock_config.OffloadSettings,
        param_bytes: int,
        host_share: float,
    ) -> None:
        self.param_bytes = param_bytes
        self.num_shards = distributed_ranks.world_size()
        self._layers = layers
        self._json = json
        self._persistent = self._on_device()
        movable = {id(param) for group in groups for param in group} - self._persistent if json.state_in_files else ()
        self._in_host = params_in_host(layers, movable, self.numel, host_share)
        rooms = json.host_rooms([sum(map(self.numel, group)) for group in groups])
        self.chunks = [chunk for each in zip(groups, rooms, strict=True) for chunk in self._chunks(*each)]

    def numel(self, param: nn.Parameter) -> int:
        """Elements of this rank's shard."""
        return -(-zero_params.full_numel(param) // self.num_shards)

    def file_bytes(self, param: nn.Parameter) -> int:
        """Bytes of the shard's file."""
        return self.aligned(self.numel(param) * self.param_bytes)

    def aligned(self, num_bytes: int) -> int:
        """Bytes of a file that holds `num_bytes`: asynchronous I/O moves whole blocks."""
        alignment = self._json.alignment_bytes
        return -(-num_bytes // alignment) * alignment

    @property
    def stepped(self) -> frozenset[int]:
        """By id the parameters that the optimizer steps."""
        return frozenset(id(param) for chunk in self.chunks for param in chunk.params)

    @property
    def in_files(self) -> list[nn.Parameter]:
        """Parameters that rest on SSD."""
        moved = {id(param) for chunk in self.chunks if not chunk.params_in_files for param in chunk.params}
        everything = (param for params in self._layers.units.values() for param in params)
        return [param for param in everything if id(param) not in moved and self._goes_to_ssd(param)]

    @property
    def state_on_ssd(self) -> float:
        """Of this rank's optimizer state, the share in files."""
        in_files = sum(chunk.numel for chunk in self.chunks if chunk.state_in_files)
        return in_files / (sum(chunk.numel for chunk in self.chunks) or 1)

    @property
    def steps_on_ssd(self) -> bool:
        """Whether the state of anything that the schedule steps is in files."""
        return any(chunk.state_in_files and not chunk.persistent for chunk in self.chunks)

    @property
    def copied(self) -> int:
        """Elements of parameters that rest in memory and are stepped with state in files: an early step makes a copy."""
        in_files = set(map(id, self.in_files))
        stepped = (chunk for chunk in self.chunks if chunk.state_in_files and not chunk.persistent)
        return sum(self.numel(param) for chunk in stepped for param in chunk.params if id(param) not in in_files)

    def _goes_to_ssd(self, param: nn.Parameter) -> bool:
        return self._json.params_in_files and self.numel(param) * self.param_bytes >= self._json.least_bytes

    def _rests_in_host(self, param: nn.Parameter) -> bool:
        return id(param) in self._in_host

    def _on_device(self) -> set[int]:
        """By id the parameters that stay there. (Under a limit for the whole model stock goes through it in another order.)"""
        params = [param for params in self._layers.units.values() for param in params]
        stays = self._json.persistent(map(zero_params.full_numel, params))
        return {id(p) for p, persistent in zip(params, stays, strict=True) if persistent and not self._goes_to_ssd(p)}

    def _chunks(self, group: Sequence[nn.Parameter], host_room: int) -> Iterator[PlannedChunk]:
        """Of one of the optimizer's groups. Its first `host_room` elements stay in host memory, in whole chunks."""
        passed = 0

        def stays(param: nn.Parameter) -> bool:
            return id(param) in self._persistent

        first = leading(self._layers, group, self.numel, self._goes_to_ssd, host_room)  # none where none has a file
        for unit, members in members_in_order(self._layers, group, first, self._json.params_in_files):
            layout = chunk_layout(members, self.numel, stays, self._json.sub_group_size, self._rests_in_host)
            for params, persistent in layout:
                sizes = tuple(map(self.numel, params))
                passed += sum(sizes)
                in_files = self._json.state_in_files and not self._rests_in_host(params[0])
                in_files = in_files and sum(sizes) * FP32_BYTES >= self._json.least_bytes
                params_in_files = self._json.params_in_files and passed > host_room
                yield PlannedChunk(unit, tuple(params), sizes, in_files, params_in_files, persistent)
