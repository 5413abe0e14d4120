"""Which micro-batch's activations rest in which tier, and where what a forward keeps does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ds_vertical.schedule.events import Cell
from ds_vertical.types import Tier


def spread(num_micro_batches: int, shares: Sequence[float]) -> tuple[int, ...]:
    """For each micro-batch the index of the share it belongs to, or -1: `shares` add up to at most 1.

    Spread evenly: of the first k micro-batches, share s has within one of k s; of all, the nearest whole number.
    """
    taken = [0] * len(shares)
    chosen: list[int] = []
    for count in range(1, num_micro_batches + 1):
        wanted = [share * count - have for share, have in zip(shares, taken, strict=True)]
        rest = (1 - sum(shares)) * count - (count - 1 - sum(taken))
        best = max(range(len(shares)), key=lambda i: wanted[i], default=-1)
        chosen.append(best if best >= 0 and wanted[best] >= rest else -1)
        if chosen[-1] >= 0:
            taken[chosen[-1]] += 1
    return tuple(chosen)


def activation_tiers(num_micro_batches: int, shares: Mapping[Tier, float]) -> tuple[Tier, ...]:
    """For each micro-batch the tier of its activations. `shares`: of the micro-batches, per tier; the device has the rest."""
    away = [tier for tier in shares if tier is not Tier.DEVICE]
    chosen = spread(num_micro_batches, [shares[tier] for tier in away])
    return tuple(Tier.DEVICE if index < 0 else away[index] for index in chosen)


def kept_tiers(num_layers: int, num_micro_batches: int, tier: Tier, one_memory: bool) -> dict[Cell, Tier]:
    """Where what forwards keep for their backwards rests, by layer and micro-batch, as far as it leaves the device.

    The last layer's is used up at once. That of the layer before is used first in the backward, before an SSD would have it
    written: in the place of SSD it rests in host memory. With `one_memory` that is the device's, and nothing moves to it.
    """
    found: dict[Cell, Tier] = {}
    for layer in range(num_layers - 1):
        rests = Tier.HOST if tier is Tier.SSD and layer >= num_layers - 2 else tier
        if rests is Tier.SSD or (rests is Tier.HOST and not one_memory):
            found |= {(layer, m): rests for m in range(num_micro_batches)}
    return found
