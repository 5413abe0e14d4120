"""What an installation from a wheel brings."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from places import ROOT


def test_a_wheel_has_the_shapes_the_machines_and_the_sources(tmp_path: Path) -> None:
    source = tmp_path / "source"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):  # a build leaves folders behind
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    words = ["wheel", "--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, timeout=200)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    folders = ("planner/machines", "cli/plan/specs", "compat/ops/csrc", "cli/report")
    copied = {"configs/models": "models"} | {f"ds_vertical/{each}": each for each in folders}
    for folder, target in copied.items():
        data = (path.name for path in (ROOT / folder).iterdir() if path.suffix in (".json", ".cpp", ".j2"))
        there = {f"ds_vertical/{target}/{name}" for name in data}
        assert there and there <= set(names)
    modules = [name for name in tracked.split("\0") if name.startswith("ds_vertical/") and name.endswith(".py")]
    assert [name for name in modules if name not in names] == [], "pyproject.toml: packages that are not listed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    code = "import ds_vertical.model.hf as s; print(s.SHAPES); print(s.named_shape('gpt_175b'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "installed", capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == str(tmp_path / "installed" / "ds_vertical" / "models")
