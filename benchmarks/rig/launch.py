"""DeepSpeed's own launcher over the two hosts, as a user calls it: hostfile, ssh, pdsh, `.deepspeed_env`.

The machine plays the node from which a user logs in to the hosts. docs/multi-node.md has the same commands for real hosts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from rig.hosts import INTERFACE, TwoHosts

ROOT: Final = Path(__file__).resolve().parents[2]
HOSTFILE: Final = "hostfile"
# Variables that ranks need on every host; besides these the launcher hands over only those whose names begin with PYTHON
ENVIRONMENT: Final = {
    "DS_ACCELERATOR": "cpu",
    "GLOO_SOCKET_IFNAME": INTERFACE,
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
PORT: Final = 29500  # in the first host's own network


def write_settings(hosts: TwoHosts, ranks_per_host: int, variables: Mapping[str, str] | None = None) -> None:
    """Write the hostfile, and the `.deepspeed_env` of the folder in which the launcher is called."""
    lines = [f"{host.name} slots={ranks_per_host}" for host in hosts.hosts]
    (hosts.shared / HOSTFILE).write_text("\n".join(lines) + "\n")
    path = f"{Path(sys.executable).parent}:$PATH"
    found = {"PATH": path, **ENVIRONMENT, **(variables or {})}
    (hosts.shared / ".deepspeed_env").write_text("".join(f"{name}={value}\n" for name, value in found.items()))


def command(script: Path, words: Sequence[str], port: int = PORT) -> list[str]:
    """What a user types in the folder of the hostfile."""
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--hostfile", HOSTFILE, "--master_port", str(port)]
    return [*launcher, str(script), *words]


def environment(hosts: TwoHosts) -> dict[str, str]:
    """The variables of a user who is logged in where the hosts can be reached."""
    python_path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PATH": f"{hosts.bin}:{os.environ['PATH']}", "PYTHONPATH": python_path, "DS_ACCELERATOR": "cpu"}


def start(hosts: TwoHosts, script: Path, words: Sequence[str], log: Path, port: int = PORT) -> subprocess.Popen[bytes]:
    """Start a script on all ranks of both hosts. Their output goes to `log`, with the host's name before each line. `port`:
    launches that run at the same time need different ones."""
    with log.open("wb") as out:
        return subprocess.Popen(
            command(script, words, port),
            cwd=hosts.shared,
            env=environment(hosts),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
