"""Signals that arrive while something must not be cut wait until it is over.

[Note: deferred signals] A handler that raises, as Ctrl-C's does, raises between any two bytecodes. Within `deferred` the
handlers of the main thread's signals only note the signal; the handler that was there is called at the next `pause`, at the
end, or at once where that does no harm: in the user's own forward (each is a coroutine of its own), which may take any time,
and in a wait for transfers (`waiting`). Within `deferred(firmly=True)` it waits there, too. A signal that comes again a second
later is not kept waiting: whoever sends it wants the process back, and what it cuts is put in order, or refused, by whoever
comes next.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Final, TypeVar

from greenlet import getcurrent

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


def num_open() -> int:
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
