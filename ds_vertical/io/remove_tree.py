"""Folders deleted below a descriptor: whatever others rename meanwhile, nothing is deleted but what lies in the folder that was
looked at.

A path that was checked may lead elsewhere by the time that it is used. So each folder is opened from the one above it without
following links, what is in it is deleted through that descriptor, and what is mounted below it is left. Imports neither torch
nor deepspeed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from ds_vertical.interrupts import Descriptor

FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_DEEPEST: Final = 100  # folders inside each other; each one takes a descriptor

Failure = tuple[Path, OSError]


@contextlib.contextmanager
def opened(name: str | os.PathLike[str], dir_fd: int | None = None, follow: bool = False) -> Iterator[int]:
    """A folder's descriptor. Raises OSError, for a link too unless it is to be followed."""
    with Descriptor(partial(os.open, name, FOLDER if follow else FOLDER | os.O_NOFOLLOW, dir_fd=dir_fd)) as fd:
        yield fd


def is_at(fd: int, name: str, dir_fd: int | None) -> bool:
    """Whether a name still means the folder or file of a descriptor."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(name, dir_fd=dir_fd, follow_symlinks=False))
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return False


def remove_inside(fd: int, shown: Path, but: Collection[str] = (), depth: int = 0) -> list[Failure]:
    """Delete what is in a folder, all but these names; returns what could not be deleted. `shown`: the folder, in messages."""
    failures: list[Failure] = []
    for name in sorted(set(os.listdir(fd)) - set(but)):
        try:
            if stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                failures += _remove_folder(name, fd, shown / name, depth + 1)
            else:
                os.unlink(name, dir_fd=fd)
        except FileNotFoundError:
            continue  # somebody else has
        except OSError as error:
            failures.append((shown / name, error))
    return failures


def remove_named(fd: int, name: str, dir_fd: int) -> None:
    """Delete an empty folder, by the name that it has in another one. Raises OSError."""
    if not is_at(fd, name, dir_fd):
        raise OSError(errno.ESTALE, "it has been renamed or replaced meanwhile; what was in it is deleted")
    os.rmdir(name, dir_fd=dir_fd)


def _remove_folder(name: str, dir_fd: int, shown: Path, depth: int) -> list[Failure]:
    with opened(name, dir_fd) as fd:
        if mount(fd) != mount(dir_fd):
            raise OSError(errno.EBUSY, "something is mounted there, which is left")
        if depth > _DEEPEST:
            raise OSError(errno.ELOOP, "the folders in it are nested too deeply")
        failures = remove_inside(fd, shown, depth=depth)
        if not failures:
            remove_named(fd, name, dir_fd)
        return failures


def mount(fd: int) -> tuple[int, str]:
    """What tells a mounted folder from the one that it is mounted in; a folder mounted a second time has the same device."""
    lines = Path(f"/proc/self/fdinfo/{fd}").read_text(encoding="ascii").splitlines()
    return os.fstat(fd).st_dev, next((line for line in lines if line.startswith("mnt_id:")), "")


def make_private(fd: int) -> Iterator[Failure]:
    """Give every folder below one mode 0700, but what is mounted there; gives those for which that failed, by their names."""
    for name in os.listdir(fd):
        try:
            if not stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                continue
            with opened(name, fd) as inner:
                if mount(inner) != mount(fd):
                    continue
                if os.fstat(inner).st_mode & 0o077:
                    os.fchmod(inner, 0o700)
                yield from ((Path(name) / path, error) for path, error in make_private(inner))
        except OSError as error:
            yield Path(name), error
