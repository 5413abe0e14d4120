"""The memory slots of the optimizer's pipeline, and the steps whose state it reads before they can be issued.

[Note: reading ahead] Where the state of a step lies is known long before its gradient is there. So the schedule's handlers say
which step comes next, and slots that would lie idle take its state from the SSD meanwhile. Nothing but time depends on it: the
state of a step that was not expected, or that is another than was said, is read when the step is submitted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ds_vertical.io.aio import Transfer, complete
from ds_vertical.io.extents import Extent


class Slot:
    """Memory of what one part's step reads, cut into as many pieces as there are extents.

    `data`: 1-d uint8. `writes`: of the last job's state, out of the slot; `beside`: that job wrote beside what is current.
    """

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self.writes: list[Transfer] = []
        self.beside = True

    def views(self, extents: Sequence[Extent]) -> list[torch.Tensor]:
        """One 1-d uint8 tensor per extent, one after the other from the start of the memory, each ahead of its spare bytes."""
        views, start = [], 0
        for extent in extents:
            views.append(self.data.narrow(0, start, extent.num_bytes))
            start += extent.num_bytes + extent.spare
        return views

    @property
    def free(self) -> bool:
        """Whether its writes are complete."""
        return all(write.done for write in self.writes)


@dataclass(frozen=True)
class PrefetchJob:
    """A job to come: its name, and where its state is."""

    what: str
    extents: Sequence[Extent]


@dataclass(eq=False)
class Prefetch:
    """`slot`: where the state of the job to come is being read to, by `reads`; None: not begun."""

    coming: PrefetchJob
    slot: Slot | None = None
    reads: list[Transfer] = field(default_factory=list)

    @property
    def extents(self) -> Sequence[Extent]:
        """Where the state of the job is."""
        return self.coming.extents


class PrefetchQueue:
    """The jobs to come, in order. Slots that it no longer needs go to `free`. Not thread-safe: the pipeline's lock is held."""

    def __init__(self, free: deque[Slot]) -> None:
        self._free = free
        self._entries: deque[Prefetch] = deque()

    def add(self, jobs: Iterable[PrefetchJob]) -> None:
        """These jobs come after those that are expected already; jobs without state on SSD are left out."""
        self._entries.extend(Prefetch(job) for job in jobs if job.extents)

    def begun(self) -> Iterator[Prefetch]:
        """The expected jobs whose state is being read, or has been."""
        return (entry for entry in self._entries if entry.slot is not None)

    def next(self) -> Prefetch | None:
        """The first that nothing has been read of."""
        return next((entry for entry in self._entries if entry.slot is None), None)

    def claim(self, job: PrefetchJob) -> Prefetch | None:
        """What was expected of this job, which is no longer to come; what was to come ahead of it is forgotten."""
        found = next((entry for entry in self._entries if entry.coming == job), None)
        if found is not None:
            while (entry := self._entries.popleft()) is not found:
                self._give_up(entry)
        return found

    def forget(self, targets: Sequence[Extent]) -> None:
        """Bytes are about to be written: forget all if any of them was read."""
        if any(extent.overlaps(target) for entry in self.begun() for extent in entry.extents for target in targets):
            self.clear()

    def give_back_last(self) -> bool:
        """Free the slot of the expected job that is furthest off, for a submitted one. Returns whether there was any."""
        for entry in reversed(self._entries):
            if entry.slot is not None:
                self._give_up(entry)
                return True
        return False

    def clear(self) -> None:
        """Nothing is expected any more: complete the reads, and free their slots."""
        while self._entries:
            self._give_up(self._entries[0])
            self._entries.popleft()  # not before: an interrupted wait must not forget a slot

    def _give_up(self, entry: Prefetch) -> None:
        for read in entry.reads:  # into memory of ours: complete, whatever came of it
            complete(read)
        slot, entry.slot, entry.reads = entry.slot, None, []
        if slot is not None:
            self._free.append(slot)
