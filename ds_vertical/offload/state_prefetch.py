"""The memory slots of the optimizer's pipeline, and the steps whose state it reads before they can be issued.

[Note: reading ahead] Where the state of a step lies is known long before its gradient is there. So the schedule's handlers say
which step comes next, and slots that would lie idle take its state from the SSD meanwhile. Nothing but time depends on it: the
state of a step that was not expected, or that is another than was said, is read when the step is submitted.

[Note: further slots] What is stepped behind the norm is told at the turn from forward to backward, all of it. For that state
there are slots besides those that the pipeline needs, as many as the memory budget has room for. Their memory is taken when a
slot is first written to. The pipeline takes the first slot that is free, so that slots behind it take no memory while a few are
enough. `ReadStage.allow` says how many may be used: where they become fewer, the pipeline's thread gives the others' memory
back.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ds_vertical.io import host
from ds_vertical.io.aio import Transfer, complete
from ds_vertical.io.extents import Extent


class Slot:
    """Memory of what one part's step reads, cut into as many pieces as there are extents.

    `data`: 1-d uint8. `number`: among the pipeline's slots, those in use all the time first. `writes`: of the last job's state,
    out of the slot; `beside`: that job wrote beside what is current.
    """

    def __init__(self, data: torch.Tensor, number: int) -> None:
        self.data = data
        self.number = number
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

    def wait_writes(self) -> None:
        """Complete its writes. Raises DiskError."""
        for write in self.writes:
            write.wait()
        self.writes = []


class FreeSlots:
    """Slots that no job has, of which writes may be under way. Only the pipeline's thread calls `take`, `wait_for_one` and
    `rest`; the lock of the pipeline is held, but in `wait_for_one`."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._complete = [slot.number for slot in slots]  # a heap: their writes are complete
        self._written: deque[Slot] = deque()  # the one that has been free longest first
        self._numbers = set(self._complete)
        self._holding: set[int] = set()  # that have been taken since they last gave their memory back

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, slot: Slot) -> bool:
        return slot.number in self._numbers

    def append(self, slot: Slot) -> None:
        """No job has the slot any more. Twice is harmless."""
        if slot not in self:
            self._written.append(slot)
            self._numbers.add(slot.number)

    def has_below(self, most: int) -> bool:
        """Whether one of the first `most` slots is free."""
        return any(number < most for number in self._complete[:1]) or any(slot.number < most for slot in self._written)

    def wait_for_one(self, most: int) -> None:
        """Complete writes, those of the slot that has been free longest first, until one of the first `most` has none
        left. Raises DiskError."""
        while self._written and not any(number < most for number in self._complete[:1]):
            self._written[0].wait_writes()
            self._note_written()

    def take(self, most: int) -> Slot | None:
        """The first of the free slots whose writes are complete, if it is one of the first `most`."""
        self._note_written()
        if not self._complete or self._complete[0] >= most:
            return None
        number = heapq.heappop(self._complete)
        self._numbers.discard(number)
        self._holding.add(number)
        return self._slots[number]

    def rest(self, most: int) -> bool:
        """Give the memory of the slots behind the first `most` back, as far as they are free and their writes complete. Returns
        whether none of them has any."""
        self._note_written()
        behind = {number for number in self._holding if number >= most}
        for number in behind.intersection(self._complete):
            data = self._slots[number].data
            host.rest_pages(data.data_ptr(), data.numel())
            self._holding.discard(number)
        return self._holding.isdisjoint(behind)

    def _note_written(self) -> None:
        while self._written and self._written[0].free:
            slot = self._written[0]
            slot.wait_writes()
            heapq.heappush(self._complete, slot.number)
            self._written.popleft()


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

    def __init__(self, free: FreeSlots) -> None:
        self._free = free
        self._entries: deque[Prefetch] = deque()

    def add(self, jobs: Iterable[PrefetchJob]) -> None:
        """These jobs come after those that are expected already; a job of these, and one without state on SSD, is left out."""
        known = {entry.coming.what: entry.coming for entry in self._entries}
        self._entries.extend(Prefetch(job) for job in jobs if job.extents and known.get(job.what) != job)

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
        paths = {target.path for target in targets}
        near = (extent for entry in self.begun() for extent in entry.extents if extent.path in paths)
        if any(extent.overlaps(target) for extent in near for target in targets):
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
