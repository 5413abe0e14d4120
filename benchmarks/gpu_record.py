"""Records a comparison that a GPU has run: `ds-vertical ab`'s result, with the GPU's utilisation and the budget of its memory.

    python benchmarks/gpu_record.py AB USAGE TARGET

AB: the folder that `ab` has written. USAGE: what nvidia-smi has printed meanwhile (timestamp,utilization.gpu,memory.used as
CSV, see `scripts/gpu_check.sh`), or a file that is not there. TARGET: the JSON to write. Its `gpu` has the utilisation in
percent over the whole command, set-ups included (the mean, and the share of the samples above 0), the most memory in use, the
device's budget that the vertical arm has printed at its start (activations not counted), and the arm's peak over that.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import portable

_MIB = 1 << 20
_TOTAL = re.compile(r"ds_vertical: device +total +([\d.]+)")


def usage(path: Path) -> dict[str, Any]:
    """What the GPU was busy with; nothing where nobody has looked."""
    rows = list(csv.reader(path.read_text().splitlines()))[1:] if path.exists() else []
    # the last one may have been cut, and a GPU need not say all
    whole = [row for row in rows if len(row) == 3 and row[1].strip().endswith("%") and row[2].strip().endswith("MiB")]
    if not whole:
        return {}
    busy = [float(row[1].strip(" %")) for row in whole]
    used = [float(row[2].strip().partition(" ")[0]) for row in whole]
    return {
        "samples": len(whole),
        "utilisation_percent": fmean(busy),
        "busy_share": fmean(each > 0 for each in busy),
        "most_memory_bytes": int(max(used) * _MIB),
    }


def budget(folder: Path) -> int | None:
    """Bytes of the device that the vertical arm has counted at its start; None where it has none beside the host."""
    found = [match for path in sorted(folder.glob("vertical*.log")) for match in _TOTAL.findall(path.read_text())]
    return int(float(found[0]) * _MIB) if found else None


def record(folder: Path, watched: Path) -> dict[str, Any]:
    """The comparison, and `gpu`."""
    content: dict[str, Any] = json.loads((folder / "ab.json").read_text())
    counted, peak = budget(folder), content["arms"]["vertical"].get("peak_device_bytes")
    ratio = peak / counted if peak and counted else None
    return content | {"gpu": usage(watched) | {"device_budget_bytes": counted, "peak_over_budget": ratio}}


if __name__ == "__main__":
    source, watched, target = map(Path, sys.argv[1:])
    portable.write(target, record(source, watched), source, target.parent.name)
