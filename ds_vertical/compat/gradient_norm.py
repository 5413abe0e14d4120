"""The norm of a gradient in host memory: stock's bits, without stock's fp64 copy of the gradient.

[Note: torch's order] Stock copies a gradient to fp64 and calls `norm(2)`. On the CPU torch adds the squares up in as many lanes
as a vector register has fp64 numbers: number i in lane i modulo their count, one after the other. Then it adds the lanes, the
first one first, and the elements that fill no register. The square of an fp32, bf16 or fp16 number is exact in fp64, so the
order of the additions decides all bits.

Here a gradient is squared piece by piece, and `vector_norm(1)` adds each lane's squares up, which it does one after the other
and without a root. The sums so far stand in front of each next piece: the first addition is to 0, and exact.

torch's order is no promise. `num_lanes` compares both ways once, on numbers whose sum shows each other order that was tried;
where none fits, or the sum is not fp64, the copy is made as in stock.
"""

from __future__ import annotations

from ds_vertical.compat import version  # noqa: F401 - refuses another DeepSpeed before its private names are imported

# isort: split

import functools

import torch
from deepspeed.runtime.zero.utils import get_norm_dtype

STOCK_PIECE = 250_000_000  # elements that stock's norm takes at a time
_PIECE = 32_768  # elements that are squared at a time
_LANES = (4, 8, 2, 16, 1)  # of AVX2, AVX-512, others
_EXACT = (torch.float32, torch.bfloat16, torch.float16)  # dtypes whose squares are exact in fp64


class NormMemory:
    """Takes norms in memory of its own: a piece where torch adds as expected, else a copy at a time."""

    def __init__(self) -> None:
        self._squares: torch.Tensor | None = None

    def norm(self, gradient: torch.Tensor) -> torch.Tensor:
        """Stock's norm of a flat gradient in host memory (one element or more), bit for bit. 0-d."""
        total: torch.Tensor | None = None
        for part in gradient.reshape(-1).split(STOCK_PIECE):
            square = self._norm(part) ** 2.0
            total = square if total is None else total + square
        assert total is not None
        return total**0.5

    def _norm(self, part: torch.Tensor) -> torch.Tensor:
        """Of what stock copies at a time."""
        lanes = num_lanes() if part.dtype in _EXACT else None
        if lanes is None:
            return part.to(get_norm_dtype()).norm(2)
        return self.root_of_squares(part, lanes)

    def root_of_squares(self, part: torch.Tensor, lanes: int) -> torch.Tensor:
        """`part.double().norm(2)` where torch adds in so many lanes. 0-d."""
        rows, whole = _PIECE // lanes, part.numel() - part.numel() % lanes
        if self._squares is None or self._squares.shape[1] != lanes:
            self._squares = torch.empty(rows + 1, lanes, dtype=torch.float64)
        sums = torch.zeros(lanes, dtype=torch.float64)
        for elements in part[:whole].view(-1, lanes).split(rows):
            squares = self._squares[: len(elements) + 1]
            squares[0] = sums
            torch.square(squares[1:].copy_(elements), out=squares[1:])
            sums = torch.linalg.vector_norm(squares, 1, dim=0)
        total, *others = sums.tolist()
        for each in (*others, *(value * value for value in part[whole:].tolist())):
            total += each
        return torch.tensor(total, dtype=torch.float64).sqrt()


def num_lanes() -> int | None:
    """In how many lanes torch adds here, with the threads that it has now; None where norms are taken of a copy."""
    return _found_lanes(torch.get_num_threads()) if get_norm_dtype() is torch.float64 else None


@functools.cache
def _found_lanes(num_threads: int) -> int | None:
    """`num_threads`: of this thread. Random numbers of very different sizes: each order has a sum of its own."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for numel in (1_003, 32_768, 150_007):
        scales = torch.logspace(-6, 6, numel)[torch.randperm(numel, generator=generator)]
        samples.append(torch.randn(numel, generator=generator) * scales)
    for lanes in _LANES:
        if all(torch.equal(NormMemory().root_of_squares(each, lanes), each.double().norm(2)) for each in samples):
            return lanes
    return None


def copied_bytes(largest: int) -> int:
    """Bytes beside a gradient of `largest` elements in host memory while its norm is taken."""
    if (lanes := num_lanes()) is not None:
        return (_PIECE + lanes) * torch.float64.itemsize
    return min(largest, STOCK_PIECE) * get_norm_dtype().itemsize
