"""Control groups whose processes have only a share of this machine's cores (cgroup v1 `cpu`, or v2)."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PERIOD_US: Final = 20_000  # shorter than the kernel's 100 ms, in which a small model's whole step could fall into one pause
REMOVAL_S: Final = 10.0  # how long to wait until the kernel lets go of a group whose processes have ended


def _parent() -> tuple[Path, int]:
    """The folder in which groups are made, and the version of the interface. Raises OSError."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mount, (kind, _, options) = Path(before.split()[4]), after.split()[:3]
        if kind == "cgroup" and "cpu" in options.split(","):
            return mount, 1
        if kind == "cgroup2" and "cpu" in (mount / "cgroup.controllers").read_text().split():
            return mount, 2
    raise OSError("no control group of this machine can limit the cores (--slow)")


@contextlib.contextmanager
def limited(name: str, share: float) -> Iterator[Path]:
    """Make a group for as long as the block runs; its processes together have that share of all cores. Raises OSError."""
    parent, version = _parent()
    quota_us = max(1000, round(share * (os.cpu_count() or 1) * PERIOD_US))
    group = parent / name
    if version == 2:
        (parent / "cgroup.subtree_control").write_text("+cpu")
    group.mkdir()
    try:
        if version == 2:
            (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        yield group
    finally:
        _remove(group)


def groups(prefix: str) -> list[Path]:
    """All groups whose names begin with the prefix, whichever process has made them."""
    try:
        return list(_parent()[0].glob(f"{prefix}*"))
    except OSError:
        return []


def _remove(group: Path) -> None:
    deadline = time.monotonic() + REMOVAL_S
    while True:
        try:
            group.rmdir()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
