"""Sums of gradients over micro-batches: two at a time, with the bits of one after the other."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ds_vertical.model.kept.block_backward import Leaves
from ds_vertical.model.state.restart import GradientMissed
from ds_vertical.offload import grad_accumulator
from ds_vertical.offload.grad_accumulator import GradientStore, ParamFacts, SumPlace
from ds_vertical.schedule.events import Unit

LARGE = 2 * grad_accumulator._PIECE + 77


def new_store(
    units: dict[Unit, list[nn.Parameter]],
    dtype: torch.dtype = torch.float32,
    rounding: torch.dtype | None = None,
    joined: bool = True,
    pairs: bool = True,
) -> GradientStore:
    facts = ParamFacts(nn.Parameter.numel, lambda param: rounding or param.dtype)
    return GradientStore(units, dtype, facts, place=SumPlace(joined=joined), pairs=pairs)


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


BF16, FP32 = torch.bfloat16, torch.float32
PIECES = 8


@pytest.mark.parametrize(
    ("unit", "dtypes", "device", "calls"),
    [
        (0, (FP32, BF16), "cpu", [0, 2 * PIECES]),  # the first one waits for the second
        ("pre", (FP32, BF16), "cpu", [1, PIECES]),  # a copy takes no memory beside the sum
        ("pre", (FP32, FP32), "cpu", [1, 1]),
        ("pre", (BF16, BF16), "cpu", [1, 1]),
        ("pre", (FP32, BF16), "meta", [1, 1]),  # as on a GPU, which makes no copy
        (0, (FP32, BF16), "meta", [0, 2]),
    ],
)
def test_gradients_are_added_piece_by_piece_where_that_saves_time_or_memory(
    unit: Unit, dtypes: tuple[torch.dtype, torch.dtype], device: str, calls: list[int]
) -> None:
    """torch's `add_` makes a copy in the sum's dtype of all that it adds at a time."""
    dtype, made_in = dtypes
    param = nn.Parameter(torch.zeros(PIECES * grad_accumulator._PIECE, dtype=made_in, device=device))
    facts = ParamFacts(nn.Parameter.numel, lambda param: param.dtype)
    store = GradientStore({unit: [param]}, dtype, facts, place=SumPlace(device), pairs=True)
    for expected in calls:
        param.grad = torch.ones_like(param)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as made:
            store.add(unit)
        events = [each for each in made.events() if each.name in ("aten::add_", "aten::copy_")]
        outer = [each for each in events if each.cpu_parent is None]
        assert len(outer) == expected
        copied = max((each.self_cpu_memory_usage for each in made.events()), default=0)
        assert expected < 2 or device == "meta" or 0 < copied <= 4 * grad_accumulator._PIECE


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


# ---- sums with memory of their own


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pairs", [True, False])
def test_sums_that_leave_one_by_one_have_the_bits_of_one_addition_after_the_other(
    count: int, dtype: torch.dtype, pairs: bool
) -> None:
    params = new_params((LARGE,), (3, 5), (0,), (70,))
    store = new_store({0: params}, dtype, joined=False, pairs=pairs)
    for _ in range(2):  # into memory used before
        store.expect(count)
        expected = [torch.zeros(p.shape, dtype=dtype) for p in params]
        for number in range(count):
            for index, grad in enumerate(set_gradients(params, number)):
                if index == 3 and number != 1:
                    params[index].grad = None  # of the last one a single gradient comes, or none
                elif number == 0:
                    expected[index].copy_(grad)
                else:
                    expected[index].add_(grad)
            store.add(0)
        assert store.flat(0) is None
        for total, flat in zip(expected, store.hand_over(0), strict=True):
            assert flat.dtype == dtype and torch.equal(flat.view(total.shape), total)
        store.drop(0)
        assert store.num_bytes == 0


def test_sums_that_leave_one_by_one_are_gone_one_by_one() -> None:
    params = new_params((1000,), (24,))
    store = new_store({0: params}, joined=False, pairs=False)
    for number in range(2):
        set_gradients(params, number)
        store.add(0)
    left = [store.num_bytes]
    for _ in store.hand_over(0):
        left.append(store.num_bytes)
    assert left == [4 * 1024, 4 * 24, 0]


def test_a_sum_that_has_left_is_its_owner_s_until_the_last_has() -> None:
    """A parameter without a gradient gets zeros, which must not lie in memory that a collective still reads."""
    params = new_params((1000,), (1000,))
    store, expected = new_store({0: params}, joined=False, pairs=False), torch.zeros(1000)
    for number in range(2):
        expected += set_gradients(params, number)[0]
        params[1].grad = None
        store.add(0)
    first, second = store.hand_over(0)
    assert torch.equal(first, expected) and not second.any()


def test_no_more_than_one_layer_s_gradients_wait() -> None:
    units: dict[Unit, list[nn.Parameter]] = {0: new_params((1000,)), 1: new_params((1000,))}
    store = new_store(units)
    for unit in (0, 1):
        set_gradients(units[unit], 0)
        store.add(unit)
    assert store.num_bytes == 2 * 4000 + 2000


def test_one_micro_batch_has_no_sum_beside_its_gradients() -> None:
    params = new_params((1000,), (24,))
    store = new_store({"pre": params}, joined=False, pairs=False)
    store.expect(1)
    grads = set_gradients(params, 0)
    store.add("pre")
    assert store.num_bytes == 2 * 1024, "gradients in bf16, as they were made"
    left = store.hand_over("pre")
    assert torch.equal(next(left), grads[0].float())
    assert store.num_bytes == 2 * 24, "the first one's memory is not the store's now"
    assert torch.equal(next(left), grads[1].float()) and next(left, None) is None
    store.drop("pre")
    store.expect(2)
    for number in range(2):
        set_gradients(params, number)
        store.add("pre")
    assert store.num_bytes == 4 * 1024


def test_a_first_gradient_whose_memory_somebody_else_has_is_copied() -> None:
    params = new_params((40,), dtype=torch.float32)
    store = new_store({0: params}, joined=False, pairs=False)
    for factor in (1.0, 2.0, 4.0):
        FromWorkspace.apply(params[0], factor).sum().backward()
        store.add(0)
    assert torch.equal(next(store.hand_over(0)), torch.full((40,), 7.0))


def test_the_last_micro_batch_waits_for_no_other() -> None:
    params = new_params((1000,))
    store = new_store({0: params})
    store.expect(3)
    for waiting in (2000, 0, 0):
        set_gradients(params, 0)
        store.add(0)
        assert store.num_bytes == 4000 + waiting


# ---- as autograd makes them


class Watched(nn.Module):
    """Two large weights in a chain and a small bias; `made` notes which gradients there are when each of them comes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(600, 600, bias=False), nn.Linear(600, 600)
        self.made: list[set[str]] = []
        self.first.weight.register_hook(lambda _: self.made.append(self.there()))

    def there(self) -> set[str]:
        return {name for name, param in self.named_parameters() if param.grad is not None}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("pairs", [True, False])
def test_a_large_gradient_is_added_as_it_is_made(joined: bool, pairs: bool) -> None:
    torch.manual_seed(0)
    model = Watched()
    params, rows = list(model.parameters()), torch.randn(4, 5, 600)
    store, expected = new_store({0: params}, joined=joined, pairs=pairs), [torch.zeros(p.shape) for p in params]
    for row in rows:
        for total, grad in zip(expected, torch.autograd.grad(model(row).square().sum(), params), strict=True):
            total += grad
    for _ in range(2):
        store.expect(len(rows))
        for number, row in enumerate(rows):
            waits = pairs or (number == 0 and not joined)  # in pairs all are added behind the whole backward
            model.made.clear()
            with store.adding(0):
                model(row).square().sum().backward()
            gone = set() if waits else {"first.weight", "second.weight"}
            assert model.made == [{"second.weight", "second.bias"} - gone], "the large one that came first is gone by now"
            assert model.there() == {"first.weight", "second.weight", "second.bias"} - gone
            store.add(0)
            assert model.there() == set()
        for total, flat in zip(expected, store.hand_over(0), strict=True):
            assert torch.equal(flat.view(total.shape), total)
        store.drop(0)
    model(rows[0]).sum().backward()
    assert len(model.there()) == 3, "hooks of the store outlive its sums"


def test_a_layer_whose_gradients_do_not_wait_adds_them_as_they_are_made_beside_one_whose_do() -> None:
    models = {layer: Watched() for layer in (0, 1)}
    store = new_store({layer: list(model.parameters()) for layer, model in models.items()})
    store.arrivals.alone = 1
    store.expect(2)
    large = {"first.weight", "second.weight"}
    for layer, left in ((1, set()), (0, large)):
        with store.adding(layer):
            models[layer](torch.ones(5, 600)).sum().backward()
        assert models[layer].there() & large == left
        store.add(layer)


@pytest.mark.parametrize("num_calls", [1, 2])
def test_hooks_of_users_find_the_gradient_as_ever(num_calls: int) -> None:
    weight = nn.Parameter(torch.ones(LARGE))
    seen: list[float] = []

    def see(*_: object) -> None:
        assert weight.grad is not None
        seen.append(float(weight.grad[-1]))

    node = torch.autograd.graph.get_gradient_edge(weight).node
    node.register_hook(see)
    store = new_store({0: [weight]}, pairs=False)
    store.expect(2, num_calls)
    weight.register_post_accumulate_grad_hook(see)
    for factor in (1.0, 3.0):
        with store.adding(0):
            (weight * factor).sum().backward()
            assert (weight.grad is None) is (num_calls == 1)
        store.add(0)
    assert seen == [1.0, 1.0, 3.0, 3.0]
    assert torch.equal(store.take(0)[0], torch.full((LARGE,), 4.0))


def test_where_code_of_others_runs_gradients_stay_until_the_backward_is_over() -> None:
    params = new_params((LARGE,), (LARGE,), dtype=torch.float32)
    facts = ParamFacts(nn.Parameter.numel, lambda param: param.dtype, is_watched=lambda unit: unit == 1)
    store = GradientStore({0: params[:1], 1: params[1:]}, torch.float32, facts)
    for unit, param in enumerate(params):
        with store.adding(unit):
            param.sum().backward()
            assert (param.grad is None) is (unit == 0)
        store.add(unit)


def test_a_parameter_to_which_autograd_comes_twice_starts_the_step_over_and_is_right_then() -> None:
    weight = nn.Parameter(torch.full((LARGE,), 1.0, dtype=torch.bfloat16))
    store, expected = new_store({0: [weight]}, pairs=False), torch.zeros(LARGE)

    def backward(factor: float) -> None:
        for part in (factor, 1 / 512):  # which bf16 does not add to 1, nor to 3
            (weight * part).sum().backward()

    with pytest.raises(GradientMissed, match="layer 0"), store.adding(0):
        backward(1.0)
    store.drop_all()
    for factor in (1.0, 3.0):
        with store.adding(0):
            backward(factor)
        store.add(0)
        expected += factor
    assert torch.equal(store.take(0)[0], expected)


def test_a_gradient_of_another_backward_is_left_alone() -> None:
    weight = nn.Parameter(torch.ones(LARGE))
    store = new_store({0: [weight]}, pairs=False)
    with store.adding(0):
        weight.sum().backward()
    store.add(0)
    weight.sum().backward()
    assert weight.grad is not None


def test_a_gradient_that_is_only_compared_is_not_added() -> None:
    weight = nn.Parameter(torch.ones(LARGE))
    store = new_store({0: [weight]}, pairs=False)
    compared: list[torch.Tensor | None] = []
    with store.adding(0):
        with Leaves((weight,)).apart(compared):
            weight.sum().backward()
        (2 * weight).sum().backward()
    store.add(0)
    assert compared[0] is not None and torch.equal(compared[0], torch.ones(LARGE))
    assert torch.equal(store.take(0)[0], torch.full((LARGE,), 2.0))


def test_what_autograd_makes_itself_waits_as_it_is_made() -> None:
    linear = nn.Linear(600, 600)
    store = new_store({0: list(linear.parameters())})
    store.expect(2)
    with store.adding(0):
        linear(torch.ones(2, 600)).sum().backward()
    store.add(0)
    assert store.num_bytes == 2 * 4 * (600 * 600 + 600)


# ---- memory, as the allocator counts it


def most_alive(run: Callable[[], object]) -> int:
    """The most bytes that `run` has of what it allocates, at any moment."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    changes = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())))


class Chain(nn.Module):
    """Matrices one behind the other: each gradient is made by itself."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.links = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for link in self.links:
            x = link(x)
        return x


def train_layer(store: GradientStore, model: nn.Module, num_micro_batches: int) -> None:
    """Backwards of a layer and its REDUCE, which takes each sum and gives it up."""
    width = model.links[0].in_features
    store.expect(num_micro_batches)
    for number in range(num_micro_batches):
        with store.adding(0):
            model(torch.full((1, width), 1.0 + number, dtype=model.links[0].weight.dtype)).sum().backward()
        store.add(0)
    deque(store.hand_over(0), maxlen=0)  # holds none
    store.drop(0)


def test_a_step_has_one_sum_and_one_gradient_at_a_time() -> None:
    """One micro-batch has no sum: its gradients, and one of them in fp32. Otherwise all sums and a gradient beside them, which
    the kernel on the CPU copies to the sum's dtype."""
    width, count = 640, 6
    one = width * width
    for num_micro_batches, dtype in itertools.product((1, 3), (torch.bfloat16, torch.float32)):
        model = Chain(width, count).to(dtype)
        store, late = (new_store({0: list(model.parameters())}, joined=False, pairs=False) for _ in range(2))
        found = most_alive(lambda: train_layer(store, model, num_micro_batches))  # noqa: B023 - called at once
        copied, size = one * (4 if dtype is torch.bfloat16 else 0), one * dtype.itemsize
        expected = copied + (count * size if num_micro_batches == 1 else count * one * 4 + size)
        assert expected <= found < expected + one, (num_micro_batches, dtype)
        late._late = True
        found = most_alive(lambda: train_layer(late, model, num_micro_batches))  # noqa: B023 - called at once
        assert num_micro_batches == 1 or found >= expected + (count - 2) * size, "nothing that this could show"


def test_after_an_error_no_parameter_has_a_gradient() -> None:
    """Nor one that the optimizer does not have: its gradient would be taken for one from outside the step."""
    params = new_params((7,), (7,))
    facts = ParamFacts(nn.Parameter.numel, lambda param: param.dtype, lambda param: param is params[0])
    store = GradientStore({0: params}, torch.float32, facts)
    set_gradients(params, 1)
    store.drop_all()
    assert [param.grad for param in params] == [None, None]
    store.refuse_strays()
