"""What a byte read or written takes from a computation on the host.

[Note: cores and bytes] The kernel submits, pins pages and completes on the cores that compute, and a virtual disk is served by
the host of the virtual machine, often on the same ones; transfers and products share the memory's bandwidth too. All of it is
counted at once, as seconds of a core per byte: by how much the same products slow down beside transfers, times the cores that
they compute on, over the bytes per second that were moved meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

_WINDOW_S = 0.25  # long against a product and a transfer, short against what others do on a shared machine
_TOKENS, _WIDTH, _WEIGHTS = 8, 1024, 12  # 50 MB of weights: more than caches hold, as a layer's


def core_s_per_byte(transfer: Callable[[], int], num_cores: int, num_pairs: int) -> float:
    """Seconds of a core for a byte, 0 or more. `transfer` does some transfers of both directions to their end and returns how
    many bytes these were; it is called in another thread. Windows with and without alternate, so that a drift of the machine
    hits both. Raises what `transfer` raises."""
    compute = _products()
    compute(_WINDOW_S)
    found = []
    for _ in range(num_pairs):
        alone = compute(_WINDOW_S)
        mover = _Mover(transfer)
        mover.start()
        beside = compute(_WINDOW_S)
        bytes_per_s = mover.stop()
        found.append((1 - beside / alone) * num_cores / bytes_per_s)
    return max(0.0, median(found))


class _Mover(threading.Thread):
    """Repeats a transfer until it is stopped; `stop` returns bytes per second, and raises what went wrong."""

    def __init__(self, transfer: Callable[[], int]) -> None:
        super().__init__(daemon=True)
        self._transfer = transfer
        self._stopped = threading.Event()
        self._num_bytes = 0
        self._seconds = 0.0
        self._error: BaseException | None = None

    def run(self) -> None:
        start = time.perf_counter()
        try:
            while not self._stopped.is_set():
                self._num_bytes += self._transfer()
        except BaseException as error:  # raised by stop, in the caller's thread
            self._error = error
        self._seconds = time.perf_counter() - start

    def stop(self) -> float:
        self._stopped.set()
        self.join()
        if self._error is not None:
            raise self._error
        return self._num_bytes / self._seconds


def _products() -> Callable[[float], float]:
    """Products of few tokens with more weights than caches hold, for so many seconds: products per second."""
    import torch

    inputs = torch.ones(_TOKENS, _WIDTH)
    weights: list[Any] = [torch.ones(_WIDTH, _WIDTH) for _ in range(_WEIGHTS)]

    def compute(seconds: float) -> float:
        count, start = 0, time.perf_counter()
        while (passed := time.perf_counter() - start) < seconds:
            for each in weights:
                torch.nn.functional.linear(inputs, each)
            count += len(weights)
        return count / passed

    return compute
