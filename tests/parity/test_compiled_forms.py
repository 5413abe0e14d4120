"""Compiled blocks whose micro-batches have several shapes, and compiled blocks that keep state: the bits of stock with the same
blocks compiled."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import Batches, Run, assert_identical, base_config, largest_relative, run_arm, small_buffers
from models import MixerModel, token_batches
from single_state import (
    NUMBERS,
    Counters,
    KeysInAContext,
    NotedCounters,
    PlainMask,
    PlainStatistics,
    PythonDepth,
    ResetCounter,
    TorchDepth,
)
from stateful import Base, batches
from stateful import config_in as stateful_config
from stateful_models import CodeBooks, FilledStatistics, OwnGenerators, Ranges, SharedUserDict, reset_globals
from torch import nn


def config_in(folder: Path) -> dict[str, Any]:
    return small_buffers(base_config(folder, num_micro_batches=2, dtype="fp32", clip=0.5), 1_100_000)


def compiled(build: Callable[[], Any], **options: Any) -> nn.Module:
    torch._dynamo.reset()
    model = build()
    for block in model.blocks:
        block.compile(**options)
    return model


def both(config: dict[str, Any], build: Callable[[], nn.Module], steps: Batches) -> tuple[Run, Run]:
    runs = []
    for vertical in (False, True):
        reset_globals()
        NUMBERS.clear()
        random.seed(5), np.random.seed(5)
        torch._dynamo.utils.counters.clear()
        runs.append(run_arm(config, build, steps, vertical=vertical))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    return runs[0], runs[1]


# ---- shapes


def one_length_a_step(num_steps: int = 4) -> list[list[dict[str, torch.Tensor]]]:
    """All micro-batches of a step have one length; the second step has another, and later ones return to both."""
    lengths = [5 + 2 * (step % 2) for step in range(num_steps)]
    made = [[token_batches(1, 1, shortest=each, seed=number + m) for m in (0, 100)] for number, each in enumerate(lengths)]
    return [[step[0][0] for step in pair] for pair in made]


MIXER = partial(MixerModel, dropout=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_dynamic_blocks_have_stocks_bits_whatever_the_lengths(tmp_path: Path, backend: str) -> None:
    build = partial(compiled, MIXER, backend=backend, dynamic=True)
    assert_identical(*both(config_in(tmp_path), build, token_batches(3, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_steps_of_one_length_each_have_stocks_bits(tmp_path: Path, backend: str) -> None:
    """Torch makes a static kernel first and a dynamic one at the second length: at the same call in both arms."""
    build = partial(compiled, MIXER, backend=backend)
    assert_identical(*both(config_in(tmp_path), build, one_length_a_step()))


@pytest.mark.slow
def test_several_lengths_a_step_agree_to_rounding(tmp_path: Path) -> None:
    """Which kernel a call gets is a matter of the calls before it, which come in another order."""
    stock, ours = both(config_in(tmp_path), partial(compiled, MIXER, backend="inductor"), token_batches(3, 2))
    assert stock.losses == pytest.approx(ours.losses, rel=1e-5)
    for theirs, own in zip(stock.grads[:1], ours.grads[:1], strict=True):
        assert max(largest_relative(theirs, own).values()) < 1e-5


# ---- state


CASES = [
    *(Counters, NotedCounters, ResetCounter, Ranges, OwnGenerators, PythonDepth, TorchDepth, CodeBooks),
    *(FilledStatistics, PlainMask, PlainStatistics, KeysInAContext, SharedUserDict),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_compiled_blocks_that_keep_state_have_stocks_bits(tmp_path: Path, case: type[Base]) -> None:
    """Micro-batches of three lengths, two steps: what a compiled block writes into modules and objects is its micro-batch's."""
    assert_identical(*both(stateful_config(tmp_path), partial(compiled, case, backend="aot_eager"), batches(2)))
