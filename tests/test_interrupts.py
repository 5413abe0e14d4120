"""Errors and interrupts at awkward moments of the optimizer's step, and a checkpoint loaded while a step is due."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_grad
from harness import base_config, differing, read_state, read_weights, running, small_buffers
from late import LateSteps
from models import MixerModel, token_batches

from ds_vertical import compat_state
from ds_vertical.stepper import Stepper
from ds_vertical.transfer import Ticket

BUILD = partial(MixerModel, 3, 512)
STEPS = [list(step) for step in token_batches(4, 2)]


def on_ssd(folder: Path, clip: float) -> dict[str, Any]:
    return small_buffers(base_config(folder, num_micro_batches=2, dtype="fp32", clip=clip, section={"seed": 3}), 600_000)


def outcome(engine: Any, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return read_weights(model) | read_state(engine, model)


def assert_torn(engine: Any, save: Callable[[], Any]) -> None:
    """It can be neither trained on nor saved, and says so."""
    for use in (lambda: engine.train_batch(iter(STEPS[1])), save):
        with pytest.raises(Exception, match="the live state is torn"):
            use()


@pytest.mark.parametrize("persistence", [0, None])
def test_a_checkpoint_loaded_while_a_step_is_due_is_the_checkpoint(tmp_path: Path, persistence: int | None) -> None:
    config = base_config(tmp_path, num_micro_batches=2, dtype="fp32", params="cpu", optimizer="cpu", persistence=persistence)
    with running(config, BUILD, vertical=True) as (engine, model):
        engine.train_batch(iter(STEPS[0]))
        engine.save_checkpoint(str(tmp_path / "saved"))
        saved = outcome(engine, model)
        engine.train_batch(iter(STEPS[1]))
        assert engine.optimizer.pending
        engine.load_checkpoint(str(tmp_path / "saved"))
        assert not differing(saved, outcome(engine, model))
        engine.train_batch(iter(STEPS[1]))
        assert differing(saved, outcome(engine, model))


def test_a_step_interrupted_after_its_norm_counts_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt comes ahead of COMMIT: the norm has made the early parts count."""
    with running(on_ssd(tmp_path / "a", 0.0), BUILD, vertical=True) as (engine, model):
        for step in STEPS[:2]:
            engine.train_batch(iter(step))
        expected = outcome(engine, model)
    with running(on_ssd(tmp_path / "b", 0.0), BUILD, vertical=True) as (engine, model):
        engine.train_batch(iter(STEPS[0]))
        conclude = engine.optimizer.conclude_early

        def interrupted() -> None:
            assert engine.optimizer._hit
            monkeypatch.setattr(engine.optimizer, "conclude_early", conclude)
            raise KeyboardInterrupt

        monkeypatch.setattr(engine.optimizer, "conclude_early", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.train_batch(iter(STEPS[1]))
        assert not differing(expected, outcome(engine, model))


@pytest.mark.parametrize("place", ["counting", "parameters"])
def test_an_interrupt_while_a_step_is_made_to_count_tears_the_state_loudly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Some chunks have been counted, or the masters count already and the parameters do not yet."""
    with running(on_ssd(tmp_path, 0.0), BUILD, vertical=True) as (engine, _):
        engine.train_batch(iter(STEPS[0]))
        moments, asked = compat_state.moments, []

        def interrupted(*arguments: Any) -> Any:
            asked.append(arguments)
            if place == "parameters" or (engine.optimizer.counts and len(asked) % 3 == 0):
                raise KeyboardInterrupt
            return moments(*arguments)

        with monkeypatch.context() as patch:
            if place == "parameters":
                patch.setattr(engine.param_store, "commit", interrupted)
            else:
                patch.setattr(compat_state, "moments", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.train_batch(iter(STEPS[1]))
        assert_torn(engine, lambda: engine.save_checkpoint(str(tmp_path / "out")))
        assert not (tmp_path / "out").exists()


def test_an_interrupt_while_a_step_is_issued_tears_the_state_loudly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(on_ssd(tmp_path, 1.0), BUILD, vertical=True) as (engine, _):
        engine.train_batch(iter(STEPS[0]))

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Stepper, "step", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.train_batch(iter(STEPS[1]))
        assert_torn(engine, lambda: engine.save_16bit_model(str(tmp_path / "out")))


def test_a_flush_interrupted_in_its_wait_leaves_the_step_to_the_next_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config(folder: Path) -> dict[str, Any]:
        section = {"optimizer_delay": 1.0, "seed": 5}
        return small_buffers(base_config(folder, num_micro_batches=2, dtype="fp32", clip=0.05, section=section), 600_000)

    build = partial(MixerModel, 4, 512)
    with running(config(tmp_path / "a"), build, vertical=True) as (engine, model):
        losses = [engine.train_batch(iter(step)).item() for step in STEPS[:2]]
        expected = outcome(engine, model)
    with running(config(tmp_path / "b"), build, vertical=True) as (engine, model):
        LateSteps(engine)
        assert engine.train_batch(iter(STEPS[0])).item() == losses[0]
        wait = Ticket.wait

        def interrupted(ticket: Ticket) -> None:
            if ticket.what == "step 2":
                monkeypatch.setattr(Ticket, "wait", wait)
                raise KeyboardInterrupt
            wait(ticket)

        monkeypatch.setattr(Ticket, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.flush()
        assert 2 in engine.optimizer.pending
        assert engine.train_batch(iter(STEPS[1])).item() == losses[1]
        assert not differing(expected, outcome(engine, model))


def test_whether_a_gradient_is_gone_does_not_depend_on_time(tmp_path: Path) -> None:
    """The steps issued ahead are waited for: on several ranks a gradient must be gone on all of them or on none."""

    def gone(model: Any) -> list[bool]:
        found = []
        for block in model.blocks:
            try:
                assert safe_get_full_grad(block.up.weight) is not None
                found.append(False)
            except RuntimeError:
                found.append(True)
        return found

    seen = []
    for late in (True, False):
        config = on_ssd(tmp_path / str(late), 0.05)
        config["vertical_schedule"] |= {"optimizer_delay": 1.0, "optimizer_speculation": False}
        with running(config, partial(MixerModel, 4, 512), vertical=True) as (engine, model):
            if late:
                LateSteps(engine)
            engine.train_batch(iter(STEPS[0]))
            if not late:
                engine.optimizer._pipeline.wait_idle()
            seen.append(gone(model))
    assert seen == [[True, True, False, False]] * 2
