"""Training with two halves a step: `train_batch` runs two schedules, and commits one step.

See `halves` for what each half does, and `prediction`, [Note: two predictions].

[Note: gradients counted] The learning rate follows the micro-batches that steps have summed, and not the steps: one step of the
scheduler for each `gradient_accumulation_steps` of each rank, or `elastic.total`. What is left over counts for the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NoReturn

import torch

from ds_vertical.compat import zero_params
from ds_vertical.distributed import ranks
from ds_vertical.distributed.step_shares import Counts
from ds_vertical.engine.acco.copies import TwoValues
from ds_vertical.engine.acco.halves import FirstHalf, SecondHalf
from ds_vertical.engine.acco.prediction import PredictedShards
from ds_vertical.engine.acco.tentative import TentativeStep
from ds_vertical.engine.assembly import StepParts
from ds_vertical.engine.checkpoint.run_state import LooseEnds
from ds_vertical.engine.handlers import LossScale
from ds_vertical.engine.progress import Progress
from ds_vertical.engine.self_check.first_step import FirstStepCheck
from ds_vertical.engine.train_loop import VerticalLoop
from ds_vertical.engine.zero3.interface import Optimizer
from ds_vertical.errors import LoopError
from ds_vertical.interrupts import Changed, deferred
from ds_vertical.model.micro_batch import Body
from ds_vertical.offload.param_store import StandingCopies
from ds_vertical.schedule.events import Cell, Outside, Unit
from ds_vertical.schedule.halves import layers_left
from ds_vertical.schedule.passes import TrainingStep
from ds_vertical.schedule.trace import Tracer

_KEY: Final = "vertical_schedule.acco"


@dataclass(frozen=True)
class TwoWeights:
    """What a run with two halves a step has besides. `copies`: of the weights, in both values."""

    copies: TwoValues
    prediction: PredictedShards
    tentative: TentativeStep


@dataclass(frozen=True)
class Half:
    """What is asked of a half's schedule. `made`: the units of which values for the next half are made. `place`: in a step of
    two halves, of which the first one leaves gradients to the second; None: it is the whole step."""

    made: frozenset[Unit] = frozenset()
    place: Literal["first", "second"] | None = None


class HalvesLoop(VerticalLoop):
    """`num_left`: gradients that have not moved the learning rate yet, see [Note: gradients counted]."""

    def __init__(
        self, parts: StepParts, check: FirstStepCheck, tracer: Tracer, progress: Progress, weights: TwoWeights
    ) -> None:
        super().__init__(parts, check, tracer, progress)
        self.num_left = 0
        self._weights_of = weights
        self._half = Half()  # under way
        self._standing: frozenset[Unit] = frozenset()  # units whose copy stood as it began
        self._before = self._concluded = -1  # steps decided as the step began; as gradients were counted last
        optimizer = parts.optimizer
        self._first = FirstHalf(optimizer.driver, weights.tentative)
        self._second = SecondHalf(optimizer.driver, weights.tentative, optimizer.gradients)
        optimizer.after_writes.append(weights.prediction.forget)
        every = (param for params in parts.layers.units.values() for param in params)
        zero_params.note_updates(every, weights.prediction.forget)

    def train_window(self, bodies: Sequence[Body], counts: Counts, batches: Sequence[object]) -> NoReturn:  # override
        """Raises LoopError."""
        raise LoopError(
            f"{_KEY}: got steps of two halves, and a Trainer, or a loop that calls the engine for each micro-batch, which sees"
            " one set of weights only; remove acco, or call engine.train_batch(data_iter)"
        )

    def run_schedules(self, bodies: Sequence[Body], scale_of: Callable[[float], LossScale]) -> list[torch.Tensor]:  # override
        """Both halves. Returns the losses of both."""
        bodies = self.check_ready(bodies)
        self._refuse_single()
        scale, parts, weights, count = scale_of(self.shares.mean_over), self._parts, self._weights_of, len(bodies) // 2
        self._before = parts.optimizer.driver.num_decided
        self._second.share_of_first = self._share_of_first(count)
        units = frozenset(parts.layers.outside.around(range(parts.layers.num_layers)))
        is_predicted = all(ranks.all_gathered(weights.prediction.is_there))
        if not is_predicted:  # then this half computes with what the last step has made
            with parts.optimizer.live.agreed("train_batch"):
                parts.optimizer.flush()
            weights.copies.drop_predicted()
        first = Half(units if is_predicted else frozenset(), "first")
        losses = self._run_half(bodies[:count], scale, self._first, is_predicted, first)
        return losses + self._run_half(bodies[count:], scale, self._second, False, Half(units, "second"))

    def _run_half(
        self, bodies: Sequence[Body], scale: LossScale, optimizer: Optimizer, is_predicted: bool, half: Half
    ) -> list[torch.Tensor]:
        """`is_predicted`: it computes with the predicted weights."""
        copies = self._weights_of.copies
        standing = self._parts.params.copies
        assert isinstance(standing, StandingCopies)  # of `copies`

        def read(predicted: bool) -> None:
            copies.reads_predicted = predicted

        with Changed(lambda: read(False), lambda: read(is_predicted)):
            self._half, self._standing = half, standing.standing()
            return self.run_pass(bodies, scale, optimizer)

    def training_step(self, num_micro_batches: int, moved: tuple[int, ...], kept: tuple[Cell, ...]) -> TrainingStep:  # override
        """That of a half."""
        step, half = super().training_step(num_micro_batches, moved, kept), self._half
        own = {"halves": True, "made": half.made, "standing": self._standing, "copy_share": 1.0}
        left = self._layers_left(step.outside) if half.place == "second" else None
        return replace(step, **own, leaves=half.place == "first", left=left, due=frozenset(), ahead=False)

    def _layers_left(self, outside: Outside) -> float:
        """How much the first half has left: see `schedule.halves.layers_left`. On all ranks alike."""

        def numel(unit: Unit) -> float:
            return sum(map(zero_params.full_numel, self._parts.optimizer.in_chunk_order(unit)))

        return layers_left(outside, list(map(numel, range(self._parts.layers.num_layers))), numel)

    def conclude(self) -> None:  # override
        """The step is over: what its second half has predicted is for the next one, if it counts."""
        weights, decided = self._weights_of, self._parts.optimizer.driver.num_decided
        counts = decided != self._before
        with deferred(firmly=True):  # not by half; `restore` may call it twice
            self.conclude_prediction(counts)
            if counts and decided != self._concluded:
                steps, left = divmod(self.num_left + self.shares.total, self._nominal)
                self.scheduler_steps, self.num_left, self._concluded = steps, left, decided
        super().conclude()
        weights.tentative.forget()

    def conclude_prediction(self, counts: bool) -> None:
        """The step is decided: set what the next first half computes with. `counts`: whether it does. Twice is harmless."""
        weights = self._weights_of
        if counts:
            weights.prediction.conclude(weights.tentative.is_complete, self._parts.optimizer.driver.num_decided)
        else:
            weights.prediction.forget()

    # ---- checkpoints

    def state(self) -> LooseEnds:
        """What a checkpoint has of it, of types that `torch.load(weights_only=True)` takes."""
        return {"num_left": self.num_left, "predicted": self._weights_of.prediction.saved(self.module.named_parameters())}

    def load(self, found: LooseEnds | None) -> None:
        """Put back what `state` gave; None: of a run, or a load, without it."""
        found = found or {}
        self.num_left = int(found.get("num_left", 0))
        self._weights_of.prediction.load(found.get("predicted"), self.module.named_parameters())

    # ---- details

    @property
    def _nominal(self) -> int:
        """Gradients for which the learning rate moves by a step."""
        count, elastic = self.engine.gradient_accumulation_steps(), self._parts.vertical.elastic
        return count * ranks.world_size() if elastic is None else elastic.total_of(count, ranks.world_size())

    def _share_of_first(self, count: int) -> float:
        """Of what this step's gradients weigh, those of all ranks' first halves. `count`: this rank's micro-batches there."""
        if self._weights is None:
            return sum(each // 2 for each in self.shares.counts) / self.shares.total
        return ranks.sum_of_all_ranks(sum(self._weights[:count])) / self.shares.total

    def _refuse_single(self) -> None:
        """Raise LoopError, on all ranks alike, where a rank has nothing for one of the halves."""
        counts = self.shares.counts
        if min(counts) < 2:
            raise LoopError(
                f"train_batch: the ranks bring {', '.join(map(str, counts))} micro-batches with {_KEY}, in which each half of a"
                " step needs one of each rank, at least; end the epoch with the step before, on all ranks, or let each rank's"
                " iterator go on into the next epoch"
            )
