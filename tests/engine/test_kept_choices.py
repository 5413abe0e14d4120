"""What `activations.keep: null` means: planned where the machine was measured, else by a rule; none where nothing is gained."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import Run, assert_identical, base_config, differing, read_weights, run_arm, running
from keep_choices import COUNT, MIXER, ROOM, config, kept, planner, report, step
from models import MixerModel, token_batches
from places import SUPPORT

from ds_vertical.config.resolve import resolve
from ds_vertical.config.section import load_section
from ds_vertical.engine import memory_check
from ds_vertical.engine.keeping import keeping
from ds_vertical.engine.keeping import planner as keep_planner
from ds_vertical.engine.keeping.device_full import DeviceFull, KeptHere, Shown
from ds_vertical.engine.keeping.measured import agreed
from ds_vertical.engine.keeping.planner import KeepChoice, KeepPlanner
from ds_vertical.engine.memory_check import Forecast, groups_of
from ds_vertical.errors import StorageError
from ds_vertical.model.layers import map_layers
from ds_vertical.planner.candidate import Candidate
from ds_vertical.planner.machine import Profile
from ds_vertical.planner.search import tune_keeping
from ds_vertical.types import ActivationSettings, Tier

# ---- the choice


def test_the_plan_keeps_what_pays_where_there_is_room(tmp_path: Path) -> None:
    """Twelve cells. In memory everything; on the SSD what the program gives it; nothing where the SSD decides the step."""
    fast = planner(tmp_path, report())
    found = fast.choose(step())
    assert kept(found) == ("everything", Tier.DEVICE, 1.0, 0.0)
    assert found.reason.startswith("planned from the limits of 2026-11-22 and the first step: ")
    assert "less time a step than with" in found.reason
    no_memory = {**ROOM, Tier.DEVICE: 0.0, Tier.HOST: 1.5e8}
    policy, tier, share, _ = kept(fast.choose(step(room=no_memory)))
    assert policy in ("products", "everything") and tier in (Tier.SSD, Tier.DEVICE) and 0 < share <= 1
    slow = planner(tmp_path, report(read=2e7, write=2e7)).choose(step(block_s=1e-3))
    assert kept(slow)[0] == "none" and 'no policy is faster than "none" by 1 %' in slow.reason


def test_what_the_runner_up_loses_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the best of what else was tried, nothing kept included."""
    ranked: list[tuple[Candidate, Candidate, Candidate | None]] = []
    monkeypatch.setattr(keep_planner, "tune_keeping", lambda *given: ranked.append(tune_keeping(*given)) or ranked[-1])
    fast = planner(tmp_path, report()).choose(step())
    best, plain, second = ranked.pop()
    assert second is not None and second.choice.kept != best.choice.kept and best.estimate_s < second.estimate_s
    loss = second.estimate_s / best.estimate_s - 1
    told = rf'"none"; the runner-up, activations\.keep "{second.choice.policy}".*, takes {loss:.1%} more$'
    assert re.search(told, fast.reason) and second.estimate_s <= plain.estimate_s
    # with one policy alone the runner-up keeps less of it, or nothing
    alone = planner(tmp_path, report()).choose(step(menu={"free": (0.0, 0.01)}))
    best, plain, second = ranked.pop()
    assert second is plain and '; the runner-up, activations.keep "none", takes ' in alone.reason
    # where nothing is kept the runner-up is what would be
    slow = planner(tmp_path, report(read=2e7, write=2e7)).choose(step(block_s=1e-3))
    best, plain, second = ranked.pop()
    assert best is plain and second is not None and second.choice.policy != "none"
    assert f'the runner-up, activations.keep "{second.choice.policy}"' in slow.reason


@pytest.mark.parametrize(
    ("menu", "told"),
    [({}, "no block can keep anything: some reason"), ({"free": (0.0, 0.0)}, "no policy saves time in these blocks")],
)
def test_where_nothing_can_be_kept_nothing_is(tmp_path: Path, menu: Any, told: str) -> None:
    for found in (report(), None):
        choice = planner(tmp_path, found, "cpu").choose(step(menu=menu))
        assert kept(choice)[0] == "none" and told in choice.reason


def test_the_rule_keeps_nothing_beside_an_unmeasured_ssd_and_else_what_memory_holds(tmp_path: Path) -> None:
    on_ssd = planner(tmp_path, None).settled()
    assert on_ssd is not None and "run `ds-vertical limits` for a plan" in on_ssd
    assert planner(tmp_path, report()).settled() is None
    moved = planner(tmp_path, None, "cpu", activations={"device": "ssd"})
    assert moved.settled() is not None
    in_memory = planner(tmp_path, None, "cpu")
    assert in_memory.settled() is None
    assert kept(in_memory.choose(step())) == ("everything", Tier.DEVICE, 1.0, 0.0)
    passing = (COUNT * 4 + 2) * 100_000  # what passes between layers comes first
    half = {**ROOM, Tier.DEVICE: passing + 6 * 6e6 / 0.8 + 1}
    assert kept(in_memory.choose(step(room=half))) == ("everything", Tier.DEVICE, 0.5, 0.0)
    none = in_memory.choose(step(room={**ROOM, Tier.DEVICE: float(passing)}))
    assert kept(none)[0] == "none" and "leaves no room" in none.reason


def test_a_choice_is_of_the_size_of_the_most_micro_batches_that_a_rank_may_bring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight for two ranks one may take seven."""
    with monkeypatch.context() as patch:
        patch.setattr(memory_check.distributed_ranks, "world_size", lambda: 2)
        in_memory = planner(tmp_path, None, "cpu", elastic={})
        most = in_memory.forecast.terms.num_micro_batches
    passing = (most * 4 + 2) * 100_000
    room = {**ROOM, Tier.DEVICE: passing + 10 * 6e6 / 0.8 + 1}
    policy, tier, share, _ = kept(in_memory.choose(step(room=room)))
    assert most == 7 and (policy, tier) == ("everything", Tier.DEVICE) and share == pytest.approx(10 / 21)
    monkeypatch.setattr(Forecast, "terms", replace(in_memory.forecast.terms, one_memory=False))
    for measured, later in ((7, 0), (4, 3), (None, 0)):
        first = replace(step(), num_micro_batches=measured)
        assert in_memory._room(first, Tier.DEVICE) == 1e9 - later * 4 * 100_000


@pytest.mark.parametrize("section", [{"order": "horizontal"}, {"overlap": False}, {"blocks_per_layer": 4}])
def test_what_no_plan_is_made_for_keeps_nothing(tmp_path: Path, section: dict[str, Any]) -> None:
    made, network = config(tmp_path, **section), MIXER()
    own = load_section(made)
    assert own is not None
    layers = map_layers(network, None, own.blocks_per_layer)
    forecast = Forecast(layers, groups_of(network, None, None), made, resolve(own))
    assert KeepPlanner(forecast, resolve(own), report(), 10**9, 7).settled() is not None


@pytest.mark.parametrize("found", [{"machine": {}}, {**report(), "machine": report()["machine"] | {"one_memory": False}}])
def test_a_report_that_cannot_tell_leaves_the_rule(tmp_path: Path, found: dict[str, Any]) -> None:
    beside_ssd = planner(tmp_path, found).choose(step())
    assert kept(beside_ssd)[0] == "none" and "no plan can be made (" in beside_ssd.reason
    assert kept(planner(tmp_path, found, "cpu").choose(step()))[0] == "everything"


def test_ranks_agree_on_the_least_room_and_the_policies_that_all_have() -> None:
    other = step(block_s=0.15, menu={"everything": (8e6, 0.04)}, room={**ROOM, Tier.SSD: 5.0, Tier.DEVICE: None})
    both = agreed([step(), other])
    assert both.seconds.block_forward == pytest.approx(0.1) and set(both.menu) == {"everything"}
    assert both.menu["everything"] == (8e6, pytest.approx(0.08))
    assert both.room == {Tier.DEVICE: 1e9, Tier.HOST: 1e9, Tier.SSD: 5.0}


# ---- in an engine


def keeps_everything(folder: Path, batches: list[list[dict[str, Any]]], plain: Run) -> bool:
    """Whether an engine chose to; its bits are stock's whatever it chose."""
    with running(config(folder, count=2), MIXER, vertical=True) as (engine, model):
        losses = [engine.train_batch(iter(batches[0])).item()]
        assert engine.kept is None and engine._runner.probe is None
        losses += [engine.train_batch(iter(batch)).item() for batch in batches[1:]]
        record = engine.kept
        assert losses == plain.losses and not differing(read_weights(model), plain.weights)
        if record is None or record.policy != "everything":
            return False
        assert dict(record.cells) == {Tier.DEVICE: 6} and dict(record.num_bytes)[Tier.DEVICE] > 1e5
        assert engine._keeping.open_step(engine._runner, 2, num_calls=2) == () and engine._runner.kinds is None
    return True


def test_without_an_ssd_everything_is_kept_from_the_second_step_with_stocks_bits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Seconds decide, which other work on the cores can hide: it is to be chosen in one of five engines."""
    batches = token_batches(3, 2, rows=8, shortest=48)
    plain = run_arm(config(tmp_path, count=2), MIXER, batches, vertical=False)
    assert any(keeps_everything(tmp_path / str(number), batches, plain) for number in range(5))
    told = capfd.readouterr().out
    assert "keep null: chosen behind the first step" in told
    line = 'vertical_schedule.activations.keep = "everything", 100% of the cells on device (null: nothing rests on SSD, and'
    assert told.count(line) == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("blocks", [1, 2])
def test_a_plan_for_the_ssd_trains_with_stocks_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], dtype: str, blocks: int
) -> None:
    """The choice itself, of which the test cannot be sure, is in the log; a plan for memory that is not there goes to SSD."""
    (tmp_path / "limits.json").write_text(json.dumps(report()))
    monkeypatch.setenv("DS_VERTICAL_LIMITS", str(tmp_path / "limits.json"))
    build = partial(MixerModel, 4, 512 if dtype == "fp32" else 1024, dropout=0.1)
    batches = token_batches(3, 3, rows=1, shortest=16)
    options = {"num_micro_batches": 3, "dtype": dtype, "section": {"seed": 11, "blocks_per_layer": blocks}}
    plain = run_arm(base_config(tmp_path, **options), build, batches, vertical=False)
    assert_identical(plain, run_arm(base_config(tmp_path, **options), build, batches, vertical=True))
    assert "vertical_schedule.activations.keep = " in capfd.readouterr().out


@pytest.mark.parametrize("tier", [Tier.DEVICE, pytest.param(Tier.SSD, marks=pytest.mark.slow)])
def test_a_plan_from_the_limits_keeps_from_the_second_step_with_stocks_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tier: Tier
) -> None:
    """What the first step takes is given, since no test can be sure of that; all else is the engine's own."""
    (tmp_path / "limits.json").write_text(json.dumps(report()))
    monkeypatch.setenv("DS_VERTICAL_LIMITS", str(tmp_path / "limits.json"))
    room = ROOM if tier is Tier.DEVICE else {**ROOM, Tier.DEVICE: 0.0, Tier.HOST: 1.5e8}
    monkeypatch.setattr(keeping, "measured_step", lambda *_: step(room=room))
    batches, records = token_batches(3, 3, rows=1, shortest=5), list[Any]()
    plain = run_arm(config(tmp_path, "nvme", count=3), MIXER, batches, vertical=False)
    made = config(tmp_path, "nvme", count=3)
    assert_identical(plain, run_arm(made, MIXER, batches, vertical=True, between=lambda engine, _: records.append(engine.kept)))
    assert records[0] is None and all(dict(each.cells)[tier] > 0 for each in records[1:])
    told = capfd.readouterr().out
    assert "(null: planned from the limits of 2026-11-22 and the first step: " in told and "less time a step than" in told


PARTS = {"free": (0.0, 0.01), "products_1": (1e6, 0.025), "products": (2e6, 0.03), "everything": (6e6, 0.04)}


def test_a_part_of_the_products_is_kept_where_memory_has_no_room_for_all(tmp_path: Path) -> None:
    """For all twelve cells; eight could keep all products. With more room nothing is left out."""
    few = {Tier.DEVICE: 1.8e6 + 16e6 / 0.8, Tier.HOST: 1.8e6 + 16e6 / 0.8, Tier.SSD: 1e6}
    choice = planner(tmp_path, report()).choose(step(menu=PARTS, room=few))
    assert kept(choice)[:2] == ("products", Tier.DEVICE) and choice.settings.keep_outputs == 1
    assert keeping.describe_keeping(choice.settings).startswith('activations.keep = "products", 1 of each block\'s products, ')
    assert planner(tmp_path, report()).choose(step(menu=PARTS)).settings.keep_outputs is None


def test_where_a_part_of_the_products_fills_a_device_no_share_of_all_is_advised() -> None:
    """Which take more, and no key asks for the part."""
    parts: Any = SimpleNamespace(keeping=SimpleNamespace(is_chosen=True, room=lambda: dict.fromkeys(Tier)))

    def advised(outputs: int | None) -> list[str]:
        settings = ActivationSettings(None, 0.0, 0.0, "products", Tier.DEVICE, keep_outputs=outputs)
        return list(DeviceFull(parts)._remedies(KeptHere(settings, (4, 4_000_000), 1_000_000, 5, 4), 10_000_000))

    assert len(advised(None)) > 1 and advised(1) == ['"keep": "none"']


@pytest.mark.parametrize(("outputs", "is_chosen"), [(2, True), (None, True), (None, False)])
def test_where_nothing_shows_what_a_step_takes_the_advice_can_be_written(outputs: int | None, is_chosen: bool) -> None:
    """Beside keep null no share can be, and of a part of the products there is none."""
    parts: Any = SimpleNamespace(keeping=SimpleNamespace(is_chosen=is_chosen))
    settings = ActivationSettings(None, 0.0, 0.0, "products", Tier.DEVICE, keep_outputs=outputs)
    told = DeviceFull(parts)._message(KeptHere(settings, (4, 4_000_000), 1_000_000, 5, 4), 0, Shown())
    if outputs is not None:
        assert 'the run has chosen "products", 2 of each block\'s products; the device is full' in told
        assert '; write "keep": "none", in vertical_schedule.activations; ' in told and "keep_share" not in told
        return
    keys = '"keep": "products", "keep_device": "device", ' if is_chosen else ""
    assert f'; write {keys}a smaller "keep_share" (now 1), or "keep": "none", in vertical_schedule.activations; ' in told


def test_a_run_that_keeps_a_part_of_the_products_has_stocks_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "limits.json").write_text(json.dumps(report()))
    monkeypatch.setenv("DS_VERTICAL_LIMITS", str(tmp_path / "limits.json"))
    monkeypatch.setattr(keeping, "measured_step", lambda *_: step(menu={"products_1": (1e5, 0.03)}))
    batches, records = token_batches(3, 3, rows=1, shortest=5), list[Any]()
    plain = run_arm(config(tmp_path, "nvme", count=3), MIXER, batches, vertical=False)
    made = config(tmp_path, "nvme", count=3)
    assert_identical(plain, run_arm(made, MIXER, batches, vertical=True, between=lambda engine, _: records.append(engine.kept)))
    assert records[0] is None and all((each.policy, each.outputs) == ("products", 1) for each in records[1:])


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["device", "host", "ssd"])
def test_a_chosen_policy_gives_up_cells_for_which_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """Longer sequences than those of the first step, or a full disk: what would fail where the JSON asks for it is left out."""
    batches = token_batches(3, 2, rows=1, shortest=8)
    plain = run_arm(config(tmp_path, "nvme", count=2), MIXER, batches, vertical=False)
    with running(config(tmp_path, "nvme", count=2), MIXER, vertical=True) as (engine, _):
        losses = [engine.train_batch(iter(batches[0])).item()]
        own = engine._keeping
        tier = Tier.DEVICE if limit == "device" else Tier.SSD
        own._take(KeepChoice(replace(own.settings, keep="everything", keep_device=tier), "for the test"))
        store = own.store
        if limit == "device":
            store.device_limit = 2 * 5000
        elif limit == "host":
            monkeypatch.setattr(store, "device_limit", 0)
        else:
            monkeypatch.setattr(store.swapper._file, "place", _full)
        losses += [engine.train_batch(iter(batch)).item() for batch in batches[1:]]
        assert losses == plain.losses
        held = {tier: cells for tier, (cells, _) in store.resting.items()}
        assert sum(held.values()) < 6 and store.num_bytes["device"] == 0


def _full(*_: object) -> None:
    raise StorageError("kept/kept0.bin: the disk is full")


RANK = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import deepspeed, harness, test_kept_choices as own
from ds_vertical.compat.ops import cache
cache.activate()
deepspeed.init_distributed(verbose=False, init_method=f"file://{sys.argv[2]}", rank=int(os.environ["RANK"]), world_size=2)
batches = own.token_batches(2, 4, rows=1, shortest=64)
with harness.running(json.loads(sys.argv[3]), own.MIXER, vertical=True) as (engine, _):
    for batch in batches:
        engine.train_batch(iter(batch))
    print("chosen", engine._keeping.settings, engine.kept and engine.kept.cells, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("place", "keep", "reports"), [("cpu", None, 1), ("nvme", None, 1), ("nvme", "everything", 2)])
def test_all_ranks_keep_the_same(tmp_path: Path, place: str, keep: str | None, reports: int) -> None:
    """By a plan where both have a report."""
    limits, store = tmp_path / "limits.json", tmp_path / "store"
    limits.write_text(json.dumps(report()))
    made = config(tmp_path, place, activations={"keep": keep})
    command = [sys.executable, "-c", RANK, str(SUPPORT), str(store), json.dumps(made)]
    launcher = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    started = [
        subprocess.Popen(
            command,
            env=os.environ
            | launcher
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "DS_VERTICAL_LIMITS": named, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, named in enumerate((str(limits), str(limits) if reports == 2 else ""))
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    chosen = [[line for line in output.splitlines() if line.startswith("chosen")] for output in outputs]
    assert chosen[0] and chosen[0] == chosen[1], "\n".join(output[-2000:] for output in outputs)
    if keep is not None:
        assert f"keep='{keep}', keep_device=<Tier." in chosen[0][0] and "(keep_device null: planned from" in outputs[0]


def test_the_schedules_own_code_is_counted_once(tmp_path: Path) -> None:
    """Where the host computes, the seconds of the first step's own backwards have that code in them; a forward's have not."""
    profile = Profile.from_dict("this machine", report(schedule_forward_s=0.25, schedule_backward_s=0.5))
    machine = planner(tmp_path, report()).problem(step(), profile, 1).machine
    assert (machine.schedule_forward_s, machine.schedule_backward_s) == (0.25, 0.0)
