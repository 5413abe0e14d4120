"""Draw one step of two halves from a trace: what a rank computes, steps, sends and waits for, and when.

    python benchmarks/acco_rounds.py TRACE/rank0.jsonl [--step -1] [--out docs/acco_rounds.svg]

The trace is that of a run with `"trace": "TRACE"`, and with `vertical_schedule.acco` over nodes: of other runs a trace has no
gradients that travel. Four ranks of this machine may be two nodes, with `"zero_hpz_partition_size": 2`:

    deepspeed --num_accelerators 4 scripts/train.py --model gpt_101m --steps 4 --deepspeed_config CONFIG.json
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from ds_vertical.schedule.events import Op, parse_event
from ds_vertical.schedule.trace import Span, StepTrace, Wait, read_trace

ROOT: Final = Path(__file__).resolve().parents[1]
WIDTH, LEFT, ROW, GAP = 900, 150, 26, 12  # pixels
FIRST, SECOND, COMMITS, PREDICTS, WEIGHTS, GRADIENTS, WAITS = range(7)
LANES: Final = (
    *("first half computes", "second half computes", "commits the step before", "predicts"),
    *("sends weights", "sends gradients", "waits"),
)
COLOURS: Final = ("#3b6ea5", "#6fa8dc", "#38761d", "#93c47d", "#e69138", "#a64d79", "#999999")


def lanes_of(step: StepTrace) -> Iterator[tuple[int, Span | Wait]]:
    """What the picture has of a step, with the number of its lane. The second half begins with its first prefix. REDUCE and
    NORM compute next to nothing: in them, and in what the trace calls a wait, the thread that computes waits."""
    computed = [span for span in step.spans if span.resource == "compute"]
    prefixes = sorted((span for span in computed if span.name == "preF0"), key=lambda span: span.start)
    if len(prefixes) != 2:
        raise ValueError(f"{len(prefixes)} schedules in the step, and a step of two halves has 2")
    for span in computed:
        is_wait = parse_event(span.name).op in (Op.REDUCE, Op.NORM)
        yield WAITS if is_wait else FIRST + (span.start >= prefixes[1].start), span
    for span in step.spans:
        if span.resource == "adam":
            yield PREDICTS if span.name.startswith("predict") else COMMITS, span
        elif span.resource == "net_cross":
            yield WEIGHTS if span.name.endswith("SPREAD") else GRADIENTS, span
    for wait in step.waits:
        if wait.thread == prefixes[0].thread:
            yield WAITS, wait


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


def main(words: Sequence[str] | None = None) -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--step", type=int, default=-1, help="of those in the trace, from 0 on, or from the last one back")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "acco_rounds.svg")
    options = parser.parse_args(words)
    options.out.write_text(drawn(read_trace(options.trace)[options.step]))


if __name__ == "__main__":
    main()
