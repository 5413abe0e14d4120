"""Slots besides those that the pipeline needs: used for what is expected as far as there is room; their memory goes back."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pipeline_rig
import pytest
import torch
from pages import resident_pages
from pipeline_rig import BLOCK, Rig, blocks, values, within_limit, zeros

from ds_vertical.compat import pinned_memory
from ds_vertical.compat.ops import load
from ds_vertical.io.aio import DiskQueue
from ds_vertical.offload.state_prefetch import PrefetchJob
from ds_vertical.offload.step_pipeline import PipelineSettings, StepJob, StepPipeline

SLOT = 4 * BLOCK
USUAL, FURTHER = 2, 6


class FurtherRig(Rig):
    """A pipeline with two usual slots and six further ones. Its thread runs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(USUAL, SLOT)
        super().close()
        self.further = pinned_memory.map_host_bytes(FURTHER * SLOT)
        usual = torch.frombuffer(mmap.mmap(-1, USUAL * SLOT), dtype=torch.uint8).split(SLOT)
        self.reader, self.writer = (DiskQueue(load.checked_aio().Queue(BLOCK, 8, False)) for _ in range(2))
        settings = PipelineSettings(further=self.further.split(SLOT))
        self.pipeline = StepPipeline(usual, self.reader, self.writer, settings)
        self.submit(self.add_one("first", blocks(zeros(folder / "first", 1), 0)))()
        self.pipeline.drain()
        self.computed.clear()

    def tell(self, *jobs: StepJob) -> None:
        self.pipeline.expect([PrefetchJob(job.what, job.extents) for job in jobs])

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


def jobs_of(rig: FurtherRig, file: Path, count: int = 8) -> list[StepJob]:
    return [rig.add_one(str(i), blocks(file, 4 * i, 4)) for i in range(count)]


@pytest.mark.parametrize(("room", "begun"), [(0, 2), (SLOT - 1, 2), (SLOT, 3), (3 * SLOT + 5, 5), (10**12, 8)])
def test_as_many_further_slots_are_used_as_the_room_holds(rig: FurtherRig, tmp_path: Path, room: float, begun: int) -> None:
    file = zeros(tmp_path / "file", 40)
    jobs = [rig.add_one(str(i), blocks(file, 4 * i, 4)) for i in range(10)]
    rig.pipeline.reads.allow(room)
    rig.tell(*jobs)
    rig.await_begun(min(begun, 10))
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
    assert rig.pages == 0 and values(file) == [3] * 32


def test_memory_of_slots_that_may_not_be_used_any_more_is_given_back(rig: FurtherRig, tmp_path: Path) -> None:
    file = zeros(tmp_path / "file", 32)
    jobs = jobs_of(rig, file)
    for room, further in ((10**12, 6), (2 * SLOT, 2), (0, 0), (10**12, 6)):
        rig.pipeline.reads.allow(room)
        rig.tell(*jobs)
        rig.await_begun(USUAL + further)
        assert rig.pages == further * SLOT // mmap.PAGESIZE
        rig.submit(*jobs)
        assert within_limit(rig.pipeline.drain) is None
    assert values(file) == [4] * 32


def test_what_is_told_twice_is_read_once(rig: FurtherRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = zeros(tmp_path / "file", 32)
    jobs, read, issued = jobs_of(rig, file), rig.reader.read, list[int]()

    def noted(address: int, num_bytes: int, *place: Any) -> Any:
        issued.append(num_bytes)
        return read(address, num_bytes, *place)

    monkeypatch.setattr(rig.reader, "read", noted)
    rig.pipeline.reads.allow(10**12)
    rig.tell(*jobs)
    rig.await_begun(8)
    for number, job in enumerate(jobs):
        rig.tell(*jobs[number + 1 : number + 2])  # as each step tells the next one
        assert within_limit(rig.submit(job)) is None
    assert within_limit(rig.pipeline.drain) is None
    assert values(file) == [1] * 32 and issued == [SLOT] * 8


def test_a_drain_that_reads_on_leaves_what_is_expected(rig: FurtherRig, tmp_path: Path) -> None:
    file, other = zeros(tmp_path / "file", 32), zeros(tmp_path / "other", 4)
    jobs = jobs_of(rig, file)
    rig.pipeline.reads.allow(10**12)
    rig.tell(*jobs)
    rig.await_begun(8)
    rig.submit(rig.add_one("early", blocks(other, 0, 4)))  # takes the slot of the job that is furthest off
    assert within_limit(lambda: rig.pipeline.drain(reads_on=True)) is None
    assert values(other) == [1] * 4 and rig.begun()[:7] == [str(i) for i in range(7)]
    assert within_limit(rig.pipeline.drain) is None
    assert rig.begun() == [] and len(rig.pipeline.reads.free) == USUAL + FURTHER
    rig.submit(*jobs)
    assert within_limit(rig.pipeline.drain) is None and values(file) == [1] * 32


@pytest.mark.parametrize("fault", [False, True])
def test_a_failure_frees_all_slots(rig: FurtherRig, tmp_path: Path, fault: bool) -> None:
    file = zeros(tmp_path / "file", 32)
    jobs = jobs_of(rig, file)
    rig.pipeline.reads.allow(10**12)
    rig.tell(*jobs)
    rig.await_begun(8)
    if fault:
        assert isinstance(within_limit(rig.submit(rig.failing("broken"))), ArithmeticError)
    within_limit(rig.pipeline.wait_idle)
    assert len(rig.pipeline.reads.free) == USUAL + FURTHER and rig.begun() == [] and not rig.reader.native.pending()


def test_a_pipeline_without_further_slots_has_no_room_for_any(tmp_path: Path) -> None:
    rig = Rig(3)
    rig.pipeline.reads.allow(10**12)
    assert not rig.pipeline.reads.has_further and rig.pipeline.reads.most == 3
    rig.close()
