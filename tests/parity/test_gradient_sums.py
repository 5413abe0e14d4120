"""Gradients that go into their sums as autograd makes them: stock's bits, hooks that find what they found before, and less
memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Run, assert_identical, base_config, run_arm, run_both, small_buffers
from models import MixerModel, token_batches
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_vertical.errors import MemoryBudgetError
from ds_vertical.offload import grad_accumulator
from ds_vertical.offload.grad_accumulator import GradientStore, SumPlace
from ds_vertical.planner import memory_budget
from ds_vertical.schedule.events import Unit
from ds_vertical.types import NORM_COPIED

CLIP = 0.05  # far below every gradient norm here, so clipping acts on every step


def config_of(folder: Path, dtype: str, num_micro_batches: int, clip: float, **section: Any) -> dict[str, Any]:
    made = base_config(folder, dtype=dtype, num_micro_batches=num_micro_batches, clip=clip, section=section)
    return small_buffers(made, 1_100_000)


def width_of(dtype: str) -> int:
    return 768 if dtype == "bf16" else 512


def apart(monkeypatch: pytest.MonkeyPatch) -> list[GradientStore]:
    """Let each sum have memory of its own, as on a GPU. Returns the stores that are made."""
    made: list[GradientStore] = []
    make = GradientStore.__init__

    def making(self: GradientStore, *args: Any, **kwargs: Any) -> None:
        *first, place = args
        make(self, *first, SumPlace(place.device, joined=False), pairs=False)
        made.append(self)

    monkeypatch.setattr(GradientStore, "__init__", making)
    return made


FAST = [("bf16", 4, CLIP), ("fp32", 1, 0.0)]
CASES = [
    pytest.param(dtype, count, clip, marks=[] if (dtype, count, clip) in FAST else pytest.mark.slow)
    for dtype in ("bf16", "fp32")
    for count in (1, 4)
    for clip in (0.0, CLIP)
]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "count", "clip"), CASES)
def test_gradients_added_as_they_are_made_have_stocks_bits(tmp_path: Path, dtype: str, count: int, clip: float) -> None:
    stock, vertical = run_both(
        config_of(tmp_path, dtype, count, clip), partial(MixerModel, 3, width_of(dtype)), token_batches(3, count)
    )
    assert_identical(stock, vertical)


@pytest.mark.parametrize(("dtype", "count", "clip"), CASES)
def test_sums_that_leave_one_by_one_have_stocks_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, count: int, clip: float
) -> None:
    config, build = config_of(tmp_path, dtype, count, clip), partial(MixerModel, 3, width_of(dtype))
    stock = run_arm(config, build, token_batches(2, count), vertical=False)
    made = apart(monkeypatch)
    assert_identical(stock, run_arm(config, build, token_batches(2, count), vertical=True))
    assert len(made) == 1 and made[0].num_bytes == 0


@pytest.mark.parametrize("keeps_freed", [pytest.param(True, marks=pytest.mark.slow), False])
def test_where_freed_memory_goes_back_the_last_layers_gradients_do_not_wait_and_bits_are_stocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps_freed: bool
) -> None:
    """They would be in memory while the head's are made."""
    config, build = config_of(tmp_path, "bf16", 4, 0.0), partial(MixerModel, 3, width_of("bf16"))
    stock = run_arm(config, build, token_batches(2, 4), vertical=False)
    chosen = partial(replace, pairs=True, keeps_freed=keeps_freed)
    monkeypatch.setattr(memory_budget, "with_room", lambda terms, *_: chosen(terms))
    waited: set[Unit] = set()
    is_to_wait = GradientStore._is_to_wait

    def noting(self: GradientStore, unit: Unit, index: int) -> bool:
        waits = is_to_wait(self, unit, index)
        waited.update([unit] * waits)
        return waits

    monkeypatch.setattr(GradientStore, "_is_to_wait", noting)
    assert_identical(stock, run_arm(config, build, token_batches(2, 4), vertical=True))
    assert waited == ({0, 1, 2} if keeps_freed else {0, 1})


@pytest.mark.parametrize("dtype", [pytest.param("bf16", marks=pytest.mark.slow), "fp32"])
def test_gradients_of_ends_that_are_larger_than_layers_have_stocks_bits_where_freed_memory_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Those in bf16 are added piece by piece."""
    config = small_buffers(
        base_config(tmp_path, dtype=dtype, num_micro_batches=3, clip=CLIP, section={"layers": ["blocks"]}), 3_000_000
    )
    build = partial(MixerModel, 2, width_of(dtype), None, 0.0, 3_000)
    stock = run_arm(config, build, token_batches(3, 3), vertical=False)
    monkeypatch.setattr(memory_budget, "with_room", lambda terms, *_: replace(terms, pairs=True, keeps_freed=False))
    assert_identical(stock, run_arm(config, build, token_batches(3, 3), vertical=True))


# ---- hooks


class Hooked(MixerModel):
    """Hooks of users on the parameters of some blocks: what they see of gradients goes to `seen`, and some change it."""

    def __init__(self) -> None:
        super().__init__(3, 512)
        self.seen: list[tuple[str, float]] = []
        weight = self.blocks[1].up.weight
        weight.register_hook(lambda grad: self.see("grad", grad) or grad * 2)
        weight.register_post_accumulate_grad_hook(lambda param: self.see("set", param.grad))
        self.blocks[2].up.weight.register_post_accumulate_grad_hook(self.after)

    def see(self, name: str, grad: torch.Tensor | None) -> None:
        self.seen.append((name, 0.0 if grad is None else float(grad.float().sum())))

    def after(self, param: nn.Parameter) -> None:
        """Ahead of this one autograd comes to the block's other matrix."""
        self.see("up", param.grad)
        self.see("down", self.blocks[2].down.weight.grad)
        param.grad.mul_(0.5)


@pytest.mark.slow
def test_users_hooks_on_parameters_see_gradients_and_change_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradients taken behind each backward and as they are made: the same."""
    apart(monkeypatch)  # where they could wait in pairs all are taken behind
    seen: list[list[tuple[str, float]]] = []
    runs: list[Run] = []
    for least in (1 << 60, grad_accumulator.LARGE, 1):
        monkeypatch.setattr(grad_accumulator, "LARGE", least)
        models: list[Hooked] = []

        def build(models: list[Hooked] = models) -> Hooked:
            models.append(Hooked())
            return models[-1]

        config = config_of(tmp_path / str(least), "fp32", 3, CLIP)
        runs.append(run_arm(config, build, token_batches(2, 3), vertical=True))
        seen.append(models[0].seen)
    assert seen[0] == seen[1] == seen[2] and all(value for _, value in seen[0])
    for run in runs[1:]:
        assert_identical(runs[0], run)


# ---- a parameter to which autograd comes twice


class TwiceBlock(nn.Module):
    """The same matrix within two checkpoints, whose backwards are two."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x + torch.tanh(checkpoint(self.up, x, use_reentrant=True))
        return x


class Twice(MixerModel):
    def __init__(self, width: int) -> None:
        super().__init__(3, width)
        self.blocks = nn.ModuleList(TwiceBlock(width) for _ in range(3))


@pytest.mark.slow
def test_a_matrix_in_two_checkpoints_of_a_block_has_the_gradients_of_late_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    apart(monkeypatch)
    runs: list[Run] = []
    for least in (1 << 60, grad_accumulator.LARGE):
        monkeypatch.setattr(grad_accumulator, "LARGE", least)
        config = config_of(tmp_path / str(least), "bf16", 2, CLIP)
        runs.append(run_arm(config, partial(Twice, 768), token_batches(2, 2), vertical=True))
    assert_identical(*runs)
    assert "autograd comes to a parameter of layer" in capsys.readouterr().out


# ---- memory


def needed(config: dict[str, Any], build: Callable[[], nn.Module]) -> int:
    """Bytes of host memory that a run asks for, where it has too little."""
    config = config | {"vertical_schedule": config["vertical_schedule"] | {"host_memory_bytes": 1 << 20}}
    with pytest.raises(MemoryBudgetError) as caught:
        run_arm(config, build, [], vertical=True)
    return int(re.findall(r"host memory: needs (\d+) bytes", str(caught.value))[0])


def settled(config: dict[str, Any], build: Callable[[], nn.Module]) -> int:
    """The same, once the process itself has ceased to grow."""
    found = [needed(config, build)]
    while len(found) < 2 or found[-1] - found[-2] > 1 << 20:
        found.append(needed(config, build))
        assert len(found) < 9, found
    return found[-1]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_model_of_175bs_proportions_trains_in_memory_that_a_build_before_refuses(
    tmp_path: Path, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Embedding and head as large as a block. That build copies the largest gradient to fp64 for its norm, and lets a layer's
    gradients wait for those of the next micro-batch whether or not there is room."""
    width, inner, size = 1024, 4096, 2 if dtype == "bf16" else 4
    largest = 2 * inner * width  # elements of embedding, head and block
    build = partial(MixerModel, 2, width, inner, 0.0, 2 * inner)
    made = base_config(tmp_path, dtype=dtype, num_micro_batches=2, clip=CLIP, sub_group_size=9_000_000)
    config = small_buffers(made, largest + 1)
    batches = token_batches(1, 2)
    stock = run_arm(config, build, batches, vertical=False)
    assert_identical(stock, run_arm(config, build, batches, vertical=True))  # by now the process has what libraries keep
    least = settled(config, build)
    before = least + 8 * (largest - NORM_COPIED) + size * largest
    # Gradients that wait would take 2 x size x largest more; the process may have grown or shrunk a little by then.
    config["vertical_schedule"]["host_memory_bytes"] = allowed = least + 3 * size * largest // 2
    assert allowed < before
    assert_identical(stock, run_arm(config, build, batches, vertical=True))
    assert "no room for gradients that wait" in capsys.readouterr().out
