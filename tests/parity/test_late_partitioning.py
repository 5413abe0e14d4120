"""A model that was not built under zero.Init."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from harness import assert_identical, base_config, run_arm, start_process_group
from models import tiny_neox, token_batches

import ds_vertical


def test_fp32_without_zero_init_is_refused_where_stock_would_round_to_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a processor that counts as bad at fp16, as most do for DeepSpeed."""
    start_process_group()
    if get_accelerator().is_fp16_supported():
        monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda _: False)
    model = tiny_neox(num_layers=2)
    with pytest.raises(ds_vertical.ConfigError, match="zero.Init"):
        ds_vertical.initialize(model=model, model_parameters=model.parameters(), config=base_config(tmp_path, dtype="fp32"))
    assert list(tmp_path.iterdir()) == []
    assert all(param.dtype == torch.float32 and param.numel() for param in model.parameters())


def test_bf16_without_zero_init_equals_stock(tmp_path: Path) -> None:
    config, batches = base_config(tmp_path), token_batches(2, 2, rows=1, shortest=4)
    build = lambda: tiny_neox(num_layers=2)  # noqa: E731
    stock = run_arm(config, build, batches, vertical=False, under_zero_init=False)
    vertical = run_arm(config, build, batches, vertical=True, under_zero_init=False)
    assert_identical(stock, vertical)
    assert vertical.ssd_bytes > 6 << 20
