"""Checks of the machine: memory, the kernel's asynchronous I/O, processor, device. See `installation` for their form."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ds_vertical.cli.common import gib
from ds_vertical.cli.doctor.check import CheckResult, Target, error, ok, warning
from ds_vertical.compat.ops import cache
from ds_vertical.io import contention, host
from ds_vertical.types import OFFLOAD_DEVICES, Tier

_SIMD: Final = {
    "-D__AVX512__": "AVX-512, 16 floats",
    "-D__AVX256__": "AVX2, 8 floats",
    "-D__SVE__": "SVE, a vector",
    "-D__NEON__": "NEON, 4 floats",
}
_BF16_FLAGS: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_LEAST_HOST_BYTES: Final = 1 << 30  # the interpreter with torch and deepspeed takes half of it
_LOCKED_BYTES: Final = 16 << 20
_SMALL_BYTES: Final = 1 << 20
_LEAST_AIO_EVENTS: Final = 1024
_OTHER_CORES: Final = 0.25  # of others that a step is not slowed by
_NAMED: Final = 3  # busy processes
_HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_BUILD: Final = "ds-vertical build-ops"


def host_memory(case: Target) -> Iterator[CheckResult]:
    """Compares what this process may allocate and lock with what DeepSpeed takes for the JSON before the first step."""
    available, lockable = host.available_bytes(), host.lockable_bytes()
    needed, why = _parameter_buffers(case)
    smaller = 'a smaller "buffer_count" or "buffer_size" in zero_optimization.offload_param'
    if available < max(needed, _LEAST_HOST_BYTES):
        what = f"{why} need {gib(needed)}" if needed > available else "torch and deepspeed alone take half a GiB"
        remedy = smaller if needed > available else "end other processes, or raise this process's control group limit"
        yield error(f"host memory: {gib(available)} may be allocated, and {what}", remedy)
    else:
        yield ok(f"host memory: {gib(available)} may be allocated without swapping")
    if lockable is not None and lockable < needed:
        yield error(
            f"memlock limit: {gib(lockable)} may be page-locked, and {why} need {gib(needed)}: DeepSpeed dies in an assertion",
            f'ulimit -l unlimited ("USER hard memlock unlimited" in /etc/security/limits.conf), or {smaller}',
        )
    elif lockable is not None and lockable < _LOCKED_BYTES:
        yield warning(
            f"memlock limit: {gib(lockable)} may be page-locked; transfer buffers need more",
            'ulimit -l unlimited ("USER hard memlock unlimited" in /etc/security/limits.conf)',
        )
    else:
        yield ok(f"memlock limit: {'none' if lockable is None else gib(lockable)}")


def _parameter_buffers(case: Target) -> tuple[int, str]:
    """Bytes of the buffers that zero.Init locks in both arms for parameters on SSD, and what they are called; 0 without."""
    section = "zero_optimization.offload_param"
    if case.at(f"{section}.device") != OFFLOAD_DEVICES[Tier.SSD]:
        return 0, ""
    count, size = (case.at(f"{section}.{key}") for key in ("buffer_count", "buffer_size"))
    count, size = (5 if count is None else count), (10**8 if size is None else size)  # DeepSpeed 0.19.8's defaults
    if not all(isinstance(value, int | float) for value in (count, size)):
        return 0, ""
    halves = [case.at(f"{name}.enabled") for name in ("bf16", "bfloat16", "fp16")]
    width = 2 if any(halves) else 4
    return int(count * size * width), f"the parameter buffers ({count:.0f} x {size:.0f} elements of {width} bytes)"


def aio_events(case: Target) -> Iterator[CheckResult]:
    """Checks the kernel's limit of asynchronous I/O, which all processes of the machine share."""
    folder = Path("/proc/sys/fs")
    taken, most = (int((folder / name).read_text()) for name in ("aio-nr", "aio-max-nr"))
    if most - taken < _LEAST_AIO_EVENTS:
        found = f"asynchronous I/O: {taken} of {most} events of the machine are taken; a queue cannot be made without"
        yield error(found, "sysctl -w fs.aio-max-nr=1048576  # as root")
    else:
        yield ok(f"asynchronous I/O: {taken} of {most} events are taken")


def other_work(case: Target) -> Iterator[CheckResult]:
    """Finds cores that this process's threads must share: with other processes, or with a control group's quota."""
    num_cores, wanted = len(contention.cores()), _num_threads()
    others, busy = contention.look()
    quota = contention.quota()
    if wanted + others > num_cores + _OTHER_CORES:
        names = ", ".join(map(str, busy[:_NAMED])) or "none that this process may see"
        found = f"other work: other processes work on {others:.1f} of {num_cores} cores ({names}), and a step wants {wanted}"
        remedy = f"renice -n 19 -p {busy[0].pid}  # or end it; a data loader: a smaller num_workers" if busy else ""
        yield warning(found, remedy or "end what runs on this host beside this container")
    else:
        yield ok(f"other work: other processes work on {others:.1f} of {num_cores} cores")
    if quota is not None and quota < min(wanted, num_cores):
        found = f"other work: this control group leaves {quota:g} cores' worth of time (cpu.max), and a step wants {wanted}"
        yield warning(found, f"export OMP_NUM_THREADS={max(1, int(quota))}  # or raise the quota")


def _num_threads() -> int:
    """Threads that torch takes for an operation."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(given) if given.isdigit() and int(given) > 0 else len(contention.cores())


def page_locked(case: Target) -> Iterator[CheckResult]:
    """Checks that this process can lock memory, by the call that runs make."""
    from ds_vertical.compat import accelerator as compat
    from ds_vertical.compat import pinned_memory

    if compat.is_one_memory() and cache.ready_library("pin_memory") is None:
        yield warning("page-locked memory: not tried, the op pin_memory is not compiled", _BUILD)
        return
    good = True
    for num_bytes in (_LOCKED_BYTES, _SMALL_BYTES):  # the small one through the op that zero.Init's buffers come from
        buffer = pinned_memory.lock_host_bytes(num_bytes)
        buffer.fill_(1)
        good = good and buffer.numel() == num_bytes and (compat.is_one_memory() or buffer.is_pinned())
        pinned_memory.unlock_host_bytes(buffer)
    if good:
        yield ok(f"page-locked memory: {gib(_LOCKED_BYTES)} locked and given back")
    else:
        yield error("page-locked memory: the device does not call it pinned; copies would block", "ulimit -l unlimited")


def huge_pages(case: Target) -> Iterator[CheckResult]:
    """Checks that the kernel grants huge pages for the buffers of direct I/O; see `io.host`."""
    from ds_vertical.compat import accelerator as compat

    mode = _HUGE_PAGES.read_text().strip() if _HUGE_PAGES.exists() else "absent"
    if "[never]" in mode or mode == "absent":
        cost = "direct I/O goes page by page, at half the rate on some machines"
        remedy = f"echo madvise > {_HUGE_PAGES}  # as root" if mode != "absent" else "a kernel with transparent huge pages"
        yield warning(f"huge pages: {mode}; {cost}", remedy)
    elif compat.is_one_memory():
        yield ok(f"huge pages: granted on request ({mode})")
    else:
        yield ok(f"huge pages: {mode}; memory that a device locks is its driver's")


def processor(case: Target) -> Iterator[CheckResult]:
    """Says what CPU Adam is compiled for, and whether a CPU as the device has bf16 arithmetic or computes it in a loop."""
    from cpuinfo import get_cpu_info

    from ds_vertical.compat.ops import load

    info = get_cpu_info()
    name, flags = info.get("brand_raw", "unknown"), set(info.get("flags", ()))
    builder: Any = load.needed_ops()["cpu_adam"]()
    width = _SIMD.get(builder.simd_width())
    cores = f"{len(os.sched_getaffinity(0))} cores"
    if width is None:
        slow = f"processor: {name}, {cores}; CPU Adam has no vectors here and takes one float at a time"
        yield warning(slow, "a processor with AVX2, AVX-512 or NEON")
    else:
        yield ok(f"processor: {name}, {cores}; CPU Adam uses {width} at a time")
    if cache.accelerator_name() != "cpu" or flags & _BF16_FLAGS:
        yield ok(f"bf16 arithmetic: {'yes' if flags & _BF16_FLAGS else 'on the device'}")
    elif case.config is None or any(case.at(f"{section}.enabled") for section in ("bf16", "bfloat16")):
        found = "bf16 arithmetic: none in this processor, and the device is the CPU: a bf16 product is a slow loop"
        yield warning(found, '"bf16": {"enabled": false}')
    else:
        yield ok("bf16 arithmetic: none in this processor; the JSON does not use bf16")


def device(case: Target) -> Iterator[CheckResult]:
    """Compares the accelerator that DeepSpeed takes with what the machine has."""
    named = os.environ.get("DS_ACCELERATOR")
    try:
        from ds_vertical.compat.accelerator import get_accelerator

        accelerator: Any = get_accelerator()
        name = accelerator.device_name().partition(":")[0]
    except ValueError as failure:
        yield error(f"DS_ACCELERATOR is {named!r}: {str(failure).partition(chr(10))[0]}", "unset DS_ACCELERATOR")
        return
    import torch

    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        yield error(f"DS_ACCELERATOR is {named!r}, and torch {torch.__version__} sees no GPU", "unset DS_ACCELERATOR")
    elif name == "cuda":
        free, total = torch.cuda.mem_get_info()
        yield ok(f"device: {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, {gib(free)} of {gib(total)} free")
    elif name != "cpu":
        yield warning(f"device: {name}, on which nobody has run ds_vertical yet", "export DS_ACCELERATOR=cuda  # or cpu")
    elif has_cuda:
        yield warning("DS_ACCELERATOR is 'cpu', and this machine has a GPU that stays idle", "unset DS_ACCELERATOR")
    elif Path("/proc/driver/nvidia/gpus").exists():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = "unset CUDA_VISIBLE_DEVICES" if visible is not None else "install a CUDA build of torch, for this driver"
        yield warning(f"device: cpu, although the driver has GPUs: torch {torch.__version__} sees none of them", hidden)
    else:
        yield ok(f"device: cpu, {torch.get_num_threads()} threads")
