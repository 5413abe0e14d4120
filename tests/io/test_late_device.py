"""The late device, with which tests see what a GPU would hide: each race and wait that is planted is found."""

from __future__ import annotations

import json
import os
import sys

import forks
import late_cases
import late_copies
import pytest
from places import SUPPORT


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """How each case has ended, in one process whose accelerator the device is."""
    folder = tmp_path_factory.mktemp("late")
    command = [sys.executable, str(SUPPORT / "late_cases.py"), str(folder / "found.json")]
    done = forks.run(folder, command, os.environ | {"OMP_NUM_THREADS": "1"}, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("name", sorted(late_cases.CASES | late_copies.CASES))
def test_what_the_late_device_does_and_catches(outcomes: dict[str, str | None], name: str) -> None:
    assert outcomes[name] is None, outcomes[name]
