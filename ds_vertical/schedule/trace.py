"""Where a step's time goes: spans per resource, waits and counters, as JSONL; a reader; a summary per step.

Times are `now()`, seconds of a clock that all threads of the process share. A record costs one append of a tuple; text is
made once per step, after the step's end is taken. One file per rank, one JSON object per line, by "kind":

- header: version, rank, date, host (its name), host_id (what no other host has: names may be alike); earlier versions wrote
  neither, or the name alone
- step: step, start, end, write_s (seconds that writing the records of the step before took)
- span: step, thread, resource, name, issue, start, end, bytes
- wait: step, thread, name (what was waited for), by (the event that needed it), start, end
- count: step, thread, name, time, value
"""

from __future__ import annotations

import contextlib
import datetime
import json
import socket
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

RESOURCES = ("compute", "copy_in", "copy_out", "ssd_read", "ssd_write", "adam")
VERSION = 2
now = perf_counter


class Tracer:
    """Takes records and keeps none: tracing switched off. `RecordingTracer` is the one that keeps them."""

    keeps = False

    def span(
        self, resource: str, name: object, start: float, end: float, num_bytes: int = 0, *, issue: float | None = None
    ) -> None:
        """`resource` worked on `name` from `start` to `end` (of `now()`), moving `num_bytes`. From any thread.

        resource: one of RESOURCES, or "" for work of the calling thread that belongs to none. name: anything; its `str` is
        taken when the step is written. issue: when it was asked for, where that was earlier than start.
        """

    def wait(self, name: object, by: object, start: float, end: float) -> None:
        """The calling thread waited for `name`, because `by` needs it."""

    def count(self, name: str, value: float) -> None:
        """A counter's value from now on, e.g. bytes held in host memory."""

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One optimizer step; what was recorded since the last step's end is written at this one's, after an exception too."""
        yield


class RecordingTracer(Tracer):
    """Appends the records of every step to `folder/rank<r>.jsonl`; an earlier run's file is replaced.

    Raises OSError where it cannot write there. A span that ends after its step, such as a delayed part's, is written with the
    step after it. `host_id`: of this host, as the reader is to tell hosts apart.
    """

    keeps = True

    def __init__(self, folder: Path, rank: int, host_id: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank{rank}.jsonl"
        date = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        header = {"kind": "header", "version": VERSION, "rank": rank, "date": date, "host": socket.gethostname()}
        header |= {"host_id": host_id} if host_id else {}
        self.path.write_text(json.dumps(header) + "\n")
        self._records: deque[tuple[Any, ...]] = deque()  # append and popleft are atomic
        self._num_steps = 0
        self._write_s = 0.0

    def span(
        self, resource: str, name: object, start: float, end: float, num_bytes: int = 0, *, issue: float | None = None
    ) -> None:
        """See `Tracer.span`."""
        thread = threading.current_thread().name
        self._records.append(("span", thread, resource, name, start if issue is None else issue, start, end, num_bytes))

    def wait(self, name: object, by: object, start: float, end: float) -> None:
        """See `Tracer.wait`."""
        self._records.append(("wait", threading.current_thread().name, name, by, start, end))

    def count(self, name: str, value: float) -> None:
        """See `Tracer.count`."""
        self._records.append(("count", threading.current_thread().name, name, now(), value))

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """See `Tracer.step`."""
        start = now()
        try:
            yield
        finally:
            self._write(start, now())

    def _write(self, start: float, end: float) -> None:
        begin = now()
        self._num_steps += 1
        times = f'"start":{start!r},"end":{end!r},"write_s":{self._write_s!r}'
        lines = [f'{{"kind":"step","step":{self._num_steps},{times}}}\n']
        for _ in range(len(self._records)):
            kind, *values = self._records.popleft()
            line, num_texts = _LINES[kind]
            lines.append(line % (self._num_steps, *map(_quoted, map(str, values[:num_texts])), *values[num_texts:]))
        with self.path.open("a", encoding="ascii") as file:
            file.write("".join(lines))
        self._write_s = now() - begin


def _line(kind: str, texts: Sequence[str], numbers: Sequence[str]) -> tuple[str, int]:
    """The record's line, into which its step, texts and numbers are to be put, and how many texts there are."""
    fields = [f'"{name}":%s' for name in texts] + [f'"{name}":%r' for name in numbers]
    return f'{{"kind":"{kind}","step":%d,{",".join(fields)}}}\n', len(texts)


# Lines are formatted, not encoded field by field: a step has some thousand, and their text is made while the next step waits.
_LINES = {
    "span": _line("span", ("thread", "resource", "name"), ("issue", "start", "end", "bytes")),
    "wait": _line("wait", ("thread", "name", "by"), ("start", "end")),
    "count": _line("count", ("thread", "name"), ("time", "value")),
}
_quoted = json.encoder.encode_basestring_ascii


# ---- reading


@dataclass(frozen=True)
class Span:
    """Work of one resource."""

    step: int
    thread: str
    resource: str
    name: str
    issue: float
    start: float
    end: float
    bytes: int


@dataclass(frozen=True)
class Wait:
    """A thread waited for `name`, which the event `by` needs; seconds of `now()`."""

    step: int
    thread: str
    name: str
    by: str
    start: float
    end: float


@dataclass(frozen=True)
class Count:
    """The value of a counter from `time` on."""

    step: int
    thread: str
    name: str
    time: float
    value: float


@dataclass
class StepTrace:
    """One step of one rank: when it was, and all that was written with it; `write_s`: what the step before took to write."""

    step: int
    start: float
    end: float
    write_s: float = 0.0
    spans: list[Span] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    counts: list[Count] = field(default_factory=list)


def read_trace(path: Path) -> list[StepTrace]:
    """The steps of one rank's file, in order. Raises ValueError, naming file and line, for what is no trace."""
    steps: list[StepTrace] = []
    for number, line in enumerate(path.read_text(encoding="ascii").splitlines(), start=1):
        try:
            _take(steps, json.loads(line), first=number == 1)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise ValueError(f"{path}, line {number}: no record of a trace of version {VERSION} ({error})") from error
    return steps


def read_host(path: Path) -> tuple[str, str]:
    """The host of one rank's file: its name, and what tells it from others, which is the name where the file has nothing else.
    "" where it does not say. Raises ValueError for what is no trace."""
    with path.open(encoding="ascii") as file:
        header = json.loads(file.readline())
    name, host_id = (header.get(key, "") if isinstance(header, dict) else "" for key in ("host", "host_id"))
    name = name if isinstance(name, str) else ""
    return name, host_id if isinstance(host_id, str) and host_id else name


def _take(steps: list[StepTrace], fields: dict[str, Any], first: bool) -> None:
    kind = fields.pop("kind")
    if first or kind == "header":
        if not first or kind != "header" or fields["version"] != VERSION:
            raise ValueError(f"{kind} {fields.get('version', '')}")
    elif kind == "step":
        steps.append(StepTrace(**fields))
    elif kind == "span":
        steps[-1].spans.append(Span(**fields))
    elif kind == "wait":
        steps[-1].waits.append(Wait(**fields))
    elif kind == "count":
        steps[-1].counts.append(Count(**fields))
    else:
        raise ValueError(f"unknown kind {kind!r}")


# ---- summary


@dataclass(frozen=True)
class Summary:
    """Seconds and bytes of one step.

    busy_s, bytes: per resource; times are unions of intervals within the step, so two transfers at once count once.
    outside_s: the part of the step in which no resource was busy. waits_s: per event waited for, most first.
    unassigned_s: per name, work of threads that belongs to no resource.
    """

    step_s: float
    busy_s: dict[str, float]
    bytes: dict[str, int]
    outside_s: float
    waits_s: dict[str, float]
    unassigned_s: dict[str, float]

    def table(self) -> str:
        """For the terminal: resources, then the time outside them and the longest waits."""
        lines = [f"{'':12}{'busy s':>9}{'of step':>9}{'MB':>10}"]
        for resource, busy in self.busy_s.items():
            share, moved = busy / self.step_s, self.bytes[resource] / 1e6
            lines.append(f"{resource:12}{busy:9.3f}{share:9.1%}{moved:10.1f}")
        lines.append(f"{'outside':12}{self.outside_s:9.3f}{self.outside_s / self.step_s:9.1%}")
        for title, seconds in (("waits", self.waits_s), ("unassigned", self.unassigned_s)):
            shown = ", ".join(f"{name} {value:.3f}" for name, value in list(seconds.items())[:6])
            lines.append(f"{title:12}{sum(seconds.values()):9.3f}  {shown}".rstrip())
        return "\n".join(lines)


def summarize(step: StepTrace) -> Summary:
    """The step's seconds and bytes; intervals are cut to the step."""
    spans = defaultdict(list)
    for span in step.spans:
        spans[span.resource].append(span)
    unassigned = spans.pop("", [])
    resources = [*RESOURCES, *sorted(set(spans) - set(RESOURCES))]
    busy = {resource: [(span.start, span.end) for span in spans[resource]] for resource in resources}

    def union_s(intervals: Iterable[tuple[float, float]]) -> float:
        return union((max(start, step.start), min(end, step.end)) for start, end in intervals)

    return Summary(
        step_s=step.end - step.start,
        busy_s={resource: union_s(intervals) for resource, intervals in busy.items()},
        bytes={resource: sum(span.bytes for span in spans[resource]) for resource in resources},
        outside_s=step.end - step.start - union_s(interval for intervals in busy.values() for interval in intervals),
        waits_s=_seconds_by_name(step.waits),
        unassigned_s=_seconds_by_name(unassigned),
    )


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of (start, end); an interval that ends before it starts is empty."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        start = max(start, reached)
        if end > start:
            total += end - start
            reached = end
    return total


def _seconds_by_name(records: Iterable[Span | Wait]) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for record in records:
        seconds[record.name] += record.end - record.start
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def intersection(left: Iterable[tuple[float, float]], right: Iterable[tuple[float, float]]) -> float:
    """Length of what two unions of intervals have in common."""
    left, right = list(left), list(right)
    return union(left) + union(right) - union([*left, *right])


def record_s(folder: Path, records: int = 1000, rounds: int = 9) -> float:
    """Seconds that one record takes on this machine, the median of some rounds; writes a trace of its own into `folder` and
    removes it."""
    tracer = RecordingTracer(folder, 0)
    seconds = []
    for _ in range(rounds):
        start = now()
        for _ in range(records):
            tracer.span("compute", "x", start, start)
        seconds.append((now() - start) / records)
    tracer.path.unlink()
    return median(seconds)


def cost_share(step: StepTrace, each_s: float) -> float:
    """What tracing took in a step that is not the first, as a share of it; `each_s`: see `record_s`."""
    num_records = len(step.spans) + len(step.waits) + len(step.counts)
    return (num_records * each_s + step.write_s) / (step.end - step.start)


def optimizer_overlap(step: StepTrace) -> float | None:
    """Of the time in which the optimizer's steps moved state or computed, the share beside computation; None without any.

    State files are told from parameter files by the thread that completes their transfers: the optimizer's own.
    """
    work = [s for s in step.spans if s.resource and (s.resource == "adam" or "optimizer" in s.thread)]
    taken, compute = (
        [(max(span.start, step.start), min(span.end, step.end)) for span in spans if span.start < step.end]
        for spans in (work, [s for s in step.spans if s.resource == "compute"])
    )
    total = union(taken)
    return intersection(taken, compute) / total if total else None
