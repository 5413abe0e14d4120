"""What some settings take of memory besides: collectives over levels, two halves a step, compressed masters."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Final

from ds_vertical.compat import accelerator, zero_params
from ds_vertical.config.section import SECTION
from ds_vertical.distributed import ranks as distributed_ranks
from ds_vertical.engine.zero3.planned_chunks import PlannedShards
from ds_vertical.model.layers import LayerMap
from ds_vertical.offload.chunking import FP32_BYTES
from ds_vertical.offload.masters.compressed import HALF_BYTES
from ds_vertical.offload.masters.halves import BLOCK_ELEMENTS
from ds_vertical.planner import memory_budget
from ds_vertical.planner.memory_budget import BudgetItem
from ds_vertical.planner.network import sent_over_levels
from ds_vertical.schedule.events import Unit
from ds_vertical.types import PRE, LevelSettings, RunSettings, Tier

_COMPRESSION: Final = f"{SECTION}.optimizer_compression"
_LEVELS: Final = "zero_optimization.zero_hpz_partition_size"


def level_items(layers: LayerMap, resolved: RunSettings, shards: PlannedShards) -> tuple[BudgetItem, ...]:
    """With collectives over levels: this rank's parts of the copies that the node keeps, on the device where they stand there,
    what a reduction sends and receives beside its sums, and what a unit's weights take on their way beside a device. The copies
    of two halves a step are counted by `acco_items`."""
    levels = resolved.levels
    if levels.share is None:
        return ()
    numels, trained = _elements(layers), _elements(layers, shards.stepped)
    w, largest, param_bytes = levels.ranks_per_node, max(numels.values()), shards.param_bytes
    gradients = 2 * FP32_BYTES * max(trained.values())
    sent = [BudgetItem(Tier.DEVICE, "gradients sent over levels", gradients, _LEVELS)]
    if not accelerator.is_one_memory():
        weights = sent_over_levels(largest, param_bytes, w, _rounded(layers, levels), resolved.prefetch_layers)
        sent.append(BudgetItem(Tier.DEVICE, "weights sent over levels", max(0, math.ceil(weights) - gradients), _LEVELS))
    if resolved.acco is not None:
        return tuple(sent)
    copied = sorted((numel for unit, numel in numels.items() if isinstance(unit, int)), reverse=True)
    copied += [numels[unit] for unit in copied_outside(layers, resolved)]
    copies = -(-sum(copied[: round(levels.share * len(copied))]) * param_bytes // w)
    place, what = (Tier.DEVICE, "standing copies") if levels.copy_on_device else (Tier.HOST, "copies")
    return (BudgetItem(place, f"{what} of the weights", copies, "vertical_schedule.levels.copy_share"), *sent)


def copied_outside(layers: LayerMap, resolved: RunSettings) -> Sequence[Unit]:
    """Of the units outside the layers, those whose copy a node may keep."""
    if resolved.levels.copy_on_device or resolved.acco is not None:
        return layers.outside.units
    return [unit for unit in layers.outside.apart if unit == PRE]


def _elements(layers: LayerMap, of: Collection[int] | None = None) -> dict[Unit, int]:
    """Of each unit, on all ranks. `of`: ids of the parameters that count; None: all."""
    found: dict[Unit, int] = {}
    for unit, params in layers.units.items():
        found[unit] = sum(zero_params.full_numel(param) for param in params if of is None or id(param) in of)
    return found


def _rounded(layers: LayerMap, levels: LevelSettings) -> float:
    """The most numbers of one parameter that a rank rounds at a time, or reads: of a copy's part, or of all ranks' shares."""
    largest = max(zero_params.full_numel(param) for params in layers.units.values() for param in params)
    if levels.quantized_gradients and levels.gradient_bits[0] is not None:
        return largest
    return largest / levels.ranks_per_node if levels.quantized_weights or levels.quantized_gradients else 0.0


def acco_items(layers: LayerMap, resolved: RunSettings, shards: PlannedShards) -> tuple[BudgetItem, ...]:
    """What two halves a step take besides."""
    if resolved.acco is None:
        return ()
    every, stepped = (sum(_elements(layers, of).values()) for of in (None, shards.stepped))
    num_ranks, copy_ranks = distributed_ranks.world_size(), resolved.levels.ranks_per_node
    return memory_budget.halves_items(every, stepped, shards.param_bytes, FP32_BYTES, num_ranks, copy_ranks)


def compression_items(shards: PlannedShards, resolved: RunSettings) -> list[BudgetItem]:
    """Low halves of the part that is being compressed, a block's halves while they are compared, and the values of parameters
    that rest in host memory, for both generations of the files."""
    if not resolved.optimizer_compression:
        return []
    largest = min(memory_budget.PART_ELEMENTS, max((chunk.numel for chunk in shards.chunks), default=0))
    in_files = set(map(id, shards.in_files))
    pairs = [pair for c in shards.chunks if c.state_in_files for pair in zip(c.params, c.sizes, strict=True)]
    kept = 2 * sum(size for param, size in pairs if id(param) not in in_files)
    numel = largest + 6 * BLOCK_ELEMENTS + kept
    return [BudgetItem(Tier.HOST, "masters being compressed", HALF_BYTES * numel, _COMPRESSION)]
