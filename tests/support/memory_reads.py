"""How the ranks of a host bring copies to each other: out of memory that they share, or as messages."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from ds_vertical.distributed import host_memory
from ds_vertical.distributed.host_memory import SharedMemory


@contextmanager
def counted(shares: bool) -> Iterator[Counter[str]]:
    """Counts, of the gathers in the block for which ranks have memory of the host, those "read" out of it and those "sent", and
    of the reductions those "summed" there and those "exchanged". Behind the block "mapped" has the pieces that this process
    still has. Without `shares` the memory cannot be made."""
    found: Counter[str] = Counter()
    parts_of_all = SharedMemory.parts_of_all

    def noted(memory: SharedMemory, *given: Any) -> Any:
        parts = parts_of_all(memory, *given)
        of_weights = "weights" in threading.current_thread().name
        found[("sent" if parts is None else "read") if of_weights else ("exchanged" if parts is None else "summed")] += 1
        return parts

    folder = host_memory._FOLDER if shares else Path("/nonexistent")
    with mock.patch.object(SharedMemory, "parts_of_all", noted), mock.patch.object(host_memory, "_FOLDER", folder):
        yield found
    found["mapped"] = Path("/proc/self/maps").read_text().count("/dev/shm/ds_vertical.")
