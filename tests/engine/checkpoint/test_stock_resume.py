"""A checkpoint that stock DeepSpeed has saved with its optimizer in host memory: our engine goes on from it, with state on SSD,
as a stock run does that resumes there, bit for bit."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import contents, counters, differing, running
from run_owners import digest
from tied import TiedModel, config_in, train
from torch import nn

from ds_vertical.errors import CheckpointError

HOST = {"params": "cpu", "optimizer": "cpu"}
slow = pytest.mark.slow


def with_buffers(engine: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    return contents(engine, model) | dict(model.named_buffers())


def without_micro_steps(engine: Any) -> dict[str, Any]:
    """Stock's format has no micro_steps."""
    return {name: value for name, value in counters(engine).items() if name != "micro_steps"}


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("fp32", {}),
        pytest.param("bf16", {"clip": 0.05}, marks=slow),
        pytest.param("fp32", {"sub_group_size": 300_001}, marks=slow),
        pytest.param("fp32", HOST, marks=slow),
    ],
    ids=str,
)
def test_we_go_on_from_it_with_stocks_bits(tmp_path: Path, dtype: str, options: dict[str, Any]) -> None:
    saved, build = tmp_path / "saved", partial(TiedModel, dtype, False)
    host = config_in(tmp_path / "host", dtype, **(options | HOST))
    with running(host, build, vertical=False) as (engine, model):
        train(engine, range(2))
        engine.save_checkpoint(str(saved), client_state={"note": [1, "two"]})
        state, numbers = with_buffers(engine, model), without_micro_steps(engine)
    with running(host, build, vertical=False) as (engine, model):  # stock resumes
        engine.load_checkpoint(str(saved))
        losses = train(engine, range(2, 4))
        expected, ends = with_buffers(engine, model), without_micro_steps(engine)
    with running(config_in(tmp_path / "ssd", dtype, **options), build, vertical=True) as (engine, model):
        train(engine, range(5, 6))  # nothing of it is left
        path, client_state = engine.load_checkpoint(str(saved))
        assert path is not None and client_state == {"note": [1, "two"]}
        assert differing(state, with_buffers(engine, model)) == []
        assert without_micro_steps(engine) == numbers
        assert train(engine, range(2, 4)) == losses
        assert differing(expected, with_buffers(engine, model)) == []
        assert without_micro_steps(engine) == ends


def test_a_save_over_a_checkpoint_of_stocks_is_refused_and_deletes_nothing(tmp_path: Path) -> None:
    """Over one that we have made for stock it is not."""
    saved, build = tmp_path / "saved", partial(TiedModel, "fp32", False)
    with running(config_in(tmp_path / "host", "fp32", **HOST), build, vertical=False) as (engine, _):
        train(engine, range(1))
        engine.save_checkpoint(str(saved), tag="best")
    before = digest(saved)
    with running(config_in(tmp_path / "ssd", "fp32"), build, vertical=True) as (engine, model):
        train(engine, range(2))
        for portable in (False, True):
            with pytest.raises(CheckpointError, match=r"saved/best: holds .*_states\.pt, which has the name.*another tag"):
                engine.save_checkpoint(str(saved), tag="best", portable=portable)
        assert digest(saved) == before
        for steps, portable in ((range(2, 3), True), (range(3, 4), True), (range(4, 5), False)):
            train(engine, steps)
            engine.save_checkpoint(str(saved), tag="ours", portable=portable)
            state = with_buffers(engine, model)
            train(engine, range(5, 6))
            engine.load_checkpoint(str(saved), tag="ours")
            assert differing(state, with_buffers(engine, model)) == []


class Unknown:
    """What no checkpoint may bring to life."""


def test_what_would_be_unpickled_is_refused_with_the_reason(tmp_path: Path) -> None:
    saved, build = tmp_path / "saved", partial(TiedModel, "fp32", False)
    with running(config_in(tmp_path / "host", "fp32", **HOST), build, vertical=False) as (engine, _):
        train(engine, range(1))
        engine.save_checkpoint(str(saved), tag="objects", client_state={"note": Unknown()})
        engine.save_checkpoint(str(saved), tag="cut")
    file = saved / "cut" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    shutil.copy(file, tmp_path / "kept")
    with running(config_in(tmp_path / "ssd", "fp32"), build, vertical=True) as (engine, model):
        before = contents(engine, model)
        with pytest.raises(CheckpointError, match=r"saved/objects: a checkpoint of stock.*not unpickled.*save_16bit_model"):
            engine.load_checkpoint(str(saved), tag="objects")
        file.write_bytes(file.read_bytes()[:5000])
        with pytest.raises(CheckpointError, match=r"saved/cut: a checkpoint of stock.*cannot be read"):
            engine.load_checkpoint(str(saved), tag="cut")
        state = torch.load(tmp_path / "kept", weights_only=False)
        state["optimizer_state_dict"]["fp32_flat_groups"] = [torch.empty(1)] * 9
        torch.save(state, file)
        with pytest.raises(CheckpointError, match=r"saved/cut: a checkpoint of stock.*its optimizer state was on SSD"):
            engine.load_checkpoint(str(saved), tag="cut")
        assert differing(before, contents(engine, model)) == []
