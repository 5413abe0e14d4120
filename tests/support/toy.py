"""A small model and the stores of a step in plain memory: layer-major training without DeepSpeed, and by autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from ds_vertical.distributed.gather_queue import GatherQueue, UnitGather
from ds_vertical.engine.handlers import ScheduleRunner
from ds_vertical.io.ticket import Ticket
from ds_vertical.model.layers import LayerMap, map_layers
from ds_vertical.model.micro_batch import Body
from ds_vertical.model.thread_state import HostState, ThreadState, applied
from ds_vertical.offload.grad_accumulator import GradientStore, ParamFacts
from ds_vertical.offload.state_files import StepShare
from ds_vertical.schedule.events import Event, Op, Schedule, Unit
from ds_vertical.schedule.executor import Handler
from ds_vertical.schedule.levels import Arrival

WIDTH = 8
LR = 0.1
Grads = dict[str, torch.Tensor]


class ToyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.25)
        self.idle = nn.Parameter(torch.ones(3))  # no micro-batch uses it

    def forward(self, hidden: torch.Tensor, side: torch.Tensor) -> torch.Tensor:
        return hidden + self.drop(torch.tanh(self.up(hidden) * side))


class ToyModel(nn.Module):
    """What makes layer-major order hard, in small: dropout, a side tensor that enters every block, glue with weights of
    its own before every block."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.side = nn.Linear(WIDTH, WIDTH)
        self.gains = nn.ParameterList([torch.linspace(0.5, 1.5, WIDTH) for _ in range(num_layers)])
        self.blocks = nn.ModuleList([ToyBlock() for _ in range(num_layers)])
        self.head = nn.Linear(WIDTH, 3)
        self.at: Callable[[str], None] = lambda where: None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.at("prefix")
        side, hidden = torch.sigmoid(self.side(inputs)), self.embed(inputs)
        for index, (gain, block) in enumerate(zip(self.gains, self.blocks, strict=True)):
            self.at(f"glue {index}")
            hidden = block(hidden * gain, side)
        self.at("suffix")
        return self.head(hidden).square().mean()


def toy_model(num_layers: int = 4) -> ToyModel:
    torch.manual_seed(0)
    return ToyModel(num_layers)


def toy_inputs(num_micro_batches: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2 + index, WIDTH, generator=generator) for index in range(num_micro_batches)]


class MemoryParams:
    """A ParamStore without SSD: a unit's weights are there from its ticket's wait to its release, and NaN otherwise."""

    def __init__(self, layers: LayerMap) -> None:
        self.units = layers.units
        self.home = {id(p): p.detach().clone() for params in layers.units.values() for p in params}
        self.fetched: list[Unit] = []
        self.num_ahead = 0
        self.host_bytes = 12345
        self.copies: Any = None
        self.recalls = False
        self.gathers = GatherQueue(in_order=True, early=True)
        for unit in self.units:
            self._forget(unit)

    def fetch(self, unit: Unit, step: Ticket | None = None, arrival: Arrival = Arrival()) -> Ticket:  # noqa: B008 - frozen
        self.fetched.append(unit)
        gather = UnitGather(unit, lambda: self.issue(unit, step), lambda: step is None or step.is_over)
        self.gathers.add(gather)
        return Ticket(f"fetch {unit}", lambda: self.gathers.complete(gather), 4 * sum(p.numel() for p in self.units[unit]))

    def issue(self, unit: Unit, step: Ticket | None) -> Callable[[], None]:
        if step is not None:
            step.wait()
        return lambda: self._arrive(unit)

    def fetch_ahead(self, unit: Unit) -> Ticket:
        self.num_ahead += 1
        return Ticket(f"fetch {unit} ahead", lambda: None)

    def release(self, unit: Unit, comes_back: bool = False) -> None:
        self.fetched.remove(unit)
        self._forget(unit)

    def release_all(self) -> None:
        self.gathers.clear()
        for unit in list(self.fetched):
            self.release(unit)

    def _arrive(self, unit: Unit) -> None:
        for param in self.units[unit]:
            param.data = self.home[id(param)].clone()

    def _forget(self, unit: Unit) -> None:
        for param in self.units[unit]:
            param.data = torch.full_like(param.data, float("nan"))


class MemoryOptimizer:
    """Plain gradient descent on the weights' homes; remembers each step's gradients by parameter.

    A step is taken when its ticket is waited for. `early`: every second parameter of a unit is stepped early.
    """

    def __init__(self, params: MemoryParams, early: bool = False) -> None:
        self.params = params
        self.grads: dict[int, torch.Tensor] = {}
        self.num_norms = self.num_norms_before = 0
        self.due: list[Unit] = []
        self.ahead: dict[Unit, Ticket] = {}
        self._first_delayed = 1 if early else 0
        self._early: dict[int, torch.Tensor] = {}

    def reduce_unit(
        self, unit: Unit, sums: Iterator[torch.Tensor], flat: torch.Tensor | None, give_back: Callable[[torch.Tensor], None]
    ) -> bool:
        params = self.params.units[unit]
        trained = [param for param in params if param.requires_grad]
        self.grads |= {id(p): total.view(p.shape).clone() for p, total in zip(trained, sums, strict=True)}
        return False

    def reducing(self, unit: Unit, leaves: bool = False) -> None:
        """There is one rank."""

    def left(self) -> None:
        """There is one rank."""

    def open_left(self) -> None:
        self.num_norms_before += 1

    def hold_unit(self, unit: Unit) -> None:
        """Nothing waits on SSD."""

    def open_step(self) -> None:
        assert self.due == []
        self.num_norms += 1
        self.due = list(self.params.units)

    def step_early(self, unit: Unit) -> Ticket:
        early = self.params.units[unit][::2]
        return Ticket(f"early step {unit}", lambda: self._early.update({id(p): self._stepped(p) for p in early}))

    def expect_steps(self, units: Sequence[Unit], share: StepShare | None) -> None:
        """There is nothing to be read."""

    def early_writes(self) -> None:
        """Nothing is written."""

    def conclude_early(self) -> None:
        self.params.home |= self._early
        self._early.clear()

    def step_unit(self, unit: Unit) -> Ticket:
        self.due.remove(unit)
        late = self.params.units[unit][self._first_delayed :: 1 + self._first_delayed]
        return Ticket(f"step {unit}", lambda: self.params.home.update({id(p): self._stepped(p) for p in late}))

    def step_ahead(self, unit: Unit) -> Ticket:
        self.ahead[unit] = self.step_unit(unit)
        return self.ahead[unit]

    def stepped_ahead(self, unit: Unit) -> Ticket | None:
        return self.ahead.pop(unit, None)

    def is_left(self, unit: Unit) -> bool:
        return unit in self.due

    def abandon(self) -> None:
        self._early.clear()

    def flush(self) -> None:
        for unit in list(self.ahead):
            self.ahead.pop(unit).wait()
        for unit in list(self.due):
            self.step_unit(unit).wait()

    def _stepped(self, param: nn.Parameter) -> torch.Tensor:
        home = self.params.home[id(param)]
        return home - LR * self.grads[id(param)] if param.requires_grad else home


class ToyTraining:
    """Sweeps over the toy model; `step` gives losses and gradients by name, `weights` the weights' homes."""

    def __init__(self, model: ToyModel, overlap: bool = True, early: bool = False, apart: bool = False) -> None:
        self.model = model
        self.layers = map_layers(model, ["blocks"], apart=apart)
        self.params = MemoryParams(self.layers)
        self.optimizer = MemoryOptimizer(self.params, early)
        self.gradients = GradientStore(
            self.layers.units,
            torch.float32,
            ParamFacts(lambda p: self.params.home[id(p)].numel(), lambda p: p.dtype),
            pairs=True,
        )
        self.sweeps = ScheduleRunner(self.layers, self.params, overlap=overlap)

    def step(self, schedule: Schedule, bodies: Sequence[Callable[[], Any]], seed: int) -> tuple[list[float], Grads]:
        runs = [Body(run, seed + index) for index, run in enumerate(bodies)]
        losses = self.sweeps.train(schedule, runs, self.gradients, self.optimizer, lambda loss: loss / len(runs))
        return [loss.item() for loss in losses], self._named(self.optimizer.grads)

    def weights(self) -> Grads:
        return self._named(self.params.home)

    def _named(self, values: dict[int, torch.Tensor]) -> Grads:
        trained = [(name, param) for name, param in self.model.named_parameters() if param.requires_grad]
        return {name: values[id(param)].clone() for name, param in trained}


def plain_step(model: ToyModel, bodies: Sequence[Callable[[], Any]], seed: int) -> tuple[list[float], Grads]:
    """The same step by plain autograd, one micro-batch after another, on weights that are all there."""
    losses = []
    for index, run in enumerate(bodies):
        with applied(ThreadState.capture().seeded(seed + index)):
            loss = run()
            (loss / len(bodies)).backward()
        losses.append(loss.item())
    grads = {}
    for name, param in model.named_parameters():
        grads[name] = torch.zeros_like(param) if param.grad is None else param.grad
        param.data -= LR * grads[name]
        param.grad = None
    return losses, grads


def facts(state: ThreadState) -> dict[str, Any]:
    """A snapshot's fields in a form that compares with ==."""
    values = {field.name: getattr(state.host, field.name) for field in fields(HostState)}
    values |= {name: getattr(state, name) for name in ("device_rng", "device", "stream")}
    plain = {name: v.numpy().tobytes() if isinstance(v, torch.Tensor) else v for name, v in values.items()}
    return plain | {"autocast": list(map(tuple, plain["autocast"])), "settings": tuple(plain["settings"])}


class Log:
    """Handlers that write down what happens; a FETCH is asynchronous and writes `[EVENT]` when it is waited for."""

    def __init__(self, fail_at: str = "", fail_in_wait: str = "") -> None:
        self.lines: list[str] = []
        self.fail_at = fail_at
        self.fail_in_wait = fail_in_wait

    def handlers(self) -> dict[Op, Handler]:
        ops = (Op.RELEASE, Op.F, Op.HEAD, Op.B, Op.REDUCE, Op.NORM, Op.STEP)
        return {Op.FETCH: self.issue} | dict.fromkeys(ops, self.compute)

    def compute(self, event: Event) -> None:
        if str(event) == self.fail_at:
            raise ArithmeticError(f"no {event}")
        self.lines.append(str(event))

    def issue(self, event: Event) -> Ticket:
        self.compute(event)
        return Ticket(f"fetch {event.layer}", lambda: self.complete(event), num_bytes=1000)

    def complete(self, event: Event) -> None:
        if str(event) == self.fail_in_wait:
            raise OSError(f"{event} broke")
        self.lines.append(f"[{event}]")
