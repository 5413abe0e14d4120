"""Bytes per tier of a run by the shares that the linear program chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Final

from ds_vertical.planner import memory_budget
from ds_vertical.planner.model_shape import ModelShape
from ds_vertical.types import RESTING_PLACES, Placement, TensorKind, Tier, per_tier

# The shares that the program chooses; those of the state are tried in turn by `search`.
CHOSEN: Final[Mapping[str, tuple[TensorKind, Tier]]] = {
    "activations_on_host": (TensorKind.ACTIVATIONS, Tier.HOST),
    "activations_on_ssd": (TensorKind.ACTIVATIONS, Tier.SSD),
    "parameters_in_host": (TensorKind.PARAMETERS, Tier.HOST),
    "gradients_on_ssd": (TensorKind.GRADIENTS, Tier.SSD),
}
IN_HOST: Final = "parameters_in_host"
Row = dict[str, float]


@lru_cache(maxsize=1024)  # the ways to keep of a case have these in common
def resting_bytes(
    shape: ModelShape,
    terms: memory_budget.BudgetTerms,
    further: tuple[memory_budget.BudgetItem, ...],
    all_in_host: bool,
) -> Mapping[Tier, tuple[float, Row]]:
    """Bytes per tier at no share, and what all of each share adds. `all_in_host`: all parameters are, whatever their share."""
    in_files = shape.in_files(TensorKind.PARAMETERS) > 0 and not all_in_host
    nothing = Placement.of(parameters_on_ssd=float(in_files), state_on_ssd=shape.in_files(TensorKind.STATE))
    base, added = _bytes_at(shape, nothing, terms, further), dict[str, Mapping[Tier, float]]()
    for name, (kind, tier) in CHOSEN.items():
        if name != IN_HOST:
            everything = nothing.with_shares(kind, {} if tier is RESTING_PLACES[kind][0] else {tier: 1.0})
            added[name] = _more(_bytes_at(shape, everything, terms, further), base)
        elif in_files:  # twice what half of them adds: their buffers take memory until all are in host memory
            half = nothing.with_shares(kind, {Tier.SSD: 0.5})
            added[name] = _more(_bytes_at(shape, half, terms, further), base, 2)
        else:
            added[name] = per_tier(dict.fromkeys(Tier, 0.0))
    return {tier: (base[tier], {name: more[tier] for name, more in added.items()}) for tier in Tier}


def tier_totals(
    shape: ModelShape, terms: memory_budget.BudgetTerms, further: tuple[memory_budget.BudgetItem, ...]
) -> Mapping[Tier, float]:
    """Bytes in each tier with things resting as `shape.placement` says."""
    items = memory_budget.budget(shape, terms, further)
    items += memory_budget.ssd_items(shape, terms)
    return per_tier({tier: float(memory_budget.total_bytes(items, tier)) for tier in Tier})


def _bytes_at(
    shape: ModelShape,
    placement: Placement,
    terms: memory_budget.BudgetTerms,
    further: tuple[memory_budget.BudgetItem, ...],
) -> Mapping[Tier, float]:
    return tier_totals(replace(shape, placement=placement), terms, further)


def _more(found: Mapping[Tier, float], base: Mapping[Tier, float], times: int = 1) -> Mapping[Tier, float]:
    return {tier: times * (found[tier] - base[tier]) for tier in Tier}
