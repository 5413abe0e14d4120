"""One rank on each of two hosts, without an engine: saves of a few bytes to a folder of each host's own, and collectives. The
process imports everything once, and forks a child for each job, so that a job starts at once.

    python tests/support/node_local_worker.py     # one JSON job a line on standard input

A job: {"rank", "port", "out": a file, "do": [[name, argument, ...], ...]}. The names are those of the functions in `JOBS`. The
child writes to `out` what each of them has come to; an error is its text.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from places import ROOT, SUPPORT
from two_hosts import INTERFACE, NAMES, TwoHosts, wait_for

LIMIT_S = 60.0


# ---- in the tests' process


class Pair:
    """A process on each of the two hosts that forks ranks."""

    def __init__(self, hosts: TwoHosts) -> None:
        self.hosts = hosts
        self._number = 0
        path = os.pathsep.join((str(ROOT), str(SUPPORT)))
        settings = f"DS_ACCELERATOR=cpu GLOO_SOCKET_IFNAME={INTERFACE} OMP_NUM_THREADS=1 PYTHONPATH={path}"
        command = f"{settings} exec {sys.executable} {__file__}"
        self._processes = [
            subprocess.Popen(
                [str(hosts.bin / "ssh"), name, f"{command} 2>> {hosts.shared}/errors.{name}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for name in NAMES
        ]
        for process in self._processes:
            assert process.stdout is not None
            while line := process.stdout.readline():  # DeepSpeed prints, too
                if line == "ready\n":
                    break
        self._starters = {pid for host in hosts.hosts for pid in host.processes(Path(__file__))}

    def ranks(self, number: int) -> list[int]:
        """The process numbers, on this machine, of the ranks that run on a host."""
        return [pid for pid in self.hosts.hosts[number].processes(Path(__file__)) if pid not in self._starters]

    def errors(self, number: int) -> str:
        """What a host's processes have said on their standard error."""
        return (self.hosts.shared / f"errors.{NAMES[number]}").read_text(errors="replace")

    def start(self, *do: Sequence[object]) -> list[Path]:
        """Start a job on both; the files that it will write."""
        self._number += 1
        outs = [self.hosts.shared / f"job{self._number}.{rank}" for rank in range(len(NAMES))]
        for rank, (process, out) in enumerate(zip(self._processes, outs, strict=True)):
            assert process.stdin is not None
            job = {"rank": rank, "port": 29600 + self._number, "out": str(out), "do": do}
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        return outs

    def run(self, *do: Sequence[object]) -> list[list[Any]]:
        """What a job has come to, by rank."""
        outs = self.start(*do)
        wait_for(lambda: all(out.exists() for out in outs), LIMIT_S)
        return [json.loads(out.read_text()) for out in outs]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


# ---- on a host


def _saved(folder: str, tag: str, text: str) -> str:
    from ds_vertical.distributed import ranks
    from ds_vertical.engine.checkpoint import manifest, save
    from ds_vertical.engine.checkpoint.tag_dir import write_synced
    from ds_vertical.io.checksums import checksum

    with save.new_folder(Path(folder), tag, True, (), True) as (new, places):
        with ranks.all_or_none("save_checkpoint"):
            own = manifest.rank_folder(new.beside, ranks.rank())
            own.mkdir()
            told = {"format": manifest.FORMAT, "files": {}, "text": f"{text} of rank {ranks.rank()}"}
            data = json.dumps(told).encode()
            write_synced(own / manifest.NAME, data)
        every = ranks.all_gathered((len(data), checksum(data)))
        with ranks.all_or_none("save_checkpoint"):
            if places.is_first:
                hosts = places.every if places.are_several else None
                write_synced(new.beside / manifest.NAME, manifest.folder_manifest(tag, every, hosts))
    return f"saved by {len(places.every)}"


def _loaded(folder: str, tag: str | None = None) -> str | None:
    from ds_vertical.distributed import ranks
    from ds_vertical.engine.checkpoint import manifest, shared_dir

    path = Path(folder)
    found = shared_dir.agreed_latest(path, manifest.read_latest(path)) if tag is None else tag
    if found is None:
        return None
    shared_dir.settle(path, found)
    told = json.loads((manifest.rank_folder(path / found, ranks.rank()) / manifest.NAME).read_text())
    return f"{found}: {told['text']}"


def _end_at(point: str, rank: int, how: str) -> str:
    """Let the next save end on a rank: by a kill, an error, or not at all until the test ends it."""
    from ds_vertical.distributed import ranks
    from ds_vertical.engine.checkpoint import save

    def reach(now: str) -> None:
        if now == point and ranks.rank() == rank:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "raise":
                raise OSError(5, "the disk of this host is gone")
            time.sleep(600)

    save.reach = reach
    return ""


def _counted(count: int, pause_s: float) -> int:
    """The sum of `count` collectives, in a section that is watched."""
    import torch

    from ds_vertical.distributed import ranks

    total = 0
    with ranks.collective_section("count"):
        for number in range(count):
            votes = torch.tensor([number * (ranks.rank() + 1)])
            torch.distributed.all_reduce(votes)
            total += int(votes)
            time.sleep(pause_s)
    return total


def _watched(name: str, *arguments: Any) -> object:
    """Another job, in a section that is watched."""
    from ds_vertical.distributed import ranks

    with ranks.collective_section(name):
        return JOBS[name](*arguments)


JOBS: dict[str, Callable[..., object]] = {
    "save": _saved,
    "load": _loaded,
    "end_at": _end_at,
    "count": _counted,
    "watched": _watched,
}


def _rank(job: dict[str, Any]) -> None:
    import torch

    from ds_vertical.distributed import ranks

    os.environ |= {"RANK": str(job["rank"]), "WORLD_SIZE": "2", "MASTER_ADDR": NAMES[0], "MASTER_PORT": str(job["port"])}
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=600))
    ranks.start_distributed()
    said: list[object] = []
    for name, *arguments in job["do"]:
        try:
            said.append(JOBS[name](*arguments))
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    out = Path(job["out"])
    out.with_name(f"{out.name}.new").write_text(json.dumps(said))
    out.with_name(f"{out.name}.new").rename(out)
    ranks._leave()
    os._exit(0)


def main() -> None:
    import ds_vertical.engine.checkpoint.save  # noqa: F401 - once, for all children

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    for line in sys.stdin:
        if os.fork() == 0:
            sys.stdin.close()
            _rank(json.loads(line))


if __name__ == "__main__":
    main()
