"""Where the state lies and when it is stepped, in the kinds that `tests/parity/test_flush.py` compares with stock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness import (
    base_config,
    small_buffers,
)
from models import MixerModel
from torch import nn

NUM_MICRO_BATCHES = 2


# where the vertical arm's state lies, the clipping, and what it leaves to the next forward; in two of them small parameters
# stay on the device (DeepSpeed's threshold)
REGIMES: dict[str, dict[str, Any]] = {
    "all delayed, on SSD": dict(clip=0.05, section={"optimizer_delay": 1.0, "keep_gradients": True}),
    "half early, on SSD": dict(clip=0.0, persistence=None, section={"optimizer_delay": 0.5, "keep_gradients": True}),
    "all delayed, in host memory": dict(
        clip=0.05,
        params="cpu",
        optimizer="cpu",
        persistence=None,
        section={"optimizer_delay": 1.0, "keep_gradients": True},
    ),
    "all early, on SSD": dict(clip=0.0, section={"optimizer_delay": 0.0, "keep_gradients": True}),
    "all delayed, reads late": dict(clip=0.05, section={"optimizer_delay": 1.0, "keep_gradients": True}),
}


DELAYED, EARLY, HOST, ALL_EARLY, LATE = REGIMES


def build_model() -> nn.Module:
    return MixerModel(3)


def config_in(folder: Path, **options: Any) -> dict[str, Any]:
    options = {"dtype": "fp32", "num_micro_batches": NUM_MICRO_BATCHES} | options
    config = base_config(folder, **options)
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    return small_buffers(config) if options.get("params", "nvme") == "nvme" else config
