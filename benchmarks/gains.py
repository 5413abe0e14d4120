"""What each overlap gains: the vertical arm with one setting changed at a time, measured beside what the simulation predicts.

    python benchmarks/gains.py [--micro-batches 8] [--dtype fp32] [--steps 4] [--repeat 2] [--ssd-limit 300M,500M]

All runs take turns under the same disk limit; the machine's rates are measured once, in the first. A gain is the changed
setting's step over the default's, measured and simulated. Writes benchmarks/gains/NAME.json and the table in
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import portable
import report
import run

# What the default has, and the settings without it. Keys of the section, and of the JSON for those with a dot.
CHANGES: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "layer-major order": ('vertical_schedule.order="horizontal"',),
    "anything in flight": ("vertical_schedule.overlap=false",),
    "reads ahead, also across the step boundary": ("vertical_schedule.prefetch_layers=0",),
    "steps in the backward": ("vertical_schedule.optimizer_delay=1.0",),
    "a share of each step in the next forward": ("vertical_schedule.optimizer_delay=0.0",),
}


def command(change: Sequence[str], options: argparse.Namespace, out: Path, machine: Path | None) -> list[str]:
    """One run of the vertical arm with its yardstick."""
    words = ["ds-vertical", "ab", "--config", "configs/gpt_101m_cpu.json", "--vertical-only"]
    words += ["--set", f"gradient_accumulation_steps={options.micro_batches}", "--set", "gradient_clipping=0.0"]
    words += ["--set", "bf16.enabled=false"] if options.dtype == "fp32" else []
    words += [word for setting in change for word in ("--set", setting)]
    words += ["--ssd-limit", options.ssd_limit] if options.ssd_limit else []
    words += ["--machine", str(machine)] if machine else []
    words += ["--steps", str(options.steps), "--out", str(out)]
    return [*words, "--", "scripts/train.py", "--model", "gpt_101m", "--seq", str(options.tokens)]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every change in turn, `repeat` times. Raises CalledProcessError."""
    seconds: dict[str, list[float]] = {name: [] for name in CHANGES}
    simulated: dict[str, float] = {}
    machine: Path | None = None
    first: dict[str, Any] = {}
    for number in range(options.repeat):
        for name, change in CHANGES.items():
            out = (options.runs / name.replace(" ", "_").replace(",", "")).resolve()
            subprocess.run(run.here(command(change, options, out, machine)), cwd=run.ROOT, check=True)
            content = json.loads((out / "ab.json").read_text())
            first = first or content
            machine = machine or out / "limits.json"
            seconds[name] += content["arms"]["vertical"]["step_s_by_repeat"][0]
            simulated[name] = content["yardstick"]["simulated_s"]
        print(f"round {number + 1} of {options.repeat}: done", flush=True)
    rows = {name: {"step_s": values, "simulated_s": simulated[name]} for name, values in seconds.items()}
    kept = {key: first[key] for key in ("date", "machine", "versions", "configs", "ssd_limit")}
    settings = {"micro_batches": options.micro_batches, "tokens": options.tokens, "dtype": options.dtype}
    words = command((), options, Path("OUT"), None)
    return kept | settings | {"rates": first["yardstick"]["limits"]["rates"], "command": words, "rows": rows}


def main() -> None:
    """Measures and rewrites benchmarks/README.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8, help="per micro-batch")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--steps", type=int, default=4, help="per run, of which the first is left out")
    parser.add_argument("--repeat", type=int, default=2, help="rounds over all settings")
    parser.add_argument("--ssd-limit", default=run.LIMIT, help="as for `ds-vertical ab`; empty for the full disk")
    parser.add_argument("--runs", type=Path, default=run.ROOT / "runs" / "gains", help="folder for logs")
    options = parser.parse_args()
    content = measure(options)
    folder = run.ROOT / "benchmarks" / "gains"
    shape = f"m{options.micro_batches}_s{options.tokens}_{options.dtype}{'_limited' if options.ssd_limit else ''}"
    name = f"gpt_101m_{shape}_{report.instructions()}_{datetime.date.today()}"
    portable.write(folder / f"{name}.json", content, options.runs, "gains")
    for row, values in content["rows"].items():
        print(f"{row:45}{median(values['step_s']):8.2f} s, simulated {values['simulated_s']:.2f} s")
    run.write_table(run.ROOT / "benchmarks" / "ab")


if __name__ == "__main__":
    sys.exit(main())
