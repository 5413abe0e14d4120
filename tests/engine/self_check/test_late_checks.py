"""The self-check runs again for state that begins to change after the first step, and for what only evaluations change."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import differing, read_weights, running
from stateful import Base, Block, CountUp, batches, config_in
from stateful_models import SharedContext

from ds_vertical.engine.self_check.check import SelfCheckError
from ds_vertical.engine.self_check.first_step import MOST_FURTHER

CHECKED = "self_check: 2 micro-batches, "  # in training
EVALUATED = re.compile(
    r"self_check: 2 micro-batches of an evaluation, (\d+\.\d) s in stock's order, (\d+\.\d) s in the schedule's: they agree"
)


class LateCountBlock(Block):
    """`first`: the block that counts from the first step on. The others begin with the third."""

    first = -1

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.start = index == self.first

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        if self.start:
            self.counter[0] += 1
        return self.body(x * (1 + 0.01 * self.counter[0]))


class LateCountUp(CountUp):
    block = LateCountBlock


class FromOneOnBlock(LateCountBlock):
    first = 0


class FromOneOn(CountUp):
    """One block counts, so that its own order is stock's, until the others do."""

    block = FromOneOnBlock


def start(model: Any) -> None:
    for block in model.blocks:
        block.start = True


@pytest.mark.parametrize("wanted", [True, None])
@pytest.mark.parametrize("case", [LateCountUp, FromOneOn])
def test_late_state_that_only_stocks_order_gets_right_is_found(tmp_path: Path, case: type[Base], wanted: bool | None) -> None:
    with running(config_in(tmp_path, section={"self_check": wanted}), case, vertical=True) as (engine, model):
        for step in batches(2):
            engine.train_batch(iter(step))
        start(model)
        before, counter = read_weights(model), list(model.blocks[0].counter)
        for _ in range(2):
            with pytest.raises(SelfCheckError, match=r"layer \d \(blocks\.\d\): output .*: blocks\.\d\.counter; .*horizontal"):
                engine.train_batch(iter(batches(1)[0]))
            assert engine.global_steps == 2 and model.blocks[0].counter == counter
            assert not differing(before, read_weights(model))


class InTheLastBlock(FromOneOnBlock):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        if self.index == 0 or (self.start and x.shape[1] == 5):
            self.counter[0] += 1
        return self.body(x * (1 + 0.01 * self.counter[0]))


class InTheLast(CountUp):
    """The other blocks count in the last micro-batch only: of that step no order is wrong, but of the next one."""

    block = InTheLastBlock


def test_what_is_wrong_from_the_next_step_on_is_found(tmp_path: Path) -> None:
    config = config_in(tmp_path, section={"self_check": None}) | {"gradient_accumulation_steps": 2}
    with running(config, InTheLast, vertical=True) as (engine, model):
        engine.train_batch(iter(batches(1)[0][::2]))
        start(model)
        with pytest.raises(SelfCheckError, match=r"blocks\.\d\.counter; .*horizontal"):
            for step in batches(2):
                engine.train_batch(iter(step[::2]))
        assert engine.global_steps == 1


class NotedBlock(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.start = False

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        if self.start:
            self.notes.append(x.shape[1])
        return self.body(x)


class LateNotes(Base):
    """A list that all blocks append to, which nobody reads."""

    block = NotedBlock

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[int] = []
        for block in self.blocks:
            block.notes = self.notes


def test_late_state_that_is_right_is_checked_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends = []
    for wanted in (None, False):
        torch.manual_seed(3)
        with running(config_in(tmp_path, section={"self_check": wanted, "seed": 4}), LateNotes, vertical=True) as (
            engine,
            model,
        ):
            losses = []
            for index, step in enumerate(batches(4)):
                if index == 2:
                    start(model)
                losses.append(engine.train_batch(iter(step)).item())
            ends.append((losses, model.notes, torch.get_rng_state().tolist(), read_weights(model)))
        assert capsys.readouterr().out.count(CHECKED) == (2 if wanted is None else 0)
    (*ours, weights), (*plain, others) = ends
    assert ours == plain and not differing(weights, others)


class RenamingBlock(Block):
    """Its state has another name in each step, or evaluation."""

    name = "note"

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        setattr(self, self.name, x.detach().mean().item())
        return self.body(x)


class Renaming(Base):
    block = RenamingBlock


def rename(model: Any, number: int) -> None:
    for block in model.blocks:
        block.name = f"note_{number}"


STOPS = re.compile(r"self_check: 8 checks of (.*) have agreed, .*; blocks\.0\.note_\d+ has begun now")


@pytest.mark.slow
def test_state_with_a_new_name_in_each_step_is_not_checked_for_ever(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends = []
    for wanted in (None, False):
        with running(config_in(tmp_path, section={"self_check": wanted}), Renaming, vertical=True) as (engine, model):
            losses = []
            for number, step in enumerate(batches(12)):
                rename(model, number)
                losses.append(engine.train_batch(iter(step)).item())
            ends.append((losses, read_weights(model)))
        said = capsys.readouterr().out
        assert said.count(CHECKED) == (1 + MOST_FURTHER if wanted is None else 0)
        assert STOPS.findall(said) == (["training steps"] if wanted is None else [])
    assert ends[0][0] == ends[1][0] and not differing(ends[0][1], ends[1][1])


@pytest.mark.slow
def test_nor_in_each_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(config_in(tmp_path, section={"self_check": None}), Renaming, vertical=True) as (engine, model):
        engine.train_batch(iter(batches(1)[0]))
        for number, step in enumerate(batches(12)):
            rename(model, number)
            engine.eval_batch(iter(step))
    said = capsys.readouterr().out
    assert len(EVALUATED.findall(said)) == MOST_FURTHER and STOPS.findall(said) == ["evaluations"]


def test_a_resume_knows_which_state_was_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for is_first in (True, False):
        with running(config_in(tmp_path, section={"self_check": None}), SharedContext, vertical=True) as (engine, _):
            if not is_first:
                engine.load_checkpoint(tmp_path / "saves")
            engine.train_batch(iter(batches(1)[0]))
            engine.save_checkpoint(tmp_path / "saves")
            assert engine.self_check.checked_state
        said.append(capsys.readouterr().out.count(CHECKED))
    assert said == [1, 0]


# ---- evaluations


class EvalCountBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.counter[0] += not self.training
        return self.body(x * (1 + 0.01 * self.counter[0]))


class EvalCountUp(CountUp):
    block = EvalCountBlock


class LateEvalCountUp(CountUp):
    """Counts in training, too, where each forward begins by setting the counter."""

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        if self.training:
            self.blocks[0].counter[0] = 0
        return ()


@pytest.mark.parametrize("case", [EvalCountUp, LateEvalCountUp])
def test_state_of_evaluations_that_only_stocks_order_gets_right_is_found(tmp_path: Path, case: type[Base]) -> None:
    with running(config_in(tmp_path, section={"self_check": None}), case, vertical=True) as (engine, model):
        engine.train_batch(iter(batches(1)[0]))
        counter = list(model.blocks[0].counter)
        for _ in range(2):
            with pytest.raises(
                SelfCheckError,
                match=r"in an evaluation the result of micro-batch 1 differs by .* may be the cause:"
                r" blocks\.\d\.counter \(several parts\); .*horizontal",
            ):
                engine.eval_batch(iter(batches(1)[0]))
            assert model.blocks[0].counter == counter
        engine.train_batch(iter(batches(1)[0]))


def losses_of(folder: Path, vertical: bool, **section: Any) -> list[float]:
    with running(config_in(folder, section=section), EvalCountUp, vertical=vertical) as (engine, _):
        engine.train_batch(iter(batches(1)[0]))
        losses: list[float] = []
        for step in batches(2):
            engine.eval_batch(iter(step), lambda loss, _: losses.append(loss.item()) or loss)
        return losses


@pytest.mark.slow
def test_it_is_right_in_stocks_order(tmp_path: Path) -> None:
    assert losses_of(tmp_path, False) == losses_of(tmp_path, True, order="horizontal", self_check=True)


def test_evaluations_that_are_right_are_checked_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends = []
    for wanted in (None, False):
        with running(config_in(tmp_path, section={"self_check": wanted}), SharedContext, vertical=True) as (engine, _):
            engine.train_batch(iter(batches(1)[0]))
            ends.append([engine.eval_batch(iter(step)).item() for step in batches(3)])
        assert len(EVALUATED.findall(capsys.readouterr().out)) == (wanted is None)
    assert ends[0] == ends[1]


def test_no_evaluation_of_a_model_without_such_state_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(config_in(tmp_path, section={"self_check": True}), Base, vertical=True) as (engine, _):
        engine.eval_batch(iter(batches(1)[0]))
    assert "of an evaluation" not in capsys.readouterr().out


class Slow(SharedContext):
    """Each forward takes a quarter of a second at least."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.25)
        return super().forward(x)


def test_checks_say_how_long_each_order_took(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(config_in(tmp_path, section={"self_check": None}), Slow, vertical=True) as (engine, _):
        start = time.perf_counter()
        engine.train_batch(iter(batches(1)[0]))
        engine.eval_batch(iter(batches(1)[0]))
        most = time.perf_counter() - start
    said = capsys.readouterr().out
    of_training = re.findall(r"2 micro-batches, (\d+\.\d) s in torch's order, (\d+\.\d) s in the schedule's: they agree", said)
    told = [float(each) for pair in (*of_training, *EVALUATED.findall(said)) for each in pair]
    assert len(told) == 4 and all(0.5 <= each < most for each in told) and sum(told) < most + 0.2


def test_a_step_of_one_micro_batch_is_checked_with_that_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_in(tmp_path, section={"self_check": None}) | {"gradient_accumulation_steps": 1}
    with running(config, Base, vertical=True) as (engine, _):
        engine.train_batch(iter(batches(1)[0][:1]))
    assert "self_check: 1 micro-batch, " in capsys.readouterr().out
