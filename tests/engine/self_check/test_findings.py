"""Each way in which state that forwards keep once gave wrong numbers without a word, with the handling of that state alone
switched off: the self-check finds it, and agrees once the handling is on again.

Issue 21 numbers these findings: tensors with gradient that later blocks read through an object (1), what hooks keep for the
loss (2), state of a forward on modules, in lists and in context objects (3), state that makes the recompute another function
(4), buffers that are replaced (5).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import Family
from harness import differing, read_weights, running
from single_state import (
    GEMMAS,
    ContextGain,
    Counters,
    ForTheSuffix,
    GlobalNumbers,
    KeysInAContext,
    LastReads,
    NotedCounters,
    PlainMask,
    PlainStatistics,
    PythonDepth,
    ResetCounter,
    TorchDepth,
    UnreadRanges,
    ibert,
)
from stateful import WIDTH, Base, config_in
from stateful_models import (
    BufferThroughParent,
    CodeBooks,
    Counting,
    GlobalList,
    Keeper,
    MaskOnBlocks,
    NumpyGenerators,
    NumpyRandom,
    OwnGenerators,
    PythonRandom,
    Ranges,
    SharedContext,
    SharedDataclass,
    SharedDict,
    SharedList,
    SharedUserDict,
    Spectral,
    TorchSpectral,
    reset_globals,
)
from torch import nn

from ds_vertical.engine.self_check.check import SelfCheckError
from ds_vertical.model import recorded_blocks
from ds_vertical.model.state.block_state import BlockState, FoundElements
from ds_vertical.model.state.tracks import LearnedState, Track
from ds_vertical.model.thread_state import ThreadState

Switch = Callable[[pytest.MonkeyPatch, Any], None]


def equal_lengths() -> list[dict[str, torch.Tensor]]:
    """Of one shape, so that what belongs to another micro-batch fits everywhere."""
    generator = torch.Generator().manual_seed(3)
    return [{"x": torch.randn(2, 4, WIDTH, generator=generator) + 0.3 * number} for number in range(2)]


# ---- what is switched off


def all_state(_: pytest.MonkeyPatch, engine: Any) -> None:
    engine._state.learned.handled = False


def versions(patch: pytest.MonkeyPatch, _: Any) -> None:
    """A forward that goes on finds in modules what the forward before it has left there."""
    patch.setattr(Track, "version", lambda self, micro_batch: self.installed)


def recompute(patch: pytest.MonkeyPatch, _: Any) -> None:
    """A block's recompute finds in modules what is there then, not what its call found."""
    patch.setattr(BlockState, "_install", lambda self, held: None)
    patch.setattr(FoundElements, "restore", lambda self: [])


def streams(patch: pytest.MonkeyPatch, _: Any) -> None:
    """A block's recompute draws the next numbers of torch's stream, not those of its forward."""
    applied = recorded_blocks.applied

    def with_the_next_numbers(state: ThreadState) -> contextlib.AbstractContextManager[None]:
        return applied(ThreadState(state.host.with_rng_of(ThreadState.capture().host)))

    patch.setattr(recorded_blocks, "applied", with_the_next_numbers)


# ---- what is found

OUTPUT = r"layer \d \(blocks\.\d\): output tensor 0 of micro-batch \d differs by "
GRADIENT = r"layer \d \(blocks\.\d\): the gradient of blocks\.\d\.[\w.]+ for micro-batch \d differs (by|wholly) "
LOSS = r"the loss of micro-batch \d differs by .*; the outputs of all layers agree"
BACKWARD = r"the schedule raises RuntimeError in the backward of layer \d \(blocks\.\d\), .*"
AFTERWARDS = r"blocks\.\d\.x_m\w+, which the forward changes, holds something else afterwards than in torch's own order"


@dataclass(frozen=True)
class Case:
    """`keeper`: where a hook on the second block keeps its output for the loss, and whether detached."""

    finding: int
    build: Callable[[], nn.Module]
    switch: Switch
    words: str
    fast: bool = False
    steps: Callable[[], list[dict[str, torch.Tensor]]] = equal_lengths
    options: dict[str, Any] = field(default_factory=dict)
    keeper: tuple[str, bool] | None = None
    name: str = ""

    def __str__(self) -> str:
        return f"{self.finding}-{self.name or self.build.__name__}"  # type: ignore[attr-defined]


def of_layers(words: str, stack: str) -> str:
    return words.replace("blocks", stack)


def gemma(family: Family, shared: int, number: int) -> Case:
    """`shared`: layers that read keys and values of others; `number`: micro-batches."""
    family = replace(family, settings=dict(family.settings) | {"num_kv_shared_layers": shared})
    name = f"{family.name}-{shared}-shared-M{number}"
    batches = partial(lambda: family.batches(1, number)[0])
    words = of_layers(f"{BACKWARD}|{GRADIENT}", r"model\.layers")
    return Case(1, family.builder(), all_state, words, steps=batches, name=name)


def kept_by_a_hook(where: str, detached: bool) -> Case:
    name = f"{where}-{'detached' if detached else 'with-gradient'}"
    return Case(2, Base, versions, LOSS, keeper=(where, detached), name=name)


CASES = [
    Case(1, SharedUserDict, all_state, BACKWARD + "|" + GRADIENT),
    Case(1, SharedUserDict, all_state, BACKWARD + "|" + GRADIENT, steps=lambda: equal_lengths()[:1], name="M1"),
    *(Case(1, case, all_state, BACKWARD + "|" + GRADIENT) for case in (SharedDict, SharedDataclass, SharedList, LastReads)),
    Case(1, KeysInAContext, all_state, BACKWARD + "|" + GRADIENT, fast=True),
    *(gemma(family, shared, number) for family in GEMMAS for shared in (1, 2) for number in (1, 2)),
    *(kept_by_a_hook(where, detached) for where in ("dict", "list", "attribute") for detached in (False, True)),
    Case(3, MaskOnBlocks, all_state, BACKWARD),
    Case(3, PlainMask, versions, OUTPUT),
    Case(3, ForTheSuffix, versions, LOSS, fast=True),
    Case(3, PlainStatistics, versions, LOSS),
    Case(3, BufferThroughParent, versions, LOSS),
    Case(3, GlobalList, all_state, LOSS),
    Case(3, GlobalNumbers, versions, LOSS),
    Case(3, ContextGain, versions, OUTPUT),
    Case(3, SharedContext, all_state, BACKWARD),
    *(Case(4, case, recompute, GRADIENT) for case in (OwnGenerators, PythonRandom, NumpyRandom, NumpyGenerators)),
    Case(4, Counters, recompute, GRADIENT, fast=True),
    *(Case(4, case, recompute, GRADIENT) for case in (NotedCounters, ResetCounter, Counting)),
    *(Case(4, case, recompute, GRADIENT) for case in (Spectral, CodeBooks, PythonDepth)),
    Case(4, TorchSpectral, recompute, GRADIENT, options={"params": "cpu", "optimizer": "cpu"}),
    Case(4, TorchDepth, streams, GRADIENT, fast=True),
    Case(5, Ranges, recompute, GRADIENT, fast=True),
    Case(5, UnreadRanges, all_state, AFTERWARDS),
    Case(
        5, ibert, recompute, GRADIENT.replace("blocks", r"ibert\.encoder\.layer"), steps=lambda: Family("bert").batches(1, 2)[0]
    ),
]


@pytest.fixture(autouse=True)
def fresh_globals() -> None:
    reset_globals()


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=() if case.fast else pytest.mark.slow) for case in CASES]
)
def test_it_finds_what_is_not_handled_and_agrees_with_what_is(
    tmp_path: Path, case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    steps, loss_fn = case.steps(), None
    config = config_in(tmp_path, section={"self_check": True, "seed": 4}, **case.options)
    config |= {"gradient_accumulation_steps": len(steps)}
    with running(config, case.build, vertical=True, under_zero_init=case.build is not TorchSpectral) as (engine, model):
        if case.keeper is not None:
            keeper = Keeper(*case.keeper)
            model.blocks[1].register_forward_hook(lambda module, args, output: keeper.keep(module, output))
            loss_fn = keeper.loss_fn
        before = read_weights(model)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SelfCheckError) as raised:
            case.switch(patch, engine)
            engine.train_batch(iter(steps), loss_fn)
        said = str(raised.value)
        assert re.search(f"self_check: ({case.words})", said) and "nothing has been trained" in said, said
        assert engine.global_steps == 0 and not differing(before, read_weights(model))
        engine._state.learned = LearnedState()
        engine._state.forget()
        engine.train_batch(iter(steps), loss_fn)
    assert "they agree" in capsys.readouterr().out
