"""Why nothing was computed: each gap of the compute lane, what the thread did in it, and which resource that was up to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ds_vertical.cli.report.timeline import MAIN, cut
from ds_vertical.schedule.trace import Span, StepTrace, intersection

COMPUTE: Final = "compute"
ISSUING: Final = "issuing"  # the thread ran an event that computes nothing
BETWEEN: Final = "between events"
# What can make the thing that is waited for late, by the first word of its name; otherwise any resource may.
_SUSPECTS: Final = {
    "fetch": ("ssd_read", "copy_in"),
    "load": ("ssd_read", "copy_in"),
    "save": ("ssd_write", "copy_out"),
    "hold": ("ssd_write", "copy_out"),
}


@dataclass(frozen=True)
class Stall:
    """From start to end nothing was computed.

    `cause`: what was waited for ("fetch 3"), the event being issued ("3RELEASE"), or BETWEEN. `by`: the event that needed it,
    "" where none did. `resource`: which was busy for the longest part of it, of those that it was up to; ISSUING; "" where none
    was.
    """

    start: float
    end: float
    cause: str
    by: str
    resource: str

    @property
    def seconds(self) -> float:
        """From its start to its end."""
        return self.end - self.start


def stalls(step: StepTrace) -> list[Stall]:
    """The times of the step in which nothing was computed, in pieces that do not overlap, in order of time."""
    found: list[Stall] = []
    waits = [(wait, interval) for wait in step.waits if wait.thread == MAIN for interval in cut(step, [wait])]
    issued = [span for span in step.spans if span.thread == MAIN and not span.resource]
    own = [(span, interval) for span in issued for interval in cut(step, [span])]
    for gap in _gaps(step.start, step.end, cut(step, (span for span in step.spans if span.resource == COMPUTE))):
        left = [gap]
        for wait, interval in waits:
            inside, left = _split(left, interval)
            found += [Stall(*piece, wait.name, wait.by, _resource(step, wait.name, piece)) for piece in inside]
        for span, interval in own:
            inside, left = _split(left, interval)
            found += [Stall(*piece, span.name, "", ISSUING) for piece in inside]
        found += [Stall(*piece, BETWEEN, "", "") for piece in left]
    return sorted(found, key=lambda stall: stall.start)


def _gaps(start: float, end: float, busy: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    for begin, until in sorted(busy):
        if begin > start:
            yield start, begin
        start = max(start, until)
    if end > start:
        yield start, end


def _split(
    pieces: Iterable[tuple[float, float]], by: tuple[float, float]
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """The parts of the pieces inside an interval, and those outside it."""
    inside, outside = [], []
    for start, end in pieces:
        parts = ((start, min(end, by[0])), (max(start, by[0]), min(end, by[1])), (max(start, by[1]), end))
        for (first, last), where in zip(parts, (outside, inside, outside), strict=True):
            if last > first:
                where.append((first, last))
    return inside, outside


def _resource(step: StepTrace, cause: str, interval: tuple[float, float]) -> str:
    suspects = _SUSPECTS.get(cause.partition(" ")[0])
    spans: dict[str, list[Span]] = defaultdict(list)
    for span in step.spans:
        near = span.start < interval[1] and span.end > interval[0]
        if near and span.resource and span.resource != COMPUTE and (suspects is None or span.resource in suspects):
            spans[span.resource].append(span)
    busy = {name: intersection([interval], [(span.start, span.end) for span in each]) for name, each in spans.items()}
    return max(busy, key=lambda name: busy[name], default="")


@dataclass(frozen=True)
class Reason:
    """Stalls of one kind together: `what` is the first word of their causes ("fetch"; two: "load kept"), or ISSUING, or
    BETWEEN."""

    what: str
    resource: str
    seconds: float
    count: int


def reasons(found: Iterable[Stall]) -> list[Reason]:
    """The stalls summed by what was waited for and by resource, most seconds first."""
    groups: dict[tuple[str, str], list[Stall]] = defaultdict(list)
    for stall in found:
        words = stall.cause.split(" ")
        what = stall.cause if stall.cause == BETWEEN else " ".join(words[: 2 if "kept" in words else 1])
        groups[(ISSUING, "") if stall.resource == ISSUING else (what, stall.resource)].append(stall)
    made = [Reason(*key, sum(stall.seconds for stall in each), len(each)) for key, each in groups.items()]
    return sorted(made, key=lambda reason: -reason.seconds)
