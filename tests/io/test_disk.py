"""Reads and writes past the page cache: what goes wrong is told with its place, and nothing goes wrong in silence."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forks
import pytest
from faults import small_disk, small_files

from ds_vertical.compat.ops import load
from ds_vertical.io.aio import DiskError, DiskQueue, Transfer
from ds_vertical.io.runs import stripes

KIB, MIB = 1 << 10, 1 << 20
BLOCK = 64 * KIB
DEPTH = 4


class Memory:
    """Page-aligned host memory."""

    def __init__(self, num_bytes: int, content: bytes = b"") -> None:
        self.map = mmap.mmap(-1, num_bytes)
        self.map[: len(content)] = content
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def __len__(self) -> int:
        return len(self.map)


def noise(num_bytes: int) -> Memory:
    return Memory(num_bytes, os.urandom(num_bytes))


@pytest.fixture(params=[False, True], ids=["batches", "singles"])
def queue(request: pytest.FixtureRequest) -> Iterator[DiskQueue]:
    made = DiskQueue(load.checked_aio().Queue(BLOCK, DEPTH, request.param))
    yield made
    made.close()


def held(transfer: Transfer, memory: Memory) -> Transfer:
    """The transfer, which keeps its memory from now on: a queue does not."""
    vars(transfer)["memory"] = memory
    return transfer


def write(queue: DiskQueue, memory: Memory, path: Path, offset: int = 0) -> Transfer:
    return held(queue.write(memory.address, len(memory), path, offset), memory)


def read(queue: DiskQueue, memory: Memory, path: Path, offset: int = 0) -> Transfer:
    return held(queue.read(memory.address, len(memory), path, offset), memory)


def failure(transfer: Transfer) -> DiskError:
    with pytest.raises(DiskError) as caught:
        transfer.wait()
    return caught.value


def whole(queue: DiskQueue, path: Path, num_bytes: int) -> bytes:
    memory = Memory(num_bytes)
    read(queue, memory, path).wait()
    return memory.map[:]


def test_a_write_follows_no_link_in_a_files_place(queue: DiskQueue, tmp_path: Path) -> None:
    """A read does: a checkpoint's files on other SSDs are links. And the folder may be one that the user has linked."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "ssd").symlink_to(tmp_path / "outside")
    theirs, new = tmp_path / "outside" / "theirs", tmp_path / "outside" / "new"
    theirs.write_bytes(bytes(BLOCK))
    for target in (theirs, tmp_path / "outside" / "not there"):
        link = tmp_path / f"to {target.name}"
        link.symlink_to(target)
        error = failure(write(queue, noise(BLOCK), link))
        assert (error.errno, error.call) == (errno.ELOOP, "open") and "where one of its files belongs" in str(error)
    assert theirs.read_bytes() == bytes(BLOCK) == whole(queue, tmp_path / "to theirs", BLOCK)
    write(queue, noise(BLOCK), tmp_path / "ssd" / "new").wait()
    assert new.stat().st_size == BLOCK and sorted(path.name for path in new.parent.iterdir()) == ["new", "theirs"]


# ---- what works


def test_many_operations_in_flight_move_the_right_bytes(queue: DiskQueue, tmp_path: Path) -> None:
    sizes = [512, BLOCK - 512, BLOCK, BLOCK + 512, 3 * BLOCK, 7 * BLOCK + 1024, 4096]
    written = [noise(size) for size in sizes]
    places = [sum(sizes[:index]) for index in range(len(sizes))]
    one, apart = tmp_path / "one", [tmp_path / f"{index}" for index in range(len(sizes))]
    transfers = [write(queue, memory, one, place) for memory, place in zip(written, places, strict=True)]
    transfers += [write(queue, memory, path) for memory, path in zip(written, apart, strict=True)]
    for transfer in reversed(transfers):
        transfer.wait()
    content = b"".join(memory.map[:] for memory in written)
    assert one.read_bytes() == content
    assert [path.read_bytes() for path in apart] == [memory.map[:] for memory in written]

    back = [Memory(size) for size in sizes]
    for transfer in [read(queue, memory, one, place) for memory, place in zip(back, places, strict=True)]:
        transfer.wait()
    assert [memory.map[:] for memory in back] == [memory.map[:] for memory in written]
    assert (queue.num_written_bytes, queue.num_read_bytes) == (2 * len(content), len(content))


def test_the_depth_is_kept_across_operations(queue: DiskQueue, tmp_path: Path) -> None:
    """With reads: a write that makes a file longer is complete when the kernel takes it."""
    memory = noise((8 * DEPTH + 1) * BLOCK)  # the last block of one operation leaves room for the next one's first
    write(queue, memory, tmp_path / "file").wait()
    for _ in range(20):  # one whose operations are all over before the last is asked for shows nothing
        before = time.monotonic_ns()
        transfers = [read(queue, memory, tmp_path / "file") for _ in range(30)]
        issued = time.monotonic_ns()
        times = [transfer.wait() for transfer in transfers]
        assert all(one.start_ns < one.end_ns for one in times)
        assert before < times[0].start_ns and times[-1].end_ns < time.monotonic_ns()
        # an operation begins before the one ahead of it has ended: never, were the queue drained between two
        early = sum(after.start_ns < one.end_ns for one, after in zip(times, times[1:], strict=False))
        if early and issued < times[-1].end_ns:
            return
    raise AssertionError("no operation ever began before the one ahead of it had ended")


def test_threads_share_a_queue(queue: DiskQueue, tmp_path: Path) -> None:
    memories = [noise(5 * BLOCK) for _ in range(8)]
    equal: list[bool] = []

    def run(index: int) -> None:
        path = tmp_path / f"{index}"
        for _ in range(5):
            write(queue, memories[index], path).wait()
            equal.append(whole(queue, path, 5 * BLOCK) == memories[index].map[:])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(memories))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal == [True] * 40


def test_wait_and_done_may_be_asked_again(queue: DiskQueue, tmp_path: Path) -> None:
    transfer = write(queue, noise(BLOCK), tmp_path / "file")
    deadline = time.monotonic() + 200
    while not transfer.done:
        assert time.monotonic() < deadline
    assert transfer.wait() == transfer.wait() and transfer.done
    missing = read(queue, Memory(512), tmp_path / "missing")
    assert str(failure(missing)) == str(failure(missing)) and missing.done
    assert queue.num_written_bytes == BLOCK and queue.num_read_bytes == 0


def test_close_completes_what_is_in_flight(queue: DiskQueue, tmp_path: Path) -> None:
    memory = noise(64 * BLOCK)
    write(queue, memory, tmp_path / "file")
    queue.close()
    queue.close()
    assert (tmp_path / "file").read_bytes() == memory.map[:]
    with pytest.raises(ValueError, match="closed"):
        write(queue, memory, tmp_path / "file")


def test_a_dropped_queue_completes_what_is_in_flight(tmp_path: Path) -> None:
    memory = noise(64 * BLOCK)
    dropped: Any = load.checked_aio().Queue(BLOCK, DEPTH)
    dropped.write(memory.address, len(memory), os.fsencode(tmp_path / "file"), 0)
    del dropped
    assert (tmp_path / "file").read_bytes() == memory.map[:]


def test_a_process_may_end_with_operations_in_flight(tmp_path: Path) -> None:
    code = """
import mmap, ctypes, sys
from ds_vertical.compat.ops import load
queue = load.checked_aio().Queue(1 << 16, 4)
memory = mmap.mmap(-1, 1 << 25)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
ids = [queue.read(address, 1 << 25, b"/nonexistent", 0), queue.write(address, 1 << 25, sys.argv[1].encode(), 0)]
print(queue.pending() > 0)
"""
    run = forks.run(tmp_path, [sys.executable, "-c", code, str(tmp_path / "file")], os.environ, timeout=200, engine=True)
    assert (run.returncode, run.stdout) == (0, "True\n"), run.stderr


# ---- what does not


def test_a_truncated_file_is_told_with_the_byte_at_which_it_ends(queue: DiskQueue, tmp_path: Path) -> None:
    memory = noise(6 * BLOCK)
    path = tmp_path / "file"
    write(queue, memory, path).wait()
    for size in (5 * BLOCK, 3 * BLOCK + 512, 2 * BLOCK + 100, 0):
        os.truncate(path, size)
        error = failure(read(queue, Memory(6 * BLOCK), path))
        assert (error.errno, error.operation, error.call) == (errno.ENODATA, "read", "read")
        assert (error.filename, error.num_bytes, error.num_transferred) == (str(path), 6 * BLOCK, size)
        assert f"the file ends at byte {size}" in str(error)
    other = read(queue, Memory(2 * BLOCK), path, BLOCK)
    assert failure(other).offset == BLOCK and failure(other).num_transferred == 0


def test_a_short_write_goes_on_and_then_tells_why(queue: DiskQueue, tmp_path: Path) -> None:
    """The limit lies within a block, so the kernel takes a part of that block, then nothing of the rest."""
    memory = noise(8 * BLOCK)
    path = tmp_path / "file"
    limit = 5 * BLOCK + 4096
    with small_files(limit):
        error = failure(write(queue, memory, path))
    assert (error.errno, error.operation, error.call) == (errno.EFBIG, "write", "write")
    assert (error.offset, error.num_bytes, error.num_transferred) == (limit, 8 * BLOCK, limit)
    assert path.read_bytes()[:limit] == memory.map[:limit]
    write(queue, memory, path).wait()
    assert path.read_bytes() == memory.map[:], "the queue is as good as new"


def test_a_full_disk_is_told(queue: DiskQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, MIB, monkeypatch):
        mounted = os.path.ismount(disk)  # where that is not allowed, a limit on the file's size does as well
        with small_files(4 * MIB if mounted else MIB):
            error = failure(write(queue, noise(2 * MIB), disk / "file"))
        assert error.errno == (errno.ENOSPC if mounted else errno.EFBIG)
        assert 0 < error.num_transferred <= MIB and error.offset == error.num_transferred
        assert os.strerror(error.errno or 0) in str(error) and str(disk / "file") in str(error)


@pytest.mark.parametrize(("address", "num_bytes", "offset"), [(8, 4096, 0), (0, 4095, 0), (0, 4096, 100)])
def test_misaligned_requests_are_named(queue: DiskQueue, tmp_path: Path, address: int, num_bytes: int, offset: int) -> None:
    memory = noise(8192)
    path = tmp_path / "file"
    write(queue, memory, path).wait()
    for issue in (queue.read, queue.write):
        error = failure(issue(memory.address + address, num_bytes, path, offset))
        assert error.errno == errno.EINVAL and "not a multiple of 512" in str(error)


def test_a_file_that_cannot_be_opened_is_told(queue: DiskQueue, tmp_path: Path) -> None:
    error = failure(read(queue, Memory(512), tmp_path / "missing"))
    assert (error.errno, error.call, error.num_transferred) == (errno.ENOENT, "open", 0)
    error = failure(write(queue, Memory(512), tmp_path / "missing" / "file"))
    assert (error.errno, error.call, error.operation) == (errno.ENOENT, "open", "write")
    assert isinstance(error, OSError) and "No such file or directory (ENOENT)" in str(error)


def test_a_failure_leaves_the_other_operations_alone(queue: DiskQueue, tmp_path: Path) -> None:
    memories = [noise(3 * BLOCK) for _ in range(6)]
    transfers = []
    for index, memory in enumerate(memories):
        folder = tmp_path / ("missing" if index % 2 else ".")
        transfers.append(write(queue, memory, folder / f"{index}"))
    for index, transfer in enumerate(transfers):
        if index % 2:
            assert failure(transfer).errno == errno.ENOENT
        else:
            transfer.wait()
            assert (tmp_path / f"{index}").read_bytes() == memories[index].map[:]


@pytest.mark.parametrize("settings", [(1000, 4), (0, 4), (4096, 0)])
def test_settings_that_cannot_work_are_refused(settings: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="block_size must be a multiple of 512"):
        load.checked_aio().Queue(*settings)


def test_more_depth_than_the_kernel_has_is_an_os_error() -> None:
    limit = int(Path("/proc/sys/fs/aio-max-nr").read_text())
    with pytest.raises(OSError):
        load.checked_aio().Queue(4096, limit + 1)


def test_a_file_on_two_ssds_is_read_and_written_whole_and_a_failure_of_one_is_told(tmp_path: Path) -> None:
    """Through a native queue for each."""
    folders, path = [tmp_path / "ssd0", tmp_path / "ssd1"], tmp_path / "ssd0" / "file"
    for folder in folders:
        folder.mkdir()
    stripes.open_run(folders, (0.5, 0.5))
    made = DiskQueue(*(load.checked_aio().Queue(BLOCK, DEPTH, False) for _ in folders))
    try:
        stripes.spread_file(path, 9 * MIB)
        memory = noise(9 * MIB)
        write(made, memory, path).wait()
        sizes = stripes.sizes_of(path, 9 * MIB)
        assert {each: each.stat().st_size for each in sizes} == sizes and not path.exists()
        assert whole(made, path, 9 * MIB) == memory.map[:]
        assert (made.num_written_bytes, made.num_read_bytes) == (9 * MIB, 9 * MIB)
        second = folders[1] / "file.ssd1"
        os.truncate(second, MIB)
        error = failure(read(made, Memory(9 * MIB), path))
        assert error.errno == errno.ENODATA and error.filename == str(second)
        second.unlink()
        second.mkdir()
        transfer = write(made, memory, path)
        failure(transfer)
        assert transfer.done and made.write_error is not None and made.write_error.filename == str(second)
        made.give_up([transfer])
        assert made.write_error is None
    finally:
        made.close()
        stripes.close_run(folders[0])
    with pytest.raises(ValueError, match="the queue was closed"):
        made.lane(1)
