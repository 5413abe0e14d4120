"""The two hosts of benchmarks/rig, for tests: a run on them through DeepSpeed's launcher, and the same one on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import forks
from places import ROOT, SUPPORT

sys.path.append(str(ROOT / "benchmarks"))

from rig import launch  # noqa: E402
from rig.hosts import INTERFACE, NAMES, TwoHosts, refusal, remove_stale  # noqa: E402

__all__ = [
    "INTERFACE",
    "NAMES",
    "ForkedRanks",
    "Launch",
    "TwoHosts",
    "launch",
    "refusal",
    "remove_stale",
    "results",
    "wait_for",
]
WORKER = SUPPORT / "two_hosts_worker.py"


class Launch:
    """A run of `WORKER` on both hosts. `name`: another one for each run on the same hosts; `out`: where its ranks write."""

    def __init__(self, hosts: TwoHosts, words: Sequence[str] = (), ranks_per_host: int = 1, name: str = "out") -> None:
        self.out = hosts.shared / name
        self.out.mkdir()
        self._log = hosts.shared / f"{name}.log"
        launch.write_settings(hosts, ranks_per_host)
        given = ["--nvme", str(hosts.ssd), "--out", str(self.out), *words]
        self.process = launch.start(hosts, WORKER, given, self._log)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait(self, limit_s: float = 200) -> int:
        """The launcher's status."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(self.log()[-5000:]) from None

    def wait_for(self, condition: Callable[[], bool], limit_s: float) -> float:
        """As `wait_for`; a failure shows the log's end."""
        return wait_for(condition, limit_s, self.log)

    def wait_for_step(self, number: int, limit_s: float = 400) -> None:
        """Return when rank 0 has taken step `number` of a loop."""
        path = self.out / "step0"
        self.wait_for(lambda: self.process.poll() is not None or (path.exists() and int(path.read_text()) >= number), limit_s)
        assert self.process.poll() is None, self.log()[-5000:]


class ForkedRanks:
    """Runs of `WORKER` on both hosts without a launcher: on each host a process imports all there is to import once, and forks
    the ranks of every run. To be used in a `with` block."""

    def __init__(self, hosts: TwoHosts, ranks_per_host: int) -> None:
        self._hosts, self._ranks_per_host = hosts, ranks_per_host
        self._env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(Path.home()), **launch.ENVIRONMENT}
        self._env |= {"PYTHONPATH": f"{ROOT}:{SUPPORT}", "LOCAL_SIZE": str(ranks_per_host)}
        settings = " ".join(f"{name}='{value}'" for name, value in self._env.items())
        command = f"{settings} exec {sys.executable} {SUPPORT / 'forks.py'}"
        self._servers = [forks.Server([str(hosts.bin / "ssh"), name, command]) for name in NAMES]

    def __enter__(self) -> ForkedRanks:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.end()

    def run(self, words: Sequence[str], name: str, limit_s: float = 100) -> list[dict[str, Any]]:
        """What each rank of a run has found. `name`: another one for each."""
        out = self._hosts.shared / name
        out.mkdir()
        num_ranks = self._ranks_per_host * len(NAMES)
        log = out / "log"
        common = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(self._ranks_per_host), "MASTER_ADDR": NAMES[0]}
        command = [sys.executable, str(WORKER), "--nvme", str(self._hosts.ssd), "--out", str(out), *words]
        under_way: list[tuple[forks.Server, int]] = []
        for rank in range(num_ranks):
            host, local = divmod(rank, self._ranks_per_host)
            env = self._env | common | {"RANK": str(rank), "LOCAL_RANK": str(local), "MASTER_PORT": str(launch.PORT)}
            server = self._servers[host]
            under_way.append((server, server.ask("start", forks.job_of(command, out, env, (log, log), engine=True))))
        codes: dict[int, int] = {}

        def are_over() -> bool:
            for rank, (server, pid) in enumerate(under_way):
                if rank not in codes and (code := server.ask("poll", pid)) is not None:
                    codes[rank] = code
            return len(codes) == num_ranks or any(codes.values())

        wait_for(are_over, limit_s, log.read_text)
        assert not any(codes.values()), log.read_text()[-5000:]
        return results(out, num_ranks)


def results(out: Path, num_ranks: int) -> list[dict[str, Any]]:
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]


def wait_for(condition: Callable[[], bool], limit_s: float, log: Callable[[], str] = str) -> float:
    """Seconds until the condition was true; fails after `limit_s`, with the end of `log`."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < limit_s, f"waited for {limit_s} s; {log()[-5000:]}"
        time.sleep(0.02)
    return time.monotonic() - start
