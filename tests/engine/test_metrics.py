"""The step recorder: what it counts, its budget, and that its lines read back as they were written."""

from __future__ import annotations

import json
import math
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ds_vertical.engine.metrics import (
    METRICS_VARIABLE,
    STEPS_VARIABLE,
    StepRecord,
    StepRecorder,
    process_io_bytes,
    read_records,
)


def recorder(folder: Path, rank: int = 0, max_steps: int | None = None) -> StepRecorder:
    return StepRecorder(folder / "metrics", rank, max_steps)


def write_past_the_cache(path: Path, num_bytes: int) -> None:
    """O_DIRECT, as swap files are written: the kernel counts these bytes at once."""
    buffer = mmap.mmap(-1, num_bytes)
    handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
    try:
        assert os.write(handle, buffer) == num_bytes
    finally:
        os.close(handle)
        buffer.close()


def read_past_the_cache(path: Path, num_bytes: int) -> None:
    buffer = mmap.mmap(-1, num_bytes)
    handle = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        assert os.readv(handle, [buffer]) == num_bytes
    finally:
        os.close(handle)
        buffer.close()


def test_step_holds_the_bytes_and_seconds_between_begin_and_end(tmp_path: Path) -> None:
    steps = recorder(tmp_path)
    write_past_the_cache(tmp_path / "before", 1 << 20)
    start = time.perf_counter()
    steps.begin()
    write_past_the_cache(tmp_path / "file", 3 << 20)
    read_past_the_cache(tmp_path / "file", 2 << 20)
    time.sleep(0.05)
    steps.end("DeepSpeedEngine", [1.0, 2.0], tokens=7)
    around_s = time.perf_counter() - start
    (record,) = read_records(tmp_path / "metrics")[0]
    # The records' own line and the file system's journal come on top, by kilobytes.
    assert 3 << 20 <= record.write_bytes < (3 << 20) + (1 << 19)
    assert 2 << 20 <= record.read_bytes < (2 << 20) + (1 << 19)
    assert 0.05 <= record.step_s <= around_s
    assert (record.step, record.engine, record.tokens, record.tied) == (1, "DeepSpeedEngine", 7, None)
    assert (record.loss, record.losses) == (1.5, (1.0, 2.0))


def test_peak_is_the_largest_resident_set_in_bytes() -> None:
    # In a process of its own: this one's peak may be gigabytes, and only more than that would show.
    program = """
from ds_vertical.engine.metrics import peak_host_bytes
before = peak_host_bytes()
block = b"x" * (128 << 20)
held = peak_host_bytes()
del block
print(before, held, peak_host_bytes())
"""
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=200).stdout
    before, held, after = map(int, output.split())
    assert (120 << 20) <= held - before <= (200 << 20)
    assert after >= held - (4 << 20)  # the kernel counts pages per core and sums now and then


def test_io_counters_never_fall() -> None:
    first = process_io_bytes()
    assert all(later >= earlier for earlier, later in zip(first, process_io_bytes(), strict=True))


def test_losses_read_back_bit_for_bit_and_the_line_is_strict_json() -> None:
    losses = (0.1 + 0.2, 1e-300, math.inf, math.nan)
    record = StepRecord(3, "VerticalEngine", 0.5, 10, 1, 2, 3, math.nan, losses, tied=True)

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is no JSON")

    json.loads(record.to_json(), parse_constant=refuse)
    back = StepRecord.from_json(record.to_json())
    assert back.losses[:3] == losses[:3]
    assert math.isnan(back.losses[3]) and math.isnan(back.loss)
    assert back.tied is True


def test_budget_stops_before_the_step_after_the_last(tmp_path: Path) -> None:
    steps = recorder(tmp_path, max_steps=2)
    for _ in range(2):
        steps.check_budget()
        steps.begin()
        steps.end("DeepSpeedEngine", [1.0], tokens=1)
    with pytest.raises(StopIteration):
        steps.check_budget()


def test_no_budget_never_stops(tmp_path: Path) -> None:
    steps = recorder(tmp_path)
    for _ in range(5):
        steps.check_budget()
        steps.begin()
        steps.end("DeepSpeedEngine", [1.0], tokens=1)
    steps.check_budget()
    assert [record.step for record in read_records(tmp_path / "metrics")[0]] == [1, 2, 3, 4, 5]


def test_step_that_failed_is_not_recorded(tmp_path: Path) -> None:
    steps = recorder(tmp_path, max_steps=1)
    steps.begin()  # ... and the step raised
    steps.check_budget()
    steps.begin()
    steps.end("DeepSpeedEngine", [1.0], tokens=1)
    assert len(read_records(tmp_path / "metrics")[0]) == 1


def test_end_without_begin_or_without_losses_is_refused(tmp_path: Path) -> None:
    steps = recorder(tmp_path)
    with pytest.raises(RuntimeError, match="begin"):
        steps.end("DeepSpeedEngine", [1.0], tokens=1)
    steps.begin()
    with pytest.raises(ValueError, match="at least one micro-batch"):
        steps.end("DeepSpeedEngine", [], tokens=1)


def test_environment_chooses_folder_rank_and_budget(tmp_path: Path) -> None:
    environment = {METRICS_VARIABLE: str(tmp_path / "m"), STEPS_VARIABLE: "1"}
    steps = StepRecorder.from_environment(3, environment)
    assert steps is not None
    steps.begin()
    steps.end("DeepSpeedEngine", [1.0], tokens=1)
    assert list(read_records(tmp_path / "m")) == [3]
    with pytest.raises(StopIteration):
        steps.check_budget()
    assert StepRecorder.from_environment(0, {}) is None


@pytest.mark.parametrize("steps", ["0", "-1", "two", "1.5", "\u00b2"])
def test_environment_with_a_senseless_budget_is_refused(tmp_path: Path, steps: str) -> None:
    with pytest.raises(ValueError, match=STEPS_VARIABLE):
        StepRecorder.from_environment(0, {METRICS_VARIABLE: str(tmp_path), STEPS_VARIABLE: steps})


def test_budget_without_a_folder_is_refused() -> None:
    with pytest.raises(ValueError, match=METRICS_VARIABLE):
        StepRecorder.from_environment(0, {STEPS_VARIABLE: "3"})


def test_second_engine_in_one_folder_is_refused_and_the_first_keeps_its_records(tmp_path: Path) -> None:
    first = recorder(tmp_path)
    first.begin()
    first.end("DeepSpeedEngine", [1.0], tokens=1)
    with pytest.raises(FileExistsError, match="fresh folder"):
        recorder(tmp_path)
    assert len(read_records(tmp_path / "metrics")[0]) == 1


def test_reading_names_the_broken_file_and_an_empty_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no step was recorded"):
        read_records(tmp_path)
    (tmp_path / "rank0.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match=r"rank0\.jsonl"):
        read_records(tmp_path)
