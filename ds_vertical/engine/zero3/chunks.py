"""ZeRO-3 whose sub-groups are chunks: parameters of one unit (a layer, or what lies outside the layers).

`ChunkedStage3` makes DeepSpeed's sub-groups along units; `make_chunks` describes each for the optimizer step.

Overridden private methods of DeepSpeed are marked `override` and listed in `compat.deepspeed_members`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from ds_vertical.compat import accelerator, zero_optimizer, zero_params
from ds_vertical.compat.zero_optimizer import DeepSpeedCPUAdam
from ds_vertical.distributed import ranks
from ds_vertical.distributed.unit_levels import LevelReductions
from ds_vertical.engine.zero3.state import StateRoutes
from ds_vertical.errors import ConfigError
from ds_vertical.io.ticket import Ticket
from ds_vertical.model.layers import LayerMap
from ds_vertical.offload.chunking import ChunkPiece, adam_cuts, chunk_layout, spread_params
from ds_vertical.offload.consistency import StateGuard
from ds_vertical.offload.speculation import StepTiming
from ds_vertical.offload.state_files import Chunk
from ds_vertical.planner.memory_budget import PART_ELEMENTS
from ds_vertical.schedule.events import Unit
from ds_vertical.types import REDUCED_TOGETHER, RunSettings

REDUCTIONS: Final = "reductions"  # the process group in which gradients are reduced


def check_optimizer(optimizer: object) -> None:
    """Raise ConfigError unless `optimizer` is DeepSpeed's CPU Adam, whose rounding the chunks reproduce."""
    if type(optimizer) is not DeepSpeedCPUAdam:
        raise ConfigError(
            f"optimizer: got {type(optimizer).__name__}; vertical_schedule needs DeepSpeed's CPU Adam: write"
            ' "optimizer": {"type": "AdamW", ...} with zero_optimization.offload_optimizer set, and pass no other optimizer'
        )


def refuse_compression(settings: RunSettings) -> None:
    """Raise ConfigError, on all ranks alike, where the section asks for compressed masters with several ranks or beside a
    device, where nobody has tried them. Collective where it asks for any."""
    if not settings.enabled or not settings.optimizer_compression:
        return
    ranks.start_distributed()
    where = [] if accelerator.device_name() == "cpu" else [f"on {accelerator.device_name()}"]
    where += [f"with {ranks.world_size()} ranks"] * (ranks.world_size() > 1)
    if where:
        raise ConfigError(
            f"vertical_schedule.optimizer_compression: got true {' '.join(where)}; it works with one rank on the CPU so far;"
            " write false"
        )


class ChunkedStage3(StateRoutes):
    """Stage 3 over the units of `layers`. `stock_groups`: the sub-groups that stock would have made, whose numerics are kept.
    `host_share`: of the state that is to be on SSD, the share that rests in host memory. `compresses`: whether masters are.

    `timing`: when parts of a step are taken; `condition`: what tore the state, and the last good checkpoint. The subclass sets
    both, and `live`.
    """

    condition: StateGuard
    timing: StepTiming
    level_reductions: LevelReductions | None = None  # with collectives over two levels
    compresses: bool = False

    def __init__(self, *args: Any, layers: LayerMap, host_share: float, **kwargs: Any) -> None:
        self.layer_map = layers
        self._host_share = host_share
        self._in_host: frozenset[int] | None = None  # by id the parameters of that share, once there are groups
        self._unit_of = layers.unit_of()
        self.stock_groups: list[list[zero_params.ZeroParam]] = []
        self._persistent: set[int] = set()
        self._num_grouped = 0  # elements of the groups that have been cut into chunks
        super().__init__(*args, **kwargs)
        zero_optimizer.place_as_stock(self)
        self._stepped = {id(param) for chunk in self.fp16_groups for param in chunk}

    def _create_fp16_sub_groups(self, params_group: list[nn.Parameter]) -> list[list[nn.Parameter]]:  # override
        """Chunks: parameters of one unit, split by sub_group_size, those that stay on the device apart from the others.
        Stock's own sub-groups are remembered for the numerics."""
        self.stock_groups += super()._create_fp16_sub_groups(params_group)
        self._persistent |= {id(param) for param in params_group if zero_params.is_persistent(param)}
        if self._in_host is None:
            every = (param for group in self.trainable_param_groups for param in group["params"])
            movable = {id(param) for param in every if not zero_params.is_persistent(param)}
            share = self._host_share if self.swap_optimizer else 0.0
            self._in_host = params_in_host(self.layer_map, movable, zero_params.shard_numel, share)
        in_host = self._in_host

        def stays(param: nn.Parameter) -> bool:
            return id(param) in self._persistent

        def rests(param: nn.Parameter) -> bool:
            return id(param) in in_host

        first: frozenset[int] = frozenset()
        if self.params_in_nvme_and_cpu:
            room = max(1, self.max_params_in_cpu - self._num_grouped)  # stock's least buffer
            first = leading(self.layer_map, params_group, zero_params.shard_numel, zero_params.is_on_ssd, room)
        self._num_grouped += sum(map(zero_params.shard_numel, params_group))
        chunks: list[list[nn.Parameter]] = []
        for _, members in members_in_order(self.layer_map, params_group, first, self.params_in_nvme_and_cpu):
            layout = chunk_layout(members, zero_params.shard_numel, stays, self.sub_group_size, rests)
            chunks += [params for params, _ in layout]
        return chunks

    def _swappable_optimizer_subgroup(self, sub_group_id: int) -> bool:  # override
        """As stock, but for chunks of the share that rests in host memory."""
        rests = id(self.fp16_groups[sub_group_id][0]) in (self._in_host or ())
        return not rests and super()._swappable_optimizer_subgroup(sub_group_id)

    def steps(self, param: nn.Parameter) -> bool:
        """Whether the parameter belongs to the optimizer."""
        return id(param) in self._stepped

    def chunks_of(self, unit: Unit) -> list[int]:
        """Sub-group numbers of a unit's chunks, ascending."""
        return [index for index, chunk in enumerate(self.fp16_groups) if self._unit_of[id(chunk[0])] == unit]

    def is_persistent_chunk(self, index: int) -> bool:
        """Whether a chunk's parameters stay on the device, where they must have their new values once a step is over."""
        return id(self.fp16_groups[index][0]) in self._persistent

    def scheduled_chunks_of(self, unit: Unit) -> list[int]:
        """A unit's chunks without persistent ones: those that the schedule steps, early or in the next forward."""
        return [index for index in self.chunks_of(unit) if not self.is_persistent_chunk(index)]

    def step_persistent(self, step: Callable[[Unit, list[int]], Ticket | None]) -> None:
        """Step what stays on the device, and wait for it. `step` issues a unit's chunks."""
        tickets: list[Ticket | None] = []
        for unit in self.layer_map.units:
            if indices := list(filter(self.is_persistent_chunk, self.chunks_of(unit))):
                tickets.append(step(unit, indices))
        for ticket in tickets:
            if ticket is not None:
                ticket.wait()

    def gather_persistent(self, settled: bool = False) -> None:
        """Bring what stays on the device back there, with its new values: users read it without DeepSpeed, on one rank alone,
        too. Collective where it is not there. `settled`: nothing is due, of those either that count as persistent and lay on
        SSD when chunks were made."""
        with self.live.inside():
            zero_optimizer.gather_persistent(self, lambda param: settled or not self._waits(param))

    def _waits(self, param: zero_params.ZeroParam) -> bool:
        return zero_params.is_on_ssd(param) or (self.steps(param) and id(param) not in self._persistent)

    def in_chunk_order(self, unit: Unit) -> list[nn.Parameter]:
        """The unit's parameters that the optimizer has, chunk by chunk: so a chunk's gradient sums are neighbours."""
        return [param for index in self.chunks_of(unit) for param in self.fp16_groups[index]]

    def reductions(self, unit: Unit) -> list[list[nn.Parameter]]:
        """The unit's parameters that the optimizer has, as they are reduced: large ones one by one, small ones together, since
        each collective takes its time and several tensors are copied for it."""
        together: list[list[nn.Parameter]] = []
        room = 0
        for param in self.in_chunk_order(unit):
            numel = zero_params.full_numel(param)
            if numel > room:
                together.append([])
                room = REDUCED_TOGETHER
            together[-1].append(param)
            room -= numel
        return together

    def start_reduction(self, unit: Unit, sums: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Start to average summed gradients of a unit over the ranks; see `zero_optimizer.start_reduction`."""
        if self.level_reductions is not None:
            return self.level_reductions.start(unit, sums)
        return zero_optimizer.start_reduction(sums, ranks.own_group(REDUCTIONS))

    @property
    def shares_memory(self) -> bool:
        """Whether the ranks of a host share memory for the gradients that they add."""
        return self.level_reductions is not None and self.level_reductions.memory is not None

    def reduce_for_others(self, unit: Unit, number: int) -> None:
        """Take part in one of the `reductions` of a unit with zeros: this rank's part of the step has failed."""
        params, dtype, device = self.reductions(unit)[number], self.gradient_accumulation_dtype, accelerator.device_name()
        zeros = [torch.zeros(zero_params.full_numel(param), dtype=dtype, device=device) for param in params]
        self.start_reduction(unit, zeros)()


def params_in_host(
    layers: LayerMap, movable: Collection[int], numel: Callable[[nn.Parameter], int], share: float | Fraction
) -> frozenset[int]:
    """By id the parameters whose state rests in host memory where `share` of it does: first those outside the layers, which are
    reduced last and stepped first. `movable`: by id those whose state would be on SSD; `numel`: elements on this rank. Likewise
    for parameters themselves; the host buffers of those outside the layers would be there for all of a step."""
    units = {unit: [param for param in params if id(param) in movable] for unit, params in layers.units.items()}
    outside = [param for unit, params in units.items() if not isinstance(unit, int) for param in params]
    inside = [params for unit, params in units.items() if isinstance(unit, int)]
    return frozenset(map(id, spread_params(outside, inside, numel, share)))


def leading(
    layers: LayerMap,
    group: Sequence[nn.Parameter],
    numel: Callable[[nn.Parameter], int],
    has_file: Callable[[nn.Parameter], bool],
    room: int,
) -> frozenset[int]:
    """By id the parameters of one of the optimizer's groups whose chunks come first, since DeepSpeed keeps the first `room`
    elements of the group in host memory though parameters are to be on SSD: some of every layer, so that the transfers of all
    shrink alike. None where there is room for the whole group. `has_file`: otherwise, as small parameters have not; `numel`:
    elements on this rank."""
    movable = {id(param): numel(param) for param in group if has_file(param)}
    if not movable or sum(map(numel, group)) <= room:
        return frozenset()
    return params_in_host(layers, movable, numel, min(1.0, Fraction(room, sum(movable.values()))))


def members_in_order(
    layers: LayerMap, group: Sequence[nn.Parameter], first: Collection[int], params_in_files: bool
) -> Iterator[tuple[Unit, list[nn.Parameter]]]:
    """A group's parameters by unit, in the order in which their chunks come; those of `first`, by id, ahead of all others."""
    unit_of = layers.unit_of()
    for ahead in (True, False):
        by_unit: dict[Unit, list[nn.Parameter]] = {}
        for param in group:
            if (id(param) in first) == ahead:
                by_unit.setdefault(unit_of[id(param)], []).append(param)
        for unit in layers.in_chunk_order(params_in_files):
            if unit in by_unit:
                yield unit, by_unit[unit]


def make_chunks(optimizer: ChunkedStage3, early_share: float, generations: int) -> list[Chunk]:
    """The chunks of a ZeRO-3 optimizer, in its order, cut so that the rounding is that of stock's own sub-groups.

    `early_share`: of every chunk on SSD that the schedule steps, the share that may be stepped early; `generations`: of its
    files."""
    place: dict[int, tuple[int, int]] = {}
    for group in optimizer.stock_groups:
        total, offset = sum(param.partition_numel() for param in group), 0
        for param in group:
            place[id(param)] = (offset, total)
            offset += param.partition_numel()
    groups = enumerate(optimizer.fp16_groups)
    return [_chunk(optimizer, index, params, place, early_share, generations) for index, params in groups]


def _chunk(
    optimizer: ChunkedStage3,
    index: int,
    params: Sequence[zero_params.ZeroParam],
    place: dict[int, tuple[int, int]],
    early_share: float,
    generations: int,
) -> Chunk:
    sizes = [param.partition_numel() for param in params]
    cuts = adam_cuts([ChunkPiece(size, *place[id(param)]) for param, size in zip(params, sizes, strict=True)])
    on_ssd = zero_optimizer.is_chunk_on_ssd(optimizer, index)
    waits = not on_ssd or optimizer.is_persistent_chunk(index)
    early, delayed = Chunk.shares(index, sizes, 0.0 if waits else early_share, PART_ELEMENTS)
    return Chunk(
        params,
        sizes,
        cuts,
        early,
        delayed,
        zero_optimizer.file_numel(optimizer, index) if on_ssd else sum(sizes),
        zero_optimizer.state_files(optimizer, index)[:generations] if on_ssd else None,
        None if on_ssd else partial(zero_optimizer.resident_state, optimizer, index),
        zero_optimizer.low_files(optimizer, index)[:generations] if on_ssd and optimizer.compresses else None,
    )
