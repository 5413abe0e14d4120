"""What `ds-vertical ab` is given and what its arms leave: a JSON, a script that records steps without training, runs."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_vertical.cli.bench.comparison import (
    Run,
)
from ds_vertical.engine.metrics import StepRecord
from ds_vertical.planner.run_record import RunInfo
from ds_vertical.schedule.events import PRE

BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {
        "stage": 3,
        "sub_group_size": 1000,
        "offload_param": {"device": "nvme", "nvme_path": "/tmp/ds_vertical", "max_in_cpu": 0},
        "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp/ds_vertical"},
    },
}


# Trains nothing, but records steps as an engine's train_batch does; the launcher, files and verdict around it are real.
SCRIPT = """
import argparse, json, os, sys, time
from pathlib import Path
from ds_vertical.engine.metrics import StepRecorder

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank")
parser.add_argument("--deepspeed_config")
parser.add_argument("--shift", type=float, default=0.0)
parser.add_argument("--fail-in", default="")
parser.add_argument("--hang", action="store_true")
args = parser.parse_args()
vertical = json.loads(Path(args.deepspeed_config).read_text())["vertical_schedule"]["enabled"]
arm = "vertical" if vertical else "stock"
recorder = StepRecorder.from_environment(int(os.environ["RANK"]))
if args.fail_in == arm:
    sys.exit("this arm fails")
while True:
    try:
        recorder.check_budget()
    except StopIteration:
        break
    recorder.begin()
    time.sleep(0.02 if vertical else 0.2)
    losses = [3.0, 4.0 + args.shift * vertical]
    recorder.end("VerticalEngine" if vertical else "DeepSpeedEngine", losses, tokens=8, tied=False)
    if args.hang:
        print("pid", os.getpid(), flush=True)
        time.sleep(600)
"""


def write(folder: Path, name: str, config: object) -> Path:
    path = folder / name
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


def make_run(
    arm: str, repeat: int, losses: Sequence[Sequence[float]], step_s: float = 1.0, num_ranks: int = 1, **fields: Any
) -> Run:
    """A run whose step i has losses[i]; rank r reads 100 * (r + 1) bytes, the first step is ten times slower."""
    engine = fields.pop("engine", "VerticalEngine" if arm == "vertical" else "DeepSpeedEngine")
    ranks = {
        rank: [
            StepRecord(
                step=index + 1,
                engine=engine,
                step_s=step_s * (10 if index == 0 else 1) + 0.5 * rank,
                tokens=8,
                read_bytes=100 * (rank + 1),
                write_bytes=10,
                peak_host_bytes=1000 + index,
                loss=sum(step) / len(step),
                losses=tuple(step),
                **fields,
            )
            for index, step in enumerate(losses)
        ]
        for rank in range(num_ranks)
    }
    return Run(arm, repeat, ranks)


def wait_for_pid(log: Path, process: subprocess.Popen[bytes]) -> int:
    """The pid that SCRIPT prints with --hang, once its log has it."""
    for _ in range(2000):
        match = re.search(r"^pid (\d+)$", log.read_text() if log.exists() else "", re.M)
        if match:
            return int(match[1])
        assert process.poll() is None, "ab ended before its run trained"
        time.sleep(0.1)
    raise AssertionError("the run did not start within 200 s")


UNITS = (PRE, 0, 1, 2)


FACTS = RunInfo(
    elements={PRE: 100, 0: 1000, 1: 1000, 2: 1000},
    early_elements={PRE: 60, 0: 750, 1: 750, 2: 750},
    delayed_elements={PRE: 40, 0: 250, 1: 250, 2: 250},
    blocks_per_layer=2,
    param_bytes=2,
    gradient_bytes=4,
    dtype="bfloat16",
    num_shards=1,
    generations=2,
    slots=4,
    part_elements=500,
    parameters_on_ssd=1.0,
    state_on_ssd=1.0,
    one_memory=True,
    host_bytes=2004,
    sequences=1,
    tokens=8,
    threads=2,
    model=None,
)
