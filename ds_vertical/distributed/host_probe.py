"""Whether a host that says nothing still has ranks of ours: its kernel answers for a process that is stopped.

Each rank listens on a socket. A rank that stands in a debugger sends no heartbeat, but the kernel still completes connections
to its socket. Where the ranks have been killed the kernel refuses them, and where the host is down nobody answers.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from collections.abc import Iterable
from typing import Final

PROBE_S: Final = 1.0  # to wait for an answer
_BACKLOG: Final = 1024  # connections that wait for a stopped process: more than come while it may be stopped
Address = tuple[str, int]


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
