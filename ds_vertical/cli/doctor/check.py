"""What doctor looks at (a Target), and what a check finds (CheckResults). Imports neither torch nor deepspeed."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ds_vertical.cli.common import JsonObject
from ds_vertical.types import OFFLOAD_DEVICES, Tier

Severity = Literal["ok", "warning", "error"]
Arm = Literal["stock", "vertical"]
_OFFLOADS = ("offload_param", "offload_optimizer")


@dataclass(frozen=True)
class CheckResult:
    """What one check says of one thing.

    `found`: one sentence. `remedy`: the command or the JSON line that mends it, empty where nothing is wrong."""

    severity: Severity
    found: str
    remedy: str = ""
    check: str = ""


def ok(found: str) -> CheckResult:
    """A check that found nothing to mend: `found` says what it saw."""
    return CheckResult("ok", found)


def warning(found: str, remedy: str) -> CheckResult:
    """Something that a run gets over, with what mends it."""
    return CheckResult("warning", found, remedy)


def error(found: str, remedy: str) -> CheckResult:
    """Something that keeps a run from working, with what mends it."""
    return CheckResult("error", found, remedy)


def split_fault(line: str) -> tuple[str, str]:
    """A line of a ConfigError or StorageError as (what is wrong, what to do): the last clause is the remedy."""
    found, semicolon, remedy = line.rpartition("; ")
    return (found, remedy) if semicolon else (line, "mend it there")


@dataclass(frozen=True)
class Target:
    """What doctor examines besides the machine.

    `config_path`: a DeepSpeed JSON. `nvme_path`: a folder on the SSD, in the place of those that the JSON names. `arm`: the
    arms that the JSON is to run in; None: the one that it says.
    """

    config_path: Path | None = None
    nvme_path: Path | None = None
    arm: Literal["stock", "vertical", "both"] | None = None

    @functools.cached_property
    def config(self) -> JsonObject | None:
        """The JSON; None without one, and for one that cannot be read, which one check reports."""
        from ds_vertical.config.file import read_config
        from ds_vertical.errors import ConfigError

        try:
            return None if self.config_path is None else read_config(self.config_path)
        except ConfigError:
            return None

    def at(self, path: str) -> Any:
        """The JSON's value at a dotted path; None where absent, null or "auto"."""
        from ds_vertical.config.cross_check import value_at

        return value_at(self.config or {}, path)

    @property
    def arms(self) -> frozenset[Arm]:
        """The arms that the JSON is to run in."""
        from ds_vertical.config.section import SECTION

        if self.arm is not None:
            return frozenset(("stock", "vertical") if self.arm == "both" else (self.arm,))
        section = (self.config or {}).get(SECTION)
        enabled = section is not None and not (isinstance(section, Mapping) and section.get("enabled") is False)
        return frozenset(("vertical" if enabled else "stock",))

    @property
    def nvme_paths(self) -> tuple[Path, ...]:
        """The folders on the SSDs: `nvme_path`, else the JSON's, each once."""
        from ds_vertical.config.section import SECTION

        if self.nvme_path is not None:
            return (self.nvme_path,)
        zero = "zero_optimization"
        found = [
            self.at(f"{zero}.{name}.nvme_path")
            for name in _OFFLOADS
            if self.at(f"{zero}.{name}.device") == OFFLOAD_DEVICES[Tier.SSD]
        ]
        several = self.at(f"{SECTION}.nvme_paths")
        found += several if isinstance(several, list | tuple) and any(found) else []
        return tuple(dict.fromkeys(Path(path) for path in found if isinstance(path, str | os.PathLike) and str(path).strip()))
