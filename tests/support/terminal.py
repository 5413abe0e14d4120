"""A real pseudo-terminal and what a reader would see on it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from unittest import mock

_MARK = b"\x00"  # nothing that is tested writes it


class Terminal:
    """`stream` writes to the terminal; a thread reads the other end, as whoever sits in front of it does."""

    def __init__(self, columns: int = 100, lines: int = 24) -> None:
        self._near, far = pty.openpty()
        fcntl.ioctl(far, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.stream = os.fdopen(far, "w", buffering=1)
        self._rows, self._row, self._column = [""], 0, 0
        self._pending = b""
        self._marks = threading.Semaphore(0)
        self.num_bytes = 0
        threading.Thread(target=self._read, daemon=True).start()

    def lines(self) -> list[str]:
        """What the screen shows now, without spaces at the ends of lines and empty lines at its end."""
        self.stream.flush()
        os.write(self.stream.fileno(), _MARK)
        assert self._marks.acquire(timeout=20)
        shown = [row.rstrip() for row in self._rows]
        while shown and not shown[-1]:
            shown.pop()
        return shown

    def clear(self) -> None:
        self.lines()
        self._rows, self._row, self._column, self.num_bytes = [""], 0, 0, 0

    def close(self) -> None:
        self.stream.close()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the other end was closed
            while data := os.read(self._near, 4096):
                for byte in data:
                    self._take(bytes([byte]))
        os.close(self._near)

    def _take(self, byte: bytes) -> None:
        if byte == _MARK:
            self._marks.release()
            return
        self.num_bytes += 1
        self._pending += byte
        if self._pending in (b"\x1b", b"\x1b["):
            return
        taken, self._pending = self._pending, b""
        if taken == b"\x1b[A":
            self._row = max(0, self._row - 1)
        elif taken == b"\r":
            self._column = 0
        elif taken == b"\n":
            self._row += 1
            self._rows += [""] * (self._row + 1 - len(self._rows))
        else:
            assert len(taken) == 1 and taken.isascii() and taken.decode().isprintable(), taken
            row = self._rows[self._row].ljust(self._column)
            self._rows[self._row] = row[: self._column] + taken.decode() + row[self._column + 1 :]
            self._column += 1


@contextlib.contextmanager
def terminal(columns: int = 100) -> Iterator[Terminal]:
    """A terminal that is `sys.stdout` and `sys.stderr`, two streams, within the block."""
    made = Terminal(columns)
    second = os.fdopen(os.dup(made.stream.fileno()), "w", buffering=1)
    try:
        with mock.patch.object(sys, "stderr", made.stream), mock.patch.object(sys, "stdout", second):
            yield made
    finally:
        second.close()
        made.close()
