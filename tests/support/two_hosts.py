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

from rig import launch, quota  # noqa: E402
from rig.hosts import INTERFACE, LOOPBACK, NAMES, PREFIX, TwoHosts, refusal  # noqa: E402

__all__ = [
    "INTERFACE",
    "LOOPBACK",
    "NAMES",
    "PREFIX",
    "ForkedRanks",
    "ForkedRun",
    "Launch",
    "TwoHosts",
    "launch",
    "quota",
    "refusal",
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
        self._hosts = hosts

    def left(self, host: int) -> list[int]:
        """The process numbers, on this machine, of the ranks of a host that have not ended."""
        return self._hosts.hosts[host].processes(WORKER)

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
        self.hosts, self.ranks_per_host = hosts, ranks_per_host
        self._env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(Path.home()), **launch.ENVIRONMENT}
        self._env |= {"PYTHONPATH": f"{ROOT}:{SUPPORT}", "MASTER_ADDR": NAMES[0], "MASTER_PORT": str(launch.PORT)}
        self._env |= {"WORLD_SIZE": str(ranks_per_host * len(NAMES))}
        settings = " ".join(f"{name}='{value}'" for name, value in self._env.items())
        command = f"{settings} exec {sys.executable} {SUPPORT / 'forks.py'}"
        self.servers = [forks.Server([str(hosts.bin / "ssh"), name, command]) for name in NAMES]

    def __enter__(self) -> ForkedRanks:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.end()

    def start(self, words: Sequence[str], name: str = "out", places: Sequence[int] | None = None) -> ForkedRun:
        """Start a run. `name`: another one for each. `places`: the number of each rank's host; None: host by host."""
        out = self.hosts.shared / name
        out.mkdir()
        command = [sys.executable, str(WORKER), "--nvme", str(self.hosts.ssd), "--out", str(out), *words]
        places = places or [rank // self.ranks_per_host for rank in range(self.ranks_per_host * len(NAMES))]
        pids: list[int] = []
        for rank, host in enumerate(places):
            local = {"LOCAL_RANK": str(places[:rank].count(host)), "LOCAL_WORLD_SIZE": str(places.count(host))}
            env, log = self._env | {"RANK": str(rank), **local}, out / f"log{rank}"
            pids.append(self.servers[host].ask("start", forks.job_of(command, out, env, (log, log), engine=True)))
        return ForkedRun(self, out, pids, places)


class ForkedRun:
    """A run of `ForkedRanks` that is under way. `out`: where its ranks write; `pids`: of the ranks, on their hosts; `places`:
    the numbers of these."""

    def __init__(self, ranks: ForkedRanks, out: Path, pids: Sequence[int], places: Sequence[int]) -> None:
        self.out = out
        self._ranks, self._pids, self._places = ranks, pids, places
        self.codes: dict[int, int] = {}  # of the ranks that have ended

    def log(self) -> str:
        """What all ranks have said, with the host's name before each line."""
        said: list[str] = []
        for rank in range(len(self._pids)):
            name = NAMES[self._places[rank]]
            said += [f"{name}: {line}" for line in self.log_of(rank).splitlines()]
        return "\n".join(said)

    def log_of(self, rank: int) -> str:
        """What a rank has said."""
        return (self.out / f"log{rank}").read_text(errors="replace")

    def left(self, host: int) -> list[int]:
        """The ranks of a host that have not ended."""
        own = [rank for rank, place in enumerate(self._places) if place == host]
        for rank in own:
            if rank not in self.codes and (code := self._ranks.servers[host].ask("poll", self._pids[rank])) is not None:
                self.codes[rank] = code
        return [rank for rank in own if rank not in self.codes]

    def kill(self, host: int) -> None:
        """Kill all ranks of a host."""
        for rank in self.left(host):
            self._ranks.servers[host].ask("kill", self._pids[rank])

    def wait_for(self, condition: Callable[[], bool], limit_s: float) -> float:
        """As the function; a failure shows the log's end."""
        return wait_for(condition, limit_s, self.log)

    def wait(self, limit_s: float = 400) -> int:
        """The first status of a rank, in their order, that is not 0; 0 where there is none."""
        self.wait_for(lambda: not any([self.left(host) for host in range(len(NAMES))]), limit_s)
        return next((code for _, code in sorted(self.codes.items()) if code), 0)


def results(out: Path, num_ranks: int) -> list[dict[str, Any]]:
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]


def wait_for(condition: Callable[[], bool], limit_s: float, log: Callable[[], str] = str) -> float:
    """Seconds until the condition was true; fails after `limit_s`, with the end of `log`."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < limit_s, f"waited for {limit_s} s; {log()[-5000:]}"
        time.sleep(0.02)
    return time.monotonic() - start
