"""Each bridge on two ranks, against stock on the same two: Trainer, the three calls, Accelerate.

Stock rounds each micro-batch's sum over the ranks to bf16 where the model is bf16. Where it sums in fp32
("communication_data_type") ours has its bits, whatever ours is told: see [Note: whose rounding] in the worker.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from places import ROOT
from processes import free_port, start_ranks
from safetensors.torch import load_file
from scripts_as_they_are import PLAIN

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]
SUPPORT = ROOT / "tests" / "support"
HOST = {"params": "cpu", "optimizer": "cpu"}  # stock on SSD is wrong for some of these models
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "fp32"},
    "bf16, summed in fp32": {"dtype": "bf16", "communication_data_type": "fp32"},
    "bf16": {"dtype": "bf16"},
}
TOLERANCE = {"fp32": 1e-6, "bf16, summed in fp32": 0.0, "bf16": 1e-3}  # of losses and norms: the numerics contract
Found = dict[str, Any]


def options_of(kind: str, vertical: bool) -> dict[str, Any]:
    on_host = HOST if not vertical else {"params": "cpu"} if kind == "fp32" else {}  # stock would keep fp32 on SSD as bf16
    return KINDS[kind] | on_host


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Found]]:
    """What each rank has seen of each run of Trainer and of the three calls, one after the other in the same two processes."""
    folder = tmp_path_factory.mktemp("ranks")
    runs = [
        {
            "name": f"{bridge} {kind} {'vertical' if vertical else 'stock'}",
            "bridge": bridge,
            "vertical": vertical,
            "options": options_of(kind, vertical),
        }
        for bridge in ("trainer", "three calls")
        for kind in KINDS
        for vertical in (False, True)
    ]
    (folder / "job.json").write_text(json.dumps({"folder": str(folder / "runs"), "out": str(folder), "runs": runs}))
    start_ranks([sys.executable, str(SUPPORT / "bridge_worker.py"), str(folder / "job.json")], folder)
    ranks = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    return {str(run["name"]): [rank[run["name"]] for rank in ranks] for run in runs}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bridge", ["trainer", "three calls"])
def test_a_loop_has_stocks_numbers_on_two_ranks(found: dict[str, list[Found]], bridge: str, kind: str) -> None:
    for stock, vertical in zip(found[f"{bridge} {kind} stock"], found[f"{bridge} {kind} vertical"], strict=True):
        assert stock.keys() == vertical.keys()
        for name in stock.keys() - {"weights"}:
            if name in ("losses", "norms", "evaluation"):
                assert vertical[name] == pytest.approx(stock[name], rel=TOLERANCE[kind], abs=0), name
            else:
                assert vertical[name] == stock[name], name
        assert_weights(kind, stock["weights"], vertical["weights"], found[f"{bridge} bf16, summed in fp32 stock"][0]["weights"])
    first, second = found[f"{bridge} {kind} vertical"]
    assert harness.differing(first["weights"], second["weights"]) == []
    if bridge == "three calls":
        assert first["losses"] != second["losses"], "the ranks work on different data"


def assert_weights(kind: str, stock: Found, vertical: Found, exact: Found) -> None:
    """`exact`: stock's bf16 weights of sums that were not rounded."""
    if kind == "bf16":
        assert harness.differing(stock, exact), "stock's rounding must show, or this compares nothing"
        assert harness.differing(vertical, exact) == []
    else:
        assert max(harness.largest_relative(stock, vertical).values()) <= TOLERANCE[kind]


# ---- scripts, launched


def config_in(folder: Path, vertical: bool, **options: Any) -> Path:
    made = harness.small_buffers(harness.base_config(folder, dtype="bf16", **(options | ({} if vertical else HOST))))
    made["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    section = made.pop("vertical_schedule")
    if vertical:
        made["zero_optimization"]["vertical_schedule"] = section
    (folder / "config.json").write_text(json.dumps(made))
    return folder / "config.json"


def run_accelerate(folder: Path, vertical: bool, **options: Any) -> list[Found]:
    """What each rank has computed in the Accelerate script, and the weights as the first rank has saved them."""
    folder.mkdir()
    how = ["-m", "ds_vertical.run"] if vertical else ["-c", PLAIN]
    config = config_in(folder, vertical, num_micro_batches=3, **options)
    start_ranks(
        [sys.executable, *how, str(SUPPORT / "accelerate_script.py"), str(config), str(folder / "out"), "uneven"], folder
    )
    ranks: list[Found] = [json.loads((folder / f"out.{rank}").read_text()) for rank in range(2)]
    for rank in ranks:
        assert rank.pop("engine") == ("VerticalEngine" if vertical else "DeepSpeedEngine")
        rank["norms"] = [float(norm) for norm in rank["norms"]]
    ranks[0]["weights"] = torch.load(folder / "out.weights", weights_only=True)
    return ranks


@pytest.mark.parametrize("kind", ["bf16, summed in fp32", "bf16"])
def test_an_accelerate_script_has_stocks_numbers_on_two_ranks(tmp_path: Path, kind: str) -> None:
    options = {name: value for name, value in KINDS[kind].items() if name != "dtype"}
    stock, vertical = (run_accelerate(tmp_path / str(arm), arm, **options) for arm in (False, True))
    exact = stock if kind != "bf16" else run_accelerate(tmp_path / "exact", False, communication_data_type="fp32")
    for mine, other in zip(vertical, stock, strict=True):
        assert other["steps"] == 4 and other["sync"] == [False, False, True, True] * 2
        assert mine.keys() == other.keys()
        for name in mine.keys() - {"weights"}:
            assert_equal_or_close(mine[name], other[name], TOLERANCE[kind] if name != "lr" else 0.0)
    assert_weights(kind, stock[0]["weights"], vertical[0]["weights"], exact[0]["weights"])


def assert_equal_or_close(mine: Any, other: Any, tolerance: float) -> None:
    mine, other = (torch.tensor(each, dtype=torch.float64) for each in (mine, other))
    assert mine.shape == other.shape
    assert torch.allclose(mine, other, rtol=tolerance, atol=0)


TRAINING = """--per_device_train_batch_size 1 --gradient_accumulation_steps 4 --num_train_epochs 1 --max_grad_norm 1.0
 --learning_rate 1e-3 --logging_steps 1 --save_strategy no --report_to none --bf16 true --use_cpu true""".split()


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_a_launched_trainer_saves_stocks_weights(tmp_path: Path, launcher: str) -> None:
    saved = {}
    for vertical in (False, True):
        folder = tmp_path / str(vertical)
        folder.mkdir()
        config = config_in(folder, vertical, num_micro_batches=4, communication_data_type="fp32", lr=1e-3, weight_decay=0.0)
        rest = [str(ROOT / "tests" / "scripts" / "trainer.py"), "--deepspeed", str(config), "--output_dir", str(folder / "out")]
        without_scheduler(config)
        if vertical:
            launch([*LAUNCHERS[launcher](str(free_port())), "ds_vertical.run", *rest, *TRAINING], folder)
        else:
            start_ranks([sys.executable, "-c", PLAIN, *rest, *TRAINING], folder)
        saved[vertical] = load_file(folder / "out" / "model.safetensors")
    assert harness.differing(saved[False], saved[True]) == []


LAUNCHERS = {
    "torchrun": lambda port: ["torch.distributed.run", "--nproc-per-node", "2", "--master-port", port, "-m"],
    "deepspeed": lambda port: [
        *("deepspeed.launcher.runner", "--hostfile", os.devnull, "--num_accelerators", "2", "--master_port", port, "--module")
    ],
}


def without_scheduler(config: Path) -> None:
    """The Trainer brings its own."""
    made = json.loads(config.read_text())
    del made["scheduler"]
    config.write_text(json.dumps(made))


def launch(command: list[str], folder: Path) -> None:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, env=env, capture_output=True, text=True, timeout=500, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    assert "vertical schedule ACTIVE: bridge Trainer" in said
