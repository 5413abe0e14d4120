"""What may not change between a save and its load is refused by name, with the live state as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import differing, read_weights, running
from models import MixerModel
from resuming import config_in, model_of, train
from torch import nn

from ds_vertical.errors import CheckpointError

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of one run: `one` is whole, `trained` lacks the frozen first parameter."""
    folder = tmp_path_factory.mktemp("fits")
    with running(config_in(folder / "ssd"), frozen, vertical=True) as (engine, _):
        train(engine, range(1))
        engine.save_checkpoint(str(folder / "saved"), tag="trained", exclude_frozen_parameters=True)
    with running(config_in(folder / "ssd"), model_of, vertical=True) as (engine, _):
        train(engine, range(1))
        engine.save_checkpoint(str(folder / "saved"), tag="one")
    return folder / "saved"


def frozen() -> nn.Module:
    model = model_of()
    next(model.parameters()).requires_grad_(False)
    return model


def unscheduled(folder: Path) -> dict[str, Any]:
    made = config_in(folder)
    del made["scheduler"]
    return made


def one_layer(folder: Path) -> dict[str, Any]:
    return config_in(folder, section={"layers": ["blocks"]})


def without_decoupled_decay(folder: Path) -> dict[str, Any]:
    made = config_in(folder)
    made["optimizer"] = {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.01, "adam_w_mode": False}}
    return made


@pytest.mark.parametrize(
    ("made", "build", "tag", "said"),
    [
        (without_decoupled_decay, model_of, "one", "optimizer.params.adam_w_mode: False here, True in the checkpoint"),
        pytest.param(unscheduled, model_of, "one", "scheduler: False here, True there", marks=slow),
        pytest.param(config_in, lambda: MixerModel(3, 512), "one", r"blocks.2.up.weight: not in the checkpoint", marks=slow),
        pytest.param(one_layer, lambda: MixerModel(1, 512), "one", r"blocks.1.up.weight: in the checkpoint only", marks=slow),
        pytest.param(config_in, model_of, "trained", "embed.weight: trained here; .* saved without it", marks=slow),
        pytest.param(config_in, frozen, "one", "embed.weight: not trained here, parameter group 0 in the", marks=slow),
    ],
    ids=["adam_w_mode", "scheduler", "more layers", "fewer layers", "frozen there", "frozen here"],
)
def test_what_may_not_change_is_refused_by_name(
    tmp_path: Path,
    saved: Path,
    made: Callable[[Path], dict[str, Any]],
    build: Callable[[], nn.Module],
    tag: str,
    said: str,
) -> None:
    with running(made(tmp_path), build, vertical=True) as (engine, model):
        before = read_weights(model)
        with pytest.raises(CheckpointError, match=rf"does not fit this run(.|\n)*{said}"):
            engine.load_checkpoint(str(saved), tag=tag)
        assert differing(before, read_weights(model)) == []
        train(engine, range(1))
