"""fp16 with a loss scale that follows overflows, against stock: skipped steps, scales and every bit of the result.

Where there is no GPU the CPU does the arithmetic, which torch can; DeepSpeed only takes fp16 there for a processor that is
fast at it, so both arms are told that it is.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from harness import assert_identical, base_config, run_arm
from models import MixerModel, token_batches

STEPS = 6
MIXER = partial(MixerModel, 3, 768, dropout=0.1)  # each matrix over 1 MiB
# 2^21 times a gradient is too large for fp16: halved (hysteresis 1) until it fits, doubled after every second good step
SCALE = {"enabled": True, "initial_scale_power": 21, "loss_scale_window": 2, "hysteresis": 1, "min_loss_scale": 1}


@pytest.fixture(autouse=True)
def fp16_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    if not get_accelerator().is_fp16_supported():
        monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda _: True)


def scales_of(arm: list[float]) -> Any:
    return lambda engine, _: arm.append(float(engine.optimizer.cur_scale))


@pytest.mark.parametrize(
    ("clip", "section"),
    [
        (0.0, {}),
        (1.0, {}),
        pytest.param(0.0, {"optimizer_delay": 0.0}, marks=pytest.mark.slow),
        pytest.param(1.0, {"optimizer_speculation": True, "optimizer_delay": 0.5}, marks=pytest.mark.slow),
        pytest.param(0.0, {"optimizer_speculation": False}, marks=pytest.mark.slow),
        (1.0, {"activations": {"device": "ssd", "share": 0.7}}),
    ],
)
def test_overflows_and_all_bits_are_stocks(tmp_path: Path, clip: float, section: dict[str, Any]) -> None:
    batches = token_batches(STEPS, 3, rows=1, shortest=5)
    runs, scales = [], []
    for arm in ("stock", "vertical"):
        config = base_config(tmp_path / arm, dtype="fp16", clip=clip, section=section, fp16=SCALE)
        (tmp_path / arm).mkdir()
        scales.append([])
        runs.append(run_arm(config, MIXER, batches, vertical=arm == "vertical", between=scales_of(scales[-1])))
    stock, vertical = runs
    assert stock.ssd_bytes == vertical.ssd_bytes > 0
    assert scales[0] == scales[1] and len(set(scales[0])) > 2
    assert 0 < stock.counters["skipped_steps"] < STEPS - 1
    assert stock.losses == vertical.losses and stock.counters == vertical.counters
    finite = [index for index, norm in enumerate(stock.norms) if norm > 0 and torch.isfinite(torch.tensor(norm))]
    assert finite and [stock.norms[i] for i in finite] == [vertical.norms[i] for i in finite]
    for run in runs:
        run.grads, run.norms = [run.grads[i] for i in finite], [run.norms[i] for i in finite]
    assert_identical(stock, vertical)
