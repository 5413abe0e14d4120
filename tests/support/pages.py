"""Which pages of a tensor's memory hold memory."""

from __future__ import annotations

import ctypes
import mmap

import torch


def resident_pages(tensor: torch.Tensor) -> int:
    """Pages of a tensor's memory that hold memory, of those that lie in it whole."""
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // mmap.PAGESIZE * mmap.PAGESIZE
    present = (ctypes.c_ubyte * ((last - first) // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(last - first), present) == 0
    return sum(page & 1 for page in present)
