"""The norm of a gradient in host memory: stock's bits, without stock's fp64 copy of a large gradient.

[Note: torch's order] Stock copies a gradient to fp64 and calls `norm(2)`. On the CPU torch adds the squares up in as many lanes
as a vector register has fp64 numbers: number i in lane i modulo their count, one after the other. Then it adds the lanes, the
first one first, and the elements that fill no register. The square of an fp32, bf16 or fp16 number is exact in fp64, so the
order of the additions decides all bits, and the root: torch's own of a single number need not be the nearest one.

Here a large gradient is squared piece by piece, and `vector_norm(1)` adds each lane's squares up, which it does one after the
other and without a root. The sums so far stand in front of each next piece: the first addition is to 0, and exact. That takes
some three times as long as the norm of a copy, so a small gradient is copied as in stock.

torch's order is no promise. `num_lanes` compares both ways once, on numbers whose sum shows each other order that was tried;
where none fits, or the sum is not fp64, every gradient is copied.
"""

from __future__ import annotations

from ds_vertical.compat import version  # noqa: F401 - refuses another DeepSpeed before its private names are imported

# isort: split

import functools
import math
import mmap

import torch
from deepspeed.runtime.zero.utils import get_norm_dtype

from ds_vertical.types import NORM_COPIED, NORM_ELEMENTS

_PIECE = 32_000  # elements that are squared at a time: torch gives so few to one thread
_LANES = (4, 8, 2, 16, 1)  # of AVX2 (which torch uses for norms where there is AVX-512, too), AVX-512, others
_EXACT = (torch.float32, torch.bfloat16, torch.float16)  # dtypes whose squares are exact in fp64


class NormMemory:
    """Host memory for the norms of gradients: for a copy in fp64, or for a large one's squares.

    Kept from one gradient to the next, where each new mapping would be zeroed page by page; `clear` gives it up at the step's
    end. Mapped and not allocated: the C library's heap would keep every copy's memory below the small tensors that live on.
    """

    def __init__(self) -> None:
        self._bytes: torch.Tensor | None = None

    def norm(self, gradient: torch.Tensor) -> torch.Tensor:
        """Stock's norm of a flat gradient in host memory (one element or more), bit for bit. 0-d."""
        total: torch.Tensor | None = None
        for part in gradient.reshape(-1).split(NORM_ELEMENTS):
            square = self._norm(part) ** 2.0
            total = square if total is None else total + square
        assert total is not None
        return total**0.5

    def _norm(self, part: torch.Tensor) -> torch.Tensor:
        """Of what stock copies at a time."""
        lanes = num_lanes() if part.dtype in _EXACT and part.numel() > NORM_COPIED else None
        if lanes is None:
            return self._memory(part.numel(), get_norm_dtype()).copy_(part).norm(2)
        return self.root_of_squares(part, lanes)

    def root_of_squares(self, part: torch.Tensor, lanes: int) -> torch.Tensor:
        """`part.double().norm(2)` where torch adds in so many lanes. 0-d."""
        rows, whole = _PIECE // lanes, part.numel() - part.numel() % lanes
        memory = self._memory((rows + 1) * lanes, torch.float64).view(rows + 1, lanes)
        sums = torch.zeros(lanes, dtype=torch.float64)
        for elements in part[:whole].view(-1, lanes).split(rows):
            squares = memory[: len(elements) + 1]
            squares[0] = sums
            torch.square(squares[1:].copy_(elements), out=squares[1:])
            sums = torch.linalg.vector_norm(squares, 1, dim=0)
        total, *others = sums.tolist()
        for each in (*others, *(value * value for value in part[whole:].tolist())):
            total += each
        return torch.tensor(math.sqrt(total), dtype=torch.float64)

    def _memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """So many numbers, of undefined values."""
        num_bytes = numel * dtype.itemsize
        if self._bytes is None or self._bytes.numel() < num_bytes:
            self._bytes = None  # before the larger one is mapped
            pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            pages.madvise(mmap.MADV_HUGEPAGE)
            self._bytes = torch.frombuffer(pages, dtype=torch.uint8)
        return self._bytes[:num_bytes].view(dtype)

    def clear(self) -> None:
        """Unmap."""
        self._bytes = None


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
    """Bytes of `NormMemory` for gradients of up to `largest` elements."""
    return min(largest, NORM_ELEMENTS if num_lanes() is None else NORM_COPIED) * get_norm_dtype().itemsize
