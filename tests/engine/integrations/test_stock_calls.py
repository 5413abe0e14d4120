"""The stock arm of a script that makes the three calls: seeded as `train_batch` is, recorded, ended at the budget of steps."""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path

import forks
import pytest
from scripts_as_they_are import CONFIG

from ds_vertical.engine.metrics import METRICS_VARIABLE, STEPS_VARIABLE, read_records

LOOPS = """
import json, os, sys
import deepspeed
import torch
from torch import nn
import ds_vertical

ds_vertical.patch()

def engine():
    torch.manual_seed(1)
    with deepspeed.zero.Init(config_dict_or_path=sys.argv[1]):
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=sys.argv[1])[0]

batches = [torch.full((2, 8), float(value)) for value in (1, 2, 3)]
loss_fn = lambda outputs, batch: outputs.square().mean()
one = engine()
means = [float(one.train_batch(iter(batches), loss_fn)) for _ in range(2)]
os.environ |= {sys.argv[2]: sys.argv[3], sys.argv[4]: "2"}
other, losses, draws = engine(), [], []
print("MEANS", json.dumps(means), flush=True)
while True:
    for batch in batches:
        loss = loss_fn(other(batch), batch)
        other.backward(loss)
        other.step()
        losses.append(loss.item())
        draws.append(torch.rand(()).item())
    print("LOSSES", json.dumps(losses), len(set(draws)), flush=True)
"""


def test_three_calls_of_the_stock_arm_are_seeded_recorded_and_ended(tmp_path: Path) -> None:
    config = copy.deepcopy(CONFIG) | {"gradient_accumulation_steps": 3}
    config["zero_optimization"] |= {
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "cpu"},
        "vertical_schedule": {"enabled": False, "seed": 5},
    }
    path, script, metrics = tmp_path / "config.json", tmp_path / "loops.py", tmp_path / "metrics"
    path.write_text(json.dumps(config))
    script.write_text(LOOPS)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29519"}
    command = [sys.executable, *map(str, (script, path, METRICS_VARIABLE, metrics, STEPS_VARIABLE))]
    done = forks.run(tmp_path, command, os.environ | alone, 200)
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("MEANS", "LOSSES"))]
    assert [name for name, _ in told] == ["MEANS", "LOSSES", "LOSSES"], "the third step should have ended the process"
    means = json.loads(told[0][1])
    losses, num_draws = told[2][1].rsplit(" ", 1)
    taken = json.loads(losses)
    by_step = [sum(taken[:3]) / 3, sum(taken[3:]) / 3]
    assert by_step == pytest.approx(means, rel=1e-6), "dropout drew other numbers than under train_batch"
    assert int(num_draws) == 6, "the script's own random stream was seeded anew"
    records = read_records(metrics)[0]
    assert [record.engine for record in records] == ["DeepSpeedEngine"] * 2 and records[0].tokens == 48
    scaled = [loss for record in records for loss in record.losses]
    assert scaled == pytest.approx([loss / 3 for loss in taken], rel=1e-6)
