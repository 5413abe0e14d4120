"""The self-check of evaluations: two micro-batches in layer-major order, and one after the other, must have the same results.

It runs ahead of the first evaluation of several micro-batches, and of the first one in other modes of the modules: a training
step shows nothing of code that runs in evaluations alone, and a model may keep state where nobody looks. It runs again where
other code than that ahead of the first block is known to change state. Its forwards have random numbers of their own.

[Note: the model alone] The first check runs the model without the user's `loss_fn` or other code, which may count what it sees
where nobody can put that back. `eval_batch` knows the model's inputs beforehand. Those of a trainer's `prediction_step` show as
it runs. So its first two micro-batches run by themselves, in stock's order, and their calls of the model are noted
(`awaits_calls`). The check runs these ahead of the first evaluation of several micro-batches. Code that brings several before
that is checked behind its evaluation, before anybody has the results.

[Note: a second look] Where a tensor differs, both orders run once more, and what each block returns is compared, too. A tensor
that differs between the two runs in stock's order as well (a time, say) tells nothing of the schedule. It is left out and
named, as long as other numbers can be compared.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from greenlet import getcurrent
from torch import nn

from ds_vertical.compat import accelerator
from ds_vertical.distributed import ranks
from ds_vertical.engine.assembly import StepParts
from ds_vertical.engine.self_check.check import generators_kept, put_state_back
from ds_vertical.engine.self_check.diagnosis import Diagnosis, EvaluationDifference, SelfCheckError
from ds_vertical.engine.self_check.digests import Digest, differing, digests_of, largest_distance
from ds_vertical.engine.self_check.first_step import NUM_MICRO_BATCHES, FurtherChecks
from ds_vertical.interrupts import Changed
from ds_vertical.model.micro_batch import Body
from ds_vertical.model.state.snapshot import Snapshot
from ds_vertical.model.state.survey import survey
from ds_vertical.model.stubs import Coroutine
from ds_vertical.model.thread_state import preserved

Evaluate = Callable[[Sequence[Body]], list[Any]]  # results of forwards in layer-major order
MOST_MODES: Final = 8  # of the modules, in which first evaluations are checked
_IN_PARTS: Final = (
    "vertical_schedule.self_check: this evaluation's code does not call the model, but parts of it, so the model's inputs are"
    " not known, and the check cannot run; call engine(...), or the model that the trainer hands over"
)


class EvaluationCheck:
    """Checks the first evaluations of one engine, and others whenever further state has become known of.

    A caller hands it `whole`, which evaluates micro-batches with all of the user's code, or `alone`, which evaluates the
    model's calls.
    """

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self._further = FurtherChecks(parts, "evaluations")
        self._checked: set[str] = set()  # paths of state that the last check of whole evaluations has seen
        self._modes: set[int] = set()  # of all modules, in which the first evaluation has been
        self._calls: list[Body] = []  # see [Note: the model alone]
        self._is_open = False  # behind the evaluation under way calls are to be noted, or checked; the same on all ranks

    @property
    def awaits_calls(self) -> bool:
        """Whether the next micro-batch of a trainer's evaluation is to run by itself: see [Note: the model alone]."""
        return len(self._calls) < NUM_MICRO_BATCHES and self._is_new

    @property
    def _is_new(self) -> bool:
        """Whether an evaluation of several micro-batches would be the first one, in these modes of the modules."""
        parts, vertical = self._parts, self._parts.vertical
        if vertical.self_check is False or vertical.order == "horizontal" or parts.engine.gradient_accumulation_steps() == 1:
            return False
        return len(self._modes) < MOST_MODES and _modes_of(parts.module) not in self._modes

    def run(self, bodies: Sequence[Body], whole: Evaluate, alone: Evaluate) -> None:
        """Ahead of an evaluation of these micro-batches, or of its next run where it starts over. Collective. Modules hold
        afterwards what they held before. Raises SelfCheckError on every rank."""
        if self._parts.vertical.self_check is False:
            return
        own = _alone(bodies)
        may_be_first = (len(bodies) > 1 or not own) and self._is_new
        told = ranks.all_gathered((may_be_first, len(bodies), len(own), len(self._calls)))
        is_new, numbers, of_own, noted = (list(each) for each in zip(*told, strict=True))
        knows = min(of_own) > 0  # the calls of this evaluation, on all ranks
        self._is_open = any(is_new) and not knows and max(noted) < NUM_MICRO_BATCHES
        if max(numbers) < NUM_MICRO_BATCHES:
            return  # on all ranks
        if not self._further.is_due(self._checked):
            if not any(is_new) or not _are_enough(of_own if knows else noted):
                return
            self._check(own if knows else self._calls, alone)
            if knows and not any(body.functions for body in bodies):
                self._checked |= self._parts.state.unsure  # no other code than the model's could read it
            if not self._further.is_due(self._checked):  # by what the check has just learned
                return
        self._check(bodies[:NUM_MICRO_BATCHES], whole)
        self._further.note_agreed()
        self._checked |= self._parts.state.unsure

    def run_behind(self, bodies: Sequence[Body], alone: Evaluate) -> None:
        """Behind an evaluation of these micro-batches, whose results nobody has yet: notes the model's calls, or checks them
        at once. Collective. Raises as `run` does."""
        if not self._is_open:
            return
        self._is_open = False
        calls = _alone(bodies)
        told = ranks.all_gathered((len(bodies), len(calls)))
        if min(number for _, number in told) == 0:
            self._give_up()
        elif max(number for number, _ in told) < NUM_MICRO_BATCHES:
            self._calls += calls
        else:
            self._check(calls, alone)

    def _give_up(self) -> None:
        with self._agreed():
            if self._parts.vertical.self_check:
                raise SelfCheckError(f"{_IN_PARTS}, or write self_check: null, which evaluates without it")
        self._modes.add(_modes_of(self._parts.module))
        accelerator.log(f"ds_vertical: warning: evaluated without a check. {_IN_PARTS}")

    def _check(self, bodies: Sequence[Body], evaluate: Evaluate) -> None:
        """Raises SelfCheckError, on every rank, where a rank's micro-batches have other results in the schedule's order."""
        told = [_digested(body, index) for index, body in enumerate(bodies)]
        took, left_out, error = self._compared(told, evaluate)
        said = f"they {'agree' if error is None else 'differ'}{left_out if error is None else ''}"
        accelerator.log(f"ds_vertical: self_check: {NUM_MICRO_BATCHES} micro-batches of an evaluation, {took}: {said}")
        with self._agreed():
            if error is not None:
                raise error
        self._modes.add(_modes_of(self._parts.module))
        self._calls, self._is_open = [], False

    def _agreed(self) -> contextlib.AbstractContextManager[object]:
        return self._parts.optimizer.live.agreed("self_check")

    def _compared(self, bodies: Sequence[Body], evaluate: Evaluate) -> tuple[str, str, SelfCheckError | None]:
        """How long both orders took, what could not be compared, and what is wrong."""
        parts = self._parts
        functions = [function for body in bodies for function in body.functions]
        blocks = [block.module for block in parts.layers.blocks]
        with self._agreed():
            undo = partial(put_state_back, Snapshot(*survey(parts.module, blocks, functions)[:2]))
        with preserved(), generators_kept(), Changed(partial(undo, refuse=False)):
            first = self._both(bodies, evaluate, undo)
            took = f"{first.seconds[1]:.1f} s in stock's order, {first.seconds[0]:.1f} s in the schedule's"
            if not any(ranks.all_gathered(first.differ)):
                return took, _told(first.unread), None
            noted = _Outputs(blocks)
            again = self._both(bodies, partial(noted.of_pass, evaluate), undo)
        found, left_out = _judged(first, again)
        if found is None:
            return took, _told(first.unread + left_out), None
        diagnosis = Diagnosis(parts.layers, parts.vertical.order, parts.state)
        return took, "", diagnosis.of_evaluation(replace(found, output=noted.first_difference(found.micro_batch)))

    def _both(self, bodies: Sequence[Body], evaluate: Evaluate, undo: Callable[[], None]) -> _Both:
        """What both orders compute. All ranks run as many passes: one with a single micro-batch runs that again."""
        start = time.perf_counter()
        together = evaluate(bodies)  # first: it learns of the state
        with self._agreed():
            undo()
        middle = time.perf_counter()
        apart = [evaluate([bodies[index % len(bodies)]])[0] for index in range(NUM_MICRO_BATCHES)]
        with self._agreed():
            undo()
        return _Both(together, apart[: len(bodies)], (middle - start, time.perf_counter() - middle))


@dataclass(frozen=True)
class _Both:
    """Digests of each micro-batch's result in layer-major order (`together`) and in stock's (`apart`), and the seconds of
    both."""

    together: list[list[Digest]]
    apart: list[list[Digest]]
    seconds: tuple[float, float]

    @property
    def differ(self) -> bool:
        """Whether a result differs."""
        return any(map(differing, self.together, self.apart))

    @property
    def unread(self) -> list[str]:
        """The tensors that nobody can read."""
        return [
            f"tensor {index} of micro-batch {number}, which cannot be read"
            for number, digests in enumerate(self.apart)
            for index, each in enumerate(digests)
            if each.bits is None
        ]


class _Outputs:
    """What blocks have returned in some passes: digests by micro-batch and block, of each pass by itself."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._blocks = blocks
        self._passes: list[dict[tuple[int, int], list[Digest]]] = []

    def of_pass(self, evaluate: Evaluate, bodies: Sequence[Body]) -> list[object]:
        """As `evaluate`, in a pass that is noted."""
        self._passes.append({})
        with contextlib.ExitStack() as hooks:  # no longer: what puts state back would take them off
            for number, block in enumerate(self._blocks):
                hooks.callback(block.register_forward_hook(partial(self._note, number)).remove)
            return evaluate(bodies)

    def _note(self, block: int, _module: nn.Module, _args: object, output: object) -> None:
        current = getcurrent()
        if isinstance(current, Coroutine):
            self._passes[-1][current.micro_batch.index, block] = digests_of(output)

    def first_difference(self, micro_batch: int) -> tuple[int, int] | None:
        """The first block whose output for a micro-batch differs between the first pass, of all of them, and its own, and which
        of its tensors does; None: no block's."""
        apart = self._passes[1 + micro_batch]
        for (_, block), plain in sorted(apart.items()):
            index, _ = largest_distance(self._passes[0].get((micro_batch, block), []), plain)
            if index >= 0:
                return block, index
        return None


def _judged(first: _Both, again: _Both) -> tuple[EvaluationDifference | None, list[str]]:
    """What is wrong, and what has been left out: see [Note: a second look]."""
    left_out: list[str] = []
    for number, (ours, plain, other) in enumerate(zip(first.together, first.apart, again.apart, strict=True)):
        differ, unsteady = differing(ours, plain), differing(plain, other)
        wrong = {index: distance for index, distance in differ.items() if index not in unsteady}
        is_blind = bool(differ) and all(index in differ for index, each in enumerate(plain) if each.projections)
        if wrong or is_blind:
            index, distance = max((wrong or differ).items(), key=lambda pair: pair[1])
            return EvaluationDifference(number, index, distance, is_unsteady=not wrong), []
        left_out += [f"tensor {index} of micro-batch {number}, another one in each run" for index in differ]
    return None, left_out


def _told(left_out: Sequence[str]) -> str:
    return f"; not compared: {'; '.join(left_out)}" if left_out else ""


def _alone(bodies: Sequence[Body]) -> list[Body]:
    """The model's calls by the first micro-batches, where all of these are known."""
    found: list[Body] = []
    for body in bodies[:NUM_MICRO_BATCHES]:
        run = body.run if body.alone is None else body.alone()
        if run is None:
            return []
        found.append(replace(body, run=run, functions=(), alone=None))
    return found


def _are_enough(numbers: Sequence[int]) -> bool:
    """Of the calls that ranks know: there are two to be compared on one of them, and all take part."""
    return min(numbers) > 0 and max(numbers) >= NUM_MICRO_BATCHES


def _digested(body: Body, index: int) -> Body:
    """A body that returns digests of its result, which may be too large to be kept."""
    seed = index if body.seed is None else body.seed
    return replace(body, run=lambda: digests_of(body.run()), seed=seed)


def _modes_of(model: nn.Module) -> int:
    return hash(tuple((id(module), module.training) for module in model.modules()))
