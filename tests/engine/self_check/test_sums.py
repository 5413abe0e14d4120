"""The self-check sees a sum of gradients that is not theirs, in the layers and outside; with every kind of sum it agrees."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import base_config, differing, read_weights, running, small_buffers
from models import tiny_gpt2, token_batches
from stateful import Base, batches, config_in

from ds_vertical.engine.self_check.check import SelfCheckError
from ds_vertical.offload import grad_accumulator
from ds_vertical.offload.grad_accumulator import GradientStore, UnitSums

Patch = pytest.MonkeyPatch
accumulate, add_grads = grad_accumulator._accumulate, UnitSums.add
add_unit, made = GradientStore.add, GradientStore.__init__


def drops_a_later_one(patch: Patch) -> None:
    def drop(total: torch.Tensor, grads: Sequence[torch.Tensor], touched: bool) -> None:
        accumulate(total, () if touched else grads[:1], touched)

    patch.setattr(grad_accumulator, "_accumulate", drop)


def adds_one_twice(patch: Patch) -> None:
    patch.setattr(grad_accumulator, "_accumulate", lambda total, grads, touched: accumulate(total, (*grads, grads[0]), touched))


def rounds_each_addition(patch: Patch) -> None:
    def add(total: torch.Tensor, grads: Sequence[torch.Tensor], touched: bool) -> None:
        accumulate(total, grads, touched)
        total.copy_(total.bfloat16())

    patch.setattr(grad_accumulator, "_accumulate", add)


def sums_in_another_dtype(patch: Patch) -> None:
    def make(self: GradientStore, units: Any, dtype: torch.dtype, *more: Any, **keywords: Any) -> None:
        made(self, units, torch.bfloat16, *more, **keywords)

    patch.setattr(GradientStore, "__init__", make)


def loses_one_that_waits(patch: Patch) -> None:
    """With pairs a layer's first one waits, and each one where sums have their own memory."""

    def add(self: UnitSums, index: int, *grads: torch.Tensor) -> None:
        self._waiting[index] = None
        add_grads(self, index, *grads)

    patch.setattr(UnitSums, "add", add)


def leaves_the_last_element_out(patch: Patch) -> None:
    def add(total: torch.Tensor, grads: Sequence[torch.Tensor], touched: bool) -> None:
        accumulate(total, grads, touched)
        total.view(-1)[-1] = 0

    patch.setattr(grad_accumulator, "_accumulate", add)


def loses_one_outside_the_layers(patch: Patch) -> None:
    calls = []

    def add(self: GradientStore, unit: Any) -> None:
        calls.append(unit)
        if not isinstance(unit, int) and calls.count(unit) == 1:
            for param in self.params(unit):
                param.grad = None
        add_unit(self, unit)

    patch.setattr(GradientStore, "add", add)


FAULTS = (drops_a_later_one, adds_one_twice, rounds_each_addition, sums_in_another_dtype, leaves_the_last_element_out)


def refused(folder: Path, section: dict[str, Any]) -> str:
    """What the check says of a model without state; nothing is trained."""
    with running(config_in(folder, section={"self_check": True, "seed": 4} | section), Base, vertical=True) as (engine, model):
        before = read_weights(model)
        with pytest.raises(SelfCheckError) as raised:
            engine.train_batch(iter(batches(1)[0]))
        assert engine.global_steps == 0 and not differing(before, read_weights(model))
        assert engine._gradients.num_bytes == 0
        return str(raised.value)


@pytest.mark.parametrize("order", ["vertical", "horizontal"])
@pytest.mark.parametrize("plant", FAULTS)
def test_a_sum_that_is_none_is_found(tmp_path: Path, monkeypatch: Patch, plant: Callable[[Patch], None], order: str) -> None:
    """Each gradient for itself agrees with torch's own order."""
    plant(monkeypatch)
    assert re.search(
        r"self_check: layer 3 \(blocks\.3\): what is kept as the sum of the gradients of blocks\.3\.\w+\.\w+ over micro-batches"
        r" 0 to 1 is \d\.\de-\d\d of their norm away from that; each of them agrees with torch's own order; nothing has been",
        refused(tmp_path, {"order": order}),
    )


def test_a_gradient_that_waits_and_is_lost_is_found(tmp_path: Path, monkeypatch: Patch) -> None:
    """A layer's first one waits for the next micro-batch's, as the budget of this run has it."""
    loses_one_that_waits(monkeypatch)
    assert "what is kept as the sum of the gradients of blocks.3." in refused(tmp_path, {})


def test_a_sum_outside_the_layers_is_found(tmp_path: Path, monkeypatch: Patch) -> None:
    """Both orders make it alike, so torch's own order holds it against its gradients."""
    loses_one_outside_the_layers(monkeypatch)
    assert re.search(
        r"self_check: outside the layers: what is kept as the sum of the gradients of \w+\.\w+ over", refused(tmp_path, {})
    )


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("large", [False, True])
def test_it_agrees_with_each_kind_of_sum(
    tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str], dtype: str, large: bool
) -> None:
    """Gradients that are added as they are made, too, in as many dtypes as sums."""
    if large:
        monkeypatch.setattr(grad_accumulator, "LARGE", 1)
    config = small_buffers(base_config(tmp_path, dtype=dtype, section={"self_check": True}))
    with running(config, lambda: tiny_gpt2(3, 64, tied=True), vertical=True) as (engine, _):
        engine.train_batch(iter(token_batches(1, 3)[0]))
    assert "they agree" in capsys.readouterr().out


class Faint(Base):
    """Its gradients have no multiple of fp16's smallest number near them, or are rounded to 0 there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 1e-6


IN_FP16 = ({"communication_data_type": "fp16"}, {"data_types": {"grad_accum_dtype": "fp16"}})


@pytest.mark.parametrize("top", [pytest.param(IN_FP16[0], marks=pytest.mark.slow), IN_FP16[1]], ids=str)
def test_it_agrees_with_sums_next_to_0_in_fp16(tmp_path: Path, capsys: pytest.CaptureFixture[str], top: dict[str, Any]) -> None:
    with running(config_in(tmp_path, section={"self_check": True}, **top), Faint, vertical=True) as (engine, _):
        engine.train_batch(iter(batches(1)[0]))
    assert "they agree" in capsys.readouterr().out


def test_in_bf16_a_sum_in_fp32_is_held_to_fp32(tmp_path: Path, monkeypatch: Patch) -> None:
    """The gradients have bf16's rounding, and their sum has not."""
    rounds_each_addition(monkeypatch)
    config = small_buffers(base_config(tmp_path, dtype="bf16", section={"self_check": True}))
    with running(config, lambda: tiny_gpt2(3, 64), vertical=True) as (engine, _):
        with pytest.raises(
            SelfCheckError, match=r"what is kept as the sum of the gradients of \S+ over .* is \d\.\de-0[34] of"
        ):
            engine.train_batch(iter(token_batches(1, 3)[0]))
