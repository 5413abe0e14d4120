"""Traces: what is written and read back, from several threads; what a summary makes of it; what it costs."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from harness import base_config, running, small_buffers
from models import MixerModel, token_batches
from toy import Log
from user_calls import build_model, host_config, initialize, ssd_config

from ds_vertical.errors import ConfigError
from ds_vertical.io.ticket import Ticket
from ds_vertical.schedule.events import Event, Op
from ds_vertical.schedule.executor import Executor
from ds_vertical.schedule.passes import TrainingStep, build_training
from ds_vertical.schedule.trace import (
    RESOURCES,
    RecordingTracer,
    StepTrace,
    Tracer,
    cost_share,
    intersection,
    now,
    optimizer_overlap,
    read_host,
    read_trace,
    record_s,
    summarize,
    union,
)


def recorded(folder: Path) -> list[StepTrace]:
    return read_trace(folder / "rank0.jsonl")


# ---- writing and reading


def test_records_are_read_back_as_they_were_made(tmp_path: Path) -> None:
    tracer = RecordingTracer(tmp_path, 0)
    with tracer.step():
        tracer.span("adam", "2STEP.e0", 1.0, 2.5, 64, issue=0.5)
        tracer.span("ssd_write", Event(Op.STEP, 2), 2.5, 3.0, 32)
        tracer.wait("fetch 1", "1F0", 2.0, 2.25)
        tracer.wait('fetch "1"\n', "größer", 0.1 + 0.2, 1e-17)
        tracer.count("host bytes", 7)
    with tracer.step():
        pass
    first, second = recorded(tmp_path)
    spans = [(s.resource, s.name, s.issue, s.start, s.end, s.bytes) for s in first.spans]
    assert spans == [
        ("adam", "2STEP.e0", 0.5, 1.0, 2.5, 64),
        ("ssd_write", "2STEP", 2.5, 2.5, 3.0, 32),
    ]
    waits = [("fetch 1", "1F0", 2.0, 2.25), ('fetch "1"\n', "größer", 0.1 + 0.2, 1e-17)]
    assert [(w.name, w.by, w.start, w.end) for w in first.waits] == waits
    assert [(c.name, c.value) for c in first.counts] == [("host bytes", 7)]
    assert first.start <= first.counts[0].time <= first.end <= second.start <= second.end
    assert (second.step, second.spans, second.waits, second.counts) == (2, [], [], [])


def test_a_header_tells_hosts_of_one_name_apart(tmp_path: Path) -> None:
    name = socket.gethostname()
    for host_id, told in (("clone boot1", "clone boot1"), ("", name)):
        assert read_host(RecordingTracer(tmp_path, 0, host_id).path) == (name, told)


def test_a_failing_step_is_written_too(tmp_path: Path) -> None:
    tracer = RecordingTracer(tmp_path, 0)
    with pytest.raises(ArithmeticError), tracer.step():
        tracer.span("compute", "0F0", now(), now())
        raise ArithmeticError
    assert [span.name for span in recorded(tmp_path)[0].spans] == ["0F0"]


def test_no_record_of_any_thread_is_lost(tmp_path: Path) -> None:
    tracer = RecordingTracer(tmp_path, 0)
    count, num_threads = 2000, 4

    def work() -> None:
        for index in range(count):
            tracer.span("adam", index, now(), now())

    threads = [threading.Thread(target=work, name=f"worker{index}") for index in range(num_threads)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        with tracer.step():  # writes while they record
            time.sleep(0.001)
    with tracer.step():
        pass
    spans = [span for step in recorded(tmp_path) for span in step.spans]
    for thread in threads:
        assert [span.name for span in spans if span.thread == thread.name] == [str(index) for index in range(count)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"kind":"step","step":1,"start":0,"end":1}\n', "line 1"),
        ('{"kind":"header","version":99,"rank":0}\n', "line 1"),
        ('{"kind":"header","version":2,"rank":0}\n{"kind":"wait"}\n', "line 2"),
        ('{"kind":"header","version":2,"rank":0}\n{"kind":"ste', "line 2"),
        ('{"kind":"header","version":2,"rank":0}\n{"kind":"new"}\n', "line 2.*'new'"),
    ],
)
def test_what_is_no_trace_is_refused_by_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "rank0.jsonl").write_text(text)
    with pytest.raises(ValueError, match=words):
        recorded(tmp_path)


# ---- summary


def test_busy_seconds_are_unions_and_the_rest_is_outside(tmp_path: Path) -> None:
    tracer = RecordingTracer(tmp_path, 0)
    with tracer.step():
        tracer.span("ssd_read", "a", 1, 3, 10)
        tracer.span("ssd_read", "b", 2, 4, 10)
        tracer.span("compute", "0F0", 3, 6)
        tracer.span("ssd_write", "c", 7.0, 7.5, 30, issue=5.0)  # busy from its start, not from its issue
        tracer.span("", "0STEP", 8, 9)
        tracer.span("adam", "late", 9, 12)
        tracer.wait("a", "0F0", 1, 2)
        tracer.wait("c", "end", 7.0, 7.5)
        tracer.wait("a", "1F0", 2.5, 3)
    step = recorded(tmp_path)[0]
    step.start, step.end = 0.0, 10.0
    summary = summarize(step)
    expected = dict.fromkeys(RESOURCES, 0.0)
    assert summary.busy_s == expected | {"ssd_read": 3.0, "compute": 3.0, "ssd_write": 0.5, "adam": 1.0}
    assert (summary.bytes["ssd_read"], summary.bytes["ssd_write"]) == (20, 30)
    assert summary.outside_s == 10 - (5 + 0.5 + 1)  # 1 to 6, 7 to 7.5, 9 to the step's end
    assert list(summary.waits_s.items()) == [("a", 1.5), ("c", 0.5)]
    assert summary.unassigned_s == {"0STEP": 1.0}
    assert "30.0%" in summary.table() and "0STEP 1.000" in summary.table()


def test_union_of_intervals() -> None:
    assert union([]) == 0
    assert union([(5, 6), (1, 2), (1, 4), (2, 3), (4, 5), (9, 8)]) == 5


# ---- the executor


class SlowFetches(Log):
    """A fetch takes 20 ms."""

    def issue(self, event: Event) -> Ticket:
        self.compute(event)
        return Ticket(f"fetch {event.layer}", lambda: time.sleep(0.02), 1000)


def test_every_event_of_a_schedule_and_every_wait_is_there(tmp_path: Path) -> None:
    tracer, schedule = RecordingTracer(tmp_path, 0), build_training(TrainingStep(2, 2, window=1))
    with tracer.step():
        Executor(SlowFetches().handlers(), tracer=tracer).run(schedule)
    step = recorded(tmp_path)[0]
    handled = step.spans
    assert [span.name for span in handled] == [str(event) for event in schedule.events]
    assert {span.name for span in handled if not span.resource} >= {"0FETCH", "0RELEASE", "0STEP"}
    assert [(wait.name, wait.by) for wait in step.waits] == [("fetch pre", "preF0"), ("fetch 0", "0F0"), ("fetch 1", "1F0")]
    first = next(span for span in handled if span.name == "preF0")
    assert first.issue <= step.waits[0].start <= step.waits[0].end <= first.start <= first.end
    assert sum(summarize(step).waits_s.values()) >= 3 * 0.02


def test_a_trace_costs_less_than_a_hundredth_of_a_step(tmp_path: Path) -> None:
    schedule = build_training(
        TrainingStep(32, 16, window=2)
    )  # a Llama 8B: the least that an event takes there is a few milliseconds
    event_s = 0.003
    assert len(schedule.events) > 1000
    tracer = RecordingTracer(tmp_path, 0)
    seconds: dict[Tracer, list[float]] = {Tracer(): [], tracer: []}
    for _ in range(5):
        for each, measured in seconds.items():
            start = time.thread_time()  # not the load of others
            with each.step():
                Executor(Log().handlers(), tracer=each).run(schedule)
            measured.append(time.thread_time() - start)
    off, on = (min(measured) for measured in seconds.values())
    assert len(recorded(tmp_path)[0].spans) >= len(schedule.events)
    assert (on - off) / (len(schedule.events) * event_s) < 0.01


# ---- the engine


def test_the_engine_writes_each_step(tmp_path: Path) -> None:
    config = ssd_config(tmp_path / "ssd", section={"seed": 5, "trace": str(tmp_path / "trace")})
    with running(config, build_model, vertical=True) as (engine, _):
        for micro_batches in token_batches(2, 2):
            engine.train_batch(iter(micro_batches))
            engine.eval_batch(iter(micro_batches))  # no part of any step
    steps = recorded(tmp_path / "trace")
    assert [step.step for step in steps] == [1, 2]
    for step in steps:
        names = [span.name for span in step.spans]
        assert [name for name in names if name in ("0F0", "sufHEAD1", "0B1", "NORM")] == ["0F0", "sufHEAD1", "0B1", "NORM"]
        summary = summarize(step)
        assert 0 < summary.busy_s["compute"] < summary.step_s and summary.bytes["ssd_read"] > 0
        assert 0 <= summary.outside_s < summary.step_s


@pytest.mark.parametrize("delay", [0.0, 0.5, 1.0])
def test_without_overlap_no_two_resources_work_at_a_time(tmp_path: Path, delay: float) -> None:
    """Not between the pieces of one optimizer step either. With overlap they do. (A piece's span of CPU Adam ends when its
    writes have been issued, so these two are not held against each other.)"""
    shared, pairs = {}, set(itertools.combinations(RESOURCES, 2)) - {("ssd_write", "adam")}
    for overlap in (True, False):
        folder = tmp_path / str(overlap)
        section = {"overlap": overlap, "optimizer_delay": delay, "blocks_per_layer": 3, "trace": str(folder)}
        pieces = {"sub_group_size": 200_000, "section": section}  # six in a layer, more than there are slots
        made = base_config(tmp_path / "ssd", num_micro_batches=2, dtype="fp32", clip=0.0, **pieces)
        with running(small_buffers(made), partial(MixerModel, 6), vertical=True) as (engine, _):
            for micro_batches in token_batches(3, 2):
                engine.train_batch(iter(micro_batches))
        spans = [span for step in recorded(folder) for span in step.spans if span.resource]
        assert {span.resource for span in spans} >= {"compute", "ssd_read", "ssd_write", "adam"}
        busy = {resource: [(s.start, s.end) for s in spans if s.resource == resource] for resource in RESOURCES}
        shared[overlap] = sum(intersection(busy[a], busy[b]) for a, b in pairs)
    assert shared[True] > 0 == shared[False]


def test_a_trace_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="vertical_schedule.trace: got .*file.*cannot write there"):
        initialize(config=host_config(trace=str(tmp_path / "file")))


# ---- overlap and cost


def test_what_two_unions_have_in_common() -> None:
    assert intersection([(0, 2), (1, 3)], [(2.5, 5)]) == 0.5
    assert intersection([(0, 1)], [(2, 3)]) == 0 == intersection([], [(2, 3)])


def test_the_optimizers_share_beside_computation(tmp_path: Path) -> None:
    tracer = RecordingTracer(tmp_path, 0)
    with tracer.step():
        begin = now()
        while now() - begin < 0.01:
            pass

        def span(resource: str, name: str, start_ms: float, end_ms: float) -> None:
            tracer.span(resource, name, begin + start_ms / 1e3, begin + end_ms / 1e3)

        span("compute", "0F0", 0.0, 4.0)
        span("ssd_read", "a parameter's file", 0.0, 8.0)
        worker = threading.Thread(target=lambda: span("ssd_read", "state", 2.0, 4.0), name="ds_vertical optimizer")
        worker.start()
        worker.join()
        span("adam", "0STEP", 4.0, 6.0)
        span("adam", "pre STEP.d0", 2000.0, 9000.0)  # behind the step, in which the process may have been stopped
    with tracer.step():
        span("compute", "0F0", 0.0, 4.0)
    first, second = recorded(tmp_path)
    assert optimizer_overlap(first) == pytest.approx(0.5) and optimizer_overlap(second) is None


def test_tracing_knows_its_cost(tmp_path: Path) -> None:
    tracer = RecordingTracer(tmp_path, 0)
    for _ in range(2):
        with tracer.step():
            tracer.span("compute", "0F0", now(), now())
    first, second = recorded(tmp_path)
    assert first.write_s == 0 < second.write_s
    assert cost_share(second, 0.0) == second.write_s / (second.end - second.start) < cost_share(second, 1e-3)
    assert record_s(tmp_path / "own", 10) > 0 and list((tmp_path / "own").iterdir()) == []
