"""Checkpoints of a run with compressed masters hold whole ones, and load with and without compression."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import contents, differing, running
from resuming import config_in, loaded, model_of, train

slow = pytest.mark.slow


def made(folder: Path, compresses: bool, delay: float = 0.25, **section: Any) -> dict[str, Any]:
    return config_in(folder, "bf16", delay=delay, section={"optimizer_compression": compresses} | section)


@pytest.mark.parametrize(
    ("saving", "resuming"),
    [(True, True), pytest.param(True, False, marks=slow), pytest.param(False, True, marks=slow)],
)
@pytest.mark.parametrize("delay", [0.25, pytest.param(1.0, marks=slow), pytest.param(0.0, marks=slow)])
def test_a_run_goes_on_in_either_format(tmp_path: Path, saving: bool, resuming: bool, delay: float) -> None:
    with running(made(tmp_path, False, delay), partial(model_of, "bf16"), vertical=True) as (engine, model):
        losses = train(engine, range(6))
        wanted = contents(engine, model)
    with running(made(tmp_path, saving, delay), partial(model_of, "bf16"), vertical=True) as (engine, model):
        found = train(engine, range(3))
        engine.save_checkpoint(str(tmp_path / "saved"), tag="a")
        found += train(engine, range(3, 6))  # the checkpoint shares files with the run
        assert found == losses and not differing(wanted, contents(engine, model))
        engine.save_checkpoint(str(tmp_path / "saved"), tag="b")
        assert not differing(wanted, contents(engine, model))
    for tag, first in (("a", 3), ("b", 6)):
        with loaded(made(tmp_path, resuming, delay), tmp_path / "saved", "bf16", tag=tag) as (engine, model):
            assert found[:first] + train(engine, range(first, 6)) == losses
            assert not differing(wanted, contents(engine, model))


@slow
def test_other_forms_of_a_checkpoint_hold_whole_masters(tmp_path: Path) -> None:
    """A portable one, and what the script beside a checkpoint makes of it."""
    with running(made(tmp_path, True), partial(model_of, "bf16"), vertical=True) as (engine, model):
        train(engine, range(3))
        engine.save_checkpoint(str(tmp_path / "portable"), tag="a", portable=True)
        train(engine, range(3, 4))
        engine.save_checkpoint(str(tmp_path / "own"), tag="a")
        wanted = contents(engine, model)
    script = importlib.util.spec_from_file_location("exported", tmp_path / "own" / "zero_to_fp32.py")
    assert script is not None and script.loader is not None
    module = importlib.util.module_from_spec(script)
    script.loader.exec_module(module)
    masters = module.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "own"), tag="a")
    compared = [name for name in masters if f"{name}/master" in wanted]
    assert len(compared) == sum(name.endswith("/master") for name in wanted) > 8
    for name in compared:
        assert torch.equal(masters[name].flatten(), wanted[f"{name}/master"][: masters[name].numel()]), name
    with loaded(made(tmp_path, True), tmp_path / "portable", "bf16", tag="a") as (engine, model):
        train(engine, range(3, 4))
        masters_only = {name: state for name, state in contents(engine, model).items() if name.endswith("/master")}
        gaps = [(state - wanted[name]).abs().max().item() for name, state in masters_only.items()]
        assert max(gaps) < 1e-5  # CPU Adam's powers of beta are not in that format
