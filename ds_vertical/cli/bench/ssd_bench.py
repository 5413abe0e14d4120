"""Times whole-file transfers through the queues that training uses, and finds the fastest aio settings of a disk."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

from ds_vertical.cli.common import JsonObject
from ds_vertical.config.deepspeed_keys import AIO

if TYPE_CHECKING:
    import torch

    from ds_vertical.io.aio import Transfer

    Issue = Callable[[int, int, Path], Transfer]  # `read` or `write` of a DiskQueue: (address, bytes, file)


def median_s(run: Callable[[], object], rounds: int) -> float:
    """The median seconds of `rounds` calls of `run`, after one that does not count."""
    run()  # warm: pages touched, threads started
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def transfer_s(issues: Sequence[Issue], buffers: Sequence[torch.Tensor], files: Sequence[Path], rounds: int) -> float:
    """Seconds of one whole-file transfer per queue, all at once. Raises DiskError."""

    def run() -> None:
        flying = [
            issue(buffer.data_ptr(), buffer.numel(), file) for issue, buffer, file in zip(issues, buffers, files, strict=True)
        ]
        for transfer in flying:
            transfer.wait()

    return median_s(run, rounds)


BLOCK_SIZES: Final = (1 << 18, 1 << 20, 1 << 23)
QUEUE_DEPTHS: Final = (8, 32)
THREADS: Final = (1, 4)
_WORTH: Final = 1.03  # a gain that is no gain is noise: the default stays


def combinations() -> Iterator[JsonObject]:
    """The aio settings to try, DeepSpeed's default first."""
    yield dict(AIO)
    for block_size, queue_depth, threads in itertools.product(BLOCK_SIZES, QUEUE_DEPTHS, THREADS):
        settings = AIO | {"block_size": block_size, "queue_depth": queue_depth, "intra_op_parallelism": threads}
        if settings != AIO:
            yield settings


def choose_fastest(seconds: list[tuple[JsonObject, float]]) -> JsonObject:
    """The fastest of (settings, seconds of a read and a write); the first, the default, where the gain is no more than 3 %."""
    default, own_s = seconds[0]
    best, best_s = min(seconds, key=lambda entry: entry[1])
    return best if best_s * _WORTH < own_s else default


def tune_aio(folder: Path, num_bytes: int, rounds: int) -> tuple[JsonObject, list[JsonObject]]:
    """(the JSON's "aio" section, what was measured). Raises DiskError, OSError."""
    from ds_vertical.compat import pinned_memory
    from ds_vertical.compat.ops import load

    buffer = pinned_memory.lock_host_bytes(num_bytes)
    buffer.fill_(1)
    measured: list[tuple[JsonObject, float]] = []
    table: list[JsonObject] = []
    try:
        with tempfile.TemporaryDirectory(prefix="ds_vertical.aio.", dir=folder) as scratch:
            file = Path(scratch, "file")
            for settings in combinations():
                queue = load.new_disk_queue(settings)
                try:
                    write_s = transfer_s([queue.write], [buffer], [file], rounds)
                    read_s = transfer_s([queue.read], [buffer], [file], rounds)
                finally:
                    queue.close()
                measured.append((settings, read_s + write_s))
                rates = {"read_bytes_per_s": num_bytes / read_s, "write_bytes_per_s": num_bytes / write_s}
                table.append(settings | rates)
    finally:
        pinned_memory.unlock_host_bytes(buffer)
    return choose_fastest(measured), table
