"""What ranks that bring different numbers of micro-batches are refused, with real processes: by name, and on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rank_groups import Found
from uneven_jobs import run_jobs

LOG = "ds_vertical: elastic: from step 1: micro-batches 4 2\n"


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    folder: Path = tmp_path_factory.mktemp("refused")
    (folder / "counts.log").write_text(LOG)
    logged = {"elastic": {"counts": str(folder / "counts.log")}}
    moved = {"activations": {"device": "ssd", "share": 0.25}}
    runs: list[dict[str, Any]] = [
        {"name": "several calls", "kind": "several calls", "tier": "nvme", "section": moved},
        {"name": "stock calls", "kind": "stock calls", "vertical": False, "tier": "cpu", "section": logged},
        {"name": "stock items", "kind": "stock items", "vertical": False, "tier": "cpu"},
    ]
    return run_jobs(folder, 2, runs)


def test_several_calls_of_the_model_are_refused_on_all_ranks_where_one_has_something_to_move(
    refused: dict[str, Found],
) -> None:
    """Rank 1 brings one micro-batch, which stays on the device."""
    for number, rank in enumerate(refused["several calls"]):
        for kind, text, seconds in rank["told"]:
            assert kind == ("LoopError" if number == 0 else "OtherRankError") and seconds < 5, text
            assert "calls the model 2 times; vertical_schedule.activations moves" in text


def test_a_loop_or_a_trainer_of_the_stock_arm_is_refused_on_all_ranks(refused: dict[str, Found]) -> None:
    for rank in refused["stock calls"]:
        for kind, text, _ in rank["told"]:
            assert kind == "LoopError" and "vertical_schedule.elastic: got counts for each rank" in text
        assert rank["then"][0] == "nothing"


def test_items_that_cannot_be_counted_on_one_rank_end_the_stock_arms_step_on_all(refused: dict[str, Found]) -> None:
    for number, rank in enumerate(refused["stock items"]):
        [(kind, text, seconds)] = rank["told"]
        assert kind == ("RuntimeError" if number == 1 else "OtherRankError") and "no items" in text and seconds < 5
        assert rank["then"][0] == "nothing"


@pytest.fixture(scope="module")
def sized(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_jobs(tmp_path_factory.mktemp("sized"), 2, [{"name": "kept", "kind": "kept", "tier": "cpu"}])["kept"]


@pytest.mark.slow
def test_what_is_kept_is_refused_at_once_where_later_counts_would_not_fit_with_a_bound_that_does(sized: Found) -> None:
    """The same bytes are enough for a run with that bound."""
    for rank in sized:
        told, _, steps = rank["everything 5"]
        assert steps == 0 and len(told) == 2
        for text in told:
            assert "MemoryBudgetError: vertical_schedule.activations.keep: 6 forwards of this step have kept" in text
            assert 'write "vertical_schedule.elastic.max_micro_batches": 4 (now 5) with null, or the log of a run' in text
        told, _, steps = rank["everything 4"]
        assert told == [] and steps == 2


@pytest.mark.slow
def test_what_passes_between_layers_is_measured_and_a_bound_is_told_with_which_it_fits(sized: Found) -> None:
    """The memory table counts none of it."""
    for keep, most in (("none", 5), ("none", 4)):
        for number, rank in enumerate(sized):
            told, log, steps = rank[f"{keep} {most}"]
            assert told == [] and steps == 2
            warned = "a rank may be given 5, and the memory budget (see the start) leaves" in log
            assert warned == (number == 0 and most == 5)
            assert ('write "vertical_schedule.elastic.max_micro_batches": 4 (now 5)' in log) == warned, log
