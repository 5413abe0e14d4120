"""What an engine is made of besides DeepSpeed's own, from the resolved section."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from ds_vertical import compat, locked, ranks
from ds_vertical.activations import ActivationStore
from ds_vertical.config import ConfigError, Resolved
from ds_vertical.disk import DiskQueue
from ds_vertical.layers import LayerMap, Unit
from ds_vertical.moves import LOOK_AHEAD, spread
from ds_vertical.optimizer import VerticalStage3
from ds_vertical.parcels import AwayTier, HostMemory, Parcels
from ds_vertical.trace import RecordingTracer, Tracer

_TIERS: tuple[AwayTier, ...] = ("host", "ssd")


def open_tracer(folder: str | None) -> Tracer:
    if folder is None:
        return Tracer()
    try:
        return RecordingTracer(Path(folder), ranks.rank())
    except OSError as error:
        raise ConfigError(
            f'vertical_schedule.trace: got "{folder}"; cannot write there ({error}); write a writable folder, or null'
        ) from error


def in_chunk_order(layers: LayerMap, optimizer: VerticalStage3) -> dict[Unit, list[nn.Parameter]]:
    """Each unit's parameters, the optimizer's first and chunk by chunk."""
    return {
        unit: [*optimizer.in_chunk_order(unit), *(param for param in params if not optimizer.steps(param))]
        for unit, params in layers.units.items()
    }


def bytes_by_tier(layers: LayerMap) -> dict[str, int]:
    """Bytes of this rank's shards per tier, where they rest between uses."""
    tiers = {"device": 0, "host": 0, "ssd": 0}
    for param in (param for params in layers.units.values() for param in params):
        tiers[compat.shard_tier(param)] += compat.shard_bytes(param)
    return tiers


def open_activations(
    vertical: Resolved,
    layers: LayerMap,
    folder: Path | None,
    new_queue: Callable[[], DiskQueue],
    device: torch.device,
    host_limit: int,
) -> ActivationStore | None:
    """The store of what passes between layers, below the run's folder; None where nothing moves. `host_limit`: bytes of host
    memory that the budget leaves for it."""
    on_ssd = vertical.moved_shares[1] > 0
    if not on_ssd and (not vertical.moved_shares[0] or compat.is_one_memory()):
        return None
    path = folder / "activations" / f"rank{ranks.rank()}.bin" if on_ssd and folder is not None else None
    memory = HostMemory(locked.lock_host_bytes, locked.unlock_host_bytes)
    most_loads = (LOOK_AHEAD + 1) * (2 if max(map(len, layers.layers)) == 1 else 3)  # inputs, blocks' inputs, gradients
    return ActivationStore(Parcels(path, new_queue, memory, device, most_loads, host_limit))


def moved_tiers(vertical: Resolved, num_micro_batches: int) -> dict[int, AwayTier]:
    """Where the activations of each micro-batch that moves rest; none go to host memory where that is the device's."""
    numbers = enumerate(spread(num_micro_batches, vertical.moved_shares))
    chosen: list[tuple[int, AwayTier]] = [(m, _TIERS[number]) for m, number in numbers if number >= 0]
    return {m: tier for m, tier in chosen if tier == "ssd" or not compat.is_one_memory()}


def describe_activations(vertical: Resolved) -> str:
    """One phrase for the start-up line."""
    host, ssd = vertical.moved_shares
    shares = [f"{share:g} of the micro-batches on {tier}" for tier, share in (("host", host), ("ssd", ssd)) if share]
    if not shares:
        return "activations stay on the device"
    same = " (host memory is the device's: no copy)" if host and compat.is_one_memory() else ""
    return f"activations: {', '.join(shares)}{same}"
