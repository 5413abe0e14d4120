"""What tells this host from all others, and which files no other host can see. A hostname is not enough: hosts may start from
copies of one image. Imports neither torch nor deepspeed."""

from __future__ import annotations

import functools
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_LOCAL: Final = frozenset(
    ("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "jfs", "reiserfs", "tmpfs", "ramfs", "overlay")
)


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


def host_names(hosts: Iterable[str]) -> list[str]:
    """The name of each host among the ids of all ranks' hosts, see `host_id`; hosts may have one name."""
    return [host.partition(" ")[0] for host in dict.fromkeys(hosts)]


def is_of_this_host(fd: int) -> bool:
    """Whether an open file lies on a file system that one host alone has mounted. False where that cannot be told."""
    try:
        told = Path(f"/proc/self/fdinfo/{fd}").read_text(encoding="ascii").splitlines()
        mount = next(line.split()[1] for line in told if line.startswith("mnt_id:"))
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        found = next(line for line in lines if line.split()[0] == mount)
    except (OSError, StopIteration):
        return False
    return found.partition(" - ")[2].split()[0] in _LOCAL
