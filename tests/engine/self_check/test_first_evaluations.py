"""Evaluations ahead of the check of the first training step: in stock's order, whatever a model keeps, and wherever.

Most of the models keep what their blocks read where the engine does not look.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from harness import differing, read_weights, running
from stateful import Base, Block, InANamespace, M, batches, config_in

from ds_vertical.engine.metrics import METRICS_VARIABLE
from ds_vertical.engine.self_check.diagnosis import SelfCheckError

IN_TURN = "evaluations run one micro-batch after the other, as in stock, and each of these reads all layers, "
UNTIL_CHECKED, NOT_FOLLOWED = IN_TURN + "until the self-check", IN_TURN + "since the self-check cannot follow"


class OnATensor(InANamespace):
    def made(self) -> Any:
        return torch.zeros(1)


class Element:
    """What an array of one object has, under the names of attributes."""

    def __init__(self) -> None:
        object.__setattr__(self, "array", np.array([{}], dtype=object))

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["array"][0][name]

    def __setattr__(self, name: str, value: Any) -> None:
        self.array[0] = self.array[0] | {name: value}


class InAnArray(InANamespace):
    def made(self) -> Any:
        return Element()


class CountedBlock(Block):
    aside: Any

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.aside.blocks += 1
        return self.body(x)


class Counted(Base):
    """A metric in a namespace, which no block reads, and a list that is followed, and that only longer micro-batches get."""

    block = CountedBlock

    def __init__(self) -> None:
        super().__init__()
        self.aside, self.longer = argparse.Namespace(forwards=0, blocks=0), list[int]()
        for block in self.blocks:
            block.aside = self.aside

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        self.aside.forwards += 1
        if x.shape[1] > 3:
            self.longer.append(x.shape[1])
        return ()


class NotingBlock(Block):
    notes: list[torch.Tensor]

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.notes.append(x.mean())
        return self.body(x)


class Noting(Base):
    """Empties the lists that its blocks fill, and adds up what they have left there. All forwards begin with empty ones."""

    block = NotingBlock

    def __init__(self) -> None:
        super().__init__()
        self.clear()

    def clear(self) -> None:
        for block in self.blocks:
            block.notes = []

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        for block in self.blocks:
            block.notes.clear()
        return ()

    def end(self, x: torch.Tensor) -> torch.Tensor:
        return sum([note for block in self.blocks for note in block.notes], x.new_zeros(()))


class DropsOut(Base):
    def end(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5, training=True).mean()


@contextlib.contextmanager
def counting_reads(engine: Any) -> Iterator[list[Any]]:
    """The layers that are read within the block, one by one."""
    store, found = engine.param_store, list[Any]()
    fetch = store.fetch
    with patch.object(store, "fetch", lambda unit, *further: found.append(unit) or fetch(unit, *further)):
        yield found


def evaluated(engine: Any, step: Any) -> list[float]:
    """Losses of an evaluation's micro-batches."""
    losses: list[float] = []
    mean = engine.eval_batch(iter(step), lambda loss, _: losses.append(loss.item()) or loss).item()
    assert mean == pytest.approx(sum(losses) / len(losses))
    return losses


def num_reads(engine: Any, step: Any) -> int:
    """How often an evaluation reads a layer."""
    with counting_reads(engine) as found:
        engine.eval_batch(iter(step))
    return found.count(1)


def plain(case: type[Base], weights: dict[str, torch.Tensor], step: Any) -> list[float]:
    """Losses of torch alone."""
    model = case()
    model.load_state_dict(weights)
    model.eval()
    with torch.no_grad():
        return [model(**micro_batch).item() for micro_batch in step]


def config(folder: Path, wanted: bool | None = None, **options: Any) -> dict[str, Any]:
    return config_in(folder, section={"self_check": wanted, "seed": 4} | options.pop("section", {}), **options)


@pytest.mark.parametrize("case", [InANamespace, OnATensor, InAnArray])
def test_what_is_kept_where_nobody_looks_is_as_in_torch(
    tmp_path: Path, case: type[InANamespace], capsys: pytest.CaptureFixture[str]
) -> None:
    steps = batches(2)
    with running(config(tmp_path), case, vertical=True) as (engine, model):
        found = [evaluated(engine, step) for step in steps]
        assert model.aside.forwards == 2 * M
        assert found == [plain(case, read_weights(model), step) for step in steps]
        assert capsys.readouterr().out.count(UNTIL_CHECKED) == 1
        with pytest.raises(SelfCheckError, match="horizontal"):
            engine.train_batch(iter(steps[0]))
        assert evaluated(engine, steps[0]) == found[0] and num_reads(engine, steps[0]) == M
        assert IN_TURN not in capsys.readouterr().out


def test_what_a_model_counts_is_counted_once(tmp_path: Path) -> None:
    """State that is followed lets nothing start over, though the second micro-batch is the first to change it."""
    step = batches(1)[0]
    with running(config(tmp_path), Counted, vertical=True) as (engine, model):
        for _ in range(2):
            evaluated(engine, step)
        assert (model.aside.forwards, model.aside.blocks) == (2 * M, 2 * M * len(model.blocks))
        assert model.longer == [4, 5] * 2
        evaluated(engine, step[2:])  # a single one
        assert model.aside.forwards == 2 * M + 1 and model.longer == [4, 5, 4, 5, 5]


def test_a_failure_leaves_modules_as_before_and_runs_nothing_again(tmp_path: Path) -> None:
    step = batches(1)[0]

    def fail(_: torch.Tensor, batch: Any) -> torch.Tensor:
        if batch["x"].shape[1] == 5:
            raise ValueError("no luck here")
        return torch.zeros(())

    with running(config(tmp_path), Counted, vertical=True) as (engine, model):
        with pytest.raises(ValueError, match="no luck here"):
            engine.eval_batch(iter(step), fail)
        assert model.longer == [4] and model.aside.forwards == M


def test_a_training_step_ends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And has stock's bits, as if nothing had been evaluated before."""
    steps, ends = batches(3), []
    for vertical in (False, True):
        with running(config(tmp_path), DropsOut, vertical=vertical) as (engine, model):
            torch.manual_seed(5)
            found = [evaluated(engine, step) for step in steps[:2]]
            drawn = torch.rand(1).item()
            if vertical:
                assert num_reads(engine, steps[0]) == M
                capsys.readouterr()
            losses = [engine.train_batch(iter(step)).item() for step in steps]
            if vertical:
                assert "self_check: 2 micro-batches, " in capsys.readouterr().out
                assert num_reads(engine, steps[0]) == 1
            ends.append((found, drawn, losses, read_weights(model)))
    (*stock, weights), (*ours, own) = ends
    assert stock == ours and not differing(weights, own)


def test_a_resume_knows_that_the_model_was_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step, saves = batches(1)[0], tmp_path / "saves"
    with running(config(tmp_path), Base, vertical=True) as (engine, _):
        engine.train_batch(iter(step))
        engine.save_checkpoint(saves)
    with (
        running(config(tmp_path), Base, vertical=True) as (engine, _),
        patch("ds_vertical.engine.self_check.first_step.model_fingerprint", wraps=_fingerprint()) as asked,
    ):
        assert num_reads(engine, step) == M
        engine.load_checkpoint(saves)
        assert [num_reads(engine, step) for _ in range(3)] == [1] * 3 and asked.call_count == 1
    for build, wanted in ((Counted, None), (Base, True)):  # another model, and one that is to be checked always
        with running(config(tmp_path, wanted), build, vertical=True) as (engine, _):
            engine.load_checkpoint(saves)
            assert num_reads(engine, step) == M
    assert capsys.readouterr().out.count(UNTIL_CHECKED) == 3


def _fingerprint() -> Any:
    from ds_vertical.engine.self_check.first_step import model_fingerprint

    return model_fingerprint


@pytest.mark.parametrize("why", ["false", "ab"])
def test_where_no_check_is_wanted_it_is_layer_major(
    tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if why == "ab":
        monkeypatch.setenv(METRICS_VARIABLE, str(tmp_path / "records"))
    with running(config(tmp_path, False if why == "false" else None), Base, vertical=True) as (engine, _):
        assert num_reads(engine, batches(1)[0]) == 1
    assert IN_TURN not in capsys.readouterr().out


def test_a_single_micro_batch_needs_no_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(config(tmp_path), Base, vertical=True) as (engine, _):
        assert num_reads(engine, batches(1)[0][:1]) == 1
    assert IN_TURN not in capsys.readouterr().out


def test_a_step_of_one_micro_batch_does_not_end_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its check shows nothing of several that take turns, and the next step is checked, too."""
    step, saves = batches(1)[0], tmp_path / "saves"
    with running(config(tmp_path), InANamespace, vertical=True) as (engine, model):
        engine.train_batch(iter(step[:1]))
        assert evaluated(engine, step) == plain(InANamespace, read_weights(model), step)
        engine.save_checkpoint(saves)
        before = read_weights(model)
        for _ in range(2):
            with pytest.raises(SelfCheckError, match="horizontal"):
                engine.train_batch(iter(step))
        assert engine.global_steps == 1 and not differing(before, read_weights(model))
        assert num_reads(engine, step) == M
    with running(config(tmp_path), InANamespace, vertical=True) as (engine, _):
        engine.load_checkpoint(saves)
        assert num_reads(engine, step) == M
    capsys.readouterr()
    with running(config(tmp_path), Base, vertical=True) as (engine, _):
        for micro_batches in (step[:1], step[:1], step, step):
            engine.train_batch(iter(micro_batches))
        assert num_reads(engine, step) == 1
    said = capsys.readouterr().out
    assert said.count("self_check: 1 micro-batch, ") == 1 and said.count("self_check: 2 micro-batches, ") == 1


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_run_of_single_micro_batches_may_get_several(
    tmp_path: Path, is_resumed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its checks, and what its checkpoints say, are enough for single ones alone."""
    step, saves, single = batches(1)[0], tmp_path / "saves", config(tmp_path) | {"gradient_accumulation_steps": 1}
    if is_resumed:
        with running(single, InANamespace, vertical=True) as (engine, _):
            engine.train_batch(iter(step))
            engine.save_checkpoint(saves)
    with running(single, InANamespace, vertical=True) as (engine, model):
        if is_resumed:
            engine.load_checkpoint(saves)
        for _ in range(2):
            engine.train_batch(iter(step))
            engine.eval_batch(iter(step))
        engine.save_checkpoint(saves)
        said = capsys.readouterr().out
        assert said.count("self_check: 1 micro-batch, ") == 1 and IN_TURN not in said
        engine.set_train_batch_size(M)
        before = read_weights(model)
        assert evaluated(engine, step) == plain(InANamespace, before, step) and num_reads(engine, step) == M
        with pytest.raises(SelfCheckError, match="horizontal"):
            engine.train_batch(iter(step))
        assert not differing(before, read_weights(model))
    with running(single, InANamespace, vertical=True) as (engine, model):
        engine.load_checkpoint(saves)
        engine.set_train_batch_size(M)
        assert evaluated(engine, step) == plain(InANamespace, read_weights(model), step)
        with pytest.raises(SelfCheckError, match="horizontal"):
            engine.train_batch(iter(step))
    assert capsys.readouterr().out.count(UNTIL_CHECKED) == 2


def test_a_check_of_several_is_enough_for_single_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step, saves = batches(1)[0], tmp_path / "saves"
    for count in (M, 1, M):
        with running(config(tmp_path) | {"gradient_accumulation_steps": count}, Base, vertical=True) as (engine, _):
            if saves.exists():
                engine.load_checkpoint(saves)
            engine.train_batch(iter(step))
            engine.save_checkpoint(saves)
    assert capsys.readouterr().out.count("ds_vertical: self_check: ") == 1


def test_a_checkpoint_of_an_older_build_is_checked_once_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its check may have seen one micro-batch only, or have been unable to follow the model."""
    step, saves = batches(1)[0], tmp_path / "saves"
    for checks in (1, 1, 0):
        with running(config(tmp_path), Base, vertical=True) as (engine, model):
            if saves.exists():
                engine.load_checkpoint(saves)
                assert num_reads(engine, step) == (M if checks else 1)
            engine.train_batch(iter(step))
            found = capsys.readouterr().out.count("ds_vertical: self_check: ")
            if not saves.exists():
                engine.self_check.checked_model = older_fingerprint(model)
            engine.save_checkpoint(saves)
        assert found == checks


def older_fingerprint(model: torch.nn.Module) -> str:
    """What builds up to 2026-11-27 wrote into their checkpoints, whatever their check had seen."""
    told = hashlib.sha256(repr(("vertical", False, 1, torch.__version__)).encode())
    for path, module in model.named_modules():
        told.update(f"{path} {inspect.getsource(type(module))}".encode())
    return told.hexdigest()


class TransformedBlock(Block):
    """Runs in no pass that saves what layers save through hooks."""

    aside: Any

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return super().body(x) + torch.func.grad(lambda y: y.square().sum())(x.detach()) * 0.01


class Transformed(Base):
    block = TransformedBlock


def test_a_model_that_the_check_cannot_follow_stays_in_stocks_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And is tried again after a resume: nobody has checked it."""
    step, saves, said = batches(1)[0], tmp_path / "saves", []
    for is_resumed in (False, True):
        with running(config(tmp_path), Transformed, vertical=True) as (engine, _):
            if is_resumed:
                engine.load_checkpoint(saves)
            engine.train_batch(iter(step))
            assert [num_reads(engine, step) for _ in range(2)] == [M, M]
            engine.save_checkpoint(saves)
        said.append(capsys.readouterr().out)
    assert [(each.count(NOT_FOLLOWED), each.count("trained without the check")) for each in said] == [(1, 1)] * 2


@pytest.mark.parametrize("wanted", [False, None])
def test_what_single_forwards_have_shown_is_learned_again_for_several(tmp_path: Path, wanted: bool | None) -> None:
    """A single one does not show that the next one resets what this one has left."""
    step = batches(1)[0]
    with running(config(tmp_path, wanted), Noting, vertical=True) as (engine, model):
        if wanted is None:
            engine.train_batch(iter(step))
        model.clear()
        right = plain(Noting, read_weights(model), step)
        assert [evaluated(engine, [micro_batch])[0] for micro_batch in step] == right
        model.clear()
        assert evaluated(engine, step) == right
