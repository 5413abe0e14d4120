"""Which aio settings move bytes fastest on a disk: every combination of a few, read and written through our own queues."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ds_vertical.deepspeed_json import AIO
from ds_vertical.disktime import transfer_s

BLOCK_SIZES: Final = (1 << 18, 1 << 20, 1 << 23)
QUEUE_DEPTHS: Final = (8, 32)
THREADS: Final = (1, 4)
_WORTH: Final = 1.03  # a gain that is no gain is noise: the default stays


def combinations() -> Iterator[dict[str, Any]]:
    """The default first."""
    yield dict(AIO)
    for block_size, queue_depth, threads in itertools.product(BLOCK_SIZES, QUEUE_DEPTHS, THREADS):
        settings = AIO | {"block_size": block_size, "queue_depth": queue_depth, "intra_op_parallelism": threads}
        if settings != AIO:
            yield settings


def choose_fastest(seconds: list[tuple[dict[str, Any], float]]) -> dict[str, Any]:
    """Of (settings, seconds of a read and a write), the default first: the fastest, if it is worth it."""
    default, own_s = seconds[0]
    best, best_s = min(seconds, key=lambda entry: entry[1])
    return best if best_s * _WORTH < own_s else default


def tune(folder: Path, num_bytes: int, rounds: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(the JSON's "aio" section, what was measured). Raises DiskError, OSError."""
    from ds_vertical import locked, native

    buffer = locked.lock_host_bytes(num_bytes)
    buffer.fill_(1)
    measured: list[tuple[dict[str, Any], float]] = []
    table: list[dict[str, Any]] = []
    try:
        with tempfile.TemporaryDirectory(prefix="ds_vertical.aio.", dir=folder) as scratch:
            file = Path(scratch, "file")
            for settings in combinations():
                queue = native.new_disk_queue(settings)
                try:
                    write_s = transfer_s([queue.write], [buffer], [file], rounds)
                    read_s = transfer_s([queue.read], [buffer], [file], rounds)
                finally:
                    queue.close()
                measured.append((settings, read_s + write_s))
                rates = {"read_bytes_per_s": num_bytes / read_s, "write_bytes_per_s": num_bytes / write_s}
                table.append(settings | rates)
    finally:
        locked.unlock_host_bytes(buffer)
    return choose_fastest(measured), table
