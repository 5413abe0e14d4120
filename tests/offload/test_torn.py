"""After a step that failed in part the engine says so and refuses everything; after one that failed whole it goes on."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed import utils as fragments
from faults import small_files
from harness import base_config, contents, differing, running, small_buffers
from models import MixerModel, token_batches
from torch import nn

from ds_vertical.errors import TornStateError
from ds_vertical.io.aio import DiskError

NUM_MICRO_BATCHES = 2
BATCHES = token_batches(6, NUM_MICRO_BATCHES)


def config_in(folder: Path, clip: float, delay: float, **options: Any) -> dict[str, Any]:
    config = base_config(
        folder, num_micro_batches=NUM_MICRO_BATCHES, dtype="fp32", clip=clip, section={"optimizer_delay": delay}, **options
    )
    return small_buffers(config) if options.get("params", "nvme") == "nvme" else config


def step(engine: Any, number: int) -> float:
    return engine.train_batch(iter(BATCHES[number])).item()


# ---- torn


def cut_state_file(engine: Any) -> str:
    """Cut the second layer's first moment short, in both generations; the name of the file."""
    chunk = engine.optimizer.chunks_of(1)[0]
    files = engine.optimizer.stepper.chunks[chunk].files
    for generation in files:
        if generation[1].exists():
            os.truncate(generation[1], 4096)
    return files[0][1].name


def routes(engine: Any, model: Any, folder: Path) -> dict[str, Callable[[], Any]]:
    param = model.blocks[0].up.weight

    def gather() -> None:
        with deepspeed.zero.GatheredParameters([param]):
            pass

    return {
        "train_batch": lambda: step(engine, 3),
        "eval_batch": lambda: engine.eval_batch(iter(BATCHES[3])),
        "save_16bit_model": lambda: engine.save_16bit_model(str(folder / "saved")),
        "gather": gather,
        "master": lambda: fragments.safe_get_full_fp32_param(param),
        "moments": lambda: fragments.safe_set_full_optimizer_state(param, torch.zeros(param.ds_shape), "exp_avg"),
        "flush": engine.flush,
        "module": lambda: model.eval()(BATCHES[0][0]["input_ids"]),
    }


def assert_refuses_everything(engine: Any, model: Any, folder: Path, cause: str) -> None:
    for name, route in routes(engine, model, folder).items():
        for _ in range(2):
            with pytest.raises(TornStateError, match="the live state is torn") as raised:
                route()
            assert cause in str(raised.value), name
            assert raised.value.__cause__ is not None
    assert not list((folder / "saved").glob("*.bin")), "torn weights were saved"


@pytest.mark.parametrize(
    ("clip", "delay"),
    [(0.05, 1.0), pytest.param(0.05, 0.0, marks=pytest.mark.slow), pytest.param(0.0, 1.0, marks=pytest.mark.slow)],
)
def test_a_state_file_cut_short_tears_a_state_that_is_stepped_in_place(tmp_path: Path, clip: float, delay: float) -> None:
    """Where it is stepped beside what is current, nothing has happened: tests/faults/test_faults.py."""
    with running(config_in(tmp_path, clip, delay), partial(MixerModel, 3), vertical=True) as (engine, model):
        step(engine, 0)
        step(engine, 1)
        engine.flush()
        name = cut_state_file(engine)
        with pytest.raises(DiskError) as raised:
            for number in (2, 3):
                step(engine, number)
        assert name in str(raised.value) and "live state is torn" in "".join(raised.value.__notes__)
        assert_refuses_everything(engine, model, tmp_path, name)
    assert not [thread for thread in threading.enumerate() if thread.name == "ds_vertical optimizer"]


@pytest.mark.parametrize(("clip", "delay", "optimizer"), [(0.05, 1.0, "cpu"), (0.05, 0.0, "cpu"), (0.0, 1.0, "nvme")])
@pytest.mark.slow
def test_new_values_that_cannot_be_written_tear_the_state(tmp_path: Path, clip: float, delay: float, optimizer: str) -> None:
    """With the optimizer in host memory only parameters are written."""
    config = config_in(tmp_path, clip, delay, optimizer=optimizer)
    with running(config, partial(MixerModel, 3), vertical=True) as (engine, model):
        step(engine, 0)
        engine.flush()
        with small_files(1 << 19), pytest.raises((DiskError, TornStateError)):
            for number in (1, 2, 3):
                step(engine, number)
        assert_refuses_everything(engine, model, tmp_path, "write of")


def test_an_error_of_the_kernel_tears_state_in_memory(tmp_path: Path) -> None:
    config = config_in(tmp_path, 0.05, 1.0, params="cpu", optimizer="cpu")
    with running(config, partial(MixerModel, 3), vertical=True) as (engine, model):
        step(engine, 0)
        tear(engine)
        assert_refuses_everything(engine, model, tmp_path, "no CPU Adam optimizer")
        with pytest.raises(TornStateError, match=r"\(no checkpoint has been saved\)"):
            engine.save_checkpoint(str(tmp_path / "checkpoint"))
        assert not (tmp_path / "checkpoint").exists()


def tear(engine: Any) -> None:
    engine.optimizer.kernel.close()
    with pytest.raises(ValueError, match="no CPU Adam optimizer") as raised:
        step(engine, 1)
        engine.flush()
    assert "live state is torn" in "".join(raised.value.__notes__)


@pytest.mark.parametrize("tag", [None, "mine"])
def test_the_refusal_names_the_last_good_tag(tmp_path: Path, tag: str | None) -> None:
    """Saved by this process, or loaded into it."""
    config = config_in(tmp_path, 0.05, 1.0, params="cpu", optimizer="cpu")
    with running(config, partial(MixerModel, 3), vertical=True) as (engine, _):
        step(engine, 0)
        engine.save_checkpoint(str(tmp_path / "first"), tag="older")
        engine.save_checkpoint(str(tmp_path / "second"), tag=tag)
        tear(engine)
        named = f'the last good tag is "{tag or "global_step1"}" in {tmp_path / "second"}'
        with pytest.raises(TornStateError, match=named):
            engine.save_checkpoint(str(tmp_path / "second"), tag="third")
    with running(config, partial(MixerModel, 3), vertical=True) as (engine, _):
        engine.load_checkpoint(str(tmp_path / "second"))
        tear(engine)
        with pytest.raises(TornStateError, match=named):
            engine.save_checkpoint(str(tmp_path / "second"), tag="third")


# ---- whole


class Tripped(Exception):
    """Raised by the model on purpose."""


class TripBlock(nn.Module):
    """A block of MixerModel; `trips` counts down its calls, and the last of them raises."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.counter = ModuleType("counter")  # of which no copy is taken: a step that fails does not put it back
        self.counter.trips = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counter.trips -= 1
        if self.counter.trips == 0:
            raise Tripped
        return self.block(x)


def trip_model() -> nn.Module:
    model = MixerModel(4)
    model.blocks = nn.ModuleList(TripBlock(block) for block in model.blocks)
    return model


@pytest.fixture(scope="module")
def untroubled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[float, dict[str, torch.Tensor]]]:
    ends = {}
    for clip, delay in ((0.0, 0.5), (0.05, 1.0)):
        folder = tmp_path_factory.mktemp("untroubled")
        with running(config_in(folder, clip, delay), trip_model, vertical=True) as (engine, model):
            for number in range(4):
                step(engine, number)
            ends[clip] = contents(engine, model)
    yield ends


@pytest.mark.parametrize(("clip", "delay"), [(0.0, 0.5), (0.05, 1.0)])
@pytest.mark.parametrize("flushes", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("block", "call"), [(2, 1), (0, NUM_MICRO_BATCHES + 1)], ids=["forward", "backward"])
def test_a_step_that_failed_whole_is_as_if_it_had_not_been(
    tmp_path: Path,
    untroubled: dict[float, dict[str, torch.Tensor]],
    clip: float,
    delay: float,
    flushes: bool,
    block: int,
    call: int,
) -> None:
    """The model raises while steps of the last train_batch, and early ones of this one, are under way."""
    with running(config_in(tmp_path, clip, delay), trip_model, vertical=True) as (engine, model):
        step(engine, 0)
        step(engine, 1)
        model.blocks[block].counter.trips = call
        with pytest.raises(Tripped):
            step(engine, 2)
        if flushes:
            engine.flush()
        for number in (2, 3):
            step(engine, number)
        assert not differing(untroubled[clip], contents(engine, model))
