"""Page-locked host memory, for direct I/O and for copies to and from a device."""

from __future__ import annotations

from ds_vertical.compat import version  # noqa: F401 - refuses another DeepSpeed before its private names are imported

# isort: split

import functools
import mmap
import os
from typing import Any, Protocol

import torch
from deepspeed.ops.op_builder.pin_memory import PinMemoryBuilder

from ds_vertical.compat import accelerator
from ds_vertical.io import host


class PinHandle(Protocol):
    """What DeepSpeed's op `pin_memory` locks and frees with."""

    def new_cpu_locked_tensor(self, numel: int, example: torch.Tensor, /) -> torch.Tensor:
        """A 1-d tensor of locked memory, of the example's dtype."""
        ...

    def free_cpu_locked_tensor(self, tensor: torch.Tensor, /) -> bool:
        """Free it; False for a tensor that was made elsewhere."""
        ...


@functools.cache
def _pin_handle() -> PinHandle:
    module: Any = PinMemoryBuilder().load(verbose=False)
    return module.pin_handle()


def lock_host_bytes(num_bytes: int) -> torch.Tensor:
    """`num_bytes` of page-locked host memory, page-aligned, as a 1-d uint8 tensor; where host and device are one memory in huge
    pages, see `host`. Raises OSError where it may not be locked."""
    if not accelerator.get_accelerator().is_synchronized_device():
        return accelerator.get_accelerator().pin_memory(torch.empty(num_bytes, dtype=torch.uint8))
    if num_bytes < host.HUGE_BYTES:
        return _pin_handle().new_cpu_locked_tensor(num_bytes, torch.empty(0, dtype=torch.uint8))
    region, start = host.lock_huge(num_bytes)
    return torch.frombuffer(region, dtype=torch.uint8, count=num_bytes, offset=start)


def counts_as_locked() -> bool:
    """Whether `lock_host_bytes` locks memory as the user's limit counts it (mlock); what CUDA gives out does not count."""
    return accelerator.is_one_memory() or os.environ.get("DS_PIN_MEMORY_BACKEND", "").strip().lower() == "native"


def unlock_host_bytes(buffer: torch.Tensor) -> None:
    """Give back what `lock_host_bytes` took; the tensor must not be used afterwards."""
    if not accelerator.get_accelerator().is_synchronized_device():
        return
    if buffer.numel() < host.HUGE_BYTES:
        _pin_handle().free_cpu_locked_tensor(buffer)
    else:
        whole_pages = -(-buffer.numel() // mmap.PAGESIZE) * mmap.PAGESIZE  # the mapping goes on behind the last byte
        host.rest_pages(buffer.data_ptr(), whole_pages)
