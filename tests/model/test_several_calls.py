"""Forwards that call the model several times, layer-major against plain autograd, in memory: the same bits, or a refusal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from toy import WIDTH, Grads, MemoryOptimizer, MemoryParams, ToyModel, toy_inputs, toy_model

from ds_vertical.engine.handlers import ScheduleRunner
from ds_vertical.errors import LayerError
from ds_vertical.model.layers import map_layers
from ds_vertical.model.micro_batch import Body
from ds_vertical.model.state.forward_state import ForwardState
from ds_vertical.model.state.restart import CallsMissed, LearnedCalls, until_known
from ds_vertical.model.thread_state import ThreadState, applied
from ds_vertical.offload.grad_accumulator import GradientStore, ParamFacts
from ds_vertical.schedule.passes import TrainingStep, build_evaluation, build_training

Code = Callable[[ToyModel, torch.Tensor], torch.Tensor]


def once(model: ToyModel, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def twice(model: ToyModel, x: torch.Tensor) -> torch.Tensor:
    first = model(x)
    second = model(x.flip(0) * 0.5)
    return first * second + first


def beside_references(model: ToyModel, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        before = model(x)
    loss = model(x.flip(0))
    with torch.no_grad():
        return_behind = model(2 * x)
    with torch.enable_grad():
        return (loss - before).abs() + loss * return_behind


def with_one_unused(model: ToyModel, x: torch.Tensor) -> torch.Tensor:
    model(x)
    return model(x) * model(x.flip(1)) / model(x)


def from_a_common_input(model: ToyModel, x: torch.Tensor) -> torch.Tensor:
    common = model.early.sin() * x  # ahead of both calls
    other = common.flip(0)
    return model(common) + 3 * model(other)


def frozen_meanwhile(model: ToyModel, x: torch.Tensor) -> torch.Tensor:
    """As PEFT has it: the reference is the model with something switched off, whose parameters are frozen meanwhile."""
    loss = model(x)
    block = model.blocks[1]
    assert block.up.weight.requires_grad, "another micro-batch has frozen it"
    with torch.no_grad():
        block.up.weight.requires_grad_(False)
        block.drop.p = 1.0
        reference = model(x)
        assert not block.up.weight.requires_grad
        block.drop.p = 0.25
        block.up.weight.requires_grad_(True)
    return (loss - reference).square()


def made() -> ToyModel:
    """A toy model with a parameter that only code ahead of its calls uses."""
    model = toy_model()
    model.early = torch.nn.Parameter(torch.linspace(0.1, 0.8, WIDTH))
    return model


def run_plain(code: Code, inputs: Sequence[torch.Tensor], weights: Grads | None = None) -> tuple[list[torch.Tensor], Grads]:
    model, losses = made(), []
    model.load_state_dict(weights or {}, strict=False)
    sums: Grads = {}
    for index, x in enumerate(inputs):
        with applied(ThreadState.capture().seeded(index)):
            loss = code(model, x)
            (loss / len(inputs)).backward()
        losses.append(loss.detach())
        for name, param in model.named_parameters():
            if param.grad is not None:
                sums[name] = sums[name] + param.grad if name in sums else param.grad
            param.grad = None
    return losses, sums


class Vertical:
    """Steps of a toy model whose weights are NaN unless fetched."""

    def __init__(self) -> None:
        self.model = made()
        self.layers = map_layers(self.model)
        self.params = MemoryParams(self.layers)
        self.state = ForwardState(self.model, self.layers, lambda: 0)
        self.calls = LearnedCalls()
        self.runner = ScheduleRunner(self.layers, self.params, overlap=True, state=self.state)

    def train(self, codes: Sequence[Code], inputs: Sequence[torch.Tensor], **step: Any) -> tuple[list[torch.Tensor], Grads]:
        optimizer = MemoryOptimizer(self.params)
        facts = ParamFacts(lambda p: self.params.home[id(p)].numel(), lambda p: p.dtype)
        bodies = [Body(partial(code, self.model, x), i) for i, (code, x) in enumerate(zip(codes, inputs, strict=True))]

        def run() -> list[torch.Tensor]:
            schedule = build_training(TrainingStep(4, len(bodies), calls=self.calls.number, **step))
            sums = GradientStore(self.layers.units, torch.float32, facts, pairs=True)
            return self.runner.train(schedule, bodies, sums, optimizer, lambda loss: loss / len(bodies))

        losses = until_known(run, self.state.forget, calls=self.calls)
        names = {id(p): name for name, p in self.model.named_parameters()}
        return losses, {names[key]: grad for key, grad in optimizer.grads.items()}

    def evaluate(self, code: Code, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        bodies = [Body(partial(code, self.model, x), index) for index, x in enumerate(inputs)]

        def run() -> list[torch.Tensor]:
            with torch.no_grad():
                return self.runner.evaluate(build_evaluation(4, len(bodies), calls=self.calls.number), bodies)

        return until_known(run, self.state.forget, calls=self.calls)


@pytest.mark.parametrize(
    ("order", "num"),
    [
        ("vertical", 3),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("vertical", 1), ("snake", 2), ("horizontal", 3)]),
    ],
)
@pytest.mark.parametrize(
    ("code", "number"),
    [(twice, 2), (beside_references, 3), (with_one_unused, 4), (from_a_common_input, 2), (frozen_meanwhile, 2)],
)
def test_losses_and_gradients_are_those_of_autograd(code: Code, number: int, order: str, num: int) -> None:
    inputs = toy_inputs(num)
    vertical = Vertical()
    step = {"order": "vertical", "snake": True} if order == "snake" else {"order": order}
    losses, grads = vertical.train([code] * num, inputs, **step)
    plain_losses, plain_grads = run_plain(code, inputs)
    assert vertical.calls.number == number
    assert [*map(torch.equal, losses, plain_losses)] == [True] * num
    for name, grad in grads.items():
        assert torch.equal(grad, plain_grads.get(name, torch.zeros_like(grad))), name
    assert all(param.requires_grad for param in vertical.model.parameters())


def test_the_number_is_learned_again_where_it_changes() -> None:
    inputs, vertical = toy_inputs(2), Vertical()
    for code, number in ((once, 1), (twice, 2), (twice, 2), (once, 1), (beside_references, 3)):
        weights = {name: vertical.params.home[id(p)].clone() for name, p in vertical.model.named_parameters()}
        losses, _ = vertical.train([code] * 2, inputs)
        assert vertical.calls.number == number
        assert [*map(torch.equal, losses, run_plain(code, inputs, weights)[0])] == [True, True]


def test_an_evaluation_calls_as_often_as_the_code_does() -> None:
    inputs, vertical = toy_inputs(3), Vertical()
    results = vertical.evaluate(twice, inputs)
    assert [*map(torch.equal, results, run_plain(twice, inputs)[0])] == [True] * 3
    assert vertical.calls.number == 2


def chained(model: ToyModel, x: torch.Tensor) -> torch.Tensor:
    return model(x * model(x))


def counting(model: ToyModel, x: torch.Tensor) -> torch.Tensor:
    model.blocks[2].count = getattr(model.blocks[2], "count", 0)

    def count(module: Any, args: Any) -> None:
        module.count += 1

    handle = model.blocks[2].register_forward_pre_hook(count)
    try:
        return model(x) + model(x)
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        ((twice, once), "micro-batch 1 of the step calls the model fewer than 2"),
        ((once, twice), "micro-batch 1 of the step calls the model more than 1"),
        ((chained, chained), "depends, with its gradient, on an earlier call"),
        ((counting, counting), r"blocks.2.count: several calls of the model"),
    ],
)
def test_what_would_be_wrong_is_refused_by_name(codes: Sequence[Code], message: str) -> None:
    vertical = Vertical()
    with pytest.raises(LayerError, match=message) as caught:
        vertical.train(codes, toy_inputs(2))
    assert not isinstance(caught.value, CallsMissed)
    inputs = toy_inputs(2)
    losses, _ = vertical.train([once, once], inputs)  # nothing of it is left
    assert [*map(torch.equal, losses, run_plain(once, inputs)[0])] == [True, True]


def test_a_hook_on_a_layers_parameter_is_refused_where_it_would_get_a_part_of_the_gradient() -> None:
    vertical = Vertical()
    hook = vertical.model.blocks[1].up.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    with pytest.raises(LayerError, match=r"blocks.1.up.weight has a hook .* calls the model several times"):
        vertical.train([twice] * 2, toy_inputs(2))
    hook.remove()
    inputs = toy_inputs(2)
    losses, _ = vertical.train([twice] * 2, inputs)
    assert [*map(torch.equal, losses, run_plain(twice, inputs)[0])] == [True, True]


def test_where_no_number_is_learned_a_further_call_is_refused() -> None:
    def run() -> None:
        raise CallsMissed(2)

    with pytest.raises(
        LayerError, match=r"calls the model 2 time\(s\), .* in a loss_fn or the model's own forward call it once"
    ):
        until_known(run, lambda: None)
