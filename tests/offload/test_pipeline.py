"""The optimizer pipeline over real files and the real queues: order, slots, read after write, and every kind of failure."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pipeline_rig
import pytest
import torch
from faults import small_disk, small_files
from pipeline_rig import BLOCK, Rig, assert_dead, blocks, pipeline_threads, values, within_limit, zeros

from ds_vertical.io.aio import DiskError
from ds_vertical.io.extents import Extent
from ds_vertical.offload.step_pipeline import StepJob

make_rig, rig = pipeline_rig.make_rig, pipeline_rig.rig  # fixtures


# ---- results


def test_the_thread_begins_once_ahead_of_its_first_job(make_rig: Callable[..., Rig], tmp_path: Path) -> None:
    begun: list[threading.Thread] = []
    rig = make_rig(3, 8 * BLOCK, lambda: begun.append(threading.current_thread()))
    assert begun == []
    for turn in ("first", "second"):
        assert within_limit(rig.submit(rig.add_one(turn, blocks(zeros(tmp_path / turn, 1), 0)))) is None
    assert begun == pipeline_threads() and rig.computed == ["first", "second"]


def test_a_thread_that_cannot_begin_takes_no_job(make_rig: Callable[..., Rig], tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("no device")

    rig = make_rig(3, 8 * BLOCK, fail)
    error = within_limit(rig.submit(rig.add_one("job", blocks(zeros(tmp_path / "state", 1), 0))))
    assert str(error) == "no device" and rig.computed == [] and within_limit(rig.pipeline.drain) is error


@pytest.mark.parametrize("num_slots", [1, 2, 3, 5])
def test_jobs_run_in_order_and_their_state_is_written(make_rig: Callable[..., Rig], tmp_path: Path, num_slots: int) -> None:
    rig = make_rig(num_slots)
    files = [zeros(tmp_path / name, 24) for name in ("master", "exp_avg", "exp_avg_sq")]
    finished: list[list[str]] = []
    waits = []
    for batch in range(4):
        jobs = [rig.add_one(f"{batch}.{i}", *(blocks(f, 6 * batch + 2 * i, 2) for f in files)) for i in range(3)]
        waits.append(rig.submit(*jobs, finish=lambda: finished.append(list(rig.computed))))
    for batch, wait in enumerate(waits):
        assert within_limit(wait) is None
        assert rig.computed[: 3 * (batch + 1)] == [f"{b}.{i}" for b in range(batch + 1) for i in range(3)]
    assert [len(computed) for computed in finished] == [3, 6, 9, 12]
    assert within_limit(rig.pipeline.drain) is None
    assert [values(file) for file in files] == [[1] * 24] * 3


def test_state_in_memory_needs_no_slot(rig: Rig, tmp_path: Path) -> None:
    file = zeros(tmp_path / "file", 2)
    wait = rig.submit(rig.add_one("memory"), rig.add_one("disk", blocks(file, 0, 2)), rig.add_one("memory again"))
    assert within_limit(wait) is None and rig.computed == ["memory", "disk", "memory again"]
    assert within_limit(rig.pipeline.drain) is None and values(file) == [1, 1]


class Unfinished:
    """A real queue that keeps the numbers of operations which nobody has seen to complete."""

    def __init__(self, native: Any, left: set[tuple[int, int]]) -> None:
        self.native = native
        self.left = left

    def _issue(self, operation: int) -> int:
        self.left.add((id(self), operation))
        return operation

    def read(self, *args: Any) -> int:
        return self._issue(self.native.read(*args))

    def write(self, *args: Any) -> int:
        return self._issue(self.native.write(*args))

    def wait(self, operation: int) -> Any:
        self.left.discard((id(self), operation))
        return self.native.wait(operation)

    def poll(self, _: int) -> None:
        """As late as it may be."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)


@pytest.mark.parametrize("overlap", [True, False])
def test_without_overlap_a_job_starts_when_the_one_before_it_is_complete(
    make_rig: Callable[..., Rig], tmp_path: Path, overlap: bool
) -> None:
    """Also where it needs no slot, and where there are slots enough."""
    rig, left = make_rig(3, 8 * BLOCK, overlap=overlap), set[tuple[int, int]]()
    for queue in (rig.reader, rig.writer):
        queue._native = Unfinished(queue.native, left)
    files, seen = [zeros(tmp_path / str(i), 2) for i in range(3)], []

    def job(name: str, *extents: Extent) -> StepJob:
        made = rig.add_one(name, *extents)

        def compute(views: Sequence[torch.Tensor]) -> None:
            seen.append(len(left))
            made.compute(views)

        return dataclasses.replace(made, compute=compute)

    for name in ("first", "second"):
        on_disk = [job(name, blocks(file, 0, 2)) for file in files]
        rig.submit(job(name), on_disk[0], job(name), *on_disk[1:], job(name))
    assert within_limit(rig.pipeline.drain) is None
    assert [values(file) for file in files] == [[2, 2]] * 3 and len(seen) == 12
    assert any(seen) if overlap else not any(seen)


def test_other_outputs_leave_the_state_that_was_read_alone(rig: Rig, tmp_path: Path) -> None:
    old, new = zeros(tmp_path / "old", 4), zeros(tmp_path / "new", 4)
    rig.submit(rig.add_one("early", blocks(old, 1, 2), outputs=[blocks(new, 1, 2)]))
    assert within_limit(rig.pipeline.drain) is None
    assert (values(old), values(new)) == ([0] * 4, [0, 1, 1, 0])


@pytest.mark.parametrize("num_slots", [1, 2, 4])
def test_a_read_sees_every_earlier_write_of_its_bytes(make_rig: Callable[..., Rig], tmp_path: Path, num_slots: int) -> None:
    """Overlapping extents of one file, again and again, without a wait between: reads ahead must not be stale."""
    rig = make_rig(num_slots)
    file = zeros(tmp_path / "file", 16)
    expected = [0] * 16
    for number in range(200):
        first, count = (7 * number) % 13, 1 + number % 4
        rig.submit(rig.add_one(str(number), blocks(file, first, min(count, 16 - first))))
        for index in range(first, min(first + count, 16)):
            expected[index] += 1
    assert within_limit(rig.pipeline.drain) is None
    assert values(file) == expected and rig.computed == [str(number) for number in range(200)]


def test_work_may_come_after_a_pause_and_ends_with_close(rig: Rig, tmp_path: Path) -> None:
    file = zeros(tmp_path / "file", 4)
    for _ in range(3):
        rig.submit(rig.add_one("pause", blocks(file, 0, 4)))
        assert within_limit(rig.pipeline.drain) is None
    rig.submit(*(rig.add_one("last", blocks(file, 0, 4)) for _ in range(20)))
    assert within_limit(rig.pipeline.close) is None
    assert values(file) == [23] * 4, "close did not finish what was submitted"
    assert not pipeline_threads()
    within_limit(rig.pipeline.close)
    with pytest.raises(RuntimeError, match="late: the optimizer pipeline is closed"):
        rig.submit(rig.add_one("late"))


# ---- failures


def test_a_truncated_file_fails_its_batch_and_all_later_ones(rig: Rig, tmp_path: Path) -> None:
    good, short = zeros(tmp_path / "good", 8), zeros(tmp_path / "short", 3)
    first = rig.submit(rig.add_one("good", blocks(good, 0, 4)))
    jobs = [rig.add_one("good", blocks(good, 4, 4)), rig.add_one("short", blocks(good, 0), blocks(short, 0, 4))]
    second = rig.submit(*jobs)
    third = rig.submit(rig.add_one("after", blocks(good, 0, 8)))
    assert within_limit(first) is None
    error = assert_dead(rig, second, DiskError)
    assert isinstance(within_limit(third), DiskError) and "after" not in rig.computed
    assert isinstance(error, DiskError)
    assert (error.filename, error.operation, error.offset, error.errno) == (str(short), "read", 3 * BLOCK, errno.ENODATA)


def test_a_missing_file_fails(rig: Rig, tmp_path: Path) -> None:
    error = assert_dead(rig, rig.submit(rig.add_one("missing", blocks(tmp_path / "missing", 0))), DiskError)
    assert isinstance(error, DiskError) and error.errno == errno.ENOENT


def test_a_full_disk_fails(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = zeros(tmp_path / "source", 64)
    disk = tmp_path / "disk"
    with small_disk(disk, 8 * BLOCK, monkeypatch), small_files(8 * BLOCK + 64 * BLOCK * os.path.ismount(disk)):
        full = disk / "full"
        # 8 blocks fit: of what is written beyond them nothing does
        waits = [rig.submit(rig.add_one(f"{i}", blocks(source, 4 * i, 4), outputs=[blocks(full, 4 * i, 4)])) for i in range(8)]
        errors = [within_limit(wait) for wait in waits]
        error = assert_dead(rig, rig.pipeline.drain, DiskError)
        assert isinstance(error, DiskError) and error.operation == "write" and error.filename == str(full)
        assert error.errno == (errno.ENOSPC if os.path.ismount(disk) else errno.EFBIG)
        assert errors[0] is None or isinstance(errors[0], DiskError)


@pytest.mark.parametrize("fault", ["read", "write", "last write"])
def test_what_fails_beside_the_state_can_be_recovered_from(rig: Rig, tmp_path: Path, fault: str) -> None:
    """Jobs that write elsewhere: with the fault gone they run again, in every slot."""
    old, new = zeros(tmp_path / "old", 12), [zeros(tmp_path / f"new{i}", 1) for i in range(12)]
    victims = {"read": [], "write": new[2:], "last write": new[11:]}[fault]

    def run() -> BaseException | None:
        jobs = [rig.add_one(f"{i}", blocks(old, i), outputs=[blocks(new[i], 0)], beside=True) for i in range(12)]
        return within_limit(rig.submit(*jobs)) or within_limit(rig.pipeline.drain)

    for _ in range(3):
        if fault == "read":
            os.truncate(old, 2 * BLOCK)
        for path in victims:
            path.unlink()
            path.mkdir()
        assert isinstance(run(), DiskError)
        assert within_limit(rig.pipeline.wait_idle) is None
        rig.pipeline.recover()
        assert len(rig.pipeline.reads.free) == len(rig.pipeline.reads.slots), "slots are lost"
        zeros(old, 12)
        for path in victims:
            path.rmdir()
            zeros(path, 1)
        assert run() is None and [values(path) for path in new] == [[1]] * 12 and values(old) == [0] * 12


@pytest.mark.parametrize("other", ["failed", "dropped", "not written"])
def test_what_fails_in_place_cannot_be_recovered_from(rig: Rig, tmp_path: Path, other: str) -> None:
    file, short = zeros(tmp_path / "file", 8), zeros(tmp_path / "short", 1)
    lost = rig.add_one("beside", blocks(short, 4), beside=True)
    jobs = {
        "failed": [rig.add_one("in place", blocks(short, 4))],
        "dropped": [lost, rig.add_one("in place", blocks(file, 0))],
        "not written": [rig.add_one("in place", blocks(file, 0), outputs=[blocks(tmp_path / "none" / "file", 0)]), lost],
    }[other]
    wait = rig.submit(*jobs)
    assert isinstance(within_limit(wait) or within_limit(rig.pipeline.drain), DiskError)
    within_limit(rig.pipeline.wait_idle)
    rig.pipeline.recover()
    assert isinstance(rig.pipeline.error, DiskError)


def test_an_error_of_a_computation_fails_its_batch_and_all_later_ones(rig: Rig, tmp_path: Path) -> None:
    file = zeros(tmp_path / "file", 8)
    finished: list[str] = []
    wait = rig.submit(
        rig.add_one("one", blocks(file, 0, 4)), rig.failing("two", blocks(file, 4, 4)), finish=lambda: finished.append("x")
    )
    error = assert_dead(rig, wait, ArithmeticError)
    assert str(error) == "two" and not finished
    assert values(file)[4:] == [0] * 4


def test_an_error_of_finishing_a_batch_fails_it(rig: Rig) -> None:
    def finish() -> None:
        raise ArithmeticError("finish")

    assert_dead(rig, rig.submit(rig.add_one("one"), finish=finish), ArithmeticError)


@pytest.mark.parametrize("num_slots", [1, 3])
def test_an_overlapping_write_that_failed_fails_the_read_after_it(
    make_rig: Callable[..., Rig], tmp_path: Path, num_slots: int
) -> None:
    """The read is of a job that has been given a slot, and has other reads under way, when the write's failure shows."""
    rig = make_rig(num_slots)
    file, folder = zeros(tmp_path / "file", 8), tmp_path / "gone"
    rig.submit(rig.add_one("lost", blocks(file, 0), outputs=[blocks(folder / "missing", 0)]))
    wait = rig.submit(rig.add_one("again", blocks(file, 1), blocks(folder / "missing", 0)))
    error = assert_dead(rig, wait, DiskError)
    assert isinstance(error, DiskError) and error.filename == str(folder / "missing")
    assert not rig.reader.native.pending() and not rig.writer.native.pending(), "memory is in use after the failure"


def test_a_failed_write_that_nobody_reads_again_is_told(rig: Rig, tmp_path: Path) -> None:
    file = zeros(tmp_path / "file", 4)
    with small_files(4 * BLOCK):
        rig.submit(rig.add_one("lost", blocks(file, 0), outputs=[blocks(file, 6)]))
        wait = rig.submit(*(rig.add_one(str(i), blocks(file, i)) for i in (1, 2)))
        assert within_limit(wait) in (None, rig.pipeline.error)
        error = within_limit(rig.pipeline.drain)
    assert isinstance(error, DiskError) and error.offset == 6 * BLOCK
