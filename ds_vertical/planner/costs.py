"""Seconds and bytes of each event on each resource, from a machine's rates and a model's sizes.

[Note: roofline] A resource ("lane") does its work at the rate that `ds-vertical limits` measures for it alone, after a
fixed latency. Nothing is assumed about what runs beside it: `simulate` and `bound` know what shares.

[Note: carried work] Some schedules have events for every transfer (HOLD, RECALL, READ, WRITE), some leave them to the
event that needs them. So work that no event of the unit does is carried: REDUCE carries the writing of waiting gradients
to SSD, STEP the reading of gradients and state and the writing of state and parameters. An early STEP finds its gradient in
memory. A HOLD of a part says that the rest of the unit's gradients does not wait.

All bytes and elements are those of one rank's shard, except what stays on the device: that is gathered. Collectives
between ranks are not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from ds_vertical.errors import CostsError
from ds_vertical.planner.machine import Machine, check_share
from ds_vertical.planner.model_shape import ModelShape
from ds_vertical.schedule.events import PRE, SUF, Event, Op, Unit

Lane = Literal["compute", "copy_in", "copy_out", "ssd_read", "ssd_write", "adam"]
Parts = Mapping[tuple[Unit, str], float]
Needs = Sequence[Sequence[int]]  # per event the events that it waits for
_STEPPING: Final = frozenset((Op.READ, Op.STEP, Op.WRITE))


@dataclass(frozen=True, slots=True)
class Stage:
    """Work on one lane. `seconds` at the lane's rate alone; `purpose` says which queue of the lane it takes."""

    lane: Lane
    purpose: Literal["compute", "parameters", "gradients", "state", "activations"]
    seconds: float
    num_bytes: float = 0.0

    @property
    def reads_state(self) -> bool:
        return (self.lane, self.purpose) == ("ssd_read", "state")


Job = tuple[Stage, ...]
Cost = tuple[Job, ...]


def split_steps(shape: ModelShape, delay: float) -> dict[tuple[Unit, str], float]:
    """`parts` of a schedule that takes a share `delay` of every unit as "d0", the rest as "e0". Raises CostsError."""
    check_share("optimizer_delay", delay)
    units: tuple[Unit, ...] = (PRE, *range(shape.num_layers))
    shares = {"e0": 1 - delay, "d0": delay}
    return {(unit, part): shape.shard(unit) * share for unit in units for part, share in shares.items()}


def is_early(event: Event) -> bool:
    """Whether an event is about parts that are stepped during the backward."""
    return event.part is not None and event.part.startswith("e")


class PartSizes:
    """Elements of this rank that an event is about: of its part, or of its whole unit.

    `parts`: elements per (unit, part). Without it, the parts of a unit that the events name are of equal size. A READ, STEP
    or WRITE without a part, beside others with one, is about the rest: one more part.
    """

    def __init__(self, events: Sequence[Event], shape: ModelShape, parts: Parts | None = None) -> None:
        self._shape = shape
        self._parts = parts
        self._named: dict[Unit | None, set[str | None]] = {}
        for event in events:
            if event.part is not None or event.op in _STEPPING:
                self._named.setdefault(event.layer, set()).add(event.part)

    def elements(self, event: Event) -> float:
        """Raises CostsError for a part whose size was not given, and for parts larger than their unit."""
        whole, named = self._shape.shard(event.layer), self._named.get(event.layer, set())
        if event.layer is None or (event.part is None and (event.op not in _STEPPING or named == {None})):
            return whole
        if self._parts is None:
            return whole / len(named)
        if event.part is not None:
            return self._given(event, event.part)
        rest = whole - sum(self._given(event, part) for part in named if part is not None)
        if rest < -0.5:
            raise CostsError(f"event {event}: the parts of {event.layer} have {-rest:.0f} elements more than it; give fewer")
        return max(0.0, rest)

    def _given(self, event: Event, part: str) -> float:
        assert self._parts is not None and event.layer is not None
        if (event.layer, part) not in self._parts:
            raise CostsError(f"event {event}: parts has no ({event.layer!r}, {part!r}); give its elements")
        return self._parts[event.layer, part]


def event_costs(events: Sequence[Event], machine: Machine, shape: ModelShape, parts: Parts | None = None) -> tuple[Cost, ...]:
    """What each event of a step costs: jobs that may overlap, each a chain of stages; () where it takes no time.

    `parts`: see PartSizes. See [Note: carried work]. A delayed step hands the whole unit over in memory, and reads what it
    leaves as it is beside its state; the unit's next FETCH reads nothing. The step before is taken to be one like this: what
    it ends with ahead of this one counts there.
    """
    pricer = _Pricer(events, machine, shape, parts)
    return tuple(pricer.price(event) for event in events)


class _Pricer:
    def __init__(self, events: Sequence[Event], machine: Machine, shape: ModelShape, parts: Parts | None) -> None:
        self.machine = machine
        self.shape = shape
        self.sizes = PartSizes(events, shape, parts)
        self.present = {(event.op, event.layer, event.part) for event in events}
        self.held = {event.layer for event in events if event.op is Op.HOLD}
        self.recalled = {event.layer for event in events if event.op is Op.RECALL}
        self.tiers = shape.placement.activation_tiers(1 + max((event.micro_batch or 0 for event in events), default=0))
        steps = [event for event in events if event.op is Op.STEP]
        self.split = {early.layer: [e for e in steps if e.layer == early.layer] for early in filter(is_early, steps)}
        ahead = (event for event in events if event.ahead and (event.op is Op.FETCH or self.sizes.elements(event)))
        self.in_memory = {event.layer for event in ahead}  # until the unit's next FETCH

    def price(self, event: Event) -> Cost:
        return _PRICES[event.op](self, event)

    # ---- lanes

    def ssd(self, lane: Literal["ssd_read", "ssd_write"], purpose: Any, num_bytes: float) -> Job:
        if not num_bytes:
            return ()
        machine = self.machine
        rate = machine.ssd_read_bytes_per_s if lane == "ssd_read" else machine.ssd_write_bytes_per_s
        return (Stage(lane, purpose, machine.ssd_latency_s + num_bytes / rate, num_bytes),)

    def copy(self, lane: Literal["copy_in", "copy_out"], purpose: Any, num_bytes: float) -> Job:
        machine = self.machine
        rate = machine.copy_in_bytes_per_s if lane == "copy_in" else machine.copy_out_bytes_per_s
        if machine.one_memory or rate is None or not num_bytes:
            return ()
        return (Stage(lane, purpose, machine.copy_latency_s + num_bytes / rate, num_bytes),)

    def compute(self, seconds: float) -> Cost:
        return ((Stage("compute", "compute", self.machine.compute_latency_s + seconds),),)

    def has(self, op: Op, event: Event) -> bool:
        """Whether an event of its own does this part of the work of `event`'s unit."""
        return any((op, event.layer, part) in self.present for part in (event.part, None))

    # ---- events

    def fetch(self, event: Event) -> Cost:
        elements = self.shape.shard(event.layer)
        read = () if event.layer in self.in_memory else self._read_parameters(elements)
        self.in_memory.discard(event.layer)
        return _cost(read if event.ahead else read + self.copy("copy_in", "parameters", elements * self.shape.param_bytes))

    def _read_parameters(self, elements: float) -> Job:
        return self.ssd("ssd_read", "parameters", elements * self.shape.param_bytes * self.shape.placement.parameters_on_ssd)

    def _scale(self, event: Event) -> float:
        return self.shape.elements(event.layer) / (max(self.shape.layer_elements) or 1)

    def forward(self, event: Event) -> Cost:
        if event.layer == PRE:
            return self.compute(self.shape.pre_forward_s)
        if event.layer == SUF:
            return self.compute(self.shape.head_s / 3)  # a forward pass is a third of forward and backward
        return self.compute(self.shape.forward_s * self._scale(event))

    def head(self, event: Event) -> Cost:
        return self.compute(self.shape.head_s)

    def backward(self, event: Event) -> Cost:
        shape = self.shape
        if event.layer == PRE:
            return self.compute(shape.pre_backward_s)
        kept = event.layer == shape.num_layers - 1 and not shape.recompute_last
        return self.compute((shape.backward_s + (0.0 if kept else shape.forward_s)) * self._scale(event))

    def save(self, event: Event) -> Cost:
        tier, num_bytes = self._tier(event), self.shape.activation_bytes
        out = self.copy("copy_out", "activations", num_bytes * (tier != "device"))
        return _cost(out + self.ssd("ssd_write", "activations", num_bytes * (tier == "ssd")))

    def load(self, event: Event) -> Cost:
        tier, num_bytes = self._tier(event), self.shape.activation_bytes
        read = self.ssd("ssd_read", "activations", num_bytes * (tier == "ssd"))
        return _cost(read + self.copy("copy_in", "activations", num_bytes * (tier != "device")))

    def _tier(self, event: Event) -> str:
        assert event.micro_batch is not None
        return self.tiers[event.micro_batch]

    def _gradient_bytes(self, event: Event) -> float:
        return self.sizes.elements(event) * self.shape.gradient_bytes

    def reduce(self, event: Event) -> Cost:
        out = self.copy("copy_out", "gradients", self._gradient_bytes(event))
        norm_s = self.sizes.elements(event) / (self.machine.norm_elements_per_s or math.inf)
        if host_s := norm_s + self._copied_s(event):
            out = self.compute(host_s)[0] + out
        return _cost(out + (() if event.layer in self.held else sum(self.hold(event), ())))

    def _copied_s(self, event: Event) -> float:
        """Of a unit's gradients those that wait, so that the memory of the rest need not; of this rank's share all."""
        rate, shared = self.machine.copy_host_bytes_per_s, self.shape.num_shards > 1
        if not self.machine.one_memory or rate is None:
            return 0.0
        waiting = [event] if shared else [e for e in self.split.get(event.layer, ()) if not is_early(e)]
        return sum(map(self._gradient_bytes, waiting)) / rate

    def hold(self, event: Event) -> Cost:
        on_ssd = self.shape.placement.gradients_on_ssd
        return _cost(self.ssd("ssd_write", "gradients", self._gradient_bytes(event) * on_ssd))

    def recall(self, event: Event) -> Cost:
        on_ssd = self.shape.placement.gradients_on_ssd
        return _cost(self.ssd("ssd_read", "gradients", self._gradient_bytes(event) * on_ssd))

    def read(self, event: Event) -> Cost:
        return _cost(self._read_state(self.sizes.elements(event)))

    def write(self, event: Event) -> Cost:
        return _cost(self._write_state(self.sizes.elements(event)))

    def _read_state(self, elements: float) -> Job:
        return self.ssd("ssd_read", "state", elements * self.shape.state_bytes * self.shape.placement.state_on_ssd)

    def _write_state(self, elements: float) -> Job:
        return self.ssd("ssd_write", "state", elements * self.shape.written_bytes)

    def step(self, event: Event) -> Cost:
        shape, machine = self.shape, self.machine
        elements = self.sizes.elements(event)
        if not elements:
            return ()
        beside: Cost = ()
        if event.step_offset or event.ahead:
            self.in_memory.add(event.layer)
            beside = _cost(self._read_parameters(max(0.0, shape.shard(event.layer) - elements)))
        placement = shape.placement
        carried = (
            event.layer not in self.recalled and placement.gradients_on_ssd > 0 and not is_early(event),
            not self.has(Op.READ, event) and placement.state_on_ssd > 0,
            not self.has(Op.WRITE, event) and placement.state_on_ssd + placement.parameters_on_ssd > 0,
        )
        count = math.ceil(elements / shape.part_elements) if shape.part_elements and any(carried) else 1
        piece = elements / count
        job: Job = (Stage("adam", "compute", machine.adam_s(piece, piece * shape.written_bytes)),)
        if carried[0]:
            job = self.ssd("ssd_read", "gradients", piece * shape.gradient_bytes * placement.gradients_on_ssd) + job
        if carried[1]:
            job = self._read_state(piece) + job
        if carried[2]:
            job += self._write_state(piece)
        return beside + (job,) * count

    def nothing(self, event: Event) -> Cost:
        return ()


def _cost(job: Job) -> Cost:
    return (job,) if job else ()


_PRICES: Final[dict[Op, Callable[[_Pricer, Event], Cost]]] = {
    **dict.fromkeys((Op.RELEASE, Op.DROP, Op.GDROP, Op.NORM, Op.COMMIT, Op.DISCARD), _Pricer.nothing),
    Op.FETCH: _Pricer.fetch,
    Op.F: _Pricer.forward,
    Op.HEAD: _Pricer.head,
    Op.B: _Pricer.backward,
    **dict.fromkeys((Op.SAVE, Op.GSAVE), _Pricer.save),
    **dict.fromkeys((Op.LOAD, Op.GLOAD), _Pricer.load),
    Op.REDUCE: _Pricer.reduce,
    Op.HOLD: _Pricer.hold,
    Op.RECALL: _Pricer.recall,
    Op.READ: _Pricer.read,
    Op.STEP: _Pricer.step,
    Op.WRITE: _Pricer.write,
}
