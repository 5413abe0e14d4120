"""This process's host memory and cores: what the machine allows it, what it uses, and what it gives back.

[Note: resting] A page-locked buffer that nobody uses takes its memory all the same. A buffer at rest is unlocked and its
pages are given back to the kernel, while its addresses stay valid: whoever writes to it next gets fresh pages, zeroed.
Direct I/O needs aligned memory, not locked memory, so such a buffer works as before.

[Note: huge pages] Direct I/O hands the device a list of the pages that hold a buffer: 256 of 4 KiB for one MiB, which are
pinned, mapped and, in a virtual machine, translated one by one, and may be more than a request takes. A buffer in huge pages
(2 MiB, where the kernel grants them on request: transparent_hugepage "madvise" or "always") is one piece.

[Note: freed memory] Where the device is the host, every micro-batch's gradients are allocated and freed. glibc gives memory
that large back to the kernel, or not, as the heap happens to lie; the kernel then maps it anew, page by page and zeroed, on
one core while the others wait: up to a fifth of a step. Kept memory has its price: an aligned block fits only into a larger
freed one (glibc before 2.38), so the heap first grows by a few blocks. And a heap that was large once has holes: gigabytes of
addresses without pages. A block goes there however large it is, takes pages, and leaves them behind when it is freed; the next
one may lie elsewhere. So no block of 4 MiB or more lies in the heap while the model is built. And where a run may take little
more memory than it needs, `trim` gives the pages of all holes back at a few places of each step. Where the budget has no room
to keep what the largest gradients free (those of embedding and head, as a rule), `trim` also follows each backward that makes
them. In between nothing is to go back: glibc gives all of the heap's free end back with the free that makes it as large as a
threshold, so that must be more than all that a layer's backward frees.

[Note: heaps of threads] glibc gives each further thread a heap of its own, up to eight for each core: pieces of 64 MiB, and an
empty one goes back, whatever the thresholds say. Of several ranks on the CPU each group of ranks has such threads. A large
collective then takes and zeroes fresh pages each time, and what one heap keeps no other thread can use.

[Note: one team] torch computes on a team of OpenMP threads per calling thread. Where more of them exist in a process than
there are cores, whether they work or not, the runtime lets them sleep between any two operations instead of waiting awake, and
every operation of every team starts with waking them. A process group's worker with a team of its own, made by one collective,
is enough; so is CPU Adam on a second thread. So where the device is the host, only the thread that trains has a team, and all
others compute on one core, which is what is left for them anyway. A thread that torch never asked (one whose first work is CPU
Adam's own kernel) would take all cores: `cpu_adam` lets torch ask. Beside other work on the cores the team is to sleep after
all: see `openmp_wait`.

Beside a device the host's cores are CPU Adam's, but for two: one thread issues the device's work, and in a backward another
does. Where those have no core the device waits for them. Several ranks share the cores: teams of all cores would keep each
other off them. So a rank's team is its share of the cores less two, or half of a small share. OMP_NUM_THREADS says another
size, and `torch.set_num_threads` a smaller one. The 1 that torchrun and `accelerate launch` write there, where nobody has
written anything, does not count: with it CPU Adam would be the slowest part of most runs.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import torch

from ds_vertical.io import openmp_wait, streams
from ds_vertical.types import Tier

_CAP_IPC_LOCK: Final = 14
_CORES_FOR_DEVICE: Final = 2
_ONLY_ACCELERATE_LAUNCH: Final = "ACCELERATE_DYNAMO_USE_FULLGRAPH"  # others of its variables are written by Trainers and users
_UNLIMITED: Final = 1 << 60  # cgroup v1 writes about 2^63 where there is no limit
_DONTNEED, _DONTFORK, _HUGEPAGE = 4, 10, 14  # madvise's
HUGE_BYTES: Final = 2 << 20
# M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h, with the most that it takes for each by itself, and M_ARENA_MAX
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_ARENA_MAX: Final = -8
_THRESHOLDS: Final = {_TRIM_THRESHOLD: 64 << 20, _MMAP_THRESHOLD: 32 << 20}
# Of each its name in a user's environment, as glibc's tunable and as the older variable
_TUNABLES: Final = {
    _TRIM_THRESHOLD: ("trim_threshold", "MALLOC_TRIM_THRESHOLD_"),
    _MMAP_THRESHOLD: ("mmap_threshold", "MALLOC_MMAP_THRESHOLD_"),
    _ARENA_MAX: ("arena_max", "MALLOC_ARENA_MAX"),
}
MAPPED_AHEAD: Final = 4 << 20  # while a model is built


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.munlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mmap.restype = ctypes.c_void_p
    return libc


def lock_huge(num_bytes: int) -> tuple[mmap.mmap, int]:
    """Page-locked memory in huge pages, as far as the kernel has them: a mapping, and where the `num_bytes` begin in it. They
    are the process's until the last reference to the mapping goes. Raises OSError. See [Note: huge pages]."""
    region = mmap.mmap(-1, num_bytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    base = ctypes.addressof(ctypes.c_char.from_buffer(region))
    start = -base % HUGE_BYTES
    _libc().madvise(base + start, num_bytes, _HUGEPAGE)  # a kernel without them gives plain pages
    if _libc().mlock(base + start, num_bytes) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"locking {num_bytes} bytes of host memory: {os.strerror(error)}; raise the limit (ulimit -l)")
    return region, start


def map_pages(num_bytes: int) -> int:
    """The address of fresh memory, for a device's driver to lock: whole pages, huge ones as far as the kernel has them, until
    `unmap_pages`. Forks do not have it: a kernel before Linux 5.12 would give this process another page at its next write, and
    the driver go on with the old one. Raises OSError."""
    address = _libc().mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if address == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, f"mapping {num_bytes} bytes of host memory: {os.strerror(error)}")
    for advice in (_HUGEPAGE, _DONTFORK):  # a kernel without huge pages gives plain ones
        _libc().madvise(address, num_bytes, advice)
    return address


def unmap_pages(address: int, num_bytes: int) -> None:
    """Give back what `map_pages` has given."""
    _libc().munmap(address, num_bytes)


def rest_pages(address: int, num_bytes: int) -> None:
    """Unlock the whole pages inside [address, address + num_bytes) and give them back. See [Note: resting].

    The contents are lost: private memory reads as zeros from then on. Raises OSError where the range is not mapped.
    """
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if first >= last:
        return
    for call in (_libc().munlock(first, last - first), _libc().madvise(first, last - first, _DONTNEED)):
        if call != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"giving {last - first} bytes of host memory back: {os.strerror(error)}")


def map_blocks_from(num_bytes: int) -> None:
    """Let the C library take each block that large from the system by itself, and give it back as it is freed, until
    `keep_freed_memory`: see [Note: freed memory]. Nothing changes with another C library than glibc, and where the user's
    environment names the size."""
    _set_parameter(_MMAP_THRESHOLD, num_bytes)


def keep_freed_memory(num_bytes: int, behind: int = 0) -> None:
    """Let this process keep blocks so large of what it frees, and so much (or more, `behind`) at the heap's end, and allocate
    from it: see [Note: freed memory]. Never less than glibc comes to keep by itself, which adapts no more from then on. `trim`
    gives it back all the same. Nothing changes with another C library than glibc, and of each of the two sizes that the user's
    environment names."""
    for parameter, asked in ((_TRIM_THRESHOLD, max(num_bytes, behind)), (_MMAP_THRESHOLD, num_bytes)):
        _set_parameter(parameter, max(asked, _THRESHOLDS[parameter]))


def use_one_heap() -> None:
    """Let threads that allocate for the first time from now on share the heap of those that there are: see [Note: heaps of
    threads]. Nothing changes with another C library than glibc, and where the user's environment names a number of heaps."""
    _set_parameter(_ARENA_MAX, 1)


def _set_parameter(parameter: int, value: int) -> None:
    """One of `_TUNABLES`, unless the user has set it: glibc has read his number when the process started."""
    name, variable = _TUNABLES[parameter]
    by_user = variable in os.environ or f"glibc.malloc.{name}=" in os.environ.get("GLIBC_TUNABLES", "")
    mallopt = getattr(_libc(), "mallopt", None)
    if mallopt is not None and not by_user:
        mallopt(parameter, min(value, 2**31 - 1))  # C's int


@functools.cache
def is_trimmed() -> bool:
    """Whether `trim` reaches what is freed: `malloc` is glibc's, neither another C library's nor one loaded in its place, such
    as jemalloc."""
    try:
        glibc = ctypes.CDLL("libc.so.6")
    except OSError:
        return False
    ours, used = (ctypes.cast(library.malloc, ctypes.c_void_p).value for library in (glibc, _libc()))
    return hasattr(glibc, "malloc_trim") and ours == used


def trim() -> None:
    """Give the pages back that the C library keeps of memory freed earlier; nothing where `is_trimmed` is false."""
    malloc_trim = getattr(_libc(), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def resident_bytes() -> int:
    """The resident set of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def memory_bytes() -> dict[str, int]:
    """What this process has of each memory: all of its host memory, and of a device's beside it what its tensors take."""
    module = streams.module_in_use()
    device: dict[str, int] = {} if module is None else {Tier.DEVICE: module.memory_allocated()}
    return {Tier.HOST: resident_bytes()} | device


def available_bytes() -> int:
    """What may still be allocated without swapping: by the machine and by every control group that holds this process."""
    return min([_kib(Path("/proc/meminfo"), "MemAvailable"), *_group_bytes()])


def room_bytes(num_ranks: int = 1) -> int:
    """What this process may take in all, as one of `num_ranks` which share what is available."""
    return resident_bytes() + available_bytes() // num_ranks


def lockable_bytes() -> int | None:
    """Bytes that this process may yet lock; None where it may lock any amount."""
    if int(_field(Path("/proc/self/status"), "CapEff"), 16) >> _CAP_IPC_LOCK & 1:
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else max(0, limit - _kib(Path("/proc/self/status"), "VmLck"))


def limit_to_lock(num_bytes: int) -> int:
    """The limit, in KiB as `ulimit -l` takes it, with which this process could lock so many more than it has locked."""
    return -(-(num_bytes + _kib(Path("/proc/self/status"), "VmLck")) // 1024)


def _group_bytes(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """For each control group above this process that limits memory: the limit less what it uses beside the page cache.

    Both versions: v2's files lie in the group's folder below `root`, v1's below `root`/memory.
    """
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        v1 = bool(controllers)
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if v1 else ("memory.max", "memory.current")
        top = root / "memory" if v1 else root
        folder = top / path.strip("/")
        for group in (folder, *(parent for parent in folder.parents if parent.is_relative_to(top))):
            limit, used = (_number(group / name) for name in names)
            if limit is not None and used is not None and limit < _UNLIMITED:
                yield max(0, limit - used + _reclaimable(group / "memory.stat"))


def _number(file: Path) -> int | None:
    """The number in a control group's file; None where there is no file, or no limit in it ("max")."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None  # a group that this process cannot see limits it through those above, which it can
    return int(text) if text.isdigit() else None


def _reclaimable(stat: Path) -> int:
    """Bytes of files' pages that a group gives back when memory is short."""
    try:
        fields = dict(line.split() for line in stat.read_text().splitlines())
    except OSError:
        return 0
    return int(fields.get("inactive_file", fields.get("total_inactive_file", 0)))


def _field(file: Path, name: str) -> str:
    lines = file.read_text(encoding="ascii", errors="replace").splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:"))


def _kib(file: Path, name: str) -> int:
    return 1024 * int(_field(file, name).removesuffix("kB"))


def keep_cores_for_this_thread() -> None:
    """Let threads that compute for the first time from now on do so on one core; this one keeps what it has. What torch keeps
    per process is the number for threads to come, and a thread takes it with its first operation: call it ahead of those."""
    torch.get_num_threads()  # this thread takes its number now

    def leave_one() -> None:
        torch.get_num_threads()
        torch.set_num_threads(1)

    other = threading.Thread(target=leave_one)
    other.start()
    other.join()


def thread_for_device(device: torch.device, num_ranks: int) -> Callable[[], None]:
    """What CPU Adam's thread is to call first: `serve_device`. The thread that trains may have no team where that one has one,
    so how it waits is watched for as long as the result is held."""
    begin = functools.partial(serve_device, device, num_ranks)
    if streams.works_beside_host(device):
        openmp_wait.WATCH.note_team(begin, team_beside_device(num_ranks))
    return begin


def serve_device(device: torch.device, num_ranks: int) -> None:
    """Let the calling thread work for `device` from the host, beside those of other ranks: `num_ranks` in all share its cores.
    Nothing changes where the device is the host."""
    if streams.works_beside_host(device):
        streams.module_of(device).set_device(
            device
        )  # a thread's first one is device 0: whatever it asks of CUDA would set that up, too
        share_cores(num_ranks)


def share_cores(num_ranks: int) -> None:
    """Let the calling thread, and threads that compute for the first time from now on, do so on as many cores as CPU Adam has
    beside a device."""
    torch.set_num_threads(team_beside_device(num_ranks))


def team_beside_device(num_ranks: int) -> int:
    """Threads with which CPU Adam computes beside a device, where `num_ranks` share this process's cores: see [Note: one team].
    OMP_NUM_THREADS wins, unless it is the 1 of a launcher; no more than torch was told otherwise."""
    share = len(os.sched_getaffinity(0)) // num_ranks
    most = max(1, share // 2, share - _CORES_FOR_DEVICE)
    if is_launchers_one():
        return most
    told = torch.get_num_threads()
    return told if "OMP_NUM_THREADS" in os.environ else min(told, most)


def is_launchers_one() -> bool:
    """Whether OMP_NUM_THREADS is the 1 that torchrun writes for several ranks of a host and `accelerate launch` for any number,
    where the user has written nothing."""
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("LOCAL_WORLD_SIZE") or 1) > 1
    by_accelerate = _ONLY_ACCELERATE_LAUNCH in os.environ
    return (by_torchrun or by_accelerate) and os.environ.get("OMP_NUM_THREADS") == "1"
