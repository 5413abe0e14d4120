"""What models that keep state between calls are made of, and the micro-batches for them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from harness import base_config, small_buffers
from torch import nn

WIDTH, NUM_LAYERS, M = 48, 4, 3
Model = Any


def config_in(folder: Path, **options: Any) -> dict[str, Any]:
    return small_buffers(base_config(folder, num_micro_batches=M, dtype="fp32", clip=0.5, **options))


def batches(num_steps: int = 3, seed: int = 3) -> list[list[dict[str, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(seed)
    return [[{"x": torch.randn(2, 3 + m, WIDTH, generator=generator)} for m in range(M)] for _ in range(num_steps)]


class Block(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.body(x)


class Base(nn.Module):
    """Embeds, runs its blocks, and takes a loss that depends on how `begin` and `end` of the case under test go."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([type(self).block(index) for index in range(NUM_LAYERS)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        return ()

    def end(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        args = self.begin(x)
        for block in self.blocks:
            x = block(x, *args)
        return self.head(x).square().mean() + self.end(x)


class CountUpBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.counter[0] += 1
        return self.body(x * (1 + 0.01 * self.counter[0]))


class CountUp(Base):
    """All blocks count up one counter: no order but stock's gives it."""

    block = CountUpBlock

    def __init__(self) -> None:
        super().__init__()
        counter = [0]
        for block in self.blocks:
            block.counter = counter


class AsideBlock(Block):
    aside: Any

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.body(x * self.aside.scale)


class InANamespace(Base):
    """Puts a number aside for the blocks of each forward, and counts the forwards beside it."""

    block = AsideBlock

    def __init__(self) -> None:
        super().__init__()
        self.aside = self.made()
        self.aside.scale, self.aside.forwards = 1.0, 0
        for block in self.blocks:
            block.aside = self.aside

    def made(self) -> Any:
        return argparse.Namespace()

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        self.aside.scale = 1 + x.detach().abs().mean().item()
        self.aside.forwards += 1
        return ()
