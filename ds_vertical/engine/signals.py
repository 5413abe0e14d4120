"""SIGTERM and SIGINT end a run between two steps, with a checkpoint where the JSON asks for one (`on_signal`).

[Note: leaving a step] The signal itself interrupts nothing: it is obeyed where all is in order. A step before its norm is left
behind the layer that computes, as if it had not been, since its early steps are in a second generation of files or not taken at
all. Steps taken in place are finished. Of several ranks any may have got the signal, and some wait in a collective for the
others: they vote behind every layer, and all leave there or none.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

import torch

from ds_vertical.compat import accelerator
from ds_vertical.distributed import ranks
from ds_vertical.errors import StepLeft
from ds_vertical.offload.speculation import StepTiming
from ds_vertical.types import SignalSettings

FINISHED: Final = 75  # exit status: the step under way was finished (EX_TEMPFAIL: try again); 128 + signal where it was left
SECOND_SIGNAL_S: Final = 2.0  # launchers send a signal several times at once; one that comes later means it
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def leave_on_sigterm() -> None:
    """Let SIGTERM, the launcher's way to end a run, end Python so that the run's folder is removed; other handlers stay."""
    if _in_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _leave_at_once)


def _leave_at_once(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class Stopping:
    """What one engine does when it is asked to stop. `on_signal`: the section's (None: handlers stay as they are).
    `timing`: whether a step can be left.

    It hears signals from `listen` on. Handlers that somebody has set before are called as well, and put back by `close`; one
    that is set later replaces these.
    """

    def __init__(self, on_signal: SignalSettings | None, timing: StepTiming) -> None:
        self._wanted = on_signal
        self._timing = timing
        self._alone, self._tells = ranks.world_size() == 1, ranks.rank() == 0
        self._pid = os.getpid()
        self._number: int | None = None
        self._told: int | None = None  # another rank's
        self.num_votes = 0  # that this rank has taken part in, or was about to when all were
        self._asked_at = 0.0
        self._before: dict[int, Any] = {}
        self._closed = False

    def listen(self) -> None:
        """Hear signals from now on. The caller has a reference already: `close` ends what an interrupt has cut."""
        if self._wanted is None:
            return
        if not _in_main_thread():
            accelerator.log(
                "ds_vertical: warning: vertical_schedule.on_signal: only an engine built in the main thread hears signals"
            )
            return
        for number in _SIGNALS:
            self._before[number] = signal.getsignal(number)  # before it is replaced: a handler must not be forgotten
            signal.signal(number, self._note)

    def close(self) -> None:
        """Put back the handlers that were there; where somebody has set another one since, which may put this one back, hand
        on to them. Twice is harmless."""
        for number, handler in self._before.items():
            if _in_main_thread() and signal.getsignal(number) == self._note:
                signal.signal(number, handler)
        self._closed = True

    @property
    def has_heard(self) -> bool:
        """Whether a signal has come to this rank."""
        return self._number is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        """The handler. In a forked child, and when asked again, the process ends at once."""
        if self._closed:
            self._hand_on(number, frame)
            return
        now = time.monotonic()
        if os.getpid() != self._pid or (self._number is not None and now - self._asked_at >= SECOND_SIGNAL_S):
            _leave_at_once(number, frame)
        if self._number is None:
            self._number, self._asked_at = number, now
            if self._tells:  # past Python's streams: the signal may have come in the middle of a print
                name = signal.Signals(number).name
                os.write(2, f"\nds_vertical: {name}: ending with a checkpoint; once more: at once\n".encode())
        before = self._before.get(number)
        if callable(before) and before not in (_leave_at_once, signal.default_int_handler):
            before(number, frame)

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        before = self._before[number]
        if callable(before):
            before(number, frame)
        elif before != signal.SIG_IGN:
            _leave_at_once(number, frame)

    def vote(self) -> bool:
        """Whether all ranks leave what is under way: one was asked to stop, and it can be left. Collective, where it can."""
        if self._wanted is None or not self._timing.can_be_left:
            return False
        self.num_votes += 1
        return self._is_asked()

    @contextlib.contextmanager
    def obeyed(self, engine: Any, ends_step: bool = True) -> Iterator[None]:
        """One call of the engine's. A signal that came before it or meanwhile ends the process: the checkpoint is saved, and
        SystemExit raised. `ends_step`: no step is half-way when the call returns; otherwise the next call obeys."""
        if self._wanted is None:
            yield
            return
        if self._number is not None and self._alone:
            self._stop(engine, finished=False)
        random_state = torch.get_rng_state()  # seeds for the step are drawn from it
        try:
            yield
        except StepLeft:
            torch.set_rng_state(random_state)
            self._stop(engine, finished=False)
        except StopIteration:  # there was no batch for another step
            if self._number is not None and self._alone:
                self._stop(engine, finished=False)
            raise
        if not ends_step:
            return
        with ranks.collective_section("on_signal"):
            asked = self._is_asked()
        if asked:
            self._stop(engine, finished=True)

    def _is_asked(self) -> bool:
        """Whether some rank is. Collective."""
        if self._alone:
            return self._number is not None
        self._told = ranks.largest_of_all_ranks(self._number or 0) or None
        return self._told is not None

    def _stop(self, engine: Any, finished: bool) -> NoReturn:
        assert self._wanted is not None
        start = time.monotonic()
        tag = self._wanted.tag or f"global_step{engine.global_steps}"
        engine.save_checkpoint(self._wanted.save_dir, tag)
        number = self._number or self._told
        status = FINISHED if finished or number is None else 128 + number
        accelerator.log(
            f"ds_vertical: the step under way was {'finished' if finished else 'left, or there was none'}; checkpoint"
            f" {Path(self._wanted.save_dir, tag)} saved in {time.monotonic() - start:.1f} s; exit status {status}"
        )
        raise SystemExit(status)
