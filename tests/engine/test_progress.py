"""The line below a step's output, and the scalars for DeepSpeed's monitor: what they say, and that they leave no trace."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import pytest
import torch
from ab_runs import FACTS
from harness import base_config, run_arm, small_buffers
from models import token_batches
from own_cache import own_cache
from terminal import Terminal, terminal
from tqdm import tqdm
from user_calls import build_model, host_config, initialize

from ds_vertical.engine import progress
from ds_vertical.engine.machine_cache import keep_links
from ds_vertical.engine.progress import WINDOW, BusyMeter, Goal, Goals, Pace, Reading, StatusLine, fit, layer_rates
from ds_vertical.engine.run_log import facts_of
from ds_vertical.io import contention
from ds_vertical.planner.bound import step_bound
from ds_vertical.planner.machine import Machine
from ds_vertical.planner.network import Network
from ds_vertical.planner.run_record import ExecutedStep
from ds_vertical.schedule.trace import RecordingTracer, read_trace, summarize

KEEPS_NOTHING = {"keep": "none"}  # what is chosen behind the first step would be a line of its own
REPORT: dict[str, Any] = {
    "machine": {
        "ssd_read_bytes_per_s": 1e8,
        "ssd_write_bytes_per_s": 1e8,
        "adam_elements_per_s": 1e9,
        "host_cores": 2,
        "one_memory": True,
    },
    "rates": {"layer_forward_s": 100.0, "layer_backward_s": 200.0, "head_s": 50.0, "activation_bytes": 64.0},
}


@pytest.fixture
def on_screen() -> Iterator[Callable[[], Terminal]]:
    """To be called by the test: between its fixtures and the test pytest takes the streams for itself."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(terminal())


def own_attributes(screen: Terminal) -> list[set[str]]:
    return [set(vars(stream)) for stream in (sys.stdout, screen.stream)]


# ---- a real engine on a real terminal


@pytest.mark.parametrize("enabled", [True, False], ids=["vertical", "stock"])
def test_the_line_stands_below_what_a_step_prints_and_goes_with_it(
    on_screen: Callable[[], Terminal], enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contention, "_NOTED", float("inf"))  # whatever works beside this test
    screen = on_screen()
    engine = initialize(config=host_config(enabled=enabled, activations=KEEPS_NOTHING))
    screen.clear()
    logger, handler = logging.getLogger("a user's"), logging.StreamHandler(screen.stream)
    logger.addHandler(handler)
    notes = ModuleType("notes")  # no state of a forward, so that no step starts over
    notes.printed, notes.seen = list[str](), list[str]()
    printed, seen = notes.printed, notes.seen

    def loss_fn(loss: torch.Tensor, _: Any) -> torch.Tensor:
        print("a text", "in pieces")
        logger.warning("a log")
        notes.printed.extend(["a text in pieces", "a log"])
        lines = screen.lines()
        assert lines[:-1] == notes.printed
        notes.seen.append(lines[-1])
        return loss

    attributes = own_attributes(screen)
    for step in token_batches(3, 2):
        engine.train_batch(iter(step), loss_fn)
        assert screen.lines() == printed and own_attributes(screen) == attributes
        print("between two steps")
        printed.append("between two steps")
    logger.removeHandler(handler)
    engine.destroy()
    assert seen[:2] == ["step 1", "step 1"]
    busiest = r" \| busiest: (compute|adam) \d+%" if enabled else ""
    for number, line in enumerate(seen[2::2], start=2):
        assert re.fullmatch(rf"step {number} \| [\d,.]+ tokens/s \| last \d+\.\d\d s{busiest}", line)


@pytest.mark.parametrize(
    ("tty", "shown", "drawn"), [(False, None, False), (True, False, False), (False, True, True), (True, None, True)]
)
@pytest.mark.parametrize("enabled", [True, False], ids=["vertical", "stock"])
def test_the_line_is_for_terminals_unless_the_key_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tty: bool, shown: bool | None, drawn: bool, enabled: bool
) -> None:
    with terminal() as screen, (tmp_path / "log").open("w+") as file:
        if not tty:
            monkeypatch.setattr(sys, "stderr", file)
        engine = initialize(config=host_config(enabled=enabled, progress=shown, activations=KEEPS_NOTHING))
        screen.clear()
        before = file.tell()
        for step in token_batches(2, 1):
            engine.train_batch(iter(step))
        engine.destroy()
        screen.lines()
        written = screen.num_bytes if tty else file.tell() - before
    assert (written > 0) is drawn


@pytest.mark.parametrize("enabled", [True, False], ids=["vertical", "stock"])
def test_an_error_in_a_step_takes_the_line_away(on_screen: Callable[[], Terminal], enabled: bool) -> None:
    screen = on_screen()
    engine = initialize(config=host_config(enabled=enabled, activations=KEEPS_NOTHING))
    screen.clear()
    attributes = own_attributes(screen)

    def fail(loss: torch.Tensor, _: Any) -> torch.Tensor:
        assert screen.lines()[-1].startswith("step 2 |")
        print("the last words", end="")
        raise ArithmeticError

    first, second, third = (iter(step) for step in token_batches(3, 1))
    engine.train_batch(first)
    with pytest.raises(ArithmeticError):
        engine.train_batch(second, fail)
    assert own_attributes(screen) == attributes
    print("!")
    assert screen.lines() == ["the last words!"]
    if enabled:  # stock itself cannot go on after an error in a forward
        engine.train_batch(third, lambda loss, _: (screen.lines()[-1].startswith("step 2 |") or pytest.fail()) and loss)
        assert screen.lines() == ["the last words!"]
    engine.destroy()


# ---- a real engine and DeepSpeed's monitor


def ssd_state_config(folder: Path, **options: Any) -> dict[str, Any]:
    """All on SSD; clipping that never acts."""
    return small_buffers(base_config(folder, dtype="fp32", num_micro_batches=2, clip=1e9, **options))


def rows_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = {}
    for path in folder.glob("*.csv"):
        (_, name), *rows = csv.reader(path.open())
        found[f"{path.stem.removesuffix(name)}{name}"] = [(int(at), float(value)) for at, value in rows]
    return found


def monitored(tmp_path: Path, vertical: bool, look: Callable[[Any, int], None] | None) -> tuple[Any, dict[str, Any]]:
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": str(vertical)}
    section = {"optimizer_speculation": True, "seed": 5}
    config = ssd_state_config(tmp_path / "ssd", csv_monitor=monitor, section=section)
    run = run_arm(config, build_model, token_batches(3, 2), vertical=vertical, between=look)
    return run, rows_of(tmp_path / str(vertical))


def test_the_monitor_gets_what_the_steps_were_in_both_arms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(progress, "training_report", lambda path: asked.append(path) or REPORT)
    bounds: list[float] = []

    def look(engine: Any, step: int) -> None:
        goal = engine._loop.progress._goals._known[engine.ran, "delayed", False, None]
        assert goal.resource in ("ssd_read", "ssd_write")  # the report's layer is another model's: no computation
        bounds.append(goal.seconds)

    (stock_run, stock), (run, rows) = monitored(tmp_path, False, None), monitored(tmp_path, True, look)
    assert all([at for at, _ in values] == [2, 4, 6] for values in (*stock.values(), *rows.values()))
    own = {"Train_Samples_lr", "Train_Samples_train_loss"}
    paces = {"Train_vertical_tokens_per_s", "Train_vertical_step_s"}
    assert set(stock) == own | paces
    busy = {f"Train_vertical_{name}_busy_share" for name in ("compute", "adam", "ssd_read", "ssd_write")}
    assert set(rows) == own | paces | busy | {
        "Train_vertical_bound_fraction_without_compute",
        "Train_vertical_speculation_hit_rate",
    }
    for name in own:
        assert stock[name] == rows[name]
    assert [value for _, value in rows["Train_Samples_train_loss"]] == run.losses == stock_run.losses
    tokens = sum(batch["input_ids"].numel() for batch in token_batches(1, 2)[0])
    for found in (stock, rows):
        rates = [tokens / seconds for _, seconds in found["Train_vertical_step_s"]]
        medians = [median(rates[: step + 1]) for step in range(3)]
        assert [rate for _, rate in found["Train_vertical_tokens_per_s"]] == pytest.approx(medians)
    shares = [bound / seconds for bound, (_, seconds) in zip(bounds, rows["Train_vertical_step_s"], strict=True)]
    medians = [median(shares[: step + 1]) for step in range(3)]
    assert [share for _, share in rows["Train_vertical_bound_fraction_without_compute"]] == pytest.approx(medians)
    for name in busy:
        shares = [share for _, share in rows[name]]
        assert all(0 <= share <= 1 for share in shares) and max(shares) > 0
    assert [rate for _, rate in rows["Train_vertical_speculation_hit_rate"]] == [1.0, 1.0, 1.0]
    assert len(asked) == 1 and Path(asked[0]).parent == tmp_path / "ssd"


def written_config(file: Path, **fields: Any) -> Any:
    """A Hugging Face configuration, and what is not a default of it in a file."""
    from transformers import GPTNeoXConfig

    config = GPTNeoXConfig(**fields)
    file.write_text(json.dumps({"model_type": "gpt_neox", "dtype": "float32"} | fields))
    return config


def test_the_bound_is_that_of_the_schedule_that_ran(tmp_path: Path) -> None:
    """First step, then with steps due; with the layer's seconds where they are this model's."""
    model = written_config(tmp_path / "model.json")
    settings = {"dtype": "fp32", "tokens": 22, "sequences": 1, "threads": None, "model": str(tmp_path / "model.json")}
    made: list[Goals] = []
    found: list[Goal] = []
    expected: list[float] = []

    def look(engine: Any, step: int) -> None:
        if not made:
            engine.module.config = model
            made.append(Goals(engine, REPORT | {"settings": settings}, 22))
        found.append(made[0].of_step(22 * 2))
        assert not made[0].of(ExecutedStep(step + 1, engine.ran, "delayed"), 22 + 24).whole  # ragged micro-batches
        facts = facts_of(engine, 22)
        early, delayed = facts.early_elements, facts.delayed_elements
        parts = {(unit, "e0"): early[unit] for unit in early} | {(unit, "d0"): delayed[unit] for unit in delayed}
        recomputed = not any(event.layer == facts.num_layers - 1 for event in engine.ran.fused)
        shape = replace(facts.shape(REPORT["rates"]), recompute_last=recomputed)
        expected.append(step_bound(engine.ran, Machine.from_dict(REPORT), shape, parts=parts).seconds)

    config = ssd_state_config(tmp_path / "ssd", section={"optimizer_speculation": True})
    run_arm(config, build_model, token_batches(3, 2), vertical=True, between=look)
    assert [goal.seconds for goal in found] == expected
    assert all(goal.whole and goal.resource == "host_cores" for goal in found)
    assert found[1].seconds > found[0].seconds > 3 * 2 * 100  # from the second step on, steps are due


LINKS = {"local_bytes_per_s": 1e12, "cross_bytes_per_s": 1e3}


def test_the_bound_has_the_links_that_the_machine_or_the_cache_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ranks on two hosts a byte between the hosts takes longest. Where nobody knows, the bound says so."""
    for name, value in own_cache(tmp_path / "cache").items():
        monkeypatch.setenv(name, value)
    keep_links(LINKS, ["b", "a"], 2, "cpu")  # in any order
    said = REPORT | {"machine": REPORT["machine"] | {f"net_{name}": value * 10 for name, value in LINKS.items()}}
    found: list[Goal] = []
    of_pairs: list[Goal] = []

    def look(engine: Any, step: int) -> None:
        alone = Goals(engine, REPORT, 22).of_step(44)
        assert alone.with_links and alone.resource.startswith("ssd") and engine.host_names == [platform.node()]
        engine.host_names = ["a", "c"]
        engine.network = Network(2, 2)
        others = Goals(engine, REPORT, 22).of_step(44)
        assert others == replace(alone, with_links=False), "they are kept of other hosts"
        engine.host_names = ["a", "b"]
        for network, report in ((Network(2, 2), REPORT), (Network(2, 2), said), (Network(2, 3), REPORT)):
            engine.network = network
            found.append(Goals(engine, report, 22).of_step(44))
        assert found[-1] == replace(alone, with_links=False)
        for pair, local in ((1e3, 1e12), (1e12, 1e3)):
            rates = {"net_pair_ranks": 2, "net_pair_bytes_per_s": pair, "net_local_bytes_per_s": local}
            engine.network = Network(1, 2)
            of_pairs.append(Goals(engine, REPORT | {"machine": REPORT["machine"] | rates}, 22).of_step(44))
        engine.network = None

    run_arm(ssd_state_config(tmp_path / "ssd"), build_model, token_batches(1, 2), vertical=True, between=look)
    measured, of_machine, unknown = found
    assert measured.with_links and of_machine.with_links and not unknown.with_links
    assert measured.resource == of_machine.resource == "net_cross"
    assert all(goal.with_links for goal in of_pairs)
    assert of_pairs[0].resource == "net_pair" and of_pairs[1].resource.startswith("ssd")
    assert measured.seconds == pytest.approx(10 * of_machine.seconds, rel=0.01)
    unequal = replace(FACTS, network=None, num_shards=3)
    assert not progress.with_known_links(Machine.from_dict(said), unequal, ["a", "b"])[1]


def test_a_machine_of_another_kind_gives_no_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = {"one_memory": False, "copy_in_bytes_per_s": 1e9, "copy_out_bytes_per_s": 1e9}
    reports: list[Mapping[str, Any]] = [{"machine": REPORT["machine"] | rates}, {"machine": {"host_cores": 0}}]
    for report, words in zip(reports, ["another accelerator", "machine.ssd_read_bytes_per_s: missing"], strict=True):
        monkeypatch.setattr(progress, "training_report", lambda path, report=report: report)
        engine = initialize(config=host_config(progress=True))
        engine.train_batch(iter(token_batches(1, 1)[0]))
        assert words in capsys.readouterr().out
        assert not any("bound" in word for word in engine._loop.progress._words)
        engine.destroy()


@pytest.mark.parametrize("key", ["layer_forward_s", "pre_forward_s", "head_s"])
def test_a_step_does_not_fail_by_a_negative_time_in_the_cached_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    """c81cdc9 raised CostsError out of train_batch, when the step had been taken."""
    model = written_config(tmp_path / "model.json")
    settings = {"dtype": "fp32", "tokens": 22, "sequences": 1, "threads": None, "model": str(tmp_path / "model.json")}
    report = REPORT | {"rates": REPORT["rates"] | {key: -7.8e-05}, "settings": settings}
    monkeypatch.setattr(progress, "training_report", lambda path: report)
    engine = initialize(config=host_config(progress=True))
    engine.module.config = model
    batch = {"input_ids": torch.zeros(1, 22, dtype=torch.long), "labels": torch.zeros(1, 22, dtype=torch.long)}
    for _ in range(2):
        engine.train_batch(iter([batch] * 2))
    assert "no bound beside the steps: model." in (said := capsys.readouterr().out) and "got -7.8e-05" in said
    assert not any("bound" in word for word in engine._loop.progress._words) and engine.global_steps == 2
    engine.destroy()


@pytest.mark.parametrize(
    ("changed", "ours"),
    [
        ({}, True),
        ({"tokens": 9}, False),
        ({"sequences": 2}, False),
        ({"dtype": "fp32"}, False),
        ({"threads": 3}, False),
        ({"threads": 2}, True),
        ({"model": None}, False),
        ({"model": "gone.json"}, False),
    ],
)
def test_seconds_of_another_layer_are_not_taken_for_this_models(tmp_path: Path, changed: dict[str, Any], ours: bool) -> None:
    file = tmp_path / "model.json"
    model = written_config(file, hidden_size=64)
    settings = {"dtype": "bf16", "tokens": 8, "sequences": 1, "threads": None, "model": str(file)} | changed
    report = REPORT | {"settings": settings}
    assert layer_rates(report, FACTS, model) == (REPORT["rates"] if ours else {})
    assert layer_rates(report, FACTS, None) == layer_rates(REPORT, FACTS, model) == {}
    for other in ({"hidden_size": 128}, {"hidden_size": 64, "hidden_act": "relu"}, {}):  # the last one: another by default
        written_config(file, **other)
        assert layer_rates(report, FACTS, model) == {}


# ---- numbers


def test_rates_are_medians_of_the_last_steps_from_end_to_end() -> None:
    pace, at, readings = Pace(), 100.0, []
    for seconds in (8.0, 2.0, 4.0, 2.0, 2.0, 2.0, 2.0, 50.0):
        pace.begin(at + 1)  # only the first step has no end before it
        at += seconds + (1 if not readings else 0)
        readings.append(pace.end(at, 40, Goal(1.0, "ssd_read", True)))
    assert [r.step_s for r in readings] == [8, 2, 4, 2, 2, 2, 2, 50]
    assert [r.tokens_per_s for r in readings] == [5, 12.5, 10, 15, 20, 20, 20, 20]
    assert [r.fraction for r in readings] == [1 / 8, 0.3125, 0.25, 0.375, 0.5, 0.5, 0.5, 0.5]
    assert WINDOW == 5
    pace.forget()
    pace.begin(at + 1000)
    assert pace.end(at + 1003, 40).step_s == 3
    with pytest.raises(RuntimeError, match="begin"):
        Pace().end(1.0, 1)


def test_fractions_of_bounds_with_and_without_computation_are_not_mixed() -> None:
    pace = Pace()
    pace.begin(0.0)
    fractions = []
    for at, whole in enumerate((True, False, True, False), start=1):
        fractions.append(pace.end(float(at), 1, Goal(0.9 if whole else 0.1, "ssd_read", whole)).fraction)
    assert fractions == pytest.approx([0.9, 0.1, 0.9, 0.1])


def test_the_meter_counts_each_second_of_the_step_once_and_passes_all_on(tmp_path: Path) -> None:
    tracer = RecordingTracer(tmp_path, 0)
    meter = BusyMeter(tracer, ("ssd_read", "adam"))
    with meter.step():
        meter.span("ssd_read", "a", 1.0, 3.0, 10)
        meter.span("ssd_read", "b", 2.0, 4.0, 10, issue=0.5)
        meter.span("adam", "c", 9.0, 12.0)
        meter.span("compute", "d", 1.0, 9.0)
        meter.wait("a", "b", 1.0, 2.0)
        meter.count("bytes", 3)
    assert meter.take(2.5, 10.0) == {"ssd_read": 1.5, "adam": 1.0}
    assert meter.take(2.5, 10.0) == {"ssd_read": 0.0, "adam": 0.0}
    (step,) = read_trace(tracer.path)
    assert [(s.name, s.issue, s.start, s.end, s.bytes) for s in step.spans] == [
        ("a", 1.0, 1.0, 3.0, 10),
        ("b", 0.5, 2.0, 4.0, 10),
        ("c", 9.0, 9.0, 12.0, 0),
        ("d", 1.0, 1.0, 9.0, 0),
    ]
    assert len(step.waits) == len(step.counts) == 1


def test_a_traced_step_was_as_busy_as_its_trace_says(tmp_path: Path) -> None:
    engine = initialize(config=host_config(trace=str(tmp_path / "trace"), progress=True))
    readings: list[Reading] = []
    seen = engine._loop.progress
    end = seen._pace.end
    seen._pace.end = lambda *given: readings.append(end(*given)) or readings[-1]
    for step in token_batches(2, 2):
        engine.train_batch(iter(step))
    engine.destroy()
    for reading, step in zip(readings, read_trace(tmp_path / "trace" / "rank0.jsonl"), strict=True):
        busy = summarize(step).busy_s
        assert reading.busy["compute"] * reading.step_s == pytest.approx(busy["compute"])
        assert busy["compute"] > 0


def test_words_name_the_busiest_resource_only_where_every_one_is_told() -> None:
    goal = Goal(2.0, "ssd_read", True)
    reading = Reading(4.0, 12345.6, {"ssd_read": 0.4, "adam": 0.3}, goal, 0.5)
    common = ["12,346 tokens/s", "last 4.00 s", "50% of the bound"]
    assert reading.words(all_told=True) == [*common, "busiest: ssd_read 40%"]
    assert reading.words(all_told=False) == [*common, "bound by ssd_read"]
    part = replace(reading, goal=replace(goal, whole=False), tokens_per_s=1.5)
    assert part.words(all_told=False) == ["1.50 tokens/s", "last 4.00 s", "at least 50% of the bound", "bound by ssd_read"]
    assert replace(reading, goal=replace(goal, with_links=False)).words(all_told=True)[2] == "at least 50% of the bound"
    assert replace(reading, goal=None, fraction=None).words(all_told=False) == common[:2]
    for unknown, name in (
        ({}, ""),
        ({"whole": False}, "_without_compute"),
        ({"with_links": False}, "_without_links"),
        ({"whole": False, "with_links": False}, "_without_compute_and_links"),
    ):
        scalars = replace(reading, goal=replace(goal, **unknown)).scalars()
        assert {key for key in scalars if "bound" in key} == {f"bound_fraction{name}"}
        assert scalars[f"bound_fraction{name}"] == 0.5


# ---- the line itself


def test_words_that_find_no_room_are_left_out_from_the_end() -> None:
    words = ["step 12", "400 tokens/s", "busiest"]
    assert fit(words, 33) == "step 12 | 400 tokens/s | busiest"
    assert fit(words, 32) == "step 12 | 400 tokens/s"
    assert fit(words, 5) == "step"
    with terminal(columns=20) as screen, StatusLine(words):
        assert screen.lines() == ["step 12"]


def test_text_without_an_end_keeps_the_line_away(on_screen: Callable[[], Terminal]) -> None:
    screen = on_screen()
    with StatusLine(["step 1"]):
        print("loss: ", end="", flush=True)
        assert screen.lines() == ["loss:"]
        print("3.0\nand", end="", flush=True)
        assert screen.lines() == ["loss: 3.0", "and"]
    print(" more")
    assert screen.lines() == ["loss: 3.0", "and more"]


def test_a_users_own_bar_stays_where_it_is(on_screen: Callable[[], Terminal]) -> None:
    screen = on_screen()
    with tqdm(total=4, bar_format="{desc} {n}/{total}", desc="mine", mininterval=0) as bar:
        for count in range(1, 3):
            with StatusLine(["step", str(count)]):
                below = [f"mine {count - 1}/4", f"step | {count}"]
                assert screen.lines() == ["written"] * (count - 1) + below
                tqdm.write("written")
                assert screen.lines() == ["written"] * count + below
            bar.update()
            assert screen.lines() == ["written"] * count + [f"mine {count}/4"]


def test_somebody_elses_detour_is_left_alone(on_screen: Callable[[], Terminal]) -> None:
    screen = on_screen()
    heard: list[str] = []
    with StatusLine(["step 1"]):
        inner = screen.stream.write
        vars(screen.stream)["write"] = lambda text: heard.append(text) or inner(text)
    print("later", file=screen.stream)
    assert "later" in heard
    with StatusLine(["step 2"]):
        print("within", file=screen.stream)
    print("after", file=screen.stream)
    assert "within" in heard and "after" in heard
    assert screen.lines() == ["later", "within", "after"]


def test_a_stream_that_is_no_file_takes_the_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with StatusLine(["step 1"]):
        assert sys.stderr.getvalue().endswith("step 1")
