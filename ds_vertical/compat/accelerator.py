"""DeepSpeed's accelerator, its communication and its log. Private names of DeepSpeed are not used here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from deepspeed import comm as dist
from deepspeed import init_distributed
from deepspeed.accelerator import get_accelerator as _get_accelerator

__all__ = ["device_name", "dist", "get_accelerator", "init_distributed", "is_one_memory", "log", "unlink_shared_workspace"]


def get_accelerator() -> Any:
    """DeepSpeed's accelerator (typed loosely: its declaration allows None)."""
    return _get_accelerator()


def is_one_memory() -> bool:
    """Whether the device computes in host memory."""
    return get_accelerator().is_synchronized_device()


def device_name() -> str:
    """The accelerator's current device, as torch names it."""
    return str(get_accelerator().current_device_name())


def log(line: str) -> None:
    """One line on rank 0, whatever the logger's level."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def unlink_shared_workspace(rank: int) -> None:
    """Of the memory through which the CPU accelerator's ranks of one host reduce (66 MiB each) remove the name: DeepSpeed
    never does, and it would outlive its processes. All ranks must have opened it."""
    parts = (os.getuid(), os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""), rank)
    Path("/dev/shm", "_".join(("deepspeed_allreduce_buffer", *map(str, parts)))).unlink(missing_ok=True)
