"""Reads what a folder holds of a run: traces, step records, accounts, the A/B's verdict, the machine's rates.

The folder is one of `ds-vertical ab`, one with traces or step records in it, or one whose subfolders hold them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from ds_vertical.cli.common import JsonObject
from ds_vertical.cli.report.timeline import Timeline
from ds_vertical.engine.metrics import ARMS, ENGINES, StepRecord, read_records
from ds_vertical.errors import ConfigError
from ds_vertical.planner.machine import Machine
from ds_vertical.planner.run_record import Account, read_account
from ds_vertical.schedule.trace import read_trace

AB, LIMITS = "ab.json", "limits.json"
TO_TRACE = 'add --trace to `ds-vertical ab`, or write "trace": "FOLDER" into the JSON\'s vertical_schedule'
_RANKS = "rank*.jsonl"
_Content = TypeVar("_Content")
_MEND = "remove the line if the run was killed while it wrote, or run again"


@dataclass(frozen=True)
class LimitsReport:
    """The machine and the rates in a report of `ds-vertical limits`."""

    machine: Machine
    rates: dict[str, float]


@dataclass(frozen=True)
class RecordedRun:
    """The folder of a run, or of several runs of one script.

    `traces`, `metrics`: the folders that hold them, by the run's name ("traced.0"). The properties read these folders when they
    are first asked for, and raise ConfigError, with file and line, for what is broken.
    """

    path: Path
    traces: dict[str, Path] = field(default_factory=dict)
    metrics: dict[str, Path] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.resolve().name

    def timelines(self) -> list[Timeline]:
        """The timelines of the first traced run, by rank; [] where nothing was traced."""
        if not self.traces:
            return []
        run, folder = next(iter(self.traces.items()))
        ranks = sorted((int(path.stem.removeprefix("rank")), path) for path in folder.glob(_RANKS))
        return [Timeline(run, "measured", rank, tuple(_read(read_trace, path))) for rank, path in ranks]

    @cached_property
    def records(self) -> dict[str, dict[int, list[StepRecord]]]:
        """Step records per run, by rank."""
        return {name: _read(read_records, folder) for name, folder in self.metrics.items()}

    @cached_property
    def arms(self) -> dict[str, list[str]]:
        """Names of the runs with records of each arm, those that were not traced first."""
        found: dict[str, list[str]] = {arm: [] for arm in ARMS}
        for name, ranks in self.records.items():
            engines = {record.engine for records in ranks.values() for record in records}
            for arm in ARMS:
                if engines == {ENGINES[arm]}:
                    found[arm].append(name)
        return {arm: sorted(names, key=lambda name: name in self.traces) for arm, names in found.items() if names}

    @cached_property
    def account(self) -> Account | None:
        """The account of the traced run, or of another run where that one kept none."""
        names = sorted(self.metrics, key=lambda name: name not in self.traces)
        accounts = (_read(read_account, self.metrics[name]) for name in names)
        return next((account for account in accounts if account is not None and account.steps), None)

    @cached_property
    def ab(self) -> JsonObject | None:
        """ab.json's content."""
        return _read(_object, self.path / AB) if (self.path / AB).is_file() else None

    @cached_property
    def limits(self) -> LimitsReport | None:
        """The rates measured beside the run: limits.json, or what ab.json says of them."""
        if (self.path / LIMITS).is_file():
            return read_limits(self.path / LIMITS)
        told = ((self.ab or {}).get("yardstick") or {}).get("limits")
        return None if told is None else _limits(self.path / AB, told)


def open_folder(path: Path) -> RecordedRun:
    """Opens the folder and those one level below. Raises ConfigError for one that is not there, or holds nothing of a run."""
    if not path.is_dir():
        what = "a file" if path.exists() else "no such folder"
        raise ConfigError(f"{path}: {what}; name a folder that `ds-vertical ab --out` or a traced run has written")
    folder = RecordedRun(path)
    try:
        for each in (path, *sorted(below for below in path.iterdir() if below.is_dir())):
            _sort_in(folder, each)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error}); name a folder that you may read") from error
    if not (folder.traces or folder.metrics or (path / AB).is_file()):
        raise ConfigError(f"{path}: no trace, no step records and no {AB} in it or one level below; to have them, {TO_TRACE}")
    return folder


def _sort_in(folder: RecordedRun, each: Path) -> None:
    files = sorted(each.glob(_RANKS))
    if not files:
        return
    name = each.resolve().name if each == folder.path else each.name
    with files[0].open(encoding="ascii", errors="replace") as file:
        is_trace = '"header"' in file.readline()
    run = name.removesuffix(".trace").removesuffix(".metrics")
    (folder.traces if is_trace else folder.metrics)[run] = each


def read_limits(path: Path) -> LimitsReport:
    """Reads a file of `ds-vertical limits`. Raises ConfigError for one that cannot be read or has no rates."""
    return _limits(path, _read(_object, path))


def _limits(path: Path, report: JsonObject) -> LimitsReport:
    try:
        return LimitsReport(Machine.from_dict(report), dict(report.get("rates", {})))
    except (ValueError, TypeError) as error:  # CostsError is a ValueError
        raise ConfigError(f"{path}: {error}; write a file with `ds-vertical limits --out`") from error


def _object(path: Path) -> JsonObject:
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def _read(reader: Callable[[Path], _Content], path: Path) -> _Content:
    try:
        return reader(path)
    except (OSError, ValueError) as error:
        said = str(error) if str(path) in str(error) else f"{path}: {error}"
        raise ConfigError(f"{said}; {_MEND}") from error


def names(folders: Iterable[RecordedRun]) -> list[str]:
    """A name of its own for each folder: the folder's name, with its parent's where two are the same."""
    folders = list(folders)
    own = [folder.name for folder in folders]
    return [
        name if own.count(name) == 1 else f"{folder.path.resolve().parent.name}/{name}"
        for folder, name in zip(folders, own, strict=True)
    ]
