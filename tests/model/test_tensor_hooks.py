"""Hooks that a model's code puts on tensors, layer-major against plain autograd, in memory: each gets the whole sum, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from toy import ToyModel, ToyTraining, plain_step, toy_inputs, toy_model

from ds_vertical.errors import LayerError
from ds_vertical.schedule.passes import TrainingStep, build_training

Hook = Callable[[torch.Tensor], Any]
M = 3


class Hooked(ToyModel):
    """Puts hooks on what each block gets, on a block's output that comes back at the end, and on the head's input."""

    hook: Hook
    hooks_parameters = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        side, hidden = torch.sigmoid(self.side(inputs)), self.embed(inputs)
        side.register_hook(self.hook)
        hidden.register_hook(self.hook)
        first = None
        for gain, block in zip(self.gains, self.blocks, strict=True):
            hidden = block(hidden * gain, side)
            if first is None:
                first = hidden
                first.register_hook(self.hook)
        last = hidden + 0.5 * first
        last.register_hook(self.hook)
        return self.head(last).square().mean()


class MadeOfOneAnother(Hooked):
    """One early tensor in all glue, and residuals around the blocks. Hooks there, and on what leads from one to the other."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        side, hidden = torch.sigmoid(self.side(inputs)), self.embed(inputs)
        early = hidden
        early.register_hook(self.hook)
        for gain, block in zip(self.gains, self.blocks, strict=True):
            hidden = hidden + torch.tanh(block(hidden * gain, side)) + 0.1 * early
            hidden.register_hook(self.hook)
        return self.head(hidden).square().mean()


def train(
    kind: type[Any], hook: Hook, order: str, vertical: bool, apart: bool = False
) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = toy_model()
    model.__class__ = kind
    model.hook = hook
    for param in (model.gains[0], model.gains[0], model.side.weight, model.head.bias) if kind.hooks_parameters else ():
        param.register_hook(hook)
    inputs = toy_inputs(M)
    bodies = [lambda x=x: model(x) for x in inputs]
    if vertical:
        training = ToyTraining(model, apart=apart)
        return training.step(build_training(TrainingStep(4, M, order=order, outside=training.layers.outside)), bodies, 5)
    return plain_step(model, bodies, 5)


def doubled(grad: torch.Tensor) -> torch.Tensor:
    return grad * 2


def clipped(grad: torch.Tensor) -> torch.Tensor:
    return grad.clamp(-1e-3, 1e-3)


class WithParameters(ToyModel):
    """Uses a parameter of its own ahead of each block and behind the last; it has hooks, as weights of either end have."""

    hooks_parameters = True
    shares = True

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        gain = self.gains[0]
        side, hidden = torch.sigmoid(self.side(inputs)), self.embed(inputs)
        for block in self.blocks:
            hidden = block(hidden * gain if self.shares else hidden, side)
        return self.head(hidden * gain if self.shares else hidden).square().mean()


class OfEitherEnd(WithParameters):
    """Uses no parameter between its blocks."""

    shares = False


@pytest.mark.parametrize("apart", [False, True])
def test_what_a_hook_makes_of_a_parameters_gradient_is_torchs_but_for_rounding(apart: bool) -> None:
    """Its parts are added in another order than torch's."""
    for hook in (clipped, doubled):
        (losses, plain), (own_losses, own) = (
            train(OfEitherEnd if apart else WithParameters, hook, "vertical", vertical, apart) for vertical in (False, True)
        )
        assert losses == own_losses
        for name, grad in plain.items():
            assert torch.allclose(own[name], grad, rtol=1e-5, atol=1e-8), name


def unchanged(grad: torch.Tensor) -> None:
    """Gradients of tensors made of one another have torch's bits, with hooks or without."""


@pytest.mark.parametrize("kind", [Hooked, MadeOfOneAnother])
@pytest.mark.parametrize("order", ["vertical", "horizontal"])
@pytest.mark.parametrize("hook", [doubled, clipped, unchanged])
def test_what_a_hook_makes_of_a_gradient_is_torchs(hook: Hook, order: str, kind: type[Any]) -> None:
    """A hook that is called for parts of a sum doubles some of them twice, and clips what is small."""
    (losses, plain), (own_losses, own) = (train(kind, hook, order, vertical) for vertical in (False, True))
    assert losses == own_losses
    assert [name for name in plain if not torch.equal(plain[name], own[name])] == []


@pytest.mark.parametrize(("kind", "calls"), [(Hooked, 4), (MadeOfOneAnother, 5)])
def test_a_hook_is_called_once_with_the_whole_sum(kind: type[Any], calls: int) -> None:
    seen: dict[bool, list[float]] = {False: [], True: []}
    for vertical, norms in seen.items():
        train(kind, lambda grad, norms=norms: norms.append(grad.norm().item()), "horizontal", vertical)
    assert seen[True] == seen[False] and len(seen[True]) == calls * M


class Counted(torch.autograd.Function):
    """An identity that is told of each gradient it gets."""

    heard: list[float]

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        Counted.heard.append(grad.norm().item())
        return grad


class WithPythonBetween(Hooked):
    """A backward of the user's own stands between an early tensor and one made of it, and both are in all glue."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        side, early = torch.sigmoid(self.side(inputs)), self.embed(inputs)
        made = torch.tanh(Counted.apply(early))
        hidden = early
        for gain, block in zip(self.gains, self.blocks, strict=True):
            hidden = block(hidden * gain, side) * made + 0.1 * early
        return self.head(hidden).square().mean()


def test_a_backward_in_python_between_tensors_of_all_glue_gets_the_whole_sum_once() -> None:
    """And zeros while gradients stop ahead of it."""
    heard: list[list[float]] = []
    found = []
    for vertical in (False, True):
        Counted.heard = []
        found.append(train(WithPythonBetween, doubled, "vertical", vertical))
        heard.append(sorted(norm for norm in Counted.heard if norm))
    (losses, plain), (own_losses, own) = found
    assert losses == own_losses and heard[0] == heard[1] and len(heard[0]) == M
    assert [name for name in plain if not torch.equal(plain[name], own[name])] == []


def test_hooks_that_are_put_on_outside_a_pass_are_torchs_own() -> None:
    register = torch.Tensor.register_hook
    train(Hooked, doubled, "vertical", True)

    def fails(grad: torch.Tensor) -> None:
        raise LayerError("no")

    with pytest.raises(LayerError):
        train(MadeOfOneAnother, fails, "vertical", True)
    assert torch.Tensor.register_hook is register
