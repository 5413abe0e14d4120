"""Errors, short transfers and refused opens put under the aio binding of a real run: what the step says, what becomes of the
state, and that nothing is lost. See tests/support/fault_worker.py for the cases."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from typing import Any

import fault_worker
import injected
import pytest
from fault_worker import CASES, NUM_TRIES

from ds_vertical.io.disk_errors import remedy
from ds_vertical.offload.consistency import WHOLE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SEED = 1


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Of all cases, in one process."""
    folder = tmp_path_factory.mktemp("injected")
    environment = os.environ | injected.environment(injected.build(folder))
    command = [sys.executable, fault_worker.__file__, "--seed", str(SEED), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    found: dict[str, list[dict[str, Any]]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("@ "):
            entry = json.loads(line[2:])
            found.setdefault(entry["case"], []).append(entry)
    return found


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_lost(outcomes: dict[str, list[dict[str, Any]]], name: str) -> None:
    """The seed is printed by the worker; `failed` operations are those that really were made to fail."""
    case = CASES[name]
    assert len(outcomes[name]) == NUM_TRIES
    for entry in outcomes[name]:
        assert entry["failed"] > 0, entry
        assert (entry["state"], entry["remarks"]) == (case.state, []), entry
        if case.state == "unharmed":
            assert entry["error"] == ""
            continue
        assert entry["error"] == "DiskError" and entry["seconds"] < 10, entry
        operation = "read" if "read" in case.kind else "write"
        for word in (f"{operation} of", errno.errorcode[case.number], remedy(case.number), case.name):
            assert word in entry["text"], entry
        notes = " ".join(entry["notes"])
        assert (WHOLE in notes) == (case.state == "whole") and ("live state is torn" in notes) == (case.state == "torn")
