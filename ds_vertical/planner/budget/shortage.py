"""Why no plan fits: tier, item, bytes that are short, and what would fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Protocol

from ds_vertical.planner import linear_program, memory_budget
from ds_vertical.planner.linear_program import LpProblem
from ds_vertical.types import Placement, TensorKind, Tier


class Refused(Protocol):
    """A search that has found nothing."""

    def cases(self) -> Iterator[tuple[LpProblem, int, int]]:
        """(case, sequences per micro-batch, blocks per layer)"""
        ...

    def placed(self) -> Iterator[tuple[LpProblem, Placement, int]]:
        """(case, where it would have things rest in whole micro-batches, sequences per micro-batch), of what the program
        solves."""
        ...

    def remedies(self, lacking: Mapping[Tier, float]) -> Iterator[str]:
        """What would make some setting fit."""
        ...


def refusal(search: Refused) -> str:
    """Which tier is too small at any setting, by how much at the setting that needs least, what takes most of it there, and
    what would fit."""
    lacking = [(*linear_program.shortage(case), case, size) for case, size, _ in search.cases()]
    least, placement, case, size = min(lacking, key=lambda entry: sum(entry[0].values()))
    over = [] if least else [(_over(own, each), each, own, number) for own, each, number in search.placed()]
    if over:  # it fits by shares that no whole micro-batches make
        least, placement, case, size = min(over, key=lambda entry: sum(entry[0].values()))
    case = replace(case, shape=replace(case.shape, placement=placement))
    whole, advice = "whole " * bool(over), " or ".join(search.remedies(least))
    if not least:
        return f"no setting fits in whole micro-batches of {size}; it takes {advice}"
    tiers = ", ".join(f"{tier} memory: {-(-short // 2**20):.0f} MiB short{_most(case, tier)}" for tier, short in least.items())
    return f"no setting fits; the least is short of {tiers} ({whole}micro-batches of {size}); it takes {advice}"


def _over(case: LpProblem, placement: Placement) -> dict[Tier, float]:
    limits = ((tier, limit) for tier, limit in case.limits.items() if limit is not None)
    found = {tier: linear_program.tier_bytes(case, placement, tier) - limit for tier, limit in limits}
    return {tier: short for tier, short in found.items() if short > 0}


def _most(case: LpProblem, tier: Tier) -> str:
    """In words what takes most of a tier, with everything where the case's shape has it; of what a plan can change."""
    shape, terms = case.shape, case.terms
    build = case.build_bytes if shape.in_files(TensorKind.PARAMETERS) else 0.0
    items = memory_budget.with_setup(memory_budget.budget(shape, terms, case.further), case.setup_bytes, build)
    items += memory_budget.ssd_items(shape, terms)
    own = [item for item in items if item.tier is tier]
    most = max(own, key=lambda item: (item.key != memory_budget.MEASURED_KEY, item.num_bytes), default=None)
    return "" if most is None else f" (most is {most.what}: {most.num_bytes / 2**20:.0f} MiB)"
