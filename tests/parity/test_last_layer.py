"""The last layer: forward, suffix, loss and backward fused per micro-batch, on the graph that its one forward made."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from harness import base_config, running
from models import tiny_gpt2, token_batches
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from toy import ToyModel, ToyTraining, plain_step, toy_inputs

from ds_vertical.errors import LayerError
from ds_vertical.schedule.events import Schedule
from ds_vertical.schedule.passes import TrainingStep, build_training

NUM_LAYERS, NUM_MICRO_BATCHES = 3, 3
LAST = NUM_LAYERS - 1
FUSED = "2F0 sufHEAD0 2B0 2F1 sufHEAD1 2B1 2F2 sufHEAD2 2B2"
APART = "2F0 2F1 2F2 sufHEAD0 sufHEAD1 sufHEAD2 2B0 2B1 2B2"
ORDERS: dict[str, dict[str, Any]] = {"vertical": {}, "snake": {"snake": True}, "horizontal": {"order": "horizontal"}}


class Twice(torch.autograd.Function):
    """A node written in Python, as users have them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return 2 * grads[0]


class SkippingToy(ToyModel):
    """Two tensors made before the first layer come back in the suffix, one of them in every block as well."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        side, hidden = torch.sigmoid(self.side(inputs)), self.embed(inputs)
        first = Twice.apply(hidden)
        for gain, block in zip(self.gains, self.blocks, strict=True):
            hidden = block(hidden * gain, side)
        return self.head(hidden + torch.tanh(first) * side).square().mean()


class LateToy(ToyModel):
    """Changes what the last layer was given, after it has run."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        side = hidden = given = self.embed(inputs)
        for block in self.blocks:
            given = hidden * 2.0
            hidden = block(given, side)
        with torch.no_grad():
            given.add_(1)
        return self.head(hidden).square().mean()


def built(kind: type[ToyModel]) -> ToyModel:
    torch.manual_seed(0)
    return kind(NUM_LAYERS)


def step(model: ToyModel, schedule: Schedule) -> tuple[list[float], dict[str, torch.Tensor]]:
    bodies = [partial(model, each) for each in toy_inputs(NUM_MICRO_BATCHES)]
    return ToyTraining(model).step(schedule, bodies, seed=0)


def apart() -> Schedule:
    """The same step with HEAD after all of the last layer's forwards: then it recomputes as every layer."""
    text = build_training(TrainingStep(NUM_LAYERS, NUM_MICRO_BATCHES)).to_text()
    assert text.count(FUSED) == 1
    return Schedule.from_text(text.replace(FUSED, APART))


def schedules() -> dict[str, Schedule]:
    orders = {name: build_training(TrainingStep(NUM_LAYERS, NUM_MICRO_BATCHES, **options)) for name, options in ORDERS.items()}
    return orders | {"apart": apart()}


@pytest.mark.parametrize("name", schedules())
def test_the_last_layer_runs_forward_once_and_every_other_one_twice(name: str) -> None:
    model, runs = built(ToyModel), Counter[int]()
    for index, block in enumerate(model.blocks):
        block.up.register_forward_hook(lambda *_, index=index: runs.update([index]))
    step(model, schedules()[name])
    once = NUM_MICRO_BATCHES
    assert runs == {0: 2 * once, 1: 2 * once, LAST: 2 * once if name == "apart" else once}


@pytest.mark.parametrize("kind", [ToyModel, SkippingToy])
def test_the_graph_of_the_forward_has_the_bits_of_a_recompute_and_of_plain_autograd(kind: type[ToyModel]) -> None:
    model = built(kind)
    losses, grads = plain_step(model, [partial(model, each) for each in toy_inputs(NUM_MICRO_BATCHES)], seed=0)
    for name in ("vertical", "apart"):
        ours, our_grads = step(built(kind), schedules()[name])
        assert ours == losses
        assert [name for name in grads if not torch.equal(grads[name], our_grads[name])] == []


class Alive:
    """Which micro-batches have tensors of the last layer or logits in memory, asked at every run of a watched module."""

    def __init__(self, model: ToyModel) -> None:
        self.found: list[tuple[str, set[int]]] = []
        self._kept: list[tuple[int, StorageWeakRef]] = []
        self._micro_batch = -1
        last = model.blocks[LAST]
        model.blocks[LAST - 1].up.register_forward_hook(partial(self._ask, "before"))
        last.up.register_forward_pre_hook(self._begin)
        for name, module in {"last": last.up, "activation": last.drop, "output": last, "logits": model.head}.items():
            module.register_forward_hook(partial(self._keep, name))

    def _begin(self, *_: Any) -> None:
        self._micro_batch += 1

    def now(self) -> set[int]:
        return {micro_batch for micro_batch, tensor in self._kept if not tensor.expired()}

    def _ask(self, name: str, *_: Any) -> None:
        self.found.append((name, self.now()))

    def _keep(self, name: str, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self._ask(name)
        self._kept.append((self._micro_batch, StorageWeakRef(output.untyped_storage())))


@pytest.mark.parametrize("kind", [ToyModel, SkippingToy])
@pytest.mark.parametrize("name", ORDERS)
def test_one_micro_batchs_graph_and_logits_are_alive_at_a_time(kind: type[ToyModel], name: str) -> None:
    model = built(kind)
    alive = Alive(model)
    step(model, schedules()[name])
    last = [[("last", set()), *((each, {m}) for each in ("activation", "output", "logits"))] for m in range(NUM_MICRO_BATCHES)]
    before = [("before", set())]
    if name == "horizontal":
        assert alive.found == sum((before + visit + before for visit in last), [])
    else:
        assert alive.found == before * NUM_MICRO_BATCHES + sum(last, []) + before * NUM_MICRO_BATCHES
    assert alive.now() == set()


def test_a_hugging_face_model_in_the_engine_runs_its_last_layer_once(tmp_path: Path) -> None:
    """And has one micro-batch's logits at a time."""
    notes = ModuleType("notes")  # of which no copy is taken: recomputes are counted, too
    notes.runs, notes.alive, notes.most = Counter[int](), set[StorageWeakRef](), list[int]()

    def keep(*found: Any) -> None:
        notes.alive.add(StorageWeakRef(found[2].untyped_storage()))
        notes.most.append(sum(not logits.expired() for logits in notes.alive))

    config = base_config(tmp_path, num_micro_batches=NUM_MICRO_BATCHES, dtype="fp32", params="cpu", optimizer="cpu")
    config["vertical_schedule"]["activations"] = {"keep": "none"}  # else all layers run once from the second step on
    with running(config, partial(tiny_gpt2, NUM_LAYERS), vertical=True) as (engine, model):
        for index, block in enumerate(model.transformer.h):
            block.mlp.c_fc.register_forward_hook(lambda *_, index=index: notes.runs.update([index]))
        model.lm_head.register_forward_hook(keep)
        for step_batches in token_batches(2, NUM_MICRO_BATCHES):
            engine.train_batch(iter(step_batches))
    assert notes.runs == {0: 4 * NUM_MICRO_BATCHES, 1: 4 * NUM_MICRO_BATCHES, LAST: 2 * NUM_MICRO_BATCHES}
    assert notes.most == [1] * 2 * NUM_MICRO_BATCHES


def test_an_input_of_the_last_layer_changed_after_it_ran_is_refused() -> None:
    with pytest.raises(LayerError, match=r"input of block blocks\.2 was changed in place after the block had run") as caught:
        step(built(LateToy), schedules()["vertical"])
    assert "2B0  <-- here" in caught.value.__notes__[0]
