"""Which hosts are alive. A host that loses its power or its network can tell nobody: the others must notice its silence.

[Note: who judges] Once a second every rank adds 1 to its host's number in the process group's store. The store lies in the
process of rank 0. Rank 0 alone reads the numbers, so that the store's work does not grow with the square of the hosts. Rank 0
takes a host for lost when the host's number stands still. The other ranks read that in the log of failures. They judge only
rank 0's host by themselves: it is lost when the store does not answer.

[Note: stopped ranks] A host whose ranks are all stopped (by a debugger, say) is silent, too. So a silent host is asked once
more before it counts as lost. If it answers, it has STOPPED_S to go on. Each rank listens on a socket. A rank that stands in a
debugger sends no heartbeat, but the kernel still completes connections to its socket. Where the ranks have been killed the
kernel refuses them, and where the host is down nobody answers.

[Note: a patient clock] A process that was stopped for a while (by a debugger, or with its whole machine) has heard nothing
meanwhile, although no host was silent. So the clock here goes on only at a tick of the watch, and by a second at most.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import Final

from ds_vertical.distributed.failure_log import RankReport
from ds_vertical.distributed.host_peers import Store
from ds_vertical.io.runs.this_host import host_id

BEAT_S: Final = 1.0
SILENCE_S: Final = 10.0  # of silence, and a host is lost; a link that comes back within 5 s is used again 1 to 4 s later
DOUBT_S: Final = 3.0  # the same once a collective has failed: its connections are closed already
STOPPED_S: Final = 600.0  # of silence, where the host's kernel still answers for its ranks
PROBE_S: Final = 1.0  # to wait for an answer
_BACKLOG: Final = 1024  # connections that wait for a stopped process: more than come while it may be stopped
_ASK_S: Final = 5.0  # from one question to the next
_TICK_S: Final = 1.0
_ALWAYS: Final = 1 << 62  # a section that is never settled
Address = tuple[str, int]


class HostBeats:
    """This rank's part in the hosts' heartbeats, see the notes above. One thread makes all calls of the store, and may wait in
    them for ever: it calls `exchange`. The thread of the watch never waits for the store: it calls `tick` and `lost`.

    `hosts`: the ids of all ranks' hosts, in the order of the ranks; empty until all ranks have introduced themselves.
    `listener`: shows other hosts that this process is there; None: they do not ask.
    """

    def __init__(self, store: Store, rank: int, world_size: int, host: str = "", listener: Listener | None = None) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._host = host or host_id()
        self._listener = listener
        self._addresses: dict[str, list[Address]] = {}  # by host
        self._stopped: dict[str, tuple[float, float]] = {}  # by silent host: when it was first asked, and when it last answered
        self._introduced = False
        self.hosts: list[str] = []
        self._names: dict[str, str] = {}
        self._ticked, self._clock = time.monotonic(), 0.0
        self._beaten = self._answered = 0.0  # when this rank last beat, and the store last answered, by `_clock`
        self._numbers: dict[str, tuple[int, float]] = {}  # by host: its number, and since when it stands
        self._closed = False  # whether the store's thread has found the store closed
        self._reported: set[str] = set()
        self._silence_s = SILENCE_S

    @property
    def are_several(self) -> bool:
        """Whether the ranks run on more than one host, as far as is known."""
        return len(set(self.hosts)) > 1

    @contextlib.contextmanager
    def doubt(self) -> Iterator[float]:
        """A block in which a shorter silence is enough, since a collective has failed by an error of the network. Gives the
        seconds within which a lost host may turn out to be the cause: rank 0 may have no such error, and then judges by the
        longer limit."""
        self._silence_s = DOUBT_S
        try:
            yield SILENCE_S + 3 * BEAT_S if self.are_several else 0.0
        finally:
            self._silence_s = SILENCE_S

    @property
    def clock(self) -> float:
        """Seconds by the patient clock, see the note above."""
        return self._clock

    def tick(self) -> None:
        """Let the clock go on; the watch calls this several times a second."""
        now = time.monotonic()
        self._clock += min(now - self._ticked, _TICK_S)
        self._ticked = now

    # ---- the store's thread

    def exchange(self) -> None:
        """Introduce this rank at the first call, and beat once a second; rank 0 also reads all hosts' numbers. Raises what the
        store raises: RuntimeError, OSError."""
        if not self._introduced:
            address = None if self._listener is None else self._listener.address
            self._store.set(f"host/{self._rank}", json.dumps([self._host, socket.gethostname(), address]))
            self._store.add("host/count", 1)
            self._introduced = True
        if not self.hosts and self._store.add("host/count", 0) == self._world_size:
            found = [json.loads(self._store.get(f"host/{rank}")) for rank in range(self._world_size)]
            self._names = {host: name for host, name, _ in found}
            for host, _, address in found:
                self._addresses.setdefault(host, []).extend([] if address is None else [tuple(address)])
            self.hosts = [host for host, *_ in found]
        if self._listener is not None:
            self._listener.take()
        if self.are_several and self._clock - self._beaten >= BEAT_S:
            self._beat()
        self._answered = self._clock
        if self.hosts and self._rank:
            self._stopped.pop(self.hosts[0], None)

    def _beat(self) -> None:
        self._beaten = self._clock
        self._store.add(f"beat/{self._host}", 1)
        for host in dict.fromkeys(self.hosts) if self._rank == 0 else ():
            number = self._store.add(f"beat/{host}", 0)
            if self._numbers.get(host, (-1, 0.0))[0] != number:
                self._numbers[host] = number, self._clock
                self._stopped.pop(host, None)

    def close(self) -> None:
        """Note that the store is closed. The store's thread calls this; the store lay in rank 0's process."""
        self._closed = True

    # ---- the watch's thread

    def lost(self, ended: Collection[int]) -> list[RankReport]:
        """Reports of the ranks on a lost host, without the ranks `ended`. Each host is reported once, and one in a call: to ask
        a silent host may take PROBE_S, and of several that are lost at once the first is told ahead of the next question."""
        first = self.hosts[0] if self.are_several else self._host
        if self._rank == 0 and self.are_several:
            return self._first_silent(ended)
        if self._host == first or (self._closed and 0 in ended):
            return []  # in the second case the store has gone with rank 0, which had said that it ends
        if self._closed:
            return self._report(first, "has closed the store of the process group, without a word of rank 0", ended)
        if self._clock - self._answered > self._silence_s and not self._is_stopped(first):
            return self._report(first, f"has not answered for {self._silence_s:.0f} s", ended)
        return []

    def _first_silent(self, ended: Collection[int]) -> list[RankReport]:
        for host, (_, since) in list(self._numbers.items()):
            if host != self._host and self._answered - since > self._silence_s and not self._is_stopped(host):
                found = self._report(host, f"has said nothing for {self._silence_s:.0f} s", ended)
                if found:
                    return found
        return []

    def _is_stopped(self, host: str) -> bool:
        """Whether a silent host's ranks are there, and only stand still: see [Note: stopped ranks]."""
        if host in self._reported:
            return False
        first, last = self._stopped.get(host, (self._clock, -_ASK_S))
        if self._clock - last < _ASK_S:
            return True
        if self._clock - first > STOPPED_S or not any_answers(self._addresses.get(host, ())):
            return False
        self._stopped[host] = first, self._clock
        return True

    def _report(self, host: str, what: str, ended: Collection[int]) -> list[RankReport]:
        ranks = [rank for rank, other in enumerate(self.hosts) if other == host and rank not in ended]
        if host in self._reported or not ranks:
            return []
        self._reported.add(host)
        numbers = ", ".join(map(str, ranks))
        text = (
            f"host {self._names[host]} (rank{'s' * (len(ranks) > 1)} {numbers}) {what}: it is down, cut off from the network,"
            " or all its processes have been killed"
        )
        return [RankReport(rank, "lost", _ALWAYS, "", text) for rank in ranks]


# ---- whether a host that says nothing still has ranks of ours


class Listener:
    """A socket on which this process listens, at the address that faces rank 0's host. `address`: None where that cannot be
    told, or nothing can be opened there."""

    def __init__(self) -> None:
        self.address: Address | None = None
        self._socket: socket.socket | None = None
        with contextlib.suppress(OSError, KeyError, ValueError):
            master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            family, *_, there = socket.getaddrinfo(*master, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as route:
                route.connect(there)  # sends nothing
                own = route.getsockname()[0]
            self._socket = socket.create_server((own, 0), family=family, backlog=_BACKLOG)
            self._socket.setblocking(False)
            self.address = own, self._socket.getsockname()[1]
        _open.add(self)

    def take(self) -> None:
        """Close what has been connected since the last call."""
        with contextlib.suppress(OSError):
            while self._socket is not None:
                self._socket.accept()[0].close()

    def close(self) -> None:
        """Listen no more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


_open: weakref.WeakSet[Listener] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child that outlives a rank is no rank."""
    for listener in list(_open):
        listener.close()


os.register_at_fork(after_in_child=_close_in_child)


def any_answers(addresses: Iterable[Address]) -> bool:
    """Whether a process listens at one of a host's addresses. Takes PROBE_S at most where the host is down."""
    for address in addresses:
        try:
            socket.create_connection(address, PROBE_S).close()
        except TimeoutError:
            return False  # the host is down, whatever the process
        except OSError:
            continue
        return True
    return False
