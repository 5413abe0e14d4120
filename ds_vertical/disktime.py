"""Seconds of something done again and again, and of whole-file transfers through our own queues."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any


def median_s(run: Callable[[], Any], rounds: int) -> float:
    """Median seconds of `rounds` runs, after one that does not count."""
    run()  # warm: pages touched, threads started
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def transfer_s(issues: Sequence[Callable[..., Any]], buffers: Sequence[Any], files: Sequence[Path], rounds: int) -> float:
    """Seconds of one whole-file transfer per queue, all at once. Raises DiskError."""

    def run() -> None:
        flying = [
            issue(buffer.data_ptr(), buffer.numel(), file) for issue, buffer, file in zip(issues, buffers, files, strict=True)
        ]
        for transfer in flying:
            transfer.wait()

    return median_s(run, rounds)
