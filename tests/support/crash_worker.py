"""Runs that may be killed at any moment, each a process of its own: it builds an engine, goes on from the last checkpoint that
is there, trains and saves. What it does is appended to a log that survives it, line by line.

A process that has imported everything and done nothing else forks them (`Starter`), so that one starts in a second.

    python tests/support/crash_worker.py     # one JSON job a line on standard input
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = "@ "  # before what the starter says; DeepSpeed prints, too
DELAY = 0.25  # of the optimizer's steps
EVERY = 2  # steps between two saves
NUM_TAGS = 3  # in turn: most saves are to a tag that is there
LIMIT_S = 300.0


# ---- in the tests' process


class Starter:
    """Starts one run after another; `with` ends what is left of it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._errors = folder / "starter.log"
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        pipe = subprocess.PIPE
        with self._errors.open("w") as errors:
            command = [sys.executable, __file__]
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=environment)
        self._running: int | None = None
        self._text = ""

    def __enter__(self) -> Starter:
        self._heard("ready")
        return self

    def __exit__(self, *_: Any) -> None:
        self.kill()
        self._process.kill()
        self._process.communicate()

    def start(self, **job: Any) -> int:
        """Start a run; returns its process id."""
        assert self._running is None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        self._running = int(self._heard("started"))
        return self._running

    def kill(self) -> None:
        """SIGKILL to the run, if it is there."""
        if self._running is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._running, signal.SIGKILL)

    def ended(self) -> int:
        """Wait for the run's end; its exit code, negative: the signal that ended it."""
        code = os.waitstatus_to_exitcode(int(self._heard("ended")))
        self._running = None
        return code

    def _heard(self, word: str) -> str:
        """What the starter says next; DeepSpeed's own lines are left out."""
        assert self._process.stdout is not None
        output, end = self._process.stdout.fileno(), time.monotonic() + LIMIT_S
        while True:
            line, is_whole, rest = self._text.partition("\n")
            if not is_whole:
                assert select.select([output], [], [], max(0.0, end - time.monotonic()))[0], self.errors()
                data = os.read(output, 1 << 16).decode()
                assert data, self.errors()
                self._text += data
                continue
            self._text = rest
            if line.startswith(MARK):
                assert line.startswith(f"{MARK}{word} "), line + self.errors()
                return line.removeprefix(f"{MARK}{word} ")

    def errors(self) -> str:
        return self._errors.read_text()[-5000:]


class Log:
    """Lines of words that a killed process leaves complete, all but the last one."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, *words: object) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(fd, (" ".join(map(str, words)) + "\n").encode())
        os.fsync(fd)
        os.close(fd)

    def lines(self) -> list[list[str]]:
        if not self._path.exists():
            return []
        return [line.split() for line in self._path.read_text().splitlines()]

    def wait_for(self, is_there: Callable[[list[list[str]]], bool]) -> None:
        """Return once the lines are as wanted."""
        end = time.monotonic() + LIMIT_S
        while not is_there(self.lines()):
            assert time.monotonic() < end, self.lines()[-5:]
            time.sleep(0.01)


# ---- in the runs' processes


def main() -> int:
    # imported here, once for all runs, and nothing started
    import harness  # noqa: F401
    import resuming  # noqa: F401

    import ds_vertical.engine.engine  # noqa: F401

    print(f"{MARK}ready to start", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            quiet = os.open(os.devnull, os.O_RDWR)
            os.dup2(quiet, 0)
            os.dup2(2, 1)  # what DeepSpeed prints is none of the starter's words
            return run(**job)
        print(f"{MARK}started {pid}", flush=True)
        _, status = os.waitpid(pid, 0)
        print(f"{MARK}ended {status}", flush=True)
    return 0


def run(
    ssd: str,
    saved: str,
    log: str,
    end: int | None = None,
    out: str | None = None,
    point: str | None = None,
    tag: str | None = None,
    soak: int | None = None,
) -> int:
    """Go on from the latest checkpoint in `saved`, save every EVERY steps, up to step `end`, then write the contents to `out`.

    `point`: be killed there in the first save, to `tag`. `soak`: seed of what else is done between two steps.
    """
    from harness import build_engine, contents, dispose
    from processes import status
    from resuming import config_in, model_of

    engine, model = build_engine(config_in(Path(ssd), delay=DELAY), model_of, vertical=True)
    told, folder = Log(Path(log)), Path(saved)
    if (folder / "latest").exists():
        engine.load_checkpoint(saved)
    told.add("ready", engine.global_steps)
    if point is not None:
        be_killed_at(point)
    draw = None if soak is None else random.Random(f"{soak} {engine.global_steps} {len(told.lines())}")
    while end is None or engine.global_steps < end:
        train(engine, told)
        if draw is not None:
            wander(engine, told, folder, draw)
            numbers = open_elsewhere(ssd), status("Threads"), status("VmLck"), status("VmRSS")
            told.add("held", *numbers, bytes_below(Path(ssd)))
        elif engine.global_steps % EVERY == 0:
            save(engine, told, folder, tag or f"tag{engine.global_steps // EVERY % NUM_TAGS}")
    if out is not None:
        import torch

        torch.save(contents(engine, model), out)
    dispose(engine)
    return 0


def train(engine: Any, told: Log) -> None:
    from resuming import BATCHES

    step = engine.global_steps
    loss = engine.train_batch(iter(BATCHES[step % len(BATCHES)])).item()
    told.add("loss", step, loss.hex())


def save(engine: Any, told: Log, folder: Path, tag: str) -> None:
    told.add("saving", engine.global_steps)
    engine.save_checkpoint(str(folder), tag=tag)
    told.add("saved", engine.global_steps)


def wander(engine: Any, told: Log, folder: Path, draw: random.Random) -> None:
    """Something that users do between two steps, or nothing."""
    chance = draw.random()
    if chance < 0.12:
        told.add("eval", engine.global_steps, evaluate(engine))
    elif chance < 0.24:
        save(engine, told, folder, f"tag{draw.randrange(NUM_TAGS)}")
    elif chance < 0.3 and (folder / "latest").exists():
        engine.load_checkpoint(str(folder))
        told.add("loaded", engine.global_steps)


def evaluate(engine: Any) -> str:
    from resuming import BATCHES

    return engine.eval_batch(iter(BATCHES[3])).item().hex()


def bytes_below(folder: Path) -> int:
    """Blocks of all files, a file of several names once."""
    files: dict[tuple[int, int], os.stat_result] = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            status = path.lstat()
            files[status.st_dev, status.st_ino] = status
    return sum(status.st_blocks * 512 for status in files.values())


def open_elsewhere(ssd: str) -> int:
    """Descriptors but those of the run's files, which are open as long as transfers are in flight."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found += not os.readlink(f"/proc/self/fd/{name}").startswith(ssd)
    return found


def be_killed_at(point: str) -> None:
    from ds_vertical.engine.checkpoint import save as checkpoint

    def reach(reached: str) -> None:
        if reached == point:
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.reach = reach


if __name__ == "__main__":
    sys.exit(main())
