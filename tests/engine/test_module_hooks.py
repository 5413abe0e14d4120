"""Calls of modules while a schedule runs: in less time, with the nodes, the hooks and the results of torch's own call."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict
from harness import running
from models import MixerModel, token_batches
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle
from user_calls import ssd_config

from ds_vertical.compat.ops import load
from ds_vertical.engine.module_hooks import ShortCalls, identity_hook, run_hooks_behind
from ds_vertical.model.thread_state import HostState, ThreadState


class Pair(NamedTuple):
    first: torch.Tensor
    second: object


class Marked(torch.Tensor):
    """A user's own type."""


class Echo(nn.Module):
    """Returns what `make` makes of its arguments."""

    def __init__(self, make: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 3.0))
        self.make = make

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.make(self, *args, **kwargs)


def hooked(make: Callable[..., Any]) -> tuple[Echo, Any]:
    """A module with the hooks that a schedule puts in the place of stock's."""
    module, hook = Echo(make), identity_hook(False, False)
    module.register_forward_pre_hook(hook)
    module.register_forward_hook(hook)
    return module, hook


@contextmanager
def short(module: nn.Module, hook: Any) -> Iterator[None]:
    calls = ShortCalls(module.modules(), hook)
    calls.put_on()
    try:
        assert module._compiled_call_impl is not None
        yield
    finally:
        calls.take_off()
        assert "_compiled_call_impl" not in module.__dict__


def graph_of(value: Any) -> Any:
    """What a result consists of: of tensors the types, the values, and the nodes of their graphs, the last one first."""
    if isinstance(value, torch.Tensor):
        nodes, waiting = [], [value.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is not None:
                nodes.append(node.name())
                waiting += [following for following, _ in node.next_functions]
        return type(value), value.tolist(), value.requires_grad, nodes
    if isinstance(value, tuple | list):
        return type(value), [graph_of(each) for each in value]
    return {key: graph_of(each) for key, each in value.items()} if isinstance(value, dict) else value


def leaf() -> torch.Tensor:
    return torch.arange(4.0).requires_grad_()


CASES: dict[str, tuple[Callable[..., Any], Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]]] = {
    "a tensor": (lambda own, x: x * own.weight, lambda: ((leaf(),), {})),
    "its own input": (lambda own, x: x, lambda: ((leaf() * 2,), {})),
    "names": (lambda own, x, by=1: (x * by, None), lambda: ((leaf() * 2,), {"by": 2.5})),
    "names alone": (lambda own, x: [x], lambda: ((), {"x": leaf() * 2})),
    "numbers": (lambda own, x, count, text: (x, count, text, True), lambda: ((leaf() * 2, 3, "up"), {})),
    "nothing": (lambda own: None, lambda: ((), {})),
    "an empty tuple": (lambda own, x: (), lambda: ((leaf(),), {})),
    "a list": (lambda own, x: (x[0], x), lambda: (([leaf() * 2],), {})),
    "a dict": (lambda own, x: {"made": x["given"] * 2}, lambda: (({"given": leaf() * 2},), {})),
    "a named tuple": (lambda own, x: Pair(x * 2, x), lambda: ((leaf() * 2,), {})),
    "tuples in tuples": (lambda own, x: ((x[0], (x[1],)), 1), lambda: (((leaf(), leaf() * 2),), {})),
    "a parameter": (lambda own, x: x * 2, lambda: ((nn.Parameter(torch.ones(4)),), {})),
    "a user's type": (lambda own, x: x * 2, lambda: ((torch.ones(4).as_subclass(Marked).requires_grad_(),), {})),
    "integers": (lambda own, x: own.weight[x], lambda: ((torch.tensor([0, 2]),), {})),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_a_short_call_makes_what_torchs_own_makes(case: str, grad: bool) -> None:
    make, given = CASES[case]
    module, hook = hooked(make)
    with torch.set_grad_enabled(grad):
        args, kwargs = given()
        expected = graph_of(module(*args, **kwargs))
        with short(module, hook):
            args, kwargs = given()
            assert graph_of(module(*args, **kwargs)) == expected


def test_a_list_that_a_module_appends_to_is_a_copy() -> None:
    module, hook = hooked(lambda own, values: values.append(1))
    given: list[int] = []
    with short(module, hook):
        module(given)
    assert not given


Put = Callable[[nn.Module, list[Any]], RemovableHandle]
HOOKS: dict[str, Put] = {
    "ahead": lambda module, seen: module.register_forward_pre_hook(
        lambda _, args: (seen.append(graph_of(args)), (args[0] * 3,))[1]
    ),
    "ahead with names": lambda module, seen: module.register_forward_pre_hook(
        lambda _, args, kwargs: (seen.append(kwargs), ((args[0] * 3,), {"by": 5}))[1], with_kwargs=True
    ),
    "behind": lambda module, seen: module.register_forward_hook(
        lambda _, args, made: (seen.append(graph_of((args, made))), made * 3)[1]
    ),
    "behind with names": lambda module, seen: module.register_forward_hook(
        lambda _, args, kwargs, made: (seen.append(kwargs), made * kwargs["by"])[1], with_kwargs=True
    ),
    "in the backward": lambda module, seen: module.register_full_backward_hook(lambda _, *grads: seen.append(graph_of(grads))),
    "ahead of the backward": lambda module, seen: module.register_full_backward_pre_hook(
        lambda _, grads: seen.append(graph_of(grads))
    ),
    "of all modules, ahead": lambda _, seen: torch_module.register_module_forward_pre_hook(
        lambda _, args: (seen.append(graph_of(args)), (args[0] * 3,))[1]
    ),
    "of all modules, behind": lambda _, seen: torch_module.register_module_forward_hook(
        lambda _, args, made: (seen.append(graph_of(made)), made * 3)[1]
    ),
    "of all modules, in the backward": lambda _, seen: torch_module.register_module_full_backward_hook(
        lambda _, *grads: seen.append(graph_of(grads))
    ),
}


def with_hook(put: Put, when: str, is_short: bool) -> list[Any]:
    """What a user's hook sees and makes, that is put on ahead of the module's call or within its forward."""
    seen: list[Any] = []
    handles: list[RemovableHandle] = []

    def make(own: Echo, x: torch.Tensor, by: float = 2) -> torch.Tensor:
        if when == "within":
            handles.append(put(own, seen))
        return x * own.weight * by

    module, hook = hooked(make)
    try:
        with short(module, hook) if is_short else nullcontext():
            if when == "ahead":
                handles.append(put(module, seen))
            x = leaf()
            made = module(x * 1, by=4)
            made.sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    return [seen, graph_of(made), graph_of(x.grad), graph_of(module.weight.grad)]


@pytest.mark.parametrize("when", ["ahead", "within"])
@pytest.mark.parametrize("name", HOOKS)
def test_users_hooks_run_as_ever(name: str, when: str) -> None:
    expected = with_hook(HOOKS[name], when, is_short=False)
    assert bool(expected[0]) is (when == "ahead" or name.startswith(("behind", "of all modules, behind")))
    assert with_hook(HOOKS[name], when, is_short=True) == expected


def test_an_error_in_a_forward_is_the_users_own() -> None:
    module, hook = hooked(lambda own, x: x @ torch.ones(3, 3))
    with short(module, hook), pytest.raises(RuntimeError, match="mat"):
        module(torch.ones(4, 4))
    with short(module, hook), pytest.raises(TypeError, match="unexpected keyword"):
        module(torch.ones(4, 4), other=1)


def test_a_call_that_is_compiled_or_traced_is_torchs_own() -> None:
    module, hook = hooked(lambda own, x: x * own.weight)
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    def compiled() -> torch.Tensor:
        torch._dynamo.reset()
        return torch.compile(lambda x: module(x).sin(), backend=backend)(leaf())

    expected = compiled(), list(graphs)
    graphs.clear()
    with short(module, hook):
        made = compiled()
        traced = torch.jit.trace(module, leaf(), check_trace=False)
    assert torch.equal(made, expected[0]) and graphs == expected[1]
    assert torch.equal(traced(leaf()), leaf() * 3)


def test_hooks_behind_run_in_their_order() -> None:
    module = Echo(lambda own: 1)
    module.register_forward_hook(lambda _, args, made: made + 1)
    module.register_forward_hook(lambda _, args, kwargs, made: made * kwargs["by"], with_kwargs=True)
    module.register_forward_hook(lambda *_: None)
    assert run_hooks_behind(module, (), {"by": 10}, 1) == 20


class Telling(MixerModel):
    """Writes down how its modules are called, and how their parameters are read, in each forward."""

    def __init__(self) -> None:
        super().__init__(num_layers=2)
        self.told: list[tuple[bool, type, bool, type]] = []
        self.captured: list[type] = []

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        made = super().forward(*args, **kwargs)
        self.captured.append(type(ThreadState.capture().host))
        other = copy.deepcopy(self.blocks[0])
        modules = [each for each in self.modules() if not isinstance(each, nn.ModuleList)]
        self.told.append(
            (
                all("_compiled_call_impl" in vars(each) for each in modules),
                type(self.blocks[0]._parameters),
                "_compiled_call_impl" in vars(other),
                type(other._parameters),
            )
        )
        return made


@pytest.mark.parametrize("fails", [False, True])
def test_calls_are_short_and_parameters_read_plainly_while_a_step_runs(tmp_path: Path, fails: bool) -> None:
    """And only then. A copy that a forward makes of a module has neither."""

    def loss_of(loss: torch.Tensor, _: object) -> torch.Tensor:
        if fails:
            raise ArithmeticError("on purpose")
        return loss

    with running(ssd_config(tmp_path), Telling, vertical=True) as (engine, model):
        with pytest.raises(ArithmeticError) if fails else nullcontext():
            engine.train_batch(iter(token_batches(1, 2)[0]), loss_of)
        assert fails or model.told  # what a forward has written a step that fails takes back
        assert HostState not in model.captured
        for is_short, read_by, copied, copied_read_by in model.told:
            assert is_short and not copied
            assert issubclass(read_by, ZeROOrderedDict) and read_by.__getitem__ is OrderedDict.__getitem__
            assert copied_read_by is ZeROOrderedDict
        for each in model.modules():
            assert "_compiled_call_impl" not in vars(each)
            assert type(each._parameters) is ZeROOrderedDict


def test_without_the_compiled_op_calls_are_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "forward_ops", lambda: None)
    module, hook = hooked(lambda own, x: x)
    calls = ShortCalls(module.modules(), hook)
    calls.put_on()
    assert module._compiled_call_impl is None
