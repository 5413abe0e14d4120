"""A script that has torch compute before it imports ds_vertical, on one rank or as one of those of a host: trains until every
rank's threads have been seen to wait asleep, or NUM_STEPS are over. Writes FOLDER/rank<R>.json.

    python torch_first_worker.py FOLDER NUM_STEPS [BUSY]

All ranks compute on the same two cores, each with a team of two threads, beside BUSY processes of its own (default 0) that
compute.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
os.environ["OMP_NUM_THREADS"] = "2"
for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
    os.environ.pop(name, None)

import torch  # noqa: E402

torch.mm(torch.ones(512, 512), torch.ones(512, 512))  # the team is there now, and its runtime has read the environment
assert "ds_vertical" not in sys.modules

from harness import base_config, start_process_group  # noqa: E402
from models import MixerModel, token_batches  # noqa: E402

import ds_vertical  # noqa: E402
from ds_vertical.io import contention  # noqa: E402
from ds_vertical.io.openmp_wait import WATCH  # noqa: E402

NUM_MICRO_BATCHES, TOKENS = 8, 8


def everybody(asleep: bool) -> bool:
    """Whether all ranks have been."""
    flag = torch.tensor(int(asleep))
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN)
    return bool(flag)


def main() -> None:
    folder, num_steps, num_busy = Path(sys.argv[1]), int(sys.argv[2]), int((*sys.argv, "0")[3])
    start_process_group()
    torch.manual_seed(0)
    model = MixerModel(4, 512)
    config = base_config(folder, dtype="fp32", params="none", optimizer="cpu", num_micro_batches=NUM_MICRO_BATCHES)
    engine = ds_vertical.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    batch = token_batches(1, NUM_MICRO_BATCHES, shortest=TOKENS)[0]
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_busy)]
    found: dict[str, Any] = {"pid": os.getpid(), "busy": [each.pid for each in busy], "asleep": False, "steps": 0, "words": []}
    try:
        train(engine, batch, num_steps, found)
    finally:
        for each in busy:
            each.kill()
            each.wait()
    rank = int(os.environ.get("RANK", "0"))
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    engine.destroy()


def train(engine: Any, batch: list[Any], num_steps: int, found: dict[str, Any]) -> None:
    """At most so many steps; what is seen goes into `found`."""
    other_work, before = contention.OtherWork(), contention.Processes()

    def loss_fn(loss: torch.Tensor, _: Any) -> torch.Tensor:
        sleeping = any(thread.name == "ds_vertical sleepers" for thread in threading.enumerate())
        found["asleep"] |= WATCH.asleep and sleeping
        return loss

    while found["steps"] < num_steps:
        other_work.begin()
        engine.train_batch(iter(batch), loss_fn)
        found["steps"] += 1
        found["words"] += other_work.words()
        if everybody(found["asleep"]):
            break
    found["takers"] = {taker.pid: taker.cores for taker in contention.Processes().since(before)}


if __name__ == "__main__":
    main()
