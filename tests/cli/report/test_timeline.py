"""Timelines, measured and simulated, in one form: what is exported, why nothing was computed, what the command says.

`recorded/ab` was written by a real run: see `recorded/README.md`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import places
import pytest
from harness import base_config, running, small_buffers
from models import MixerModel, token_batches

from ds_vertical.cli import trace
from ds_vertical.cli.report.chrome_trace import disjoint, events, to_json
from ds_vertical.cli.report.run_folder import open_folder
from ds_vertical.cli.report.stalls import BETWEEN, ISSUING, reasons, stalls
from ds_vertical.cli.report.timeline import MAIN, OPTIMIZER, Timeline, by_time, kind_of, simulated, work_by_kind
from ds_vertical.planner.simulate import SimulationSettings, simulate
from ds_vertical.schedule.events import parse_event
from ds_vertical.schedule.trace import RESOURCES, Span, StepTrace, Wait, optimizer_overlap, read_trace, summarize, union

RECORDED = places.RECORDED / "ab"
KINDS = ("measured", "simulated")
MICRO = 1e-6


def line_of(kind: str) -> Timeline:
    folder = open_folder(RECORDED)
    if kind == "measured":
        return folder.timelines()[0]
    assert folder.account is not None and folder.limits is not None
    return simulated(folder.account, folder.limits.machine, folder.limits.rates, name="ab", steps=3)


@pytest.fixture(scope="module")
def lines() -> dict[str, Timeline]:
    return {kind: line_of(kind) for kind in KINDS}


def rows_of(found: Iterable[Mapping[str, Any]]) -> dict[tuple[int, int], str]:
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in found if event["name"] == "thread_name"}


def complete(found: Sequence[Mapping[str, Any]], row: str) -> list[Mapping[str, Any]]:
    """The X events of a row and of those that continue it."""
    rows = {key for key, name in rows_of(found).items() if name.partition(" +")[0] == row}
    return [event for event in found if event["ph"] == "X" and (event["pid"], event["tid"]) in rows]


# ---- the export


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_is_what_perfetto_reads(lines: dict[str, Timeline], kind: str) -> None:
    content = json.loads(to_json([lines[kind]]))
    assert content["displayTimeUnit"] == "ms" and content["otherData"]["kind"] == kind
    found = content["traceEvents"]
    assert {event["ph"] for event in found} == {"M", "X", "C"}
    rows, processes = rows_of(found), [event for event in found if event["name"] == "process_name"]
    assert [event["args"]["name"] for event in processes] == [f"rank 0, {kind}"]
    assert set(rows.values()) >= {"step", "wait", "compute", "ssd_read", "ssd_write", "adam"}
    times = [event["ts"] for event in found if event["ph"] != "M"]
    assert times == sorted(times) and times[0] == 0
    for event in found:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0 and (event["pid"], event["tid"]) in rows
            assert event["name"] and event["cat"] and event["cname"]
        elif event["ph"] == "C":
            assert event["name"] in ("host bytes", "device bytes", "ssd bytes") and event["args"]["bytes"] >= 0


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_on_a_row_overlaps(lines: dict[str, Timeline], kind: str) -> None:
    found = events([lines[kind]])
    for key, name in rows_of(found).items():
        row = [event for event in found if event["ph"] == "X" and (event["pid"], event["tid"]) == key]
        assert row, f"an empty row {name}"
        for before, after in pairwise(row):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-4, (name, before, after)


@pytest.mark.parametrize("kind", KINDS)
def test_everything_comes_back_from_the_file(lines: dict[str, Timeline], kind: str) -> None:
    line, found = lines[kind], events([lines[kind]])
    first = min(event["ts"] for event in complete(found, "step"))
    zero = line.steps[0].start - first * MICRO
    rows = rows_of(found)
    back = [
        (
            rows[event["pid"], event["tid"]].partition(" +")[0],
            event["name"],
            event["args"]["step"],
            event["args"].get("bytes", 0),
        )
        + (round(zero + event["ts"] * MICRO, 6), round(zero + (event["ts"] + event["dur"]) * MICRO, 6))
        for event in found
        if event["ph"] == "X"
    ]
    spans = [
        (span.resource or "issuing", span.name, span.step, span.bytes, span.start, span.end)
        for s in line.steps
        for span in s.spans
    ]
    waits = [("wait", wait.name, wait.step, 0, wait.start, wait.end) for step in line.steps for wait in step.waits]
    steps = [("step", f"step {step.step}", step.step, 0, step.start, step.end) for step in line.steps]
    there = sorted(spans + waits + steps, key=lambda record: (record[:4], record[4]))
    for left, right in zip(sorted(back, key=lambda record: (record[:4], record[4])), there, strict=True):
        assert left[:4] == right[:4] and left[4:] == pytest.approx(right[4:], abs=2e-6)
    counted = [(event["name"], event["args"]["bytes"]) for event in found if event["ph"] == "C"]
    assert sorted(counted) == sorted((f"{count.name} bytes", count.value) for step in line.steps for count in step.counts)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_busy_as_long_as_the_summary_says(lines: dict[str, Timeline], kind: str) -> None:
    found = events([lines[kind]])
    bounds = {event["args"]["step"]: (event["ts"], event["ts"] + event["dur"]) for event in complete(found, "step")}
    for step in lines[kind].steps:
        start, end = bounds[step.step]
        for resource, busy_s in summarize(step).busy_s.items():
            own = [event for event in complete(found, resource) if event["args"]["step"] == step.step]
            cut = ((max(e["ts"], start), min(e["ts"] + e["dur"], end)) for e in own)
            assert union(cut) * MICRO == pytest.approx(busy_s, abs=2e-6 * (len(own) + 1)), (step.step, resource)


def test_a_simulated_file_has_the_form_of_a_measured_one(lines: dict[str, Timeline]) -> None:
    keys = {}
    for kind in KINDS:
        found = [event for event in events([lines[kind]]) if event["ph"] == "X"]
        keys[kind] = {frozenset(event) for event in found}
        kinds = {event["args"]["kind"]: event["cat"] for event in found if "kind" in event["args"]}
        assert kinds["F"] == "forward" and kinds["FETCH"] == "parameters" and kinds["STEP read"] == "state", kind
    assert keys["measured"] == keys["simulated"]


def test_each_rank_is_a_process(tmp_path: Path) -> None:
    lines = by_rank(tmp_path, 2)
    found = events(lines)
    names = [event["args"]["name"] for event in found if event["name"] == "process_name"]
    assert names == ["rank 0, measured", "rank 1, measured"]
    each = [sum(event["pid"] == rank and event["ph"] == "X" for event in found) for rank in (0, 1)]
    assert each[0] == each[1] > 100


def by_rank(folder: Path, count: int) -> list[Timeline]:
    """The recorded trace, as if so many ranks had written it."""
    for rank in range(count):
        shutil.copy(next(RECORDED.glob("*.trace")) / "rank0.jsonl", folder / f"rank{rank}.jsonl")
    return open_folder(folder).timelines()


def test_no_step_is_no_file() -> None:
    with pytest.raises(ValueError, match="no step"):
        events([Timeline("x", "measured", 0, ())])


def test_as_few_rows_as_hold_what_overlaps() -> None:
    spans = [span("ssd_read", "a", start, end) for start, end in ((0, 4), (1, 2), (2, 3), (1, 5), (4, 6))]
    assert [[(s.start, s.end) for s in row] for row in disjoint(spans)] == [[(0, 4), (4, 6)], [(1, 2), (2, 3)], [(1, 5)]]
    assert list(disjoint([])) == []


# ---- kinds of work


def span(resource: str, name: str, start: float, end: float, num_bytes: int = 0, thread: str = MAIN) -> Span:
    return Span(1, thread, resource, name, start, start, end, num_bytes)


@pytest.mark.parametrize(
    ("resource", "name", "kind"),
    [
        ("compute", "3F0", "F"),
        ("compute", "preB1", "preB"),
        ("compute", "sufHEAD0", "HEAD"),
        ("compute", "1REDUCE", "REDUCE"),
        ("compute", "preREDUCE", "preREDUCE"),
        ("compute", "sufREDUCE", "sufREDUCE"),
        ("compute", "NORM", "NORM"),
        ("ssd_read", "5_param.tensor.swp", "FETCH"),
        ("ssd_read", "3FETCH", "FETCH"),
        ("ssd_read", "0FETCH@+1", "FETCH"),
        ("ssd_write", "5_param.tensor.swp", "STEP write"),
        ("ssd_read", "exp_avg-1_9.tensor.swp", "STEP read"),
        ("ssd_read", "2STEP.d0@-1", "STEP read"),
        ("ssd_write", "2STEP.e0", "STEP write"),
        ("ssd_read", "gradients.swp", "STEP read"),
        ("ssd_write", "gradients.swp", "HOLD"),
        ("ssd_write", "2HOLD", "HOLD"),
        ("ssd_write", "rank0.bin", "SAVE"),
        ("ssd_read", "rank12.bin", "LOAD"),
        ("ssd_read", "1LOAD0", "LOAD"),
        ("ssd_write", "1GSAVE0", "SAVE"),
        ("ssd_write", "kept0.bin", "KSAVE"),
        ("ssd_read", "kept3.bin", "KLOAD"),
        ("ssd_write", "2KSAVE1", "KSAVE"),
        ("ssd_read", "2KLOAD1", "KLOAD"),
        ("copy_in", "2KLOAD1", "KLOAD copy"),
        ("ssd_read", "5_param.tensor.swp.ssd0", "FETCH"),
        ("ssd_read", "5_param.tensor.swp.3.ssd1", "FETCH"),
        ("ssd_write", "5_param.tensor.swp.ssd12", "STEP write"),
        ("ssd_read", "exp_avg-1_9.tensor.swp.ssd1", "STEP read"),
        ("ssd_read", "gradients.swp.ssd0", "STEP read"),
        ("ssd_write", "gradients.swp.ssd1", "HOLD"),
        ("ssd_write", "rank0.bin.ssd0", "SAVE"),
        ("ssd_read", "rank0.bin.ssd1", "LOAD"),
        ("ssd_write", "kept0.bin.ssd0", "KSAVE"),
        ("ssd_read", "kept0.bin.ssd1", "KLOAD"),
        ("adam", "step 0, chunk 1 from 4096", "STEP adam"),
        ("adam", "0STEP.e0", "STEP adam"),
        ("copy_in", "3FETCH", "FETCH copy"),
    ],
)
def test_a_span_is_of_the_kind_of_its_event_or_file(resource: str, name: str, kind: str) -> None:
    assert kind_of(span(resource, name, 0, 1)) == kind


def test_bytes_over_a_steps_end_are_divided() -> None:
    step = StepTrace(1, 2.0, 6.0, spans=[span("ssd_read", "0FETCH", 1, 3, 100), span("ssd_read", "0FETCH", 5, 9, 400)])
    work = work_by_kind(step)["FETCH"]
    assert (work.seconds, work.bytes, work.count) == (2.0, 150, 2)


def test_the_run_moved_what_the_simulation_moves(lines: dict[str, Timeline]) -> None:
    measured, predicted = (work_by_kind(by_time(lines[kind].steps)[-2]) for kind in KINDS)
    later = lines["measured"].steps[1:]  # reads ahead are between two steps' times, but are recorded with a step
    for kind in ("FETCH", "STEP read", "STEP write"):
        moved = sum(s.bytes for step in later for s in step.spans if s.resource.startswith("ssd") and kind_of(s) == kind)
        assert moved / len(later) == pytest.approx(predicted[kind].bytes, rel=0.1), kind
    for kind in ("F", "B", "HEAD", "preF", "preB", "REDUCE"):
        assert measured[kind].count == predicted[kind].count, kind


def test_records_go_to_the_step_whose_time_they_are_of() -> None:
    first = StepTrace(1, 0.0, 10.0, spans=[span("ssd_read", "a", 1, 2)])
    late = [span("ssd_write", "b", 8, 9), span("ssd_write", "c", 9.5, 11.5), span("ssd_write", "d", 12, 13)]
    second = StepTrace(2, 11.0, 20.0, spans=late, waits=[Wait(2, MAIN, "fetch 0", "0F0", 12, 13)])
    by = by_time([first, second])
    assert [s.name for s in by[0].spans] == ["a", "b", "c"] and [s.name for s in by[1].spans] == ["c", "d"]
    assert by[0].waits == [] and by[1].waits == second.waits


# ---- simulated


def test_a_simulated_step_lasts_as_long_as_the_simulator_says(lines: dict[str, Timeline]) -> None:
    folder = open_folder(RECORDED)
    account, limits = folder.account, folder.limits
    assert account is not None and limits is not None
    ran = account.steps[-1]
    shape, slots = account.shape(ran, limits.rates), account.facts.slots
    line = simulate(ran.schedule, limits.machine, shape, SimulationSettings(steps=4, slots=slots), parts=account.parts(ran))
    steps = lines["simulated"].steps
    assert [step.step for step in steps] == [1, 2, 3]
    assert steps[-1].end - steps[-1].start == pytest.approx(line.step_s, rel=0.1)
    for step in steps[:-1]:
        after = steps[step.step]
        assert step.end == after.start
    busy = {lane: sum(summarize(step).busy_s[lane] for step in by_time(steps)) for lane in RESOURCES}
    for lane, seconds in line.busy_s.items():
        assert busy[lane] == pytest.approx(seconds * 3 / 4, rel=0.2), lane
    assert all(count.name in ("host", "ssd") for step in steps for count in step.counts)  # one memory


def test_a_simulated_wait_is_where_nothing_is_computed(lines: dict[str, Timeline]) -> None:
    found = [wait for step in lines["simulated"].steps for wait in step.waits]
    assert found and {wait.name.split()[0] for wait in found} <= {"fetch", "step"}
    for step in lines["simulated"].steps:
        compute = [(s.start, s.end) for s in step.spans if s.resource == "compute"]
        for wait in step.waits:
            assert union([*compute, (wait.start, wait.end)]) == pytest.approx(union(compute) + wait.end - wait.start)
            assert str(parse_event(wait.by)) == wait.by
    overlap = optimizer_overlap(lines["simulated"].steps[-1])
    assert overlap is not None and 0 < overlap <= 1


# ---- stalls


@pytest.mark.parametrize("kind", KINDS)
def test_all_time_without_computation_has_one_cause(lines: dict[str, Timeline], kind: str) -> None:
    for step in by_time(lines[kind].steps):
        found, summary = stalls(step), summarize(step)
        idle = summary.step_s - summary.busy_s["compute"]
        assert sum(stall.seconds for stall in found) == pytest.approx(idle, abs=1e-6)
        assert all(before.end <= after.start for before, after in pairwise(found))
        assert sum(reason.seconds for reason in reasons(found)) == pytest.approx(idle, abs=1e-6)
        waited = sum(stall.seconds for stall in found if stall.by)
        assert waited <= sum(summary.waits_s.values()) + 1e-6
        # whoever waited for a read, waited while something was read
        reads = [stall for stall in found if stall.cause.startswith("fetch") and stall.seconds > 5e-3]
        assert all(stall.resource == "ssd_read" for stall in reads)


def test_gaps_are_put_to_what_was_waited_for_and_to_what_that_kept_busy() -> None:
    spans = [
        span("compute", "preF0", 1, 2),
        span("compute", "0F0", 5, 8),
        span("compute", "0B0", 10, 12),
        span("ssd_read", "0_param.tensor.swp", 1.5, 4),
        span("adam", "step 0", 2, 5, thread=OPTIMIZER),  # longer than the fetch, but not what it waits for
        span("ssd_write", "1_9.tensor.swp", 8, 9.5, thread=OPTIMIZER),
        span("ssd_read", "9_param.tensor.swp", 8, 8.25),
        span("", "0FETCH", 4.5, 4.75),
        span("", "elsewhere", 0, 1, thread="another"),
    ]
    waits = [
        Wait(1, MAIN, "fetch 0", "0F0", 2, 4.5),
        Wait(1, MAIN, "step 0", "0B0", 7.5, 9.75),
        Wait(1, "another", "fetch 7", "7F0", 9.75, 10),
    ]
    found = stalls(StepTrace(1, 0.5, 12.5, spans=spans, waits=waits))
    assert [(s.start, s.end, s.cause, s.by, s.resource) for s in found] == [
        (0.5, 1, BETWEEN, "", ""),
        (2, 4.5, "fetch 0", "0F0", "ssd_read"),
        (4.5, 4.75, "0FETCH", "", ISSUING),
        (4.75, 5, BETWEEN, "", ""),
        (8, 9.75, "step 0", "0B0", "ssd_write"),
        (9.75, 10, BETWEEN, "", ""),
        (12, 12.5, BETWEEN, "", ""),
    ]
    by = {(reason.what, reason.resource): (reason.seconds, reason.count) for reason in reasons(found)}
    assert by == {
        ("fetch", "ssd_read"): (2.5, 1),
        ("step", "ssd_write"): (1.75, 1),
        (BETWEEN, ""): (1.5, 4),
        (ISSUING, ""): (0.25, 1),
    }


def test_what_is_kept_is_waited_for_under_a_name_of_its_own() -> None:
    spans = [span("compute", "1B0", 0, 1), span("ssd_read", "kept0.bin", 1, 2), span("ssd_read", "rank0.bin", 2, 5)]
    waits = [Wait(1, MAIN, "load kept 1 of 0", "1B0", 1, 2), Wait(1, MAIN, "load 1 of 0", "1B0", 2, 5)]
    found = reasons(stalls(StepTrace(1, 0, 5, spans=spans, waits=waits)))
    assert [(reason.what, reason.seconds) for reason in found] == [("load", 3), ("load kept", 1)]


# ---- counters of a real run


@pytest.fixture(scope="module")
def own_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one's own that was told to trace, and nothing else."""
    folder = tmp_path_factory.mktemp("own")
    config = small_buffers(base_config(folder, num_micro_batches=2, clip=0.0), 1_200_000)
    config["vertical_schedule"]["trace"] = str(folder / "trace")
    with running(config, lambda: MixerModel(3, 768, vocab=61), vertical=True) as (engine, _):
        for batches in token_batches(3, 2, vocab=61):
            engine.train_batch(iter(batches))
    return folder


def test_the_engine_counts_its_memory(own_run: Path) -> None:
    with open("/proc/meminfo", encoding="ascii") as file:
        machine = 1024 * int(file.readline().split()[1])
    for step in read_trace(own_run / "trace" / "rank0.jsonl"):
        host = [count for count in step.counts if count.name == "host"]
        assert len(host) > 3 and all(10_000_000 < count.value < machine for count in host)
        assert all(step.start <= count.time <= step.end for count in host)
        values = [count.value for count in host]
        assert all(before != after for before, after in pairwise(values))  # a record per change


def test_a_run_of_ones_own_is_exported(own_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "own.json"
    assert trace.main([str(own_run / "trace"), "--out", str(out), "--steps", "2:3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    content = json.loads(out.read_text())
    assert told["events"] == len(content["traceEvents"]) and [each["step"] for each in told["steps"]] == [2, 3]
    assert [event["name"] for event in complete(content["traceEvents"], "step")] == ["step 2", "step 3"]
    names = [event["name"] for event in complete(content["traceEvents"], "compute")]
    assert names.count("0B1") == 2 and names.count("sufHEAD0") == 2
    assert any(event["ph"] == "C" and event["name"] == "host bytes" for event in content["traceEvents"])


# ---- the command


@pytest.mark.parametrize("simulate", [False, True])
def test_the_command_writes_a_file_and_says_what_is_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, simulate: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    assert trace.main([str(RECORDED), *(["--simulate"] if simulate else [])]) == 0
    out = tmp_path / ("ab.simulated.json" if simulate else "ab.json")
    said = capsys.readouterr().out
    assert f"written: {out.name}" in said and "compute" in said and ("simulated" in said) == simulate
    assert json.loads(out.read_text())["otherData"]["kind"] == KINDS[simulate]


def test_another_machine_may_be_simulated(tmp_path: Path) -> None:
    slow = json.loads((RECORDED / "limits.json").read_text())
    for way in ("read", "write"):
        slow["machine"][f"ssd_{way}_bytes_per_s"] /= 100
        slow["machine"][f"ssd_{way}_together_bytes_per_s"] /= 100
    (tmp_path / "slow.json").write_text(json.dumps(slow))
    options = trace._parser().parse_args([str(RECORDED), "--simulate", "--machine", str(tmp_path / "slow.json")])
    (line,) = trace.timelines(options)
    own = line_of("simulated").steps[-1]
    assert line.steps[-1].end - line.steps[-1].start > 2 * (own.end - own.start)


def broken(tmp_path: Path, name: str) -> Path:
    """A folder with this fault."""
    folder = tmp_path / name
    if name == "absent":
        return folder
    if name in ("truncated", "binary"):
        shutil.copytree(next(RECORDED.glob("*.trace")), folder)
        path = folder / "rank0.jsonl"
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] if name == "truncated" else data + b"\xff\xfe")
        return folder
    folder.mkdir()
    if name == "a file":
        folder.rmdir()
        folder.write_text("")
    if name == "no steps":
        (folder / "rank0.jsonl").write_text('{"kind": "header", "version": 2, "rank": 0, "date": ""}\n')
    if name == "no limits":
        shutil.copytree(next(RECORDED.glob("traced*.metrics")), folder / "traced.0.metrics")
    return folder


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("absent", [], "no such folder; name a folder that"),
        ("a file", [], "a file; name a folder that"),
        ("empty", [], "no trace, no step records and no ab.json in it"),
        ("truncated", [], "rank0.jsonl, line .*no record of a trace.*remove the line"),
        ("binary", [], "rank0.jsonl.*remove the line"),
        ("no steps", [], "no step in its trace; run again"),
        ("no limits", [], "no trace in it; add --trace"),
        ("no limits", ["--simulate"], "no limits.json in it; name one with --machine"),
        ("no steps", ["--simulate"], "no account of a schedule in it"),
    ],
)
def test_a_folder_that_does_not_do_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, options: list[str], words: str
) -> None:
    refused(capsys, [str(broken(tmp_path, name)), *options], words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--steps", "3:2"], "--steps 3:2: write A:B with 1 <= A <= B"),
        (["--steps", "x"], "--steps x: write A:B"),
        (["--steps", "99"], "--steps 99: none of them in .*; write 1:"),
        (["--machine", "x.json"], "it is for --simulate"),
        (["--simulate", "--machine", "nosuch.json"], "--machine nosuch.json: no such file; name one"),
        (["--out", "/proc/nosuch/x.json"], "--out /proc/nosuch/x.json: cannot be written"),
    ],
)
def test_options_that_make_no_sense_are_refused(capsys: pytest.CaptureFixture[str], options: list[str], words: str) -> None:
    refused(capsys, [str(RECORDED), *options], words)


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert trace.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    assert re.search(words, captured.err) and captured.err.startswith("ds-vertical trace: ") and captured.err.count("\n") == 1


def test_steps_are_chosen_by_number(lines: dict[str, Timeline]) -> None:
    chosen = lines["measured"].within(2, 3)
    assert [step.step for step in chosen.steps] == [2, 3]
    assert chosen == replace(lines["measured"], steps=lines["measured"].steps[1:3])
