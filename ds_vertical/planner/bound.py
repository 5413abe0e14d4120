"""The least time that a step can take: its busiest resource, and what no order of the same events avoids around it.

[Note: bound] For each resource: busy seconds, plus fill, plus drain; the largest sum is the bound.
- busy: all its work in one step at the rates of `Machine`. CPU Adam and casts count on the host cores, and where host and
  device are one memory compute does too (one resource, `host_cores`), and so does what transfers take of the cores, but for
  what they can have taken while these had nothing else to do. The schedule's own code and its copies within host memory
  do not count: another order would do without them. Where reads and writes slow each other down, the
  SSD as a whole is a resource too: the less of "one after the other" and "together as long as both have work".
- fill: the fetch that must be complete before the resource has anything to do ("first layer's fetch"); drain: the state's
  write that must follow its last work ("last chunk's write"). Both are the least over the resource's own work, by the
  schedule's dependencies, so neither is counted for a resource that is busy with it (a fetch is work of `ssd_read`).
Busy + head + tail per resource is the classic bound for one machine with release times and tails (J. Carlier, The one-machine
sequencing problem, European Journal of Operational Research 11, 1982), which makes it hold for every order. It is for a step by
itself: steps that overlap at their boundary may come down to the largest busy time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds_vertical.planner.costs import Cost, Lane, Parts, Stage, event_costs
from ds_vertical.planner.machine import LAUNCHES, Machine
from ds_vertical.planner.model_shape import ModelShape
from ds_vertical.schedule.dependencies import dependencies
from ds_vertical.schedule.events import Event, Needs, Op, Schedule


@dataclass(frozen=True)
class Bound:
    """`resource` decides; `busy_s`, `fill_s`, `drain_s` per resource in seconds."""

    resource: str
    busy_s: dict[str, float]
    fill_s: dict[str, float]
    drain_s: dict[str, float]

    @property
    def seconds(self) -> float:
        """Busy, fill and drain of the resource that decides."""
        return self.of(self.resource)

    def of(self, resource: str) -> float:
        """Busy, fill and drain of one resource, in seconds."""
        return self.busy_s[resource] + self.fill_s[resource] + self.drain_s[resource]

    def lines(self) -> list[str]:
        """A small table, the deciding resource first."""
        order = sorted(self.busy_s, key=self.of, reverse=True)
        rows = [f"{'resource':<12}{'busy s':>10}{'fill s':>10}{'drain s':>10}{'sum s':>10}"]
        for name in order:
            numbers = (self.busy_s[name], self.fill_s[name], self.drain_s[name], self.of(name))
            rows.append(f"{name:<12}" + "".join(f"{number:>10.3f}" for number in numbers))
        return rows


def step_bound(
    schedule: Schedule, machine: Machine, shape: ModelShape, *, parts: Parts | None = None, needs: Needs | None = None
) -> Bound:
    """The bound of one step of the schedule. See [Note: bound]. Raises ScheduleError or CostsError as `simulate` does."""
    # without what an order and its code cost
    copies = dict.fromkeys(("copy_host_bytes_per_s", "net_memory_core_s_per_byte"))
    machine = replace(machine, compute_latency_s=0.0, **copies, **dict.fromkeys(LAUNCHES, 0.0))
    costs = event_costs(schedule.events, machine, shape, parts)
    needs = dependencies(schedule.events) if needs is None else needs
    before = _fetched_before(schedule.events, costs, needs)
    told = _told(schedule)
    after = _written_after(costs, needs)
    work: dict[str, list[tuple[Stage, float, float]]] = {}
    for index, cost in enumerate(costs):
        for job in cost:
            for position, stage in enumerate(job):
                first = told.get(index, index) if stage.reads_state else index
                fill = before[first] + (_seconds(job[:position]) if schedule.events[index].op is Op.FETCH else 0.0)
                drain = max(_write_seconds(job[position + 1 :]), after[index])
                for resource in _resources(stage.lane, machine):
                    work.setdefault(resource, []).append((stage, fill, drain))
    busy = {name: _busy(name, [stage for stage, _, _ in entries], machine) for name, entries in work.items()}
    fill_s = {name: min(fill for _, fill, _ in entries) for name, entries in work.items()}
    drain_s = {name: min(drain for _, _, drain in entries) for name, entries in work.items()}
    if "host_cores" in busy:
        idle_s = fill_s["host_cores"] + drain_s["host_cores"]
        busy["host_cores"] += _transferring([stage for cost in costs for job in cost for stage in job], machine, idle_s)
    bound = Bound("", busy, fill_s, drain_s)
    return Bound(max(busy, key=bound.of, default=""), busy, fill_s, drain_s)


def _told(schedule: Schedule) -> dict[int, int]:
    """By the index of a step, that of the event which tells it: its state may be read from there on, also of a step behind
    NORM, whatever memory there is for it."""
    places = {event: index for index, event in enumerate(schedule.events)}
    told = {places[step]: places[by] for by, step in schedule.coming.items()}
    if schedule.teller_of_rest is not None:
        norm = schedule.events.index(Event(Op.NORM))
        teller = places[schedule.teller_of_rest]
        told |= {index: teller for event, index in places.items() if event.op is Op.STEP and index > norm}
    return told


def _resources(lane: Lane, machine: Machine) -> tuple[str, ...]:
    if lane in ("compute", "adam") and machine.one_memory:
        return ("host_cores",)
    if lane in ("ssd_read", "ssd_write") and min(machine.read_together, machine.write_together) < 1:
        return (lane, "ssd")
    return (lane,)


def _transferring(stages: Sequence[Stage], machine: Machine, idle_s: float) -> float:
    """Seconds of the host cores for the transfers among the stages, which in `idle_s` seconds hold up nothing else."""
    num_bytes = sum(stage.num_bytes for stage in stages if stage.lane in ("ssd_read", "ssd_write"))
    fastest = machine.load(machine.ssd_read_bytes_per_s + machine.ssd_write_bytes_per_s)
    return max(0.0, machine.load(1.0) * num_bytes - fastest * idle_s)


def _busy(resource: str, stages: Sequence[Stage], machine: Machine) -> float:
    if resource == "host_cores":
        return sum(s.seconds * (machine.least_adam_share if s.lane == "adam" else 1.0) for s in stages)
    if resource != "ssd":
        return _seconds(stages)
    read, write = (_seconds([s for s in stages if s.lane == lane]) for lane in ("ssd_read", "ssd_write"))
    both = min(read / machine.read_together, write / machine.write_together)
    rest = read - both * machine.read_together + write - both * machine.write_together
    return min(read + write, both + rest)


def _fetched_before(events: Sequence[Event], costs: Sequence[Cost], needs: Needs) -> list[float]:
    """Per event, seconds of the fetches that must come before it, one after another."""
    before: list[float] = []
    for earlier in needs:
        before.append(
            max((before[j] + (sum(map(_seconds, costs[j])) if events[j].op is Op.FETCH else 0.0) for j in earlier), default=0.0)
        )
    return before


def _written_after(costs: Sequence[Cost], needs: Needs) -> list[float]:
    """Per event, seconds of the longest single write of state among all that must come after it."""
    after = [0.0] * len(costs)
    for index in reversed(range(len(costs))):
        own = max((_write_seconds(job) for job in costs[index]), default=0.0)
        for j in needs[index]:
            after[j] = max(after[j], own, after[index])
    return after


def _seconds(stages: Sequence[Stage]) -> float:
    return sum(stage.seconds for stage in stages)


def _write_seconds(stages: Sequence[Stage]) -> float:
    return _seconds([stage for stage in stages if stage.lane == "ssd_write" and stage.purpose == "state"])
