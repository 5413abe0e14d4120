"""The process that times a layer between the steps of a run, which is stopped meanwhile: see [Note: gauge] in `gauge`."""

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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_vertical.blocktime import BlockTimer

_LEAST_S = 1.0
_PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """A process that measures as long as the block runs; the value for `gauge.VARIABLE`. Raises RuntimeError where it does not
    start."""
    folder = Path(tempfile.mkdtemp(prefix="ds_vertical.timekeeper."))
    path = folder / "socket"
    process = subprocess.Popen([sys.executable, "-m", "ds_vertical.timekeeper", str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            raise RuntimeError("ds_vertical.timekeeper did not start")
        yield str(path)
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder)


def serve(path: str) -> None:
    """Answer one run after the other, until killed, or until the process that has started this one ends."""
    import torch

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # through the `finally` that lets a stopped run go on
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        print("ready", flush=True)
        timers: dict[str, BlockTimer] = {}
        while True:
            client, _ = server.accept()
            with contextlib.suppress(OSError, ValueError), client, client.makefile("rw") as line:  # of one client's end
                asked: dict[str, Any] = json.loads(line.readline())
                torch.set_num_threads(asked["threads"])
                try:
                    os.kill(asked["pid"], signal.SIGSTOP)
                    seconds = _timer(timers, asked, Path(path).parent).block_s(_LEAST_S)
                finally:
                    os.kill(asked["pid"], signal.SIGCONT)
                line.write(f"{seconds!r}\n")


def _timer(timers: dict[str, BlockTimer], asked: Mapping[str, Any], folder: Path) -> BlockTimer:
    from ds_vertical.blocktime import Batch, BlockTimer

    key = json.dumps([asked["model"], asked["batch"]])
    if key not in timers:
        model = folder / "model.json"
        model.write_text(json.dumps(asked["model"]))
        timers[key] = BlockTimer(model, Batch(**asked["batch"]), "cpu", zero_linear=True)
    return timers[key]


if __name__ == "__main__":
    serve(sys.argv[1])
