"""Safety from interrupts: changes that are undone wherever a block is cut, and blocks that no signal cuts.

`Changed` is the first: something is changed for the time of a block, and undone at its end. `deferred` is the second: signals
that arrive during a block wait until it is over. `Descriptor` is an open file that closes by itself, wherever an interrupt
comes between its opening and its end.

[Note: interrupts] Python calls handlers of signals between any two bytecodes of the main thread, and a handler may raise, as
Ctrl-C's does. So an exception may come just ahead of the `finally` that undoes a change, or within it. Therefore a change is
registered before it is made, together with its undo. An undo may run twice, and where nothing was changed. When a call of the
engine is over, all changes that are still registered are undone, or at the latest ahead of the next call (`take_back`). Context
managers written as generators need more: one that is cut on its way out runs its `finally` only when the last reference to it
goes, at any later time. Its undo must find nothing left to do then, or be run earlier: `end_generators`.

[Note: deferred signals] Within `deferred` a handler of ours only notes a signal of the main thread. The handler that was there
before is called at the next `pause`, at the end of the outermost block, or at once where an exception does no harm: in the
user's own forward (a coroutine of its own), which may take any time, and in a wait for transfers (`waiting`). Within
`deferred(firmly=True)` it is not called at once there, either. A signal that comes again after a second (AGAIN_S) is handled at
once, and closes all blocks: its sender wants the process back, and what the handler raises may cut the blocks' ends. The code
that runs next puts in order, or refuses, what that has cut.

[Note: descriptors] Between `os.open` and the statement that closes its number a handler may raise, and nobody has the number
then: it stays open until the process ends. So handlers wait while a number has no owner yet, or is being closed. One gap is
left: a handler that raises while Python closes what nobody has any more is lost, and so is the number.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import CodeType, FrameType, TracebackType
from typing import Any, Final, TypeVar

from greenlet import getcurrent


class _Open(threading.local):
    def __init__(self) -> None:
        self.changes: list[Changed] = []


_open = _Open()


class Changed:
    """A context manager: `do` makes a change as the block begins, and `undo` takes it back at its end.

    Without `do` the block makes the change itself. `only_if_failed`: it is taken back only after an error. A change that
    `take_back` has undone meanwhile is not undone again. See [Note: interrupts].
    """

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
    """How many changes of this thread are registered and not undone."""
    return len(_open.changes)


def take_back(first: int = 0) -> None:
    """Undo this thread's registered changes but the `first` ones, the latest change first."""
    changes = _open.changes
    while len(changes) > first:
        changes[-1].undo()
        changes.pop()  # not before: an interrupt must not forget it


def end_generators(error: BaseException | None) -> None:
    """End the context managers in an error's tracebacks that an interrupt has cut on their way in or out.

    Otherwise their `finally` would run when the traceback is freed.
    """
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
# signals whose handlers may raise; the handlers of faults (SIGSEGV) and of job control (SIGTSTP) stay as they are
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_NUMBERS: Final = tuple(map(int, _SIGNALS))

_waits: set[CodeType] = set()
_before: dict[int, Any] = {}  # by signal: the handler that ours stands for
_noted: dict[int, float] = {}  # by signal: when it arrived (time.monotonic, seconds)
_blocks: list[tuple[Any, bool]] = []  # the open ones: the coroutine of each, and whether it is firm
_pid = 0


def waiting(function: F) -> F:
    """A decorator: marks a function that only waits, so that a handler may raise in it at any place."""
    _waits.add(function.__code__)
    return function


def pause() -> None:
    """Call the handlers of the signals that have arrived during `deferred`. They may raise."""
    if _noted:
        _obey()


class deferred:  # noqa: N801 - used as a function
    """A context manager: no signal's handler cuts the block. See [Note: deferred signals].

    Outside the main thread it does nothing: Python runs no handlers there. `firmly`: not even waits and the user's forward are
    cut.
    """

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
        try:
            if not _blocks:
                _install()
            _blocks.append((getcurrent(), self._firmly))
        except BaseException:  # a second Ctrl-C does not wait
            reset(self._before)
            raise

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            reset(self._before)
            if not _blocks:
                pause()


class Descriptor:
    """An open file's or folder's number `fd`, which is closed by `close`, at the end of a `with` block, or once nobody has this
    object; not at the interpreter's exit, where the kernel does it. See [Note: descriptors]."""

    def __init__(self, open_it: Callable[[], int]) -> None:
        """`open_it`: opens it and returns the number. Raises what that raises."""
        with deferred(firmly=True):
            self.fd = open_it()
            self._closing = weakref.finalize(self, os.close, self.fd)
            self._closing.atexit = False

    def __enter__(self) -> int:
        return self.fd

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close it; harmless when it is closed."""
        with deferred(firmly=True):
            self._closing()


def num_shields() -> int:
    """How many `deferred` blocks are open; 0 outside the main thread."""
    return len(_blocks) if threading.current_thread() is threading.main_thread() else 0


class LaidAside:
    """Registered changes and `deferred` blocks of this thread that a coroutine takes off its lists, with nothing undone, while
    it lets other code run in the middle of its blocks.

    Both methods may be cut anywhere. Then `put_back`, called once more, puts back what is missing. Around both stands a firm
    block of the other code's, which is not laid aside.
    """

    def __init__(self) -> None:
        self._changes: list[Changed] = []
        self._blocks: list[tuple[Any, bool]] = []

    def lay(self, num_changes: int, num_blocks: int) -> None:
        """Take all but the first ones off the lists."""
        self._changes = _open.changes[num_changes:]  # held here before they are there no more
        is_main = threading.current_thread() is threading.main_thread()
        self._blocks = _blocks[num_blocks:] if is_main else []
        del _open.changes[num_changes:]
        if is_main:
            del _blocks[num_blocks:]

    def put_back(self) -> None:
        """Put them on the lists again; harmless where nothing is laid aside."""
        _open.changes.extend([each for each in self._changes if each not in _open.changes])
        self._changes = []
        _blocks.extend([each for each in self._blocks if not any(each is other for other in _blocks)])  # many are equal
        self._blocks = []  # not before: an interrupt must not forget them


def reset(first: int) -> None:
    """Close all `deferred` blocks but the `first` ones: an interrupt may have cut the ends of the others."""
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
    """The handler in the place of the others. Where no block is open it calls the one it stands for: other code has saved it
    during a block and installed it again later."""
    now = time.monotonic()
    first = _noted.get(number)
    again = first is not None and now - first >= AGAIN_S
    if not _blocks or _pid != os.getpid() or again or _does_no_harm(frame):
        _noted.pop(number, None)
        if again:
            reset(0)  # what the handler raises may cut the ends of the blocks: none may stay open for good
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
