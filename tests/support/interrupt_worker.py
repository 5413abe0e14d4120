"""Trains while somebody presses Ctrl-C at random times: `interrupt_worker.py FOLDER KIND COUNT SEED`.

A thread sends SIGINT to the process, its default handler raises, the loop catches that and goes on with the next step. Prints
one line of JSON: how many signals were sent, in which calls, and what was torn or wrong afterwards.
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
from pathlib import Path
from typing import Any

from cut_kinds import STEPS, evaluate, make
from cutting import Trials

CALLS = ("step", "step", "step", "evaluate", "save")


class Presser:
    """Sends SIGINT at some time up to `longest_s` after the block begins, and has sent it when the block ends."""

    def __init__(self, chance: random.Random, longest_s: float) -> None:
        self._delay_s = chance.uniform(0.0, longest_s)
        self._sent = threading.Event()
        self.done: Any = False

    def __str__(self) -> str:
        return f"SIGINT after {self._delay_s:.4f} s"

    def __enter__(self) -> None:
        threading.Thread(target=self._press, daemon=True).start()

    def _press(self) -> None:
        time.sleep(self._delay_s)
        self._sent.set()  # ahead of it: the block must not end without the signal
        os.kill(os.getpid(), signal.SIGINT)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._sent.wait()
            time.sleep(0.02)  # the signal comes here at the latest
        self.done = kind is None or issubclass(kind, KeyboardInterrupt)


def main(folder: str, kind: str, count: str, seed: str) -> None:
    chance, seen = random.Random(int(seed)), Counter[str]()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    saved = Path(folder) / "saved"
    with contextlib.redirect_stdout(io.StringIO()), Trials(Path(folder), lambda place: make(kind, place), STEPS) as trials:
        engine, _ = trials.ready()
        start = time.monotonic()
        evaluate(engine)
        trials.step()
        longest_s = 1.3 * (time.monotonic() - start)
        actions = {"step": None, "evaluate": evaluate, "save": lambda engine: engine.save_checkpoint(str(saved), tag="one")}
        for _ in range(int(count)):
            name = chance.choice(CALLS)
            before = len(trials.torn), len(trials.wrong)
            trials.cut(Presser(chance, longest_s), actions[name])
            seen[name] += 1
            seen["torn"] += len(trials.torn) - before[0]
            seen["wrong"] += len(trials.wrong) - before[1]
    print(json.dumps({"seen": seen, "torn": trials.torn, "wrong": trials.wrong}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
