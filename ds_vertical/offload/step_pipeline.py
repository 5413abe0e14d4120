"""The optimizer pipeline: read state -> compute -> write state, several parts deep, on a thread of its own.

[Note: slots] A slot is page-locked host memory for one part's state, and for its gradient where that waits on SSD. While
one slot is computed, the next is being read and the one before is being written: with three slots every resource has work.
A slot takes its next read when its write is complete. Parts go through in the order in which they were submitted. Slots that
nothing submitted has use for read what is expected next: see [Note: reading ahead] in `state_prefetch`.

[Note: failures] After the first failure nothing more is computed. A job that writes beside what is current leaves the state
as it was, whatever becomes of it; any other one that failed, or was not run any more, has torn it. So has whoever finds that
what it reads is not what was written.

[Note: the lock] Other threads than the pipeline's own, where interrupts come, take the lock itself and no condition, whose
methods are Python's: one that is cut between taking it and saying so keeps it for ever. They wait by a lock of their own.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

from ds_vertical.interrupts import waiting
from ds_vertical.io.aio import DiskQueue, Transfer, complete
from ds_vertical.io.checksums import ChecksumError, Checksums
from ds_vertical.io.extents import Extent
from ds_vertical.io.ticket import Ticket
from ds_vertical.offload.state_prefetch import PrefetchJob, PrefetchQueue, Slot
from ds_vertical.schedule.trace import Tracer, now

_TURN_S: Final = 1.0


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
        return (*self.extents, *self.inputs)

    @property
    def targets(self) -> Sequence[Extent]:
        return self.extents if self.outputs is None else self.outputs


class JobGroup:
    """Jobs submitted together; complete when all have been computed (their writes may be under way)."""

    def __init__(self, jobs: Sequence[StepJob], finish: Callable[[], None]) -> None:
        self.left = len(jobs)
        self.finish = finish
        self.error: BaseException | None = None


class StepPipeline:
    """Runs jobs in order on one thread. `slots`: uint8 tensors, page-locked, each as large as all that the largest job reads.
    `begin` is called on the thread, ahead of the first. `checksums`: told of all that is written, asked about all that is read.
    `overlap`: where false, a job starts when the one before it, its writes included, is complete.

    An error of a job is raised by the wait of its batch and of every later one, until `recover`.
    """

    def __init__(
        self,
        slots: Sequence[torch.Tensor],
        reader: DiskQueue,
        writer: DiskQueue,
        tracer: Tracer | None = None,
        begin: Callable[[], None] = lambda: None,
        checksums: Checksums | None = None,
        overlap: bool = True,
    ) -> None:
        self._begin = begin
        self._overlap = overlap
        self._tracer = tracer or Tracer()
        self._checksums = checksums or Checksums()
        self._slots = tuple(Slot(data) for data in slots)
        self._free = deque(self._slots)
        self._expected = PrefetchQueue(self._free)
        self._reader = reader
        self._writer = writer
        self._submitted: deque[tuple[StepJob, JobGroup]] = deque()
        self._reading: deque[tuple[StepJob, JobGroup, Slot | None]] = deque()
        self._writes: dict[Path, list[tuple[Extent, Transfer]]] = {}
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # for the pipeline's thread; see [Note: the lock]
        self._turns: list[threading.Lock] = []  # of those who wait for a change
        self._runs = threading.Lock()
        self._idle = True
        self._closed = False
        self._error: BaseException | None = None
        self._torn = False
        self._thread: threading.Thread | None = None
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
        return Ticket(what, lambda: self._wait(batch), num_bytes)

    def expect(self, jobs: Sequence[PrefetchJob]) -> None:
        """Read the state of jobs that will be submitted soon, in this order, as far as slots are free. A hint: whether
        they come does not matter."""
        with self._lock:
            if not self._closed and self._error is None:
                self._wake()
                self._expected.add(jobs)

    def _wake(self) -> None:
        """The thread finds what is given to it while the caller holds the lock."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="ds_vertical optimizer", daemon=True)
            thread.start()  # raises where there are too many
            self._thread = thread
        self._tell()

    def _tell(self) -> None:
        """Something has changed. The caller holds the lock."""
        self._changed.notify_all()
        while self._turns:
            self._turns.pop().release()

    @waiting
    def _await(self, is_so: Callable[[], object]) -> None:
        """Return once `is_so`, whatever changes meanwhile."""
        while True:
            turn = threading.Lock()
            turn.acquire()
            with self._lock:
                if is_so():
                    return
                self._turns.append(turn)
            turn.acquire(timeout=_TURN_S)  # whoever was to release it may have been cut

    @property
    def error(self) -> BaseException | None:
        """The first failure: nothing is computed after it."""
        return self._error

    def wait_idle(self) -> None:
        """Return when nothing is in flight, whatever came of it. Nothing is expected any more."""
        self._await(lambda: self._idle and not self._submitted)  # an interrupt may have cut `submit` between the two
        with self._lock:
            self._expected.clear()
            self._free_all()

    def drain(self) -> None:
        """Return when everything submitted is computed and on SSD. Raises the first error."""
        self.wait_idle()
        if self._error is not None:
            raise self._error

    def recover(self) -> None:
        """Be as before a failure, if it has left the state whole: see [Note: failures]. Nothing may be in flight."""
        with self._lock:
            if self._error is not None and not self._torn:
                self._error = None
                self._free_all()

    def _free_all(self) -> None:
        """Nothing is in flight or expected, so all slots are free; an interrupt may have forgotten one."""
        for slot in self._slots:
            if slot not in self._free:
                self._free.append(slot)

    def close(self) -> None:
        """Finish what was submitted and end the thread. Harmless when called twice; raises nothing."""
        with self._lock:
            self._closed = True
            self._tell()
        if self._thread is not None:
            self._thread.join()
        self._expected.clear()
        self._reader.close()
        self._writer.close()

    def _wait(self, batch: JobGroup) -> None:
        self._await(lambda: batch.left == 0 or batch.error is not None)
        if batch.error is not None:
            raise batch.error

    # ---- the thread

    def _run(self) -> None:
        if not self._runs.acquire(blocking=False):
            return  # an interrupt has cut the start of the first thread, which runs
        self._thread = threading.current_thread()
        try:
            self._begin()
        except BaseException as error:  # handed to whoever waits
            self._fail(error)
        while self._next():
            try:
                if self._error is None:
                    self._advance()
                else:
                    self._fail(self._error)
            except BaseException as error:  # handed to whoever waits
                self._fail(error)

    def _next(self) -> bool:
        """Wait for work; False when there is none left and the pipeline is closed."""
        with self._lock:
            if not self._busy:
                self._idle = True
                self._tell()
                self._changed.wait_for(lambda: self._submitted or self._closed or self._may_read_ahead())
            ahead = not self._closed and self._may_read_ahead()
            self._idle = not (self._busy or ahead)
            return self._busy or ahead

    @property
    def _busy(self) -> bool:
        return bool(self._submitted or self._reading or any(self._writes.values()))

    def _may_read_ahead(self) -> bool:
        return bool(self._free) and self._expected.next() is not None

    def _advance(self) -> None:
        """Start the reads that have a slot, those of what is expected last; then compute the oldest job, then complete writes
        where nothing is left."""
        if not self._overlap:
            self._settle()
        while self._start_one(patient=not self._reading) and self._overlap:
            pass
        self._read_ahead()
        if self._reading:
            self._compute(*self._reading.popleft())
        elif not self._submitted:
            self._settle()

    def _start_one(self, patient: bool) -> bool:
        with self._lock:
            if not self._submitted:
                return False
            job, batch = self._submitted[0]
        if self._is_due(job.sources):
            return False  # what it is to read has not been computed yet
        with self._lock:
            expected = self._expected.claim(PrefetchJob(job.what, job.extents))
            self._expected.forget(job.targets)
        slot = None if expected is None else expected.slot
        if expected is not None:
            job.started.extend(expected.reads)
        if job.sources:
            slot = slot or self._take_slot(patient)
            if slot is None:
                return False
            for extent, view in list(zip(job.sources, slot.views(job.sources), strict=True))[len(job.started) :]:
                self._await_writes(extent)
                job.started.append(self._reader.read(view.data_ptr(), extent.num_bytes, extent.path, extent.offset))
        with self._lock:
            self._submitted.popleft()
        self._reading.append((job, batch, slot))
        return True

    def _is_due(self, extents: Sequence[Extent]) -> bool:
        """Whether a job that has not been computed is to write them."""
        return any(extent.overlaps(target) for extent in extents for job, *_ in self._reading for target in job.targets)

    def _read_ahead(self) -> None:
        """Give free slots to what is expected, unless anything that is submitted waits for one."""
        with self._lock:
            while not self._submitted and (expected := self._expected.next()):
                if self._is_due(expected.extents) or any(map(self._is_being_written, expected.extents)):
                    return
                expected.slot = slot = self._take_slot(patient=False)
                if slot is None:
                    return
                for extent, view in zip(expected.extents, slot.views(expected.extents), strict=True):
                    expected.reads.append(self._reader.read(view.data_ptr(), extent.num_bytes, extent.path, extent.offset))

    def _take_slot(self, patient: bool) -> Slot | None:
        """The slot that has been free longest; with `patient` wait for its writes, or take one from what is expected."""
        with self._lock:
            if patient and not self._free:
                self._expected.give_back_last()
        if not self._free or not (patient or self._free[0].free):
            return None
        slot = self._free[0]
        for write in slot.writes:
            write.wait()
        slot.writes = []
        return self._free.popleft()

    def _is_being_written(self, extent: Extent) -> bool:
        return any(written.overlaps(extent) and not write.done for written, write in self._writes.get(extent.path, ()))

    def _await_writes(self, extent: Extent) -> None:
        """Complete earlier writes of the bytes about to be read or written: a queue keeps no order."""
        left = []
        for written, write in self._writes.get(extent.path, ()):
            if written.overlaps(extent):
                write.wait()
            elif not write.done:
                left.append((written, write))
        self._writes[extent.path] = left

    def _compute(self, job: StepJob, batch: JobGroup, slot: Slot | None) -> None:
        try:
            for transfer in job.started:
                transfer.wait()
            job.started.clear()
            views = slot.views(job.sources) if slot is not None else []
            for extent, view in zip(job.sources, views, strict=True):
                self._checksums.check(extent.path, extent.offset, view.numpy())
            for extent in job.targets if slot is not None else ():
                self._await_writes(extent)
            start = now()
            job.compute(views)
            if slot is not None:
                for extent, view in zip(job.targets, views[: len(job.extents)], strict=True):
                    write = self._writer.write(view.data_ptr(), extent.num_bytes, extent.path, extent.offset)
                    slot.beside = job.beside
                    slot.writes.append(write)
                    self._writes.setdefault(extent.path, []).append((extent, write))
                for extent, view in zip(job.targets, views, strict=False):  # beside the writes
                    self._checksums.note(extent.path, extent.offset, view.numpy())
            self._tracer.span("adam", job.what, start, now())
            if batch.left == 1:
                batch.finish()
        except BaseException as error:
            batch.error = error
            self._torn |= not job.beside or isinstance(error, ChecksumError)
            for transfer in job.started:  # into memory of ours
                complete(transfer)
            raise
        finally:
            if slot is not None:
                self._free.append(slot)
            with self._lock:
                batch.left -= 1
                self._tell()

    def _settle(self) -> None:
        writes, self._writes = self._writes, {}
        started = [write for entries in writes.values() for _, write in entries]
        for write in (*started, *(write for slot in self._free for write in slot.writes)):
            write.wait()

    def _fail(self, error: BaseException) -> None:
        """Give the error to everything submitted; complete transfers in flight, whose memory is ours."""
        with self._lock:
            self._error = error
            dropped = [*self._submitted, *((job, batch) for job, batch, _ in self._reading)]
            self._torn |= any(not job.beside for job, _ in dropped)
            self._submitted.clear()
            self._expected.clear()
            for _, batch in dropped:
                batch.error = batch.error or error
            self._tell()
        for job, _ in dropped:
            for transfer in job.started:
                complete(transfer)
        self._reading.clear()
        self._writes.clear()
        for slot in self._slots:  # all writes in flight are those of slots
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
