"""The hosts of a comparison over several hosts: DeepSpeed's hostfile, and what the launcher hands over to the ranks there.

DeepSpeed's launcher hands over few variables of its own environment, and those of a file named by DS_ENV_FILE. So a run gets a
file with what the user's `.deepspeed_env` says, and the run's own variables behind that.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ds_vertical.errors import ConfigError

HOSTFILE: Final = "--hostfile"
_LINE: Final = re.compile(r"(\S+)\s+slots=(\d+)(\s.*)?")
_USERS: Final = ".deepspeed_env"
_REACH_S: Final = 60.0


@dataclass(frozen=True)
class Hosts:
    """The hosts in a hostfile, with their numbers of ranks, in its order. `master`: the address by which the others reach the
    first one; None: the launcher asks that host."""

    hostfile: Path
    slots: Mapping[str, int]
    master: str | None = None

    @property
    def num_ranks(self) -> int:
        """Ranks of all hosts."""
        return sum(self.slots.values())

    def options(self, port: int) -> list[str]:
        """The launcher's options."""
        master = [] if self.master is None else ["--master_addr", self.master]
        return ["--hostfile", str(self.hostfile), "--master_port", str(port), *master]

    def write_environment(self, path: Path, variables: Mapping[str, str]) -> None:
        """Write the file whose variables ranks get on all hosts: the user's own, then `variables`."""
        lines: list[str] = []
        name = os.environ.get("DS_ENV_FILE", _USERS)
        for file in dict.fromkeys((Path.home() / name, Path(name))):
            if file.is_file():
                lines += filter(str.strip, file.read_text().splitlines())
        path.write_text("".join(f"{line}\n" for line in [*lines, *(f"{name}={value}" for name, value in variables.items())]))

    def check_shared(self, out: Path) -> None:
        """Raise ConfigError unless every host can be reached by ssh, and sees the folder."""
        token = out / f".ds_vertical.{secrets.token_hex(8)}"
        token.touch()
        try:
            for host in self.slots:
                seen = _run_on(host, f"test -e '{token}'")
                if seen:
                    raise ConfigError(
                        f"--out {out}: host {host} does not see it ({seen}); name a folder on a file system that this machine"
                        " and all hosts share, such as NFS or Lustre"
                    )
        finally:
            token.unlink()


def _run_on(host: str, command: str) -> str:
    """Run a command on a host; returns "" where it succeeded, else why it did not."""
    try:
        done = subprocess.run(
            ["ssh", host, command], capture_output=True, text=True, timeout=_REACH_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"ssh: {error}"
    return "" if done.returncode == 0 else done.stderr.strip() or f"status {done.returncode}"


def read_hostfile(path: Path, master: str | None = None) -> Hosts:
    """The hosts in a file of lines `HOST slots=NUMBER`. Raises ConfigError."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{HOSTFILE} {path}: {error}; write a file of lines `HOST slots=NUMBER`") from error
    slots: dict[str, int] = {}
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None or int(match[2]) < 1 or match[1] in slots:
            told = f"host {match[1]} for the second time" if match and match[1] in slots else repr(line)
            raise ConfigError(f"{HOSTFILE} {path}, line {number}: got {told}; write each host once, as `HOST slots=NUMBER`")
        slots[match[1]] = int(match[2])
    if len(slots) < 2:
        raise ConfigError(
            f"{HOSTFILE} {path}: names {len(slots)} host{'s' * (len(slots) != 1)}; write two or more, or leave {HOSTFILE} out"
            " and write --num-ranks"
        )
    return Hosts(path.resolve(), slots, master)


def own_variables() -> dict[str, str]:
    """Variables of this process that are ds_vertical's, such as the folder of compiled ops."""
    return {name: value for name, value in os.environ.items() if name.startswith("DS_VERTICAL_")}
