"""Blocks compiled by torch.compile: stock's bits; models compiled as a whole are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_identical, base_config, run_arm, running, small_buffers, start_process_group
from models import MixerModel, tiny_neox, token_batches
from torch import nn

import ds_vertical
from ds_vertical.errors import LayerError


def config_in(folder: Path) -> dict[str, Any]:
    return small_buffers(base_config(folder, num_micro_batches=2, dtype="fp32", clip=0.5), 1_100_000)


def equal_lengths(num_steps: int) -> list[list[dict[str, torch.Tensor]]]:
    """Of one length: which of a static and a dynamic kernel runs depends on what ran before, under stock as well."""
    steps = token_batches(num_steps, 1)
    return [[step[0], *token_batches(1, 1, seed=7 + index)[0]] for index, step in enumerate(steps)]


def compiled(backend: str, blocks: Callable[[nn.Module], Any], make: Callable[[], nn.Module]) -> nn.Module:
    torch._dynamo.reset()
    model = make()
    for block in blocks(model):
        block.compile(backend=backend)
    return model


def mixer(backend: str) -> Callable[[], nn.Module]:
    return partial(compiled, backend, lambda model: model.blocks, partial(MixerModel, dropout=0.1))


def neox(backend: str) -> Callable[[], nn.Module]:
    return partial(compiled, backend, lambda model: model.gpt_neox.layers, partial(tiny_neox, dropout=0.1))


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(mixer("aot_eager"), id="aot_eager"),
        pytest.param(mixer("inductor"), id="inductor", marks=pytest.mark.slow),
        pytest.param(neox("inductor"), id="neox-inductor", marks=pytest.mark.slow),
    ],
)
def test_compiled_blocks_give_the_bits_of_stock_with_the_same_blocks_compiled(tmp_path: Path, build: Any) -> None:
    runs = []
    for vertical in (False, True):
        torch._dynamo.utils.counters.clear()
        runs.append(run_arm(config_in(tmp_path), build, equal_lengths(3), vertical=vertical))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    assert_identical(*runs)


@pytest.mark.parametrize(
    "backend", [pytest.param("aot_eager", id="aot_eager"), pytest.param("inductor", id="inductor", marks=pytest.mark.slow)]
)
def test_blocks_that_are_compiled_between_two_steps_give_stocks_bits(tmp_path: Path, backend: str) -> None:
    """Whether a block is compiled is looked at in each step."""

    def between(engine: Any, step: int) -> None:
        for block in engine.module.blocks if step == 0 else ():
            block.compile(backend=backend)

    runs = []
    for vertical in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        build = partial(MixerModel, dropout=0.1)
        runs.append(run_arm(config_in(tmp_path), build, equal_lengths(3), vertical=vertical, between=between))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    assert_identical(*runs)


class Forwards(MixerModel):
    """Blocks whose forward alone is compiled, and one whose inner module is; the last one is not compiled."""

    def __init__(self) -> None:
        super().__init__()
        torch._dynamo.reset()
        self.blocks[0].forward = torch.compile(self.blocks[0].forward, backend="aot_eager")
        self.blocks[1].up.compile(backend="aot_eager")


class Function(MixerModel):
    """A compiled function of the user's own calls the blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch._dynamo.reset()
        self.through = torch.compile(self._through, backend="aot_eager")

    def _through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(2.0 * x) + x
        return x

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.through(self.embed(input_ids))
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("build", [Forwards, Function])
def test_whatever_way_blocks_are_compiled(tmp_path: Path, build: Any) -> None:
    assert_identical(*(run_arm(config_in(tmp_path), build, equal_lengths(2), vertical=v) for v in (False, True)))


def whole() -> nn.Module:
    model = MixerModel()
    model.compile()
    return model


def test_a_model_compiled_as_a_whole_is_refused_before_a_file_is_made(tmp_path: Path) -> None:
    start_process_group()
    with pytest.raises(LayerError, match=r"the model is compiled as a whole.*block\.compile\(\)"):
        ds_vertical.initialize(model=whole(), config=config_in(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_the_engine_and_its_module_are_not_compiled_as_a_whole(tmp_path: Path) -> None:
    batches = token_batches(2, 2)
    with running(config_in(tmp_path), MixerModel, vertical=True) as (engine, model):
        with pytest.raises(RuntimeError, match=r"engine\.compile\(\) is not available.*block\.compile\(\)"):
            engine.compile()
        model.compile()
        with pytest.raises(LayerError, match="the model is compiled as a whole"):
            engine.train_batch(iter(batches[0]))
        model._compiled_call_impl = None
        assert engine.train_batch(iter(batches[1])) > 0
