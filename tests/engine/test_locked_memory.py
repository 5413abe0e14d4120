"""The user's limit of locked memory (ulimit -l) is held against what DeepSpeed locks, on any device, before it locks any: an
allocation beyond it would end the process in an assertion, without a word about the limit."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import forks
import pytest
from harness import base_config, small_buffers
from places import SUPPORT

MIB = 1 << 20


def limited(folder: Path, limit: int, kind: str = "mixer") -> tuple[str, str, int, int]:
    """What comes of a run beside a device that may lock so much: see `locked_worker`."""
    config = small_buffers(base_config(folder / "swap", dtype="fp32", clip=0.0, sub_group_size=200_000), 512 * 512)
    config["zero_optimization"]["offload_param"]["buffer_count"] = 40  # 40 MiB, of which none is locked
    file = folder / "run.json"
    file.write_text(json.dumps(config))
    command = [sys.executable, str(SUPPORT / "locked_worker.py"), str(file), str(limit), kind]
    done = forks.run(folder, command, os.environ | {"OMP_NUM_THREADS": "1"}, timeout=250, engine=True)
    assert done.returncode == 0, (done.stdout[-1000:], done.stderr[-3000:])
    word, told, most, left = json.loads(file.read_text())
    return word, told, most, left


def test_a_limit_below_what_deepspeed_locks_is_refused_and_the_one_that_is_advised_suffices(tmp_path: Path) -> None:
    """In 8 MiB, which users may lock by default."""
    word, told, most, left = limited(tmp_path, MIB)  # too little for the optimizer's; zero.Init locks none
    assert word == "refused" and most == left == 0 and "(zero_optimization.sub_group_size: " in told
    needed, allowed, advised = numbers(told)
    assert needed > allowed == MIB and advised == -(-needed // 1024)
    word, told, most, left = limited(tmp_path, needed)
    assert word == "trained" and left == 0, told
    assert 0.95 * needed <= most <= needed < 8 * MIB, (needed, most)


@pytest.mark.slow
def test_adapters_of_a_frozen_base_are_trained_with_their_optimizers_buffers_alone(tmp_path: Path) -> None:
    """The base is made under zero.Init, its adapters outside: they join the base's buffers, which are not locked."""
    word, told, most, left = limited(tmp_path, 2 * MIB, "adapters")
    assert (word, told, left) == ("trained", "", 0)
    assert most <= 2 * MIB


def numbers(told: str) -> list[int]:
    """Of a refusal: bytes that are needed, and allowed, and KiB for `ulimit -l`."""
    words = r"locked memory: .*? (\d+) bytes.*, (\d+) are allowed; raise the limit \(ulimit -l (\d+)\),"
    found = re.match(words, told)
    assert found is not None, told
    return [int(number) for number in found.groups()]
