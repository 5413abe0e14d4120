"""Processes that the kernel holds to so much memory."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


@contextlib.contextmanager
def held_to(num_bytes: int, command: Sequence[str]) -> Iterator[list[str]]:
    """The command inside a control group of its own, which the kernel kills where it takes more; OSError for users who may make
    no group."""
    parent, limit = (V1, "memory.limit_in_bytes") if V1.exists() else (V2, "memory.max")
    group = parent / f"ds_vertical_test.{os.getpid()}"
    group.mkdir()
    try:
        (group / limit).write_text(str(num_bytes))
        yield ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *command]
    finally:
        for _ in range(100):  # the kernel may take a moment to let go of processes that have ended
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.05)


def allowed() -> bool:
    """Whether this user may make such a group."""
    try:
        with held_to(1 << 40, []):
            return True
    except OSError:
        return False
