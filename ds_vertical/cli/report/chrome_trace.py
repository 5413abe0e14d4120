"""Timelines as Chrome's trace events (JSON), for ui.perfetto.dev and chrome://tracing.

One process per rank; in it a row ("thread") for the steps, one for waits, one per resource, one for what the issuing thread
does besides, and a counter track per counter. Times are microseconds from the first record. Rows hold complete events (X) that
never overlap: where a resource has several transfers under way, each further one is on a row below ("ssd_read +1").
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from ds_vertical.cli.common import JsonObject
from ds_vertical.cli.report.colors import ISSUE_STREAM, OTHER_STREAM, STEP_STREAM, STREAMS, WAIT_STREAM
from ds_vertical.cli.report.timeline import Timeline, kind_of
from ds_vertical.schedule.trace import RESOURCES, Span, StepTrace, Wait

TraceRecord = Span | Wait | StepTrace

_STEPS: Final = "step"
_WAITS: Final = "wait"
_ISSUING: Final = "issuing"
_MICRO: Final = 1e6


def to_json(lines: Sequence[Timeline]) -> str:
    """The text of the whole file. Raises ValueError for timelines without a step."""
    return json.dumps({"traceEvents": events(lines), "displayTimeUnit": "ms", "otherData": _about(lines)}, allow_nan=False)


def events(lines: Sequence[Timeline]) -> list[JsonObject]:
    """The trace events: metadata first, then the others in order of time. Raises ValueError for timelines without a step."""
    if not any(line.steps for line in lines):
        raise ValueError("no step to export")
    zero = min(_first(step) for line in lines for step in line.steps)
    metadata: list[JsonObject] = []
    timed: list[JsonObject] = []
    for line in lines:
        rows = _rows(line)
        metadata += _metadata(line, list(rows))
        for row, (name, records) in enumerate(rows.items()):
            timed += [_complete(line.rank, row, name, record, zero) for record in records]
        timed += [
            {"ph": "C", "pid": line.rank, "tid": 0, "ts": _micros(count.time, zero), "name": f"{count.name} bytes"}
            | {"args": {"bytes": count.value}}
            for step in line.steps
            for count in step.counts
        ]
    return metadata + sorted(timed, key=lambda event: event["ts"])


def _about(lines: Sequence[Timeline]) -> JsonObject:
    return {"run": lines[0].name, "kind": lines[0].kind, "ranks": [line.rank for line in lines]}


def _first(step: StepTrace) -> float:
    starts = (record.start for record in (*step.spans, *step.waits))
    return min([step.start, *starts, *(count.time for count in step.counts)])


def _micros(time: float, zero: float) -> float:
    return round((time - zero) * _MICRO, 3)


# ---- rows


def _rows(line: Timeline) -> dict[str, Sequence[TraceRecord]]:
    """Row name -> its records, disjoint and in order; rows in the order in which they are shown."""
    spans: dict[str, list[Span]] = {resource: [] for resource in RESOURCES}
    waits: list[Wait] = []
    for step in line.steps:
        waits += step.waits
        for span in step.spans:
            spans.setdefault(span.resource or _ISSUING, []).append(span)
    issuing = spans.pop(_ISSUING, [])
    rows: dict[str, Sequence[TraceRecord]] = {_STEPS: list(line.steps)}
    for name, records in ((_WAITS, waits), *spans.items(), (_ISSUING, issuing)):
        for index, row in enumerate(disjoint(records)):
            rows[f"{name} +{index}" if index else name] = row
    return rows


def disjoint(records: Iterable[Span | Wait]) -> Iterator[list[Span | Wait]]:
    """Puts the records on as few rows as hold them without an overlap."""
    rows: list[list[Span | Wait]] = []
    for record in sorted(records, key=lambda record: (record.start, record.end)):
        row = next((row for row in rows if row[-1].end <= record.start), None)
        if row is None:
            rows.append([record])
        else:
            row.append(record)
    yield from rows


# ---- events


def _metadata(line: Timeline, names: Sequence[str]) -> list[JsonObject]:
    pid = line.rank
    made = [_meta(pid, 0, "process_name", name=f"rank {pid}, {line.kind}"), _meta(pid, 0, "process_sort_index", sort_index=pid)]
    for row, name in enumerate(names):
        made += [_meta(pid, row, "thread_name", name=name), _meta(pid, row, "thread_sort_index", sort_index=row)]
    return made


def _meta(pid: int, tid: int, what: str, **args: object) -> JsonObject:
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": what, "args": args}


def _complete(pid: int, row: int, row_name: str, record: TraceRecord, zero: float) -> JsonObject:
    start, end = _micros(record.start, zero), _micros(record.end, zero)
    name, stream, args = _described(record)
    category, colour = stream
    event = {"ph": "X", "pid": pid, "tid": row, "ts": start, "dur": round(end - start, 3), "name": name}
    return event | {"cat": category, "cname": colour, "args": args | {"step": record.step}}


def _described(record: TraceRecord) -> tuple[str, tuple[str, str], JsonObject]:
    """A record's name, category and colour, and what else there is to say of it."""
    if isinstance(record, StepTrace):
        return f"step {record.step}", STEP_STREAM, {}
    if isinstance(record, Wait):
        return record.name, WAIT_STREAM, {"by": record.by}
    if not record.resource:
        return record.name, ISSUE_STREAM, {}
    kind, seconds = kind_of(record), record.end - record.start
    args: JsonObject = {"kind": kind}
    if record.issue < record.start:
        args["issued_us_earlier"] = round((record.start - record.issue) * _MICRO, 3)
    if record.bytes:
        args |= {"bytes": record.bytes} | ({"GB_per_s": round(record.bytes / seconds / 1e9, 4)} if seconds > 0 else {})
    return record.name, STREAMS.get(kind, OTHER_STREAM), args
