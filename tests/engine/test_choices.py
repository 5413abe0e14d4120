"""What `null` means for timing where the machine has been measured: planned, printed, and without effect on the result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import (
    Run,
    assert_identical,
    base_config,
    build_engine,
    dispose,
    run_arm,
    running,
    small_buffers,
    start_process_group,
)
from models import MixerModel, token_batches
from places import SUPPORT
from torch import nn

from ds_vertical.engine import autotune, machine_cache
from ds_vertical.errors import CostsError

STEPS = 3


def config(folder: Path, clip: float = 0.0, **section: Any) -> dict[str, Any]:
    made = base_config(folder, num_micro_batches=4, dtype="fp32", clip=clip, section={"seed": 11, **section})
    return small_buffers(made, 1_100_000)


def model() -> nn.Module:
    return MixerModel(4, 512)


def report(**rates: float) -> dict[str, Any]:
    """A machine of two cores whose disk is fast and whose products are slow, unless `rates` say otherwise."""
    machine = {"ssd_read_bytes_per_s": 2e9, "ssd_write_bytes_per_s": 2e9, "adam_elements_per_s": 1e9, "host_cores": 2}
    speeds = {"fp32_flops_per_s": rates.pop("flops", 1e9)}
    return {"machine": machine | {"one_memory": True} | rates, "rates": speeds, "date": "2026-11-22"}


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def write(found: dict[str, Any] | str) -> None:
        path = tmp_path / "limits.json"
        path.write_text(found if isinstance(found, str) else json.dumps(found))
        monkeypatch.setenv("DS_VERTICAL_LIMITS", str(path))

    yield write


@pytest.fixture(scope="module")
def by_rule(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Trained with the fixed rules."""
    return train(config(tmp_path_factory.mktemp("rule")))


def train(made: dict[str, Any]) -> Run:
    return run_arm(made, model, token_batches(STEPS, 4), vertical=True)


def test_a_slow_disk_gets_another_share_of_delayed_steps_and_the_same_bits(
    tmp_path: Path, measured: Any, by_rule: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    """Reads that no computation hides: what is stepped in the next forward is handed over in memory, which saves some."""
    measured(report(ssd_read_bytes_per_s=2e7, flops=2e11))
    with running(config(tmp_path), model, vertical=True) as (engine, _):
        reason = engine.vertical.reasons["optimizer_delay"]
        assert engine.vertical.optimizer_delay != 0.25 and reason.startswith("null: planned from the limits of")
    assert "faster than the fixed rule" in capfd.readouterr().out
    assert_identical(train(config(tmp_path)), by_rule)


def test_where_nothing_is_gained_the_rule_stands(tmp_path: Path, measured: Any) -> None:
    measured(report())
    with running(config(tmp_path), model, vertical=True) as (engine, _):
        assert (engine.vertical.prefetch_layers, engine.optimizer.timing.delay) == (1, 0.25)
        assert "which nothing beats" in engine.vertical.reasons["prefetch_layers"]


def test_what_is_written_is_not_touched(tmp_path: Path, measured: Any) -> None:
    measured(report(ssd_write_bytes_per_s=2e7, flops=2e11))
    with running(config(tmp_path, prefetch_layers=2, optimizer_delay=0.25), model, vertical=True) as (engine, _):
        assert (engine.vertical.prefetch_layers, engine.vertical.optimizer_delay) == (2, 0.25)
        assert engine.vertical.reasons["optimizer_delay"] == "as written"


def test_clipping_leaves_the_share_to_the_rule(tmp_path: Path, measured: Any) -> None:
    """Which regime a step takes is the last norms' business there."""
    measured(report(ssd_write_bytes_per_s=2e7, flops=2e11))
    with running(config(tmp_path, clip=1.0), model, vertical=True) as (engine, _):
        assert engine.vertical.optimizer_delay is None and "planned" in engine.vertical.reasons["prefetch_layers"]


@pytest.mark.parametrize("found", [{"machine": {}}, {"rates": {}, "machine": report()["machine"]}])
def test_a_report_that_cannot_tell_leaves_the_rules(tmp_path: Path, measured: Any, found: dict[str, Any]) -> None:
    measured(found)
    with running(config(tmp_path), model, vertical=True) as (engine, _):
        assert engine.vertical.prefetch_layers == 1 and "planned" not in engine.vertical.reasons["prefetch_layers"]


class NoLimit(MixerModel):
    """Its configuration gives -1 for sequences of any length, as XLNet's does."""

    def __init__(self) -> None:
        super().__init__(4, 512)
        self.config = SimpleNamespace(max_position_embeddings=-1)


def test_a_model_without_a_longest_sequence_is_planned_for(tmp_path: Path, measured: Any) -> None:
    measured(report())
    with running(config(tmp_path), NoLimit, vertical=True) as (engine, _):
        assert "which nothing beats" in engine.vertical.reasons["prefetch_layers"]


def xlnet() -> nn.Module:
    from transformers import XLNetConfig, XLNetLMHeadModel

    sizes = {"d_model": 64, "n_layer": 4, "n_head": 4, "d_inner": 64, "vocab_size": 300, "dropout": 0.0}
    return XLNetLMHeadModel(XLNetConfig(**sizes))


@pytest.mark.parametrize("flops", [1e9, 2e11])
def test_xlnet_trains_once_limits_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flops: float) -> None:
    """c81cdc9 took its -1 positions for tokens, and ended in initialize: "CostsError: model.forward_s: got -7.8e-05"."""
    monkeypatch.setattr(machine_cache, "cache_root", lambda: tmp_path / "cache" / "ops")
    monkeypatch.delenv("DS_VERTICAL_LIMITS")
    machine_cache.keep_report(report(flops=flops), ".")  # of the working directory's disk: nothing of this run rests on another
    made = base_config(tmp_path, num_micro_batches=2, dtype="fp32", params="cpu", optimizer="cpu", clip=0.0)
    engine, network = build_engine(made, xlnet, vertical=True, under_zero_init=False)
    try:
        assert network.config.max_position_embeddings == -1
        assert "planned from the limits of 2026-11-22" in engine.vertical.reasons["prefetch_layers"]
        assert engine.train_batch(iter(token_batches(1, 2)[0])) > 0 and engine.skipped_steps == 0
    finally:
        dispose(engine)


@pytest.mark.parametrize("positions", [-1, -512, 0, None, "many", 1 << 40])
def test_whatever_a_model_says_of_its_positions_no_time_is_negative(
    tmp_path: Path, measured: Any, monkeypatch: pytest.MonkeyPatch, positions: Any
) -> None:
    """The seconds that `initialize` plans by, as the cost model takes them."""
    seen: list[Any] = []
    tune = autotune.tune_timing
    monkeypatch.setattr(autotune, "tune_timing", lambda case, *args: seen.append(case.shape) or tune(case, *args))
    measured(report())
    made = base_config(tmp_path, num_micro_batches=2, dtype="fp32", params="cpu", optimizer="cpu", clip=0.0)

    def build() -> nn.Module:
        network = MixerModel(2, 64)
        network.config = SimpleNamespace(max_position_embeddings=positions)  # pyright: ignore[reportAttributeAccessIssue]
        return network

    with running(made, build, vertical=True):
        pass
    (shape,) = seen
    assert min(shape.forward_s, shape.backward_s, shape.head_s) > 0 and min(shape.pre_forward_s, shape.pre_backward_s) == 0


def test_a_model_that_cannot_be_planned_for_has_the_rules(
    tmp_path: Path, measured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tune(*_: Any) -> Any:
        raise CostsError("model.forward_s: got -7.8e-05")

    monkeypatch.setattr(autotune, "tune_timing", tune)
    measured(report())
    with running(config(tmp_path), model, vertical=True) as (engine, _):
        assert engine.vertical.prefetch_layers == 1 and "planned" not in engine.vertical.reasons["prefetch_layers"]


def test_a_window_that_does_not_fit_is_not_chosen(tmp_path: Path, measured: Any) -> None:
    measured(report(ssd_read_bytes_per_s=3e7, flops=2e11))
    wide = needed = 0
    for _ in range(2):  # what a process loads for its first engine counts for the second
        with running(config(tmp_path, optimizer_delay=0.25), model, vertical=True) as (engine, _):
            wide = engine.vertical.prefetch_layers
            needed = engine.host_bytes
    assert wide >= 1
    tight = config(tmp_path, optimizer_delay=0.25, host_memory_bytes=int(1.02 * needed))
    with running(tight, model, vertical=True) as (engine, _):
        assert engine.vertical.prefetch_layers <= wide


def long_model() -> nn.Module:
    return MixerModel(20, 512)


def test_gradients_wait_in_host_memory_as_far_as_it_holds_them(tmp_path: Path) -> None:
    """By the budget's own formulas: to the byte, down to what nothing fits into."""
    from ds_vertical.config.resolve import resolve
    from ds_vertical.config.section import load_section
    from ds_vertical.engine.autotune import choose_gradient_tier
    from ds_vertical.engine.memory_check import Forecast, groups_of
    from ds_vertical.model.layers import map_layers
    from ds_vertical.planner import memory_budget

    start_process_group()
    made, network = config(tmp_path, clip=1.0), long_model()
    section = load_section(made)
    assert section is not None
    resolved = resolve(section)

    def forecast_of(resolved: Any) -> Forecast:
        return Forecast(map_layers(network, None), groups_of(network, None, None), made, resolved)

    def needed(share: float) -> int:
        forecast = forecast_of(replace(resolved, gradient_host_share=share))
        terms = replace(forecast.terms, **memory_budget.LEAN)  # what waits for its pair goes first
        return memory_budget.total_bytes(memory_budget.budget(forecast.shape, terms, forecast.further(7)), "host")

    def chosen(allowed: int, section: Any = section, resolved: Any = resolved) -> float:
        return choose_gradient_tier(section, resolved, forecast_of, (allowed, 7)).gradient_host_share

    shares = [count / 16 for count in range(17)]
    assert chosen(needed(1.0)) == 1.0 and needed(0.0) < needed(1.0)
    for allowed in (needed(1.0) - 1, needed(0.5), needed(0.5) - 1, needed(0.0)):
        fitting = [share for share in shares if needed(share) <= allowed]
        assert chosen(allowed) == max(fitting) < 1
    assert needed(chosen(1)) == min(map(needed, shares))
    assert chosen(1, section.model_copy(update={"gradient_host_share": 1.0})) == 1.0
    assert chosen(1, resolved=replace(resolved, keep_gradients=True)) == 1.0
    full = autotune.choose_all(section, resolved, forecast_of, network, None, (needed(1.0), 7))
    assert 0 < needed(full.gradient_host_share) < needed(1.0), "what the choices import has no room beside them"


def test_less_of_a_step_is_left_to_the_next_forward_where_host_memory_does_not_hold_what_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the budget's own formulas: to the byte, with gradients added one by one and freed memory given back, down to none."""
    from ds_vertical.config.resolve import resolve
    from ds_vertical.config.section import load_section
    from ds_vertical.engine.autotune import choose_delay
    from ds_vertical.engine.memory_check import Forecast, groups_of
    from ds_vertical.model.layers import map_layers
    from ds_vertical.planner import memory_budget

    start_process_group()
    network = long_model()

    def chosen(allowed: int, clip: float = 0.0, **section: Any) -> tuple[float | None, float]:
        made = config(tmp_path, clip, **section)
        loaded = load_section(made)
        assert loaded is not None
        resolved = choose_delay(loaded, resolve(loaded), partial(forecast_of, made), (allowed, 7))
        return resolved.optimizer_delay, forecast_of(made, resolved).timing.delay

    def forecast_of(made: dict[str, Any], resolved: Any) -> Forecast:
        return Forecast(map_layers(network, None), groups_of(network, None, None), made, resolved)

    def needed(delay: float) -> int:
        made = config(tmp_path)
        loaded = load_section(made)
        assert loaded is not None
        forecast = forecast_of(made, replace(resolve(loaded), optimizer_delay=delay))
        least = replace(forecast.terms, **memory_budget.LEAN)
        return memory_budget.total_bytes(memory_budget.budget(forecast.shape, least, forecast.further(7)), "host")

    assert chosen(needed(0.25)) == (None, 0.25), "the rule"
    tried = {delay: needed(delay) for delay in (0.25, 0.2, 0.15, 0.1, 0.05, 0.0)}
    found = set()
    for allowed in (count - 1 for count in tried.values()):
        expected = max((delay for delay, count in tried.items() if count <= allowed), default=0.0)
        assert chosen(allowed)[1] == pytest.approx(expected)
        found.add(expected)
    assert {0.0} < found
    assert chosen(1)[0] == 0.0
    assert chosen(1, clip=1.0) == (None, 0.25), "with clipping all gradients may wait"
    assert chosen(1, optimizer_delay=0.25)[1] == 0.25
    assert chosen(1, gradient_host_share=0.5) == (None, 0.25)
    assert chosen(1, keep_gradients=True) == (None, 0.25)
    monkeypatch.setattr(Forecast, "terms", property(lambda _: memory_budget.BudgetTerms(4)))
    assert chosen(1) == (None, 0.25), "beside a device"


def test_early_steps_that_nobody_asks_for_are_given_up_where_gradients_would_go_to_the_ssd_for_them(tmp_path: Path) -> None:
    """With parameters in host memory new values lie beside the old ones, in every step. By the budget's own formulas, to the
    byte."""
    from ds_vertical.config.resolve import resolve
    from ds_vertical.config.section import load_section
    from ds_vertical.engine.memory_check import Forecast, groups_of
    from ds_vertical.model.layers import map_layers

    start_process_group()
    with torch.device("meta"):
        network = long_model()
    layers, groups = map_layers(network, None), groups_of(network, None, None)

    def settings(clip: float, params: str, **section: Any) -> tuple[Any, Any, Any]:
        made = base_config(tmp_path, dtype="fp32", clip=clip, params=params, section=section)
        loaded = load_section(made)
        assert loaded is not None
        return loaded, resolve(loaded), partial(Forecast, layers, groups, made)

    def needed(params: str = "cpu", **section: Any) -> int:
        _, resolved, forecast_of = settings(1.0, params, **section)
        return autotune._needed(forecast_of(resolved), (0, 7))

    def chosen(allowed: int, clip: float = 1.0, params: str = "cpu", **section: Any) -> tuple[float | None, float]:
        loaded, resolved, forecast_of = settings(clip, params, **section)
        for choose in (autotune.choose_early_steps, autotune.choose_gradient_tier):
            resolved = choose(loaded, resolved, forecast_of, (allowed, 7))
        return resolved.optimizer_delay, resolved.gradient_host_share

    early, late = needed(), needed(optimizer_delay=1.0)
    assert early - late > 16 << 20
    assert chosen(early) == (None, 1.0) and chosen(early - 1) == chosen(late) == (1.0, 1.0)
    assert chosen(late - 1)[0] == 1.0 and 0.5 < chosen(late - 1)[1] < 1, "more than with early steps"
    for written in ({"optimizer_delay": 0.25}, {"optimizer_speculation": True}):
        delay, share = chosen(early - 1, **written)
        assert delay == written.get("optimizer_delay") and share < 1
    assert chosen(early - 1, gradient_host_share=1.0) == (1.0, 1.0), "no room for the run otherwise"
    assert chosen(early - 1, keep_gradients=True) == (1.0, 1.0)
    assert chosen(early - 1, gradient_host_share=0.0) == (None, 0.0)
    assert chosen(early - 1, optimizer_speculation=False)[0] is chosen(1, clip=0.0)[0] is chosen(1)[0] is None
    on_ssd = chosen(needed("nvme") - (4 << 20), params="nvme")
    assert on_ssd[0] is None and on_ssd[1] < 1, "what rests on SSD has no such values"
    loaded, resolved, forecast_of = settings(1.0, "cpu")
    full = autotune.choose_all(loaded, resolved, forecast_of, network, None, (early, 7))
    assert (full.optimizer_delay, full.gradient_host_share) == (1.0, 1.0)
    assert full.reasons["optimizer_delay"].startswith("null: 1, host memory holds more of what waits without")


def test_a_run_that_memory_holds_narrowly_lets_no_gradients_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_rule: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    import ds_vertical.engine.api

    monkeypatch.setattr(ds_vertical.engine.api, "host_room", lambda *_: (1, 7))
    with running(config(tmp_path), model, vertical=True) as (engine, _):
        assert (engine.optimizer.timing.delay, engine.vertical.gradient_host_share) == (0.0, 1.0)
    assert "optimizer_delay = 0.0 (null: 0, host memory holds no more gradients that wait" in capfd.readouterr().out
    assert_identical(train(config(tmp_path)), by_rule)


def test_a_node_keeps_as_many_copies_as_host_memory_holds(tmp_path: Path) -> None:
    from ds_vertical.config.resolve import resolve
    from ds_vertical.config.section import load_section
    from ds_vertical.engine.autotune import choose_copy_share
    from ds_vertical.engine.memory_check import Forecast, groups_of
    from ds_vertical.model.layers import map_layers
    from ds_vertical.planner import memory_budget
    from ds_vertical.types import LevelSettings

    start_process_group()
    made, network = config(tmp_path, clip=1.0), long_model()
    section = load_section(made)
    assert section is not None
    resolved = replace(resolve(section), levels=LevelSettings(2))

    def forecast_of(resolved: Any) -> Forecast:
        return Forecast(map_layers(network, None), groups_of(network, None, None), made, resolved)

    def needed(share: float | None, ranks_per_node: int = 2) -> int:
        forecast = forecast_of(replace(resolved, levels=LevelSettings(ranks_per_node, copy_share=share)))
        items = memory_budget.budget(forecast.shape, replace(forecast.terms, **memory_budget.LEAN), forecast.further(7))
        return memory_budget.total_bytes(items, "host")

    def chosen(allowed: int, settings: Any = resolved) -> float | None:
        return choose_copy_share(settings, forecast_of, (allowed, 7)).levels.copy_share

    layers = sum(param.numel() for param in network.blocks.parameters())
    assert needed(1.0) - needed(0.0) == layers * 4 // 2 and needed(None) == needed(1.0), "fp32, of which a rank has a half"
    assert chosen(needed(1.0)) == 1.0 and chosen(needed(0.0)) == 0.0 and chosen(1) == 0.0
    assert chosen(needed(0.5)) == 0.5 and chosen(needed(0.5) - 1) == 7 / 16
    assert chosen(1, replace(resolved, levels=LevelSettings(2, copy_share=0.75))) == 0.75
    assert chosen(1, replace(resolved, levels=LevelSettings())) is None
    assert "host memory holds no more copies" in choose_copy_share(resolved, forecast_of, (1, 7)).reasons["levels"]


@pytest.mark.parametrize(
    ("section", "early", "advice"),
    [
        ({}, True, '"optimizer_delay": 0'),
        ({}, False, '"optimizer_delay": 0'),
        ({"optimizer_delay": 0.0}, True, None),
        ({"optimizer_delay": 0.25}, True, None),
        ({"optimizer_host_share": 0.5}, True, '"optimizer_delay": 0, "optimizer_host_share": 0'),
        ({"optimizer_host_share": 0.5}, False, '"optimizer_delay": 0'),
        ({"optimizer_host_share": 0.5, "optimizer_delay": 0.0}, True, '"optimizer_host_share": 0'),
        ({"optimizer_host_share": 0.5, "optimizer_delay": 0.0}, False, None),  # all steps come behind the norm
        ({"optimizer_host_share": 0.5, "optimizer_delay": 0.25}, True, None),
    ],
    ids=str,
)
def test_standing_copies_that_few_units_have_are_warned_of(
    tmp_path: Path, section: dict[str, Any], early: bool, advice: str | None
) -> None:
    from ds_vertical.config.resolve import resolve
    from ds_vertical.config.section import load_section
    from ds_vertical.offload.speculation import StepTiming
    from ds_vertical.types import LevelSettings

    loaded = load_section(config(tmp_path, **section))
    assert loaded is not None
    timing = StepTiming(loaded.optimizer_delay, None, certain=True, in_files=early)
    for stands in (True, False):
        resolved = replace(resolve(loaded), levels=LevelSettings(2, copy_on_device=stands))
        found = autotune.late_copies(loaded, resolved, timing)
        assert bool(found) == (advice is not None and stands)
        assert not found or found[0].endswith(f"; write {advice}")


@pytest.mark.slow
def test_what_host_memory_does_not_hold_waits_on_ssd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The room is made small; how much a process takes beside it differs from run to run by more than these gradients."""
    import ds_vertical.engine.api

    monkeypatch.setattr(ds_vertical.engine.api, "host_room", lambda *_: (1, 7))
    with running(config(tmp_path, clip=1.0), long_model, vertical=True) as (engine, _):
        assert engine.vertical.gradient_host_share < 1
        engine.train_batch(iter(token_batches(1, 4, rows=1, shortest=4)[0]))
        assert engine.optimizer.gradients.file.num_bytes > 0
    assert "waits on SSD)" in capfd.readouterr().out


RANK = """
import json, os, sys
sys.path[:0] = sys.argv[1].split(os.pathsep)
import deepspeed, harness, test_choices
from ds_vertical.compat.ops import cache
cache.activate()
deepspeed.init_distributed(verbose=False, init_method=f"file://{sys.argv[2]}", rank=int(os.environ["RANK"]), world_size=2)
with harness.running(json.loads(sys.argv[3]), test_choices.model, vertical=True) as (engine, _):
    print("chosen", engine.vertical.prefetch_layers, engine.vertical.optimizer_delay, flush=True)
"""


def run_ranks(folder: Path, script: str, limits: list[str]) -> list[list[str]]:
    """Per rank, of as many as `limits` has files of rates, the lines that begin with "chosen"."""
    paths = os.pathsep.join((str(SUPPORT), str(Path(__file__).parent)))
    command = [sys.executable, "-c", script, paths, str(folder / "store"), json.dumps(config(folder))]
    launcher = {"WORLD_SIZE": str(len(limits)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            command,
            env=os.environ | launcher | {"RANK": str(rank), "LOCAL_RANK": str(rank), "DS_VERTICAL_LIMITS": named},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, named in enumerate(limits)
    ]
    try:
        outputs = [process.communicate(timeout=400)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    chosen = [[line for line in output.splitlines() if line.startswith("chosen")] for output in outputs]
    assert all(chosen), "\n".join(output[-2000:] for output in outputs)
    return chosen


@pytest.mark.slow
@pytest.mark.parametrize("second_has", [True, False])
def test_all_ranks_take_one_plan_or_the_rules_where_a_host_has_no_rates(tmp_path: Path, second_has: bool) -> None:
    """The second disk is faster: the slower one decides."""
    limits = [tmp_path / "slow.json", tmp_path / "fast.json"]
    for path, rate in zip(limits, (2e7, 2e9), strict=True):
        path.write_text(json.dumps(report(ssd_read_bytes_per_s=rate, flops=2e11)))
    first, second = run_ranks(tmp_path, RANK, [str(limits[0]), str(limits[1]) if second_has else ""])
    assert first == second and (first != ["chosen 1 None"]) is second_has


@pytest.mark.slow
def test_a_plan_is_for_the_rank_with_least_room_and_the_host_with_most_ranks(tmp_path: Path) -> None:
    """Rank 0 is by itself on a host, the other two are on one, and the last one has less room."""
    limits = tmp_path / "limits.json"
    limits.write_text(json.dumps(report(ssd_read_bytes_per_s=2e7, flops=2e11)))
    chosen = run_ranks(tmp_path, UNLIKE_RANKS + RANK.replace("world_size=2", "world_size=3"), [str(limits)] * 3)
    assert [len(lines) for lines in chosen] == [2, 1, 1]
    assert chosen[0][0] == f"chosen by the room of 2 GiB and 2 ranks: {2 << 30}"
    assert len({lines[-1] for lines in chosen}) == 1


# as rank 0 has it, what it plans by
UNLIKE_RANKS = """
import os
from ds_vertical.distributed import ranks
from ds_vertical.engine import api, autotune
number = int(os.environ["RANK"])
ranks.host_id = lambda: "ab"[number > 0]
api.host_room = lambda *_: ((2 << 30, 7) if number == 2 else (3 << 30, 7))
def problem(*given, made=autotune._problem):
    print(f"chosen by the room of {given[-2][0] >> 30} GiB and {given[-1]} ranks: {given[-2][0]}", flush=True)
    return made(*given)
autotune._problem = problem
"""
