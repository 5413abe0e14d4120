"""What a rank does whose part of a pass has failed: the rest of what all ranks do together, so that none is left alone in it.

Gathers, reductions and votes come in the order of the schedule's events, the same on all ranks, and end where the ranks decide
together whether the pass counts: a step at its NORM, an evaluation at its end, either where a vote has all leave it. A rank
that fails before goes through the schedule once more, takes part in those that it has not begun, with values that nobody will
use, and raises its error where the others raise that there was one. That takes no longer than the rest of the pass.

Behind its NORM a step has no collective, yet a rank may fail there: its disk refuses what the optimizer's step writes. So the
ranks ask each other once more at the end of the pass. Else the others would return from a step that this rank raised from.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from ds_vertical.io.ticket import Ticket
from ds_vertical.schedule.events import Event, Op, Schedule, Unit
from ds_vertical.schedule.executor import Executor


class Others(Protocol):
    """The ranks of the run, this one among them."""

    @property
    def num_gathers(self) -> int:
        """Gathers of units that this rank has taken part in, or was about to when all were."""
        ...

    @property
    def num_reductions(self) -> int:
        """Of units' gradients, likewise."""
        ...

    @property
    def num_votes(self) -> int:
        """On whether the pass is left, behind each layer, likewise."""
        ...

    def gather(self, unit: Unit) -> None:
        """Take part in a gather with values that nobody will use."""
        ...

    def reduce(self, unit: Unit) -> None:
        """Take part in a reduction with zeros."""
        ...

    def vote(self) -> bool:
        """Take part in a vote: whether all leave the pass."""
        ...

    def agree(self, error: Exception | None) -> None:
        """Raises on all ranks if one of them has an error, its own one here."""
        ...


class _ReachedEndError(Exception):
    """The event at which the ranks decide."""


class CollectiveReplay:
    """Of one pass. `only_gathers`: nothing is reduced or voted on."""

    def __init__(self, others: Others, only_gathers: bool = False) -> None:
        self._others = others
        self._only_gathers = only_gathers
        self._before = self._counts()
        self._decided = False  # no gather, reduction or vote is left, or the ranks are about to decide
        self._over = False  # the ranks leave the pass together, or all raise

    @contextlib.contextmanager
    def deciding(self) -> Iterator[None]:
        """Within the block all ranks raise, or none does. What one rank does behind it, `conclude` asks about."""
        self._decided = self._over = True
        yield
        self._over = False

    def conclude(self) -> None:
        """The end of a pass, or where all leave it: raises on all ranks if one has failed. Called again it does nothing."""
        if self._over:
            return
        self._decided = self._over = True
        self._others.agree(None)

    def accompany(self, schedule: Schedule, overlap: bool, error: Exception) -> None:
        """After `error` go with the others to where they next ask each other. What fails there is noted; it is raised only
        where `error` asks for the pass to start over, which no rank does alone, nor for a reason of its own where all have
        another one."""
        if self._over:
            return
        try:
            if not self._decided:
                self._go(schedule, overlap)
            self._decided = self._over = True
            self._others.agree(error)
        except Exception as further:
            if further is error:
                return
            if getattr(error, "starts_over", False):
                raise further from error
            error.add_note(f"the other ranks may not know of it: {type(further).__name__}: {further}")

    def _counts(self) -> Counter[str]:
        others = self._others
        return Counter(gathers=others.num_gathers, reductions=others.num_reductions, votes=others.num_votes)

    def _go(self, schedule: Schedule, overlap: bool) -> None:
        done = self._counts()
        done.subtract(self._before)

        def is_done(kind: str) -> bool:
            done[kind] -= 1
            return done[kind] >= 0

        def gather(unit: Unit) -> None:
            if not is_done("gathers"):
                self._others.gather(unit)

        def fetch(event: Event) -> Ticket | None:
            unit = _unit(event)
            return None if event.ahead else Ticket(f"fetch {unit}", lambda: gather(unit))

        def reduce(event: Event) -> None:
            if not self._only_gathers and not is_done("reductions"):
                self._others.reduce(_unit(event))

        def vote(_: Event) -> None:
            if not self._only_gathers and not is_done("votes") and self._others.vote():
                raise _ReachedEndError

        def reach(_: Event) -> None:
            raise _ReachedEndError

        handlers = dict.fromkeys(Op, lambda _: None) | {Op.FETCH: fetch, Op.REDUCE: reduce, Op.RELEASE: vote, Op.NORM: reach}
        try:
            Executor(handlers, overlap=overlap).run(schedule)
        except _ReachedEndError:
            return


def _unit(event: Event) -> Unit:
    assert event.layer is not None
    return event.layer
