"""The first evaluation of several micro-batches is checked, whatever is known of the model's state: once, and unseen."""

from __future__ import annotations

import argparse
import array
import itertools
import random
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import running
from stateful import Base, Block, M, batches, config_in
from torch import nn

from ds_vertical.engine.self_check.check import SelfCheckError
from ds_vertical.engine.self_check.evaluation import MOST_MODES

LINE = re.compile(
    r"self_check: 2 micro-batches of an evaluation, \d+\.\d s in stock's order, \d+\.\d s in the schedule's: (.*)"
)


def in_memory(folder: Path, wanted: bool | None, **section: Any) -> dict[str, Any]:
    return config_in(folder, params="cpu", optimizer="cpu", section={"self_check": wanted, **section})


class UnseenBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.body(x * (1 + self.read()))


def configuration() -> Any:
    from transformers import PretrainedConfig

    return PretrainedConfig()


def place(kind: str, model: nn.Module) -> tuple[Callable[[float], None], Callable[[], float]]:
    """What writes and reads a number in an object that nobody looks into."""
    if kind == "buffer":
        model.register_buffer("mark", torch.zeros(1))
    if kind in ("array", "objects"):
        numbers: Any = array.array("d", [0.0]) if kind == "array" else np.zeros(1, dtype=object)
        return partial(numbers.__setitem__, 0), partial(numbers.__getitem__, 0)
    held = {"namespace": argparse.Namespace, "configuration": configuration, "buffer": lambda: model.mark}[kind]()
    return partial(setattr, held, "gain"), partial(getattr, held, "gain")


class Unseen(Base):
    """The model writes a number that its blocks read."""

    block = UnseenBlock

    def __init__(self, kind: str = "namespace") -> None:
        super().__init__()
        self.write, read = place(kind, self)
        for block in self.blocks:
            block.read = read

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        self.write(0.01 * x.shape[1])
        return ()


REFUSED = (
    r"in an evaluation the result of micro-batch 0 differs by .*, first in layer 0 \(blocks\.0\), output tensor 0; the cause"
    r" may be state in an object that is not looked into .*horizontal"
)


@pytest.mark.parametrize(
    "kind",
    ["namespace", *(pytest.param(each, marks=pytest.mark.slow) for each in ("configuration", "buffer", "array", "objects"))],
)
def test_state_that_nobody_looks_after_is_found(tmp_path: Path, kind: str) -> None:
    """Ahead of any step, and before a loss function has seen a wrong number."""
    losses: list[torch.Tensor] = []
    with running(in_memory(tmp_path, None), partial(Unseen, kind), vertical=True) as (engine, _):
        for loss_fn in (None, lambda loss, _: losses.append(loss) or loss):
            with pytest.raises(SelfCheckError, match=REFUSED):
                engine.eval_batch(iter(batches(1)[0]), loss_fn)
    assert losses == []


def test_what_it_refuses_is_right_in_stocks_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for vertical in (False, True):
        with running(in_memory(tmp_path, None, order="horizontal"), Unseen, vertical=vertical) as (engine, _):
            found.append(engine.eval_batch(iter(batches(1)[0])).item())
    assert found[0] == found[1] and not LINE.findall(capsys.readouterr().out)


class DrawingBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.body(x * (random.random() + torch.rand(()) + float(np.random.rand())))


class Drawing(Base):
    """Random numbers in evaluations, and a buffer that each forward writes."""

    block = DrawingBlock

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        self.seen.add_(x.shape[1] * torch.rand(3))
        return ()

    def end(self, x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(x, 0.5, True).mean() * self.seen.sum()


def evaluated_twice(folder: Path, wanted: bool | None) -> list[Any]:
    """Losses, and what the caller has besides."""
    held = iter([batch for step in batches(3) for batch in step])
    torch.manual_seed(5), random.seed(7), np.random.seed(7)
    with running(in_memory(folder, wanted), Drawing, vertical=True) as (engine, model):
        engine.train()
        modes = [module.training for module in model.modules()]
        losses = [engine.eval_batch(held).item() for _ in range(2)]
        besides = [torch.rand(1).item(), random.random(), float(np.random.rand()), model.seen.tolist(), len(list(held))]
        return [losses, besides, modes == [module.training for module in model.modules()]]


def test_it_is_checked_once_and_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, lines = [], []
    for wanted in (None, True, False):
        found.append(evaluated_twice(tmp_path, wanted))
        lines.append(LINE.findall(capsys.readouterr().out))
    assert lines == [["they agree"], ["they agree"], []] and found[0] == found[1] == found[2]
    assert found[0][1][-1] == M and found[0][2]


class Doubling(Base):
    """Writes into its inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(2))


def test_inputs_that_the_model_writes_are_written_once(tmp_path: Path) -> None:
    found = []
    for wanted in (None, False):
        step = batches(1)[0]
        with running(in_memory(tmp_path, wanted), Doubling, vertical=True) as (engine, _):
            found.append((engine.eval_batch(iter(step)).item(), [batch["x"].sum().item() for batch in step]))
    assert found[0] == found[1]


def test_a_step_that_was_checked_says_nothing_of_evaluations(tmp_path: Path) -> None:
    """Whose code may be another one."""

    class InEvaluations(Unseen):
        def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
            self.write(0.0 if self.training else 0.01 * x.shape[1])
            return ()

    with running(in_memory(tmp_path, None), InEvaluations, vertical=True) as (engine, _):
        engine.train_batch(iter(batches(1)[0]))
        with pytest.raises(SelfCheckError, match=REFUSED):
            engine.eval_batch(iter(batches(1)[0]))


def test_the_users_loss_function_runs_once_for_each_micro_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may count where nobody looks."""
    counter = itertools.count()
    with running(in_memory(tmp_path, True), Base, vertical=True) as (engine, _):
        engine.eval_batch(iter(batches(1)[0]), lambda loss, _: next(counter) * 0 + loss)
    assert next(counter) == M and LINE.findall(capsys.readouterr().out) == ["they agree"]


class Stubborn(Block):
    """Stays in training mode while `stays` says so."""

    stays = False

    def train(self, mode: bool = True) -> Any:
        return super().train(mode or self.stays)


class InModes(Base):
    block = Stubborn


def test_other_modes_are_checked_each_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = []
    with running(in_memory(tmp_path, None), InModes, vertical=True) as (engine, model):
        for number in (0, 0, *range(1, 10)):
            for index, block in enumerate(model.blocks):
                block.stays = bool(number >> index & 1)
            engine.eval_batch(iter(batches(1)[0]))
            lines.append(len(LINE.findall(capsys.readouterr().out)))
    assert MOST_MODES == 8 and lines == [1, 0, *[1] * 7, 0, 0]


def now() -> torch.Tensor:
    return torch.tensor(float(time.perf_counter_ns() % 99_991))


class Many(Base):
    """Returns tensors of every kind beside the loss."""

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        loss = super().forward(x)
        rows = x.detach()[0]
        return {
            "loss": loss,
            "time": now(),
            "meta": torch.empty(3, device="meta"),
            "sparse": rows.to_sparse(),
            "csr": rows.to_sparse_csr(),
            "csc": rows.to_sparse_csc(),
            "conjugate": torch.complex(rows, rows).conj(),
            "nested": torch.nested.nested_tensor([rows, rows[1:]]),
            "masked": torch.where(rows > 0, rows, -torch.inf),
        }


def test_outputs_that_cannot_be_compared_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for wanted in (None, False):
        with running(in_memory(tmp_path, wanted), Many, vertical=True) as (engine, _):
            found.append(engine.eval_batch(iter(batches(1)[0]), lambda outputs, _: outputs["loss"]).item())
    assert found[0] == found[1]
    [said] = LINE.findall(capsys.readouterr().out)
    unread = [f"tensor 2 of micro-batch {number}, which cannot be read" for number in range(2)]
    unsteady = [f"tensor 1 of micro-batch {number}, another one in each run" for number in range(2)]
    assert said == "they agree; not compared: " + "; ".join(unread + unsteady)


class Clocked(Base):
    def end(self, x: torch.Tensor) -> torch.Tensor:
        return now()


def test_a_result_that_is_another_one_in_each_run_is_refused(tmp_path: Path) -> None:
    """A counter that nobody looks after would look the same."""
    with (
        running(in_memory(tmp_path, None), Clocked, vertical=True) as (engine, _),
        pytest.raises(SelfCheckError, match="in the outputs of no layer; it differs between two runs in stock's order, too"),
    ):
        engine.eval_batch(iter(batches(1)[0]))


# ---- code around the model's calls


def by_parts(model: Any, x: torch.Tensor) -> torch.Tensor:
    for part in (model.embed, *model.blocks, model.head):
        x = part(x)
    return x.square().mean()


def code_for(engine: Any, batch: dict[str, torch.Tensor], seen: list[float]) -> Callable[[], float]:
    @torch.no_grad()
    def run() -> float:
        seen.append(engine(**batch).item())
        return seen[-1]

    return run


def test_code_that_brings_several_is_checked_behind_and_runs_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step, seen = batches(1)[0], list[float]()
    with running(in_memory(tmp_path, None), Unseen, vertical=True) as (engine, model):
        model.eval()
        assert engine.awaits_calls
        with pytest.raises(SelfCheckError, match=REFUSED):
            engine.eval_window([code_for(engine, batch, seen) for batch in step], step)
    assert len(seen) == M
    capsys.readouterr(), seen.clear()
    with running(in_memory(tmp_path, None), Base, vertical=True) as (engine, model):
        model.eval()
        for called in (model, engine):  # a Trainer calls the one or the other
            engine.eval_window([code_for(called, batch, seen) for batch in step], step)
    assert len(seen) == 2 * M and LINE.findall(capsys.readouterr().out) == ["they agree"]


def test_code_for_one_micro_batch_each_is_checked_ahead_of_several(tmp_path: Path) -> None:
    """And has seen right numbers alone."""
    step, seen = batches(1)[0], list[float]()
    with running(in_memory(tmp_path, None, order="horizontal"), Unseen, vertical=True) as (engine, _):
        right = engine.eval_batch(iter(step), lambda loss, _: seen.append(loss.item()) or loss).item()
    with running(in_memory(tmp_path, None), Unseen, vertical=True) as (engine, model):
        model.eval()
        alone = [engine.eval_window([code_for(engine, batch, seen)], [batch])[0] for batch in step[:2]]
        assert not engine.awaits_calls
        with pytest.raises(SelfCheckError, match=REFUSED):
            engine.eval_window([code_for(engine, batch, seen) for batch in step], step)
    assert alone == seen[:2] == seen[M:] and right == pytest.approx(sum(seen[:M]) / M)


def test_code_that_calls_parts_of_the_model_is_not_checked_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step, seen = batches(1)[0], list[float]()
    for wanted, refused in ((None, False), (True, True)):
        with running(in_memory(tmp_path, wanted), Base, vertical=True) as (engine, model):
            model.eval()
            runs = [code_for(partial(by_parts, model), batch, seen) for batch in step]
            if refused:
                for _ in range(2):
                    with pytest.raises(SelfCheckError, match="does not call the model, but parts of it.*self_check: null"):
                        engine.eval_window(runs, step)
                continue
            for _ in range(2):
                engine.eval_window(runs, step)
            said = capsys.readouterr().out
            assert said.count("warning: evaluated without a check") == 1 and not LINE.findall(said)
