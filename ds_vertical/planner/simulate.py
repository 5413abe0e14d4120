"""Run a schedule on costs instead of a machine: when each event is issued, starts and ends, and on which lane.

[Note: lanes and queues] A lane (SSD read, CPU Adam, ...) has one queue per purpose, as the runtime has one handle per
direction and purpose. A queue is first in, first out, in the schedule's order; a lane divides itself evenly among the
queues that have work ready. SSD reads and writes slow each other down as measured together; where host and device are
one memory, compute and CPU Adam share the host cores, less what transfers take of these. Collectives take what they need, but
not more than the half of the cores beside a computation; then they are slower themselves. With fixed rates and one queue per
lane no transfer that gets faster makes a step slower; where lanes share, it can happen, here as on a machine (an early CPU
Adam takes cores from the computation that everybody waits for).

[Note: issuing] One thread walks the events in order, as the executor does, and holds at an event until what it depends on
is complete. Steps of the optimizer are only handed to their pipeline. Where host and device are one memory the
thread computes itself. RELEASE holds the thread until its unit's uses are complete, so the window bounds memory. With window 0
the thread of a single rank beside a device also waits, at a REDUCE, until the unit's gradients have left the device
(`offload.grad_store.HeldGradients`, `leaves_beside`); the ranks of several wait there for the reduction before in any case.

[Note: reading ahead] The state of a step is read from when the event starts that tells it (`events.coming_steps`), as far as
slots are free; the rest of the step starts when its event does. With further slots (`ahead`) one event tells all steps behind
NORM (`events.teller_of_rest`), those that are left to the next schedule, too.

[Note: boundary] dependencies() covers one schedule. Between consecutive ones: what an earlier step left (`@-1`) needs that
step's NORM, and what it did to the same unit; the first FETCH of a unit needs its steps and its RELEASE, and of a step
issued ahead of it (`STEP.d0`) the values only: what is written is needed by the FETCH after that. NORM@-1 needs the gradients
that the schedule before has left. A step of several schedules is made one by `joined`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import truediv
from typing import Final

from ds_vertical.errors import CostsError
from ds_vertical.planner.costs import Cost, Lane, Parts, Stage, event_costs
from ds_vertical.planner.machine import NET_CORES, Machine
from ds_vertical.planner.model_shape import ModelShape
from ds_vertical.planner.network import LINKS
from ds_vertical.schedule.dependencies import dependencies
from ds_vertical.schedule.events import Event, Needs, Op, Schedule, error_at
from ds_vertical.types import Unit

OPTIMIZER_OPS: Final = frozenset((Op.HOLD, Op.STEP, Op.COMMIT, Op.MAKE))
COMPUTE_OPS: Final = frozenset((Op.F, Op.HEAD, Op.B))
_ROUNDING: Final = 1e-12
_LOADS: Final = ("ssd_core_s_per_byte", *NET_CORES)  # what transfers take of the host cores


@dataclass(frozen=True, slots=True)
class SimulatedSpan:
    """A stage of event `index` (counted over all steps) on its lane, from start to end in seconds."""

    index: int
    event: Event
    stage: Stage
    start_s: float
    end_s: float


@dataclass(frozen=True)
class SimulatedRun:
    """What a simulated run did. `ran`: the stages as they ended, each with its event's index, start and end. `issued_s` and
    `end_s`: per event, over all steps; `busy_s`: seconds in which a lane worked."""

    events: tuple[Event, ...]
    num_steps: int
    ran: Sequence[tuple[int, Stage, float, float]]
    issued_s: tuple[float, ...]
    end_s: tuple[float, ...]
    busy_s: dict[Lane, float]

    @cached_property
    def spans(self) -> tuple[SimulatedSpan, ...]:
        """What ran, in the order in which it began."""
        spans = [SimulatedSpan(index, self.events[index], stage, start, end) for index, stage, start, end in self.ran]
        return tuple(sorted(spans, key=lambda span: (span.start_s, span.index)))

    @property
    def makespan_s(self) -> float:
        """From the first issue to the end of everything."""
        return max(self.end_s, default=0.0)

    @property
    def step_s(self) -> float:
        """Seconds that the last step added: its makespan in the steady state, where steps overlap."""
        count = len(self.events) // self.num_steps
        return self.makespan_s - max(self.end_s[: len(self.events) - count], default=0.0)


@dataclass(frozen=True)
class SimulationSettings:
    """`steps`: consecutive steps of the schedule. `slots`: pieces of optimizer state in memory at a time; `ahead`: further
    ones, with which state is read before NORM that is stepped behind it. `overlap` False: each event is waited for before the
    next is issued, so that seconds add up."""

    steps: int = 1
    slots: int = 3
    overlap: bool = True
    ahead: int = 0


def simulate(
    schedule: Schedule,
    machine: Machine,
    shape: ModelShape,
    settings: SimulationSettings = SimulationSettings(),  # noqa: B008 - frozen
    *,
    parts: Parts | None = None,
    needs: Needs | None = None,
) -> SimulatedRun:
    """Run steps of the schedule on `machine`. See the notes above.

    `parts`: see `costs.PartSizes`. `needs`: dependencies of one step, when the caller has them. Raises ScheduleError for a
    schedule that cannot be run, CostsError for one that does not fit the shape.
    """
    steps, slots = settings.steps, settings.slots
    if schedule.num_layers != shape.num_layers:
        raise CostsError(f"the schedule has {schedule.num_layers} layers, the model {shape.num_layers}; give both the same")
    if steps < 1 or slots < 1:
        raise CostsError(f"steps and slots must be 1 or more, got {steps} and {slots}")
    costs = event_costs(schedule.events, machine, shape, parts)
    if not settings.overlap:
        costs = tuple((tuple(stage for job in cost for stage in job),) if cost else () for cost in costs)
    needs = dependencies(schedule.events) if needs is None else needs
    leaves_beside = schedule.window > 0 or machine.one_memory or shape.num_shards > 1
    held_by = frozenset[Op]() if leaves_beside else frozenset((Op.REDUCE,))
    simulation = _Simulation(schedule.events, costs, machine, settings, held_by)
    simulation.add_edges(_edges(schedule.events, needs, steps))
    simulation.limit_slots(slots + settings.ahead)
    if settings.overlap:
        simulation.read_ahead(schedule, settings.ahead > 0)
    return simulation.run()


def joined(first: tuple[Schedule, Needs], second: tuple[Schedule, Needs]) -> tuple[Schedule, Needs]:
    """A step of two schedules, one behind the other, as `simulate` takes one: its events, and what they need. It is no schedule
    that runs: events of both are there twice."""
    (schedule, own), (then, of_then) = first, second
    count = len(schedule.events)
    needs = [set(each) for each in own] + [{count + index for index in each} for each in of_then]
    for earlier, later in _boundary(schedule.events, then.events):
        needs[count + later].add(earlier)
    return replace(then, events=schedule.events + then.events), [sorted(each) for each in needs]


def _edges(events: Sequence[Event], needs: Needs, steps: int) -> Iterator[tuple[int, int]]:
    count = len(events)
    own = [(j, index) for index, earlier in enumerate(needs) for j in earlier]
    own += _written_before_fetch(events)
    boundary = list(_boundary(events, events)) if steps > 1 else []
    for step in range(steps):
        first = step * count
        yield from ((first + j, first + i) for j, i in own)
        if step:
            yield from ((first - count + j, first + i) for j, i in boundary)


def _boundary(before: Sequence[Event], events: Sequence[Event]) -> Iterator[tuple[int, int]]:
    """[Note: boundary]: pairs (event of the step before, event of this step)."""
    left: dict[Unit | None, list[int]] = {}
    for index, event in enumerate(before):
        if event.op in OPTIMIZER_OPS or event.op in (Op.RELEASE, Op.REDUCE) or event.ahead:
            left.setdefault(event.layer, []).append(index)
    norms = [index for index, event in enumerate(before) if event.op is Op.NORM]
    fetched: set[Unit | None] = set()
    for index, event in enumerate(events):
        if event.op is Op.NORM and event.step_offset < 0:
            yield from ((j, index) for j, other in enumerate(before) if other.op is Op.CROSS and other.ahead)
        elif event.step_offset < 0:
            yield from ((j, index) for j in {*norms, *left.get(event.layer, ()), *left.get(None, ())})
        elif event.op is Op.FETCH and event.layer not in fetched:
            fetched.add(event.layer)
            yield from ((j, index) for j in left.get(event.layer, ()) if before[j].op not in (Op.REDUCE, Op.CROSS))
        elif event.op is Op.FETCH and not event.ahead:
            yield from ((j, index) for j in left.get(event.layer, ()) if before[j].op is Op.STEP and before[j].ahead)


def _written_before_fetch(events: Sequence[Event]) -> Iterator[tuple[int, int]]:
    """A delayed step hands its values to the next FETCH in memory; the FETCH after that one reads what it wrote."""
    steps: dict[Unit | None, list[int]] = {}
    fetches: dict[Unit | None, int] = {}
    for index, event in enumerate(events):
        if event.op is Op.STEP and event.step_offset:
            steps.setdefault(event.layer, []).append(index)
        elif event.op is Op.FETCH:
            fetches[event.layer] = fetches.get(event.layer, 0) + 1
            if fetches[event.layer] == 2:
                yield from ((j, index) for j in steps.get(event.layer, ()))


def _tellers(schedule: Schedule, steps: int, beyond_norm: bool) -> dict[int, int]:
    """By the index of a STEP, counted over all steps, that of the event which tells it."""
    events, count = schedule.events, len(schedule.events)
    places = {event: index for index, event in enumerate(events) if event.op in (Op.STEP, Op.HEAD)}
    firsts, coming = range(0, steps * count, count), schedule.coming.items()
    told = {first + places[step]: first + places[by] for first in firsts for by, step in coming}
    if beyond_norm and schedule.teller_of_rest is not None:
        teller = places[schedule.teller_of_rest]
        norm = events.index(Event(Op.NORM))
        rest = [index for event, index in places.items() if event.op is Op.STEP and index > norm]
        left = [count + index for event, index in places.items() if event.op is Op.STEP and event.step_offset < 0]
        pairs = ((first + index, first + teller) for first in firsts for index in (*rest, *left))
        told |= {index: by for index, by in pairs if index < steps * count}
    return told


@dataclass(eq=False, slots=True)
class _Task:
    """A stage on its way, on `lane` in `queue`. `waits`: what must be complete before it may run, besides its queue."""

    index: int
    stage: Stage
    lane: Lane
    queue: deque[_Task]
    waits: int
    left_s: float
    followers: list[_Task] = field(default_factory=list)
    start_s: float | None = None
    hinted: bool = False  # it need not wait for its event to start


class _Simulation:
    """A simulation's state: time, queues, and what each event still waits for. `held_by`: the thread stands at such events
    until all that they do is done, but for writes."""

    def __init__(
        self,
        events: Sequence[Event],
        costs: Sequence[Cost],
        machine: Machine,
        settings: SimulationSettings,
        held_by: frozenset[Op],
    ) -> None:
        steps = settings.steps
        self.events = tuple(events) * steps
        fetches = [(event.layer, index) for index, event in enumerate(events) if event.op is Op.FETCH and not event.ahead]
        first = dict(reversed(fetches))  # by unit
        self.delayed = [event.op is Op.STEP and (event.ahead or event.step_offset < 0) for event in events] * steps
        self.first_fetches = {step * len(events) + index for step in range(steps) for index in first.values()}
        self.machine = machine
        self.steps = steps
        self.now = 0.0
        self.next = 0
        self.num_ended = 0
        self.computing: int | None = None
        self.held_by = held_by
        self.holding: int | None = None  # of these the last one that has been issued
        count = len(self.events)
        self.waits = [0] * count
        self.on_end: list[list[int]] = [[] for _ in range(count)]
        self.on_values: list[list[int]] = [[] for _ in range(count)]
        self.issued_s: list[float | None] = [None] * count
        self.end_s: list[float | None] = [None] * count
        self.jobs: list[list[list[_Task]]] = []
        self.queues: dict[tuple[str, str], deque[_Task]] = {}
        for index, cost in enumerate(tuple(costs) * steps):
            self.jobs.append([self._chain(index, job) for job in cost])
        self.tasks_left = [sum(map(len, cost)) for cost in costs] * steps
        self.values_left = [sum(stage.lane != "ssd_write" for job in cost for stage in job) for cost in costs] * steps
        self.hinted: list[list[_Task]] = [[] for _ in range(count)]
        self.ran: list[tuple[int, Stage, float, float]] = []
        self.busy_s: dict[Lane, float] = {}
        self.overlap = settings.overlap
        self.factors: dict[tuple[Lane, ...], tuple[float, ...]] = {}  # by what is active, see `_divided`
        self.transfers_load = machine.one_memory and any(getattr(machine, name) for name in _LOADS)

    def _chain(self, index: int, job: Sequence[Stage]) -> list[_Task]:
        tasks: list[_Task] = []
        for stage in job:
            queue = self.queues.setdefault((stage.lane, stage.purpose), deque())
            task = _Task(index, stage, stage.lane, queue, 1, stage.seconds)
            queue.append(task)
            if tasks:
                tasks[-1].followers.append(task)
            tasks.append(task)
        return tasks

    def add_edges(self, edges: Iterable[tuple[int, int]]) -> None:
        """Of each pair the second event needs the first: of a delayed step its values, for a FETCH its files."""
        delayed, on_end, on_values, waits = self.delayed, self.on_end, self.on_values, self.waits
        for earlier, later in edges:
            by_values = delayed[earlier] and self._needs_values(earlier, later)
            (on_values if by_values else on_end)[earlier].append(later)
            waits[later] += 1

    def _needs_values(self, step: int, later: int) -> bool:
        """Whether an event waits for the values of a delayed step alone."""
        is_first = self.events[step].ahead and later in self.first_fetches
        return (is_first or self.events[later].op is not Op.FETCH) and self.values_left[step] > 0

    def limit_slots(self, slots: int) -> None:
        """The k-th read of state waits for the (k - slots)-th write of state."""
        tasks = [task for jobs in self.jobs for job in jobs for task in job if task.stage.purpose == "state"]
        reads = [task for task in tasks if task.stage.lane == "ssd_read"]
        writes = [task for task in tasks if task.stage.lane == "ssd_write"]
        for write, read in zip(writes, reads[slots:], strict=False):
            write.followers.append(read)
            read.waits += 1

    def read_ahead(self, schedule: Schedule, beyond_norm: bool) -> None:
        """See [Note: reading ahead]."""
        for index, told in _tellers(schedule, self.steps, beyond_norm).items():
            for job in self.jobs[index]:
                if job[1:] and job[0].stage.reads_state:
                    job[0].hinted = True
                    self.hinted[told].append(job[0])
                    job[1].waits += 1

    # ---- the run

    def run(self) -> SimulatedRun:
        queues = list(self.queues.values())
        while True:
            self._issue()
            active = [queue[0] for queue in queues if queue and not queue[0].waits]
            if not active:
                break
            self._advance(active)
        if self.num_ended < len(self.events):
            index = next(i for i, end in enumerate(self.end_s) if end is None)
            raise error_at(self.events, index, "never ends: what it waits for comes after it")
        issued, ended = ([s or 0.0 for s in times] for times in (self.issued_s, self.end_s))
        return SimulatedRun(self.events, self.steps, self.ran, tuple(issued), tuple(ended), self.busy_s)

    def _issue(self) -> None:
        """See [Note: issuing]."""
        events, waits, count, one_memory = self.events, self.waits, len(self.events), self.machine.one_memory
        while (index := self.next) < count and (not waits[index] or events[index].op in OPTIMIZER_OPS):
            if one_memory and self.computing is not None and self.end_s[self.computing] is None:
                return
            if not self.overlap and self.num_ended < index:
                return
            if self.holding is not None and self.values_left[self.holding]:
                return
            self.next = index + 1
            self.issued_s[index] = self.now
            if events[index].op in self.held_by:
                self.holding = index
            if events[index].op in COMPUTE_OPS:
                self.computing = index
            if not waits[index]:
                self._start(index)

    def _start(self, index: int) -> None:
        """The event is issued and has what it needs: its first stages may run; without stages it is over."""
        for task in self.hinted[index]:
            task.waits -= 1
        if not self.jobs[index]:
            self._end(index)
        for job in self.jobs[index]:
            job[1 if job[0].hinted else 0].waits -= 1

    def _end(self, index: int) -> None:
        self.end_s[index] = self.now
        self.num_ended += 1
        self._satisfy(self.on_end[index])

    def _satisfy(self, dependents: Sequence[int]) -> None:
        for later in dependents:
            self.waits[later] -= 1
            if self.waits[later] == 0 and self.issued_s[later] is not None:
                self._start(later)

    def _advance(self, active: Sequence[_Task]) -> None:
        """Let time pass until the first of the active stages is complete."""
        lanes: tuple[Lane, ...] = tuple([task.lane for task in active])
        rates, busy_s, begun_s = self._rates(active, lanes), self.busy_s, self.now
        passed_s = min(map(truediv, [task.left_s for task in active], rates))
        active_lanes: set[Lane] = set(lanes)
        for lane in active_lanes:
            busy_s[lane] = busy_s.get(lane, 0.0) + passed_s
        self.now += passed_s
        for task, rate in zip(active, rates, strict=True):
            if task.start_s is None:
                task.start_s = begun_s
            task.left_s -= rate * passed_s
            if task.left_s <= _ROUNDING * task.stage.seconds:
                self._complete(task)

    def _rates(self, active: Sequence[_Task], lanes: tuple[Lane, ...]) -> Sequence[float]:
        """Per stage, its speed against its lane alone. See [Note: lanes and queues]."""
        factors = self.factors.get(lanes)
        if factors is None:
            factors = self.factors[lanes] = self._divided(lanes)
        if not self.transfers_load:
            return factors
        stages = [(factor, task.stage) for factor, task in zip(factors, active, strict=True)]
        left, sent = self.machine.divided(*_moved_per_s(stages), "compute" in lanes or "adam" in lanes)
        parts = {"compute": left, "adam": left, **dict.fromkeys(LINKS, sent)}
        return [factor * parts.get(stage.lane, 1.0) for factor, stage in stages]

    def _divided(self, lanes: tuple[Lane, ...]) -> tuple[float, ...]:
        """The part of its lane's speed that each of the active stages has, before transfers take any of the host cores."""
        machine = self.machine
        factors: dict[Lane, float] = {lane: 1 / lanes.count(lane) for lane in lanes}
        if "ssd_read" in factors and "ssd_write" in factors:
            factors["ssd_read"] *= machine.read_together
            factors["ssd_write"] *= machine.write_together
        if machine.one_memory and "compute" in factors and "adam" in factors:
            factors["compute"] /= 1 + machine.adam_share
            factors["adam"] /= 1 + machine.adam_share
        if "compute" in factors or "adam" in factors:
            for lane in LINKS.keys() & factors.keys():
                factors[lane] *= machine.link_beside(lane)
        return tuple(factors[lane] for lane in lanes)

    def _complete(self, task: _Task) -> None:
        index = task.index
        task.queue.popleft()
        self.ran.append((index, task.stage, task.start_s or 0.0, self.now))
        for follower in task.followers:
            follower.waits -= 1
        if task.lane != "ssd_write":
            self.values_left[index] -= 1
            if self.values_left[index] == 0:
                self._satisfy(self.on_values[index])
        self.tasks_left[index] -= 1
        if self.tasks_left[index] == 0:
            self._end(index)


def _moved_per_s(active: Sequence[tuple[float, Stage]]) -> tuple[float, float]:
    """Bytes a second that move to and from the SSD, and cores that collectives need. `active`: speeds and stages."""
    moving = [(speed / stage.seconds, stage) for speed, stage in active if stage.seconds]
    ssd = sum(each * stage.num_bytes for each, stage in moving if stage.lane in ("ssd_read", "ssd_write"))
    return ssd, sum(each * stage.core_s for each, stage in moving)
