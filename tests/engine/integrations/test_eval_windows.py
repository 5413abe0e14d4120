"""Batches taken some at a time: what the user's loop and Accelerate see is as if they came one by one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.state import GradientState, PartialState
from harness import start_process_group

from ds_vertical.engine.integrations.eval_windows import MOST_WAITING_BYTES, EvaluationWindows, Preprocessing, fitting


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_the_end_is_told_with_the_last_batch_alone(size: int) -> None:
    PartialState()
    GradientState._reset_state()  # other tests' loaders may be on it
    rows = list(torch.arange(5))
    state = GradientState()

    def told(loader: object) -> list[tuple[int, bool, int]]:
        return [(int(batch), state.end_of_dataloader, state.remainder) for batch in loader]  # type: ignore[attr-defined]

    plain = told(DataLoaderShard(rows, batch_size=1))
    assert [(batch, ends) for batch, ends, _ in plain] == [(0, False), (1, False), (2, False), (3, False), (4, True)]
    loader = DataLoaderShard(rows, batch_size=1)
    windows = EvaluationWindows(loader, size)
    assert told(windows) == plain
    assert not state.in_dataloader
    assert len(windows) == 5
    assert windows.dataset is rows


def test_each_window_is_there_before_its_first_batch_is_used() -> None:
    windows = EvaluationWindows(["a", "b", "c"], 2)
    assert [(batch, windows.window) for batch in windows] == [("a", ["a", "b"]), ("b", ["b"]), ("c", ["c"])]
    assert windows.window == []


def test_as_many_wait_as_fit() -> None:
    loss, logits = torch.zeros(()), torch.empty(MOST_WAITING_BYTES // 12, device="meta")  # of 4 bytes each: a third of all
    assert fitting([(loss, None, None)], 16) == 16
    assert fitting([(loss, None, None), (loss, logits, None)], 16) == 2
    assert fitting([(loss, (logits,) * 9, None)], 16) == 1


def test_logits_are_preprocessed_once_and_no_other_result_is() -> None:
    start_process_group()
    trainer: Any = SimpleNamespace(preprocess_logits_for_metrics=lambda logits, labels: logits + labels)
    user, preprocessing = trainer.preprocess_logits_for_metrics, Preprocessing(trainer)

    def in_the_loop(result: object) -> Any:
        found: Any = preprocessing.handed_on(result)
        _, logits, labels = found
        return trainer.preprocess_logits_for_metrics(logits, labels)

    assert preprocessing.applied((0, 1, 2)) == (0, 1, 2), "outside an evaluation"
    with preprocessing.at_once():
        waits = preprocessing.applied((0, torch.ones(4), 2))
        assert fitting([waits], MOST_WAITING_BYTES) == MOST_WAITING_BYTES // 16
        with preprocessing.at_once():
            assert in_the_loop(waits).tolist() == [3] * 4
        assert in_the_loop((0, 1, 2)) == 3, "a micro-batch that was run by itself"
        assert preprocessing.applied((0, None, 2)) == (0, None, 2)
        assert preprocessing.applied([0, 1, 2]) == [0, 1, 2]
    assert trainer.preprocess_logits_for_metrics is user
