"""An engine and one step of it, in a process that may lock so many bytes of memory more, as users without CAP_IPC_LOCK may.

    python tests/support/locked_worker.py FILE LIMIT mixer|adapters

Reads the JSON from FILE, and writes there what has come of it: "refused" and the words, or "trained"; bytes that were locked at
most beyond those at the start, and those that are locked at the end. "adapters": made outside zero.Init, of a frozen base that
was made under it.
"""

from __future__ import annotations

import ctypes
import json
import resource
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

# run as a script, so this folder is first on the path
import harness
import late_accelerator
from adapters import BATCHES, adapted, llama
from models import MixerModel, token_batches
from processes import status
from torch import nn

from ds_vertical.errors import MemoryBudgetError

_VERSION, _CAP_IPC_LOCK = 0x20080522, 14


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Capabilities(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def allow_locking(num_bytes: int) -> None:
    """So many more than are locked, and none by right."""
    libc, header, found = ctypes.CDLL(None, use_errno=True), _Header(_VERSION, 0), (_Capabilities * 2)()
    assert libc.capget(ctypes.byref(header), found) == 0
    found[0].effective &= ~(1 << _CAP_IPC_LOCK)
    assert libc.capset(ctypes.byref(header), found) == 0
    limit = 1024 * status("VmLck") + num_bytes
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))


class Watch(threading.Thread):
    """Notes the most that is locked, until `enough`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.most = status("VmLck")
        self.enough = threading.Event()

    def run(self) -> None:
        while not self.enough.wait(0.001):
            self.most = max(self.most, status("VmLck"))


def adapters() -> nn.Module:
    """A base under the zero.Init that is open, its adapters outside."""
    from deepspeed.runtime.zero.partition_parameters import restore_init_context, shutdown_init_context

    base = llama(512)
    shutdown_init_context()
    try:
        return adapted(base, 8)
    finally:
        restore_init_context()


def main(file: str, limit: str, kind: str) -> int:
    late_accelerator.use()  # whose driver locks our buffers, so that they do not count
    harness.start_process_group()
    config = json.loads(Path(file).read_text())
    allow_locking(int(limit))
    watch = Watch()
    watch.start()
    try:
        mixes = kind == "mixer"
        build = partial(MixerModel, 3, vocab=256) if mixes else adapters
        batch: list[Any] = token_batches(1, 3, vocab=256, rows=1, shortest=5)[0] if mixes else [*BATCHES[0], BATCHES[1][0]]
        with harness.running(config, build, vertical=True) as (engine, _):
            engine.train_batch(iter(batch))
        found = ["trained", ""]
    except MemoryBudgetError as error:
        found = ["refused", str(error)]
    watch.enough.set()
    watch.join()
    locked = [1024 * (watch.most - watch.before), 1024 * (status("VmLck") - watch.before)]
    Path(file).write_text(json.dumps([*found, *locked]))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
