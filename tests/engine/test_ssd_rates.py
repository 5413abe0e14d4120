"""Several SSDs as they are meant: file systems of their own on disks that are slow, read at the sum of their rates."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
from faults import loop_disk
from places import SUPPORT

from ds_vertical.cli.bench import disk_limit
from ds_vertical.errors import ConfigError

MB = 1_000_000
READ_BPS = 150 * MB


@contextlib.contextmanager
def slow_disks(folder: Path, count: int) -> Iterator[tuple[list[Path], disk_limit.LimitedGroup]]:
    """So many file systems, and a group whose reads of each are limited."""
    with contextlib.ExitStack() as stack:
        disks = [stack.enter_context(loop_disk(folder / f"ssd{number}", 3 << 30)).folder for number in range(count)]
        try:
            group = stack.enter_context(disk_limit.limited(disk_limit.Limit(READ_BPS, 20_000 * MB), disks))
        except ConfigError as error:
            pytest.skip(str(error))
        yield disks, group


@pytest.mark.slow
def test_two_slow_disks_are_read_at_the_sum_of_their_rates(tmp_path: Path) -> None:
    """In a step, and in one layer's fetch by itself."""
    rates = {}
    for count in (1, 2):
        place = tmp_path / str(count)
        place.mkdir()
        with slow_disks(place, count) as (disks, group):
            out = place / "rates.json"
            command = [sys.executable, str(SUPPORT / "ssd_rate_worker.py"), str(out), *(str(disk / "runs") for disk in disks)]
            subprocess.run(group.wrap(command), check=True)
            rates[count] = json.loads(out.read_text())
    print(json.dumps(rates))
    for count, found in rates.items():
        for kind in ("steps", "layers"):
            assert abs(median(found[kind]) / (count * READ_BPS) - 1) < 0.1, (count, kind, found)
