"""State that a forward keeps outside its own variables belongs to its micro-batch: stock's bits, in training and evaluation."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from families import VOCAB, Family, fill
from harness import (
    Run,
    assert_identical,
    differing,
    read_weights,
    run_arm,
    run_both,
    running,
)
from stateful import WIDTH, Base, Block, M, batches, config_in
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import IBertConfig, IBertForMaskedLM
from transformers.initialization import no_init_weights

from ds_vertical.errors import LayerError

# ---- state set by the model, read by blocks


class MaskBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.body(x * self.mask)


class MaskOnBlocks(Base):
    block = MaskBlock

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        for block in self.blocks:
            block.mask = torch.sigmoid(x.mean((0, 2), keepdim=True))  # requires grad
        return ()


class ContextBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        context = self.context
        context.seen.append(x.detach().mean())
        context.calls += 1
        out = self.body(x * context.gain)
        if context.calls == 2:
            context.side = out.mean(-1, keepdim=True)  # with gradient, read by later blocks and by the suffix
        elif context.calls > 2:
            out = out + 0.1 * context.side
        return out


class SharedContext(Base):
    """One context object that the model and all blocks share; each forward begins by resetting it."""

    block = ContextBlock

    def __init__(self) -> None:
        super().__init__()
        self.context = SimpleNamespace(seen=[], calls=0, gain=1.0, side=None)
        for block in self.blocks:
            block.context = self.context

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        self.context.seen.clear()
        self.context.calls, self.context.side = 0, None
        self.context.gain = 1.0 + 0.01 * x.shape[1]
        return ()

    def end(self, x: torch.Tensor) -> torch.Tensor:
        return sum(self.context.seen) * x.mean() + self.context.side.square().mean()


NOTES: list[torch.Tensor] = []


class GlobalListBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        NOTES.append(x.square().mean())  # with gradient
        return self.body(x)


class GlobalList(Base):
    block = GlobalListBlock

    def end(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.stack(NOTES).sum()
        NOTES.clear()
        return 0.1 * total


class BufferOfModelBlock(Block):
    def forward(self, x: torch.Tensor, load: torch.Tensor) -> Any:
        load.add_(x.detach().abs().mean())
        return self.body(x)


class BufferOfModel(Base):
    block = BufferOfModelBlock

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("load", torch.zeros(()))

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        self.load.zero_()
        return (self.load,)

    def end(self, x: torch.Tensor) -> torch.Tensor:
        return self.load.clone() * x.mean()


class BufferOfParentBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.parent[0].load.add_(x.detach().abs().mean())
        return self.body(x)


class BufferThroughParent(BufferOfModel):
    block = BufferOfParentBlock

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.parent = (self,)

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        self.load.zero_()
        return ()


# ---- what blocks leave for the suffix


class StatisticBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.statistic = x.detach().abs().mean()
        self.auxiliary = self.up(x).square().mean()  # with gradient
        return self.body(x)


class Statistics(Base):
    block = StatisticBlock

    def end(self, x: torch.Tensor) -> torch.Tensor:
        return sum(block.statistic * x.mean() + 0.01 * block.auxiliary for block in self.blocks)


class NamespaceBlock(Block):
    def forward(self, x: Any, *args: Any) -> Any:
        x = x.hidden if isinstance(x, SimpleNamespace) else x
        return SimpleNamespace(hidden=self.body(x), extra=[x.mean(), "text"])


class Namespaces(Base):
    """Blocks that return objects."""

    block = NamespaceBlock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        extra = []
        for block in self.blocks:
            x = block(x)
            extra.append(x.extra[0])
        return self.head(x.hidden).square().mean() + torch.stack(extra).sum()


class NoneBlock(Block):
    def forward(self, x: Any, *args: Any) -> None:
        x["hidden"] = self.body(x["hidden"])


class Nones(Base):
    """Blocks that return nothing and write into a dict that they are given."""

    block = NoneBlock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        carrier = {"hidden": self.embed(x)}
        for block in self.blocks:
            block(carrier)
        return self.head(carrier["hidden"]).square().mean()


@dataclass
class Carrier:
    keys: Any = None
    log: Any = None


class SharingBlock(Block):
    """The first half stores keys with gradient in an object, the second half reads them."""

    def forward(self, x: torch.Tensor, shared: Any, *args: Any) -> Any:
        get = shared.get if hasattr(shared, "get") else lambda key: getattr(shared, key)
        if self.index == 1:
            value = (self.up(x), [self.down(x), None])
            if isinstance(shared, Carrier):
                shared.keys = value
            else:
                shared["keys"] = value
        if self.index >= 2:
            first, (second, _) = get("keys")
            x = x * torch.sigmoid(first) + second
        return self.body(x)


class SharedDict(Base):
    block = SharingBlock
    carrier: Callable[[], Any] = dict

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        return (type(self).carrier(),)


class SharedUserDict(SharedDict):
    carrier = collections.UserDict


class SharedDataclass(SharedDict):
    carrier = Carrier


class ListBlock(Block):
    def forward(self, x: torch.Tensor, states: list[torch.Tensor]) -> Any:
        if states:
            x = x + 0.1 * states[-1]
        out = self.body(x)
        states.append(out if self.index % 2 else torch.tanh(out))
        return out


class SharedList(Base):
    block = ListBlock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, states = self.embed(x), []
        for block in self.blocks:
            x = block(x, states)
        return self.head(x).square().mean() + sum(state.mean() for state in states)


# ---- state that makes the recompute another one


class GeneratorBlock(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.generator = torch.Generator().manual_seed(index)

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.body(x * (torch.rand(x.shape, generator=self.generator) > 0.3))


class OwnGenerators(Base):
    block = GeneratorBlock


class PythonRandomBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        kept = random.random() > 0.3  # stochastic depth; stock adds to what a parameter without gradient had, so all have one
        return x + (self.body(x * random.uniform(0.5, 1.5)) - x) * kept


class PythonRandom(Base):
    block = PythonRandomBlock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * random.uniform(0.5, 1.5))


class NumpyRandomBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.body(x * float(np.random.rand()))


class NumpyRandom(Base):
    block = NumpyRandomBlock


class NumpyGeneratorBlock(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.rng, self.old = np.random.default_rng(index), random.Random(index)

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.body(x * float(self.rng.random()) * self.old.random())


class NumpyGenerators(Base):
    block = NumpyGeneratorBlock


class CountingBlock(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.calls = 0
        self.note = SimpleNamespace(calls=0, sizes=[])

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.calls += 1
        self.note.calls += 2
        self.note.sizes.append(x.shape[1])
        return self.body(x * (1 + 0.01 * self.calls + 0.02 * self.note.calls + 0.001 * sum(self.note.sizes)))


class Counting(Base):
    block = CountingBlock


class SpectralBlock(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("u", torch.nn.functional.normalize(torch.ones(WIDTH), dim=0))

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        weight = self.up.weight
        with torch.no_grad():  # one step of the power iteration, in place
            v = torch.nn.functional.normalize(weight.t() @ self.u, dim=0)
            self.u.copy_(torch.nn.functional.normalize(weight @ v, dim=0))
        sigma = self.u.clone() @ (weight @ v)
        return x + self.down(torch.tanh(torch.nn.functional.linear(x, weight / sigma, self.up.bias)))


class Spectral(Base):
    block = SpectralBlock


class CodeBookBlock(Block):
    """A code book larger than any that was put back by copying, moved by each forward."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("codes", torch.linspace(-1, 1, 2000 * WIDTH).view(2000, WIDTH))

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        flat = x.detach().reshape(-1, WIDTH)
        nearest = torch.cdist(flat, self.codes).argmin(-1)
        out = self.body(x + self.codes[nearest].view_as(x))
        self.codes[nearest] = self.codes[nearest].lerp(flat, 0.1)
        return out


class CodeBooks(Base):
    block = CodeBookBlock


class RangeBlock(Block):
    """Buffers that are replaced, not written, as I-BERT's activation ranges are."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("x_min", torch.zeros(1))
        self.register_buffer("x_max", torch.zeros(1))

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.x_min = self.x_min * 0.9 + x.detach().min() * 0.1
        self.x_max = self.x_max * 0.9 + x.detach().max() * 0.1
        return self.body(x / (self.x_max - self.x_min + 1))


class Ranges(Base):
    block = RangeBlock


class NormBlock(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.body(x) + self.norm.running_mean.detach() * x


class RunningStatistics(Base):
    """Running statistics move without a trace in the buffer's version."""

    block = NormBlock

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        return ()

    def end(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(())


class FilledNormBlock(NormBlock):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.norm(x.detach().flatten(0, 1))
        return super().forward(x)


class FilledStatistics(Base):
    block = FilledNormBlock


CASES: list[type[Base]] = [
    MaskOnBlocks,
    SharedContext,
    GlobalList,
    BufferOfModel,
    BufferThroughParent,
    Statistics,
    Namespaces,
    Nones,
    SharedDict,
    SharedUserDict,
    SharedDataclass,
    SharedList,
    OwnGenerators,
    PythonRandom,
    NumpyRandom,
    NumpyGenerators,
    Counting,
    Spectral,
    CodeBooks,
    Ranges,
    FilledStatistics,
]


@pytest.fixture(autouse=True)
def fresh_globals() -> None:
    NOTES.clear()
    random.seed(5)
    np.random.seed(5)


# one of each kind; the others are slow
FAST = {MaskOnBlocks, SharedContext, Statistics, SharedUserDict, OwnGenerators, PythonRandom, Counting, Ranges}


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.__name__, marks=[] if case in FAST else pytest.mark.slow) for case in CASES]
)
def test_training_has_stocks_bits(tmp_path: Path, case: type[Base]) -> None:
    ends: list[dict[str, torch.Tensor]] = []

    def keep(engine: Any, step: int) -> None:
        ends.append({name: buffer.clone() for name, buffer in engine.module.named_buffers()})

    runs: list[Run] = []
    for vertical in (False, True):
        NOTES.clear()
        random.seed(5), np.random.seed(5)
        runs.append(run_arm(config_in(tmp_path), case, batches(), vertical=vertical, between=keep))
    assert_identical(*runs)
    half = len(ends) // 2
    for stock, ours in zip(ends[:half], ends[half:], strict=True):
        assert stock.keys() == ours.keys() and all(torch.equal(stock[name], ours[name]) for name in stock)


# ---- models of Hugging Face

_SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
_PER_LAYER = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB, "sliding_window": 4}
_GEMMA = {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "max_position_embeddings": 64} | _SMALL | _PER_LAYER
_TYPES = {"layer_types": ["sliding_attention", "full_attention"] * 3}
_GEMMA3N = {"laurel_rank": 8, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 6}
GEMMAS = (
    Family("gemma3n_text", _GEMMA | _TYPES | _GEMMA3N),
    Family("gemma4_text", _GEMMA | _TYPES),
)


@pytest.mark.parametrize(
    "family", [pytest.param(GEMMAS[0], id="gemma3n"), pytest.param(GEMMAS[1], id="gemma4", marks=pytest.mark.slow)]
)
def test_layers_that_share_keys_and_values(tmp_path: Path, family: Family) -> None:
    """Two layers of each kind of attention read what two before them have written into a dict, gradients and all."""
    assert_identical(*run_both(config_in(tmp_path), family.builder(), family.batches(2, M)))


def ibert() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": VOCAB}
    config = IBertConfig(**sizes, max_position_embeddings=64, quant_mode=True, pad_token_id=0)
    with no_init_weights():
        model = IBertForMaskedLM._from_config(config)
    fill(model)
    return model


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


class Keeper:
    """A hook that keeps a block's output, and a loss that uses it."""

    def __init__(self, where: str, detached: bool) -> None:
        self.where, self.detached = where, detached
        self.kept: dict[str, torch.Tensor] = {}
        self.notes: list[torch.Tensor] = []
        self.module: Any = None

    def keep(self, module: Any, output: torch.Tensor) -> None:
        output = output.detach() if self.detached else output
        if self.where == "dict":
            self.kept["hidden"] = output
        elif self.where == "list":
            self.notes.append(output)
        else:
            self.module, module.kept = module, output

    def loss_fn(self, loss: torch.Tensor, _: Any) -> torch.Tensor:
        places = {"dict": lambda: self.kept["hidden"], "list": self.notes.pop, "attribute": lambda: self.module.kept}
        return loss * (1 + places[self.where]().square().mean())


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
    def loss_fn(loss: torch.Tensor, _: Any) -> torch.Tensor:
        return loss

    with running(config_in(tmp_path), case, vertical=True) as (engine, model):
        step = batches(1)[0]
        engine.train_batch(iter(batches(1, seed=8)[0]))
        together = engine.eval_batch(iter(step), loss_fn)
        model.eval()
        apart = [engine(**micro_batch) for micro_batch in step]
        assert together.item() == torch.stack(apart).mean().item()


# ---- what cannot be followed


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
        with pytest.raises(LayerError, match=r"generator: a generator of random numbers that several parts.*horizontal"):
            engine.train_batch(iter(batches(1)[0]))
        assert torch.equal(model.generator.get_state(), state)
    stock, ours = run_both(config_in(tmp_path, section={"order": "horizontal"}), SharedGenerator, batches())
    assert_identical(stock, ours)


class ReentrantCheckpoints(Base):
    reentrant = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x).square().mean()


class Checkpoints(ReentrantCheckpoints):
    reentrant = False


def with_own_backward(loss: torch.Tensor, _: Any) -> torch.Tensor:
    loss.backward(retain_graph=True)
    return loss


def with_backward_of_the_head(model: Any) -> Callable[[torch.Tensor, Any], torch.Tensor]:
    def loss_fn(loss: torch.Tensor, _: Any) -> torch.Tensor:
        model.head.weight.square().sum().backward()
        return loss

    return loss_fn


@pytest.mark.parametrize("case", [Base, Checkpoints, ReentrantCheckpoints], ids=lambda case: case.__name__)
def test_a_second_backward_is_refused_by_name(tmp_path: Path, case: type[Base]) -> None:
    with running(config_in(tmp_path), case, vertical=True) as (engine, model):
        before = read_weights(model)
        if case is Base:
            for loss_fn in (with_own_backward, with_backward_of_the_head(model)):
                with pytest.raises(LayerError, match=r"has called backward\(\) itself.*call no backward"):
                    engine.train_batch(iter(batches(1)[0]), loss_fn)
        else:
            with pytest.raises(LayerError, match=r"blocks\.0 is called within torch\.utils\.checkpoint.*call it directly"):
                engine.train_batch(iter(batches(1)[0]))
        assert not differing(before, read_weights(model))
        assert all(param.grad is None for param in model.parameters())


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
