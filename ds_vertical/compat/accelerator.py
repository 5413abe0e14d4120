"""DeepSpeed's accelerator, its communication and the lines that ranks print. No private name of DeepSpeed is used here."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from deepspeed import comm as dist
from deepspeed import init_distributed
from deepspeed.accelerator import get_accelerator as _get_accelerator

from ds_vertical.io import streams

__all__ = [
    "device_name",
    "device_room",
    "dist",
    "forget_peak",
    "free_device_bytes",
    "get_accelerator",
    "init_distributed",
    "is_one_memory",
    "log",
    "log_own",
    "peak_device_bytes",
    "synchronize",
    "taken_by",
    "unlink_shared_workspace",
]


class Accelerator(Protocol):
    """What this package calls of DeepSpeed's accelerator, whose abstract class declares no types."""

    def is_synchronized_device(self) -> bool:
        """Whether the device computes in host memory, and nothing is asynchronous."""
        ...

    def resolves_data_dependency(self) -> bool:
        """Whether a host's read of a tensor waits for the device's work on it."""
        ...

    def is_fp16_supported(self) -> bool:
        """Whether the device computes in fp16."""
        ...

    def is_bf16_supported(self) -> bool:
        """Whether the device computes in bf16."""
        ...

    def device_name(self, device_index: int | None = None) -> str:
        """The kind of device, such as "cuda"; with an index the device of that number."""
        ...

    def current_device(self) -> int | str:
        """The device in use."""
        ...

    def current_device_name(self) -> str:
        """The device in use, as torch names it."""
        ...

    def set_device(self, device_index: int) -> None:
        """Use another device from now on, on this thread."""
        ...

    def current_stream(self) -> torch.Stream:
        """The stream on which the device works for this thread."""
        ...

    def communication_backend_name(self) -> str:
        """The back end of torch.distributed that the device needs."""
        ...

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's contents in page-locked host memory."""
        ...

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        """Have the device's driver lock pages of host memory; False for a driver that locks only what it has allocated."""
        ...

    def unregister_host_memory(self, address: int) -> None:
        """Unlock them."""
        ...

    def get_rng_state(self) -> torch.Tensor:
        """The state of the device's random number generator."""
        ...

    def set_rng_state(self, new_state: torch.Tensor) -> None:
        """Put back a state that `get_rng_state` returned."""
        ...


class DeviceMemory(Protocol):
    """What this package calls of DeepSpeed's accelerator where that has memory of its own."""

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""
        ...

    def memory_allocated(self) -> int:
        """Bytes of the device's memory that tensors of this process take."""
        ...

    def max_memory_allocated(self) -> int:
        """The most that `memory_allocated` has been since `reset_peak_memory_stats`, or since the start."""
        ...

    def reset_peak_memory_stats(self) -> None:
        """Let `max_memory_allocated` begin anew."""
        ...

    def available_memory(self) -> int:
        """Free bytes of the device's memory, as far as DeepSpeed knows."""
        ...


def get_accelerator() -> Accelerator:
    """DeepSpeed's accelerator: the CPU where there is no other."""
    found: Any = _get_accelerator()
    return found


def is_one_memory() -> bool:
    """Whether the device computes in host memory."""
    return get_accelerator().is_synchronized_device()


def device_name() -> str:
    """The accelerator's current device, as torch names it."""
    return str(get_accelerator().current_device_name())


def synchronize() -> None:
    """Wait until the device has done all that it was given; it computes at once where it is the host."""
    if not is_one_memory():
        _device_memory().synchronize()


def free_device_bytes() -> int | None:
    """Bytes of the device's own memory that are free now, or that torch holds without a use; None where the device computes in
    host memory. DeepSpeed's `available_memory` leaves the latter out on NVIDIA's GPUs, and elsewhere counts other processes'
    memory as free: it is asked where torch's module of the device cannot tell, as with MPS and some of Intel's GPUs."""
    if is_one_memory():
        return None
    try:
        return streams.free_for_tensors(torch.device(device_name()))
    except (AttributeError, RuntimeError):
        return _device_memory().available_memory()


def device_room() -> int | None:
    """Bytes of the device's own memory that nobody has used so far, at the time when this process used most; None where the
    device computes in host memory."""
    free = free_device_bytes()
    return None if free is None else max(0, free + _device_memory().memory_allocated() - peak_device_bytes())


def peak_device_bytes() -> int:
    """The most bytes of the device's own memory that tensors have taken here since `forget_peak`, or since the start; 0
    where the device computes in host memory."""
    return 0 if is_one_memory() else _device_memory().max_memory_allocated()


def forget_peak() -> None:
    """Let `peak_device_bytes`, which is torch's own statistic, begin anew: a step that has filled the device would leave no
    room for what later engines of this process keep."""
    _device_memory().reset_peak_memory_stats()


def taken_by(run: Callable[[], object]) -> int:
    """The most bytes of the device's own memory that tensors have taken during `run`, beyond those ahead of it."""
    memory = _device_memory()
    forget_peak()
    before = memory.memory_allocated()
    run()
    return memory.max_memory_allocated() - before


def _device_memory() -> DeviceMemory:
    found: Any = _get_accelerator()
    return found


def log(line: str) -> None:
    """One line on rank 0, whatever the logger's level."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def log_own(line: str) -> None:
    """One line on the rank that calls this, with its number where that is not 0: of what each rank finds by itself."""
    number = dist.get_rank()
    print(f"ds_vertical: {line}" if number == 0 else f"ds_vertical: rank {number}: {line}", flush=True)


def unlink_shared_workspace(rank: int) -> None:
    """Remove the name of the shared memory (66 MiB) through which this `rank` reduces with the others of its host. DeepSpeed
    never does, and the memory would outlive its processes. Call it after all ranks have opened theirs."""
    parts = (os.getuid(), os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""), rank)
    Path("/dev/shm", "_".join(("deepspeed_allreduce_buffer", *map(str, parts)))).unlink(missing_ok=True)
