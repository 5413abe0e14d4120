"""Reads what a folder holds of a run: traces, step records, accounts, the A/B's verdict, the machine's rates.

The folder is one of `ds-vertical ab`, one with traces or step records in it, or one whose subfolders hold them.

[Note: several hosts] Hosts that share no folder have each written their own ranks' files. Only one host has rank 0. So a folder
without rank 0 is a part of a run that another folder holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
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
from ds_vertical.schedule.trace import read_host, read_trace

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

    `traces`, `metrics`: the folders that hold them, by the run's name ("traced.0"). `others`: for such a folder, those of the
    run's other hosts, see [Note: several hosts]. The properties read these folders when they are first asked for, and raise
    ConfigError, with file and line, for what is broken.
    """

    path: Path
    traces: dict[str, Path] = field(default_factory=dict)
    metrics: dict[str, Path] = field(default_factory=dict)
    others: dict[Path, list[Path]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.resolve().name

    def timelines(self) -> list[Timeline]:
        """The timelines of the first traced run, by rank; [] where nothing was traced."""
        return self._timelines

    @cached_property
    def _timelines(self) -> list[Timeline]:
        if not self.traces:
            return []
        run, folder = next(iter(self.traces.items()))
        found = []
        for rank, path in sorted(_ranks_of(folder, *self.others.get(folder, ())).items()):
            found.append(Timeline(run, "measured", rank, tuple(_read(read_trace, path)), *_read(read_host, path)))
        return found

    @cached_property
    def records(self) -> dict[str, dict[int, list[StepRecord]]]:
        """Step records per run, by rank."""
        found: dict[str, dict[int, list[StepRecord]]] = {}
        for name, folder in self.metrics.items():
            parts = [_read(read_records, each) for each in (folder, *self.others.get(folder, ()))]
            found[name] = {rank: part[rank] for part in parts for rank in sorted(part)}
        return found

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
    for kind in (folder.traces, folder.metrics):
        _take_parts(folder, kind)
    return folder


def _take_parts(folder: RecordedRun, kind: dict[str, Path]) -> None:
    """Where one of several folders below has rank 0, and the others have other ranks, they are parts of one run."""
    whole = [name for name, each in kind.items() if 0 in _ranks_of(each)]
    parts = [name for name in kind if name not in whole]
    if len(whole) == 1 and parts:
        for name in parts:
            _add_part(folder, kind[whole[0]], kind.pop(name))


def _add_part(folder: RecordedRun, whole: Path, part: Path) -> None:
    there = _ranks_of(whole, *folder.others.get(whole, ()))
    twice = sorted(there.keys() & _ranks_of(part).keys())
    if twice:
        raise ConfigError(
            f"{part}: holds rank {twice[0]}, which {there[twice[0]].parent} has too; name the folders of one run's hosts"
        )
    folder.others.setdefault(whole, []).append(part)


def _ranks_of(*folders: Path) -> dict[int, Path]:
    """The files of ranks in folders, by rank."""
    return {int(path.stem.removeprefix("rank")): path for folder in folders for path in folder.glob(_RANKS)}


def joined_hosts(opened: Sequence[RecordedRun]) -> list[RecordedRun]:
    """The runs of folders, of which some may be those of a run's other hosts: a folder without rank 0 belongs to the run whose
    folder is named ahead of it. Raises ConfigError where there is none, or where it does not fit that one."""
    found: list[RecordedRun] = []
    for folder in opened:
        held = [*folder.traces.values(), *folder.metrics.values()]
        if not held or any(0 in _ranks_of(each) for each in held):
            found.append(folder)
            continue
        if not found:
            raise ConfigError(f"{folder.path}: has no rank 0: name the folder of the host that has it first")
        for parts, wholes in ((folder.traces, found[-1].traces), (folder.metrics, found[-1].metrics)):
            for name, part in parts.items():
                whole = wholes.get(name) or (next(iter(wholes.values())) if len(wholes) == 1 else None)
                if whole is None:
                    raise ConfigError(f"{part}: {found[-1].path} has no run {name} to which it belongs; name that one's folder")
                _add_part(found[-1], whole, part)
    return found


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
