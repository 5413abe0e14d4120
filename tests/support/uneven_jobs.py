"""Runs of ranks that bring different numbers of micro-batches, each rank a process of `uneven_worker.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import uneven_worker
from processes import start_ranks
from rank_groups import Found
from uneven_worker import COUNTS


def run_jobs(folder: Path, num_ranks: int, runs: list[dict[str, Any]]) -> dict[str, Found]:
    """{run: what each rank found}."""
    counts = [list(each) for each in COUNTS[num_ranks]]
    description = folder / "job.json"
    given = [{"counts": counts} | run for run in runs]
    description.write_text(json.dumps({"folder": str(folder / "swap"), "out": str(folder), "runs": given}))
    command = [sys.executable, str(Path(uneven_worker.__file__)), str(description)]
    start_ranks(command, folder, num_ranks=num_ranks, forked=True)
    loaded = {run["name"]: [folder / f"{run['name']}.rank{rank}.pt" for rank in range(num_ranks)] for run in runs}
    return {name: [torch.load(path, weights_only=True) for path in paths] for name, paths in loaded.items()}
