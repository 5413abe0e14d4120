"""What stock allocates: by which settings, and giving the pages of its transfer buffers back while nobody uses them.

The schedule's transfers go through buffers of ours. Stock's are still needed where its own code moves data: zero.Init
writes new parameters through them, and what gathers parameters or reads state outside a schedule reads through them. So
they keep their addresses and their number, but no memory; see [Note: resting] in `host`.
"""

from __future__ import annotations

from ds_vertical.compat import version  # noqa: F401 - refuses another DeepSpeed before its private names are imported

# isort: split

import mmap
from collections.abc import Iterable, Iterator

import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import AsyncPartitionedParameterSwapper
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from ds_vertical.compat.zero_params import ZeroParam
from ds_vertical.io import host


def aligned_bytes(sizes: Iterable[int], alignment_bytes: int) -> int:
    """Bytes of a buffer of stock's that has a place for each of `sizes` (bytes), aligned for asynchronous I/O; whole pages."""
    needed = sum(-(-size // alignment_bytes) * alignment_bytes for size in sizes)
    return -(-needed // mmap.PAGESIZE) * mmap.PAGESIZE


def parameter_swappers(params: Iterable[ZeroParam]) -> list[AsyncPartitionedParameterSwapper]:
    """The swappers of these parameters, one for each zero.Init that made some of them."""
    found = {id(s): s for param in params if (s := getattr(param, "nvme_swapper", None)) is not None}
    return list(found.values())


def rest_stock_buffers(params: Iterable[ZeroParam], optimizer: DeepSpeedZeroOptimizer_Stage3 | None = None) -> int:
    """Give the pages of stock's transfer buffers back that hold nothing at present: those of the parameters and, where it
    is given, of the optimizer. Returns their bytes. Raises RuntimeError for a buffer that the device's driver has locked: it
    would go on copying from and to the pages that were there."""
    swappers = parameter_swappers(params)
    free = [buffer for swapper in swappers for buffer in _free_parameter_buffers(swapper)]
    if optimizer is not None and optimizer.optimizer_swapper is not None:
        manager = optimizer.optimizer_swapper.swap_buffer_manager
        free += [manager.all_buffers[index] for index in manager.free_buffer_index]
    free = [buffer for buffer in free if buffer.device.type == "cpu"]  # with use_gds they are the device's
    if any(buffer.is_pinned() for buffer in free):
        raise RuntimeError(
            "DeepSpeed's swap buffers are page-locked by the device's driver, so their pages cannot be given back;"
            " unset DS_PIN_MEMORY_BACKEND, and use an unmodified deepspeed"
        )
    for buffer in free:
        host.rest_pages(buffer.data_ptr(), _num_bytes(buffer))
    return sum(map(_num_bytes, free))


def _free_parameter_buffers(swapper: AsyncPartitionedParameterSwapper) -> Iterator[torch.Tensor]:
    size = int(swapper.aligned_elements_per_buffer)
    if len(swapper.available_buffer_ids) == swapper.param_buffer_count:
        yield swapper.buffers
    else:
        yield from (swapper.buffers.narrow(0, index * size, size) for index in swapper.available_buffer_ids)
    if swapper.partitioned_swap_buffer is not None and not swapper.pending_writes:
        yield swapper.partitioned_swap_buffer


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def whole_bytes(params: Iterable[ZeroParam]) -> int:
    """Of these parameters, what is in host memory of those that nobody has partitioned yet."""
    return sum(_num_bytes(param) for param in params if not is_zero_param(param) and param.device.type == "cpu")


def are_outside(params: Iterable[ZeroParam]) -> bool:
    """Whether DeepSpeed makes a zero.Init of its own for these parameters, on whatever device they are: it does where nobody
    has partitioned any of them. False where they are nowhere."""
    held = list(params)
    return not any(map(is_zero_param, held)) and any(not param.is_meta for param in held)


def bytes_in_memory(params: Iterable[ZeroParam]) -> int:
    """Of these parameters, what is in host memory at present: shards that rest there, whole ones if not partitioned yet."""
    tensors = (param.ds_tensor if is_zero_param(param) else param for param in params)
    return sum(_num_bytes(tensor) for tensor in tensors if tensor.device.type == "cpu")
