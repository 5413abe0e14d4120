"""Every model type that transformers can make small trains layer-major with the gradients of plain autograd, or is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT, SUPPORT


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("ends", ["resident", "fetched"])
def test_every_type_is_exact_to_rounding_or_refused(tmp_path: Path, ends: str) -> None:
    """`DS_VERTICAL_FAMILIES=docs/families.md` writes the table as well. Weights are NaN while they are away."""
    out = tmp_path / "rows.jsonl"
    paths = os.pathsep.join([str(SUPPORT), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "DS_VERTICAL_ENDS": ends}
    subprocess.run([sys.executable, str(SUPPORT / "sweep.py"), str(out)], env=environment, check=True)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    if (named := os.environ.get("DS_VERTICAL_FAMILIES")) and ends == "resident":
        subprocess.run([sys.executable, str(SUPPORT / "sweep.py"), str(out), "--table", named], env=environment, check=True)
    bad = {row["type"]: row for row in rows if row["result"] in ("differs", "fails")}
    assert not bad
    assert sum(row["result"] == "exact" for row in rows) >= 400
