"""How long a CPU Adam update keeps other Python threads waiting; tests/test_patches.py runs it as a process of its own.

    python tests/adam_gap.py [--build FOLDER]

prints one JSON object: `call_s`, the seconds of one long update by DeepSpeed's `cpu_adam`, and `gap_s`, the longest time for
which another Python thread did not run meanwhile. `--build` compiles cpu_adam there, from the sources of the DeepSpeed
that is first on PYTHONPATH, instead of taking the finished one from the op cache.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from ds_vertical import opcache

NUMEL = 40 << 20
OPTIMIZER_ID = 7_000  # far from those of DeepSpeed's own optimizers in this process


def update(adam: Any, optimizer_id: int, step: int, tensors: list[torch.Tensor], lr: float = 1e-3, decay: float = 0.01) -> None:
    """One adam_update with the usual betas and bias correction. `tensors`: parameters, gradients, both moments."""
    adam.adam_update(optimizer_id, step, lr, 0.9, 0.999, 1e-8, decay, True, *tensors)


def measure(adam: Any) -> tuple[float, float]:
    """(seconds of one long update, longest gap in seconds that another Python thread saw during it)."""
    tensors = [torch.full((NUMEL,), 0.5) for _ in range(4)]
    adam.create_adam(OPTIMIZER_ID, 1e-3, 0.9, 0.999, 1e-8, 0.01, True, False)
    update(adam, OPTIMIZER_ID, 1, tensors)  # memory and threads are there from now on
    ticks: list[float] = []
    ready, stop = threading.Event(), threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.perf_counter())
            ready.set()
            time.sleep(0.0005)

    thread = threading.Thread(target=tick)
    thread.start()
    ready.wait()
    start = time.perf_counter()
    update(adam, OPTIMIZER_ID, 2, tensors)
    end = time.perf_counter()
    stop.set()
    thread.join()
    adam.destroy_adam(OPTIMIZER_ID)
    seen = [start, *(at for at in ticks if start < at < end), end]
    return end - start, max(after - before for before, after in zip(seen, seen[1:], strict=False))


def load_adam(build_folder: Path | None) -> Any:
    opcache.activate()
    from deepspeed.accelerator import get_accelerator

    if build_folder is not None:
        build_folder.mkdir(exist_ok=True)
        os.environ["TORCH_EXTENSIONS_DIR"] = str(build_folder)
    accelerator: Any = get_accelerator()
    return accelerator.create_op_builder("CPUAdamBuilder").load(verbose=False)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=Path)
    call_s, gap_s = measure(load_adam(parser.parse_args().build))
    print(json.dumps({"call_s": call_s, "gap_s": gap_s}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
