"""Checks of the folder on the SSD (nvme_path): what lies under it, who else is there, and whether direct I/O really works."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ds_vertical import errors
from ds_vertical.cli.bench import disk_limit
from ds_vertical.cli.common import first_line, gib
from ds_vertical.cli.doctor.check import CheckResult, Target, error, ok, split_fault, warning
from ds_vertical.compat.ops import cache
from ds_vertical.errors import ConfigError
from ds_vertical.io import files
from ds_vertical.io.files import mount_of, read_mounts
from ds_vertical.io.runs import run_dir
from ds_vertical.io.runs.run_dirs import FoundRun, find_runs

_GENERATION_BYTES: Final = 14  # per parameter: fp32 master and two moments, bf16 parameter
_LEAST_FREE_BYTES: Final = 64 << 20
_SCARCE: Final = 0.05  # of the file system: below it file systems slow down
_LEAST_TRIP_BYTES: Final = 8 << 20
_MOST_TRIP_BYTES: Final = 256 << 20
_AIO: Final = '"aio": {"block_size": 1048576, "queue_depth": 8, "intra_op_parallelism": 1, "single_submit": false}'
_ANOTHER: Final = '"nvme_path": "/mnt/nvme", a folder on a local file system of the SSD (ext4, xfs)'

# What is under an nvme_path and should not be: why, and what to do. A name that ends in "." is a prefix.
_KINDS: Final = {
    "tmpfs": ("memory, not an SSD: what is offloaded stays in host memory", _ANOTHER),
    "ramfs": ("memory, not an SSD: what is offloaded stays in host memory", _ANOTHER),
    "devtmpfs": ("memory, not an SSD: what is offloaded stays in host memory", _ANOTHER),
    "overlay": ("a container's own layer, slower than the disk below and often small", "docker run -v /mnt/nvme:/mnt/nvme ..."),
    "btrfs": ("copy-on-write and checksums cost direct I/O much of its speed", "chattr +C FOLDER  # before anything is in it"),
    "zfs": ("before 2.3 it takes direct I/O through its own cache", _ANOTHER),
    "ecryptfs": ("it encrypts through the page cache", _ANOTHER),
}
_NETWORK: Final = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "9p",
    "virtiofs",
    "ceph",
    "lustre",
    "glusterfs",
    "beegfs",
    "gpfs",
    "afs",
    "fuse.",
)


def _standing(path: Path) -> Path:
    """The folder itself, or the nearest one above it that is there. Raises OSError where that cannot be told."""
    path = path.absolute()
    for folder in (path, *path.parents):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            folder.stat()
            return folder
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def existence(case: Target) -> Iterator[CheckResult]:
    """Checks that the path is there, and that it is a folder."""
    if not case.nvme_paths and case.config is not None:
        yield ok("the JSON keeps nothing on SSD, so no disk was examined")
    elif not case.nvme_paths:
        yield warning("no folder on the SSD was named, so no disk was examined", "ds-vertical doctor --nvme-path /mnt/nvme")
    for path in case.nvme_paths:
        try:
            there = _standing(path)
        except OSError as failure:
            yield error(f"{path}: {failure.strerror}", f"namei -l {path}  # shows which folder above it may not be entered")
            continue
        if not there.is_dir():
            yield error(f"{path}: {there} is not a folder", _ANOTHER)
        elif there != path.absolute():
            where = f"it would be made below {there}, on {mount_of(there, read_mounts()).source}"
            yield warning(
                f"{path}: no such folder; {where}: is the SSD mounted?", f"mkdir -p {path}  # once the SSD is mounted"
            )


def _folders(case: Target) -> Iterator[tuple[Path, Path]]:
    """Each path with the folder that stands for it; those that `existence` finds fault with are left out."""
    for path in case.nvme_paths:
        with contextlib.suppress(OSError):
            there = _standing(path)
            if there.is_dir():
                yield path, there


def file_system(case: Target) -> Iterator[CheckResult]:
    """Finds file systems that are no SSD's, read-only mounts, and rotating disks."""
    for path, there in _folders(case):
        mount = mount_of(there, read_mounts())
        network = any(mount.kind == name or (name.endswith(".") and mount.kind.startswith(name)) for name in _NETWORK)
        if mount.read_only:
            remount = f"mount -o remount,rw {mount.point}"
            yield error(f"{path}: {mount.kind} of {mount.source} is mounted read-only at {mount.point}", remount)
        elif network:
            yield warning(f"{path}: {mount.kind} from {mount.source} is a network or shared file system, not an SSD", _ANOTHER)
        elif mount.kind in _KINDS:
            why, remedy = _KINDS[mount.kind]
            yield warning(f"{path}: {mount.kind}: {why}", remedy)
        elif _rotates(there):
            yield warning(f"{path}: {mount.source} is a rotating disk, says the kernel", _ANOTHER)
        else:
            yield ok(f"{path}: {mount.kind} on {mount.source}, mounted at {mount.point}")


def separate_disks(case: Target) -> Iterator[CheckResult]:
    """Finds paths of one run that lie on one disk: it is read no faster for them."""
    seen: dict[str, Path] = {}
    for path, there in _folders(case):
        try:
            disk = str(disk_limit.disk_of(there))
        except ConfigError:
            disk = f"the file system mounted at {mount_of(there, read_mounts()).point}"
        if disk in seen:
            one = '"nvme_paths" with one folder for each SSD'
            yield warning(f"{path}: on the same disk as {seen[disk]}, {disk}: it is read no faster for two folders", one)
        elif seen:
            yield ok(f"{path}: on another disk than {next(iter(seen.values()))}: {disk}")
        seen.setdefault(disk, path)


def _rotates(folder: Path) -> bool:
    """Whether the kernel calls the disk rotating. A virtual machine's (vda, xvda) is called so whatever it is."""
    try:
        disk = disk_limit.disk_of(folder).name
    except ConfigError:
        return False  # no block device of its own
    flag = Path("/sys/block", disk, "queue", "rotational")
    return disk.startswith(("sd", "hd")) and flag.exists() and flag.read_text().strip() == "1"


def space(case: Target) -> Iterator[CheckResult]:
    """Says how many bytes and inodes are free, and how large a model they hold."""
    for path, there in _folders(case):
        yield judge_space(path, os.statvfs(there))


def judge_space(path: Path, status: os.statvfs_result) -> CheckResult:
    """The result for a file system with this `status`."""
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    millions = free / _GENERATION_BYTES / 1e6
    room = f"{path}: {gib(free)} of {gib(total)} free: the state of {millions:.0f} M parameters, or of {millions / 2:.0f} M"
    room += " with a second generation of files for early steps"
    remedy = f"du -xh --max-depth=2 {path} | sort -h | tail  # then free some, or use another nvme_path"
    if status.f_files and not status.f_favail:
        return error(f"{path}: no inode is free: no file can be made there", remedy)
    if free < _LEAST_FREE_BYTES:
        return error(f"{path}: too little room on the disk: {gib(free)} of {gib(total)} free", remedy)
    return ok(room) if free > _SCARCE * total else warning(room, remedy)


# ---- the round trip


def round_trip(case: Target) -> Iterator[CheckResult]:
    """Claims a folder as a run does, reserves a file, writes it past the page cache, reads it back both ways, and compares."""
    for path, there in _folders(case):
        try:
            folder = run_dir.RunFolder.claim(there, run_dir.new_run_id(), 0)
            try:
                yield _transfer(path, folder.path / "round_trip", case)
            finally:
                folder.release()
        except errors.StorageError as failure:
            found, remedy = split_fault(str(failure).partition("\n")[0])
            yield error(found, _remedy(failure.__cause__, there) or remedy)
        except OSError as failure:
            yield error(f"{path}: {failure}", _remedy(failure, there) or _ANOTHER)


def _transfer(path: Path, file: Path, case: Target) -> CheckResult:
    from ds_vertical.compat.ops import load
    from ds_vertical.compat.stock_config import aio_settings

    aio = aio_settings(case.config or {})
    block = aio["block_size"] if isinstance(aio["block_size"], int) else _LEAST_TRIP_BYTES
    num_bytes = -(-min(max(4 * block, _LEAST_TRIP_BYTES), _MOST_TRIP_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
    files.preallocate({file: num_bytes})
    cache.activate()
    if not cache.is_own_folder() or cache.ready_library(load.CHECKED_AIO.build_name) is None:
        return warning(f"{path}: can be written; direct I/O not tried, our op for it is not compiled", "ds-vertical build-ops")
    try:
        queue = load.new_disk_queue(aio)
    except (TypeError, ValueError, RuntimeError) as failure:
        return error(f"aio: no queue can be made of {aio}: {first_line(failure)}", _AIO)
    sent, received = (mmap.mmap(-1, num_bytes) for _ in range(2))
    sent.write(os.urandom(num_bytes))
    try:
        queue.write(_address(sent), num_bytes, file).wait()
        queue.read(_address(received), num_bytes, file).wait()
    finally:
        queue.close()
    if not came_back(sent[:], received[:], file):
        return error(f"{path}: {gib(num_bytes)} written past the page cache came back as other bytes", _ANOTHER)
    return ok(f"{path}: {gib(num_bytes)} written past the page cache (O_DIRECT) and read back, the same bytes")


def came_back(sent: bytes, received: bytes, file: Path) -> bool:
    """Whether the bytes read past the page cache, and those that any program reads from the file, are those written."""
    return received == sent and file.read_bytes() == sent


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _remedy(failure: BaseException | None, folder: Path) -> str:
    """What mends an operation that failed with this errno; empty where nothing better is known than its own words."""
    user = str(os.geteuid())
    mount = mount_of(folder, read_mounts())
    number = failure.errno if isinstance(failure, OSError) else None
    return {
        errno.EROFS: f"mount -o remount,rw {mount.point}",
        errno.EACCES: f"chown {user} {folder}",
        errno.EPERM: f"{mount.point} ({mount.kind}) takes no files; {_ANOTHER}",
        errno.ENOENT: f"{mount.point} ({mount.kind}) takes no files; {_ANOTHER}",
        errno.ENOSPC: f"free space on {mount.point}",
        errno.EDQUOT: f"raise the quota of user {user} on {mount.point}, or free space there",
    }.get(number or 0, "")


# ---- who else is there


def runs(case: Target) -> Iterator[CheckResult]:
    """Finds other runs on the disk: live ones share its rate, folders of dead ones take its space."""
    for path, there in _folders(case):
        if there != path.absolute():
            continue
        try:
            found = find_runs(there)
        except OSError as failure:
            yield error(f"{path}: {failure.strerror}", _remedy(failure, there) or _ANOTHER)
            continue
        for run in found:
            yield _told(run)
        bare = there / "zero_stage_3"
        if bare.is_dir():
            held = f"{gib(files.disk_bytes(bare))} of a stock run without a folder of its own; the next such run deletes them,"
            yield warning(f"{bare}: {held} alive or not", f"rm -r {bare}  # if that run is over")
        elif not found:
            yield ok(f"{path}: no other run's files")


def _told(run: FoundRun) -> CheckResult:
    folder, who = run.folder, str(next(iter(run.owners), None) or "a process that did not write its name")
    clean = f"ds-vertical clean --path {folder.parent} --remove"
    if run.fault:
        return warning(f"{folder}: a run {run.fault}", f"ls -ld {folder}")
    if run.state == "stale":
        owners = ", ".join(str(owner or "a process that did not write its name") for owner in run.gone)
        return warning(f"{folder}: {gib(files.disk_bytes(folder))} left by a run that is dead ({owners})", clean)
    if run.state == "live":
        return warning(f"{folder}: a live run ({who}) uses the disk, which shares its rate", "wait for it, or use another disk")
    if run.elsewhere:
        return warning(f"{folder}: a run of another host ({who}), of which nothing can be told here", f"ssh {_host(run)}")
    return warning(f"{folder}: named like a run's folder, without a lock that says so", f"rm -r {folder}  # if you know it")


def _host(run: FoundRun) -> str:
    return next((owner.host for owner in run.elsewhere if owner is not None), "")
