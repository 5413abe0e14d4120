"""An Accelerate script as it is, in both arms: short windows, evaluation, own losses, workers and saves as in stock."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import harness
import pytest
from processes import free_port

# as `python SCRIPT`, with the ops that are compiled already
PLAIN = (
    "import runpy, sys; from ds_vertical.compat.ops import cache; cache.activate(); del sys.argv[0];"
    " sys.path.insert(0, sys.argv[0].rpartition('/')[0]); runpy.run_path(sys.argv[0], run_name='__main__')"
)
SCRIPT = Path(__file__).parents[2] / "support" / "accelerate_script.py"


def run_arm(folder: Path, kind: str, vertical: bool, refused: str | None = None, **options: Any) -> dict[str, Any]:
    """What the script has computed. `vertical`: launched through ds_vertical, with the section in its JSON. `refused`: the
    message with which it ends instead."""
    folder.mkdir()
    made = harness.small_buffers(harness.base_config(folder, num_micro_batches=3, dtype="bf16", **options))
    made["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    section = made.pop("vertical_schedule")
    if vertical:
        made["zero_optimization"]["vertical_schedule"] = section | {"self_check": True}
    (folder / "config.json").write_text(json.dumps(made))
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [
            sys.executable,
            *(["-m", "ds_vertical.run"] if vertical else ["-c", PLAIN]),
            SCRIPT,
            folder / "config.json",
            folder / "out",
            kind,
        ],
        env=os.environ | ranks,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    if refused is not None:
        assert done.returncode != 0
        assert re.search(refused, done.stderr), done.stderr[-4000:]
        return {}
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert vertical == ("vertical schedule ACTIVE" in done.stdout)
    found = json.loads((folder / "out").read_text())
    assert found.pop("engine") == ("VerticalEngine" if vertical else "DeepSpeedEngine")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own_loss", "plain", "workers", "saving"])
def test_an_accelerate_script_has_stocks_bits(tmp_path: Path, kind: str) -> None:
    stock = run_arm(tmp_path / "stock", kind, False)
    vertical = run_arm(tmp_path / "vertical", kind, True)
    assert stock["steps"] == 6 and stock["sync"] == [False, False, True, False, False, True, False, True] * 2
    for name, found in stock.items():
        assert vertical[name] == found, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sync"),
    [
        ("skipped", [False, False, True, False, False, True, True]),
        ("across", [False, False, True] * 2),
        ("skipped stream", [False, False, True] * 2),
    ],
)
def test_loaders_of_other_kinds_have_stocks_bits(tmp_path: Path, kind: str, sync: list[bool]) -> None:
    stock = run_arm(tmp_path / "stock", kind, False)
    vertical = run_arm(tmp_path / "vertical", kind, True)
    assert stock["sync"] == sync * 2
    for name, found in stock.items():
        assert vertical[name] == found, name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["across, with a rest", "skipped stream, with a rest"])
def test_a_window_that_goes_on_into_the_next_epoch_is_refused_with_what_to_write(tmp_path: Path, kind: str) -> None:
    said = "the loop says that it is not the last one.*leave sync_with_dataloader true, and skip_first_batches of a loader that"
    run_arm(tmp_path / "vertical", kind, True, refused=f"{said}|the data loader ends .* micro-batches before the step does")
