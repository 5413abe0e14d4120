"""Real faults of a disk, for tests: a full one, one that fails, and files that may not grow.

[Note: failing blocks] A loop device over memory fails as a drive does, in the block layer: a sealed memory file takes no more
writes, one that is cut short has blocks that cannot be read, and a sparse file in a full tmpfs has room for no more of them.
So no device mapper is needed, which not every kernel has.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import pytest

from ds_vertical import errors
from ds_vertical.io.files import mount_of, read_mounts
from ds_vertical.io.runs import run_dir


@contextlib.contextmanager
def small_disk(folder: Path, size_bytes: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A file system of `size_bytes` at `folder`; where mounting is not allowed, a folder that is said to be one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=700", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    if not mounted:
        entries = dict(f_bavail=size_bytes // 4096, f_frsize=4096)
        monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(**entries))
    try:
        yield
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def small_files(size_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond `size_bytes`: the kernel refuses, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


_GET_FREE, _SET_FD, _CLEAR_FD = 0x4C82, 0x4C00, 0x4C01  # ioctls of /dev/loop-control and of a loop device
_SHUT_DOWN: Final = 0x8004587D  # of a file system
_NO_LOG_FLUSH: Final = (2).to_bytes(4, "little")
_MAKE = ("mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", "-E", "lazy_itable_init=0,nodiscard")


class LoopDisk:
    """ext4 on a loop device; see [Note: failing blocks]. `folder`: where it is mounted."""

    def __init__(self, folder: Path, backing: int) -> None:
        self.folder = folder
        self._backing = backing

    def refuse_writes(self) -> None:
        """From now on every write of a block gives EIO; what is there can be read."""
        self._sync()
        fcntl.fcntl(self._backing, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)

    def lose_blocks(self) -> None:
        """No block of data can be read any more (EIO)."""
        self._sync()
        os.ftruncate(self._backing, 1 << 16)

    def shut_down(self) -> None:
        """The file system answers everything with EIO, as one does whose drive is gone."""
        folder = os.open(self.folder, os.O_RDONLY)
        fcntl.ioctl(folder, _SHUT_DOWN, _NO_LOG_FLUSH)
        os.close(folder)

    def become_read_only(self) -> None:
        """The file system takes an error for a reason to be read only from now on (EROFS)."""
        self._sync()
        subprocess.run(["mount", "-o", "remount,errors=remount-ro", str(self.folder)], check=True)
        device = Path(mount_of(self.folder, read_mounts()).source).name
        Path("/sys/fs/ext4", device, "trigger_fs_error").write_text("1")

    def _sync(self) -> None:
        folder = os.open(self.folder, os.O_RDONLY)
        assert ctypes.CDLL(None).syncfs(folder) == 0
        os.close(folder)

    def fill(self) -> Path:
        """Leave no room for another file; returns the file to delete for some."""
        filler = self.folder / "filler"
        fd = os.open(filler, os.O_WRONLY | os.O_CREAT, 0o600)
        size, step = 0, 1 << 24
        while step >= 1 << 12:
            try:
                os.posix_fallocate(fd, size, step)
                size += step
            except OSError:
                step //= 2
        os.close(fd)
        return filler


@contextlib.contextmanager
def loop_disk(folder: Path, size_bytes: int, room: Path | None = None) -> Iterator[LoopDisk]:
    """A disk of `size_bytes` at `folder`, in a sparse file in the folder `room`, or in memory. Skips the test where this
    machine has no loop devices for us."""
    with contextlib.ExitStack() as undo:
        if room is None:
            backing = os.memfd_create("disk", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        else:
            backing = os.open(room / "disk", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        undo.callback(os.close, backing)
        os.ftruncate(backing, size_bytes)
        try:
            _mount(_attach(backing, undo), folder, undo)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no loop device here: {error}")
        yield LoopDisk(folder, backing)


@contextlib.contextmanager
def mapped_disk(folder: Path, size_bytes: int) -> Iterator[Callable[[], None]]:
    """A disk at `folder` through the device mapper; yields what makes every block of it fail (EIO). Skips the test where the
    kernel has none."""
    if not Path("/dev/mapper/control").exists():
        pytest.skip("this kernel has no device mapper")
    with contextlib.ExitStack() as undo:
        backing = os.memfd_create("disk", os.MFD_CLOEXEC)
        undo.callback(os.close, backing)
        os.ftruncate(backing, size_bytes)
        name, sectors = f"ds_vertical_{os.getpid()}", size_bytes // 512

        def ask(*words: str) -> None:
            subprocess.run(["dmsetup", *words], check=True, capture_output=True)

        ask("create", name, "--table", f"0 {sectors} linear {_attach(backing, undo)} 0")
        undo.callback(ask, "remove", "--deferred", name)
        _mount(f"/dev/mapper/{name}", folder, undo)

        def fail() -> None:
            ask("suspend", name)
            ask("reload", name, "--table", f"0 {sectors} error")
            ask("resume", name)

        yield fail


def _mount(device: str, folder: Path, undo: contextlib.ExitStack) -> None:
    subprocess.run([*_MAKE, device], check=True, capture_output=True)
    folder.mkdir()
    subprocess.run(["mount", "-t", "ext4", "-o", "errors=continue", device, str(folder)], check=True, capture_output=True)
    undo.callback(subprocess.run, ["umount", "--lazy", str(folder)], check=True)
    undo.callback(_release, folder)


def _release(folder: Path) -> None:
    """Give up the runs' folders below one, whose locks would keep the disk."""
    for path in run_dir.claimed():
        if path.is_relative_to(folder.resolve()):
            with contextlib.suppress(errors.StorageError):
                owned = run_dir.owned(path)
                assert owned is not None
                owned.release()


def _attach(backing: int, undo: contextlib.ExitStack) -> str:
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    undo.callback(os.close, control)
    while True:
        name = f"/dev/loop{fcntl.ioctl(control, _GET_FREE)}"
        device = os.open(name, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.ioctl(device, _SET_FD, backing)
        except OSError as error:
            os.close(device)
            if error.errno != errno.EBUSY:  # somebody was faster
                raise
            continue
        undo.callback(os.close, device)
        undo.callback(fcntl.ioctl, device, _CLEAR_FD)
        return name


@contextlib.contextmanager
def full_room(folder: Path, size_bytes: int) -> Iterator[Path]:
    """A tmpfs of `size_bytes` at `folder`; skips the test where mounting is not allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=700", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """What is opened below the folder within the block, by its path, can be read only."""
    shown = str(folder)
    if subprocess.run(["mount", "--bind", shown, shown], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", shown], check=True)
        yield
    finally:
        subprocess.run(["umount", "--lazy", shown], check=True)


@contextlib.contextmanager
def immutable(path: Path) -> Iterator[None]:
    """Nobody, root included, may write the file; skips the test where that cannot be said of it."""
    if subprocess.run(["chattr", "+i", str(path)], capture_output=True).returncode:
        pytest.skip("no file can be made immutable here")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", str(path)], check=True)


def flip(path: Path, offset: int) -> None:
    """One bit, on the disk itself."""
    fd = os.open(path, os.O_RDWR)
    try:
        os.pwrite(fd, bytes([os.pread(fd, 1, offset)[0] ^ 4]), offset)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
