"""Engines in each way of taking a step, to be cut anywhere."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from harness import base_config, build_engine, small_buffers
from models import MixerModel, token_batches
from torch import nn

STEPS = [list(step) for step in token_batches(20, 2)]


BUILD = partial(MixerModel, 2, 512)


SECTION = {"seed": 3}


# overflows in the first steps, then doubled after every second good one
SCALE = {"enabled": True, "initial_scale_power": 21, "loss_scale_window": 2, "hysteresis": 1, "min_loss_scale": 1}


# what decides how a step is taken: when, from where, and what may be thrown away again
KINDS: dict[str, dict[str, Any]] = {
    "early": {"clip": 0.0},
    "delayed": {"clip": 0.05, "section": SECTION | {"optimizer_delay": 1.0}},
    "speculating": {"clip": 0.05},
    "half": {"clip": 0.0, "section": SECTION | {"optimizer_delay": 0.5}},
    "at once": {"clip": 0.05, "section": SECTION | {"optimizer_delay": 0.0, "optimizer_speculation": False}},
    "in place": {"clip": 0.0, "section": SECTION | {"on_nonfinite": "stop"}},
    "activations": {"clip": 0.0, "section": SECTION | {"activations": {"device": "ssd"}}},
    "gradients": {"clip": 0.05, "section": SECTION | {"gradient_host_share": 0.0, "optimizer_speculation": False}},
    "fetched": {"clip": 0.05, "section": SECTION | {"outside_layers": "fetched"}},
    "no overlap": {"clip": 0.0, "section": SECTION | {"overlap": False}},
    "memory": {"clip": 0.05, "params": "cpu", "optimizer": "cpu"},
    "persistent": {"clip": 0.0, "persistence": None},
    "fp16": {"clip": 0.05, "dtype": "fp16", "fp16": SCALE},
}


def make(kind: str, folder: Path) -> tuple[Any, nn.Module]:
    options = {"num_micro_batches": 2, "dtype": "fp32", "section": SECTION} | KINDS[kind]
    config = base_config(folder, **options)
    return build_engine(config if kind == "memory" else small_buffers(config, 600_000), BUILD, vertical=True)


def evaluate(engine: Any) -> None:
    engine.eval_batch(iter(STEPS[0]))
