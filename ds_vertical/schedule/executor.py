"""Walk a schedule: wait for what an event needs, call its handler, keep the ticket."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Protocol

from ds_vertical.interrupts import pause
from ds_vertical.schedule.dependencies import dependencies
from ds_vertical.schedule.events import Event, Op, Schedule, format_window
from ds_vertical.schedule.trace import Tracer, now


class InFlight(Protocol):
    """Something that was started and is to be waited for. `what` and `num_bytes`: for traces and messages."""

    what: str
    num_bytes: int

    @property
    def done(self) -> bool:
        """Whether it is complete: `wait` would return at once."""
        ...

    def wait(self) -> None:
        """Return once it is complete. Raises what has failed."""
        ...


Handler = Callable[[Event], InFlight | None]

# What a handler keeps busy while it runs; the others only issue, or trace their own work.
_RESOURCE: dict[Op, str] = dict.fromkeys((Op.F, Op.HEAD, Op.B, Op.REDUCE, Op.NORM), "compute")


@lru_cache(maxsize=32)
def _dependencies(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    return dependencies(schedule.events)


class Executor:
    """Runs schedules with one handler per operation.

    A handler that starts something asynchronous returns a ticket, a `InFlight`; the executor waits for it just before the
    first event that depends on it (`dependencies` of the schedule), or at once with `overlap=False`, the debugging oracle. What
    is issued for the next schedule is waited for there, by whoever gave the ticket. `before`: what an event of an operation
    waits for besides.
    `held_bytes()` gives bytes held per tier for the message of a failure. `tracer` takes a span of every handler (from issue,
    when the executor came to the event, and start, when its waits were over), every wait, and what of `counters()` an event
    of no micro-batch has changed: asking a device costs more than launching a kernel. On a device that computes asynchronously
    a handler's span is the host's part only.
    """

    def __init__(
        self,
        handlers: Mapping[Op, Handler],
        *,
        before: Mapping[Op, Handler] = MappingProxyType({}),
        overlap: bool = True,
        held_bytes: Callable[[], Mapping[str, int]] = dict,
        counters: Callable[[], Mapping[str, int]] = dict,
        tracer: Tracer | None = None,
    ) -> None:
        self.handlers = dict(handlers)
        self.before = before
        self.overlap = overlap
        self.held_bytes = held_bytes
        self.counters = counters
        self.tracer = tracer or Tracer()
        self._counted: dict[str, int] = {}

    def run(self, schedule: Schedule) -> None:
        """Run every event once, in order. An exception of a handler carries the events around it as a note."""
        needs = _dependencies(schedule)
        flying: dict[int, InFlight] = {}
        index = 0
        try:
            for index, event in enumerate(schedule.events):
                pause()
                issue = now()
                for needed in needs[index]:
                    if needed in flying:
                        self._wait(flying.pop(needed), event)
                if event.op in self.before and (ticket := self.before[event.op](event)) is not None:
                    self._wait(ticket, event)
                start = now()
                ticket = self.handlers[event.op](event)
                self.tracer.span(_RESOURCE.get(event.op, ""), event, start, now(), issue=issue)
                if self.tracer.keeps and event.micro_batch is None:
                    self._count()
                if ticket is not None and not self.overlap:
                    self._wait(ticket, event)
                if ticket is not None and not ticket.done and not event.ahead:
                    flying[index] = ticket
            index = len(schedule.events)
            for issued in list(flying):
                self._wait(flying.pop(issued), "end")
        except BaseException as error:
            error.add_note(self._describe_failure(schedule, index, flying))
            raise

    def _wait(self, ticket: InFlight, by: object) -> None:
        start = now()
        ticket.wait()
        self.tracer.wait(ticket.what, by, start, now())

    def _count(self) -> None:
        for name, value in self.counters().items():
            if self._counted.get(name) != value:
                self._counted[name] = value
                self.tracer.count(name, value)

    def _describe_failure(self, schedule: Schedule, index: int, flying: Mapping[int, InFlight]) -> str:
        in_flight = ", ".join(f"{ticket.what} ({ticket.num_bytes} bytes)" for ticket in flying.values())
        held = ", ".join(f"{tier} {count} bytes" for tier, count in self.held_bytes().items())
        return (
            f"ds_vertical schedule, around the failing event:\n{format_window(schedule.events, index)}\n"
            f"in flight: {in_flight or 'nothing'}; held: {held or 'nothing'}"
        )
