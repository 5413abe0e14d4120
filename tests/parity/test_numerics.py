"""The numerics contract beyond the plain run: odd sizes, accumulation dtypes, skipped steps, order and timing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from harness import (
    MIN_SSD_BYTES,
    Run,
    assert_identical,
    base_config,
    differing,
    digest,
    largest_relative,
    read_state,
    read_weights,
    run_arm,
    run_both,
    running,
    small_buffers,
)
from models import MixerModel, next_token_loss, token_batches
from spoilt import GOOD, INF, SPOILT, SpoilableModel, spoilt_batches
from torch import nn

from ds_vertical.compat import gradient_norm
from ds_vertical.compat.gradient_norm import NormMemory
from ds_vertical.engine.assembly import bytes_by_tier
from ds_vertical.offload.chunking import LANE
from ds_vertical.types import NORM_COPIED

CLIP = 0.05  # far below every gradient norm here, so clipping acts on every step


# ---- N1: the norm


SIZES = (
    1,
    2,
    17,
    4096,
    32_765,
    32_766,
    32_767,
    32_768,
    32_769,
    65_534,
    65_535,
    65_536,
    65_537,
    98_304,
    98_305,
    300_000,
    1_000_003,
)


def hard(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers of very different sizes in a random order: each order of additions has a sum of its own."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(-20, 3, numel)[torch.randperm(numel, generator=generator)]
    return (torch.randn(numel, generator=generator) * scales).to(dtype)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
def test_the_norm_of_a_gradient_is_stocks_without_an_fp64_copy_of_it(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_norm, "NORM_COPIED", 0)
    memory, stock = NormMemory(), DeepSpeedZeroOptimizer_Stage3._constant_buffered_norm2
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        lanes = gradient_norm.num_lanes()
        for seed, numel in enumerate(SIZES):
            for dtype in (torch.float32, torch.bfloat16):
                gradient = hard(numel + 3, dtype, seed)[3:]  # begins anywhere
                assert memory.norm(gradient).item() == stock(None, gradient).item() > 0
        assert lanes is not None and memory._bytes is not None and memory._bytes.numel() < SIZES[-1]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("spoil", [float("inf"), float("nan"), 3e38])
def test_the_norm_of_what_is_not_finite_is_stocks(spoil: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_norm, "NORM_COPIED", 0)
    gradient = hard(70_000, torch.float32, 1)
    gradient[40_000] = spoil
    mine, stock = NormMemory().norm(gradient), DeepSpeedZeroOptimizer_Stage3._constant_buffered_norm2(None, gradient)
    assert torch.equal(mine, stock) or (mine.isnan() and stock.isnan())


def test_norms_of_parts_that_stock_takes_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_norm, "NORM_ELEMENTS", 100_000)
    monkeypatch.setattr(gradient_norm, "NORM_COPIED", 0)
    gradient = hard(250_001, torch.float32, 5)
    stock = DeepSpeedZeroOptimizer_Stage3._constant_buffered_norm2(None, gradient, buffer_size=100_000)
    assert torch.equal(NormMemory().norm(gradient), stock)


def test_where_torch_adds_in_another_order_the_norm_is_taken_of_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_norm, "_LANES", (3, 5))
    gradient_norm._found_lanes.cache_clear()
    try:
        assert gradient_norm.num_lanes() is None and gradient_norm.copied_bytes(10**8) == 8 * 10**8
        gradient = hard(100_000, torch.float32, 2)
        assert torch.equal(NormMemory().norm(gradient), DeepSpeedZeroOptimizer_Stage3._constant_buffered_norm2(None, gradient))
    finally:
        gradient_norm._found_lanes.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_torch_adds_in_the_expected_order_with_all_instructions(capability: str) -> None:
    """So a large gradient is never copied here: `plan` counts on that. In a process of its own, which reads the variable."""
    code = "from ds_vertical.compat import gradient_norm as norm; print(norm.num_lanes(), norm.copied_bytes(10**9))"
    variables = os.environ | {"ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split()[-2:] == ["4", str(8 * NORM_COPIED)]


def test_an_fp64_gradient_has_stocks_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_norm, "NORM_COPIED", 0)
    gradient = hard(100_000, torch.float64, 2)
    assert torch.equal(NormMemory().norm(gradient), DeepSpeedZeroOptimizer_Stage3._constant_buffered_norm2(None, gradient))


# ---- N1: sizes


@dataclass(frozen=True)
class Layout:
    """What a test must know of stock's sub-groups: the layers that each spans, and its number of elements."""

    units: tuple[tuple[Any, ...], ...]
    numels: tuple[int, ...]

    @classmethod
    def of(cls, engine: Any) -> Layout:
        unit_of = engine.layers.unit_of()
        groups = engine.optimizer.stock_groups
        return cls(
            tuple(tuple(dict.fromkeys(unit_of[id(p)] for p in group)) for group in groups),
            tuple(sum(p.ds_numel for p in group) for group in groups),
        )

    def assert_awkward(self) -> None:
        assert len(self.numels) >= 3, "too few stock sub-groups"
        assert any(numel % LANE for numel in self.numels), "every stock sub-group fills its vectors"
        assert any(len(units) > 1 for units in self.units), "every stock sub-group ends where a layer does"


def run_awkward(config: dict[str, Any], build: Any, num_steps: int = 3) -> tuple[Run, Run]:
    """Both arms, with the conditions that make the comparison worth something."""
    layouts: list[Layout] = []

    def note(engine: Any, step: int) -> None:
        if step == 0 and type(engine).__name__ == "VerticalEngine":
            layouts.append(Layout.of(engine))

    config = small_buffers(config, 600_000)
    stock, vertical = run_both(config, build, token_batches(num_steps, 2), between=note)
    layouts[0].assert_awkward()
    assert min(stock.norms) > CLIP, "clipping must act on every step"
    assert vertical.ssd_bytes > 6 * MIN_SSD_BYTES
    return stock, vertical


def odd_model(dtype: str) -> nn.Module:
    """Hardly a tensor here has a size that is a multiple of 16; every matrix is over 1 MiB."""
    return MixerModel(3, *((727, 731) if dtype == "bf16" else (511, 517)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "sub_group_size"),
    [
        ("fp32", 300_001),
        ("fp32", 600_001),
        ("bf16", 300_001),
        ("bf16", 600_001),
    ],
)
def test_odd_sizes_in_several_stock_sub_groups(tmp_path: Path, dtype: str, sub_group_size: int) -> None:
    config = base_config(tmp_path, dtype=dtype, clip=CLIP, sub_group_size=sub_group_size, optimizer="cpu")
    assert_identical(*run_awkward(config, partial(odd_model, dtype)))


def test_odd_sizes_with_the_optimizer_on_ssd(tmp_path: Path) -> None:
    """Stock reads a gradient's file to an address that SSD reads refuse and trains on garbage (compat, [Note: aligned
    gradients]); the vertical arm gives the bits that stock gives with its optimizer in host memory."""
    build = partial(odd_model, "fp32")
    runs: dict[tuple[str, bool], Run] = {}
    for optimizer, vertical in (("cpu", False), ("nvme", False), ("nvme", True)):
        config = base_config(tmp_path, dtype="fp32", clip=CLIP, sub_group_size=300_001, optimizer=optimizer)
        runs[optimizer, vertical] = run_arm(small_buffers(config, 600_000), build, token_batches(2, 2), vertical=vertical)
    assert_identical(runs["cpu", False], runs["nvme", True])
    assert differing(runs["cpu", False].state, runs["nvme", False].state), "stock is right here: compare it directly"


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_odd_layers_on_ssd_where_stock_is_right(tmp_path: Path, dtype: str) -> None:
    """Each stock sub-group but the last ends with the one odd tensor of a layer, so every gradient lies at an aligned
    address; our chunks are whole layers, so not every one of ours does."""
    width, inner = (768, 773) if dtype == "bf16" else (512, 517)

    def build() -> nn.Module:
        model = MixerModel(3, width, inner, vocab=inner)
        for module in (*model.blocks, model):
            module.norm = nn.Identity()
        return model

    config = base_config(tmp_path, dtype=dtype, clip=CLIP, sub_group_size=2 * width * inner + 100)
    assert_identical(*run_awkward(config, build))


# ---- N1: dtypes of accumulation and communication


@pytest.mark.parametrize(
    ("dtype", "top"),
    [
        ("bf16", {"data_types": {}}),
        ("bf16", {"communication_data_type": "fp32"}),
        pytest.param(
            "bf16",
            {"data_types": {"grad_accum_dtype": "bf16"}, "communication_data_type": "fp32"},
            marks=pytest.mark.slow,
        ),
        ("fp32", {"data_types": {}}),
        ("fp32", {"communication_data_type": "bf16"}),
        ("fp32", {"communication_data_type": "fp16"}),
    ],
    ids=str,
)
def test_accumulation_and_communication_dtypes(tmp_path: Path, dtype: str, top: dict[str, Any]) -> None:
    config = base_config(tmp_path, num_micro_batches=4, dtype=dtype, clip=CLIP, **top)
    build = partial(MixerModel, 2, 768 if dtype == "bf16" else 512)
    assert_identical(*run_both(small_buffers(config, 600_000), build, token_batches(2, 4)))


# ---- N1: what the model does between layers


class OuterResidual(MixerModel):
    """The residual connections are the model's own: tensors go around a block as well as through it."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return next_token_loss(self.head(self.norm(x)), labels)


class LongSkips(MixerModel):
    """Tensors made before the first layers come back after the last one."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        skips = []
        for block in self.blocks:
            skips.append(x)
            x = block(x)
        return next_token_loss(self.head(self.norm(x + skips[0] + 0.5 * skips[1])), labels)


@pytest.mark.parametrize("build", [OuterResidual, LongSkips])
def test_tensors_that_go_around_layers(tmp_path: Path, build: type[MixerModel]) -> None:
    config = small_buffers(base_config(tmp_path, dtype="fp32", clip=CLIP))
    assert_identical(*run_both(config, build, token_batches(2, 3)))


class NestedSkips(MixerModel):
    """One early tensor in every piece of glue, and residuals around the blocks: one waiting tensor is made of another."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = first = self.embed(input_ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x)) + 0.1 * first
        return next_token_loss(self.head(self.norm(x)), labels)


def test_tensors_made_of_one_another_wait_in_glue(tmp_path: Path) -> None:
    config = small_buffers(base_config(tmp_path, dtype="fp32", clip=CLIP))
    assert_identical(*run_both(config, NestedSkips, token_batches(2, 3)))


class SharedLinear(MixerModel):
    """The same linear around every block: its weight is used in every piece of glue."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__(num_layers)
        self.around = nn.Linear(512, 512)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = self.around(x) + block(x)
        return next_token_loss(self.head(self.norm(x)), labels)


class SharedBias(SharedLinear):
    """The same of an addition, which saves nothing for its backward: nobody would notice one that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.around = nn.Identity()
        self.bias = nn.Parameter(torch.full((512,), 0.01))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + self.bias + block(x)
        return next_token_loss(self.head(self.norm(x)), labels)


@pytest.mark.parametrize("build", [SharedLinear, SharedBias])
def test_parameters_that_several_pieces_of_glue_share(tmp_path: Path, build: type[MixerModel]) -> None:
    config = small_buffers(base_config(tmp_path, dtype="fp32", clip=CLIP))
    stock, vertical = run_both(config, build, token_batches(2, 3))
    assert max(largest_relative(stock.grads[0], vertical.grads[0]).values()) < 1e-6
    assert max(largest_relative(stock.weights, vertical.weights).values()) < 2e-5


# ---- N4: skipped steps


@dataclass(frozen=True)
class After:
    """What a step left behind; `state` is None until moments exist."""

    weights: str
    state: str | None
    skipped: int
    global_steps: int
    lr: float
    norm: float


@pytest.mark.parametrize(
    ("dtype", "clip"),
    [("fp32", 0.0), ("fp32", 1.0), ("bf16", 1.0), pytest.param("bf16", 0.0, marks=pytest.mark.slow)],
)
def test_a_non_finite_step_is_skipped_whole(tmp_path: Path, dtype: str, clip: float) -> None:
    seen: dict[str, list[After]] = {"DeepSpeedEngine": [], "VerticalEngine": []}

    def note(engine: Any, step: int) -> None:
        model = engine.module
        state = digest(read_state(engine, model)) if step else None
        norm = float(engine.get_global_grad_norm())
        after = After(digest(read_weights(model)), state, engine.skipped_steps, engine.global_steps, engine.get_lr()[0], norm)
        seen[type(engine).__name__].append(after)

    config = base_config(tmp_path, num_micro_batches=2, dtype=dtype, clip=clip)
    width = 768 if dtype == "bf16" else 512
    stock, vertical = run_both(small_buffers(config, 600_000), lambda: SpoilableModel(width), spoilt_batches(), between=note)
    assert seen["DeepSpeedEngine"] == seen["VerticalEngine"]
    for run in (stock, vertical):  # a NaN differs from itself, and nobody sees the gradients of a skipped step
        run.losses = [repr(loss) for loss in run.losses]
        run.grads = [grads for grads, spoil in zip(run.grads, SPOILT, strict=True) if spoil == GOOD]
    assert_identical(stock, vertical)
    assert_skips(seen["VerticalEngine"])
    assert vertical.ssd_bytes == 3 * width * width * (2 if dtype == "bf16" else 4)


def assert_skips(steps: Sequence[After]) -> None:
    for index, (now, spoil) in enumerate(zip(steps, SPOILT, strict=True)):
        assert now.global_steps == index + 1
        assert now.skipped == sum(each != GOOD for each in SPOILT[: index + 1])
        if index == 0:
            continue
        before = steps[index - 1]
        if spoil == GOOD:
            assert now.weights != before.weights and now.lr >= before.lr and now.norm < INF
        else:
            assert (now.weights, now.lr) == (before.weights, before.lr) and now.norm == INF
            assert now.state == before.state
    assert steps[-1].lr > steps[0].lr


# ---- N2 and order: one stock run, many settings of the section

ORDER_LAYERS = 4


def order_model() -> nn.Module:
    return MixerModel(ORDER_LAYERS, dropout=0.1)


def order_config(folder: Path, **section: Any) -> dict[str, Any]:
    return small_buffers(base_config(folder, dtype="fp32", clip=CLIP, section={"seed": 11} | section), 600_000)


@pytest.fixture(scope="module")
def stock_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    config = order_config(tmp_path_factory.mktemp("stock"))
    run = run_arm(config, order_model, token_batches(3, 3), vertical=False)
    assert min(run.norms) > CLIP
    return run


@pytest.mark.parametrize(
    "section",
    [
        {"prefetch_layers": 0},
        {"prefetch_layers": 1},
        {"prefetch_layers": 3},
        {"overlap": False},
        {"overlap": False, "prefetch_layers": 3},
        {"order": "horizontal"},
        {"order": "horizontal", "overlap": False},
        {"order": "horizontal", "prefetch_layers": 3},
        {"blocks_per_layer": 2},
        {"blocks_per_layer": 3},
        {"blocks_per_layer": 2, "order": "horizontal", "prefetch_layers": 0},
        {"blocks_per_layer": ORDER_LAYERS},
    ],
    ids=str,
)
def test_timing_and_order_are_bit_identical_to_stock(tmp_path: Path, stock_run: Run, section: dict[str, Any]) -> None:
    vertical = run_arm(order_config(tmp_path, **section), order_model, token_batches(3, 3), vertical=True)
    assert_identical(stock_run, vertical)


@pytest.mark.parametrize("blocks_per_layer", [1, 2])
def test_snake_changes_the_last_bits_at_most(tmp_path: Path, stock_run: Run, blocks_per_layer: int) -> None:
    section = {"snake": True, "blocks_per_layer": blocks_per_layer}
    snake = run_arm(order_config(tmp_path, **section), order_model, token_batches(3, 3), vertical=True)
    assert max(largest_relative(stock_run.grads[0], snake.grads[0]).values()) <= 1e-6
    assert max(largest_relative(stock_run.weights, snake.weights).values()) <= 1e-6
    assert differing(stock_run.grads[0], snake.grads[0]), "the order of the micro-batches has not changed"


@pytest.mark.parametrize("clip", [0.05, 0.0])
def test_parameters_on_ssd_may_count_as_persistent(tmp_path: Path, clip: float) -> None:
    """With so high a threshold every parameter is "small", those on SSD too; they lie in buffers that the next layer needs, and
    there are more of them than buffers: none can be gathered with the others, by an evaluation between steps either."""
    seen = []
    for persistence in (0, 10**7):
        made = base_config(tmp_path / str(persistence), num_micro_batches=2, dtype="fp32", clip=clip, persistence=persistence)
        with running(small_buffers(made, 600_000), partial(MixerModel, 7, 512), vertical=True) as (engine, model):
            assert bytes_by_tier(engine.layers)["ssd"] > 0
            losses = []
            for step in token_batches(3, 2):
                losses += [engine.train_batch(iter(step)).item(), engine.eval_batch(iter(step)).item()]
            seen.append((losses, read_weights(model)))
    assert seen[0][0] == seen[1][0]
    assert differing(seen[0][1], seen[1][1]) == []
