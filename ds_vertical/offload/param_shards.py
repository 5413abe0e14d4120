"""A parameter's shard on SSD: its files, its place in its unit's host buffer, and the bytes of it that an update fills.

What a unit's parameters are on their way with: from SSD to the device, and new values from the optimizer to SSD.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ds_vertical.compat import zero_params
from ds_vertical.io import files
from ds_vertical.io.aio import DiskQueue, Transfer
from ds_vertical.io.buffers import HostBuffer
from ds_vertical.io.checksums import Checksums
from ds_vertical.io.ticket import Ticket

ElementRange = tuple[int, int]  # first element in a shard, and how many


@dataclass(eq=False)
class Shard:
    """A shard's place in its unit's host buffer, in bytes, and its files: one per generation (one or two), the current one's
    number. `aside`: the file with the current values where a checkpoint shares it (`state_files`, [Note: frozen files]);
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
        zero_params.set_swap_path(self.param, self.path)

    def make_room(self) -> None:
        """Have a file to write. Raises StorageError."""
        if self.is_vacant:
            files.preallocate({Path(self.paths[self.generation]): self.num_bytes})
        self.is_vacant = False

    def set_aside(self, path: Path) -> None:
        """The current values are in another file, which is not to be written."""
        self.aside, self.is_vacant = str(path), self.is_idle
        zero_params.set_swap_path(self.param, self.path)

    def view(self, data: torch.Tensor) -> torch.Tensor:
        """The shard's elements inside a unit buffer, 1-d, in the parameter's dtype."""
        return data.narrow(0, self.start, self.num_bytes).view(self.param.dtype).narrow(0, 0, self.numel)


@dataclass(frozen=True)
class ShardPiece:
    """Bytes [start, end) of a shard's file that an update fills."""

    shard: Shard
    start: int
    end: int

    @classmethod
    def of(cls, shard: Shard, changed: ElementRange) -> ShardPiece:
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
        if zero_params.is_on_ssd(param):
            file = zero_params.swap_file(param)
            paths = (str(file.path), str(zero_params.second_generation(file.path)))[:generations]
            shards.append(Shard(param, paths, start, file.num_bytes, file.numel, not param.requires_grad))
            start += file.num_bytes
    return shards


@dataclass
class Resident:
    """A unit that is fetched or on its way: the parameters that were `partitioned` before, which nobody else has full; those of
    them that this store gathered, and the buffer that backs them."""

    buffer: HostBuffer | None
    partitioned: list[nn.Parameter]
    gathered: list[nn.Parameter]
    ticket: Ticket


@dataclass(frozen=True)
class Copy:
    """A unit's shards on their way into a buffer, as they are in `version`, before anybody fetches them."""

    buffer: HostBuffer
    version: int


@dataclass(eq=False)
class Update:
    """New values of a unit in a host buffer, on their way to SSD and, unless `early`, to the unit's next fetch."""

    buffer: HostBuffer
    pieces: Sequence[ShardPiece]
    early: bool
    finished: bool = False  # all values are there and their writes issued
    returned: bool = False  # the buffer is in its pool again
    writes: Sequence[Transfer] = ()

    def write(self, writer: DiskQueue, checksums: Checksums) -> Sequence[Transfer]:
        """Start writing the values to their files, and note the checksums beside that."""
        writes: list[Transfer] = []
        for piece in self.pieces:
            path = piece.shard.target(self.early)
            data = self.buffer.data.narrow(0, piece.shard.start + piece.start, piece.end - piece.start)
            writes.append(writer.write(data.data_ptr(), data.numel(), path, piece.start))
            checksums.note(path, piece.start, data.numpy())
        self.buffer.writes += writes
        self.writes = writes
        return writes

    def give_up(self, writer: DiskQueue) -> None:
        """Complete the writes, whatever comes of them: nobody needs the values. None of the caller's may be under way."""
        writer.give_up(self.writes)
        self.buffer.writes = [write for write in self.buffer.writes if write not in self.writes]
