"""Engines on a GPU: stock's bits, copies beside computation, no more layers there than counted, the commands.

Every engine runs in a process of its own (tests/support/gpu_worker.py), with DS_ACCELERATOR=cuda; one test runs the same
process on the CPU, so that where there is no GPU only the device is untested.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from gpu_worker import LIMIT_S
from harness import base_config
from late_worker import CASES, COMPILED
from places import ROOT, SUPPORT

MODEL = ROOT / "configs" / "models" / "gpt_13m.json"
CHOSEN_HERE = ("MASTER_ADDR", "RANK", "LOCAL_RANK", "WORLD_SIZE")  # by tests before, for this process


def run(folder: Path, device: str, *words: object) -> str:
    """What a command prints whose DeepSpeed computes on `device`."""
    environment = {name: value for name, value in os.environ.items() if name not in CHOSEN_HERE}
    if device != "cpu":
        environment.pop("TORCH_EXTENSIONS_DIR", None)  # the ops of this process's accelerator
    environment |= {"DS_ACCELERATOR": device, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    command = [sys.executable, *map(str, words)]
    if device == "cpu":
        done = forks.run(folder, command, environment, timeout=280, engine=True)
    else:
        done = run_on_device(command, environment, folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def run_on_device(command: list[str], environment: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    """One that does not end is ended, and what its threads wait for in the kernel is told behind what it has printed."""
    process = subprocess.Popen(
        command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        printed, errors = process.communicate(timeout=LIMIT_S + 20)
        told = ""
    except subprocess.TimeoutExpired:
        told = "\n".join(f"{path.parent.name} {path.read_text().strip()}" for path in threads_of(process.pid, "comm", "wchan"))
        os.killpg(process.pid, signal.SIGKILL)
        printed, errors = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, printed, f"{errors}\n{told}")


def threads_of(pid: int, *files: str) -> list[Path]:
    return [each / name for each in sorted(Path(f"/proc/{pid}/task").iterdir()) for name in files]


def test_a_process_that_never_ends_is_ended_and_tells_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LIMIT_S", -19)
    done = run_on_device([sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"], {}, tmp_path)
    assert done.returncode == -signal.SIGKILL and done.stdout == "begun\n"
    assert "python" in done.stderr and "nanosleep" in done.stderr


def run_cases(folder: Path, device: str, *cases: dict[str, Any]) -> list[dict[str, Any]]:
    return json.loads(run(folder, device, SUPPORT / "gpu_worker.py", folder, json.dumps(cases)).splitlines()[-1])


def test_bits_are_stocks_in_a_process_of_its_own_on_the_cpu(tmp_path: Path) -> None:
    case = {"case": "bits", "dtype": "fp32", "clip": 1.0, "persistence": None}
    assert run_cases(tmp_path, "cpu", case) == [{"steps": 2, "skipped": 0}]


@pytest.mark.slow
def test_the_other_cases_hold_on_the_cpu(tmp_path: Path) -> None:
    cases = [{"case": "activations", "dtype": "fp32"}, {"case": "ahead", "dtype": "fp32", "window": 1}]
    moved, ahead, resumed = run_cases(tmp_path, "cpu", *cases, {"case": "resumes", "dtype": "fp32"})
    assert moved == {"steps": 2}
    assert resumed["differing"] == [] and resumed["tensors"] > 20
    assert ahead["layer"] > 2 << 20 and ahead["rest"] > 0


@pytest.mark.gpu
def test_what_leaves_a_busy_device_comes_back_as_it_was(tmp_path: Path) -> None:
    assert run_cases(tmp_path, "cuda", {"case": "activations", "dtype": "bf16"}) == [{"steps": 2}]


LIBRARIES = 96 << 20  # bytes of workspaces, which kernels' libraries take in the first training of a process
ON_A_GPU = [name for name in CASES if name != COMPILED]  # `compiled` compiles, without the sanitizer
SETTINGS = [["bf16, clipped", "fp32, half of each layer late"], *(ON_A_GPU[index::6] for index in range(6))]


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(1, len(SETTINGS)))
def test_settings_that_run_on_the_late_device_have_their_bits(tmp_path: Path, part: int) -> None:
    [found] = run_cases(tmp_path, "cuda", {"case": "settings", "names": SETTINGS[part]})
    assert not {name: each["wrong"] for name, each in found.items() if each["wrong"]}
    assert [*found] == SETTINGS[part]
    beyond = {name: each["peak"] - each["budget"] for name, each in found.items()}
    assert all(each <= LIBRARIES for each in beyond.values()), beyond


@pytest.mark.slow
def test_settings_have_their_bits_on_the_cpu(tmp_path: Path) -> None:
    [found] = run_cases(tmp_path, "cpu", {"case": "settings", "names": SETTINGS[0]})
    assert found == {name: {"wrong": None} for name in SETTINGS[0]}


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)])
def test_attention_in_one_kernel_has_stocks_bits(tmp_path: Path, device: str) -> None:
    case = {"case": "attention", "dtype": "bf16", "backend": "flash" if device == "cuda" else "math"}
    assert run_cases(tmp_path, device, case) == [{"steps": 2}]


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)])
def test_blocks_that_torch_compiles_have_the_bits_of_the_same_under_stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.delenv("TORCH_CUDA_SANITIZER", raising=False)  # it looks at each operation, which the compiler would trace
    [found] = run_cases(tmp_path, device, {"case": "compiled", "dtype": "bf16"})
    assert found["steps"] == 2 and found["frames"] > 0


@pytest.mark.gpu
def test_a_resumed_run_has_the_bits_of_one_that_went_on(tmp_path: Path) -> None:
    for found in run_cases(tmp_path, "cuda", *({"case": "resumes", "dtype": dtype} for dtype in ("bf16", "fp16"))):
        assert found["differing"] == [] and found["tensors"] > 20


@pytest.mark.gpu
def test_the_host_runs_ahead_of_the_device_by_no_more_layers_than_are_counted(tmp_path: Path) -> None:
    windows = 1, 2
    cases = [{"case": "ahead", "dtype": "bf16", "window": window} for window in windows]
    for window, found in zip(windows, run_cases(tmp_path, "cuda", *cases), strict=True):
        assert found["busy"]  # nothing on the host's way waits until all of it is computed
        # the window and the layer that computes, one more where a copy is still due; small tensors have blocks of their own
        assert found["grown"] <= (window + 2) * found["layer"] + found["rest"] + (4 << 20)


@pytest.mark.gpu
def test_a_full_gpu_fails_the_step_whole_and_says_what_fits(tmp_path: Path) -> None:
    [found] = run_cases(tmp_path, "cuda", {"case": "full"})
    assert found["kinds"] == ["DeviceFullError", "OutOfMemoryError", "OutOfMemoryError"] and found["left"] == [[]] * 3
    assert found["mended"] == {change: [] for change in found["mended"]} and found["mended"], found["text"]
    assert found["chosen"] == [] and 0 < found["cells"] < 24


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp16"])
def test_bits_are_stocks(tmp_path: Path, dtype: str) -> None:
    """With and without clipping, with and without persistent parameters."""
    cases = [{"case": "bits", "dtype": dtype, "clip": clip, "persistence": each} for clip in (0.0, 1.0) for each in (0, None)]
    for found in run_cases(tmp_path, "cuda", *cases):
        assert found["steps"] >= 2 and bool(found["skipped"]) is (dtype == "fp16")


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "late", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_gradients_of_a_busy_device_are_whole_for_another_thread(tmp_path: Path, device: str) -> None:
    """In a process whose accelerator is the device: its driver locks the memory that they wait in."""
    [found] = run_cases(tmp_path, "cpu" if device == "late" else device, {"case": "gradients", "device": device})
    assert found == {"page_locked": device != "cpu"}


@pytest.mark.gpu
def test_limits_measures_the_gpu_and_doctor_finds_no_fault(tmp_path: Path) -> None:
    out = tmp_path / "limits.json"
    words = ["--path", tmp_path, "--size-mb", 4, "--rounds", 1, "--model", MODEL, "--dtype", "bf16", "--tokens", 16]
    run(tmp_path, "cuda", "-m", "ds_vertical.cli.main", "limits", *words, "--no-keep", "--out", out)
    rates = json.loads(out.read_text())["rates"]
    assert rates["layer_forward_s"] > 0 and rates["activation_bytes"] == 16 * 512 * 2
    (tmp_path / "swap").mkdir()
    (tmp_path / "ds.json").write_text(json.dumps(base_config(tmp_path / "swap")))
    printed = run(tmp_path, "cuda", "-m", "ds_vertical.cli.main", "doctor", "--json", "--config", tmp_path / "ds.json")
    findings = json.loads(printed)["findings"]
    assert not [finding for finding in findings if finding["severity"] == "error"]
    assert [finding for finding in findings if f" x {torch.cuda.get_device_name(0)}" in finding["found"]]
