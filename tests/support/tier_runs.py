"""One small model with its JSON, and stock's runs of it: for tests that put what the optimizer needs into several tiers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harness import Run, base_config, run_arm, small_buffers
from models import MixerModel, token_batches
from torch import nn

NUM_LAYERS = 4
CLIPS = 0.05  # far below every norm here
FREE = 1e6  # far above
WIDTH = {"fp32": 512, "bf16": 768}
NUM_STEPS = 4


def config(folder: Path, dtype: str, clip: float, **section: Any) -> dict[str, Any]:
    made = base_config(folder, num_micro_batches=2, dtype=dtype, clip=clip, section={"seed": 11} | section)
    return small_buffers(made, 600_000)


def mixer(dtype: str, num_layers: int = NUM_LAYERS) -> nn.Module:
    return MixerModel(num_layers, WIDTH[dtype], dropout=0.1)


def stock_runs(folders: pytest.TempPathFactory) -> Callable[[str, float], Run]:
    """What gives stock's run by dtype and clip, each trained once."""
    runs: dict[tuple[str, float], Run] = {}

    def get(dtype: str, clip: float) -> Run:
        if (dtype, clip) not in runs:
            made = config(folders.mktemp("stock"), dtype, clip)
            runs[dtype, clip] = run_arm(made, partial(mixer, dtype), token_batches(NUM_STEPS, 2), vertical=False)
        return runs[dtype, clip]

    return get
