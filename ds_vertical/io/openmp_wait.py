"""How OpenMP's threads wait for each other at the end of an operation: awake on a machine of our own, asleep beside others.

[Note: awake or asleep] libgomp lets a thread that waits for its team look at a flag some 300,000 times, milliseconds long,
before it sleeps. That is right where each thread has a core: the next operation begins at once. Beside one busy process the
scheduler puts two threads of a team on one core, and each spends its turns on waiting for the other one: a step took 25 times
as long, and may go on so when the other process has ended. Asleep they give the core to each other, and a step takes half as
long again; but on an idle machine that is a third slower than awake. So neither is right for a whole run: a thread watches for
cores that are denied to us (see `contention`), and switches.

[Note: the switch] The environment that libgomp reads (GOMP_SPINCOUNT, OMP_WAIT_POLICY) is read once, when torch is loaded. But
where more threads of OpenMP exist in a process than it has cores, libgomp lets all of them look at the flag 100 times only
(gomp_throttled_spin_count_var). So a further team that does nothing, of one thread more than there are cores, is the switch; it
sleeps, and takes nothing but its stacks' addresses. Where torch computes by another runtime than libgomp, nothing is switched.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch

from ds_vertical.io.contention import Host, Threads, cores

_PERIOD_S: Final = 0.05  # several turns of the scheduler
_LONGER: Final = 100  # times what a look takes is the least time between two
_DENIED: Final = 0.4  # cores; less costs less than sleeping does
_TIMES: Final = 2  # periods on end in which cores are denied: while threads wait for the disk one happens with nobody near
_STUCK: Final = 8  # with nobody near: the scheduler has left two threads of the team on one core, and they stay there
_STILL_OTHERS: Final = 0.25  # cores on which others work
_SLEEP_S: Final = (0.25, 8.0)  # asleep before the next look at others: at least, and at most where waking was a mistake
_MISTAKE_S: Final = 1.0  # awake for less than that


@functools.cache
def _runtimes() -> tuple[ctypes.CDLL, ...]:
    """The libgomp's that are loaded: usually one, torch's."""
    with Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "libgomp" in line}
    return tuple(ctypes.CDLL(path) for path in sorted(paths) if os.path.exists(path))  # noqa: PTH110  # no error either


class _SleepingTeam(threading.Thread):
    """A team of more threads than there are cores, per runtime, until `end`: see [Note: the switch]."""

    def __init__(self) -> None:
        super().__init__(name="ds_vertical sleepers", daemon=True)
        self._there, self._enough = threading.Event(), threading.Event()
        self.start()
        self._there.wait()

    def run(self) -> None:
        try:
            for runtime in _runtimes():
                size = 1 + max(len(cores()), runtime.omp_get_num_procs())
                work = ctypes.cast(runtime.omp_get_thread_num, ctypes.c_void_p)  # a call without effect
                runtime.GOMP_parallel(work, None, ctypes.c_uint(size), ctypes.c_uint(0))
        finally:
            self._there.set()
        self._enough.wait()  # a team ends with the thread that made it

    def end(self) -> None:
        self._enough.set()
        self.join()


class SpinWatch:
    """Switches how this process's OpenMP threads wait, in the times that are watched, by what others leave of the cores."""

    def __init__(self) -> None:
        self._block: weakref.ref[_Block] | None = None  # that is watched
        self._team: _SleepingTeam | None = None
        self._others: Host | None = None  # as of the last look at them; None while threads wait awake
        self._sleep_s = _SLEEP_S[0]
        self._awake_since = float("-inf")
        self._teams: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()

    def note_team(self, owner: object, size: int) -> None:
        """A thread that opens no blocks computes on `size` threads, as CPU Adam's does beside a device: blocks are watched for
        its sake, too, as long as `owner` lives."""
        self._teams[owner] = size

    @property
    def asleep(self) -> bool:
        """Whether threads wait asleep, in a time that is watched."""
        return self._others is not None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """For the time of the block; within another one, and where no thread that is known of has a team, nothing happens.
        Outside all threads wait as libgomp has it; how they waited last is how they do in the next block."""
        within = self._block is not None and self._block() is not None
        if within or not self._has_team() or not _runtimes():
            yield
            return
        ended, block = threading.Event(), _Block()
        self._block = weakref.ref(block)
        watch = functools.partial(self._watch, ended, self._block)
        watcher = threading.Thread(target=watch, name="ds_vertical cores", daemon=True)
        try:
            if self.asleep and self._team is None:
                self._team = _SleepingTeam()
            watcher.start()
            yield
        finally:
            ended.set()
            if watcher.ident is not None:
                watcher.join()
            if self._team is not None:
                self._team.end()
                self._team = None
            self._block = None

    def _has_team(self) -> bool:
        """Whether the calling thread has a team, or another one has that was noted."""
        return max([torch.get_num_threads(), *self._teams.values()]) > 1

    # ---- the watching thread

    def _watch(self, ended: threading.Event, block: weakref.ref[_Block]) -> None:
        """Until the block has ended, or is gone: an interrupt may come ahead of the word that it has."""
        awake = _Awake()
        while not ended.wait(awake.period_s) and block() is not None:
            if self._others is None:
                if awake.denied():
                    self._fall_asleep()
            elif self._others_have_gone(self._others):
                self._team, team, self._others = None, self._team, None
                if team is not None:
                    team.end()
                self._awake_since, awake = time.perf_counter(), _Awake()

    def _fall_asleep(self) -> None:
        self._team = _SleepingTeam()
        mistaken = time.perf_counter() - self._awake_since < _MISTAKE_S
        self._sleep_s = min(2 * self._sleep_s, _SLEEP_S[1]) if mistaken else _SLEEP_S[0]
        self._others = Host.now()

    def _others_have_gone(self, before: Host) -> bool:
        if time.perf_counter() - before.at < self._sleep_s:
            return False
        self._others = Host.now()
        return self._others.others_since(before) < _STILL_OTHERS


class _Block:
    """Lives as long as a block that is watched."""


class _Awake:
    """Whether cores are denied to threads that wait awake, period by period."""

    def __init__(self) -> None:
        self.period_s = _PERIOD_S
        self._used = time.perf_counter(), time.process_time()
        self._well: Host | None = None  # as of the last period in which none was denied
        self._threads: Threads | None = None  # at the end of the last period, where that was short of cores
        self._times = 0  # periods on end in which some were

    def denied(self) -> bool:
        """At the end of a period. Cheap while this process computes on all of its cores."""
        at, used_s = time.perf_counter(), time.process_time()
        idle = len(cores()) - (used_s - self._used[1]) / (at - self._used[0])
        self._used = at, used_s
        if idle < _DENIED:
            self._threads, self._times = None, 0
            return False
        before, self._threads = self._threads, Threads.now()
        self.period_s = max(_PERIOD_S, _LONGER * (time.perf_counter() - at))
        if before is None or self._well is None or self._threads.denied_since(before) <= _DENIED:
            self._well, self._times = Host.now(), 0
            return False
        self._times += 1
        return self._times >= _STUCK or (self._times >= _TIMES and Host.now().others_since(self._well) > _STILL_OTHERS)


WATCH: Final = SpinWatch()  # libgomp's threads are the process's
