"""How fast the host computes just now: seconds of a fixed piece of work, between the steps of a run that is measured.

[Note: gauge] On a shared machine the same work takes half as long again some minutes later, so rates that were measured ahead
of a run are not the run's. `ds-vertical limits` times this piece of work in turn with a layer, and `ds-vertical ab` does so
between any two steps of a run: by how much it is slower there, the layer is too. It is done by a process of its own, whose
memory is not the run's, while the training process is stopped (SIGSTOP), lest its transfers go on for nothing meanwhile. Both
arms are stopped alike, so that neither has a rest that the other has not.
"""

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
from statistics import fmean
from time import perf_counter
from typing import Any

VARIABLE = "DS_VERTICAL_GAUGE"  # path of the socket of the process that measures
_OUT, _IN = 12288, 1024  # 96 MiB of weights, gradient and sum in bf16: where they almost fit a cache, it times the cache
_CALLS = 4  # of the work in a sample; the first, which finds the caches as others left them, is not counted
_LEAST_S = 1.0
_MOST_TOKENS = 256  # from there on products are bound by arithmetic, and more of them only take longer
_PR_SET_PDEATHSIG = 1


class Gauge:
    """The work: a linear's forward and backward for `tokens` tokens in `dtype` ("bfloat16", ...), an fp32 sum of gradients."""

    def __init__(self, tokens: int, dtype: str) -> None:
        import torch

        tokens = min(tokens, _MOST_TOKENS)
        kind = getattr(torch, dtype)
        self._weight, self._sum = torch.ones(_OUT, _IN, dtype=kind), torch.zeros(_OUT, _IN)
        self._input, self._gradient = torch.ones(tokens, _IN, dtype=kind), torch.ones(tokens, _OUT, dtype=kind)

    def sample(self) -> float:
        """Seconds of a call."""
        start = 0.0
        for call in range(_CALLS):
            start = perf_counter() if call == 1 else start
            self._input.matmul(self._weight.t())
            self._gradient.matmul(self._weight)
            self._sum += self._gradient.t() @ self._input
        return (perf_counter() - start) / (_CALLS - 1)

    def mean_s(self) -> float:
        """Seconds of a call, the mean over a second or more: a step takes the slow moments with the fast ones."""
        start, samples = perf_counter(), [self.sample()]
        while perf_counter() - start < _LEAST_S:
            samples.append(self.sample())
        return fmean(samples)


# ---- between the steps of a run


def measure_between_steps(tokens: int, dtype: str, threads: int) -> float | None:
    """Seconds of the work now, measured while this process is stopped; None where nobody has asked for it, or answers."""
    path = os.environ.get(VARIABLE)
    if path is None:
        return None
    question = json.dumps({"pid": os.getpid(), "tokens": tokens, "dtype": dtype, "threads": threads})
    try:
        with socket.socket(socket.AF_UNIX) as client, client.makefile("r") as answer:
            client.connect(path)
            client.sendall(f"{question}\n".encode())
            return float(answer.readline())
    except (OSError, ValueError):
        return None  # the run is worth more than the measurement


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """A process that measures as long as the block runs; the value for VARIABLE. Raises RuntimeError if it does not start."""
    folder = Path(tempfile.mkdtemp(prefix="ds_vertical.gauge."))
    path = folder / "socket"
    process = subprocess.Popen([sys.executable, "-m", "ds_vertical.gauge", str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            raise RuntimeError("ds_vertical.gauge did not start")
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
        gauges: dict[tuple[int, str], Gauge] = {}
        while True:
            client, _ = server.accept()
            with contextlib.suppress(OSError, ValueError), client, client.makefile("rw") as line:  # of one client's end
                asked: dict[str, Any] = json.loads(line.readline())
                torch.set_num_threads(asked["threads"])
                key = asked["tokens"], asked["dtype"]
                gauges[key] = gauges.get(key) or Gauge(*key)
                try:
                    os.kill(asked["pid"], signal.SIGSTOP)
                    seconds = gauges[key].mean_s()
                finally:
                    os.kill(asked["pid"], signal.SIGCONT)
                line.write(f"{seconds!r}\n")


if __name__ == "__main__":
    serve(sys.argv[1])
