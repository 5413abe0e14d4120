"""Trains while somebody presses Ctrl-C at random times: `interrupt_worker.py FOLDER KIND COUNT SEED`.

A thread sends SIGINT to the process, its default handler raises, the loop catches that and goes on with the next step. Prints
one line of JSON: how many signals were sent, in which calls, and what was torn or wrong afterwards. Of the kinds in `FIRST` an
engine's first step gets the signals, or the self-check ahead of it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from cut_first import FirstTrials, in_check, in_step
from cut_kinds import FIRST, STEPS, evaluate, make
from cutting import Trials, reference_of

CALLS = ("step", "step", "step", "evaluate", "save")
# An evaluation moves the counters of a model that keeps state, and the reference has none
CALLS_OF = {"stateful": ("step", "step", "step", "step", "save")}


class Presser:
    """Sends SIGINT at some time up to `longest_s` after the block begins, and has sent it when the block ends."""

    def __init__(self, chance: random.Random, longest_s: float) -> None:
        self._delay_s = chance.uniform(0.0, longest_s)
        self._sent: threading.Event
        self.done: Any = False

    def __str__(self) -> str:
        return f"SIGINT after {self._delay_s:.4f} s"

    def __enter__(self) -> None:
        self._sent = threading.Event()
        threading.Thread(target=self._press, args=(self._sent,), daemon=True).start()

    def _press(self, sent: threading.Event) -> None:
        time.sleep(self._delay_s)
        sent.set()  # ahead of it: the block must not end without the signal
        os.kill(os.getpid(), signal.SIGINT)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._sent.wait()
            time.sleep(0.02)  # the signal comes here at the latest
        self.done = kind is None or issubclass(kind, KeyboardInterrupt)


class Stopwatch:
    """In the place of a Presser: how long the block takes."""

    seconds = 0.0
    done: Any = True

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.seconds = time.monotonic() - self._start


def save(engine: Any, folder: str) -> None:
    engine.save_checkpoint(folder, tag="one")


def in_later_steps(folder: Path, kind: str, count: int, chance: random.Random) -> tuple[Counter[str], Trials]:
    seen = Counter[str]()
    with Trials(folder, partial(make, kind), STEPS) as trials:
        engine, _ = trials.ready()
        start = time.monotonic()
        trials.step()
        if "evaluate" in (calls := CALLS_OF.get(kind, CALLS)):
            evaluate(engine)
        longest_s = 1.3 * (time.monotonic() - start)
        actions = {
            "step": None,
            "evaluate": evaluate,
            "save": lambda engine: engine.save_checkpoint(str(folder / "saved"), tag="one"),
        }
        for _ in range(count):
            name = chance.choice(calls)
            trials.cut(Presser(chance, longest_s), actions[name])
            seen[name] += 1
    return seen, trials


def in_first_steps(folder: Path, kind: str, count: int, chance: random.Random) -> tuple[Counter[str], Trials]:
    steps, around = STEPS[:3], in_check if kind == "self-check" else in_step
    reference = reference_of(folder / "reference", partial(make, kind), steps, 0)
    with FirstTrials(folder, partial(make, kind), steps, reference, around=around) as trials:
        watch: Any = Stopwatch()
        trials.cut(watch)
        trials.whole = 0
        for _ in range(count):
            pressed: Any = Presser(chance, 1.1 * watch.seconds)
            trials.cut(pressed)
    return Counter({kind: count}), trials


def main(folder: str, kind: str, count: str, seed: str) -> None:
    chance = random.Random(int(seed))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    press = in_first_steps if kind in FIRST else in_later_steps
    with contextlib.redirect_stdout(io.StringIO()):
        seen, trials = press(Path(folder), kind, int(count), chance)
    told = {"seen": seen, "right": trials.whole, "torn": trials.torn, "wrong": trials.wrong, "others": trials.others}
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
