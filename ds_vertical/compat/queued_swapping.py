"""DeepSpeed's own swappers over a queue of ours: zero.Init writes parameters, set-up and `safe_get_*` read and write state.

DeepSpeed's swappers give whole files to a handle of asynchronous I/O. `QueuedHandle` stands in its place where DeepSpeed's
cannot do what a run needs:

- Where the run has several SSDs, our queue knows where the bytes of such a file are (`io.runs.stripes`).
- See [Note: unlocked buffers].

[Note: unlocked buffers] DeepSpeed's handle takes locked memory alone: all of buffer_count x buffer_size is in memory from
before the model is built, though zero.Init writes one parameter at a time, through one buffer. Our queue takes any aligned
memory. So where the vertical schedule trains, the buffers are mapped and not locked: they take memory page by page as they are
written to, and `swap_buffers` gives it back. DeepSpeed locks by mlock, which no device's driver knows of, so nothing changes
for a device's copies. The stock arm has DeepSpeed's own buffers and handle.
"""

from __future__ import annotations

from ds_vertical.compat import version  # noqa: F401 - refuses another DeepSpeed before its private names are imported

# isort: split

import functools
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import AsyncPartitionedParameterSwapper
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadParamConfig
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from ds_vertical.compat.ops.load import new_disk_queue
from ds_vertical.errors import MemoryBudgetError
from ds_vertical.io import files
from ds_vertical.io.aio import ALIGNMENT_BYTES, DiskQueue, Transfer
from ds_vertical.io.runs import stripes

_unlocked: set[str] = set()  # folders of runs whose parameters' buffers are not locked


class QueuedHandle:
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


def queue_optimizer(optimizer: DeepSpeedZeroOptimizer_Stage3) -> None:
    """Let the optimizer's swapper move files through a QueuedHandle where its folder is in a run with several SSDs."""
    swapper: Any = optimizer.optimizer_swapper  # None where no state is on SSD
    if swapper is not None and stripes.run_of(swapper.swap_folder) is not None:
        swapper.aio_handle = QueuedHandle(swapper.aio_handle, new_disk_queue(swapper.aio_config))


def queue_parameters(folder: Path | None) -> None:
    """Let each parameters' swapper that is made from now on move files through a QueuedHandle where its folder is in a run with
    several SSDs, or where `folder`, or that of an earlier call, is its nvme_path: it locks no buffers then, see [Note: unlocked
    buffers]."""
    if folder is not None:
        _unlocked.add(os.path.realpath(folder))
    stock = AsyncPartitionedParameterSwapper._configure_aio
    if getattr(stock, "queues", False):
        return

    @functools.wraps(stock)
    def configure(self: AsyncPartitionedParameterSwapper, ds_config: DeepSpeedConfig) -> None:
        param = ds_config.zero_config.offload_param
        assert param is not None  # which zero.Init has looked at
        unlocked = _leaves_unlocked(param)
        if unlocked:
            with _without_buffers(param):
                stock(self, ds_config)
            _map_buffers(self)
        else:
            stock(self, ds_config)
        if unlocked or stripes.run_of(self.swap_folder) is not None:
            queue = new_disk_queue(self.aio_config)
            self.aio_read_handle = QueuedHandle(self.aio_read_handle, queue)
            self.aio_write_handle = QueuedHandle(self.aio_write_handle, queue)

    vars(configure)["queues"] = True
    AsyncPartitionedParameterSwapper._configure_aio = configure


def _leaves_unlocked(param: DeepSpeedZeroOffloadParamConfig) -> bool:
    return os.path.realpath(param.nvme_path or "") in _unlocked and param.buffer_count * param.buffer_size > 0


@contextmanager
def _without_buffers(param: DeepSpeedZeroOffloadParamConfig) -> Iterator[None]:
    """Let DeepSpeed make a swapper without a buffer meanwhile."""
    count, param.buffer_count = param.buffer_count, 0
    try:
        yield
    finally:
        param.buffer_count = count


def _map_buffers(swapper: AsyncPartitionedParameterSwapper) -> None:
    """The buffers of the swapper's configuration, in memory that is not locked. Raises MemoryBudgetError."""
    count, size = int(swapper.swap_config.buffer_count), int(swapper.aligned_elements_per_buffer)
    num_bytes = count * size * swapper.swap_element_size
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryBudgetError(
            f"zero_optimization.offload_param: buffer_count {count} x buffer_size {swapper.elements_per_buffer} are {num_bytes}"
            f" bytes, for which this process gets no addresses ({error.strerror}); write a smaller one"
        ) from error
    swapper.param_buffer_count = count
    swapper.available_buffer_ids = list(range(count))
    swapper.buffers = torch.frombuffer(pages, dtype=swapper.dtype)
