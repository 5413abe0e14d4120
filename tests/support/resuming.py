"""A small model that trains on given batches, is saved and resumed: what the tests of checkpoints and of failures train."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import (
    base_config,
    running,
    small_buffers,
)
from models import MixerModel, token_batches
from torch import nn

from ds_vertical.engine.checkpoint import manifest

NUM_LAYERS = 2


WIDTH = {"fp32": 512, "bf16": 768}  # square matrices of 1 MiB and more


BATCHES = token_batches(24, 2, rows=1, shortest=5)


CLIP = 0.05  # acts on every step


Tensors = dict[str, torch.Tensor]


def config_in(
    folder: Path, dtype: str = "fp32", clip: float = 0.0, delay: float | None = 0.25, **options: Any
) -> dict[str, Any]:
    section = {"optimizer_delay": delay, "seed": 7} | options.pop("section", {})
    made = base_config(folder, num_micro_batches=2, dtype=dtype, clip=clip, section=section, **options)
    params = made["zero_optimization"].get("offload_param", {}).get("device")
    return small_buffers(made, 700_000) if params == "nvme" else made


def model_of(dtype: str = "fp32", width: int | None = None) -> nn.Module:
    return MixerModel(NUM_LAYERS, width or WIDTH[dtype], dropout=0.1)


def train(engine: Any, steps: range) -> list[float]:
    return [engine.train_batch(iter(BATCHES[step])).item() for step in steps]


@contextlib.contextmanager
def loaded(config: dict[str, Any], folder: Path, dtype: str = "fp32", **options: Any) -> Iterator[tuple[Any, nn.Module]]:
    """A new engine with the checkpoint in it."""
    with running(config, partial(model_of, dtype), vertical=True) as (engine, model):
        torch.manual_seed(999)  # whatever the new process has drawn
        path, _ = engine.load_checkpoint(str(folder), **options)
        assert path is not None
        yield engine, model


def assert_whole(folder: Path, *tags: str) -> None:
    assert sorted(manifest.complete_tags(folder)) == sorted(tags)
    for tag in tags:
        manifest.check_manifest(folder / tag, manifest.read_rank(folder / tag, 0))
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
