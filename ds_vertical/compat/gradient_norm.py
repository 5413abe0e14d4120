"""The norm of a gradient in host memory: stock's bits, without stock's fp64 copy of the gradient.

[Note: torch's order] Stock copies a gradient to fp64 and calls `norm(2)`. On the CPU torch adds the squares up one after the
other. From `_GRAIN` elements on it cuts the gradient into T equal runs, T the number of threads and at most one for each
`_GRAIN` elements; each thread adds up a run, then the T sums are added up, the first one first. The square of an fp32, bf16 or
fp16 number is exact in fp64, so the order of the additions decides all bits.

`vector_norm(1)` adds in that order, too, and takes no root at its end. So a gradient is squared piece by piece, in all runs at
a time, and the sum so far stands in front of each next piece: the first addition is to 0, and exact. Pieces are shorter than
`_GRAIN`, so that torch does not cut them.

torch's order is no promise. `is_in_pieces` compares both ways once, on numbers whose sum shows each other order that was tried;
where they differ, or the sum is not fp64, the copy is made as in stock.
"""

from __future__ import annotations

from ds_vertical.compat import version  # noqa: F401 - refuses another DeepSpeed before its private names are imported

# isort: split

import functools

import torch
from deepspeed.runtime.zero.utils import get_norm_dtype

STOCK_PIECE = 250_000_000  # elements that stock's norm takes at a time
_GRAIN = 32_768  # at::internal::GRAIN_SIZE of torch
_PIECE = _GRAIN - 2  # elements of each run that are squared at a time; with the sum so far one less than _GRAIN
_EXACT = (torch.float32, torch.bfloat16, torch.float16)  # dtypes whose squares are exact in fp64


class NormMemory:
    """Takes norms in memory of its own: `pieces_bytes` at most where torch adds as expected, else a copy at a time."""

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
        if part.dtype not in _EXACT or not is_in_pieces():
            return part.to(get_norm_dtype()).norm(2)
        return self.sum_of_squares(part).sqrt()

    def sum_of_squares(self, part: torch.Tensor) -> torch.Tensor:
        """The fp64 sum from which `part.double().norm(2)` takes the root. 0-d."""
        numel = part.numel()
        num_runs = _num_runs(numel)
        length = -(-numel // num_runs)
        squares = self._memory(num_runs)
        squares[:, 0] = 0.0
        for start in range(0, length, _PIECE):
            self._add(part, squares, range(start, min(start + _PIECE, length)))
        total = squares[0, 0].clone()
        for run in range(1, num_runs):
            total += squares[run, 0]
        return total

    def _add(self, part: torch.Tensor, squares: torch.Tensor, place: range) -> None:
        """Add elements `place` of each run to the sums, the first column of `squares`; the last run may be shorter."""
        num_runs, numel = squares.shape[0], part.numel()
        length = -(-numel // num_runs)
        last = numel - (num_runs - 1) * length  # elements of the last run
        for first, end, count in (
            (place.start, min(place.stop, last), num_runs),
            (max(place.start, last), place.stop, num_runs - 1),
        ):
            if first < end and count:
                columns = end - first
                rows = squares[:count, : columns + 1]
                elements = part.as_strided((count, columns), (length, 1), part.storage_offset() + first)
                torch.square(rows[:, 1:].copy_(elements), out=rows[:, 1:])
                rows[:, 0] = torch.linalg.vector_norm(rows, 1, dim=1)

    def _memory(self, num_runs: int) -> torch.Tensor:
        if self._squares is None or len(self._squares) < num_runs:
            self._squares = torch.empty(num_runs, _PIECE + 1, dtype=torch.float64)
        return self._squares[:num_runs]


def _num_runs(numel: int) -> int:
    """Into how many runs torch cuts so many elements, on this thread."""
    return 1 if numel < _GRAIN else min(torch.get_num_threads(), -(-numel // _GRAIN))


def is_in_pieces() -> bool:
    """Whether norms are taken in pieces here: torch adds as [Note: torch's order] says, with the threads that it has now."""
    return get_norm_dtype() is torch.float64 and _adds_as_expected(torch.get_num_threads())


@functools.cache
def _adds_as_expected(num_threads: int) -> bool:
    """`num_threads`: of this thread. Random numbers of very different sizes: each order has a sum of its own."""
    generator, memory = torch.Generator().manual_seed(0), NormMemory()
    for numel in (1_003, _GRAIN, min(num_threads, 8) * 2 * _GRAIN + 5):
        sample = (
            torch.randn(numel, generator=generator) * torch.logspace(-6, 6, numel)[torch.randperm(numel, generator=generator)]
        )
        if memory.sum_of_squares(sample).sqrt() != sample.double().norm(2):
            return False
    return True


def copied_bytes(largest: int) -> int:
    """Bytes beside a gradient of `largest` elements in host memory while its norm is taken."""
    if is_in_pieces():
        return _num_runs(largest) * (_PIECE + 1) * torch.float64.itemsize
    return min(largest, STOCK_PIECE) * get_norm_dtype().itemsize
