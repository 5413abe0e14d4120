"""Mistakes of a first script, each told with what to write instead."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import base_config, differing, read_weights, running
from models import MixerModel, token_batches

from ds_vertical.model.batch import as_iterator, loss_of


@pytest.mark.parametrize("batch", [{"input_ids": torch.zeros(1, 2)}, torch.zeros(2, 3)], ids=["dict", "tensor"])
def test_one_micro_batch_is_no_iterator_of_them(batch: object) -> None:
    with pytest.raises(TypeError, match=r"got one (dict|Tensor); write iter\(\[micro_batch\]\)"):
        as_iterator(batch)  # pyright: ignore[reportArgumentType]
    assert next(as_iterator([batch])) is batch


def test_a_loss_without_gradient_is_refused_where_one_trains() -> None:
    loss = torch.ones((), requires_grad=True)
    with pytest.raises(ValueError, match=r"that loss_fn\(outputs, batch\) returned requires no gradient"):
        loss_of(None, None, lambda *_: loss.detach())
    with pytest.raises(ValueError, match="that the model returned requires no gradient"):
        loss_of(SimpleNamespace(loss=loss.detach()), None, None)
    with torch.no_grad():
        assert loss_of(None, None, lambda *_: loss.detach()) == 1


def test_a_gradient_from_outside_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    config = base_config(tmp_path, num_micro_batches=1, dtype="fp32", params="cpu", optimizer="cpu")
    with running(config, partial(MixerModel, 2, 64), vertical=True) as (engine, model):
        before = read_weights(model)
        param = next(model.parameters())
        param.grad = torch.zeros_like(param)
        with pytest.raises(RuntimeError, match="1 parameters have a .grad before train_batch"):
            engine.train_batch(iter(token_batches(1, 1)[0]))
        assert not differing(before, read_weights(model))
        param.grad = None
        engine.train_batch(iter(token_batches(1, 1)[0]))
        assert differing(before, read_weights(model))


def test_a_script_without_launcher_is_told_of_it(tmp_path: Path) -> None:
    names = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "AZUREML_EXPERIMENT_ID")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    code = f"import ds_vertical; ds_vertical.prepare({base_config(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode != 0
    assert "write: deepspeed SCRIPT.py --deepspeed_config CONFIG.json" in done.stderr
    assert not any(tmp_path.iterdir())
