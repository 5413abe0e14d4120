"""State of the code around the blocks: its own generators, and what a `loss_fn` keeps from micro-batch to micro-batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import differing, read_weights, running
from stateful import Base, batches, config_in
from torch import nn


class Drawn(Base):
    """Drops elements ahead of its blocks and behind them, each by a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead = torch.Generator().manual_seed(1)
        self.behind = torch.Generator().manual_seed(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        x = x * (torch.rand(x.shape, generator=self.ahead) > 0.3)
        for block in self.blocks:
            x = block(x)
        return self.head(x * (torch.rand(x.shape, generator=self.behind) > 0.3)).square().mean()


class Remembering(nn.Module):
    """A `loss_fn` with a counter, a running mean and a generator. `losses`: what it has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.mean = torch.zeros(1)
        self.own = torch.Generator().manual_seed(3)
        self.losses: list[float] = []

    def forward(self, loss: torch.Tensor, _: Any) -> torch.Tensor:
        self.calls += 1
        self.mean.mul_(0.9).add_(0.1 * loss.detach())
        made = loss * (1 + 0.01 * self.calls + 0.1 * torch.rand(1, generator=self.own).item()) + 0.1 * self.mean.item()
        self.losses.append(made.item())
        return made


def trained(folder: Path, self_check: bool, *, vertical: bool) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Losses and norms of four steps, losses of an evaluation between them, what is left of all state; weights."""
    loss_fn = Remembering()
    found: list[Any] = []
    with running(config_in(folder, section={"self_check": self_check}), Drawn, vertical=vertical) as (engine, model):
        for index, step in enumerate(batches(4)):
            found += [engine.train_batch(iter(step), loss_fn).item(), float(engine.get_global_grad_norm())]
            if index == 1:
                loss_fn.losses.clear()
                engine.eval_batch(iter(step), loss_fn)
                found += loss_fn.losses
        generators = (model.ahead, model.behind, loss_fn.own)
        left = [loss_fn.calls, loss_fn.mean.item(), *(each.get_state().tolist() for each in generators)]
        return found + left, read_weights(model)


@pytest.mark.parametrize("self_check", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_prefix_suffix_and_loss_fn_have_stocks_state(tmp_path: Path, self_check: bool) -> None:
    (stock, weights), (ours, own) = [trained(tmp_path / str(arm), self_check, vertical=arm) for arm in (False, True)]
    assert stock == ours
    assert not differing(weights, own)
