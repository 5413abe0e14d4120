"""scripts/gpu_check.sh, which nobody here can run on a GPU: its commands are ones that our tools take, and run on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from places import ROOT
from processes import is_alive

from ds_vertical.cli.bench import ab

CHECK = ROOT / "scripts" / "gpu_check.sh"


def check(*words: str, timeout: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHON": sys.executable, "HF_HUB_OFFLINE": "1"} | environment
    command = ["bash", str(CHECK), *words]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=timeout)


@pytest.mark.parametrize(("stage", "count", "billions"), [("ab4", 4, 2.07), ("ab16", 16, 1.3)])
def test_the_comparisons_are_commands_that_our_tools_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, count: int, billions: float
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import model_config

    done = check("--stage", stage, "--print", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    [words] = [line.split() for line in done.stdout.splitlines() if "ds_vertical.cli.main ab" in line]
    plan = ab.parse(words[words.index("ab") + 1 :])
    config = plan.arms.vertical
    assert config["gradient_accumulation_steps"] == count and config["gradient_clipping"] == 0
    assert config["vertical_schedule"]["on_nonfinite"] == "stop"
    script = list(plan.script_arguments)
    assert script[script.index("--seq") + 1] == "2048"
    shape = model_config.resolve("llama", script[script.index("--dims") + 1 :], None, 2048)
    layer = 4 * shape.hidden_size**2 + 3 * shape.hidden_size * shape.intermediate_size
    largest = shape.vocab_size * shape.hidden_size
    assert shape.num_hidden_layers * layer + 2 * largest == pytest.approx(billions * 1e9, rel=0.05)
    assert config["zero_optimization"]["offload_param"]["buffer_size"] >= largest
    assert f"benchmarks/gpu/{stage}_" in done.stdout
    assert plan.num_steps >= 2  # the first one is not counted


def test_wheels_are_installed_first_and_from_nowhere_else(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/bash\nprintf '%s ' ran \"$@\"; echo\n")
    python.chmod(0o755)
    for name in ("a.whl", "b.whl", "notes.txt"):
        (tmp_path / name).touch()
    done = check("--stage", "debug", "--dry-run", "--out", str(tmp_path / "out"), "--wheels", str(tmp_path), PYTHON=str(python))
    ran = [line.split() for line in done.stdout.splitlines() if line.startswith("ran ")]
    assert done.returncode == 0 and ran[0][1:5] == ["-m", "pip", "install", "--no-index"], done.stdout + done.stderr
    assert ran[0][5:] == ["--no-deps", str(tmp_path / "a.whl"), str(tmp_path / "b.whl")]
    assert ran[1][3:] == ["build-ops"] and len(ran) == 3


def test_a_comparison_is_recorded_with_the_gpus_use_and_its_peak_over_the_budget(tmp_path: Path) -> None:
    """In a dry run whose commands do nothing but the last one, which records; nvidia-smi goes on until it is ended."""
    out, python, watcher = tmp_path / "out", tmp_path / "python", tmp_path / "nvidia-smi"
    (out / "ab").mkdir(parents=True)
    arms = {"stock": {}, "vertical": {"peak_device_bytes": 3 << 20}}
    (out / "ab" / "ab.json").write_text(json.dumps({"arms": arms, "speedup": 2.5}))
    (out / "ab" / "vertical.log").write_text("ds_vertical: device  parameters  1.0\nds_vertical: device  total        2.0\n")
    python.write_text(f'#!/bin/bash\nsleep 0.3; [[ $1 != benchmarks/gpu_record.py ]] || exec "{sys.executable}" "$@"\n')
    head, rows = (
        "timestamp, utilization.gpu [%], memory.used [MiB]",
        ("0, 0 %, 10 MiB", "1, 50 %, 300 MiB", "2, 70 %, [N/A]", "3, 80 %, "),
    )
    watcher.write_text(
        f"#!/bin/bash\necho $$ >'{tmp_path}/pid'; printf '%s\\n' '{head}' {' '.join(map(repr, rows))}; exec sleep 99\n"
    )
    for each in (python, watcher):
        each.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = check("--stage", "ab4", "--dry-run", "--out", str(out), PYTHON=str(python), PATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((out / "record.json").read_text())
    assert found["speedup"] == 2.5 and found["arms"] == arms
    assert found["gpu"] == {
        "samples": 2,
        "utilisation_percent": 25.0,
        "busy_share": 0.5,
        "most_memory_bytes": 300 << 20,
        "device_budget_bytes": 2 << 20,
        "peak_over_budget": 1.5,
    }
    deadline = time.monotonic() + 30
    while (running := is_alive(int((tmp_path / "pid").read_text()))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running


def test_wrong_words_are_refused() -> None:
    assert check("--stage", "all").returncode == check("--quick").returncode == 2


def test_a_stage_whose_time_is_over_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMIT_S", "0")
    done = check("--stage", "debug", "--dry-run", "--out", str(tmp_path))
    assert done.returncode == 124 and "the stage's 0 seconds are over" in done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize("ignored", [False, True], ids=["plain", "started in the background"])
def test_a_command_is_asked_once_to_end_ahead_of_the_stages_limit(tmp_path: Path, ignored: bool) -> None:
    """As Ctrl-C asks it: pytest answers with what has failed so far. What a script starts in the background ignores that."""
    python = tmp_path / "python"
    python.write_text("#!/bin/bash\ntrap 'echo asked' INT\nfor i in {1..40}; do sleep 0.1; done\n")
    python.chmod(0o755)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    try:
        done = check("--stage", "debug", "--dry-run", "--out", str(tmp_path), PYTHON=str(python), LIMIT_S="32")  # 30 in reserve
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.returncode == 124 and done.stdout.splitlines()[1:] == ["asked"], done.stdout + done.stderr


def test_what_a_command_has_left_behind_is_ended_too(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/bash\nsleep 300 >/dev/null 2>&1 &\necho $!\n")
    python.chmod(0o755)
    done = check("--stage", "debug", "--dry-run", "--out", str(tmp_path), PYTHON=str(python))
    left = [int(line) for line in done.stdout.splitlines() if line.isdecimal()]
    assert done.returncode == 0 and left, done.stdout + done.stderr
    deadline = time.monotonic() + 30  # a killed process ends when the kernel next runs it
    while (running := [process for process in left if is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running


def test_the_gpus_tests_are_named_as_they_end() -> None:
    done = check("--stage", "tests", "--print")
    words = done.stdout.split()
    assert "-v" in words and ("-n" in words) is (len(os.sched_getaffinity(0)) >= 4)
    files = [word for word in words if word.endswith(".py")]
    assert files == sorted(files) and {"tests/engine/test_gpu_engine.py", "tests/io/test_transfer.py"} <= set(files)
    assert words[words.index("-m", words.index("pytest")) + 1] == "gpu"


@pytest.mark.slow
def test_the_tests_for_gpus_are_found() -> None:
    done = check("--stage", "tests", "--dry-run", timeout=200)
    assert done.returncode == 0 and "test_gpu_engine.py" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "told"), [("debug", "not watched (no CUDA): waits of the host"), ("ab4", "losses")])
def test_a_stage_runs_on_the_cpu(tmp_path: Path, stage: str, told: str) -> None:
    done = check("--stage", stage, "--dry-run", "--out", str(tmp_path / "out"), timeout=590)
    assert done.returncode == 0 and told in done.stdout, done.stdout[-2000:] + done.stderr[-3000:]


@pytest.mark.slow
def test_the_launching_threads_time_is_measured_and_recorded(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "launch.py"), "--rounds", "1", "--layers", "3", "--micro-batches", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command += ["--benchmarks", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    [path] = (tmp_path / "launch").iterdir()
    found = json.loads(path.read_text())
    told = [found[device][op] for device in ("late", "cpu") for op in ("F", "B")]
    assert [len(each[key]) for each in told for key in ("engine_s", "plain_s")] == [1] * 8
    assert all(each["engine_ops"] > each["plain_ops"] > 0 for each in told)
    assert found["beyond"]["op_s"] > 0
    assert [line.split(":")[0] for line in done.stdout.splitlines()[-5:-1]] == ["late F", "late B", "cpu F", "cpu B"]
