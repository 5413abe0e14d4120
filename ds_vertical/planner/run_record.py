"""What a run of the vertical arm really ran, as data: the model's sizes, the settings, the schedule of each step.

Written beside the step records of rank 0 (`account.jsonl`): the facts on the first line, then a line per step. From it and a
machine's rates follow the bound, the simulated makespan and the bytes of the table of that very run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, Self

from ds_vertical.planner.closed_forms import Traffic, kept_layers, vertical_traffic
from ds_vertical.planner.kept_activations import KeptShare, PolicyPoint
from ds_vertical.planner.machine import Machine
from ds_vertical.planner.model_shape import ModelShape, SufShape, state_read
from ds_vertical.planner.network import Network, network_from_json, with_pairs
from ds_vertical.schedule.events import DELAYED, Op, Schedule
from ds_vertical.types import HOLDING, PRE, SHARE_NAMES, SUF, ActivationPolicy, Placement, TensorKind, Tier, Unit, point_name

FILE_NAME = "account.jsonl"
Share = Literal["delayed", "all"]
_BY_UNIT: Final = ("elements", "early_elements", "delayed_elements", "file_elements")

DTYPES: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}  # torch's names, and those of `limits`


@dataclass(frozen=True)
class RunInfo:
    """Elements are whole units', early ones this rank's; a unit is "pre", "suf" or a layer's number. `apart`: as in `Outside`.

    `host_bytes`: of this rank's memory budget. `tokens` of a micro-batch of `sequences`; `threads` of the process that trained;
    `model` is the Hugging Face configuration (None: the model has none). `parameters_on_ssd`, ...: the shares that rest there,
    under the names of `types.SHARE_NAMES`. `slots`, `ahead`: as in `SimulationSettings`. `file_elements`: of those that this
    rank steps, the ones whose state is in files; empty in accounts of earlier versions. `compressed`: whether their masters
    are. `network`: how the ranks lie on hosts (None: there is one, or the account is of an earlier version).
    """

    elements: dict[Unit, int]
    early_elements: dict[Unit, int]
    delayed_elements: dict[Unit, int]
    blocks_per_layer: int
    param_bytes: int
    gradient_bytes: int
    dtype: str
    num_shards: int
    generations: int
    slots: int
    part_elements: int
    parameters_on_ssd: float
    state_on_ssd: float
    one_memory: bool
    host_bytes: int
    sequences: int
    tokens: int
    threads: int
    model: Mapping[str, object] | None
    overlap: bool = True
    gradients_on_ssd: float = 0.0
    activations_on_host: float = 0.0
    activations_on_ssd: float = 0.0
    apart: tuple[Unit, ...] = ()
    file_elements: dict[Unit, int] = field(default_factory=dict[Unit, int])
    ahead: int = 0
    compressed: bool = False
    network: Network | None = None

    @property
    def placement(self) -> Placement:
        """Where things rested in the run."""
        return Placement.of(**{name: getattr(self, name) for name in SHARE_NAMES})

    @property
    def num_layers(self) -> int:
        """Of the schedule: each of `blocks_per_layer` blocks."""
        return sum(isinstance(unit, int) for unit in self.elements)

    @property
    def early_share(self) -> float:
        """Of the elements that are stepped, the share that may be stepped early."""
        early, delayed = sum(self.early_elements.values()), sum(self.delayed_elements.values())
        return early / (early + delayed) if early + delayed else 0.0

    def on(self, machine: Machine) -> RunInfo:
        """The same with the machine's pairs of ranks, which a run does not know."""
        return self if self.network is None else replace(self, network=with_pairs(self.network, machine))

    def _stepped(self, unit: Unit) -> int:
        """Elements of a unit that this rank steps where the schedule says."""
        return self.early_elements[unit] + self.delayed_elements[unit]

    def shape(self, rates: Mapping[str, float]) -> ModelShape:
        """The model for `costs`; `rates` are those of `ds-vertical limits`, whose seconds are those of one block."""
        per_layer = self.blocks_per_layer
        return ModelShape(
            pre_elements=self.elements[PRE],
            layer_elements=tuple(self.elements[layer] for layer in range(self.num_layers)),
            forward_s=per_layer * rates.get("layer_forward_s", 0.0),
            backward_s=per_layer * max(0.0, rates.get("layer_backward_s", 0.0)),
            activation_bytes=round(rates.get("activation_bytes", 0)),
            pre_forward_s=rates.get("pre_forward_s", 0.0),
            pre_backward_s=rates.get("pre_backward_s", 0.0),
            head_s=rates.get("head_s", 0.0),
            param_bytes=self.param_bytes,
            gradient_bytes=self.gradient_bytes,
            num_shards=self.num_shards,
            generations=self.generations,
            part_elements=self.part_elements or None,
            placement=self.placement,
            suf=SufShape(self.elements[SUF], self.elements[SUF]) if SUF in self.elements else None,
            apart=self.apart,
            state_places=tuple((unit, count, self._stepped(unit) - count) for unit, count in self.file_elements.items()),
            compressed=self.compressed,
            network=self.network,
            blocks_per_layer=per_layer,
        )


@dataclass(frozen=True)
class KeptRecord:
    """What the forwards of one step kept on this rank: by the policy in force, for `shares` of the cells (one layer of one
    micro-batch each) by the tier asked for; and the cells and bytes that have really rested in each tier. `outputs`: see
    `PolicyPoint`."""

    policy: ActivationPolicy
    shares: tuple[tuple[Tier, float], ...]
    cells: tuple[tuple[Tier, int], ...] = ()
    num_bytes: tuple[tuple[Tier, int], ...] = ()
    outputs: int | None = None

    @property
    def name(self) -> str:
        """Of the policy, see `types.point_name`."""
        return point_name(self.policy, self.outputs)

    def share(self, layer_s: float, saved_s: float | None) -> KeptShare | None:
        """As the planner has it, with the bytes of the mean cell. `layer_s`: seconds of a layer's forward, `saved_s`: those
        that the policy saves of it, None where they are not known. None where bytes should rest and none did."""
        count, total = (sum(number for _, number in each) for each in (self.cells, self.num_bytes))
        if self.policy in HOLDING and not (count and total):
            return None
        saved = saved_s if saved_s is not None else layer_s if self.policy == "everything" else 0.0
        point = PolicyPoint(self.policy, total / count if self.policy in HOLDING else 0.0, saved, self.outputs)
        shares = dict(self.shares)
        return KeptShare(point, *(shares.get(tier, 0.0) for tier in Tier))

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """From what `to_json` has written."""
        tables = (tuple((Tier(tier), number) for tier, number in fields[name].items()) for name in _TABLES)
        return cls(fields["policy"], *tables, outputs=fields.get("outputs"))

    def to_json(self) -> dict[str, object]:
        """As an account has it."""
        tables = zip(_TABLES, (self.shares, self.cells, self.num_bytes), strict=True)
        written: dict[str, object] = {name: {tier.value: number for tier, number in table} for name, table in tables}
        return {"policy": self.policy} | written | ({} if self.outputs is None else {"outputs": self.outputs})

    def describe(self) -> str:
        """One phrase: the policy, and the cells and MB in each tier."""
        held = dict(self.num_bytes)
        rested = [f"{count} cells, {held.get(tier, 0) / 1e6:.1f} MB on {tier}" for tier, count in self.cells if count]
        where = "; ".join(rested) or ", ".join(f"{share:.0%} of the cells" for _, share in self.shares if share)
        count = "" if self.outputs is None else f" ({self.outputs} of each block's)"
        return f'"{self.policy}"{count}: {where or "no cell"}'


_TABLES: Final = ("shares", "cells", "bytes")


@dataclass(frozen=True)
class ExecutedStep:
    """One step: its schedule, and which share of the step before was due in it. `gauge_s`: how fast the host was behind it, see
    `metrics`; None where that was not measured. `kept`: what its forwards kept; None: nothing."""

    step: int
    schedule: Schedule
    due: Share
    gauge_s: float | None = None
    kept: KeptRecord | None = None


@dataclass(frozen=True)
class Account:
    """What one run ran: its facts, and each of its steps."""

    facts: RunInfo
    steps: tuple[ExecutedStep, ...]

    def shape(self, step: ExecutedStep, rates: Mapping[str, float]) -> ModelShape:
        """The shape in one step: whether its last layer is recomputed follows from its schedule."""
        last = self.facts.num_layers - 1
        fused = any(event.layer == last for event in step.schedule.fused)
        shape, kept = self.facts.shape(rates), None
        if step.kept is not None:
            saved = rates.get(f"{step.kept.name}_saved_s")
            kept = step.kept.share(shape.forward_s, None if saved is None else self.facts.blocks_per_layer * saved)
        return replace(shape, recompute_last=not fused, kept=kept)

    def parts(self, step: ExecutedStep) -> dict[tuple[Unit, str], float]:
        """Elements of this rank that the early and the delayed steps of each unit are about."""
        facts = self.facts
        sizes: dict[tuple[Unit, str], float] = {}
        for unit, early in facts.early_elements.items():
            sizes[unit, "e0"] = early
            sizes[unit, "d0"] = facts.delayed_elements[unit] + (early if step.due == "all" else 0)
        return sizes

    def shares(self, step: ExecutedStep) -> tuple[float, float]:
        """Of all elements that are stepped, the shares stepped early and stepped for the step before it."""
        early = self.facts.early_share
        delayed = any(event.op is Op.STEP and event.part == DELAYED for event in step.schedule.events)
        due = delayed and step.step > 1
        return early * step.schedule.early, (1.0 if step.due == "all" else 1 - early) * due

    def table(self, step: ExecutedStep, rates: Mapping[str, float]) -> Traffic | None:
        """The closed table's bytes for this step; None where it took less than one whole step (the first, for one), where
        activations move in an order that the table does not know, or where what forwards keep moves and the account does not
        say how many bytes that is."""
        early, due = self.shares(step)
        schedule = step.schedule
        after_norm = not (schedule.early or schedule.delayed)
        taken = 1.0 if after_norm else early + due
        unknown = schedule.kept and (step.kept is None or not step.kept.num_bytes)
        if taken < 1 - 1e-9 or schedule.order != "vertical" or unknown or (schedule.moved and schedule.snake):
            return None
        kept, redone = kept_layers(schedule.window), max(0.0, taken - 1)
        held = {event.part for event in schedule.events if event.op is Op.HOLD}
        waiting = 0.0 if not held else 1.0 if None in held else 1 - self.facts.early_share
        shape, count = self.shape(step, rates), schedule.num_micro_batches
        found = vertical_traffic(shape, count, kept=kept, handed_over=due, waiting=waiting, redone=redone)
        recalled = min(early, shape.in_files(TensorKind.STATE)) * shape.stepped_elements / shape.num_shards
        less = state_read(shape, early=False) - state_read(shape, early=True)
        return replace(found, state_read=found.state_read - recalled * less)


class AccountWriter:
    """Writes `folder/account.jsonl`, a line per step; a schedule is written out where it is another than the step before's."""

    def __init__(self, folder: Path, facts: RunInfo) -> None:
        self._file = Path(folder, FILE_NAME).open("w", encoding="utf-8", buffering=1)  # noqa: SIM115 - open as long as the run
        self._file.write(json.dumps({"facts": _named(asdict(facts))}) + "\n")
        self._last: Schedule | None = None
        self._num_steps = 0

    def step(self, schedule: Schedule, due: Share, gauge_s: float | None = None, kept: KeptRecord | None = None) -> None:
        """Append the step that has just ended; arguments as in `ExecutedStep`."""
        self._num_steps += 1
        text = None if schedule == self._last else schedule.to_text()
        self._last = schedule
        line = {"step": self._num_steps, "due": due, "schedule": text, "gauge_s": gauge_s}
        line |= {} if kept is None else {"kept": kept.to_json()}
        self._file.write(json.dumps(line) + "\n")


def read_account(folder: Path) -> Account | None:
    """What the run with these metrics wrote, None where it wrote none (the stock arm). Raises ValueError for a broken file."""
    path = Path(folder, FILE_NAME)
    if not path.exists():
        return None
    try:
        first, *lines = path.read_text(encoding="utf-8").splitlines()
        fields = json.loads(first)["facts"]
        for name in _BY_UNIT:
            fields[name] = {unit if unit in (PRE, SUF) else int(unit): count for unit, count in fields.get(name, {}).items()}
        fields["apart"] = tuple(fields.get("apart", ()))
        fields["network"] = network_from_json(found) if (found := fields.get("network")) else None
        return Account(RunInfo(**fields), tuple(_steps(lines)))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: no account of a run: {error}") from error


def _steps(lines: Sequence[str]) -> list[ExecutedStep]:
    steps: list[ExecutedStep] = []
    for line in lines:
        fields = json.loads(line)
        text = fields["schedule"]
        schedule = steps[-1].schedule if text is None else Schedule.from_text(text)
        kept = KeptRecord.from_json(fields["kept"]) if fields.get("kept") else None
        steps.append(ExecutedStep(fields["step"], schedule, fields["due"], fields.get("gauge_s"), kept))
    return steps


def _named(fields: Mapping[str, Any]) -> Mapping[str, object]:
    """JSON's keys are strings."""
    return {**fields} | {name: {str(unit): count for unit, count in fields[name].items()} for name in _BY_UNIT}
