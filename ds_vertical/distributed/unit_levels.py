"""Units over two levels: their parameters, of which each node keeps a copy, and the reduction of their gradients.

A unit is sent as DeepSpeed has cut its parameters: a rank's chunk of the unit is the rank's shards, one behind the other.
Parameters of different dtypes go apart. See `schedule.levels`, [Note: levels], for what is sent when, and `device_parts`,
[Note: levels beside a device], for what is different there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ds_vertical.compat import accelerator, zero_params
from ds_vertical.compat.ops import load
from ds_vertical.compat.zero_params import ZeroParam
from ds_vertical.distributed import ranks
from ds_vertical.distributed.device_parts import DeviceParts, RestingPart
from ds_vertical.distributed.host_memory import SharedMemory, padded, shared_by
from ds_vertical.distributed.levels import Issued, LevelCollectives, clear_padding, cut_into_chunks, joined_chunks
from ds_vertical.distributed.quantize import Quantizer
from ds_vertical.distributed.topology import PAIR_KEY, Level, Topology, ranks_of_hosts, topology_of
from ds_vertical.errors import ConfigError
from ds_vertical.io.checksums import checksum
from ds_vertical.io.runs.this_host import host_id
from ds_vertical.io.streams import works_beside_host
from ds_vertical.schedule.levels import Arrival
from ds_vertical.schedule.trace import Tracer
from ds_vertical.types import LevelSettings, RunSettings, Unit

_WEIGHT_BITS = 8

_opened: dict[Topology, tuple[object, LevelCollectives]] = {}  # with the process group's store


def topology_for(settings: LevelSettings) -> Topology:
    """The ranks' topology. Collective. Raises ConfigError, on all ranks alike, where they do not make such nodes."""
    return topology_on(ranks.all_gathered(host_id()), settings)


def topology_on(hosts: Sequence[str], settings: LevelSettings) -> Topology:
    """The topology of ranks on `hosts` (`host_id()` of each). Raises ConfigError where they do not make such nodes."""
    size = settings.ranks_per_node
    if len(hosts) % size:
        raise ConfigError(
            f"{PAIR_KEY}: got {size}, which does not divide the number of ranks, {len(hosts)}; write the number of ranks on a"
            " node, the same on all nodes"
        )
    by_host = ranks_of_hosts(hosts, size)
    per_host = len(hosts) // len(by_host)
    if size > per_host:
        told = ", ".join(f"rank {rank} on {hosts[rank].split()[0]}" for rank in range(size))
        raise ConfigError(
            f"{PAIR_KEY}: got {size}, by which a node is not on one host: {told}; give each host as many ranks as the others,"
            f" {size} or a multiple of it, one host after the other in the hostfile, or write 1"
        )
    found = topology_of(hosts, pair=size, node=settings.gradients)
    return replace(found, node=settings.sum_ranks(len(by_host), per_host))


def refuse_levels(settings: RunSettings) -> None:
    """Raise ConfigError, on all ranks alike, where the section asks for levels that the ranks do not have. Collective where it
    asks for any."""
    if not (settings.enabled and settings.levels.are_on):
        return
    ranks.start_distributed()
    topology_for(settings.levels)


def _open(settings: LevelSettings) -> tuple[Topology, LevelCollectives]:
    """The ranks' topology, and their collectives, which the engines of one process share. Collective."""
    topology = topology_for(settings)
    store = torch.distributed.distributed_c10d._get_default_store()
    if topology not in _opened or _opened[topology][0] is not store:
        _opened[topology] = store, LevelCollectives(topology)
    return topology, _opened[topology][1]


# ---- parameters

ShardOf = Callable[[ZeroParam], torch.Tensor]


@dataclass(eq=False)
class _Copy:
    """This rank's part of its node's copy of a unit: per dtype the parameters, and what brings the part. `version`: of the
    unit's files when they were read. `sent`: per dtype this rank's own chunk, until the part is there. Beside a device
    `resting` has the parts that are kept in host memory, in place of `parts`, and `checksums` those of shards in memory."""

    groups: list[list[ZeroParam]]
    parts: list[Issued[torch.Tensor]]
    version: int
    sent: list[torch.Tensor | None]
    resting: list[RestingPart] = field(default_factory=list)
    checksums: list[int] | None = None

    def forget_sent(self) -> None:
        """What has arrived says itself what was sent."""
        self.sent = [None if part.is_over else sent for part, sent in zip(self.parts, self.sent, strict=True)]

    def given(self, rest: DeviceParts | None) -> Sequence[torch.Tensor | Issued[torch.Tensor]]:
        """What is gathered of the copy; what waits in host memory begins to come back."""
        return self.parts if rest is None or not self.resting else [rest.back(part) for part in self.resting]

    def leave(self, rest: DeviceParts | None) -> None:
        """Let the parts wait in host memory; without `rest` they wait where they are."""
        if rest is not None:
            self.resting += [rest.put(part.wait()) for part in self.parts]
            self.parts = []

    def give_up(self, rest: DeviceParts | None) -> None:
        """Nobody asks for the copy any more."""
        while rest is not None and self.resting:
            rest.give_up(self.resting.pop())


class UnitLevels:
    """Gathers units, and keeps this rank's parts of the node's copies. `topology`: of the ranks. `tracer`: takes all hops,
    those of reductions, too. `shard_of`: this rank's shard of a parameter, of the values that the copies have. `sends`:
    whether a copy that is made again has a parameter; one that is full stays on the device. `beside`: what brings shards to a
    device beside the host; None: there is none. `memory`: which a host's ranks share, where copies lie; None: each rank has its
    part in memory of its own."""

    memory: SharedMemory | None = None

    def __init__(self, settings: LevelSettings, tracer: Tracer, shard_of: ShardOf = zero_params.shard) -> None:
        self.topology, self._collectives = _open(settings)
        self._collectives.trace(tracer)
        device = torch.device(accelerator.device_name())
        self.beside = DeviceParts(device) if works_beside_host(device) else None
        self._rest = None if settings.copy_on_device else self.beside  # where parts wait for the next fetch
        if self.beside is None and (settings.quantized_weights or settings.quantized_gradients):
            load.block_quantizer()  # compiled here, and not on a hop's thread in mid-step
        self._settings = settings
        self._shard_of = shard_of
        self.sends: Callable[[ZeroParam], bool] = zero_params.is_partitioned
        self._copies: dict[Unit, _Copy] = {}

    def share_memory(self, units: Mapping[Unit, Sequence[ZeroParam]], outside: Sequence[Unit], num_values: int = 1) -> None:
        """Have copies in memory that the ranks of a host share, if they can: room for as many of the `units` as are kept at a
        time, in each of their values. `outside`: those beside the layers whose copies are kept. Collective."""
        if self.beside is not None or self.topology.pair == 1:
            return
        num_bytes = room_of_copies(units, outside, self._settings.share or 0.0, self.topology)
        if num_bytes:
            self.memory = shared_by(self.topology.hops(Level.PAIR), num_values * num_bytes, "copies")

    def close(self) -> None:
        """Give the memory of the copies back. Twice is harmless."""
        self.drop_all()
        if self.memory is not None:
            self.memory.close()
        if self.beside is not None:
            self.beside.close()

    @property
    def num_bytes(self) -> int:
        """Bytes in the copies: of host memory, or of the device's where they stand there."""
        return sum(_part_bytes(group, self.topology) for copy in self._copies.values() for group in copy.groups)

    def check_copy(self, unit: Unit, version: int) -> None:
        """Raise RuntimeError where there is no copy of the unit's present values. All ranks do, or none."""
        if (copy := self._copies.get(unit)) is not None and copy.version != version:
            raise RuntimeError(
                f"unit {unit}: its parameters were written between its forward and its backward, for which each node has kept a"
                ' copy of them; write them between two steps, or set "vertical_schedule.levels.copy_share": 0'
            )

    def start(
        self, unit: Unit, params: Sequence[ZeroParam], arrival: Arrival, version: int
    ) -> tuple[list[ZeroParam], Callable[[], None]]:
        """Start to assemble full parameters, out of the shards in memory or out of the node's copy. Returns those that will be
        full, and what waits for that. `version`: of the unit's files."""
        if arrival.spreads:
            if arrival.keeps and self._rest is not None:  # which may fail, and then ahead of the hops
                self._rest.make_room([_part_bytes(group, self.topology) for group in _by_dtype(params)])
            memory = self.memory if arrival.keeps else None
            copy, what = self._spread(unit, params, self._shard_of, version, memory), f"{unit}SPREAD"
            copy.sent = [None] * len(copy.sent)
        else:
            copy, what = self._copies[unit], f"{unit}FETCH"
        in_memory = self.memory if arrival.from_copy or arrival.keeps else None
        pairs = zip(copy.groups, copy.given(self._rest), strict=True)
        gather, joins = functools.partial(self._collectives.gather, what=what, memory=in_memory), self.beside is None
        under_way = [(group, gather(part, join=functools.partial(_joined, group) if joins else list)) for group, part in pairs]
        if arrival.keeps:
            self._copies[unit] = copy
            copy.leave(self._rest)
        else:
            self._copies.pop(unit, None)
            copy.give_up(self._rest)
        wanted = {id(param) for param in params}
        gathered = [param for group in copy.groups for param in group if id(param) in wanted]
        zero_params.expect(gathered)
        del copy  # `wait` holds none of its memory

        def wait() -> None:
            """Called again it does nothing."""
            try:
                while under_way:
                    group, issued = under_way.pop(0)
                    whole = issued.wait() if joins else _joined(group, issued.wait())
                    zero_params.fill((param, flat) for param, flat in zip(group, whole, strict=True) if id(param) in wanted)
            except BaseException:
                zero_params.expect_no_more(gathered)
                raise

        return gathered, wait

    def join(self, params: Sequence[ZeroParam], arrival: Arrival) -> None:
        """Take part in what `start` does on the other ranks, with zeros: this rank's part of the pass has failed. In its order:
        all spreads first."""
        groups = _by_dtype(params)
        parts: Sequence[torch.Tensor | Issued[torch.Tensor]]
        if arrival.spreads:
            parts = self.join_renewal(params)
        else:
            parts = [zeros.expand(self.topology.world // self.topology.pair, -1).contiguous() for zeros in map(_zeros, groups)]
        memory = self.memory if arrival.from_copy or arrival.keeps else None
        for gather in [self._collectives.gather(part, memory=memory) for part in parts]:
            gather.wait()

    # ---- copies that stand from one step to the next

    def renew(self, unit: Unit, params: Sequence[ZeroParam], shard_of: ShardOf, version: int) -> list[Issued[torch.Tensor]]:
        """Start to make the copy of a unit that is not fetched; returns what is under way. `shard_of`: this rank's shard of a
        parameter, which is copied here."""
        for other in list(self._copies):
            self._copies[other].forget_sent()
        self._copies[unit] = copy = self._spread(unit, params, shard_of, version, self.memory)
        if self.beside is not None:
            copy.sent, copy.checksums = [None] * len(copy.sent), _checksums(copy.groups, self._shard_of)
        return copy.parts

    def join_renewal(self, params: Sequence[ZeroParam]) -> list[Issued[torch.Tensor]]:
        """Take part in what `renew` does on the other ranks, with zeros; returns what is under way."""
        groups = _by_dtype(params)
        pairs = zip(groups, list(map(_zeros, groups)), strict=True)
        return [self._collectives.spread(zeros, _quantizer(self._settings, group)) for group, zeros in pairs]

    def standing(self, versions: Mapping[Unit, int]) -> frozenset[Unit]:
        """The units whose copy is of their present values on all ranks; any other copy is forgotten. Collective. `versions`:
        of the units' files."""
        own = frozenset(
            unit for unit, copy in self._copies.items() if copy.version == versions[unit] and self._is_current(copy)
        )
        found = frozenset.intersection(*ranks.all_gathered(own))
        self._copies = {unit: copy for unit, copy in self._copies.items() if unit in found}
        return found

    def stands(self, unit: Unit) -> bool:
        """Whether this rank has its part of a copy of the unit, or it is on its way."""
        return unit in self._copies

    def _is_current(self, copy: _Copy) -> bool:
        """Whether what rests in memory is what this rank has sent. The values of files have versions."""
        if self.beside is not None:
            return copy.checksums == _checksums(copy.groups, self._shard_of)
        copy.forget_sent()
        place = self.topology.copy_order(ranks.rank()).index(ranks.rank())
        for group, part, sent in zip(copy.groups, copy.parts, copy.sent, strict=True):
            if sent is None and part.error is not None:
                return False
            row = (part.wait()[place] if sent is None else sent).split(list(map(zero_params.shard_numel, group)))
            members = [(param, then) for param, then in zip(group, row, strict=True) if not zero_params.is_on_ssd(param)]
            if members:
                params, then = [param for param, _ in members], torch.cat([then for _, then in members])
                now = self._own_chunk(params, self._shard_of)
                if not (_same_bits(now, then) or _same_bits(_rounded(now, _quantizer(self._settings, params)), then)):
                    return False
        return True

    def drop_all(self) -> None:
        """Forget the copies: the pass that has kept them was cut."""
        while self._copies:
            self._copies.popitem()[1].give_up(self._rest)

    # ---- details

    def _spread(
        self, unit: Unit, params: Sequence[ZeroParam], shard_of: ShardOf, version: int, memory: SharedMemory | None
    ) -> _Copy:
        """Start to make this rank's part of a copy, in `memory` if it can be; there the one before gives way."""
        groups, spread = _by_dtype(params), self._collectives.spread
        sent = [self._own_chunk(group, shard_of) for group in groups]  # which may fail, and then ahead of the hops
        if memory is not None:
            self._copies.pop(unit, None)
        pairs = zip(groups, sent, strict=True)
        parts = [spread(chunk, _quantizer(self._settings, group), f"{unit}SPREAD", memory=memory) for group, chunk in pairs]
        return _Copy(groups, parts, version, list(sent))

    def _own_chunk(self, group: Sequence[ZeroParam], shard_of: ShardOf) -> torch.Tensor:
        shards = [shard_of(param) for param in group]
        chunk = torch.cat(shards) if self.beside is None else self.beside.joined(shards)
        clear_padding(chunk, [zero_params.full_numel(param) for param in group], ranks.rank(), self.topology.world)
        return chunk


def _quantizer(settings: LevelSettings, group: Sequence[ZeroParam]) -> Quantizer | None:
    """What rounds chunks of the weights."""
    if not settings.quantized_weights:
        return None
    return Quantizer(_WEIGHT_BITS, settings.block, tuple(map(zero_params.shard_numel, group)))


def _rounded(chunk: torch.Tensor, quantizer: Quantizer | None) -> torch.Tensor:
    """The chunk as a spread leaves it."""
    if quantizer is None:
        return chunk
    rows = torch.empty_like(chunk).view(1, -1)
    quantizer.dequantize(quantizer.quantize(chunk.view(1, -1)), rows)
    return rows.view(-1)


def _joined(group: Sequence[ZeroParam], chunks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The flat parameters of a group."""
    return joined_chunks(chunks, [zero_params.full_numel(param) for param in group])


def _part_bytes(group: Sequence[ZeroParam], topology: Topology) -> int:
    """Of a rank's part of a copy: shards of one dtype of W/w ranks."""
    size = zero_params.shard_dtype(group[0]).itemsize
    return topology.world // topology.pair * size * sum(map(zero_params.shard_numel, group))


def room_of_copies(units: Mapping[Unit, Sequence[ZeroParam]], outside: Sequence[Unit], share: float, topology: Topology) -> int:
    """Bytes of a rank's parts of the copies that are kept at a time, by the order in which the budget counts them: layers are
    kept first, the largest ones at worst, then the units `outside`."""

    def size_of(unit: Unit) -> int:
        return sum(padded(_part_bytes(group, topology)) for group in _by_dtype(units[unit]))

    kept = sorted((size_of(unit) for unit in units if isinstance(unit, int)), reverse=True)
    kept += [size_of(unit) for unit in outside]
    return sum(kept[: round(share * len(kept))])


def _checksums(groups: Sequence[Sequence[ZeroParam]], shard_of: ShardOf) -> list[int]:
    """Of this rank's shards that rest in memory. For one in a device's memory the host waits."""
    members = (param for group in groups for param in group if not zero_params.is_on_ssd(param))
    return [checksum(shard_of(param).cpu().contiguous().view(torch.uint8).numpy()) for param in members]


def _zeros(group: Sequence[ZeroParam]) -> torch.Tensor:
    """In place of a rank's own chunk."""
    numel, device = sum(map(zero_params.shard_numel, group)), accelerator.device_name()
    return torch.zeros(numel, dtype=zero_params.shard_dtype(group[0]), device=device)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _by_dtype(params: Sequence[ZeroParam]) -> list[list[ZeroParam]]:
    found: dict[torch.dtype, list[ZeroParam]] = {}
    for param in params:
        found.setdefault(zero_params.shard_dtype(param), []).append(param)
    return list(found.values())


# ---- gradients


class LevelReductions:
    """Averages summed gradients over the ranks, first over those of a node, then over the nodes, as the `settings` say.
    `memory`: which a host's ranks share, where the terms lie that they add first; None: they send each other these."""

    def __init__(self, settings: LevelSettings, units: Iterable[Sequence[Sequence[ZeroParam]]], dtype: torch.dtype) -> None:
        """Has the terms of one unit at a time in that memory, if it can be. `units`: of each the parameters of its reductions;
        `dtype`: of the sums. Collective."""
        self._topology, self._collectives = topology, _ = _open(settings)
        self.settings = settings
        self.memory: SharedMemory | None = None
        within, _ = self._quantizers(())
        if accelerator.device_name() == "cpu" and topology.pair > 1 and within is None:
            row = topology.world * dtype.itemsize
            sizes = [sum(padded(row * sum(map(zero_params.shard_numel, params))) for params in unit) for unit in units]
            self.memory = shared_by(topology.hops(Level.PAIR), max(sizes), "gradients") if any(sizes) else None

    def close(self) -> None:
        """Give the memory back. Twice is harmless."""
        if self.memory is not None:
            self.memory.close()

    def start(self, unit: Unit, sums: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """As `zero_optimizer.start_reduction`: `sums` are copied, and the function returned waits for this rank's share of
        each, flat."""
        count, number = self._topology.world, ranks.rank()
        dtype, numels = sums[0].dtype, [total.numel() for total in sums]
        sizes = [-(-numel // count) for numel in numels]
        rows = cut_into_chunks(sums, self._topology.order, count, self._collectives.room(self.memory))
        within, across = self._quantizers(tuple(sizes))
        summed = self._collectives.reduce(rows, within, f"{unit}REDUCE", self.memory)
        issued = self._collectives.cross(summed, across, f"{unit}CROSS")
        del rows, summed

        def finish() -> list[torch.Tensor]:
            chunk = issued.wait().to(dtype)
            lengths = [max(0, min(size, numel - number * size)) for size, numel in zip(sizes, numels, strict=True)]
            return [place[:length] for place, length in zip(chunk.split(sizes), lengths, strict=True)]

        return finish

    def _quantizers(self, segments: tuple[int, ...]) -> tuple[Quantizer | None, Quantizer | None]:
        if not self.settings.quantized_gradients:
            return None, None
        within, across = self.settings.gradient_bits
        block = self.settings.block
        return (
            None if within is None else Quantizer(within, block, segments),
            None if across is None else Quantizer(across, block, segments),
        )
