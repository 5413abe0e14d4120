"""Gradients of a model's ends in one block of memory: torch's bits, and no memory that the kernel maps for each."""

from __future__ import annotations

import resource
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from ds_vertical.offload.autograd.gradient_block import GradientBlock
from ds_vertical.offload.grad_accumulator import GradientStore, ParamFacts

ROWS, WIDTH = 3000, 64
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def gradient(module: nn.Module, run: Callable[[nn.Module], torch.Tensor], block: GradientBlock | None = None) -> torch.Tensor:
    """Of the module's weight; it is the caller's. `run`: the module's output."""
    made, (weight,) = run(module), module.parameters()
    weight.grad, start = None, torch.linspace(-1, 1, made.numel()).view(made.shape).to(made.dtype)
    if block is None:
        made.backward(start)
    else:
        with block:
            made.backward(start)
    assert weight.grad is not None
    grad, weight.grad = weight.grad, None
    return grad


def new_block(numel: int = ROWS * WIDTH, above: int = 1 << 10) -> GradientBlock:
    return GradientBlock([numel], above)


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    """Few of them, so that some come more than once."""
    return torch.randint(0, 40, shape, generator=torch.Generator().manual_seed(seed))


LOOKUPS = {
    "plain": {},
    "padding": {"padding_idx": 7},
    "last row pads": {"padding_idx": ROWS - 1},
    "by frequency": {"scale_grad_by_freq": True, "padding_idx": 3},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("settings", LOOKUPS.values(), ids=LOOKUPS)
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32], ids=str)
def test_a_lookups_gradient_has_torchs_bits(dtype: torch.dtype, settings: dict[str, int], index_dtype: torch.dtype) -> None:
    module, block = nn.Embedding(ROWS, WIDTH, dtype=dtype, **settings), new_block()  # type: ignore[arg-type]
    for seed, shape in enumerate(((2, 33), (5,), (1, 1), (2, 33))):  # each over what the one before has left
        ids = tokens(*shape, seed=seed).to(index_dtype)
        expected = gradient(module, lambda m, ids=ids: m(ids))
        found = gradient(module, lambda m, ids=ids: m(ids), block)
        assert block.holds(found) and not block.holds(expected)
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)) and expected.any()
        del found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_a_matrixs_gradient_has_torchs_bits(dtype: torch.dtype, bias: bool) -> None:
    weight, block = nn.Linear(WIDTH, ROWS, bias=False, dtype=dtype), new_block()
    added = torch.ones(ROWS, dtype=dtype) if bias else None
    for number, shape in enumerate(((1, 8, WIDTH), (2, 33, WIDTH), (5, WIDTH))):
        given = torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(dtype).requires_grad_()
        run = partial(_linear, given, added)
        expected, found = gradient(weight, run), gradient(weight, run, block)
        assert block.holds(found) and torch.equal(found.view(torch.uint8), expected.view(torch.uint8)) and expected.any()
        del found


def _linear(given: torch.Tensor, bias: torch.Tensor | None, module: nn.Module) -> torch.Tensor:
    assert isinstance(module.weight, nn.Parameter)
    return functional.linear(given, module.weight, bias)


def test_a_gradient_that_somebody_holds_keeps_its_values() -> None:
    module, block = nn.Embedding(ROWS, WIDTH), new_block()
    first = gradient(module, lambda m: m(tokens(9)), block)
    kept = first.clone()
    second = gradient(module, lambda m: m(tokens(9, seed=1)), block)
    assert block.holds(first) and not block.holds(second)
    assert torch.equal(first, kept) and not torch.equal(first, second)


@pytest.mark.parametrize(
    "block",
    [GradientBlock([ROWS * WIDTH], 4 * ROWS * WIDTH), GradientBlock([ROWS * WIDTH + 1], 0)],
    ids=["small", "no parameter"],
)
def test_other_results_lie_where_torch_puts_them(block: GradientBlock) -> None:
    assert not block.holds(gradient(nn.Embedding(ROWS, WIDTH), lambda m: m(tokens(9)), block))
    assert block.num_bytes == 0


def test_a_gradient_that_is_to_have_a_gradient_lies_where_torch_puts_it() -> None:
    weight, block = nn.Parameter(torch.ones(WIDTH, ROWS)), new_block()
    with block:
        (found,) = torch.autograd.grad((torch.ones(3, WIDTH) @ weight).square().sum(), [weight], create_graph=True)
    assert found.requires_grad and not block.holds(found)


def test_a_block_is_made_once_for_as_many_micro_batches_as_come() -> None:
    """Torch's memory for each is mapped anew: 8192 pages here."""
    module = nn.Embedding(8 * 1024, 1024)
    block = new_block(module.weight.numel())
    gradient(module, lambda m: m(tokens(9)), block)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for seed in range(4):
        gradient(module, lambda m, seed=seed: m(tokens(9, seed=seed)), block)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 2000


def test_a_store_gives_its_block_back_ahead_of_other_layers_and_with_the_sums() -> None:
    """Gradients in pairs take that memory there."""
    module, layers = nn.Embedding(ROWS, WIDTH), [nn.Linear(3, 3) for _ in range(2)]
    units = {"pre": list(module.parameters()), 0: list(layers[0].parameters()), 1: list(layers[1].parameters())}
    store = GradientStore(units, torch.float32, ParamFacts(nn.Parameter.numel, lambda param: param.dtype), pairs=True)
    store.block, store.arrivals.alone = new_block(), 1
    for count, held in ((4, 4 * ROWS * WIDTH), (1, 0)):
        store.expect(count)
        with store.making():
            module(tokens(9)).sum().backward()
        store.add("pre")
        assert store.block.num_bytes == held, "nothing comes again in a step of one micro-batch"
        store.drop("pre")
    store.expect(2)
    with store.making():
        module(tokens(9)).sum().backward()
    store.add("pre")
    assert module.weight.grad is None and store.block.num_bytes
    with store.adding(1):  # which comes between two backwards of the suffix
        assert store.block.num_bytes
    with store.adding(0):
        assert not store.block.num_bytes
    with store.making():
        module(tokens(9)).sum().backward()
    store.add("pre")
    module(tokens(9)).sum().backward()
    assert module.weight.grad is not None
    expected = 2 * module.weight.grad
    assert store.block.num_bytes and torch.equal(store.take("pre")[0].view(ROWS, WIDTH), expected)
    store.drop("pre")
    assert not store.block.num_bytes
