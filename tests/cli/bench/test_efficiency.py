"""The vertical arm's account of what it ran, and the figures that follow from it: bound, bytes, memory, tracing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ab_runs import FACTS, UNITS, make_run
from harness import base_config, running, small_buffers
from models import MixerModel, token_batches

from ds_vertical.cli.bench import efficiency
from ds_vertical.cli.bench.comparison import Run, summarize_arm
from ds_vertical.cli.bench.host_speed import Conditions
from ds_vertical.engine.metrics import METRICS_VARIABLE, read_records
from ds_vertical.errors import ConfigError
from ds_vertical.planner.bound import step_bound
from ds_vertical.planner.closed_forms import traffic_of
from ds_vertical.planner.costs import event_costs
from ds_vertical.planner.machine import Machine, read_links
from ds_vertical.planner.network import Network
from ds_vertical.planner.run_record import FILE_NAME, Account, AccountWriter, ExecutedStep, KeptRecord, read_account
from ds_vertical.schedule.events import PRE
from ds_vertical.schedule.passes import TrainingStep, build_training
from ds_vertical.schedule.trace import RecordingTracer, now
from ds_vertical.types import Tier

FIRST = build_training(TrainingStep(3, 2, delayed=True, early=True))
STEADY = build_training(TrainingStep(3, 2, delayed=True, early=True, due=frozenset(UNITS)))
AFTER_NORM = build_training(TrainingStep(3, 2))
ALL_DELAYED = build_training(TrainingStep(3, 2, delayed=True, due=frozenset(UNITS)))
RATES = {"layer_forward_s": 0.5, "layer_backward_s": 1.0, "head_s": 0.25, "activation_bytes": 64.0}
REPORT: dict[str, Any] = {
    "machine": {
        "ssd_read_bytes_per_s": 1e4,
        "ssd_write_bytes_per_s": 1e4,
        "adam_elements_per_s": 1e4,
        "host_cores": 2,
        "one_memory": True,
        "schedule_forward_s": 0.0,
        "schedule_backward_s": 0.0,
    },
    "rates": RATES,
}

KEPT = KeptRecord(
    "everything",
    ((Tier.DEVICE, 0.0), (Tier.HOST, 0.0), (Tier.SSD, 1.0)),
    ((Tier.DEVICE, 1), (Tier.HOST, 1), (Tier.SSD, 2)),
    ((Tier.DEVICE, 600), (Tier.HOST, 150), (Tier.SSD, 5_000_000)),
)


def ran(*steps: ExecutedStep, **facts: Any) -> efficiency.Ran:
    """A vertical run whose steps take 8 s (the first 80 s), read 100 bytes and write 10."""
    run = make_run("vertical", 0, [(3.0, 2.0)] * len(steps), step_s=8.0)
    return efficiency.Ran(run, Account(replace(FACTS, **facts), steps))


# ---- the account


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_a_vertical_engine_keeps_an_account_of_what_it_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip: float
) -> None:
    monkeypatch.setenv(METRICS_VARIABLE, str(tmp_path / "metrics"))
    config = small_buffers(base_config(tmp_path, num_micro_batches=2, clip=clip), 1_200_000)
    schedules = []
    with running(config, lambda: MixerModel(3, 768, vocab=61), vertical=True) as (engine, model):
        for batches in token_batches(4, 2, vocab=61):
            engine.train_batch(iter(batches))
            schedules.append(engine.ran)
        num_elements = sum(param.ds_numel for param in model.parameters())
    account = read_account(tmp_path / "metrics")
    assert account is not None and [step.schedule for step in account.steps] == schedules
    facts = account.facts
    assert sum(facts.elements.values()) == num_elements
    for unit, count in facts.elements.items():
        assert facts.early_elements[unit] + facts.delayed_elements[unit] == count
    assert (facts.param_bytes, facts.gradient_bytes, facts.dtype, facts.num_shards) == (2, 4, "bfloat16", 1)
    assert 0.9 < facts.state_on_ssd < 1 > facts.parameters_on_ssd > 0.9 and facts.slots > 0  # `pre` is below 1 MiB
    assert account.table(account.steps[0], {}) is None and account.table(account.steps[-1], {}) is not None
    assert len(read_records(tmp_path / "metrics")[0]) == 4
    assert [step.due for step in account.steps[1:]] == ["all" if clip else "delayed"] * 3


@pytest.mark.parametrize(
    ("clip", "keep", "state"),
    [
        (0.0, {}, None),
        (0.0, {"keep": "everything", "keep_device": "ssd"}, None),
        pytest.param(0.05, {}, None, marks=pytest.mark.slow),
        pytest.param(0.05, {"keep": "products", "keep_device": "ssd", "keep_share": 0.5}, None, marks=pytest.mark.slow),
        pytest.param(0.0, {}, 0.6, marks=pytest.mark.slow),
        pytest.param(0.05, {}, 0.6, marks=pytest.mark.slow),
    ],
)
def test_the_table_has_what_activations_gradients_and_kept_values_move_on_ssd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip: float, keep: dict[str, Any], state: float | None
) -> None:
    monkeypatch.setenv(METRICS_VARIABLE, str(tmp_path / "metrics"))
    section = {"activations": {"device": "ssd", "share": 0.5, **keep}, "gradient_host_share": 0.25}
    section |= {"optimizer_host_share": state, "optimizer_delay": 0.5, "prefetch_layers": 0}  # nothing crosses the steps' ends
    config = small_buffers(base_config(tmp_path, num_micro_batches=4, clip=clip, section=section), 1_200_000)
    ids = torch.arange(2 * 64).view(2, 64) % 61
    with running(config, lambda: MixerModel(3, 768, vocab=61), vertical=True) as (engine, _):
        swappers = [engine._activations.swapper] + ([engine._keeping.store.swapper] if keep else [])
        for _ in range(4):
            before = [moved_by(swapper) for swapper in swappers]
            engine.train_batch(iter([{"input_ids": ids, "labels": ids}] * 4))
        after = [moved_by(swapper) for swapper in swappers]
        record = engine.kept
    moved, *kept = [(end[0] - start[0], end[1] - start[1]) for start, end in zip(before, after, strict=True)]
    account = read_account(tmp_path / "metrics")
    assert account is not None
    facts = account.facts
    assert facts.activations_on_ssd == 0.5 and 0.3 < facts.gradients_on_ssd <= 1
    rates = {"activation_bytes": 2.0 * 64 * 768 * 2}
    table = account.table(account.steps[-1], rates)
    assert table is not None and moved == (table.activations_read, table.activations_written)
    assert account.steps[-1].kept == record and bool(record) == bool(keep)
    assert (table.kept_read, table.kept_written) == pytest.approx(kept[0] if kept else (0.0, 0.0), rel=0.02)
    if record is not None:
        assert kept[0][1] == pytest.approx(dict(record.num_bytes)[Tier.SSD], rel=0.02) and kept[0][0] == kept[0][1] > 1e5
    waiting = sum(facts.elements.values()) * (1 - facts.early_share if clip == 0 else 1) * facts.gradients_on_ssd
    assert table.gradients_read == table.gradients_written == pytest.approx(4 * waiting)
    record = read_records(tmp_path / "metrics")[0][-1]
    assert record.read_bytes / table.read == pytest.approx(1, abs=0.02)
    assert record.write_bytes / table.written == pytest.approx(1, abs=0.02)


def moved_by(swapper: Any) -> tuple[int, int]:
    """Bytes read and written so far."""
    return swapper.queues[0].num_read_bytes, swapper.queues[1].num_written_bytes


def test_stock_keeps_none(tmp_path: Path) -> None:
    assert read_account(tmp_path) is None


def test_an_account_is_read_back_as_written(tmp_path: Path) -> None:
    writer = AccountWriter(tmp_path, FACTS)
    for schedule, due, kept in ((FIRST, "delayed", None), (STEADY, "delayed", KEPT), (STEADY, "all", None)):
        writer.step(schedule, due, kept=kept)  # pyright: ignore
    account = read_account(tmp_path)
    second = ExecutedStep(2, STEADY, "delayed", kept=KEPT)
    steps = (ExecutedStep(1, FIRST, "delayed"), second, ExecutedStep(3, STEADY, "all"))
    assert account == Account(FACTS, steps)
    over_links = replace(FACTS, network=Network(2, 2, levels=True, weight_bytes=1.5, gradient_bytes=(None, 0.5), sum_ranks=4))
    AccountWriter(tmp_path, over_links)
    assert read_account(tmp_path) == Account(over_links, ())
    Path(tmp_path, FILE_NAME).write_text('{"facts": {}}\n')
    with pytest.raises(ValueError, match="no account of a run"):
        read_account(tmp_path)


@pytest.mark.parametrize(
    "step",
    [
        ExecutedStep(2, STEADY, "delayed"),
        ExecutedStep(2, STEADY, "all"),
        ExecutedStep(1, AFTER_NORM, "delayed"),
        ExecutedStep(2, ALL_DELAYED, "all"),
    ],
    ids=["early", "redone", "after the norm", "delayed"],
)
def test_the_closed_table_is_what_the_schedule_moves(step: ExecutedStep) -> None:
    facts = replace(FACTS, early_elements={PRE: 75, 0: 750, 1: 750, 2: 750}, delayed_elements={PRE: 25, 0: 250, 1: 250, 2: 250})
    account = Account(facts, (step,))
    shape = account.shape(step, RATES)
    moved = traffic_of(event_costs(step.schedule.events, Machine.from_dict(REPORT), shape, account.parts(step)), shape)
    table = account.table(step, RATES)
    assert table is not None
    assert (moved.read, moved.written) == pytest.approx((table.read, table.written))


def test_a_first_step_that_leaves_work_has_no_table() -> None:
    assert Account(FACTS, ()).table(ExecutedStep(1, FIRST, "delayed"), {}) is None


# ---- the figures


def test_figures_of_a_run() -> None:
    steps = (ExecutedStep(1, FIRST, "delayed"), ExecutedStep(2, STEADY, "delayed"), ExecutedStep(3, STEADY, "delayed"))
    each = ran(*steps)
    stock = summarize_arm([make_run("stock", 0, [(3.0, 2.0)] * 3, step_s=20.0)])
    found = efficiency.figures([each], {0: [REPORT]}, stock, Path("unused"))
    account = each.account
    shape = account.shape(steps[-1], RATES)
    assert (shape.forward_s, shape.backward_s, shape.recompute_last) == (1.0, 2.0, False)  # two blocks a layer
    bound = step_bound(STEADY, Machine.from_dict(REPORT), shape, parts=account.parts(steps[-1]))
    assert found["bound_s"] == pytest.approx(bound.seconds) and found["resource"] == "host_cores"
    assert found["step_over_bound"] == pytest.approx(8.0 / bound.seconds)
    assert found["simulated_s"] >= bound.busy_s["host_cores"] - 1e-9
    one_by_one = efficiency.figures([ran(*steps, overlap=False)], {0: [REPORT]}, stock, Path("unused"))
    assert one_by_one["simulated_s"] > found["simulated_s"] and one_by_one["bound_s"] == found["bound_s"]
    table = account.table(steps[-1], RATES)
    assert table is not None
    assert found["bytes"]["read_over_table"] == pytest.approx(100 / table.read)
    memory = found["host_memory"]
    assert (memory["peak_bytes"], memory["stock_peak_bytes"]) == (1002, 1002)
    assert memory["peak_over_formula"] == 0.5
    text = "\n".join(efficiency.efficiency_lines(found))
    assert f"bound of the vertical step: {bound.seconds:.3f} s (host_cores); step / bound {8 / bound.seconds:.2f}" in text
    assert text.index("bound of the") < text.index("simulated makespan, beside the bound") and "outside" not in text


def test_a_slow_link_is_the_bound_of_a_run_on_two_hosts(tmp_path: Path) -> None:
    steps = (ExecutedStep(1, AFTER_NORM, "delayed"), ExecutedStep(2, AFTER_NORM, "delayed"))
    path = tmp_path / "links.json"
    path.write_text(json.dumps({"links": {"cross_bytes_per_s": 100.0}}))
    report = efficiency.add_links(REPORT, read_links(path))
    each = ran(*steps, network=Network(2, 1, reduces_twice=True), num_shards=2)
    found = efficiency.figures([each], {0: [report]}, None, Path("unused"))
    elements = sum(each.account.facts.elements.values())
    gathered = 2 * elements * each.account.facts.param_bytes / 2  # twice, in a ring of two
    summed = 2 * elements * each.account.facts.gradient_bytes / 2
    assert found["resource"] == "net_cross" and found["bound_s"] == pytest.approx((gathered + summed) / 100, rel=0.2)
    assert efficiency.figures([each], {0: [REPORT]}, None, Path("unused"))["resource"] != "net_cross"


def test_a_pairs_hop_is_on_its_own_link_in_the_bound_of_a_run() -> None:
    """A run's account knows no pairs: the machine's file does."""
    steps = (ExecutedStep(1, AFTER_NORM, "delayed"), ExecutedStep(2, AFTER_NORM, "delayed"))
    each = ran(*steps, network=Network(1, 2, reduces_twice=True), num_shards=2)
    found = []
    for pair, local in ((100.0, 1e12), (1e12, 100.0)):
        links = {"pair_ranks": 2, "pair_bytes_per_s": pair, "local_bytes_per_s": local}
        report = efficiency.add_links(REPORT, links)
        found.append(efficiency.figures([each], {0: [report]}, None, Path("unused"))["resource"])
    assert found[0] == "net_pair" and not found[1].startswith("net_")


@pytest.mark.parametrize(("one_memory", "held"), [(True, 750), (False, 150)])
def test_what_is_kept_in_memory_is_no_overrun_of_the_formula(one_memory: bool, held: int) -> None:
    """The formula is of the start, ahead of any forward. On the device it is the host's where the two are one memory."""
    steps = (ExecutedStep(1, AFTER_NORM, "delayed"), ExecutedStep(2, AFTER_NORM, "delayed", kept=KEPT))
    found = efficiency.figures([ran(*steps, one_memory=one_memory)], {0: [REPORT]}, None, Path("unused"))
    memory = found["host_memory"]
    assert memory["formula_bytes"] == FACTS.host_bytes + held and memory["kept_bytes"] == held
    told = f"formula 0 MB with 0 MB kept for the backward, ratio {1001 / (FACTS.host_bytes + held):.2f}"
    assert told in "\n".join(efficiency.efficiency_lines(found))


def test_each_run_has_the_machine_that_was_measured_beside_it() -> None:
    steps = [ExecutedStep(1, AFTER_NORM, "delayed")] * 3
    fast = ran(*steps)
    slow = efficiency.Ran(make_run("vertical", 1, [(3.0, 2.0)] * 3, step_s=16.0), fast.account)
    half = {"rates": RATES, "machine": {**REPORT["machine"]}}
    half["rates"] = {**RATES, "layer_forward_s": 1.0, "layer_backward_s": 2.0, "head_s": 0.5}
    for rate in ("ssd_read_bytes_per_s", "ssd_write_bytes_per_s", "adam_elements_per_s"):
        half["machine"][rate] /= 2
    found = efficiency.figures([fast, slow], {0: [REPORT], 1: [half]}, None, Path("unused"))
    first, second = found["step_over_bound_by_repeat"]
    assert first == pytest.approx(second) == pytest.approx(found["step_over_bound"])
    alone = efficiency.figures([fast], {0: [REPORT]}, None, Path("unused"))
    assert first == alone["step_over_bound"] and found["simulated_s"] == pytest.approx(1.5 * alone["simulated_s"])
    assert f"({first:.2f}, {first:.2f})" in "\n".join(efficiency.efficiency_lines(found))


def _at_speed(share: float) -> dict[str, Any]:
    """The report of a machine whose work takes 1 / `share` of REPORT's seconds."""
    machine = {k: v * share if k.endswith("_per_s") and isinstance(v, float) else v for k, v in REPORT["machine"].items()}
    return {"machine": machine, "rates": {k: v / share if k.endswith("_s") else v for k, v in RATES.items()}}


def test_a_run_has_the_machine_halfway_between_ahead_of_it_and_after() -> None:
    each = ran(*[ExecutedStep(1, AFTER_NORM, "delayed")] * 3)
    alone = efficiency.figures([each], {0: [REPORT]}, None, Path("unused"))
    found = efficiency.figures([each], {0: [REPORT, _at_speed(1 / 1.1)]}, None, Path("unused"))
    assert found["bound_s"] == pytest.approx(1.05 * alone["bound_s"]) and found["steady"]
    assert found["machine_drift_by_repeat"] == [pytest.approx(0.1)]


def test_a_run_during_which_the_machine_changed_counts_only_where_there_is_no_other() -> None:
    each = ran(*[ExecutedStep(1, AFTER_NORM, "delayed")] * 3)
    other = efficiency.Ran(make_run("vertical", 1, [(3.0, 2.0)] * 3, step_s=8.0), each.account)
    changed = [REPORT, _at_speed(0.5)]
    both = efficiency.figures([each, other], {0: changed, 1: [REPORT]}, None, Path("unused"))
    first, second = both["step_over_bound_by_repeat"]
    assert first == pytest.approx(second / 1.5) and both["step_over_bound"] == second
    assert both["steady"] is None  # of the other run there is one report: nothing was compared
    alone = efficiency.figures([each], {0: changed}, None, Path("unused"))
    assert alone["step_over_bound"] == first and alone["steady"] is False
    assert "the machine's speed changed meanwhile, by 100%" in "\n".join(efficiency.efficiency_lines(alone))


def test_a_step_has_the_speed_that_the_host_had_around_it() -> None:
    """A gauge twice as slow behind the second step: the third begins there, and ends where it is three times as slow."""
    schedule = [ExecutedStep(n, AFTER_NORM, "delayed", gauge_s=g) for n, g in ((1, 0.5), (2, 1.0), (3, 1.5))]
    report = {"machine": REPORT["machine"], "rates": RATES | {"gauge_s": 0.5}}
    found = Conditions([report])
    assert [found.slowdown(schedule, index) for index in range(3)] == pytest.approx([1.0, 1.5, 2.5])
    machine, rates = found.during(schedule, 2)
    assert machine.adam_elements_per_s == pytest.approx(4e3) and machine.ssd_read_bytes_per_s == 1e4
    loaded = replace(machine, ssd_core_s_per_byte=1e-6).slowed(2.0)
    assert loaded.ssd_core_s_per_byte == 2e-6 and loaded.adam_elements_per_s == pytest.approx(2e3)
    assert rates["layer_forward_s"] == 1.25 and rates["activation_bytes"] == 64.0
    each, usual = ran(*schedule), ran(*[ExecutedStep(1, AFTER_NORM, "delayed")] * 3)
    first, second = (efficiency.figures([one], {0: [report]}, None, Path("unused")) for one in (each, usual))
    assert first["host_slowdown_by_repeat"] == [pytest.approx([1.5, 2.5])] and first["bound_s"] > second["bound_s"]
    assert first["step_over_bound"] < second["step_over_bound"]


def test_rates_may_be_the_inner_object_alone() -> None:
    each = ran(*[ExecutedStep(1, AFTER_NORM, "delayed")] * 2)
    whole, inner = ({0: [report]} for report in ({"machine": REPORT["machine"]}, REPORT["machine"]))
    assert efficiency.figures([each], whole, None, Path("x")) == efficiency.figures([each], inner, None, Path("x"))


def test_a_host_that_was_slower_ahead_of_the_run_than_after_it_is_no_drift_where_its_steps_are_gauged() -> None:
    slow = {key: value * 2 if key.endswith("_s") else value for key, value in RATES.items()}
    reports = [{"machine": REPORT["machine"], "rates": rates} for rates in (RATES, slow)]
    assert Conditions(reports).drift == 1.0
    for gauge_s, told in ((None, [1.0]), (0.5, [None])):
        each = ran(*[ExecutedStep(1, AFTER_NORM, "delayed", gauge_s=gauge_s)] * 2)
        assert efficiency.figures([each], {0: reports}, None, Path("unused"))["machine_drift_by_repeat"] == told


def test_the_account_keeps_what_the_gauge_said(tmp_path: Path) -> None:
    writer = AccountWriter(tmp_path, FACTS)
    writer.step(FIRST, "delayed", 0.25)
    writer.step(STEADY, "delayed")
    account = read_account(tmp_path)
    assert account is not None and [step.gauge_s for step in account.steps] == [0.25, None]


def test_without_layer_seconds_the_bound_says_so() -> None:
    each = ran(*[ExecutedStep(1, AFTER_NORM, "delayed")] * 2)
    found = efficiency.figures([each], {0: [{"machine": REPORT["machine"]}]}, None, Path("x"))
    assert found["without_compute"] and "computation not measured" in "\n".join(efficiency.efficiency_lines(found))
    assert efficiency.efficiency_lines({"missing": "why"}) == ["no bound: why"] and efficiency.efficiency_lines({}) == []


def test_a_trace_gives_time_outside_and_its_own_cost(tmp_path: Path) -> None:
    each = ran(*[ExecutedStep(1, AFTER_NORM, "delayed")] * 3)
    traced = efficiency.Ran(Run("vertical", 0, each.run.ranks, traced=True), each.account)
    tracer = RecordingTracer(tmp_path / "traced.0.trace", 0)
    for _ in range(3):
        with tracer.step():
            begin = now()
            while now() - begin < 0.01:
                pass
            tracer.span("compute", "0F0", begin, begin + 0.005)
            for unit in ("0", "pre", "suf"):
                tracer.span("compute", f"{unit}REDUCE", begin, begin)
            tracer.span("adam", "0STEP", begin, begin + 0.0025)
    found = efficiency.figures([each, traced], {0: [REPORT]}, None, tmp_path)
    assert 0 < found["outside_share"] < 1 and found["optimizer_overlap"] == pytest.approx(1.0)
    taken, priced = found["operations_s"]["F"]
    # pre's apart; two layers forward and the last one, two micro-batches, 2 blocks of 0.5 s each
    assert taken == pytest.approx(0.005) and priced == pytest.approx(6.0)
    assert set(found["operations_s"]) == {"F", "REDUCE", "preREDUCE", "sufREDUCE", "STEP"}
    assert found["traced_over_untraced"] == 1.0 and found["trace_cost_share"] > 0
    assert any(line.startswith("tracing: ") for line in efficiency.efficiency_lines(found))
    assert [path.name for path in (tmp_path / "trace.cost").iterdir()] == []


def test_traced_runs_do_not_count_as_steps(tmp_path: Path) -> None:
    each = ran(*[ExecutedStep(1, AFTER_NORM, "delayed")] * 2)
    slow = make_run("vertical", 0, [(3.0, 2.0)] * 2, step_s=80.0)
    traced = efficiency.Ran(Run("vertical", 0, slow.ranks, traced=True), each.account)
    tracer = RecordingTracer(tmp_path / "traced.0.trace", 0)
    for _ in range(2):
        with tracer.step():
            tracer.span("compute", "0F0", now(), now())
    found = efficiency.figures([each, traced], {0: [REPORT]}, None, tmp_path)
    assert (found["step_s"], found["traced_over_untraced"]) == (8.0, 10.0)


def test_a_machine_file_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(REPORT))
    assert efficiency.read_machine(path) == REPORT
    for text, words in (("{", "machine.json"), ('{"machine": {}}', "ssd_read_bytes_per_s: missing"), ("[]", "machine.json")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            efficiency.read_machine(path)


def test_runs_with_an_account_are_found(tmp_path: Path) -> None:
    runs = [make_run(arm, 0, [(3.0, 2.0)] * 2) for arm in ("stock", "vertical")]
    assert efficiency.accounts(runs, tmp_path) == []
    folder = tmp_path / "vertical.0.metrics"
    folder.mkdir()
    writer = AccountWriter(folder, FACTS)
    for kept in (None, KEPT):
        assert efficiency.kept_of(runs, tmp_path) is None
        writer.step(AFTER_NORM, "delayed", kept=kept)
    assert efficiency.kept_of(runs, tmp_path) == KEPT.to_json()
    assert KEPT.describe() == '"everything": 1 cells, 0.0 MB on device; 1 cells, 0.0 MB on host; 2 cells, 5.0 MB on ssd'
    assert [each.run.name for each in efficiency.accounts(runs, tmp_path)] == ["vertical.0"]
