"""From the recorded steps of both arms to the verdict: are the losses equal, and only then, how fast is each arm.

[Note: how equal]
See docs/architecture.md, what is exact. On one rank, with untied weights, gradients summed in fp32 and without snake, both arms
agree bit for bit. Tied weights, several ranks, snake or a narrower sum change the order of additions, so a tolerance holds
instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ds_vertical.cli.common import JsonObject
from ds_vertical.config.section import SECTION
from ds_vertical.engine.metrics import ENGINES, TRACED, Agreement, StepRecord, encode_float

_TOLERANCE_NARROW = 1e-3  # bf16, fp16
_TOLERANCE_FP32 = 1e-6


class ComparisonError(Exception):
    """The recorded runs cannot be compared: the wrong engine, or not the same steps."""


@dataclass(frozen=True)
class Run:
    """One recorded run of one arm: {rank: records in step order}. A traced one is left out of the arm's summary."""

    arm: str
    repeat: int
    ranks: Mapping[int, Sequence[StepRecord]]
    traced: bool = False

    @property
    def name(self) -> str:
        """What its files are called: the arm, or "traced", and the repeat."""
        return f"{TRACED if self.traced else self.arm}.{self.repeat}"

    @property
    def num_steps(self) -> int:
        """The steps that every rank recorded."""
        return min(len(records) for records in self.ranks.values())

    def step(self, index: int) -> list[StepRecord]:
        """The records of all ranks for the step of this index, from 0."""
        return [self.ranks[rank][index] for rank in sorted(self.ranks)]


@dataclass(frozen=True)
class Contract:
    """How equal the losses of two arms must be: the relative tolerance, and the reasons why bits may differ, if any."""

    tolerance: float
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class LossDifference:
    """One loss that two runs do not share; step counts from 1."""

    step: int
    rank: int
    micro_batch: int
    left_run: str
    left: float
    right_run: str
    right: float

    @property
    def relative(self) -> float:
        """|left - right| over the larger of both; inf where one of them is not finite."""
        if not (math.isfinite(self.left) and math.isfinite(self.right)):
            return math.inf
        return abs(self.left - self.right) / max(abs(self.left), abs(self.right))

    def __str__(self) -> str:
        return (
            f"step {self.step}, micro-batch {self.micro_batch}, rank {self.rank}: "
            f"{self.left!r} in {self.left_run}, {self.right!r} in {self.right_run} (relative {self.relative:.2g})"
        )


@dataclass(frozen=True)
class LossVerdict:
    """The agreement over all runs, the first difference that decides it, and the largest relative one."""

    agreement: Agreement
    contract: Contract
    first: LossDifference | None
    max_relative: float


@dataclass(frozen=True)
class ArmSummary:
    """One arm over its repeats; medians leave out the first step of every repeat. Bytes and tokens of all ranks, but for the
    peak of a device's own memory, which is the fullest device's (0: none has its own)."""

    engine: str
    step_s: float
    step_s_by_repeat: tuple[tuple[float, ...], ...]
    tokens_per_s: float
    read_bytes_per_step: float
    write_bytes_per_step: float
    peak_host_bytes: int
    losses: tuple[float, ...]
    peak_device_bytes: int = 0

    def to_json(self, with_speed: bool) -> dict[str, object]:
        """Fields for ab.json; without speed when the losses forbid to speak of it."""
        fields: dict[str, object] = {"engine": self.engine}
        if with_speed:
            fields |= {"step_s": self.step_s, "tokens_per_s": self.tokens_per_s}
            fields["step_s_by_repeat"] = [list(steps) for steps in self.step_s_by_repeat]
        fields |= {
            "read_bytes_per_step": self.read_bytes_per_step,
            "write_bytes_per_step": self.write_bytes_per_step,
            "peak_host_bytes": self.peak_host_bytes,
            "losses": [encode_float(loss) for loss in self.losses],
        }
        return fields | ({"peak_device_bytes": self.peak_device_bytes} if self.peak_device_bytes else {})


def contract_of(config: JsonObject, num_ranks: int, tied: bool | None, repeatable: bool = True) -> Contract:
    """The contract of a run of this configuration. tied None: the run did not say whether weights are tied. repeatable: whether
    its device's kernels give the same bits each time."""
    narrow = any(_enabled(config, name) for name in ("bf16", "bfloat16", "fp16", "torch_autocast"))
    model_dtype = next((name for name in ("bf16", "fp16") if _enabled(config, name)), "fp32")
    model_dtype = "bf16" if _enabled(config, "bfloat16") else model_dtype
    sum_dtype = (config.get("data_types") or {}).get("grad_accum_dtype") or model_dtype
    reasons = []
    if tied is None:
        reasons.append("the model may have tied weights")
    elif tied:
        reasons.append("tied weights")
    if not repeatable:
        reasons.append("a device whose kernels need not repeat their bits; see torch.use_deterministic_algorithms")
    if num_ranks > 1:
        reasons.append(f"{num_ranks} ranks")
    if sum_dtype != "fp32":
        reasons.append(f"gradients summed in {sum_dtype}")
    if (config.get(SECTION) or {}).get("snake"):
        reasons.append("snake order")
    return Contract(_TOLERANCE_NARROW if narrow else _TOLERANCE_FP32, tuple(reasons))


def _enabled(config: JsonObject, section: str) -> bool:
    return bool((config.get(section) or {}).get("enabled"))


def check_runs(runs: Sequence[Run], num_steps: int, num_ranks: int) -> None:
    """Raises ComparisonError unless each run used its arm's engine and recorded the same work, step for step."""
    for run in runs:
        engines = sorted({record.engine for records in run.ranks.values() for record in records})
        if engines != [ENGINES[run.arm]]:
            raise ComparisonError(
                f"{run.name} trained with {', '.join(engines)} instead of {ENGINES[run.arm]}: the script must build "
                f"its engine with ds_vertical.initialize() from the file given as --deepspeed_config"
            )
        if len(run.ranks) != num_ranks:
            raise ComparisonError(f"{run.name} recorded {len(run.ranks)} ranks instead of {num_ranks}")
        counts = {len(records) for records in run.ranks.values()}
        if counts != {num_steps}:
            raise ComparisonError(
                f"{run.name} recorded {min(counts)} steps instead of {num_steps}: the script ended by itself; "
                f"write a smaller --steps or give it more to do"
            )
    work = {run.name: [[(r.tokens, len(r.losses)) for r in run.step(i)] for i in range(num_steps)] for run in runs}
    for name, steps in work.items():
        if steps != work[runs[0].name]:
            raise ComparisonError(f"{name} trained on other numbers of tokens or micro-batches than {runs[0].name}")


def compare_losses(runs: Sequence[Run], contract: Contract) -> LossVerdict:
    """Compares every run with the first stock run (the first of all, without stock), loss by loss. Two NaN are equal."""
    reference = next((run for run in runs if run.arm == "stock"), runs[0])
    found = [difference for run in runs if run is not reference for difference in _differences(reference, run)]
    if not found:
        return LossVerdict(Agreement.EQUAL, contract, None, 0.0)
    allowed = contract.tolerance if contract.reasons else 0.0
    beyond = [difference for difference in found if difference.relative > allowed]
    decisive = min(beyond or found, key=lambda difference: difference.step)
    agreement = Agreement.DIFFERENT if beyond else Agreement.WITHIN
    return LossVerdict(agreement, contract, decisive, max(difference.relative for difference in found))


def _differences(left_run: Run, right_run: Run) -> Iterator[LossDifference]:
    for rank, left_records in sorted(left_run.ranks.items()):
        for left, right in zip(left_records, right_run.ranks[rank], strict=True):
            for micro_batch, (a, b) in enumerate(zip(left.losses, right.losses, strict=True)):
                if a != b and not (math.isnan(a) and math.isnan(b)):
                    yield LossDifference(left.step, rank, micro_batch, left_run.name, a, right_run.name, b)


def summarize_arm(runs: Sequence[Run]) -> ArmSummary:
    """The summary of one arm's runs, which all have two steps or more."""
    steps = [[run.step(index) for index in range(1, run.num_steps)] for run in runs]
    pooled = [step for repeat in steps for step in repeat]
    seconds = tuple(tuple(max(record.step_s for record in step) for step in repeat) for repeat in steps)
    step_s = median(second for repeat in seconds for second in repeat)
    tokens = median(sum(record.tokens for record in step) for step in pooled)
    every_step = [[run.step(index) for index in range(run.num_steps)] for run in runs]
    return ArmSummary(
        engine=runs[0].step(0)[0].engine,
        step_s=step_s,
        step_s_by_repeat=seconds,
        tokens_per_s=tokens / step_s,
        read_bytes_per_step=median(sum(record.read_bytes for record in step) for step in pooled),
        write_bytes_per_step=median(sum(record.write_bytes for record in step) for step in pooled),
        peak_host_bytes=max(sum(record.peak_host_bytes for record in step) for rep in every_step for step in rep),
        losses=tuple(map(_loss_of, every_step[0])),
        peak_device_bytes=max(record.peak_device_bytes for rep in every_step for step in rep for record in step),
    )


def _loss_of(step: Sequence[StepRecord]) -> float:
    """The mean loss of a step's micro-batches, of which ranks may have brought different numbers."""
    counts = [len(record.losses) for record in step]
    if len(set(counts)) == 1:
        return sum(record.loss for record in step) / len(step)
    return sum(record.loss * count for record, count in zip(step, counts, strict=True)) / sum(counts)


def describe_losses(verdict: LossVerdict, num_steps: int) -> str:
    """One or two lines for the terminal: what was found, and what the contract asks."""
    if verdict.agreement is Agreement.EQUAL:
        return f"losses: equal bit for bit over {num_steps} steps"
    contract = verdict.contract
    why = ", ".join(contract.reasons)
    if verdict.agreement is Agreement.WITHIN:
        return (
            f"losses: not bit-equal, largest relative difference {verdict.max_relative:.2g}, within the "
            f"{contract.tolerance:g} that the contract allows here ({why})\n        first: {verdict.first}"
        )
    rule = f"relative {contract.tolerance:g} ({why})" if contract.reasons else "bit for bit (one rank, untied weights)"
    return f"losses: DIFFERENT; the contract asks for equality {rule}\n        first: {verdict.first}"


def comparison_table(summaries: Mapping[str, ArmSummary], ssd_limit: str = "") -> str:
    """The arms side by side, one quantity a line, for the terminal; `ssd_limit` says what their disk was limited to."""
    arms = list(summaries.values())
    rows = [
        ["", *summaries, *(["stock/vertical"] if len(arms) == 2 else [])],
        ["engine", *(arm.engine for arm in arms)],
        _row("step", "s", 1.0, [arm.step_s for arm in arms]),
        _row("tokens", "/s", 1.0, [arm.tokens_per_s for arm in arms]),
        _row("SSD read per step", "MB", 1e-6, [arm.read_bytes_per_step for arm in arms]),
        _row("SSD written per step", "MB", 1e-6, [arm.write_bytes_per_step for arm in arms]),
        _row("peak host memory", "MB", 1e-6, [arm.peak_host_bytes for arm in arms]),
        *(_row("peak device memory", "MB", 1e-6, peaks) for peaks in [[arm.peak_device_bytes for arm in arms]] if any(peaks)),
        _row("last loss", "", 1.0, [arm.losses[-1] for arm in arms]),
    ]
    rows = [row + [""] * (len(rows[0]) - len(row)) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for name, *cells in rows:
        cells_text = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append(f"{name.ljust(widths[0])}  {cells_text}".rstrip())
    if ssd_limit:
        lines.append(f"SSD limited to {ssd_limit}")
    return "\n".join(lines)


def _row(name: str, unit: str, scale: float, values: Sequence[float]) -> list[str]:
    """The values, and the first over the second where there are two."""
    ratio = [f"{values[0] / values[1]:.2f}" if values[1] else ""] if len(values) == 2 else []
    return [name, *(f"{value * scale:.4g} {unit}".strip() for value in values), *ratio]
