"""scripts/train.py with steps that are delayed by one (DPU of ZeRO-Offload, arXiv 2101.06840), for `acco_loss.py`.

A JSON with `vertical_schedule.acco` gives the run two values of the weights. Here a step is one schedule over all of its
micro-batches. It computes with the weights as they were before the last step, while that step is taken:

    w(t+1) = Opt(w(t), gradients at w(t-1))

The engine itself has no such steps: a delay of one step changes what is trained.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from ds_vertical.compat import zero_params
from ds_vertical.distributed import ranks
from ds_vertical.engine.acco import steps
from ds_vertical.engine.acco.halves import SecondHalf
from ds_vertical.engine.acco.loop import Half, HalvesLoop
from ds_vertical.engine.handlers import LossScale
from ds_vertical.engine.zero3.reductions import ShareSink
from ds_vertical.io.ticket import Ticket
from ds_vertical.model.micro_batch import Body
from ds_vertical.schedule.events import Unit

TRAIN: Final = Path(__file__).resolve().parents[1] / "scripts" / "train.py"


class _Whole(SecondHalf):
    """All of a step's gradients, and the step before, which is taken beside them."""

    def __init__(self, driver: Any, tentative: Any, gradients: Any) -> None:
        super().__init__(driver, tentative, gradients)
        self._sink = ShareSink(gradients)

    def step_unit(self, unit: Unit) -> Ticket | None:
        return self._driver.step_unit(unit)


class DelayedLoop(HalvesLoop):
    """See the module."""

    def run_schedules(self, bodies: Sequence[Body], scale_of: Callable[[float], LossScale]) -> list[torch.Tensor]:  # override
        """One schedule. Returns the losses."""
        bodies = self.check_ready(bodies)
        scale, parts, weights = scale_of(self.shares.mean_over), self._parts, self._weights_of
        self._before = parts.optimizer.driver.num_decided
        units = frozenset(parts.layers.outside.around(range(parts.layers.num_layers)))
        stale = all(ranks.all_gathered(weights.prediction.is_there))
        if not stale:  # then this step computes with what the last one has made, if one is due
            with parts.optimizer.live.agreed("train_batch"):
                parts.optimizer.flush()
            weights.copies.drop_predicted()
        whole = _Whole(parts.optimizer.driver, weights.tentative, parts.optimizer.gradients)
        return self._run_half(bodies, scale, whole, stale, Half(units if stale else frozenset()))

    def conclude_prediction(self, counts: bool) -> None:  # override
        """A step that counts is due, and not taken: the weights are those with which the next step computes."""
        prediction, params = self._weights_of.prediction, self._parts.optimizer.fp16_groups
        with torch.no_grad():
            for param in (param for group in params for param in group):
                prediction.target(param).copy_(zero_params.shard(param))
        if counts:
            prediction.conclude(True, self._parts.optimizer.driver.num_decided)
        else:
            prediction.forget()  # the step was skipped, and none is due


if __name__ == "__main__":
    steps.HalvesLoop = DelayedLoop  # type: ignore[misc]
    sys.argv[0], sys.path[0] = str(TRAIN), str(TRAIN.parent)
    runpy.run_path(str(TRAIN), run_name="__main__")
