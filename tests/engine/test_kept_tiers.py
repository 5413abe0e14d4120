"""What `activations.keep_device: null` means beside a written `keep`: the plan's tier with a report, else the device."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import TwoMemories, assert_identical, contents, differing, read_weights, run_arm, running, two_memories
from keep_choices import MIXER, ROOM, config, kept, planner, report, step
from kept_toys import Block, Chained, KeptTraining, bodies_of, model_of
from models import token_batches
from torch import nn
from toy import WIDTH

from ds_vertical.distributed.elastic import ElasticCounts
from ds_vertical.engine import memory_check
from ds_vertical.engine.assembly import describe_activations
from ds_vertical.engine.keeping import keeping
from ds_vertical.engine.keeping.growth import PassingBytes
from ds_vertical.engine.keeping.measured import measured_step
from ds_vertical.engine.keeping.planner import KeepPlanner, open_choice
from ds_vertical.engine.memory_check import Forecast
from ds_vertical.model.kept.probe import BlockTimes, KeptPoint, Probe
from ds_vertical.model.layers import map_layers
from ds_vertical.planner.budget.fewer import FewerMicroBatches
from ds_vertical.types import ActivationPolicy, ElasticSettings, Tier

BYTES, SAVED_S = 6_000_000, 0.04  # of a cell
MENU: dict[ActivationPolicy, tuple[float, float]] = {"everything": (BYTES, SAVED_S)}
MANY = 32  # micro-batches, so that the buffers of what moves are a small part of all cells
NO_MEMORY = {**ROOM, Tier.DEVICE: 0.0, Tier.HOST: 1.5e8}


def asks(policy: str = "everything", **keys: Any) -> dict[str, Any]:
    """The part of the section that asks for a policy, and leaves the tier alone."""
    return {"activations": {"keep": policy, **keys}}


def one_room(num_bytes: float) -> dict[Tier, float | None]:
    """So many bytes of the memory that host and device share."""
    return {**ROOM, Tier.DEVICE: num_bytes, Tier.HOST: num_bytes}


# ---- the choice


def test_the_whole_share_goes_to_the_best_tier_that_has_room_for_it(tmp_path: Path) -> None:
    own = planner(tmp_path, report(), **asks())
    assert own.settled() is None
    ample = own.choose(step(menu=MENU))
    assert kept(ample) == ("everything", Tier.DEVICE, 1.0, 0.0)
    assert ample.reason.startswith("planned from the limits of 2026-11-22 and the first step: ")
    assert '% less time a step than with "none"; the runner-up, activations.keep "everything" (100% on ssd), t' in ample.reason
    on_ssd = own.choose(step(menu=MENU, room=NO_MEMORY))
    assert kept(on_ssd) == ("everything", Tier.SSD, 1.0, 0.0)
    assert on_ssd.reason.endswith('less time a step than with "none"; no other tier has room for all of it')
    half = planner(tmp_path, report(), **asks("products", keep_share=0.123456789)).choose(step(menu={"products": (2e6, 0.03)}))
    assert kept(half) == ("products", Tier.DEVICE, 0.123456789, 0.0)


@pytest.mark.parametrize("share", [1.0, 0.7])
def test_two_tiers_share_what_neither_has_room_for(tmp_path: Path, share: float) -> None:
    """Whole cells, of which none is lost; memory holds as many as it can beside the buffers of those that move."""
    cells = 3 * MANY
    passing = (MANY * 4 + 2) * 100_000
    room = one_room(passing + share * 0.8 * cells * BYTES / 0.8)
    own = planner(tmp_path, report(), count=MANY, **asks(keep_share=share))
    policy, tier, on_ssd, beside = kept(own.choose(step(menu=MENU, room=room)))
    assert (policy, tier) == ("everything", Tier.SSD) and 0 < on_ssd < share and 0 < beside < share
    assert round(cells * on_ssd) + round(cells * beside) == round(cells * share)
    assert cells * on_ssd == pytest.approx(round(cells * on_ssd), abs=1e-3)


def test_where_no_tier_has_room_for_all_of_it_the_device_has_it(tmp_path: Path) -> None:
    little = {**one_room(3e6), Tier.SSD: 1e6}
    own = planner(tmp_path, report(), **asks(keep_share=0.5))
    found = own.choose(step(menu=MENU, room=little))
    assert kept(found) == ("everything", Tier.DEVICE, 0.5, 0.0)
    assert found.reason.endswith("and the first step: no tier has room for all of it")


def test_in_two_memories_the_host_has_what_the_device_has_no_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = report(2e7, 2e7, one_memory=False, copy_in_bytes_per_s=1e10, copy_out_bytes_per_s=1e10)
    own = planner(tmp_path, found, count=MANY, **asks())
    monkeypatch.setattr(Forecast, "terms", replace(own.forecast.terms, one_memory=False))
    buffers = 40e6  # of what moves
    choice = own.choose(step(menu=MENU, room={**ROOM, Tier.DEVICE: buffers}))
    policy, tier, share, beside = kept(choice)
    on_host = share if tier is Tier.HOST else beside
    assert policy == "everything" and tier in (Tier.DEVICE, Tier.HOST) and on_host > 0.9 and share + beside <= 1 + 1e-9
    assert kept(own.choose(step(menu=MENU))) == ("everything", Tier.DEVICE, 1.0, 0.0)


def test_what_is_asked_for_is_kept_where_it_only_costs_time(tmp_path: Path) -> None:
    """The line says how much."""
    own = planner(tmp_path, report(2e7, 2e7), **asks())
    found = own.choose(step(1e-3, MENU, NO_MEMORY))
    assert kept(found) == ("everything", Tier.SSD, 1.0, 0.0) and '% more time a step than with "none"' in found.reason


@pytest.mark.parametrize(
    ("place", "found", "section", "told"),
    [
        ("nvme", None, asks(), "the rates of this machine's SSD are not known, which may decide the step; run `ds-vertical l"),
        ("cpu", report(), asks(), "there is no other tier"),
        ("nvme", report(), asks(keep_share=0.0), "a keep_share of 0 keeps nothing"),
        ("nvme", report(), asks() | {"order": "horizontal"}, "plans are made for the vertical order with overlap alone"),
    ],
)
def test_where_no_plan_can_be_made_it_is_the_device_from_the_first_step_on(
    tmp_path: Path, place: str, found: Any, section: dict[str, Any], told: str
) -> None:
    resolved, left = open_choice(planner(tmp_path, found, place, **section))
    share = section["activations"].get("keep_share", 1.0)
    assert left is None and resolved.activations.keep_device is Tier.DEVICE
    assert resolved.activations.kept_shares[Tier.DEVICE] == share
    assert f"as written; keep_device null: device: {told}" in resolved.reasons["activations"]


def test_what_is_told_of_a_written_policy_fits_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an SSD no rates of one are missed; and where the device has it, nothing says that nothing can be kept."""
    own = planner(tmp_path, None, "cpu", **asks())
    monkeypatch.setattr(Forecast, "terms", replace(own.forecast.terms, one_memory=False))
    assert own.settled() == "the rates of this machine are not known; run `ds-vertical limits` for a plan"
    found = planner(tmp_path, report(), **asks()).choose(step(menu={}))
    assert kept(found) == ("everything", Tier.DEVICE, 1.0, 0.0)
    assert found.reason == "the first step shows no bytes that a block would keep; some reason"


def test_a_broken_report_leaves_the_device(tmp_path: Path) -> None:
    own = planner(tmp_path, {"machine": {}}, **asks())
    found = own.choose(step(menu=MENU))
    assert kept(found) == ("everything", Tier.DEVICE, 1.0, 0.0) and "no plan can be made (machine." in found.reason


def test_what_the_json_divides_by_itself_is_left_as_it_is(tmp_path: Path) -> None:
    """The share that is no host_share rests on the device."""
    for section in (asks(keep_share=0.5, keep_host_share=0.25), asks(keep_device="ssd"), asks("free"), asks("none")):
        own = planner(tmp_path, report(), **section)
        resolved, left = open_choice(own)
        assert left is None and resolved is own.resolved
    divided = planner(tmp_path, report(), **asks(keep_share=0.5, keep_host_share=0.25)).resolved.activations
    assert dict(divided.kept_shares) == {Tier.HOST: 0.25, Tier.DEVICE: 0.5}


def test_while_the_tier_is_open_the_start_says_so(tmp_path: Path) -> None:
    own = planner(tmp_path, report(), **asks("products", keep_share=0.5))
    resolved, left = open_choice(own)
    assert left is own and resolved.activations.is_open and not resolved.activations.kept_shares
    assert "as written; keep_device null: chosen behind the first step, which keeps nothing" in resolved.reasons["activations"]
    assert describe_activations(resolved).endswith('activations.keep = "products", 50% of the cells from the second step on')


def test_a_written_policy_is_measured_as_the_blocks_will_keep_it() -> None:
    """Also where others save more for their bytes, or it saves nothing; a class that lacks it has the next lower one."""
    layers = map_layers(MIXER(), None)
    kind = layers.blocks[0].kind

    def menu(policy: ActivationPolicy | None, *points: KeptPoint) -> Any:
        probe = Probe(found={kind: BlockTimes(0.05, 0.1, 1000, points)})
        return measured_step(probe, None, layers, ROOM, policy)

    free, products = KeptPoint("free", 0, 0.03), KeptPoint("products", 2_000_000, 0.0)
    assert menu("everything", free, products).menu == {"everything": (2_000_000, 1e-9)}
    assert [point.policy for point in menu("products", free, products).points] == ["products"]
    assert menu(None, free, products).menu == {"free": (0.0, 0.03), "products": (0.0, 0.0)}
    assert menu("everything", free).menu == {} == menu("products").menu
    part = KeptPoint("products", 1_000_000, 0.02, 1)
    assert menu("products", products, part).menu == {"products": (2_000_000, 1e-9)}  # all of them, as it is written


def test_of_two_kinds_of_blocks_a_part_of_the_products_is_all_of_them_where_there_are_no_more() -> None:
    layers = map_layers(model_of(Block, Chained, Chained), ["blocks"])
    first, second, _ = (block.kind for block in layers.blocks)
    whole, part = KeptPoint("products", 4_000_000, 0.04), KeptPoint("products", 1_000_000, 0.03, 1)
    times = {first: BlockTimes(0.05, 0.1, 1000, (KeptPoint("products", 2_000_000, 0.02),))}
    probe = Probe(found={**times, second: BlockTimes(0.05, 0.1, 1000, (whole, part))})
    menu = measured_step(probe, None, layers, ROOM).menu
    assert menu == {"products": (3e6, pytest.approx(0.03)), "products_1": (1.5e6, pytest.approx(0.025))}


def times_of(num_bytes: int) -> BlockTimes:
    """Of a kind whose products take so many bytes."""
    return BlockTimes(0.05, 0.1, 1000, (KeptPoint("products", num_bytes, 0.02),))


def test_a_block_whose_kind_was_not_measured_counts_as_the_nearest_of_its_class() -> None:
    """So do blocks that run no backward, since nothing ahead of them is trained; a class of which none does counts not at
    all."""
    model = model_of(Chained, *[Block] * 6)
    for extra, block in zip((1, 2, 3, 9, 10, 10), model.blocks[1:], strict=True):
        block.extra = nn.Parameter(torch.zeros(extra))
    layers = map_layers(model, ["blocks"])
    small, large = layers.blocks[3].kind, layers.blocks[4].kind
    found = measured_step(Probe(found={small: times_of(3_000_000), large: times_of(8_000_000)}), None, layers, ROOM)
    assert found.menu == {"products": ((3 * 3e6 + 2 * 8e6) / 5, pytest.approx(0.02))}, "the last layer keeps its graph"
    assert found.seconds.block_forward == pytest.approx(0.05) and found.seconds.head > 0
    assert measured_step(Probe(), None, layers, ROOM).menu == {}


def test_where_upper_blocks_alone_are_trained_their_kind_fills_the_menu() -> None:
    model = model_of(*[Block] * 4)
    model.requires_grad_(False)
    for block in model.blocks[2:]:
        block.adapter = nn.Parameter(torch.zeros(WIDTH))
        block.drop.register_forward_pre_hook(lambda _, given, block=block: given[0] + block.adapter.repeat(2))
    training = KeptTraining(model, "none")
    probe = training.probing()
    training.step(bodies_of(model), 0)
    layers = map_layers(model, ["blocks"])
    assert set(probe.found) == {layers.blocks[2].kind} and layers.blocks[0].kind != layers.blocks[2].kind
    assert measured_step(probe, None, layers, ROOM).menu["everything"][0] > 0


def test_partitioned_parameters_count_whole_in_what_stands_around_the_blocks() -> None:
    def head_s(model: nn.Module) -> float:
        layers = map_layers(model, ["blocks"])
        return measured_step(Probe(found={layers.blocks[0].kind: times_of(1)}), None, layers, ROOM).seconds.head

    model = model_of(Block, Block)
    whole = head_s(model)
    for param in model.parameters():
        vars(param)["ds_numel"] = param.numel()
        param.data = torch.empty(0)
    assert head_s(model) == whole > 0


# ---- in an engine


def with_limits(folder: Path, monkeypatch: pytest.MonkeyPatch, **machine: Any) -> None:
    (folder / "limits.json").write_text(json.dumps(report(**machine)))
    monkeypatch.setenv("DS_VERTICAL_LIMITS", str(folder / "limits.json"))


def with_room(monkeypatch: pytest.MonkeyPatch, room: dict[Tier, float | None]) -> None:
    """As much of each tier is free for what is kept; all else is measured."""
    monkeypatch.setattr(keeping.RunKeeping, "room", lambda _: room)


@pytest.mark.parametrize("policy", ["products", pytest.param("everything", marks=pytest.mark.slow)])
def test_a_written_policy_goes_to_ssd_where_memory_has_no_room_with_stocks_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], policy: str
) -> None:
    """From the second step on, also behind a resume; the cells of the layer before the last rest in memory."""
    with_limits(tmp_path, monkeypatch)
    with_room(monkeypatch, NO_MEMORY)
    batches, records, probes = token_batches(3, 3, rows=1, shortest=5), list[Any](), list[Probe]()
    monkeypatch.setattr(keeping, "Probe", lambda *given: probes.append(Probe(*given)) or probes[-1])
    plain = run_arm(config(tmp_path, "nvme", count=3), MIXER, batches, vertical=False)
    made = config(tmp_path, "nvme", count=3, **asks(policy))
    assert_identical(plain, run_arm(made, MIXER, batches, vertical=True, between=lambda engine, _: records.append(engine.kept)))
    assert records[0] is None
    assert [probe.part_rounds for probe in probes] == [0] and probes[0].found, "a written policy has no use for parts"
    for record in records[1:]:
        assert record.policy == policy and dict(record.cells) == {Tier.SSD: 6, Tier.DEVICE: 3}
    told = capfd.readouterr().out
    assert "keep_device null: chosen behind the first step" in told
    line = f'activations.keep = "{policy}", 100% of the cells on ssd (keep_device null: planned from the limits of 2026-11-22'
    assert told.count(line) == 1


def test_in_two_memories_it_goes_to_the_hosts_with_stocks_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a cell takes and saves is given, since no test can be sure of that; the SSD is slow."""
    copies = {"copy_in_bytes_per_s": 1e10, "copy_out_bytes_per_s": 1e10}
    with_limits(tmp_path, monkeypatch, read=2e7, write=2e7, one_memory=False, **copies)
    batches, records = token_batches(3, 3, rows=1, shortest=5), list[Any]()
    plain = run_arm(config(tmp_path, "nvme", count=3), MIXER, batches, vertical=False)
    two_memories(monkeypatch)
    monkeypatch.setattr(memory_check, "accelerator", TwoMemories())
    monkeypatch.setattr(keeping, "measured_step", lambda *_: step(menu=MENU, room={**ROOM, Tier.DEVICE: 40e6}))
    made = config(tmp_path, "nvme", count=3, **asks())
    assert_identical(plain, run_arm(made, MIXER, batches, vertical=True, between=lambda engine, _: records.append(engine.kept)))
    assert records[0] is None
    for record in records[1:]:
        cells = dict(record.cells)
        assert cells[Tier.HOST] > 4 and sum(cells.values()) == 9 and not cells.get(Tier.SSD)


def test_where_its_files_cannot_be_opened_the_device_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with_limits(tmp_path, monkeypatch)
    with_room(monkeypatch, NO_MEMORY)
    batches = token_batches(2, 2, rows=1, shortest=5)
    with running(config(tmp_path, "nvme", count=2, **asks()), MIXER, vertical=True) as (engine, _):
        own = engine._keeping
        opens = own._open_store

        def fails_on_ssd(settings: Any, gives_up: bool) -> Any:
            if settings.keep_device is Tier.SSD:
                raise OSError("too many queues")
            return opens(settings, gives_up)

        monkeypatch.setattr(own, "_open_store", fails_on_ssd)
        assert own.is_asked and not own.is_chosen and own.store is None
        for batch in batches:
            engine.train_batch(iter(batch))
        assert own.settings.keep_device is Tier.DEVICE and own.store is not None and not own.store.gives_up
        assert dict(engine.kept.cells) == {Tier.DEVICE: 6}
    assert "(keep_device null: a rank could not open its files: too many queues)" in capfd.readouterr().out


@pytest.mark.parametrize("cut", ["measured_step", "choose", "_take"])
def test_an_interrupt_of_the_choice_leaves_it_to_the_next_step_with_stocks_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    """In `_take` it comes when the store is open, and not in force yet: that one is closed."""
    with_limits(tmp_path, monkeypatch)
    with_room(monkeypatch, NO_MEMORY)
    batches = token_batches(4, 2, rows=1, shortest=5)
    plain = run_arm(config(tmp_path, "nvme", count=2), MIXER, batches, vertical=False)
    with running(config(tmp_path, "nvme", count=2, **asks()), MIXER, vertical=True) as (engine, model):
        own, stores = engine._keeping, list[Any]()
        opens = own._open_store
        monkeypatch.setattr(own, "_open_store", lambda *given: stores.append(opens(*given)) or stores[-1])
        owner, name = {"choose": (KeepPlanner, "choose"), "_take": (keeping, "_kinds_of")}.get(cut, (keeping, cut))
        with monkeypatch.context() as once:
            once.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.train_batch(iter(batches[0]))
        assert engine.global_steps == 1 and own.store is None
        assert [store.swapper._load_buffers for store in stores] == [[]] * (cut == "_take")  # none: it is closed
        losses = [engine.train_batch(iter(batches[1])).item()]
        assert engine.kept is None
        for batch in batches[2:]:
            losses.append(engine.train_batch(iter(batch)).item())
            record: Any = engine.kept
            assert record.policy == "everything" and dict(record.cells) == {Tier.SSD: 4, Tier.DEVICE: 2}
        assert losses == plain.losses[1:] and not differing(read_weights(model), plain.weights)


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_elastic_hears_of_the_first_step_that_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The step before it shows what passes between layers alone."""
    with_limits(tmp_path, monkeypatch)
    with_room(monkeypatch, ROOM)
    batches, told = token_batches(3, 2, rows=1, shortest=5), list[list[int]]()
    with running(config(tmp_path, "nvme", count=2, **asks()), MIXER, vertical=True) as (engine, _):
        most = ElasticCounts(ElasticSettings(), 8, 8), FewerMicroBatches(8, 1, ElasticSettings())
        engine._keeping.passing = PassingBytes(most, 4, 1, 1)
        for batch in batches:
            engine.train_batch(iter(batch))
            lines = re.findall(r"what forwards keep, has taken (\d+) bytes", capfd.readouterr().out)
            told.append([int(size) for size in lines])
        held = dict(engine.kept.num_bytes)[Tier.DEVICE]
    first, second, third = told
    assert first == [] == third and len(second) == 1 and second[0] > held // 2 > 0


@pytest.mark.slow
def test_behind_a_resume_the_tier_is_chosen_again_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_limits(tmp_path, monkeypatch)
    batches = token_batches(5, 2, rows=1, shortest=5)
    made = config(tmp_path / "ssd", "nvme", count=2, **asks())
    train = lambda engine, steps: [engine.train_batch(iter(batches[n])).item() for n in steps]  # noqa: E731
    with_room(monkeypatch, NO_MEMORY)
    with running(made, MIXER, vertical=True) as (engine, model):
        train(engine, range(2))
        engine.save_checkpoint(str(tmp_path / "saved"))
        losses, expected = train(engine, range(2, 5)), contents(engine, model)
        weights = read_weights(model)
    with_room(monkeypatch, ROOM)
    with running(made, MIXER, vertical=True) as (engine, model):
        torch.manual_seed(999)  # whatever the new process has drawn
        engine.load_checkpoint(str(tmp_path / "saved"))
        assert train(engine, range(2, 5)) == losses and not differing(read_weights(model), weights)
        assert differing(expected, contents(engine, model)) == []
        assert engine._keeping.settings.keep_device is Tier.DEVICE
