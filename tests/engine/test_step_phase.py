"""The phases of an optimizer step: which may follow which, and what stays where another is asked for."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from ds_vertical.engine.zero3.step_driver import ARROWS, StepDriver, StepPhase
from ds_vertical.offload.cpu_adam import Powers

IDLE, EARLY, COMMITTING, DECIDED = StepPhase
LEGAL = {
    (IDLE, EARLY),
    (IDLE, DECIDED),
    (EARLY, COMMITTING),
    (EARLY, DECIDED),
    (EARLY, IDLE),
    (COMMITTING, DECIDED),
    (DECIDED, IDLE),
}


def driver() -> StepDriver:
    nothing: Any = None
    return StepDriver(nothing, nothing, nothing, nothing, Powers.made_with((0.9, 0.999)))


def test_every_phase_has_its_arrows() -> None:
    assert {(start, to) for start, ends in ARROWS.items() for to in ends} == LEGAL and set(ARROWS) == set(StepPhase)


@pytest.mark.parametrize(("start", "to"), product(StepPhase, StepPhase), ids=lambda phase: phase.name)
def test_a_transition_follows_an_arrow_or_changes_nothing(start: StepPhase, to: StepPhase) -> None:
    step = driver()
    step.phase = start
    if start is to or (start, to) in LEGAL:
        step.transition(to)
        assert step.phase is to
    else:
        with pytest.raises(RuntimeError, match=f"cannot go from {start.name} to {to.name}"):
            step.transition(to)
        assert step.phase is start


def test_a_decided_step_counts_until_the_engine_has_counted_it() -> None:
    assert [phase for phase in StepPhase if phase.counts] == [COMMITTING, DECIDED]
