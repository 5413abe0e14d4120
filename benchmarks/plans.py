"""Plans for machines that were not at hand, as docs/results.md has them: predicted seconds of a step, and what decides them.

    python benchmarks/plans.py [--only TEXT] [--json FILE]

Without --only it writes benchmarks/plans/<date>.json, if --json names no other file. It takes some minutes (the rows of
`--only frontier_node` one), and measures nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from ds_vertical.cli.bench import machine_info
from ds_vertical.cli.plan import command

FOLDER = Path(__file__).resolve().parent / "plans"
ROWS = (
    "--model gpt_65b --tokens-per-step 65536 --machine a100_server",
    "--model gpt_175b --tokens-per-step 65536 --machine a100_server",
    "--model gpt_65b --tokens-per-step 524288 --machine a100_server",
    "--model gpt_175b --tokens-per-step 524288 --machine a100_server",
    "--model gpt_175b --tokens-per-step 65536 --machine rtx4090_desktop",
    "--model gpt_13b --tokens-per-step 65536 --sequence-length 1024 --machine rtx4090_desktop",
    "--model gpt_13b --tokens-per-step 32768 --sequence-length 1024 --machine rtx4090_12_ssds",
    "--model gpt_13b --tokens-per-step 65536 --sequence-length 1024 --machine rtx4090_12_ssds",
    "--model gpt_175b --tokens-per-step 16384 --sequence-length 1024 --machine rtx4090_12_ssds",
    *(
        f"--model gpt_20b --tokens-per-step {262144 * nodes} --machine frontier_node --num-ranks 8 --nodes {nodes}{levels}"
        for nodes in (1, 2, 8, 48)
        for levels in (("", " --assume-levels") if nodes > 1 else ("",))
    ),
    *(
        f"--model gpt_20b --tokens-per-step {16384 * nodes} --machine frontier_node --num-ranks 8 --nodes {nodes}"
        " --assume-levels"
        for nodes in (2, 8, 48)
    ),
)
KEYS = ("step_s", "flops_per_s", "bound_s", "resource", "busy_s", "stock", "setting", "ssd_bytes", "others", "into_node_bytes")


def row_of(options: str, found: dict[str, Any]) -> dict[str, Any]:
    """What is recorded of a plan."""
    memory = {tier: sum(item["num_bytes"] for item in found["memory"] if item["tier"] == tier) for tier in ("device", "host")}
    return {"options": options, **{key: found[key] for key in KEYS}, "memory_bytes": memory}


def main() -> None:
    """Plans, prints a line for each, and writes them down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="plan the rows alone whose options have this text")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here, those of --only, too")
    given = parser.parse_args()
    rows = []
    for options in (f"{row} --clip 0" for row in ROWS if given.only in row):
        rows.append(row_of(options, command.plan(command.parsed(shlex.split(options)))))
        found = rows[-1]
        gain, rate = found["stock"]["step_s"] / found["step_s"], found["flops_per_s"] / 1e12
        shown = f"{found['step_s']:.1f} s, {rate:.1f} TFLOP/s, by {found['resource']}; stock {gain:.2f} times as long"
        print(f"{options}: {shown}", flush=True)
    if given.json is not None or not given.only:
        write(rows, given.json)


def write(rows: list[dict[str, Any]], path: Path | None) -> None:
    """The record of the rows."""
    today = str(datetime.date.today())
    content = {"date": today, "versions": machine_info.versions(), "rows": rows}
    FOLDER.mkdir(exist_ok=True)
    (path or FOLDER / f"{today}.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
