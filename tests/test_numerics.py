"""The numerics contract beyond the plain run: odd sizes, accumulation dtypes, skipped steps, order and timing."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from harness import (
    MIN_SSD_BYTES,
    Run,
    assert_identical,
    base_config,
    build_engine,
    differing,
    largest_relative,
    read_state,
    read_weights,
    run_arm,
    run_both,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import MixerModel, token_batches
from torch import nn

from ds_vertical.chunks import LANE, Cut, Piece, adam_cuts
from ds_vertical.optimizer import CutAdam

CLIP = 0.05  # far below every gradient norm here, so clipping acts on every step


def small_buffers(config: dict[str, Any], numel: int) -> dict[str, Any]:
    """Lock no more host memory than these small models need: locking would take longer than training."""
    config["zero_optimization"]["offload_param"] |= {"buffer_count": 12, "buffer_size": numel}
    return config


# ---- N1: sizes


def odd_model(dtype: str) -> nn.Module:
    """No tensor of a layer but one has a size that is a multiple of 16; every matrix is over 1 MiB."""
    width, inner = (727, 731) if dtype == "bf16" else (511, 517)
    return MixerModel(3, width, inner)


@pytest.mark.parametrize("sub_group_size", [300_001, 900_001])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_odd_sizes_in_several_stock_sub_groups(tmp_path: Path, dtype: str, sub_group_size: int) -> None:
    config = base_config(tmp_path, dtype=dtype, clip=CLIP, sub_group_size=sub_group_size)
    layout: list[list[int]] = []

    def note_layout(engine: Any, step: int) -> None:
        if not step and type(engine).__name__ == "VerticalEngine":
            unit_of = engine.layers.unit_of()
            groups = engine.optimizer._stock_groups
            layout.extend([[unit_of[id(p)] for p in group], sum(p.ds_numel for p in group)] for group in groups)

    config = small_buffers(config, 540_000)
    stock, vertical = run_both(config, partial(odd_model, dtype), token_batches(3, 2), between=note_layout)
    assert_identical(stock, vertical)
    assert min(stock.norms) > CLIP
    assert vertical.ssd_bytes > 6 * MIN_SSD_BYTES
    assert len(layout) >= 3 and any(numel % LANE for _, numel in layout)
    assert any(len(set(units)) > 1 for units, _ in layout), "no stock sub-group spans layers"


# ---- N1: dtypes of accumulation and communication


@pytest.mark.parametrize(
    ("dtype", "top"),
    [
        ("bf16", {"data_types": {}}),
        ("bf16", {"data_types": {"grad_accum_dtype": "bf16"}, "communication_data_type": "fp32"}),
        ("bf16", {"communication_data_type": "fp32"}),
        ("fp32", {"data_types": {}}),
        ("fp32", {"communication_data_type": "bf16"}),
        ("fp32", {"communication_data_type": "fp16"}),
    ],
    ids=str,
)
def test_accumulation_and_communication_dtypes(tmp_path: Path, dtype: str, top: dict[str, Any]) -> None:
    config = base_config(tmp_path, num_micro_batches=4, dtype=dtype, clip=CLIP, **top)
    build = partial(MixerModel, 2, 728 if dtype == "bf16" else 512)
    stock, vertical = run_both(small_buffers(config, 540_000), build, token_batches(2, 4))
    assert_identical(stock, vertical)
