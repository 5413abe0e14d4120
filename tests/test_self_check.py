"""The self-check ahead of the first step: it agrees where training is exact, and finds what is switched off."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import base_config, differing, read_weights, running
from models import tiny_gpt2, token_batches
from test_forward_state import (
    CASES,
    NOTES,
    Base,
    Block,
    Keeper,
    MaskOnBlocks,
    Namespaces,
    Nones,
    PythonRandom,
    Ranges,
    SharedContext,
    SharedUserDict,
    Statistics,
    batches,
    config_in,
)
from torch import nn

from ds_vertical.layers import LayerError
from ds_vertical.selfcheck import SelfCheckError


@pytest.fixture(autouse=True)
def fresh_globals() -> None:
    NOTES.clear()
    random.seed(5)
    np.random.seed(5)


def checked(folder: Path, wanted: bool | None = True, **section: Any) -> dict[str, Any]:
    return config_in(folder, section={"self_check": wanted, "seed": 4} | section)


@pytest.mark.parametrize("case", [Base, SharedContext, SharedUserDict, Ranges, PythonRandom], ids=lambda case: case.__name__)
def test_it_agrees_and_leaves_everything_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: type[Base]
) -> None:
    ends = []
    for wanted in (True, False):
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(3)
        with running(checked(tmp_path, wanted), case, vertical=True) as (engine, model):
            losses = [engine.train_batch(iter(step)).item() for step in batches(2)]
            buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
            randomness = random.getstate(), torch.get_rng_state().tolist()
            ends.append((losses, randomness, read_weights(model), buffers))
    (losses, randomness, weights, buffers), (own, own_randomness, own_weights, own_buffers) = ends
    assert losses == own and randomness == own_randomness
    assert not differing(weights, own_weights)
    assert all(torch.equal(buffers[name], own_buffers[name]) for name in buffers)
    assert "self_check: 2 micro-batches" in capsys.readouterr().out


def test_it_agrees_with_a_hugging_face_model_in_bf16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = base_config(tmp_path, dtype="bf16", section={"self_check": True})
    with running(config, lambda: tiny_gpt2(3, 512, dropout=0.1), vertical=True) as (engine, _):
        engine.train_batch(iter(token_batches(1, 3)[0]))
    assert "they agree" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_it_agrees_with_every_kind_of_state(tmp_path: Path, case: type[Base]) -> None:
    with running(checked(tmp_path), case, vertical=True) as (engine, _):
        engine.train_batch(iter(batches(1)[0]))


def without_handling(engine: Any) -> None:
    engine._state.handled = False


def refused(folder: Path, case: Callable[[], nn.Module], loss_fn: Any = None, prepare: Any = None) -> str:
    """What the self-check says where state is not handled; nothing has changed."""
    with running(checked(folder), case, vertical=True) as (engine, model):
        without_handling(engine)
        if prepare is not None:
            prepare(model)
        before = read_weights(model)
        with pytest.raises(LayerError) as raised:  # SelfCheckError, or a refusal by name
            engine.train_batch(iter(batches(1)[0]), loss_fn)
        assert engine.global_steps == 0 and not differing(before, read_weights(model))
        return str(raised.value)


FOUND: list[tuple[type[Base], str]] = [
    (SharedUserDict, "fails where torch's own order does not|layer 1 .*gradient of blocks.1"),
    (MaskOnBlocks, "fails where torch's own order does not.*must match"),
    (SharedContext, "fails where torch's own order does not.*must match"),
    (Statistics, "fails where torch's own order does not"),
]


@pytest.mark.parametrize(
    ("case", "words"),
    [pytest.param(*row, id=row[0].__name__) for row in FOUND],
)
def test_it_finds_what_is_not_handled(tmp_path: Path, case: type[Base], words: str) -> None:
    said = refused(tmp_path, case)
    assert re.search(words, said) and "horizontal" in said


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in {row[0] for row in FOUND} | {Nones, Namespaces}])
def test_it_finds_every_kind_of_state(tmp_path: Path, case: type[Base]) -> None:
    refused(tmp_path, case)


@pytest.mark.parametrize("detached", [False, True])
def test_it_finds_a_hook_whose_output_is_another_micro_batchs(tmp_path: Path, detached: bool) -> None:
    keeper = Keeper("dict", detached)

    def prepare(model: Any) -> None:
        model.blocks[1].register_forward_hook(lambda module, args, output: keeper.keep(module, output))

    said = refused(tmp_path, Base, keeper.loss_fn, prepare)  # with gradient, micro-batch 0 meets what 2's backward has left
    assert "loss of micro-batch 0" in said if detached else "backward() itself" in said


class CountUpBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.counter[0] += 1
        return self.body(x * (1 + 0.01 * self.counter[0]))


class CountUp(Base):
    """All blocks count up one counter: no order but stock's gives it."""

    block = CountUpBlock

    def __init__(self) -> None:
        super().__init__()
        counter = [0]
        for block in self.blocks:
            block.counter = counter


def test_what_cannot_be_followed_is_found_by_name_and_right_in_stocks_order(tmp_path: Path) -> None:
    with running(checked(tmp_path), CountUp, vertical=True) as (engine, model):
        with pytest.raises(SelfCheckError, match=r"layer 0 \(blocks\.0\): output .* micro-batch 1 differs.*horizontal"):
            engine.train_batch(iter(batches(1)[0]))
        assert model.blocks[0].counter == [0]
    with running(checked(tmp_path, order="horizontal"), CountUp, vertical=True) as (engine, _):
        engine.train_batch(iter(batches(1)[0]))


def test_a_resume_with_the_same_model_is_not_checked_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saves = tmp_path / "saves"
    said = []
    for case in (Base, Base, MaskOnBlocks):
        with running(checked(tmp_path, None), case, vertical=True) as (engine, _):
            if saves.exists():
                engine.load_checkpoint(saves)
            engine.train_batch(iter(batches(1)[0]))
            engine.train_batch(iter(batches(1)[0]))
            if not saves.exists():
                engine.save_checkpoint(saves)
        said.append(capsys.readouterr().out.count("self_check: 2 micro-batches"))
    assert said == [1, 0, 1]
