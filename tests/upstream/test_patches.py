"""Four bugs of stock DeepSpeed that stand in the way of a fair baseline, each shown on the installed DeepSpeed, and
shown to be gone in a copy with the patch from patches/. A `test_stock_...` that fails says that DeepSpeed has changed:
see whether the patch is still needed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import forks
import pytest
from places import ROOT, SUPPORT

PATCHES = ROOT / "patches"
PREFETCH = PATCHES / "0001-prefetch-queue-duplicate.patch"
DTYPE = PATCHES / "0002-zero-init-honours-dtype.patch"
AIO = PATCHES / "0003-aio-checks-results.patch"
ADAM = PATCHES / "0004-cpu-adam-releases-the-interpreter-lock.patch"
TENSOR_BYTES = 2 << 20  # of every write in stock_aio.py
Finished = subprocess.CompletedProcess[str]
NUM_MODES = 4  # single_submit x overlap_events


# ----------------------------------------------------------------------------------------------------- patched copies


def installed_package() -> Path:
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def touched_files(patch: Path) -> list[PurePosixPath]:
    """The files that `patch` changes, with the paths of DeepSpeed's repository."""
    return [PurePosixPath(name) for name in re.findall(r"^\+\+\+ b/(\S+)$", patch.read_text(), re.MULTILINE)]


def installed_path(file: PurePosixPath) -> Path:
    """Where the installation has a file of the repository: csrc/ is shipped inside the package."""
    inside = PurePosixPath("ops") / file if file.parts[0] == "csrc" else file.relative_to("deepspeed")
    return installed_package() / inside


def link_tree(target: Path, origin: Path, copied: Sequence[PurePosixPath]) -> None:
    """`target` with every entry of `origin` as a link, except the files `copied` and the folders above them."""
    target.mkdir()
    for entry in origin.iterdir():
        below = [path.relative_to(entry.name) for path in copied if path.parts[0] == entry.name]
        if entry.name == "__pycache__":
            continue  # a link would let Python put compiled patched code into the installation
        if not below:
            (target / entry.name).symlink_to(entry)
        elif entry.is_dir():
            link_tree(target / entry.name, entry, below)
        else:
            shutil.copyfile(entry, target / entry.name)


def patched_copy(root: Path, patch: Path) -> Path:
    """`root`, laid out as DeepSpeed's repository, with `patch` applied; nothing of the installation is written to."""
    package = installed_package()
    root.mkdir()
    inside = [PurePosixPath(installed_path(file).relative_to(package)) for file in touched_files(patch)]
    # "ops/csrc" is always real, to be moved to where the repository has it
    link_tree(root / "deepspeed", package, [*inside, PurePosixPath("ops/csrc/aio/common/deepspeed_aio_common.h")])
    shutil.move(root / "deepspeed/ops/csrc", root / "csrc")
    (root / "deepspeed/ops/csrc").symlink_to(root / "csrc")
    # no fuzz: what was tested is what the patch says
    command = ["patch", "-p1", "--batch", "--fuzz=0", "-d", str(root), "-i", str(patch)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{patch.name} does not apply to the installed DeepSpeed:\n{done.stdout}{done.stderr}"
    return root


def run_script(name: str, *arguments: object, first: Path | None = None, timeout_s: float = 280) -> Finished:
    """Run a script of this folder; DeepSpeed comes from `first`, or is the installed one."""
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "ignore"}
    folders = [str(first)] if first is not None else []
    env["PYTHONPATH"] = os.pathsep.join([*folders, str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    command = [sys.executable, str(SUPPORT / name), *map(str, arguments)]
    if first is None:
        with tempfile.TemporaryDirectory() as folder:
            return forks.run(Path(folder), command, env, timeout_s)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)


def objects_of(run: Finished, key: str) -> list[dict[str, Any]]:
    """The script's JSON lines, between what DeepSpeed prints."""
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith(f'{{"{key}": ')]


@pytest.mark.parametrize("patch", sorted(PATCHES.glob("*.patch")), ids=lambda patch: patch.stem)
def test_patch_applies_and_leaves_the_installation_alone(patch: Path, tmp_path: Path) -> None:
    files = touched_files(patch)
    assert files
    before = {file: hashlib.sha256(installed_path(file).read_bytes()).digest() for file in files}
    root = patched_copy(tmp_path / "repository", patch)
    for file in files:
        assert hashlib.sha256(installed_path(file).read_bytes()).digest() == before[file], file
        assert hashlib.sha256((root / file).read_bytes()).digest() != before[file], file
        shipped = root / "deepspeed" / installed_path(file).relative_to(installed_package())
        assert shipped.samefile(root / file)


# ----------------------------------------------------------------------------------- 1: one prefetch issued twice


@pytest.mark.slow
def test_stock_dies_when_the_prefetch_window_reaches_over_the_turn(tmp_path: Path) -> None:
    run = run_script("stock_training.py", tmp_path, "bf16", "bf16-prefetch")
    trained = objects_of(run, "variant")
    assert [one["variant"] for one in trained] == ["bf16"], run.stderr
    assert run.returncode != 0
    assert re.search(r"AssertionError: param \d+ already assigned swap buffer id \d+", run.stderr), run.stderr


@pytest.mark.slow
def test_prefetch_patch_trains_with_the_bits_of_no_prefetch(tmp_path: Path) -> None:
    root = patched_copy(tmp_path / "repository", PREFETCH)
    run = run_script("stock_training.py", tmp_path, "bf16", "bf16-prefetch", first=root)
    assert run.returncode == 0, run.stderr
    without, prefetched = objects_of(run, "variant")
    assert Path(prefetched["deepspeed"]).is_relative_to(root)
    assert prefetched["losses"] == without["losses"]
    assert prefetched["weights"] == without["weights"]


# ------------------------------------------------------------------- 2: fp32 on SSD without zero.Init, without fp16


FP32_VARIANTS = ("fp32", "fp32-without-init", "fp32-mixed-without-init")


@pytest.mark.slow
def test_stock_makes_an_fp32_model_bf16_without_zero_init(tmp_path: Path) -> None:
    run = run_script("stock_training.py", tmp_path, *FP32_VARIANTS)
    trained = {one["variant"]: one for one in objects_of(run, "variant")}
    # in silence where every parameter lies on SSD; with an error where some stay in host memory, and so in fp32
    assert tuple(trained) == FP32_VARIANTS[:2], run.stderr
    assert trained["fp32"]["dtypes"] == ["torch.float32"]
    assert trained["fp32-without-init"]["dtypes"] == ["torch.bfloat16"]
    assert trained["fp32-without-init"]["losses"] != trained["fp32"]["losses"]
    assert run.returncode != 0
    assert "to have the same dtype, but got: c10::BFloat16 != float" in run.stderr, run.stderr


@pytest.mark.slow
def test_dtype_patch_trains_an_fp32_model_in_fp32(tmp_path: Path) -> None:
    root = patched_copy(tmp_path / "repository", DTYPE)
    run = run_script("stock_training.py", tmp_path, *FP32_VARIANTS, first=root)
    assert run.returncode == 0, run.stderr
    under_init, without, mixed = objects_of(run, "variant")
    assert Path(without["deepspeed"]).is_relative_to(root)
    assert without["dtypes"] == under_init["dtypes"] == mixed["dtypes"] == ["torch.float32"]
    assert without["losses"] == under_init["losses"]
    assert without["weights"] == under_init["weights"]


# ------------------------------------------------------------------------------------------ 3: aio ignores results


def by_case(run: Finished, case: str) -> list[dict[str, Any]]:
    return [one for one in objects_of(run, "case") if one["case"] == case]


@pytest.mark.slow
def test_stock_reports_cut_writes_as_done_and_aborts_on_a_truncated_file(tmp_path: Path) -> None:
    run = run_script("stock_aio.py", tmp_path)
    for case in ("short", "full"):
        cut = by_case(run, case)
        assert len(cut) == NUM_MODES, run.stderr
        assert all(one["waited"] == 1 and one["file_bytes"] < TENSOR_BYTES for one in cut), cut
    assert run.returncode == -signal.SIGABRT
    assert "is_valid_bytes_to_read" in run.stderr and "Assertion" in run.stderr
    assert not by_case(run, "truncated")


@pytest.mark.slow  # compiles async_io: 3 minutes where nothing else runs
@pytest.mark.timeout(1200)
def test_aio_patch_raises_on_cut_writes_and_refuses_a_truncated_file(tmp_path: Path) -> None:
    root = patched_copy(tmp_path / "repository", AIO)
    run = run_script("stock_aio.py", tmp_path, "--build", tmp_path / "build", first=root, timeout_s=1100)
    assert run.returncode == 0, run.stderr
    shutil.rmtree(tmp_path / "build")  # 100 MB of objects, which pytest would keep
    healthy, short, full = (by_case(run, case) for case in ("healthy", "short", "full"))
    assert len(healthy) == len(short) == len(full) == NUM_MODES
    assert all(one["written"] == one["read"] == 1 and one["equal"] for one in healthy), healthy
    for index in range(NUM_MODES):
        assert re.search(rf"write of {TENSOR_BYTES} bytes .*/short{index}: Input/output error", short[index]["waited"])
        assert re.search(rf"write of {TENSOR_BYTES} bytes .*/full{index}: File too large", full[index]["waited"])
        # the handle is as good as new
        assert short[index]["again"] == full[index]["again"] == 1
    assert "short transfer, 262144 of 524288 bytes" in run.stderr
    # the second read is refused, and the first, which nobody waited for, does not abort the process
    assert [one["submitted"] for one in by_case(run, "truncated")] == [[0, -1]]


# ------------------------------------------------------------------------------- 4: CPU Adam holds the interpreter lock


def test_stock_adam_keeps_other_threads_waiting() -> None:
    assert objects_of(run_script("adam_gap.py"), "ticks") == [{"ticks": 0}]


@pytest.mark.slow  # compiles cpu_adam: 2 minutes where nothing else runs
@pytest.mark.timeout(900)
def test_adam_patch_lets_other_threads_run(tmp_path: Path) -> None:
    root = patched_copy(tmp_path / "repository", ADAM)
    run = run_script("adam_gap.py", "--build", tmp_path / "build", first=root, timeout_s=800)
    assert run.returncode == 0, run.stderr
    shutil.rmtree(tmp_path / "build")
    (measured,) = objects_of(run, "ticks")
    assert measured["ticks"] > 0
