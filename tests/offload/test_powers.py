"""CPU Adam's powers of beta: stock's bits with groups of different betas, and an uninterrupted run's after a resume."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from harness import (
    assert_identical,
    base_config,
    build_engine,
    contents,
    differing,
    dispose,
    run_arm,
    run_both,
)
from models import MixerModel, token_batches
from torch import nn

from ds_vertical.offload.chunking import Cut, Part
from ds_vertical.offload.cpu_adam import AdamSettings, CpuAdam, Powers

NUMEL = 64
A, B = (0.9, 0.999), (0.8, 0.95)
slow = pytest.mark.slow


def new_adam() -> DeepSpeedCPUAdam:
    return DeepSpeedCPUAdam([nn.Parameter(torch.zeros(1))], lr=1e-2, betas=A)


def tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(NUMEL, generator=generator) for _ in range(2)] + [torch.zeros(NUMEL) for _ in range(2)]


# ---- the kernel


@pytest.mark.parametrize("turns", [[A], [B], [A, B], [B, A], [A, B, A], [A, A, B], [(0.9, 0.95), A]], ids=str)
def test_updates_in_any_order_have_the_bits_of_those_in_stocks(turns: Sequence[tuple[float, float]]) -> None:
    """Some updates are taken twice, as early ones that are discarded are, and some steps are left out by a jump."""
    stock, ours = new_adam(), new_adam()
    kernel, powers = CpuAdam(ours.ds_opt_adam, ours.opt_id, A), Powers.made_with(A)
    expected, found = ([tensors(index) for index in range(len(turns))] for _ in range(2))
    shuffled = random.Random(7)
    for step in (*range(1, 16), 30, 31, 32):
        settings = []
        for betas, state in zip(turns, expected, strict=True):
            stock.ds_opt_adam.adam_update(stock.opt_id, step, 1e-2, *betas, 1e-8, 0.0, True, *state)
            powers = powers.after(step, *betas)
            settings.append(AdamSettings(step, 1e-2, *betas, 1e-8, 0.0, True, powers.anchor))
        order = list(range(len(turns))) * 2
        shuffled.shuffle(order)
        before = [[tensor.clone() for tensor in state] for state in found]
        for index in order:
            for tensor, value in zip(found[index], before[index], strict=True):
                tensor.copy_(value)
            kernel.update(settings[index], Part(0, 0, NUMEL), (Cut(0, NUMEL, NUMEL, 0),), found[index])
        for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), f"step {step}, group {index}"


@pytest.mark.parametrize("turns", [[A], [A, B], [B, A], [A, B, A]], ids=str)
@pytest.mark.parametrize("steps_before", [1, 30])
def test_a_new_kernel_goes_on_as_the_old_one_would_have(turns: Sequence[tuple[float, float]], steps_before: int) -> None:
    stock, ours = new_adam(), new_adam()
    states = [tensors(index) for index in range(len(turns))]
    powers = Powers.made_with(A)
    for step in range(1, steps_before + 1):
        for betas, state in zip(turns, states, strict=True):
            stock.ds_opt_adam.adam_update(stock.opt_id, step, 1e-2, *betas, 1e-8, 0.0, True, *state)
            powers = powers.after(step, *betas)
    resumed = [[tensor.clone() for tensor in state] for state in states]
    kernel = CpuAdam(ours.ds_opt_adam, ours.opt_id, A)
    for step in range(steps_before + 1, steps_before + 20):
        for betas, state, again in zip(turns, states, resumed, strict=True):
            stock.ds_opt_adam.adam_update(stock.opt_id, step, 1e-2, *betas, 1e-8, 0.0, True, *state)
            powers = powers.after(step, *betas)
            settings = AdamSettings(step, 1e-2, *betas, 1e-8, 0.0, True, powers.anchor)
            kernel.update(settings, Part(0, 0, NUMEL), (Cut(0, NUMEL, NUMEL, 0),), again)
            assert all(torch.equal(a, b) for a, b in zip(state, again, strict=True)), f"step {step}"


# ---- the engine


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Biases, norms and one matrix per layer have betas, eps, lr and weight decay of their own."""
    own = [p for name, p in model.named_parameters() if "down" in name or p.dim() == 1]
    rest = [p for p in model.parameters() if not any(p is other for other in own)]
    return [{"params": rest}, {"params": own, "betas": B, "eps": 1e-6, "lr": 2e-3, "weight_decay": 0.0}]


@pytest.mark.parametrize(
    ("clip", "delay"), [(0.0, 0.3), *(pytest.param(*c, marks=slow) for c in ((0.05, 1.0), (0.0, 0.0), (0.05, 0.0)))]
)
def test_groups_with_different_betas_have_stocks_bits(tmp_path: Path, clip: float, delay: float) -> None:
    """Stock steps one group after the other, here they take turns layer by layer."""
    section = {"optimizer_delay": delay, "optimizer_speculation": False}
    config = base_config(tmp_path, num_micro_batches=1, dtype="fp32", clip=clip, section=section)
    config["zero_optimization"]["offload_param"] |= {"buffer_count": 12, "buffer_size": 300_000}
    del config["scheduler"]  # it would give all groups one lr
    batches = token_batches(4, 1)
    stock, vertical = run_both(config, partial(MixerModel, 3), batches, groups=two_groups)
    assert_identical(stock, vertical)
    alone = run_arm(config, partial(MixerModel, 3), batches, vertical=True)
    assert differing(alone.weights, vertical.weights), "the groups made no difference"


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("params", ["cpu", pytest.param("none", marks=slow)])
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(tmp_path: Path, params: str, grouped: bool) -> None:
    """Weights, masters and moments. The betas change once before the stop, which the step count does not tell."""
    config = base_config(tmp_path, num_micro_batches=1, dtype="fp32", params=params, optimizer="cpu", section={"seed": 1})
    batches = token_batches(8, 1)
    build, folder = partial(MixerModel, 2, dropout=0.1), str(tmp_path / "checkpoint")
    groups = two_groups if grouped else None

    def train(engine: Any, steps: range) -> None:
        for step in steps:
            if step == 2:
                for group in engine.optimizer.param_groups:
                    group["betas"] = (0.85, group["betas"][1])
            engine.train_batch(iter(batches[step]))

    engine, model = build_engine(config, build, vertical=True, groups=groups)
    train(engine, range(3))
    engine.save_checkpoint(folder)
    train(engine, range(3, 8))
    expected = contents(engine, model)
    dispose(engine)
    engine, model = build_engine(config, build, vertical=True, groups=groups)
    engine.load_checkpoint(folder)
    train(engine, range(3, 8))
    assert differing(expected, contents(engine, model)) == []
    dispose(engine)
