"""What stock allocates: by which settings, and giving the pages of its transfer buffers back while nobody uses them.

The schedule's transfers go through buffers of ours. Stock's are still needed where its own code moves data: zero.Init
writes new parameters through them, and what gathers parameters or reads state outside a schedule reads through them. So
they keep their addresses and their number, but no memory; see [Note: resting] in `hostmemory`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.swap_tensor.aio_config import get_aio_config
from deepspeed.runtime.swap_tensor.utils import AIO_ALIGNED_BYTES, MIN_AIO_BYTES
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from deepspeed.runtime.zero.utils import get_norm_dtype

from ds_vertical import hostmemory
from ds_vertical.compat import ZeroParam


def parameter_swappers(params: Iterable[ZeroParam]) -> list[Any]:
    """The swappers of these parameters, one for each zero.Init that made some of them."""
    found = {id(s): s for param in params if (s := getattr(param, "nvme_swapper", None)) is not None}
    return list(found.values())


def rest_stock_buffers(params: Iterable[ZeroParam], optimizer: Any = None) -> int:
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
        hostmemory.rest(buffer.data_ptr(), _num_bytes(buffer))
    return sum(map(_num_bytes, free))


def _free_parameter_buffers(swapper: Any) -> Iterator[torch.Tensor]:
    size = int(swapper.aligned_elements_per_buffer)
    if len(swapper.available_buffer_ids) == swapper.param_buffer_count:
        yield swapper.buffers
    else:
        yield from (swapper.buffers.narrow(0, index * size, size) for index in swapper.available_buffer_ids)
    if swapper.partitioned_swap_buffer is not None and not swapper.pending_writes:
        yield swapper.partitioned_swap_buffer


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# ---- what of the JSON decides about memory


@dataclass(frozen=True)
class OffloadSettings:
    """DeepSpeed's settings, its defaults filled in. Sizes in elements where they are not called bytes."""

    params_on_ssd: bool
    state_on_ssd: bool
    max_in_cpu: int
    sub_group_size: int
    alignment_bytes: int  # of sizes of files
    least_bytes: int  # smaller shards stay in memory
    largest_persistent: int  # of the parameters that stay on the device, if `all_persistent` is not reached
    all_persistent: int

    @classmethod
    def read(cls, config: dict[str, Any]) -> OffloadSettings:
        zero = DeepSpeedZeroConfig(**config.get("zero_optimization", {}))
        param, optimizer, aio = zero.offload_param, zero.offload_optimizer, get_aio_config(config)
        params_on_ssd = param is not None and param.device == OffloadDeviceEnum.nvme
        return cls(
            params_on_ssd,
            optimizer is not None and optimizer.device == OffloadDeviceEnum.nvme,
            int(param.max_in_cpu) if param is not None and params_on_ssd else 0,
            int(zero.sub_group_size),
            AIO_ALIGNED_BYTES * aio["intra_op_parallelism"],
            max(MIN_AIO_BYTES, aio["block_size"]),
            int(zero.param_persistence_threshold),
            int(zero.model_persistence_threshold),
        )

    def persistent(self, sizes: Iterable[int]) -> list[bool]:
        """Of parameters of these elements, in the model's order, which stay on the device: as `mark_persistent_parameters`."""
        found, total = [], 0
        for numel in sizes:
            found.append(numel <= self.largest_persistent and total + numel <= self.all_persistent)
            total += numel * found[-1]
        return found


def aio_settings(config: dict[str, Any]) -> dict[str, Any]:
    """The `aio` section with DeepSpeed's defaults."""
    return get_aio_config(config)


def locked_by_zero_init(config: dict[str, Any]) -> int:
    """Bytes of the buffers that zero.Init locks for parameters on SSD; 0 without."""
    param = DeepSpeedZeroConfig(**config.get("zero_optimization", {})).offload_param
    if param is None or param.device != OffloadDeviceEnum.nvme:
        return 0
    half = any((config.get(name) or {}).get("enabled") for name in ("bf16", "bfloat16", "fp16"))
    return int(param.buffer_count) * int(param.buffer_size) * (2 if half else 4)


def has_dynamic_scale(config: dict[str, Any]) -> bool:
    fp16 = config.get("fp16") or {}
    return bool(fp16.get("enabled")) and not fp16.get("loss_scale")


def element_bytes(units: Mapping[Any, Sequence[ZeroParam]], config: dict[str, Any]) -> int:
    """Of a parameter, once DeepSpeed has converted the model."""
    half = any((config.get(name) or {}).get("enabled") for name in ("bf16", "bfloat16", "fp16"))
    return 2 if half else max(param.element_size() for params in units.values() for param in params)


def norm_bytes() -> int:
    """Of one element in the copy from which a gradient's norm is taken."""
    return get_norm_dtype().itemsize


def bytes_in_memory(params: Iterable[ZeroParam]) -> int:
    """Of these parameters, what is in host memory at present: shards that rest there, whole ones if not partitioned yet."""
    tensors = (param.ds_tensor if is_zero_param(param) else param for param in params)
    return sum(_num_bytes(tensor) for tensor in tensors if tensor.device.type == "cpu")
