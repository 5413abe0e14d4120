"""Whether another Python thread runs during a CPU Adam update; tests/upstream/test_patches.py runs it as a process of its own.

    python tests/support/adam_gap.py [--build FOLDER]

prints one JSON object: `ticks`, how often another Python thread ran during one long update by DeepSpeed's `cpu_adam`: the
most of several updates. `--build` compiles cpu_adam there, from the sources of the DeepSpeed that is first on PYTHONPATH,
instead of taking the finished one from the op cache.

[Note: ticks] Nothing here depends on how long anything takes. The interpreter takes its lock from nobody while this runs (the
switch interval is an hour): so another thread runs during the update if the binding gives the lock up, and only then.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ds_vertical.compat.ops import cache

NUMEL = 16 << 20
OPTIMIZER_ID = 7_000  # far from those of DeepSpeed's own optimizers in this process
MAX_UPDATES = 20  # another thread may be ready to run and yet have no core, all through an update


def update(adam: Any, optimizer_id: int, step: int, tensors: list[torch.Tensor], lr: float = 1e-3, decay: float = 0.01) -> None:
    """One adam_update with the usual betas and bias correction. `tensors`: parameters, gradients, both moments."""
    adam.adam_update(optimizer_id, step, lr, 0.9, 0.999, 1e-8, decay, True, *tensors)


@contextlib.contextmanager
def ticking(switch_interval_s: float = 3600.0) -> Iterator[Callable[[], int]]:
    """Within the block another thread counts, as often as it gets the interpreter's lock; yields what reads the count."""
    count = 0
    ready, stop = threading.Event(), threading.Event()

    def tick() -> None:
        nonlocal count
        while not stop.is_set():
            count += 1
            ready.set()
            time.sleep(0.0005)

    before = sys.getswitchinterval()
    thread = threading.Thread(target=tick)
    thread.start()
    ready.wait()
    sys.setswitchinterval(switch_interval_s)
    try:
        yield lambda: count
    finally:
        sys.setswitchinterval(before)
        stop.set()
        thread.join()


@contextlib.contextmanager
def long_updates(adam: Any) -> Iterator[Callable[[int], None]]:
    """Yields what makes one long update of the step given."""
    tensors = [torch.full((NUMEL,), 0.5) for _ in range(4)]
    adam.create_adam(OPTIMIZER_ID, 1e-3, 0.9, 0.999, 1e-8, 0.01, True, False)
    try:
        yield lambda step: update(adam, OPTIMIZER_ID, step, tensors)
    finally:
        adam.destroy_adam(OPTIMIZER_ID)


def ticks_during_update(adam: Any) -> int:
    """How often another Python thread ran during a long update; of up to MAX_UPDATES the first during which it did."""
    ticks = 0
    with long_updates(adam) as run, ticking() as count:
        for step in range(1, MAX_UPDATES + 1):
            before = count()
            run(step)
            ticks = count() - before
            if ticks:
                break
            time.sleep(0.001)  # the thread's turn
    return ticks


def load_adam(build_folder: Path | None) -> Any:
    cache.activate()
    from deepspeed.accelerator import get_accelerator

    if build_folder is not None:
        build_folder.mkdir(exist_ok=True)
        os.environ["TORCH_EXTENSIONS_DIR"] = str(build_folder)
    accelerator: Any = get_accelerator()
    return accelerator.create_op_builder("CPUAdamBuilder").load(verbose=False)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=Path)
    print(json.dumps({"ticks": ticks_during_update(load_adam(parser.parse_args().build))}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
