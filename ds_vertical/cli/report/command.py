"""`ds-vertical report`: one self-contained HTML page about runs, with its charts as PNG beside it."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ds_vertical import __version__
from ds_vertical.cli.common import JsonObject
from ds_vertical.cli.report import summary
from ds_vertical.cli.report.charts import title
from ds_vertical.cli.report.colors import RESOURCE_COLORS
from ds_vertical.cli.report.page import RunReport, Table, page
from ds_vertical.cli.report.run_folder import joined_hosts, names, open_folder
from ds_vertical.cli.report.sections import NONE, megabytes, number, sections, share
from ds_vertical.cli.report.summary import Findings
from ds_vertical.errors import ConfigError

_BAD_INPUT = 2
_PAGE = "report.html"


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page and its charts. Returns 0; 2 for bad input."""
    options = _parser().parse_args(sys.argv[1:] if argv is None else argv)
    try:
        written = write(options.folders, options.out or options.folders[0] / "report", options.step)
    except ConfigError as error:
        print(f"ds-vertical report: {error}", file=sys.stderr)
        return _BAD_INPUT
    if options.json:
        print(json.dumps(_finite(written), indent=2, allow_nan=False))
        return 0
    for run in written["runs"]:
        print(_line(summary.RunSummary(**run["summary"])))
        if "hosts" in run["sections"]:
            print(f"  {run['sections']['hosts']['told']}")
        for missing in run["missing"]:
            print(f"  left out: {missing}")
    print(f"written: {written['page']}, and {len(written['charts'])} charts beside it")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ds-vertical report",
        description="Writes one HTML page about runs: timeline with stalls named, measured beside predicted, the drive's "
        "limits, the bound, memory, the arms, losses, optimizer overlap, hosts. It needs no network. Charts lie beside it as "
        "PNG.",
        epilog="example: ds-vertical report runs/ab16",
    )
    parser.add_argument(
        "folders",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="folder of `ds-vertical ab --trace`, or of a traced run;"
        " behind it those of the run's other hosts, where hosts have written to folders of their own",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write to (default: report/ in the first DIR)")
    parser.add_argument("--step", type=int, metavar="N", help="traced step to show (default: the middle one by length)")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    return parser


def write(folders: Sequence[Path], out: Path, step: int | None = None) -> JsonObject:
    """The page and its charts, written to `out`. Returns where they are, and all figures. Raises ConfigError."""
    opened = joined_hosts([open_folder(folder) for folder in folders])
    try:
        every = [summary.summarize_run(folder, name, step) for folder, name in zip(opened, names(opened), strict=True)]
    except KeyError as error:
        told = f"what it holds lacks {error}, written by another version or by hand"
        raise ConfigError(f"{', '.join(map(str, folders))}: {told}; run `ds-vertical ab` again") from error
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(out, error) from error
    runs = [RunReport(each.name, f"run{index}", _about(each), sections(each)) for index, each in enumerate(every, start=1)]
    made = f"ds-vertical {__version__}, {datetime.datetime.now().astimezone():%Y-%m-%d %H:%M %Z}"
    text = page(runs, _compared(every), {name: title(name) for name in RESOURCE_COLORS}, made)
    charts = {f"{_prefix(run, runs)}{section.key}.png": section.chart for run in runs for section in run.sections}
    charts = {name: data for name, data in charts.items() if data is not None}
    try:
        (out / _PAGE).write_text(text, encoding="utf-8")
        for name, data in charts.items():
            (out / name).write_bytes(data)
    except OSError as error:
        raise _unwritable(out, error) from error
    described = [_described(each, run) for each, run in zip(every, runs, strict=True)]
    return {"page": str(out / _PAGE), "charts": [str(out / name) for name in charts], "runs": described}


def _unwritable(out: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--out {out}: cannot write there ({error}); name a folder that you may write to")


def _prefix(run: RunReport, runs: Sequence[RunReport]) -> str:
    return "" if len(runs) == 1 else f"{re.sub(r'[^A-Za-z0-9._-]+', '-', run.name)}.{run.slug}."


def _described(found: Findings, run: RunReport) -> JsonObject:
    missing = [f"{section.title}: {section.missing}" for section in run.sections if section.missing]
    shown = {section.key: section.data for section in run.sections}
    return {"summary": asdict(summary.summary(found)), "missing": missing, "sections": shown}


def _about(found: Findings) -> list[str]:
    """What was run, on what and when, as far as ab.json says."""
    ab, lines = found.ab, [str(found.folder.path.resolve())]
    if "machine" in ab:
        machine, versions = ab["machine"], ab.get("versions", {})
        what = f"{machine.get('num_cores')} cores of {machine.get('cpu')}, {machine.get('device')}"
        lines.append(f"{ab.get('date', '')}, {what}; " + ", ".join(f"{name} {number}" for name, number in versions.items()))
        lines.append(" ".join(ab.get("command", [])))
    return lines


def _compared(every: Sequence[Findings]) -> Table:
    head = ["run", "stock s", "vertical s", "ratio", "bound s", "decided by", "step / bound", "simulated s"]
    head += ["computing", "optimizer overlap", "peak MB", "last loss"]
    rows = []
    for found in every:
        each = summary.summary(found)
        rows.append(
            [each.run, number(each.stock_s), number(each.vertical_s), number(each.speedup), number(each.bound_s)]
            + [
                title(each.busiest) if each.busiest else NONE,
                number(each.step_over_bound),
                number(each.simulated_s),
            ]
            + [share(each.compute_share), share(each.optimizer_overlap), megabytes(each.peak_host_bytes)]
            + [number(each.last_loss, 4)]
        )
    return Table("", head, rows, frozenset({5}))


def _line(each: summary.RunSummary) -> str:
    parts = [
        (each.vertical_s, "step {:.3f} s"),
        (each.speedup, "stock / vertical {:.2f}"),
        (each.step_over_bound, "step / bound {:.2f}"),
        (each.compute_share, "computing {:.1%}"),
        (each.optimizer_overlap, "optimizer beside computation {:.1%}"),
    ]
    return f"{each.run}: " + (", ".join(words.format(value) for value, words in parts if value is not None) or "no figures")


def _finite(value: object) -> object:
    """JSON has no number for a loss that is not finite: its name."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
