"""What plans keep of a forward for its backward, at the settings of the benchmarks, and advice for what does not fit."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from typing import Any

import pytest

from ds_vertical.cli.plan import command, pieces
from ds_vertical.config.section import load_section
from ds_vertical.errors import CostsError
from ds_vertical.planner import search
from ds_vertical.planner.candidate import Choice
from ds_vertical.planner.kept_activations import KeptShare, PolicyPoint, keep_keys
from ds_vertical.planner.machine import Machine, Profile
from ds_vertical.planner.model_shape import CountedMenu, CountedPoint, ModelSpec, Seconds
from ds_vertical.planner.search import Plan, PlanError, Task, choose
from ds_vertical.types import Placement, Tier

# One memory, two cores; the disk alone, and both directions together.
FULL = Machine(2.6e9, 3.73e9, 1.58e9, 2, True, None, None, 5e9, 1.46e9, 2.1e9, norm_elements_per_s=9.3e8, adam_core_share=0.999)
LIMITED = replace(
    FULL,
    ssd_read_bytes_per_s=3e8,
    ssd_write_bytes_per_s=5e8,
    ssd_read_together_bytes_per_s=None,
    ssd_write_together_bytes_per_s=None,
)


def spec(tokens: int) -> ModelSpec:
    """gpt_101m, with what `plan` counts of one of its blocks at so many tokens."""
    unit, flops = 2 * tokens * 1024, 2 * 12 * 1024**2 * tokens
    counted = (
        CountedPoint("free", 0, 0.32 * flops, 24 * unit, 22),
        CountedPoint("products", 9 * unit, 1.0 * flops, 75 * unit, 17),
        CountedPoint("everything", 18 * unit, 1.0 * flops, 122 * unit, 0),
    )
    menu = CountedMenu("GPTNeoXLayer", 8, flops, 122 * unit, counted)
    blocks = (12_596_224,) * 8
    return ModelSpec(
        "gpt_101m", tokens, "bf16", 559_104, blocks, 4_194_304, flops, 0, flops / 50, unit, 20 * unit, 4 * unit, (menu,)
    )


def plan(tokens: int, num_micro_batches: int, machine: Machine, host: float = 20e9, keep: bool = True) -> Plan:
    forward, backward = {8: (0.003, 0.0078), 512: (0.040, 0.090)}[tokens]
    pieces = Seconds(forward, backward, 0.0005, 0.0002, 0.001 if tokens == 8 else 0.02)
    task = Task(
        spec(tokens), tokens * num_micro_batches, lambda _: pieces, clip=0.0, micro_batch_size=1, flops_per_byte=20, keep=keep
    )
    return choose(task, machine, {Tier.DEVICE: None, Tier.HOST: host, Tier.SSD: 50e9})


def test_nothing_is_kept_where_the_ssd_decides() -> None:
    """The control: four micro-batches of 8 tokens at 300/500 MB/s."""
    found = plan(8, 4, LIMITED, host=1.4e9)
    assert found.chosen.choice.policy == "none" and found.chosen.choice.kept is None
    other = found.best_otherwise
    assert other is not None and other.estimate_s >= 0.99 * found.chosen.estimate_s  # what the runner-up loses is known
    assert [point["name"] for point in command._menu(found.chosen)] == ["free", "products", "everything"]


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "count", "most"), [(8, 16, 0.88), (512, 4, 0.85)])
def test_everything_is_kept_in_memory_where_the_cores_decide(tokens: int, count: int, most: float) -> None:
    kept, plain = (plan(tokens, count, FULL, host=2e9, keep=keep) for keep in (True, False))
    choice = kept.chosen.choice
    assert choice.policy == "everything" and choice.kept is not None and choice.kept.device == 1.0
    assert kept.chosen.estimate_s <= most * plain.chosen.estimate_s


@pytest.mark.slow
def test_where_memory_is_short_the_ssd_takes_what_is_kept_and_wears() -> None:
    kept, plain = (plan(512, 6, LIMITED, host=1.6e9, keep=keep) for keep in (True, False))
    chosen = kept.chosen
    assert chosen.choice.kept is not None and chosen.choice.kept.ssd > 0
    cells = chosen.traffic.kept_written / chosen.choice.kept.point.num_bytes
    assert cells == pytest.approx(chosen.choice.kept.ssd * 6 * 6, abs=1) and cells.is_integer()  # of the last two layers none
    assert chosen.traffic.kept_read == chosen.traffic.kept_written
    assert chosen.traffic.written > plain.chosen.traffic.written
    # of two ranks, a day, over the free bytes of the SSD
    size = 4e9
    worn = command._drive_writes(chosen, Profile("here", LIMITED, {**dict.fromkeys(Tier), Tier.SSD: size}, {}), 2)
    moved = {name: value for name, value in asdict(chosen.traffic).items() if name.endswith("_written")}
    assert moved["kept_written"] > 0 and worn == pytest.approx(2 * sum(moved.values()) * 86400 / chosen.estimate_s / size)
    assert chosen.estimate_s < 0.88 * plain.chosen.estimate_s


GPU = Machine(3e9, 2e9, 1e9, 16, False, 2e10, 2e10, 2e9, 1.4e9, ssd_latency_s=1e-4, copy_latency_s=1e-5)


def task(**changes: Any) -> Task:
    pieces = Seconds(0.01, 0.02, 0.001, 0.001, 0.01)
    return Task(spec(512), 16 * 512, lambda _: pieces, **{"clip": 0.0, "num_ranks": 1} | changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "wanted"),
    [
        ((1e8, 24e9, 100e9), {"device"}),
        ((8e9, 1e9, 100e9), {"host"}),
        ((1e8, 1e9, 100e9), {"host", "device"}),
        ((8e9, 2e9, 5e8), set()),
    ],
)
def test_the_advice_for_what_does_not_fit_is_true(limits: tuple[float, ...], wanted: set[str]) -> None:
    """Each piece of advice is followed by itself, and then there is a plan."""
    given = dict(zip(Tier, limits, strict=True))
    with pytest.raises(PlanError, match="it takes ") as caught:
        choose(task(), GPU, given)
    text = str(caught.value)
    assert wanted <= set(re.findall(r"(device|host|ssd) memory: \d+ MiB short", text))
    if length := re.search(r"--sequence-length (\d+)", text):
        choose(replace(task(), spec=spec(int(length[1]))), GPU, given)
    if tokens := re.search(r"--tokens-per-step (\d+)", text):
        choose(replace(task(), tokens=int(tokens[1])), GPU, given)
    more = re.findall(r"(\d+) GB more (device memory|host memory|free on the SSD)", text)
    words = {"device memory": Tier.DEVICE, "host memory": Tier.HOST, "free on the SSD": Tier.SSD}
    assert more
    choose(task(), GPU, {**given, **{words[what]: given[words[what]] + 1e9 * int(count) for count, what in more}})


@pytest.mark.slow
def test_fewer_ranks_are_advised_where_they_would_do() -> None:
    given = dict(zip(Tier, (8e9, 1e9, 100e9), strict=True))  # of one rank: the host has twice as much
    with pytest.raises(PlanError, match=r"fewer ranks \(--num-ranks 1\)"):
        choose(task(num_ranks=2), GPU, given)
    assert choose(task(), GPU, {**given, Tier.HOST: 2e9}).chosen.choice.num_micro_batches


def test_steps_are_taken_in_place_where_two_generations_do_not_fit() -> None:
    """Without clipping; where the SSD has room the run goes on after a norm that is not finite, unless that is not wanted."""
    room = 20.0 * spec(512).num_elements
    limits = {Tier.DEVICE: 8e9, Tier.HOST: 1.9e9, Tier.SSD: room}
    search_of = lambda **changes: search._Search(task(micro_batch_size=1, **changes), GPU, limits, ())  # noqa: E731
    in_place = {timing.in_place for timing in search_of()._all_timings if timing.early}
    assert in_place == {False, True}
    assert {timing.in_place for timing in search_of(stop=False)._all_timings} == {False}
    assert {timing.in_place for timing in search_of(stop=True)._all_timings if timing.early} == {True}
    assert {timing.in_place for timing in search_of(clip=1.0)._all_timings} == {False}
    limits[Tier.SSD] *= 2
    assert {timing.in_place for timing in search_of()._all_timings} == {False}


@pytest.mark.slow
def test_a_plan_in_place_has_one_generation_and_says_so() -> None:
    room = 20.0 * spec(512).num_elements
    chosen = choose(task(micro_batch_size=1), GPU, {Tier.DEVICE: 8e9, Tier.HOST: 1.6e9, Tier.SSD: room}).chosen
    assert chosen.choice.in_place and chosen.choice.early and chosen.shape.generations == 1 and chosen.ssd_bytes <= room


def test_timed_seconds_count_in_the_place_of_counted_ones() -> None:
    """A part of the products saves in proportion; a policy, or a kind of block, that was not timed is counted."""
    counted = replace(spec(512).menus[0])
    part = replace(counted.points[1], outputs=1, num_bytes=1000, flops=counted.points[1].flops / 2, moved_bytes=0)
    menu = replace(counted, points=(*counted.points, part))
    seconds = Seconds(0.04, 0.09, 0.0, 0.0, 0.0, saved_shares={menu.kind: {"products": 0.9, "everything": 0.95}})
    plain, timed = (menu.menu(1, each, 20.0) for each in (replace(seconds, saved_shares={}), seconds))
    products, everything = timed.point("products"), timed.point("everything")
    assert products and everything and (products.saved_s, everything.saved_s) == (pytest.approx(0.036), pytest.approx(0.038))
    assert timed.point("free") == plain.point("free") is not None
    other = replace(seconds, saved_shares={"Other": {"products": 0.5}})
    assert menu.menu(1, other, 20.0) == plain
    (half,) = (p for p in timed.points if p.outputs == 1)
    full = menu.points[1]
    assert half.saved_s == pytest.approx(0.036 * part.flops / (full.flops + 20.0 * full.moved_bytes))
    assert seconds.times(2).saved_shares == seconds.saved_shares and seconds.times(2).block_forward == 0.08
    own = menu.menu(1, replace(seconds, saved_shares={menu.kind: {"products": 0.9, "products_1": 0.5}}), 20.0)
    assert [p.saved_s for p in own.points if p.outputs == 1] == [pytest.approx(0.02)]  # timed by itself


def test_the_mean_block_is_of_all_kinds_that_were_timed() -> None:
    kinds = {
        "Dense": {"layer_forward_s": 0.01, "layer_backward_s": 0.02, "free_saved_s": 0.003},
        "Sparse": {"layer_forward_s": 0.03, "layer_backward_s": 0.1, "products_2_saved_s": 0.006},
    }
    around = {"pre_forward_s": 0.001, "pre_backward_s": 0.002, "head_s": 0.004}
    found = pieces._seconds(around, kinds, {"Dense": 3, "Sparse": 1})
    assert (found.block_forward, found.block_backward) == (pytest.approx(0.015), pytest.approx(0.04))
    assert found.saved_shares == {"Dense": {"free": pytest.approx(0.2)}, "Sparse": {"products_2": pytest.approx(0.4)}}
    assert (found.pre_forward, found.pre_backward, found.head) == (0.001, 0.002, 0.004)


@pytest.mark.slow
def test_plans_have_shares_of_the_cells_in_two_tiers() -> None:
    """Memory for a part of what every cell would keep: the others compute again, or go to SSD."""
    found = plan(512, 6, LIMITED, host=1.7e9)
    kept = found.chosen.choice.kept
    assert kept is not None and found.chosen.choice.policy in ("products", "everything")
    keys = keep_keys(kept, one_memory=True)
    assert load_section({"vertical_schedule": {"activations": keys}})
    assert found.chosen.estimate_s <= 1.01 * min(other.estimate_s for other in found.runners_up)


def test_a_plans_way_to_keep_is_written_with_the_keys_of_the_section() -> None:
    point = PolicyPoint("everything", 1e6, 0.01)
    assert keep_keys(KeptShare(point, device=0.25, ssd=0.5), one_memory=True) == {
        "keep": "everything",
        "keep_device": "ssd",
        "keep_share": 0.5,
        "keep_host_share": 0.25,
    }
    assert keep_keys(KeptShare(point, host=1.0), one_memory=False) == {"keep": "everything", "keep_device": "host"}
    assert keep_keys(KeptShare(point, 0.5, 0.25), False)["keep_host_share"] == 0.25
    assert keep_keys(KeptShare(PolicyPoint("free", 0.0, 0.01), 0.5), True) == {"keep": "free", "keep_share": 0.5}
    assert keep_keys(None, True) == {"keep": "none"}
    with pytest.raises(CostsError, match=r"kept\.device: got 0\.25; write 0"):
        keep_keys(KeptShare(point, device=0.25, ssd=0.5), one_memory=False)


def test_a_choice_is_read_as_it_was_written() -> None:
    kept = KeptShare(PolicyPoint("products", 1e6, 0.01), 0.0, 0.25, 0.5)
    choice = Choice(1, 4, 1, 1, 0.25, True, Placement.of(activations_on_ssd=0.5), kept=kept)
    assert Choice.from_json(json.loads(json.dumps(choice.to_json()))) == choice
    assert Choice.from_json(replace(choice, kept=None).to_json()).policy == "none"
