"""While the model is built a process takes no more than the budget that initialize prints, however large DeepSpeed's transfer
buffers are."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import memory_groups
import pytest
import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import AsyncPartitionedParameterSwapper
from deepspeed.runtime.zero import partition_parameters
from harness import base_config, read_weights, running, small_buffers
from models import MixerModel
from pages import resident_pages
from places import SUPPORT
from processes import status

MIB = 1 << 20
BUFFER_COUNT, BUFFER_SIZE = 8, 65_536_000  # 1 GB in bf16


def built(folder: Path, allowed: int, held: bool) -> tuple[str, str, int]:
    """What comes of a run with so much `host_memory_bytes`: see `build_worker`. `held`: the kernel kills it beyond them."""
    config = base_config(folder / "swap", num_micro_batches=2, section={"host_memory_bytes": allowed})
    config["zero_optimization"]["offload_param"] |= {"buffer_count": BUFFER_COUNT, "buffer_size": BUFFER_SIZE}
    file = folder / "run.json"
    file.write_text(json.dumps(config))
    command = [sys.executable, str(SUPPORT / "build_worker.py"), str(file)]
    with memory_groups.held_to(allowed, command) if held else contextlib.nullcontext(command) as wrapped:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(wrapped, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.returncode, done.stdout[-1000:], done.stderr[-3000:])
    word, told, peak = json.loads(file.read_text())
    return word, told, peak


def test_a_process_that_is_held_to_what_a_refusal_advises_builds_the_model_and_trains(tmp_path: Path) -> None:
    word, told, _ = built(tmp_path, 100 * MIB, held=False)
    (advised,) = map(int, re.findall(r'"vertical_schedule.host_memory_bytes": (\d+)', told))
    assert word == "refused" and advised < 2 * BUFFER_COUNT * BUFFER_SIZE, "the buffers alone would be as much"
    word, told, peak = built(tmp_path, advised, held=memory_groups.allowed())
    assert (word, told) == ("trained", "")
    assert peak <= advised


def test_only_the_stock_arm_locks_the_buffers_of_parameters_and_both_write_the_same_weights(tmp_path: Path) -> None:
    locked, weights = {}, {}
    for vertical in (False, True):
        config = small_buffers(base_config(tmp_path / str(vertical), dtype="fp32"))
        before = status("VmLck")

        def build(vertical: bool = vertical, before: int = before) -> MixerModel:
            locked[vertical] = 1024 * (status("VmLck") - before)  # zero.Init has its buffers by now
            return MixerModel()

        with running(config, build, vertical=vertical) as (_, model):
            weights[vertical] = read_weights(model)
    assert locked[False] >= 12 * 300_000 * 4 and locked[True] == 0
    assert all(torch.equal(weights[True][name], weight) for name, weight in weights[False].items())


def test_the_buffers_of_a_model_that_was_not_built_under_zero_init_are_not_locked_either(tmp_path: Path) -> None:
    most: list[int] = []
    before = status("VmLck")

    class Watched(AsyncPartitionedParameterSwapper):
        """Notes what is locked as the first parameter is written, ahead of any other buffer."""

        def get_buffer(self, param: Any, numel: int) -> Any:
            most.append(1024 * (status("VmLck") - before))
            return super().get_buffer(param, numel)

    config = small_buffers(base_config(tmp_path, dtype="fp32"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition_parameters, "AsyncPartitionedParameterSwapper", Watched)
        with running(config, MixerModel, vertical=True, under_zero_init=False) as (_, model):
            swapper: Any = next(model.parameters()).nvme_swapper
            assert swapper.param_buffer_count == len(swapper.available_buffer_ids) == 12
            assert swapper.buffers.nbytes >= 12 * 300_000 * 4 and resident_pages(swapper.buffers) == 0
    assert most and most[0] == 0
