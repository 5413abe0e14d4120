"""Lightning's strategy for DeepSpeed, which is refused by name: its loop is none that a bridge follows."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Final

from ds_vertical.config.section import SECTION
from ds_vertical.errors import ConfigError

_STRATEGIES: Final = tuple(
    f"{package}.strategies.deepspeed"
    for package in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")
)


def refuse_lightning() -> None:
    """Raises ConfigError where a DeepSpeedStrategy of Lightning's, or of Fabric's, is what has called, however far above."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") in _STRATEGIES:
            raise ConfigError(
                f"{SECTION}: Lightning's DeepSpeedStrategy drives this engine; it asks for a DeepSpeed below 0.17, and"
                " layer-major order does not follow its loop; train with Hugging Face's Trainer, Accelerate or DeepSpeed's"
                f" three calls (docs/scripts.md), or set {SECTION}.enabled to false"
            )
        frame = frame.f_back
