"""Files that others may have put where ours are: opened without waiting for anybody, taken only where they are regular files,
read up to a limit.

Opening a FIFO waits for somebody who writes, a folder cannot be read, and `/dev/zero` does not end. Imports neither torch nor
deepspeed.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from functools import partial
from typing import Any, Final

from ds_vertical.interrupts import Descriptor

_LONGEST_NAME: Final = 255  # bytes of a file's name on Linux's file systems
_KINDS: Final = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, dir_fd: int | None = None) -> int:
    """A descriptor of a regular file; one that O_CREAT makes has mode 0600. Raises OSError, of errno EINVAL where the path is
    something else."""
    try:
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
    except OSError as error:
        if error.errno not in (errno.ENXIO, errno.EISDIR):  # a FIFO that nobody reads, a socket; a folder to write to
            raise
        kind = "a folder" if error.errno == errno.EISDIR else "a FIFO or a socket"
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", os.fspath(path)) from error
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        kind = next((words for holds, words in _KINDS if holds(mode)), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", os.fspath(path))
    return fd


def read_regular(path: str | os.PathLike[str], limit: int, flags: int = 0, dir_fd: int | None = None) -> bytes:
    """All bytes of a regular file. Raises OSError, of errno EFBIG where there are more than `limit`."""
    opened = Descriptor(partial(open_regular, path, os.O_RDONLY | flags, dir_fd))
    with opened as fd, os.fdopen(fd, "rb", closefd=False) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit} bytes, which no file of its kind has", os.fspath(path))
    return data


def parse_json(data: bytes | str) -> Any:
    """What JSON says. Raises ValueError for whatever is none."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def is_plain_name(name: str) -> bool:
    """Whether a text names a file of its own folder: not one elsewhere, and not one that no file system can have."""
    try:
        num_bytes = len(os.fsencode(name))
    except UnicodeEncodeError:
        return False
    return 0 < num_bytes <= _LONGEST_NAME and name not in (".", "..") and "/" not in name and "\0" not in name
