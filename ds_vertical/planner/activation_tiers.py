"""Which micro-batch's activations rest in which tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ds_vertical.types import Placement, TensorKind, Tier


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


def in_whole_micro_batches(placement: Placement, num_micro_batches: int) -> Placement:
    """Shares of activations are of whole micro-batches: more of them leave the device, never fewer."""
    shares = placement[TensorKind.ACTIVATIONS]
    host, ssd = shares[Tier.HOST], shares[Tier.SSD]
    off = -(-round((host + ssd) * num_micro_batches * 1e6) // 10**6) / num_micro_batches
    ssd = min(off, -(-round(ssd * num_micro_batches * 1e6) // 10**6) / num_micro_batches)
    return placement.with_shares(TensorKind.ACTIVATIONS, {Tier.HOST: max(0.0, off - ssd), Tier.SSD: ssd})
