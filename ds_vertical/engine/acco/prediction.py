"""This rank's shards of the predicted weights, with which the first half of a step computes.

[Note: two predictions] While a step runs, its second half makes the prediction for the next step. The one that its first half
has computed with is kept until the step counts: a step that fails is taken again with the same weights. So a parameter has two
predicted shards, `standing` and `coming`, which change places when the step counts (`conclude`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ds_vertical.compat import zero_params
from ds_vertical.compat.zero_params import ZeroParam


class PredictedShards:
    """The predicted shards of the parameters that the optimizer steps; of any other one the shard itself. `is_there`: the next
    step's first half computes with them; else with the committed weights."""

    def __init__(self) -> None:
        self.is_there = False
        self._number = -1
        self._standing: dict[int, torch.Tensor] = {}
        self._coming: dict[int, torch.Tensor] = {}

    def shard(self, param: ZeroParam) -> torch.Tensor:
        """What the first half computes with, 1-d."""
        found = self._standing.get(id(param))
        return zero_params.shard(param) if found is None else found

    def coming_shard(self, param: ZeroParam) -> torch.Tensor:
        """What the next step's first half will compute with."""
        found = self._coming.get(id(param))
        return zero_params.shard(param) if found is None else found

    def target(self, param: ZeroParam) -> torch.Tensor:
        """Memory for a coming shard, in which all elements are to be written."""
        found = self._coming.get(id(param))
        if found is None:
            found = self._coming[id(param)] = torch.empty_like(zero_params.shard(param))
        return found

    def conclude(self, is_complete: bool, number: int) -> None:
        """The step `number` counts: what it has predicted is for the next one, where that `is_complete`. Twice is harmless."""
        if number == self._number:
            return
        if is_complete:
            self._standing, self._coming = self._coming, self._standing
        self.is_there, self._number = is_complete, number

    def forget(self) -> None:
        """The next step's first half computes with the committed weights."""
        self.is_there = False

    # ---- checkpoints

    def saved(self, named: Iterable[tuple[str, ZeroParam]]) -> dict[str, torch.Tensor] | None:
        """Copies of the shards by name; None where there is no prediction."""
        if not self.is_there:
            return None
        return {name: self._standing[id(param)].clone() for name, param in named if id(param) in self._standing}

    def load(self, found: Mapping[str, torch.Tensor] | None, named: Iterable[tuple[str, ZeroParam]]) -> None:
        """Put back what `saved` gave. Nothing is predicted where that is not of these parameters."""
        shards = {} if found is None else {id(param): found[name] for name, param in named if name in found}
        self.is_there = found is not None and bool(shards) and len(shards) == len(found)
        if self.is_there:
            self._standing = {key: shard.clone() for key, shard in shards.items()}
