"""What to write into a JSON so that a rank brings fewer micro-batches to a step: refusals for want of memory advise it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from ds_vertical.types import ElasticSettings

_STEPS: Final = "gradient_accumulation_steps"
_BATCH: Final = "train_batch_size"
_ELASTIC: Final = "vertical_schedule.elastic"
_Change = tuple[str, int, int]  # a path of the JSON, what to write there, what holds now


@dataclass(frozen=True)
class FewerMicroBatches:
    """`steps`: micro-batches of each of `num_ranks` ranks, by `gradient_accumulation_steps`, or, where that `is_derived`, by
    `train_batch_size`. `batch`: that number, None where the JSON does not say it. `halves`: a step has two, of as many each.

    With `elastic` ranks bring different numbers, and both keys say only what these add up to; see `ElasticSettings`.
    """

    steps: int
    num_ranks: int = 1
    elastic: ElasticSettings | None = None
    halves: bool = False
    batch: int | None = None
    is_derived: bool = False

    @property
    def most(self) -> int:
        """The most that a rank may bring now."""
        return self.steps if self.elastic is None else self.elastic.most_of(self.steps, self.num_ranks)

    def counts(self) -> Iterator[int]:
        """Smaller numbers for the rank that brings most, the largest first."""
        if self.elastic is not None:
            yield from range(self.most - 1, self.elastic.min_micro_batches - 1, -1)
        elif not self.is_derived or self.batch is not None:
            step = 2 if self.halves else 1
            yield from range(self.most - step, 0, -step)

    def fitting(self, fits: Callable[[int], bool]) -> str | None:
        """What to write for the largest of `counts` that `fits`; None where none does."""
        count = next(filter(fits, self.counts()), None)
        return None if count is None else self.written(count)

    def written(self, count: int, says_now: bool = True) -> str:
        """What to write for one of `counts`; `says_now`: beside it, what holds now."""
        changes = [f'"{path}": {value}' + f" (now {now})" * says_now for path, value, now in self._changes(count)]
        return " and ".join(changes) + self._logged

    @property
    def told(self) -> str | None:
        """How to have fewer where nobody knows yet how many fit, as what follows "write"; None where there are no fewer."""
        if not any(True for _ in self.counts()):
            return None
        if self.elastic is not None:
            total, least = self.elastic.total_of(self.steps, self.num_ranks), self.elastic.min_micro_batches * self.num_ranks
            if self.most > self._even:
                return f'a smaller "{_ELASTIC}.max_micro_batches" (now {self.most}, {self._even} or more){self._logged}'
            return f'a smaller "{_ELASTIC}.total" (now {total}, {least} or more){self._logged}'
        if self.batch is not None:
            beside = "" if self.is_derived else f", and fewer {_STEPS} in proportion"
            return f"a smaller {_BATCH} (now {self.batch}){beside}"
        return f"fewer {_STEPS}" + ", an even number" * self.halves

    @property
    def _logged(self) -> str:
        logged = self.elastic is not None and self.elastic.counts is not None
        return ' with null, or the log of a run that had it, as "counts"' * logged

    @property
    def _even(self) -> int:
        """The most micro-batches of a rank where all bring as equal numbers as may be."""
        assert self.elastic is not None
        return -(-self.elastic.total_of(self.steps, self.num_ranks) // self.num_ranks)

    def _changes(self, count: int) -> Iterator[_Change]:
        if self.elastic is None:
            if not self.is_derived:
                yield _STEPS, count, self.steps
            if self.batch is not None:
                yield _BATCH, self.batch * count // self.steps, self.batch
            return
        if count < self._even:
            yield f"{_ELASTIC}.total", count * self.num_ranks, self.elastic.total_of(self.steps, self.num_ranks)
        yield f"{_ELASTIC}.max_micro_batches", count, self.most
