"""Which bytes are in which tier at which moment of a simulated run, and whose they are.

Counted is what the schedule moves and what rests between steps. Buffers count while they are in use. Where device and
host are one memory, all of it is the host's. See `memory_budget` for what is allocated, by closed formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from ds_vertical.planner.activation_tiers import activation_tiers
from ds_vertical.planner.costs import Parts, PartSizes
from ds_vertical.planner.machine import Machine
from ds_vertical.planner.model_shape import ModelShape
from ds_vertical.planner.simulate import SimulatedRun, SimulatedSpan
from ds_vertical.schedule.events import Event, Op
from ds_vertical.types import IN_FILES, PRE, SUF, TensorKind, Tier, Unit

MemoryOwner = Literal["parameters", "activations", "activation gradients", "kept", "gradients", "state"]


@dataclass(frozen=True, slots=True)
class MemoryChange:
    """`num_bytes` more (or, below 0, fewer) in a tier from `at_s` on."""

    at_s: float
    tier: Tier
    owner: MemoryOwner
    num_bytes: float


def changes(timeline: SimulatedRun, machine: Machine, shape: ModelShape, parts: Parts | None = None) -> Iterator[MemoryChange]:
    """All changes of a run, in no particular order."""
    ledger = _Ledger(timeline, machine, shape, parts)
    yield from ledger.resting()
    yield from ledger.parameters()
    yield from ledger.gradients()
    yield from ledger.state()
    yield from ledger.activations("activations", _input_role)
    yield from ledger.activations("activation gradients", _gradient_role)
    yield from ledger.kept()


@dataclass(frozen=True)
class _Tensor:
    """Something that rests in `tier` between its uses."""

    owner: MemoryOwner
    tier: Tier
    num_bytes: float


# What events do with what a cell's forward keeps.
_KEPT_VERBS: Final = {Op.F: "make", Op.KSAVE: "save", Op.KLOAD: "load", Op.B: "use", Op.KDROP: "drop"}


class _Ledger:
    def __init__(self, timeline: SimulatedRun, machine: Machine, shape: ModelShape, parts: Parts | None) -> None:
        self.timeline = timeline
        self.machine = machine
        self.shape = shape
        self.count = len(timeline.events) // timeline.num_steps
        self.sizes = PartSizes(timeline.events[: self.count], shape, parts)
        self.present = {(event.op, event.layer, event.part) for event in timeline.events[: self.count]}
        self.spans: dict[int, list[SimulatedSpan]] = {}
        for span in timeline.spans:
            self.spans.setdefault(span.index, []).append(span)
        num_micro_batches = 1 + max((event.micro_batch or 0 for event in timeline.events), default=0)
        self.tiers = activation_tiers(num_micro_batches, shape.placement[TensorKind.ACTIVATIONS])
        self.trains = any(event.op is Op.B for event in timeline.events)

    def start_s(self, index: int) -> float:
        spans = self.spans.get(index)
        return min(span.start_s for span in spans) if spans else self.timeline.end_s[index]

    def end_s(self, index: int) -> float:
        return self.timeline.end_s[index]

    def resting(self) -> Iterator[MemoryChange]:
        shape = self.shape
        stepped = shape.stepped_elements if self.trains else 0
        rests: tuple[tuple[MemoryOwner, TensorKind, float], ...] = (
            ("parameters", TensorKind.PARAMETERS, shape.num_elements * shape.param_bytes / shape.num_shards),
            ("state", TensorKind.STATE, stepped * shape.state_bytes / shape.num_shards),
        )
        for owner, kind, num_bytes in rests:
            second = shape.in_files(TensorKind.STATE) if kind is TensorKind.PARAMETERS else 1.0  # of it, what is stepped early
            for tier, share in shape.placement[kind].items():
                copies = 1.0 + (shape.generations - 1) * second if IN_FILES[tier] else 1.0
                yield MemoryChange(0.0, tier, owner, num_bytes * share * copies)

    def parameters(self) -> Iterator[MemoryChange]:
        """The shard in its host buffer from the read to the end of the copy, the gathered unit from there to RELEASE. Read
        ahead, from that read on. Where nothing is copied the buffer is the unit."""
        fetched: dict[Unit | None, int] = {}
        ahead: dict[Unit | None, int] = {}
        copied = not (self.machine.one_memory or self.machine.copy_in_bytes_per_s is None)
        for index, event in enumerate(self.timeline.events):
            shard = self.shape.shard(event.layer) * self.shape.param_bytes * self.shape.in_files(TensorKind.PARAMETERS)
            gathered = self.shape.elements(event.layer) * self.shape.param_bytes
            if event.op is Op.FETCH and event.ahead:
                ahead[event.layer] = index
                buffered = (Tier.HOST, shard) if copied else (Tier.DEVICE, gathered)
                yield MemoryChange(self.start_s(index), buffered[0], "parameters", buffered[1])
            elif event.op is Op.FETCH:
                fetched[event.layer] = index
                early = ahead.pop(event.layer, None) is not None
                copies = [s.start_s for s in self.spans.get(index, ()) if s.stage.lane == "copy_in"]
                if copied or not early:
                    yield MemoryChange(min(copies, default=self.start_s(index)), Tier.DEVICE, "parameters", gathered)
                if copied and not early:
                    yield MemoryChange(self.start_s(index), Tier.HOST, "parameters", shard)
                if copied:
                    yield MemoryChange(self.end_s(index), Tier.HOST, "parameters", -shard)
            elif event.op is Op.RELEASE and event.layer in fetched:
                yield MemoryChange(self.end_s(index), Tier.DEVICE, "parameters", -gathered)

    def gradients(self) -> Iterator[MemoryChange]:
        """The sum on the device from its first B to REDUCE, which empties it ahead of the next unit's; then this rank's share
        until the step that takes it: in host memory, and from HOLD on (REDUCE, where there is none) its share of it on SSD."""
        summing: set[Unit] = set()
        for index, event in enumerate(self.timeline.events):
            for added in self._added_to(event) - summing:
                summing.add(added)
                yield self._summed(self.start_s(index), added, 1)
            unit = event.layer
            if unit is None:
                continue
            elements = self.shape.stepped(unit) if event.op is Op.REDUCE else self.sizes.elements(event)
            on_ssd = elements * self._share_on_ssd(event)
            if event.op is Op.REDUCE:
                summing.discard(unit)
                yield self._summed(self.start_s(index), unit, -1)
                yield from self._gradients(self.start_s(index), elements - on_ssd, on_ssd)
            elif event.op is Op.HOLD:
                yield self._gradient(self.start_s(index), Tier.SSD, on_ssd)
                yield self._gradient(self.end_s(index), Tier.HOST, -on_ssd)
            elif event.op is Op.STEP:
                if event.step_offset and index < self.count:  # left by the step before the first one
                    yield from self._gradients(0.0, elements - on_ssd, on_ssd)
                yield from self._gradients(self.end_s(index), on_ssd - elements, -on_ssd)

    def _summed(self, at_s: float, unit: Unit, sign: int) -> MemoryChange:
        """A unit's gradients on the device: summed, or of a lone micro-batch those of a layer as autograd makes them."""
        shape = self.shape
        held = self.machine.one_memory and shape.num_shards == 1  # the sums wait for their step
        lone = len(self.tiers) == 1 and isinstance(unit, int) and not held
        each = shape.param_bytes if lone else shape.gradient_bytes
        return MemoryChange(at_s, Tier.DEVICE, "gradients", sign * shape.stepped(unit) * shape.num_shards * each)

    def _added_to(self, event: Event) -> set[Unit]:
        """The units whose gradient sums an event begins or adds to: what stays outside the layers begins with the suffix."""
        if event.op is Op.HEAD:
            return set(self.shape.outside.added_by_head)
        return {event.layer} if event.op is Op.B and event.layer is not None else set()

    def _share_on_ssd(self, event: Event) -> float:
        """Of the gradients that an event is about; a unit whose HOLD names a part keeps the others in memory."""
        held = {part for op, unit, part in self.present if op is Op.HOLD and unit == event.layer}
        if held and (event.op is Op.REDUCE or not {None, event.part} & held):
            return 0.0
        return self.shape.in_files(TensorKind.GRADIENTS)

    def _gradients(self, at_s: float, in_host: float, on_ssd: float) -> Iterator[MemoryChange]:
        yield self._gradient(at_s, Tier.HOST, in_host)
        yield self._gradient(at_s, Tier.SSD, on_ssd)

    def _gradient(self, at_s: float, tier: Tier, elements: float) -> MemoryChange:
        return MemoryChange(at_s, tier, "gradients", elements * self.shape.gradient_bytes)

    def state(self) -> Iterator[MemoryChange]:
        """A slot of the optimizer's pipeline holds a piece's state from its read to the end of its write."""
        spans = sorted((s for s in self.timeline.spans if s.stage.purpose == "state"), key=lambda s: (s.index, s.start_s))
        reads = [span for span in spans if span.stage.lane == "ssd_read"]
        writes = [span for span in spans if span.stage.lane == "ssd_write"]
        for read, write in zip(reads, writes, strict=False):
            num_bytes = max(read.stage.num_bytes, write.stage.num_bytes)
            yield MemoryChange(read.start_s, Tier.HOST, "state", num_bytes)
            yield MemoryChange(write.end_s, Tier.HOST, "state", -num_bytes)

    def activations(self, owner: MemoryOwner, role: Callable[[Event, int], _Role]) -> Iterator[MemoryChange]:
        uses: dict[tuple[Unit, int], list[tuple[str, int]]] = {}
        for index, event in enumerate(self.timeline.events):
            for verb, unit in role(event, self.shape.num_layers):
                assert event.micro_batch is not None
                key = (unit, event.micro_batch)
                if verb == "make" and key in uses:
                    yield from self._life(_Tensor(owner, self.tiers[key[1]], self.shape.activation_bytes), uses.pop(key))
                if verb == "make" or key in uses:
                    uses.setdefault(key, []).append((verb, index))
        for (_, micro_batch), life in uses.items():
            yield from self._life(_Tensor(owner, self.tiers[micro_batch], self.shape.activation_bytes), life)

    def kept(self) -> Iterator[MemoryChange]:
        """What each cell's forward keeps, from its F to its B."""
        kept = self.shape.kept
        if kept is None or not kept.point.num_bytes:
            return
        cells: dict[object, Tier] = {**kept.cells(self.shape.num_layers, len(self.tiers), self.machine.one_memory)}
        lives: dict[object, list[tuple[str, int]]] = {}
        for index, event in enumerate(self.timeline.events):
            cell = event.layer, event.micro_batch
            if event.op not in _KEPT_VERBS or cell not in cells:
                continue
            lives.setdefault(cell, []).append((_KEPT_VERBS[event.op], index))
            if event.op is (Op.B if cells[cell] is Tier.DEVICE else Op.KDROP):
                yield from self._life(_Tensor("kept", cells[cell], kept.point.num_bytes), lives.pop(cell))

    def _life(self, tensor: _Tensor, life: Sequence[tuple[str, int]]) -> Iterator[MemoryChange]:
        """One tensor from the event that makes it to its last use. Saved, it leaves the device between for its tier."""
        owner, tier, num_bytes, verbs = tensor.owner, tensor.tier, tensor.num_bytes, [verb for verb, _ in life]
        last = max(self.end_s(index) for verb, index in life if verb != "drop")
        if tier is Tier.DEVICE or "save" not in verbs:
            yield MemoryChange(self.start_s(life[0][1]), Tier.DEVICE, owner, num_bytes)
            yield MemoryChange(last, Tier.DEVICE, owner, -num_bytes)
            return
        loads = [i for i, verb in enumerate(verbs) if verb == "load"]
        for begin, end in zip([0, *loads], [*loads, len(life)], strict=True):
            on_device = [index for verb, index in life[begin:end] if verb != "drop"]
            yield MemoryChange(self.start_s(life[begin][1]), Tier.DEVICE, owner, num_bytes)
            yield MemoryChange(max(self.end_s(index) for index in on_device), Tier.DEVICE, owner, -num_bytes)
        saved = next(index for verb, index in life if verb == "save")
        dropped = max([self.end_s(index) for verb, index in life if verb == "drop"], default=last)
        yield MemoryChange(self.start_s(saved), tier, owner, num_bytes)
        yield MemoryChange(dropped, tier, owner, -num_bytes)


_Role = tuple[tuple[str, Unit], ...]


def _after(unit: Unit | None, num_layers: int) -> Unit:
    """The unit that takes what `unit` hands on in forward."""
    following = 0 if unit == PRE else num_layers if not isinstance(unit, int) else unit + 1
    return following if following < num_layers else SUF


def _input_role(event: Event, num_layers: int) -> _Role:
    """What an event does with the input of a unit: verb and unit."""
    unit = event.layer
    if unit is None:
        return ()
    if event.op is Op.F:
        use: _Role = () if unit == PRE else (("use", unit),)
        return use if unit == SUF else (*use, ("make", _after(unit, num_layers)))
    if event.op in (Op.HEAD, Op.B):
        return (("use", unit),)
    verbs = {Op.SAVE: "save", Op.LOAD: "load", Op.DROP: "drop"}
    return ((verbs[event.op], unit),) if event.op in verbs else ()


def _gradient_role(event: Event, num_layers: int) -> _Role:
    """What an event does with the gradient that a unit's backward takes: verb and unit."""
    unit = event.layer
    if unit is None:
        return ()
    if event.op in (Op.HEAD, Op.B):
        last = num_layers - 1 if unit == SUF else PRE if unit == 0 else unit - 1 if isinstance(unit, int) else None
        use: _Role = () if unit == SUF else (("use", unit),)
        return use if last is None else (*use, ("make", last))
    verbs = {Op.GSAVE: "save", Op.GLOAD: "load", Op.GDROP: "drop"}
    return ((verbs[event.op], unit),) if event.op in verbs else ()
