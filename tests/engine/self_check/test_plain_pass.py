"""What the self-check's own pass in torch's order can run: heads whose backward asks a weight for ZeRO's attributes, compiled
blocks; and what it cannot, which is trained with a warning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import read_weights, running
from stateful import Base, Block, batches, config_in
from torch import nn

from ds_vertical.engine.self_check.diagnosis import SelfCheckError


class AsksItsWeight(torch.autograd.Function):
    """A product whose backward looks at what DeepSpeed says of the weight, as that of TRL's fused head does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        assert weight.ds_status is not None
        return grads[0] @ weight, grads[0].flatten(0, 1).t() @ x.flatten(0, 1)


class FusedHead(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return AsksItsWeight.apply(x, self.head.weight).square().mean()


class FusedBlock(Block):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return x + AsksItsWeight.apply(torch.tanh(self.up(x)), self.down.weight)


class FusedBlocks(Base):
    block = FusedBlock


class TransformedBlock(Block):
    """Torch's transforms take no hooks for what autograd saves."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.func.grad(lambda v: torch.tanh(v).sum())(x.detach()) * self.down(torch.tanh(self.up(x)))


class TransformedBlocks(Base):
    block = TransformedBlock


class RaisingBlock(Block):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return x.no_such_attribute + super().body(x)


class Raising(Base):
    block = RaisingBlock


def compiled() -> nn.Module:
    torch._dynamo.reset()
    model = Base()
    for block in model.blocks:
        block.compile(backend="aot_eager", dynamic=True)
    return model


def checked(folder: Path, wanted: bool | None) -> dict[str, Any]:
    return config_in(folder, section={"self_check": wanted, "seed": 4})


@pytest.mark.parametrize("build", [FusedHead, pytest.param(compiled, marks=pytest.mark.slow)])
def test_what_is_around_layers_and_how_they_are_compiled_is_checked(
    tmp_path: Path, build: Callable[[], nn.Module], capsys: pytest.CaptureFixture[str]
) -> None:
    with running(checked(tmp_path, True), build, vertical=True) as (engine, _):
        engine.train_batch(iter(batches(1)[0]))
    said = capsys.readouterr().out
    assert "they agree" in said and "warning: trained without the check" not in said


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (FusedBlocks, r"AttributeError in the backward of layer 3 \(blocks\.3\), for micro-batch 0: .*ds_status"),
        (TransformedBlocks, r"RuntimeError in the forward of layer 0 \(blocks\.0\), for micro-batch 0: .*hooks"),
    ],
)
def test_what_the_pass_cannot_run_is_trained_with_a_warning_unless_the_check_is_asked_for(
    tmp_path: Path, case: type[Base], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    with running(checked(tmp_path, True), case, vertical=True) as (engine, model):
        before = read_weights(model)
        with pytest.raises(SelfCheckError, match=f"self_check: the check's own pass raises {words}.*nothing has been trained"):
            engine.train_batch(iter(batches(1)[0]))
        after = read_weights(model)
        assert all(torch.equal(before[name], after[name]) for name in before)
    capsys.readouterr()
    with running(checked(tmp_path, None), case, vertical=True) as (engine, _):
        assert engine.train_batch(iter(batches(1)[0])).isfinite()
    assert re.search(f"warning: trained without the check, which cannot follow this model.*{words}", capsys.readouterr().out)


def test_an_error_of_the_model_is_one_in_a_loop_of_micro_steps_too(tmp_path: Path) -> None:
    """Which was a warning there, and failed again in the step, in the model's words."""

    def micro_step(engine: Any, batch: dict[str, torch.Tensor]) -> None:
        engine.backward(engine(**batch))
        engine.step()

    with running(checked(tmp_path, None), Raising, vertical=True) as (engine, _):
        step = batches(1)[0]
        runs = [lambda batch=batch: micro_step(engine, batch) for batch in step]
        with pytest.raises(SelfCheckError, match=r"torch's own order raises AttributeError in the forward of layer 0"):
            engine.train_window(runs, step)
