"""Whether a budget fits into memory; where it does not, which numbers in the JSON make it fit."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from ds_vertical.errors import MemoryBudgetError
from ds_vertical.planner.budget.fewer import FewerMicroBatches
from ds_vertical.planner.memory_budget import (
    MEASURED_KEY,
    BudgetItem,
    BudgetTerms,
    budget,
    budget_lines,
    total_bytes,
    with_setup,
)
from ds_vertical.planner.model_shape import ModelShape
from ds_vertical.types import Tier, TierBytes

_WINDOW: Final = "vertical_schedule.prefetch_layers"


def check_budget(
    shape: ModelShape,
    terms: BudgetTerms,
    further: tuple[BudgetItem, ...] = (),
    limits: TierBytes = MappingProxyType({}),
    setup_bytes: int = 0,
    fewer: FewerMicroBatches | None = None,
) -> tuple[BudgetItem, ...]:
    """The budget, if each tier's items fit into the bytes of `limits` (a tier without any is not checked). `setup_bytes`: of
    host memory in all while stock's optimizer is set up. `fewer`: how to have fewer micro-batches; None: as `terms` have them,
    by `gradient_accumulation_steps`. Raises MemoryBudgetError for all tiers at once."""
    fewer = FewerMicroBatches(terms.num_micro_batches) if fewer is None else fewer
    items = with_setup(budget(shape, terms, further), setup_bytes)
    found = [
        _Overrun(shape, terms, further, tier, limit, setup_bytes, fewer)
        for tier, limit in limits.items()
        if limit is not None and total_bytes(items, tier) > limit
    ]
    if found:
        raise MemoryBudgetError("\n".join([*(overrun.fault() for overrun in found), *budget_lines(items)]))
    return items


@dataclass(frozen=True)
class _Overrun:
    """A tier that has fewer bytes, `limit`, than a run needs of it."""

    shape: ModelShape
    terms: BudgetTerms
    further: tuple[BudgetItem, ...]
    tier: Tier
    limit: float
    setup_bytes: int
    fewer: FewerMicroBatches

    def items(self, terms: BudgetTerms) -> tuple[BudgetItem, ...]:
        """What the run needs with `terms`."""
        return with_setup(budget(self.shape, terms, self.further), self.setup_bytes)

    def needed(self, terms: BudgetTerms) -> int:
        """Bytes of the tier that the run needs with `terms`."""
        return total_bytes(self.items(terms), self.tier)

    def fault(self) -> str:
        """The message: bytes needed and allowed, and each number in the JSON whose change alone makes the run fit."""
        needed = self.needed(self.terms)
        fewer = self.fewer.fitting(lambda count: self._fits(num_micro_batches=count))
        remedies = [found for found in (self._narrower, fewer) if found is not None]
        remedy = f"write {' or '.join(remedies)}" if remedies else self._advice()
        items = [item for item in self.items(self.terms) if item.tier == self.tier]
        most = max(items, key=lambda item: (item.key != MEASURED_KEY, item.num_bytes))  # of what a JSON can change
        short = f"{needed - self.limit} too few (most is {most.what}: {most.num_bytes})"
        return f"{self.tier} memory: needs {needed} bytes, {self.limit} are allowed, {short}; {remedy}"

    def _advice(self) -> str:
        """What is left where no number alone is enough."""
        count = min(self.fewer.counts(), default=None)
        least: dict[str, int] = {"window": 0} | ({} if count is None else {"num_micro_batches": count})
        together = " and ".join([f'"{_WINDOW}": 0', *([] if count is None else [self.fewer.written(count, says_now=False)])])
        if self._fits(**least):
            return f"write {together}"
        return f"{together} would need {self.needed(dataclasses.replace(self.terms, **least))}, too many as well"

    @property
    def _narrower(self) -> str | None:
        """The most layers fetched ahead, fewer than now, with which the tier fits, as what to write."""
        windows = range(self.terms.window - 1, -1, -1)
        window = next((each for each in windows if self._fits(window=each)), None)
        return None if window is None else f'"{_WINDOW}": {window} (now {self.terms.window})'

    def _fits(self, **changed: int) -> bool:
        return self.needed(dataclasses.replace(self.terms, **changed)) <= self.limit
