"""Seconds and bytes of each event on each resource, from a machine's rates and a model's sizes.

[Note: roofline] A resource ("lane") does its work at the rate that `ds-vertical limits` measures for it alone, after a
fixed latency. Nothing is assumed about what runs beside it: `simulate` and `bound` know what shares.

[Note: carried work] STEP carries the reading of waiting gradients and state and the writing of state and parameters. REDUCE
carries the writing of waiting gradients to SSD where the unit has no HOLD, whose work that is otherwise. An early STEP finds
its gradient in memory. A HOLD of a part says that the rest of the unit's gradients does not wait.

All bytes and elements are those of one rank's shard, except what stays on the device: that is gathered. Collectives take time
where the shape has a network and the machine says what its links carry; `network` has their volumes. A rank's unit comes over
the links behind its own shard's read, and the norm of a unit's gradients stands behind the last hop of their reduction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from ds_vertical.errors import CostsError
from ds_vertical.planner.activation_tiers import activation_tiers
from ds_vertical.planner.machine import Machine
from ds_vertical.planner.model_shape import ModelShape, state_elements, state_read, state_written
from ds_vertical.planner.network import Hop, Network, adds_in_memory, reads_memory, seconds_of
from ds_vertical.schedule.events import Event, Op
from ds_vertical.schedule.levels import Arrival, arrivals
from ds_vertical.types import PRE, SUF, TensorKind, Tier, Unit, check_share, per_tier

Lane = Literal["compute", "copy_in", "copy_out", "ssd_read", "ssd_write", "adam", "net_pair", "net_local", "net_cross"]
Purpose = Literal["compute", "parameters", "gradients", "state", "activations", "kept"]
Parts = Mapping[tuple[Unit, str], float]
# Whether activations and what forwards keep that rest in a tier are copied off the device, and whether they are written to SSD.
_ACTIVATION_MOVES: Final = per_tier({Tier.DEVICE: (False, False), Tier.HOST: (True, False), Tier.SSD: (True, True)})


@dataclass(frozen=True, slots=True)
class Stage:
    """Work on one lane. `seconds` at the lane's rate alone; `purpose` says which queue of the lane it takes. `num_bytes`: what
    moves on the lane; `core_s`: of a collective, seconds of a host core that the ranks of a node take for it together, where
    computation takes the cores, too."""

    lane: Lane
    purpose: Purpose
    seconds: float
    num_bytes: float = 0.0
    core_s: float = 0.0

    @property
    def reads_state(self) -> bool:
        """Whether it reads optimizer state from SSD."""
        return (self.lane, self.purpose) == ("ssd_read", "state")


_SUM_COPIES: Final = 1  # of a unit's sums, ahead of their collective

Job = tuple[Stage, ...]
Cost = tuple[Job, ...]


def split_steps(shape: ModelShape, delay: float) -> dict[tuple[Unit, str], float]:
    """Elements of this rank per (unit, part), in a schedule that takes a share `delay` of what of every unit has its state in
    files as "d0", and of that the rest as "e0". What has its state in memory is all "d0". Raises CostsError for a delay that is
    no share."""
    check_share("optimizer_delay", delay)
    parts: dict[tuple[Unit, str], float] = {}
    for unit in shape.outside.around(range(shape.num_layers)):
        in_files, in_memory = state_elements(shape, unit)
        parts[unit, "e0"] = in_files * (1 - delay)
        parts[unit, "d0"] = in_files * delay + in_memory
    return parts


def is_early(event: Event) -> bool:
    """Whether an event is about parts that are stepped during the backward."""
    return event.part is not None and event.part.startswith("e")


class PartSizes:
    """Elements of this rank that are stepped and that an event is about: of its part, or of its whole unit.

    `parts`: elements per (unit, part). Without it, the parts of a unit that the events name are of equal size. A STEP without
    a part, beside others with one, is about the rest: one more part.
    """

    def __init__(self, events: Sequence[Event], shape: ModelShape, parts: Parts | None = None) -> None:
        self._shape = shape
        self._parts = parts
        self._named: dict[Unit | None, set[str | None]] = {}
        for event in events:
            if event.op is not Op.F and (event.part is not None or event.op is Op.STEP):
                self._named.setdefault(event.layer, set()).add(event.part)

    def elements(self, event: Event) -> float:
        """Raises CostsError for a part whose size was not given, and for parts larger than their unit."""
        whole, named = self._shape.stepped(event.layer), self._named.get(event.layer, set())
        if event.layer is None or (event.part is None and (event.op is not Op.STEP or named == {None})):
            return whole
        if self._parts is None:
            return whole / len(named)
        if event.part is not None:
            return self._given(event, event.part)
        rest = whole - sum(self._given(event, part) for part in named if part is not None)
        if rest < -0.5:
            raise CostsError(f"event {event}: the parts of {event.layer} have {-rest:.0f} elements more than it; give fewer")
        return max(0.0, rest)

    def state_in_files(self, event: Event) -> float:
        """Of the elements, those whose state is in files: all of an early part, and of the others what memory does not have."""
        elements, (in_files, in_memory) = self.elements(event), state_elements(self._shape, event.layer)
        if self._parts is None:
            return elements * in_files / (in_files + in_memory) if in_memory else elements
        return min(in_files, elements if is_early(event) else max(0.0, elements - in_memory))

    def gradient_bytes(self, event: Event) -> float:
        """Of the elements that the event is about. Raises CostsError as `elements` does."""
        return self.elements(event) * self._shape.gradient_bytes

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
    return tuple(_PRICES[event.op](pricer, event) for event in events)


class _Lanes:
    """What a machine's lanes take for bytes and for computation."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def ssd(self, lane: Literal["ssd_read", "ssd_write"], purpose: Purpose, num_bytes: float) -> Job:
        """A read or a write; nothing for no bytes."""
        if not num_bytes:
            return ()
        machine = self.machine
        rate = machine.ssd_read_bytes_per_s if lane == "ssd_read" else machine.ssd_write_bytes_per_s
        return (Stage(lane, purpose, machine.ssd_latency_s + num_bytes / rate, num_bytes),)

    def copy(self, lane: Literal["copy_in", "copy_out"], purpose: Purpose, num_bytes: float) -> Job:
        """A copy between host and device; nothing where both are one memory."""
        machine = self.machine
        rate = machine.copy_in_bytes_per_s if lane == "copy_in" else machine.copy_out_bytes_per_s
        if machine.one_memory or rate is None or not num_bytes:
            return ()
        return (Stage(lane, purpose, machine.copy_latency_s + num_bytes / rate, num_bytes),)

    def compute(self, seconds: float, launches: int, schedule_s: float = 0.0) -> Cost:
        """Kernels of the device, in `launches` passes through a block: beside the host no faster than one thread of it issues
        them, which runs ahead. `schedule_s`: what the schedule's own code takes of that thread. Where the host is the device,
        the thread computes, and its time for a smallest event is a part of that code."""
        machine, own_s = self.machine, self.machine.compute_latency_s
        if machine.one_memory:
            own_s = max(own_s, schedule_s)
        else:
            seconds = max(seconds, launches * machine.launch_s + schedule_s)
        return ((Stage("compute", "compute", own_s + seconds),),)

    def links(self, purpose: Purpose, hops: Sequence[Hop], levels: bool) -> Job:
        """A collective, over levels or over all ranks at once, hop by hop, each behind what is rounded for it; nothing over
        links of which the machine says nothing."""
        timed = ((hop, seconds_of(hop, self.machine)) for hop in hops)
        return tuple(stage for hop, seconds in timed if seconds for stage in self._hop(purpose, hop, seconds, levels))

    def _hop(self, purpose: Purpose, hop: Hop, seconds: float, levels: bool) -> Job:
        moved = Stage(hop.lane, purpose, seconds, hop.num_bytes, self.machine.net_core_s(hop.received, levels))
        each = (self.machine.net_round_core_s_per_element or 0.0) * self.machine.one_memory
        rounding_s = hop.rounded * each / self.machine.host_cores
        return (Stage("compute", purpose, rounding_s), moved) if rounding_s else (moved,)

    def host_copy_s(self, num_bytes: float) -> float:
        """Seconds of all host cores for a copy within host memory, where computation takes these as well."""
        rate = self.machine.copy_host_bytes_per_s
        return num_bytes / rate if self.machine.one_memory and rate is not None else 0.0

    def shared_memory_s(self, num_bytes: float, num_ranks: int) -> float:
        """The same for what each of a host's ranks gathers out of memory that they share, or adds in it, on one core each."""
        each = self.machine.net_memory_core_s_per_byte
        if each is None or not self.machine.one_memory:
            return self.host_copy_s(num_bytes)
        return num_bytes * each * max(1.0, num_ranks / self.machine.host_cores)


class _Moves:
    """Prices what moves between the tiers between its uses: what passes between two layers, and what forwards keep."""

    def __init__(self, lanes: _Lanes, shape: ModelShape, events: Sequence[Event]) -> None:
        num_micro_batches = 1 + max((event.micro_batch or 0 for event in events), default=0)
        kept, one_memory = shape.kept, lanes.machine.one_memory
        self._lanes = lanes
        self._activation_bytes = shape.activation_bytes
        self._kept = None if kept is None else kept.point
        self._tiers = activation_tiers(num_micro_batches, shape.placement[TensorKind.ACTIVATIONS])
        cells = {} if kept is None else kept.cells(shape.num_layers, num_micro_batches, one_memory)
        self._cells: dict[tuple[Unit | None, int | None], Tier] = {**cells}

    def saved_s(self, event: Event) -> float:
        """Seconds of the recompute that a B leaves out, in a layer of largest size."""
        return 0.0 if self._kept is None or _cell(event) not in self._cells else self._kept.saved_s

    def save(self, event: Event) -> Cost:
        """What passes between two layers on its way to the tier of its micro-batch."""
        return self._out("activations", *self._of(event))

    def load(self, event: Event) -> Cost:
        """The way back to the device."""
        return self._back("activations", *self._of(event))

    def keep(self, event: Event) -> Cost:
        """What a forward has kept on its way to the tier of its cell; nothing where the shape does not say what is kept."""
        return () if self._kept is None else self._out("kept", self._tier_of(event), self._kept.num_bytes)

    def recall(self, event: Event) -> Cost:
        """The way back to the device."""
        return () if self._kept is None else self._back("kept", self._tier_of(event), self._kept.num_bytes)

    def _of(self, event: Event) -> tuple[Tier, float]:
        assert event.micro_batch is not None
        return self._tiers[event.micro_batch], self._activation_bytes

    def _tier_of(self, event: Event) -> Tier:
        if _cell(event) not in self._cells:
            raise CostsError(f"event {event}: the model keeps nothing of it; give the shape the share that the schedule keeps")
        return self._cells[_cell(event)]

    def _out(self, purpose: Purpose, tier: Tier, num_bytes: float) -> Cost:
        copied, written = _ACTIVATION_MOVES[tier]
        out = self._lanes.copy("copy_out", purpose, num_bytes * copied)
        return _cost(out + self._lanes.ssd("ssd_write", purpose, num_bytes * written))

    def _back(self, purpose: Purpose, tier: Tier, num_bytes: float) -> Cost:
        copied, written = _ACTIVATION_MOVES[tier]
        read = self._lanes.ssd("ssd_read", purpose, num_bytes * written)
        return _cost(read + self._lanes.copy("copy_in", purpose, num_bytes * copied))


def _cell(event: Event) -> tuple[Unit | None, int | None]:
    return event.layer, event.micro_batch


@dataclass(frozen=True)
class _Gathered:
    """How a unit comes to a FETCH: `from_copy`: from the node's copy, `copied` to the device; `hops`: over the links."""

    from_copy: bool
    hops: Job
    copied: Job = ()


class _Collectives:
    """Prices what ranks send each other, and the node's copies on their way between host and device."""

    def __init__(self, lanes: _Lanes, shape: ModelShape, events: Sequence[Event]) -> None:
        self.levels = any(event.op is Op.CROSS for event in events)
        self._lanes = lanes
        self._shape = shape
        self._network = shape.network or Network()
        self._arrivals = arrivals(events, levels=True) if self.levels else {}
        self._handed_on = {event.layer for event in events if event.op is Op.STEP and not is_early(event)}
        self._last: dict[Unit | None, Arrival] = {}  # by unit, of its last FETCH

    def fetch(self, event: Event) -> _Gathered:
        """To be asked once for each FETCH, in the schedule's order."""
        shape, network = self._shape, self._network
        elements = shape.elements(event.layer)
        if event.ahead:
            return _Gathered(False, ())
        if not self.levels:
            return _Gathered(False, self._joined(event, network.gather(elements, shape.param_bytes)))
        if self._arrival(event).spreads:
            return _Gathered(False, ())
        hops = self._joined(event, network.local_gather(elements, shape.param_bytes), reads_memory(network))
        return _Gathered(True, hops, () if network.stands else self._copied("copy_in", event))

    def spread(self, event: Event) -> Job:
        """The hops, and the copy on its way to where it waits."""
        shape, network = self._shape, self._network
        sent = shape.elements(event.layer), shape.param_bytes
        if event.ahead:
            return self._links("parameters", network.to_copy(*sent))
        keeps = self._last.get(event.layer, Arrival()).keeps
        hops = self._joined(event, network.spread(*sent, kept=keeps), keeps and reads_memory(network))
        return hops + (self._copied("copy_out", event) if keeps and not network.stands else ())

    def reads_to_spread(self, event: Event) -> bool:
        """Whether a unit that is spread behind its step has to be read: no step has left its values in memory."""
        return event.ahead and event.layer not in self._handed_on

    def reduce(self, event: Event) -> Job:
        """Over the node, or over all ranks."""
        elements, each = self._gradients(event)
        hops, adds = self._links("gradients", self._network.reduce(elements, each)), adds_in_memory(self._network)
        copied_s = self._lanes.host_copy_s(_SUM_COPIES * elements * each)
        copied_s += self._in_memory_s(elements * each) if adds else 0.0
        return (Stage("compute", "compute", copied_s), *hops) if (hops or adds) and copied_s else hops

    def cross(self, event: Event) -> Job:
        """Over the nodes."""
        return self._links("gradients", self._network.cross(*self._gradients(event)))

    def _links(self, purpose: Purpose, hops: Sequence[Hop]) -> Job:
        return self._lanes.links(purpose, hops, self.levels)

    def _joined(self, event: Event, hops: Sequence[Hop], in_memory: bool = False) -> Job:
        """The hops of a gather, and the copy of what has come into parameters, or of what others have put `in_memory`."""
        job = self._links("parameters", hops)
        num_bytes = self._shape.elements(event.layer) * self._shape.param_bytes
        copied_s = self._in_memory_s(num_bytes) if in_memory else self._lanes.host_copy_s(num_bytes)
        return (*job, Stage("compute", "parameters", copied_s)) if (job or in_memory) and copied_s else job

    def _in_memory_s(self, num_bytes: float) -> float:
        return self._lanes.shared_memory_s(num_bytes, self._network.ranks_per_node)

    def _gradients(self, event: Event) -> tuple[float, int]:
        return self._shape.stepped(event.layer) * self._shape.num_shards, self._shape.gradient_bytes

    def _copied(self, lane: Literal["copy_in", "copy_out"], event: Event) -> Job:
        """A rank's part of its node's copy on its way between host and device."""
        num_bytes = self._shape.elements(event.layer) * self._shape.param_bytes / self._network.w
        return self._lanes.copy(lane, "parameters", num_bytes)

    def _arrival(self, event: Event) -> Arrival:
        assert event.layer is not None
        self._last[event.layer] = self._arrivals[event.layer].popleft()
        return self._last[event.layer]


class _Pricer:
    """Prices the events of one schedule, in its order: a delayed STEP decides what the FETCH after it has to read."""

    def __init__(self, events: Sequence[Event], machine: Machine, shape: ModelShape, parts: Parts | None) -> None:
        self.lanes = _Lanes(machine)
        self.shape = shape
        self.sizes = PartSizes(events, shape, parts)
        self.held = {event.layer for event in events if event.op is Op.HOLD}
        self.moves = _Moves(self.lanes, shape, events)
        steps = [event for event in events if event.op is Op.STEP]
        self.split = {early.layer: [e for e in steps if e.layer == early.layer] for early in filter(is_early, steps)}
        ahead = (e for e in events if e.ahead and (e.op is Op.FETCH or (e.op is Op.STEP and self.sizes.elements(e))))
        self.in_memory = {event.layer for event in ahead}  # until the unit's next FETCH
        self.again = {PRE} & set(shape.apart)  # its buffer keeps it from its first FETCH to its second
        self.collectives = _Collectives(self.lanes, shape, events)

    def fetch(self, event: Event) -> Cost:
        """The read of a unit's shard, where it is not in memory yet, the copy of it to the device, and its gather."""
        gathered = self.collectives.fetch(event)
        if gathered.from_copy:
            return _cost(gathered.copied + gathered.hops)
        elements = self.shape.shard(event.layer)
        read = () if event.layer in self.in_memory else self._read_parameters(elements)
        self.in_memory.discard(event.layer)
        if event.layer in self.again and not event.ahead:
            self.again.discard(PRE)
            self.in_memory.add(PRE)
        copied = self.lanes.copy("copy_in", "parameters", elements * self.shape.param_bytes)
        return _cost(read if event.ahead else read + copied + gathered.hops)

    def spread(self, event: Event) -> Cost:
        """The unit on its way over the nodes and over the node."""
        reads = self.collectives.reads_to_spread(event)
        return _cost((self._read_parameters(self.shape.shard(event.layer)) if reads else ()) + self.collectives.spread(event))

    def _read_parameters(self, elements: float) -> Job:
        num_bytes = elements * self.shape.param_bytes * self.shape.in_files(TensorKind.PARAMETERS)
        return self.lanes.ssd("ssd_read", "parameters", num_bytes)

    def forward(self, event: Event) -> Cost:
        """Of the prefix, the suffix or a layer, for one micro-batch."""
        if event.layer == PRE:
            return self.lanes.compute(self.shape.pre_forward_s, 1)
        if event.layer == SUF:
            return self.lanes.compute(self.shape.head_s / 3, 1)  # a forward pass is a third of forward and backward
        return self._layer(event, self.shape.forward_s, 1, self.lanes.machine.schedule_forward_s)

    def head(self, event: Event) -> Cost:
        """Suffix, loss and their backward, for one micro-batch."""
        return self.lanes.compute(self.shape.head_s, 3)

    def backward(self, event: Event) -> Cost:
        """Of the prefix or a layer, for one micro-batch, with the recompute of the layer's forward where there is one."""
        shape = self.shape
        if event.layer == PRE:
            return self.lanes.compute(shape.pre_backward_s, 2)
        last = event.layer == shape.num_layers - 1 and not shape.recompute_last
        recompute = 0.0 if last else max(0.0, shape.forward_s - self.moves.saved_s(event))
        launches, own_s = 3 if recompute else 2, self.lanes.machine.schedule_backward_s
        return self._layer(event, shape.backward_s + recompute, launches, own_s)

    def _layer(self, event: Event, seconds: float, launches: int, schedule_s: float) -> Cost:
        """`seconds`: of a layer of largest size; `launches` and `schedule_s`: of each of its blocks."""
        scale = self.shape.elements(event.layer) / (max(self.shape.layer_elements) or 1)
        blocks = max(1, round(self.shape.blocks_per_layer * scale))  # the last layer may have fewer
        return self.lanes.compute(seconds * scale, blocks * launches, blocks * schedule_s)

    def reduce(self, event: Event) -> Cost:
        """The unit's gradient sums on their way over the links, or over those of the node where a CROSS follows."""
        hops = self.collectives.reduce(event)
        return _cost(hops) if self.collectives.levels else self._reduced(event, hops)

    def cross(self, event: Event) -> Cost:
        """The node's sums on their way over the nodes."""
        return self._reduced(event, self.collectives.cross(event))

    def _reduced(self, event: Event, hops: Job) -> Cost:
        """The last hops of the unit's gradient sums, and their way to where they wait."""
        out = self.lanes.copy("copy_out", "gradients", self.sizes.gradient_bytes(event))
        norm_s = self.sizes.elements(event) / (self.lanes.machine.norm_elements_per_s or math.inf)
        if host_s := norm_s + self._copied_s(event):
            # behind a collective it is computed when that is over, whatever else is computed meanwhile
            purpose: Purpose = "gradients" if hops else "compute"
            out = (replace(self.lanes.compute(host_s, 0)[0][0], purpose=purpose), *out)
        return _cost(hops + out + (() if event.layer in self.held else sum(self.hold(event), ())))

    def _copied_s(self, event: Event) -> float:
        """Seconds of the copy of those of a unit's gradients that wait, so that the memory of the rest need not be kept; with
        several ranks, of this rank's share of all."""
        shared = self.shape.num_shards > 1
        waiting = [event] if shared else [e for e in self.split.get(event.layer, ()) if not is_early(e)]
        return self.lanes.host_copy_s(sum(map(self.sizes.gradient_bytes, waiting)))

    def hold(self, event: Event) -> Cost:
        """The write of the gradients that wait on SSD."""
        num_bytes = self.sizes.gradient_bytes(event) * self.shape.in_files(TensorKind.GRADIENTS)
        return _cost(self.lanes.ssd("ssd_write", "gradients", num_bytes))

    def step(self, event: Event) -> Cost:
        """CPU Adam piece by piece, with what each piece reads and writes; see [Note: carried work]."""
        shape, elements = self.shape, self.sizes.elements(event)
        if not elements:
            return ()
        beside: Cost = ()
        if event.step_offset or event.ahead:
            self.in_memory.add(event.layer)
            beside = _cost(self._read_parameters(max(0.0, shape.shard(event.layer) - elements)))
        waits = shape.in_files(TensorKind.GRADIENTS) > 0 and not is_early(event)
        moves = waits or shape.in_files(TensorKind.STATE) > 0 or shape.in_files(TensorKind.PARAMETERS) > 0
        count = math.ceil(elements / shape.part_elements) if shape.part_elements and moves else 1
        in_files = self.sizes.state_in_files(event)
        state = in_files * state_read(shape, is_early(event)) / count, in_files * state_written(shape) / count
        return beside + (self._piece(elements / count, state, waits),) * count

    def _piece(self, elements: float, state: tuple[float, float], waits: bool) -> Job:
        """One piece's state in, as far as it is in files, and gradients that wait on SSD; Adam; state and parameters out.
        `state`: its bytes in and out."""
        shape, lanes = self.shape, self.lanes
        gradients = elements * shape.gradient_bytes * shape.in_files(TensorKind.GRADIENTS) if waits else 0.0
        num_read, num_written = state
        num_written += elements * shape.param_bytes * shape.in_files(TensorKind.PARAMETERS)
        read = lanes.ssd("ssd_read", "state", num_read)
        adam = Stage("adam", "compute", lanes.machine.adam_s(elements, num_written))
        written = lanes.ssd("ssd_write", "state", num_written)
        return (*read, *lanes.ssd("ssd_read", "gradients", gradients), adam, *written)


def _cost(job: Job) -> Cost:
    return (job,) if job else ()


def _nothing(pricer: _Pricer, event: Event) -> Cost:
    return ()


_PRICES: Final[dict[Op, Callable[[_Pricer, Event], Cost]]] = {
    **dict.fromkeys((Op.RELEASE, Op.DROP, Op.GDROP, Op.KDROP, Op.NORM, Op.COMMIT), _nothing),
    Op.FETCH: _Pricer.fetch,
    Op.F: _Pricer.forward,
    Op.HEAD: _Pricer.head,
    Op.B: _Pricer.backward,
    **dict.fromkeys((Op.SAVE, Op.GSAVE), lambda pricer, event: pricer.moves.save(event)),
    **dict.fromkeys((Op.LOAD, Op.GLOAD), lambda pricer, event: pricer.moves.load(event)),
    Op.KSAVE: lambda pricer, event: pricer.moves.keep(event),
    Op.KLOAD: lambda pricer, event: pricer.moves.recall(event),
    Op.SPREAD: _Pricer.spread,
    Op.REDUCE: _Pricer.reduce,
    Op.CROSS: _Pricer.cross,
    Op.HOLD: _Pricer.hold,
    **dict.fromkeys((Op.STEP, Op.MAKE), _Pricer.step),
}
