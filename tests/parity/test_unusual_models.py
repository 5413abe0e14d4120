"""Models and calls off the beaten track: equal to stock, or refused with what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from harness import (
    assert_identical,
    base_config,
    build_engine,
    dispose,
    read_weights,
    run_both,
    running,
    small_buffers,
    start_process_group,
)
from models import MixerBlock, MixerModel, next_token_loss, token_batches
from torch import nn
from transformers import BatchEncoding

import ds_vertical
from ds_vertical.errors import LayerError

STEPS = token_batches(2, 2)


def config_in(folder: Path, **options: Any) -> dict[str, Any]:
    return small_buffers(base_config(folder, num_micro_batches=2, dtype="fp32", clip=0.5, **options))


class CountingBlock(MixerBlock):
    """Keeps running statistics as batch normalisation does."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("calls", torch.zeros(()))
        self.statistics = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.statistics(super().forward(x).transpose(1, 2)).transpose(1, 2).contiguous()


class WithBlocks(MixerModel):
    """MixerModel with blocks of another class."""

    block: Callable[[int], nn.Module] = MixerBlock

    def __init__(self) -> None:
        super().__init__(num_layers=3)
        self.blocks = nn.ModuleList(type(self).block(512) for _ in range(3))


class Counting(WithBlocks):
    block = CountingBlock


@pytest.mark.slow
def test_statistics_of_blocks_move_once_per_micro_batch(tmp_path: Path) -> None:
    buffers: list[dict[str, torch.Tensor]] = []

    def keep(engine: Any, step: int) -> None:
        if step == 1:
            buffers.append({name: buffer.clone() for name, buffer in engine.module.named_buffers()})

    a, b = run_both(config_in(tmp_path), Counting, STEPS, between=keep)
    assert_identical(a, b)  # gradients reach a block in the layout that they have in stock, which batch_norm's kernels round by
    stock, vertical = buffers
    assert stock["blocks.0.calls"] == vertical["blocks.0.calls"] == 4
    assert all(torch.equal(stock[name], vertical[name]) for name in stock)
    assert int(vertical["blocks.2.statistics.num_batches_tracked"]) == 4


def test_parameters_that_the_optimizer_does_not_have(tmp_path: Path) -> None:
    def blocks_only(model: nn.Module) -> list[nn.Parameter]:
        return [param for name, param in model.named_parameters() if name.startswith("blocks")]

    stock, vertical = run_both(config_in(tmp_path), MixerModel, STEPS, groups=blocks_only)
    assert stock.losses == vertical.losses and stock.norms == vertical.norms
    assert all(torch.equal(stock.weights[name], vertical.weights[name]) for name in stock.weights)
    assert "head.weight" not in vertical.grads[0]


@pytest.mark.slow
def test_batch_encodings_of_hugging_face(tmp_path: Path) -> None:
    encoded = [[BatchEncoding(dict(batch)) for batch in step] for step in STEPS]
    losses = []
    for batches in (STEPS, encoded):
        with running(config_in(tmp_path), MixerModel, vertical=True) as (engine, _):
            losses.append([engine.train_batch(iter(step)).item() for step in batches])
    assert losses[0] == losses[1]


def test_the_loss_function_runs_outside_torch_autocast(tmp_path: Path) -> None:
    seen: list[torch.dtype] = []

    def loss_fn(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.append((outputs.float() @ torch.eye(outputs.shape[-1])).dtype)
        return next_token_loss(outputs, batch["input_ids"])

    ids = [[{"input_ids": batch["input_ids"]} for batch in step] for step in STEPS]
    config = config_in(tmp_path, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    stock, vertical = run_both(config, MixerModel, ids, loss_fn=loss_fn)
    assert set(seen) == {torch.float32}
    assert stock.losses == vertical.losses


class Halves(nn.Module):
    """A module inside it writes in place to one of several views, which autograd allows only behind a node of the hooks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left = self.act(self.up(x).chunk(2, dim=-1)[0])
        return x + torch.cat([left, left], dim=-1)


class Appending(nn.Module):
    """A module inside it appends to a list that it gets by position, of which stock's hooks make a copy."""

    class Inner(nn.Linear):
        def forward(self, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
            seen.append(x)
            return super().forward(x)

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = self.Inner(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        out = x + self.inner(x, seen)
        return out + 0.5 * seen[0] if seen else out


class HandsOn(nn.Module):
    """A module inside it hands its input on. The block asks whether it did, and writes to what it got."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(width, width), nn.Dropout(0.0), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        got = self.drop(hidden)
        out = self.down(got) if got is hidden else self.down(got) + x
        target = self.drop(hidden).detach_()
        return out - target if hidden.requires_grad else 3 * out - target


class Storing(nn.Module):
    """A module inside it stores its input, which the loss uses."""

    class Inner(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # override
            self.seen = x
            return super().forward(nn.functional.rms_norm(x, x.shape[-1:])) * x

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = self.Inner(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Descending(nn.Module):
    """Goes down the slope of an energy, of which it makes a graph by itself: nodes decide the order of its sums."""

    class Energy(nn.Module):
        class Wave(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * torch.cos(x * 0.7) + x.exp() * 0.1

        def __init__(self) -> None:
            super().__init__()
            self.act, self.wave = nn.Tanh(), self.Wave()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.act(x) * x * self.wave(x) + torch.sin(x)).sum()

    def __init__(self, width: int) -> None:
        super().__init__()
        self.energy, self.lin = self.Energy(), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            place = x if x.requires_grad else x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.energy(place), place, create_graph=True)
        return self.lin(x) - 0.1 * slope


class WithStored(WithBlocks):
    block = Storing

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = super().forward(input_ids, labels)
        blocks: Any = self.blocks
        seen = [block.inner.seen for block in blocks]
        return loss + sum((each**2).mean() + each.tanh().mean() for each in seen)


@pytest.mark.parametrize(
    "block", [*(pytest.param(each, marks=pytest.mark.slow) for each in (Halves, Appending, HandsOn)), Storing, Descending]
)
def test_a_blocks_modules_hand_on_what_stocks_nodes_make_of_it(tmp_path: Path, block: type[nn.Module]) -> None:
    """Code can see the nodes at the ends of modules in the forward, whoever takes the graph: all of these bits hang on them."""
    build = WithStored if block is Storing else type("Model", (WithBlocks,), {"block": block})
    assert_identical(*run_both(config_in(tmp_path), build, STEPS))


class Late(MixerModel):
    """Changes, after a block has run, a tensor that the block was given."""

    def __init__(self) -> None:
        super().__init__(num_layers=3)
        self.spoil = False

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for index, block in enumerate(self.blocks):
            given = x
            x = block(given)
            if self.spoil and index == 1:
                given.data.add_(0)  # unseen by autograd, and by versions
                with torch.no_grad():
                    given.add_(1)
        return next_token_loss(self.head(self.norm(x)), labels)


def test_an_input_changed_after_its_block_is_refused(tmp_path: Path) -> None:
    with running(config_in(tmp_path), Late, vertical=True) as (engine, model):
        model.spoil = True
        with pytest.raises(LayerError, match=r"blocks\.1 was changed in place after the block had run"):
            engine.train_batch(iter(STEPS[0]))
        model.spoil = False
        assert engine.train_batch(iter(STEPS[0])) > 0


class External(MixerModel):
    """The model uses a parameter of a block outside it, and says so to DeepSpeed."""

    def __init__(self) -> None:
        super().__init__(num_layers=3)
        deepspeed.zero.register_external_parameter(self, next(self.blocks[0].parameters()))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        used = next(self.blocks[0].parameters()).float().mean()
        return super().forward(input_ids, labels) + 0.01 * used


def test_registered_external_parameters(tmp_path: Path) -> None:
    stock, vertical = run_both(config_in(tmp_path), External, STEPS)
    assert stock.losses[0] == vertical.losses[0]
    for name, weights in stock.weights.items():
        assert torch.allclose(weights, vertical.weights[name], rtol=1e-5, atol=1e-7), name


class InGlue(WithBlocks):
    """The model calls a part of each block once more, behind that block."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
            x = x + 0.1 * block.up(x)
        return next_token_loss(self.head(self.norm(x)), labels)


class GatedBlock(MixerBlock):
    """Has a `__call__` of its own, which computes with a parameter around the call with hooks."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.gate = nn.Parameter(torch.full((width,), 0.5))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # override
        return super().__call__(x * self.gate)


class GatedCalls(WithBlocks):
    block = GatedBlock


class GatedBehind(WithBlocks):
    block = type("GatedBehindBlock", (GatedBlock,), {"__call__": lambda self, x: MixerBlock.__call__(self, x) * self.gate})


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (InGlue, r"blocks\.0\.up\.weight"),
        pytest.param(GatedCalls, r"blocks\.0\.gate", marks=pytest.mark.slow),
        (GatedBehind, r"blocks\.\d\.gate"),
    ],
)
def test_a_blocks_parameter_that_code_outside_it_uses_is_refused_by_name(
    tmp_path: Path, build: type[nn.Module], named: str
) -> None:
    """In the forward, or where the graph outside the block runs backward. It ended in torch's words, of sizes."""
    with running(config_in(tmp_path), build, vertical=True) as (engine, model):
        before = read_weights(model)
        with pytest.raises(LayerError, match=rf"^{named} is used by code outside its block's forward.*register_external"):
            engine.train_batch(iter(STEPS[0]))
        assert engine.global_steps == 0 and all(map(torch.equal, before.values(), read_weights(model).values()))


def test_another_optimizer_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    start_process_group()
    model = MixerModel()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    config = base_config(tmp_path, dtype="bf16")
    with pytest.raises(ds_vertical.ConfigError, match="optimizer: got SGD"):
        ds_vertical.initialize(model=model, optimizer=other, config=config)
    assert list(tmp_path.iterdir()) == []


def test_a_disabled_section_gives_the_stock_arm_a_folder_of_its_own(tmp_path: Path) -> None:
    start_process_group()
    config = small_buffers(base_config(tmp_path, dtype="bf16", section={"enabled": False}), 700_000)
    model = MixerModel(num_layers=2, width=768)
    engine, *_ = ds_vertical.initialize(model=model, model_parameters=model.parameters(), config=config)
    try:
        (folder,) = tmp_path.iterdir()
        assert (folder / "rank0.lock").exists() and not (tmp_path / "zero_stage_3").exists()
    finally:
        dispose(engine)


def test_a_destroyed_engine_says_so(tmp_path: Path) -> None:
    engine, _ = build_engine(config_in(tmp_path), MixerModel, vertical=True)
    engine.train_batch(iter(STEPS[0]))
    dispose(engine)
    with pytest.raises(RuntimeError, match="the engine was destroyed"):
        engine.train_batch(iter(STEPS[1]))


@pytest.fixture
def float64() -> Iterator[Callable[[], None]]:
    """Sets torch's default to float64; it is float32 again after the test."""
    yield lambda: torch.set_default_dtype(torch.float64)
    torch.set_default_dtype(torch.float32)


def test_float64_is_refused_before_anything_is_written(tmp_path: Path, float64: Callable[[], None]) -> None:
    start_process_group()
    model = MixerModel()
    with pytest.raises(ds_vertical.ConfigError, match=r"model parameter embed\.weight: got torch\.float64.*model\.float\(\)"):
        ds_vertical.initialize(model=MixerModel().double(), config=base_config(tmp_path, dtype="bf16"))
    float64()
    with pytest.raises(ds_vertical.ConfigError, match=r"got torch\.float64.*set_default_dtype\(torch\.float32\)"):
        ds_vertical.initialize(model=model, config=base_config(tmp_path, dtype="bf16"))
    assert list(tmp_path.iterdir()) == []


def test_float64_is_refused_before_zero_init_writes_the_model(tmp_path: Path, float64: Callable[[], None]) -> None:
    start_process_group()
    float64()
    with pytest.raises(
        ds_vertical.ConfigError, match=r"got torch\.float64.*set_default_dtype\(torch\.float32\) before .*prepare"
    ):
        ds_vertical.prepare(config_in(tmp_path))
    assert list(tmp_path.iterdir()) == []
    ds_vertical.prepare(config_in(tmp_path, section={"enabled": False}))  # the stock arm's is stock's


@pytest.mark.slow
def test_float64_as_the_default_after_initialize_changes_no_bit(tmp_path: Path, float64: Callable[[], None]) -> None:
    weights = []
    for switch in (lambda: None, float64):
        with running(config_in(tmp_path), MixerModel, vertical=True) as (engine, model):
            switch()
            losses = [engine.train_batch(iter(step)).item() for step in STEPS]
            torch.set_default_dtype(torch.float32)
            weights.append((losses, read_weights(model)))
    assert weights[0][0] == weights[1][0]
    assert all(torch.equal(value, weights[1][1][name]) for name, value in weights[0][1].items())


class OddSizes(nn.Module):
    """Parameters of three and of ten elements around layers that compute with a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 10)

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        row = row * self.scale.sum()
        for layer in self.layers:
            row = torch.tanh(layer(row))
        return self.head(row).square().mean()


@pytest.mark.parametrize("tier", ["cpu", "none"])
def test_weights_behind_one_of_odd_size_begin_where_stocks_do(tmp_path: Path, tier: str) -> None:
    """MKL's product of a row and a matrix rounds by the matrix's address."""
    rows = torch.Generator().manual_seed(5)
    batches = [[torch.randn(1, 64, generator=rows) for _ in range(2)] for _ in range(2)]
    config = base_config(tmp_path, num_micro_batches=2, dtype="fp32", clip=0.5, params=tier, optimizer="cpu")

    def build() -> nn.Module:
        torch.manual_seed(3)
        return OddSizes()

    assert_identical(*run_both(config, build, batches))
