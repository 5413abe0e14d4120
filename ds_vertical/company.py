"""What a rank does whose part of a pass has failed: the rest of what all ranks do together, so that none is left alone in it.

Gathers and reductions come in the order of the schedule's events, the same on all ranks, and end where the ranks decide
together whether the pass counts: a step at its NORM, an evaluation at its end. A rank that fails before goes through the
schedule once more, takes part in those that it has not begun, with values that nobody will use, and raises its error where
the others raise that there was one. That takes no longer than the rest of the pass.
"""

from __future__ import annotations

from typing import Protocol

from ds_vertical.executor import Executor
from ds_vertical.layers import Unit
from ds_vertical.schedule import Event, Op, Schedule
from ds_vertical.transfer import Ticket


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

    def gather(self, unit: Unit) -> None:
        """Take part in a gather with values that nobody will use."""
        ...

    def reduce(self, unit: Unit) -> None:
        """Take part in a reduction with zeros."""
        ...

    def agree(self, error: Exception | None) -> None:
        """Raises on all ranks if one of them has an error, its own one here."""
        ...


class _Reached(Exception):
    """The event at which the ranks decide."""


class Company:
    """Of one pass. `decided`: the ranks have decided, or are about to."""

    def __init__(self, others: Others) -> None:
        self._others = others
        self._before = others.num_gathers, others.num_reductions
        self.decided = False

    def conclude(self) -> None:
        """The end of a pass that nothing else decides."""
        self.decided = True
        self._others.agree(None)

    def accompany(self, schedule: Schedule, overlap: bool, error: Exception) -> None:
        """Go with the others to where the pass is decided, after `error`. Raises nothing: what fails on the way is noted."""
        if self.decided:
            return
        try:
            self._go(schedule, overlap)
            self.decided = True
            self._others.agree(error)
        except Exception as further:
            if further is not error:
                error.add_note(f"the other ranks may not know of it: {type(further).__name__}: {further}")

    def _go(self, schedule: Schedule, overlap: bool) -> None:
        now = self._others.num_gathers, self._others.num_reductions
        gathers_left, reductions_left = (count - before for count, before in zip(now, self._before, strict=True))  # done

        def gather(unit: Unit) -> None:
            nonlocal gathers_left
            gathers_left -= 1
            if gathers_left < 0:
                self._others.gather(unit)

        def fetch(event: Event) -> Ticket | None:
            unit = _unit(event)
            return None if event.ahead else Ticket(f"fetch {unit}", lambda: gather(unit))

        def reduce(event: Event) -> None:
            nonlocal reductions_left
            reductions_left -= 1
            if reductions_left < 0:
                self._others.reduce(_unit(event))

        def reach(_: Event) -> None:
            raise _Reached

        handlers = dict.fromkeys(Op, lambda _: None) | {Op.FETCH: fetch, Op.REDUCE: reduce, Op.NORM: reach}
        try:
            Executor(handlers, overlap=overlap).run(schedule)
        except _Reached:
            return


def _unit(event: Event) -> Unit:
    assert event.layer is not None and event.layer != "suf"
    return event.layer
