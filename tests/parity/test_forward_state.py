"""State that a forward keeps outside its own variables belongs to its micro-batch: stock's bits, in training and evaluation."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import Family
from harness import (
    Run,
    assert_identical,
    differing,
    read_weights,
    run_arm,
    run_both,
    running,
)
from single_state import GEMMAS, NUMBERS, SINGLE, ibert
from stateful import Base, Block, M, batches, config_in
from stateful_models import (
    CASES,
    NOTES,
    BufferThroughParent,
    Counting,
    GlobalList,
    Keeper,
    MaskOnBlocks,
    OwnGenerators,
    PythonRandom,
    Ranges,
    SharedContext,
    SharedUserDict,
    Skipping,
    Spectral,
    Statistics,
    TorchSpectral,
    reset_globals,
)
from torch import nn

from ds_vertical.errors import LayerError
from ds_vertical.model.state.containers import MOST_CONTAINERS
from ds_vertical.offload import grad_accumulator


@pytest.fixture(autouse=True)
def fresh_globals() -> None:
    reset_globals()


# one of each kind; the others are slow
FAST = {MaskOnBlocks, SharedContext, Statistics, SharedUserDict, OwnGenerators, PythonRandom, Counting, Ranges}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.__name__, marks=[] if case in FAST else pytest.mark.slow) for case in (*CASES, *SINGLE)],
)
def test_training_has_stocks_bits(tmp_path: Path, case: type[Base]) -> None:
    ends: list[dict[str, torch.Tensor]] = []

    def keep(engine: Any, step: int) -> None:
        ends.append({name: buffer.clone() for name, buffer in engine.module.named_buffers()})

    runs: list[Run] = []
    for vertical in (False, True):
        NOTES.clear()
        NUMBERS.clear()
        random.seed(5), np.random.seed(5)
        runs.append(run_arm(config_in(tmp_path), case, batches(), vertical=vertical, between=keep))
    assert_identical(*runs)
    half = len(ends) // 2
    for stock, ours in zip(ends[:half], ends[half:], strict=True):
        assert stock.keys() == ours.keys() and all(torch.equal(stock[name], ours[name]) for name in stock)


@pytest.mark.slow
def test_torchs_own_spectral_norm_has_stocks_bits(tmp_path: Path) -> None:
    config = config_in(tmp_path, params="cpu", optimizer="cpu")
    assert_identical(*run_both(config, TorchSpectral, batches(), under_zero_init=False))


def test_blocks_that_hand_their_input_on_have_the_gradients_of_plain_torch(tmp_path: Path) -> None:
    """In stock a parameter that a micro-batch gives no gradient to gets the one of another again."""
    with running(config_in(tmp_path), Skipping, vertical=True) as (engine, model):
        for step in batches():
            plain = Skipping()
            plain.load_state_dict(read_weights(model))
            torch.stack([plain(**micro_batch) for micro_batch in step]).mean().backward()
            expected = torch.stack([param.grad.norm() for param in plain.parameters() if param.grad is not None]).norm()
            engine.train_batch(iter(step))
            assert float(engine.get_global_grad_norm()) == pytest.approx(expected.item(), rel=1e-5)


# ---- models of Hugging Face


SHARING = [(family, shared, number) for family in GEMMAS for shared in (1, 2) for number in (1, M)]


@pytest.mark.parametrize(
    ("family", "shared", "num_micro_batches"),
    [pytest.param(*row, marks=() if row == (GEMMAS[0], 2, M) else pytest.mark.slow) for row in SHARING],
    ids=lambda each: each.name if isinstance(each, Family) else str(each),
)
def test_layers_that_share_keys_and_values(tmp_path: Path, family: Family, shared: int, num_micro_batches: int) -> None:
    """The last one or two layers read what those of their kind before them have written into a dict, gradients and all."""
    family = replace(family, settings=dict(family.settings) | {"num_kv_shared_layers": shared})
    config = config_in(tmp_path) | {"gradient_accumulation_steps": num_micro_batches}
    assert_identical(*run_both(config, family.builder(), family.batches(2, num_micro_batches)))


def test_ranges_that_ibert_replaces_in_each_forward(tmp_path: Path) -> None:
    steps = Family("bert").batches(2, M)
    assert_identical(*run_both(config_in(tmp_path), ibert, steps))


# ---- hooks that keep outputs


def train_with_hooks(folder: Path, keep: Callable[[Any, Any], None], loss_fn: Any, *, vertical: bool) -> tuple[Any, ...]:
    """Losses, norms and weights of training, and losses of evaluation, with a hook on the second block."""
    with running(config_in(folder), Base, vertical=vertical) as (engine, model):
        model.blocks[1].register_forward_hook(lambda module, args, output: keep(module, output))
        losses, norms = [], []
        for step in batches():
            losses.append(engine.train_batch(iter(step), loss_fn).item())
            norms.append(float(engine.get_global_grad_norm()))
        evaluated = engine.eval_batch(iter(batches(1, seed=9)[0]), loss_fn).item()
        return losses, norms, evaluated, read_weights(model)


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("where", ["dict", "list", "attribute"])
def test_what_a_hook_keeps_is_its_micro_batchs(tmp_path: Path, where: str, detached: bool) -> None:
    results = []
    for vertical in (False, True):
        keeper = Keeper(where, detached)
        results.append(train_with_hooks(tmp_path, keeper.keep, keeper.loss_fn, vertical=vertical))
    (*stock, weights), (*ours, own) = results
    assert stock == ours
    assert not differing(weights, own)


# ---- evaluation


@pytest.mark.parametrize("case", [MaskOnBlocks, SharedContext, GlobalList, BufferThroughParent, Statistics, SharedUserDict])
def test_evaluation_sees_its_own_state(tmp_path: Path, case: type[Base]) -> None:
    """Each micro-batch's loss is that of stock's evaluation, and of a forward by itself."""
    arms: list[list[float]] = []
    for vertical in (False, True):
        losses: list[float] = []
        with running(config_in(tmp_path), case, vertical=vertical) as (engine, model):
            engine.train_batch(iter(batches(1, seed=8)[0]))
            engine.eval_batch(iter(batches(1)[0]), lambda loss, _, losses=losses: losses.append(loss.item()) or loss)
            model.eval()
            assert [engine(**micro_batch).item() for micro_batch in batches(1)[0]] == losses[-M:]
        arms.append(losses[-M:])
    assert arms[0] == arms[1] and len(set(arms[0])) == M


@pytest.mark.parametrize(
    "case", [Counting, *(pytest.param(each, marks=pytest.mark.slow) for each in (OwnGenerators, Ranges, Spectral))]
)
def test_evaluation_goes_on_from_micro_batch_to_micro_batch_as_stocks_does(tmp_path: Path, case: type[Base]) -> None:
    """And each evaluation from the one before, with a step of training between the second and the third."""
    arms = []
    for vertical in (False, True):
        losses: list[float] = []
        with running(config_in(tmp_path), case, vertical=vertical) as (engine, model):
            for index, step in enumerate(batches(4)):
                if index == 2:
                    losses.append(engine.train_batch(iter(step)).item())
                else:
                    engine.eval_batch(iter(step), lambda loss, _, losses=losses: losses.append(loss.item()) or loss)
            arms.append((losses[-2 * M :], {name: buffer.tolist() for name, buffer in model.named_buffers()}))
    assert arms[0] == arms[1]


# ---- what cannot be followed


class HoldingBlock(Block):
    """Has taken one of what it holds where that is a generator that has begun."""

    held: Callable[[], Any]

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.source = type(self).held()

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.body(x)


def endless() -> Iterator[float]:
    number = 0.0
    while True:
        number += 1
        yield number


def ended() -> Iterator[float]:
    generator = iter([1.0])
    found = (each for each in generator)
    assert list(found) == [1.0]
    return found


def holding(what: Callable[[], Any]) -> type[Base]:
    class Of(HoldingBlock):
        held = staticmethod(what)

    class Holding(Base):
        block = Of

    return Holding


@pytest.mark.parametrize(
    ("what", "named"),
    [
        (
            endless,
            r"blocks\.0\.source: holds a generator, whose place can be neither read.*a number that the forward counts up",
        ),
        (lambda: [itertools.count()], r"blocks\.0\.source: holds a count, whose place"),
        (lambda: {"of": itertools.cycle([1, 2])}, r"blocks\.0\.source: holds a cycle, whose place"),
        (lambda: iter([1.0, 2.0]), r"blocks\.0\.source: holds a list_iterator, whose place"),
        (
            random.SystemRandom,
            r"blocks\.0\.source: holds a SystemRandom, whose numbers never come again.*random\.Random\(seed\)",
        ),
    ],
)
@pytest.mark.parametrize("self_check", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_only_goes_on_is_refused_by_name(tmp_path: Path, what: Callable[[], Any], named: str, self_check: bool) -> None:
    """In any order: the recompute of a block would go on, too."""
    config = config_in(tmp_path, section={"self_check": self_check})
    with running(config, holding(what), vertical=True) as (engine, model):
        before = read_weights(model)
        with pytest.raises(LayerError, match=named):
            engine.train_batch(iter(batches(1)[0]))
        with pytest.raises(LayerError, match=named):
            engine.eval_batch(iter(batches(1)[0]))
        assert engine.global_steps == 0 and not differing(before, read_weights(model))


class Crowded(Base):
    """Its forwards add to a list that leads to more objects than a step looks after."""

    num_objects = MOST_CONTAINERS + 1

    def __init__(self) -> None:
        super().__init__()
        self.crowd: list[list[float]] = [[] for _ in range(self.num_objects)]

    def end(self, x: torch.Tensor) -> torch.Tensor:
        self.crowd.append([float(x.detach().sum())])
        return super().end(x)


class Few(Crowded):
    num_objects = 10


@pytest.mark.parametrize("self_check", [False, None])
def test_state_of_too_many_objects_is_refused_by_name(tmp_path: Path, self_check: bool | None) -> None:
    assert MOST_CONTAINERS == 20_000  # as docs/state.md says
    config = config_in(tmp_path, section={"self_check": self_check})
    with running(config, Crowded, vertical=True) as (engine, model):
        before = read_weights(model)
        with pytest.raises(LayerError, match=r"crowd changes during the forward and holds too many objects.*object of its own"):
            engine.train_batch(iter(batches(1)[0]))
        assert engine.global_steps == 0 and not differing(before, read_weights(model))
        assert len(model.crowd) == MOST_CONTAINERS + 1


def test_state_of_few_objects_is_kept(tmp_path: Path) -> None:
    with running(config_in(tmp_path), Few, vertical=True) as (engine, model):
        engine.train_batch(iter(batches(1)[0]))
        assert len(model.crowd) == Few.num_objects + M


def test_a_generator_at_its_end_is_none(tmp_path: Path) -> None:
    with running(config_in(tmp_path), holding(ended), vertical=True) as (engine, _):
        engine.train_batch(iter(batches(1)[0]))


class SharedGeneratorBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.body(x * (torch.rand(x.shape, generator=self.generator) > 0.3))


class SharedGenerator(Base):
    block = SharedGeneratorBlock

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)
        for block in self.blocks:
            block.generator = self.generator


def test_a_generator_that_blocks_share_is_refused_by_name_and_right_in_stocks_order(tmp_path: Path) -> None:
    with running(config_in(tmp_path), SharedGenerator, vertical=True) as (engine, model):
        state = model.generator.get_state()
        with pytest.raises(LayerError, match=r"generator: several parts of the forward draw from this generator.*horizontal"):
            engine.train_batch(iter(batches(1)[0]))
        assert torch.equal(model.generator.get_state(), state)
    stock, ours = run_both(config_in(tmp_path, section={"order": "horizontal"}), SharedGenerator, batches())
    assert_identical(stock, ours)


class OwnBackward(torch.autograd.Function):
    """Runs blocks without a graph, and once more in its backward, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, blocks: nn.ModuleList) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.blocks = blocks
        for block in blocks:
            x = block(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        first = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            x = first
            for block in ctx.blocks:
                x = block(x)
        torch.autograd.backward(x, grad)
        return first.grad, None


class Reversible(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(OwnBackward.apply(self.embed(x), self.blocks)).square().mean()


@pytest.mark.parametrize("self_check", [True, False])
def test_blocks_within_a_function_with_its_own_backward_are_refused_by_name(tmp_path: Path, self_check: bool) -> None:
    with running(config_in(tmp_path, section={"self_check": self_check}), Reversible, vertical=True) as (engine, model):
        before = read_weights(model)
        with pytest.raises(
            LayerError, match=r"blocks\.0 is called within the forward of OwnBackward.*a module around that function"
        ):
            engine.train_batch(iter(batches(1)[0]))
        assert not differing(before, read_weights(model))


@pytest.mark.parametrize("order", ["vertical", "horizontal"])
def test_parameters_frozen_before_the_first_step_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """Ahead of the self-check, which would ask torch where their gradients come from."""
    monkeypatch.setattr(grad_accumulator, "LARGE", 1)
    with running(config_in(tmp_path, section={"self_check": True, "order": order}), Base, vertical=True) as (engine, model):
        before = read_weights(model)
        model.blocks[1].requires_grad_(False)
        with pytest.raises(LayerError, match=r"blocks\.1\.up\.weight: requires_grad was set to False .* \(4 parameter"):
            engine.train_batch(iter(batches(1)[0]))
        assert not differing(before, read_weights(model))


@pytest.mark.parametrize("wanted", [True, False])
def test_parameters_unfrozen_after_initialize_are_refused_by_name(tmp_path: Path, wanted: bool) -> None:
    """With the self-check and without; none is left with a gradient."""

    def build() -> Base:
        model = Base()
        model.blocks[1].requires_grad_(False)
        return model

    with running(config_in(tmp_path, section={"self_check": wanted}), build, vertical=True) as (engine, model):
        model.blocks[1].requires_grad_(True)
        with pytest.raises(LayerError, match=r"blocks\.1\.up\.weight: requires_grad was set to True .* \(4 parameter"):
            engine.train_batch(iter(batches(1)[0]))
        assert all(param.grad is None for param in model.parameters())
        model.blocks[1].requires_grad_(False)
        engine.train_batch(iter(batches(1)[0]))


def test_parameters_frozen_later_are_refused_by_name_in_each_step(tmp_path: Path) -> None:
    with running(config_in(tmp_path), Base, vertical=True) as (engine, model):
        first, second, third = batches(3)
        engine.train_batch(iter(first))
        before = read_weights(model)
        model.blocks[1].requires_grad_(False)
        with pytest.raises(LayerError, match=r"blocks\.1\.up\.weight: requires_grad was set to False .* \(4 parameter"):
            engine.train_batch(iter(second))
        assert not differing(before, read_weights(model))
        model.blocks[1].requires_grad_(True)
        engine.train_batch(iter(second))
        engine.train_batch(iter(third))
        own = read_weights(model)
    stock = run_arm(config_in(tmp_path), Base, batches(3), vertical=False)
    assert not differing(stock.weights, own)


class ByName(Base):
    def forward(self, x: Any = None, y: Any = None, scale: Any = None) -> torch.Tensor:
        out = super().forward(x if x is not None else y)
        return out if scale is None else out * scale.mean()


def test_micro_batches_of_different_keys(tmp_path: Path) -> None:
    mixed: list[list[dict[str, torch.Tensor]]] = [
        [a, {"y": b["x"]}, c | {"scale": torch.full((3,), 2.0)}] for a, b, c in batches()
    ]
    assert_identical(*run_both(config_in(tmp_path), ByName, mixed))


class LateBlock(Block):
    """Begins to count in the third step."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("calls", torch.zeros(()))
        self.start = False

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        if self.start:
            self.calls.add_(1)
            self.late = x.detach().mean()
            return self.body(x * (1 + self.calls * 0.1) + self.late)
        return self.body(x)


class Late(Base):
    block = LateBlock


def test_state_that_changes_for_the_first_time_in_a_later_step(tmp_path: Path) -> None:
    def begin(engine: Any, step: int) -> None:
        for block in engine.module.blocks if step == 1 else ():
            block.start = True

    stock, ours = run_both(config_in(tmp_path), Late, batches(4), between=begin)
    assert_identical(stock, ours)


def test_a_step_that_fails_leaves_state_as_it_was(tmp_path: Path) -> None:
    with running(config_in(tmp_path), Counting, vertical=True) as (engine, model):
        engine.train_batch(iter(batches(1)[0]))
        before = [(block.calls, block.note.calls, list(block.note.sizes)) for block in model.blocks]

        def fail(*_: Any) -> torch.Tensor:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            engine.train_batch(iter(batches(1)[0]), fail)
        assert [(block.calls, block.note.calls, list(block.note.sizes)) for block in model.blocks] == before
