"""CPU Adam outside the interpreter lock: DeepSpeed's bits, other threads run meanwhile, and what happens without it; joints."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adam_gap import MAX_UPDATES, NUMEL, load_adam, long_updates, ticking, ticks_during_update, update

from ds_vertical.cli import build_ops
from ds_vertical.compat.ops import cache, load
from ds_vertical.engine import module_hooks

MODULES = ("free", "pieces")
IDS = itertools.count(9_000)
# param (and gradient) dtype, moments' dtype
DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
]
# a first step, consecutive ones, the same one again (another chunk of it), a jump, consecutive ones after it
STEPS = [1, 2, 3, 3, 4, 9, 10]


@pytest.fixture(scope="module")
def stock() -> Any:
    return load_adam(None)


@pytest.fixture(scope="module")
def adams(stock: Any) -> dict[str, Any]:
    free = load.free_adam()
    assert not isinstance(free, load.PiecewiseAdam), "our own binding was not built"
    return {"free": free, "pieces": load.PiecewiseAdam(stock)}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "PIECE_NUMEL", 4096)


COULD_NOT = r"broken\.cpp could not be compiled"


@contextlib.contextmanager
def that_does_not_compile(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[load.OwnOp]:
    """An op of ours with another source, which does not compile."""
    broken = folder / "broken.cpp"
    broken.write_text("#error on purpose\n")
    # nothing of DeepSpeed's: it would be compiled beside the broken file for a minute
    op = replace(getattr(load, name), source=str(broken), shipped=())
    monkeypatch.setattr(load, name, op)
    try:
        yield op
    finally:
        cache.forget(op.build_name)


def trained(adam: Any, numel: int, dtypes: tuple[torch.dtype, torch.dtype], adamw: bool) -> list[list[torch.Tensor]]:
    """Parameters and both moments after each of STEPS."""
    generator = torch.Generator().manual_seed(numel)
    optimizer_id = next(IDS)
    adam.create_adam(optimizer_id, 1e-3, 0.9, 0.999, 1e-8, 0.01, adamw, False)
    param_dtype, state_dtype = dtypes
    params = torch.randn(numel, generator=generator).to(param_dtype)
    moments = [torch.zeros(numel, dtype=state_dtype) for _ in range(2)]
    results = []
    for index, step in enumerate(STEPS):
        grads = torch.randn(numel, generator=generator).to(param_dtype)
        update(adam, optimizer_id, step, [params, grads, *moments], lr=1e-3 / (1 + index), decay=0.1 * (index % 2))
        results.append([tensor.clone() for tensor in (params, *moments)])
    adam.destroy_adam(optimizer_id)
    return results


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("adamw", [True, False])
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda pair: "-".join(str(one).removeprefix("torch.") for one in pair))
def test_bits_are_those_of_deepspeeds_binding(
    adams: dict[str, Any], stock: Any, small_pieces: None, name: str, adamw: bool, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    for numel in (1, 15, 16, 17, 1000, 4096, 4096 + 8, 100_003):
        ours, theirs = (trained(adam, numel, dtypes, adamw) for adam in (adams[name], stock))
        for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True)), f"{numel} elements, update {step}"
        if numel == 100_003:
            assert not torch.equal(ours[0][0], ours[-1][0]), "nothing was updated"


def test_several_threads_get_the_bits_of_one(adams: dict[str, Any], stock: Any) -> None:
    sizes = [100_003, 65_536, 70_001, 99_999]
    results: dict[int, list[list[torch.Tensor]]] = {}

    def run(numel: int) -> None:
        results[numel] = trained(adams["free"], numel, DTYPES[0], True)

    threads = [threading.Thread(target=run, args=(numel,)) for numel in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for numel in sizes:
        expected = trained(stock, numel, DTYPES[0], True)
        assert all(torch.equal(a, b) for a, b in zip(results[numel][-1], expected[-1], strict=True)), numel


def test_other_threads_run_while_a_long_update_computes(adams: dict[str, Any], stock: Any) -> None:
    """See [Note: ticks]: no time is measured."""
    assert ticks_during_update(stock) == 0, "DeepSpeed's binding gives the lock up by now: see whether ours is still needed"
    assert ticks_during_update(adams["free"]) > 0


class Noted:
    """DeepSpeed's binding; `before` runs ahead of every update."""

    def __init__(self, stock: Any, before: Callable[[], None]) -> None:
        self.stock = stock
        self.before = before

    def adam_update(self, *args: Any) -> None:
        self.before()
        self.stock.adam_update(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stock, name)


def test_other_threads_run_between_the_pieces_of_a_long_update(stock: Any) -> None:
    counts: list[int] = []
    with ticking(switch_interval_s=1e-4) as count:
        adam = load.PiecewiseAdam(Noted(stock, lambda: counts.append(count())))
        with long_updates(adam) as run:
            for step in range(1, MAX_UPDATES + 1):
                counts.clear()
                run(step)
                assert len(counts) == NUMEL // load.PIECE_NUMEL > 8
                if counts[-1] > counts[1]:
                    return
    raise AssertionError("no other thread ran between two pieces")


@pytest.fixture
def optimizer_id(adams: dict[str, Any]) -> Iterator[int]:
    made = next(IDS)
    for adam in adams.values():
        adam.create_adam(made, 1e-3, 0.9, 0.999, 1e-8, 0.01, True, False)
    yield made
    for adam in adams.values():
        adam.destroy_adam(made)


@pytest.mark.parametrize("name", MODULES)
def test_the_threads_of_an_update_are_bounded_for_the_calling_thread(
    adams: dict[str, Any], optimizer_id: int, name: str
) -> None:
    tensors = [torch.ones(100_003) for _ in range(4)]
    started: dict[int, int] = {}

    def run(num_threads: int) -> None:
        adams[name].set_num_threads(num_threads)
        before = set(os.listdir("/proc/self/task"))
        update(adams[name], optimizer_id, 1, tensors)
        started[num_threads] = len(set(os.listdir("/proc/self/task")) - before)

    for num_threads in (1, 3):
        thread = threading.Thread(target=run, args=(num_threads,))  # OpenMP keeps the helpers of a thread until it ends
        thread.start()
        thread.join()
    assert started == {1: 0, 3: 2}
    with pytest.raises(ValueError, match="num_threads"):
        adams[name].set_num_threads(-1)


BAD: dict[str, Callable[[list[torch.Tensor]], list[torch.Tensor]]] = {
    "short gradients": lambda t: [t[0], t[1][:16], t[2], t[3]],
    "other gradients' dtype": lambda t: [t[0], t[1].bfloat16(), t[2], t[3]],
    "moments of two dtypes": lambda t: [*t[:3], t[3].bfloat16()],
    "not contiguous": lambda t: [one[::2] for one in t],
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("fault", BAD)
def test_what_the_kernel_would_misread_is_refused(adams: dict[str, Any], optimizer_id: int, name: str, fault: str) -> None:
    tensors = [torch.ones(64) for _ in range(4)]
    with pytest.raises(ValueError, match="CPU Adam takes"):
        update(adams[name], optimizer_id, 1, BAD[fault](tensors))
    assert all(torch.equal(one, torch.ones(64)) for one in tensors)


@pytest.mark.parametrize("name", MODULES)
def test_an_unknown_optimizer_is_refused(adams: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match="no CPU Adam optimizer 8999"):
        update(adams[name], 8999, 1, [torch.ones(64) for _ in range(4)])


# ------------------------------------------------------------------------------------------------------------ the builds


def test_an_edited_source_is_another_op(tmp_path: Path) -> None:
    copied = tmp_path / "free_adam.cpp"
    shutil.copyfile(load.CSRC / load.FREE_ADAM.source, copied)
    op = replace(load.FREE_ADAM, source=str(copied))
    assert op.build_name == load.FREE_ADAM.build_name
    copied.write_text(copied.read_text() + "// edited\n")
    assert op.build_name != load.FREE_ADAM.build_name


def test_build_ops_knows_our_own() -> None:
    assert {op.build_name for op in load.OWN_OPS} < set(load.needed_ops())


def test_build_ops_fails_where_a_stand_in_works_in_an_ops_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load.identity_node.cache_clear()
    try:
        with that_does_not_compile("IDENTITY_NODE", tmp_path, monkeypatch) as op:
            monkeypatch.setattr(load, "OWN_OPS", (load.FREE_ADAM, load.CHECKED_AIO, op))
            with pytest.warns(RuntimeWarning, match=COULD_NOT):
                assert build_ops.main([]) == 1
    finally:
        load.identity_node.cache_clear()
    said = capsys.readouterr()
    assert f"{op.build_name}: not compiled, slower stand-ins" in said.err and "are ready" not in said.out


def test_where_it_does_not_compile_a_warning_says_so_and_deepspeeds_is_used(
    stock: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        that_does_not_compile("FREE_ADAM", tmp_path, monkeypatch),
        pytest.warns(RuntimeWarning, match=f"{COULD_NOT} .* in pieces"),
    ):
        adam = load.free_adam.__wrapped__()
    assert isinstance(adam, load.PiecewiseAdam)
    assert torch.equal(trained(adam, 1000, DTYPES[0], True)[-1][0], trained(stock, 1000, DTYPES[0], True)[-1][0])


# ------------------------------------------------------------------------------------------------------------- the joint


class PythonJoint(torch.autograd.Function):
    """The node of stock's hooks, in the interpreter."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def gradients_through(joint: Any) -> list[torch.Tensor]:
    """Of a tensor that is used several times, in an order in which the joints have a say."""
    random = torch.Generator().manual_seed(0)
    leaf = torch.randn(512, generator=random).bfloat16().requires_grad_()
    weights = [torch.randn(512, generator=random).bfloat16().requires_grad_() for _ in range(6)]
    hidden = leaf
    for weight in weights:
        inner = joint(hidden)
        hidden = joint(hidden + inner * weight + joint(inner).sin() * inner.tanh())
    hidden.sum().backward()
    return [tensor.grad for tensor in (leaf, *weights) if tensor.grad is not None]


def test_a_joint_gives_the_bits_of_a_node_in_python() -> None:
    joint = load.identity_node()
    assert joint is not None
    ours, expected = gradients_through(joint), gradients_through(PythonJoint.apply)
    assert len(ours) == 7
    for got, wanted in zip(ours, expected, strict=True):
        assert torch.equal(got, wanted)
    without = gradients_through(lambda tensor: tensor)
    assert any(not torch.equal(got, other) for got, other in zip(ours, without, strict=True))  # the joints do matter


def test_a_joint_is_the_same_memory_and_no_view() -> None:
    joint = load.identity_node()
    assert joint is not None
    leaf = torch.ones(4, requires_grad=True)
    inner = leaf * 1
    joined = joint(inner)
    assert joined.data_ptr() == inner.data_ptr()
    assert joined.grad_fn is not inner.grad_fn
    assert joined._base is None
    before = inner._version
    with torch.no_grad():
        joined.add_(1)
    assert inner._version == before + 1  # a write is seen by who keeps the tensor before the joint
    relu = joint(leaf * -1).relu_()  # as modules that work in place do
    relu.sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, torch.zeros(4))
    with torch.no_grad():
        assert joint(leaf).grad_fn is None
    assert joint(torch.ones(4)).grad_fn is None
    assert type(joint(torch.nn.Parameter(torch.ones(4)))) is torch.Tensor


class Marked(torch.Tensor):
    """A user's own type."""


def test_tensors_of_users_own_types_keep_them() -> None:
    joint = module_hooks.load_identity_node()
    marked = torch.ones(4).as_subclass(Marked).requires_grad_()
    assert type(joint(marked)) is Marked
    plain = torch.ones(4, requires_grad=True)
    assert type(joint(plain).grad_fn) is not type(PythonJoint.apply(plain).grad_fn)
    assert "Joint" in joint(plain).grad_fn.name()
    assert "_IdentityNode" not in joint(plain).grad_fn.name()  # the compiled one


@pytest.mark.parametrize(
    ("name", "loader", "stands_in"),
    [
        ("IDENTITY_NODE", load.identity_node, "nodes written in Python stand in: same result"),
        ("HOST_STATE", load.state_reader, "Python captures what torch keeps per thread: same result"),
        ("BLOCK_QUANTIZE", load.block_quantizer, "torch stands in: same result"),
        ("MASTER_HALVES", load.master_halves, "torch stands in: same result"),
    ],
)
def test_where_an_op_does_not_compile_a_warning_names_what_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, loader: Any, stands_in: str
) -> None:
    with (
        that_does_not_compile(name, tmp_path, monkeypatch),
        pytest.warns(RuntimeWarning, match=rf"{COULD_NOT} .*; {stands_in}"),
    ):
        assert loader.__wrapped__() is None
    assert load.free_adam() is not None  # one that fails takes no other with it


def test_nodes_written_in_python_have_the_bits_of_compiled_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "identity_node", lambda: None)
    for got, wanted in zip(
        gradients_through(module_hooks.load_identity_node()), gradients_through(PythonJoint.apply), strict=True
    ):
        assert torch.equal(got, wanted)
