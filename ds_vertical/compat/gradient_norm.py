"""The norm of a gradient in host memory: stock's bits, without stock's fp64 copy of a large gradient.

[Note: torch's order] Stock copies a gradient to fp64 and calls `norm(2)`. On the CPU torch then adds up the squares in several
lanes, as many as a vector register has fp64 numbers. With 4 lanes the squares of elements 0, 4, 8, ... are added one after the
other in lane 0. At the end torch adds the lanes, the first one first, and then the elements that fill no register. The square
of an fp32, bf16 or fp16 number is exact in fp64. So only two things decide the bits: the order of the additions, and the root.
The root is `math.sqrt` here, since torch's own root of a single number need not be the nearest one.

Here a large gradient is squared piece by piece. `vector_norm(1)` adds up each lane's squares one after the other, and takes no
root. The lanes' sums so far stand in front of each next piece, so the additions go on where they were. (`vector_norm` begins
with 0, and adding the first number to 0 is exact.) That takes some three times as long as the norm of a copy, so a small
gradient is copied as in stock.

torch does not promise this order. So `num_lanes` compares both ways once for each number of threads, on numbers whose sum
differs for each other order that was tried. Where no number of lanes fits, or stock's norm is not in fp64, every gradient is
copied.
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
    """Host memory for the norms of gradients: for a small gradient's copy in fp64, or for the squares of a large one's piece.

    It is kept from one gradient to the next, since the kernel would zero each new mapping page by page. `clear` gives it up at
    the step's end. It is mapped and not allocated: the C library's heap could not give a copy's memory back while small tensors
    above it live on.
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
        """The norm of a part of a gradient that stock copies at a time."""
        lanes = num_lanes() if part.dtype in _EXACT and part.numel() > NORM_COPIED else None
        if lanes is None:
            return self._memory(part.numel(), get_norm_dtype()).copy_(part).norm(2)
        return self.root_of_squares(part, lanes)

    def root_of_squares(self, part: torch.Tensor, lanes: int) -> torch.Tensor:
        """What `part.double().norm(2)` gives where torch adds in `lanes` lanes. 0-d."""
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
        """`numel` numbers, of undefined values."""
        num_bytes = numel * dtype.itemsize
        if self._bytes is None or self._bytes.numel() < num_bytes:
            self._bytes = None  # before the larger one is mapped
            pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            pages.madvise(mmap.MADV_HUGEPAGE)
            self._bytes = torch.frombuffer(pages, dtype=torch.uint8)
        return self._bytes[:num_bytes].view(dtype)

    def clear(self) -> None:
        """Give the memory up."""
        self._bytes = None


def num_lanes() -> int | None:
    """In how many lanes torch adds here, with as many threads as it has now; None where every norm is taken of a copy."""
    return _found_lanes(torch.get_num_threads()) if get_norm_dtype() is torch.float64 else None


@functools.cache
def _found_lanes(num_threads: int) -> int | None:
    """`num_threads`: torch's number of threads now. Compares on random numbers of very different sizes, whose sum differs with
    the order of the additions."""
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
    """Bytes that `NormMemory` takes for gradients of up to `largest` elements."""
    return min(largest, NORM_ELEMENTS if num_lanes() is None else NORM_COPIED) * get_norm_dtype().itemsize
