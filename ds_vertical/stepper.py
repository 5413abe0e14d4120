"""The optimizer step of one unit: its chunks' parts through the pipeline, from held gradients to new parameters.

[Note: generations] An early step is taken before it is known whether the step counts. It reads the state of one generation
of files and writes that of the other; `commit` turns the bit, `discard` does not. The delayed share of a chunk is stepped
when all is known and has one generation only. So a chunk's state is current in generation `g` up to its boundary, and in
generation 0 beyond. Where there is one generation at all, early steps are taken in place: the other one is the same, and what
is discarded has torn the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import nn

from ds_vertical.adam import AdamSettings, CpuAdam
from ds_vertical.chunks import Cut
from ds_vertical.held import HeldGradients
from ds_vertical.layers import Unit
from ds_vertical.parts import Part, boundary, split_chunk
from ds_vertical.pipeline import Extent, Job, StepPipeline
from ds_vertical.transfer import Ticket

FP32_BYTES = 4
Share = Literal["early", "delayed", "all"]
Files = tuple[Path, Path, Path]  # master, exp_avg, exp_avg_sq


class Updates(Protocol):
    """Where a unit's new parameters go."""

    def open_update(
        self, unit: Unit, ranges: Mapping[nn.Parameter, tuple[int, int]], early: bool
    ) -> Mapping[int, torch.Tensor]:
        """By id(param), the memory (1-d, the parameter's dtype) of its shard, of which `ranges` (first, count) is filled."""
        ...

    def finish_update(self, unit: Unit) -> None:
        """All values are there; called on the pipeline's thread."""
        ...

    @property
    def error(self) -> BaseException | None:
        """The first write of new parameters that failed."""
        ...

    def commit(self) -> None: ...

    def discard(self) -> None: ...

    def close_updates(self) -> None:
        """Return when finished updates are where the parameters rest; those not fetched meanwhile are put away."""
        ...


@dataclass(frozen=True)
class Chunk:
    """What a step needs of one chunk. `files` on SSD, one set per generation, or `resident`, which finds the state in host
    memory when it is needed (loading a checkpoint moves it).

    `early`: the parts before the boundary, `delayed`: those from it on. `file_numel`: elements of a state file, the chunk's
    rounded up to the disk's alignment.
    """

    params: Sequence[nn.Parameter]
    sizes: Sequence[int]
    cuts: Sequence[Cut]
    early: Sequence[Part]
    delayed: Sequence[Part]
    file_numel: int
    files: tuple[Files, ...] | None
    resident: Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None

    @staticmethod
    def shares(index: int, sizes: Sequence[int], early_share: float, largest: int) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
        """The early and the delayed parts of a chunk of which `early_share` is to be stepped early."""
        middle = boundary(sizes, early_share)
        return split_chunk(index, 0, middle, largest), split_chunk(index, middle, sum(sizes), largest)

    def parts(self, share: Share) -> Sequence[Part]:
        """The parts of a share, in order."""
        return {"early": self.early, "delayed": self.delayed, "all": (*self.early, *self.delayed)}[share]

    @property
    def boundary(self) -> int:
        """The first element of the delayed parts."""
        return sum(part.numel for part in self.early)

    @property
    def numel(self) -> int:
        return sum(self.sizes)

    def overlaps(self, part: Part) -> Iterator[tuple[nn.Parameter, int, int, int]]:
        """(parameter, first element in its shard, first element in the part, count) of what the part covers."""
        start = 0
        for param, size in zip(self.params, self.sizes, strict=True):
            first, last = max(part.start, start), min(part.start + part.numel, start + size)
            if first < last:
                yield param, first - start, first - part.start, last - first
            start += size

    def extents(self, part: Part, generation: int) -> list[Extent]:
        """The part's bytes in the chunk's three files; the last part takes the padding that rounds the file up."""
        if self.files is None:
            return []
        end = part.start + part.numel
        end = self.file_numel if end == self.numel else end
        return [
            Extent(path, part.start * FP32_BYTES, (end - part.start) * FP32_BYTES) for path in self.files[generation]
        ]


@dataclass(frozen=True)
class Due:
    """A step that is to be taken: `settings` per chunk, its gradients, and what these are multiplied by (None: by one)."""

    settings: Sequence[AdamSettings]
    gradients: HeldGradients
    factor: torch.Tensor | float | None


class Stepper:
    """Turns the step of a unit into jobs of the pipeline. See [Note: generations]."""

    def __init__(self, chunks: Sequence[Chunk], kernel: CpuAdam, pipeline: StepPipeline, updates: Updates) -> None:
        self.chunks = chunks
        self._kernel = kernel
        self._pipeline = pipeline
        self._updates = updates
        self._generation = [0] * len(chunks)
        self._stepped_early: set[int] = set()
        self.torn = False  # early steps that do not count have changed the only generation
        self._scratch: torch.Tensor | None = None

    def step(self, unit: Unit, indices: Sequence[int], due: Due, share: Share) -> Ticket | None:
        """Issue a share of a unit's parts; the ticket's wait returns when the new values are in memory.

        "early" parts go to the other generation until `commit` or `discard`; "delayed" and "all" change state in place.

        None where the unit has no such part.
        """
        early = share == "early"
        parts = [part for index in indices for part in self.chunks[index].parts(share)]
        if not parts:
            return None
        targets = self._updates.open_update(unit, self._ranges(parts), early)
        if early:
            self._stepped_early.update(part.chunk for part in parts)
        jobs = [self._job(unit, part, due, targets, early) for part in parts]
        return self._pipeline.submit(f"step {unit}", jobs, lambda: self._updates.finish_update(unit))

    def commit(self) -> None:
        """Make the early steps count. All of them must have been waited for."""
        for index in self._stepped_early:
            self._generation[index] = self._other(index)
        self._stepped_early.clear()
        self._updates.commit()

    def discard(self) -> None:
        """Let the early steps not have been, or know that the state is torn. None may be in flight."""
        self.torn |= any(self._other(index) == self._generation[index] for index in self._stepped_early)
        self._stepped_early.clear()
        self._updates.discard()

    def gather_state(self) -> None:
        """Bring all state into generation 0, where DeepSpeed looks for it. Nothing may be in flight."""
        jobs = [
            Job("copy state", chunk.extents(part, 1), _leave, chunk.extents(part, 0))
            for index, chunk in enumerate(self.chunks)
            if self._generation[index]
            for part in chunk.early
        ]
        if jobs:
            self._pipeline.submit("gather state", jobs, lambda: None).wait()
            self._pipeline.drain()
        self._generation = [0] * len(self.chunks)

    def _other(self, index: int) -> int:
        """The generation that an early step of a chunk writes."""
        return (self._generation[index] + 1) % len(self.chunks[index].files or (None,))

    def _ranges(self, parts: Sequence[Part]) -> dict[nn.Parameter, tuple[int, int]]:
        ranges: dict[nn.Parameter, tuple[int, int]] = {}
        for part in parts:
            for param, first, _, count in self.chunks[part.chunk].overlaps(part):
                start, before = ranges.get(param, (first, 0))
                ranges[param] = (start, before + count)
        return ranges

    def _job(self, unit: Unit, part: Part, due: Due, targets: Mapping[int, torch.Tensor], early: bool) -> Job:
        chunk = self.chunks[part.chunk]
        current = self._generation[part.chunk] if part.start < chunk.boundary else 0

        inputs = [] if early else due.gradients.extents(part)

        def compute(read: Sequence[torch.Tensor]) -> None:
            pieces = [piece.view(torch.float32) for piece in read]
            gradient = pieces.pop().narrow(0, 0, part.numel) if inputs else due.gradients.data(part)
            with torch.no_grad():
                self._compute(part, due, pieces, gradient, targets)
            due.gradients.finish(part, "early step" if early else "step")

        outputs = chunk.extents(part, self._other(part.chunk)) if early else None
        what = f"step {unit}, chunk {part.chunk} from {part.start}"
        return Job(what, chunk.extents(part, current), compute, outputs, inputs)

    def _compute(
        self,
        part: Part,
        due: Due,
        state: Sequence[torch.Tensor],
        gradient: torch.Tensor,
        targets: Mapping[int, torch.Tensor],
    ) -> None:
        chunk = self.chunks[part.chunk]
        whole = state if chunk.resident is None else chunk.resident()
        start = 0 if chunk.resident is None else part.start
        master, exp_avg, exp_avg_sq = (piece.narrow(0, start, part.numel) for piece in whole)
        gradient = self._scaled(gradient, due.factor)
        self._kernel.update(due.settings[part.chunk], part, chunk.cuts, (master, gradient, exp_avg, exp_avg_sq))
        for param, in_shard, in_part, count in chunk.overlaps(part):
            targets[id(param)].narrow(0, in_shard, count).copy_(master.narrow(0, in_part, count))

    def _scaled(self, gradient: torch.Tensor, factor: torch.Tensor | float | None) -> torch.Tensor:
        """The gradient times the factor, in memory of our own: the held gradient stays as users may read it."""
        if factor is None:
            return gradient
        if self._scratch is None or self._scratch.numel() < gradient.numel():
            self._scratch = torch.empty_like(gradient)
        return torch.mul(gradient, factor, out=self._scratch.narrow(0, 0, gradient.numel()))


def _leave(_: Sequence[torch.Tensor]) -> None:
    """Copying changes nothing."""


def bytes_read(chunks: Sequence[Chunk], gradients: Callable[[Part], Sequence[Extent]]) -> list[int]:
    """Of each part that reads anything: the bytes of its state, and of its gradient where that may wait on SSD."""
    parts = ((chunk, part) for chunk in chunks for part in chunk.parts("all"))
    read = ((*chunk.extents(part, 0), *gradients(part)) for chunk, part in parts)
    return [sum(extent.num_bytes for extent in extents) for extents in read if extents]
