"""Chunks, their files of optimizer state, and which of these hold what is current.

[Note: generations] An early step is taken before it is known whether the step counts. It reads the state of one generation
of files and writes that of the other; `commit` turns the bit, `discard` does not. The delayed share of a chunk is stepped
when all is known and has one generation only. So a chunk's state is current in generation `g` up to its boundary, and in
generation 0 beyond. Where there is one generation at all, early steps are taken in place: the other one is the same, and what
is discarded has torn the state.

[Note: frozen files] A checkpoint may share files with the run by hard links. Such a file is never written again: `set_aside`
gives it another name, and the name that the next step writes to goes to a new, preallocated file. A part is read aside until
it has been written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from ds_vertical.io import files as io_files
from ds_vertical.io.checksums import Checksums
from ds_vertical.io.extents import Extent
from ds_vertical.io.runs import stripes
from ds_vertical.offload.chunking import FP32_BYTES, Cut, Part, boundary, split_chunk

KINDS = ("master", "exp_avg", "exp_avg_sq")
StepShare = Literal["early", "delayed", "all"]
Files = tuple[Path, Path, Path]  # of KINDS


@dataclass(frozen=True)
class Chunk:
    """What a step needs of one chunk. `files` on SSD, one set per generation, or `resident`, which finds the state in host
    memory when it is needed (loading a checkpoint moves it).

    `early`: the parts before the boundary, `delayed`: those from it on. `file_numel`: elements of a state file, the chunk's
    rounded up to the disk's alignment. `low_files`: those of compressed masters, one per generation; None: masters stay whole.
    """

    params: Sequence[nn.Parameter]
    sizes: Sequence[int]
    cuts: Sequence[Cut]
    early: Sequence[Part]
    delayed: Sequence[Part]
    file_numel: int
    files: tuple[Files, ...] | None
    resident: Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None
    low_files: tuple[Path, ...] | None = None

    @staticmethod
    def shares(index: int, sizes: Sequence[int], early_share: float, largest: int) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
        """The early and the delayed parts of a chunk of which `early_share` is to be stepped early."""
        middle = boundary(sizes, early_share)
        return split_chunk(index, 0, middle, largest), split_chunk(index, middle, sum(sizes), largest)

    def parts(self, share: StepShare) -> Sequence[Part]:
        """The parts of a share, in order."""
        return {"early": self.early, "delayed": self.delayed, "all": (*self.early, *self.delayed)}[share]

    @property
    def num_generations(self) -> int:
        """Of its files; 1 where the state is in memory."""
        return len(self.files or (None,))

    @property
    def boundary(self) -> int:
        """The first element of the delayed parts."""
        return sum(part.numel for part in self.early)

    @property
    def numel(self) -> int:
        """Elements of this rank's shares of the parameters."""
        return sum(self.sizes)

    def overlaps(self, part: Part) -> Iterator[tuple[nn.Parameter, int, int, int]]:
        """(parameter, first element in its shard, first element in the part, count) of what the part covers."""
        start = 0
        for param, size in zip(self.params, self.sizes, strict=True):
            first, last = max(part.start, start), min(part.start + part.numel, start + size)
            if first < last:
                yield param, first - start, first - part.start, last - first
            start += size

    def extents(self, part: Part, paths: Iterable[Path] | None = None) -> list[Extent]:
        """The part's bytes in three files (the first generation's); the last part takes the padding that rounds them up."""
        if self.files is None:
            return []
        end = part.start + part.numel
        end = self.file_numel if end == self.numel else end
        first, num_bytes = part.start * FP32_BYTES, (end - part.start) * FP32_BYTES
        return [Extent(path, first, num_bytes) for path in (self.files[0] if paths is None else paths)]


class Generations:
    """Which files hold each part's current state, and which the next step writes. See the notes above."""

    def __init__(self, chunks: Sequence[Chunk], checksums: Checksums) -> None:
        self._chunks = chunks
        self._checksums = checksums
        self._bits = [0] * len(chunks)
        self._stepped_early: set[int] = set()
        self._aside: dict[Part, Files] = {}
        self._moved: set[Files] = set()  # sets of files aside, those that hold no current state any more included
        self._num_moves = 0
        self.torn = False  # early steps that do not count have changed the only generation

    def source(self, part: Part) -> list[Extent]:
        """Where a part's current state is; nowhere on SSD if it is in memory."""
        chunk = self._chunks[part.chunk]
        return chunk.extents(part, self._paths(part)) if chunk.files is not None else []

    def target(self, part: Part, early: bool) -> list[Extent]:
        """Where a step writes a part. In place unless `early`, and then its state is there from now on."""
        chunk = self._chunks[part.chunk]
        if chunk.files is None:
            return []
        if not early:
            self._aside.pop(part, None)
        return chunk.extents(part, chunk.files[self.written(part, early)])

    def written(self, part: Part, early: bool) -> int:
        """The generation whose files a step of the part writes."""
        return self._other(part.chunk) if early else self._bit(part)

    def step_early(self, indices: Iterable[int]) -> None:
        """Early steps of these chunks are under way until `commit` or `discard`."""
        self._stepped_early.update(indices)

    def commit(self) -> None:
        """Make the early steps count."""
        for index in self._stepped_early:
            self._bits[index] = self._other(index)
            for part in self._chunks[index].early:
                self._aside.pop(part, None)
        self._stepped_early.clear()

    def discard(self) -> None:
        """Let the early steps not have been, or know that the state is torn."""
        self.torn |= any(self._other(index) == self._bits[index] for index in self._stepped_early)
        self._stepped_early.clear()

    def away(self) -> list[Part]:
        """Parts whose state is not in generation 0, where DeepSpeed looks for it."""
        parts = (part for chunk in self._chunks for part in chunk.parts("all"))
        return [part for part in parts if part in self._aside or self._bit(part)]

    def gathered(self) -> None:
        """All state has been copied to generation 0."""
        self._bits = [0] * len(self._chunks)
        self._aside.clear()
        self._remove_unused()

    # ---- files that a checkpoint shares

    def on_ssd(self) -> Iterator[tuple[int, Part, Files]]:
        """Every part whose state is on SSD: its chunk's number, itself, the files with its current state."""
        for index, chunk in enumerate(self._chunks):
            if chunk.files is not None:
                yield from ((index, part, self._paths(part)) for part in chunk.parts("all"))

    def set_aside(self, shared: Collection[Path]) -> None:
        """Files of `shared` that hold current state are read only from now on. Nothing may be in flight.

        Raises StorageError, with nothing changed, where there is no room for those that take their place.
        """
        self._remove_unused()
        sets = {paths for _, part, paths in self.on_ssd() if part not in self._aside and not set(paths).isdisjoint(shared)}
        if not sets:
            return
        self._num_moves += 1
        pairs = {path: path.with_name(f"{path.name}.{self._num_moves}") for paths in sets for path in paths}
        io_files.set_aside(pairs)
        for path, aside in pairs.items():
            self._checksums.move(path, aside)
        found = [(part, paths) for _, part, paths in self.on_ssd() if paths in sets]
        self._aside |= {part: (pairs[first], pairs[second], pairs[third]) for part, (first, second, third) in found}
        self._moved = set(self._aside.values())

    def _remove_unused(self) -> None:
        used = set(self._aside.values())
        unused = self._moved - used
        io_files.remove_files(path for paths in unused for path in paths)
        for path in (path for paths in unused for path in paths):
            self._checksums.forget(path)
            stripes.forget_file(path)
        self._moved &= used

    # ---- inside

    def _paths(self, part: Part) -> Files:
        of_chunk = self._chunks[part.chunk].files
        assert of_chunk is not None
        return self._aside.get(part) or of_chunk[self._bit(part)]

    def _bit(self, part: Part) -> int:
        return self._bits[part.chunk] if part.start < self._chunks[part.chunk].boundary else 0

    def _other(self, index: int) -> int:
        """The generation that an early step of a chunk writes."""
        return (self._bits[index] + 1) % self._chunks[index].num_generations
