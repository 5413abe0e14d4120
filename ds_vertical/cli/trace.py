"""`ds-vertical trace`: a run's timeline as Chrome/Perfetto JSON, from a measured or a simulated run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ds_vertical.cli.common import JsonObject
from ds_vertical.cli.report.chrome_trace import events, to_json
from ds_vertical.cli.report.run_folder import LIMITS, TO_TRACE, RecordedRun, open_folder, read_limits
from ds_vertical.cli.report.timeline import Timeline, simulated
from ds_vertical.errors import ConfigError
from ds_vertical.io.atomic_file import write_out
from ds_vertical.schedule.trace import summarize

_BAD_INPUT = 2
_SIMULATED_STEPS = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the file. Returns 0; 2 for bad input."""
    options = _parser().parse_args(sys.argv[1:] if argv is None else argv)
    try:
        lines = timelines(options)
        out = options.out or Path(f"{open_folder(options.source).name}{'.simulated' * options.simulate}.json")
        write_out(out, to_json(lines) + "\n")
    except ConfigError as error:
        print(f"ds-vertical trace: {error}", file=sys.stderr)
        return _BAD_INPUT
    report = describe(lines, out)
    print(json.dumps(report, indent=2) if options.json else "\n".join(_text(report, lines)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ds-vertical trace",
        description="Writes a run's timeline as Chrome trace events: a process per rank, a row per resource, counters of "
        "memory. Open it at ui.perfetto.dev or chrome://tracing.",
        epilog="example: ds-vertical trace runs/ab16 --steps 2:4 --out step.json",
    )
    parser.add_argument("source", type=Path, metavar="SOURCE", help="folder of `ds-vertical ab --trace`, or with rank*.jsonl")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file to write (default: SOURCE's name, here)")
    parser.add_argument("--steps", metavar="A:B", help="steps A to B, counted from 1, both included; or one (default: all)")
    parser.add_argument(
        "--simulate", action="store_true", help="the schedule that SOURCE ran, simulated at the rates measured beside it"
    )
    parser.add_argument("--machine", type=Path, help="with --simulate: rates from this file of `ds-vertical limits` instead")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    return parser


def timelines(options: argparse.Namespace) -> list[Timeline]:
    """The ranks' timelines that the command line asks for. Raises ConfigError."""
    wanted = _steps(options.steps)
    folder = open_folder(options.source)
    if options.machine is not None and not options.simulate:
        raise ConfigError(f"--machine {options.machine}: it is for --simulate; add that, or leave it out")
    if options.simulate:
        found = [_simulated(folder, options.machine, wanted[1] if wanted else _SIMULATED_STEPS)]
    else:
        found = folder.timelines()
        if not found:
            raise ConfigError(f"{folder.path}: no trace in it; {TO_TRACE}, or add --simulate")
    chosen = found if wanted is None else [line.within(*wanted) for line in found]
    if not any(line.steps for line in chosen):
        there = [step.step for line in found for step in line.steps]
        if not there:
            raise ConfigError(f"{folder.path}: no step in its trace; run again, and let a step come to its end")
        raise ConfigError(f"--steps {options.steps}: none of them in {folder.path}; write {min(there)}:{max(there)}, or less")
    return chosen


def _simulated(folder: RecordedRun, machine: Path | None, steps: int) -> Timeline:
    if folder.account is None:
        raise ConfigError(f"{folder.path}: no account of a schedule in it; --simulate needs a folder of `ds-vertical ab`")
    if machine is not None and not machine.is_file():
        raise ConfigError(f"--machine {machine}: no such file; name one that `ds-vertical limits --out` has written")
    limits = read_limits(machine) if machine is not None else folder.limits
    if limits is None:
        raise ConfigError(f"{folder.path}: no {LIMITS} in it; name one with --machine, made by `ds-vertical limits --out`")
    try:
        return simulated(folder.account, limits.machine, limits.rates, name=folder.name, steps=steps)
    except ValueError as error:  # CostsError, ScheduleError
        raise ConfigError(f"{folder.path}: {error}") from error


def _steps(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, colon, last = text.partition(":")
    try:
        wanted = int(first), int(last if colon else first)
    except ValueError:
        wanted = 0, 0
    if not 1 <= wanted[0] <= wanted[1]:
        raise ConfigError(f"--steps {text}: write A:B with 1 <= A <= B, e.g. --steps 2:4, or one number")
    return wanted


def describe(lines: Sequence[Timeline], out: Path) -> JsonObject:
    """What was written: the file, its events, and per rank and step the seconds of `trace.summarize`."""
    made = []
    for line in lines:
        for step in line.steps:
            found = summarize(step)
            seconds = {"step_s": found.step_s, "busy_s": found.busy_s, "outside_s": found.outside_s}
            made.append({"rank": line.rank, "step": step.step} | seconds)
    return {"file": str(out), "kind": lines[0].kind, "run": lines[0].name, "events": len(events(lines)), "steps": made}


def _text(report: JsonObject, lines: Sequence[Timeline]) -> list[str]:
    step = max(lines[0].steps, key=lambda step: step.step)
    ranks = f"rank {lines[0].rank}" if len(lines) == 1 else f"{len(lines)} ranks"
    numbers = [step.step for step in lines[0].steps]
    return [
        f"{report['run']}, {report['kind']}, {ranks}, steps {min(numbers)} to {max(numbers)}; step {step.step}:",
        summarize(step).table(),
        f"written: {report['file']} ({report['events']} events); open it at https://ui.perfetto.dev or chrome://tracing",
    ]
