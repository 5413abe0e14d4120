"""Gradients that wait in host memory for their optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ds_vertical.layers import Unit


class HeldGradients:
    """Per chunk one flat fp32 gradient of this rank's shares. `sizes`: elements of each parameter's share, by chunk.

    [Note: gradients in place] With one rank, sums in fp32 and one memory for device and host, the sums are the held
    gradients: nothing is copied, and the memory goes back to the sums of the next step. Otherwise they are copied.
    """

    def __init__(self, sizes: Sequence[Sequence[int]]) -> None:
        self._sizes = [list(shares) for shares in sizes]
        self.chunks: list[torch.Tensor] = [torch.empty(0) for _ in sizes]
        self._kept: dict[Unit, torch.Tensor] = {}
        self._indices: dict[Unit, list[int]] = {}  # chunks of the units whose gradients are held
        self._own: list[torch.Tensor | None] = [None] * len(self._sizes)
        self._copied: dict[int, Any] = {}  # by chunk, the event behind its copies from a device that runs ahead of the host

    @property
    def num_bytes(self) -> int:
        """Bytes of copies; sums held in place are counted by whoever made them."""
        return sum(own.numel() * own.element_size() for own in self._own if own is not None)

    def hold(self, unit: Unit, indices: Sequence[int], shares: Sequence[torch.Tensor], flat: torch.Tensor) -> bool:
        """Hold a unit's shares, one per parameter in the order of its chunks. Returns whether `flat` itself is held."""
        self._indices[unit] = list(indices)
        if _lie_in(flat, shares):
            start = 0
            for index in indices:
                numel = sum(self._sizes[index])
                self.chunks[index] = flat.narrow(0, start, numel)
                start += numel
            self._kept[unit] = flat
            return True
        left = iter(shares)
        for index in indices:
            own = self._memory(index, flat.device)
            for view, share in zip(own.split(self._sizes[index]), left, strict=False):
                view.narrow(0, 0, share.numel()).copy_(share, non_blocking=True)
            self.chunks[index] = own
            if flat.device.type == "cuda":
                self._copied[index] = torch.cuda.current_stream(flat.device).record_event()
        return False

    def wait(self, index: int) -> None:
        """Return once a chunk's gradients have arrived in host memory. From any thread."""
        copied = self._copied.get(index)
        if copied is not None:
            copied.synchronize()

    def views(self, index: int) -> list[torch.Tensor]:
        """A chunk's held gradients, one per parameter."""
        return list(self.chunks[index].split(self._sizes[index]))

    def holds(self, index: int) -> bool:
        """Whether a chunk's gradients are those of the last step."""
        return any(index in indices for indices in self._indices.values())

    def reclaim(self, unit: Unit) -> torch.Tensor | None:
        """Hold the unit's gradients no longer: its next ones are about to be summed, in the memory returned if any."""
        self._indices.pop(unit, None)
        return self._kept.pop(unit, None)

    def _memory(self, index: int, device: torch.device) -> torch.Tensor:
        own = self._own[index]
        if own is None:
            own = torch.zeros(sum(self._sizes[index]), dtype=torch.float32, pin_memory=device.type == "cuda")
            self._own[index] = own
        return own


def _lie_in(flat: torch.Tensor, shares: Sequence[torch.Tensor]) -> bool:
    """Whether the shares are fp32 host memory, one after the other from the start of `flat`."""
    position = flat.data_ptr()
    for share in shares:
        if share.device.type != "cpu" or share.dtype != torch.float32 or share.data_ptr() != position:
            return False
        position += share.numel() * share.element_size()
    return True
