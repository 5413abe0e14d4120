"""The two halves of a step, as the handlers of a schedule see an optimizer: what each reduces into, decides and makes.

    first half    at the predicted weights   makes the committed weights, reduces its own gradients
    second half   at the committed weights   decides the tentative step, makes the predicted weights, adds its gradients,
                                             decides the step

So a step is committed beside the first half of the next one, or by a flush. The first half's last gradients are still on their
way when the second half begins. See `schedule.halves`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ds_vertical.engine.acco.tentative import TentativeStep
from ds_vertical.engine.zero3.reductions import ShareSink
from ds_vertical.engine.zero3.step_driver import StepDriver
from ds_vertical.io.ticket import Ticket
from ds_vertical.offload.grad_store import HeldGradients
from ds_vertical.offload.state_files import StepShare
from ds_vertical.schedule.events import Unit


class _Half:
    """What both halves do alike; see `interface.Optimizer`. No step is taken early, nor for the schedule that takes it."""

    def __init__(self, driver: StepDriver, tentative: TentativeStep, sink: ShareSink) -> None:
        self._driver = driver
        self._tentative = tentative
        self._sink = sink

    def reduce_unit(
        self, unit: Unit, sums: Iterator[torch.Tensor], flat: torch.Tensor | None, give_back: Callable[[torch.Tensor], None]
    ) -> bool:
        """Average a unit's sums over the ranks, and hold this rank's share where this half's shares go."""
        self._driver.sink = self._sink
        return self._driver.reduce_unit(unit, sums, flat, give_back)

    def reducing(self, unit: Unit, leaves: bool = False) -> Ticket | None:
        """See `UnitReductions`."""
        return self._driver.reducing(unit, leaves)

    def left(self) -> Ticket | None:
        """See `UnitReductions`."""
        return self._driver.left()

    def hold_unit(self, unit: Unit) -> Ticket | None:
        """None: gradients wait in memory."""

    def step_early(self, unit: Unit) -> Ticket | None:
        """None: see the class."""

    def expect_steps(self, units: Sequence[Unit], share: StepShare | None) -> None:
        """Nothing: state is in memory."""

    def early_writes(self) -> Ticket | None:
        """None: see the class."""

    def conclude_early(self) -> None:
        """Nothing: see the class."""

    def step_ahead(self, unit: Unit) -> Ticket | None:
        """None: see the class."""

    def stepped_ahead(self, unit: Unit) -> Ticket | None:
        """None: see the class."""

    def is_left(self, unit: Unit) -> bool:
        """False: what is spread for the next half has been made."""
        return False

    def abandon(self) -> None:
        """After an error: see `StepDriver`. Unless the step counts, it is taken again: what the first half has reduced, and its
        prediction, are not needed then."""
        counts = self._driver.phase.counts
        self._driver.abandon()
        if not counts:
            self._tentative.forget()


class FirstHalf(_Half):
    """It leaves its last gradients to the second half, which decides what they are for."""

    def __init__(self, driver: StepDriver, tentative: TentativeStep) -> None:
        super().__init__(driver, tentative, ShareSink(tentative.gradients))

    def open_step(self) -> None:
        """Raises RuntimeError."""
        raise RuntimeError("the first half of a step decides nothing: its schedule has no NORM")

    open_left = open_step

    def step_unit(self, unit: Unit) -> Ticket | None:
        """Take what is due of the step before: it makes the committed weights."""
        return self._driver.step_unit(unit)


class SecondHalf(_Half):
    """Its shares are added to those of the first half. `share_of_first`: of what the step's gradients weigh, those of the first
    half; set ahead of the step."""

    def __init__(self, driver: StepDriver, tentative: TentativeStep, gradients: HeldGradients) -> None:
        super().__init__(driver, tentative, ShareSink(gradients, tentative.whole))
        self.share_of_first = 0.5

    def open_left(self) -> None:
        """The first half's gradients are all held: decide the tentative step."""
        self._tentative.decide(self._driver.powers, self.share_of_first)
        self._driver.norm_memory.clear()

    def open_step(self) -> None:
        """Decide the step."""
        self._driver.open_step()

    def step_unit(self, unit: Unit) -> Ticket | None:
        """Take the tentative step of a unit: it makes the predicted weights."""
        return self._tentative.step(unit)
