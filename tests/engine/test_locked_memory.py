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


def limited(folder: Path, limit: int, device: list[str]) -> tuple[str, str, int, int]:
    """What comes of a run that may lock so much: see `locked_worker`."""
    config = small_buffers(base_config(folder / "swap", dtype="bf16", clip=0.0), 768 * 768)
    file = folder / "run.json"
    file.write_text(json.dumps(config))
    command = [sys.executable, str(SUPPORT / "locked_worker.py"), str(file), str(limit), *device]
    done = forks.run(folder, command, os.environ | {"OMP_NUM_THREADS": "1"}, timeout=250)
    assert done.returncode == 0, (done.stdout[-1000:], done.stderr[-3000:])
    word, told, most, left = json.loads(file.read_text())
    return word, told, most, left


@pytest.mark.parametrize("device", [["late"], pytest.param([], marks=pytest.mark.slow)], ids=["late", "cpu"])
def test_a_limit_below_what_deepspeed_locks_is_refused_and_the_one_that_is_advised_suffices(
    tmp_path: Path, device: list[str]
) -> None:
    word, told, most, left = limited(tmp_path, MIB, device)
    assert word == "refused" and most == left == 0 and not (tmp_path / "swap").exists()
    found = re.match(r"locked memory: .* (\d+) bytes.*, (\d+) are allowed; raise the limit \(ulimit -l (\d+)\),", told)
    assert found is not None, told
    needed, allowed, advised = map(int, found.groups())
    assert allowed == MIB and advised == -(-needed // 1024)
    word, told, most, left = limited(tmp_path, advised * 1024, device)
    if word == "refused":  # the buffers of zero.Init are checked ahead of all others
        found = re.match(r"locked memory: needs (\d+) bytes", told)
        assert found is not None and int(found[1]) > needed, told
        needed = int(found[1])
        word, told, most, left = limited(tmp_path, needed, device)
    assert word == "trained", told
    assert 0.95 * needed <= most <= needed, (needed, most)
    assert left == 0
