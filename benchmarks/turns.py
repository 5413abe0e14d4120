"""What a disk under `--ssd-limit` gives to a loop that reads and writes in turn, against each direction alone: whether the
kernel's limit stands for a slower disk where nothing is in flight. Bytes/s of each direction while it works.

    python benchmarks/turns.py [--ssd-limit 300M,500M] [--folder .]

Writes benchmarks/turns/<date>.json. Nothing else may use the disk.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import portable

from ds_vertical.cli.bench import disk_limit, machine_info
from ds_vertical.compat import pinned_memory
from ds_vertical.compat.ops import load
from ds_vertical.io import files
from ds_vertical.io.aio import DiskQueue

ROOT = Path(__file__).resolve().parent.parent
MODES = {
    "read": ("read",),
    "write": ("write",),
    "in turn": ("read", "write"),
    "in turn, pauses": ("read", "pause", "write", "pause"),
}
SIZES = (25_165_824, 100_663_296)  # a piece of optimizer state, and four
PAUSE_S = 0.02  # as long as CPU Adam and the cast of a piece take
MEASURED_S = 4.0  # per mode and size, after half a second that is left out


def rates(turn: Callable[[str], None], directions: tuple[str, ...], num_bytes: int) -> dict[str, float]:
    """Bytes/s of each direction while it works, and of the whole loop in each."""
    seconds: dict[str, list[float]] = defaultdict(list)
    begin = time.perf_counter()
    for direction in itertools.cycle(directions):
        start = time.perf_counter()
        if direction == directions[0] and start - begin > MEASURED_S:
            break
        turn(direction)
        if start - begin > 0.5:
            seconds[direction].append(time.perf_counter() - start)
    whole = sum(map(sum, seconds.values()))
    found = {name: len(times) * num_bytes / sum(times) for name, times in seconds.items() if name != "pause"}
    return found | {"each over the whole": len(seconds[directions[0]]) * num_bytes / whole}


def measure(folder: Path) -> list[dict[str, object]]:
    """All modes with all sizes on the disk of `folder`."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="turns.", dir=folder) as scratch:
        paths = {direction: Path(scratch) / direction for direction in ("read", "write")}
        files.preallocate({path: max(SIZES) for path in paths.values()})
        memory, queue = pinned_memory.lock_host_bytes(max(SIZES)), DiskQueue(load.checked_aio().Queue(1 << 20, 32, False))
        queue.write(memory.data_ptr(), max(SIZES), paths["read"], 0).wait()
        for num_bytes, (mode, directions) in itertools.product(SIZES, MODES.items()):

            def turn(direction: str, num_bytes: int = num_bytes) -> None:
                if direction == "pause":
                    time.sleep(PAUSE_S)
                else:
                    getattr(queue, direction)(memory.data_ptr(), num_bytes, paths[direction], 0).wait()

            rows.append({"bytes": num_bytes, "mode": mode, "bytes_per_s": rates(turn, directions, num_bytes)})
        queue.close()
        pinned_memory.unlock_host_bytes(memory)
    return rows


def main() -> None:
    """Measures in a child, which is limited, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ssd-limit", default="300M,500M")
    parser.add_argument("--folder", type=Path, default=ROOT, help="on the disk")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.folder)))
        return
    with disk_limit.limited(disk_limit.parse_limit(options.ssd_limit), [options.folder]) as group:
        command = group.wrap([sys.executable, __file__, "--child", "--folder", str(options.folder)])
        rows = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])
    for row in rows:
        shown = ", ".join(f"{name} {rate / 1e6:.0f} MB/s" for name, rate in row["bytes_per_s"].items())
        print(f"{row['bytes'] / 1e6:6.0f} MB {row['mode']:16} {shown}")
    today = datetime.date.today()
    content = {
        "date": str(today),
        "machine": machine_info.describe_machine(),
        "versions": machine_info.versions(),
        "ssd_limit": options.ssd_limit,
        "pause_s": PAUSE_S,
        "rows": rows,
    }
    portable.write(ROOT / "benchmarks" / "turns" / f"{today}.json", content, ROOT / "runs" / "turns", "turns")


if __name__ == "__main__":
    sys.exit(main())
