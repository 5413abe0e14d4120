"""The disk's rates as `fio` measures them, to check our own against.

fio gets the same block size, depth, threads, file size and O_DIRECT, and memory in huge pages, as our buffers have. In small
pages a block is more pieces than a disk may take at once (virtio: 254 of 4 KiB), and a read takes up to 2.5 times as long.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from ds_vertical.cli.common import JsonObject

ABSENT = "fio is not installed (Debian: apt-get install fio): the SSD's rates are not checked against it"
_HUGE_PAGE_BYTES = 2 << 20
# Allocations are advised to be of huge pages: glibc from 2.35 on, older ones ignore it. fio has no option for it.
_HUGE_PAGES = "glibc.malloc.hugetlb=1"


def installed() -> bool:
    """Whether this machine has fio on its path."""
    return shutil.which("fio") is not None


def fio_rates(folder: Path, num_bytes: int, rounds: int, aio: JsonObject) -> dict[str, float]:
    """Bytes/s of each direction alone and of both together, `fio_*`. `aio`: DeepSpeed's settings. Raises OSError."""
    found = {}
    for name, directions in (("write", ["write"]), ("read", ["read"]), ("together", ["read", "write"])):
        jobs = _run(folder, num_bytes, rounds, aio, directions)
        for direction in directions:
            bandwidth = float(sum(job[direction]["bw_bytes"] for job in jobs if job["jobname"] == direction))
            found[f"fio_{direction}{'_together' * (name == 'together')}_bytes_per_s"] = bandwidth
    return found


def command(folder: Path, num_bytes: int, rounds: int, aio: JsonObject, directions: list[str]) -> list[str]:
    """The command line: one job per direction, each on a file of its own that exists in full before it starts."""
    threads = aio["intra_op_parallelism"]
    shared = [
        *("--output-format=json", "--direct=1", "--ioengine=libaio", "--group_reporting=0", "--overwrite=1"),
        *(f"--bs={aio['block_size']}", f"--iodepth={aio['queue_depth']}", f"--loops={rounds}", "--invalidate=1"),
        f"--iomem_align={_HUGE_PAGE_BYTES}",
        *(f"--numjobs={threads}", f"--size={num_bytes // threads}", f"--offset_increment={num_bytes // threads}"),
    ]
    jobs = [[f"--name={way}", f"--filename={folder}/fio.{way}", f"--rw={way}"] for way in directions]
    return ["fio", *shared, *(option for job in jobs for option in job)]


def _run(folder: Path, num_bytes: int, rounds: int, aio: JsonObject, directions: list[str]) -> list[JsonObject]:
    tunables = ":".join(filter(None, [os.environ.get("GLIBC_TUNABLES"), _HUGE_PAGES]))
    env = os.environ | {"GLIBC_TUNABLES": tunables}
    done = subprocess.run(command(folder, num_bytes, rounds, aio, directions), capture_output=True, text=True, env=env)
    start = done.stdout.find("{")
    if done.returncode != 0 or start < 0:
        raise OSError(f"fio failed with status {done.returncode}: {(done.stderr or done.stdout).strip()[-500:]}")
    return json.loads(done.stdout[start:])["jobs"]
