"""The self-check ahead of the first step: it agrees where training is exact, and finds what is switched off."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from greenlet import getcurrent
from harness import base_config, differing, read_weights, running, small_buffers
from models import tiny_gpt2, token_batches
from stateful import NUM_LAYERS, WIDTH, Base, Block, CountUp, CountUpBlock, batches, config_in
from stateful_models import (
    CASES,
    BufferOfModel,
    BufferThroughParent,
    GlobalList,
    Keeper,
    MaskOnBlocks,
    Namespaces,
    Nones,
    NumpyGenerators,
    NumpyRandom,
    OwnGenerators,
    PythonRandom,
    Ranges,
    SharedContext,
    SharedDataclass,
    SharedDict,
    SharedUserDict,
    Skipping,
    Statistics,
    TorchSpectral,
    reset_globals,
)
from torch import nn

from ds_vertical.engine.self_check.check import SelfCheckError
from ds_vertical.engine.self_check.first_step import FirstStepCheck
from ds_vertical.errors import LayerError
from ds_vertical.model.stubs import Coroutine


@pytest.fixture(autouse=True)
def fresh_globals() -> None:
    reset_globals()


def checked(folder: Path, wanted: bool | None = True, **section: Any) -> dict[str, Any]:
    return config_in(folder, section={"self_check": wanted, "seed": 4} | section)


def streams(model: nn.Module) -> list[Any]:
    """Where the generators stand, Python's, NumPy's and torch's own, and those that modules hold."""
    found: list[Any] = [random.getstate(), pickle.dumps(np.random.get_state()), torch.get_rng_state().tolist()]
    for value in (value for module in model.modules() for value in vars(module).values()):
        if isinstance(value, torch.Generator):
            found.append(value.get_state().tolist())
        elif isinstance(value, np.random.Generator):
            found.append(value.bit_generator.state)
        elif isinstance(value, random.Random):
            found.append(value.getstate())
    return found


AGREEING = (Base, SharedContext, SharedUserDict, Ranges, PythonRandom, NumpyRandom, NumpyGenerators, OwnGenerators)
NUM_STREAMS = {NumpyGenerators: 2 * NUM_LAYERS, OwnGenerators: NUM_LAYERS}  # of their modules


@pytest.mark.parametrize("seeds", [True, False])
@pytest.mark.parametrize("case", AGREEING, ids=lambda case: case.__name__)
def test_a_check_that_agrees_puts_all_generators_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: type[Base], seeds: bool
) -> None:
    """As they stand right behind it, ahead of the step, with a stream for each micro-batch or one for all."""
    stood = []
    check = FirstStepCheck._compare

    def compare(self: FirstStepCheck, *arguments: Any) -> None:
        model = self._parts.module
        before = streams(model)
        check(self, *arguments)
        stood.append((before, streams(model)))

    monkeypatch.setattr(FirstStepCheck, "_compare", compare)
    with running(checked(tmp_path, seed_micro_batches=seeds), case, vertical=True) as (engine, model):
        [engine.train_batch(iter(step)) for step in batches(2)]
        assert len(streams(model)) == 3 + NUM_STREAMS.get(case, 0)
    ((before, after),) = stood
    assert before == after


@pytest.mark.parametrize("case", AGREEING, ids=lambda case: case.__name__)
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
            randomness = streams(model)
            ends.append((losses, randomness, read_weights(model), buffers))
    (losses, randomness, weights, buffers), (own, own_randomness, own_weights, own_buffers) = ends
    assert losses == own and randomness == own_randomness
    assert not differing(weights, own_weights)
    assert all(torch.equal(buffers[name], own_buffers[name]) for name in buffers)
    assert "self_check: 2 micro-batches" in capsys.readouterr().out


def test_it_agrees_with_a_hugging_face_model_in_bf16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_buffers(base_config(tmp_path, dtype="bf16", section={"self_check": True}))
    with running(config, lambda: tiny_gpt2(3, 256, dropout=0.1), vertical=True) as (engine, _):
        engine.train_batch(iter(token_batches(1, 3)[0]))
    assert "they agree" in capsys.readouterr().out


def test_it_agrees_where_gradients_in_bf16_are_summed_in_fp32(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_buffers(base_config(tmp_path, dtype="bf16", section={"self_check": True}))
    with running(config, lambda: tiny_gpt2(3, 256, tied=True), vertical=True) as (
        engine,
        _,
    ):  # head and embedding share their weight
        engine.train_batch(iter(token_batches(1, 3)[0]))
    assert "they agree" in capsys.readouterr().out


def opened(folder: Path, case: Callable[[], nn.Module]) -> contextlib.AbstractContextManager[tuple[Any, nn.Module]]:
    """An engine that checks. Under zero.Init torch's own spectral norm fails in stock as well."""
    if case is not TorchSpectral:
        return running(checked(folder), case, vertical=True)
    config = config_in(folder, params="cpu", optimizer="cpu", section={"self_check": True, "seed": 4})
    return running(config, case, vertical=True, under_zero_init=False)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, TorchSpectral, Skipping], ids=lambda case: case.__name__)
def test_it_agrees_with_every_kind_of_state(tmp_path: Path, case: type[Base]) -> None:
    """And with blocks that hand their input on, which is no state: nothing of it could be switched off."""
    with opened(tmp_path, case) as (engine, _):
        engine.train_batch(iter(batches(1)[0]))


def without_handling(engine: Any) -> None:
    engine._state.learned.handled = False


def refused(folder: Path, case: Callable[[], nn.Module], loss_fn: Any = None, prepare: Any = None) -> str:
    """What the self-check says where state is not handled; nothing has changed."""
    with opened(folder, case) as (engine, model):
        without_handling(engine)
        if prepare is not None:
            prepare(model)
        before = read_weights(model)
        with pytest.raises(LayerError) as raised:  # SelfCheckError, or a refusal by name
            engine.train_batch(iter(batches(1)[0]), loss_fn)
        assert engine.global_steps == 0 and not differing(before, read_weights(model))
        return str(raised.value)


RAISES = r"the schedule raises \w+ in the {}, .*, where torch's own order raises nothing: "
FOUND: list[tuple[type[Base], str]] = [
    (SharedUserDict, RAISES.format("backward of .*") + r"|layer 1 .*gradient of blocks.1"),
    (MaskOnBlocks, RAISES.format(r"forward of layer 0 \(blocks.0\)") + ".*must match"),
    (SharedContext, RAISES.format(r"forward of layer \d \(blocks.\d\)") + ".*must match"),
    (Statistics, r"^blocks\.\d\.up\.\w+ is used by code outside its block's forward.*\(.*keeps the graph of the block"),
]


@pytest.mark.parametrize(
    ("case", "words"),
    [pytest.param(*row, id=row[0].__name__) for row in FOUND],
)
def test_it_finds_what_is_not_handled(tmp_path: Path, case: type[Base], words: str) -> None:
    said = refused(tmp_path, case)
    assert re.search(words, said) and ("horizontal" in said or "register_external_parameter" in said)


GRADIENT = r"self_check: layer \d \(blocks\.\d\): the gradient of blocks\.\d\.\w+\.\w+ for micro-batch 0 differs by .*"
LOSS = r"self_check: the loss of micro-batch 1 differs by .*; the outputs of all layers agree.*"
BACKWARD = RAISES.format(r"backward of layer 3 \(blocks\.3\)") + ".*"
OUTPUT = r"self_check: layer 0 \(blocks\.0\): output tensor 0 of micro-batch 0 differs by .*"
OTHERS = [case for case in (*CASES, TorchSpectral) if case not in {row[0] for row in FOUND} | {Nones, Namespaces}]
FAST = (OwnGenerators, PythonRandom)
SAID = {
    **dict.fromkeys((GlobalList, BufferThroughParent), LOSS),
    **dict.fromkeys((SharedDict, SharedDataclass), BACKWARD),
    **dict.fromkeys((PythonRandom, NumpyRandom), OUTPUT),
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case in FAST else pytest.mark.slow) for case in OTHERS])
def test_it_finds_every_kind_of_state(tmp_path: Path, case: type[Base]) -> None:
    """Layer, tensor and micro-batch that differ first, or the state, and what to write."""
    said = refused(tmp_path, case)
    if case is BufferOfModel:
        assert re.search(r"block blocks\.0 writes one of its inputs in place; .*: change the block to write a copy", said)
    else:
        assert re.search(SAID.get(case, GRADIENT) + 'set vertical_schedule.order to "horizontal"', said)


@pytest.mark.parametrize("detached", [False, True])
def test_it_finds_a_hook_whose_output_is_another_micro_batchs(tmp_path: Path, detached: bool) -> None:
    keeper = Keeper("dict", detached)

    def prepare(model: Any) -> None:
        model.blocks[1].register_forward_hook(lambda module, args, output: keeper.keep(module, output))

    said = refused(tmp_path, Base, keeper.loss_fn, prepare)  # micro-batch 0 meets what 2 has left
    assert "loss of micro-batch 0" in said, said


COUNTED = (
    r"self_check: layer 0 \(blocks\.0\): output tensor 0 of micro-batch 1 differs by \S+ of its norm from torch's own order;"
    r" what changes there, and may be the cause: blocks\.\d\.counter; nothing has been trained; set vertical_schedule\.order to"
    r' "horizontal", .*'
)


def test_what_cannot_be_followed_is_found_by_name_and_right_in_stocks_order(tmp_path: Path) -> None:
    with running(checked(tmp_path), CountUp, vertical=True) as (engine, model):
        with pytest.raises(SelfCheckError, match=COUNTED):
            engine.train_batch(iter(batches(1)[0]))
        assert model.blocks[0].counter == [0]
    with running(checked(tmp_path, order="horizontal"), CountUp, vertical=True) as (engine, _):
        engine.train_batch(iter(batches(1)[0]))


class SuffixBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.body(x * (1 + 0.1 * self.owner[0].steps[0]))


class CountedInTheSuffix(Base):
    """Blocks read what the end of the forward counts up."""

    block = SuffixBlock

    def __init__(self) -> None:
        super().__init__()
        self.steps = [0]
        for block in self.blocks:
            block.owner = (self,)

    def end(self, x: torch.Tensor) -> torch.Tensor:
        self.steps[0] += 1
        return x.new_zeros(())


class CountedByAHook(Base):
    """A hook on the last block and the code behind that block count up the same number, which the latter reads."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = [0]
        self.blocks[-1].register_forward_hook(self.count)

    def count(self, *_: object) -> None:
        self.steps[0] += 1

    def end(self, x: torch.Tensor) -> torch.Tensor:
        self.count()
        return 0.1 * self.steps[0] * x.mean()


@pytest.mark.parametrize(
    ("case", "differs"),
    [
        (CountedInTheSuffix, r"self_check: layer 0 \(blocks\.0\): output tensor 0 of micro-batch 1 differs by .*"),
        (CountedByAHook, r"self_check: the loss of micro-batch 1 differs by .*"),
    ],
)
def test_state_with_which_no_micro_batch_begins_as_in_stock_is_found(tmp_path: Path, case: type[Base], differs: str) -> None:
    """The rows of docs/state.md that leave it to the check; without the check such a step would train with other numbers."""
    with running(checked(tmp_path, None), case, vertical=True) as (engine, model):
        with pytest.raises(SelfCheckError, match=differs + '.*set vertical_schedule.order to "horizontal"'):
            engine.train_batch(iter(batches(1)[0]))
        assert model.steps == [0]


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


# ---- small gradients


class FaintBlock(CountUpBlock):
    """A path whose output is lost in rounding, and whose gradient turns its sign with the fifth call."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.faint = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.counter[0] += 1
        return self.body(x) + 3e-8 * self.faint(x) * (1 if self.counter[0] <= NUM_LAYERS else -1)


class Faint(CountUp):
    block = FaintBlock


def test_a_small_gradient_that_is_wholly_wrong_is_found(tmp_path: Path) -> None:
    with running(checked(tmp_path), Faint, vertical=True) as (engine, _):
        with pytest.raises(SelfCheckError, match=r"the gradient of blocks\.\d\.faint\.\w+ for micro-batch 1 differs by [12]\."):
            engine.train_batch(iter(batches(1)[0]))


# ---- what it says


def said_by(
    folder: Path, case: Callable[[], nn.Module], prepare: Any = None, loss_fn: Any = None, **section: Any
) -> SelfCheckError:
    with running(checked(folder, **section), case, vertical=True) as (engine, model):
        if prepare is not None:
            prepare(model)
        before = read_weights(model)
        with pytest.raises(SelfCheckError) as raised:
            engine.train_batch(iter(batches(1)[0]), loss_fn)
        assert engine.global_steps == 0 and not differing(before, read_weights(model))
        assert all(param.grad is None for param in model.parameters())
        return raised.value


def test_a_gradient_is_named_with_layer_and_micro_batch(tmp_path: Path) -> None:
    calls = itertools.count()  # of a library: nobody puts it back

    def prepare(model: Any) -> None:
        model.blocks[1].up.weight.register_hook(lambda grad: grad * 2 if next(calls) >= 2 else grad)

    assert re.search(
        r"self_check: layer 1 \(blocks\.1\): the gradient of blocks\.1\.up\.weight for micro-batch \d differs by [3-8]\.\de-01"
        " of its norm from torch's own order; outputs and losses agree; nothing has been trained; set",
        str(said_by(tmp_path, Base, prepare)),
    )


def test_a_gradient_outside_the_layers_is_named(tmp_path: Path) -> None:
    calls = itertools.count()

    def prepare(model: Any) -> None:
        model.head.bias.register_hook(lambda grad: grad * 2 if next(calls) >= 2 else grad)

    assert re.search(
        r"outside the layers: the gradient of head\.bias, summed over micro-batches 0 to 1, differs by \S+ of its norm from"
        " torch's own order; outputs, losses and the layers' gradients agree; nothing has been trained",
        str(said_by(tmp_path, Base, prepare)),
    )


def test_a_loss_is_named(tmp_path: Path) -> None:
    def loss_fn(loss: torch.Tensor, _: Any) -> torch.Tensor:
        return loss * 2 if isinstance(getcurrent(), Coroutine) else loss

    assert re.search(
        "self_check: the loss of micro-batch 0 differs by 5.0e-01 of its norm from torch's own order; the outputs of all layers"
        " agree; nothing has been trained",
        str(said_by(tmp_path, Base, loss_fn=loss_fn)),
    )


class OtherwiseBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.body(x * 2 if isinstance(getcurrent(), Coroutine) else x)


class Otherwise(Base):
    block = OtherwiseBlock


def test_in_horizontal_order_nobody_is_told_to_set_it(tmp_path: Path) -> None:
    assert '"horizontal"' in str(said_by(tmp_path, Otherwise))
    said = str(said_by(tmp_path, Otherwise, order="horizontal"))
    assert "horizontal" not in said and "change what the model does there; vertical_schedule.self_check: false" in said


class RaisingBlock(Block):
    """Raises in one of the orders, in layer 2 of the second micro-batch."""

    scheduled = False

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        if self.index == 2 and x.shape[1] == 4 and isinstance(getcurrent(), Coroutine) is self.scheduled:
            raise KeyError("what is missing")
        return self.body(x)


class Raising(Base):
    block = RaisingBlock


class RaisingScheduledBlock(RaisingBlock):
    scheduled = True


class RaisingScheduled(Base):
    block = RaisingScheduledBlock


@pytest.mark.parametrize("order", ["vertical", "horizontal"])
@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            Raising,
            r"torch's own order raises KeyError in the forward of layer 2 \(blocks\.2\), for micro-batch 1: 'what is miss",
        ),
        (
            RaisingScheduled,
            r"the schedule raises KeyError in the forward of layer 2 \(blocks\.2\), or of the code between it and the layer"
            r" ahead of it, for micro-batch 1, where torch's own order raises nothing: 'what is missing'",
        ),
    ],
)
def test_an_exception_is_named_with_order_layer_and_remedy(tmp_path: Path, order: str, case: type[Base], words: str) -> None:
    error = said_by(tmp_path, case, order=order)
    assert re.search(words, str(error)) and isinstance(error.__cause__, KeyError)
    assert "nothing has been trained" in str(error) and "vertical_schedule.self_check: false" in str(error)
    assert ("horizontal" in str(error)) is (order == "vertical" and case is RaisingScheduled)


@pytest.mark.parametrize("scheduled", [False, True])
def test_an_exception_of_the_backward_is_named(tmp_path: Path, scheduled: bool) -> None:
    calls = itertools.count()

    def hook(grad: torch.Tensor) -> None:
        if next(calls) == (2 if scheduled else 0):
            raise ValueError("not this gradient")

    error = said_by(tmp_path, Base, lambda model: model.blocks[1].up.weight.register_hook(hook))
    order = "the schedule" if scheduled else "torch's own order"
    assert re.search(rf"{order} raises ValueError in the backward of layer 1 \(blocks\.1\),.*: not this gradient; ", str(error))
    assert isinstance(error.__cause__, ValueError)


def test_an_exception_of_the_loss_is_named_and_state_is_put_back(tmp_path: Path) -> None:
    models = []

    def loss_fn(loss: torch.Tensor, _: Any) -> torch.Tensor:
        raise ValueError("no such label")

    def prepare(model: Any) -> None:
        models.append(model)

    error = said_by(tmp_path, CountUp, prepare, loss_fn)
    assert "in the forward behind layer 3 (blocks.3), for micro-batch 0: no such label" in str(error)
    assert models[0].blocks[0].counter == [0]


def test_what_is_lacking_keeps_its_type_and_has_a_note(tmp_path: Path) -> None:
    def loss_fn(loss: torch.Tensor, _: Any) -> torch.Tensor:
        raise MemoryError("no room")

    with running(checked(tmp_path), Base, vertical=True) as (engine, _), pytest.raises(MemoryError) as raised:
        engine.train_batch(iter(batches(1)[0]), loss_fn)
    assert any("self_check: torch's own order raises MemoryError in the forward" in note for note in raised.value.__notes__)


# ---- hooks of the backward


class Tally:
    def __init__(self) -> None:
        self.calls, self.norms = 0, []

    def __call__(self, module: Any, inputs: Any, outputs: Any) -> None:
        self.calls += 1
        self.norms.append(outputs[0].norm().item())


def test_what_hooks_of_the_backward_collect_is_put_back(tmp_path: Path) -> None:
    ends = []
    for wanted in (True, False):
        notes: list[float] = []
        grads: list[torch.Tensor] = []
        counts, tally = {"up": 0}, Tally()

        def hook(module: Any, inputs: Any, outputs: Any, notes: list[float] = notes, counts: Any = counts) -> None:
            notes.append(outputs[0].norm().item())
            counts["up"] += 1

        with running(checked(tmp_path, wanted), Base, vertical=True) as (engine, model):
            model.blocks[1].register_full_backward_hook(hook)
            model.blocks[2].register_full_backward_hook(tally)
            model.blocks[2].register_full_backward_pre_hook(lambda module, outputs, each=tally: each.norms.append(0.5))
            model.blocks[0].up.weight.register_hook(grads.append)
            for step in batches(2):
                engine.train_batch(iter(step))
        ends.append((notes, counts, tally.calls, tally.norms, [grad.norm().item() for grad in grads]))
    assert ends[0] == ends[1]
    assert len(ends[0][0]) == ends[0][1]["up"] == ends[0][2] == len(ends[0][4]) == 6
