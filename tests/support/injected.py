"""Faults under the aio binding, in processes that were started with `environment`: see tests/support/failing_aio.c.

Nothing here imports torch, so that the tests' own process may use it as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

SOURCE = Path(__file__).with_name("failing_aio.c")
Kind = Literal["read", "write", "open to read", "open to write"]
_KINDS = ("read", "write", "open to read", "open to write")


def build(folder: Path) -> Path:
    """The library, compiled into a folder."""
    library = folder / "failing_aio.so"
    flags = ("-std=gnu11", "-O1", "-Wall", "-Werror", "-shared", "-fPIC")
    subprocess.run(["cc", *flags, "-o", str(library), str(SOURCE), "-ldl", "-lpthread"], check=True)
    return library


def environment(library: Path) -> dict[str, str]:
    """Variables of a process whose I/O can be made to fail."""
    return {"LD_PRELOAD": str(library), "DS_VERTICAL_FAILING_AIO": str(library)}


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(os.environ["DS_VERTICAL_FAILING_AIO"])  # the one that is loaded already


@contextlib.contextmanager
def failing(name: str, kind: Kind, number: int, after: int = 0, count: int = -1) -> Iterator[None]:
    """Within the block operations on files with `name` in their path fail with an errno, 0: move a part of their bytes only;
    none of the first `after`, then `count` of them (-1: all)."""
    library = _library()
    library.failing_aio_arm(name.encode(), _KINDS.index(kind), number, after, count)
    try:
        yield
    finally:
        library.failing_aio_arm(b"", 0, 0, 0, 0)


def num_failed() -> int:
    """Operations that were made to fail since the last `failing` began."""
    return _library().failing_aio_hits()


def num_seen() -> int:
    """Operations of that kind on such files, failed or not."""
    return _library().failing_aio_seen()
