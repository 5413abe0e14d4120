"""The optimizer pipeline: read state -> compute -> write state, several parts deep, on a thread of its own.

[Note: slots] A slot is page-locked host memory for one part's state, and for its gradient where that waits on SSD. While
one slot is computed, the next is being read and the one before is being written: with three slots every resource has work.
A slot takes its next read when its write is complete. Parts go through in the order in which they were submitted. Slots that
nothing submitted has use for read what is expected next, and there may be further ones for that: see [Note: reading ahead] and
[Note: further slots] in `state_prefetch`.

[Note: failures] After the first failure nothing more is computed. A job that writes beside what is current leaves the state
as it was, whatever becomes of it; any other one that failed, or was not run any more, has torn it. So has a job
that does not read what was written.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ds_vertical.io.aio import DiskQueue, complete
from ds_vertical.io.checksums import ChecksumError, Checksums
from ds_vertical.io.extents import Extent, ExtentIndex
from ds_vertical.io.ticket import Ticket
from ds_vertical.offload.state_prefetch import (
    ChangeSignal,
    FreeSlots,
    JobGroup,
    Prefetch,
    PrefetchJob,
    PrefetchQueue,
    Slot,
    StepJob,
    WriteStage,
)
from ds_vertical.schedule.trace import Tracer, now


@dataclass(frozen=True)
class PipelineSettings:
    """`begin` is called on the pipeline's thread, ahead of the first job. `checksums` notes all that is written and checks all
    that is read. `overlap`: where false, a job starts when the one before it, its writes included, is complete. `further`:
    slots for what is expected, which nobody may use before `ReadStage.allow`; see [Note: further slots]."""

    tracer: Tracer = field(default_factory=Tracer)
    begin: Callable[[], None] = lambda: None
    checksums: Checksums = field(default_factory=Checksums)
    overlap: bool = True
    further: Sequence[torch.Tensor] = ()


class JobsUnderWay:
    """Jobs whose reads have been started and which have not been computed, in order, each with its slot. Only the pipeline's
    thread changes them."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[StepJob, JobGroup, Slot | None]] = deque()
        self._targets = ExtentIndex()

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[tuple[StepJob, JobGroup, Slot | None]]:
        return iter(self._jobs)

    def append(self, job: StepJob, batch: JobGroup, slot: Slot | None) -> None:
        """The job's reads have been started."""
        self._targets.add(job.targets)
        self._jobs.append((job, batch, slot))

    def popleft(self) -> tuple[StepJob, JobGroup, Slot | None]:
        """The oldest job, which is computed next."""
        oldest = self._jobs.popleft()
        self._targets.remove(oldest[0].targets)
        return oldest

    def clear(self) -> None:
        """No job is under way any more."""
        self._jobs.clear()
        self._targets.clear()

    def will_write(self, extents: Sequence[Extent]) -> bool:
        """Whether one of the jobs is to write any of these bytes."""
        return self._targets.overlaps(extents)


class ReadStage:
    """Gives slots to jobs and starts the reads of their state, those of expected jobs into slots that would lie idle.

    `free`: slots that no job has; `reading`: the jobs under way, in order; `most`: slots that may be used. Only the pipeline's
    thread calls `start`, `read_ahead`, `take_slot` and `turn`.
    """

    def __init__(
        self,
        slots: Sequence[torch.Tensor],
        further: Sequence[torch.Tensor],
        reader: DiskQueue,
        writes: WriteStage,
        changes: ChangeSignal,
    ) -> None:
        self.slots = tuple(Slot(data, number) for number, data in enumerate((*slots, *further)))
        self.free = FreeSlots(self.slots, len(slots))
        self.expected = PrefetchQueue(self.free)
        self.reading = JobsUnderWay()
        self.most = self._least = len(slots)
        self._reader = reader
        self._writes = writes
        self._changes = changes
        self._lock = changes.lock
        self._rests_behind: int | None = None  # slots behind so many are to give their memory back as they become free

    def allow(self, num_bytes: float) -> None:
        """Let further slots be used, as many as so many bytes hold, from now on. From any thread."""
        with self._lock:
            before, further = self.most, len(self.slots) - self._least
            self.most = self._least + (min(further, int(num_bytes // self.slots[-1].data.numel())) if further else 0)
            if self.most < before:
                self._rest_behind(self.most)

    def give_memory_back(self) -> None:
        """Return when no further slot has memory. Nothing may be in flight or expected: see `StepPipeline.wait_idle`."""
        with self._lock:
            if not self.held_bytes:
                return
            self._rest_behind(self._least)
        self._changes.wait_until(lambda: self._rests_behind is None)

    def close(self) -> None:
        """The pipeline's thread has ended: nothing is expected any more, and no further slot has memory."""
        with self._lock:
            self.expected.clear()
            self._rest_behind(self._least)
            self.turn()

    def _rest_behind(self, most: int) -> None:
        """The pipeline's thread is to give the memory of the slots behind the first `most` back, as they become free."""
        self._rests_behind = most if self._rests_behind is None else min(most, self._rests_behind)
        self._changes.tell()

    def turn(self) -> bool:
        """Give the memory back that is to be given back, as far as its slots are free. Returns whether a slot is free for a job
        that is expected and not being read. The lock is held."""
        if self._rests_behind is not None and self.free.rest(self._rests_behind):
            self._rests_behind = None
            self._changes.tell()
        return self.may_read_ahead

    @property
    def held_bytes(self) -> int:
        """Bytes of further slots that may have memory."""
        with self._lock:
            return self.free.held_bytes()

    @property
    def has_further(self) -> bool:
        """Whether further slots may be used."""
        return self.most > self._least

    @property
    def may_read_ahead(self) -> bool:
        """Whether a slot is free for a job that is expected and not being read."""
        expected = self.expected.next()
        return expected is not None and self.free.has(self._slots_for(expected))

    def _slots_for(self, expected: Prefetch) -> range:
        """The numbers of slots that what is expected may take."""
        return range(self._least if expected.far else 0, self.most)

    def start(self, job: StepJob, patient: bool) -> tuple[bool, Slot | None]:
        """Start the reads of a job. Returns whether it could, and its slot, None for a job that reads nothing. With `patient` a
        slot is waited for."""
        if self.reading.will_write(job.sources):
            return False, None  # what it is to read has not been computed yet
        with self._lock:
            expected = self.expected.claim(PrefetchJob(job.what, job.extents))
            self.expected.forget(job.targets)
        slot = None if expected is None else expected.slot
        if expected is not None:
            job.started.extend(expected.reads)
        if job.sources:
            slot = slot or self.take_slot(patient)
            if slot is None:
                return False, None
            for extent, view in list(zip(job.sources, slot.views(job.sources), strict=True))[len(job.started) :]:
                self._writes.wait_for(extent)
                job.started.append(self._reader.read(view.data_ptr(), extent.num_bytes, extent.path, extent.offset))
        return True, slot

    def read_ahead(self, submitted: Collection[object]) -> None:
        """Give free slots to what is expected, unless anything that is submitted waits for one."""
        while self._read_next(submitted):
            pass

    def _read_next(self, submitted: Collection[object]) -> bool:
        """Start reading the state of the next job that is expected. Returns whether it could."""
        with self._lock:
            expected = self.expected.next()
            if submitted or expected is None or self.reading.will_write(expected.extents):
                return False
            if any(map(self._writes.is_being_written, expected.extents)):
                return False
            slot = self.free.take(self._slots_for(expected))
            if slot is None:
                return False
            self.expected.begin(expected, slot)
            for extent, view in zip(expected.extents, slot.views(expected.extents), strict=True):
                expected.reads.append(self._reader.read(view.data_ptr(), extent.num_bytes, extent.path, extent.offset))
            return True

    def take_slot(self, patient: bool) -> Slot | None:
        """The first slot that is free; with `patient` wait for writes, or take one from what is expected."""
        allowed = range(self.most)
        if patient:
            with self._lock:
                if not self.free.has(allowed):
                    self.expected.give_back_last()
            self.free.wait_for_one(allowed)
        with self._lock:
            return self.free.take(range(len(self.slots)) if patient else allowed)

    def free_all(self) -> None:
        """Nothing is in flight or expected, so all slots are free; an interrupt may have forgotten one."""
        self.free.reset()


class StepPipeline:
    """Runs jobs in order on one thread. `slots`: uint8 tensors, page-locked, each as large as all that the largest job reads.

    `reader`, `writer`: the queues of its transfers. `reads`: the stage that gives slots to jobs. `changes`: its lock. `thread`:
    None before the first job.

    `error`: the first failure, after which nothing is computed. The wait of its batch raises it, and so does every later wait,
    until `recover`.
    """

    def __init__(
        self,
        slots: Sequence[torch.Tensor],
        reader: DiskQueue,
        writer: DiskQueue,
        settings: PipelineSettings | None = None,
    ) -> None:
        self.error: BaseException | None = None
        self.changes = ChangeSignal()
        self._lock = self.changes.lock
        self._settings = settings or PipelineSettings()
        self._writes = WriteStage(writer, self._settings.checksums)
        self.reads = ReadStage(slots, self._settings.further, reader, self._writes, self.changes)
        self.reader = reader
        self.writer = writer
        self._submitted: deque[tuple[StepJob, JobGroup]] = deque()
        self._runs = threading.Lock()
        self._idle = True
        self._closed = False
        self._torn = False
        self.thread: threading.Thread | None = None
        _OPEN.add(self)

    def submit(self, what: str, jobs: Sequence[StepJob], finish: Callable[[], None]) -> Ticket:
        """Queue jobs; `finish` runs on the pipeline's thread after the last. The ticket waits for all of it."""
        batch = JobGroup(jobs, finish)
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{what}: the optimizer pipeline is closed; build a new engine")
            self._wake()
            self._submitted.extend((job, batch) for job in jobs)
            self._idle = False
        num_bytes = sum(extent.num_bytes for job in jobs for extent in job.sources)
        return Ticket(what, lambda: self._wait(batch), num_bytes, lambda: batch.is_over)

    def expect(self, jobs: Sequence[PrefetchJob], far: bool = False) -> None:
        """Read the state of jobs that will be submitted soon, in this order, as far as slots are free; into further slots alone
        where they are `far`, behind the norm. A hint: whether they come does not matter."""
        with self._lock:
            if not self._closed and self.error is None:
                self._wake()
                self.reads.expected.add(jobs, far)

    def _wake(self) -> None:
        """The thread finds what is given to it while the caller holds the lock."""
        if self.thread is None:
            thread = threading.Thread(target=self._run, name="ds_vertical optimizer", daemon=True)
            thread.start()  # raises where there are too many
            self.thread = thread
        self.changes.tell()

    def wait_idle(self, reads_on: bool = False) -> None:
        """Return when nothing that was submitted is in flight, whatever came of it. Nothing is expected any more, unless the
        pipeline `reads_on`."""
        self.changes.wait_until(lambda: self._idle and not self._submitted)  # `submit` may have been cut between the two
        if not reads_on:
            with self._lock:
                self.reads.expected.clear()
                self.reads.free_all()

    def drain(self, reads_on: bool = False) -> None:
        """Return when everything submitted is computed and on SSD. Raises the first error. `reads_on`: what is expected goes on
        being read."""
        self.wait_idle(reads_on)
        if self.error is not None:
            raise self.error

    def recover(self) -> None:
        """Be as before a failure, if it has left the state whole: see [Note: failures]. Nothing may be in flight."""
        with self._lock:
            if self.error is not None and not self._torn:
                self.error = None
                self.reads.free_all()

    def close(self) -> None:
        """Finish what was submitted and end the thread. Harmless when called twice; raises nothing."""
        with self._lock:
            self._closed = True
            self.changes.tell()
        if self.thread is not None:
            self.thread.join()
        self.reads.close()
        self.reader.close()
        self.writer.close()

    def _wait(self, batch: JobGroup) -> None:
        self.changes.wait_until(lambda: batch.is_over)
        if batch.error is not None:
            raise batch.error

    # ---- the thread

    def _run(self) -> None:
        if not self._runs.acquire(blocking=False):
            return  # an interrupt has cut the start of the first thread, which runs
        self.thread = threading.current_thread()
        try:
            self._settings.begin()
        except BaseException as error:  # the waits of batches raise it
            self._fail(error)
        while self._next():
            try:
                if self.error is None:
                    self._advance()
                else:
                    self._fail(self.error)
            except BaseException as error:  # the waits of batches raise it
                self._fail(error)

    def _next(self) -> bool:
        """Wait for work; False when there is none left and the pipeline is closed."""
        reads = self.reads
        with self._lock:
            if not (self._submitted or reads.reading or self._writes.is_busy):
                self._idle = True
                self.changes.tell()
                self.changes.wait_on_own_thread(lambda: reads.turn() or self._submitted or self._closed)
            ahead = reads.turn() and not self._closed
            self._idle = not (self._submitted or reads.reading or self._writes.is_busy or ahead)
            return not self._idle

    def _advance(self) -> None:
        """Start the reads that have a slot, those of what is expected last; then compute the oldest job, then complete writes
        where nothing is left."""
        reads, overlap = self.reads, self._settings.overlap
        if not overlap:
            self._writes.settle(reads.slots)
        while self._start_one(patient=not reads.reading) and overlap:
            pass
        reads.read_ahead(self._submitted)
        if reads.reading:
            self._compute(*reads.reading.popleft())
        elif not self._submitted:
            self._writes.settle(reads.slots)

    def _start_one(self, patient: bool) -> bool:
        """Start the reads of the oldest job that was submitted. Returns whether it could."""
        with self._lock:
            if not self._submitted:
                return False
            job, batch = self._submitted[0]
        started, slot = self.reads.start(job, patient)
        if started:
            with self._lock:
                self._submitted.popleft()
            self.reads.reading.append(job, batch, slot)
        return started

    def _compute(self, job: StepJob, batch: JobGroup, slot: Slot | None) -> None:
        """Compute a job whose reads have been started, and start its writes. Raises what fails, once the batch has it."""
        try:
            for transfer in job.started:
                transfer.wait()
            job.started.clear()
            views = slot.views(job.sources) if slot is not None else []
            for extent, view in zip(job.sources, views, strict=True):
                self._settings.checksums.check(extent.path, extent.offset, view.numpy())
            for extent in job.targets if slot is not None else ():
                self._writes.wait_for(extent)
            start = now()
            job.compute(views)
            if slot is not None:
                self._writes.start(job, slot, views)
            self._settings.tracer.span("adam", job.what, start, now())
            if batch.left == 1:
                batch.finish()
        except BaseException as error:
            batch.error = error
            self._torn |= not job.beside or isinstance(error, ChecksumError)
            for transfer in job.started:  # into memory of ours
                complete(transfer)
            raise
        finally:
            with self._lock:
                if slot is not None:
                    self.reads.free.append(slot)
                batch.left -= 1
                self.changes.tell()

    def _fail(self, error: BaseException) -> None:
        """Give the error to everything submitted; complete transfers in flight, whose memory is ours."""
        reads = self.reads
        with self._lock:
            self.error = error
            dropped = [*self._submitted, *((job, batch) for job, batch, _ in reads.reading)]
            self._torn |= any(not job.beside for job, _ in dropped)
            self._submitted.clear()
            reads.expected.clear()
            for _, batch in dropped:
                batch.error = batch.error or error
            self.changes.tell()
        for job, _ in dropped:
            for transfer in job.started:
                complete(transfer)
        reads.reading.clear()
        self._writes.forget()
        for slot in reads.slots:  # all writes in flight are those of slots
            written = [complete(write) for write in slot.writes]
            self._torn |= not (slot.beside or all(written))
            slot.writes = []


_OPEN: weakref.WeakSet[StepPipeline] = weakref.WeakSet()
os.register_at_fork(after_in_child=_OPEN.clear)  # the thread is its parent's


@atexit.register
def _complete_all() -> None:
    """A process may end without closing its pipelines: their thread finishes while there is an interpreter."""
    for pipeline in list(_OPEN):
        pipeline.close()
