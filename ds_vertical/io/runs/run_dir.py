"""The folder of a run: one claimed folder per run on each SSD path.

Stock's `zero.Init` clears the bare `nvme_path`, so two jobs that share one destroy each other's files. Here every
run works in `nvme_path/<run id>`, which each rank holds with a lock file of its own. Only a folder whose locks say that a run
made it is ever deleted, and through its descriptor: see `remove_tree`. Imports neither torch nor deepspeed.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import errno
import fcntl
import logging
import os
import re
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ds_vertical.errors import StorageError
from ds_vertical.io import remove_tree as trees
from ds_vertical.io.runs import held_folders, run_lock, stripes
from ds_vertical.io.runs.held_folders import HeldFolder, HeldTree
from ds_vertical.io.runs.run_lock import Owner
from ds_vertical.types import OFFLOAD_DEVICES, Tier

logger = logging.getLogger(__name__)

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
MOST_SHOWN = 5
_NUM_RETRIES = 100
_SECTIONS = ("offload_param", "offload_optimizer")


def fail(path: str | os.PathLike[str], operation: str, error: OSError, remedy: str) -> StorageError:
    """The error to raise where an `operation` on a path failed: path, operation, the system's reason and the remedy."""
    reason = f"{error.strerror or error} (errno {errno.errorcode.get(error.errno or 0, error.errno)})"
    return StorageError(f"{os.fspath(path)}: {operation}: {reason}; {remedy}")


# --- run folders ---------------------------------------------------------------------------------------------------


def new_run_id() -> str:
    """UTC time, host and a random suffix, safe as a folder name; e.g. 20260131-235959-node7-1f2e3d4c."""
    host = re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname().split(".")[0])[:32].strip("-") or "host"
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{host}-{secrets.token_hex(4)}"


def is_run_id(value: object) -> bool:
    """Whether a value may be a run's id."""
    return isinstance(value, str) and _RUN_ID.fullmatch(value) is not None


_claimed: dict[Path, RunFolder] = {}


class Guard(NamedTuple):
    """A run's folder while its own flock is held, with the descriptors of it and of the folder that it lies in."""

    path: Path
    root: int
    fd: int


class RunFolder:
    """`nvme_path/<run id>`, held by this process for one rank until `release` (or the interpreter's exit).

    A forked child holds nothing: neither its exit nor its `release` touches the parent's folder.
    """

    def __init__(self, guard: Guard, rank: int, beside: Sequence[str] = ()) -> None:
        self.path = guard.path
        self.rank = rank
        # opened anew: the guard's goes with its flock
        tree = HeldTree(guard.path, HeldFolder(partial(os.open, ".", trees.FOLDER, dir_fd=guard.fd)))
        _check_proc(tree)
        self._lock_fd = _take_lock(guard, rank, beside)
        self._pid = os.getpid()
        held_folders.hold(tree)

    @property
    def lock_path(self) -> Path:
        """Where this rank's lock file lies in the run's folder."""
        return self.path / run_lock.lock_name(self.rank)

    @classmethod
    def claim(cls, nvme_path: str | os.PathLike[str], run_id: str, rank: int, beside: Sequence[str] = ()) -> RunFolder:
        """Create `nvme_path/<run id>` (mode 0700) where needed and take this rank's lock in it. `beside`: the run's folders on
        its other SSDs, for whoever finds this one.

        A lock left by a dead process is taken over. Raises StorageError where a live process holds it, where the folder is
        somebody else's, where `nvme_path` is itself a run's folder, and where the folder cannot be made.
        """
        if not is_run_id(run_id):
            raise StorageError(f"run id {run_id!r}: not safe as a folder name; use letters, digits, - and _")
        root = Path(os.path.realpath(nvme_path))
        _refuse_run_folder(root)
        path = root / run_id
        if path in _claimed:
            raise StorageError(f"{path}: claim: this process holds it already; use a new run id (new_run_id())")
        try:
            make_shared(root)
        except OSError as error:
            raise fail(root, "create the swap folder", error, "write a writable folder as nvme_path") from error
        with guarded(path, create=True) as guard:
            try:
                _refuse_others_folder(guard)
                folder = cls(guard, rank, beside)
            except StorageError:
                with contextlib.suppress(OSError):  # not empty: a run's folder, with its owner's files
                    trees.remove_named(guard.fd, path.name, guard.root)
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
        stripes.close_run(self.path)
        root = held_folders.let_go(self.path).root
        try:
            with contextlib.ExitStack() as opened:
                try:
                    guard = opened.enter_context(guarded(self.path, create=False))
                except (OSError, StorageError):
                    if trees.is_at(root.fd, os.fspath(self.path), None):
                        raise
                    self._tell_gone(root.fd)  # anything may be in its place: a link, a file, another user's folder
                else:
                    self._give_up(guard, root.fd)
        except OSError as error:
            raise fail(self.path, "release", error, "delete the folder by hand") from error
        finally:
            os.close(self._lock_fd)

    def _give_up(self, guard: Guard, fd: int) -> None:
        own = run_lock.lock_name(self.rank)
        if not os.path.samestat(os.fstat(guard.fd), os.fstat(fd)):
            self._tell_gone(fd)
        elif any(lock.standing != "gone" for lock in run_lock.locks_in(guard.fd) if lock.name != own):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(own, dir_fd=guard.fd)
        else:
            remove_tree(guard)

    def _tell_gone(self, fd: int) -> None:
        where = os.readlink(held_folders.by_descriptor(fd))
        now = "" if where.endswith(" (deleted)") else f": it is {where} now; delete it by hand"
        logger.warning("%s: the run's folder was removed by someone else before its release, or renamed%s", self.path, now)

    def forget(self) -> None:
        """Close what a forked child shares with its parent: kept open, the parent's lock would outlive the parent."""
        os.close(self._lock_fd)
        held_folders.let_go(self.path)


def owned(path: str | os.PathLike[str]) -> RunFolder | None:
    """The folder claimed by this process that `path` is, or lies in, by its name or by where that leads; None where there is
    none."""
    named, real = Path(path), Path(os.path.realpath(path))
    return next((_claimed[each] for each in (named, *named.parents, real, *real.parents) if each in _claimed), None)


def claimed() -> list[Path]:
    """The run folders that this process holds."""
    return list(_claimed)


def make_shared(path: Path) -> None:
    """A folder and those above it, for all runs (mode 0775 less the umask: world-writable under none). Raises OSError."""
    try:
        path.mkdir(mode=0o775, exist_ok=True)
    except FileNotFoundError:
        make_shared(path.parent)
        path.mkdir(mode=0o775, exist_ok=True)


def _refuse_run_folder(root: Path) -> None:
    """A prepared configuration given to another process would nest one run's folder inside another's."""
    found = run_lock.owner_above(root)
    if found is not None:
        raise StorageError(
            f"{root}: claim: {found[0]} is the folder of a run, of {found[1]}; "
            "give the original configuration, whose nvme_path is the bare SSD folder"
        )


def _refuse_others_folder(guard: Guard) -> None:
    """A folder that holds anything and no lock of a run was made by somebody else, and would be deleted at the end of ours."""
    there = run_lock.locks_in(guard.fd)
    names = set(os.listdir(guard.fd)) - {lock.name for lock in there if not _size(lock.name, guard.fd)}
    if names and not run_lock.is_of_run(there, guard.path.name):
        raise StorageError(
            f"{guard.path}: claim: holds {min(names)}, and no lock in it says that a run made it; use a new run id"
            " (new_run_id())"
        )


def _check_proc(tree: HeldTree) -> None:
    """DeepSpeed's code is given paths through proc: without it they would be looked up from the root."""
    if not held_folders.is_reachable(tree.root.fd):
        where = held_folders.by_descriptor(tree.root.fd)
        raise StorageError(f"{tree.path}: claim: {where} does not lead to it; mount proc (mount -t proc proc /proc)")


def _size(name: str, folder: int) -> int:
    return os.stat(name, dir_fd=folder, follow_symlinks=False).st_size


@contextlib.contextmanager
def guarded(path: Path, create: bool) -> Iterator[Guard]:
    """Hold the folder's own flock for a moment: ranks claim and release, and others look and delete, one after another.

    A folder that its last holder deleted while we waited is not the one we opened; then start again. Raises
    FileNotFoundError where there is none and none is to be made.
    """
    with trees.opened(path.parent, follow=True) as root:
        while True:
            fd = _open_folder(path, root, create)
            try:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX)
                except OSError as error:
                    raise fail(path, "flock", error, "use an nvme_path on a local file system") from error
                if not trees.is_at(fd, path.name, root):
                    continue
                yield Guard(path, root, fd)
                return
            finally:
                os.close(fd)


def _open_folder(path: Path, root: int, create: bool) -> int:
    """A descriptor of the folder, made where asked; FileNotFoundError where it is not there and not to be made."""
    is_new, retries_left = False, _NUM_RETRIES
    while True:
        retries_left -= 1
        try:
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(path.name, mode=0o700, dir_fd=root)
                    is_new = True
            fd = os.open(path.name, trees.FOLDER | os.O_NOFOLLOW, dir_fd=root)
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
    if is_new:
        os.fchmod(fd, 0o700)  # whatever the umask takes away
    return fd


def _take_lock(guard: Guard, rank: int, beside: Sequence[str] = ()) -> int:
    """Create this rank's lock file, or take over a dead process's; returns the descriptor that holds the flock."""
    with contextlib.ExitStack() as undo:
        try:
            fd = _open_lock(guard, rank, undo)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, Owner.me(rank, guard.path.name, beside).to_json(), 0)
        except OSError as error:
            remedy = "use a new run id, and an nvme_path whose file system has locks (flock) and free space"
            raise fail(guard.path / run_lock.lock_name(rank), "take the rank's lock", error, remedy) from error
        undo.pop_all()
    return fd


def _open_lock(guard: Guard, rank: int, undo: contextlib.ExitStack) -> int:
    name = run_lock.lock_name(rank)
    try:
        fd = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=guard.fd)
        undo.callback(os.close, fd)
        undo.callback(os.unlink, name, dir_fd=guard.fd)
        os.fchmod(fd, 0o600)
    except FileExistsError:
        fd = run_lock.open_lock(name, guard.fd)
        undo.callback(os.close, fd)
        owner, is_empty = run_lock.read_owner(fd)
        if run_lock.standing(fd, owner) != "gone":
            raise _held(guard.path / name, owner) from None
        if owner is None and not is_empty:
            raise StorageError(f"{guard.path / name}: claim: no lock of ours, by what is in it; use a new run id") from None
        logger.warning("%s: left by a process that is gone (%s); taken over", guard.path / name, owner)
    return fd


def _held(lock: Path, owner: Owner | None) -> StorageError:
    return StorageError(
        f"{lock}: claim: held by {owner or 'a process that did not write its name'}; "
        "end that process or use a new run id (is it gone, on another host? ds-vertical clean --path "
        f"{lock.parent.parent} --remove {lock.parent.name})"
    )


def remove_tree(guard: Guard) -> None:
    """Delete a run's folder, its locks last, so that what a failure or a kill leaves of it is known for a dead run's.

    Raises StorageError, after deleting what could be deleted, naming what could not.
    """
    names = run_lock.lock_names(guard.fd)
    failures = trees.remove_inside(guard.fd, guard.path, but=names)
    if not failures:
        failures = trees.remove_inside(guard.fd, guard.path)
    if not failures:
        try:
            trees.remove_named(guard.fd, guard.path.name, guard.root)
        except FileNotFoundError:
            pass
        except OSError as error:
            failures.append((guard.path, error))
    if failures:
        told = [str(fail(path, "delete", error, "delete it by hand")) for path, error in failures]
        shown = "\n".join(told[:MOST_SHOWN])
        raise StorageError(f"{guard.path}: delete: {len(failures)} entries could not be deleted:\n{shown}")


def release_all() -> None:
    """At exit. Registered at import, so it runs after the exit handlers of everything that was imported later. A launcher may
    send SIGTERM again meanwhile: the process is ending by then, and ends with what has been removed."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN) if is_main else None
    try:
        for folder in list(_claimed.values()):
            try:
                folder.release()
            except StorageError as error:
                logger.error("%s", error)
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)  # None: it was not set from Python


def _forget_in_child() -> None:
    """A forked child shares the parent's locks; were it to keep them open, they would outlive the parent."""
    for folder in _claimed.values():
        folder.forget()
    _claimed.clear()


atexit.register(release_all)
os.register_at_fork(after_in_child=_forget_in_child)


def claim_config(config: dict[str, Any], run_id: str, rank: int, several: Sequence[str] = ()) -> dict[str, Any]:
    """A deep copy of the DeepSpeed configuration with every nvme_path in use replaced by a claimed run folder.

    Paths that this process has claimed already are kept, so a prepared configuration comes back as it is. The same
    nvme_path twice is one folder. `several`: paths on several SSDs, the nvme_path first, in each of which the run gets a
    folder. Raises StorageError, with nothing newly claimed left behind.
    """
    prepared = copy.deepcopy(config)
    zero = prepared.get("zero_optimization")
    sections = [zero.get(name) for name in _SECTIONS] if isinstance(zero, dict) else []
    fresh: dict[Path, RunFolder] = {}
    roots = [Path(os.path.realpath(path)) for path in several]
    try:
        for root in roots:
            fresh[root] = RunFolder.claim(root, run_id, rank, [str(each / run_id) for each in roots if each != root])
        for section in sections:
            if (
                not isinstance(section, dict)
                or section.get("device") != OFFLOAD_DEVICES[Tier.SSD]
                or not section.get("nvme_path")
            ):
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
