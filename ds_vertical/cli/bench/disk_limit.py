"""A disk slowed down: processes run in a control group whose reads and writes of a block device are limited.

A real disk under a limit stands for another ratio of compute to SSD speed, and makes runs repeatable. cgroup v1 (`blkio`)
and v2 (`io`). v1 limits direct I/O and reads that miss the page cache, not what the kernel writes back later; the swap
files of an offloaded run are read and written directly.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_vertical.cli.common import parse_bytes
from ds_vertical.errors import ConfigError

OPTION = "--ssd-limit"
HELP = "limit each disk to so many bytes per second, e.g. 300M,500M; needs a cgroup that may be written (root, as a rule)"
_REMOVAL_S = 10.0  # for how long a group's ended processes may keep it busy
# The shell moves itself, then becomes the command: nothing of the command runs outside the group, or unlimited.
_ENTER = 'echo $$ > "$0" && exec "$@"'


@dataclass(frozen=True)
class Limit:
    """Bytes per second of each direction."""

    read_bps: int
    write_bps: int

    def __str__(self) -> str:
        return f"{self.read_bps / 1e6:.4g} MB/s read, {self.write_bps / 1e6:.4g} MB/s write"


@dataclass(frozen=True)
class BlockDevice:
    """A whole block device, e.g. ("vda", "254:0"): limits are refused on partitions."""

    name: str
    number: str

    def __str__(self) -> str:
        return f"{self.name} ({self.number})"


@dataclass(frozen=True)
class Controller:
    """Where a group may be made: the parent group's folder, and the version of its interface, 1 or 2."""

    parent: Path
    version: int

    def settings(self, limit: Limit, disk: BlockDevice) -> list[tuple[str, str]]:
        """The files of a group, and the text to write into each, that limit one disk."""
        if self.version == 2:
            return [("io.max", f"{disk.number} rbps={limit.read_bps} wbps={limit.write_bps}")]
        return [
            ("blkio.throttle.read_bps_device", f"{disk.number} {limit.read_bps}"),
            ("blkio.throttle.write_bps_device", f"{disk.number} {limit.write_bps}"),
        ]


def parse_limit(text: str) -> Limit:
    """`READ,WRITE` in bytes per second: `300e6,500e6`, `300M,500M`, `1.5G,800Mi`. Raises ConfigError."""
    try:
        read_bps, write_bps = (parse_bytes(part) for part in text.split(","))
    except ValueError:
        right = "write READ,WRITE in bytes per second, each more than 0, e.g. 300M,500M or 3e8,5e8"
        raise ConfigError(f"{OPTION} {text}: {right}") from None
    return Limit(read_bps, write_bps)


def disk_of(path: str | os.PathLike[str], block: Path = Path("/sys/dev/block")) -> BlockDevice:
    """The whole disk below `path`, which need not exist yet. Raises ConfigError where no block device lies below it."""
    found = Path(path).resolve()
    while not found.exists():
        found = found.parent
    status = found.stat()
    number = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    device = (block / number).resolve()
    if not device.is_dir():
        raise ConfigError(
            f"{OPTION}: {path} lies on {_filesystem(number)}, which has no block device of its own to limit; "
            "name a path on a disk's own file system, e.g. ext4 or xfs"
        )
    whole = device.parent if (device / "partition").exists() else device
    return BlockDevice(whole.name, (whole / "dev").read_text().strip())


def _filesystem(number: str) -> str:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == number:
            return after.split()[0]
    return f"a file system of device {number}"


def controllers(mounts: str, membership: str) -> list[Controller]:
    """Places for a group, best first. mounts and membership: /proc/self/mountinfo and /proc/self/cgroup of this process."""
    own = {line.split(":")[1]: line.split(":", 2)[2] for line in membership.splitlines()}
    found = []
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        (root, mount), (kind, _, options) = before.split()[3:5], after.split()[:3]
        if kind == "cgroup" and "blkio" in options.split(","):
            path = next((path for names, path in own.items() if "blkio" in names.split(",")), "/")
            found += [Controller(parent, 1) for parent in _ancestors(mount, root, path)[:1]]
        elif kind == "cgroup2":
            found += [Controller(parent, 2) for parent in _ancestors(mount, root, own.get("", "/"))]
    return sorted(found, key=lambda controller: controller.version)


def _ancestors(mount: str, root: str, path: str) -> list[Path]:
    """The folders of this process's group and of those above it up to the mount; the mount alone where it cannot be seen."""
    top = Path(mount)
    relative = path.removeprefix(root.rstrip("/")).strip("/")
    own = top / relative
    return [own, *(parent for parent in own.parents if parent.is_relative_to(top))] if own.is_dir() else [top]


@dataclass(frozen=True)
class LimitedGroup:
    """A control group with a limit set for each disk."""

    folder: Path
    version: int
    limits: Mapping[BlockDevice, Limit]

    def wrap(self, command: Sequence[str]) -> list[str]:
        """The command that runs `command`, all its processes, inside the group; it fails where it cannot enter."""
        return ["/bin/sh", "-c", _ENTER, str(self.folder / "cgroup.procs"), *command]

    def describe(self) -> str:
        """The limits, the disks and the kernel's interface, for the terminal."""
        of: dict[Limit, list[BlockDevice]] = {}
        for disk, limit in self.limits.items():
            of.setdefault(limit, []).append(disk)
        told = [f"{limit}{' each' if disks[1:] else ''}, on {', '.join(map(str, disks))}" for limit, disks in of.items()]
        return f"{'; '.join(told)}, cgroup v{self.version}"

    def to_json(self) -> dict[str, object]:
        """The same for ab.json: the rates of each disk, of the slowest one where they differ."""
        return {
            "read_bytes_per_s": min(limit.read_bps for limit in self.limits.values()),
            "write_bytes_per_s": min(limit.write_bps for limit in self.limits.values()),
            "disks": [{"name": disk.name, "device": disk.number} for disk in self.limits],
            "cgroup_version": self.version,
        }


@contextlib.contextmanager
def limited(limit: Limit | Sequence[Limit], paths: Sequence[str | os.PathLike[str]]) -> Iterator[LimitedGroup]:
    """A group limited on the disks below `paths`, removed at the end, after an exception too; then nobody is limited.

    A limit holds for each disk by itself; several: one for each path, of two on one disk the first. Raises ConfigError, saying
    why, where this machine does not allow it.
    """
    limits: dict[BlockDevice, Limit] = {}
    for path, own in zip(paths, [limit] * len(paths) if isinstance(limit, Limit) else limit, strict=True):
        limits.setdefault(disk_of(path), own)
    places = controllers(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    refusals = []
    for place in places:
        folder = place.parent / f"ds_vertical.{os.getpid()}"
        try:
            try:
                _make(folder, place, limits)
            except (OSError, subprocess.CalledProcessError) as error:
                refusals.append(f"cgroup v{place.version} at {place.parent}: {_reason(error)}")
                continue
            yield LimitedGroup(folder, place.version, limits)
            return
        finally:
            _remove(folder)
    raise ConfigError(
        f"{OPTION}: this machine does not let this process limit {', '.join(map(str, limits))}; run as root on a machine with "
        "the cgroup controller blkio (v1) or io (v2), or leave the option out\n"
        + "\n".join(f"  {refusal}" for refusal in refusals or ["no cgroup file system with such a controller is mounted"])
    )


def _make(folder: Path, place: Controller, limits: Mapping[BlockDevice, Limit]) -> None:
    """Raises OSError or CalledProcessError unless the kernel took the limits and a process can enter the group."""
    _remove_stale(folder.parent)
    if place.version == 2:
        if "io" not in (place.parent / "cgroup.controllers").read_text().split():
            raise FileNotFoundError("the io controller is not available there")
        if "io" not in (place.parent / "cgroup.subtree_control").read_text().split():
            (place.parent / "cgroup.subtree_control").write_text("+io")
    folder.mkdir()
    for disk, limit in limits.items():
        for file, text in place.settings(limit, disk):
            if not (folder / file).exists():  # writing would otherwise be reported as a lack of permission
                raise FileNotFoundError(f"the kernel has no {file}")
            (folder / file).write_text(text)
            if not set(text.split()) <= set((folder / file).read_text().split()):
                raise OSError(f"the kernel did not take {text!r} for {file}")
    entry = LimitedGroup(folder, place.version, limits).wrap(["true"])
    subprocess.run(entry, check=True, capture_output=True, text=True)


def _reason(error: OSError | subprocess.CalledProcessError) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return f"a process cannot enter the group ({error.stderr.strip()})"
    return str(error)


def _remove_stale(parent: Path) -> None:
    """Groups whose maker was killed before it could remove them."""
    for folder in parent.glob("ds_vertical.*"):
        pid = folder.name.removeprefix("ds_vertical.")
        if pid.isdigit() and not Path("/proc", pid).exists():
            with contextlib.suppress(OSError):  # somebody else's, or in use
                folder.rmdir()


def _remove(folder: Path) -> None:
    """Moves whoever is left in the group to the one above it and removes it. Raises OSError when it stays busy."""
    end = time.monotonic() + _REMOVAL_S
    while folder.exists():
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # it has ended, or may not be moved: then the group stays busy until it ends
                (folder.parent / "cgroup.procs").write_text(pid)
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
