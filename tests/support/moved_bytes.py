"""What a step has read and written, by the kernel's count."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ds_vertical.io.aio import complete


def disk_bytes(direction: str) -> int:
    """Bytes that this process has had read from or written to block devices; all count that pass the page cache by."""
    match = re.search(rf"^{direction}_bytes: (\d+)$", Path("/proc/self/io").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1])


def complete_transfers(engine: Any) -> None:
    """What was issued is on the disk, or read; what is due stays due."""
    pipeline = engine.optimizer.pipeline
    pipeline.wait_idle(reads_on=True)
    with pipeline.changes.lock:
        for entry in pipeline.reads.expected.begun():
            for read in entry.reads:
                complete(read)
    engine.optimizer.gradients.file.complete()
    engine._params.writer.native.wait_all()
    for copy in engine._params.ahead.values():  # of the next step: still in flight, it would count in neither step or in both
        copy.buffer.wait_reads()
