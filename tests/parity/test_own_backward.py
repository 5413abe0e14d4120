"""A second backward (in loss_fn, in the model's forward, by a checkpoint round a block) is refused by name, with the self-check
and without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import read_weights, running
from stateful import Base, batches, config_in
from torch.utils.checkpoint import checkpoint

from ds_vertical.errors import LayerError

SETTINGS = pytest.mark.parametrize("self_check", [None, True, False], ids=["null", "true", "false"])
BY_NAME = r"loss_fn, or the model's forward, has called backward\(\) itself.*call no backward"

Loss = Callable[[torch.Tensor, Any], torch.Tensor]


class ReentrantCheckpoints(Base):
    reentrant = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x).square().mean()


class Checkpoints(ReentrantCheckpoints):
    reentrant = False


class BackwardBehindABlock(Base):
    """Calls backward() of a loss between the blocks, whose graph ends in the blocks ahead."""

    retained = True
    at = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for number, block in enumerate(self.blocks):
            if number == self.at:
                x.square().mean().backward(retain_graph=self.retained)
            x = block(x)
        return self.head(x).square().mean()


class FreeingBehindABlock(BackwardBehindABlock):
    retained = False


class BackwardAheadOfTheBlocks(BackwardBehindABlock):
    at = 0


class FreeingAheadOfTheBlocks(FreeingBehindABlock):
    at = 0


def own_backward(retained: bool) -> Callable[[Any], Loss]:
    def of(model: Any) -> Loss:
        def loss_fn(loss: torch.Tensor, _: Any) -> torch.Tensor:
            loss.backward(retain_graph=retained)
            return loss

        return loss_fn

    return of


def of_the_head(model: Any) -> Loss:
    def loss_fn(loss: torch.Tensor, _: Any) -> torch.Tensor:
        model.head.weight.square().sum().backward()
        return loss

    return loss_fn


def assert_refused(folder: Path, build: type[Base], self_check: bool | None, loss_of: Any, words: str) -> None:
    """By a LayerError of these words, which does not say that the model trains without the check; nothing is left behind."""
    with running(config_in(folder, section={"self_check": self_check}), build, vertical=True) as (engine, model):
        before = read_weights(model)
        for _ in range(2):
            with pytest.raises(LayerError, match=words) as caught:
                engine.train_batch(iter(batches(1)[0]), None if loss_of is None else loss_of(model))
            told = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
            assert "trains without this check" not in told
            assert all(param.grad is None for param in model.parameters())
        assert engine.global_steps == 0 and not any(not torch.equal(before[n], w) for n, w in read_weights(model).items())


@SETTINGS
@pytest.mark.parametrize("loss_of", [own_backward(True), own_backward(False), of_the_head], ids=["kept", "freed", "head"])
def test_a_backward_of_loss_fn_is_refused_by_name(tmp_path: Path, loss_of: Any, self_check: bool | None) -> None:
    assert_refused(tmp_path, Base, self_check, loss_of, BY_NAME)


@SETTINGS
@pytest.mark.parametrize(
    "case",
    [BackwardBehindABlock, FreeingBehindABlock, BackwardAheadOfTheBlocks, FreeingAheadOfTheBlocks],
    ids=lambda case: case.__name__,
)
def test_a_backward_of_the_models_forward_is_refused_by_name(tmp_path: Path, case: type[Base], self_check: bool | None) -> None:
    assert_refused(tmp_path, case, self_check, None, BY_NAME)


@SETTINGS
@pytest.mark.parametrize("case", [Checkpoints, ReentrantCheckpoints], ids=lambda case: case.__name__)
def test_checkpoints_round_blocks_are_refused_by_name(tmp_path: Path, case: type[Base], self_check: bool | None) -> None:
    words = r"block blocks\.0 is called within torch\.utils\.checkpoint.*call it directly"
    assert_refused(tmp_path, case, self_check, None, words)
