"""The files inside a run's folder: exact sizes, free space, preallocation, and the mount that holds them. Imports neither torch
nor deepspeed."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from ds_vertical.errors import StorageError
from ds_vertical.interrupts import Descriptor
from ds_vertical.io import remove_tree
from ds_vertical.io.disk_errors import remedy
from ds_vertical.io.runs import held_folders, stripes
from ds_vertical.io.runs.held_folders import opened_folder
from ds_vertical.io.runs.run_dir import MOST_SHOWN, fail

logger = logging.getLogger(__name__)

_HOLES_ARE_UNWRITTEN = ("ext4", "xfs", "btrfs")
_LONGEST_PATH = os.pathconf("/", "PC_PATH_MAX") - 1
_LONGEST_NAME = 256  # of a file below an nvme_path: run id, folders, the name itself and what is put behind it


@contextlib.contextmanager
def naming(path: str | os.PathLike[str], operation: str) -> Iterator[None]:
    """An OSError of the block becomes a StorageError with the file, the operation, the errno and what to do about it."""
    try:
        yield
    except OSError as error:
        raise fail(path, operation, error, remedy(error.errno)) from error


def check_length(nvme_path: str | os.PathLike[str]) -> None:
    """Raise StorageError for a folder below which a run's files would have names that the system does not take."""
    length = len(os.path.realpath(os.fsencode(nvme_path)))
    if length + _LONGEST_NAME > _LONGEST_PATH:
        error = OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        most = f"a folder whose path has at most {_LONGEST_PATH - _LONGEST_NAME} bytes, not {length}"
        raise fail(nvme_path, "make the run's files below it", error, f"write {most}, as nvme_path")


def check_files(expected: Mapping[Path, int]) -> None:
    """Raise StorageError unless every file exists with exactly the expected size in bytes, all of them written."""
    faults, mounts = [], read_mounts()
    for path, size_bytes in _on_each_ssd(expected).items():
        try:
            actual = held_folders.status(path)
        except OSError as error:
            faults.append(f"{path}: stat: {error.strerror} (expected {size_bytes} bytes)")
            continue
        if not stat.S_ISREG(actual.st_mode):
            faults.append(f"{path}: not a regular file (expected {size_bytes} bytes)")
        elif actual.st_size != size_bytes:
            faults.append(f"{path}: {actual.st_size} bytes, expected {size_bytes}")
        elif (hole := _first_hole(path, size_bytes, mounts)) < size_bytes:
            faults.append(f"{path}: nothing has been written at byte {hole} (expected {size_bytes} bytes)")
    if faults:
        more = [f"... and {len(faults) - MOST_SHOWN} more"] if len(faults) > MOST_SHOWN else []
        raise StorageError(
            f"{len(faults)} of {len(expected)} files are missing, of the wrong size or not whole; reading them would give "
            "wrong parameters. Short: zero.Init's write did not complete (disk full?). Missing: removed, or written under "
            "another path. Free space and start again with a new run.\n" + "\n".join(faults[:MOST_SHOWN] + more)
        )


def _on_each_ssd(sizes: Mapping[Path, int]) -> dict[Path, int]:
    """The single files that these files consist of, with their sizes."""
    return {each: size for path, total in sizes.items() for each, size in stripes.sizes_of(path, total).items()}


def _first_hole(path: Path, size_bytes: int, mounts: str) -> int:
    """Where a file has no bytes of its own: a write there has failed, and one behind it has not. `size_bytes` where there is no
    such place, and on file systems that keep written zeros as holes (zfs) or may."""
    if not size_bytes:
        return 0
    with naming(path, "read"), os.fdopen(held_folders.open_file(path), "rb", buffering=0) as file:
        opened = Path(held_folders.by_descriptor(file.fileno()))
        if mount_of(opened, mounts).kind not in _HOLES_ARE_UNWRITTEN:
            return size_bytes
        return os.lseek(file.fileno(), 0, os.SEEK_HOLE)


def free_bytes(path: str | os.PathLike[str]) -> int:
    """Bytes that we may still write on the file system of `path`, which need not exist yet."""
    parent, tree = _existing(Path(path)), held_folders.tree_of(path)
    try:
        space = os.statvfs(parent if tree is None else tree.root.fd)
    except OSError as error:
        raise fail(parent, "statvfs", error, "use a readable folder") from error
    return space.f_bavail * space.f_frsize


def preallocate(files: Mapping[Path, int]) -> None:
    """Give every file its size in bytes with blocks really allocated, so that a full disk shows here, not later.

    Contents of files that exist are kept; new ones read as zeros (mode 0600, missing parent folders 0700). Space is
    checked per file system before anything is written. Raises StorageError, having undone what this call did, where
    space is short, an operation fails, or a file is larger than asked.
    """
    sizes = _on_each_ssd(files)
    try:
        _check_sizes(sizes)
        _check_space(sizes)
    except OSError as error:
        raise fail(error.filename or "preallocate", "stat", error, "use a readable nvme_path") from error
    with contextlib.ExitStack() as held, contextlib.ExitStack() as undo:
        folders: dict[Path, int] = {}
        for path, size_bytes in sizes.items():
            if path.parent not in folders:
                folders[path.parent] = _made(path.parent, held, undo)
            _allocate(folders[path.parent], path, size_bytes, undo)
        undo.pop_all()


def set_aside(pairs: Mapping[Path, Path], vacated: Collection[Path] = ()) -> None:
    """Give each file its second name, and its first to a new, preallocated file of the same size; to none if it is `vacated`.

    Raises StorageError, with every file as it was: no room for the new files, or a name that cannot be given.
    """
    for path, aside in pairs.items():
        stripes.spread_as(aside, path)
    several = [zip(stripes.files_of(path), stripes.files_of(aside), strict=True) for path, aside in pairs.items()]
    _set_aside(dict(chain(*several)), {each for path in vacated for each in stripes.files_of(path)})


def _set_aside(pairs: Mapping[Path, Path], vacated: Collection[Path]) -> None:
    """As `set_aside`, of single files."""
    fresh = {path: path.with_name(f"{path.name}.fresh") for path in pairs if path not in vacated}
    try:
        sizes = {new: held_folders.status(path).st_size for path, new in fresh.items()}
    except OSError as error:
        raise fail(error.filename, "stat", error, "the file of a run must not be removed") from error
    preallocate(sizes)
    path, made = Path(), {}
    try:
        for path, aside in pairs.items():
            _link(path, aside)
            made[path] = aside
        for path in pairs:
            _unlink(path) if path in vacated else _replace(fresh[path], path)
    except BaseException as error:
        _put_back(made)
        remove_files(fresh.values())
        if isinstance(error, OSError):
            raise fail(path, f"give it the name {pairs[path].name} as well", error, "save again; the run can go on") from error
        raise


def _put_back(made: Mapping[Path, Path]) -> None:
    """Let files have their first name only. Raises OSError for one that cannot, which keeps its second: no byte is lost."""
    for path, aside in made.items():
        if _is_file(path, aside):
            _unlink(aside)
        else:
            _replace(aside, path)


def disk_bytes(folder: Path) -> int:
    """Bytes that deleting a folder would free: a file that has a name elsewhere too, in a checkpoint, would stay."""
    found: dict[tuple[int, int], list[os.stat_result]] = {}
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # a live run's
                status = Path(root, name).lstat()
                found.setdefault((status.st_dev, status.st_ino), []).append(status)
    return sum(here[0].st_blocks * 512 for here in found.values() if len(here) >= here[0].st_nlink)


def make_run_private(folder: Path) -> None:
    """Give every folder below a run's mode 0700: DeepSpeed makes its own as the umask says. Its files it makes 0600."""
    try:
        with opened_folder(folder) as fd:
            for path, error in remove_tree.make_private(fd):
                logger.warning("%s: set mode 0700: %s", folder / path, error.strerror)
    except OSError as error:
        logger.warning("%s: set mode 0700: %s", folder, error.strerror)


def remove_files(paths: Iterable[Path]) -> None:
    """Delete files that are there. Raises StorageError for one that cannot be."""
    for path in chain.from_iterable(map(stripes.files_of, paths)):
        try:
            _unlink(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise fail(path, "delete", error, "delete it by hand") from error


def _unlink(path: Path) -> None:
    with opened_folder(path.parent) as fd:
        os.unlink(path.name, dir_fd=fd)


def _link(path: Path, other: Path) -> None:
    with opened_folder(path.parent) as here, opened_folder(other.parent) as there:
        os.link(path.name, other.name, src_dir_fd=here, dst_dir_fd=there, follow_symlinks=False)


def _replace(path: Path, other: Path) -> None:
    """Let a file have the name of another one, which is gone."""
    with opened_folder(path.parent) as here, opened_folder(other.parent) as there:
        os.replace(path.name, other.name, src_dir_fd=here, dst_dir_fd=there)


def _is_file(path: Path, other: Path) -> bool:
    """Whether both names are there, and of one file."""
    with opened_folder(path.parent) as here, opened_folder(other.parent) as there:
        try:
            found = os.stat(path.name, dir_fd=here, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.stat(other.name, dir_fd=there, follow_symlinks=False))


def _existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.absolute().parents) if held_folders.exists(parent))


def _check_sizes(sizes: Mapping[Path, int]) -> None:
    for path, size_bytes in sizes.items():
        if size_bytes < 0:
            raise StorageError(f"{path}: preallocate: got {size_bytes} bytes; a size is 0 or more")
        if not held_folders.exists(path):
            continue
        found = held_folders.status(path)
        is_file = stat.S_ISREG(found.st_mode)
        if not is_file or found.st_size > size_bytes:
            kind = f"holds {found.st_size} bytes already" if is_file else "exists and is no file"
            raise StorageError(f"{path}: preallocate {size_bytes} bytes: it {kind}; remove it, or use a new run id")


def _check_space(sizes: Mapping[Path, int]) -> None:
    needed_bytes: dict[int, int] = {}
    folders: dict[int, Path] = {}
    for path, size_bytes in sizes.items():
        there = _existing(path)
        entry = held_folders.status(there)
        allocated_bytes = entry.st_blocks * 512 if there == path else 0
        needed_bytes[entry.st_dev] = needed_bytes.get(entry.st_dev, 0) + max(0, size_bytes - allocated_bytes)
        folders.setdefault(entry.st_dev, path.parent)
    for device, needed in needed_bytes.items():
        available = free_bytes(folders[device])
        if needed > available:
            raise StorageError(
                f"{folders[device]}: preallocate: needs {needed} more bytes ({needed / 2**30:.2f} GiB), the file system"
                f" has {available} free ({available / 2**30:.2f} GiB); free {needed - available} bytes or use another "
                "nvme_path"
            )


def _made(folder: Path, held: contextlib.ExitStack, undo: contextlib.ExitStack) -> int:
    """A folder's descriptor until `held` is closed; it and those above it are made where they are missing. What lies below the
    run's folder, or below one that is there, is reached without following links."""
    tree = held_folders.tree_of(folder)
    there = _existing(folder) if tree is None else Path(tree.nearest(os.fspath(folder))[0])
    try:
        fd = held.enter_context(opened_folder(there))
        for name in folder.absolute().relative_to(there.absolute()).parts:
            there, above = there / name, fd
            is_new = False
            with contextlib.suppress(FileExistsError):  # the usual case; or another rank was first
                os.mkdir(name, mode=0o700, dir_fd=above)
                is_new = True
            fd = held.enter_context(remove_tree.opened(name, above))
            if is_new:
                undo.callback(_undo, there, remove_tree.remove_named, fd, name, above)
                os.fchmod(fd, 0o700)  # whatever the umask takes away
    except OSError as error:
        raise fail(there, "create the folder", error, "use a writable nvme_path") from error
    return fd


def _allocate(folder: int, path: Path, size_bytes: int, undo: contextlib.ExitStack) -> None:
    """`folder`: the descriptor of the one that `path` lies in."""
    name, flags = path.name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        try:
            file = Descriptor(partial(os.open, name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder))
            undo.callback(_undo, path, os.unlink, name, dir_fd=folder)
            os.fchmod(file.fd, 0o600)
        except FileExistsError:
            file = Descriptor(partial(os.open, name, flags, dir_fd=folder))
            undo.callback(_undo, path, _truncate, name, os.fstat(file.fd).st_size, folder)
        with file as fd:
            if size_bytes > 0:
                os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        remedy = f"free space there ({free_bytes(path)} bytes are free) or use another nvme_path"
        raise fail(path, f"preallocate {size_bytes} bytes", error, remedy) from error


def _truncate(name: str, size_bytes: int, folder: int) -> None:
    with Descriptor(partial(os.open, name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)) as fd:
        os.ftruncate(fd, size_bytes)


def _undo(path: Path, function: Callable[..., object], *arguments: object, **named: object) -> None:
    """Take one step of a failed preallocation back; a failure here must not hide the error that led to it."""
    try:
        function(*arguments, **named)
    except OSError as error:
        logger.error("%s: undo a failed preallocation: %s", path, error.strerror)


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
