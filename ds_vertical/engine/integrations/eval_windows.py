"""The batches of an evaluation, taken from their loader some at a time, and handed on one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Final, Generic, TypeVar

import torch
from torch.utils import _pytree as pytree

T = TypeVar("T")
MOST_WAITING_BYTES: Final = 256 << 20  # of results (logits, say) of one window, which wait until the user's loop comes to them


class EvaluationWindows(Generic[T]):
    """Stands for a loader in the user's loop. `window` holds the batches that have been taken, from the one on that the loop
    is at. `size`: how many to take at most; may change between two windows.

    What Accelerate says of the loader's end is held back until the loop is at the last batch.
    """

    def __init__(self, loader: Iterable[T], size: int) -> None:
        self._loader = loader
        self.size = size
        self.window: list[T] = []

    def __iter__(self) -> Iterator[T]:
        batches = iter(self._loader)
        while window := self._taken(batches):
            at_end = self._at_end
            for index in range(len(window)):
                if at_end:
                    self._at_end = index == len(window) - 1
                self.window = window[index:]
                yield window[index]
        self.window = []

    def _taken(self, batches: Iterator[T]) -> list[T]:
        taken: list[T] = []
        for batch in batches:
            taken.append(batch)
            # behind the loader's last batch its iterator must not be asked for another one yet: it would say that it is over
            if len(taken) >= self.size or self._at_end:
                break
        return taken

    @property
    def _at_end(self) -> bool:
        return bool(getattr(self._loader, "end_of_dataloader", False))

    @_at_end.setter
    def _at_end(self, value: bool) -> None:
        setattr(self._loader, "end_of_dataloader", value)  # noqa: B010 - Accelerate's loaders have it

    def __len__(self) -> int:
        if not isinstance(self._loader, Sized):
            raise TypeError(f"object of type {type(self._loader).__name__!r} has no len()")
        return len(self._loader)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)


def fitting(results: Iterable[object], most: int) -> int:
    """How many micro-batches with results as large as these may wait in memory at once: at least one, and at most `most`."""
    largest = max((num_bytes(each) for each in results), default=0)
    return max(1, min(most, MOST_WAITING_BYTES // max(1, largest)))


def num_bytes(result: object) -> int:
    """Bytes of a result's tensors."""
    return sum(each.nbytes for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor))
