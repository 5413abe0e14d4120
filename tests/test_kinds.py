"""Small models of every kind in the real engine against real stock: losses, gradients, weights and optimizer state bit for bit.

Everything rests in host memory, which moves no bits; `test_families.py` has families whose layers are on SSD, and
`test_sweep.py` every type that transformers can make small.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_identical, base_config, run_both
from small import VARIANTS, batch, loss_of, small_model
from torch import nn

NUM_STEPS = 2
NUM_MICRO_BATCHES = 2

# kind: model types; what is no plain text model has how `small` makes it: (variant, tokens of an image, video)
KINDS: dict[str, tuple[str, ...]] = {}
HOW: dict[str, tuple[int, int, bool]] = {}
FAST: tuple[str, ...] = ()


def build(model_type: str) -> nn.Module:
    return small_model(model_type, VARIANTS[HOW.get(model_type, (0, 0, False))[0]])[1]


def steps(model_type: str) -> list[list[dict[str, Any]]]:
    model = build(model_type)
    _, tokens, video = HOW.get(model_type, (0, 0, False))
    count = NUM_STEPS * NUM_MICRO_BATCHES
    each = [batch(model, index, tokens, video) for index in range(count)]
    return [each[start : start + NUM_MICRO_BATCHES] for start in range(0, count, NUM_MICRO_BATCHES)]


def own_loss(outputs: Any, _: Any) -> torch.Tensor:
    return loss_of(outputs)


def rows() -> list[Any]:
    return [
        pytest.param(name, id=f"{kind}-{name}", marks=[] if name in FAST else pytest.mark.slow)
        for kind, names in KINDS.items()
        for name in names
    ]


@pytest.mark.parametrize("model_type", rows())
def test_a_small_model_of_this_kind_has_the_bits_of_stock(tmp_path: Path, model_type: str) -> None:
    options: dict[str, Any] = {"dtype": "fp32", "clip": 0.05, "params": "cpu", "optimizer": "cpu", "weight_decay": 0.1}
    config = base_config(tmp_path, num_micro_batches=NUM_MICRO_BATCHES, **options)
    make: Callable[[], nn.Module] = partial(build, model_type)
    assert_identical(*run_both(config, make, steps(model_type), loss_fn=own_loss, under_zero_init=False))
