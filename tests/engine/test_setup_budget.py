"""What the budget says of the time in which stock's optimizer is set up, against the peak of a process that does it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import base_config, start_process_group
from models import MixerModel
from places import SUPPORT
from planned_runs import BASELINE, Setting, limits, planned_bytes
from torch import nn

import ds_vertical
from ds_vertical.cli.plan.deepspeed_json import TrainingOptions, write_config
from ds_vertical.config.resolve import resolve
from ds_vertical.config.section import load_section
from ds_vertical.engine import memory_check
from ds_vertical.engine.budget.zero_init import tight_buffers
from ds_vertical.io import host
from ds_vertical.model.layers import map_layers
from ds_vertical.planner.budget.zero_init import build_bytes
from ds_vertical.planner.candidate import Candidate, fits
from ds_vertical.planner.linear_program import solve
from ds_vertical.planner.memory_budget import INIT_BUFFERS
from ds_vertical.types import TensorKind

NUM_LAYERS, WIDTH = 4, 2560
MATRIX_BYTES = 4 * WIDTH**2


def set_up(folder: Path, section: dict[str, Any], where: str = "under", dtype: str = "fp32", **zero: Any) -> dict[str, int]:
    """`where`: the model is built under zero.Init, or outside. `zero`: more of each offload section."""
    config = base_config(folder / "swap", dtype=dtype, section=section, sub_group_size=4 * WIDTH**2)
    config["zero_optimization"]["offload_param"] |= {"buffer_count": 3, "buffer_size": WIDTH**2}
    for name, keys in zero.items():
        config["zero_optimization"][name] |= keys
    (folder / "ds.json").write_text(json.dumps(config))
    command = [sys.executable, str(SUPPORT / "setup_worker.py"), str(folder / "ds.json"), str(NUM_LAYERS), str(WIDTH), where]
    return told_by(command, "setup")


def told_by(command: list[str], what: str) -> dict[str, int]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line[2:] for line in done.stdout.splitlines() if line.startswith(f'@ ["{what}"')]
    return json.loads(line)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "least"),
    [
        ({"optimizer_host_share": 0.0}, 10 * MATRIX_BYTES),  # a layer's state for stock's five buffers
        ({"optimizer_host_share": 0.5}, 13 * MATRIX_BYTES),
        ({"optimizer_host_share": 1.0}, 26 * MATRIX_BYTES),  # masters and zeroed gradients of all eight matrices
    ],
    ids=str,
)
def test_setting_up_takes_what_the_budget_says(tmp_path: Path, section: dict[str, Any], least: int) -> None:
    """To within a tenth, and what libraries load at their first use."""
    found = set_up(tmp_path, section)
    taken = found["peak"] - found["baseline"]
    assert found["setup"] >= least
    assert 0.9 * found["setup"] <= taken <= 1.1 * found["setup"] + (96 << 20), found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "zero", "buffers"),
    [
        ("outside", {"offload_param": {"buffer_count": 12}}, 12),
        ("under", {"offload_param": {"buffer_count": 12}}, 0),
        ("under", {"offload_param": {"buffer_size": 4 * WIDTH**2}, "offload_optimizer": {"fast_init": True}}, 12),
    ],
    ids=str,
)
def test_buffers_of_zero_init_count_where_they_are_locked_or_filled(
    tmp_path: Path, where: str, zero: dict[str, Any], buffers: int
) -> None:
    """At `initialize`, for a model that comes whole, and where stock's set-up reads into all of them."""
    dtype = "bf16" if where == "outside" else "fp32"  # which DeepSpeed does not write to SSD as it should
    found = set_up(tmp_path, {"optimizer_host_share": 0.0}, where, dtype, **zero)
    taken = found["peak"] - found["baseline"]
    assert found["setup"] >= (8 + buffers / (2 if where == "outside" else 1)) * MATRIX_BYTES
    assert 0.8 * found["setup"] <= taken <= 1.1 * found["setup"] + (96 << 20), found


def forecast_of(folder: Path, model: nn.Module, zero: dict[str, Any], **options: Any) -> memory_check.Forecast:
    start_process_group()
    config = base_config(folder / "swap", section={"optimizer_host_share": 0.0}, sub_group_size=10**7, **options)
    for name, keys in zero.items():
        config["zero_optimization"][name] |= keys
    section = load_section(config)
    assert section is not None
    return memory_check.Forecast(map_layers(model), memory_check.groups_of(model, None, None), config, resolve(section, 0))


@pytest.mark.parametrize(("count", "max_in_cpu", "filled"), [(8, 0, 1.0), (1, 0, 0.25), (8, 10**9, 0.0)])
def test_fast_init_fills_the_buffers_that_parameters_on_ssd_need(
    tmp_path: Path, count: int, max_in_cpu: int, filled: float
) -> None:
    with torch.device("meta"):
        model = MixerModel(2, 1024)
    large = sum(param.numel() for param in model.parameters() if param.dim() == 2)
    zero = {"offload_param": {"buffer_count": count, "buffer_size": large // 4}}
    plain = forecast_of(tmp_path, model, zero, max_in_cpu=max_in_cpu)
    fast = forecast_of(tmp_path, model, zero | {"offload_optimizer": {"fast_init": True}}, max_in_cpu=max_in_cpu)
    assert fast.setup_bytes - plain.setup_bytes == pytest.approx(filled * 2 * large, rel=0.01)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_fewer_buffers_are_advised_down_to_one(tmp_path: Path, count: int) -> None:
    """For a model that was built outside zero.Init."""
    zero = {"offload_param": {"buffer_count": 5, "buffer_size": 256 << 20}}
    forecast = forecast_of(tmp_path, MixerModel(2, 1024), zero)
    allowed = BASELINE + forecast.changed(INIT_BUFFERS, count).setup_bytes
    message = memory_check._fault(forecast.paired((allowed, BASELINE)), (allowed, BASELINE), None, 1)
    assert message is not None and f'"{INIT_BUFFERS}": {count} (now 5)' in message.splitlines()[0]


def planned_on_ssd(setting: Setting) -> Candidate:
    """With the least memory in which its parameters are on SSD."""
    every = (setting.candidate(count * 5e7) for count in range(17, 60))
    return next(found for found in every if found is not None and found.shape.in_files(TensorKind.PARAMETERS))


@pytest.mark.parametrize("pin_memory", [False, True])
def test_building_a_planned_model_takes_what_the_plan_counts(tmp_path: Path, pin_memory: bool) -> None:
    """Zero.Init locks its buffers on the CPU, too, whatever `pin_memory` says; `initialize` unlocks them."""
    setting = Setting("llama, wide vocabulary", "bf16", 0.0, 2, delay=0.0)
    found = planned_on_ssd(setting)
    config = write_config(found, setting.spec, TrainingOptions(0.0, (str(tmp_path / "swap"),), locked=pin_memory))
    offload, largest = config["zero_optimization"]["offload_param"], setting.spec.largest_parameter
    (tmp_path / "ds.json").write_text(json.dumps(config))
    told = told_by(
        [sys.executable, str(SUPPORT / "build_memory_worker.py"), str(tmp_path / "ds.json"), setting.name, "bf16"], "built"
    )
    assert offload["buffer_size"] == largest and offload["pin_memory"] is pin_memory
    assert told["locked"] == pytest.approx(2 * largest * offload["buffer_count"], rel=0.001) and told["left"] == 0
    counted = build_bytes(found.shape, largest, found.case.further, True, offload["buffer_count"]) - BASELINE
    taken = told["peak"] - told["baseline"]
    assert 0.9 * counted <= taken <= counted + (48 << 20), (told, counted)


def test_nothing_is_locked_where_no_parameter_is_to_be_on_ssd(tmp_path: Path) -> None:
    setting = Setting("gpt", "bf16", 1.0, 2)
    found = setting.candidate(8e9)
    assert found is not None and not found.shape.in_files(TensorKind.PARAMETERS)
    assert not any("zero.Init" in what for what in planned_bytes(replace(found, case=replace(found.case, build_bytes=1e12))))
    config = write_config(found, setting.spec, TrainingOptions(1.0, (str(tmp_path / "swap"),), locked=False))
    (tmp_path / "ds.json").write_text(json.dumps(config))
    told = told_by(
        [sys.executable, str(SUPPORT / "build_memory_worker.py"), str(tmp_path / "ds.json"), setting.name, "bf16"], "built"
    )
    assert config["zero_optimization"]["offload_param"]["device"] == "cpu" and told["locked"] == 0


def test_a_plan_counts_the_buffers_where_they_take_most() -> None:
    """With the state in host memory nothing else takes so much ahead of the steps. Fewer buffers are written where the plan
    takes no more anyway."""
    setting = Setting("llama, wide vocabulary", "bf16", 0.0, 2, delay=0.0)
    found = planned_on_ssd(setting)
    largest, further, total = setting.spec.largest_parameter, found.case.further, sum(planned_bytes(found).values())
    count = setting.config(found, 2.6e9)["zero_optimization"]["offload_param"]["buffer_count"]
    assert 8 < count < 32
    taken = partial(build_bytes, found.shape, largest, further, True)
    assert taken(count) <= total < taken(count + 1)
    more = replace(found, case=replace(found.case, build_bytes=total + 5e6))
    assert planned_bytes(more)["zero.Init's buffers beyond the rest"] >= 5e6 - 1
    assert sum(planned_bytes(more).values()) == pytest.approx(total + 5e6, abs=1), "the larger of both, and not their sum"
    assert not fits(replace(more, case=replace(more.case, limits=limits(total))))
    assert solve(replace(more.case, limits=limits(total))) is None


def test_prepare_warns_of_buffers_that_the_written_memory_does_not_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The number of buffers that it names fits."""
    start_process_group()
    config = base_config(tmp_path / "swap", section={"host_memory_bytes": host.resident_bytes() + (110 << 20)})
    offload = config["zero_optimization"]["offload_param"] | {"buffer_count": 100}
    config["zero_optimization"]["offload_param"] = offload
    ds_vertical.prepare(config)
    told = capsys.readouterr().out
    found = re.search(r'zero\.Init locks \d+ bytes \(100 x 1100000 elements\) .* write "buffer_count": (\d+) \(now 100\)', told)
    assert found is not None and 30 < int(found[1]) < 52
    offload["buffer_count"] = int(found[1]) - 3  # what else the process has taken meanwhile
    ds_vertical.prepare(config)
    assert "zero.Init locks" not in capsys.readouterr().out
    (line,) = tight_buffers(config, host.resident_bytes() + (3 << 20))
    assert 'write "buffer_count": 1, and ' in line and line.endswith('or more "host_memory_bytes" where that is written')
    offload["device"] = "cpu"
    assert tight_buffers(config, 1) == []
