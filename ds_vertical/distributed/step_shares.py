"""What each rank brings to a step: its micro-batches and what they weigh, as all ranks know it before the first forward.

[Note: unequal numbers] No collective of a layer-major step depends on the number of micro-batches. So ranks may bring different
numbers. The mean over all micro-batches is not the mean of the ranks' means then. The ranks therefore tell each other their
numbers, as integers, in the collective in which they agree that the step can begin. Each rank then divides its losses by the
mean number per rank, and the gradients are averaged over the ranks as ever: W ranks with m_1 .. m_W micro-batches divide by
(m_1 + .. + m_W) / W, and then by W. Where all bring m, that is m itself: the bits of a step with equal numbers.

Dividing the losses rather than the sums keeps the gradients of fp16 and of quantised reductions in the range that they have
with equal numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from ds_vertical.errors import LoopError
from ds_vertical.types import Order

NUMBERS: Final = 4  # that a rank tells the others


@dataclass(frozen=True)
class Brought:
    """By one rank to one step. `num_items`: what its micro-batches weigh together in the mean of the losses; None: one each.
    `num_tokens`: for rates. `nanoseconds`: of one micro-batch's computation in the steps before; 0: not known."""

    num_micro_batches: int
    num_items: int | None = None
    num_tokens: int = 0
    nanoseconds: int = 0

    def numbers(self) -> list[int]:
        """As integers, NUMBERS of them."""
        items = -1 if self.num_items is None else self.num_items
        return [self.num_micro_batches, items, self.num_tokens, self.nanoseconds]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> Brought:
        """What `numbers` gave."""
        count, items, tokens, nanoseconds = numbers
        return cls(count, None if items < 0 else items, tokens, nanoseconds)


@dataclass(frozen=True)
class StepShares:
    """What all ranks bring to one step, in their order."""

    ranks: tuple[Brought, ...]

    @classmethod
    def of(cls, said: Sequence[Sequence[int]]) -> StepShares:
        """From each rank's `numbers`."""
        return cls(tuple(map(Brought.from_numbers, said)))

    @property
    def total(self) -> int:
        """Micro-batches of all ranks."""
        return sum(each.num_micro_batches for each in self.ranks)

    @property
    def num_tokens(self) -> int:
        """Of all ranks."""
        return sum(each.num_tokens for each in self.ranks)

    @property
    def counts(self) -> tuple[int, ...]:
        """Micro-batches of each rank."""
        return tuple(each.num_micro_batches for each in self.ranks)

    @property
    def are_equal(self) -> bool:
        """Whether all ranks bring the same number of micro-batches."""
        return len(set(self.counts)) == 1

    @property
    def are_weighted(self) -> bool:
        """Whether the loss function says what micro-batches weigh."""
        return any(each.num_items is not None for each in self.ranks)

    @property
    def mean_over(self) -> float:
        """What each loss is divided by: micro-batches per rank. An integer where all ranks bring as many."""
        return self.ranks[0].num_micro_batches if self.are_equal else self.total / len(self.ranks)

    def weights(self, items: Sequence[int] | None) -> list[float] | None:
        """What a rank's losses are multiplied by, whose micro-batches have so many items: 1 for a micro-batch with the mean
        number of items of all. None: all have the same weight. Raises ValueError where only some ranks say what theirs
        weigh, or nothing weighs anything."""
        if not self.are_weighted:
            return None
        if items is None or any(each.num_items is None for each in self.ranks):
            raise ValueError("the loss function has `num_items` on some ranks only; give all ranks the same loss function")
        num_items = sum(each.num_items or 0 for each in self.ranks)
        if num_items == 0:
            raise ValueError(
                f"loss_fn.num_items: got 0 for all {self.total} micro-batches of this step; nothing would be trained"
            )
        return [each * self.total / num_items for each in items]


class Counts(Protocol):
    """What a step adds to DeepSpeed's counters; asked once all its forwards are over."""

    def num_sampled(self, shares: StepShares) -> int:
        """Micro-batches of all ranks whose samples count; DeepSpeed by itself counts `gradient_accumulation_steps` each."""
        ...

    @property
    def num_calls(self) -> int:
        """Calls of `engine.step`, each of which is a micro-step to DeepSpeed."""
        ...

    @property
    def items(self) -> Callable[[], list[int] | None] | None:
        """Says what each micro-batch weighs in the mean of the losses (None: all the same); None where a loop has scaled
        them. It may call the user's code, and raise."""
        ...


@dataclass(frozen=True)
class OwnCounts:
    """A step of `train_batch`: each micro-batch counts. `num_calls`: of `engine.step`, as stock's arm calls it."""

    num_calls: int
    items: Callable[[], list[int] | None] | None = None

    def num_sampled(self, shares: StepShares) -> int:
        """All that the ranks bring."""
        return shares.total


def refuse_unequal(shares: StepShares, order: Order) -> None:
    """Raises LoopError, on all ranks alike, where the ranks bring different numbers and the order is not layer-major: then each
    micro-batch gathers the weights anew."""
    if order == "vertical" or shares.are_equal:
        return
    told = ", ".join(map(str, shares.counts))
    raise LoopError(
        f"train_batch: the ranks bring {told} micro-batches with vertical_schedule.order {json.dumps(order)}, in which each"
        ' micro-batch gathers the weights anew; bring as many on each rank, or write "order": "vertical"'
    )
