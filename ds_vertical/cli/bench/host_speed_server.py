"""The process that times a layer between a run's steps, while the run is stopped: see [Note: host speed] in `metrics`."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ds_vertical.cli.common import JsonObject

if TYPE_CHECKING:
    from ds_vertical.cli.bench.block_timer import BlockTimer


_LEAST_S = 1.0
_MOST_S = 300
_PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """Starts the process, ends it with the block, and gives the value for `metrics.VARIABLE`. Raises RuntimeError where it does
    not start."""
    folder = Path(tempfile.mkdtemp(prefix="ds_vertical.timekeeper."))
    path = folder / "socket"
    process = subprocess.Popen(
        [sys.executable, "-m", "ds_vertical.cli.bench.host_speed_server", str(path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            raise RuntimeError("ds_vertical.cli.bench.host_speed_server did not start")
        yield str(path)
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder)


def serve(path: str) -> None:
    """Answer one run after the other, until killed, or until the process that has started this one ends."""
    import torch

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # through what lets a stopped run go on
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        print("ready", flush=True)
        os.dup2(2, 1)  # nobody reads what libraries print from here on
        timers: dict[str, BlockTimer] = {}
        while True:
            client, _ = server.accept()
            with contextlib.suppress(Exception), client, client.makefile("rw") as line:  # the next one is answered all the same
                asked: JsonObject = json.loads(line.readline())
                torch.set_num_threads(asked["threads"])
                with _stopped(asked["pid"]):
                    seconds = _timer(timers, asked, Path(path).parent).block_s(_LEAST_S)
                line.write(f"{seconds!r}\n")


@contextlib.contextmanager
def _stopped(pid: int) -> Iterator[None]:
    """A process stands still for the block, but for no longer than _MOST_S, nor longer than this process lives: another one
    lets it go on when its input ends."""
    waiting = f"timeout {_MOST_S} cat >/dev/null; kill -CONT {pid}"
    with subprocess.Popen(["sh", "-c", waiting], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL):
        os.kill(pid, signal.SIGSTOP)
        yield


def _timer(timers: dict[str, BlockTimer], asked: JsonObject, folder: Path) -> BlockTimer:
    from ds_vertical.cli.bench.block_timer import BlockBatch, BlockTimer

    key = json.dumps([asked["model"], asked["batch"], asked["zero_linear"]])
    if key not in timers:
        model = folder / "model.json"
        model.write_text(json.dumps(asked["model"]))
        timers.clear()  # a model's layer each
        timers[key] = BlockTimer(model, BlockBatch(**asked["batch"]), "cpu", asked["zero_linear"])
    return timers[key]


if __name__ == "__main__":
    serve(sys.argv[1])
