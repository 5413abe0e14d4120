"""A sub-group whose gradients wait, without an SSD."""

from __future__ import annotations

from ds_vertical.io.aio import DiskQueue
from ds_vertical.offload.chunking import ALIGNMENT
from ds_vertical.offload.state_files import Chunk

SIZES = [3000, 2 * ALIGNMENT, 5]


def no_queue() -> DiskQueue:
    raise AssertionError("nothing waits on SSD")


def a_chunk(early_share: float) -> Chunk:
    sizes = [2 * ALIGNMENT, *SIZES]
    early, delayed = Chunk.shares(0, sizes, early_share, ALIGNMENT)
    return Chunk([], sizes, [], early, delayed, sum(sizes), None, None)
