"""Several SSDs for DeepSpeed's own swappers: zero.Init writes parameters, set-up and `safe_get_*` read and write state.

DeepSpeed's swappers give whole files to a handle of asynchronous I/O. Where the run has several SSDs, `StripedHandle` stands in
its place, and moves them through a queue of ours, which knows where the bytes of such a file are (`io.runs.stripes`).
"""

from __future__ import annotations

from ds_vertical.compat import version  # noqa: F401 - refuses another DeepSpeed before its private names are imported

# isort: split

import functools
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import AsyncPartitionedParameterSwapper
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from ds_vertical.compat.ops.load import new_disk_queue
from ds_vertical.io import files
from ds_vertical.io.aio import ALIGNMENT_BYTES, DiskQueue, Transfer
from ds_vertical.io.runs import stripes


class StripedHandle:
    """The two transfers that the swappers ask of DeepSpeed's handle, and their wait; all else is the handle's.

    A file that is not there yet is made, and lies on all SSDs from then on. Memory and lengths that are not those that O_DIRECT
    takes go through memory that is.
    """

    def __init__(self, handle: Any, queue: DiskQueue) -> None:
        self._handle = handle
        self._queue = queue
        self._flying: list[tuple[Transfer, torch.Tensor, torch.Tensor]] = []  # with the memory it uses, and the caller's

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def async_pread(self, buffer: torch.Tensor, path: str, offset: int) -> int:
        """Start to fill a 1-d tensor with a file's bytes from `offset` on. Returns 0, as DeepSpeed's does."""
        used = buffer if _is_aligned(buffer) else _aligned_like(buffer)
        self._flying.append((self._queue.read(used.data_ptr(), used.nbytes, path, offset), used, buffer))
        return 0

    def async_pwrite(self, buffer: torch.Tensor, path: str, offset: int) -> int:
        """Start to write a 1-d tensor to a file from `offset` on. Returns 0. Raises StorageError."""
        used = buffer if _is_aligned(buffer) else _aligned_like(buffer)
        if used is not buffer:
            used[: buffer.nbytes].copy_(buffer.view(torch.uint8))
        stripes.spread_file(path, offset + used.nbytes, whole=True)
        if not all(each.exists() for each in stripes.files_of(path)):
            files.preallocate({Path(path): offset + used.nbytes})
        self._flying.append((self._queue.write(used.data_ptr(), used.nbytes, path, offset), used, buffer))
        return 0

    def wait(self) -> int:
        """Complete what was started since the last wait; returns how many transfers that were. Raises DiskError."""
        flying, self._flying = self._flying, []
        self._queue.settle()
        for transfer, used, buffer in flying:
            transfer.wait()
            if transfer.is_read and used is not buffer:
                buffer.view(torch.uint8).copy_(used[: buffer.nbytes])
        return len(flying)


def _is_aligned(buffer: torch.Tensor) -> bool:
    return buffer.data_ptr() % ALIGNMENT_BYTES == 0 and buffer.nbytes % ALIGNMENT_BYTES == 0


def _aligned_like(buffer: torch.Tensor) -> torch.Tensor:
    """Bytes for a tensor's, and up to the alignment, that start where the disk can read them; those behind are zeros."""
    num_bytes = buffer.nbytes + -buffer.nbytes % ALIGNMENT_BYTES
    whole = torch.zeros(num_bytes + ALIGNMENT_BYTES, dtype=torch.uint8)
    return whole.narrow(0, -whole.data_ptr() % ALIGNMENT_BYTES, num_bytes)


def stripe_optimizer(optimizer: DeepSpeedZeroOptimizer_Stage3) -> None:
    """Let the optimizer's swapper move files through a StripedHandle where its folder is in a run with several SSDs."""
    swapper: Any = optimizer.optimizer_swapper  # None where no state is on SSD
    if swapper is not None and stripes.run_of(swapper.swap_folder) is not None:
        swapper.aio_handle = StripedHandle(swapper.aio_handle, new_disk_queue(swapper.aio_config))


def stripe_parameters() -> None:
    """Let each parameters' swapper that is made from now on do so. Harmless when called twice."""
    stock = AsyncPartitionedParameterSwapper._configure_aio
    if getattr(stock, "stripes", False):
        return

    @functools.wraps(stock)
    def configure(self: AsyncPartitionedParameterSwapper, ds_config: object) -> None:
        stock(self, ds_config)
        if stripes.run_of(self.swap_folder) is not None:
            queue = new_disk_queue(self.aio_config)
            self.aio_read_handle = StripedHandle(self.aio_read_handle, queue)
            self.aio_write_handle = StripedHandle(self.aio_write_handle, queue)

    vars(configure)["stripes"] = True
    AsyncPartitionedParameterSwapper._configure_aio = configure
