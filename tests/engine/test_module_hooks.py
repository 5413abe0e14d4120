"""Modules while a schedule runs: users' hooks, calls and copies of them are what they are under stock, and their parameters are
read plainly."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict
from harness import differing, read_weights, running
from models import MixerModel, token_batches
from torch import nn
from torch.nn.utils import parametrize
from user_calls import host_config, initialize, ssd_config

from ds_vertical.compat.ops import load
from ds_vertical.model.thread_state import HostState, ThreadState


class Scale(nn.Module):
    """A module without parameters, of which copies can be made in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.added = 0.0
        self.register_buffer("factor", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor + self.added


class Stated(Scale):
    """Tells by itself what a copy of it consists of, as `nn.LSTM` does."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()


class Failing(Scale):
    """Has a hook put on by its forward, which fails then."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        handle = self.register_forward_hook(lambda *_: self.seen.append(1), always_call=True)
        self.seen.append(handle.id)
        raise ArithmeticError("on purpose")


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def parametrized() -> nn.Module:
    return parametrize.register_parametrization(Scale(), "factor", Doubled())


def with_its_own_call() -> nn.Module:
    module = Scale()
    module._call_impl = lambda x: nn.Module._call_impl(module, x) * 3
    return module


def of_a_copy(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
    own = inner(x)  # first: stock's hooks ask for what a module has since its first call
    other = copy.deepcopy(inner)
    other.added = 3.0
    return other(x) + own


def of_a_replica(inner: Any, x: torch.Tensor) -> torch.Tensor:
    own = inner(x)
    other = inner._replicate_for_data_parallel()
    other.added = 3.0
    return other(x) + own


def of_a_failure(inner: Any, x: torch.Tensor) -> torch.Tensor:
    with pytest.raises(ArithmeticError):
        inner(x)
    number, *calls = inner.seen
    del inner.seen[:], inner._forward_hooks[number], inner._forward_hooks_always_called[number]
    return x * (2 + len(calls))


def with_a_hook(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
    handle = inner.register_forward_hook(lambda _, args, kwargs, made: made * len(args) * 3, with_kwargs=True)
    try:
        return inner(x)
    finally:
        handle.remove()


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, torch.Tensor], torch.Tensor]]] = {
    "a copy": (Scale, of_a_copy),
    "a copy that tells its state": (Stated, of_a_copy),
    "a copy of a parametrized module": (parametrized, of_a_copy),
    "a replica": (Scale, of_a_replica),
    "a call of its own": (with_its_own_call, lambda inner, x: inner(x)),
    "a hook that is called after a failure": (Failing, of_a_failure),
    "a hook for one call": (Scale, with_a_hook),
}


class CallingBlock(nn.Module):
    def __init__(self, case: str) -> None:
        super().__init__()
        make, self.call = CASES[case]
        self.inner, self.linear = make(), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.call(self.inner, self.linear(x)))


class Calling(MixerModel):
    """A model with a block for each of the cases."""

    def __init__(self) -> None:
        super().__init__(1, 16)
        self.blocks = nn.ModuleList(map(CallingBlock, CASES))


def trained(vertical: bool) -> dict[str, torch.Tensor]:
    """The losses of two steps, and the weights behind them."""
    torch.manual_seed(0)
    with running(host_config(layers=["blocks"]), Calling, vertical=vertical) as (engine, model):
        losses = [engine.train_batch(iter(batches)) for batches in token_batches(2, 3)]
        return {f"loss {step}": loss.detach().clone() for step, loss in enumerate(losses)} | read_weights(model)


def test_what_blocks_do_with_their_modules_has_stocks_bits() -> None:
    """A fast way to call modules ran a copy's original, and left out calls of a module's own and hooks of one call."""
    assert not differing(trained(vertical=False), trained(vertical=True))


class CompilingBlock(CallingBlock):
    def __init__(self) -> None:
        super().__init__("a hook for one call")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inner._compiled_call_impl is None:
            self.inner.compile(backend="eager")
        return x + self.linear(self.inner(x))


class Compiling(MixerModel):
    def __init__(self) -> None:
        super().__init__(1, 16)
        self.blocks = nn.ModuleList([CompilingBlock(), CompilingBlock()])


@pytest.mark.parametrize("vertical", [False, True], ids=["stock", "vertical"])
def test_a_module_that_a_forward_has_compiled_stays_compiled(vertical: bool) -> None:
    with running(host_config(layers=["blocks"]), Compiling, vertical=vertical) as (engine, model):
        engine.train_batch(iter(token_batches(1, 3)[0]))
        assert all(block.inner._compiled_call_impl is not None for block in model.blocks)


class Telling(MixerModel):
    """Writes down in each forward how its parameters are read, and what captures the thread's state."""

    def __init__(self) -> None:
        super().__init__(num_layers=2)
        self.told: list[tuple[type, type, type]] = []

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        made = super().forward(*args, **kwargs)
        other = copy.deepcopy(self.blocks[0])
        self.told.append((type(ThreadState.capture().host), type(self.blocks[0]._parameters), type(other._parameters)))
        return made


@pytest.mark.parametrize("fails", [False, True])
def test_parameters_are_read_plainly_and_state_is_captured_compiled_while_a_step_runs(tmp_path: Path, fails: bool) -> None:
    """Parameters then alone, and not those of a copy that a forward makes of a module."""

    def loss_of(loss: torch.Tensor, _: object) -> torch.Tensor:
        if fails:
            raise ArithmeticError("on purpose")
        return loss

    with running(ssd_config(tmp_path), Telling, vertical=True) as (engine, model):
        with pytest.raises(ArithmeticError) if fails else nullcontext():
            engine.train_batch(iter(token_batches(1, 2)[0]), loss_of)
        assert fails or model.told  # what a forward has written a step that fails takes back
        for captured, read_by, copied_read_by in model.told:
            assert captured is not HostState
            assert issubclass(read_by, ZeROOrderedDict) and read_by.__getitem__ is OrderedDict.__getitem__
            assert copied_read_by is ZeROOrderedDict
        for each in model.modules():
            assert type(each._parameters) is ZeROOrderedDict


def test_without_the_compiled_op_python_captures_state(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(load, "state_reader", lambda: None)
        initialize(config=host_config()).destroy()
        assert type(ThreadState.capture().host) is HostState
    initialize(config=host_config()).destroy()
    assert type(ThreadState.capture().host) is not HostState
