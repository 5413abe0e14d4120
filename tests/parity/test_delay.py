"""`optimizer_delay`: steps taken during the backward, after the norm or in the next forward, bit-identical to stock; none
lost, none counted twice, whatever happens between."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from harness import (
    MIN_SSD_BYTES,
    Run,
    assert_identical,
    base_config,
    contents,
    differing,
    read_state,
    read_weights,
    run_arm,
    run_both,
    running,
    small_buffers,
)
from late import LateWrites
from models import MixerModel, next_token_loss, token_batches
from spoilt import GOOD, SPOILT, SpoilableModel, spoilt_batches
from torch import nn

CLIP = 0.05  # far below every gradient norm here, so clipping acts on every step
NUM_LAYERS = 4
WIDTH = {"fp32": 512, "bf16": 1024}  # square matrices of 1 MiB and more, and places where a layer can be cut in two
slow = pytest.mark.slow


def config(folder: Path, dtype: str, clip: float, delay: float | None = None, **options: Any) -> dict[str, Any]:
    section = {"seed": 11, "optimizer_delay": delay, "optimizer_speculation": False}
    made = base_config(folder, num_micro_batches=2, dtype=dtype, clip=clip, section=section, **options)
    return small_buffers(made, 1_100_000) if made["zero_optimization"]["offload_param"]["device"] == "nvme" else made


def mixer(dtype: str) -> nn.Module:
    return MixerModel(NUM_LAYERS, WIDTH[dtype], dropout=0.1)


def clip_of(clips: bool) -> float:
    return CLIP if clips else 0.0


# ---- N1, N2: every regime


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Run]:
    """Stock's run of the same JSON, trained once."""
    runs: dict[tuple[str, bool], Run] = {}

    def get(dtype: str, clips: bool) -> Run:
        if (dtype, clips) not in runs:
            made = config(tmp_path_factory.mktemp("stock"), dtype, clip_of(clips))
            runs[dtype, clips] = run_arm(made, partial(mixer, dtype), token_batches(4, 2), vertical=False)
        return runs[dtype, clips]

    return get


@pytest.mark.parametrize(
    ("dtype", "clips", "delay"),
    [
        ("fp32", False, None),
        ("fp32", False, 0.0),
        ("fp32", False, 0.3),
        ("fp32", False, 1.0),
        ("fp32", True, 0.0),
        ("fp32", True, 1.0),
        pytest.param("fp32", True, None, marks=slow),
        pytest.param("fp32", True, 0.3, marks=slow),
        ("bf16", False, 0.3),
        *(pytest.param("bf16", False, delay, marks=slow) for delay in (None, 0.0, 1.0)),
        *(pytest.param("bf16", True, delay, marks=slow) for delay in (None, 0.0, 0.3, 1.0)),
    ],
)
def test_every_delay_is_bit_identical_to_stock(
    tmp_path: Path, stock: Callable[[str, bool], Run], dtype: str, clips: bool, delay: float | None
) -> None:
    regimes: list[tuple[bool, bool, bool]] = []

    def note(engine: Any, step: int) -> None:
        due = engine.optimizer.driver.backlog.pending
        regimes.append((engine.optimizer.timing.early, bool(due), len(due) == NUM_LAYERS + 1))

    made = config(tmp_path, dtype, clip_of(clips), delay)
    vertical = run_arm(made, partial(mixer, dtype), token_batches(4, 2), vertical=True, between=note)
    early = not clips and delay != 1.0
    leaves = delay != 0.0
    # of `pre`, small as it is here, no part may be left
    assert {regime[:2] for regime in regimes} == {(early, leaves)}
    assert not leaves or early or all(everything for _, _, everything in regimes)
    assert_identical(stock(dtype, clips), vertical)
    assert vertical.ssd_bytes == 2 * NUM_LAYERS * WIDTH[dtype] ** 2 * (4 if dtype == "fp32" else 2)


# ---- tiers


@pytest.mark.parametrize(
    "options",
    [
        {"persistence": None},
        {"max_in_cpu": 1_000_000},
        {"params": "cpu"},
        pytest.param({"params": "cpu", "persistence": None}, marks=slow),
        {"optimizer": "cpu"},
        pytest.param({"sub_group_size": 300_001}, marks=slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("delay", [0.3, pytest.param(0.0, marks=slow)])
def test_early_steps_in_every_tier(tmp_path: Path, options: dict[str, Any], delay: float) -> None:
    """Parameters in memory get their early values by copies, once these count; state in memory is never stepped early."""
    steps_early: list[bool] = []

    def note(engine: Any, step: int) -> None:
        if type(engine).__name__ == "VerticalEngine":
            steps_early.append(engine.optimizer.timing.early)

    made = config(tmp_path, "fp32", 0.0, delay, **options)
    assert_identical(*run_both(made, partial(mixer, "fp32"), token_batches(3, 2), between=note))
    assert set(steps_early) == {options.get("optimizer") != "cpu"}


@pytest.mark.parametrize("clips", [False, pytest.param(True, marks=slow)])
def test_frozen_parameters_inside_stepped_units(tmp_path: Path, clips: bool) -> None:
    """On SSD and in memory, first and in the middle of a layer: they stay as they are, the rest is stepped."""

    def build() -> nn.Module:
        model = MixerModel(NUM_LAYERS)
        for frozen in (model.embed, model.blocks[0].up, model.blocks[1].norm, model.blocks[2].down, model.blocks[3]):
            frozen.requires_grad_(False)
        return model

    made = config(tmp_path, "fp32", clip_of(clips), 0.3)
    stock, vertical = run_both(made, build, token_batches(3, 2))
    assert_identical(stock, vertical)
    torch.manual_seed(0)
    start = build()
    for name, param in start.named_parameters():
        assert torch.equal(param, vertical.weights[name]) != param.requires_grad, name


# ---- N4: steps that do not count


@pytest.mark.parametrize(("clips", "delay"), [(False, None), (False, 0.0), (True, None), pytest.param(True, 0.0, marks=slow)])
def test_a_skipped_step_takes_early_ones_back_and_loses_none_that_is_due(
    tmp_path: Path, clips: bool, delay: float | None
) -> None:
    """Nobody looks between the steps, so what is due meets a step that does not count, and early steps do too. Spoilt are
    the first and the last layer to finish their backward, and all at once."""
    made = config(tmp_path, "fp32", 1.0 if clips else 0.0, delay)
    stock, vertical = run_both(made, partial(SpoilableModel, 512), spoilt_batches())
    for run in (stock, vertical):  # a NaN differs from itself, and nobody sees the gradients of a skipped step
        run.losses = [repr(loss) for loss in run.losses]
        run.grads = [grads for grads, spoil in zip(run.grads, SPOILT, strict=True) if spoil == GOOD]
    assert_identical(stock, vertical)
    assert vertical.counters["skipped_steps"] == sum(spoil != GOOD for spoil in SPOILT)
    assert vertical.ssd_bytes == 3 * MIN_SSD_BYTES


# ---- errors


class Trap(torch.autograd.Function):
    """Identity that tells of its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, at: Callable[[str], None], where: str) -> torch.Tensor:
        ctx.at, ctx.where = at, where
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.at(ctx.where)
        return grads[0], None, None


class TrappedModel(MixerModel):
    """Tells where it is: `at(place)`."""

    def __init__(self) -> None:
        super().__init__(NUM_LAYERS, dropout=0.1)
        self.at: Callable[[str], None] = lambda place: None

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.at("prefix")
        x = Trap.apply(self.embed(input_ids), self.at, "prefix backward")
        for index, block in enumerate(self.blocks):
            x = Trap.apply(block(x), self.at, f"glue {index} backward")
            self.at(f"glue {index}")
        self.at("suffix")
        return next_token_loss(self.head(self.norm(x)), labels)


class Fault(Exception):
    """Raised on purpose."""


PLACES = ["prefix", "glue 0", "glue 2", "suffix", "glue 2 backward", "glue 0 backward", "prefix backward"]


class SlowKernel:
    """CPU Adam that takes its time: what is issued before an error is still under way after it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def update(self, *args: Any) -> None:
        time.sleep(0.03)
        self.kernel.update(*args)


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Run]:
    """The run without a fault, of clipping and not."""
    runs: dict[bool, Run] = {}

    def get(clips: bool) -> Run:
        if clips not in runs:
            made = config(tmp_path_factory.mktemp("unharmed"), "fp32", clip_of(clips), 0.3)
            runs[clips] = run_arm(made, TrappedModel, token_batches(len(PLACES) + 1, 2), vertical=True)
        return runs[clips]

    return get


@pytest.mark.parametrize("clips", [False, pytest.param(True, marks=slow)])
def test_an_error_anywhere_in_a_step_loses_no_step_that_is_due(
    tmp_path: Path, clips: bool, unharmed: Callable[[bool], Run]
) -> None:
    """Every step but the first fails once, somewhere else each time, with steps due and under way; then it is repeated."""
    made = config(tmp_path, "fp32", clip_of(clips), 0.3)
    made["vertical_schedule"]["gradient_host_share"] = 0.5
    batches = token_batches(len(PLACES) + 1, 2)
    with running(made, TrappedModel, vertical=True) as (engine, model):
        engine.optimizer.stepper.kernel = SlowKernel(engine.optimizer.stepper.kernel)
        losses = [engine.train_batch(iter(batches[0])).item()]
        for place, step in zip(PLACES, batches[1:], strict=True):
            assert engine.optimizer.driver.backlog.pending, "nothing was due"
            fail_once(model, place)
            with pytest.raises(Fault, match=place):
                engine.train_batch(iter(step))
            losses.append(engine.train_batch(iter(step)).item())
        assert losses == unharmed(clips).losses
        assert differing(unharmed(clips).weights, read_weights(model)) == []
        assert differing(unharmed(clips).state, read_state(engine, model)) == []


def fail_once(model: Any, place: str) -> None:
    once = ModuleType("once")  # of which no copy is taken: the step that fails does not put it back
    once.failed = False

    def at(where: str) -> None:
        if where == place and not once.failed:
            once.failed = True
            raise Fault(place)

    model.at = at


def test_what_is_due_after_an_error_is_there_for_whoever_reads_the_weights(
    tmp_path: Path, unharmed: Callable[[bool], Run]
) -> None:
    made = config(tmp_path, "fp32", 0.0, 0.3)
    batches = token_batches(len(PLACES) + 1, 2)
    seen: list[dict[str, torch.Tensor]] = []
    for place in (None, "glue 0", "glue 0 backward"):
        with running(made, TrappedModel, vertical=True) as (engine, model):
            engine.optimizer.stepper.kernel = SlowKernel(engine.optimizer.stepper.kernel)
            engine.train_batch(iter(batches[0]))
            if place is not None:
                fail_once(model, place)
                with pytest.raises(Fault, match=place):
                    engine.train_batch(iter(batches[1]))
            seen.append(contents(engine, model))
    assert [differing(seen[0], other) for other in seen[1:]] == [[], []]


# ---- files that are written late


@pytest.mark.parametrize(
    ("clips", "delay"),
    [(False, 0.0), (False, 1.0), *(pytest.param(*case, marks=slow) for case in ((False, 0.3), (True, 0.0)))],
)
def test_parameters_written_late_are_read_after_that(
    tmp_path: Path, stock: Callable[[str, bool], Run], clips: bool, delay: float
) -> None:
    made = config(tmp_path, "fp32", clip_of(clips), delay)
    with running(made, partial(mixer, "fp32"), vertical=True) as (engine, model):
        engine._params.writer._native = LateWrites(engine._params.writer.native)
        losses = [engine.train_batch(iter(step)).item() for step in token_batches(4, 2)]
        expected = stock("fp32", clips)
        assert losses == expected.losses
        assert differing(expected.weights, read_weights(model)) == []
        assert differing(expected.state, read_state(engine, model)) == []


@pytest.mark.parametrize("delay", [0.3, 1.0])
def test_destroy_completes_the_writes_under_way_before_their_memory_goes(tmp_path: Path, delay: float) -> None:
    with running(config(tmp_path, "fp32", 0.0, delay), partial(mixer, "fp32"), vertical=True) as (engine, _):
        late = engine._params.writer._native = LateWrites(engine._params.writer.native)
        for step in token_batches(2, 2):
            engine.train_batch(iter(step))
        engine.optimizer.pipeline.wait_idle()  # what is issued ahead has come to its writes
        assert late.left, "nothing was under way"
        engine.destroy()
        assert late.left == {}
