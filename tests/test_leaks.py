"""Two hundred steps leave nothing behind: descriptors, threads, memory, locked memory, files and bytes on SSD stay flat."""

from __future__ import annotations

import gc
import os
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path

import pytest
from harness import base_config, read_weights, running, small_buffers
from models import MixerModel, token_batches

NUM_STEPS = 200
WARM_UP = 40
EVERY = 20
MIB = 1 << 20
MAX_GROWTH = 8 * MIB  # of the resident set between the warm-up and the end: 0.05 MiB a step; a lost gradient is 6 MiB


@dataclass(frozen=True)
class Held:
    """What the process and its run's folder hold; all but `resident` must not change at all."""

    descriptors: int
    threads: int
    locked_kib: int
    num_files: int
    file_bytes: int
    blocks: int

    @classmethod
    def now(cls, folder: Path) -> Held:
        files = [path.stat() for path in folder.rglob("*") if path.is_file()]
        return cls(
            len(os.listdir("/proc/self/fd")),
            status("Threads"),
            status("VmLck"),
            len(files),
            sum(file.st_size for file in files),
            sum(file.st_blocks for file in files),
        )


def status(key: str) -> int:
    """A number of /proc/self/status; memory in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("clip", "delay", "share"), [(0.05, 1.0, None), (0.05, 0.0, None), (0.0, 0.5, None), (0.05, 0.5, 0.5)]
)
def test_two_hundred_steps_leave_nothing_behind(tmp_path: Path, clip: float, delay: float, share: float | None) -> None:
    section = {"optimizer_delay": delay, "gradient_host_share": share}
    config = base_config(tmp_path, num_micro_batches=2, dtype="fp32", clip=clip, section=section)
    seen: list[Held] = []
    resident: list[int] = []
    with running(small_buffers(config), partial(MixerModel, 3), vertical=True) as (engine, model):
        for number, batch in enumerate(token_batches(NUM_STEPS, 2, rows=1, shortest=4), start=1):
            engine.train_batch(iter(batch))
            if number % EVERY == 0:
                engine.eval_batch(iter(batch))  # and so a flush
                read_weights(model)
                if number >= WARM_UP:
                    gc.collect()
                    seen.append(Held.now(tmp_path))
                    resident.append(1024 * status("VmRSS"))
    assert len(seen) == 1 + (NUM_STEPS - WARM_UP) // EVERY
    assert all(astuple(held) == astuple(seen[0]) for held in seen), seen
    assert seen[0].num_files > 6 and seen[0].locked_kib > 0
    assert resident[-1] - resident[0] < MAX_GROWTH, resident
