"""Several ops compiled at the same time, each by a process of its own.

An op is one to a few files, and DeepSpeed compiles one op after the other: most cores would have nothing to do. This process
holds the cache's turn for all of them, so that other builders wait for it alone (see `build_lock`).
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from ds_vertical.compat.ops import cache
from ds_vertical.compat.ops.build_lock import build_turn, say

STAND_IN = 17  # the status of a process that has not compiled its op, and has found something slower in its place
_ENOUGH = 4  # files at a time, from which on several ops are compiled at once
_POLL_S = 0.1


def files_at_a_time() -> int:
    """How many files may be compiled at the same time (MAX_JOBS, which `cache` sets); 1 where too few may for several ops."""
    jobs = os.environ.get("MAX_JOBS", "")
    return int(jobs) if jobs.isdecimal() and int(jobs) >= _ENOUGH else 1


def files_each(files: Mapping[str, int], jobs: int) -> dict[str, int]:
    """Files at a time of each op, by its number of files, the largest op first: all are to be ready at the same time. With two
    files at a time DeepSpeed's async_io, of 12 files, took 128 s on 16 cores, and no other op more than 41 s."""
    total = sum(files.values())
    largest_first = sorted(files, key=lambda name: -files[name])
    return {name: max(1, min(files[name], jobs * files[name] // total)) for name in largest_first}


def compile_side_by_side(
    files: Mapping[str, int], jobs: int, command: Callable[[str, int], Sequence[str]]
) -> tuple[list[str], list[str]]:
    """Compile ops, by name with their numbers of files, `jobs` files at a time. Returns those that have a slower stand-in, and
    those that failed otherwise. One that another process has compiled by the time that this one has its turn is left out.

    `command`: of a name and the id of this process, what compiles that op within this process's turn (`cache.join_turn`). It
    prints to this one's standard error. An interrupt ends all of them.
    """
    slow: list[str] = []
    failed: list[str] = []
    running: dict[str, subprocess.Popen[bytes]] = {}
    with build_turn(cache.cache_folder()):
        shares = files_each({name: num for name, num in files.items() if cache.ready_library(name) is None}, jobs)
        waiting = [*shares]
        say(f"{len(waiting)} ops are compiled side by side, up to {jobs} files at a time")
        try:
            while waiting or running:
                while waiting and sum(shares[name] for name in (*running, waiting[0])) <= jobs:
                    name = waiting.pop(0)
                    environment = os.environ | {"MAX_JOBS": str(shares[name])}
                    running[name] = subprocess.Popen(command(name, os.getpid()), env=environment)
                time.sleep(_POLL_S)
                for name in [name for name, process in running.items() if process.poll() is not None]:
                    if status := running.pop(name).returncode:
                        (slow if status == STAND_IN else failed).append(name)
        finally:
            for process in running.values():
                process.terminate()
            for process in running.values():
                process.wait()
    return slow, failed
