"""A device with memory of its own that is full: the step fails whole, and what the message says to write trains there.

On the late device, whose memory is limited to a number of bytes. See tests/support/full_device_worker.py.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import forks
import harness
import pytest
import torch
from full_device_worker import NONE, SHORT, SMALL, batches_of, train
from places import SUPPORT

from ds_vertical.engine.keeping.device_full import DeviceFullError


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("full")
    command = [sys.executable, str(SUPPORT / "full_device_worker.py"), str(folder)]
    done = forks.run(folder, command, os.environ | {"OMP_NUM_THREADS": "1"}, timeout=400, engine=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(folder / "found.pt", weights_only=False)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> harness.Run:
    """On the CPU."""
    return train(tmp_path_factory.mktemp("cpu"), NONE, SMALL, batches_of(SMALL, 2))


def test_kept_values_that_fill_the_device_fail_the_step_whole_with_numbers(tmp_path: Path, found: dict[str, Any]) -> None:
    kept = found["kept"]
    assert (kept["kind"], kept["cause"], kept["steps"]) == ("DeviceFullError", "OutOfMemoryError", 1), kept["text"]
    told = re.fullmatch(
        r'vertical_schedule\.activations\.keep: got "everything"; the device is full: it is out of memory\. (\d+) of'
        r" 24 forwards \(one layer of one micro-batch each\) have kept (\d+) bytes on it for their backwards, up to (\d+) each;"
        r" (\d+) bytes"
        r" of it are free between two steps, and without kept values this step takes (\d+) of them;"
        r' in vertical_schedule\.activations write "keep_share": ([\d.]+) \(now 1\) or "keep_device": "host" or "keep": "none";'
        r" nothing of this step counts, and the run is as it was before it, but its micro-batches have been taken from the"
        r" iterator",
        kept["text"],
    )
    assert told is not None, kept["text"]
    cells, held, each, free, taken = (int(group) for group in told.groups()[:5])
    assert 0 < cells < 24 and held <= cells * each and taken < free and 0.1 < float(told[6]) < 0.6
    assert kept["differing"] == [] and found["violations"] == []
    short = train(tmp_path, NONE, SMALL, batches_of(SMALL, 2, SHORT))
    harness.assert_identical(short, kept["run"])  # the failing step came between these


def test_what_the_message_says_to_write_trains_with_the_cpus_bits(found: dict[str, Any], reference: harness.Run) -> None:
    assert len(found["mended"]) == 2
    for run in found["mended"].values():
        harness.assert_identical(reference, run)


@pytest.mark.parametrize("keep", ["none", "everything"])
def test_torchs_own_error_says_what_was_counted_and_what_takes_less(found: dict[str, Any], keep: str) -> None:
    short = found["short"][keep]
    assert short["kind"] == "OutOfMemoryError" and short["differing"] == [] and short["steps"] == 1
    [note] = [each for each in short["notes"] if "the device is full" in each]
    assert re.search(r"has counted \d+ bytes .*parameters \d+.* leaves out .*logits", note)
    for remedy in ("train_micro_batch_size_per_gpu", '"vertical_schedule.prefetch_layers": 0 (now 1)', '.device": "host"'):
        assert remedy in note
    assert ("Without kept values, too" in note) is (keep == "everything")
    assert ('"vertical_schedule.activations.keep": "none"' in note) is (keep == "everything")


def test_what_the_run_chooses_by_itself_stays_within_what_is_free(found: dict[str, Any], reference: harness.Run) -> None:
    kept = found["chosen"]["kept"]
    [(tier, cells)] = kept.cells
    assert (kept.policy, str(tier)) == ("everything", "device") and 0 < cells < 24
    harness.assert_identical(reference, found["chosen"]["run"])


def test_what_a_step_had_no_room_for_leaves_later_engines_their_room(found: dict[str, Any]) -> None:
    assert found["later"]["kept"] == found["chosen"]["kept"]


def test_loops_that_catch_torchs_error_catch_this_one(found: dict[str, Any]) -> None:
    kept = found["kept"]
    assert kept["is_torchs"] and kept["args"] == 1
    memory = pytest.importorskip("accelerate.utils.memory")
    assert memory.should_reduce_batch_size(DeviceFullError(kept["text"]))


def test_state_of_which_nothing_is_known_leaves_the_message_its_numbers(found: dict[str, Any]) -> None:
    first = found["first"]
    assert first["kind"] == "DeviceFullError" and re.search(r"this step takes \d+ of them", first["text"]), first
    assert first["differing"] == []


def test_what_ends_the_run_without_kept_values_is_told(found: dict[str, Any]) -> None:
    refused, worded = found["refuses"], found["words"]
    assert refused["kind"] == "DeviceFullError" and refused["differing"] == worded["differing"] == []
    told = "run once more without kept values, this step has raised KeyError: 'a tap that is closed'; write a"
    assert told in refused["text"], refused["text"]
    assert worded["kind"] == "OutOfMemoryError" and "Without kept values, too, this step does not fit" in str(worded["notes"])


def test_where_a_step_may_not_fit_without_kept_values_the_message_says_what_else_takes_less(found: dict[str, Any]) -> None:
    tight = found["tight"]
    assert tight["kind"] == "DeviceFullError" and tight["differing"] == []
    told = r'it may not fit without kept values either; .* write "keep": "none", and what takes less beside: .*"vertical'
    assert re.search(told, tight["text"]) and "keep_share" not in tight["text"], tight["text"]


def test_a_step_that_has_torn_the_state_keeps_torchs_error_with_its_notes(found: dict[str, Any]) -> None:
    torn = found["torn"]
    assert torn["kind"] == "OutOfMemoryError", torn
    notes = "\n".join(torn["notes"])
    assert "is torn" in notes and re.search(r"the device is full\. \d+ of \d+ forwards .* have kept \d+ bytes on it", notes)


def test_a_device_that_does_not_tell_what_is_free_trains(found: dict[str, Any]) -> None:
    assert len(found["silent"]) == 1
