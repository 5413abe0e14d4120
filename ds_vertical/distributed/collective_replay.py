"""What a rank does whose part of a pass has failed: the rest of what all ranks do together, so that none is left alone in it.

Gathers are issued in the order of the schedule's fetches; reductions and votes come in the order of its events. Both are the
same on all ranks, and end where the ranks decide
together whether the pass counts: a step at its NORM, an evaluation at its end, either where a vote has all leave it. A rank
that fails before goes through the schedule once more, takes part in those that it has not begun, with values that nobody will
use, and raises its error where the others raise that there was one. That takes no longer than the rest of the pass.

Of a step with two halves the first half is decided at its end, since it has no NORM. In the second half the ranks ask each
other at NORM@-1, and again at NORM. A rank that fails between the two goes from where it was to NORM.

Behind its NORM a rank may fail, too: its disk refuses what the optimizer's step writes. So the ranks ask each other once more
at the end of the pass. Else the others would return from a step that this rank raised from. The only collectives there are
those that make copies for the next step; the rank takes part in these in the same way.

An error with a true `ends_run` is of a collective that the others are in: the rank takes part in none any more. It raises at
once, and tells the failure watch, which ends the others.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from ds_vertical.io.ticket import Ticket
from ds_vertical.schedule.events import Event, Op, Schedule, Unit
from ds_vertical.schedule.executor import Executor, Handler
from ds_vertical.schedule.levels import Arrival, arrivals


class Others(Protocol):
    """The ranks of the run, this one among them."""

    @property
    def num_gathers(self) -> int:
        """Gathers of units that this rank has issued, in the order in which it fetched them."""
        ...

    @property
    def gathers_lead(self) -> bool:
        """Whether each rank issues the gather of the next backward's unit ahead of a reduction: see `gather_queue`, [Note:
        gathers ahead of reductions]."""
        ...

    @property
    def num_reductions(self) -> int:
        """Of gradients, likewise: a unit has `reductions_of` such."""
        ...

    @property
    def num_votes(self) -> int:
        """On whether the pass is left, behind each layer, likewise."""
        ...

    def gather(self, unit: Unit, arrival: Arrival) -> None:
        """Take part in a gather with values that nobody will use. `arrival`: over which levels it goes."""
        ...

    def renew_copy(self, unit: Unit) -> None:
        """Take part in what makes the node's copy of a unit for the next step."""
        ...

    def is_left(self, unit: Unit) -> bool:
        """Whether the step of a unit is left to the next schedule, where steps may be."""
        ...

    def reductions_of(self, unit: Unit) -> int:
        """Into how many collectives the reduction of a unit's gradients is cut, on all ranks alike."""
        ...

    def reduce(self, unit: Unit, number: int) -> None:
        """Take part in one of them with zeros."""
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
        self._num_before = 0  # of NORM@-1, behind which there are more of them
        self._leaves = False  # all ranks have voted to leave the pass
        self._over = False  # the ranks leave the pass together, or all raise

    @contextlib.contextmanager
    def deciding(self, norm: Event) -> Iterator[None]:
        """Within the block all ranks raise, or none does. What one rank does behind it, `conclude` asks about; behind NORM@-1,
        the schedule's own NORM."""
        self._decided = self._over = True
        yield
        self._num_before += norm.step_offset < 0
        self._decided = norm.step_offset == 0
        self._over = False

    def leave(self) -> None:
        """All ranks have voted to leave the pass: no vote is left, and no gather of what is fetched later."""
        self._leaves = True

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
        if self._over or getattr(error, "ends_run", False):
            return
        try:
            if self._decided:
                self._renew_copies(schedule)
            else:
                self._go(schedule, overlap)
            self._decided = self._over = True
            self._others.agree(error)
        except Exception as further:
            if further is error:
                return
            if getattr(error, "starts_over", False):
                raise further from error
            error.add_note(f"the other ranks may not know of it: {type(further).__name__}: {further}")

    def _renew_copies(self, schedule: Schedule) -> None:
        """Behind the decision: all fetches of the pass are over."""
        fetches = sum(event.op is Op.FETCH and not event.ahead for event in schedule.events)
        begun = self._counts()["gathers"] - self._before["gathers"] - fetches
        spreads = (event for event in schedule.events if event.op is Op.SPREAD and event.ahead)
        values = {event.layer for event in schedule.events if event.op is Op.MAKE}  # for the next schedule, whatever is left
        left = schedule.delayed and not values
        made = [event for event in spreads if not (left and self._others.is_left(_unit(event)))]
        for event in made[begun:]:
            self._others.renew_copy(_unit(event))

    def _counts(self) -> Counter[str]:
        others = self._others
        return Counter(gathers=others.num_gathers, reductions=others.num_reductions, votes=others.num_votes)

    def _go(self, schedule: Schedule, overlap: bool) -> None:
        done = self._counts()
        done.subtract(self._before)
        done["norms before"] = self._num_before
        rest = _Rest(self._others, done, self._only_gathers, self._leaves, schedule)
        try:
            Executor(rest.handlers(), overlap=overlap).run(schedule)
        except _ReachedEndError:
            return


class _Rest:
    """The collectives of a pass that this rank has not begun. `done`: how many of each kind it has begun. `leaves`: all ranks
    leave at the last vote of those. `schedule`: of the pass."""

    def __init__(self, others: Others, done: Counter[str], only_gathers: bool, leaves: bool, schedule: Schedule) -> None:
        self._others = others
        self._done = done
        self._only_gathers = only_gathers
        self._leaves = leaves
        self._coming = arrivals(schedule.events, levels=schedule.copied is not None)
        self._next_backward = schedule.next_backward
        # whose gather this rank has not issued; the others do so where they use it, or before. None: of a copy that is made
        self._fetched: list[tuple[Unit, Arrival | None]] = []

    def handlers(self) -> dict[Op, Handler]:
        own = {Op.FETCH: self.fetch, Op.SPREAD: self.spread, Op.REDUCE: self.reduce, Op.RELEASE: self.vote, Op.NORM: self.reach}
        nothing: dict[Op, Handler] = dict.fromkeys(Op, lambda _: None)
        return nothing | own

    def fetch(self, event: Event) -> Ticket | None:
        if event.ahead:
            return None
        unit = _unit(event)
        arrival = self._coming[unit].popleft()
        if not self._is_done("gathers"):  # in the order of the fetches, as gathers are issued
            self._fetched.append((unit, arrival))
        return None if arrival.spreads else self.spread(event)

    def spread(self, event: Event) -> Ticket | None:
        unit = _unit(event)
        if event.ahead:
            if not self._is_done("gathers"):
                self._fetched.append((unit, None))
            self._gather(unit)
            return None
        return Ticket(f"fetch {unit}", lambda: self._gather(unit))

    def reduce(self, event: Event) -> None:
        if self._only_gathers:
            return
        if self._others.gathers_lead and event in self._next_backward:
            self._gather(self._next_backward[event])
        for number in range(self._others.reductions_of(_unit(event))):
            if not self._is_done("reductions"):
                self._others.reduce(_unit(event), number)

    def vote(self, _: Event) -> None:
        if self._only_gathers:
            return
        is_last = self._done["votes"] == 1
        if (self._leaves and is_last) if self._is_done("votes") else self._others.vote():
            self._end()  # the others issue what they have fetched before they leave

    def reach(self, norm: Event) -> None:
        """The ranks decide here, unless this one was there when they did. What they have fetched they have issued."""
        if not norm.step_offset or not self._is_done("norms before"):
            self._end()

    def _end(self) -> None:
        while self._fetched:
            self._gather(self._fetched[-1][0])
        raise _ReachedEndError

    def _is_done(self, kind: str) -> bool:
        self._done[kind] -= 1
        return self._done[kind] >= 0

    def _gather(self, unit: Unit) -> None:
        """Of all units up to this one, in the order of their fetches."""
        while any(unit == fetched for fetched, _ in self._fetched):
            first, arrival = self._fetched.pop(0)
            if arrival is None:
                self._others.renew_copy(first)
            else:
                self._others.gather(first, arrival)


def _unit(event: Event) -> Unit:
    assert event.layer is not None
    return event.layer
