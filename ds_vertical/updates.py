"""What a unit's parameters are on their way with: from SSD to the device, and new values from the optimizer to SSD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ds_vertical.checksums import Checksums
from ds_vertical.disk import DiskQueue, Transfer
from ds_vertical.shards import Piece
from ds_vertical.transfer import HostBuffer, Ticket


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
    pieces: Sequence[Piece]
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
