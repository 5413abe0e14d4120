"""An optimizer pipeline over real files and the real queues, and jobs that count what was done to their bytes."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_vertical.compat.ops import load
from ds_vertical.io.aio import DiskQueue
from ds_vertical.io.extents import Extent
from ds_vertical.offload.step_pipeline import PipelineSettings, StepJob, StepPipeline

BLOCK = 4096
LIMIT_S = 60  # a wait that takes longer hangs


class Rig:
    """A pipeline with `num_slots` slots of `slot_bytes`, and what it computed, in order."""

    def __init__(
        self, num_slots: int = 3, slot_bytes: int = 8 * BLOCK, begin: Callable[[], None] = lambda: None, overlap: bool = True
    ) -> None:
        self.memory = mmap.mmap(-1, num_slots * slot_bytes)
        slots = torch.frombuffer(self.memory, dtype=torch.uint8).view(num_slots, slot_bytes)
        self.reader, self.writer = (DiskQueue(load.checked_aio().Queue(BLOCK, 8, False)) for _ in range(2))
        self.pipeline = StepPipeline(list(slots), self.reader, self.writer, PipelineSettings(begin=begin, overlap=overlap))
        self.computed: list[str] = []

    def add_one(self, what: str, *extents: Extent, outputs: Sequence[Extent] | None = None, beside: bool = False) -> StepJob:
        """A job that adds one to every byte of its state."""

        def compute(views: Sequence[torch.Tensor]) -> None:
            self.computed.append(what)
            for view in views:
                view.add_(1)

        return StepJob(what, extents, compute, outputs, beside=beside)

    def failing(self, what: str, *extents: Extent) -> StepJob:
        def compute(views: Sequence[torch.Tensor]) -> None:
            raise ArithmeticError(what)

        return StepJob(what, extents, compute)

    def submit(self, *jobs: StepJob, finish: Callable[[], None] = lambda: None) -> Callable[[], None]:
        return self.pipeline.submit(jobs[0].what, jobs, finish).wait

    def close(self) -> None:
        self.pipeline.close()
        self.reader.close()
        self.writer.close()


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    """Makes rigs, which end with the test and leave no thread."""
    made: list[Rig] = []

    def make(*args: Any, **kwargs: Any) -> Rig:
        made.append(Rig(*args, **kwargs))
        return made[-1]

    yield make
    for rig in made:
        assert within_limit(rig.close) is None
    assert not pipeline_threads()


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()


def pipeline_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ds_vertical optimizer"]


def within_limit(call: Callable[[], object]) -> BaseException | None:
    """Run `call` on a thread; fails where it hangs. Returns what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "hangs"
    return raised[0] if raised else None


def zeros(path: Path, num_blocks: int) -> Path:
    path.write_bytes(bytes(num_blocks * BLOCK))
    return path


def blocks(path: Path, first: int, count: int = 1) -> Extent:
    return Extent(path, first * BLOCK, count * BLOCK)


def values(path: Path) -> list[int]:
    """The first byte of every block, all of whose bytes must be equal."""
    content = path.read_bytes()
    found = [content[start : start + BLOCK] for start in range(0, len(content), BLOCK)]
    assert all(len(set(block)) == 1 for block in found)
    return [block[0] for block in found]


def assert_dead(rig: Rig, wait: Callable[[], None], kind: type[BaseException]) -> BaseException:
    """The batch's wait raises, and so does everything after it; returns the error."""
    error = within_limit(wait)
    assert isinstance(error, kind), error
    assert isinstance(within_limit(rig.pipeline.drain), kind)
    computed = len(rig.computed)
    assert isinstance(within_limit(rig.submit(rig.add_one("later"))), kind)
    assert isinstance(within_limit(rig.pipeline.drain), kind)
    assert len(rig.computed) == computed, "a job ran on torn state"
    return error
