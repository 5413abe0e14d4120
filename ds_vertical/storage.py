"""The folder of a run: one claimed folder per run on each SSD path.

Stock's `zero.Init` clears the bare `nvme_path`, so two jobs that share one destroy each other's files. Here every
run works in `nvme_path/<run id>`, which each rank holds with a lock file of its own. Only a claimed folder is ever
deleted. Imports neither torch nor deepspeed.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

logger = logging.getLogger(__name__)

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
NUM_SHOWN = 5
_NUM_RETRIES = 100
_SECTIONS = ("offload_param", "offload_optimizer")


class StorageError(RuntimeError):
    """A file of the run that cannot be used; the message names file, operation, errno text and remedy."""


def fail(path: str | os.PathLike[str], operation: str, error: OSError, remedy: str) -> StorageError:
    reason = f"{error.strerror or error} (errno {errno.errorcode.get(error.errno or 0, error.errno)})"
    return StorageError(f"{os.fspath(path)}: {operation}: {reason}; {remedy}")


# --- run folders ---------------------------------------------------------------------------------------------------


def new_run_id() -> str:
    """UTC time, host and a random suffix, safe as a folder name; e.g. 20260131-235959-node7-1f2e3d4c."""
    host = re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname().split(".")[0])[:32].strip("-") or "host"
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{host}-{secrets.token_hex(4)}"


@dataclass(frozen=True)
class Owner:
    """Who holds a lock file. `start_ticks` (clock ticks since boot) tells a process from a later one of its pid."""

    pid: int
    host: str
    rank: int
    start_ticks: int
    since: str

    @classmethod
    def me(cls, rank: int) -> Owner:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        return cls(os.getpid(), socket.gethostname(), rank, _start_ticks(os.getpid()) or 0, since)

    @classmethod
    def read(cls, lock: Path) -> Owner | None:
        """The owner written in a lock file; None where the file is gone, unreadable or was never fully written."""
        try:
            entry = json.loads(lock.read_text(encoding="utf-8"))
            return cls(*(entry[key] for key in ("pid", "host", "rank", "start_ticks", "since")))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def __str__(self) -> str:
        return f"pid {self.pid} on host {self.host} (rank {self.rank}), since {self.since}"


def _start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, or None where there is no such process."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name, in parentheses, may itself hold spaces and parentheses; field 22 counts from the last one.
    return int(line.rpartition(")")[2].split()[19])


_claimed: dict[Path, RunFolder] = {}


class RunFolder:
    """`nvme_path/<run id>`, held by this process for one rank until `release` (or the interpreter's exit).

    A forked child holds nothing: neither its exit nor its `release` touches the parent's folder.
    """

    def __init__(self, path: Path, rank: int, lock_fd: int) -> None:
        self.path = path
        self.rank = rank
        self._lock_fd = lock_fd
        self._pid = os.getpid()

    @property
    def lock_path(self) -> Path:
        return _lock_path(self.path, self.rank)

    @classmethod
    def claim(cls, nvme_path: str | os.PathLike[str], run_id: str, rank: int) -> RunFolder:
        """Create `nvme_path/<run id>` (mode 0700) where needed and take this rank's lock in it.

        A lock left by a dead process is taken over. Raises StorageError where a live process holds it, where
        `nvme_path` is itself a run's folder, and where the folder cannot be made.
        """
        if not _RUN_ID.fullmatch(run_id):
            raise StorageError(f"run id {run_id!r}: not safe as a folder name; use letters, digits, - and _")
        root = Path(os.path.realpath(nvme_path))
        _refuse_run_folder(root)
        path = root / run_id
        if path in _claimed:
            raise StorageError(f"{path}: claim: this process holds it already; use a new run id (new_run_id())")
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise fail(root, "create the swap folder", error, "write a writable folder as nvme_path") from error
        with guarded(path, create=True):
            try:
                folder = cls(path, rank, _take_lock(path, rank))
            except StorageError:
                with contextlib.suppress(OSError):  # not empty: a run's folder, with its owner's files
                    path.rmdir()
                raise
        _claimed[path] = folder
        return folder

    def release(self) -> None:
        """Give the lock back; with no other rank's left, delete the folder. Idempotent; a no-op in a forked child.

        Raises StorageError, after deleting what could be deleted, naming what could not.
        """
        if self._pid != os.getpid() or _claimed.get(self.path) is not self:
            return
        del _claimed[self.path]
        try:
            with guarded(self.path, create=False):
                if any(lock.standing != "gone" for lock in locks(self.path) if lock.path != self.lock_path):
                    self.lock_path.unlink(missing_ok=True)
                else:
                    remove_tree(self.path)
        except FileNotFoundError:
            logger.warning("%s: the run's folder was removed by someone else before its release", self.path)
        except OSError as error:
            raise fail(self.path, "release", error, "delete the folder by hand") from error
        finally:
            os.close(self._lock_fd)


def owned(path: str | os.PathLike[str]) -> RunFolder | None:
    """The folder claimed by this process that `path` is, or lies in; None where there is none."""
    real = Path(os.path.realpath(path))
    return next((_claimed[parent] for parent in (real, *real.parents) if parent in _claimed), None)


def claimed() -> list[Path]:
    """The run folders that this process holds."""
    return list(_claimed)


def _lock_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.lock"


def lock_files(folder: Path) -> list[Path]:
    return [lock for lock in sorted(folder.glob("rank*.lock")) if re.fullmatch(r"rank\d+\.lock", lock.name)]


def _refuse_run_folder(root: Path) -> None:
    """A prepared configuration given to another process would nest one run's folder inside another's."""
    for parent in (root, *root.parents):
        paths = lock_files(parent) if parent.is_dir() and os.access(parent, os.R_OK) else []
        owner = next((owner for path in paths if (owner := Owner.read(path))), None)
        if owner is not None:
            raise StorageError(
                f"{root}: claim: {parent} is the folder of a run, of {owner}; "
                "give the original configuration, whose nvme_path is the bare SSD folder"
            )


@contextlib.contextmanager
def guarded(path: Path, create: bool) -> Iterator[None]:
    """Hold the folder's own flock for a moment: ranks claim and release, and others look and delete, one after another.

    A folder that its last holder deleted while we waited is not the one we opened; then start again. Raises
    FileNotFoundError where there is none and none is to be made.
    """
    while True:
        fd = _open_folder(path, create)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
            except OSError as error:
                raise fail(path, "flock", error, "use an nvme_path on a local file system") from error
            if not _same_file(fd, path):
                continue
            yield
            return
        finally:
            os.close(fd)


def _open_folder(path: Path, create: bool) -> int:
    """A descriptor of the folder, made where asked; FileNotFoundError where it is not there and not to be made."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    for retries_left in reversed(range(_NUM_RETRIES)):
        try:
            if create:
                with contextlib.suppress(FileExistsError):
                    path.mkdir(mode=0o700)
            fd = os.open(path, flags)
            break
        except OSError as error:
            vanished = isinstance(error, FileNotFoundError)
            if vanished and not create:
                raise
            if not vanished or not retries_left:  # its last holder may delete it between our mkdir and our open
                remedy = "use a new run id, or a writable nvme_path"
                raise fail(path, "open the run's folder", error, remedy) from error
    uid = os.fstat(fd).st_uid
    if uid != os.geteuid():
        os.close(fd)
        raise StorageError(f"{path}: claim: the folder belongs to user id {uid}, not to us; use a new run id")
    return fd


def _same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _take_lock(folder: Path, rank: int) -> int:
    """Create this rank's lock file, or take over a dead process's; returns the descriptor that holds the flock."""
    lock = _lock_path(folder, rank)
    with contextlib.ExitStack() as undo:
        try:
            fd = _open_lock(lock, undo)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(asdict(Owner.me(rank))).encode() + b"\n", 0)
        except OSError as error:
            remedy = "use a new run id, and an nvme_path whose file system has locks (flock) and free space"
            raise fail(lock, "take the rank's lock", error, remedy) from error
        undo.pop_all()
    return fd


def _open_lock(lock: Path, undo: contextlib.ExitStack) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(lock, flags | os.O_CREAT | os.O_EXCL, 0o600)
        undo.callback(os.close, fd)
        undo.callback(lock.unlink, missing_ok=True)
    except FileExistsError:
        fd = os.open(lock, flags)
        undo.callback(os.close, fd)
        owner = Owner.read(lock)
        if _standing(fd, owner) != "gone":
            raise _held(lock, owner) from None
        logger.warning("%s: left by a process that is gone (%s); taken over", lock, owner)
    return fd


def _held(lock: Path, owner: Owner | None) -> StorageError:
    return StorageError(
        f"{lock}: claim: held by {owner or 'a process that did not write its name'}; "
        "end that process or use a new run id (is it gone, on another host? ds-vertical clean --path "
        f"{lock.parent.parent} --remove {lock.parent.name})"
    )


Standing = Literal["live", "elsewhere", "gone"]


class Lock(NamedTuple):
    """A rank's lock file; owner None: it did not write its name. "elsewhere": on another host, alive or not."""

    path: Path
    owner: Owner | None
    standing: Standing


def _standing(fd: int, owner: Owner | None) -> Standing:
    """How the owner of an open lock fares. Another host's flock may be invisible here, so that one is never called gone."""
    here = owner is None or owner.host == socket.gethostname()
    if owner is not None and here and owner.start_ticks and _start_ticks(owner.pid) == owner.start_ticks:
        return "live"
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "live"
    return "gone" if here else "elsewhere"


def locks(folder: Path) -> list[Lock]:
    """The locks in a run's folder. Only under `guarded`: while one is looked at, a rank that wants it would be refused."""
    found = []
    for path in lock_files(folder):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            owner = Owner.read(path)
            found.append(Lock(path, owner, _standing(fd, owner)))
        finally:
            os.close(fd)
    return found


def remove_tree(folder: Path) -> None:
    """Delete a run's folder, its locks last, so that what a failure or a kill leaves of it is known for a dead run's.

    Only under `guarded`. Raises StorageError, after deleting what could be deleted, naming what could not.
    """
    failures: list[StorageError] = []

    def keep(_function: Any, path: Any, info: Any) -> None:
        failures.append(fail(path, "delete", info[1], "delete it by hand"))

    names = {path.name for path in lock_files(folder)}
    for entry in list(folder.iterdir()) if folder.is_dir() else []:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, onerror=keep)
        elif entry.name not in names:
            try:
                entry.unlink()
            except OSError as error:
                keep(None, entry, (type(error), error, None))
    if not failures:
        shutil.rmtree(folder, onerror=keep)
    if failures:
        shown = "\n".join(map(str, failures[:NUM_SHOWN]))
        raise StorageError(f"{folder}: delete: {len(failures)} entries could not be deleted:\n{shown}")


def release_all() -> None:
    """At exit. Registered at import, so it runs after the exit handlers of everything that was imported later."""
    for folder in list(_claimed.values()):
        try:
            folder.release()
        except StorageError as error:
            logger.error("%s", error)


def _forget_in_child() -> None:
    """A forked child shares the parent's locks; were it to keep them open, they would outlive the parent."""
    for folder in _claimed.values():
        os.close(folder._lock_fd)
    _claimed.clear()


atexit.register(release_all)
os.register_at_fork(after_in_child=_forget_in_child)


def claim_config(config: dict[str, Any], run_id: str, rank: int) -> dict[str, Any]:
    """A deep copy of the DeepSpeed configuration with every nvme_path in use replaced by a claimed run folder.

    Paths that this process has claimed already are kept, so a prepared configuration comes back as it is. The same
    nvme_path twice is one folder. Raises StorageError, with nothing newly claimed left behind.
    """
    prepared = copy.deepcopy(config)
    zero = prepared.get("zero_optimization")
    sections = [zero.get(name) for name in _SECTIONS] if isinstance(zero, dict) else []
    fresh: dict[Path, RunFolder] = {}
    try:
        for section in sections:
            if not isinstance(section, dict) or section.get("device") != "nvme" or not section.get("nvme_path"):
                continue
            root = Path(os.path.realpath(section["nvme_path"]))
            if owned(root) is None:
                fresh[root] = fresh.get(root) or RunFolder.claim(root, run_id, rank)
                section["nvme_path"] = str(fresh[root].path)
    except BaseException:
        for folder in fresh.values():
            folder.release()
        raise
    return prepared
