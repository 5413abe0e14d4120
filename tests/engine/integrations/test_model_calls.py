"""Micro-steps that call the model several times: each call is a forward through the schedule, with stock's bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed import DeepSpeedEngine
from harness import base_config, differing, read_weights, running, small_buffers
from models import tiny_neox, token_batches
from torch.nn.functional import cosine_similarity
from trainer_runs import HOST, Seen, arguments_for, assert_same, both, recorder, run_arm, tiny_llama, token_rows

from ds_vertical.engine.integrations.engine_calls import CallableEngine
from ds_vertical.engine.train_loop import seeded
from ds_vertical.errors import LayerError
from ds_vertical.model.batch import stream_seed

NUM = 3
build = partial(tiny_neox, num_layers=2, hidden=128)


def window(engine: Any, loss_of: Callable[[Any, Any], torch.Tensor], batches: list[Any]) -> list[float]:
    """A step over the batches in either arm; the losses."""

    def micro_step(batch: Any) -> float:
        loss = loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        return loss.item()

    if isinstance(engine, CallableEngine):
        return engine.train_window([partial(micro_step, batch) for batch in batches], batches)
    return [micro_step(batch) for batch in batches]


def contrastive(engine: Any, batch: Any) -> torch.Tensor:
    """Two calls with gradients, whose results meet in one loss, one of them used twice."""
    first = engine(**batch)
    second = engine(input_ids=batch["input_ids"].flip(1), labels=batch["labels"])
    near = cosine_similarity(first.logits.float().mean(1), second.logits.float().mean(1)).mean()
    return first.loss + 0.5 * second.loss - near * first.loss


def plain(engine: Any, batch: Any) -> torch.Tensor:
    return engine(**batch).loss


def three_times(engine: Any, batch: Any) -> torch.Tensor:
    """Three calls, the first one without gradients and past the engine, the last one without any use."""
    with torch.no_grad():
        reference = engine.module(**batch).logits
    outputs = engine(**batch)
    with torch.no_grad():
        engine(**batch)
    return outputs.loss + (outputs.logits - reference.roll(1, 0)).float().square().mean()


def losses_of(folder: Path, steps: list[list[Any]], kinds: list[Any], *, vertical: bool, **options: Any) -> tuple[Any, ...]:
    options = options if vertical else {k: v for k, v in options.items() if k != "section"} | HOST
    config = small_buffers(base_config(folder, num_micro_batches=len(steps[0]), **options))
    with running(config, build, vertical=vertical) as (engine, model):
        seen = []
        for batches, kind in zip(steps, kinds, strict=True):
            seen.append((window(engine, kind, batches), engine.get_global_grad_norm()))
        return seen, engine.global_steps, read_weights(model)


@pytest.mark.parametrize(
    ("order", "dtype", "num"),
    [
        ("vertical", "bf16", NUM),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("vertical", "fp32", NUM), ("vertical", "bf16", 1)]),
        pytest.param("horizontal", "bf16", NUM, marks=pytest.mark.slow),
    ],
)
def test_losses_norms_and_weights_are_stocks(tmp_path: Path, order: str, dtype: str, num: int) -> None:
    kinds = [contrastive, plain, three_times, contrastive]
    steps = token_batches(len(kinds), num, rows=2)
    section = {"order": order, "self_check": True}
    stock, ours = (
        losses_of(tmp_path / str(v), steps, kinds, vertical=v, dtype=dtype, clip=0.5, section=section) for v in (False, True)
    )
    assert stock[:2] == ours[:2]
    assert all(norm > 0.5 for _, norm in stock[0]), "clipping must act"
    assert not differing(stock[2], ours[2])
