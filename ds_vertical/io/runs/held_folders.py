"""The folders of this process's runs on the SSDs, held by descriptors, and the files in them opened below these.

[Note: held folders] Whoever may rename below an nvme_path can put another folder, or a link, in the place of a run's, while
it trains. A path that is looked up from the root leads into that one: our writes would go to its files, and its bytes would
become weights. So a run opens its folder once, when it has made and locked it, and each folder in it once, from there and
without following links. A file is then opened in the folder that is held, by its last name, which must be no link. What others
rename meanwhile, a name leads to the run's own file.

Names stay the paths that the run gave its files: tables, messages and records have those. Whoever opens, looks at or links a
file asks here, with that path. A path outside the runs of this process is looked up as it is: it is the user's, who may have
linked it. Imports neither torch nor deepspeed.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from ds_vertical.interrupts import Descriptor
from ds_vertical.io import remove_tree
from ds_vertical.io.regular_file import open_regular

AnyPath = str | os.PathLike[str]

_DESCRIPTORS: Final = "/proc/self/fd"


class HeldFolder(Descriptor):
    """A folder by its descriptor, which nobody closes: the run has this object until it is released, and a queue that was given
    it until that is closed or gone. The number of a closed descriptor may soon be another folder's."""

    @property
    def is_gone(self) -> bool:
        """Whether somebody has deleted the folder."""
        try:
            return os.fstat(self.fd).st_nlink == 0
        except OSError:  # what a server says of one that is not there (ESTALE)
            return True


class HeldTree:
    """A run's folder, and those in it that were asked for. `path`: its name."""

    def __init__(self, path: AnyPath, root: HeldFolder) -> None:
        self.path = os.fspath(path)
        self.root = root
        self._folders = {self.path: self.root}

    def has(self, path: str) -> bool:
        """Whether a path, by its name, is the run's folder or lies in it."""
        return path == self.path or path.startswith(f"{self.path}/")

    def nearest(self, folder: str) -> tuple[str, HeldFolder]:
        """The folder of this name, or the nearest one above it that is held already, with its name."""
        assert self.has(folder), f"{folder} is not in {self.path}"
        while (found := self._folders.get(folder)) is None or (found is not self.root and found.is_gone):
            folder = folder.rpartition("/")[0]
        return folder, found

    def folder(self, name: str, make: bool = False) -> HeldFolder:
        """The folder of this name, held from now on. `make`: it and those above it are made where they are missing (mode 0700).
        Raises OSError, where a link is in its place or in that of one above."""
        there, found = self.nearest(name)
        for part in name[len(there) :].split("/")[1:]:
            there = f"{there}/{part}"
            with _naming(there):
                found = HeldFolder(partial(_opened_in, found, part, make))
            self._folders[there] = found
        return found


def _opened_in(folder: HeldFolder, name: str, make: bool) -> int:
    is_new = False
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, mode=0o700, dir_fd=folder.fd)
            is_new = True
    fd = os.open(name, remove_tree.FOLDER | os.O_NOFOLLOW, dir_fd=folder.fd)
    if is_new:
        os.fchmod(fd, 0o700)  # whatever the umask takes away
    return fd


_trees: dict[str, HeldTree] = {}
_released: set[str] = set()  # folders of runs of this process that have ended


def hold(tree: HeldTree) -> None:
    """Names in this run's folder lead into what it holds from now on."""
    _released.discard(tree.path)
    _trees[tree.path] = tree


def let_go(path: AnyPath) -> HeldTree:
    """Names in the run's folder lead to nothing from now on; returns what it held."""
    name = os.fspath(path)
    _released.add(name)
    return _trees.pop(name)


def tree_of(path: AnyPath) -> HeldTree | None:
    """The run of this process whose folder this is, by its name, or lies in."""
    name = os.fspath(path)
    return next((tree for tree in tuple(_trees.values()) if tree.has(name)), None)  # a copy: other threads end runs


def _live_tree_of(path: AnyPath) -> HeldTree | None:
    """As `tree_of`. Raises OSError, of errno ESTALE, for a path in the folder of a run that has ended: others may have another
    folder there by now."""
    tree = tree_of(path)
    if tree is None and _released:
        name = os.fspath(path)
        if any(name == each or name.startswith(f"{each}/") for each in tuple(_released)):
            raise OSError(errno.ESTALE, "its run has ended", name)
    return tree


def locate(path: AnyPath) -> tuple[HeldFolder | None, str]:
    """The folder that a file lies in, and the file's name there; of one outside all runs None and the path. Raises OSError,
    of errno ESTALE where the file's run has ended."""
    name = os.fspath(path)
    tree = _live_tree_of(name)
    if tree is None:
        return None, name
    if name == tree.path:
        return tree.root, "."
    folder, _, last = name.rpartition("/")
    return tree.folder(folder), last


@contextlib.contextmanager
def opened_folder(folder: AnyPath) -> Iterator[int]:
    """A folder's descriptor for the time of the block. Raises OSError, as `locate`."""
    tree = _live_tree_of(folder)
    if tree is not None:
        held = tree.folder(os.fspath(folder))
        yield held.fd
        return
    with remove_tree.opened(folder, follow=True) as fd:
        yield fd


def open_file(path: AnyPath, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file; one that O_CREAT makes has mode 0600. Raises OSError, of a run's for a link, too."""
    folder, name = locate(path)
    if folder is None:
        return open_regular(name, flags)
    with _naming(path):
        return open_regular(name, flags | os.O_NOFOLLOW, folder.fd)


def status(path: AnyPath) -> os.stat_result:
    """What stat tells of a file; of a run's it tells of a link itself. Raises OSError."""
    folder, name = locate(path)
    if folder is None:
        return Path(name).stat()
    with _naming(path):
        return os.stat(name, dir_fd=folder.fd, follow_symlinks=False)


def exists(path: AnyPath) -> bool:
    """Whether there is anything under this name."""
    try:
        status(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return False
    return True


def link(path: AnyPath, target: AnyPath) -> None:
    """Give a file a second name, outside the runs. Raises OSError."""
    folder, name = locate(path)
    if folder is None:
        os.link(name, target)
        return
    try:
        os.link(name, target, src_dir_fd=folder.fd, follow_symlinks=False)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path), None, os.fspath(target)) from None


def is_reachable(fd: int) -> bool:
    """Whether `by_descriptor` leads to a folder of this process, so that proc is mounted."""
    try:
        return os.path.samestat(os.fstat(fd), Path(by_descriptor(fd)).stat())
    except OSError:
        return False


def by_descriptor(fd: int) -> str:
    """A path to what a descriptor has open, whatever its name is by now: for code of others, which opens paths."""
    return f"{_DESCRIPTORS}/{fd}"


@contextlib.contextmanager
def _naming(path: AnyPath) -> Iterator[None]:
    """An OSError of the block has the path that the run gave its file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None
