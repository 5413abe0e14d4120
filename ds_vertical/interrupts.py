"""Changes that hold for a block, and are taken back also where an interrupt has cut the end of the block.

[Note: interrupts] Python raises KeyboardInterrupt, and what other handlers of signals raise, between any two bytecodes of the
main thread: ahead of the `finally` that takes a change back, and within it. So a change is written down before it is made,
with a way back that may be taken twice and where nothing was changed; what is still written down when an engine's call is over
is taken back then, or ahead of the next one. Generators cannot do without: one that is cut on its way out runs its `finally`
when the last reference to it goes, any time later, and its way back must find nothing left to do then, or be taken earlier:
`end_generators`.

Signals that arrive while something must not be cut wait until it is over.

[Note: deferred signals] A handler that raises, as Ctrl-C's does, raises between any two bytecodes. Within `deferred` the
handlers of the main thread's signals only note the signal; the handler that was there is called at the next `pause`, at the
end, or at once where that does no harm: in the user's own forward (each is a coroutine of its own), which may take any time,
and in a wait for transfers (`waiting`). Within `deferred(firmly=True)` it waits there, too. A signal that comes again a second
later is not kept waiting: whoever sends it wants the process back, and what it cuts is put in order, or refused, by whoever
comes next.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType, TracebackType
from typing import Any, Final, TypeVar

from greenlet import getcurrent


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


F = TypeVar("F", bound=Callable[..., Any])

AGAIN_S: Final = 1.0
# whose handlers may raise; a fault's, and those of the terminal, stay as they are
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_NUMBERS: Final = tuple(map(int, _SIGNALS))

_waits: set[CodeType] = set()
_before: dict[int, Any] = {}  # handlers that ours stands for
_noted: dict[int, float] = {}  # signals, and when they came
_blocks: list[tuple[Any, bool]] = []  # that are open: the coroutine of each, and whether it is firm
_pid = 0


def waiting(function: F) -> F:
    """A function that waits, and that an exception may leave at any place."""
    _waits.add(function.__code__)
    return function


def pause() -> None:
    """Signals that have come are obeyed here: their handlers may raise."""
    if _noted:
        _obey()


class deferred:  # noqa: N801 - used as a function
    """The block is not cut by a signal's handler; see [Note: deferred signals]. Outside the main thread none ever is."""

    def __init__(self, firmly: bool = False) -> None:
        self._firmly = firmly
        self._before: int | None = None

    def __enter__(self) -> None:
        global _pid
        if threading.current_thread() is not threading.main_thread():
            return
        if _pid != os.getpid():
            _pid = os.getpid()
            _blocks.clear()
        self._before = len(_blocks)
        if not _blocks:
            _install()
        _blocks.append((getcurrent(), self._firmly))

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            reset(self._before)
            if not _blocks:
                pause()


def num_shields() -> int:
    """How many blocks are open."""
    return len(_blocks) if threading.current_thread() is threading.main_thread() else 0


def reset(first: int) -> None:
    """Only the `first` blocks are open, whatever an interrupt has cut."""
    if len(_blocks) > first and threading.current_thread() is threading.main_thread():
        del _blocks[first:]
        if not _blocks:
            _remove()


def _install() -> None:
    for number in _NUMBERS:
        handler = signal.getsignal(number)
        if callable(handler) and handler is not _hear:
            _before[number] = handler
            signal.signal(number, _hear)


def _remove() -> None:
    for number, handler in _before.items():
        if signal.getsignal(number) is _hear:
            signal.signal(number, handler)


def _hear(number: int, frame: FrameType | None) -> None:
    """The handler. Where nothing is open it hands on: somebody has put it back later than we have taken it away."""
    now = time.monotonic()
    first = _noted.get(number)
    again = first is not None and now - first >= AGAIN_S
    if not _blocks or _pid != os.getpid() or again or _does_no_harm(frame):
        _noted.pop(number, None)
        _hand_on(number, frame)
    elif first is None:
        _noted[number] = now


def _does_no_harm(frame: FrameType | None) -> bool:
    coroutine, is_firm = _blocks[-1]
    return not is_firm and (getcurrent() is not coroutine or (frame is not None and frame.f_code in _waits))


def _hand_on(number: int, frame: FrameType | None) -> None:
    handler = _before.get(number)
    if callable(handler):
        handler(number, frame)


def _obey() -> None:
    while _noted:
        number, _ = _noted.popitem()
        _hand_on(number, None)
