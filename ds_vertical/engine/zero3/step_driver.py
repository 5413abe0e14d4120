"""One optimizer step at a time: in which phase it is, which units it has left to step, and the calls that move it on.

[Note: phases] A step is idle until its first early part is issued (where the timing tries that), or until its norm is known:

    IDLE -> EARLY -> COMMITTING -> DECIDED -> IDLE

The norm decides it: from EARLY to COMMITTING where the early parts have come true, else, and from IDLE, to DECIDED. The
schedule's COMMIT leads from COMMITTING to DECIDED, the engine's `optimizer.step` back to IDLE, and so does an error before the
norm. What a decided step has not stepped yet is the backlog, which outlives the step: the next forward, or a flush, takes it.

[Note: interrupts] An interrupt may come between any two bytecodes. A transition is therefore one assignment, and `abandon`
finds in the phase all that it needs to know of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Final

import torch

from ds_vertical.compat import zero_optimizer
from ds_vertical.distributed import ranks
from ds_vertical.engine.zero3.chunks import ChunkedStage3
from ds_vertical.engine.zero3.reductions import UnitReductions
from ds_vertical.errors import NonFiniteError
from ds_vertical.interrupts import Changed
from ds_vertical.io.ticket import Ticket
from ds_vertical.offload.cpu_adam import AdamSettings, Powers
from ds_vertical.offload.grad_store import HeldGradients
from ds_vertical.offload.state_files import StepShare
from ds_vertical.offload.step_pipeline import StepPipeline
from ds_vertical.offload.stepper import PendingStep, Stepper
from ds_vertical.schedule.events import Unit


class StepPhase(Enum):
    """How far the current optimizer step is; see [Note: phases]."""

    IDLE = "no part of the step has been issued"
    EARLY = "early parts have been issued, and the norm is not known"
    COMMITTING = "the step counts, its early parts too, and these are not committed"
    DECIDED = "it is settled whether the step counts, and the engine has not counted it"

    @property
    def counts(self) -> bool:
        """Whether a step has been decided, be it to skip it, that the engine has not counted yet."""
        return self is StepPhase.COMMITTING or self is StepPhase.DECIDED


# from each phase the other ones that may follow
ARROWS: Final[Mapping[StepPhase, frozenset[StepPhase]]] = {
    StepPhase.IDLE: frozenset({StepPhase.EARLY, StepPhase.DECIDED}),
    StepPhase.EARLY: frozenset({StepPhase.COMMITTING, StepPhase.DECIDED, StepPhase.IDLE}),
    StepPhase.COMMITTING: frozenset({StepPhase.DECIDED}),
    StepPhase.DECIDED: frozenset({StepPhase.IDLE}),
}


@dataclass
class Backlog:
    """What the last step that counts has left to do.

    `units`: those whose step is due, in the order of their next use; `share`: which parts of each. `ahead`: the steps that were
    issued for the next forward, which has not taken them over yet. `step`: the hyper-parameters and gradients of all of them.
    `settled`: nothing is due and nothing in flight. `left`: the units that were due when the step was decided.
    """

    units: dict[Unit, None] = field(default_factory=dict)
    share: StepShare = "delayed"
    ahead: dict[Unit, Ticket] = field(default_factory=dict)
    step: PendingStep | None = None
    settled: bool = True
    left: frozenset[Unit] = frozenset()

    @property
    def due(self) -> tuple[Unit, ...]:
        """Units whose step of the last train_batch has not been issued yet."""
        return tuple(self.units)

    @property
    def pending(self) -> tuple[Unit, ...]:
        """Units whose step of the last train_batch no wait has completed: issued for the next forward, or due."""
        return (*self.ahead, *self.units)


class StepDriver(UnitReductions):
    """Takes the optimizer steps of one rank: what the events REDUCE, HOLD, STEP, NORM and COMMIT of a schedule call.

    A step is `reduce_unit` for each unit, with `step_early` where it is tried; `open_step` (norm, overflow); `conclude_early`;
    then `step_unit` for each unit that is due, at once or in the next forward.

    `powers`: CPU Adam's powers of beta after the last step that counts. `num_decided`: steps so far that count.
    """

    def __init__(
        self, optimizer: ChunkedStage3, stepper: Stepper, pipeline: StepPipeline, gradients: HeldGradients, powers: Powers
    ) -> None:
        super().__init__(optimizer, gradients)
        self.phase = StepPhase.IDLE
        self.backlog = Backlog()
        self.powers = powers
        self.num_decided = 0
        self._stepper = stepper
        self._pipeline = pipeline

    def transition(self, to: StepPhase) -> None:
        """Be in the phase `to`. Raises RuntimeError, with nothing changed, where no arrow leads there."""
        if to is not self.phase and to not in ARROWS[self.phase]:
            raise RuntimeError(f"an optimizer step cannot go from {self.phase.name} to {to.name}")
        self.phase = to

    # ---- gradients

    def hold_unit(self, unit: Unit) -> Ticket | None:
        """Start writing what of a unit's gradients waits on SSD."""
        return self._gradients.write(unit)

    # ---- before the norm

    def step_early(self, unit: Unit) -> Ticket | None:
        """Issue the early parts of a unit whose gradient is complete; `conclude_early` says whether they count."""
        if self.phase is not StepPhase.EARLY:
            self.transition(StepPhase.EARLY)
        guess = float(self._optimizer.loss_scale)  # the divisor, if the norm asks for no clipping
        settings = settings_of_step(self._optimizer, self.powers)
        due = PendingStep(settings, self._gradients, None if guess == 1.0 else 1.0 / guess)
        return self._stepper.step(unit, self._optimizer.scheduled_chunks_of(unit), due, "early")

    def early_writes(self) -> Ticket | None:
        """The writes of early steps that are on their way to the second generation; None where there are none."""
        is_written = self.phase is StepPhase.EARLY and self._optimizer.timing.generations > 1
        return Ticket("early writes", partial(self._stepper.complete, reads_on=True)) if is_written else None

    # ---- the norm

    def open_step(self) -> None:
        """Take the global norm and decide whether the step is skipped (non-finite norm, overflow); else what is not
        stepped early is due. Raises NonFiniteError instead of skipping where the timing stops; OtherRankError where another
        rank's part of the step has failed. What stays on the device is back there, also where all ranks raise."""
        optimizer, live = self._optimizer, self._optimizer.live
        with live.agreed("train_batch"):
            if self.backlog.units:
                raise RuntimeError(f"units {list(self.backlog.units)} have not taken the step before this one")
        self.backlog.settled = False  # the persistent parameters have been partitioned, whatever comes of the norm
        guess = float(optimizer.loss_scale)  # before it is updated
        numbers = zero_optimizer.loss_scaler_numbers(optimizer)
        scale_as_before = partial(zero_optimizer.set_loss_scaler_numbers, optimizer, numbers)
        with Changed(lambda: self.phase.counts or scale_as_before(), only_if_failed=True):
            norm = zero_optimizer.open_step(optimizer)
            self.norm_memory.clear()
            if norm is None and optimizer.timing.stops:
                error = NonFiniteError('the norm of the gradients is not finite, and vertical_schedule.on_nonfinite is "stop"')
                ranks.raise_after(error, optimizer.gather_persistent)
            with live.agreed("train_batch", optimizer.gather_persistent):
                tried = self.phase is StepPhase.EARLY
                if norm is not None:
                    self._let_count(zero_optimizer.combined_scale(optimizer, norm), guess, tried)
                else:
                    self.backlog.left = frozenset()
                    self.transition(StepPhase.DECIDED)
                    optimizer.timing.note(tried, False)
                    if not tried:
                        self._gradients.conclude((), hit=False)

    def _let_count(self, scale: torch.Tensor | float, guess: float, tried: bool) -> None:
        """The step counts. `scale`: what its gradients are divided by; `guess`: what those of early parts were."""
        came_true = float(scale) == guess
        self._optimizer.timing.note(tried, came_true)
        settings = settings_of_step(self._optimizer, self.powers)
        with self._optimizer.condition.torn_if_interrupted():
            hit = came_true and tried
            self.transition(StepPhase.COMMITTING if hit else StepPhase.DECIDED)
            due = self._decide(settings, scale, "delayed" if hit else "all")
            self._optimizer.step_persistent(lambda unit, chunks: self._stepper.step(unit, chunks, due, "all"))

    def _decide(self, settings: list[AdamSettings], scale: torch.Tensor | float, share: StepShare) -> PendingStep:
        """All chunks are one step further, and `share` of every unit is due."""
        for index, setting in enumerate(settings):
            zero_optimizer.moments(self._optimizer, index)["step"] = setting.step
        self.powers = settings[-1].powers
        backlog, chunks = self.backlog, self._stepper.chunks
        backlog.step = due = PendingStep(settings, self._gradients, None if float(scale) == 1.0 else 1.0 / scale)
        backlog.share = share
        units, chunks_of = self._optimizer.layer_map.units, self._optimizer.scheduled_chunks_of
        backlog.units = dict.fromkeys(u for u in units if any(chunks[i].parts(share) for i in chunks_of(u)))
        backlog.left = frozenset(backlog.units)
        self.num_decided += 1
        return due

    # ---- after the norm

    def conclude_early(self) -> None:
        """Commit the early steps if the norm has left the factor they were taken with; else discard them. A step that
        counts is then due whole."""
        if hit := self.phase is StepPhase.COMMITTING:
            with self._optimizer.condition.torn_if_interrupted():  # masters that count and parameters that do not
                self._stepper.commit()
            self.transition(StepPhase.DECIDED)
        else:
            self._stepper.discard()
        self._gradients.conclude(self.backlog.units, hit)
        if self.backlog.units and self._stepper.torn:
            raise RuntimeError("steps taken in place have not come true: clipping or the loss scale were changed in mid-step")

    def expect_steps(self, units: Sequence[Unit], share: StepShare | None) -> None:
        """The steps of these units will be issued next, in this order: start reading their state. A hint. `share`: of each
        unit, also before it is decided; None: what is due."""
        far = share not in (None, "early")
        for unit in units if share is not None else filter(self.backlog.units.__contains__, units):
            self._stepper.expect(unit, self._optimizer.scheduled_chunks_of(unit), share or self.backlog.share, far)

    def step_unit(self, unit: Unit) -> Ticket | None:
        """Issue what is due of a unit: read state, CPU Adam, write state and parameters."""
        backlog = self.backlog
        if unit not in backlog.units or backlog.step is None:
            return None
        with self._optimizer.condition.torn_if_interrupted():  # the unit's step is neither taken nor due
            ticket = self._stepper.step(unit, self._optimizer.scheduled_chunks_of(unit), backlog.step, backlog.share)
            del backlog.units[unit]
        return ticket

    def step_ahead(self, unit: Unit) -> Ticket | None:
        """Issue what is due of a unit in the step that made it; the next forward waits for `stepped_ahead`."""
        with self._optimizer.condition.torn_if_interrupted():  # no forward would wait for it
            if ticket := self.step_unit(unit):
                self.backlog.ahead[unit] = ticket
        return ticket

    def stepped_ahead(self, unit: Unit) -> Ticket | None:
        """Once after `step_ahead`: the ticket that the unit's parameters wait for; None where there is none."""
        return self.backlog.ahead.pop(unit, None)

    def is_left(self, unit: Unit) -> bool:
        """Whether the last step that was decided has left the unit, or a part of it, to be stepped behind that."""
        return unit in self.backlog.left

    def abandon(self) -> None:
        """After an error in a schedule: complete what is in flight and let early steps not have been (in place, they have torn
        the state), unless the norm has made them count: the rest of that step is due. What failed beside the current state is
        forgotten with the early steps. Raises nothing; twice is harmless."""
        self._pipeline.wait_idle()
        if error := self._gradients.abandon(self.backlog.units):
            self._optimizer.condition.tear(error)
        if self.phase is StepPhase.COMMITTING and self._optimizer.live.failure is None:
            self.conclude_early()
        else:
            self._stepper.discard()
            self._pipeline.recover()
        self.backlog.ahead.clear()  # complete, or torn
        self.forget_left()
        self.transition(StepPhase.DECIDED if self.phase.counts else StepPhase.IDLE)


def settings_of_step(optimizer: ChunkedStage3, powers: Powers) -> list[AdamSettings]:
    """Per chunk the hyper-parameters of the step that is being taken, with the powers of beta that stock has then: it goes from
    group to group, as chunks are numbered. `powers`: those after the step before."""
    settings: list[AdamSettings] = []
    for index in range(len(optimizer.fp16_groups)):
        group = zero_optimizer.parameter_group(optimizer, index)
        powers = powers.after(zero_optimizer.moments(optimizer, index)["step"] + 1, *group["betas"])
        settings.append(AdamSettings.of_group(group, powers))
    return settings
