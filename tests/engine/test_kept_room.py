"""What the JSON has kept where the memory budget has no room for it: refused with path, value, numbers and what mends it."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harness import base_config, differing, read_weights, running, start_process_group
from models import MixerModel, token_batches

import ds_vertical
from ds_vertical.errors import MemoryBudgetError
from ds_vertical.io import host

MIXER = partial(MixerModel, 4, 512, dropout=0.1)
LEFT = 4096  # of a cell of some hundred thousand bytes


@pytest.fixture
def least(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The least `host_memory_bytes` that a run starts with, of a process that does not grow meanwhile."""
    start_process_group()
    resident = host.resident_bytes()
    monkeypatch.setattr(host, "resident_bytes", lambda: resident)
    with pytest.raises(MemoryBudgetError) as caught:
        refused(config_in(tmp_path, 1 << 20, {"keep": "free"}))
    found = re.search(r"needs (\d+) bytes", str(caught.value))
    assert found is not None
    return int(found[1])


def config_in(folder: Path, host_bytes: int, activations: dict[str, Any]) -> dict[str, Any]:
    section = {"seed": 7, "host_memory_bytes": host_bytes, "activations": activations}
    return base_config(folder / "ssd", num_micro_batches=2, dtype="fp32", params="cpu", section=section)


def refused(config: dict[str, Any]) -> None:
    model = MIXER()
    ds_vertical.initialize(model=model, model_parameters=model.parameters(), config=config)


def train(config: dict[str, Any]) -> None:
    with running(config, MIXER, vertical=True) as (engine, _):
        engine.train_batch(iter(token_batches(1, 2, rows=1, shortest=16)[0]))
        assert engine.global_steps == 1


def test_where_nothing_is_left_for_it_no_run_starts(tmp_path: Path, least: int) -> None:
    for activations in ({"keep": "products"}, {"keep": "everything", "keep_device": "ssd"}):
        told = rf'activations\.keep: got "{activations["keep"]}"; the rest of the run takes {least} bytes .* leaves 0 .* "free"'
        with pytest.raises(MemoryBudgetError, match=told):
            refused(config_in(tmp_path, least, activations))
        assert not (tmp_path / "ssd").exists()
    train(config_in(tmp_path, least, {"keep": "free"}))  # as advised


@pytest.mark.parametrize("tier", ["device", "ssd"])
def test_where_one_cell_does_not_fit_the_first_step_is_refused_at_that_cell(tmp_path: Path, least: int, tier: str) -> None:
    """Nothing has left the device by then, and nothing of the step has happened."""
    activations = {"keep": "everything", "keep_device": tier}
    with running(config_in(tmp_path, least + LEFT, activations), MIXER, vertical=True) as (engine, model):
        before = read_weights(model)
        told = rf'activations\.keep: got "everything"; .* one layer keeps \d+ bytes .* leaves {LEFT}; write .*"free"'
        for _ in range(2):
            with pytest.raises(MemoryBudgetError, match=told):
                engine.train_batch(iter(token_batches(1, 2, rows=1, shortest=16)[0]))
            assert engine.global_steps == 0 and differing(read_weights(model), before) == []
            assert not any(path.stat().st_size for path in tmp_path.rglob("kept*.bin"))
    train(config_in(tmp_path, least + (64 << 20), activations))  # as advised
