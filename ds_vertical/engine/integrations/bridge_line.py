"""Says once which loop brings an engine its steps: the engine's start-up line comes before the first call of any."""

from __future__ import annotations

import weakref

from ds_vertical.compat import accelerator
from ds_vertical.compat.engine import DeepSpeedEngine

_told: weakref.WeakSet[DeepSpeedEngine] = weakref.WeakSet()


def tell_bridge(engine: DeepSpeedEngine, bridge: str, num_layers: int, num_micro_batches: int) -> None:
    """Log one line at an engine's first step. `bridge`: whose loop it is, as in the line."""
    if engine in _told:
        return
    _told.add(engine)
    accelerator.log(
        f"ds_vertical: vertical schedule ACTIVE: bridge {bridge}, {num_layers} layers, M = {num_micro_batches} micro-batches"
        " a step"
    )
