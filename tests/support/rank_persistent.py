"""What one rank of two sees of parameters that stay on the device (DeepSpeed's threshold), read as users read them: without
DeepSpeed, and on one rank alone. Part of tests/support/rank_worker.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import harness
import torch
from torch import nn

KEPT = "scale.weight"  # of the model, the only one below the threshold
Steps = list[list[dict[str, torch.Tensor]]]
Seen = list[torch.Tensor | None]


def _config(made: dict[str, Any]) -> dict[str, Any]:
    zero = {k: v for k, v in made["zero_optimization"].items() if k != "stage3_param_persistence_threshold"}
    return made | {"zero_optimization": zero}


def _read(model: nn.Module, rank: int) -> torch.Tensor | None:
    return model.get_parameter(KEPT).detach().clone() if rank == 0 else None


def trained(made: dict[str, Any], build: Callable[[], nn.Module], steps: Steps, rank: int) -> dict[str, Any]:
    """The value after every step on rank 0, and weights and state in the end, of both arms."""
    results = {}
    for vertical in (False, True):
        seen: Seen = []
        with harness.running(_config(made), build, vertical=vertical) as (engine, model):
            for step in steps:
                engine.train_batch(iter(step))
                seen.append(_read(model, rank))
            on_ssd = harness.bytes_on_ssd(model)
            ends = {"weights": harness.read_weights(model), "state": harness.read_state(engine, model)}
        results["vertical" if vertical else "stock"] = ends | {"seen": seen, "ssd_bytes": on_ssd}
    return results


def failing(
    made: dict[str, Any], build: Callable[[], nn.Module], steps: Steps, rank: int, poison: Callable[..., Any], saved: Path
) -> dict[str, Any]:
    """After a good step one that is not finite, by `poison` (a `loss_fn`); one in which rank 1 fails as it steps what stays on
    the device; one more, and a save. What this rank is told by these, and the value before and after each."""
    made = _config(made)
    made["vertical_schedule"]["on_nonfinite"] = "stop"
    told = []
    with harness.running(made, build, vertical=True) as (engine, model):
        engine.train_batch(iter(steps[0]))
        seen: Seen = [_read(model, rank)]
        for call in (
            lambda: engine.train_batch(iter(steps[1]), poison),
            lambda: engine.train_batch(iter(steps[1])),
            lambda: engine.train_batch(iter(steps[2])),
            lambda: engine.save_checkpoint(str(saved)),
        ):
            fails = rank == 1 and len(told) == 1
            broken = mock.patch.object(engine.optimizer, "step_persistent", side_effect=OSError("no luck here"))
            with broken if fails else contextlib.nullcontext():
                try:
                    call()
                    told.append("nothing")
                except (ArithmeticError, OSError, RuntimeError) as error:
                    told.append(f"{type(error).__name__}: {error}")
            seen.append(_read(model, rank))
    return {"told": told, "seen": seen}
