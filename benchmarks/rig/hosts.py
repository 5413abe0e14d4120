"""Two hosts on one machine, and a link between them: namespaces of the kernel, which vanish with the process that made them.

Each host has its own network, hostname, process numbers, /dev/shm and boot id. Each also has one folder of its own, at a path
that is the same on both. All else is the machine's: both hosts see the same files, as hosts with a shared home do. The link is
a pair of virtual Ethernet interfaces. Both lie in the hosts' networks only, so the machine's own network never changes.

[Note: the end] A host's first process reads a pipe of this process. However this process ends (by `kill -9`, too), the kernel
closes that pipe. The host's first process then ends, and the kernel kills all others of the host and removes its network and
mounts. A shell beside the hosts reads a pipe of this process, too, and then removes the folder and the control groups, which
have this process's pid in their names.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ds_vertical.cli.bench import disk_limit
from rig import quota

NAMES: Final = ("nodeA", "nodeB")
INTERFACE: Final = "eth0"  # on each host
LOOPBACK: Final = "lo"  # of each host; the kernel sends over it what a process sends to its own host, by whatever address
PREFIX: Final = "ds_vertical_rig."
HERE: Final = Path(__file__).resolve().parent
KINDS: Final = ("--mount", "--uts", "--ipc", "--net", "--pid")
READY_S: Final = 30.0

# What a rig needs that a kernel may refuse; tried in namespaces that end with the command.
PROBE: Final = "mount -t proc proc /proc && tc qdisc add dev lo root tbf rate 1gbit burst 256k latency 50ms"
# What the first process of a host runs; its arguments are the host's name and the rig's folder.
FIRST_PROCESS: Final = """set -e
hostname "$1"
mount -t proc proc /proc
mount --bind "$2/$1/boot_id" /proc/sys/kernel/random/boot_id
mount -t tmpfs tmpfs /dev/shm
mount --bind "$2/$1/own" "$2/own"
mount --bind "$2/hosts" /etc/hosts
ip link set lo up
echo ready
exec cat
"""


# What stays outside the hosts until this process has ended. Its arguments are the folder and the control groups, which go once
# the kernel has ended the hosts' processes.
SWEEPER: Final = """cat > /dev/null
folder=$1
shift
for pause in 0.1 0.5 1 2 4 8; do
    rm -rf "$folder"
    for group; do
        [ ! -d "$group" ] || rmdir "$group"
    done 2> /dev/null
    left=
    for each in "$folder" "$@"; do
        [ ! -e "$each" ] || left=yes
    done
    [ -n "$left" ] || exit 0
    sleep $pause
done
"""


class RigError(RuntimeError):
    """The machine does not let the rig be built; the message has the kernel's or the tool's words."""


def refusal() -> str | None:
    """Why no rig can be made on this machine, in one line; None where one can."""
    missing = [tool for tool in ("unshare", "nsenter", "ip", "tc", "mount", "hostname") if shutil.which(tool) is None]
    if missing:
        return f"two hosts need the commands {', '.join(missing)} (util-linux, iproute2, hostname)"
    done = subprocess.run(["unshare", *KINDS, "--fork", "sh", "-c", PROBE], capture_output=True, text=True)
    return f"the kernel refuses what two hosts are made of: {done.stderr.strip()}" if done.returncode else None


class Host:
    """One of the two hosts: its first process, and its network, which stays while this object holds it. `own`: the path by
    which this machine sees the host's own folder. `address`: the host's address on the link."""

    def __init__(self, name: str, address: str, folder: Path) -> None:
        self.name, self.address = name, address
        self.own = folder / name / "own"
        (self.own / "ssd").mkdir(parents=True)
        (folder / name / "boot_id").write_text(f"{uuid.uuid4()}\n")
        command = ["unshare", *KINDS, "--propagation", "private", "--fork"]
        self._unshare = subprocess.Popen(
            [*command, "sh", "-c", FIRST_PROCESS, "sh", name, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._unshare.stdout is not None and self._unshare.stderr is not None
        if self._unshare.stdout.readline() != "ready\n":
            raise RigError(f"{name}: {self._unshare.stderr.read().strip()}")
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children").read_text()
        self.pid = int(children.split()[0])
        self._network = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY)

    def set_up(self, rate: str | None) -> None:
        """Give the interface its address, and its rate as tc(8) writes it (None: no limit). Raises RigError."""
        # no IPv6 address: the kernel would now and then announce it, and those bytes would be counted
        self.in_network("ip", "link", "set", INTERFACE, "addrgenmode", "none")
        self.in_network("ip", "address", "add", f"{self.address}/24", "dev", INTERFACE)
        self.in_network("ip", "link", "set", INTERFACE, "up")
        if rate is not None:
            # the burst holds several packets of 64 KiB: a smaller one cuts them into frames, whose headers would count
            shaped = ("root", "tbf", "rate", rate, "burst", "256k", "latency", "50ms")
            self.in_network("tc", "qdisc", "add", "dev", INTERFACE, *shaped)

    def in_network(self, *command: str) -> str:
        """Run a command of this machine in the host's network. Returns its output. Raises RigError."""
        done = subprocess.run(
            ["nsenter", f"--net=/proc/{os.getpid()}/fd/{self._network}", *command], capture_output=True, text=True
        )
        if done.returncode:
            raise RigError(f"{self.name}: {' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def inbound_bytes(self) -> int:
        """Bytes that have come in over the link so far, by the interface's own counter. Raises RigError."""
        return self._received_bytes(INTERFACE)

    def within_bytes(self) -> int:
        """Bytes that the host's processes have got from each other so far, by the loopback's own counter. Raises RigError."""
        return self._received_bytes(LOOPBACK)

    def _received_bytes(self, interface: str) -> int:
        shown = json.loads(self.in_network("ip", "-json", "-statistics", "link", "show", "dev", interface))
        return shown[0]["stats64"]["rx"]["bytes"]

    def processes(self, script: Path) -> list[int]:
        """The numbers, on this machine, of the host's processes that run a Python script."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                words = (folder / "cmdline").read_bytes().split(b"\0")
                is_here = (folder / "ns" / "pid").readlink() == Path(f"/proc/{self.pid}/ns/pid").readlink()
                if is_here and str(script).encode() in words[:3] and b"python" in words[0]:
                    found.append(int(folder.name))
        return found

    def set_link(self, up: bool) -> None:
        """Pull the cable out, or put it in again. Raises RigError."""
        self.in_network("ip", "link", "set", INTERFACE, "up" if up else "down")

    def vanish(self) -> None:
        """Lose the host as a power cut does: nothing that its processes do while they end reaches the other one."""
        self.set_link(False)
        self._kill()

    def close(self) -> None:
        """End the host's processes and give its network up."""
        self._kill()
        with contextlib.suppress(OSError):
            os.close(self._network)

    def _kill(self) -> None:
        assert self._unshare.stdin is not None
        self._unshare.stdin.close()  # the first process ends, see the note; it has ended when unshare has
        try:
            self._unshare.wait(READY_S)
        finally:
            self._unshare.kill()
            self._unshare.wait()


class TwoHosts:
    """Two hosts in a new folder below `base`, linked at `rate`; to be used in a `with` block.

    `slow`: {name: percent of its half of this machine's cores that the host has}. Where it is given, the other host has its
    half and no more. `disks`: {name: bytes/s of reads and writes that the host's disk has}, for one host at most;
    see `cli.bench.disk_limit` for what is limited. Raises RigError, ConfigError.

    `folder`: the new folder, which both hosts see. `shared`: a folder in it, in which commands are run. `ssd`: a path at which
    each host has a folder of its own. `bin`: the folder with the commands `ssh` and `pdsh` that reach these hosts.
    """

    def __init__(
        self,
        base: Path | None = None,
        rate: str | None = None,
        slow: Mapping[str, float] | None = None,
        disks: Mapping[str, disk_limit.Limit] | None = None,
    ) -> None:
        self._base = base or Path(tempfile.gettempdir())
        self._rate, self._slow, self._disks = rate, slow or {}, disks or {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> TwoHosts:
        with contextlib.ExitStack() as stack:
            made = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}.", dir=self._base)
            self.folder = Path(made).resolve()
            at_last = stack.enter_context(contextlib.ExitStack())
            stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self._lay_out()
            groups = stack.enter_context(self._groups())
            at_last.enter_context(self._sweeper([group for each in groups.values() for group in each]))
            addresses = {name: f"10.9.0.{number}" for number, name in enumerate(NAMES, 1)}
            lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
            (self.folder / "hosts").write_text("\n".join(lines) + "\n")
            self.hosts: list[Host] = []
            for name, address in addresses.items():
                self.hosts.append(Host(name, address, self.folder))
                stack.callback(self.hosts[-1].close)
            self._link()
            table: dict[str, Any] = {host.name: {"pid": host.pid, "groups": groups[host.name]} for host in self.hosts}
            (self.folder / "table.json").write_text(json.dumps(table))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _lay_out(self) -> None:
        self.shared, self.own, self.bin = (self.folder / name for name in ("shared", "own", "bin"))
        for each in (self.shared, self.own, self.bin):
            each.mkdir()
        self.ssd = self.own / "ssd"
        for name in ("ssh", "pdsh"):
            command = self.bin / name
            script = HERE / "remote.py"
            command.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "{self.folder}" {name} "$@"\n')
            command.chmod(0o755)

    def _sweeper(self, groups: Sequence[str]) -> subprocess.Popen[bytes]:
        """See the note. A session of its own: Ctrl-C ends what this process runs, and not the sweeper."""
        command = ["sh", "-c", SWEEPER, "sh", str(self.folder), *groups]
        return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    @contextlib.contextmanager
    def _groups(self) -> Iterator[dict[str, list[str]]]:
        """{name: control groups} for as long as the block runs; [] for a host that is not limited."""
        shares = {name: self._slow.get(name, 100.0) / 100 / len(NAMES) for name in NAMES} if self._slow else {}
        with contextlib.ExitStack() as stack:
            found: dict[str, list[str]] = {name: [] for name in NAMES}
            try:
                for name, share in shares.items():
                    found[name].append(str(stack.enter_context(quota.limited(f"{PREFIX}{os.getpid()}.{name}", share))))
            except OSError as error:
                raise RigError(str(error)) from error
            for name, limit in self._disks.items():
                found[name].append(str(stack.enter_context(disk_limit.limited(limit, [self.folder])).folder))
            yield found

    def _link(self) -> None:
        first, second = self.hosts
        ends = ["netns", str(first.pid), "type", "veth", "peer", "name", INTERFACE, "netns", str(second.pid)]
        done = subprocess.run(["ip", "link", "add", INTERFACE, *ends], capture_output=True, text=True)
        if done.returncode:
            raise RigError(f"ip link add: {done.stderr.strip()}")
        for host in self.hosts:
            host.set_up(self._rate)

    def run(self, name: str, command: str) -> str:
        """Run a shell command on a host. Returns its output. Raises CalledProcessError."""
        words = [str(self.bin / "ssh"), name, command]
        return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout

    def inbound_bytes(self) -> dict[str, int]:
        """{host: bytes that have come in}, see `Host.inbound_bytes`."""
        return {host.name: host.inbound_bytes() for host in self.hosts}

    def within_bytes(self) -> dict[str, int]:
        """{host: bytes that its processes have got from each other}, see `Host.within_bytes`."""
        return {host.name: host.within_bytes() for host in self.hosts}
