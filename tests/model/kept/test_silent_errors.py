"""Errors of keeping that no exception would show: each is found by a check of its own, and the step has autograd's bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from kept_toys import Block, KeptTraining, bodies_of, compare, model_of
from torch import nn
from toy import plain_step

from ds_vertical.errors import LayerError
from ds_vertical.interrupts import take_back
from ds_vertical.model.kept.recording import Recording
from ds_vertical.model.kept.slots import BaseSlot, Slots, unpack
from ds_vertical.model.tensor_refs import key_of
from ds_vertical.model.thread_state import Modes
from ds_vertical.types import ActivationPolicy

POLICIES: tuple[ActivationPolicy, ...] = ("free", "products", "everything")
REPLAYED = POLICIES[:2]


# ---- views of parameters where hooks do not see them


class Holder:
    """Not a container in which anybody looks for tensors."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.get = lambda: weight


class Hidden(Block):
    """As `ctx.w = weight.t()`, deeper."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.holder = Holder(weight.t())
            ctx.save_for_backward(x)
            return x @ weight.t()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            (x,) = ctx.saved_tensors
            return grads[0] @ ctx.holder.get().t(), grads[0].t() @ x

    def inner(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.Product.apply(hidden, self.up.weight))


class Cast(Block):
    """A view by another dtype is no view of which a slot could be made."""

    def inner(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().inner(hidden) * self.up.weight.detach().view(torch.uint8)[:, 0]


@pytest.mark.parametrize("kind", [Hidden, Cast])
def test_a_view_of_a_parameter_that_is_no_slot_is_found(kind: type[Block]) -> None:
    training, _ = compare(partial(model_of, kind, kind, kind), "everything")
    assert len(training.lines) == 1 and "leaves a view of a parameter's memory behind" in training.lines[0]


def test_a_view_that_a_single_call_leaves_behind_is_found_in_that_call() -> None:
    """Not in the trial."""
    weight = nn.Parameter(torch.ones(4, 4))
    elsewhere: list[torch.Tensor] = []
    for left in (False, True):
        slots = Slots([weight], [])
        slot = slots.pack(weight.t())
        elsewhere += [weight[0]] if left else []
        assert slots.sees_all() is not left and torch.equal(unpack(slot), weight.t())
        elsewhere.clear()


# ---- layers of one class and one form that need other values


class Fixed(Block):
    """The same operations, of which autograd saves less: `down` is not trained here."""

    fixed = False

    def forward(self, hidden: torch.Tensor, side: torch.Tensor) -> torch.Tensor:
        weight = self.down.weight.detach() if self.fixed else self.down.weight
        inner = self.drop(self.inner(hidden))
        return hidden + (inner + inner) @ weight.t() + self.down.bias


def fixed() -> Fixed:
    block = Fixed()
    block.fixed = True
    return block


class Choosing(Block):
    """Values decide which of two results goes on, and no operation tells."""

    def inner(self, hidden: torch.Tensor) -> torch.Tensor:
        up = self.up(hidden)
        return torch.tanh((up + up, -up)[hidden.sum().item() > 0])


class WritingEither(Block):
    """Values decide which of two results is written in place, of which one alone goes on."""

    def inner(self, hidden: torch.Tensor) -> torch.Tensor:
        up = self.up(hidden)
        both = up + up, -up
        both[hidden.sum().item() > 0].add_(1.0)
        return torch.tanh(both[0])


class WritingComputed(Block):
    """One of two results, both of which are computed again, is written in place; of one alone the new value is needed."""

    second = False

    def inner(self, hidden: torch.Tensor) -> torch.Tensor:
        up = self.up(hidden)
        both = up + up, -up
        early = both[0].exp() * both[1].exp()
        both[self.second].detach().add_(1.0)
        return torch.tanh(early) + torch.tanh(both[0])


def writing_second() -> WritingComputed:
    block = WritingComputed()
    block.second = True
    return block


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "kinds",
    [
        (fixed, Fixed, Fixed, fixed, Fixed),
        (Choosing,) * 4,
        (WritingEither,) * 4,
        (writing_second, WritingComputed, writing_second, writing_second),
        (WritingComputed, writing_second, WritingComputed, WritingComputed),
    ],
    ids=["saves", "chooses", "writes", "writes-second", "writes-first"],
)
def test_calls_that_run_the_same_operations_on_other_tensors(kinds: tuple[Any, ...], policy: ActivationPolicy) -> None:
    """The first call of a form is recorded and the last one is tried; what another one needs is not known from either."""
    training, _ = compare(partial(model_of, *kinds), policy)
    assert training.lines == [] or all("does not run the same operations" in line for line in training.lines)


class Scaling(Block):
    """Python reads a number and computes with it."""

    def inner(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().inner(hidden) * hidden.square().mean().item()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_number_that_python_reads_is_computed(policy: ActivationPolicy) -> None:
    training, _ = compare(partial(model_of, Scaling, Scaling, Scaling), policy)
    assert training.lines == []


class InCtx(Block):
    """An attribute of an autograd context holds what no hook has seen."""

    class Masked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.mask = x > 0
            return x * ctx.mask

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return grads[0] * ctx.mask

    def forward(self, hidden: torch.Tensor, side: torch.Tensor) -> torch.Tensor:
        return hidden + self.Masked.apply(self.down(self.drop(self.inner(hidden))))


@pytest.mark.parametrize("policy", POLICIES)
def test_what_the_graph_holds_in_attributes_is_computed(policy: ActivationPolicy) -> None:
    """Memory that is left out holds True in the trial, as masks may, too: the trial alone would not tell."""
    training, _ = compare(partial(model_of, InCtx, InCtx, InCtx), policy)
    assert training.lines == [] and {kind.policy for kind in training.kinds.found} == {policy}
    for kind in training.kinds.found if policy != "everything" else ():
        assert kind.plan is not None
        told = {str(o.packet): action for o, action in zip(kind.plan.operations, kind.plan.actions, strict=True)}
        assert told["aten.gt"] == "run" and "skip" in told.values()


# ---- what modules hold


class CachingOne(Block):
    """One of the layers alone holds what it made, which no gradient reads."""

    cached: torch.Tensor | None = None
    caches = False

    def forward(self, hidden: torch.Tensor, side: torch.Tensor) -> torch.Tensor:
        down = self.down(self.drop(self.inner(hidden)))
        if self.caches:
            self.cached = down.detach()
        return hidden + down


def caching() -> CachingOne:
    block = CachingOne()
    block.caches = True
    return block


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cache_of_one_layer_holds_what_its_forward_made(policy: ActivationPolicy) -> None:
    _, models = compare(partial(model_of, CachingOne, caching, CachingOne, CachingOne), policy)
    plain, own = (model.blocks[1].cached for model in models)
    assert plain is not None and torch.equal(plain, own)


class WrittenLater(Block):
    """Written in place behind its last use by autograd, which refuses that."""

    def inner(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = super().inner(hidden)
        result = inner.exp()
        with torch.no_grad():
            result.mul_(2.0)
        return inner + result


@pytest.mark.parametrize("policy", POLICIES)
def test_a_saved_tensor_that_is_written_in_place_is_refused_as_without(policy: ActivationPolicy) -> None:
    model = model_of(WrittenLater, WrittenLater, WrittenLater)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plain_step(model, bodies_of(model), 0)
    model = model_of(WrittenLater, WrittenLater, WrittenLater)
    with pytest.raises((RuntimeError, LayerError), match="modified by an inplace operation"):
        KeptTraining(model, policy).step(bodies_of(model), 0)


class WritingOneOfTwo(Block):
    """The same operations in each call: one of two factors is written in place, of which autograd has saved one already."""

    saved = False

    def inner(self, hidden: torch.Tensor) -> torch.Tensor:
        up = self.up(hidden)
        both = up.exp(), -up
        both[not self.saved].mul_(1.5)
        return both[0] * both[1]


def writing_saved() -> WritingOneOfTwo:
    block = WritingOneOfTwo()
    block.saved = True
    return block


@pytest.mark.parametrize("policy", POLICIES)
def test_a_write_to_another_saved_tensor_than_in_the_trial_is_refused_as_without(policy: ActivationPolicy) -> None:
    """The first layer's call is recorded and the last one's is tried: neither writes what is saved."""
    make = partial(model_of, WritingOneOfTwo, writing_saved, WritingOneOfTwo, WritingOneOfTwo)
    model = make()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plain_step(model, bodies_of(model), 0)
    model = make()
    with pytest.raises((RuntimeError, LayerError), match="modified by an inplace operation|was written in place"):
        KeptTraining(model, policy).step(bodies_of(model), 0)


class Named(torch.Tensor):
    """A kind of tensor whose memory may say not all about it."""


REACHES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # what a block may save of a tensor
    "itself": lambda value: value,
    "view": lambda value: value.t(),
    "detached": lambda value: value.detach(),
    "data": lambda value: value.data,  # has a count of writes of its own
    "part": lambda value: value[1, :1],  # of the block's own memory it is kept alone
    "subclass": lambda value: value.as_subclass(Named),
}


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("whose", ["parameter", "input", "own"])
def test_what_is_written_in_place_once_it_is_saved_is_refused(whose: str, reach: str) -> None:
    value = nn.Parameter(torch.arange(12.0).view(3, 4)) if whose == "parameter" else torch.arange(12.0).view(3, 4) + 1
    slots = Slots([value] if isinstance(value, nn.Parameter) else [], [value] if whose == "input" else [])
    with torch.no_grad():
        if reach == "data":
            slots.pack(value)  # the first slot over this memory
        saved = REACHES[reach](value)
        slot = slots.pack(saved)
        assert torch.equal(unpack(slot), saved) and slots.are_current()
        saved.mul_(2.0)
    del value, saved
    slots.settle()
    assert not slots.are_current()
    with pytest.raises(LayerError, match=r"a tensor of shape .* was written in place .* write to a copy, or set \"keep\""):
        unpack(slot)


# ---- a trial that tells nothing


class Reading(Block):
    """A kernel that torch does not dispatch reads what the recompute leaves out."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if np.isnan(x.detach().numpy()).all():
                print("reads NaN")  # a list of what was read would be as before the recompute
            ctx.save_for_backward(torch.from_numpy(x.detach().numpy() + 1))
            return y.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return grads[0] * ctx.saved_tensors[0], grads[0]

    def inner(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.Kernel.apply(self.up(hidden), hidden.repeat(1, 2))


@pytest.mark.parametrize("policy", REPLAYED)
def test_gradients_that_are_not_finite_pass_no_trial(policy: ActivationPolicy) -> None:
    """As the first steps in fp16 may give: NaN beside NaN would show no difference."""
    model = model_of(Reading, Reading, Reading)
    training = KeptTraining(model, policy)
    training.step(bodies_of(model, lambda loss: loss * float("nan")), 0)
    assert training.kinds.found and not any(kind.is_tried and kind.policy != "none" for kind in training.kinds.found)


@pytest.mark.parametrize("policy", REPLAYED)
def test_what_is_left_out_is_nan_in_the_trial(policy: ActivationPolicy, capsys: pytest.CaptureFixture[str]) -> None:
    training, _ = compare(partial(model_of, Reading, Reading, Reading), policy)
    assert "reads NaN" in capsys.readouterr().out
    assert len(training.lines) == len(REPLAYED[: REPLAYED.index(policy) + 1])  # a line for each fall
    assert all("the gradients of its first backward differ" in line for line in training.lines)


# ---- interrupts


def test_a_hook_that_an_interrupt_has_left_on_a_module_begins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes between a hook of a recompute and its handle."""
    model = model_of(Block, Block, Block)
    training = KeptTraining(model, "free")
    training.step(bodies_of(model), 0)
    register, calls = nn.Module.register_forward_pre_hook, iter(range(1000))

    def cut(module: nn.Module, hook: Callable[..., Any]) -> Any:
        handle = register(module, hook)
        if next(calls) == 1:
            raise KeyboardInterrupt
        return handle

    monkeypatch.setattr(nn.Module, "register_forward_pre_hook", cut)
    with pytest.raises(KeyboardInterrupt):
        training.step(bodies_of(model), 1)
    monkeypatch.undo()
    take_back()
    left = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    assert left
    for hook in left:
        hook()
    assert Modes.capture() == Modes()


def test_a_scripted_module_takes_no_hook_of_a_recording() -> None:
    modules = [nn.Sequential(), torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2)]
    with Recording([]).watching(modules):
        assert [len(module._forward_pre_hooks) for module in modules] == [0, 0, 1]


def test_slots_ask_each_parameter_for_its_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of them have views that are saved."""
    params = [nn.Parameter(torch.ones(2, 3)) for _ in range(20)]
    held, asked = Slots(params, []), []
    monkeypatch.setattr("ds_vertical.model.kept.slots.key_of", lambda storage: asked.append(storage) or key_of(storage))
    made = [held.pack(param.t()) for param in params]
    assert all(isinstance(slot, BaseSlot) and slot.index == place for place, slot in enumerate(made))
    assert len(asked) == len(params)
