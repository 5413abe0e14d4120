"""Runs the table of shapes: `ds-vertical ab` row by row, the most important first, and regenerates benchmarks/README.md.

    python benchmarks/run.py --list                        # rows, with estimated minutes
    python benchmarks/run.py --budget 30                   # as many as fit into 30 minutes
    python benchmarks/run.py --only m16_s8_clip0 straight  # these
    python benchmarks/run.py --table                       # the table only, from the JSON files there are

A row that has a result of today is left out unless --again is given, so that an interrupted series goes on where it was. Every
row's arms take turns (`--repeat`), the medians leave out the first step of each run. A row's name says M, tokens per
micro-batch (scripts/train.py --seq), clipping, the disk limit in MB/s and, where it is not the pipelined one, the stock arm.
`--dtype fp32` runs them in fp32, for processors without bf16 arithmetic, on which a bf16 product is a loop that hides all else.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import portable
import report

ROOT = Path(__file__).resolve().parent.parent
LIMIT = "300M,500M"
# (stock, vertical) seconds of a step at M = 16 with 8 tokens, on a processor with and without bf16 arithmetic worth the name.
USUAL_S = {"avx512": (11.0, 3.2), "avx2": (70.0, 60.0), "cpu": (70.0, 60.0)}
SETUP_S = 20.0  # of a run: processes, model, files
LIMITS_S = 120.0  # measuring the machine beside the vertical arm
STRAIGHT = (8, 16, 24, 32)  # where computation binds, not the disk


@dataclass(frozen=True)
class Row:
    """One A/B; `stock` names the stock arm's JSON under configs/ (None: vertical alone). M is a tuple for the fit over M."""

    micro_batches: int | tuple[int, ...]
    tokens: int = 8
    clip: int = 0
    limited: bool = False
    stock: str | None = "stock_pipelined"
    dtype: str = "bf16"

    @property
    def straight(self) -> bool:
        """Whether this is the fit of a straight line over several M."""
        return isinstance(self.micro_batches, tuple)

    @property
    def name(self) -> str:
        """What --only calls the row, and the end of its record's name."""
        dtype = "" if self.dtype == "bf16" else f"_{self.dtype}"
        if self.straight:
            return ("straight" if self.tokens == 8 else f"straight_s{self.tokens}") + dtype
        end = {"stock_pipelined": "", None: "_vertical"}.get(self.stock, f"_{self.stock}")
        return f"m{self.micro_batches}_s{self.tokens}_clip{self.clip}{'_300_500' * self.limited}{end}{dtype}"

    def command(self, out: Path, steps: int, repeat: int, micro_batches: int | None = None) -> list[str]:
        """The A/B's own command line, from the repository's root."""
        count = self.micro_batches if micro_batches is None else micro_batches
        words = ["ds-vertical", "ab", "--config", "configs/gpt_101m_cpu.json"]
        words += ["--vertical-only"] if self.stock is None else ["--stock-config", f"configs/{self.stock}.json"]
        words += ["--set", f"gradient_accumulation_steps={count}", "--set", f"gradient_clipping={self.clip}.0"]
        words += ["--set", "bf16.enabled=false"] if self.dtype == "fp32" else []
        words += ["--ssd-limit", LIMIT] if self.limited else []
        words += ["--no-bound"] if self.straight else ["--trace"]
        words += ["--steps", str(steps), "--repeat", str(repeat), "--out", str(out)]
        return [*words, "--", "scripts/train.py", "--model", "gpt_101m", "--seq", str(self.tokens)]

    def seconds(self, steps: int, repeat: int, known: dict[str, tuple[float, float]]) -> float:
        """An estimate from the steps of an earlier result with this name on such a processor, else from what is usual."""
        if isinstance(self.micro_batches, tuple):
            each = [replace(self, micro_batches=count).seconds(steps, 1, known) - LIMITS_S for count in self.micro_batches]
            return repeat * sum(each)
        usual = USUAL_S["avx512" if self.dtype == "fp32" else report.instructions()]
        stock_s, vertical_s = known.get(self.name) or self._scaled(*usual)
        arms = [stock_s] * (self.stock is not None) + [vertical_s, vertical_s * (not self.straight)]
        return LIMITS_S + repeat * sum(SETUP_S + steps * arm_s for arm_s in arms)

    def _scaled(self, stock_s: float, vertical_s: float) -> tuple[float, float]:
        assert isinstance(self.micro_batches, int)
        factor = self.micro_batches / 16 * max(0.25, self.tokens / 8)
        return max(2.0, stock_s * factor * (2.7 if self.limited else 1)), max(1.5, vertical_s * factor, 5.4 * self.limited)


ROWS = (
    Row(16),
    Row(16, limited=True),
    Row(16, clip=1),
    Row(16, clip=1, limited=True),
    Row(4, limited=True),
    Row(4),
    Row(16, tokens=32),
    Row(8),
    Row(32),
    Row(STRAIGHT, stock=None),
    Row(16, stock="stock_best"),
    Row(16, limited=True, stock="stock_best"),
    Row(4, clip=1),
    Row(4, clip=1, limited=True),
    Row(16, tokens=32, limited=True),
    Row(16, clip=1, stock="stock_best"),
    Row(4, tokens=32),
    Row(4, tokens=32, limited=True),
    Row(16, tokens=32, clip=1),
    Row(16, tokens=32, clip=1, limited=True),
    Row(4, tokens=32, clip=1),
    Row(4, tokens=32, clip=1, limited=True),
)


def rows(tokens: int | None, dtype: str = "bf16") -> list[Row]:
    """The table's rows in `dtype`; `tokens` replaces those of the rows with 8, for machines on which these take too long."""
    return [replace(row, tokens=tokens if tokens and row.tokens == 8 else row.tokens, dtype=dtype) for row in ROWS]


def run_row(row: Row, out: Path, steps: int, repeat: int, micro_batches: int | None = None) -> dict[str, Any]:
    """One A/B and its report; what it prints is shown. Raises CalledProcessError."""
    subprocess.run(here(row.command(out, steps, repeat, micro_batches)), cwd=ROOT, check=True)
    return json.loads((out / "ab.json").read_text())


def run_straight(row: Row, out: Path, steps: int, repeat: int) -> dict[str, Any]:
    """The vertical arm alone at several M in turn, and the line through the medians."""
    assert isinstance(row.micro_batches, tuple)
    seconds: dict[int, list[float]] = {count: [] for count in row.micro_batches}
    last: dict[str, Any] = {}
    for number in range(repeat):
        for count in row.micro_batches if number % 2 == 0 else reversed(row.micro_batches):
            last = run_row(row, out, steps, 1, count)
            seconds[count] += last["arms"]["vertical"]["step_s_by_repeat"][0]
    kept = {key: last[key] for key in ("date", "machine", "versions", "configs")}
    medians = {count: median(values) for count, values in seconds.items()}
    command = " ".join(row.command(out, steps, 1, row.micro_batches[-1]))
    return kept | {"kind": "straight", "step_s": seconds, "fit": report.fit_line(medians), "command": command.split()}


def write_table(folder: Path) -> None:
    """benchmarks/README.md from the results in `folder`, and the gains, costs of checkpoints, steps beside other work, in loops
    that stay as they are, and with what forwards keep."""
    kinds = ("gains", "saves", "busy", "bridges", "kept")
    further = ([json.loads(path.read_text()) for path in sorted((folder.parent / kind).glob("*.json"))] for kind in kinds)
    (folder.parent / "README.md").write_text(report.markdown(report.results(folder), *further))


def here(command: Sequence[str]) -> list[str]:
    """The console script as this interpreter's module."""
    return [sys.executable, "-m", "ds_vertical.cli.main", *command[1:]]


def known_steps(folder: Path) -> dict[str, tuple[float, float]]:
    """By row name, the latest (stock, vertical) seconds of a step on a processor like this one."""
    found = {}
    for result in report.results(folder):
        arms = result.content.get("arms", {})
        if "vertical" in arms and result.isa == report.instructions():
            stock = arms.get("stock", arms["vertical"])
            found[result.row] = (stock["step_s"], arms["vertical"]["step_s"])
    return found


def main() -> None:
    """Runs the rows asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="ROW", help="names of rows (see --list)")
    parser.add_argument("--list", action="store_true", help="rows and estimated minutes; run nothing")
    parser.add_argument("--table", action="store_true", help="regenerate benchmarks/README.md; run nothing")
    parser.add_argument("--budget", type=float, metavar="MINUTES", help="skip rows that would end later, by the estimate")
    parser.add_argument("--steps", type=int, default=4, help="per run, of which the first is left out (default 4)")
    parser.add_argument("--repeat", type=int, default=2, help="runs per arm in turn (default 2)")
    parser.add_argument("--tokens", type=int, help="per micro-batch, in place of 8")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of the model (default bf16)")
    parser.add_argument("--again", action="store_true", help="also rows that have a result of today")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "ab", help="folder of the JSON files")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "bench", help="folder for logs and traces")
    options = parser.parse_args()
    wanted = rows(options.tokens, options.dtype)
    unknown = sorted(set(options.only or ()) - {row.name for row in wanted})
    if unknown:
        parser.error(f"--only {unknown[0]}: there are {', '.join(row.name for row in wanted)}")
    chosen = [row for row in wanted if not options.only or row.name in options.only]
    known = known_steps(options.results)
    if options.list:
        for row in chosen:
            print(f"{row.name:28}{row.seconds(options.steps, options.repeat, known) / 60:6.1f} min")
        return
    if not options.table:
        run_all(chosen, options, known)
    write_table(options.results)


def run_all(chosen: Sequence[Row], options: argparse.Namespace, known: dict[str, tuple[float, float]]) -> None:
    """Runs each row that has no result of today and fits into the budget; after one that fails comes the next."""
    start = time.monotonic()
    for row in chosen:
        target = options.results / f"gpt_101m_{row.name}_{report.instructions()}_{datetime.date.today()}.json"
        estimate = row.seconds(options.steps, options.repeat, known)
        left = None if options.budget is None else options.budget * 60 - (time.monotonic() - start)
        if target.exists() and not options.again:
            print(f"{row.name}: there is {target.name}", flush=True)
        elif left is not None and estimate > left:
            print(f"{row.name}: left out, {estimate / 60:.1f} minutes do not fit into {left / 60:.1f}", flush=True)
        else:
            print(f"{row.name}: about {estimate / 60:.1f} minutes", flush=True)
            run = run_straight if row.straight else run_row
            try:
                content = run(row, (options.runs / row.name).resolve(), options.steps, options.repeat)
            except subprocess.CalledProcessError as error:
                print(f"{row.name}: failed with status {error.returncode}", flush=True)
                continue
            shutil.rmtree(options.runs / row.name / "traced.0.trace", ignore_errors=True)
            portable.write(target, content, options.runs, "bench")


if __name__ == "__main__":
    main()
