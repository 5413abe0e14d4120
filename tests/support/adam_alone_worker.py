"""CPU Adam alone computes, in a thread of its own with a team of two on two cores, while the thread that trains only waits, as
it does beside a GPU. Until that team has been seen to wait asleep, or SECONDS are over. Prints JSON.

    python adam_alone_worker.py SECONDS BUSY [launcher]

Beside them BUSY processes compute on the same cores. "launcher": torchrun has written OMP_NUM_THREADS=1, so the thread that
trains has no team, and that of Adam's thread is made as it is beside a GPU, on a machine of four cores.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
LAUNCHER = "launcher" in sys.argv
os.environ["OMP_NUM_THREADS"] = "1" if LAUNCHER else "2"
if LAUNCHER:
    os.environ |= {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2"}
for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
    os.environ.pop(name, None)

import torch  # noqa: E402

from ds_vertical.compat.ops import load  # noqa: E402
from ds_vertical.io.host import thread_for_device  # noqa: E402
from ds_vertical.io.openmp_wait import WATCH  # noqa: E402
from ds_vertical.offload.chunking import Cut, Part  # noqa: E402
from ds_vertical.offload.cpu_adam import AdamSettings, CpuAdam, Powers  # noqa: E402

NUMEL, BETAS = 1 << 20, (0.9, 0.999)
torch.cuda.set_device = lambda _: None  # there need not be one
RATES = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.0, "bias_correction": True}


@contextlib.contextmanager
def four_cores() -> Iterator[None]:
    """As if this machine had four, and a GPU beside them."""
    of_this_machine, os.sched_getaffinity = os.sched_getaffinity, lambda _: set(range(4))
    try:
        yield
    finally:
        os.sched_getaffinity = of_this_machine


class Stepper(threading.Thread):
    """Updates one part until `enough`. `team`: the threads that it has for that; `updates`: how many there were."""

    def __init__(self, kernel: load.AdamModule) -> None:
        super().__init__(name="pipeline", daemon=True)
        self.adam = CpuAdam(kernel, 77, BETAS)
        self.enough = threading.Event()
        self.has_begun = threading.Event()
        self.team = self.updates = 0
        with four_cores():
            self.begin = thread_for_device(torch.device("cuda"), 1) if LAUNCHER else lambda: None

    def run(self) -> None:
        with four_cores():
            self.begin()
        self.has_begun.set()
        state = [torch.full((NUMEL,), 0.5) for _ in range(4)]
        part, cut = Part(0, 0, NUMEL), Cut(0, NUMEL, NUMEL, 0)
        self.team = torch.get_num_threads()
        while not self.enough.is_set():
            step = self.updates + 1
            self.adam.update(AdamSettings.of_group(RATES, Powers(step, *BETAS, 1)), part, [cut], state)
            self.updates = step


def main() -> None:
    seconds, num_busy = float(sys.argv[1]), int(sys.argv[2])
    kernel = load.free_adam()
    kernel.create_adam(77, 1e-3, *BETAS, 1e-8, 0.0, True, False)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_busy)]
    stepper = Stepper(kernel)
    try:
        with WATCH.watching():
            stepper.start()
            stepper.has_begun.wait()
            end = time.monotonic() + seconds
            while not (slept := WATCH.asleep) and time.monotonic() < end:
                time.sleep(0.02)  # a device computes
        stepper.enough.set()
        stepper.join()
    finally:
        for each in busy:
            each.kill()
            each.wait()
    own = torch.get_num_threads()
    print(json.dumps({"asleep": slept, "own": own, "team": stepper.team, "updates": stepper.updates}))


if __name__ == "__main__":
    main()
