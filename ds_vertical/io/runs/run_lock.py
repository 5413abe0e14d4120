"""A run's folder says by its lock files whose it is: `rank<r>.lock`, with the run's id and its owner's process, and a flock.

They are read through the folder's descriptor. A lock that does not say so is another program's, and so may be the folder. Locks
of versions that did not write the run's id tell who holds the folder, and not that it is ours to delete.
Imports neither torch nor deepspeed.

[Note: boots] A lock also names the kernel's boot. Two processes with one boot see each other's flocks, whatever their hostnames
are (containers). A process id means something within one boot only. A lock of another boot under this host's name is of this
host before its last start, or of another host that was made from a copy of its image. On a local file system it can only be the
former, so its owner is gone. On a file system that hosts may share it is treated as another host's.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal, NamedTuple

from ds_vertical.interrupts import Descriptor
from ds_vertical.io.regular_file import open_regular, parse_json
from ds_vertical.io.runs.this_host import boot_id, is_of_this_host

_WRITTEN_BY: Final = {"written_by": "ds_vertical"}
_MOST_BYTES: Final = 1 << 14
_NAME: Final = re.compile(r"rank\d+\.lock")

Standing = Literal["live", "elsewhere", "gone"]


@dataclass(frozen=True)
class Owner:
    """Who holds a lock file. `start_ticks` (clock ticks since boot) tells a process from a later one of its pid. `run`: the
    run's id; empty in locks of earlier versions, which did not write it. `beside`: the run's folders on its other SSDs. `boot`:
    the kernel's boot id; empty where nobody has written it."""

    pid: int
    host: str
    rank: int
    start_ticks: int
    since: str
    run: str = ""
    beside: tuple[str, ...] = ()
    boot: str = ""

    @classmethod
    def me(cls, rank: int, run: str, beside: Sequence[str] = ()) -> Owner:
        """This process, as the owner of a rank's lock in the folder of `run`."""
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        ticks = start_ticks(os.getpid()) or 0
        return cls(os.getpid(), socket.gethostname(), rank, ticks, since, run, tuple(beside), boot_id())

    @classmethod
    def of(cls, data: bytes) -> Owner | None:
        """The owner that a lock file's bytes tell of; None where they were not written by us, or not wholly."""
        try:
            entry = parse_json(data)
        except ValueError:
            return None
        beside = entry.pop("beside", []) if isinstance(entry, dict) else []
        if not isinstance(beside, list) or not all(isinstance(each, str) for each in beside):
            return None
        kinds: Mapping[str, type] = {"pid": int, "host": str, "rank": int, "start_ticks": int, "since": str}
        if isinstance(entry, dict) and "run" in entry:
            kinds = {**kinds, "run": str, "written_by": str}
        if isinstance(entry, dict) and "boot" in entry:
            kinds = {**kinds, "boot": str}
        if not isinstance(entry, dict) or {key: type(value) for key, value in entry.items()} != kinds:
            return None
        if entry.pop("written_by", _WRITTEN_BY["written_by"]) != _WRITTEN_BY["written_by"]:
            return None
        return cls(**entry, beside=tuple(beside))

    def to_json(self) -> bytes:
        """The bytes of a lock file of this owner's: a line of JSON."""
        entry = {key: value for key, value in asdict(self).items() if value or key not in ("beside", "boot")}
        return json.dumps(_WRITTEN_BY | entry).encode() + b"\n"

    def __str__(self) -> str:
        return f"pid {self.pid} on host {self.host} (rank {self.rank}), since {self.since}"


class Lock(NamedTuple):
    """A rank's lock file; owner None: it does not say. "elsewhere": on another host, alive or not."""

    name: str
    owner: Owner | None
    standing: Standing


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, or None where there is no such process."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name, in parentheses, may itself hold spaces and parentheses; field 22 counts from the last one.
    return int(line.rpartition(")")[2].split()[19])


def lock_name(rank: int) -> str:
    """The name of a rank's lock file in the run's folder."""
    return f"rank{rank}.lock"


def lock_names(folder: int | str | os.PathLike[str]) -> list[str]:
    """Names of a folder's lock files. Raises OSError."""
    return sorted(name for name in os.listdir(folder) if _NAME.fullmatch(name))


def open_lock(name: str, folder: int, flags: int = os.O_RDWR) -> int:
    """A lock file's descriptor, given the folder's. Raises OSError, for anything but a regular file."""
    return open_regular(name, flags | os.O_NOFOLLOW, folder)


def read_owner(fd: int) -> tuple[Owner | None, bool]:
    """The owner that an open lock file tells of, and whether it holds nothing at all."""
    data = os.pread(fd, _MOST_BYTES, 0)
    return Owner.of(data), not data


def standing(fd: int, owner: Owner | None) -> Standing:
    """How the owner of an open lock fares. Another host's flock may be invisible here, so that one is never called gone. See
    [Note: boots]."""
    same_boot, here = (False, True) if owner is None else _is_known_here(fd, owner)
    if owner is not None and same_boot and owner.start_ticks and start_ticks(owner.pid) == owner.start_ticks:
        return "live"
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "live"
    return "gone" if here else "elsewhere"


def _is_known_here(fd: int, owner: Owner) -> tuple[bool, bool]:
    """Whether the process id in a lock is one of this kernel's, and whether the lock's flock would be seen here."""
    named = owner.host == socket.gethostname()
    if not owner.boot or not boot_id():
        return named, named
    if owner.boot == boot_id():
        return True, True
    return False, named and is_of_this_host(fd)


def locks_in(folder: int) -> list[Lock]:
    """The locks in a run's folder, given its descriptor; what cannot be opened as one says nothing. Only under its guard: while
    one is looked at, a rank that wants it would be refused."""
    found = []
    for name in lock_names(folder):
        try:
            lock = Descriptor(partial(open_lock, name, folder))
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ELOOP, errno.ENOENT):
                raise
            found.append(Lock(name, None, "gone"))
            continue
        with lock as fd:
            owner, _ = read_owner(fd)
            found.append(Lock(name, owner, standing(fd, owner)))
    return found


def owner_above(folder: Path) -> tuple[Path, Owner] | None:
    """The run whose folder this is, or lies in, and the first of its owners; None where no lock tells of one."""
    for parent in (folder, *folder.parents):
        try:
            opened = Descriptor(partial(os.open, parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except OSError:
            continue  # not there, or not ours to read
        with opened as fd:
            owner = next((owner for name in lock_names(fd) if (owner := _told(name, fd)) is not None), None)
        if owner is not None:
            return parent, owner
    return None


def _told(name: str, folder: int) -> Owner | None:
    try:
        lock = Descriptor(partial(open_lock, name, folder, os.O_RDONLY))
    except OSError:
        return None
    with lock as fd:
        return read_owner(fd)[0]


def is_of_run(locks: list[Lock], run: str) -> bool:
    """Whether the locks say that a run made the folder of this name: one under another name may be somebody's copy."""
    return any(lock.owner is not None and lock.owner.run == run for lock in locks)


def plain_entry(owner: Owner) -> dict[str, object]:
    """The owner as JSON objects for users have it: without the run, whose folders are named beside it."""
    return {key: value for key, value in asdict(owner).items() if key not in ("run", "beside", "boot")}
