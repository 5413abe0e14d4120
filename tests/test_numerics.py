"""The numerics contract beyond the plain run: odd sizes, accumulation dtypes, skipped steps, order and timing."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from harness import (
    MIN_SSD_BYTES,
    Batches,
    Run,
    assert_identical,
    base_config,
    differing,
    largest_relative,
    read_state,
    read_weights,
    run_arm,
    run_both,
    small_buffers,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import MixerModel, next_token_loss, token_batches
from torch import nn

from ds_vertical.chunks import LANE, Cut, Piece, adam_cuts
from ds_vertical.optimizer import CutAdam

CLIP = 0.05  # far below every gradient norm here, so clipping acts on every step


# ---- N1: sizes


@dataclass(frozen=True)
class Layout:
    """What a test must know of stock's sub-groups: the layers that each spans, and its number of elements."""

    units: tuple[tuple[Any, ...], ...]
    numels: tuple[int, ...]

    @classmethod
    def of(cls, engine: Any) -> Layout:
        unit_of = engine.layers.unit_of()
        groups = engine.optimizer._stock_groups
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


@pytest.mark.parametrize(
    ("dtype", "sub_group_size"),
    [
        ("fp32", 300_001),
        ("fp32", 600_001),
        ("bf16", 300_001),
        pytest.param("bf16", 600_001, marks=pytest.mark.slow),
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
        runs[optimizer, vertical] = run_arm(
            small_buffers(config, 600_000), build, token_batches(2, 2), vertical=vertical
        )
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
    """Gradients cannot be added in stock's order here; they are the same up to rounding."""
    config = small_buffers(base_config(tmp_path, dtype="fp32", clip=CLIP))
    stock, vertical = run_both(config, NestedSkips, token_batches(2, 3))
    assert max(largest_relative(stock.grads[0], vertical.grads[0]).values()) < 1e-6
    assert max(largest_relative(stock.weights, vertical.weights).values()) < 1e-6


# ---- N4: skipped steps


class Spoil(torch.autograd.Function):
    """Identity whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] * ctx.factor, None


class SpoilableBlock(nn.Linear):
    """A residual layer; its weight's gradient, and nothing else, is multiplied by `factor`."""

    def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x + torch.tanh(nn.functional.linear(x, Spoil.apply(self.weight, factor), self.bias))


class SpoilableModel(nn.Module):
    """`spoil` (where, factor): multiplies the weight gradient of the first or the last layer, or the loss itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(SpoilableBlock(width, width) for _ in range(3))
        self.head = nn.Linear(width, 16)

    def forward(self, input_ids: torch.Tensor, spoil: tuple[str, float]) -> torch.Tensor:
        where, factor = spoil
        x = self.embed(input_ids)
        for index, block in enumerate(self.blocks):
            x = block(x, factor if where == {0: "first", 2: "last"}.get(index) else 1.0)
        loss = nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), input_ids.flatten())
        return loss * factor if where == "loss" else loss


GOOD = ("nowhere", 1.0)
NAN, INF = float("nan"), float("inf")
# one step each; only the second of two micro-batches is spoilt
FIRST = (("first", INF), GOOD, ("first", NAN))
LAST = (("last", INF), GOOD, ("last", NAN))
SPOILT = (*FIRST, *LAST, ("loss", INF), ("loss", NAN), GOOD, GOOD)


def spoilt_batches() -> Batches:
    generator = torch.Generator().manual_seed(3)
    ids = [[torch.randint(0, 16, (1, 3 + m), generator=generator) for m in range(2)] for _ in SPOILT]
    return [
        [{"input_ids": pair[0], "spoil": GOOD}, {"input_ids": pair[1], "spoil": spoil}]
        for pair, spoil in zip(ids, SPOILT, strict=True)
    ]


def digest(tensors: dict[str, torch.Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode() + tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


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
        after = After(
            digest(read_weights(model)), state, engine.skipped_steps, engine.global_steps, engine.get_lr()[0], norm
        )
        seen[type(engine).__name__].append(after)

    config = base_config(tmp_path, num_micro_batches=2, dtype=dtype, clip=clip)
    width = 768 if dtype == "bf16" else 512
    stock, vertical = run_both(
        small_buffers(config, 600_000), lambda: SpoilableModel(width), spoilt_batches(), between=note
    )
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


# ---- chunks: where CPU Adam's calls are cut


@dataclass(frozen=True)
class Regrouping:
    """Sizes of parameters in stock's order; stock's sub-groups as numbers of parameters; chunks as lists of them."""

    sizes: tuple[int, ...]
    stock: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]

    def stock_ranges(self) -> list[range]:
        """Elements of each stock sub-group in stock's order of all elements."""
        ranges, first, start = [], 0, 0
        for count in self.stock:
            numel = sum(self.sizes[first : first + count])
            ranges.append(range(start, start + numel))
            first, start = first + count, start + numel
        return ranges

    def pieces(self) -> list[list[Piece]]:
        """Each chunk's pieces."""
        starts = [sum(self.sizes[:i]) for i in range(len(self.sizes) + 1)]
        groups = self.stock_ranges()

        def piece(param: int) -> Piece:
            group = next(g for g in groups if starts[param] in g)
            return Piece(self.sizes[param], starts[param] - group.start, len(group))

        return [[piece(param) for param in chunk] for chunk in self.chunks]

    def elements(self) -> list[torch.Tensor]:
        """For each chunk, where its elements lie in stock's order of all elements."""
        starts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        return [
            torch.cat([torch.arange(starts[p], starts[p] + self.sizes[p]) for p in chunk]) for chunk in self.chunks
        ]


@st.composite
def regroupings(draw: st.DrawFn) -> Regrouping:
    sizes = tuple(draw(st.lists(st.integers(1, 70), min_size=1, max_size=12)))
    order = draw(st.permutations(range(len(sizes))))
    ends = sorted(draw(st.sets(st.integers(1, len(sizes)))) | {len(sizes)})
    stops = sorted(draw(st.sets(st.integers(1, len(sizes)))) | {len(sizes)})
    chunks = tuple(tuple(order[a:b]) for a, b in zip([0, *stops], stops, strict=False))
    return Regrouping(sizes, tuple(b - a for a, b in zip([0, *ends], ends, strict=False)), chunks)


# stock's remainder of 7 + 5 elements lies in three chunks, the middle of it in a chunk of its own
SPLIT_REMAINDER = Regrouping((20, 5, 3, 4), (4,), ((0,), (2,), (3, 1)))


@given(regroupings())
@example(SPLIT_REMAINDER)
@settings(deadline=None, max_examples=300)
def test_cuts_cover_a_chunk_once_in_order(regrouping: Regrouping) -> None:
    for pieces in regrouping.pieces():
        position = 0
        for cut in adam_cuts(pieces):
            assert cut.start == position and cut.numel > 0
            assert 0 <= cut.offset and cut.offset + cut.numel <= cut.span
            assert cut.span <= LANE or cut.in_place and cut.span % LANE == 0
            position += cut.numel
        assert position == sum(piece.numel for piece in pieces)


def test_a_piece_outside_its_sub_group_is_refused() -> None:
    with pytest.raises(ValueError, match="does not lie inside its sub-group"):
        adam_cuts([Piece(numel=4, stock_offset=14, stock_numel=17)])


@pytest.fixture(scope="module")
def cpu_adam() -> DeepSpeedCPUAdam:
    return DeepSpeedCPUAdam([nn.Parameter(torch.zeros(1))], lr=1e-2, weight_decay=0.1)


def adam_step(module: Any, opt_id: int, step: int, tensors: Sequence[torch.Tensor]) -> None:
    module.adam_update(opt_id, step, 1e-2, 0.9, 0.999, 1e-8, 0.1, True, *tensors)


def regrouped_matches_stock(adam: DeepSpeedCPUAdam, regrouping: Regrouping, cut: bool) -> bool:
    """Whether two steps chunk by chunk give the bits of two steps sub-group by sub-group."""
    generator = torch.Generator().manual_seed(sum(regrouping.sizes))
    numel = sum(regrouping.sizes)
    param, exp_avg, exp_avg_sq = torch.randn(numel, generator=generator), torch.zeros(numel), torch.zeros(numel)
    whole = [param, torch.randn(numel, generator=generator), exp_avg, exp_avg_sq]
    chunks = [[tensor[index].clone() for tensor in whole] for index in regrouping.elements()]
    cutting = CutAdam(adam.ds_opt_adam)
    for step in (1, 2):
        for group in regrouping.stock_ranges():
            adam_step(adam.ds_opt_adam, adam.opt_id, step, [tensor[group.start : group.stop] for tensor in whole])
        for chunk, pieces in zip(chunks, regrouping.pieces(), strict=True):
            with cutting.cutting(adam_cuts(pieces) if cut else (Cut(0, chunk[0].numel(), chunk[0].numel(), 0),)):
                adam_step(cutting, adam.opt_id, step, chunk)
    return all(
        torch.equal(whole[kind][index], chunk[kind])
        for index, chunk in zip(regrouping.elements(), chunks, strict=True)
        for kind in (0, 2, 3)
    )


@given(regroupings())
@example(SPLIT_REMAINDER)
@settings(deadline=None, max_examples=300)
def test_cut_adam_gives_the_bits_of_stocks_sub_groups(cpu_adam: DeepSpeedCPUAdam, regrouping: Regrouping) -> None:
    assert regrouped_matches_stock(cpu_adam, regrouping, cut=True)


def test_uncut_adam_does_not(cpu_adam: DeepSpeedCPUAdam) -> None:
    """Otherwise the test above shows nothing on this processor."""
    sizes = tuple(range(7, 67, 3))
    regrouping = Regrouping(sizes, (len(sizes),), tuple((index,) for index in range(len(sizes))))
    assert regrouped_matches_stock(cpu_adam, regrouping, cut=True)
    assert not regrouped_matches_stock(cpu_adam, regrouping, cut=False)
