"""The folder of a tag: written beside it, then switched, so that it is complete or absent whenever the process ends.

[Note: leftovers] A save that was killed leaves its folder beside, with links to files of gone runs that hold space on the disk,
or a file that was to replace one among the tags. The next save to the same place deletes them. Who writes such a folder or file
holds a lock on it, which ends with the process; and nothing is deleted that may be the only copy of a checkpoint: an earlier
one that could not be exchanged for the new at once.

Imports neither torch nor deepspeed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ds_vertical.files import naming
from ds_vertical.manifest import LATEST, NAME, CheckpointError
from ds_vertical.remedies import remedy
from ds_vertical.storage import fail

logger = logging.getLogger(__name__)

_AT_FDCWD: Final = -100
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY
_RENAME_EXCHANGE: Final = 2
_BESIDE: Final = re.compile(r"\.(?P<tag>.+)\.(?P<token>[0-9a-f]{8})(?P<old>\.old)?")
_PLACED: Final = re.compile(rf"\..+\.[0-9a-f]{{8}}\.({LATEST}|zero_to_fp32\.py)")  # on its way to its place among the tags
_OF_A_CHECKPOINT: Final = re.compile(rf"{re.escape(NAME)}|rank\d+|\w+_states\.pt")  # ours, and DeepSpeed's
_NOT_THERE: Final = (errno.EINVAL, errno.ENOSYS, errno.ENOTTY)  # a kernel or file system that cannot exchange two names


class TagFolder:
    """`<save_dir>/<tag>`. `beside`: the folder to write, which takes its place at `switch`; `token`: the same on all ranks,
    and of no other save."""

    def __init__(self, save_dir: Path, tag: str, token: str) -> None:
        self.path = save_dir / tag
        self.beside = save_dir / f".{tag}.{token}"
        self._lock: int | None = None
        self._is_unclear = False  # which of the two folders is which

    def make(self) -> None:
        """Make `beside` (mode 0700), and the folders above, and delete what killed saves left: see [Note: leftovers]. Raises
        StorageError; CheckpointError where the tag's folder holds anything that is no checkpoint's: it would be deleted."""
        try:
            self._refuse_others_files()
            make_folder(self.beside.parent)
            for path in leftovers(self.beside.parent):
                _remove(path)
            self.beside.mkdir(mode=0o700)
            self._lock = _lock(self.beside)
        except OSError as error:
            raise fail(self.beside, "create the folder", error, f"{remedy(error.errno)}; or save elsewhere") from error

    def switch(self) -> None:
        """Let the complete `beside` be the tag's folder; the earlier one is loadable until then. Raises StorageError.

        One system call where the file system can exchange two names (ext4, xfs, btrfs, tmpfs). Where it cannot, the tag is
        absent between two calls, and its earlier folder is beside it with ".old" at its name's end.
        """
        try:
            _sync(self.beside, _FOLDER)
            old = self._replace()
            try:
                _sync(self.path.parent, _FOLDER)
            except OSError:
                self._put_back(old)
                raise
        except OSError as error:
            raise fail(self.path, "switch to the new folder", error, remedy(error.errno)) from error
        finally:
            self._unlock()
        if old is not None:
            _remove(old)

    def write_latest(self) -> None:
        """Name the tag in `latest`, in one step. Raises StorageError."""
        self.place(LATEST, self.path.name.encode(), f"write {self.path.name} into it by hand")

    def place(self, name: str, data: bytes, remedy: str, mode: int = 0o600) -> None:
        """Write a file among the tags, or replace it, in one step. Raises StorageError."""
        path, new = self.path.with_name(name), self.path.with_name(f"{self.beside.name}.{name}")
        try:
            with _written(new, data, mode):  # and locked
                os.replace(new, path)
            sync_folder(path.parent)
        except OSError as error:
            raise fail(path, "replace", error, remedy) from error

    def discard(self) -> None:
        """Delete `beside` after a failure."""
        self._unlock()
        if not self._is_unclear:
            _remove(self.beside)

    def _refuse_others_files(self) -> None:
        inside = sorted(self.path.iterdir()) if self.path.is_dir() else [self.path] if self.path.exists() else []
        others = [path.name for path in inside if path == self.path or not _OF_A_CHECKPOINT.fullmatch(path.name)]
        if others:
            raise CheckpointError(
                f"{self.path}: holds {others[0]}, which is no part of a checkpoint, and would be deleted with the folder that"
                " the new one replaces; give another tag, or move that away"
            )

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _replace(self) -> Path | None:
        """Put `beside` in the place of the folder that is there; returns where that is now, None where there was none."""
        if not self.path.exists():
            os.rename(self.beside, self.path)
            return None
        if _exchange(self.beside, self.path):
            return self.beside
        old = self.path.with_name(f"{self.beside.name}.old")
        try:
            os.rename(self.path, old)
            os.rename(self.beside, self.path)
        except BaseException:
            if not self.path.exists():
                os.rename(old, self.path)
            raise
        return old

    def _put_back(self, old: Path | None) -> None:
        """Let the earlier folder be the tag's again. Where that fails, neither is deleted any more."""
        self._is_unclear = True
        if old != self.beside or not _exchange(self.beside, self.path):
            os.rename(self.path, self.beside)
            if old is not None:
                os.rename(old, self.path)
        self._is_unclear = False


def leftovers(save_dir: Path) -> list[Path]:
    """Folders and files that killed saves left in `save_dir` and that nobody needs. See [Note: leftovers]."""
    everything = sorted(save_dir.iterdir())
    found = [(path, match) for path in everything if (match := _BESIDE.fullmatch(path.name)) and path.is_dir()]
    between = {match["token"] for _, match in found if match["old"] and not (save_dir / match["tag"]).exists()}
    folders = [path for path, match in found if match["token"] not in between]
    files = [path for path in everything if _PLACED.fullmatch(path.name) and path.is_file() and not path.is_symlink()]
    return [path for path in (*folders, *files) if _is_free(path)]


def _is_free(path: Path) -> bool:
    """Whether nobody writes the folder or file; False where that cannot be told."""
    try:
        lock = _lock(path)
    except OSError:
        return False
    if lock is not None:
        os.close(lock)
    return lock is not None


def _lock(path: Path) -> int | None:
    """Lock a folder or file until its descriptor is closed, at the latest by the end of this process; None where a file system
    has no locks. Raises OSError: somebody has it locked."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            return None
        raise
    return fd


def check_tag(tag: str) -> None:
    """Raise CheckpointError for a tag that is no name of a folder."""
    if not tag or tag.startswith(".") or "/" in tag or "\0" in tag or tag == LATEST:
        raise CheckpointError(f"tag {tag!r}: not usable as a folder's name; use letters, digits, - and _")


def write_synced(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a new file that survives a power cut from then on. Raises StorageError."""
    with naming(path, "write"), _written(path, data, mode):
        pass


@contextlib.contextmanager
def _written(path: Path, data: bytes, mode: int) -> Iterator[None]:
    """Within the block a new file is there with all its bytes, and locked, where the file system has locks."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    with os.fdopen(fd, "wb") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.write(data)
        file.flush()
        os.fsync(fd)
        yield


def make_folder(path: Path) -> None:
    """A folder and those above it. Those that this makes survive a power cut from then on, and so does `path` itself, if
    somebody else has just made it. Raises OSError."""
    is_new = not path.is_dir()
    if is_new:
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
    try:
        _sync(path.parent, _FOLDER)
    except OSError as error:
        if is_new and not isinstance(error, PermissionError):
            path.rmdir()
            raise
        logger.debug("%s: sync: %s", path.parent, error.strerror)  # whoever made the folder, or may read that, syncs it


def sync_file(path: Path) -> None:
    """Let what was written to a file survive a power cut. Raises StorageError."""
    with naming(path, "sync"):
        _sync(path, os.O_RDONLY)


def sync_folder(path: Path) -> None:
    """Let the names in a folder survive a power cut. Raises StorageError."""
    with naming(path, "sync"):
        _sync(path, _FOLDER)


def _sync(path: Path, flags: int) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names at once; False where that cannot be had here."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    if ctypes.get_errno() in _NOT_THERE:
        return False
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), os.fspath(other))


def _remove(path: Path) -> None:
    """Delete a folder or file that nobody needs; what cannot be deleted does no harm."""
    try:
        if path.is_file():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)
    except OSError as error:
        logger.warning("%s: delete: %s; delete it by hand", path, error.strerror)
