"""Slots besides those that the pipeline needs: used for what is expected as far as there is room; their memory goes back."""

from __future__ import annotations

import itertools
import mmap
import threading
import time
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import pipeline_rig
import pytest
import torch
from pages import resident_pages
from pipeline_rig import BLOCK, Rig, blocks, values, within_limit, zeros

from ds_vertical.compat import pinned_memory
from ds_vertical.compat.ops import load
from ds_vertical.io.aio import DiskQueue
from ds_vertical.io.extents import Extent
from ds_vertical.offload.state_prefetch import FreeSlots, PrefetchJob, Slot
from ds_vertical.offload.step_pipeline import PipelineSettings, StepJob, StepPipeline

SLOT = 4 * BLOCK
USUAL, FURTHER = 2, 6


class FurtherRig(Rig):
    """A pipeline with two usual slots and further ones, six if not told otherwise. Its thread runs."""

    def __init__(self, folder: Path, further: int = FURTHER) -> None:
        super().__init__(USUAL, SLOT)
        super().close()
        self.further = pinned_memory.map_host_bytes(further * SLOT)
        usual = torch.frombuffer(mmap.mmap(-1, USUAL * SLOT), dtype=torch.uint8).split(SLOT)
        self.reader, self.writer = (DiskQueue(load.checked_aio().Queue(BLOCK, 8, False)) for _ in range(2))
        settings = PipelineSettings(further=self.further.split(SLOT))
        self.pipeline = StepPipeline(usual, self.reader, self.writer, settings)
        self.submit(self.add_one("first", blocks(zeros(folder / "first", 1), 0)))()
        self.pipeline.drain()
        self.computed.clear()

    def tell(self, *jobs: StepJob) -> None:
        """Of jobs behind the norm."""
        self.pipeline.expect([PrefetchJob(job.what, job.extents) for job in jobs], far=True)

    def begun(self) -> list[str]:
        with self.pipeline.changes.lock:
            return [entry.coming.what for entry in self.pipeline.reads.expected.begun()]

    def await_begun(self, count: int) -> None:
        def wait() -> None:
            while len(self.begun()) != count:
                time.sleep(0.001)

        assert within_limit(wait) is None
        time.sleep(0.05)
        assert len(self.begun()) == count

    @property
    def pages(self) -> int:
        """Of the further slots, those that hold memory."""
        return resident_pages(self.further)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[FurtherRig]:
    made = FurtherRig(tmp_path)
    yield made
    assert within_limit(made.close) is None
    assert not pipeline_rig.pipeline_threads()


def jobs_of(rig: FurtherRig, file: Path, count: int = FURTHER) -> list[StepJob]:
    return [rig.add_one(str(i), blocks(file, 4 * i, 4)) for i in range(count)]


@pytest.mark.parametrize(("room", "begun"), [(0, 0), (SLOT - 1, 0), (SLOT, 1), (3 * SLOT + 5, 3), (10**12, 6)])
def test_as_many_further_slots_are_used_as_the_room_holds(rig: FurtherRig, tmp_path: Path, room: float, begun: int) -> None:
    file = zeros(tmp_path / "file", 40)
    jobs = [rig.add_one(str(i), blocks(file, 4 * i, 4)) for i in range(10)]
    rig.pipeline.reads.allow(room)
    rig.tell(*jobs)
    rig.await_begun(begun)
    rig.submit(*jobs)
    assert within_limit(rig.pipeline.drain) is None
    assert values(file) == [1] * 40 and rig.computed == [str(i) for i in range(10)]


def test_further_slots_take_no_memory_before_they_are_needed(rig: FurtherRig, tmp_path: Path) -> None:
    file = zeros(tmp_path / "file", 32)
    rig.pipeline.reads.allow(10**12)
    for _ in range(3):
        for job in jobs_of(rig, file):
            assert within_limit(rig.submit(job)) is None
            assert within_limit(rig.pipeline.drain) is None
    assert rig.pages == 0 and values(file)[:24] == [3] * 24


def test_memory_of_slots_that_may_not_be_used_any_more_is_given_back(rig: FurtherRig, tmp_path: Path) -> None:
    file = zeros(tmp_path / "file", 32)
    jobs = jobs_of(rig, file)
    for room, further in ((10**12, 6), (2 * SLOT, 2), (0, 0), (10**12, 6)):
        rig.pipeline.reads.allow(room)
        rig.tell(*jobs)
        rig.await_begun(further)
        assert rig.pages == further * SLOT // mmap.PAGESIZE
        rig.submit(*jobs)
        assert within_limit(rig.pipeline.drain) is None
    assert values(file)[:24] == [4] * 24


def test_what_is_told_twice_is_read_once(rig: FurtherRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = zeros(tmp_path / "file", 32)
    jobs, read, issued = jobs_of(rig, file), rig.reader.read, list[int]()

    def noted(address: int, num_bytes: int, *place: Any) -> Any:
        issued.append(num_bytes)
        return read(address, num_bytes, *place)

    monkeypatch.setattr(rig.reader, "read", noted)
    rig.pipeline.reads.allow(10**12)
    rig.tell(*jobs)
    rig.await_begun(FURTHER)
    for number, job in enumerate(jobs):
        rig.tell(*jobs[number + 1 : number + 2])  # as each step tells the next one
        assert within_limit(rig.submit(job)) is None
    assert within_limit(rig.pipeline.drain) is None
    assert values(file)[:24] == [1] * 24 and issued == [SLOT] * FURTHER


def test_a_drain_that_reads_on_leaves_what_is_expected(rig: FurtherRig, tmp_path: Path) -> None:
    file, other = zeros(tmp_path / "file", 32), zeros(tmp_path / "other", 4)
    jobs = jobs_of(rig, file)
    rig.pipeline.reads.allow(10**12)
    rig.tell(*jobs)
    rig.await_begun(FURTHER)
    rig.submit(rig.add_one("early", blocks(other, 0, 4)))  # has a slot all the same
    assert within_limit(lambda: rig.pipeline.drain(reads_on=True)) is None
    assert values(other) == [1] * 4 and rig.begun() == [str(i) for i in range(FURTHER)]
    assert within_limit(rig.pipeline.drain) is None
    assert rig.begun() == [] and len(rig.pipeline.reads.free) == USUAL + FURTHER
    rig.submit(*jobs)
    assert within_limit(rig.pipeline.drain) is None and values(file)[:24] == [1] * 24


@pytest.mark.parametrize("fault", [False, True])
def test_a_failure_frees_all_slots(rig: FurtherRig, tmp_path: Path, fault: bool) -> None:
    file = zeros(tmp_path / "file", 32)
    jobs = jobs_of(rig, file)
    rig.pipeline.reads.allow(10**12)
    rig.tell(*jobs)
    rig.await_begun(FURTHER)
    if fault:
        assert isinstance(within_limit(rig.submit(rig.failing("broken"))), ArithmeticError)
    within_limit(rig.pipeline.wait_idle)
    assert len(rig.pipeline.reads.free) == USUAL + FURTHER and rig.begun() == [] and not rig.reader.native.pending()


def test_a_pipeline_without_further_slots_has_no_room_for_any(tmp_path: Path) -> None:
    rig = Rig(3)
    rig.pipeline.reads.allow(10**12)
    assert not rig.pipeline.reads.has_further and rig.pipeline.reads.most == 3
    rig.close()


def calls_for(folder: Path, count: int) -> tuple[int, int]:
    """(Python calls on the pipeline's thread, comparisons of extents and paths among them) for so many jobs that are told, and
    begun, at once, half as many that find no slot, and one that is not told."""
    calls, compared = itertools.count(), itertools.count()

    def counted(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            next(calls)
            if frame.f_code in (Extent.overlaps.__code__, Extent.__eq__.__code__, PurePath.__eq__.__code__):
                next(compared)

    folder.mkdir()
    threading.setprofile(counted)
    try:
        rig = FurtherRig(folder, count)
    finally:
        threading.setprofile(None)
    files = [zeros(folder / str(number), 40) for number in range(count * 3 // 20)]
    jobs = [rig.add_one(f"{file.name}.{i}", blocks(file, 4 * i, 4)) for file in files for i in range(10)]
    rig.pipeline.reads.allow(10**12)
    before = next(calls), next(compared)
    rig.tell(*jobs)
    rig.await_begun(count)
    rig.submit(rig.add_one("other", blocks(zeros(folder / "other", 4), 0, 4)))
    rig.submit(*jobs)
    assert within_limit(rig.pipeline.drain) is None
    assert rig.computed == ["other", *(job.what for job in jobs)] and all(values(file) == [1] * 40 for file in files)
    found = next(calls) - before[0], next(compared) - before[1]
    assert within_limit(rig.close) is None
    return found


def test_a_job_costs_as_much_among_thousands_as_among_a_few(tmp_path: Path) -> None:
    few, many = calls_for(tmp_path / "few", 100), calls_for(tmp_path / "many", 1000)
    assert few[0] > 1000 and many[0] < 1.5 * 10 * few[0], (few, many)
    assert many[1] < 12 * 1500


def test_memory_that_is_given_back_is_waited_for_and_taken_anew(rig: FurtherRig, tmp_path: Path) -> None:
    file = zeros(tmp_path / "file", 32)
    jobs = jobs_of(rig, file)
    rig.pipeline.reads.allow(10**12)
    for count in range(3):
        rig.tell(*jobs)
        rig.await_begun(FURTHER)
        if count < 2:
            rig.submit(*jobs)
            assert within_limit(rig.pipeline.drain) is None
        assert rig.pages == FURTHER * SLOT // mmap.PAGESIZE, "they stay for the next step"
        assert within_limit(rig.pipeline.drain) is None
        assert within_limit(rig.pipeline.reads.give_memory_back) is None
        assert rig.pages == 0 and rig.begun() == []
    assert values(file)[:24] == [2] * 24


def test_slots_that_become_fewer_while_nothing_is_to_do_give_their_memory_back(rig: FurtherRig, tmp_path: Path) -> None:
    file = zeros(tmp_path / "file", 32)
    jobs = jobs_of(rig, file)
    rig.pipeline.reads.allow(10**12)
    rig.tell(*jobs)
    rig.await_begun(FURTHER)
    rig.submit(*jobs)
    assert within_limit(rig.pipeline.drain) is None
    rig.pipeline.reads.allow(2 * SLOT)

    def wait() -> None:
        while rig.pages > 2 * SLOT // mmap.PAGESIZE:
            time.sleep(0.001)

    assert within_limit(wait) is None
    assert rig.pages == 2 * SLOT // mmap.PAGESIZE


def test_what_is_behind_the_norm_leaves_the_usual_slots_to_what_comes_next(rig: FurtherRig, tmp_path: Path) -> None:
    """And it keeps what was read of it where more is stepped behind the norm than was told, as where a guess was wrong."""
    file, other = zeros(tmp_path / "file", 32), zeros(tmp_path / "other", 16)
    far, near = jobs_of(rig, file, 8), [rig.add_one(f"early {i}", blocks(other, 4 * i, 4)) for i in range(3)]
    rig.pipeline.reads.allow(10**12)
    rig.tell(*far)
    rig.await_begun(FURTHER)
    rig.pipeline.expect([PrefetchJob(job.what, job.extents) for job in near])
    rig.await_begun(FURTHER + USUAL)
    assert rig.begun()[:USUAL] == [job.what for job in near[:USUAL]]
    rig.submit(near[0])()
    rig.await_begun(FURTHER + USUAL)
    rig.pipeline.expect([PrefetchJob(job.what, job.extents) for job in far[6:]])  # come next now
    rig.submit(near[1])()
    rig.await_begun(FURTHER + USUAL)
    assert rig.begun() == [near[2].what, far[6].what, *(job.what for job in far[:6])]
    rig.submit(near[2], *far)
    assert within_limit(rig.pipeline.drain) is None
    assert values(file) == [1] * 32 and values(other) == [1] * 12 + [0] * 4


# ---- what an interrupt or a failed write leaves


def slots_of(count: int) -> list[Slot]:
    return [Slot(torch.empty(mmap.PAGESIZE, dtype=torch.uint8), number) for number in range(count)]


@pytest.mark.parametrize("known", [True, False], ids=["cut behind the number", "cut ahead of it"])
def test_a_slot_that_an_interrupt_has_left_is_free_once(known: bool) -> None:
    """It was there twice, so that two jobs would have had its memory."""
    slots = slots_of(4)
    free = FreeSlots(slots, 2)
    taken = free.take(range(4))
    assert taken is slots[0]
    if known:
        free._numbers.add(taken.number)  # as far as `append` comes ahead of the interrupt
    for _ in range(2):
        free.reset()
    assert [free.take(range(4)) for _ in range(5)] == [*slots, None]


def test_a_failed_write_is_left_to_who_takes_the_slot() -> None:
    """Giving memory back raised it outside of what the pipeline's thread guards, and the thread ended."""

    class Failed:
        done = True

        def wait(self) -> None:
            raise OSError(28, "No space left on device")

    slots = slots_of(3)
    free = FreeSlots(slots, 1)
    for slot in (free.take(range(3)), free.take(range(1, 3))):
        assert slot is not None
        slot.writes = [Failed()] if slot.number else []  # type: ignore[list-item]
        free.append(slot)
    assert not free.rest(1)
    with pytest.raises(OSError, match="No space"):
        free.take(range(1, 2))
