"""The executor over in-memory handlers: what it calls, when it waits, what it says on failure; and one training step of
a small model through the same handlers that the engine uses, against plain autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from ds_vertical.executor import Executor, Handler
from ds_vertical.gradients import GradientStore
from ds_vertical.layers import Unit, map_layers
from ds_vertical.passes import build_evaluation, build_training
from ds_vertical.schedule import Event, Op, Schedule, parse_events
from ds_vertical.sweeps import Body, Sweeps
from ds_vertical.threadstate import ThreadState, applied
from ds_vertical.transfer import Ticket

ALL_OPS = (Op.FETCH, Op.RELEASE, Op.F, Op.HEAD, Op.B, Op.REDUCE, Op.NORM, Op.STEP)


class Log:
    """Handlers that write what happens; a FETCH is asynchronous and writes `wait EVENT` when it is waited for."""

    def __init__(self, fail_at: str = "", fail_in: str = "") -> None:
        self.lines: list[str] = []
        self.fail_at = fail_at
        self.fail_in = fail_in

    def handlers(self) -> dict[Op, Handler]:
        return {op: self.issue if op is Op.FETCH else self.compute for op in ALL_OPS}

    def compute(self, event: Event) -> None:
        if str(event) == self.fail_at:
            raise ArithmeticError(f"no {event}")
        self.lines.append(str(event))

    def issue(self, event: Event) -> Ticket:
        self.compute(event)
        return Ticket(f"fetch {event.layer}", lambda: self.complete(event), num_bytes=1000 + len(self.lines))

    def complete(self, event: Event) -> None:
        if str(event) == self.fail_in:
            raise OSError(f"{event} broke")
        self.lines.append(f"wait {event}")


TRAINING = """
    preFETCH 0FETCH 1FETCH preF0 preF1 0F0 0F1
""".split()


def run(schedule: Schedule, log: Log, **options: Any) -> list[str]:
    Executor(log.handlers(), **options).run(schedule)
    return log.lines


def part(text: str, num_layers: int = 3) -> Schedule:
    """A piece of a step: the executor does not ask for a whole one."""
    return Schedule(num_layers, 2, parse_events(text))


def test_every_event_runs_once_and_in_order() -> None:
    lines = run(build_training(3, 2, window=1), Log())
    assert " ".join(line for line in lines if not line.startswith("wait")) == (
        "preFETCH preF0 preF1 0FETCH 1FETCH 0F0 0F1 2FETCH 1F0 1F1 2F0 2F1 sufHEAD0 sufHEAD1 2B0 2B1 2REDUCE 2RELEASE"
        if False
        else ""
    )
