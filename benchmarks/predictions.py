"""Predicted against measured: what `ds-vertical plan` says of a step before it runs, and what the step then takes.

    python benchmarks/predictions.py [--dtype fp32] [--steps 5] [--only NAME ...]
    python benchmarks/predictions.py --sweep [--dtype fp32]     # the plan's choice beside a measured sweep

Each setting is predicted twice, from the machine's limits and the model's blocks as they are right before its run and right
after it: on a shared machine they are others minutes later. The prediction is the mean of the two, both are kept. The JSON is
trained as it stands. Writes benchmarks/predictions/NAME.json and the table in README.md there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import portable
import report
import run

from ds_vertical.cli.bench.arms import ssd_folders
from ds_vertical.cli.plan.deepspeed_json import TrainingOptions, write_config
from ds_vertical.cli.plan.fake_run import read_spec
from ds_vertical.cli.plan.pieces import time_pieces
from ds_vertical.model.hf import read_fields
from ds_vertical.planner import memory_budget, search
from ds_vertical.planner.candidate import Candidate, Choice
from ds_vertical.planner.linear_program import LpProblem
from ds_vertical.planner.machine import Profile
from ds_vertical.planner.model_shape import Division, ModelSpec, Seconds, shape_of
from ds_vertical.planner.search import Task
from ds_vertical.types import Placement, Tier

FOLDER = run.ROOT / "benchmarks" / "predictions"
LAYERS_200M = ("num_hidden_layers=16",)
LEARNING_RATE = 6e-4


@dataclass(frozen=True)
class Row:
    """One setting of one model; `delay` None: clipping, with every step in the next forward."""

    model: str
    tokens: int
    micro_batches: int
    delay: float | None = 0.25
    window: int = 1
    limited: bool = False
    on_ssd: float = 0.0  # of the activations
    dims: tuple[str, ...] = ()
    size: int = 1  # sequences per micro-batch
    blocks: int = 1  # per layer

    @property
    def name(self) -> str:
        """Names the row in the record and the folder of its run."""
        layers = "_16_layers" if self.dims else ""
        delay = "clip" if self.delay is None else f"a{self.delay:g}"
        sizes = f"_b{self.size}" * (self.size > 1) + f"_{self.blocks}_blocks" * (self.blocks > 1)
        moved = f"_activations{self.on_ssd:g}" if self.on_ssd else ""
        end = f"{sizes}{moved}{'_300_500' * self.limited}"
        return f"{self.model}{layers}_s{self.tokens}_m{self.micro_batches}_{delay}_w{self.window}{end}"


ROWS = (
    Row("gpt_13m", 64, 4),
    Row("gpt_13m", 64, 16, window=2),
    Row("gpt_101m", 8, 4, delay=0.0),
    Row("gpt_101m", 8, 4, delay=0.5),
    Row("gpt_101m", 8, 4, delay=None),
    Row("gpt_101m", 8, 8, window=2),
    Row("gpt_101m", 32, 4),
    Row("gpt_101m", 8, 4, limited=True),
    Row("gpt_101m", 8, 4, delay=0.75, limited=True),
    Row("gpt_101m", 8, 8, delay=0.0, window=2, limited=True),
    Row("gpt_101m", 8, 4, delay=None, limited=True),
    Row("gpt_101m", 8, 8, on_ssd=0.5),
    Row("gpt_101m", 8, 4, dims=LAYERS_200M),
    Row("gpt_101m", 8, 4, dims=LAYERS_200M, limited=True),
)
SWEEP = (
    *(Row("gpt_101m", 8, 4, delay=delay, limited=True) for delay in (0.0, 0.25, 0.5, 0.75, 1.0)),
    *(Row("gpt_101m", 8, 4, delay=delay, window=2, limited=True) for delay in (0.25, 1.0)),
    *(Row("gpt_101m", 8, 4, delay=1.0, blocks=blocks, limited=True) for blocks in (2, 4)),
    *(Row("gpt_101m", 8, 4 // size, delay=1.0, size=size, limited=True) for size in (2, 4)),
)
SWEPT_TOKENS = 32  # of a step in each of these
LITTLE = 1.3e9  # bytes of host memory in which the sweep's model does not find room for its optimizer state


@cache
def outline_of(model: str, tokens: int, dims: tuple[str, ...], dtype: str) -> tuple[ModelSpec, dict[str, Any]]:
    """A shape's spec and its configuration, with `dims` ("KEY=JSON") put into that."""
    fields = read_fields(run.ROOT / "configs" / "models" / f"{model}.json")
    fields |= {key: json.loads(value) for key, _, value in (dim.partition("=") for dim in dims)}
    return read_spec(model, fields, tokens, dtype), fields


def seconds_of(model: str, tokens: int, dtype: str, size: int) -> Seconds:
    """The model's pieces for `size` sequences, timed now; a block's size does not depend on how many there are."""
    spec, fields = outline_of(model, tokens, (), dtype)
    return time_pieces(spec, fields, size)


def limits_path(limited: bool, out: Path) -> Path:
    """Where `profile_of` leaves what it has measured."""
    return out / f"limits{'_limited' * limited}.json"


def profile_of(limited: bool, out: Path) -> Profile:
    """This machine, measured now, under the disk limit if there is one."""
    target = limits_path(limited, out)
    words = ["ds-vertical", "limits", "--path", "/tmp", "--no-keep", "--no-fio", "--config", "configs/gpt_101m_cpu.json"]
    words += ["--out", str(target)]
    words += ["--ssd-limit", run.LIMIT] if limited else []
    subprocess.run(run.here(words), cwd=run.ROOT, check=True)
    return Profile.from_dict("this machine", json.loads(target.read_text()))


def candidate(row: Row, dtype: str, out: Path) -> tuple[Candidate, ModelSpec]:
    """The setting as a plan made now would have it."""
    spec, _ = outline_of(row.model, row.tokens, row.dims, dtype)
    early = row.delay is not None and row.delay < 1
    delay = 1.0 if row.delay is None else row.delay
    placement = Placement.of(activations_on_ssd=row.on_ssd)
    shape = shape_of(
        spec,
        seconds_of(row.model, row.tokens, dtype, row.size),
        Division(
            sequences=row.size,
            blocks_per_layer=row.blocks,
            generations=1 + early,
            part_elements=memory_budget.PART_ELEMENTS,
            placement=placement,
        ),
    )
    machine = profile_of(row.limited, out).machine
    held = delay if early else 1.0
    terms = memory_budget.BudgetTerms(row.micro_batches, row.window, held_share=held, one_memory=machine.one_memory)
    choice = Choice(row.size, row.micro_batches, row.blocks, row.window, delay, early, placement)
    case = LpProblem(shape, machine, terms, dict(zip(Tier, (None, None, None), strict=True)), delay, early)
    return Candidate(choice, case, 0.0, ()), spec


def measured(row: Row, dtype: str, steps: int, out: Path, resume: bool) -> dict[str, Any]:
    """`measure`, kept in `out`; what is kept there already is taken with `resume`."""
    kept = out / row.name / "row.json"
    if not (resume and kept.is_file()):
        found = measure(row, dtype, steps, out)
        kept.write_text(json.dumps(found))
    return json.loads(kept.read_text())


def measure(row: Row, dtype: str, steps: int, out: Path) -> dict[str, Any]:
    """Predicts and runs one row. Raises CalledProcessError."""
    found, spec = candidate(row, dtype, out)
    step_s = train(row, row.name, found, spec, steps, out)
    after, _ = candidate(row, dtype, out)
    both = found.step_s, after.step_s
    predicted, taken = sum(both) / 2, median(step_s)
    print(f"{row.name}: predicted {predicted:.2f} s, measured {taken:.2f} s, {predicted / taken:.2f}", flush=True)
    told = {"row": row.name, "predicted_s": predicted, "before_and_after_s": both, "step_s": step_s, "measured_s": taken}
    return told | {"bound_s": (found.bound.seconds + after.bound.seconds) / 2}


def train(row: Row, name: str, found: Candidate, spec: ModelSpec, steps: int, out: Path) -> list[float]:
    """Seconds of each step but the first, of a run of `row`'s model and disk as `found` would have it. Raises
    CalledProcessError."""
    clip = 1.0 if row.delay is None else 0.0
    training = TrainingOptions(clip, ("/tmp/ds_vertical",), locked=False, learning_rate=LEARNING_RATE)
    config = write_config(found, spec, training)
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(config, indent=2))
    words = ["ds-vertical", "ab", "--config", str(folder / "plan.json"), "--vertical-only", "--no-bound"]
    words += ["--ssd-limit", run.LIMIT] if row.limited and ssd_folders(config) else []
    words += ["--steps", str(steps), "--out", str(folder / "run"), "--", "scripts/train.py", "--model", row.model]
    words += ["--seq", str(row.tokens), *(word for dim in row.dims for word in ("--dims", dim))]
    subprocess.run(run.here(words), cwd=run.ROOT, check=True)
    content = json.loads((folder / "run" / "ab.json").read_text())
    return content["arms"]["vertical"]["step_s_by_repeat"][0]


def choices(dtype: str, steps: int, out: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What `plan` takes for the sweep's model, tokens and disk, trained as well, beside the best of the sweep. With little host
    memory the optimizer's state rests on SSD, as in the sweep; with all of the machine's nothing has to."""
    best = min(row["measured_s"] for row in rows)
    spec, _ = outline_of("gpt_101m", 8, (), dtype)
    task = Task(spec, SWEPT_TOKENS, cache(lambda size: seconds_of("gpt_101m", 8, dtype, size)), clip=0.0)
    machine = profile_of(True, out)
    found: list[dict[str, Any]] = []
    for name, host_bytes in (("plan_little_host_memory", LITTLE), ("plan", machine.capacity[Tier.HOST])):
        held = {**machine.capacity, Tier.DEVICE: None, Tier.HOST: host_bytes}
        chosen = search.choose(task, machine.machine, held, (memory_budget.libraries(machine.process_bytes),)).chosen
        step_s = train(SWEEP[0], name, chosen, spec, steps, out)
        told = {"choice": name, "host_bytes": host_bytes, "setting": chosen.choice.to_json(), "predicted_s": chosen.step_s}
        found.append(told | {"step_s": step_s, "measured_s": median(step_s), "over_best": median(step_s) / best})
        print(f"{name}: predicted {chosen.step_s:.2f} s, measured {median(step_s):.2f} s", flush=True)
    return found


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--steps", type=int, default=5, help="per run, of which the first is left out")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--resume", action="store_true", help="take the rows that --runs has from an earlier call")
    parser.add_argument("--runs", type=Path, default=run.ROOT / "runs" / "predictions", help="folder for logs")
    options = parser.parse_args()
    chosen = [row for row in (SWEEP if options.sweep else ROWS) if not options.only or row.name in options.only]
    options.runs.mkdir(parents=True, exist_ok=True)
    runs = options.runs.resolve()
    rows = [measured(row, options.dtype, options.steps, runs, options.resume) for row in chosen]
    kind = "sweep" if options.sweep else "predictions"
    content: dict[str, Any] = {"kind": kind, "date": str(datetime.date.today()), "dtype": options.dtype, "rows": rows}
    content |= {"machine": report_machine(), "command": sys.argv}
    if options.sweep:
        content["choices"] = choices(options.dtype, options.steps, runs, rows)
    name = f"{kind}_{options.dtype}_{report.instructions()}_{content['date']}"
    portable.write(FOLDER / f"{name}.json", content, options.runs, "predictions")
    (FOLDER / "README.md").write_text(table())


def report_machine() -> dict[str, Any]:
    """The fields about this machine that every record has."""
    from ds_vertical.cli.bench.machine_info import describe_machine

    return describe_machine()


def _fastest_line(rows: list[dict[str, Any]]) -> str:
    """How good a choice among these very rows is."""
    chosen, best = (min(rows, key=lambda row: row[key]) for key in ("predicted_s", "measured_s"))
    over = chosen["measured_s"] / best["measured_s"]
    return f"\nPredicted fastest: `{chosen['row']}`, measured {over:.3f} x the best, `{best['row']}`.\n"


def _choice_line(choice: dict[str, Any]) -> str:
    setting, placement = choice["setting"], choice["setting"]["placement"]
    sizes = f"micro-batches of {setting['micro_batch_size']}, M = {setting['num_micro_batches']}"
    layers = f"layers of {setting['blocks_per_layer']} block(s), {setting['window']} ahead"
    timing = f"{layers}, `optimizer_delay` {setting['delay']:g}"
    where = f"{placement['parameters_on_ssd']:.0%} of the parameters and {placement['state_on_ssd']:.0%} of the state on SSD"
    return (
        f"\nWith {choice['host_bytes'] / 1e9:.3g} GB of host memory `plan` takes {sizes}, {timing}, {where}: predicted"
        f" {choice['predicted_s']:.2f} s, measured {choice['measured_s']:.2f} s, {choice['over_best']:.2f} x the best of the"
        " sweep.\n"
    )


def table() -> str:
    """All results as markdown."""
    text = ["# Predicted and measured step times\n\n"]
    text.append("Made by `benchmarks/predictions.py`; seconds, medians without the first step.")
    text.append(" A prediction is the mean of one made right before the run and one right after it.\n")
    for path in sorted(FOLDER.glob("*.json")):
        content = json.loads(path.read_text())
        text.append(f"\n## {content['kind']}, {content['dtype']}, {content['machine']['cpu']}, {content['date']}\n\n")
        heads = "setting | predicted | measured | predicted / measured | of the prediction before the run alone | bound"
        text.append(f"| {heads} |\n")
        text.append("|---|---|---|---|---|---|\n")
        for row in content["rows"]:
            ratio = row["predicted_s"] / row["measured_s"]
            bound = f"{row['bound_s']:.2f}" if "bound_s" in row else "not kept"
            before = f"{both[0] / row['measured_s']:.2f}" if (both := row.get("before_and_after_s")) else "not kept"
            cells = f"{row['predicted_s']:.2f} | {row['measured_s']:.2f} | {ratio:.2f} | {before} | {bound}"
            text.append(f"| {row['row']} | {cells} |\n")
        text += [_fastest_line(content["rows"])] if content["kind"] == "sweep" else []
        text += [_choice_line(choice) for choice in content.get("choices", [])]
    return "".join(text)


if __name__ == "__main__":
    sys.exit(main())
