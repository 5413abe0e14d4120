"""What torch's kernels on the host take of memory beside a result.

[Note: fp32 beside it] Where the processor has no instruction for a dtype of 16 bits, a matrix product of few rows is summed in
fp32, in a copy of the whole result, and rounded behind that. The gradient of a weight is such a product: beside its 2 bytes an
element there are 4 more. Which kernel runs is oneDNN's choice, so it is measured: by the pages that a product takes anew.
"""

from __future__ import annotations

import functools
import mmap
import resource

import torch

from ds_vertical.io import host

_ROWS, _COLUMNS, _TOKENS = 8192, 1024, 8  # of the product; its result is far larger than what else it takes
_NEARLY = 0.9  # of the result's own pages: with fewer, pages are larger here, or old ones were taken, and faults tell nothing


@functools.cache
def sums_in_fp32(dtype: torch.dtype) -> bool:
    """Whether a weight's gradient of this dtype has a copy in fp32 beside it while it is made; True where nobody can tell."""
    if not host.is_trimmed():
        return True
    left, right = torch.zeros(_ROWS, _TOKENS, dtype=dtype), torch.zeros(_TOKENS, _COLUMNS, dtype=dtype)
    left = left.t().contiguous().t()  # as autograd has it
    _ = left @ right  # with the first one comes the kernel
    del _
    host.trim()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    made = left @ right
    found = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * mmap.PAGESIZE
    return not _NEARLY * made.nbytes <= found < made.nbytes + 2 * made.numel()
