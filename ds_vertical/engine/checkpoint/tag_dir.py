"""The folder of a tag: written beside it, then switched, so that it is complete or absent whenever the process ends.

[Note: leftovers] A save that was killed leaves its folder beside, with links to files of gone runs that hold space on the disk,
or one with a file that was to replace one among the tags. The next save to the same place deletes them, by the marks in them
(`leftovers`). Who writes such a folder, or keeps the earlier one there until all hosts have switched, holds a lock on it, which
ends with the process: meanwhile no save or load of another job deletes it or puts it back. And nothing is deleted that may be
the only copy of a checkpoint: an earlier one that could not be exchanged for the new at once.

Imports neither torch nor deepspeed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from ds_vertical.engine.checkpoint import leftovers, manifest
from ds_vertical.errors import CheckpointError, StorageError
from ds_vertical.io import remove_tree
from ds_vertical.io.disk_errors import remedy
from ds_vertical.io.files import naming
from ds_vertical.io.regular_file import open_regular
from ds_vertical.io.runs import run_dir
from ds_vertical.io.runs.run_dir import fail

logger = logging.getLogger(__name__)

_AT_FDCWD: Final = -100
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY
_RENAME_EXCHANGE: Final = 2
_AROUND_A_TAG: Final = len(".") + len(".0123abcd.old")  # bytes that the longest name of a folder beside has more than the tag
_BELOW_A_TAG: Final = 100  # bytes that the longest path of a file in it has more
PLACED: Final = (manifest.LATEST, "zero_to_fp32.py")  # what a save puts among the tags
_OUR_SCRIPT: Final = b"fp32 weights out of a checkpoint of ds_vertical"  # at the beginning, in each version
_DEEPSPEEDS_SCRIPTS: Final = (b"DeepSpeed Team", b"extracts fp32 consolidated weights")  # now, and in earlier versions
_HEAD_BYTES: Final = 1024
_NOT_THERE: Final = (errno.EINVAL, errno.ENOSYS, errno.ENOTTY)  # a kernel or file system that cannot exchange two names


class TagFolder:
    """`<save_dir>/<tag>`. `beside`: the folder to write, which takes its place at `switch`; `token`: the same on all ranks,
    and of no other save; `run`: the run that saves."""

    def __init__(self, save_dir: Path, tag: str, token: str) -> None:
        self.path = save_dir / tag
        self.beside = save_dir / f".{tag}.{token}"
        self._token = token
        self.run = next((run.name for run in run_dir.claimed()), None) or run_dir.new_run_id()
        self._locks: list[int] = []  # descriptors of `beside` and the earlier folder: no other save or load touches these
        self._earlier: Path | None = None  # what was the tag's folder, where it is kept
        self._is_switched = False  # and not settled: other hosts have yet to switch
        self._is_unclear = False  # which of the two folders is which

    def make(self, placed: Iterable[str] = ()) -> None:
        """Make `beside` (mode 0700), and the folders above, and delete what killed saves left: see [Note: leftovers]. `placed`:
        names that the save will `place`. Raises StorageError; CheckpointError where the tag's folder holds anything that is no
        checkpoint's, which would be deleted, or where something of others has one of these names."""
        try:
            self._refuse_others_files()
            check_placed(self.path.parent, placed)
            make_folder(self.beside.parent)
            for found in leftovers.find_leftovers(self.beside.parent):
                leftovers.remove_leftover(*found)
            self._hold_new(self.beside)
        except OSError as error:
            raise fail(self.beside, "create the folder", error, f"{remedy(error.errno)}; or save elsewhere") from error

    def switch(self, keep: bool = False) -> None:
        """Let the complete `beside` be the tag's folder; the earlier one is loadable until then. Raises StorageError. `keep`:
        the earlier one stays beside it until `settle` or `discard`.

        One system call where the file system can exchange two names (ext4, xfs, btrfs, tmpfs). Where it cannot, the tag is
        absent between two calls, and its earlier folder is beside it with ".old" at its name's end.
        """
        try:
            _sync(self.beside, _FOLDER)
            self._mark_earlier(hold=True)
            old = self._replace()
            try:
                _sync(self.path.parent, _FOLDER)
            except OSError:
                self._put_back(old)
                raise
            self._earlier, self._is_switched = old, True
            with remove_tree.opened(self.path) as fd:
                leftovers.unmark(fd)
        except OSError as error:
            raise fail(self.path, "switch to the new folder", error, remedy(error.errno)) from error
        finally:
            if not self._is_switched:
                self._unlock()
        if not keep:
            self.settle()

    def settle(self) -> None:
        """All hosts have switched: delete the earlier folder."""
        self._is_switched = False
        try:
            if self._earlier is not None:
                self._remove(self._earlier)
                self._earlier = None
        finally:
            self._unlock()

    def put_back(self, earlier: Path | None) -> None:
        """Let the folder of an earlier save, which is beside the tag's, be the tag's again (None: there was none), and the
        tag's own be one beside it. Raises StorageError."""
        try:
            self._mark_earlier()
            self._put_back(earlier)
            if earlier is not None:
                with remove_tree.opened(self.path) as fd:
                    leftovers.unmark(fd)
            _sync(self.path.parent, _FOLDER)
        except OSError as error:
            raise fail(self.path, "put the earlier folder back", error, remedy(error.errno)) from error

    def write_latest(self) -> None:
        """Name the tag in `latest`, in one step. Raises StorageError."""
        self.place(manifest.LATEST, self.path.name.encode(), f"the tag is whole; write {self.path.name} into it by hand")

    def place(self, name: str, data: bytes, remedy: str, mode: int = 0o600) -> None:
        """Write a file among the tags, or replace it, in one step. Raises StorageError."""
        path, folder = self.path.with_name(name), self.path.with_name(f"{self.beside.name}.new")
        held = len(self._locks)
        try:
            try:
                self._hold_new(folder)
                write_synced(folder / name, data, mode)
                os.replace(folder / name, path)
            finally:
                try:
                    if len(self._locks) > held:
                        self._remove(folder)
                finally:
                    self._unlock(held)
            sync_folder(path.parent)
        except OSError as error:
            raise fail(path, "replace", error, remedy) from error

    def _hold_new(self, folder: Path) -> None:
        """Make a folder beside the tags, marked as ours; its descriptor, which holds its lock, is the last of `_locks` then.
        Raises OSError."""
        try:
            folder.mkdir(mode=0o700)
            fd = os.open(folder, remove_tree.FOLDER | os.O_NOFOLLOW)
        except FileExistsError:
            raise
        except BaseException:  # a second Ctrl-C: nobody could tell later that the folder is ours
            with contextlib.suppress(OSError):
                folder.rmdir()
            raise
        try:
            os.fchmod(fd, 0o700)  # whatever the umask takes away
            _lock(fd)
            leftovers.mark(fd, self.run, self.path.name, self._token)
            self._locks.append(fd)
        except BaseException:
            with contextlib.suppress(OSError):
                leftovers.unmark(fd)  # it may be there, and say nothing yet
                folder.rmdir()
            self._locks = [each for each in self._locks if each != fd]
            os.close(fd)
            raise

    def _mark_earlier(self, hold: bool = False) -> None:
        """The tag's folder is about to be one beside; under its own name the mark means nothing. `hold`: lock it, too."""
        if self.path.exists():
            with remove_tree.opened(self.path) as fd:
                if hold:
                    self._locks.append(os.dup(fd))
                    _lock(fd)
                leftovers.mark(fd, self.run, self.path.name, self._token, is_made=False)

    def _remove(self, folder: Path) -> None:
        leftovers.remove_leftover(folder, self.path.name, self._token)

    def discard(self) -> None:
        """Delete `beside` after a failure, here or on another host."""
        try:
            if self._is_switched:
                self._is_switched = False
                self.put_back(self._earlier)
            if not self._is_unclear:
                self._remove(self.beside)
        except StorageError as error:
            logger.error("%s", error)
        finally:
            self._unlock()

    def _refuse_others_files(self) -> None:
        if self.path.is_symlink():
            raise CheckpointError(f"{self.path}: a symbolic link, in whose place the new folder would be; give another tag")
        other = None
        if self.path.is_dir():
            other = next(leftovers.others_files(self.path), None)
        elif self.path.exists():
            other = leftovers.Other(self.path.name)
        if other is not None:
            raise CheckpointError(
                f"{self.path}: holds {other.path}, which {other.why}, and would be deleted with the folder that the new one"
                f" replaces; give another tag, or move it away"
            )

    def _unlock(self, left: int = 0) -> None:
        """Close all but the first `left` of the descriptors."""
        while len(self._locks) > left:
            os.close(self._locks.pop())

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
        """Let the earlier folder be the tag's again; the tag may be absent. Where that fails, nothing is deleted any more."""
        self._is_unclear = True
        if not self.path.exists():
            if old is not None:
                os.rename(old, self.path)
        elif old != self.beside or not _exchange(self.beside, self.path):
            os.rename(self.path, self.beside)
            if old is not None:
                os.rename(old, self.path)
        self._is_unclear = False


class Found(NamedTuple):
    """The complete folder of a save. `save`: its `manifest.save_id`; `token`: of the save that has put it beside the tag's
    folder, "" for that itself."""

    save: int
    path: Path
    token: str
    mtime_ns: int


def found_saves(save_dir: Path, tag: str) -> list[Found]:
    """Of a tag: its folder, and those that a save which has ended half-way has left beside it."""
    found = []
    with contextlib.suppress(OSError):
        for path, name, token in ((save_dir / tag, tag, ""), *leftovers.marked_beside(save_dir)):
            if name == tag and (save := manifest.save_id(path)) is not None:
                found.append(Found(save, path, token, (path / manifest.NAME).stat().st_mtime_ns))
    return found


def check_placed(folder: Path, names: Iterable[str]) -> None:
    """Raise CheckpointError where one of the files that a save puts among the tags would take the place of something else: of
    what is no regular file, or of a script that neither a save of ours nor DeepSpeed has put there; StorageError where the
    disk fails."""
    for name in names:
        if (why := _in_the_way(folder / name)) is not None:
            instead = "or pass save_latest=False" if name == manifest.LATEST else "or save to another folder"
            raise CheckpointError(f"{folder / name}: {why}, and the save would replace it; move it away, {instead}")


def _in_the_way(path: Path) -> str | None:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            head = file.read(_HEAD_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return "is a link that leads to no file" if path.is_symlink() else None
    except OSError as error:
        if error.errno == errno.EIO:
            raise fail(path, "read", error, remedy(error.errno)) from error
        return f"cannot be read ({error.strerror})"
    is_cut = not head  # DeepSpeed empties the file before it copies: a full disk or a kill may have come between the two
    if path.name == manifest.LATEST or is_cut or any(each in head for each in (_OUR_SCRIPT, *_DEEPSPEEDS_SCRIPTS)):
        return None
    return "is no script of ours or of DeepSpeed's"


def _lock(folder: int) -> None:
    """Until the descriptor, and each copy of it, is closed."""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)


def check_tag(tag: str, save_dir: Path | None = None) -> None:
    """Raise CheckpointError for a tag, or a folder for it, that cannot be used, before anything is made."""
    if not tag or tag.startswith(".") or "/" in tag or "\0" in tag or tag in PLACED:
        raise CheckpointError(f"tag {tag!r}: not usable as a folder's name; use letters, digits, - and _")
    if tag != tag.strip() or not tag.isprintable():
        raise CheckpointError(f"tag {tag!r}: begins or ends with a blank, or has what cannot be printed; write {_plain(tag)!r}")
    folder = Path() if save_dir is None else save_dir
    try:
        above, num_bytes = len(os.fsencode(folder.absolute())), len(os.fsencode(tag))
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"{str(folder)!a}, tag {tag!a}: no names that this process can give to files ({error.encoding}); set LC_ALL=C.UTF-8"
        ) from error
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    most = min(os.pathconf(there, "PC_NAME_MAX") - _AROUND_A_TAG, os.pathconf("/", "PC_PATH_MAX") - above - _BELOW_A_TAG)
    if num_bytes > most:
        raise CheckpointError(f"tag {tag[:20]!r}...: has {num_bytes} bytes; write one of at most {max(0, most)} for {folder}")


def _plain(tag: str) -> str:
    return "".join(letter for letter in tag if letter.isprintable()).strip()


def write_synced(path: Path, data: bytes | memoryview, mode: int = 0o600) -> None:
    """Write a new file that survives a power cut from then on. Raises StorageError."""
    with naming(path, "write"):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, mode)  # whatever the umask takes away
            file.write(data)
            file.flush()
            os.fsync(fd)


def make_folder(path: Path) -> None:
    """A folder and those above it. Those that this makes survive a power cut from then on, and so does `path` itself, if
    somebody else has just made it. Raises OSError."""
    is_new = not path.is_dir()
    if is_new:
        make_folder(path.parent)
        path.mkdir(mode=0o775, exist_ok=True)  # world-writable under no umask
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
