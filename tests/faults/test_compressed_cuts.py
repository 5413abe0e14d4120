"""Interrupts while compressed masters are written whole, one and two of them: the run goes on with the same bits."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from cut_kinds import STEPS, make
from cutting import Cut, Reference, Site, Trials, chosen, recorded, reference_of
from harness import contents, differing, dispose

KIND = "compressed"


def slow(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@cache
def reference(folder: Path) -> Reference:
    return reference_of(folder / "reference", partial(make, KIND), STEPS)


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], Trials]]:
    folder = tmp_path_factory.mktemp("reference")
    yield lambda own: Trials(own, partial(make, KIND), STEPS, reference(folder))


def cuts_in(found: Counter[Site]) -> list[Cut]:
    """Where steps and compressed masters are in charge."""
    return chosen(Counter({s: n for s, n in found.items() if s.function.startswith(("Stepper.", "CompressedMasters."))}))


def whole(engine: Any) -> None:
    engine.optimizer.flush_state()


def save(engine: Any, folder: Path) -> None:
    engine.save_checkpoint(str(folder), tag=f"step{engine.global_steps}")


@pytest.mark.parametrize("count", [6, slow(12)])
def test_an_interrupt_in_a_step_of_compressed_masters(tmp_path: Path, trials: Callable[[Path], Trials], count: int) -> None:
    with trials(tmp_path) as each:
        cuts = cuts_in(each.found)
        assert len(cuts) > 12, "the step compresses nothing"
        for cut in cuts[:: len(cuts) // count]:
            each.cut(cut)
    assert not each.wrong, "\n".join(each.wrong)


@pytest.mark.parametrize(("act", "count"), [("whole", 6), ("save", 3), slow("whole", 12), slow("save", 5)])
def test_an_interrupt_while_masters_are_made_whole(
    tmp_path: Path, trials: Callable[[Path], Trials], act: str, count: int
) -> None:
    action = whole if act == "whole" else partial(save, folder=tmp_path / "saved")
    with trials(tmp_path) as each:
        engine, _ = each.ready()
        with recorded() as found:
            action(engine)
        cuts = cuts_in(found)
        assert len(cuts) > 12, "nothing is made whole"
        for cut in cuts[:: len(cuts) // count]:
            each.cut(cut, action)
    assert not each.wrong and not each.torn, "\n".join(each.wrong + each.torn)


@contextlib.contextmanager
def interrupted_twice(pipeline: Any) -> Iterator[None]:
    """Ctrl-C while jobs are in flight, and again while that is put in order: nobody has waited for them then."""
    submit, wait_idle = pipeline.submit, pipeline.wait_idle

    def cut(*_: Any) -> None:
        raise KeyboardInterrupt

    def submitting(*args: Any) -> Any:
        ticket = submit(*args)
        ticket.wait = cut
        return ticket

    pipeline.submit, pipeline.wait_idle = submitting, cut
    try:
        yield
    finally:
        pipeline.submit, pipeline.wait_idle = submit, wait_idle


@pytest.mark.parametrize("then", ["a step", "a user's write", "a save"])
def test_two_interrupts_leave_every_master_as_it_was(tmp_path: Path, then: str) -> None:
    """The jobs of the first go on; whatever comes next must meet what it expects."""
    found: list[dict[str, torch.Tensor]] = []
    for cut in (False, True):
        engine, model = make(KIND, tmp_path / str(cut))
        try:
            for step in STEPS[:3]:
                engine.train_batch(iter(step))
            engine.flush()
            assert engine.optimizer.stepper.masters.parts
            if cut:
                with pytest.raises(KeyboardInterrupt), interrupted_twice(engine.optimizer.pipeline):
                    whole(engine)
                assert engine.optimizer.stepper.masters.parts
            if then == "a user's write":
                weight = model.blocks[1].down.weight
                with deepspeed.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
                    weight.add_(0.5)
            elif then == "a save":
                save(engine, tmp_path / "saved" / str(cut))
            for step in STEPS[3:5]:
                engine.train_batch(iter(step))
            found.append(contents(engine, model))
        finally:
            dispose(engine)
    assert not differing(*found)
