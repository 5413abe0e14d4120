"""Gradients beyond the host's budget: one file of the run, each part's fp32 elements at a place of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ds_vertical.checksums import Checksums
from ds_vertical.disk import DiskQueue, Transfer
from ds_vertical.parts import ALIGNMENT, Part, spread
from ds_vertical.slots import Extent

FP32_BYTES = 4


def beyond_host(waiting: Mapping[Any, Sequence[Part]], host_share: float) -> list[Part]:
    """Of the parts whose gradients wait for their step, by unit, those beyond the share that waits in host memory. `pre`, the
    last to be reduced and the first to be stepped, waits in memory first."""
    first = waiting.get("pre", ())
    rest = [part for unit, parts in waiting.items() if unit != "pre" for part in parts]
    kept = spread(first, rest, host_share)
    return [part for part in (*first, *rest) if part not in kept]


class GradientFile:
    """`parts` in `path`, which whoever makes it preallocates (`sizes`); without parts there is no file, nor a queue for its
    writes. `checksums`: told of what is written where they verify reads; nobody else asks."""

    def __init__(
        self, path: Path, parts: Iterable[Part], new_queue: Callable[[], DiskQueue], checksums: Checksums | None = None
    ) -> None:
        self._checksums = checksums if checksums is not None and checksums.verify else None
        self._extents: dict[Part, Extent] = {}
        self._writer: DiskQueue | None = None
        self.num_bytes = 0
        for part in parts:
            self._extents[part] = Extent(path, self.num_bytes, aligned_numel(part) * FP32_BYTES)
            self.num_bytes += self._extents[part].num_bytes
        if self._extents:
            self._writer = new_queue()
        self.sizes = {path: self.num_bytes} if self._extents else {}

    def __contains__(self, part: object) -> bool:
        return part in self._extents

    def extents(self, part: Part) -> list[Extent]:
        """Where a part's gradient lies, and padding up to the disk's alignment; nowhere if it is none of the file's."""
        return [self._extents[part]] if part in self._extents else []

    def write(self, part: Part, data: torch.Tensor) -> Transfer:
        """Start writing a part from memory that `aligned` made."""
        extent = self._extents[part]
        assert self._writer is not None
        transfer = self._writer.write(data.data_ptr(), extent.num_bytes, extent.path, extent.offset)
        if self._checksums is not None:  # the padding, too: it is read back
            whole = data.as_strided((extent.num_bytes // FP32_BYTES,), (1,))
            self._checksums.note(extent.path, extent.offset, whole.numpy())
        return transfer

    def complete(self) -> None:
        """Return when nothing is in flight, whatever came of it."""
        if self._writer is not None:
            self._writer.native.wait_all()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def aligned_numel(part: Part) -> int:
    return part.numel + -part.numel % ALIGNMENT


def aligned(numel: int) -> torch.Tensor:
    """fp32 host memory for `numel` elements that starts where the disk can read it."""
    whole = torch.empty(numel + ALIGNMENT, dtype=torch.float32)
    return whole.narrow(0, -whole.data_ptr() % (ALIGNMENT * FP32_BYTES) // FP32_BYTES, numel)
