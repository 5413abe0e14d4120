"""Copies of the weights in two values, committed and predicted, of which a half computes with one and makes the other.

See `schedule.halves`, [Note: two values].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ds_vertical.compat.zero_params import ZeroParam
from ds_vertical.distributed.levels import Issued
from ds_vertical.distributed.unit_levels import ShardOf, UnitLevels
from ds_vertical.engine.acco.prediction import PredictedShards
from ds_vertical.schedule.levels import Arrival
from ds_vertical.schedule.trace import Tracer
from ds_vertical.types import LevelSettings, Unit


def _every(_: ZeroParam) -> bool:
    return True


class TwoValues(UnitLevels):
    """The committed values are this object's own copies, the predicted ones those of a second one. `reads_predicted`: units
    come from the predicted copies, and the committed ones are made; else it is the other way round."""

    def __init__(self, settings: LevelSettings, tracer: Tracer, prediction: PredictedShards) -> None:
        super().__init__(settings, tracer)
        self.reads_predicted = False
        self.sends = _every  # also where the unit is fetched with the other value
        self._prediction = prediction
        self._predicted = UnitLevels(settings, tracer, prediction.shard)

    def share_memory(self, units: Mapping[Unit, Sequence[ZeroParam]], outside: Sequence[Unit], num_values: int = 2) -> None:
        """See `UnitLevels`."""
        super().share_memory(units, outside, num_values)
        self._predicted.memory = self.memory

    def close(self) -> None:
        """See `UnitLevels`."""
        super().close()
        self._predicted.close()

    @property
    def num_bytes(self) -> int:
        """Of both values."""
        return super().num_bytes + self._predicted.num_bytes

    def check_copy(self, unit: Unit, version: int) -> None:
        """See `UnitLevels`."""
        (self._predicted.check_copy if self.reads_predicted else super().check_copy)(unit, version)

    def start(
        self, unit: Unit, params: Sequence[ZeroParam], arrival: Arrival, version: int
    ) -> tuple[list[ZeroParam], Callable[[], None]]:
        """See `UnitLevels`."""
        return (self._predicted.start if self.reads_predicted else super().start)(unit, params, arrival, version)

    def renew(self, unit: Unit, params: Sequence[ZeroParam], shard_of: ShardOf, version: int) -> list[Issued[torch.Tensor]]:
        """See `UnitLevels`; of the value that is not read."""
        if self.reads_predicted:
            return super().renew(unit, params, shard_of, version)
        return self._predicted.renew(unit, params, self._prediction.coming_shard, version)

    def standing(self, versions: Mapping[Unit, int]) -> frozenset[Unit]:
        """See `UnitLevels`; of the value that is read."""
        return (self._predicted.standing if self.reads_predicted else super().standing)(versions)

    def stands(self, unit: Unit) -> bool:
        """See `UnitLevels`; of the value that is read."""
        return (self._predicted.stands if self.reads_predicted else super().stands)(unit)

    def drop_all(self) -> None:
        """Forget the copies of both values: they are made again from the shards."""
        super().drop_all()
        self._predicted.drop_all()

    def drop_predicted(self) -> None:
        """Forget the copies of the predicted values."""
        self._predicted.drop_all()
