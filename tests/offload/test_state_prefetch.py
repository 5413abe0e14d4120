"""State that is read ahead of its step: once, never old, and in nobody's way."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pipeline_rig
import pytest
from harness import base_config, running, small_buffers
from models import MixerModel, token_batches
from pipeline_rig import BLOCK, LIMIT_S, Rig, assert_dead, blocks, values, within_limit, zeros

from ds_vertical.io.aio import DiskError
from ds_vertical.offload.state_prefetch import PrefetchJob
from ds_vertical.offload.step_pipeline import StepJob

make_rig, rig = pipeline_rig.make_rig, pipeline_rig.rig  # fixtures


def expect(rig: Rig, *jobs: StepJob, begun: int) -> None:
    """Announce jobs; returns when the state of the first `begun` of them is being read, and of no other."""
    rig.pipeline.expect([PrefetchJob(job.what, job.extents) for job in jobs])
    wanted = [job.what for job in jobs[:begun]]

    def wait() -> None:
        while expected(rig) != wanted:
            time.sleep(0.001)

    assert within_limit(wait) is None


def expected(rig: Rig) -> list[str]:
    with rig.pipeline.changes.lock:
        return [entry.coming.what for entry in rig.pipeline.reads.expected.begun()]


@pytest.mark.parametrize("num_slots", [1, 2, 3, 7])
def test_expected_state_is_read_while_nothing_is_submitted_and_once(
    make_rig: Callable[..., Rig], tmp_path: Path, num_slots: int
) -> None:
    rig = make_rig(num_slots)
    file = zeros(tmp_path / "file", 10)
    jobs = [rig.add_one(str(i), blocks(file, 2 * i, 2)) for i in range(5)]
    issued: list[int] = []

    def read(address: int, num_bytes: int, *place: Any, issue: Any = rig.reader.read) -> Any:
        issued.append(num_bytes)
        return issue(address, num_bytes, *place)

    rig.reader.read = read
    expect(rig, *jobs, begun=min(num_slots, 5))
    assert rig.computed == []
    rig.submit(*jobs)
    assert within_limit(rig.pipeline.drain) is None
    assert values(file) == [1] * 10 and rig.computed == list("01234") and expected(rig) == []
    assert issued == [2 * BLOCK] * 5


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_what_was_not_expected_gets_a_slot_and_what_was_left_out_is_forgotten(
    make_rig: Callable[..., Rig], tmp_path: Path, num_slots: int
) -> None:
    rig = make_rig(num_slots)
    file = zeros(tmp_path / "file", 6)
    left_out, *coming = [rig.add_one(str(i), blocks(file, i)) for i in range(4)]
    expect(rig, left_out, *coming, begun=num_slots)
    rig.submit(*(rig.add_one("other", blocks(file, i)) for i in (4, 5)))
    rig.submit(*coming)
    assert within_limit(rig.submit(left_out)) is None
    assert within_limit(rig.pipeline.drain) is None and values(file) == [1] * 6
    assert rig.computed == ["other", "other", "1", "2", "3", "0"]


def test_state_that_another_job_writes_meanwhile_is_read_again(rig: Rig, tmp_path: Path) -> None:
    file = zeros(tmp_path / "file", 4)
    job = rig.add_one("expected", blocks(file, 0, 4))
    expect(rig, job, begun=1)
    rig.submit(rig.add_one("first", blocks(file, 1, 2)))
    rig.submit(job)
    assert within_limit(rig.pipeline.drain) is None and values(file) == [1, 2, 2, 1]


@pytest.mark.parametrize("num_slots", [1, 2, 4])
def test_hints_right_and_wrong_change_no_value(make_rig: Callable[..., Rig], tmp_path: Path, num_slots: int) -> None:
    rig, draw = make_rig(num_slots), random.Random(num_slots)
    file = zeros(tmp_path / "file", 12)
    counts, before = [0] * 12, list[StepJob]()
    for number in range(300):
        first = draw.randrange(12)
        job = rig.add_one(str(number), blocks(file, first, count := draw.randint(1, min(8, 12 - first))))
        hints = draw.choice([[], [job], before[-2:], [job, *before[-1:]]])
        rig.pipeline.expect([PrefetchJob(hint.what, hint.extents) for hint in hints])
        if draw.random() < 0.2:
            time.sleep(0.002)
        rig.submit(job)
        before.append(job)
        counts[first : first + count] = [value + 1 for value in counts[first : first + count]]
    assert within_limit(rig.pipeline.drain) is None
    assert values(file) == [value % 256 for value in counts] and rig.computed == [str(number) for number in range(300)]


def test_an_expected_read_that_fails_is_told_by_its_job_only(rig: Rig, tmp_path: Path) -> None:
    file, missing = zeros(tmp_path / "file", 2), tmp_path / "missing"
    lost, kept = rig.add_one("lost", blocks(missing, 0)), rig.add_one("kept", blocks(file, 0, 2))
    expect(rig, lost, begun=1)
    assert within_limit(rig.submit(kept)) is None and within_limit(rig.pipeline.drain) is None and values(file) == [1, 1]
    expect(rig, lost, begun=1)
    error = assert_dead(rig, rig.submit(lost), DiskError)
    assert isinstance(error, DiskError) and error.filename == str(missing)


@pytest.mark.parametrize("end", ["wait_idle", "close"])
def test_nothing_expected_is_in_flight_when_the_pipeline_is_idle(rig: Rig, tmp_path: Path, end: str) -> None:
    job = rig.add_one("job", blocks(zeros(tmp_path / "file", 4), 0, 4))
    expect(rig, job, begun=1)
    assert within_limit(getattr(rig.pipeline, end)) is None
    assert expected(rig) == [] and (end == "close" or not rig.reader.native.pending())
    rig.pipeline.expect([PrefetchJob("late", job.extents)])
    assert end == "wait_idle" or expected(rig) == []


def test_an_interrupted_wait_loses_no_slot(make_rig: Callable[..., Rig], tmp_path: Path) -> None:
    rig = make_rig(1)
    file = zeros(tmp_path / "file", 2)
    expect(rig, rig.add_one("expected", blocks(file, 0)), begun=1)
    (entry,) = rig.pipeline.reads.expected.begun()
    (transfer,) = entry.reads
    wait = transfer.wait

    def interrupted() -> None:
        transfer.wait = wait
        raise KeyboardInterrupt

    transfer.wait = interrupted
    with pytest.raises(KeyboardInterrupt):
        rig.pipeline.wait_idle()
    assert list(rig.pipeline.reads.expected.begun()) == [entry], "the slot under the read is known as long as it is read into"
    assert within_limit(rig.pipeline.wait_idle) is None and len(rig.pipeline.reads.free) == 1
    assert within_limit(rig.submit(rig.add_one("other", blocks(file, 1)))) is None
    assert within_limit(rig.pipeline.drain) is None and values(file) == [0, 1]


def test_a_thread_that_cannot_be_started_leaves_nothing_behind(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = zeros(tmp_path / "file", 1)
    job = rig.add_one("job", blocks(file, 0))

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        for give in (partial(rig.submit, job), partial(rig.pipeline.expect, [PrefetchJob(job.what, job.extents)])):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                give()
    assert within_limit(rig.pipeline.wait_idle) is None and rig.computed == []
    rig.submit(job)
    assert within_limit(rig.pipeline.drain) is None and values(file) == [1]


@pytest.mark.parametrize(
    ("clip", "delay", "untold"), [(0.0, 0.0, []), (0.0, 0.5, ["pre", 2] * 2 + ["pre"]), (0.5, 1.0, ["pre", 2] * 2 + ["pre"])]
)
def test_the_engine_reads_the_state_of_each_step_before_it_issues_it(
    tmp_path: Path, clip: float, delay: float, untold: list[Any]
) -> None:
    """Untold are the first step behind the norm, and the first of the next schedule."""
    config = small_buffers(base_config(tmp_path, num_micro_batches=2, dtype="fp32", clip=clip))
    config["vertical_schedule"] |= {"optimizer_delay": delay, "optimizer_speculation": False}
    with running(config, partial(MixerModel, 4, 512), vertical=True) as (engine, _):
        driver, pipeline = engine.optimizer.driver, engine.optimizer.pipeline
        first: list[Any] = []

        def is_being_read(unit: Any) -> bool:
            with pipeline.changes.lock:
                return any(entry.coming.what.startswith(f"step {unit},") for entry in pipeline.reads.expected.begun())

        def step(unit: Any, submit: Any) -> Any:
            with pipeline.changes.lock:
                told = any(entry.coming.what.startswith(f"step {unit},") for entry in pipeline.reads.expected.expected())
            end = time.monotonic() + LIMIT_S
            while told and not is_being_read(unit):
                assert time.monotonic() < end, f"the state of {unit} is not being read"
                time.sleep(0.001)
            ticket = submit(unit)
            if ticket is not None and not told:
                first.append(unit)
            return ticket

        for name in ("step_early", "step_unit"):
            setattr(driver, name, partial(step, submit=getattr(driver, name)))
        for batch in token_batches(3, 2):
            engine.train_batch(iter(batch))
        assert first == untold
