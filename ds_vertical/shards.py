"""A parameter's shard on SSD: its files, its place in its unit's host buffer, and the bytes of it that an update fills."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ds_vertical import compat, files

Range = tuple[int, int]  # first element in a shard, and how many


@dataclass(eq=False)
class Shard:
    """A shard's place in its unit's host buffer, in bytes, and its files: one per generation (one or two), the current one's
    number. `aside`: the file with the current values where a checkpoint shares it (`generations`, [Note: frozen files]);
    `is_idle`: the optimizer never steps it; then there is no file in its place meanwhile (`is_vacant`)."""

    param: nn.Parameter
    paths: tuple[str, ...]
    start: int
    num_bytes: int
    numel: int
    is_idle: bool
    generation: int = 0
    aside: str | None = None
    is_vacant: bool = False

    @property
    def other(self) -> int:
        """The generation that an early step writes."""
        return (self.generation + 1) % len(self.paths)

    @property
    def path(self) -> str:
        """The file with the current values."""
        return self.aside or self.paths[self.generation]

    def target(self, early: bool) -> str:
        """The file that a step writes."""
        return self.paths[self.other if early else self.generation]

    def leave(self) -> None:
        """The file aside holds the current values no more. Raises StorageError, with nothing changed: no room for another."""
        self.make_room()
        self.aside = None
        compat.set_swap_path(self.param, self.path)

    def make_room(self) -> None:
        """Have a file to write. Raises StorageError."""
        if self.is_vacant:
            files.preallocate({Path(self.paths[self.generation]): self.num_bytes})
        self.is_vacant = False

    def set_aside(self, path: Path) -> None:
        """The current values are in another file, which is not to be written."""
        self.aside, self.is_vacant = str(path), self.is_idle
        compat.set_swap_path(self.param, self.path)

    def view(self, data: torch.Tensor) -> torch.Tensor:
        """The shard's elements inside a unit buffer, 1-d, in the parameter's dtype."""
        return data.narrow(0, self.start, self.num_bytes).view(self.param.dtype).narrow(0, 0, self.numel)


@dataclass(frozen=True)
class Piece:
    """Bytes [start, end) of a shard's file that an update fills."""

    shard: Shard
    start: int
    end: int

    @classmethod
    def of(cls, shard: Shard, changed: Range) -> Piece:
        first, count = changed
        size = shard.param.element_size()
        end = shard.num_bytes if first + count == shard.numel else (first + count) * size
        return cls(shard, first * size, end)

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.end == self.shard.num_bytes


def lay_out(params: Sequence[nn.Parameter], generations: int) -> list[Shard]:
    """Neighbouring places for the shards that live on SSD; file sizes are multiples of the aio alignment already."""
    shards: list[Shard] = []
    start = 0
    for param in params:
        if compat.is_on_ssd(param):
            file = compat.swap_file(param)
            paths = (str(file.path), str(compat.second_generation(file.path)))[:generations]
            shards.append(Shard(param, paths, start, file.num_bytes, file.numel, not param.requires_grad))
            start += file.num_bytes
    return shards
