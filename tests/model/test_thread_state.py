"""The state that torch keeps per thread: every field captured and put back, and forwards that take turns on one thread
without seeing each other's."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode
from toy import facts

from ds_vertical.compat.ops import load
from ds_vertical.model.forward_coroutine import ForwardPass
from ds_vertical.model.layers import map_layers
from ds_vertical.model.micro_batch import MicroBatch
from ds_vertical.model.stubs import Stubs
from ds_vertical.model.thread_state import (
    HostState,
    Modes,
    Settings,
    ThreadState,
    applied,
    autocast_device_types,
    capture_host_by,
    entered,
    inference_guard,
    preserved,
)

RNG = {"rng"}
CHANGES: dict[str, Callable[[], object]] = {
    "grad": lambda: torch.set_grad_enabled(False),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "autocast dtype": lambda: torch.set_autocast_dtype("cpu", torch.float16),
    "autocast_cache": lambda: torch.set_autocast_cache_enabled(False),
    "autocast_nesting": lambda: (torch.autocast_increment_nesting(), torch.autocast_increment_nesting()),
    "rng": lambda: torch.rand(3),
    "settings dtype": lambda: torch.set_default_dtype(torch.float64),
    "settings deterministic": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "settings attention": lambda: torch.backends.cuda.enable_math_sdp(False),
    "settings precision": lambda: torch.set_float32_matmul_precision("medium"),
}
NEED_A_GPU = {"device_rng", "device", "stream"}


NO_MODES = Modes()


def now(modes: Modes = NO_MODES) -> dict[str, Any]:
    assert Modes.capture() == modes
    assert is_in_torch_dispatch_mode() == bool(modes.operations)
    return facts(ThreadState.capture())


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {name for name in before if before[name] != after[name]}


def compiled() -> Callable[[], Any]:
    reader = load.state_reader()
    assert reader is not None
    return reader([torch.device(kind) for kind in autocast_device_types()]).capture


@pytest.fixture(params=["compiled", "python"], autouse=True)
def captured_by(request: pytest.FixtureRequest) -> Iterator[None]:
    """By the compiled op and by what stands in for it. Whatever a test does to the thread's state, the next one starts from
    the same."""
    capture_host_by(compiled() if request.param == "compiled" else HostState.capture)
    outer = ThreadState.capture()
    guard = inference_guard(False)
    yield
    del guard
    outer.apply()
    capture_host_by(HostState.capture)


def test_every_field_has_a_test_here() -> None:
    assert set(now()) == {name.split()[0] for name in CHANGES} | NEED_A_GPU | {"inference"}


@pytest.mark.parametrize("name", ["nothing", "normal number", *CHANGES])
def test_the_compiled_op_and_python_capture_the_same(name: str) -> None:
    """Of a generator that keeps the second of two normal numbers, that one, too."""
    before = ThreadState.capture()
    ({"nothing": lambda: None, "normal number": lambda: torch.randn(1)} | CHANGES)[name]()
    by_op, by_python = ThreadState(compiled()()), ThreadState(HostState.capture())
    assert facts(by_op) == facts(by_python)
    expected = torch.randn(3), torch.rand(2)
    for state in (by_op, by_python):
        before.apply()
        state.apply()
        assert now() == facts(by_python)
        assert all(map(torch.equal, (torch.randn(3), torch.rand(2)), expected))


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_captured_applied_and_taken_back(name: str) -> None:
    before = ThreadState.capture()
    CHANGES[name]()
    after = ThreadState.capture()
    assert changed(facts(before), facts(after)) == {name.split()[0]}
    before.apply()
    assert now() == facts(before)
    after.apply()
    assert now() == facts(after)
    before.apply()
    with applied(after):
        assert now() == facts(after)
    assert now() == facts(before)


def test_inference_mode_is_captured_and_applied_both_ways() -> None:
    before = ThreadState.capture()
    with torch.inference_mode():
        inside = ThreadState.capture()
        with applied(before):
            assert now() == facts(before)
            assert torch.ones(1, requires_grad=True).mul(2).requires_grad
        assert now() == facts(inside)
    assert changed(facts(before), facts(inside)) == {"inference", "grad"}
    with applied(inside):
        assert torch.ones(1).is_inference()
        assert now() == facts(inside)
    assert now() == facts(before)


@pytest.mark.gpu
def test_device_stream_and_device_rng_are_captured_and_taken_back() -> None:
    torch.rand(1, device="cuda")
    modes = Modes.capture()  # CUDA's sanitizer, where it watches, is one
    before = ThreadState.capture()
    stream = torch.cuda.Stream()
    torch.cuda.set_stream(stream)
    torch.rand(3, device="cuda")
    after = ThreadState.capture()
    assert changed(facts(before), facts(after)) == {"device_rng", "stream"}
    before.apply()
    assert now(modes) == facts(before)
    with applied(after):
        assert torch.cuda.current_stream() == stream
    assert now(modes) == facts(before)
    assert after.device == torch.cuda.current_device()


def test_seeded_gives_a_stream_of_its_own_and_leaves_the_outer_one_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(0)
    outer = ThreadState.capture()
    seeded = outer.seeded(5)
    assert now() == facts(outer)
    assert changed(facts(outer), facts(seeded)) == RNG
    assert torch.equal(seeded.host.rng, outer.seeded(5).host.rng)
    assert not torch.equal(seeded.host.rng, outer.seeded(6).host.rng)
    with applied(seeded):
        assert torch.equal(torch.rand(4), expected)
    assert now() == facts(outer)


def test_a_state_takes_the_random_stream_of_one_of_either_kind() -> None:
    own = ThreadState.capture()
    torch.randn(1)  # keeps the second of two normal numbers
    others = [compiled()(), HostState.capture()]
    expected = torch.randn(3)
    for other in others:
        own.host.with_rng_of(other).apply_rng()
        assert torch.equal(torch.randn(3), expected)


def test_without_autocast_cache_changes_that_alone() -> None:
    state = ThreadState.capture()
    assert facts(state)["autocast_cache"] is True
    assert changed(facts(state), facts(state.without_autocast_cache())) == {"autocast_cache"}


def _spoil() -> None:
    for change in CHANGES.values():
        change()


@pytest.mark.parametrize("use", ["preserved", "applied"])
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_the_outer_state_is_back_after_the_block(use: str, error: type[BaseException] | None) -> None:
    before = ThreadState.capture()
    block = preserved() if use == "preserved" else applied(before.seeded(3))
    with nullcontext() if error is None else pytest.raises(error):
        with block:
            _spoil()
            assert changed(facts(before), now()) == {name.split()[0] for name in CHANGES}
            if error is not None:
                raise error("on purpose")
    assert now() == facts(before)


class Quiet(TorchDispatchMode):
    """Changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def compiles() -> bool:
    """Whether `torch.compile` compiles a new function now."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    function = eval("lambda x: x * 2 + 1")  # code of its own each time: of code that was left alone once none is compiled later
    torch.compile(function, backend=backend)(torch.ones(3))
    return bool(graphs)


def test_behind_a_mode_whose_end_is_not_called_functions_are_compiled() -> None:
    with entered(Quiet()):
        assert not compiles() and is_in_torch_dispatch_mode()
    assert compiles() and not is_in_torch_dispatch_mode()


def test_a_side_without_modes_compiles_while_another_has_some() -> None:
    with Quiet():
        inside = Modes.capture()
        NO_MODES.apply()
        assert compiles()
        inside.apply()
        assert not compiles()
    assert compiles()


# ---- forwards that take turns

COLOUR: contextvars.ContextVar[str] = contextvars.ContextVar("COLOUR", default="none")


def sight() -> tuple[Any, ...]:
    """What model code can see of the thread's state, one random number drawn included."""
    modes = Modes.capture()
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        COLOUR.get(),
        round(torch.rand(1).item(), 6),
        (torch.ones(2, 2) @ torch.ones(2, 2)).dtype,
        torch.ones(1).item(),
        Settings.capture(),
        *(len(each) for each in (modes.functions, modes.operations, modes.packings)),
        is_in_torch_dispatch_mode(),
    )


class Seen(list[tuple[Any, ...]]):
    """A list that is one value to pytree, so that the layers write into it and not into a copy."""


class Witness(nn.Module):
    """Two layers; everything writes down what it sees, under the name that its input carries."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([WitnessLayer(), WitnessLayer()])

    def forward(self, inputs: torch.Tensor, seen: Seen, colour: str) -> torch.Tensor:
        seen.append(("prefix", *sight()))
        inside = torch.autocast("cpu", dtype=torch.bfloat16) if colour == "inside" else nullcontext()
        with inside:
            hidden = inputs
            for index, layer in enumerate(self.layers):
                COLOUR.set(f"{colour} {index}")
                hidden = layer(hidden, seen)
                seen.append((f"glue {index}", *sight()))
        return hidden.float().sum()


class WitnessLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor, seen: Seen) -> torch.Tensor:
        seen.append(("layer", *sight()))
        return nn.functional.dropout(self.inner(hidden), 0.5)


@contextmanager
def all_of_it() -> Iterator[None]:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        yield


@contextmanager
def with_settings() -> Iterator[None]:
    before = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    torch.set_default_dtype(torch.float16)
    torch.set_float32_matmul_precision("high")
    try:
        with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
            yield
    finally:
        torch.set_default_dtype(before[0])
        torch.set_float32_matmul_precision(before[1])


def test_the_newer_keys_for_precision_do_not_keep_states_from_being_captured() -> None:
    before = torch.backends.fp32_precision
    torch.backends.fp32_precision = "tf32"
    try:
        state = ThreadState.capture()
        with applied(state):
            assert torch.backends.fp32_precision == "tf32"
        assert torch.backends.fp32_precision == "tf32"
    finally:
        torch.backends.fp32_precision = before


class Doubled(TorchFunctionMode):
    """Lets `torch.ones` give twos, and linear layers twice as much."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func in (torch.ones, nn.functional.linear) else result


class Halved(TorchDispatchMode):
    """Lets uniform random numbers be halves of what they are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 0.5 if func is torch.ops.aten.rand.default else result


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.round(decimals=1) if tensor.is_floating_point() else tensor


@contextmanager
def in_modes() -> Iterator[None]:
    with Doubled(), Halved(), torch.autograd.graph.saved_tensors_hooks(rounded, lambda tensor: tensor), Doubled():
        yield


# how one micro-batch's forward runs, its own user code
MANNERS: dict[str, Callable[[], Any]] = {
    "plain": nullcontext,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inside": nullcontext,  # the model itself opens autocast between its prefix and its end
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "nested": all_of_it,
    "settings": with_settings,
    "modes": in_modes,
}


class Turn:
    """One micro-batch's forward in some manner, with the list of what it saw."""

    def __init__(self, model: Witness, manner: str, seed: int, stubs: Stubs | None) -> None:
        self.seen = Seen()
        self.inputs = torch.arange(8.0).view(2, 4) / (seed + 1)
        self.state = ThreadState.capture().seeded(seed)
        run = partial(self._run, model, manner)
        if stubs is None:
            with applied(self.state):
                self.result = contextvars.copy_context().run(run)
        else:
            self.micro_batch = MicroBatch(run, ForwardPass(map_layers(model), stubs, keep=True), self.state)

    def _run(self, model: Witness, manner: str) -> torch.Tensor:
        with MANNERS[manner]():
            return model(self.inputs, self.seen, manner)


@pytest.mark.parametrize("second", MANNERS)
@pytest.mark.parametrize("first", MANNERS)
def test_forwards_that_take_turns_see_their_own_state(first: str, second: str) -> None:
    model = Witness()
    COLOUR.set("hub")
    alone = [Turn(model, manner, seed, None) for seed, manner in enumerate((first, second))]
    hub = now()
    with Stubs(map_layers(model)) as stubs:
        turns = [Turn(model, manner, seed, stubs) for seed, manner in enumerate((first, second))]
        for do in (
            lambda t: t.micro_batch.start(),
            lambda t: t.micro_batch.advance(0),
            lambda t: t.micro_batch.advance(1),
            lambda t: setattr(t, "result", t.micro_batch.finish()),
        ):
            for turn in turns:
                do(turn)
                assert now() == hub
                assert COLOUR.get() == "hub"
    for turn, plain in zip(turns, alone, strict=True):
        assert turn.seen == plain.seen
        assert torch.equal(turn.result, plain.result)


@pytest.mark.parametrize("manners", [("plain", "autocast"), ("autocast", "inside"), ("settings", "modes")])
def test_a_recompute_sees_what_its_forward_saw(manners: tuple[str, str]) -> None:
    model = Witness()
    hub = now()
    with Stubs(map_layers(model)) as stubs:
        turns = [Turn(model, manner, seed, stubs) for seed, manner in enumerate(manners)]
        for turn in turns:
            turn.micro_batch.start()
        for layer in (0, 1):
            for turn in turns:
                turn.micro_batch.advance(layer)
        for turn in turns:
            turn.micro_batch.finish().backward()
        forward = [[entry for entry in turn.seen if entry[0] == "layer"] for turn in turns]
        for layer in (1, 0):
            for turn, seen in zip(turns, forward, strict=True):
                del turn.seen[:]
                turn.micro_batch.backward_layer(layer)
                assert turn.seen == [seen[layer]]
                assert now() == hub
    assert forward[0] != forward[1]


@pytest.mark.parametrize("manner", MANNERS)
def test_a_forward_ended_while_parked_leaves_nothing_behind(manner: str) -> None:
    model = Witness()
    hub = now()
    with Stubs(map_layers(model)) as stubs:
        turn = Turn(model, manner, 0, stubs)
        turn.micro_batch.start()
        turn.micro_batch.advance(0)
        turn.micro_batch.close()
        assert now() == hub
        del turn
        assert now() == hub
