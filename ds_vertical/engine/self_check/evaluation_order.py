"""Evaluations: the passes over their micro-batches, all of them layer by layer, or one micro-batch after the other.

[Note: unchecked models] A model may keep what its blocks read where the engine does not look: in an `argparse.Namespace`, in an
attribute of a tensor. In layer-major order blocks find another micro-batch's values there. The check ahead of a training step
finds that, and an evaluation may come before it. So until a check has agreed evaluations run as stock does: one micro-batch
after the other, each with the random numbers that the one before has left. Each then fetches all layers. No such forward runs
again since it has changed state (`forward_state`, [Note: one after the other]). So what it counts where the engine does not
look is counted once.

[Note: ranks with fewer] There a rank that has run its last micro-batch still takes part in the passes of the others: it fetches
its share of the layers, and computes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ds_vertical.compat import accelerator
from ds_vertical.distributed import ranks
from ds_vertical.engine.assembly import StepParts
from ds_vertical.engine.module_hooks import suspended_hooks
from ds_vertical.engine.self_check.evaluation import EvaluationCheck
from ds_vertical.engine.self_check.first_step import FirstStepCheck
from ds_vertical.io.openmp_wait import WATCH
from ds_vertical.model import batch as micro
from ds_vertical.model.micro_batch import Body
from ds_vertical.model.state.restart import LearnedCalls, until_known
from ds_vertical.schedule.passes import build_evaluation


class EvaluationPasses:
    """Those of one engine. `first_step`: knows whether its model has been checked."""

    def __init__(self, parts: StepParts, first_step: FirstStepCheck) -> None:
        self._parts = parts
        self._first_step = first_step
        self._check = EvaluationCheck(parts)
        self._calls = LearnedCalls()
        self._num_seeded = 0  # evaluations whose micro-batches had seeds
        self._told: set[str] = set()

    def run(self, bodies: Sequence[Body]) -> list[Any]:
        """Run forwards without training; returns what each returned. In layer-major order each has a seed of its own, where
        there are several. Collective."""
        with ranks.collective_section("evaluate"):
            in_turn, most = self._order(len(bodies))
            if in_turn:
                return self._passes([bodies[index : index + 1] for index in range(most)], 1, self._calls)
            if len(bodies) > 1:
                self._num_seeded += 1
                seeds = _seeds(len(bodies), self._num_seeded)
                bodies = [replace(body, seed=seed) for body, seed in zip(bodies, seeds, strict=True)]
            return self._passes([bodies], most, self._calls)

    def run_one(self, body: Body) -> Any:
        """Run one forward without training; returns what it returned. Collective."""
        with ranks.collective_section("evaluate"):
            return self._passes([[body]], 1, LearnedCalls())[0]

    def _order(self, number: int) -> tuple[bool, int]:
        """Whether micro-batches run one after the other, on all ranks alike, and how many of them a rank has at most: see
        [Note: unchecked models]. `number`: this rank's. Collective, unless the JSON leaves nothing to find out."""
        vertical = self._parts.vertical
        if vertical.order == "vertical" and vertical.self_check is False:
            return False, number
        doubt = self._first_step.doubt
        every = ranks.numbers_of_all([int(doubt is not None), number])
        most = max(each for _, each in every)
        if vertical.order == "horizontal":
            return True, most
        in_turn = most > 1 and any(doubts for doubts, _ in every)
        if in_turn and doubt is not None and doubt not in self._told:
            self._told.add(doubt)
            accelerator.log(
                "ds_vertical: evaluations run one micro-batch after the other, as in stock, and each of these reads all layers,"
                f' {doubt}; where you know that layer-major order is right for this model, write "self_check": false in'
                " vertical_schedule"
            )
        return in_turn, most

    def _passes(self, rounds: Sequence[Sequence[Body]], most: int, calls: LearnedCalls) -> list[object]:
        """One pass for the forwards of each round; what each returned. `most`: of the rank that has most in a round. `calls`:
        of the model by each forward."""
        parts = self._parts
        with parts.optimizer.live.agreed("evaluation"):
            parts.optimizer.flush()
        with (
            parts.optimizer.calls.running(),
            WATCH.watching(),
            suspended_hooks(parts.engine, parts.layers),
            parts.optimizer.live.schedule_running(),
        ):
            return [result for bodies in rounds for result in self._evaluated(bodies, most, calls)]

    def _evaluated(self, bodies: Sequence[Body], most: int, calls: LearnedCalls) -> list[object]:
        parts, window = self._parts, self._parts.vertical.prefetch_layers

        def run(some: Sequence[Body]) -> list[object]:
            shape = parts.layers.num_layers, max(1, len(some))  # see [Note: ranks with fewer]
            outside, standing = parts.layers.outside, parts.standing_in_evaluation()
            sweep = build_evaluation(*shape, window=window, calls=calls.number, outside=outside, standing=standing)
            return parts.runner.evaluate(sweep, some)

        def learned(some: Sequence[Body]) -> list[object]:
            return until_known(partial(run, some), parts.start_over, calls=calls)

        def check() -> None:
            parts.start_over()
            self._check.run(bodies, most, learned)

        self._check.run(bodies, most, learned)
        return until_known(partial(run, bodies), check, calls=calls)


def _seeds(num_micro_batches: int, number: int) -> Sequence[int]:
    """Forwards that take turns cannot share the caller's random stream: each has its own, another one in each evaluation.
    What the caller draws afterwards is what it would have drawn. `number`: of such evaluations, this one included."""
    base, rank = torch.initial_seed(), ranks.rank()
    return [micro.stream_seed(base, -number, index, rank) for index in range(num_micro_batches)]
