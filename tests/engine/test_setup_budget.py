"""What the budget says of the time in which stock's optimizer is set up, against the peak of a process that does it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import base_config
from places import SUPPORT

NUM_LAYERS, WIDTH = 4, 2560
MATRIX_BYTES = 4 * WIDTH**2


def set_up(folder: Path, section: dict[str, Any], **options: Any) -> dict[str, int]:
    config = base_config(folder / "swap", dtype="fp32", section=section, sub_group_size=4 * WIDTH**2, **options)
    config["zero_optimization"]["offload_param"] |= {"buffer_count": 3, "buffer_size": WIDTH**2}
    (folder / "ds.json").write_text(json.dumps(config))
    command = [sys.executable, str(SUPPORT / "setup_worker.py"), str(folder / "ds.json"), str(NUM_LAYERS), str(WIDTH)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line[2:] for line in done.stdout.splitlines() if line.startswith('@ ["setup"')]
    return json.loads(line)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "least"),
    [
        ({"optimizer_host_share": 0.0}, 10 * MATRIX_BYTES),  # a layer's state for stock's five buffers
        ({"optimizer_host_share": 0.5}, 13 * MATRIX_BYTES),
        ({"optimizer_host_share": 1.0}, 26 * MATRIX_BYTES),  # masters and zeroed gradients of all eight matrices
    ],
    ids=str,
)
def test_setting_up_takes_what_the_budget_says(tmp_path: Path, section: dict[str, Any], least: int) -> None:
    """To within a tenth, and what libraries load at their first use."""
    found = set_up(tmp_path, section)
    taken = found["peak"] - found["baseline"]
    assert found["setup"] >= least
    assert 0.9 * found["setup"] <= taken <= 1.1 * found["setup"] + (96 << 20), found
