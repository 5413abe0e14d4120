"""Descriptors of files and folders that close by themselves, wherever an interrupt comes between their opening and their end.

Between `os.open` and the statement that closes its number a signal's handler may raise, and nobody has the number then: it
stays open until the process ends. Here handlers wait while a number has no owner yet, or is being closed. One gap is left: a
handler that raises while Python closes what nobody has any more is lost, and so is the number. Imports neither torch nor
deepspeed.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

from ds_vertical import interrupts


class Descriptor:
    """An open file's or folder's number `fd`, which is closed by `close`, at the end of a `with` block, or once nobody has this
    object; not at the interpreter's exit, where the kernel does it."""

    def __init__(self, open_it: Callable[[], int]) -> None:
        """`open_it`: opens it and returns the number. Raises what that raises."""
        with interrupts.deferred(firmly=True):
            self.fd = open_it()
            self._closing = weakref.finalize(self, os.close, self.fd)
            self._closing.atexit = False

    def __enter__(self) -> int:
        return self.fd

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close it; harmless when it is closed."""
        with interrupts.deferred(firmly=True):
            self._closing()
