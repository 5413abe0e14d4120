"""Only the thread that trains has a team of cores where the device is the host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import forks
import pytest

PROGRAM = """
import ctypes, json, pathlib, sys, threading
import torch
import ds_vertical
from ds_vertical.compat.ops import load
from ds_vertical.offload.cpu_adam import AdamSettings, CpuAdam, Powers
from ds_vertical.offload.chunking import Cut
from ds_vertical.offload.chunking import Part

def threads_of_another():
    found = []
    other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    other.start()
    other.join()
    return found[0]

def team_of_a_thread_that_only_steps(found):
    # The thread of the optimizer's pipeline: its first call is CPU Adam's kernel, which never asks torch for its cores.
    runtime = ctypes.CDLL(str(next(pathlib.Path(torch.__file__).parent.glob("lib/libgomp*"))))
    rates = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.0, "bias_correction": True}
    settings = AdamSettings.of_group(rates, Powers(1, 0.9, 0.999, 1))
    CpuAdam(kernel, 77, (0.9, 0.999)).update(settings, PART, [CUT], STATE)
    found.append(runtime.omp_get_max_threads())

before = torch.get_num_threads(), threads_of_another()
ds_vertical.prepare(json.loads(sys.argv[1]))
torch.ones(1 << 22).sum()
kernel = load.free_adam()
kernel.create_adam(77, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, False)
NUMEL = 1 << 16
PART, CUT = Part(0, 0, NUMEL), Cut(0, NUMEL, NUMEL, 0)
STATE = [torch.full((NUMEL,), 0.5) for _ in range(4)]
stepping = []
stepper = threading.Thread(target=team_of_a_thread_that_only_steps, args=(stepping,))
stepper.start()
stepper.join()
print(json.dumps([before, torch.get_num_threads(), threads_of_another(), *stepping]))
"""


def config(folder: Path, enabled: bool) -> dict[str, object]:
    offload = {"device": "nvme", "nvme_path": str(folder)}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 3, "offload_optimizer": offload},
        "vertical_schedule": {"enabled": enabled},
    }


def run(folder: Path, enabled: bool) -> list[Any]:
    environment = os.environ | {"OMP_NUM_THREADS": "2", "DS_ACCELERATOR": "cpu", "RANK": "0", "WORLD_SIZE": "1"}
    environment |= {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [sys.executable, "-c", PROGRAM, json.dumps(config(folder, enabled))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


SHARING = """
import ctypes, json, os, pathlib, sys, threading
import torch
from ds_vertical.io.host import serve_device, share_cores

runtime = ctypes.CDLL(str(next(pathlib.Path(torch.__file__).parent.glob("lib/libgomp*"))))
found = []

def on_a_thread(work):
    def run():
        work()
        found.append([torch.get_num_threads(), runtime.omp_get_max_threads()])
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

cores, num_ranks = int(sys.argv[1]), [int(number) for number in sys.argv[2:]]
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(int(os.environ.get("SET_THREADS", cores)))
os.sched_getaffinity = lambda _: set(range(cores))  # whatever this machine has
on_a_thread(lambda: serve_device(torch.device("cpu"), 4))
for number in num_ranks:
    on_a_thread(lambda: share_cores(number))
print(json.dumps(found))
"""


def teams(folder: Path, environment: dict[str, str], cores: int, *num_ranks: int) -> list[int]:
    """The teams of threads that compute beside a device on so many cores, which so many ranks share."""
    of_launchers = ("OMP_NUM_THREADS", "ACCELERATE_", "TORCHELASTIC_", "LOCAL_WORLD_SIZE")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(of_launchers)}
    command = [sys.executable, "-c", SHARING, *map(str, (cores, *num_ranks))]
    folder /= str(len(list(folder.iterdir())))
    folder.mkdir()
    if environment.get("OMP_NUM_THREADS", "1") != "1":  # a fork has the runtime that was loaded with 1
        done = subprocess.run(command, env=plain | environment, capture_output=True, text=True, timeout=200)
    else:
        done = forks.run(folder, command, plain | environment, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    on_the_host, *found = json.loads(done.stdout)
    threads = environment.get("OMP_NUM_THREADS")
    written = int(environment.get("SET_THREADS", cores)) if threads is None else min(int(threads), len(os.sched_getaffinity(0)))
    assert on_the_host == [written, written]  # as torch takes it
    assert all(torchs == runtimes for torchs, runtimes in found)
    return [torchs for torchs, _ in found]


def test_ranks_beside_devices_share_the_cores_for_adam_and_leave_two(tmp_path: Path) -> None:
    assert teams(tmp_path, {}, 16, 1, 2, 3, 3, 4, 8, 16, 32) == [14, 6, 3, 3, 2, 1, 1, 1]
    assert teams(tmp_path, {}, 2, 1) == [1]


def test_what_a_script_has_told_torch_is_not_exceeded(tmp_path: Path) -> None:
    assert teams(tmp_path, {"SET_THREADS": "4"}, 16, 1, 2, 4) == [4, 4, 2]


def test_the_one_thread_that_a_launcher_writes_does_not_bind_cpu_adam(tmp_path: Path) -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2"}
    assert teams(tmp_path, {"OMP_NUM_THREADS": "1"} | torchrun, 16, 2) == [6]
    assert teams(tmp_path, {"OMP_NUM_THREADS": "1", "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False"}, 16, 1) == [14]
    users = {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_CPU": "1", "ACCELERATE_USE_DEEPSPEED": "true"}
    assert teams(tmp_path, {"OMP_NUM_THREADS": "1"} | users | torchrun | {"LOCAL_WORLD_SIZE": "1"}, 16, 1) == [1]
    assert teams(tmp_path, {"OMP_NUM_THREADS": "1"}, 16, 2) == [1]  # ranks of another launcher
    assert teams(tmp_path, {"OMP_NUM_THREADS": "2"} | torchrun, 16, 2) == [min(2, len(os.sched_getaffinity(0)))]


@pytest.mark.parametrize("enabled", [True, False])
def test_the_thread_that_trains_keeps_its_cores_and_others_take_one(tmp_path: Path, enabled: bool) -> None:
    before, own, another, stepping = run(tmp_path, enabled)
    assert before == [2, 2] and own == 2 and another == stepping == (1 if enabled else 2)
