"""Numbers in 8 or 4 bits, block by block, for what crosses a slow link.

[Note: what is rounded, and how] A block of up to `block` neighbours has one fp32 scale. L is the largest code: 127 of 8 bits,
7 of 4 bits.

- scale = absmax * fp32(1/L), at least 2^-126, at most the float below fp32(largest float / L).
- code = x * fp32(1/scale), rounded to the nearest integer, ties to the even one, and cut to -L .. L.
- A value comes back as code * scale in fp32, rounded once to the result's dtype.

So an element's error is at most absmax / (2 L), or 2^-127 where that is more, times 1 + 2^-14 for the roundings in fp32. Where
the result is bf16 or fp16, half a unit in its last place comes on top. Zeros come back as +0, -0 too. All elements of a block
with inf or nan come back as nan. The compiled kernel and the code in torch give the same bits, on every device; nan may have
other bits.

[Note: layout] A row is what goes to one rank. It is cut into segments, at whose ends a block ends too. They are the shards of
several parameters: small values must not be rounded by the absmax of another parameter. Each segment is stored as its scales,
then its codes, then zeros up to a multiple of 4 bytes. Two codes of 4 bits share a byte, each as code + 8, the first one in the
low half.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch.nn import functional

from ds_vertical.compat.ops import load
from ds_vertical.errors import ConfigError

_LARGEST: Final = {8: 127, 4: 7}  # by bits
_LEAST_SCALE: Final = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Quantizer:
    """Rows of numbers to rows of bytes, and back: see the notes above. `bits`: 8 or 4. `block`: elements, even. `segments`:
    their lengths in a row; empty: a row is one segment. Raises ConfigError for other bits or blocks."""

    bits: int
    block: int = 256
    segments: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.bits not in _LARGEST:
            raise ConfigError(f"vertical_schedule.levels.gradient_bits: {self.bits}; write 8 or 4, or null for all bits")
        if self.block < 2 or self.block % 2:
            raise ConfigError(f"vertical_schedule.levels.block: {self.block}; write an even number of elements, such as 256")

    @property
    def largest(self) -> int:
        """L, the largest code."""
        return _LARGEST[self.bits]

    def row_bytes(self, numel: int) -> int:
        """Bytes of a row of `numel` elements."""
        return sum(num_bytes for *_, num_bytes in self._places(numel))

    def quantize(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows`: (rows, numel), fp32, bf16 or fp16, each row contiguous. Returns (rows, row_bytes) of uint8."""
        packed = torch.empty(len(rows), self.row_bytes(rows.shape[1]), dtype=torch.uint8, device=rows.device)
        for values, part in self._segments(rows, packed):
            kernel = _kernel(values)
            if kernel is None:
                part.copy_(_quantized(values, self))
            else:
                kernel.quantize(values, part, self.bits, self.block, torch.get_num_threads())
        return packed

    def dequantize(self, packed: torch.Tensor, rows: torch.Tensor) -> None:
        """Overwrite `rows` (rows, numel) with what `packed` (rows, row_bytes) stands for."""
        self._write(packed, rows, add=False)

    def add(self, packed: torch.Tensor, totals: torch.Tensor) -> None:
        """Add what `packed` stands for to `totals` (rows, numel), fp32."""
        self._write(packed, totals, add=True)

    def _write(self, packed: torch.Tensor, rows: torch.Tensor, *, add: bool) -> None:
        for values, part in self._segments(rows, packed):
            kernel = _kernel(values)
            if kernel is not None:
                kernel.dequantize(part, values, self.bits, self.block, torch.get_num_threads(), add)
            elif add:
                values += _dequantized(part, values.shape[1], self)
            else:
                values.copy_(_dequantized(part, values.shape[1], self))

    def _segments(self, rows: torch.Tensor, packed: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each segment of all rows, as values and as bytes."""
        if packed.shape[1] != self.row_bytes(rows.shape[1]):
            raise ValueError(f"a row of {rows.shape[1]} elements does not fit {packed.shape[1]} bytes of {self}")
        byte = 0
        for first, numel, num_bytes in self._places(rows.shape[1]):
            yield rows.narrow(1, first, numel), packed.narrow(1, byte, num_bytes)
            byte += num_bytes

    def _places(self, numel: int) -> Iterator[tuple[int, int, int]]:
        """The first element, the number of elements and the number of bytes of each segment of a row."""
        if self.segments and sum(self.segments) != numel:
            raise ValueError(f"segments of {self.segments} elements are no row of {numel}")
        first = 0
        for length in self.segments or (numel,):
            yield first, length, 4 * self._num_blocks(length) + -(-length * self.bits // 32) * 4
            first += length

    def _num_blocks(self, numel: int) -> int:
        return -(-numel // self.block)


def _kernel(rows: torch.Tensor) -> load.QuantizeModule | None:
    """The compiled kernel, where it takes these rows."""
    return load.block_quantizer() if rows.device.type == "cpu" else None


# ---- the same in torch, a segment at a time; holds three times the segment's fp32 meanwhile


def _quantized(values: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
    numel, largest = values.shape[1], quantizer.largest
    num_blocks = -(-numel // quantizer.block)
    blocks = functional.pad(values.float(), (0, num_blocks * quantizer.block - numel))
    blocks = blocks.view(len(values), num_blocks, quantizer.block)
    absmax = blocks.abs().amax(dim=2)
    # a product, not a quotient: by a number torch divides otherwise on a GPU
    scales = (absmax * float(np.float32(1) / np.float32(largest))).clamp_(_LEAST_SCALE, _most_scale(largest))
    is_finite = absmax.isfinite()
    inverses = torch.where(is_finite, scales.reciprocal(), 0)
    scales = torch.where(is_finite, scales, torch.nan)
    codes = blocks.mul(inverses.unsqueeze(2)).nan_to_num_(nan=0.0).round_().clamp_(-largest, largest).to(torch.int8)
    codes = codes.view(len(values), -1)[:, :numel]
    if quantizer.bits == 4:
        halves = functional.pad(codes, (0, numel % 2)).add_(8).view(torch.uint8)
        codes = halves[:, ::2] | halves[:, 1::2] << 4
    codes = codes.contiguous().view(torch.uint8)
    return torch.cat([scales.view(torch.uint8), functional.pad(codes, (0, -codes.shape[1] % 4))], dim=1)


def _dequantized(packed: torch.Tensor, numel: int, quantizer: Quantizer) -> torch.Tensor:
    num_blocks = -(-numel // quantizer.block)
    scales = packed[:, : 4 * num_blocks].contiguous().view(torch.float32)
    codes = packed[:, 4 * num_blocks :]
    if quantizer.bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1).view(torch.int8) - 8
    else:
        codes = codes.view(torch.int8)
    blocks = functional.pad(codes[:, :numel].float(), (0, num_blocks * quantizer.block - numel))
    blocks = blocks.view(len(packed), num_blocks, quantizer.block) * scales.unsqueeze(2)
    return blocks.flatten(1)[:, :numel]


def _most_scale(largest: int) -> float:
    """The largest scale: code * scale is finite for every code."""
    return float(np.nextafter(np.finfo(np.float32).max / np.float32(largest), np.float32(0)))
