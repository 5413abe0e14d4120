"""The last measurement of this machine by `ds-vertical limits`, one per disk, in the user's cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ds_vertical.compat.ops.cache import cache_root
from ds_vertical.errors import ConfigError
from ds_vertical.io.atomic_file import replace_file, try_place


def report_path(folder: str | os.PathLike[str]) -> Path:
    """Where the report for the disk of `folder` (or of the nearest folder above it that exists) is kept."""
    found = Path(folder).absolute()
    while not found.exists():
        found = found.parent
    accelerator = os.environ.get("DS_ACCELERATOR") or ("cuda" if Path("/dev/nvidia0").exists() else "cpu")
    facts = (platform.node(), os.cpu_count(), _processor(), _memory_total(), accelerator, found.stat().st_dev)
    return cache_root().parent / "limits" / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.json"


def keep_report(report: dict[str, Any], folder: str | os.PathLike[str]) -> Path:
    """Put a report in place of the last one, whole or not at all. Raises ConfigError."""
    path = report_path(folder)
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


def cached_report(folder: str | os.PathLike[str] | None) -> dict[str, Any] | None:
    """The report of this machine for the disk of `folder` (None: of the working directory); None where there is none that
    can be read."""
    try:
        report = json.loads(report_path(folder or ".").read_text())
    except (OSError, ValueError):
        return None
    return report if isinstance(report, dict) else None


def training_report(folder: str | os.PathLike[str] | None) -> dict[str, Any] | None:
    """As `cached_report`; the file that DS_VERTICAL_LIMITS names in its place, none at all where that is empty. Raises
    ConfigError for a file that cannot be read."""
    named = os.environ.get("DS_VERTICAL_LIMITS")
    if named is None:
        return cached_report(folder)
    try:
        return json.loads(Path(named).read_text()) if named else None
    except (OSError, ValueError) as error:
        raise ConfigError(f"DS_VERTICAL_LIMITS={named}: {error}; name a file of `ds-vertical limits --out`") from error


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "flags"))), "")


def _memory_total() -> str:
    return Path("/proc/meminfo").read_text().partition("\n")[0]
