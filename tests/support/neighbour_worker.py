"""Trains on two cores with a team of two threads, alone and beside a busy process on the same cores. Writes seconds to
FOLDER/rank<R>.json: those of each step, and those that this process computed or waited awake in it.

    python neighbour_worker.py FOLDER NUM_STEPS BUSY [plugin]

Three phases of NUM_STEPS steps each: alone; beside BUSY processes that compute; beside them with one thread in place of the
team, which never waits for another. As one of the ranks of a host it has the others beside it in each phase, on the same cores.
Torch computes before ds_vertical is imported; with "plugin" ds_vertical is imported first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CORES = sorted(os.sched_getaffinity(0))[:2]
os.sched_setaffinity(0, CORES)  # ahead of torch: its runtime counts cores when it is loaded
os.environ["OMP_NUM_THREADS"] = "2"
for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
    os.environ.pop(name, None)
if "plugin" in sys.argv:
    import ds_vertical

import torch  # noqa: E402

if "plugin" not in sys.argv:
    torch.mm(torch.ones(512, 512), torch.ones(512, 512))  # the team is there now, and its runtime has read the environment
    assert "ds_vertical" not in sys.modules

from harness import base_config, start_process_group  # noqa: E402
from models import MixerModel, token_batches  # noqa: E402

import ds_vertical  # noqa: E402, F811

NUM_MICRO_BATCHES, TOKENS = 8, 8


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def main() -> None:
    folder, num_steps = Path(sys.argv[1]), int(sys.argv[2])
    num_busy, rank = int(sys.argv[3]), int(os.environ.get("RANK", "0"))
    start_process_group()
    torch.manual_seed(0)
    model = MixerModel(4, 512)
    config = base_config(folder, params="none", optimizer="nvme", num_micro_batches=NUM_MICRO_BATCHES, dtype="fp32")
    engine = ds_vertical.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    batch = token_batches(1, NUM_MICRO_BATCHES, shortest=TOKENS)[0]

    def steps(number: int) -> list[dict[str, float]]:
        found = []
        for _ in range(number):
            start, used = time.perf_counter(), time.process_time()
            engine.train_batch(iter(batch))
            found.append({"step_s": time.perf_counter() - start, "used_s": time.process_time() - used})
        return found

    steps(3)
    threads = num_threads()
    phases: list[Any] = []
    for busy_now, team in ((0, 2), (num_busy, 2), (num_busy, 1)):
        torch.set_num_threads(team)
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy_now if rank == 0 else 0)]
        time.sleep(0.3 * bool(busy))
        try:
            phases.append(steps(num_steps))
        finally:
            for each in busy:
                each.kill()
                each.wait()
    end = time.monotonic() + 2
    while num_threads() != threads and time.monotonic() < end:  # those of a team end on their own
        time.sleep(0.01)
    (folder / f"rank{rank}.json").write_text(json.dumps({"phases": phases, "threads": [threads, num_threads()]}))
    engine.destroy()


if __name__ == "__main__":
    main()
