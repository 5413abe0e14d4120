"""Draw one step of two halves from a trace: what a rank computes, steps and sends, and when.

    python benchmarks/acco_rounds.py TRACE/rank0.jsonl [--step -1] [--out docs/acco_rounds.svg]

The trace is that of a run with `vertical_schedule.acco` and `"trace": "TRACE"`, such as one of four ranks of this machine:

    deepspeed --num_accelerators 4 scripts/train.py --model gpt_13m --steps 6 --deepspeed_config CONFIG.json
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ds_vertical.schedule.trace import Span, StepTrace, read_trace

ROOT: Final = Path(__file__).resolve().parents[1]
WIDTH, LEFT, ROW, GAP = 900, 150, 26, 12  # pixels
LANES: Final = ("first half computes", "second half computes", "commits the step before", "predicts", "sends")
COLOURS: Final = ("#3b6ea5", "#6fa8dc", "#38761d", "#93c47d", "#e69138")


def lanes_of(step: StepTrace) -> Iterator[tuple[int, Span]]:
    """Each span of a step that the picture has, with the number of its lane. The second half begins with its first prefix."""
    prefixes = sorted(span.start for span in step.spans if span.resource == "compute" and span.name == "preF0")
    if len(prefixes) != 2:
        raise ValueError(f"{len(prefixes)} schedules in the step, and a step of two halves has 2")
    for span in step.spans:
        if span.resource == "compute":
            yield int(span.start >= prefixes[1]), span
        elif span.resource == "adam":
            yield 3 if span.name.startswith("predict") else 2, span
        elif span.resource.startswith("net_"):
            yield 4, span


def drawn(step: StepTrace) -> str:
    """The picture."""
    found = list(lanes_of(step))
    first, last = min(span.start for _, span in found), max(span.end for _, span in found)
    scale = (WIDTH - LEFT - 10) / (last - first)
    height = len(LANES) * (ROW + GAP) + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for number, name in enumerate(LANES):
        y = 10 + number * (ROW + GAP)
        lines.append(f'<text x="4" y="{y + ROW * 0.65:.0f}">{name}</text>')
        lines.append(f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y + ROW}" y2="{y + ROW}" stroke="#ccc"/>')
    for number, span in found:
        x, y = LEFT + (span.start - first) * scale, 10 + number * (ROW + GAP)
        width = max(0.5, (span.end - span.start) * scale)
        lines.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}" fill="{COLOURS[number]}"/>')
    lines.append(f'<text x="{LEFT}" y="{height - 8}">0 s</text>')
    lines.append(f'<text x="{WIDTH - 10}" y="{height - 8}" text-anchor="end">{last - first:.2f} s</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--step", type=int, default=-1, help="of those in the trace, from 0 on, or from the last one back")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "acco_rounds.svg")
    options = parser.parse_args()
    options.out.write_text(drawn(read_trace(options.trace)[options.step]))


if __name__ == "__main__":
    main()
