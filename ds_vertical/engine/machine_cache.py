"""The last measurement of this machine by `ds-vertical limits`, one per disk, in the user's cache; and of its links."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ds_vertical.compat.ops.cache import cache_root
from ds_vertical.errors import ConfigError, CostsError
from ds_vertical.io.atomic_file import replace_file, try_place
from ds_vertical.planner.machine import LAUNCHES, read_links

MeasuredReport = dict[str, Any]  # a file of `ds-vertical limits`

# Of an SSD's report: what several SSDs have more of.
_SHARED_OUT: Final = (
    *("ssd_read_bytes_per_s", "ssd_write_bytes_per_s", "ssd_read_together_bytes_per_s", "ssd_write_together_bytes_per_s"),
    "ssd_bytes",
)
_LESS_IS_BETTER: Final = ("_latency_s", "_s_per_byte", "_share", *LAUNCHES)
_GPU_NODES: Final = ("/dev/nvidia0", "/dev/kfd")  # the latter: AMD's, which torch calls cuda
# Keys of a machine, and those whose numbers theirs never exceed
_AT_MOST: Final = {
    "ssd_read_together_bytes_per_s": "ssd_read_bytes_per_s",
    "ssd_write_together_bytes_per_s": "ssd_write_bytes_per_s",
    "adam_cores": "host_cores",
    "net_local_beside_bytes_per_s": "net_local_bytes_per_s",
    "net_cross_beside_bytes_per_s": "net_cross_bytes_per_s",
}


def file_system_of(folder: str | os.PathLike[str]) -> int:
    """The number of the file system of `folder` (or of the nearest folder above it that exists), which stands for a disk."""
    found = Path(folder).absolute()
    while not found.exists():
        found = found.parent
    return found.stat().st_dev


def disks_of(folders: Sequence[str | os.PathLike[str]]) -> tuple[int, ...]:
    """The disk of each folder: its file system, see `file_system_of`."""
    return tuple(map(file_system_of, folders))


def report_path(folder: str | os.PathLike[str]) -> Path:
    """Where the report for the disk of `folder` (see `file_system_of`) is kept: by what the kernel shows of devices, which
    spares the import of torch."""
    has_gpu = any(Path(node).exists() for node in _GPU_NODES)
    return _report_path(folder, os.environ.get("DS_ACCELERATOR") or ("cuda" if has_gpu else "cpu"))


def _report_path(folder: str | os.PathLike[str], accelerator: str) -> Path:
    return _place_of(platform.node(), os.cpu_count(), _processor(), _memory_total(), accelerator, file_system_of(folder))


def links_path(num_hosts: int, ranks_per_host: int, device: str) -> Path:
    """Where the links between so many ranks are kept, rank 0 being on this host."""
    return _place_of("links", platform.node(), num_hosts, ranks_per_host, device)


def _place_of(*facts: object) -> Path:
    return cache_root().parent / "limits" / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.json"


def keep_report(report: MeasuredReport, folder: str | os.PathLike[str]) -> Path:
    """Put a report in place of the last one, whole or not at all. Raises ConfigError."""
    return _keep(report, report_path(folder))


def keep_links(links: Mapping[str, float], hosts: Sequence[str], ranks_per_host: int, device: str) -> Path:
    """Put what `limits --links` has measured between these hosts, by their names, in place of the last of its kind, see
    `links_path`. Raises ConfigError."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    report = {"links": {**links}, "hosts": sorted(hosts), "date": date}
    return _keep(report, links_path(len(hosts), ranks_per_host, device))


def kept_links(hosts: Sequence[str], ranks_per_host: int, device: str) -> dict[str, float] | None:
    """What `keep_links` has kept of these hosts, as `Machine.with_links` takes it; None where there is nothing that can be
    read, or the links are those of other hosts."""
    path = links_path(len(hosts), ranks_per_host, device)
    try:
        links = read_links(path)
        measured = json.loads(path.read_text(encoding="utf-8")).get("hosts")
    except (CostsError, OSError, ValueError):
        return None
    return links if measured == sorted(hosts) else None


def _keep(report: MeasuredReport, path: Path) -> Path:
    with _naming(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(path, json.dumps(report, indent=2, allow_nan=False) + "\n")
    return path


def check_keeping(folder: str | os.PathLike[str]) -> None:
    """Raise ConfigError where `keep_report` could not write."""
    path = report_path(folder)
    with _naming(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try_place(path)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        advice = "name another folder in DS_VERTICAL_CACHE, or give --no-keep and --out FILE"
        raise ConfigError(f"{path}: cannot be written ({error.strerror or error}); {advice}") from error


def cached_report(folder: str | os.PathLike[str] | None) -> MeasuredReport | None:
    """The report of this machine for the disk of `folder` (None: of the working directory); None where there is none that
    can be read."""
    path = report_path(folder or ".")
    if not path.exists() and not os.environ.get("DS_ACCELERATOR") and not Path(_GPU_NODES[0]).exists():
        path = _report_path(folder or ".", "cpu")  # where reports of AMD's graphics were kept, too
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return report if isinstance(report, dict) else None


def joint_report(reports: Sequence[MeasuredReport], shares: Sequence[float], disks: Sequence[int]) -> MeasuredReport:
    """The report of a machine whose SSDs have one each, when files are spread over them in these shares: the first one, with
    the rates at which all SSDs together are read and written, and the room that there is on them. `disks`: see `disks_of`; what
    several folders on one disk have is counted once. A disk is done with its share of a transfer after (share x bytes) / rate
    seconds, so the slowest decides: where shares go by rates, the sum. It is no more than `limits` has measured of the same
    disks at once."""
    joint: MeasuredReport = {**reports[0]}
    on_disk = [sum(share for share, other in zip(shares, disks, strict=True) if other == disk) for disk in disks]
    for part in ("machine", "rates", "capacity"):
        tables = [report.get(part) or {} for report in reports]
        joint[part] = {**tables[0]}
        for key in _SHARED_OUT:
            found = [table.get(key) for table in tables]
            if key in joint[part] and None not in found:
                most = min(value / share for value, share in zip(found, on_disk, strict=True) if value is not None)
                joint[part][key] = min([most, *(each[key] for each in _at_once(reports, disks) if key in each)])
    return joint


def slowest_report(reports: Sequence[MeasuredReport | None]) -> MeasuredReport | None:
    """The report that holds on the hosts of all ranks, given each rank's: the first one, with the least of each rate and size,
    and the most of each latency and share, since ranks wait for each other in every layer. None where a host has none."""
    known = [report for report in reports if report is not None]
    if not known or len(known) < len(reports):
        return None
    if all(report == known[0] for report in known):
        return known[0]
    slowest: MeasuredReport = {**known[0]}
    for part in ("machine", "rates", "capacity"):
        tables = [report.get(part) or {} for report in known]
        slowest[part] = {**tables[0]}
        for key in {key for table in tables for key in table}:
            found = [
                value for table in tables if isinstance(value := table.get(key), int | float) and not isinstance(value, bool)
            ]
            if found:
                slowest[part][key] = (max if key.endswith(_LESS_IS_BETTER) else min)(found)
    machine = slowest["machine"]
    for key, most in _AT_MOST.items():
        if machine.get(key) is not None and machine.get(most) is not None:
            machine[key] = min(machine[key], machine[most])
    return slowest


def at_once(disks: Sequence[int], rates: Mapping[str, float]) -> MeasuredReport:
    """What reports say of the `rates` that several disks were measured to have at once."""
    return {"disks": sorted(set(disks)), "rates": {key: rates[key] for key in _SHARED_OUT if key in rates}}


def _at_once(reports: Sequence[MeasuredReport], disks: Sequence[int]) -> list[dict[str, float]]:
    """The rates that all these disks were measured to have at once; one entry where all reports have the same measurement."""
    first = reports[0].get("at_once")
    if first is None or any(report.get("at_once") != first for report in reports):
        return []
    return [first["rates"]] if first["disks"] == sorted(set(disks)) else []


def reports_of(folders: Sequence[str | os.PathLike[str]]) -> list[MeasuredReport]:
    """The kept reports for the disks of several folders; none at all where one of them has none, or DS_VERTICAL_LIMITS is
    set."""
    if os.environ.get("DS_VERTICAL_LIMITS") is not None:
        return []
    found = [cached_report(folder) for folder in folders]
    reports = [report for report in found if report is not None]
    return reports if len(reports) == len(folders) else []


def shares_of(folders: Sequence[str | os.PathLike[str]]) -> tuple[float, ...]:
    """The share of a file's bytes that goes to each of several SSDs: by their measured rates of reads, where `ds-vertical
    limits` has kept those of all; else the same for each."""
    reports = reports_of(folders)
    return shares_by_rates(reports, disks_of(folders)) if reports else tuple(1 / len(folders) for _ in folders)


def shares_by_rates(reports: Sequence[MeasuredReport], disks: Sequence[int]) -> tuple[float, ...]:
    """The shares of SSDs with these reports: in proportion to their rates of reads; equal where one does not say. Folders on
    one disk (see `disks_of`) have equal shares of what it is given."""
    rates = [read_rate(report) or 0.0 for report in reports]
    if not all(rates):
        return tuple(1 / len(rates) for _ in rates)
    slowest = {disk: min(rate for rate, other in zip(rates, disks, strict=True) if other == disk) for disk in disks}
    return tuple(slowest[disk] / disks.count(disk) / sum(slowest.values()) for disk in disks)


def read_rate(report: MeasuredReport) -> float | None:
    """Bytes per second of the reads of a report's SSD; None where it does not say."""
    found = (report.get("machine") or {}).get("ssd_read_bytes_per_s")
    return float(found) if isinstance(found, int | float) and found > 0 else None


def training_report(
    folder: str | os.PathLike[str] | None, beside: Sequence[str | os.PathLike[str]] = ()
) -> MeasuredReport | None:
    """As `cached_report`, with several SSDs (`beside`: folders on the others) as `joint_report`; the file that
    DS_VERTICAL_LIMITS names in its place, none at all where that is empty. Raises ConfigError for a file that cannot be
    read."""
    named = os.environ.get("DS_VERTICAL_LIMITS")
    if named is None:
        if folder is None or not beside:
            return cached_report(folder)
        folders = [folder, *beside]
        reports = reports_of(folders)
        return joint_report(reports, shares_of(folders), disks_of(folders)) if reports else None
    try:
        return json.loads(Path(named).read_text()) if named else None
    except (OSError, ValueError) as error:
        raise ConfigError(f"DS_VERTICAL_LIMITS={named}: {error}; name a file of `ds-vertical limits --out`") from error


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "flags"))), "")


def _memory_total() -> str:
    return Path("/proc/meminfo").read_text().partition("\n")[0]
