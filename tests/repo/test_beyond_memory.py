"""The benchmark of a model beyond memory: real control groups, real kills, and a small model in both arms."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import beyond_memory  # noqa: E402

MIB = 1 << 20
TAKE = "import sys; taken = bytearray(int(sys.argv[1]) << 20)"
SMALL = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def take(group: beyond_memory.MemoryGroup, num_mib: int) -> int:
    return subprocess.run(group.wrap([sys.executable, "-c", TAKE, str(num_mib)]), capture_output=True).returncode


def test_the_kernel_kills_what_takes_more_than_its_group_may() -> None:
    with beyond_memory.memory_group(100 * MIB) as group:
        assert take(group, 40) == 0 and group.num_kills() == 0
        assert take(group, 200) != 0 and group.num_kills() == 1
        peak = group.peak_bytes()
    assert peak is None or 40 * MIB < peak <= 100 * MIB
    assert not group.folder.exists()


def test_the_budget_is_found_in_a_log() -> None:
    log = ["loading", "memory of this rank, activations", "tier  what", "host  slots  72.1", "host    total  983.7", "step 1"]
    assert beyond_memory.budget_of("\n".join(log)) == log[1:5] and beyond_memory.budget_of("loading") == []


def test_keys_stand_behind_the_bytes_that_are_allowed() -> None:
    assert beyond_memory.keys_of("optimizer_compression=true:optimizer_host_share=0.6") == {
        "optimizer_compression": True,
        "optimizer_host_share": 0.6,
    }
    for text in ("0.6", "host_memory_bytes=1"):
        with pytest.raises(SystemExit, match="write KEY=VALUE"):
            beyond_memory.keys_of(text)


@pytest.mark.slow
def test_a_small_model_trains_in_the_least_that_the_engine_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: dict[str, Any] = {}
    monkeypatch.setattr(beyond_memory.portable, "write", lambda _, content, *__: recorded.update(content))
    words = [
        "--dims",
        json.dumps(SMALL),
        "--allowed",
        "least,3G,3G:optimizer_host_share=1.0",
        "--stock",
        "600M",
        "--whole",
        "6G",
        "--folder",
        str(tmp_path),
        "--before",
        str(ROOT),
    ]
    assert beyond_memory.main(words) == 0
    first, least, more, resident, stock, last = recorded["runs"]
    assert first["section"] == last["section"] == {} and set(first["checkout"]) == {"commit", "changed"}
    assert first["allowed_bytes"] == last["allowed_bytes"] == 6 * 10**9 and len(last["steps"]) == len(least["steps"])
    assert least["ended"] == more["ended"] == resident["ended"] == "trained" and stock["ended"] == "killed"
    assert least["group_peak_bytes"] <= least["allowed_bytes"] < more["allowed_bytes"]
    assert [step["losses"] for step in least["steps"]] == [step["losses"] for step in more["steps"]]
    assert least["median"]["read_bytes"] >= more["median"]["read_bytes"] > resident["median"]["read_bytes"]
