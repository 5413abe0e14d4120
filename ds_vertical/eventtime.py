"""Seconds that the schedule's own code takes for an event of computation, beside what the model computes.

Where host and device are one memory the thread that walks the schedule computes as well, so they are part of every step. They
are measured on a model that computes next to nothing, with stores that move nothing: a step by the schedule against the same
forwards and backwards by plain autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_vertical.disktime import median_s
from ds_vertical.gradients import GradientStore
from ds_vertical.layers import Unit, map_layers
from ds_vertical.passes import build_training
from ds_vertical.schedule import Op
from ds_vertical.sweeps import Body, Sweeps
from ds_vertical.transfer import Ticket

_LAYERS = _MICRO_BATCHES = 8
_COMPUTE = (Op.F, Op.HEAD, Op.B)
_STEPS = 5  # timed together


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.gain


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = _Block()
        self.blocks = nn.ModuleList(_Block() for _ in range(_LAYERS))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.sum()


class _Memory:
    """Parameters that are where they are, and an optimizer that steps none."""

    host_bytes = 0

    def fetch(self, unit: Unit) -> Ticket:
        return Ticket(f"fetch {unit}", lambda: None)

    def fetch_ahead(self, unit: Unit) -> Ticket | None:
        return None

    def release(self, unit: Unit) -> None: ...

    def release_all(self) -> None: ...

    def reduce_unit(
        self, unit: Unit, sums: Sequence[torch.Tensor], flat: torch.Tensor, give_back: Callable[[torch.Tensor], None]
    ) -> bool:
        return False

    def hold_unit(self, unit: Unit) -> Ticket | None: ...

    def open_step(self) -> None: ...

    def step_early(self, unit: Unit) -> Ticket | None: ...

    def expect_step(self, unit: Unit, early: bool) -> None: ...

    def early_writes(self) -> Ticket | None: ...

    def conclude_early(self) -> None: ...

    def step_unit(self, unit: Unit) -> Ticket | None: ...

    def step_ahead(self, unit: Unit) -> Ticket | None: ...

    def stepped_ahead(self, unit: Unit) -> Ticket | None: ...

    def abandon(self) -> None: ...


def event_s(rounds: int) -> float:
    """Seconds per event of computation (F, HEAD, B), 0 or more: the median of `rounds`."""
    model, memory = _Model(), _Memory()
    layers = map_layers(model, ["blocks"])
    sums = GradientStore(layers.units, torch.float32, nn.Parameter.numel, lambda param: param.dtype, pairs=True)
    sweeps = Sweeps(layers, memory, overlap=True)
    schedule = build_training(_LAYERS, _MICRO_BATCHES)
    runs: list[Callable[[], Any]] = [partial(model, torch.ones(1)) for _ in range(_MICRO_BATCHES)]

    def scheduled() -> None:
        for _ in range(_STEPS):
            sweeps.train(schedule, [Body(run, seed) for seed, run in enumerate(runs)], sums, memory, lambda loss: loss)

    def plain() -> None:
        for _ in range(_STEPS):
            for run in runs:
                run().backward()
            model.zero_grad()

    num_events = _STEPS * sum(event.op in _COMPUTE for event in schedule.events)
    return max(0.0, (median_s(scheduled, rounds) - median_s(plain, rounds)) / num_events)
