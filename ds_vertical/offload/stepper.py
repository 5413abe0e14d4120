"""The optimizer step of one unit: its chunks' parts through the pipeline, from held gradients to new parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from ds_vertical.io.checksums import Checksums
from ds_vertical.io.extents import Extent
from ds_vertical.io.ticket import Ticket
from ds_vertical.offload.chunking import Part
from ds_vertical.offload.cpu_adam import AdamSettings, CpuAdam
from ds_vertical.offload.grad_store import HeldGradients
from ds_vertical.offload.masters.compressed import CompressedMasters, value_bytes
from ds_vertical.offload.param_shards import Update
from ds_vertical.offload.state_files import Chunk, Generations, StepShare
from ds_vertical.offload.state_prefetch import PrefetchJob
from ds_vertical.offload.step_pipeline import StepJob, StepPipeline
from ds_vertical.schedule.events import Unit


class Updates(Protocol):
    """Where a unit's new parameters go."""

    def open_update(
        self, unit: Unit, ranges: Mapping[nn.Parameter, tuple[int, int]], early: bool
    ) -> Mapping[int, torch.Tensor]:
        """By id(param), the memory (1-d, the parameter's dtype) of its shard, of which `ranges` (first, count) is filled."""
        ...

    @property
    def unfinished(self) -> Mapping[Unit, Update]:
        """Updates of parameters on SSD that are open, by unit."""
        ...

    def wait_writes(self, unit: Unit) -> None:
        """Return when no write of the unit's files is under way."""
        ...

    def finish_update(self, unit: Unit) -> None:
        """All values are there; called on the pipeline's thread."""
        ...

    @property
    def error(self) -> BaseException | None:
        """The first write of new parameters that failed."""
        ...

    def commit(self) -> None:
        """Make the values of early updates the parameters' own. All of them must be finished."""
        ...

    def discard(self) -> None:
        """Forget the values of early updates."""
        ...

    def complete_update(self, unit: Unit) -> None:
        """Return when no transfer of a unit's finished updates is under way."""
        ...

    def close_updates(self) -> None:
        """Return when finished updates are where the parameters rest; those not fetched meanwhile are put away."""
        ...


@dataclass(frozen=True)
class PendingStep:
    """A step that is to be taken: `settings` per chunk, its gradients, and what these are multiplied by (None: by one)."""

    settings: Sequence[AdamSettings]
    gradients: HeldGradients
    factor: torch.Tensor | float | None


class Stepper:
    """Turns the step of a unit into jobs of the pipeline. See [Note: generations]. `checksums`: those of the state's files.
    `overlap`: where false, a step waits for its transfers, too. `masters`: which are compressed; None: none ever is."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        kernel: CpuAdam,
        pipeline: StepPipeline,
        updates: Updates,
        checksums: Checksums,
        overlap: bool,
    ) -> None:
        self.chunks = chunks
        self.generations = Generations(chunks, checksums)
        compresses = any(chunk.low_files for chunk in chunks)
        self.masters = CompressedMasters(chunks, pipeline.reader) if compresses else None
        self.kernel = kernel
        self._pipeline = pipeline
        self._updates = updates
        self._overlap = overlap
        self._scratch: torch.Tensor | None = None

    def step(self, unit: Unit, indices: Sequence[int], due: PendingStep, share: StepShare) -> Ticket | None:
        """Issue a share of a unit's parts; the ticket's wait returns when the new values are in memory.

        "early" parts go to the other generation until `commit` or `discard`; "delayed" and "all" change state in place.

        None where the unit has no such part.
        """
        early = share == "early"
        parts = [part for index in indices for part in self.chunks[index].parts(share)]
        if not parts:
            return None
        targets = self._updates.open_update(unit, self._ranges(parts), early)
        if not self._overlap:
            self._updates.complete_update(unit)  # what is read beside the new values
        if early:
            self.generations.step_early(part.chunk for part in parts)
        jobs = [self._job(unit, part, due, targets, early) for part in parts]
        if self.masters is not None:
            update, written = self._updates.unfinished.get(unit), self.generations.written
            if self.masters.compress(zip(parts, jobs, strict=True), update, targets, lambda part: written(part, early)):
                self._updates.wait_writes(unit)
        ticket = self._pipeline.submit(f"step {unit}", jobs, lambda: self._updates.finish_update(unit))
        return ticket if self._overlap else Ticket(ticket.what, lambda: self._complete(unit)).after(ticket)

    def _complete(self, unit: Unit) -> None:
        self._pipeline.drain()
        self._updates.complete_update(unit)

    def complete(self, reads_on: bool = False) -> None:
        """Return when all issued steps are computed and where they rest. Raises the first error. `reads_on`: state of steps
        that are expected goes on being read."""
        self._pipeline.drain(reads_on)
        self._updates.close_updates()

    def expect(self, unit: Unit, indices: Sequence[int], share: StepShare, far: bool = False) -> None:
        """The unit's `step` comes behind those that are expected: start reading its state where there is room. `far`: it comes
        behind the norm, which is not known yet."""
        parts = [part for index in indices for part in self.chunks[index].parts(share)]
        self._pipeline.expect([PrefetchJob(_what(unit, part), self._source(part)) for part in parts], far)

    @property
    def torn(self) -> bool:
        """Whether discarded early steps have torn the state."""
        return self.generations.torn

    def commit(self) -> None:
        """Make the early steps count. All of them must have been waited for."""
        self.generations.commit()
        if self.masters is not None:
            self.masters.commit()
        self._updates.commit()

    def discard(self) -> None:
        """Let the early steps not have been, or know that the state is torn. None may be in flight."""
        self.generations.discard()
        if self.masters is not None:
            self.masters.discard()
        self._updates.discard()

    def gather_state(self) -> None:
        """Bring all state into generation 0, where DeepSpeed looks for it. Nothing may be in flight."""
        self.make_whole()
        parts = self.generations.away()
        jobs = [
            StepJob("copy state", self.generations.source(p), _leave, self.chunks[p.chunk].extents(p), beside=True)
            for p in parts
        ]
        if jobs:
            _write_beside(self._pipeline, "gather state", jobs)
            self.generations.gathered()

    def make_whole(self, params: Sequence[nn.Parameter] | None = None) -> None:
        """Have the masters in files of their own, those of all parts, or of parts that have any of `params`. Nothing may be in
        flight. See `masters.compressed`, [Note: made whole]."""
        if self.masters is None:
            return
        ids = None if params is None else set(map(id, params))
        parts = [
            part
            for part in self.masters.parts
            if ids is None or ids & {id(p) for p, *_ in self.chunks[part.chunk].overlaps(part)}
        ]
        found = self.masters.whole_jobs(parts, lambda part: self.generations.source(part)[0])
        if found:
            _write_beside(self._pipeline, "whole masters", [job for _, job in found.values()])
            self.masters.drop({part: record for part, (record, _) in found.items()})

    def _source(self, part: Part) -> list[Extent]:
        """Where a part's state is, as a step reads it."""
        source = self.generations.source(part)
        if self.masters is not None and (record := self.masters.of(part)) is not None:
            source[0] = record.low
        return source

    def _ranges(self, parts: Sequence[Part]) -> dict[nn.Parameter, tuple[int, int]]:
        ranges: dict[nn.Parameter, tuple[int, int]] = {}
        for part in parts:
            for param, first, _, count in self.chunks[part.chunk].overlaps(part):
                start, before = ranges.get(param, (first, 0))
                ranges[param] = (start, before + count)
        return ranges

    def _job(self, unit: Unit, part: Part, due: PendingStep, targets: Mapping[int, torch.Tensor], early: bool) -> StepJob:
        inputs = [] if early else due.gradients.extents(part)

        def compute(read: Sequence[torch.Tensor]) -> None:
            pieces = [piece.view(torch.float32) for piece in read]
            gradient = pieces.pop().narrow(0, 0, part.numel) if inputs else due.gradients.data(part)
            with torch.no_grad():
                self._compute(part, due, pieces, gradient, targets)
            due.gradients.finish(part, "early step" if early else "step")

        source, beside = self._source(part), early and self.chunks[part.chunk].num_generations > 1
        return StepJob(_what(unit, part), source, compute, self.generations.target(part, early), inputs, beside)

    def _compute(
        self,
        part: Part,
        due: PendingStep,
        state: Sequence[torch.Tensor],
        gradient: torch.Tensor,
        targets: Mapping[int, torch.Tensor],
    ) -> None:
        chunk = self.chunks[part.chunk]
        whole = state if chunk.resident is None else chunk.resident()
        start = 0 if chunk.resident is None else part.start
        master, exp_avg, exp_avg_sq = (piece.narrow(0, start, part.numel) for piece in whole)
        gradient = self._scaled(gradient, due.factor)
        self.kernel.update(due.settings[part.chunk], part, chunk.cuts, (master, gradient, exp_avg, exp_avg_sq))
        for param, in_shard, in_part, count in chunk.overlaps(part):
            targets[id(param)].narrow(0, in_shard, count).copy_(master.narrow(0, in_part, count))

    def _scaled(self, gradient: torch.Tensor, factor: torch.Tensor | float | None) -> torch.Tensor:
        """The gradient times the factor, in memory of our own: the held gradient stays as users may read it."""
        if factor is None:
            return gradient
        if self._scratch is None or self._scratch.numel() < gradient.numel():
            self._scratch = torch.empty_like(gradient)
        return torch.mul(gradient, factor, out=self._scratch.narrow(0, 0, gradient.numel()))


def _write_beside(pipeline: StepPipeline, what: str, jobs: Sequence[StepJob]) -> None:
    """Complete jobs that write beside what is current."""
    try:
        pipeline.submit(what, jobs, lambda: None).wait()
        pipeline.drain()
    except BaseException:  # all state is where it was
        pipeline.wait_idle()
        pipeline.recover()
        raise


def _what(unit: Unit, part: Part) -> str:
    return f"step {unit}, chunk {part.chunk} from {part.start}"


def _leave(_: Sequence[torch.Tensor]) -> None:
    """Copying changes nothing."""


def bytes_read(chunks: Sequence[Chunk], gradients: Callable[[Part], Sequence[Extent]]) -> list[int]:
    """Of each part that reads anything: the bytes of its state, of its gradient where that may wait on SSD, and of its
    parameters where masters are compressed."""
    parts = ((chunk, part) for chunk in chunks for part in chunk.parts("all"))
    read = ((chunk, part, (*chunk.extents(part), *gradients(part))) for chunk, part in parts)
    return [
        sum(extent.num_bytes for extent in extents) + (value_bytes(part.numel, len(chunk.params)) if chunk.low_files else 0)
        for chunk, part, extents in read
        if extents
    ]
