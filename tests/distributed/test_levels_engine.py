"""Training over two levels, with real processes: four ranks on one host, of which two each are a node."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import level_worker
import pytest
import torch
from harness import differing, largest_relative
from processes import start_ranks

TOLERANCE = 1e-6  # fp32, relative per tensor: sums in another order
pytestmark = pytest.mark.timeout(1000)  # processes of one core each, which other work may share


def run_jobs(folder: Path, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By rank, {name of the run: what it found}."""
    description = folder / "job.json"
    description.write_text(json.dumps({"folder": str(folder / "swap"), "out": str(folder), "runs": runs}))
    command = [sys.executable, str(Path(level_worker.__file__)), str(description)]
    start_ranks(command, folder, num_ranks=level_worker.NUM_RANKS)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(level_worker.NUM_RANKS)]


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float = TOLERANCE) -> None:
    gaps = largest_relative(a, b)
    assert {name: gap for name, gap in gaps.items() if gap > tolerance} == {}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    runs = [{"name": "flat"}, {"name": "copies", "levels": {}}, {"name": "no copies", "levels": {"copy_share": 0.0}}]
    return run_jobs(tmp_path_factory.mktemp("levels"), runs)


def test_weights_and_gradients_are_those_of_one_level(trained: list[dict[str, Any]]) -> None:
    for rank in trained:
        flat, copies, none = rank["flat"], rank["copies"], rank["no copies"]
        assert flat["losses"][0] == copies["losses"][0], "gathers have the same bits"
        for found in (copies, none):
            assert found["losses"] == pytest.approx(flat["losses"], rel=TOLERANCE)
            assert found["norms"] == pytest.approx(flat["norms"], rel=TOLERANCE)
            assert found["evaluated"] == pytest.approx(flat["evaluated"], rel=TOLERANCE)
            for a, b in zip(flat["grads"], found["grads"], strict=True):
                assert_close(a, b)
            assert_close(flat["weights"], found["weights"])


def test_a_copy_changes_no_bit(trained: list[dict[str, Any]]) -> None:
    for rank in trained:
        copies, none = rank["copies"], rank["no copies"]
        assert (copies["losses"], copies["norms"], copies["evaluated"]) == (none["losses"], none["norms"], none["evaluated"])
        assert not differing(copies["weights"], none["weights"]) and not differing(copies["state"], none["state"])


def test_a_unit_crosses_the_link_once_where_its_copy_is_kept(trained: list[dict[str, Any]]) -> None:
    spreads = {name: trained[0][name]["schedule"].count("0SPREAD") for name in ("flat", "copies", "no copies")}
    assert spreads == {"flat": 0, "copies": 1, "no copies": 2}
