"""The tentative step of a half's gradients: from state as it is to predicted shards, and nothing else.

Masters and moments are copied piece by piece on the pipeline's thread, and the copies are stepped. CPU Adam has an object of
its own for that, so that the committed steps' powers of beta stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from ds_vertical.compat import accelerator, zero_optimizer
from ds_vertical.distributed import ranks
from ds_vertical.engine.acco.prediction import PredictedShards
from ds_vertical.engine.zero3.chunks import ChunkedStage3
from ds_vertical.engine.zero3.step_driver import settings_of_step
from ds_vertical.errors import ConfigError
from ds_vertical.io.aio import DiskQueue
from ds_vertical.io.ticket import Ticket
from ds_vertical.offload.chunking import Part
from ds_vertical.offload.cpu_adam import CpuAdam, Powers
from ds_vertical.offload.grad_store import GradientFile, HeldGradients
from ds_vertical.offload.state_files import Chunk
from ds_vertical.offload.step_pipeline import StepJob, StepPipeline
from ds_vertical.offload.stepper import PendingStep
from ds_vertical.schedule.events import Unit


class TentativeStep:
    """Of one rank. `gradients`: the first half's shares, which are read twice: by this step, and where the second half's are
    added to them. `prediction`: takes the new shards. `kernel`: an object of CPU Adam for this step alone."""

    def __init__(
        self,
        optimizer: ChunkedStage3,
        chunks: Sequence[Chunk],
        pipeline: StepPipeline,
        kernel: CpuAdam,
        prediction: PredictedShards,
    ) -> None:
        refuse_state_on_ssd(chunks)
        self.gradients = HeldGradients(chunks, GradientFile(Path(), (), _no_queue), True, accelerator.device_name() != "cpu")
        self._optimizer = optimizer
        self._chunks = chunks
        self._pipeline = pipeline
        self._kernel = kernel
        self._prediction = prediction
        self._due: PendingStep | None = None
        self._num_left = 0  # parts that have not been computed
        self._scratch: torch.Tensor | None = None
        chunk_params = ((index, place, param) for index, chunk in enumerate(chunks) for place, param in enumerate(chunk.params))
        self._places = {id(param): (index, place) for index, place, param in chunk_params}

    @property
    def is_complete(self) -> bool:
        """Whether all coming shards are there."""
        return self._due is not None and self._num_left == 0

    def decide(self, powers: Powers, share: float) -> None:
        """All of the first half's gradients are held: take their norm, and what they are multiplied by. `powers`: after the
        last committed step. `share`: of what the step's gradients weigh, those of the first half. Nothing is due where the norm
        is not finite, or where `share` is 0: micro-batches that weigh nothing have no mean. Raises OtherRankError.
        Collective."""
        optimizer = self._optimizer
        with optimizer.live.agreed("train_batch"):  # raises where another rank's part of the half has failed
            self._due = None
        norm = zero_optimizer.tentative_norm(optimizer)
        if norm is None or not share:
            return
        factor = 1.0 / zero_optimizer.combined_scale(optimizer, norm / share) / share  # the bits of a half that is the whole
        self._num_left = sum(len(chunk.parts("all")) for chunk in self._chunks)
        self._due = PendingStep(settings_of_step(optimizer, powers), self.gradients, factor)  # last: see `is_complete`

    def step(self, unit: Unit) -> Ticket | None:
        """Issue a unit's tentative step; the ticket's wait returns when its coming shards are in memory."""
        if self._due is None:
            return None
        due, indices = self._due, self._optimizer.chunks_of(unit)
        jobs = [self._job(unit, part, due) for index in indices for part in self._chunks[index].parts("all")]
        return self._pipeline.submit(f"predict {unit}", jobs, lambda: None) if jobs else None

    def forget(self) -> None:
        """The step is over, or was cut. Nothing may be in flight."""
        self._due = None
        for unit in self._optimizer.layer_map.units:
            self.gradients.drop(unit)

    def close(self) -> None:
        """Give the kernel's object and the gradients' memory back. Nothing may be in flight."""
        self.forget()
        self.gradients.close()
        self._kernel.close()

    def whole(self, param: nn.Parameter, share: torch.Tensor) -> torch.Tensor:
        """This rank's share of a gradient of the whole step, given that of the second half."""
        first = self.gradients.share(*self._places[id(param)])
        assert first is not None  # the first half has reduced it
        return first.narrow(0, 0, share.numel()).to(share.device).add_(share)

    # ---- on the pipeline's thread

    def _job(self, unit: Unit, part: Part, due: PendingStep) -> StepJob:
        def compute(_: Sequence[torch.Tensor]) -> None:
            with torch.no_grad():
                self._compute(part, due)
            self._num_left -= 1

        return StepJob(f"predict {unit}, chunk {part.chunk} from {part.start}", (), compute, beside=True)

    def _compute(self, part: Part, due: PendingStep) -> None:
        chunk, gradient = self._chunks[part.chunk], due.gradients.data(part)
        assert chunk.resident is not None
        master, exp_avg, exp_avg_sq = (piece.narrow(0, part.start, part.numel).clone() for piece in chunk.resident())
        if due.factor is not None:
            gradient = torch.mul(gradient, due.factor, out=self._room(part.numel))
        self._kernel.update(due.settings[part.chunk], part, chunk.cuts, (master, gradient, exp_avg, exp_avg_sq))
        for param, in_shard, in_part, count in chunk.overlaps(part):
            target = self._prediction.target(param)
            target.narrow(0, in_shard, count).copy_(master.narrow(0, in_part, count))

    def _room(self, numel: int) -> torch.Tensor:
        if self._scratch is None or self._scratch.numel() < numel:
            self._scratch = torch.empty(numel, dtype=torch.float32)
        return self._scratch.narrow(0, 0, numel)


def refuse_state_on_ssd(chunks: Sequence[Chunk]) -> None:
    """Raise ConfigError where DeepSpeed has put state on SSD after all. On all ranks alike."""
    if any(ranks.all_gathered(any(chunk.resident is None for chunk in chunks))):
        raise ConfigError(
            'zero_optimization.offload_optimizer.device: got state on SSD with vertical_schedule.acco; write "cpu", or'
            " remove acco"
        )


def _no_queue() -> DiskQueue:
    raise RuntimeError("gradients of a half wait in memory alone")
