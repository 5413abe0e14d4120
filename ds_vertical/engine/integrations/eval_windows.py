"""The batches of an evaluation, taken from their loader some at a time, and what waits of their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import torch
from torch.utils import _pytree as pytree

from ds_vertical.distributed import ranks
from ds_vertical.engine.integrations.made_trainers import Trainer

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


@dataclass(frozen=True)
class _Preprocessed:
    """A micro-batch's result, with what the user's function has made of its logits."""

    result: object


class Preprocessing:
    """A trainer's `preprocess_logits_for_metrics`, called as soon as a micro-batch has its logits: what it makes of them is
    small as a rule, and the logits need not wait. The trainer's own call of it comes later, and does nothing more.

    With several ranks it is left where it is: they pad logits to one length ahead of it.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._function: Callable[[object, object], object] | None = None
        self._is_applied = False  # to what the trainer's loop is at

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within the block, an evaluation, the trainer's own call does nothing more to what `applied` has had."""
        before, function = self._function, self._trainer.preprocess_logits_for_metrics
        if function is None or before is not None or ranks.world_size() > 1:
            yield
            return
        self._function = function
        self._trainer.preprocess_logits_for_metrics = self._once
        try:
            yield
        finally:
            self._function, self._trainer.preprocess_logits_for_metrics = before, function

    def applied(self, result: object) -> object:
        """A result as it is to wait; `handed_on` takes it back."""
        if self._function is None or not isinstance(result, tuple) or len(result) != 3 or result[1] is None:
            return result
        loss, logits, labels = result
        return _Preprocessed((loss, self._function(logits, labels), labels))

    def handed_on(self, waited: object) -> object:
        """The result, to which the trainer's loop comes now."""
        self._is_applied = isinstance(waited, _Preprocessed)
        return waited.result if isinstance(waited, _Preprocessed) else waited

    def _once(self, logits: object, labels: object) -> object:
        assert self._function is not None
        return logits if self._is_applied else self._function(logits, labels)


def fitting(results: Iterable[object], most: int) -> int:
    """How many micro-batches with results as large as these may wait in memory at once: at least one, and at most `most`."""
    largest = max((num_bytes(each) for each in results), default=0)
    return max(1, min(most, MOST_WAITING_BYTES // max(1, largest)))


def num_bytes(result: object) -> int:
    """Bytes of a result's tensors."""
    result = result.result if isinstance(result, _Preprocessed) else result
    return sum(each.nbytes for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor))
