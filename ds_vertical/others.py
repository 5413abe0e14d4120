"""The ranks of a run, as a pass of the schedule knows them."""

from __future__ import annotations

from ds_vertical.layers import Unit
from ds_vertical.optimizer import VerticalStage3
from ds_vertical.params import ParamStore
from ds_vertical.stopping import Stopping


class OtherRanks:
    """See `company.Others`."""

    def __init__(self, params: ParamStore, optimizer: VerticalStage3, stopping: Stopping) -> None:
        self._params = params
        self._optimizer = optimizer
        self._stopping = stopping

    @property
    def num_gathers(self) -> int:
        return self._params.num_gathers

    @property
    def num_reductions(self) -> int:
        return self._optimizer.num_reductions

    @property
    def num_votes(self) -> int:
        return self._stopping.num_votes

    def gather(self, unit: Unit) -> None:
        self._params.gather_for_others(unit)

    def reduce(self, unit: Unit) -> None:
        self._optimizer.reduce_for_others(unit)

    def vote(self) -> bool:
        return self._stopping.vote()

    def agree(self, error: Exception | None) -> None:
        with self._optimizer.agreed("a pass"):
            if error is not None:
                raise error
