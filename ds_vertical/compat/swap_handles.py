"""What DeepSpeed's own swappers read and write with in a run's folder: when zero.Init writes parameters, at set-up, and when
`safe_get_*` reads state.

DeepSpeed's swappers give the path of a whole file to a handle of asynchronous I/O, whose C++ looks it up from the root. Another
folder may be there by then: see `io.runs.held_folders`. So `HeldHandle` stands in the handle's place, and gives it the file
that it has opened itself. Where the run has several SSDs it is `StripedHandle`, which moves the bytes through a queue of ours:
that knows where they are (`io.runs.stripes`).

At set-up a swapper deletes and makes its folder by path, through whatever links stand there. So it is given the path of
another, empty folder, `set_up_below`, and the folder in the run's is made and held here, without following links.
"""

from __future__ import annotations

from ds_vertical.compat import version  # noqa: F401 - refuses another DeepSpeed before its private names are imported

# isort: split

import contextlib
import errno
import functools
import io
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar

import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import AsyncPartitionedParameterSwapper
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from ds_vertical import interrupts
from ds_vertical.compat.ops.load import new_disk_queue
from ds_vertical.io import files, remove_tree
from ds_vertical.io.aio import ALIGNMENT_BYTES, DiskQueue, Transfer
from ds_vertical.io.runs import held_folders, stripes
from ds_vertical.io.runs.held_folders import HeldTree

_Transfer = Callable[[torch.Tensor, str, int], int]
Offload = TypeVar("Offload", DeepSpeedZeroOffloadParamConfig, DeepSpeedZeroOffloadOptimizerConfig)


class _Waits(Protocol):
    """Of DeepSpeed's handle what completes its transfers."""

    def wait(self) -> int:
        """How many it has completed."""
        ...


class WrappedHandle:
    """What is DeepSpeed's handle but for the transfers that a subclass makes itself."""

    def __init__(self, handle: object) -> None:
        self._handle: Any = handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


class HeldHandle(WrappedHandle):
    """The two transfers that the swappers ask of DeepSpeed's handle, which opens a file before it returns.

    DeepSpeed's handle ends the process where it goes while transfers are in flight, as after an interrupt. So this one waits
    for those that it has started. Its other transfers (`sync_pread` and the like), for which no swapper asks, are not counted.
    """

    def __init__(self, handle: _Waits) -> None:
        super().__init__(handle)
        self._flying = [0]  # transfers that no `wait` has been for
        weakref.finalize(self, _complete_at_the_end, handle, self._flying, os.getpid())

    def async_pread(self, buffer: torch.Tensor, path: str, offset: int) -> int:
        """Start to fill a 1-d tensor with a file's bytes from `offset` on. Returns 0, as DeepSpeed's does. Raises StorageError,
        also for a file that is too short, of which DeepSpeed's ends the process."""
        with files.naming(path, "read"), _opened(path, os.O_RDONLY) as file:
            if (num_bytes := os.fstat(file.fileno()).st_size) < offset + buffer.nbytes:
                raise OSError(errno.ENODATA, f"the file ends at byte {num_bytes} of {offset + buffer.nbytes}")
            return self._start(self._handle.async_pread, buffer, file, os.O_RDONLY, offset)

    def async_pwrite(self, buffer: torch.Tensor, path: str, offset: int) -> int:
        """Start to write a 1-d tensor to a file from `offset` on; makes the file. Returns 0. Raises StorageError."""
        with files.naming(path, "write"), _opened(path, os.O_WRONLY | os.O_CREAT) as file:
            return self._start(self._handle.async_pwrite, buffer, file, os.O_WRONLY, offset)

    def _start(self, transfer: _Transfer, buffer: torch.Tensor, file: io.FileIO, flags: int, offset: int) -> int:
        """Let DeepSpeed's handle open a file once more, and start a transfer. Raises OSError where it returns -1 instead of
        0."""
        path = held_folders.by_descriptor(file.fileno())
        with interrupts.deferred(firmly=True):
            has_failed = transfer(buffer, path, offset)
            self._flying[0] += not has_failed
        if has_failed:
            os.close(os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC))  # raises what DeepSpeed has met
            raise OSError(errno.EINVAL, f"DeepSpeed's asynchronous I/O does not take {buffer.nbytes} bytes at offset {offset}")
        return 0

    def wait(self) -> int:
        """Complete what was started since the last wait; returns how many transfers that were."""
        with interrupts.deferred(firmly=True):
            return _complete(self._handle, self._flying)


def _complete(handle: _Waits, flying: list[int]) -> int:
    """`flying`: how many transfers of the handle are; 0 afterwards. DeepSpeed's own wait ends the process where none is."""
    num_flying, flying[0] = flying[0], 0
    return handle.wait() if num_flying else 0


def _complete_at_the_end(handle: _Waits, flying: list[int], pid: int) -> None:
    """As the handle goes. A forked child has none of the threads that move the bytes, and does not wait for them.

    What a handler raises here Python only prints. So no handler is called on the way: a signal stays pending in the wait, which
    is C++, and comes with the next statement of whoever let the handle go.
    """
    if os.getpid() == pid:
        _complete(handle, flying)


def _opened(path: str, flags: int) -> io.FileIO:
    """The file, which goes with what refers to it: no interrupt comes while it is a bare number."""
    with interrupts.deferred(firmly=True):
        return io.FileIO(held_folders.open_file(path, flags), "rb" if flags == os.O_RDONLY else "wb")


class StripedHandle(WrappedHandle):
    """The two transfers that the swappers ask of DeepSpeed's handle, and their wait; all else is the handle's.

    A file that is not there yet is made, and lies on all SSDs from then on. Memory and lengths that are not those that O_DIRECT
    takes go through memory that is.
    """

    def __init__(self, handle: object, queue: DiskQueue) -> None:
        super().__init__(handle)
        self._queue = queue
        self._flying: list[tuple[Transfer, torch.Tensor, torch.Tensor]] = []  # with the memory it uses, and the caller's

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
        if not all(map(held_folders.exists, stripes.files_of(path))):
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


def _tree_of(offload: DeepSpeedZeroOffloadParamConfig | DeepSpeedZeroOffloadOptimizerConfig) -> HeldTree | None:
    return None if offload.nvme_path is None else held_folders.tree_of(offload.nvme_path)


@contextlib.contextmanager
def set_up_below(offload: Offload) -> Iterator[Offload]:
    """A section of the configuration as a swapper is to be given it at set-up, in the block: below an empty folder in the
    run's, whose name nobody knows ahead."""
    tree = _tree_of(offload)
    if tree is None:
        yield offload
        return
    with files.naming(tree.path, "make a folder in it"):
        made = tempfile.TemporaryDirectory(prefix="set-up-", dir=held_folders.by_descriptor(tree.root.fd))
    with made as empty:
        yield offload.model_copy(update={"nvme_path": Path(empty)})


def _held_as(folder: str, below: Offload, tree: HeldTree, clear: bool) -> str:
    """Make and hold the folder in the run's for one that a swapper has made by `set_up_below`; returns its name. `clear`:
    delete what is in it, as the swapper does of parameters. Raises StorageError."""
    name = tree.path + folder.removeprefix(os.fspath(below.nvme_path or ""))
    with files.naming(name, "make the folder"):
        held = tree.folder(name, make=True)
        if clear:
            remove_tree.remove_inside(held.fd, Path(name))  # what stays is written over, as DeepSpeed does
    return name


def hold_optimizer(
    optimizer: DeepSpeedZeroOptimizer_Stage3,
    offload: DeepSpeedZeroOffloadOptimizerConfig,
    below: DeepSpeedZeroOffloadOptimizerConfig,
) -> None:
    """Let the optimizer's swapper, made as `set_up_below(offload)` says (`below`), move the files of a run through a handle of
    ours. Raises StorageError."""
    swapper: Any = optimizer.optimizer_swapper  # None where no state is on SSD
    tree = _tree_of(offload)
    if swapper is None or tree is None:
        return
    swapper.swap_folder = _held_as(swapper.swap_folder, below, tree, clear=False)
    swapper.swap_config = swapper.swap_config.model_copy(update={"nvme_path": offload.nvme_path})
    if stripes.run_of(swapper.swap_folder) is not None:
        swapper.aio_handle = StripedHandle(swapper.aio_handle, new_disk_queue(swapper.aio_config))
    else:
        swapper.aio_handle = HeldHandle(swapper.aio_handle)
    swapper.gradient_swapper.aio_handle = swapper.aio_handle


def hold_parameters() -> None:
    """Let each parameters' swapper that is made from now on in a run's folder do so. Harmless when called twice."""
    stock = AsyncPartitionedParameterSwapper._configure_aio
    if getattr(stock, "holds", False):
        return

    @functools.wraps(stock)
    def configure(self: AsyncPartitionedParameterSwapper, ds_config: object) -> None:
        config: Any = ds_config
        offload: DeepSpeedZeroOffloadParamConfig = config.zero_config.offload_param
        tree = _tree_of(offload)
        if tree is None:
            stock(self, config)
            return
        with set_up_below(offload) as below:
            stock(self, SimpleNamespace(zero_config=SimpleNamespace(offload_param=below), aio_config=config.aio_config))
        self.swap_config = offload
        self.swap_folder = _held_as(self.swap_folder, below, tree, clear=True)
        if stripes.run_of(self.swap_folder) is not None:
            queue = new_disk_queue(self.aio_config)
            self.aio_read_handle = StripedHandle(self.aio_read_handle, queue)
            self.aio_write_handle = StripedHandle(self.aio_write_handle, queue)
        else:
            self.aio_read_handle, self.aio_write_handle = HeldHandle(self.aio_read_handle), HeldHandle(self.aio_write_handle)

    vars(configure)["holds"] = True
    AsyncPartitionedParameterSwapper._configure_aio = configure
