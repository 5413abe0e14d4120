"""What a step of the engine consists of, one schedule or two halves: the one place where the section's `acco` decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ds_vertical.distributed.unit_levels import UnitLevels
from ds_vertical.engine.acco.copies import TwoValues
from ds_vertical.engine.acco.loop import HalvesLoop, TwoWeights
from ds_vertical.engine.acco.prediction import PredictedShards
from ds_vertical.engine.acco.tentative import TentativeStep
from ds_vertical.engine.assembly import StepParts
from ds_vertical.engine.checkpoint.run_state import FurtherState
from ds_vertical.engine.progress import Progress
from ds_vertical.engine.self_check.first_step import FirstStepCheck
from ds_vertical.engine.train_loop import VerticalLoop
from ds_vertical.engine.zero3.optimizer import VerticalStage3, own_kernel
from ds_vertical.schedule.events import Unit
from ds_vertical.schedule.trace import Tracer
from ds_vertical.types import RunSettings


class WholeSteps:
    """A step is one schedule. `further`: what checkpoints have of it besides the run's own state, by its name there."""

    def __init__(self, vertical: RunSettings) -> None:
        self.vertical = vertical
        self.further: Mapping[str, FurtherState] = {}

    def open_levels(self, tracer: Tracer) -> UnitLevels | None:
        """What gathers units over levels; None: there is one."""
        return UnitLevels(self.vertical.levels, tracer) if self.vertical.levels.are_on else None

    def before_sums(self, optimizer: VerticalStage3) -> Callable[[Unit], None]:
        """Called with a unit whose next gradients are about to be summed."""
        return optimizer.gradients.drop

    def new_loop(self, parts: StepParts, check: FirstStepCheck, tracer: Tracer, progress: Progress) -> VerticalLoop:
        """What trains."""
        return VerticalLoop(parts, check, tracer, progress)

    def close(self) -> None:
        """Give memory back. Nothing may be in flight; twice is harmless."""


class HalfSteps(WholeSteps):
    """A step has two halves."""

    def __init__(self, vertical: RunSettings) -> None:
        super().__init__(vertical)
        self._prediction = PredictedShards()
        self._copies: TwoValues | None = None
        self._tentative: TentativeStep | None = None

    def open_levels(self, tracer: Tracer) -> UnitLevels:  # override
        """What gathers units from the copies of either value."""
        self._copies = TwoValues(self.vertical.levels, tracer, self._prediction)
        return self._copies

    def before_sums(self, optimizer: VerticalStage3) -> Callable[[Unit], None]:  # override
        """Nothing is given up there: the step before may still have to be taken, beside this half."""
        return lambda _: None

    def new_loop(self, parts: StepParts, check: FirstStepCheck, tracer: Tracer, progress: Progress) -> HalvesLoop:  # override
        """See `WholeSteps`."""
        optimizer: Any = parts.optimizer
        assert self._copies is not None  # `open_levels` comes first
        kernel, made = own_kernel(optimizer.optimizer, 2), (optimizer.stepper.chunks, optimizer.pipeline)
        self._tentative = TentativeStep(optimizer, *made, kernel, self._prediction)
        weights = TwoWeights(self._copies, self._prediction, self._tentative)
        loop = HalvesLoop(parts, check, tracer, progress, weights)
        self.further = {"acco": loop}
        return loop

    def close(self) -> None:  # override
        """See `WholeSteps`."""
        if self._tentative is not None:
            self._tentative.close()


def steps_of(vertical: RunSettings) -> WholeSteps:
    """As the section asks for them."""
    return WholeSteps(vertical) if vertical.acco is None else HalfSteps(vertical)
