"""A model whose gradients can be made non-finite, in its first or its last layer, and batches that do so."""

from __future__ import annotations

from typing import Any

import torch
from harness import Batches
from torch import nn


class Spoil(torch.autograd.Function):
    """Identity whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] * ctx.factor, None


class SpoilableBlock(nn.Linear):
    """A residual layer; its weight's gradient, and nothing else, is multiplied by `factor`."""

    def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x + torch.tanh(nn.functional.linear(x, Spoil.apply(self.weight, factor), self.bias))


class SpoilableModel(nn.Module):
    """`spoil` (where, factor): multiplies the weight gradient of the first or the last layer, or the loss itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(SpoilableBlock(width, width) for _ in range(3))
        self.head = nn.Linear(width, 16)

    def forward(self, input_ids: torch.Tensor, spoil: tuple[str, float]) -> torch.Tensor:
        where, factor = spoil
        x = self.embed(input_ids)
        for index, block in enumerate(self.blocks):
            x = block(x, factor if where == {0: "first", 2: "last"}.get(index) else 1.0)
        loss = nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), input_ids.flatten())
        return loss * factor if where == "loss" else loss


GOOD = ("nowhere", 1.0)
NAN, INF = float("nan"), float("inf")
# one step each; only the second of two micro-batches is spoilt
FIRST = (("first", INF), GOOD, ("first", NAN))
LAST = (("last", INF), GOOD, ("last", NAN))
SPOILT = (*FIRST, *LAST, ("loss", INF), ("loss", NAN), GOOD, GOOD)


def spoilt_batches() -> Batches:
    generator = torch.Generator().manual_seed(3)
    ids = [[torch.randint(0, 16, (1, 3 + m), generator=generator) for m in range(2)] for _ in SPOILT]
    return [
        [{"input_ids": pair[0], "spoil": GOOD}, {"input_ids": pair[1], "spoil": spoil}]
        for pair, spoil in zip(ids, SPOILT, strict=True)
    ]
