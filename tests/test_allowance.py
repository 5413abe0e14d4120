"""Layer inputs that rest in host memory, which is the device's here, against what the memory budget leaves."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import base_config, digest, read_weights, running, small_buffers
from models import MixerModel, token_batches

from ds_vertical.memory import MemoryBudgetError

LAYERS, WIDTH, ROWS, TOKENS, M = 3, 128, 2, 11, 4


def train(engine: Any, seed: int) -> torch.Tensor:
    return engine.train_batch(iter(token_batches(1, M, seed, rows=ROWS, shortest=TOKENS)[0]))


def engine_of(folder: Path, **section: Any) -> Any:
    config = base_config(folder, section=section, num_micro_batches=M, dtype="fp32")
    small_buffers(config, 200_000)
    return running(config, partial(MixerModel, LAYERS, width=WIDTH), vertical=True)


CASES = [  # section, micro-batches whose inputs rest at a time, tokens of the first of them
    pytest.param({}, M, TOKENS, id="vertical"),
    pytest.param({"order": "horizontal"}, 1, TOKENS, id="horizontal"),
    pytest.param({"activations": {"device": "ssd", "share": 0.5}}, M // 2, TOKENS + 1, id="half_on_ssd"),
]


@pytest.mark.parametrize(("section", "count", "tokens"), CASES)
def test_what_the_layers_hand_on_must_fit_what_the_budget_leaves(
    tmp_path: Path, section: dict[str, Any], count: int, tokens: int
) -> None:
    each = ROWS * tokens * WIDTH * 4
    needed = count * (LAYERS + 1) * each  # every layer's inputs, and gradients between two
    with engine_of(tmp_path / "one", **section) as (engine, model):
        allowance = engine._sweeps.allowance
        assert allowance._limit > 1 << 20
        train(engine, 1)
        before = read_weights(model)
        allowance._limit = needed - 1
        with pytest.raises(MemoryBudgetError) as caught:
            train(engine, 2)
        told = str(caught.value)
        assert [int(number) for number in re.findall(r"(\d+) bytes", told)] == [each, needed]
        assert f"leaves {needed - 1};" in told and "vertical_schedule.activations" in told
        assert digest(read_weights(model)) == digest(before)
        allowance._limit = needed
        train(engine, 2)
        after = digest(read_weights(model))
    with engine_of(tmp_path / "other", **section) as (engine, model):
        for seed in (1, 2):
            train(engine, seed)
        assert digest(read_weights(model)) == after


def test_the_limit_is_what_host_memory_bytes_leaves(tmp_path: Path) -> None:
    limits = []
    for count in (4, 5):
        with engine_of(tmp_path / str(count), host_memory_bytes=count << 30) as (engine, _):
            limits.append(engine._sweeps.allowance._limit)
    assert limits[1] - limits[0] == pytest.approx(1 << 30, rel=0.2)  # this process has grown meanwhile
