"""Batches taken some at a time: what the user's loop and Accelerate see is as if they came one by one."""

from __future__ import annotations

import pytest
import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.state import GradientState, PartialState

from ds_vertical.engine.integrations.eval_windows import MOST_WAITING_BYTES, EvaluationWindows, fitting


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
