"""Memory of the optimizer's pipeline, and the pieces of files that pass through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ds_vertical.disk import Transfer


@dataclass(frozen=True)
class Extent:
    """A piece of a state file: `num_bytes` at `offset` are transferred, both multiples of the disk's alignment."""

    path: Path
    offset: int
    num_bytes: int

    def overlaps(self, other: Extent) -> bool:
        end, other_end = self.offset + self.num_bytes, other.offset + other.num_bytes
        return self.path == other.path and self.offset < other_end and other.offset < end


class Slot:
    """Memory of what one part's step reads, cut into as many pieces as there are extents."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self.writes: list[Transfer] = []
        self.beside = True  # the job whose writes these are

    def views(self, extents: Sequence[Extent]) -> list[torch.Tensor]:
        views, start = [], 0
        for extent in extents:
            views.append(self.data.narrow(0, start, extent.num_bytes))
            start += extent.num_bytes
        return views

    @property
    def free(self) -> bool:
        return all(write.done for write in self.writes)
