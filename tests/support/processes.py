"""Other processes and this one's own: ports, ranks, memory."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from pathlib import Path

import forks


def status(key: str) -> int:
    """A number of /proc/self/status; memory in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1])


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended but was not yet waited for does not count."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_ranks(command: list[str], folder: Path, limit_s: float = 500, num_ranks: int = 2, forked: bool = False) -> None:
    """Run `command` once per rank; when one fails, end the others and show all. `forked`: as forks.py has it, with engines."""
    number = str(num_ranks)
    common = {"WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    logs = [folder / f"rank{rank}.log" for rank in range(num_ranks)]
    processes: list[subprocess.Popen[bytes] | forks.Fork] = []
    for rank, log in enumerate(logs):
        env = os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        if forked:
            processes.append(forks.Fork(command, Path.cwd(), env, (log, log), engine=True))
            continue
        with log.open("w") as out:
            processes.append(subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT))
    deadline = time.monotonic() + limit_s
    try:
        while any(p.poll() is None for p in processes) and not any(p.poll() for p in processes):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    codes = [process.returncode for process in processes]
    assert codes == [0] * num_ranks, "\n".join([str(codes), *(f"{log.name}: {log.read_text()[-3000:]}" for log in logs)])


def say(word: str, what: object) -> None:
    """Tell the process that reads this one's standard output, among whatever else stands there."""
    print("@ " + json.dumps([word, what]), flush=True)
