"""Files of a run are found below the folders that it holds, whatever their names lead to, and are told of by their names."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_vertical.compat.ops import load
from ds_vertical.errors import StorageError
from ds_vertical.io import files
from ds_vertical.io.aio import DiskError, DiskQueue
from ds_vertical.io.runs import held_folders
from ds_vertical.io.runs.run_dir import RunFolder

NUM_BYTES = 4096


class Case:
    """A run with a file of ones, `zero/rank0/file`, beside a folder of somebody else's with one of twos under the same name."""

    def __init__(self, root: Path) -> None:
        self.run = RunFolder.claim(root, "run1", 0)
        self.folder = self.run.path / "zero" / "rank0"
        self.file = self.folder / "file"
        self.outside = root / "outside"
        files.preallocate({self.file: NUM_BYTES})
        self.file.write_bytes(b"1" * NUM_BYTES)
        (self.outside / "zero" / "rank0").mkdir(parents=True)
        self.theirs = self.outside / "zero" / "rank0" / "file"
        self.theirs.write_bytes(b"2" * NUM_BYTES)
        self.memory = mmap.mmap(-1, NUM_BYTES)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.queue = DiskQueue(load.checked_aio().Queue(NUM_BYTES, 4))

    def read(self) -> bytes:
        self.queue.read(self.address, NUM_BYTES, self.file).wait()
        return self.memory[:]

    def write(self) -> None:
        self.memory[:] = b"3" * NUM_BYTES
        self.queue.write(self.address, NUM_BYTES, self.file).wait()

    def replace(self, name: str) -> Path:
        """Put a link to somebody else's folder or file in the place of one of the run's; returns where that is now."""
        place, moved = self.run.path / name, self.outside.parent / "moved"
        place.rename(moved)
        place.symlink_to(self.outside / name)
        return moved


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    made = Case(tmp_path / "ssd")
    yield made
    made.queue.close()
    made.run.release()


@pytest.mark.parametrize("name", ["", "zero", "zero/rank0"])
def test_a_file_is_found_in_the_folder_that_is_held(case: Case, name: str) -> None:
    assert case.read() == b"1" * NUM_BYTES
    moved = case.replace(name)
    assert case.read() == b"1" * NUM_BYTES
    case.write()
    files.check_files({case.file: NUM_BYTES})
    with pytest.raises(StorageError, match=f"^{case.file}: preallocate 1 bytes: it holds {NUM_BYTES} bytes already"):
        files.preallocate({case.file: 1})
    assert held_folders.status(case.file).st_ino == (moved / case.file.relative_to(case.run.path / name)).stat().st_ino
    assert case.theirs.read_bytes() == b"2" * NUM_BYTES
    assert (moved / case.file.relative_to(case.run.path / name)).read_bytes() == b"3" * NUM_BYTES


@pytest.mark.parametrize(
    ("name", "number", "advice"),
    [
        ("zero", errno.ENOTDIR, "a file or a link is where a folder belongs"),
        ("zero/rank0/file", errno.ELOOP, "nobody but the run may put"),
    ],
)
def test_no_link_is_followed_to_what_is_not_held_yet(case: Case, name: str, number: int, advice: str) -> None:
    case.replace(name)
    for move in (case.read, case.write):
        with pytest.raises(DiskError, match=advice) as caught:
            move()
        assert (caught.value.errno, caught.value.call, caught.value.filename) == (number, "open", str(case.file))
    assert case.queue.write_error is not None and case.theirs.read_bytes() == b"2" * NUM_BYTES


def test_a_folder_that_is_made_anew_is_found_anew(case: Case) -> None:
    """zero.Init deletes and makes its own; what is deleted is held no more."""
    assert case.read() == b"1" * NUM_BYTES
    files.remove_files([case.file])
    case.folder.rmdir()
    with pytest.raises(DiskError) as caught:
        case.read()
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(case.file))
    files.preallocate({case.file: NUM_BYTES})
    assert case.read() == bytes(NUM_BYTES)


def test_a_folder_is_held_until_no_queue_can_ask_for_it(case: Case) -> None:
    """The number of a closed descriptor may be another folder's by the time that an operation opens its file."""
    fd, name = case.queue.locate(str(case.file))
    assert (os.readlink(held_folders.by_descriptor(fd)), name) == (str(case.folder), "file")
    case.run.release()
    assert os.fstat(fd).st_nlink == 0 and not case.run.path.exists()
    case.queue.close()
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(fd)


def test_a_name_of_a_run_that_has_ended_leads_to_nothing(case: Case) -> None:
    """Somebody else may have a folder there by then."""
    case.run.release()
    case.folder.mkdir(parents=True)
    case.file.write_bytes(b"2" * NUM_BYTES)
    for move in (case.read, case.write):
        with pytest.raises(DiskError, match="start a new run") as caught:
            move()
        assert (caught.value.errno, caught.value.filename) == (errno.ESTALE, str(case.file))
    with pytest.raises(StorageError, match="ESTALE"):
        files.remove_files([case.file])
    assert case.file.read_bytes() == b"2" * NUM_BYTES
    case.run = RunFolder.claim(case.run.path.parent / "new", "run1", 0)
    shutil.rmtree(case.folder.parent.parent)
    again = RunFolder.claim(case.folder.parent.parent.parent, "run1", 0)  # the same name, anew
    files.preallocate({case.file: NUM_BYTES})
    assert case.read() == bytes(NUM_BYTES)
    again.release()


def test_a_forked_child_holds_nothing(case: Case) -> None:
    fd, _ = case.queue.locate(str(case.file))
    tree = held_folders.tree_of(case.file)
    assert tree is not None
    fds = [fd, tree.root.fd]
    del tree
    pid = os.fork()
    if pid == 0:
        os._exit(sum(map(is_open, fds)) + (held_folders.tree_of(case.file) is not None))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert all(map(is_open, fds)) and case.read() == b"1" * NUM_BYTES


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError as error:
        assert error.errno == errno.EBADF
        return False
    return True


def test_no_run_starts_where_proc_is_not_mounted(tmp_path: Path) -> None:
    code = "import sys; from ds_vertical.io.runs.run_dir import RunFolder; RunFolder.claim(sys.argv[1], 'run1', 0)"
    hidden = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"]
    if subprocess.run([*hidden, "true"], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    run = subprocess.run([*hidden, sys.executable, "-c", code, tmp_path / "ssd"], capture_output=True, text=True, timeout=100)
    assert f"{tmp_path}/ssd/run1: claim: /proc/self/fd/" in run.stderr and "does not lead to it; mount proc" in run.stderr
    assert not (tmp_path / "ssd" / "run1").exists()
