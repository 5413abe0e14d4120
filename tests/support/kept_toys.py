"""Toy steps with what forwards keep, beside plain autograd; parameters are NaN, and in other memory, between their uses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from toy import WIDTH, Grads, MemoryParams, ToyModel, ToyTraining, plain_step, toy_inputs

from ds_vertical.model.kept.kinds import KeptKinds
from ds_vertical.model.kept.probe import Probe
from ds_vertical.model.state.forward_state import ForwardState
from ds_vertical.model.state.restart import until_known
from ds_vertical.schedule.passes import TrainingStep, build_training
from ds_vertical.types import ActivationPolicy, Unit

COUNT = 3  # micro-batches of a step, each of its own length
NUM_STEPS = 2  # calls of one form are recorded and tried in the first step, and kept in the second
Body = Callable[[], torch.Tensor]
Step = tuple[list[float], Grads]


class Block(nn.Module):
    """`down` after dropout is dead work: no gradient reads its result."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.25)

    def inner(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.up(hidden))

    def forward(self, hidden: torch.Tensor, side: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(self.drop(self.inner(hidden)))


def model_of(*kinds: Callable[[], nn.Module]) -> ToyModel:
    """A toy with a block of each kind."""
    torch.manual_seed(0)
    model = ToyModel(len(kinds))
    model.blocks = nn.ModuleList([kind() for kind in kinds])
    return model


class Chained(Block):
    """Three products whose results a gradient reads. An element of the second sums over twice as many as one of the others."""

    def inner(self, hidden: torch.Tensor) -> torch.Tensor:
        narrow = torch.tanh(nn.functional.linear(torch.tanh(self.up(hidden)), self.down.weight))
        return torch.tanh(self.up(narrow))


class Overwritten(MemoryParams):
    """The memory of a layer's parameters is another layer's once it is released: what reads it reads NaN."""

    def _forget(self, unit: Unit) -> None:
        for param in self.units[unit]:
            param.data.fill_(float("nan"))
        super()._forget(unit)


class KeptTraining:
    """Steps of a toy whose forwards keep by a policy. `lines`: for the log; `kinds`: of its calls."""

    def __init__(self, model: ToyModel, policy: ActivationPolicy, outputs: int | None = None) -> None:
        self.lines: list[str] = []
        self.kinds = KeptKinds(policy, self.lines.append, outputs)
        self._training = training = ToyTraining(model)
        params, home = Overwritten(training.layers), training.params.home
        params.home = home
        training.params = training.optimizer.params = training.sweeps.params = params
        training.sweeps.kinds = self.kinds
        training.sweeps.state = self._state = ForwardState(model, training.layers, lambda: 0)

    def probing(self) -> Probe:
        """What measures the steps from now on; nothing is kept in them."""
        sweeps, sweeps.probe, sweeps.kinds = self._training.sweeps, (probe := Probe()), None
        return probe

    def step(self, bodies: list[Body], seed: int) -> Step:
        """Losses and gradients by name."""
        training = self._training
        schedule = build_training(TrainingStep(training.layers.num_layers, len(bodies)))
        before = dict(training.params.home)
        found = until_known(partial(training.step, schedule, bodies, seed), self._state.forget)
        training.optimizer.flush()
        training.params.home.update(before)  # so that no step diverges
        return found


def bodies_of(model: ToyModel, through: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss) -> list[Body]:
    """The micro-batches of a step. `through`: what becomes of each loss."""
    return [lambda each=each: through(model(each)) for each in toy_inputs(COUNT)]


def compare(
    make: Callable[[], ToyModel], policy: ActivationPolicy, num_steps: int = NUM_STEPS, outputs: int | None = None
) -> tuple[KeptTraining, Any]:
    """Compare the bits of some steps, all from the same weights, with those of plain autograd. Returns the training, and both
    models."""
    plain, model = make(), make()
    before = [param.detach().clone() for param in plain.parameters()]
    training = KeptTraining(model, policy, outputs)
    for seed in range(0, 100 * num_steps, 100):
        losses, grads = plain_step(plain, bodies_of(plain), seed)
        for param, value in zip(plain.parameters(), before, strict=True):
            param.data.copy_(value)
        ours, our_grads = training.step(bodies_of(model), seed)
        assert ours == losses
        assert [name for name in grads if not torch.equal(grads[name], our_grads[name])] == []
    own = dict(model.named_buffers())
    assert [name for name, each in plain.named_buffers() if not torch.equal(each, own[name])] == []
    return training, (plain, model)
