"""Numbers in 8 or 4 bits, block by block, for what crosses a slow link.

[Note: what is rounded, and how] A block of up to `block` neighbours has one fp32 scale. L is the largest code: 127 of 8 bits,
7 of 4 bits.

- scale = absmax * fp32(1/L), at least 2^-126, at most the largest float of which L times is finite.
- code = x * fp32(1/scale), rounded to the nearest integer, ties to the even one, and cut to -L .. L.
- A value comes back as code * scale in fp32, rounded once to the result's dtype.

So an element's error is at most absmax / (2 L), and 2^-127 where that is more, times 1 + 2^-14 for the roundings in fp32, and
then half a unit in the last place of the result's dtype. Zeros come back as +0, -0 too. All elements of a block with inf or nan
come back as nan. The compiled kernel and the one in torch give the same bits, on every device.

[Note: layout] A row is what goes to one rank. It is cut into segments, at whose ends a block ends too: the shards of several
parameters, of which small ones must not be rounded by the absmax of their neighbours. Each segment is stored as its scales, then
its codes, then zeros up to a multiple of 4 bytes. Two codes of 4 bits share a byte as code + 8, the first one in the low half.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Quantizer:
    """Rows of numbers to rows of bytes, and back: see the notes above. `bits`: 8 or 4. `block`: elements, even. `segments`: their
    lengths in a row; empty: a row is one segment. Raises ConfigError for other bits or blocks."""

    bits: int
    block: int = 256
    segments: tuple[int, ...] = ()

    @property
    def largest(self) -> int:
        """L, the largest code."""
        raise NotImplementedError

    def row_bytes(self, numel: int) -> int:
        """Bytes of a row of `numel` elements."""
        raise NotImplementedError

    def quantize(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows`: (rows, numel), fp32, bf16 or fp16, each row contiguous. Returns (rows, row_bytes) of uint8."""
        raise NotImplementedError

    def dequantize(self, packed: torch.Tensor, rows: torch.Tensor) -> None:
        """Overwrite `rows` (rows, numel) with what `packed` (rows, row_bytes) stands for."""
        raise NotImplementedError

    def add(self, packed: torch.Tensor, totals: torch.Tensor) -> None:
        """Add what `packed` stands for to `totals` (rows, numel), fp32."""
        raise NotImplementedError
