"""One rank's failure ends all: what ranks tell each other of it, while some wait in a collective for the one that has failed.

[Note: the log] Failures go into the store through which the process group was made, one entry after another: the first is the
cause, those behind it mostly its consequences. A thread of each rank follows that log. All calls of the store are that
thread's, so that nobody else waits for a network. Another thread, the watch, looks whether the ranks of this host are alive,
and whether the other hosts are: a process that was killed writes nothing, nor does a host that is cut off.

[Note: the end of the others] A rank that fails tells the others, and raises. One that waits for it in a collective is woken
where the process group notices that the other process is gone (gloo: its sockets close), and raises OtherRankError with the
cause instead of the socket's error. One that nobody wakes (NCCL; the rank that failed lives on; its host is cut off) is ended
by the watch.

[Note: going on] A failure that all ranks share, such as a norm that is not finite, leaves them in step, and they may go on. So
whoever has failed goes on only where all others have failed in the same section: its next collective would otherwise meet the
others' last one, and compute nonsense.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Final, NoReturn

from ds_vertical.distributed.failure_log import FailureLog, RankReport
from ds_vertical.distributed.host_beats import HostBeats, Listener
from ds_vertical.distributed.host_peers import HostPeers, Store
from ds_vertical.errors import OtherRankError, Unanimous

POLL_S: Final = 0.2
HEARD_S: Final = 2.0  # to wait until all other ranks have read a report, before a process may end and the store with it
PATIENCE_S: Final = 3.0  # to wait for the cause of a collective's error: a killed process is not gone at once
LONGEST_PATIENCE_S: Final = 120.0  # the same by the wall's clock
GRACE_S: Final = 10.0  # for a rank to leave a collective by itself once another one has failed
UNREAD_S: Final = 5.0  # for the store to say what a rank has written that is gone
LOST_GRACE_S: Final = 1.0  # the same once a host is lost: nobody there wakes it
FLUSH_S: Final = 1.0  # for the output of a process that ends: its reader may stand still
_ENDS: Final = ("failed", "gone", "lost")  # of another rank: what may be the cause of an error here
_ALWAYS: Final = 1 << 62  # a section that is never settled
_LONGEST: Final = 2000  # characters of an error's text
_SIGNS: Final = ("gloo", "nccl", "connection closed", "connection reset", "connection refused", "broken pipe", "process group")


class FailureWatch:
    """This rank's watch over the others, see the notes above. `section` encloses what all ranks do together.

    `end` is called on the watch's thread, with the cause, where this rank waits for ever; it must not return. `log`: what the
    ranks tell each other; `peers`: the processes of this host's ranks; `beats`: the hosts' heartbeats.
    """

    def __init__(self, store: Store, rank: int, world_size: int, end: Callable[[str], None]) -> None:
        self._rank = rank
        self._world_size = world_size
        self._end = end
        self._changed = threading.Condition()
        self.log = FailureLog(store, rank, world_size, self._changed)
        self.peers = HostPeers(store, rank, world_size)
        self.beats = HostBeats(store, rank, world_size, listener=Listener())
        self._section, self._settled = 0, -1  # the number of the last one; up to which all failures were shared
        self._inside: list[str] = []
        self._failed = False  # in the last section, and has not gone on
        self._stuck_since: float | None = None
        self._num_begun = self._num_ended = 0  # exchanges of reports
        self._seen_dead: dict[int, tuple[int, float]] = {}  # by rank: exchanges begun by then, and when that was
        self._closing = False
        names = {"ds_vertical store": self._exchange, "ds_vertical ranks": self._watch}
        self._threads = [threading.Thread(target=run, name=name, daemon=True) for name, run in names.items()]
        for thread in self._threads:
            thread.start()

    @property
    def is_host_lost(self) -> bool:
        """Whether the first cause of this rank's end that was heard of is the loss of a host."""
        with self._changed:
            cause = self._cause(*_ENDS)
        return cause is not None and cause.kind == "lost"

    # ---- for the rank's own thread

    def section(self, what: str) -> CollectiveSection:
        """A block in which all ranks do the same, `what`. An error in it is told to the other ranks. One that follows from
        another rank's error becomes OtherRankError, which names that. A section inside another one is part of the outer one.
        Raises OtherRankError at the start where this rank has failed before, and others have not."""
        return CollectiveSection(self, what)

    def enter(self, what: str) -> None:
        """A section begins; called by `CollectiveSection` only, as `leave` is. Raises OtherRankError."""
        if not self._inside and self._failed:
            self._go_on(what)
        with self._changed:
            self._section += not self._inside
            self._inside.append(what)

    def leave(self, error: BaseException | None) -> OtherRankError | None:
        """A section ends, by `error` or by itself. Returns what is to be raised instead of the error, if anything is."""
        with self._changed:
            what = self._inside.pop()
            if self._inside or error is None or isinstance(error, (StopIteration, Unanimous)):
                return None
            self._failed = True
        cause = self._cause_of(error)
        if cause is None:
            self.tell(what, error)
            return None
        instead = OtherRankError(f"{what}: {cause.describe()}")
        first = next(each for each in chain(error) if _is_of_the_group(each))
        instead.add_note(f"this rank's own error, which follows from it: {_text(first)}")
        # the store ends with rank 0, whose process may end at once: see `is_host_lost`
        self.tell(what, instead, waits=cause.kind == "lost" and self._rank == 0)
        return instead

    def tell(self, what: str, error: BaseException, waits: bool = True) -> None:
        """Report an error of this rank to the others. Returns once they have read it: after HEARD_S at most, or after POLL_S
        if nobody `waits`."""
        self.log.send(RankReport(self._rank, "failed", self._section, what, _text(error)), HEARD_S if waits else POLL_S)

    def close(self, error: BaseException | None) -> None:
        """This rank ends, by itself or by an error that nobody has caught. Raises nothing."""
        kind, text = ("left", "") if error is None else ("failed", _text(error))
        if not (error is not None and self._failed):
            self.log.send(RankReport(self._rank, kind, self._section, "", text), HEARD_S)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(HEARD_S)

    def _go_on(self, what: str) -> None:
        """Return once all ranks are known to have failed where this one has."""

        def missing() -> list[int]:
            failed = {entry.rank for entry in self.log.entries if entry.kind == "failed" and entry.section == self._section}
            return [rank for rank in range(self._world_size) if rank not in failed]

        with self._changed:
            if not self._changed.wait_for(lambda: not missing(), GRACE_S):
                raise OtherRankError(
                    f"{what}: this rank has failed in its last call, and rank {missing()[0]} has not: they are out of step,"
                    " and what they would compute together is undefined; let the error end this process, so that all ranks end"
                )
            self._settled, self._failed = self._section, False

    def _cause_of(self, error: BaseException) -> RankReport | None:
        """What happened elsewhere, if an error, or one that it was raised in the handling of, speaks of nothing else."""
        if isinstance(error, OtherRankError) or not any(map(_is_of_the_group, chain(error))):
            return None
        with self.beats.doubt() as patience_s, self._changed:
            end = self.beats.clock + max(PATIENCE_S, patience_s)  # by the clock that finds hosts lost, which may be slower
            self._changed.wait_for(lambda: self._cause(*_ENDS) is not None or self.beats.clock >= end, LONGEST_PATIENCE_S)
            return self._cause(*_ENDS) or self._cause("left")

    def _cause(self, *kinds: str) -> RankReport | None:
        """The first that was heard of another rank's end, and not of all ranks'."""
        found = (entry for entry in self.log.entries if entry.rank != self._rank and entry.section > self._settled)
        return next((entry for entry in found if entry.kind in kinds), None)

    # ---- the threads

    def _exchange(self) -> None:
        """Until `close`, or until the store is gone: exchange reports and heartbeats, sleep."""
        while self.log.is_open:
            self._num_begun += 1
            try:
                self.peers.introduce()
                self.log.exchange()
                self.peers.meet()
                self.beats.exchange()
            except (RuntimeError, OSError):  # torch raises several kinds of the first
                self.log.is_open = False
                self.beats.close()
            self._num_ended = self._num_begun
            with self._changed:
                self._changed.notify_all()
                if self._closing and not self.log.has_unsent:
                    return
                self._changed.wait_for(lambda: self._closing or self.log.has_unsent, POLL_S)

    def _watch(self) -> None:
        """Until `close`: look after the others, sleep."""
        while not self._closing:
            self.beats.tick()
            self._look()
            with self._changed:
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closing, POLL_S)

    def _is_read(self, rank: int) -> bool:
        """Whether this rank has read what the other one may have written before it died, or cannot read it: that comes
        first."""
        begun, since = self._seen_dead.setdefault(rank, (self._num_begun, time.monotonic()))
        return self._num_ended > begun or not self.log.is_open or time.monotonic() - since > UNREAD_S

    def _look(self) -> None:
        """See which ranks of this host have died and which hosts are lost, and end this process where it has waited for such a
        rank, or for one that failed, for as long as that one's kind of end allows."""
        with self._changed:
            ended = {entry.rank for entry in self.log.entries if entry.kind != "failed" or entry.section > self._settled}
            for report in self.beats.lost(ended):
                if self._rank == 0:  # for all ranks to read, this one among them
                    self.log.send(report, 0.0)
                else:
                    self.log.entries.append(report)
            # Behind the hosts: where one is lost, and the store with it, a rank here that ends for that can tell nobody why.
            for rank, process in self.peers.gone(ended):
                if self._is_read(rank):
                    self.log.entries.append(RankReport(rank, "gone", _ALWAYS, "", f"pid {process.pid}"))
            cause = self._cause(*_ENDS) if self._inside else None
            what = self._inside[0] if self._inside else ""
            if cause is None:
                self._stuck_since = None
            elif self._stuck_since is None:
                self._stuck_since = time.monotonic()
            waited_s = 0.0 if self._stuck_since is None else time.monotonic() - self._stuck_since
        grace_s = LOST_GRACE_S if cause is not None and cause.kind == "lost" else GRACE_S
        if cause is not None and waited_s >= grace_s:
            self._end(f"{what}: {cause.describe()} (this rank has been waiting for it, and ends {grace_s:.0f} s later)")


class CollectiveSection:
    """See `FailureWatch.section`. No generator: StopIteration has to pass."""

    def __init__(self, watch: FailureWatch, what: str) -> None:
        self._watch = watch
        self._what = what

    def __enter__(self) -> None:
        self._watch.enter(self._what)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        instead = self._watch.leave(error)
        if instead is not None:
            raise instead from None


def end_process(cause: str, before: Sequence[Callable[[], None]] = ()) -> None:
    """Say why, and end this process at once with status 1: its own thread waits where no exception reaches it."""
    sys.stderr.write(f"ds_vertical: {OtherRankError.__name__}: {cause}\n")
    sys.stderr.flush()
    end_now(before)


def end_now(before: Sequence[Callable[[], None]] = ()) -> NoReturn:
    """End this process with status 1, without Python's and torch's exit, after calls of `before`."""
    try:
        for function in before:
            function()
        flushing = threading.Thread(target=_flush, daemon=True)
        flushing.start()
        flushing.join(FLUSH_S)
    finally:
        os._exit(1)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those behind it, the last first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_of_the_group(error: BaseException) -> bool:
    """Whether an error comes out of a collective."""
    speaks = type(error).__name__.startswith("Dist") or any(sign in str(error).lower() for sign in _SIGNS)
    return isinstance(error, RuntimeError) and speaks


def _text(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}{': ' if text else ''}{text}"[:_LONGEST]
