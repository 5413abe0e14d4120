"""Gathers of units over the ranks, in the order in which the units are fetched.

[Note: gathers in flight] A gather can begin once the rank's own shards are in memory, and the unit's first use waits for its
end. Between the two the rank computes. So ahead of each event of a schedule the queue looks whether the shards of the next unit
have come, and issues that gather. When they come differs from rank to rank, while the ranks' collectives must be issued in one
order. So gathers are issued in the order of the fetches and in a process group of their own: whatever else a rank issues
meanwhile cannot come between.

With one rank there is nothing to keep in order, and each unit goes to the device when it is used. So it does on a device that
computes while the host goes on: there the gather is issued while the device is busy with what was issued before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


@dataclass(eq=False)
class UnitGather:
    """One unit's. `issue`: waits for its shards, starts the collective, and returns what waits for that; `is_ready`: whether
    the shards have come. `wait`: of a gather that has been issued."""

    issue: Callable[[], Callable[[], None]]
    is_ready: Callable[[], bool]
    wait: Callable[[], None] | None = None


class GatherQueue:
    """See [Note: gathers in flight]. `in_order`: there are several ranks; `early`: a gather may be issued before its unit is
    used.

    `num_issued`: gathers so far. It counts what has been issued, whoever waits for it: the other ranks can complete that.
    """

    def __init__(self, in_order: bool, early: bool) -> None:
        self._in_order = in_order
        self._early = early
        self._next: deque[UnitGather] = deque()
        self.num_issued = 0

    def add(self, gather: UnitGather) -> None:
        """A unit has been fetched."""
        self._next.append(gather)

    def advance(self) -> None:
        """Issue the gathers whose turn it is and whose shards have come. Raises what their reads have failed with."""
        while self._early and self._next and self._next[0].is_ready():
            self._issue_one(self._next[0])

    def beside(self, work: Callable[[T], R]) -> Callable[[T], R]:
        """`work`, beside which the gathers are under way that can be issued ahead of it."""

        def work_beside(given: T) -> R:
            self.advance()
            return work(given)

        return work_beside

    def complete(self, gather: UnitGather) -> None:
        """Return when the unit's parameters are whole. Raises what reads have failed with: another unit's too, whose turn is
        before."""
        while gather.wait is None:
            self._issue_one(self._next[0] if self._in_order else gather)
        gather.wait()

    def issue_all(self) -> None:
        """The pass ends here, on all ranks: so that each has issued the same gathers, issue those of all units fetched. Raises
        what reads have failed with."""
        while self._in_order and self._next:
            self._issue_one(self._next[0])

    def clear(self) -> None:
        """Forget the units. A gather in flight keeps its memory until it is complete."""
        self._next.clear()

    def _issue_one(self, gather: UnitGather) -> None:
        gather.wait = gather.issue()
        self.num_issued += 1  # not before: an error ahead of the collective leaves the other ranks alone in it
        self._next.remove(gather)
