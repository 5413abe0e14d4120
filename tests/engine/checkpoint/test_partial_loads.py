"""`load_module_strict=False` means what it means in stock: what the checkpoint leaves out stays as it is. HF's Trainer passes
it for every model of PEFT."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from adapters import lora, lora_config, train
from harness import build_engine, contents, counters, differing, dispose, read_weights, running
from resuming import config_in, model_of
from resuming import train as train_mixer
from torch import nn

from ds_vertical.errors import CheckpointError


@contextlib.contextmanager
def tuned(folder: Path) -> Iterator[tuple[Any, nn.Module]]:
    engine, model = build_engine(lora_config(folder), lora, vertical=True, under_zero_init=False)
    try:
        yield engine, model
    finally:
        dispose(engine)


@pytest.mark.parametrize("exclude", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["adapter", "all"])
def test_lora_resumes_with_the_bits_of_a_run_that_never_stopped(tmp_path: Path, exclude: bool) -> None:
    """Whether the save has left the frozen base out, as Trainer's does, or not."""
    with tuned(tmp_path / "ssd") as (engine, model):
        losses = train(engine, range(2))
        engine.save_checkpoint(str(tmp_path / "saved"), exclude_frozen_parameters=exclude)
        losses += train(engine, range(2, 4))
        expected, numbers = contents(engine, model), counters(engine)
    saved = {path.name for path in (tmp_path / "saved").rglob("weight*.bin")}
    assert bool(saved) is not exclude  # adapters are too small for files of their own
    with tuned(tmp_path / "ssd") as (engine, model):
        base = model.get_parameter("base_model.model.model.layers.0.mlp.up_proj.weight")
        if not exclude:
            with deepspeed.zero.GatheredParameters([base], modifier_rank=0):
                base.data.zero_()
        path, _ = engine.load_checkpoint(
            str(tmp_path / "saved"), load_module_strict=False, load_optimizer_states=True, load_lr_scheduler_states=True
        )
        assert path is not None
        assert train(engine, range(2, 4)) == losses[2:]
        assert differing(expected, contents(engine, model)) == []
        assert counters(engine) == numbers


class _More(nn.Module):
    """A block that no checkpoint has, and a buffer."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((512, 512), 0.5), requires_grad=trained)
        self.register_buffer("scale", torch.full((3,), 0.25))


def test_what_only_the_model_has_stays_as_it_is(tmp_path: Path) -> None:
    with running(config_in(tmp_path / "ssd"), model_of, vertical=True) as (engine, model):
        train_mixer(engine, range(1))
        engine.save_checkpoint(str(tmp_path / "saved"))
        expected = contents(engine, model)

    def build(trained: bool) -> nn.Module:
        model = model_of()
        model.more = _More(trained)
        return model

    with running(config_in(tmp_path / "ssd"), lambda: build(trained=False), vertical=True) as (engine, model):
        train_mixer(engine, range(2))
        with pytest.raises(CheckpointError, match=r"more\.weight: not in the checkpoint"):
            engine.load_checkpoint(str(tmp_path / "saved"))
        engine.load_checkpoint(str(tmp_path / "saved"), load_module_strict=False)
        found = contents(engine, model)
        assert torch.equal(found.pop("more.weight"), torch.full((512, 512), 0.5))
        assert torch.equal(model.get_buffer("more.scale"), torch.full((3,), 0.25))
        assert differing(expected, found) == []


def test_what_is_trained_must_have_its_state(tmp_path: Path) -> None:
    """With `load_module_only` it stays, master and moments included, beside neighbours of its chunk that are loaded."""
    with running(config_in(tmp_path / "ssd"), model_of, vertical=True) as (engine, model):
        train_mixer(engine, range(1))
        engine.save_checkpoint(str(tmp_path / "saved"))
        expected = read_weights(model)

    def build() -> nn.Module:
        model = model_of()
        model.blocks[0].more = _More(trained=True)
        return model

    with running(config_in(tmp_path / "ssd"), build, vertical=True) as (engine, model):
        train_mixer(engine, range(2))
        before = contents(engine, model)
        with pytest.raises(CheckpointError, match=r"blocks\.0\.more\.weight: not in the checkpoint"):
            engine.load_checkpoint(str(tmp_path / "saved"), load_module_strict=False)
        assert differing(before, contents(engine, model)) == []
        engine.load_checkpoint(str(tmp_path / "saved"), load_module_strict=False, load_module_only=True)
        found = contents(engine, model)
        own = {name: tensor for name, tensor in found.items() if "more" in name or "/exp_avg" in name}
        assert differing({name: before[name] for name in own}, own) == []
        assert differing(expected, {name: found[name] for name in expected}) == []
        assert differing(expected, {name: found[f"{name}/master"].view_as(expected[name]) for name in expected}) == []
        train_mixer(engine, range(2, 3))
