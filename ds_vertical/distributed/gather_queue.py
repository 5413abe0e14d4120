"""Gathers of units over the ranks, in the order in which the units are fetched.

[Note: gathers in flight] A gather can begin once the rank's own shards of the unit are in memory. The unit's first use waits
for the gather's end. Between the two the rank computes. So ahead of each event of a schedule the queue looks whether the shards
of the next unit have come. If they have, it issues that gather.

Shards come at another moment on each rank, while all ranks must issue their collectives in one order. So a rank issues gathers
in the order of its fetches, which all ranks share, and in a process group for gathers alone: no other collective that a rank
issues meanwhile can come between them.

With one rank there is no order to keep. On the processor each unit is then there when it is read. Beside a device its copy is
issued as a gather is: as soon as it is read and the device has room.

[Note: gathers ahead of reductions] With several ranks beside a device gathers and reductions share a process group, whose
collectives run in the order in which the host issues them. When shards come must not decide that order: it differs from rank to
rank. So a gather is issued at events of the schedule alone. In the forward, that is where its unit is first used: the device is
then still busy with what the host issued before. In the backward, it is ahead of the reduction of the unit before. An example:
the gather of layer 2, then the reduction of layer 3, then the backward of layer 2. The gather is under way in the backward of
layer 3, and the reduction in that of layer 2. The other way round the backward of layer 2 would wait for both. The host waits
for the shards of layer 2 ahead of the reduction, and not behind it. Where two layers are read ahead, that of layer 1 waits
in the queue meanwhile: the host issues it ahead of the reduction of layer 2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ds_vertical.io.ticket import Ticket
from ds_vertical.types import Unit

T = TypeVar("T")
R = TypeVar("R")


@dataclass(eq=False)
class UnitGather:
    """The gather of a unit.

    `issue` waits for the rank's shards, starts the collective, and returns a function that waits for the collective's end.
    `is_ready` says whether the shards have come. `wait` is what `issue` has returned; None until then.
    """

    unit: Unit
    issue: Callable[[], Callable[[], None]]
    is_ready: Callable[[], bool]
    wait: Callable[[], None] | None = None


class GatherQueue:
    """See [Note: gathers in flight]. `in_order`: there are several ranks. `early`: a gather may be issued before its unit is
    used. `leads`: a gather may be issued ahead of a reduction, see [Note: gathers ahead of reductions].

    `num_issued`: gathers that this rank has issued so far, complete or not. The other ranks can complete those without it.
    """

    def __init__(self, in_order: bool, early: bool, leads: bool = False) -> None:
        self._in_order = in_order
        self._early = early
        self.leads = leads
        self._next: deque[UnitGather] = deque()
        self._in_flight: list[UnitGather] = []
        self._is_issuing = False
        self.num_issued = 0

    def add(self, gather: UnitGather) -> None:
        """Queue the gather of a unit whose fetch has begun."""
        self._next.append(gather)

    def advance(self) -> None:
        """Issue the gathers at the front of the queue whose shards have come. Raises what their reads have failed with."""
        while self._early and self._next and self._next[0].is_ready():
            self._issue_one(self._next[0])

    def lead(self, unit: Unit | None) -> Ticket | None:
        """A reduction is about to be issued, and the next backward is of `unit`: what waits for its shards, and issues its
        gather. None where gathers do not lead, or where no gather of the unit is queued: it is there, or on its way, or not
        fetched yet. The wait raises what reads have failed with."""
        gather = next((each for each in self._next if each.unit == unit), None) if self.leads else None
        return None if gather is None else Ticket(f"fetch {unit}", lambda: self._issue_up_to(gather))

    def beside(self, work: Callable[[T], R]) -> Callable[[T], R]:
        """A function that first issues the gathers whose shards have come, and then does `work` while they are under way."""

        def work_beside(given: T) -> R:
            self.advance()
            return work(given)

        return work_beside

    def complete(self, gather: UnitGather) -> None:
        """Return when the unit's parameters are whole. Gathers that stand before it in the queue are issued first. Raises what
        reads have failed with, those of such units too."""
        self._issue_up_to(gather)
        assert gather.wait is not None
        gather.wait()
        self.forget(gather)

    def settle(self) -> None:
        """Have whole what is fetched: other code is about to gather parameters in the middle of a pass, on all ranks. Whether a
        unit's gather has been issued by then may differ from rank to rank. Called within a gather's own `issue` it does
        nothing."""
        if not self._is_issuing:
            self.issue_all()
            for gather in list(self._in_flight):
                self.complete(gather)

    def issue_all(self) -> None:
        """Issue the gathers of all units fetched. All ranks call this where a pass ends early, so that each has issued the same
        gathers. Raises what reads have failed with."""
        while self._in_order and self._next:
            self._issue_one(self._next[0])

    def forget(self, gather: UnitGather) -> None:
        """Nobody waits for a gather any more. In flight it keeps its memory until it is complete."""
        for queue in (self._next, self._in_flight):
            if gather in queue:
                queue.remove(gather)

    def clear(self) -> None:
        """Forget all gathers."""
        self._next.clear()
        self._in_flight.clear()
        self._is_issuing = False

    def _issue_up_to(self, gather: UnitGather) -> None:
        while gather.wait is None:
            self._issue_one(self._next[0] if self._in_order else gather)

    def _issue_one(self, gather: UnitGather) -> None:
        self._is_issuing = True
        try:
            gather.wait = gather.issue()
        finally:
            self._is_issuing = False
        self.num_issued += 1  # not before: an error ahead of the collective leaves the other ranks alone in it
        self._next.remove(gather)
        self._in_flight.append(gather)
