"""Cores that this process asks for while others work on them: how many, and who they are. Imports neither torch nor deepspeed.

[Note: denied cores] Two numbers of the kernel tell a busy neighbour from our own threads, however these wait. A thread that
could run and does not waits for a core (`run_delay` of its schedstat); that may be one of our own threads' fault, where more
of them want to run than there are cores. What this process computes, its CPU time, is short of the cores by what others have,
or by what nobody wants. The smaller of the two, threads that wait and cores that are not ours, is what others have and we ask
for: near 0 on an idle machine and on one that only we use, and 1 beside one busy loop. It counts a control group's quota as
well, and other ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_GROUPS: Final = Path("/sys/fs/cgroup")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_WORKING: Final = (0, 1, 2, 5, 6)  # fields of /proc/stat: user, nice, system, irq, softirq
_LOOK_S: Final = 0.5
_LOOK_AGAIN_S: Final = 2.0
_SHORTEST_S: Final = 0.25
_NOTED: Final = 0.25  # cores


def cores() -> frozenset[int]:
    """The processors on which this process may run."""
    return frozenset(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Threads:
    """This process at one moment: its CPU time, and by thread how long it has waited for a core (empty where the kernel does
    not say, as in gVisor)."""

    at: float
    used_s: float
    waited_s: Mapping[str, float]

    @classmethod
    def now(cls) -> Threads:
        """The process as it is; in strings, which are faster than pathlib: the watch of `openmp_wait` calls this often."""
        waited = {}
        for thread in os.listdir("/proc/self/task"):  # noqa: PTH208
            try:
                with open(f"/proc/self/task/{thread}/schedstat", "rb") as file:  # noqa: PTH123
                    waited[thread] = int(file.read().split()[1]) / 1e9
            except (OSError, IndexError):  # it has ended; or no such file
                continue
        return cls(time.perf_counter(), time.process_time(), waited)

    def denied_since(self, before: Threads) -> float:
        """Cores, on average, for which threads of this process waited while others had them: see [Note: denied cores]."""
        seconds = max(self.at - before.at, 1e-9)
        waited = sum(max(0.0, each - before.waited_s.get(thread, each)) for thread, each in self.waited_s.items())
        return max(0.0, min(waited, len(cores()) * seconds - (self.used_s - before.used_s)) / seconds)


@dataclass(frozen=True)
class Host:
    """The processors on which this process may run, at one moment: how long they have worked for anybody, and this process's
    part of it."""

    at: float
    used_s: float
    worked_s: float

    @classmethod
    def now(cls) -> Host:
        """The processors as they are."""
        names = {f"cpu{number}" for number in cores()}
        try:
            text = (_PROC / "stat").read_text(encoding="ascii", errors="replace")
        except OSError:  # hidden from this process: others seem to do nothing
            text = ""
        lines = (line.split() for line in text.splitlines())
        ticks = sum(int(fields[1 + each]) for fields in lines if fields and fields[0] in names for each in _WORKING)
        return cls(time.perf_counter(), time.process_time(), ticks / _TICKS_PER_S)

    def others_since(self, before: Host) -> float:
        """Cores, on average, on which others worked."""
        seconds = max(self.at - before.at, 1e-9)
        return max(0.0, (self.worked_s - before.worked_s - (self.used_s - before.used_s)) / seconds)


# ---- who they are


@dataclass(frozen=True)
class BusyProcess:
    """A process, and the cores on which it worked on average."""

    name: str
    pid: int
    cores: float

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}): {self.cores:.1f}"


class Processes:
    """The CPU time of all other processes that can be seen, as of some moment."""

    def __init__(self) -> None:
        self.at = time.perf_counter()
        self._ticks: dict[int, tuple[str, int]] = {}
        for folder in os.listdir(_PROC):  # noqa: PTH208 - there may be thousands
            if folder.isdigit() and int(folder) != os.getpid():
                try:
                    text = (_PROC / folder / "stat").read_text(errors="replace")
                except OSError:  # it has ended
                    continue
                name, fields = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 1 :].split()
                self._ticks[int(folder)] = name, int(fields[11]) + int(fields[12])

    def since(self, before: Processes) -> list[BusyProcess]:
        """Processes that have worked since, the busiest first; one that began meanwhile with all that it has used."""
        seconds = max(self.at - before.at, 1e-9)
        found = []
        for pid, (name, ticks) in self._ticks.items():
            used = (ticks - before._ticks.get(pid, ("", 0))[1]) / _TICKS_PER_S
            if used > 0:
                found.append(BusyProcess(name, pid, used / seconds))
        return sorted(found, key=lambda each: -each.cores)


def look(seconds: float = _LOOK_S) -> tuple[float, list[BusyProcess]]:
    """Cores on which others work meanwhile, and the processes among them that can be seen, the busiest first."""
    processes, host = Processes(), Host.now()
    time.sleep(seconds)
    return Host.now().others_since(host), Processes().since(processes)


class OtherWork:
    """What steps find of other work on the cores, in words for one line; none where they were denied none."""

    def __init__(self) -> None:
        self._before: tuple[Threads, Host] | None = None
        self._words: list[str] = []
        self._processes: Processes | None = None
        self._busiest: BusyProcess | None = None

    def begin(self) -> None:
        """A step begins. Of short ones several count as one: the kernel counts others' work in ticks."""
        if self._before is None:
            self._before = Threads.now(), Host.now()

    def words(self) -> list[str]:
        """At the end of a step."""
        now = Host.now()
        if self._before is None or now.at - self._before[1].at < _SHORTEST_S:
            return self._words
        (threads, host), self._before = self._before, None
        others = now.others_since(host)
        if min(others, Threads.now().denied_since(threads)) < _NOTED:
            self._words, self._processes, self._busiest = [], None, None
            return self._words
        self._look(now.at)
        who = "" if self._busiest is None else f": {self._busiest.name} (pid {self._busiest.pid})"
        self._words = [f"others work on {others:.1f} of {len(cores())} cores{who}"]
        return self._words

    def _look(self, at: float) -> None:
        """At the processes, now and then: there may be thousands."""
        if self._processes is None or at - self._processes.at > _LOOK_AGAIN_S:
            before, self._processes = self._processes, Processes()
            if before is not None:
                self._busiest = next(iter(self._processes.since(before)), None)


def quota(groups: Path = _GROUPS, membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """Cores' worth of time that control groups above this process leave it; None where none limits it. Both versions: v2's
    files lie in the group's folder, v1's below cpu,cpuacct."""
    found = []
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = groups / controllers if controllers else groups
        folder = top / path.strip("/")
        for group in (folder, *(parent for parent in folder.parents if parent.is_relative_to(top))):
            found += _limit(group)
    return min(found, default=None)


def _limit(group: Path) -> list[float]:
    try:
        if (group / "cpu.max").exists():
            limit, period = (group / "cpu.max").read_text().split()
        else:
            limit, period = ((group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    except OSError:  # a group that this process cannot see limits it through those above, which it can
        return []
    return [int(limit) / int(period)] if limit.isdigit() else []
