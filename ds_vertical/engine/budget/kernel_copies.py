"""What torch's kernels on the host take of memory beside a result.

[Note: fp32 beside it] Where the processor has no instruction for a dtype of 16 bits, a matrix product of few rows is summed in
fp32, in a copy of the whole result, and rounded behind that. The gradient of a weight is such a product: beside its 2 bytes an
element there are 4 more. Which kernel runs is oneDNN's choice, so it is measured: by the pages that a product takes anew. Each
try is larger than the one before, since a kernel may keep its copy for a next result of the same size. Faults of other threads
count, too: so one try without a copy is enough, as a copy cannot be made without pages.
"""

from __future__ import annotations

import functools
import mmap
import resource
from collections.abc import Iterable, Sequence

import torch

from ds_vertical.io import host
from ds_vertical.types import LARGE_GRADIENT

_TRIES = (4096, 6144, 8192)  # rows of the product; its result is far larger than what else it takes
_COLUMNS, _TOKENS = 1024, 8
_NEARLY = 0.9  # of the result's own pages: with fewer, pages are larger here, or old ones were taken, and faults tell nothing


def are_summed_in_fp32(shapes: Iterable[Sequence[int]], dtypes: Iterable[torch.dtype]) -> bool:
    """Whether a gradient has a copy in fp32 beside it while it is made; True where nobody can tell. `shapes`: of all
    parameters."""
    return not are_made_by_products(shapes) or any(map(sums_in_fp32, dtypes))


def are_made_by_products(shapes: Iterable[Sequence[int]]) -> bool:
    """Whether all large gradients are matrices, as those of linear layers and embeddings. Those of a convolution, or of experts
    that lie in one parameter, are made by other kernels than the one that is measured."""
    return all(len(shape) <= 2 or torch.Size(shape).numel() < LARGE_GRADIENT for shape in shapes)


@functools.cache
def sums_in_fp32(dtype: torch.dtype) -> bool:
    """Whether a weight's gradient of this dtype has a copy in fp32 beside it while it is made; True where nobody can tell."""
    if not host.is_trimmed():
        return True
    _product(512, dtype)  # with the first one comes the kernel
    return not any(_makes_no_copy(rows, dtype) for rows in _TRIES)


def _makes_no_copy(rows: int, dtype: torch.dtype) -> bool:
    host.trim()
    num_bytes = rows * _COLUMNS * dtype.itemsize
    found = _product(rows, dtype) * mmap.PAGESIZE
    return _NEARLY * num_bytes <= found < num_bytes + 2 * rows * _COLUMNS


def _product(rows: int, dtype: torch.dtype) -> int:
    """Make one, and return the page faults of the process meanwhile."""
    left, right = torch.zeros(_TOKENS, rows, dtype=dtype), torch.zeros(_TOKENS, _COLUMNS, dtype=dtype)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    made = left.t() @ right  # as autograd makes it
    after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    del made
    return after - before
