"""A model with tied, frozen and non-trained tensors, and the fp32 masters that its checkpoint must give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from harness import base_config, read_state, read_weights, small_buffers
from models import MixerModel, token_batches
from torch import nn

WIDTH = {"fp32": 512, "bf16": 768, "fp16": 768}  # square matrices of 1 MiB and more


FROZEN = ("blocks.0.up.weight", "norm.bias")  # the first on SSD, the second in host memory


Tensors = dict[str, torch.Tensor]


class TiedModel(MixerModel):
    """Head and embedding are one parameter; a matrix on SSD and a small vector are not trained; buffers of three kinds."""

    def __init__(self, dtype: str = "fp32", tied: bool = True) -> None:
        super().__init__(2, WIDTH[dtype], dropout=0.1)
        if tied:
            self.head.weight = self.embed.weight
        for name in FROZEN:
            self.get_parameter(name).requires_grad_(False)
        self.register_buffer("scale", torch.linspace(0.0, 1.0, 5))
        self.register_buffer("order", torch.arange(7))
        self.register_buffer("cache", torch.zeros(3), persistent=False)


def config_in(folder: Path, dtype: str = "fp32", **options: Any) -> dict[str, Any]:
    section = {"optimizer_delay": 0.25, "seed": 7} | options.pop("section", {})
    made = base_config(folder, num_micro_batches=2, dtype=dtype, section=section, **options)
    return small_buffers(made, 700_000) if made["zero_optimization"]["offload_param"]["device"] == "nvme" else made


def train(engine: Any, steps: range) -> list[float]:
    batches = token_batches(12, 2, rows=1, shortest=5)
    return [engine.train_batch(iter(batches[step])).item() for step in steps]


def masters(engine: Any, model: nn.Module) -> Tensors:
    """What the script is to give, in one process: masters, weights that are not trained, buffers, all names."""
    state, expected = read_state(engine, model), dict(model.named_buffers())
    del expected["cache"]
    for name, weight in read_weights(model).items():
        expected[name] = weight if name in FROZEN else state[f"{name}/master"].view_as(weight)
    expected["head.weight"] = expected.get("head.weight", expected["embed.weight"])
    return {name: value.detach().float() if value.is_floating_point() else value for name, value in expected.items()}
