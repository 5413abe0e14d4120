"""Which ranks of this host are alive: a process that was killed tells nobody."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol


class Store(Protocol):
    """The calls that failure_log and this module make of a torch store. Each raises RuntimeError once the store is gone."""

    def add(self, key: str, value: int, /) -> int:
        """Add to the key's number, 0 at first; returns the sum."""
        ...

    def set(self, key: str, value: str, /) -> None:
        """Give the key a value."""
        ...

    def get(self, key: str, /) -> bytes:
        """The key's value, as soon as it has one."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys have values."""
        ...


class Process(NamedTuple):
    """A process among all that this kernel has had. `home`: the kernel's boot, and the process's namespace."""

    home: str
    pid: int
    start_ticks: str

    @classmethod
    def me(cls) -> Process:
        """The calling process. Raises OSError where /proc does not say."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").readlink()
        return cls(f"{boot} {namespace}", os.getpid(), process_status(os.getpid())[1])

    def is_alive(self) -> bool:
        """Whether the process runs; to be asked in a process with the same home. A zombie counts as ended."""
        try:
            state, start_ticks = process_status(self.pid)
        except OSError:
            return False
        return state not in "ZX" and start_ticks == self.start_ticks


def process_status(pid: int) -> tuple[str, str]:
    """A process's state letter, and its start in clock ticks since boot, as proc(5) writes them. Raises OSError."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    fields = text.rpartition(")")[2].split()  # the command's name before the last parenthesis may hold anything
    return fields[0], fields[19]


class HostPeers:
    """The processes of the ranks that run on this host, this one's among them. They find each other in the process group's
    store, so `introduce` and `meet` are called on the thread that makes all calls of the store.

    `processes`: by rank, those that have introduced themselves.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._home = ""  # this process's, once it has introduced itself; stays empty where /proc does not say
        self._introduced = False
        self._num_met = 0
        self.processes: dict[int, Process] = {}

    def introduce(self) -> None:
        """Write this process into the store, at the first call. A process that cannot read /proc is watched by nobody. Raises
        RuntimeError for a store that is gone."""
        if self._introduced:
            return
        self._introduced = True
        with contextlib.suppress(OSError):
            me = Process.me()
            number = self._store.add(f"home/{me.home}", 1)
            self._store.set(f"home/{me.home}/{number}", json.dumps([self._rank, *me]))
            self._home = me.home

    def meet(self) -> None:
        """Read from the store which ranks of this host have introduced themselves since the last call. Raises RuntimeError for
        a store that is gone."""
        if not self._home or len(self.processes) == self._world_size:
            return
        for number in range(self._num_met + 1, self._store.add(f"home/{self._home}", 0) + 1):
            if not self._store.check([f"home/{self._home}/{number}"]):
                return
            rank, *fields = json.loads(self._store.get(f"home/{self._home}/{number}"))
            self.processes[rank] = Process(*fields)
            self._num_met = number

    def gone(self, ended: Collection[int]) -> Iterator[tuple[int, Process]]:
        """The other ranks of this host, but those `ended`, whose processes have ended, with these."""
        for rank, process in list(self.processes.items()):  # those of this moment: others may introduce themselves now
            if rank not in ended and rank != self._rank and not process.is_alive():
                yield rank, process
