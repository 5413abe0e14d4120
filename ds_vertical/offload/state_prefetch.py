"""What the optimizer's pipeline is made of: jobs, memory slots, writes, a lock, and the steps whose state it reads before they
can be issued.

[Note: reading ahead] Where the state of a step lies is known long before its gradient is there. So the schedule's handlers say
which step comes next, and slots that would lie idle take its state from the SSD meanwhile. Nothing but time depends on it: the
state of a step that was not expected, or that is another than was said, is read when the step is submitted.

[Note: further slots] What is stepped behind the norm is told at the turn from forward to backward, all of it. For that state
there are slots besides those that the pipeline needs, as many as the memory budget has room for. Their memory is taken when a
slot is first written to. The pipeline takes the first slot that is free, so that slots behind it take no memory while a few are
enough. What is told so never takes one of the usual slots: early parts that are taken again behind the norm need them.
`ReadStage.allow` says how many may be used: where they become fewer, the pipeline's thread gives the others' memory back.
`ReadStage.give_memory_back` has it give back the memory of all further slots.

[Note: the lock] Other threads than the pipeline's own, where interrupts come, take the lock itself and no condition, whose
methods are Python's: one that is cut between taking it and saying so keeps it for ever. They wait by a lock of their own.
"""

from __future__ import annotations

import contextlib
import heapq
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

from ds_vertical.interrupts import waiting
from ds_vertical.io import host
from ds_vertical.io.aio import DiskQueue, Transfer, complete
from ds_vertical.io.checksums import Checksums
from ds_vertical.io.extents import Extent, ExtentIndex

_TURN_S: Final = 1.0


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
    `rest`; the lock of the pipeline is held, but in `wait_for_one`. Slots are asked for by numbers: those of a range, of which
    the first is 0 or `least`, the number of usual slots."""

    def __init__(self, slots: Sequence[Slot], least: int) -> None:
        self._slots = slots
        self._least = least
        usual = [slot.number for slot in slots]
        self._usual, self._further = usual[:least], usual[least:]  # heaps: their writes are complete
        self._written: deque[Slot] = deque()  # the one that has been free longest first
        self._numbers = set(usual)
        self._holding: set[int] = set()  # that have been taken since they last gave their memory back

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, slot: Slot) -> bool:
        return slot.number in self._numbers

    def append(self, slot: Slot) -> None:
        """No job has the slot any more. Twice is harmless, unless an interrupt cuts it: see `reset`."""
        if slot not in self:
            self._numbers.add(slot.number)  # first: a slot may be lost until the next reset, and never be there twice
            self._written.append(slot)

    def reset(self) -> None:
        """Nothing is in flight or expected, so all slots are free; an interrupt may have forgotten one."""
        self._numbers = {slot.number for slot in self._slots}
        there = {*self._usual, *self._further, *(slot.number for slot in self._written)}
        self._written.extend(slot for slot in self._slots if slot.number not in there)

    def has(self, numbers: range) -> bool:
        """Whether one of these slots is free."""
        return self._first(numbers) is not None or any(slot.number in numbers for slot in self._written)

    def wait_for_one(self, numbers: range) -> None:
        """Complete writes, those of the slot that has been free longest first, until one of these slots has none left. Raises
        DiskError."""
        while self._written and self._first(numbers) is None:
            self._written[0].wait_writes()
            self._note_written()

    def take(self, numbers: range) -> Slot | None:
        """The first of these slots that is free and whose writes are complete."""
        self._note_written()
        heap = self._first(numbers)
        if heap is None:
            return None
        number = heapq.heappop(heap)
        self._numbers.discard(number)
        self._holding.add(number)
        return self._slots[number]

    def rest(self, most: int) -> bool:
        """Give the memory of the slots behind the first `most` back, as far as they are free and their writes complete. Returns
        whether none of them has any."""
        with contextlib.suppress(OSError):  # the slot stays, and whoever takes it or settles its writes meets what failed
            self._note_written()
        behind = {number for number in self._holding if number >= most}
        for number in behind.intersection(self._further):
            data = self._slots[number].data
            host.rest_pages(data.data_ptr(), data.numel())
            self._holding.discard(number)
        return self._holding.isdisjoint(behind)

    def held_bytes(self) -> int:
        """Bytes of the further slots that may have memory."""
        return sum(self._slots[number].data.numel() for number in self._holding if number >= self._least)

    def _first(self, numbers: range) -> list[int] | None:
        """Of the two heaps, the first whose first slot is one of these."""
        return next((heap for heap in (self._usual, self._further) if heap and heap[0] in numbers), None)

    def _note_written(self) -> None:
        while self._written and self._written[0].free:
            slot = self._written[0]
            slot.wait_writes()
            heapq.heappush(self._usual if slot.number < self._least else self._further, slot.number)
            self._written.popleft()


@dataclass(frozen=True)
class PrefetchJob:
    """A job to come: its name, and where its state is."""

    what: str
    extents: Sequence[Extent]


@dataclass(eq=False)
class Prefetch:
    """`far`: it is stepped behind the norm. `slot`: where the state of the job to come is being read to, by `reads`; None: not
    begun."""

    coming: PrefetchJob
    far: bool = False
    slot: Slot | None = None
    reads: list[Transfer] = field(default_factory=list)

    @property
    def extents(self) -> Sequence[Extent]:
        """Where the state of the job is."""
        return self.coming.extents


class _Told:
    """Jobs to come in the order in which they were told: those of which something was read, then the others."""

    def __init__(self) -> None:
        self.begun: deque[Prefetch] = deque()
        self.coming: deque[Prefetch] = deque()


class PrefetchQueue:
    """The jobs to come, in order: those that come next, then those behind the norm (`far`), all of which were told at once.
    Slots that it no longer needs go to `free`. Not thread-safe: the pipeline's lock is held.

    No call looks at all jobs, but `clear`: there may be thousands.
    """

    def __init__(self, free: FreeSlots) -> None:
        self._free = free
        self._near, self._far = _Told(), _Told()
        self._named: dict[str, list[Prefetch]] = {}
        self._read = ExtentIndex()  # of those that are begun

    def add(self, jobs: Iterable[PrefetchJob], far: bool = False) -> None:
        """These jobs come after those that are expected already; one without state on SSD is left out, and so is one that is
        expected already. Unless `far`, that one comes next too, as long as it is not begun."""
        for job in jobs:
            known = self._find(job)
            if known is None and job.extents:
                entry = Prefetch(job, far)
                self._told(entry).coming.append(entry)
                self._named.setdefault(job.what, []).append(entry)
            elif known is not None and known.far and not far and known.slot is None:
                self._far.coming.remove(known)  # the first of them, but for hints that were wrong
                known.far = False
                self._near.coming.append(known)

    def begun(self) -> Iterator[Prefetch]:
        """The expected jobs whose state is being read, or has been."""
        return (entry for told in (self._near, self._far) for entry in told.begun if entry.slot is not None)

    def expected(self) -> Iterator[Prefetch]:
        """All of them."""
        return (entry for told in (self._near, self._far) for entry in (*told.begun, *told.coming))

    def next(self) -> Prefetch | None:
        """The first that nothing has been read of."""
        coming = self._near.coming or self._far.coming
        return coming[0] if coming else None

    def begin(self, entry: Prefetch, slot: Slot) -> None:
        """The state of `next` is about to be read into a slot."""
        told = self._told(entry)
        entry.slot = slot
        self._read.add(entry.extents)
        told.begun.append(entry)
        told.coming.popleft()

    def claim(self, job: PrefetchJob) -> Prefetch | None:
        """What was expected of this job, which is no longer to come; what was to come ahead of it is forgotten."""
        found = self._find(job)
        if found is not None:
            told = self._told(found)
            while told.begun and (found.slot is None or told.begun[0] is not found):
                self._give_up(told.begun[0])
                self._unname(told.begun.popleft())
            queue = told.begun if found.slot is not None else told.coming
            while queue and (entry := queue.popleft()) is not found:
                self._unname(entry)
            self._read.remove(found.extents if found.slot is not None else ())
            self._unname(found)
        return found

    def forget(self, targets: Sequence[Extent]) -> None:
        """Bytes are about to be written: forget all if any of them was read."""
        if self._read.overlaps(targets):
            self.clear()

    def give_back_last(self) -> bool:
        """Free the slot of the expected job that is furthest off, for a submitted one. Returns whether there was any."""
        for told in (self._far, self._near):
            if told.begun:
                self._give_up(told.begun[-1])
                told.coming.appendleft(told.begun.pop())
                return True
        return False

    def clear(self) -> None:
        """Nothing is expected any more: complete the reads, and free their slots."""
        self._named.clear()  # first: an interrupted wait leaves nothing that could be claimed
        for told in (self._near, self._far):
            while told.begun:
                self._give_up(told.begun[0])
                told.begun.popleft()  # not before: an interrupted wait must not forget a slot
            told.coming.clear()
        self._read.clear()

    def _told(self, entry: Prefetch) -> _Told:
        return self._far if entry.far else self._near

    def _find(self, job: PrefetchJob) -> Prefetch | None:
        return next((entry for entry in self._named.get(job.what, ()) if entry.coming == job), None)

    def _unname(self, entry: Prefetch) -> None:
        named = self._named.get(entry.coming.what, [])
        if entry in named:
            named.remove(entry)
        if not named:
            self._named.pop(entry.coming.what, None)

    def _give_up(self, entry: Prefetch) -> None:
        for read in entry.reads:  # into memory of ours: complete, whatever came of it
            complete(read)
        slot, entry.slot, entry.reads = entry.slot, None, []
        if slot is not None:
            self._free.append(slot)
            self._read.remove(entry.extents)


@dataclass
class StepJob:
    """One part's step. `extents`: its state on SSD (master, moments), none where the state is in memory. `inputs`: what else
    it reads (its gradient). `beside`: it writes beside what is current; see [Note: failures].

    `compute` gets one uint8 tensor per extent, then per input, filled from its file, and changes the state in place.
    """

    what: str
    extents: Sequence[Extent]
    compute: Callable[[Sequence[torch.Tensor]], None]
    outputs: Sequence[Extent] | None = None  # where the state is written; None: where it was read
    inputs: Sequence[Extent] = ()
    beside: bool = False
    started: list[Transfer] = field(default_factory=list)

    @property
    def sources(self) -> Sequence[Extent]:
        """All that the job reads: its state, then the rest."""
        return (*self.extents, *self.inputs)

    @property
    def targets(self) -> Sequence[Extent]:
        """Where the job writes its state."""
        return self.extents if self.outputs is None else self.outputs


class JobGroup:
    """Jobs submitted together; complete when all have been computed (their writes may be under way)."""

    def __init__(self, jobs: Sequence[StepJob], finish: Callable[[], None]) -> None:
        self.left = len(jobs)
        self.finish = finish
        self.error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is left to compute, or will be computed any more."""
        return self.left == 0 or self.error is not None


class ChangeSignal:
    """The lock of a pipeline, and word of each change to the threads that wait for one; see [Note: the lock]."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._condition = threading.Condition(self.lock)  # for the pipeline's thread
        self._turns: list[threading.Lock] = []  # of the other threads that wait

    def tell(self) -> None:
        """Something has changed. The caller holds the lock."""
        self._condition.notify_all()
        while self._turns:
            self._turns.pop().release()

    @waiting
    def wait_until(self, is_so: Callable[[], object]) -> None:
        """Return once `is_so`, which is asked under the lock. From any thread, which an interrupt may cut."""
        while True:
            turn = threading.Lock()
            turn.acquire()
            with self.lock:
                if is_so():
                    return
                self._turns.append(turn)
            turn.acquire(timeout=_TURN_S)  # the thread that was to release it may have been cut

    def wait_on_own_thread(self, is_so: Callable[[], object]) -> None:
        """As `wait_until`, from the pipeline's thread, which holds the lock and which no interrupt reaches."""
        self._condition.wait_for(is_so)


class WriteStage:
    """The writes of computed state, which may not be complete. Only the pipeline's thread calls it."""

    def __init__(self, writer: DiskQueue, checksums: Checksums) -> None:
        self._writer = writer
        self._checksums = checksums
        self._under_way: dict[Path, deque[tuple[Extent, Transfer]]] = {}
        self._index = ExtentIndex()  # of all of these

    @property
    def is_busy(self) -> bool:
        """Whether any write has not been waited for."""
        return bool(self._under_way)

    def start(self, job: StepJob, slot: Slot, views: Sequence[torch.Tensor]) -> None:
        """Start writing the job's state out of `views`, and note its checksums beside that."""
        for extent, view in zip(job.targets, views[: len(job.extents)], strict=True):
            write = self._writer.write(view.data_ptr(), extent.num_bytes, extent.path, extent.offset)
            slot.beside = job.beside
            slot.writes.append(write)
            self._under_way.setdefault(extent.path, deque()).append((extent, write))
            self._index.add((extent,))
        for extent, view in zip(job.targets, views, strict=False):  # beside the writes
            self._checksums.note(extent.path, extent.offset, view.numpy())

    def is_being_written(self, extent: Extent) -> bool:
        """Whether a write of any of these bytes is not complete."""
        return any(not write.done for write in self._of(extent))

    def wait_for(self, extent: Extent) -> None:
        """Complete earlier writes of the bytes about to be read or written: a queue keeps no order."""
        for write in self._of(extent):
            write.wait()
        left = self._under_way.get(extent.path)
        while left and left[0][1].done:
            self._index.remove((left.popleft()[0],))
        if not left:
            self._under_way.pop(extent.path, None)

    def _of(self, extent: Extent) -> list[Transfer]:
        """The writes of any of these bytes."""
        if not self._index.overlaps((extent,)):
            return []
        return [write for written, write in self._under_way.get(extent.path, ()) if written.overlaps(extent)]

    def settle(self, slots: Iterable[Slot]) -> None:
        """Complete all writes, those of `slots` included. Raises DiskError."""
        writes, self._under_way = self._under_way, {}
        self._index.clear()
        started = [write for entries in writes.values() for _, write in entries]
        for write in (*started, *(write for slot in slots for write in slot.writes)):
            write.wait()

    def forget(self) -> None:
        """After a failure: the slots have the writes in flight."""
        self._under_way.clear()
        self._index.clear()
