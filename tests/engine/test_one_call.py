"""An engine's calls come one at a time, from the process that built it: any other is refused at once, and harms nothing."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from harness import base_config, contents, differing, running
from models import MixerModel, token_batches

BUILD = partial(MixerModel, 2, 64)
STEPS = [list(step) for step in token_batches(3, 2)]


def config_in(folder: Path) -> dict[str, Any]:
    return base_config(folder, num_micro_batches=2, dtype="fp32", params="cpu", optimizer="cpu", section={"seed": 5})


@pytest.fixture(scope="module")
def untroubled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    with running(config_in(tmp_path_factory.mktemp("untroubled")), BUILD, vertical=True) as (engine, model):
        for step in STEPS:
            engine.train_batch(iter(step))
        return contents(engine, model)


def calls_of(engine: Any) -> dict[str, Callable[[], Any]]:
    return {
        "train_batch": lambda: engine.train_batch(iter(STEPS[0])),
        "eval_batch": lambda: engine.eval_batch(iter(STEPS[0])),
        "save_16bit_model": lambda: engine.save_16bit_model("nowhere"),
        "save_checkpoint": lambda: engine.save_checkpoint("nowhere"),
        "load_checkpoint": lambda: engine.load_checkpoint("nowhere"),
        "flush": engine.flush,
    }


def direct_calls_of(model: Any) -> list[Callable[[], Any]]:
    return [lambda: model.eval()(**STEPS[0][0]), lambda: model.eval().head(torch.ones(1, 64))]


class Nested:
    """Makes all calls within a call of the engine, `outer`; `refused`: what they said."""

    def __init__(self, engine: Any, model: Any, outer: str) -> None:
        self.engine, self.model, self.outer = engine, model, outer
        self.refused: list[str] = []

    def __call__(self) -> None:
        outer = rf"engine\.{self.outer}\(\)|a step or an evaluation"
        for name, call in calls_of(self.engine).items():
            with pytest.raises(RuntimeError, match=rf"^(engine\.)?{name}(\(\))?: called within ({outer})") as raised:
                call()
            self.refused.append(str(raised.value))


def in_loss(nested: Nested) -> tuple[Iterator[Any], Any]:
    def loss_fn(outputs: Any, batch: Any) -> Any:
        nested()
        return outputs.loss if hasattr(outputs, "loss") else outputs

    return iter(STEPS[1]), loss_fn


def in_data(nested: Nested) -> tuple[Iterator[Any], Any]:
    def data() -> Iterator[Any]:
        for batch in STEPS[1]:
            nested()
            yield batch

    return data(), None


def in_hook(nested: Nested) -> tuple[Iterator[Any], Any]:
    handles: list[Any] = []

    def hook(*_: Any) -> None:
        handles.pop().remove()
        nested()

    handles.append(nested.model.blocks[1].register_forward_hook(hook))
    return iter(STEPS[1]), None


@pytest.mark.parametrize("outer", ["train_batch", "eval_batch"])
@pytest.mark.parametrize("place", [in_loss, in_data, in_hook])
def test_a_call_within_another_is_refused_and_that_goes_on(
    tmp_path: Path, untroubled: dict[str, torch.Tensor], place: Callable[..., Any], outer: str
) -> None:
    with running(config_in(tmp_path), BUILD, vertical=True) as (engine, model):
        engine.train_batch(iter(STEPS[0]))
        nested = Nested(engine, model, outer)
        getattr(engine, outer)(*place(nested))
        assert len(nested.refused) >= 6 and f"once {outer} has returned" in nested.refused[0]
        for step in STEPS[engine.global_steps :]:
            engine.train_batch(iter(step))
        assert not differing(untroubled, contents(engine, model))


def test_a_step_that_such_a_call_ends_is_as_if_it_had_not_been(tmp_path: Path, untroubled: dict[str, torch.Tensor]) -> None:
    with running(config_in(tmp_path), BUILD, vertical=True) as (engine, model):
        engine.train_batch(iter(STEPS[0]))
        with pytest.raises(RuntimeError, match=r"engine.eval_batch\(\): called within engine.train_batch\(\)"):
            engine.train_batch(iter(STEPS[1]), lambda *_: engine.eval_batch(iter(STEPS[0])))
        for step in STEPS[1:]:
            engine.train_batch(iter(step))
        assert not differing(untroubled, contents(engine, model))


def test_two_threads_do_not_call_at_once(tmp_path: Path, untroubled: dict[str, torch.Tensor]) -> None:
    """The second one is told; the first one's step is what it would have been. One after the other they may."""
    told: list[BaseException] = []

    def call_of_another(call: Callable[[], Any]) -> None:
        def run() -> None:
            try:
                call()
            except RuntimeError as error:
                told.append(error)

        thread = threading.Thread(target=run, name="the second")
        thread.start()
        thread.join()

    def read() -> None:
        with deepspeed.zero.GatheredParameters([next(model.parameters())]):
            pass

    with running(config_in(tmp_path), BUILD, vertical=True) as (engine, model):
        engine.train_batch(iter(STEPS[0]))

        def loss_fn(outputs: Any, batch: Any) -> Any:
            for call in (*calls_of(engine).values(), read):
                call_of_another(call)
            return outputs

        engine.train_batch(iter(STEPS[1]), loss_fn)
        assert len(told) == 2 * 7
        assert all("thread 'MainThread' is in engine.train_batch() of the same engine" in str(error) for error in told)
        told.clear()
        call_of_another(lambda: engine.train_batch(iter(STEPS[2])))
        assert not told and not differing(untroubled, contents(engine, model))


def test_a_forked_child_is_told_and_its_parent_goes_on(tmp_path: Path, untroubled: dict[str, torch.Tensor]) -> None:
    with running(config_in(tmp_path), BUILD, vertical=True) as (engine, model):
        for step in STEPS[:2]:
            engine.train_batch(iter(step))
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            said = []
            for call in (*calls_of(engine).values(), engine.destroy, *direct_calls_of(model)):
                try:
                    call()
                except RuntimeError as error:
                    said.append(str(error))
            os.write(writer, "\n".join(said).encode())
            os._exit(0)
        os.close(writer)
        has_answered = select.select([reader], [], [], 30)[0]  # a child that were let in would wait for threads it has not
        if not has_answered:
            os.kill(child, signal.SIGKILL)
        said = os.read(reader, 1 << 16).decode().splitlines()
        os.waitpid(child, 0)
        os.close(reader)
        assert len(said) == 9 and all(f"process {child} was forked from {os.getpid()}" in line for line in said)
        assert "engine.train_batch()" in said[0] and 'multiprocessing\'s "spawn"' in said[0]
        engine.train_batch(iter(STEPS[2]))
        assert not differing(untroubled, contents(engine, model))
