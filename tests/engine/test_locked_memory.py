"""The user's limit of locked memory (ulimit -l) is held against what DeepSpeed locks, on any device, before it locks any: an
allocation beyond it would end the process in an assertion, without a word about the limit."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import forks
import pytest
from harness import base_config, small_buffers, start_process_group
from models import MixerModel
from places import SUPPORT

from ds_vertical.compat import pinned_memory
from ds_vertical.config.resolve import resolve
from ds_vertical.config.section import load_section
from ds_vertical.engine import disk_check, memory_check
from ds_vertical.errors import MemoryBudgetError
from ds_vertical.io import host
from ds_vertical.model.layers import map_layers

MIB = 1 << 20


def limited(folder: Path, limit: int, kind: str = "mixer", sub_group_size: int = 200_000) -> tuple[str, str, int, int]:
    """What comes of a run beside a device that may lock so much: see `locked_worker`."""
    config = small_buffers(base_config(folder / "swap", dtype="fp32", clip=0.0, sub_group_size=sub_group_size), 512 * 512)
    config["zero_optimization"]["offload_param"]["buffer_count"] = 2
    file = folder / "run.json"
    file.write_text(json.dumps(config))
    command = [sys.executable, str(SUPPORT / "locked_worker.py"), str(file), str(limit), kind]
    done = forks.run(folder, command, os.environ | {"OMP_NUM_THREADS": "1"}, timeout=250, engine=True)
    assert done.returncode == 0, (done.stdout[-1000:], done.stderr[-3000:])
    word, told, most, left = json.loads(file.read_text())
    return word, told, most, left


def test_a_limit_below_what_deepspeed_locks_is_refused_and_the_one_that_is_advised_suffices(tmp_path: Path) -> None:
    """In 8 MiB, which users may lock by default."""
    word, told, most, left = limited(tmp_path, MIB)  # too little for the buffers of zero.Init
    needed, allowed, advised = numbers(told)
    assert word == "refused" and most == left == 0 and not (tmp_path / "swap").exists()
    assert allowed == MIB and needed == 2 * MIB == 1024 * advised
    assert f"(of 2 x {512 * 512} elements; 2 x {256 * 512} fit)" in told
    word, told, most, left = limited(tmp_path, needed)  # enough for those, which are unlocked by then; not for the optimizer's
    assert word == "refused" and most == needed and "(zero_optimization.sub_group_size: " in told
    more, allowed, advised = numbers(told)
    assert more > allowed == needed and advised == -(-more // 1024)
    word, told, most, left = limited(tmp_path, more)
    assert word == "trained" and left == 0, told
    assert 0.95 * more <= most <= more, (more, most)


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_several_ranks_can_follow_the_advice_with_parameters_on_ssd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    """DeepSpeed's buffer for a sub-group's parameters has room for whole ones, that for state only for a rank's shards."""
    start_process_group()
    model, written = MixerModel(3, width=1024), 1 << 22
    monkeypatch.setattr(memory_check.distributed_ranks, "world_size", lambda: num_ranks)
    monkeypatch.setattr(pinned_memory, "counts_as_locked", lambda: False)

    def planned(sub_group_size: int) -> tuple[memory_check.Forecast, dict[str, Any]]:
        config = small_buffers(base_config(tmp_path / "swap", sub_group_size=sub_group_size), 1024 * 1024)
        resolved = resolve(load_section(config), 0)
        groups = memory_check.groups_of(model, None, None)
        return memory_check.Forecast(map_layers(model, None), groups, config, resolved), config

    def told(lockable: int) -> str:
        monkeypatch.setattr(host, "lockable_bytes", lambda: lockable)
        with pytest.raises(MemoryBudgetError) as refused:
            disk_check.check_locked(*planned(written))
        return str(refused.value)

    forecast, config = planned(written)
    assert any(chunk.params_in_files for chunk in forecast.chunks) and max(len(chunk.params) for chunk in forecast.chunks) > 1
    limit = sum(disk_check._locked_by_stock(forecast, config).values()) - 1
    found = re.search(r"\(zero_optimization.sub_group_size: (\d+) fits\)", told(limit))
    assert found is not None and int(found[1]) < written
    disk_check.check_locked(*planned(int(found[1])))
    assert "fits" not in told(1)  # no sub-group is as small as that
    monkeypatch.setattr(pinned_memory, "counts_as_locked", lambda: True)
    assert "write smaller" not in told(1)  # our own buffers would not fit either


@pytest.mark.slow
def test_the_size_of_sub_groups_that_is_advised_fits(tmp_path: Path) -> None:
    """Into a limit with room for one matrix in a sub-group, where the JSON asks for three."""
    limit = 7 * MIB
    word, told, *_ = limited(tmp_path, limit, sub_group_size=700_001)
    found = re.search(r"write smaller ones there \(zero_optimization.sub_group_size: (\d+) fits\),", told)
    assert word == "refused" and found is not None, told
    word, told, most, left = limited(tmp_path, limit, sub_group_size=int(found[1]))
    assert (word, left) == ("trained", 0), told
    assert 4 * MIB <= most <= limit


@pytest.mark.slow
def test_buffers_that_a_frozen_base_has_had_are_not_counted_again_for_its_adapters(tmp_path: Path) -> None:
    """The base is made under zero.Init, its adapters outside: they join the base's buffers."""
    word, told, most, left = limited(tmp_path, 2 * MIB, "adapters")  # those of zero.Init, and no more
    assert (word, told, left) == ("trained", "", 0)
    assert most == 2 * MIB


def numbers(told: str) -> list[int]:
    """Of a refusal: bytes that are needed, and allowed, and KiB for `ulimit -l`."""
    words = r"locked memory: .*? (\d+) bytes.*, (\d+) are allowed; raise the limit \(ulimit -l (\d+)\),"
    found = re.match(words, told)
    assert found is not None, told
    return [int(number) for number in found.groups()]
