"""One markdown table from the A/B results under benchmarks/ab, and the line through step times over M."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NAME = re.compile(r"gpt_101m_(?P<row>.+)_(?P<isa>avx\w+|cpu|cuda)_(?P<date>\d{4}-\d\d-\d\d)")
_NONE = "-"
_HEAD = """# Benchmarks

Which runs have been recorded, and what did each one measure? `python benchmarks/run.py --table`
makes this page from the files in `ab/`, `gains/`, `saves/`, `busy/`, `bridges/` and `kept/`. Each
file holds the machine, the date, the command or settings, all JSONs and every step.
[docs/results.md](../docs/results.md) explains the figures,
[docs/benchmarking.md](../docs/benchmarking.md) how to make new ones.

`gpt_101m` has 8 layers of width 1024 and 101.3 M parameters; all of its state rests on SSD. Seconds
are medians without the first step of each repeat, and a ratio compares two arms of one run. The
columns:

- "bound s" is the least time that the vertical step could take at the rates measured in the same
  run, under the same disk limit. The resource behind it is the one that decides.
- "step/bound" is the measured step over that time. A "~" marks a run in which the machine's speed
  changed by more than 15 %.
- "sim s" is the simulated step.
- "read" and "written" are SSD bytes over those of the closed formula for the schedule.
- "outside" is the share of the step in which no resource was busy.
- "peak/formula" and "peak/stock" are the vertical arm's peak host memory over its closed formula,
  and over the stock arm's.

The bound is measured before and after each vertical run since 2026-11-22 16:00, and corrected by
the host's speed between the steps since then; since 22:40 that speed is taken from a layer of the
model. Gradients are summed in pairs since 2026-11-23 01:30, checksums count in bound and simulation
since 03:00, and CPU Adam takes its measured share of the cores since 04:25.

[stock_best.md](stock_best.md) says how the best stock settings were found.

`gpu/` has what was measured on a GPU, which is in no table here: three pairs of steps, and CPU Adam
beside a busy core. `scripts/gpu_check.sh` records with `gpu_record.py`, which adds the GPU's
utilisation and the peak over the device's budget; no record has these yet.
[docs/devices.md](../docs/devices.md#what-has-run-on-a-gpu) says what it shows.

`python benchmarks/kept.py --rounds 1 --turns 3` measures what it gains that forwards keep what
backwards read (`activations.keep`), in about 20 minutes; `--list` names its rows, `--only ROW`
measures some of them. The arms of a row are processes of one checkout. Each takes a step in turn,
while the others are stopped. The arm "plan" has what the planner chooses under the row's disk
limit, from limits that are measured first. Limits of the disk need a cgroup, as a rule root.
"""


@dataclass(frozen=True)
class Result:
    """One file: its row's name, what of the processor the name says, the date, and the content."""

    file: str
    row: str
    isa: str
    date: str
    content: dict[str, Any]


def results(folder: Path) -> list[Result]:
    """All results, by row, the latest last. A file with another name is left out."""
    found = []
    for path in sorted(folder.glob("*.json")):
        match = _NAME.fullmatch(path.stem)
        if match:
            found.append(Result(path.name, match["row"], match["isa"], match["date"], json.loads(path.read_text())))
    return sorted(found, key=lambda result: (result.date, result.file))


def instructions() -> str:
    """The widest vector instructions of this processor, for file names."""
    line = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    flags = line[1].split() if line else []
    return "avx512" if "avx512f" in flags else "avx2" if "avx2" in flags else "cpu"


def fit_line(seconds: Mapping[int, float]) -> dict[str, float]:
    """Least squares of seconds over M: slope, value at 0, R squared, and the largest deviation relative to the line."""
    count, values = len(seconds), list(seconds.items())
    mean_m, mean_s = sum(m for m, _ in values) / count, sum(s for _, s in values) / count
    spread = sum((m - mean_m) ** 2 for m, _ in values)
    slope = sum((m - mean_m) * (s - mean_s) for m, s in values) / spread
    start = mean_s - slope * mean_m
    total = sum((s - mean_s) ** 2 for _, s in values)
    left = sum((s - start - slope * m) ** 2 for m, s in values)
    deviation = max(abs(s / (start + slope * m) - 1) for m, s in values)
    return {"slope_s": slope, "at_0_s": start, "r_squared": 1 - left / total if total else 1.0, "max_deviation": deviation}


def markdown(
    found: Sequence[Result],
    gains: Sequence[Mapping[str, Any]] = (),
    saves: Sequence[Mapping[str, Any]] = (),
    busy: Sequence[Mapping[str, Any]] = (),
    bridges: Sequence[Mapping[str, Any]] = (),
    kept: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The whole of benchmarks/README.md; `gains` as `gains.measure` gives them, `saves`, `busy`, `bridges` and `kept` as `main`
    of `saves`, `busy`, `bridges` and `kept` writes them."""
    tables = [result for result in found if result.content.get("kind") != "straight"]
    columns = ("M", "tokens", "dtype", "clip", "disk", "stock arm", "stock s", "vertical s", "ratio")
    columns += ("bound s", "step/bound", "sim s", "read", "written", "outside", "peak/formula", "peak/stock", "date, processor")
    lines = [_row(columns), _row(["---"] * len(columns)), *(_row(_cells(result)) for result in tables)]
    straight = [_straight(result) for result in found if result.content.get("kind") == "straight"]
    commands = [f"- `{result.file}`{_commit(result)}: `{' '.join(result.content['command'])}`" for result in found]
    parts = [_HEAD, "\n".join(lines), *straight, *map(_gains, gains), *map(saves_table, saves), *map(busy_table, busy)]
    parts += [*map(bridges_table, bridges), *([kept_table(kept)] if kept else [])]
    parts.append("## Commands\n\n" + "\n".join(commands))
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _cells(result: Result) -> list[str]:
    content = result.content
    stock, vertical = content["arms"].get("stock"), content["arms"]["vertical"]
    yard, config = content.get("yardstick", {}), content["configs"]["vertical"]
    moved, memory = yard.get("bytes") or {}, yard.get("host_memory") or {}
    bound = f"{yard['bound_s']:.2f} {yard['resource']}" if "bound_s" in yard else _NONE
    peak = vertical["peak_host_bytes"] / stock["peak_host_bytes"] if stock else None
    return [
        str(config["gradient_accumulation_steps"]),
        _after(content["command"], "--seq"),
        "bf16" if config.get("bf16", {}).get("enabled") else "fp32",
        f"{config['gradient_clipping']:g}",
        _disk(content.get("ssd_limit")),
        Path(_after(content["command"], "--stock-config")).stem if stock else _NONE,
        _number(stock and stock["step_s"]),
        _number(vertical["step_s"]),
        _number(content.get("speedup")),
        bound,
        _number(yard.get("step_over_bound")) + " ~" * (yard.get("steady") is False),
        _number(yard.get("simulated_s")),
        _number(moved.get("read_over_table"), 3),
        _number(moved.get("written_over_table"), 3),
        f"{yard['outside_share']:.1%}" if "outside_share" in yard else _NONE,
        _number(memory.get("peak_over_formula")),
        _number(peak),
        f"{result.date}, {content['machine']['num_cores']} cores {content['machine']['cpu']} {result.isa}",
    ]


def _commit(result: Result) -> str:
    known = result.content.get("versions", {}).get("commit")
    return f" ({known})" if known else ""


def _straight(result: Result) -> str:
    content, fit = result.content, result.content["fit"]
    points = ", ".join(f"{_median(values):.2f} s at M = {count}" for count, values in content["step_s"].items())
    return (
        f"Vertical step over M ({result.row}, {result.date}, {result.isa}): {points}. Line: {fit['at_0_s']:.2f} s + "
        f"{fit['slope_s']:.3f} s M, R^2 {fit['r_squared']:.4f}, largest deviation {fit['max_deviation']:.1%}."
    )


def _gains(content: Mapping[str, Any]) -> str:
    """What the step takes without each thing that the default has."""
    rows = content["rows"]
    default = _median(rows["default"]["step_s"]), rows["default"]["simulated_s"]
    title = (
        f"## What each part gains\n\nThe vertical step without it (`gains.py`), seconds and over the default's: M ="
        f" {content['micro_batches']}, {content['tokens']} tokens, {content['dtype']}, clipping 0, disk"
        f" {_disk(content['ssd_limit'])}, {content['date'][:10]}, {content['machine']['num_cores']} cores"
        f" {content['machine']['cpu']}. Predicted: the simulation at the rates measured in the first run. Steps"
        f" {', '.join(str(len(row['step_s'])) for row in rows.values())}, medians."
    )
    lines = [_row(("without", "measured s", "simulated s", "measured gain", "predicted gain")), _row(["---"] * 5)]
    for name, row in rows.items():
        taken = _median(row["step_s"]), row["simulated_s"]
        cells = (name, *map(_number, taken), *(_number(a / b) for a, b in zip(taken, default, strict=True)))
        lines.append(_row(cells))
    return title + "\n\n" + "\n".join(lines)


def saves_table(content: Mapping[str, Any]) -> str:
    """What a checkpoint costs in both arms."""
    arms = content["arms"]
    machine, count = arms["vertical"]["machine"], arms["vertical"]["parameters"]
    usual = {arm: _median(found["steps_s"][1:]) for arm, found in arms.items()}
    title = (
        f"## What a checkpoint costs\n\n`{content['model']}`, {content['dtype']}, {count / 1e6:.1f} M parameters, everything on"
        f" SSD, saved to the same disk (`saves.py`), {content['date'][:10]}, {machine['num_cores']} cores {machine['cpu']}."
        " Seconds until the call returns, and until the files are on the disk; bytes per parameter, in the vertical arm with"
        " the delayed part of the last step, which the save brings to rest and the next step leaves out; the step after the"
        f" save over the median before ({', '.join(f'{arm} {seconds:.2f} s' for arm, seconds in usual.items())})."
    )
    columns = ("arm", "call", "returns s", "on disk s", "read B", "written B", "next step")
    lines = [_row(columns), _row(["---"] * len(columns))]
    for arm, found in arms.items():
        for each in (*found["saves"], *found["loads"]):
            call = f"save {each['tag']}" if "tag" in each else "load"
            if "failed" in each:
                lines.append(_row((arm, call, each["failed"], *[_NONE] * 4)))
                continue
            moved = (_number(each[name] / count) for name in ("read_bytes", "write_bytes"))
            after = _number(each["step_after_s"] / usual[arm]) if "tag" in each else _NONE
            lines.append(_row((arm, call, _number(each["returned_s"]), _number(each["synced_s"]), *moved, after)))
    return title + "\n\n" + "\n".join(lines)


def busy_table(content: Mapping[str, Any]) -> str:
    """Both arms beside other work on the cores."""
    machine, steps = content["machine"], content["step_s"]
    title = (
        f"## Beside other work\n\n`{content['model']}`, M = {content['micro_batches']}, {content['tokens']} tokens, clipping"
        f" {content['clip']:g}, disk full, against `{content['stock']}.json` (`busy.py`), {content['date'][:10]},"
        f" {machine['num_cores']} cores {machine['cpu']} ({content['checkout']['commit']}). Medians of {content['rounds']}"
        f" steps of each, in turn; losses {'equal bit for bit' if content['losses_equal'] else 'DIFFERENT'}."
    )
    columns = ("beside", "stock s", "vertical s", "stock / vertical", "stock / alone", "vertical / alone")
    lines = [_row(columns), _row(["---"] * len(columns))]
    alone = {arm: _median(values) for arm, values in next(iter(steps.values())).items()}
    for name, taken in steps.items():
        stock, vertical = (_median(taken[arm]) for arm in ("stock", "vertical"))
        figures = (stock, vertical, stock / vertical, stock / alone["stock"], vertical / alone["vertical"])
        lines.append(_row((name, *map(_number, figures))))
    return title + "\n\n" + "\n".join(lines)


_BRIDGES = {
    "overhead": "Seconds of a step of loops that stay as they are, and over those of a loop of `train_batch`",
    "busy": "Seconds of a step of one Trainer script in both arms, beside one busy core",
    "reads": "MB that one Trainer script reads from SSD in a step, in both arms",
    "evaluation": "MB that Trainer's evaluation reads from SSD, and `eval_batch` for the same rows",
}


def bridges_table(content: Mapping[str, Any]) -> str:
    """One figure of the loops that stay as they are."""
    machine, seconds = content["machine"], content["unit"] == "step_s"
    stock = f", stock with `{content['stock']}.json`" if content["figure"] in ("busy", "reads") else ""
    turns = sum(len(each["turns"]) for each in content["rounds"])
    title = (
        f"## Scripts as they are: {content['figure']}\n\n{_BRIDGES[content['figure']]}: `{content['model']}`, M ="
        f" {content['micro_batches']}, {content['tokens']} tokens, clipping {content['clip']:g}, disk full{stock}"
        f" (`bridges.py`), {content['date'][:10]}, {machine['num_cores']} cores {machine['cpu']}"
        f" ({content['checkout']['commit']}). Medians of {turns} turns in {len(content['rounds'])} rounds of new processes;"
        " a ratio is the median of those within the turns."
    )
    columns = ("loop", "step s" if seconds else "read MB", f"over {content['divided_by']}")
    lines = [_row(columns), _row(["---"] * len(columns))]
    for name, value in content["median"].items():
        ratio = content["median_ratio"].get(name)
        lines.append(_row((name, _number(value if seconds else value / 1e6), _number(ratio, 3))))
    return title + "\n\n" + "\n".join(lines)


def kept_table(contents: Sequence[Mapping[str, Any]]) -> str:
    """All rows of what forwards keep for their backwards."""
    title = (
        "## What forwards keep\n\nSeconds of a step by what a layer's forward keeps for its backward (`activations.keep`), and"
        " over those of the arm that keeps nothing, all of one checkout (`kept.py`): clipping 0, medians of the turns; a ratio"
        " is the median of those within the turns. Predicted: the simulation at the rates measured first. Host GB:"
        " `host_memory_bytes`, of which the plan counts 0.84 for the interpreter and its libraries."
    )
    columns = ("M", "tokens", "disk", "host GB", "arm", "keeps", "step s", "over none", "required", "predicted ratio")
    columns += ("predicted / measured s", "losses", "date, processor, commit")
    lines = [_row(columns), _row(["---"] * len(columns))]
    return title + "\n\n" + "\n".join([*lines, *(_row(cells) for content in contents for cells in _kept_cells(content))])


def _kept_cells(content: Mapping[str, Any]) -> Iterator[list[str]]:
    """A row for each arm."""
    host, machine = content["host_memory_bytes"], content["machine"]
    required = {each["what"]: each for each in content["required"]}
    made = f"{content['date'][:10]}, {machine['num_cores']} cores {machine['cpu']}, {content['checkout']['commit']}"
    for arm, seconds in content["median_s"].items():
        asked = required.get(f"{arm} over none")
        yield [
            str(content["micro_batches"]),
            str(content["tokens"]),
            _disk(content["ssd_limit"]),
            _NONE if host is None else f"{host / 1e9:.2f}",
            arm,
            _keeps(content.get("chosen", {}).get(arm) or content["configs"][arm]["vertical_schedule"]["activations"]),
            _number(seconds),
            _number(content["median_ratio"][arm], 3),
            _NONE if asked is None else _range(asked),
            _number(content["predicted_ratio"][arm], 3),
            _number(content["predicted_over_measured"][arm]),
            "equal" if content["losses_equal"] else "DIFFERENT",
            made,
        ]


def _range(asked: Mapping[str, Any]) -> str:
    """What a ratio is required to be."""
    return f"{asked['least']:.2f} to {asked['most']:.2f}" if asked["least"] else f"{asked['most']:.2f}"


def _keeps(activations: Mapping[str, Any]) -> str:
    """What an arm keeps, and where."""
    policy, tier = activations.get("keep") or "none", activations.get("keep_device")
    if tier is None:
        return policy
    policy = f"{policy} ({activations['keep_outputs']} a block)" if "keep_outputs" in activations else policy
    near = activations.get("keep_host_share", 0.0)
    host = f", {near:.0%} on host" if near else ""
    return f"{policy}, {activations.get('keep_share', 1.0):.0%} on {tier}{host}"


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _after(command: Sequence[str], option: str) -> str:
    """The word after an option; the plain configuration where there is none."""
    return command[command.index(option) + 1] if option in command else "plain"


def _disk(limit: Mapping[str, Any] | None) -> str:
    if not limit:
        return "full"
    return f"{limit['read_bytes_per_s'] / 1e6:.0f}/{limit['write_bytes_per_s'] / 1e6:.0f} MB/s"


def _number(value: float | None, digits: int = 2) -> str:
    return _NONE if value is None else f"{value:.{digits}f}"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
