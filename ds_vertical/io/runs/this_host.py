"""What tells this host from all others. A hostname does not where hosts start from copies of one image. Imports neither torch
nor deepspeed."""

from __future__ import annotations

import functools
import socket
from pathlib import Path


@functools.cache
def boot_id() -> str:
    """The kernel's boot, which no other host has, and this one not after its next start; "" where /proc does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def host_id() -> str:
    """This host among those of a job: name and boot. Containers of one kernel differ in the name."""
    return f"{socket.gethostname()} {boot_id()}"
