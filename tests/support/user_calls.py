"""What a user's script does: a model, a JSON, `ds_vertical.initialize`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import (
    base_config,
    small_buffers,
    start_process_group,
)
from models import MixerModel

import ds_vertical

build_model = partial(MixerModel, 3, dropout=0.1)


def ssd_config(folder: Path, num_micro_batches: int = 2, **options: Any) -> dict[str, Any]:
    """Parameters on SSD, optimizer state in host memory, fp32, clipping on every step, fixed seeds."""
    options = {"section": {"seed": 5}} | options
    config = base_config(folder, num_micro_batches=num_micro_batches, dtype="fp32", clip=0.05, optimizer="cpu", **options)
    return small_buffers(config)


def host_config(**section: Any) -> dict[str, Any]:
    """Everything in host memory and no zero.Init needed: the cheapest engine there is."""
    return base_config("unused", dtype="fp32", params="none", optimizer="cpu", section=section)


def initialize(**kwargs: Any) -> Any:
    """The engine of ds_vertical.initialize for a small model of its own."""
    start_process_group()
    torch.manual_seed(0)
    model = MixerModel(2, 64)
    return ds_vertical.initialize(model=model, model_parameters=list(model.parameters()), **kwargs)[0]
