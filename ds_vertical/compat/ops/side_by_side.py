"""Several ops compiled at the same time, each by a process of its own.

An op is one to a few files, and DeepSpeed compiles one op after the other: most cores would have nothing to do. This process
holds the cache's turn for all of them, so that other builders wait for it alone (see `build_lock`).
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence

from ds_vertical.compat.ops import cache
from ds_vertical.compat.ops.build_lock import build_turn, say

FILES_EACH = 2  # of one op that are compiled at the same time, of those that MAX_JOBS allows
STAND_IN = 17  # the status of a process that has not compiled its op, and has found something slower in its place
_POLL_S = 0.1


def most_at_once() -> int:
    """Ops that are compiled at the same time, by the number of files that may be (MAX_JOBS, which `cache` sets)."""
    jobs = os.environ.get("MAX_JOBS", "")
    return max(1, int(jobs) // FILES_EACH) if jobs.isdecimal() else 1


def compile_side_by_side(
    names: Sequence[str], most: int, command: Callable[[str, int], Sequence[str]]
) -> tuple[list[str], list[str]]:
    """Compile the ops of these names, up to `most` at a time. Returns those that have a slower stand-in, and those that failed
    otherwise. One that another process has compiled by the time that this one has its turn is left out.

    `command`: of a name and the id of this process, what compiles that op within this process's turn (`cache.join_turn`). It
    prints to this one's standard error. An interrupt ends all of them.
    """
    slow: list[str] = []
    failed: list[str] = []
    running: dict[str, subprocess.Popen[bytes]] = {}
    environment = os.environ | {"MAX_JOBS": str(FILES_EACH)}
    with build_turn(cache.cache_folder()):
        waiting = [name for name in names if cache.ready_library(name) is None]
        say(f"up to {most} ops are compiled at the same time")
        try:
            while waiting or running:
                while waiting and len(running) < most:
                    name = waiting.pop(0)
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
