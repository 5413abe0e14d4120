"""Changes that hold for a block, and are taken back also where an interrupt has cut the end of the block.

[Note: interrupts] Python raises KeyboardInterrupt, and what other handlers of signals raise, between any two bytecodes of the
main thread: ahead of the `finally` that takes a change back, and within it. So a change is written down before it is made,
with a way back that may be taken twice and where nothing was changed; what is still written down when an engine's call is over
is taken back then, or ahead of the next one. Generators cannot do without: one that is cut on its way out runs its `finally`
when the last reference to it goes, any time later, and its way back must find nothing left to do then, or be taken earlier:
`end_generators`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import TracebackType


class _Open(threading.local):
    def __init__(self) -> None:
        self.changes: list[Changed] = []


_open = _Open()


class Changed:
    """Within the block something is changed, by `do` unless the block does it; `undo` takes it back at the end, only after an
    error if `only_if_failed`. What has been taken back meanwhile is left as it is."""

    def __init__(
        self, undo: Callable[[], object], do: Callable[[], object] | None = None, *, only_if_failed: bool = False
    ) -> None:
        self.undo = undo
        self._do = do
        self._only_if_failed = only_if_failed

    def __enter__(self) -> None:
        _open.changes.append(self)
        if self._do is not None:
            self._do()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._only_if_failed:
            self.undo = _nothing
        if self in _open.changes:
            take_back(_open.changes.index(self))


def num_open() -> int:
    """How many changes of this thread have not been taken back."""
    return len(_open.changes)


def take_back(first: int = 0) -> None:
    """Take back what this thread has changed and not taken back, the last change first; all but the `first` ones."""
    changes = _open.changes
    while len(changes) > first:
        changes[-1].undo()
        changes.pop()  # not before: an interrupt must not forget it


def end_generators(error: BaseException | None) -> None:
    """Let context managers that an interrupt has cut on their way in or out end now, not when the traceback goes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        trace: TracebackType | None = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == contextlib.__file__:
                with contextlib.suppress(RuntimeError):  # it is running
                    trace.tb_frame.clear()
            trace = trace.tb_next
        error = error.__cause__ or error.__context__


def _nothing() -> None:
    """Nothing to take back."""
