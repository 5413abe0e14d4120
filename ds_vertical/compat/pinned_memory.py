"""Page-locked host memory, for direct I/O and for copies to and from a device.

[Note: registered pages] Torch's own page-locked memory comes in powers of two and is never given back: 1 GiB for a buffer of
634 MB. So beside a device memory is mapped in the size that is asked for, and given to the device's driver to lock
(`cudaHostRegister`). Where DeepSpeed's accelerator has no such call, as for XPU, the memory is torch's. Torch does not know
which copies use registered memory: whoever unlocks it has waited for them.
"""

from __future__ import annotations

from ds_vertical.compat import version  # noqa: F401 - refuses another DeepSpeed before its private names are imported

# isort: split

import ctypes
import functools
import mmap
import os
import sys
import weakref
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


class _Registered:
    """Whole pages of host memory that the device's driver locks, until `unlock`, and that are this process's while anything
    refers to the object. See [Note: registered pages]."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.is_locked = False
        self._owner = 0  # the process that has mapped them: a fork of it has them not
        self.address = host.map_pages(self.num_bytes)
        self._owner = os.getpid()

    def lock(self) -> bool:
        """Whether the driver does lock them. Raises OSError where it may not."""
        try:
            self.is_locked = accelerator.get_accelerator().register_host_memory(self.address, self.num_bytes)
        except RuntimeError as error:
            raise OSError(f"locking {self.num_bytes} bytes of host memory for the device: {error}") from error
        return self.is_locked

    def tensor(self, num_bytes: int) -> torch.Tensor:
        """The first bytes of them."""
        memory: Any = (ctypes.c_ubyte * num_bytes).from_address(self.address)
        memory.pages = self  # which the tensor's memory refers to from now on
        return torch.frombuffer(memory, dtype=torch.uint8)

    def unlock(self) -> None:
        """Let the driver unlock them. Twice is harmless. Raises what the driver does; they are locked then as before."""
        if self.is_locked and self._owner == os.getpid():
            accelerator.get_accelerator().unregister_host_memory(self.address)
            self.is_locked = False

    def __del__(self) -> None:
        if self._owner == os.getpid() and not sys.is_finalizing():  # at the process's end all goes back by itself
            self.unlock()  # where that raises the pages stay: the driver has them
            host.unmap_pages(self.address, self.num_bytes)


_registered: weakref.WeakValueDictionary[int, _Registered] = weakref.WeakValueDictionary()  # by address


def lock_host_bytes(num_bytes: int) -> torch.Tensor:
    """`num_bytes` (not 0) of page-locked host memory, page-aligned, as a 1-d uint8 tensor; in huge pages, see `host`. Raises
    OSError where it may not be locked."""
    if not accelerator.is_one_memory():
        found = None if _is_native() else _register(num_bytes)
        return accelerator.get_accelerator().pin_memory(torch.empty(num_bytes, dtype=torch.uint8)) if found is None else found
    if num_bytes < host.HUGE_BYTES:
        return _pin_handle().new_cpu_locked_tensor(num_bytes, torch.empty(0, dtype=torch.uint8))
    region, start = host.lock_huge(num_bytes)
    return torch.frombuffer(region, dtype=torch.uint8, count=num_bytes, offset=start)


def map_host_bytes(num_bytes: int) -> torch.Tensor:
    """`num_bytes` (not 0) of host memory that is not locked, page-aligned, as a 1-d uint8 tensor. It is taken page by page as
    it is written to; `host.rest_pages` gives it back. Forks do not have it. Raises OSError."""
    return _Registered(num_bytes).tensor(num_bytes)


def _register(num_bytes: int) -> torch.Tensor | None:
    """Memory of our own that the device's driver has locked; None where it does not do that."""
    pages = _Registered(num_bytes)
    if not pages.lock():
        return None
    _registered[pages.address] = pages
    return pages.tensor(num_bytes)


def _is_native() -> bool:
    """Whether the user wants DeepSpeed's own allocator, which locks by mlock."""
    return os.environ.get("DS_PIN_MEMORY_BACKEND", "").strip().lower() == "native"


def counts_as_locked() -> bool:
    """Whether `lock_host_bytes` locks memory as the user's limit counts it (mlock); what a device's driver locks does not."""
    return accelerator.is_one_memory() or _is_native()


def unlock_host_bytes(buffer: torch.Tensor) -> None:
    """Give back what `lock_host_bytes` took; the tensor must not be used afterwards, nor by a copy that is under way."""
    pages = _registered.get(buffer.data_ptr())
    if pages is not None:
        pages.unlock()
        _registered.pop(pages.address, None)
        host.rest_pages(pages.address, pages.num_bytes)
    if not accelerator.is_one_memory():
        return
    if buffer.numel() < host.HUGE_BYTES:
        _pin_handle().free_cpu_locked_tensor(buffer)
    else:
        whole_pages = -(-buffer.numel() // mmap.PAGESIZE) * mmap.PAGESIZE  # the mapping goes on behind the last byte
        host.rest_pages(buffer.data_ptr(), whole_pages)
