"""Blocks that make keeping hard, on a toy whose parameters are NaN, and in other memory, between their uses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from kept_toys import COUNT, Block, Chained, KeptTraining, compare, model_of
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from toy import WIDTH

from ds_vertical.model.block_call import BlockGraph
from ds_vertical.model.kept.probe import Probe, common_kinds
from ds_vertical.model.kept.slots import Slots
from ds_vertical.model.layers import Block as Layer
from ds_vertical.model.layers import map_layers
from ds_vertical.types import ActivationPolicy

POLICIES: tuple[ActivationPolicy, ...] = ("free", "products", "everything")


class Caching(Block):
    """A module holds an activation."""

    def inner(self, hidden: torch.Tensor) -> torch.Tensor:
        self.last = super().inner(hidden).detach()
        return self.last + super().inner(hidden)


class TransposedInCtx(Block):
    """A node of Python's holds a view of a parameter where hooks do not see it, as `ctx.w = weight.t()` does."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.w = weight.t()
            ctx.save_for_backward(x)
            return x @ ctx.w

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            (x,) = ctx.saved_tensors
            return grads[0] @ ctx.w.t(), grads[0].t() @ x

    def inner(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.Product.apply(hidden, self.up.weight))


class Opaque(Block):
    """A kernel that torch does not dispatch writes memory: NumPy's here."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            out.detach().numpy()[...] = 2 * x.detach().numpy()
            ctx.save_for_backward(out)
            return out.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return grads[0] * ctx.saved_tensors[0]

    def inner(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.Kernel.apply(super().inner(hidden))


class OpaqueReader(Block):
    """Such a kernel reads what the recompute leaves out, and its result is nothing that torch has made."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(torch.from_numpy(x.detach().numpy() + 1))
            return y.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return grads[0] * ctx.saved_tensors[0], grads[0]

    def inner(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.Kernel.apply(self.up(hidden), hidden.repeat(1, 2))


class Counting(Block):
    """A buffer that each forward writes in place, and that autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(2 * WIDTH))

    def inner(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.scale.mul_(0.9)
        return super().inner(hidden) * self.scale


class Branching(Block):
    """Values decide which operations run, ahead of the last product."""

    def inner(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = super().inner(hidden)
        return inner.sin().exp() if hidden.sum().item() > 0 else inner.cos()


class BranchingBehind(Block):
    """Values decide which operations run behind the last product."""

    def forward(self, hidden: torch.Tensor, side: torch.Tensor) -> torch.Tensor:
        down = self.down(self.drop(self.inner(hidden)))
        return hidden + (down + 0.01 if hidden.sum().item() > 4 else down - 0.01)


class Routing(Block):
    """Values decide the shapes."""

    def inner(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = super().inner(hidden)
        rows = (hidden.sum(-1) > 0).nonzero().squeeze(-1)
        return inner.index_add(0, rows, self.up(hidden[rows]).sin())


class Autocast(Block):
    def inner(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().inner(hidden).float()


class Aliased(Block):
    """Expanded, transposed and sliced tensors, in-place operations behind products, and one small view of a large storage."""

    def inner(self, hidden: torch.Tensor) -> torch.Tensor:
        large = self.up(hidden)
        piece = large[:, 1:4].exp()
        wide = hidden[:, :1].expand(-1, 2 * WIDTH) * large.t().contiguous().t().sigmoid()
        product = torch.mm(hidden, self.up.weight.t())
        product += self.up.bias
        return torch.tanh(product * wide) + piece.sum(-1, keepdim=True).relu_()


class Joined(Block):
    """The part of a storage that is saved is contiguous, and lies behind one that grows with the micro-batch: of the storage of
    the first, which is tried, it is two thirds, of the others' less."""

    def inner(self, hidden: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([hidden.repeat(1, 2), self.up(hidden[:2].repeat(2, 1))])
        return super().inner(hidden) + (joined[len(hidden) :] * self.up.bias).sum(0)


class Attending(Block):
    def inner(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key = self.up(hidden).view(1, 1, -1, 2 * WIDTH).split(WIDTH, -1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, key, is_causal=True)
        return mixed.reshape(-1, WIDTH).repeat(1, 2)


@torch.library.custom_op("kept_test::own_scaled_dot_product", mutates_args=())
def _doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


_doubled.register_autograd(lambda ctx, grad: 2 * grad)


class NamedAsAttention(Block):
    """An operation of the user's has attention's name and one tensor."""

    def inner(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(_doubled(self.up(hidden)))


def compared(kind: type[Block], policy: ActivationPolicy) -> KeptTraining:
    """Two steps of three blocks of a kind, with the bits of plain autograd."""
    return compare(lambda: model_of(kind, kind, kind), policy)[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_have_the_bits_of_plain_autograd(policy: ActivationPolicy) -> None:
    training = compared(Block, policy)
    kinds = training.kinds
    assert training.lines == [] and all(kind.is_tried and kind.policy == policy for kind in kinds.found)
    for plan in (kind.plan for kind in kinds.found if kind.plan is not None):
        actions = {operation.packet: action for operation, action in zip(plan.operations, plan.actions, strict=True)}
        products = [a for o, a in zip(plan.operations, plan.actions, strict=True) if o.is_product]
        assert products == (["keep", "skip"] if policy == "products" else ["run", "skip"]), actions


@pytest.mark.parametrize("policy", POLICIES[:2])
def test_a_recompute_follows_its_plan_from_the_last_module_on_ahead_of_what_is_left_out(policy: ActivationPolicy) -> None:
    """Under "free" that is the last product's, behind everything else; kept products begin with the first module."""
    training = compared(Block, policy)
    for plan in (kind.plan for kind in training.kinds.found):
        assert plan is not None and plan.start is not None
        assert plan.start.module == {"free": 2, "products": 1}[policy]  # `down`, `up`
        assert set(plan.actions[: plan.start.operation]) <= {"run"} and "skip" in plan.actions[plan.start.operation :]
        assert (plan.start.operation > 0) == (policy == "free")


class Hooked(Block):
    """Code of the block's own sees what autograd saves and which operations run."""

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    def forward(self, hidden: torch.Tensor, side: torch.Tensor) -> torch.Tensor:
        with self.Counted(), saved_tensors_hooks(lambda saved: saved.detach(), lambda saved: saved):
            return super().forward(hidden, side)


@pytest.mark.parametrize("policy", POLICIES[:2])
def test_modes_that_a_block_enters_lie_inside_those_of_its_recompute(policy: ActivationPolicy) -> None:
    """A plan that was followed from a module within them on would end with the block's modes left on, or its own."""
    training = compared(Hooked, policy)
    assert _get_current_dispatch_mode_stack() == []
    assert [kind.plan.start for kind in training.kinds.found if kind.plan is not None] == [None] * len(training.kinds.found)


def test_an_operation_that_only_has_attentions_name_is_recorded() -> None:
    training = compared(NamedAsAttention, "products")
    assert training.lines == [] and all(kind.is_tried and kind.policy == "products" for kind in training.kinds.found)


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_part_of_the_products_is_kept_which_saves_most_for_its_bytes(outputs: int) -> None:
    training, _ = compare(lambda: model_of(Chained, Chained, Chained), "products", outputs=outputs)
    assert training.lines == [] and training.kinds.found
    for kind in training.kinds.found:
        plan = kind.plan
        assert plan is not None and kind.is_tried and kind.policy == "products"
        products = [action for operation, action in zip(plan.operations, plan.actions, strict=True) if operation.is_product]
        assert products == (["run", "keep", "run", "skip"] if outputs == 1 else ["run", "keep", "keep", "skip"])


ROWS = 8  # of what a probe measures


def forwards_of(probe: Probe, block: Layer) -> int:
    """How many forwards of the block a probe runs in its first backward."""
    inputs, count = [torch.randn(ROWS, WIDTH).requires_grad_(), torch.randn(ROWS, WIDTH)], itertools.count()

    @contextmanager
    def again(within: AbstractContextManager[object]) -> Iterator[BlockGraph]:
        next(count)
        with within:
            graph = BlockGraph({}, [block.module(*inputs)])
        yield graph

    probe.backward(block, False, inputs, again, lambda _: {})
    return next(count)


def test_parts_of_the_products_are_measured_as_often_as_is_asked() -> None:
    """Besides them, three times four ways, a forward each to record and to count, and the one that runs backward."""
    block = map_layers(model_of(Chained, Chained), ["blocks"]).blocks[0]
    narrow = 4 * ROWS * WIDTH
    parts = {"products_1": narrow, "products_2": 3 * narrow}
    for probe, num_rounds in ((Probe(), 3), (Probe(part_rounds=1), 1), (Probe(part_rounds=0), 0)):
        assert forwards_of(probe, block) == 3 * 4 + 2 + 1 + 2 * num_rounds
        found = {point.name: point.num_bytes for point in probe.found[block.kind].points}
        assert found.pop("everything") > 0
        assert found == {"free": 0, "products": 5 * narrow} | (parts if num_rounds else {})


def test_of_many_kinds_the_commonest_are_measured_and_of_each_further_class_one() -> None:
    """Six sizes of one class, of which the largest is the commonest; and two of another, the rarest."""
    model = model_of(*[Chained] * 7, Block, Block)
    for extra, block in zip((1, 2, 3, 4, 5, 6, 6, 1, 2), model.blocks, strict=True):
        block.extra = nn.Parameter(torch.zeros(extra))
    blocks = map_layers(model, ["blocks"]).blocks
    common = common_kinds(blocks)
    assert len(common) == 4 and blocks[5].kind in common
    probe, measured = Probe(common=common, part_rounds=1), list[int]()
    for number in reversed(range(len(blocks))):
        if probe.wants(blocks[number]):
            forwards_of(probe, blocks[number])
            measured.append(number)
    assert measured == [8, 6, 2, 1, 0]
    names = {number: {point.name for point in probe.found[blocks[number].kind].points} for number in measured}
    assert "products_1" in names[6] and "products_1" not in names[8] and "products" in names[8]
    assert all(Probe().wants(block) for block in blocks)


def test_a_small_contiguous_part_of_a_storage_is_kept_alone_with_its_own_elements() -> None:
    slots = Slots([], [])
    slot = slots.pack(torch.arange(30.0)[10:13])
    (kept,) = slots.settle()
    assert kept.num_bytes == 12 and slot.tensor().tolist() == [10, 11, 12]


Fall = tuple[tuple[ActivationPolicy, ...], str]  # the policies that a kind of block gets one after the other, and why


def _no_recompute(why: str) -> dict[ActivationPolicy, Fall]:
    """Of blocks of whose recompute no operation can be left out."""
    return {"free": (("none",), why), "products": (("none",), why)}


_READS = "the gradients of its first backward differ"
FALLS_BACK: dict[type[Block], dict[ActivationPolicy, Fall]] = {  # by the policy that is asked for
    Caching: {},
    TransposedInCtx: {"everything": (("products",), "its forward leaves a view of a parameter's memory behind")},
    Opaque: _no_recompute("code that torch does not dispatch"),
    OpaqueReader: {"free": (("none",), _READS), "products": (("free", "none"), _READS)},
    Counting: {"everything": (("products",), "what autograd saves in its forward is written in place")},
    Branching: {"products": (("none",), "it does not run the same operations each time")},  # "free" follows its last product
    BranchingBehind: _no_recompute("it does not run the same operations each time"),
    Routing: _no_recompute("the shapes in it depend on the values"),
    Autocast: {},
    Aliased: {},
    Joined: {},
    Attending: {},
}


def check_falls(kind: type[Block], policy: ActivationPolicy) -> None:
    """A line for each fall; what a kind has got in the end is tried, and its steps have the bits of plain autograd."""
    training, _ = compare(lambda: model_of(kind, kind, kind), policy, num_steps=3)
    instead, why = FALLS_BACK[kind].get(policy, ((), ""))
    starts = [f'vertical_schedule.activations.keep: "{lower}" in place of "{policy}" for' for lower in instead]
    assert [line.split(f" {kind.__name__} (blocks.")[0] for line in training.lines] == starts
    assert all(why in line for line in training.lines)
    found = {(each.policy, each.is_tried) for each in training.kinds.found if each.policy != "none"}
    last = (policy, *instead)[-1]
    if last != "none":
        assert found == {(last, True)} and training.kinds.in_force == last


@pytest.mark.slow
@pytest.mark.parametrize("kind", FALLS_BACK)
@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_that_make_keeping_hard(kind: type[Block], policy: ActivationPolicy) -> None:
    check_falls(kind, policy)


@pytest.mark.parametrize(("kind", "policy"), [(Counting, "everything"), (OpaqueReader, "products")])
def test_a_kind_falls_to_the_next_lower_policy_and_tries_that(kind: type[Block], policy: ActivationPolicy) -> None:
    check_falls(kind, policy)


def test_lengths_of_one_form_are_planned_for_one_by_one_behind_a_fall() -> None:
    """What autograd saves needs no plan, so "everything" has one kind for all lengths; "products" has one for each."""
    training, _ = compare(lambda: model_of(Counting, Counting, Counting), "everything")
    policies = [kind.policy for kind in training.kinds.found]
    assert policies.count("none") == 1 and policies.count("products") == COUNT
