"""The self-check of evaluations: two micro-batches in layer-major order, and one after the other, must have the same results.

It runs only where other code than that ahead of the first block is known to change state: such state alone may have other
values in layer-major order than in stock's. Its forwards have the random numbers of the micro-batches in the evaluation.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ds_vertical.compat import accelerator
from ds_vertical.engine.assembly import StepParts
from ds_vertical.engine.self_check.check import generators_kept, put_state_back
from ds_vertical.engine.self_check.diagnosis import Diagnosis, SelfCheckError
from ds_vertical.engine.self_check.digests import digests_of, largest_distance
from ds_vertical.engine.self_check.first_step import NUM_MICRO_BATCHES, FurtherChecks
from ds_vertical.interrupts import Changed
from ds_vertical.model.micro_batch import Body
from ds_vertical.model.state.snapshot import Snapshot
from ds_vertical.model.state.survey import survey
from ds_vertical.model.thread_state import preserved

Evaluate = Callable[[Sequence[Body]], list[object]]  # results of forwards in layer-major order


class EvaluationCheck:
    """Checks the evaluations of one engine, again whenever further state has become known of."""

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self._further = FurtherChecks(parts, "evaluations")
        self._checked: set[str] = set()  # paths of state that the last check has seen

    def run(self, bodies: Sequence[Body], most: int, evaluate: Evaluate) -> None:
        """Ahead of an evaluation of these micro-batches, or of its next run where it starts over. `most`: of the rank that has
        most of them. Collective. Modules hold afterwards what they held before. Raises SelfCheckError on every rank."""
        if self._parts.vertical.self_check is False:
            return
        if most < NUM_MICRO_BATCHES or not self._further.is_due(self._checked):
            return  # on all ranks
        took, error = self._compared(bodies[:NUM_MICRO_BATCHES], evaluate)
        said = "agree" if error is None else "differ"
        accelerator.log(f"ds_vertical: self_check: {NUM_MICRO_BATCHES} micro-batches of an evaluation, {took}: they {said}")
        with self._agreed():
            if error is not None:
                raise error
        self._further.note_agreed()
        self._checked |= self._parts.state.unsure

    def _agreed(self) -> contextlib.AbstractContextManager[object]:
        return self._parts.optimizer.live.agreed("self_check")

    def _compared(self, bodies: Sequence[Body], evaluate: Evaluate) -> tuple[str, SelfCheckError | None]:
        """How long both orders took, and what is wrong. All ranks run as many passes: one with a single micro-batch runs that
        again."""
        parts = self._parts
        functions = [function for body in bodies for function in body.functions]
        blocks = [block.module for block in parts.layers.blocks]
        with self._agreed():
            undo = partial(put_state_back, Snapshot(*survey(parts.module, blocks, functions)[:2]))
        with preserved(), generators_kept(), Changed(partial(undo, refuse=False)):
            start = time.perf_counter()
            together = evaluate(bodies)  # first: it learns of the state
            with self._agreed():
                undo()
            middle = time.perf_counter()
            apart = [evaluate([bodies[index % len(bodies)]])[0] for index in range(NUM_MICRO_BATCHES)]
            with self._agreed():
                undo()
            took = f"{time.perf_counter() - middle:.1f} s in stock's order, {middle - start:.1f} s in the schedule's"
            found = next(_differences(together, apart[: len(bodies)]), None)
        if found is None:
            return took, None
        return took, Diagnosis(parts.layers, parts.vertical.order, parts.state).of_evaluation(*found)


def _differences(together: Sequence[object], apart: Sequence[object]) -> Iterator[tuple[int, float]]:
    """Micro-batches whose results differ, and by how much."""
    for number, (ours, plain) in enumerate(zip(together, apart, strict=True)):
        index, distance = largest_distance(digests_of(ours), digests_of(plain))
        if index >= 0:
            yield number, distance
