"""A destroyed engine leaves memory with all that it had, wherever a call of it has been interrupted before."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from inspect import unwrap
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from cut_kinds import STEPS, evaluate, make, three_calls
from cutting import PACKAGE, Cut, Site
from harness import dispose

import ds_vertical
from ds_vertical.engine.integrations.three_calls import Hub, ThreeCalls
from ds_vertical.engine.train_loop import VerticalLoop
from ds_vertical.engine.zero3.step_driver import StepDriver
from ds_vertical.model.forward_coroutine import ForwardCoroutine
from ds_vertical.model.kept.block_backward import run_backward
from ds_vertical.model.micro_batch import MicroBatch
from ds_vertical.offload.grad_accumulator import GradientStore
from ds_vertical.offload.stepper import Stepper

Use = Callable[[Any], None]


def at(function: Any, number: int) -> Cut:
    """As the function is called for the `number`-th time."""
    code = unwrap(function).__code__
    return Cut(Site(code.co_filename[len(PACKAGE) + 1 :], code.co_qualname, code.co_firstlineno, "call", ""), number)


def step(engine: Any) -> None:
    engine.train_batch(iter(STEPS[engine.global_steps]))


def cut(use: Use, function: Any, number: int) -> Use:
    """The use of an engine is interrupted."""

    def use_and_cut(engine: Any) -> None:
        place = at(function, number)
        with contextlib.suppress(KeyboardInterrupt), place:
            use(engine)
        assert place.done, "the place was to be reached"

    return use_and_cut


def left_behind_a_forward(engine: Any) -> None:
    """A loop of the three calls that ends in the middle of a step."""
    for batch in islice(ds_vertical.look_ahead(STEPS[engine.global_steps]), 1):
        engine(**batch)


def left_behind_a_backward(engine: Any) -> None:
    for batch in islice(ds_vertical.look_ahead(STEPS[engine.global_steps]), 1):
        engine.backward(engine(**batch))
        engine.step()


def held_by(engine: Any) -> dict[str, weakref.ref[Any]]:
    """An engine, its parts, and the tensors that make its size."""
    found = {"engine": engine, "model": engine.module, "optimizer": engine.optimizer, "store": engine.param_store}
    found |= {f"slot {index}": slot for index, slot in enumerate(engine.optimizer.slots)}
    for name, param in engine.module.named_parameters():
        found |= {name: param, f"shard of {name}": param.ds_tensor}
    return {name: weakref.ref(each) for name, each in found.items()}


def used_and_destroyed(folder: Path, kind: str, use: Use) -> dict[str, weakref.ref[Any]]:
    engine, _ = make(kind, folder)
    step(engine)
    held = held_by(engine)
    use(engine)
    with contextlib.suppress(Exception):  # of one that is torn
        dispose(engine)
    return held


USES: dict[str, Use] = {
    "a step": step,
    "between two forwards": cut(step, ForwardCoroutine.advance, 2),
    "in a head": cut(step, MicroBatch.backward_suffix, 1),
    "in a backward": cut(step, run_backward, 2),
    "as gradients are added": cut(step, GradientStore.add, 3),
    "at the norm": cut(step, StepDriver.open_step, 1),
    "in the optimizer's step": cut(step, Stepper.step, 2),
    "as the step is counted": cut(step, VerticalLoop.conclude, 1),
    "in an evaluation": cut(evaluate, ForwardCoroutine.advance, 2),
    "the three calls": three_calls,
    "the three calls, in a forward": cut(three_calls, ForwardCoroutine.advance, 2),
    "the three calls, as outputs are handed over": cut(three_calls, Hub._hand_over, 1),
    "the three calls, as the next forward begins": cut(three_calls, ThreeCalls.forward, 2),
    "the three calls, in a backward": cut(three_calls, run_backward, 2),
    "the three calls, at the norm": cut(three_calls, StepDriver.open_step, 1),
    "the three calls, left behind a forward": left_behind_a_forward,
    "the three calls, left behind a backward": left_behind_a_backward,
}


FAST = ("in a backward", "in the optimizer's step", "the three calls", "the three calls, in a forward")


def rows() -> Iterator[Any]:
    for name, use in USES.items():
        for kind in ("early", "everything"):
            is_fast = kind == "early" and name in FAST
            yield pytest.param(kind, use, id=f"{name}-{kind}", marks=() if is_fast else pytest.mark.slow)


@pytest.mark.parametrize(("kind", "use"), rows())
def test_a_destroyed_engine_leaves_memory(tmp_path: Path, kind: str, use: Use) -> None:
    """After one collection of garbage: what graphs of autograd hold is freed in the next one, if the package still has graphs.
    The garbage collector does not see what hooks in graphs hold."""
    held = used_and_destroyed(tmp_path, kind, use)
    gc.collect()
    assert not [name for name, each in held.items() if each() is not None]
