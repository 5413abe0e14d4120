"""Sums of gradients over micro-batches: two at a time, with the bits of one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from ds_vertical.offload import grad_accumulator
from ds_vertical.offload.grad_accumulator import GradientStore, ParamFacts
from ds_vertical.schedule.events import Unit

LARGE = 2 * grad_accumulator._PIECE + 77


def new_store(
    units: dict[Unit, list[nn.Parameter]], dtype: torch.dtype = torch.float32, rounding: torch.dtype | None = None
) -> GradientStore:
    return GradientStore(units, dtype, ParamFacts(nn.Parameter.numel, lambda param: rounding or param.dtype), pairs=True)


def new_params(*sizes: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(*size, dtype=dtype)) for size in sizes]


def set_gradients(params: Sequence[nn.Parameter], seed: int) -> list[torch.Tensor]:
    """Give the parameters gradients, and return others like them: what has two owners does not wait."""
    random = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=random).to(param.dtype)
    return [param.grad.clone() for param in params if param.grad is not None]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("unit", [0, "pre"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_sum_has_the_bits_of_one_addition_after_the_other(count: int, unit: Unit, dtype: torch.dtype) -> None:
    params = new_params((LARGE,), (3, 5), (0,))
    store, expected = new_store({unit: params}, dtype), [torch.zeros(p.shape, dtype=dtype) for p in params]
    for number in range(count):
        for total, grad in zip(expected, set_gradients(params, number), strict=True):
            total.copy_(grad) if number == 0 else total.add_(grad)
        store.add(unit)
        assert all(param.grad is None for param in params)
    for total, flat in zip(expected, store.take(unit), strict=True):
        assert torch.equal(flat.view(total.shape), total)


def test_a_gradient_that_is_transposed_is_added_where_it_belongs() -> None:
    (param,) = new_params((700, 1000))
    store, expected = new_store({0: [param]}), torch.zeros(param.shape)
    for number in range(4):
        (grad,) = set_gradients([param], number)
        expected += grad
        param.grad = grad.t().contiguous().t()
        store.add(0)
    assert torch.equal(store.take(0)[0].view(param.shape), expected)


def test_weights_that_some_micro_batches_do_not_use_have_the_sums_of_the_others() -> None:
    params = new_params((LARGE,), (64,), (7,))
    store, expected = new_store({0: params}), [torch.zeros(p.shape) for p in params]
    for number, used in enumerate([(0,), (1,), (0, 1), (0,), (1,)]):
        grads = set_gradients(params, number)
        for index, param in enumerate(params):
            if index in used:
                expected[index] += grads[index]
            else:
                param.grad = None
        store.add(0)
    for total, flat in zip(expected, store.take(0), strict=True):
        assert torch.equal(flat, total)


def test_layers_in_turn_and_what_stands_around_them_do_not_mix() -> None:
    units: dict[Unit, list[nn.Parameter]] = {0: new_params((40,)), 1: new_params((40,)), "pre": new_params((40,))}
    store, expected = new_store(units), {unit: torch.zeros(40) for unit in units}
    order: list[Unit] = [1, "pre", 1, 0, 1, "pre", 0, 0, 1]
    for number, unit in enumerate(order):
        expected[unit] += set_gradients(units[unit], number)[0]
        store.add(unit)
    for unit, total in expected.items():
        assert torch.equal(store.take(unit)[0], total)


def test_what_waits_is_counted_and_goes_with_the_sums() -> None:
    params = new_params((1000,))
    store = new_store({0: params})
    set_gradients(params, 0)
    store.add(0)
    assert store.num_bytes == 1000 * 4 + 1000 * 2  # the sum in fp32, and a gradient in bf16
    store.drop_all()
    assert store.num_bytes == 0
    (grad,) = set_gradients(params, 1)
    store.add(0)
    assert torch.equal(store.take(0)[0], grad.float())  # and nothing of the step that failed
    store.drop(0)
    assert store.num_bytes == 0
    set_gradients(params, 2)
    store.add(0)
    store.drop(0)
    assert store.num_bytes == 0


def test_each_gradient_of_a_pair_is_rounded_by_itself() -> None:
    params = new_params((LARGE,), dtype=torch.float32)
    store, expected = new_store({0: params}, rounding=torch.bfloat16), torch.zeros(LARGE)
    for number in range(4):
        expected += set_gradients(params, number)[0].bfloat16()
        store.add(0)
    assert torch.equal(store.take(0)[0], expected)


def test_a_micro_batch_that_leaves_a_layer_out_parts_no_pair() -> None:
    params = new_params((1000,))
    store, expected = new_store({0: params}), torch.zeros(1000)
    for number in range(5):
        if number % 2 == 0:
            expected += set_gradients(params, number)[0]
        store.add(0)
    assert torch.equal(store.take(0)[0], expected)


def test_a_pair_of_which_one_is_transposed() -> None:
    (param,) = new_params((700, 1000))
    store, expected = new_store({0: [param]}), torch.zeros(param.shape)
    for number in range(4):
        (grad,) = set_gradients([param], number)
        expected += grad
        param.grad = grad if number % 2 else grad.t().contiguous().t()
        store.add(0)
    assert torch.equal(store.take(0)[0].view(param.shape), expected)


class FromWorkspace(torch.autograd.Function):
    """A user's function whose gradients are views of memory that every backward writes anew."""

    workspace = torch.zeros(64)

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return weight * factor

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        FromWorkspace.workspace[:40] = grads[0] * ctx.factor
        return FromWorkspace.workspace[:40], None


def test_a_gradient_whose_memory_somebody_else_has_does_not_wait() -> None:
    params = new_params((40,), dtype=torch.float32)
    store = new_store({0: params})
    for factor in (1.0, 2.0, 4.0):
        FromWorkspace.apply(params[0], factor).sum().backward()
        store.add(0)
    assert torch.equal(store.take(0)[0], torch.full((40,), 7.0))


def test_what_autograd_makes_itself_does_wait() -> None:
    linear = nn.Linear(8, 8)
    store = new_store({0: list(linear.parameters())})
    linear(torch.ones(2, 8)).sum().backward()
    store.add(0)
    assert store.num_bytes == 2 * 4 * (64 + 8)


def test_without_pairs_no_gradient_waits() -> None:
    params = new_params((1000,))
    store = GradientStore({0: params}, torch.float32, ParamFacts(nn.Parameter.numel, lambda param: param.dtype))
    set_gradients(params, 0)
    store.add(0)
    assert store.num_bytes == 1000 * 4
