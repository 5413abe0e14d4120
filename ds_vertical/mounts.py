"""Which mount holds a path."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple


class Mount(NamedTuple):
    """A line of mountinfo. `read_only`: the mount itself or the file system in it."""

    point: Path
    kind: str
    source: str
    read_only: bool


def mount_of(path: Path, mountinfo: str) -> Mount:
    """The mount that holds `path` (which exists), by the text of `read_mounts`: the deepest, of several the last."""
    real, found = path.resolve(), Mount(Path("/"), "?", "?", False)
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), before.split()[4]))
        if real.is_relative_to(point) and len(point.parts) >= len(found.point.parts):
            kind, source, options = after.split(" ", 2)
            found = Mount(point, kind, source, "ro" in before.split()[5].split(",") or "ro" in options.split(","))
    return found


def read_mounts() -> str:
    """This process's mounts, as proc(5) writes mountinfo."""
    return Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
