"""One engine's calls: one at a time, in the process that built it; each is over before the next one begins.

[Note: one that was cut] A call notes itself before it changes anything and forgets itself as its last act. So whoever comes
next knows of one that an interrupt has cut in its own clean-up: its note is there, and its frame runs no more. What it left is
put in order then, ahead of anything else.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FrameType

from greenlet import getcurrent

from ds_vertical import interrupts
from ds_vertical.interrupts import end_generators, num_open, take_back

NOTHING, FLUSHED, RUNNING = range(3)  # what a call may have left half-way: nothing, updates on their way, all of a schedule


@dataclass(eq=False)
class _Call:
    """`changes`, `blocks`: of the thread's changes, and of the blocks that signals do not cut, those after so many are the
    call's; `level`: see NOTHING."""

    name: str
    frame: FrameType
    thread: threading.Thread
    changes: int
    blocks: int
    level: int = NOTHING

    def left_by(self, cut: _Call) -> None:
        """Take over what is to be put in order."""
        self.level = cut.level
        if cut.thread is self.thread:
            self.changes, self.blocks = min(self.changes, cut.changes), min(self.blocks, cut.blocks)

    def is_mine(self) -> bool:
        """Whether this thread is in the call."""
        if self.thread is not threading.current_thread():
            return False
        here: FrameType | None = sys._getframe()
        coroutine = getcurrent()
        while True:
            while here is not None:
                if here is self.frame:
                    return True
                here = here.f_back
            if coroutine.parent is None:
                return False
            coroutine = coroutine.parent
            here = coroutine.gr_frame


class Calls:
    """`restore(level, take_back)` puts in order what a call has left, and may be called again where it was cut; what it has
    changed for its time is taken back in between. `tear` hears of an error in it. `admit(name)` is asked ahead of each call,
    and raises where none may come now. All are the engine's, which sets them."""

    def __init__(self) -> None:
        self.restore: Callable[[int, Callable[[], None]], None] = lambda _, __: None
        self.tear: Callable[[BaseException], None] = lambda _: None
        self.admit: Callable[[str], None] = lambda _: None
        self._running: _Call | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def call(self, name: str) -> _Turn:
        """Within the block nobody else calls the engine. Raises RuntimeError where somebody does, and in a forked child."""
        self.admit(name)
        return _Turn(self, name, joins=False)

    def joined(self, name: str) -> _Turn:
        """As `call`; within this thread's own call a part of that."""
        if not self.is_mine:
            self.admit(name)
        return _Turn(self, name, joins=True)

    @property
    def is_mine(self) -> bool:
        """Whether this thread is in a call."""
        running = self._running
        return running is not None and self._pid == os.getpid() and running.is_mine()

    def leaves(self, level: int) -> None:
        """What the call under way would leave half-way from here on."""
        if self._running is not None:
            self._running.level = max(self._running.level, level)

    def running(self) -> interrupts.deferred:
        """In the block a schedule runs: signals do not cut it, and an error leaves it half-way."""
        self.leaves(RUNNING)
        return interrupts.deferred()

    def check_process(self, name: str) -> None:
        """Raises RuntimeError in a forked child."""
        if self._pid != os.getpid():
            raise RuntimeError(
                f"engine.{name}(): process {os.getpid()} was forked from {self._pid}, which built the engine and has its"
                " threads and transfers; both would write the same files: call it there, or start a process that needs one"
                ' with multiprocessing\'s "spawn" and build it there'
            )

    def begin(self, call: _Call) -> bool:
        """Note a call; returns whether it is one, and no part of this thread's own."""
        self.check_process(call.name)
        with self._lock:
            running = self._running
            if running is None or not (running.is_mine() or self._is_elsewhere(running)):
                if running is not None:
                    call.left_by(running)
                self._running = call
                return True
        if running.is_mine():
            return False
        raise RuntimeError(
            f"engine.{call.name}(): thread {running.thread.name!r} is in engine.{running.name}() of the same engine; call"
            " the engine from one thread, or take turns with a lock around every call"
        )

    def refuse(self, name: str) -> None:
        """Raises RuntimeError: within another call."""
        running = self._running
        assert running is not None
        raise RuntimeError(
            f"engine.{name}(): called within engine.{running.name}() of the same engine (by the loss function, the data"
            " iterator, a hook or the model's forward), whose micro-batches are half-way; let such code set a flag, and make"
            f" the call once {running.name} has returned"
        )

    def put_in_order(self, call: _Call) -> None:
        """What the call has left, or the one before it."""
        if call.level == NOTHING and num_open() <= call.changes:
            return
        with interrupts.deferred(firmly=True):
            if call.level != NOTHING:
                self.restore(call.level, partial(take_back, call.changes))
            take_back(call.changes)
        call.level = NOTHING

    def end(self) -> None:
        """The call under way is over: another one may begin."""
        self._running = None

    @staticmethod
    def _is_elsewhere(call: _Call) -> bool:
        return call.thread is not threading.current_thread() and call.thread.is_alive()


class _Turn:
    """See `Calls.call` and `Calls.joined`."""

    def __init__(self, calls: Calls, name: str, joins: bool) -> None:
        self._calls = calls
        self._name = name
        self._joins = joins
        self._call: _Call | None = None

    def __enter__(self) -> _Turn:
        frame = sys._getframe(1)
        call = _Call(self._name, frame, threading.current_thread(), num_open(), interrupts.num_shields())
        if not self._calls.begin(call):
            if not self._joins:
                self._calls.refuse(self._name)
            return self
        self._call = call
        interrupts.reset(call.blocks)
        self._calls.put_in_order(call)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        call, calls = self._call, self._calls
        if call is None:
            return
        if error is not None:
            end_generators(error)
            try:
                calls.put_in_order(call)
            except Exception as later:  # the first one is the cause
                calls.tear(later)
                error.add_note(f"and while that was put in order: {type(later).__name__}: {later}")
            interrupts.reset(call.blocks)
        calls.end()
        if interrupts.num_shields() == 0:
            interrupts.pause()
