"""The chart at the top of README.md and the table of docs/results.md, made from the records in benchmarks/ab.

    python benchmarks/chart.py            # print the points and the table
    python benchmarks/chart.py --write    # rewrite docs/step_time.svg, and the table between its markers in docs/results.md

The chart has the latest record of each M with 8 tokens a micro-batch, bf16, no clipping, the full disk and the pipelined stock
arm. The table has the bf16 records of one day with a stock arm. The SVG is plain text, so the same records give the same bytes.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import report

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks" / "ab"
CHART = ROOT / "docs" / "step_time.svg"
PAGE = ROOT / "docs" / "results.md"
BEGIN, END = "<!-- records: made by benchmarks/chart.py -->\n", "<!-- /records -->"
SHOWN = re.compile(r"m(\d+)_s8_clip0")  # rows of the chart
DAY = "2026-11-23"  # of the table's records
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 740, 380, 62, 170, 52, 74
COLOURS = {"stock": "#d1603d", "vertical": "#2f6fb7"}
NAMES = {"stock": "stock ZeRO-Infinity", "vertical": "layer-major"}


# ---- the chart


def points(found: Sequence[report.Result]) -> dict[int, report.Result]:
    """By M, the latest record of the chart's rows."""
    latest = {int(match[1]): result for result in found if (match := SHOWN.fullmatch(result.row))}
    return dict(sorted(latest.items()))


def seconds(shown: Mapping[int, report.Result], arm: str) -> dict[int, float]:
    """By M, the seconds of an arm's step: the median of the record."""
    return {count: result.content["arms"][arm]["step_s"] for count, result in shown.items()}


def hardware(shown: Mapping[int, report.Result]) -> str:
    """One line: what the points were measured on. Raises ValueError where they are of several machines."""
    found = {(r.content["machine"]["cpu"], r.content["machine"]["num_cores"], r.isa) for r in shown.values()}
    if len(found) != 1:
        raise ValueError(f"the chart's records are of several machines: {sorted(found)}")
    ((cpu, cores, isa),) = found
    memory = min(result.content["machine"]["host_bytes"] for result in shown.values()) / 2**30
    dates = sorted({result.date for result in shown.values()})
    return (
        f"101.3 M parameters in bf16, all state on one virtio disk, {cores} cores of an {cpu} ({isa.upper()}), "
        f"{memory:.0f} GiB, no GPU, {' to '.join(dates)}"
    )


def svg(shown: Mapping[int, report.Result]) -> str:
    """Seconds a step over M, one line for each arm, each point with its value."""
    top_s = max(seconds(shown, "stock").values())
    high = next(step for step in (5, 10, 20, 50, 100, 200, 500) if step >= top_s)
    right, floor = WIDTH - RIGHT, HEIGHT - BOTTOM

    def at(count: float, taken: float) -> tuple[float, float]:
        return LEFT + (right - LEFT) * count / max(shown), floor - (floor - TOP) * taken / high

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img"'
        ' font-family="system-ui, sans-serif" font-size="13" fill="#333">',
        "<title>Seconds a step over M micro-batches: stock ZeRO-Infinity and layer-major order</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#fff"/>',
        f'<text x="{LEFT}" y="26" font-size="15" font-weight="600">Seconds a step, over M micro-batches of 8 tokens</text>',
    ]
    for mark in range(0, high + 1, high // 4 or 1):
        _, y = at(0, mark)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#e3e3e3"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#666">{mark} s</text>')
    for count in shown:
        x, _ = at(count, 0)
        parts.append(f'<text x="{x:.1f}" y="{floor + 20}" text-anchor="middle" fill="#666">M = {count}</text>')
    for arm, colour in COLOURS.items():
        places = {count: at(count, taken) for count, taken in seconds(shown, arm).items()}
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places.values())
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        for count, (x, y) in places.items():
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
            value = f"{seconds(shown, arm)[count]:.2f}"
            parts.append(f'<text x="{x:.1f}" y="{y - 10:.1f}" text-anchor="middle" fill="{colour}">{value}</text>')
        x, y = places[max(places)]
        parts.append(f'<text x="{x + 12:.1f}" y="{y + 4:.1f}" font-weight="600" fill="{colour}">{NAMES[arm]}</text>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 18}" font-size="11" fill="#666">{hardware(shown)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


# ---- the table


def table(found: Sequence[report.Result]) -> str:
    """The day's bf16 records against a stock arm: seconds, bytes and memory; each names its file."""
    head = ("M", "tokens", "clip", "disk", "stock s", "vertical s", "ratio", "step / bound", "read MB", "written MB", "peak MB")
    rows = [[*head, "record"], ["---"] * (len(head) + 1)]
    chosen = [result for result in found if result.date == DAY and result.row.startswith("m") and "fp32" not in result.row]
    for result in sorted(chosen, key=_order):
        rows.append(_cells(result.content, result.row) + [f"[{result.row}](../benchmarks/ab/{result.file})"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _order(result: report.Result) -> tuple[Any, ...]:
    count, tokens, clip = re.match(r"m(\d+)_s(\d+)_clip(\d+)", result.row).groups()  # pyright: ignore
    return int(count), int(tokens), int(clip), "300_500" in result.row, result.row


def _cells(content: Mapping[str, Any], row: str) -> list[str]:
    arms, yard = content["arms"], content["yardstick"]
    stock, vertical, config = arms["stock"], arms["vertical"], content["configs"]["vertical"]
    limit = content["ssd_limit"]
    disk = "full" if not limit else f"{limit['read_bytes_per_s'] / 1e6:.0f}/{limit['write_bytes_per_s'] / 1e6:.0f} MB/s"
    moved = [f"{stock[key] / 1e6:.0f} -> {vertical[key] / 1e6:.0f}" for key in ("read_bytes_per_step", "write_bytes_per_step")]
    bounds = ", ".join(f"{value:.2f}" for value in yard["step_over_bound_by_repeat"])
    decides = {"host_cores": "cores"}.get(yard["resource"], "SSD")
    return [
        str(config["gradient_accumulation_steps"]),
        re.findall(r"_s(\d+)", row)[0],
        f"{config['gradient_clipping']:g}",
        disk,
        f"{stock['step_s']:.2f}" + " (`stock_best`)" * ("stock_best" in row),
        f"{vertical['step_s']:.2f}",
        f"{content['speedup']:.2f}",
        f"{bounds} ({decides})",
        *moved,
        f"{stock['peak_host_bytes'] / 1e6:.0f} -> {vertical['peak_host_bytes'] / 1e6:.0f}",
    ]


def replaced(text: str, found: Sequence[report.Result]) -> str:
    """docs/results.md with the table as the records have it."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"docs/results.md needs the lines {BEGIN.strip()} and {END}, the table goes between them")
    return before + BEGIN + table(found) + END + after


def main() -> None:
    """Prints the chart's points and the table, or writes both. Raises ValueError for records that do not fit together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="rewrite chart and table")
    write, found = parser.parse_args().write, report.results(RECORDS)
    shown = points(found)
    if write:
        CHART.write_text(svg(shown))
        PAGE.write_text(replaced(PAGE.read_text(), found))
        return
    for arm in COLOURS:
        print(arm, {count: round(taken, 2) for count, taken in seconds(shown, arm).items()})
    print(table(found), end="")


if __name__ == "__main__":
    main()
