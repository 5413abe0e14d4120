"""What the planner says of two halves a step: seconds against the links' by hand, memory, and when it recommends them."""

from __future__ import annotations

import copy
import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_vertical.cli.plan import command
from ds_vertical.cli.plan.half_steps import HalvedStep, two_halves
from ds_vertical.config.cross_check import check
from ds_vertical.config.levels import move_levels
from ds_vertical.config.resolve import resolve
from ds_vertical.config.section import load_section
from ds_vertical.planner import linear_program, memory_budget
from ds_vertical.planner import machine as profile
from ds_vertical.planner.candidate import Candidate, Choice
from ds_vertical.planner.linear_program import LpProblem
from ds_vertical.planner.machine import Machine
from ds_vertical.planner.model_shape import ModelShape
from ds_vertical.planner.network import Network
from ds_vertical.schedule.events import Event, Op
from ds_vertical.schedule.passes import build_training
from ds_vertical.types import Placement, Tier

_IN_MEMORY = Placement.of(parameters_on_ssd=0.0, state_on_ssd=0.0)
_NUMEL, _LAYERS = 1000, 6


def exact(
    cross_bytes_per_s: float, *, num_ranks: int = 4, num_nodes: int = 2, micro_batches: int = 8, host: float = 1e9
) -> Candidate:
    """An exact delayed step of six layers, all in memory: 8 micro-batches compute for 8 x 6 x (0.1 + 0.3) s."""
    machine = Machine(1e6, 1e6, 1e9, 2, one_memory=True, net_local_bytes_per_s=1e9, net_cross_bytes_per_s=cross_bytes_per_s)
    network = Network(num_nodes, num_ranks // num_nodes, reduces_twice=True) if num_ranks > 1 else None
    shape = ModelShape(0, (_NUMEL,) * _LAYERS, 0.1, 0.2, 4, num_shards=num_ranks, network=network, placement=_IN_MEMORY)
    terms = memory_budget.BudgetTerms(micro_batches, one_memory=True)
    limits = {Tier.DEVICE: None, Tier.HOST: host, Tier.SSD: None}
    choice = Choice(1, micro_batches, 1, 1, 1.0, False, _IN_MEMORY)
    return Candidate(choice, LpProblem(shape, machine, terms, limits, 1.0, False), 0.0, ())


def halved(cross_bytes_per_s: float) -> HalvedStep:
    """A step of two halves, of 4 micro-batches each, with a copy for each node."""
    given = exact(cross_bytes_per_s)
    network = replace(given.shape.network or Network(), levels=True, stands=True)
    choice = replace(given.choice, num_micro_batches=4)
    return HalvedStep(choice, replace(given.case, shape=replace(given.shape, network=network)), 0.0, ())


def test_make_waits_for_the_norm_that_decides_it() -> None:
    """In the first half for that of the step before, in the second for NORM@-1, which waits for what the first half left."""
    ran = halved(500.0).timeline  # the last gradients take 4 s
    count = len(ran.events) // ran.num_steps
    for step in (1, 2):
        at = {index: event for index, event in enumerate(ran.events) if step * count <= index < (step + 1) * count}
        (before,) = [index for index, event in at.items() if event == Event(Op.NORM, step_offset=-1)]
        (last,) = [index - count for index, event in at.items() if event == Event(Op.NORM)]
        (left,) = [index for index, event in at.items() if event == Event(Op.CROSS, 0, step_offset=1)]
        begun = min(index for index, event in at.items() if index > left and event == Event(Op.F, 0, 0))
        assert ran.end_s[begun] < ran.end_s[left] <= ran.end_s[before], "the second half computes meanwhile"
        makes = [index for index, event in at.items() if event.op is Op.MAKE]
        assert len(makes) == 2 * (_LAYERS + 1)
        starts = {span.index: span.start_s for span in ran.spans if span.index in makes}
        assert {index > before for index in starts} == {True, False}
        assert all(start >= ran.end_s[before if index > before else last] for index, start in starts.items())


def test_each_half_makes_all_units_for_the_next_and_takes_no_other_step() -> None:
    for half in halved(500.0).halves(_LAYERS):
        events = build_training(half).events
        assert [event.layer for event in events if event.op is Op.MAKE] == ["pre", *range(_LAYERS)]
        assert not any(event.op is Op.STEP or (event.op is Op.FETCH and event.ahead) for event in events)


def test_a_slow_link_carries_weights_and_gradients_twice() -> None:
    given = exact(1.0)
    found = two_halves(given)
    assert found is not None and found.copies == "node" and not found.short
    into_node = _LAYERS * _NUMEL * (2 + 4) / 2  # with a copy for each node
    assert found.step_s == pytest.approx(2 * into_node, rel=0.02)
    assert found.step_s < given.estimate_s  # which has one level: more bytes cross


def test_a_link_that_fits_behind_half_of_the_computation_is_hidden() -> None:
    """A half computes for 9.6 s, and all of its weights and gradients take 3 s. Exposed are the last gradients of the second
    half alone: those of the first one travel while the second one computes."""
    found, computes_s = two_halves(exact(6000.0)), 8 * _LAYERS * (0.1 + 0.3)
    assert found is not None
    last_s = _NUMEL * 4 / 2 / 6000.0
    assert computes_s + 0.99 * last_s < found.step_s < computes_s + 1.3 * last_s


def test_a_link_without_limits_leaves_the_computation() -> None:
    found, given = two_halves(exact(1e12)), exact(1e12)
    assert found is not None
    assert found.step_s == pytest.approx(given.estimate_s, rel=0.01)


def test_many_layers_are_simulated_whole() -> None:
    """What the second half hides of the first one's last gradients does not grow with the layers: no line goes through it."""
    given = exact(8e3)
    shape = replace(given.shape, pre_elements=10 * _NUMEL, layer_elements=(_NUMEL,) * 24)
    found = two_halves(replace(given, case=replace(given.case, shape=shape)))
    assert found is not None and found.step_s > 24 * 8 * 0.4, "all layers compute for so long"


def test_ranks_of_one_host_have_a_copy_each() -> None:
    found = two_halves(exact(1e6, num_nodes=1))
    assert found is not None and found.copies == "rank"


def test_what_does_not_train_with_halves_has_none() -> None:
    assert two_halves(exact(1e6, num_ranks=1, num_nodes=1)) is None
    assert two_halves(exact(1e6, micro_batches=7)) is None
    on_gpus = exact(1e6)
    machine = replace(on_gpus.machine, one_memory=False, copy_in_bytes_per_s=1e9, copy_out_bytes_per_s=1e9)
    assert two_halves(replace(on_gpus, case=replace(on_gpus.case, machine=machine))) is None


def test_bytes_that_lack_are_counted_with_copies_prediction_and_gradients() -> None:
    given = exact(1e6, num_nodes=1)
    assert not _short(given, 1e9)
    own = _LAYERS * _NUMEL // 4
    items = memory_budget.halves_items(_LAYERS * _NUMEL, _LAYERS * _NUMEL, 2, 4, 4, 1)
    assert sum(item.num_bytes for item in items) == 2 * _LAYERS * _NUMEL * 2 + 2 * own * 2 + own * 4
    without = linear_program.tier_bytes(given.case, _IN_MEMORY, Tier.HOST)
    halved = replace(given.case.terms, num_micro_batches=4)
    fewer = linear_program.tier_bytes(replace(given.case, terms=halved), _IN_MEMORY, Tier.HOST)
    assert fewer < without  # half of the micro-batches are in memory at a time
    assert _short(given, 1.0)[Tier.HOST] == pytest.approx(fewer + sum(item.num_bytes for item in items) - 1)


def _short(given: Candidate, host: float) -> dict[Tier, float]:
    limited = replace(given, case=replace(given.case, limits={**given.case.limits, Tier.HOST: host}))
    found = two_halves(limited)
    assert found is not None
    return {tier: num_bytes for tier, num_bytes in found.short.items() if num_bytes is not None}


def test_a_half_moves_each_weight_and_gradient_once() -> None:
    ran = halved(1e4).timeline
    moved = sum(stage.num_bytes for _, stage, _, _ in ran.ran if stage.lane == "net_cross") / ran.num_steps
    assert moved == pytest.approx(2 * _LAYERS * _NUMEL * (2 + 4) / 2)


def machine_and_links(folder: Path, rate: float) -> list[str]:
    report = json.loads((profile.SHIPPED / "a100_server.json").read_text())
    report["machine"] = {**report["machine"], "one_memory": True}
    links = {"local_bytes_per_s": 5e9, "local_latency_s": 1e-5, "cross_bytes_per_s": rate, "cross_latency_s": 2e-5}
    for name, content in (("machine.json", report), ("links.json", {"links": links})):
        (folder / name).write_text(json.dumps(content))
    return ["--machine", str(folder / "machine.json"), "--links", str(folder / "links.json")]


def test_the_command_says_whether_to_try_it(tmp_path: Path) -> None:
    words = ["--model", "gpt_13m", "--tokens-per-step", "65536", "--nodes", "2", "--num-ranks", "4"]
    found = command.plan(command.parsed([*words, *machine_and_links(tmp_path, 1e13)]))
    assert found["acco"]["step_over_chosen"] > 0.99 and not found["acco"]["short"]

    def told(**changed: object) -> str:
        lines = command.plan_lines(found | {"acco": found["acco"] | changed})
        return next(line for line in lines if line.startswith("acco"))

    assert told().endswith("not worth it here")
    assert "a rank lacks 2.5 GB of host memory for it" in told(short={"host": 2.5e9})
    by_rank, by_node = (told(step_over_chosen=0.9, copies=copies) for copies in ("rank", "node"))
    assert "(-10.0%)" in by_rank and 'vertical_schedule.acco {"copies": "rank"}' in by_rank
    assert "zero_hpz_partition_size" not in by_rank
    assert 'vertical_schedule.acco {"copies": "node"}' in by_node
    assert "zero_optimization.zero_hpz_partition_size 4" in by_node


def as_told(config: dict[str, Any], line: str) -> dict[str, Any]:
    """The JSON, changed as a line says: "write PATH VALUE, PATH VALUE; remove PATH"."""
    changed, (wanted, *gone) = copy.deepcopy(config), line.partition(", write ")[2].split("; remove ")
    path = r"(?:vertical_schedule|zero_optimization)[\w.]*"
    found = re.findall(rf'({path}) (\{{.*?\}}|"[^"]*"|[\d.]+)', wanted)
    assert found and all(re.fullmatch(path, each) for each in gone)
    for where, value in (*found, *((each, None) for each in gone)):
        *names, last = where.split(".")
        place = functools.reduce(lambda outer, name: outer[name], names, changed)
        if value is None:
            del place[last]
        else:
            place[last] = json.loads(value)
    return changed


@pytest.mark.parametrize("copies", ["rank", "node"])
@pytest.mark.parametrize("ssds", [["/ssd"], ["/ssd1", "/ssd2"]])
@pytest.mark.parametrize(("rate", "memory"), [(1e13, "64G"), (2e8, "64G"), (2e8, "3G")])
def test_the_plans_json_trains_with_halves_once_it_is_changed_as_the_line_says(
    tmp_path: Path, rate: float, memory: str, ssds: list[str], copies: str
) -> None:
    """Also where the plan has levels, state and weights on one SSD or two, or kept activations."""
    words = ["--model", "gpt_101m", "--tokens-per-step", "8192", "--nodes", "2", "--num-ranks", "2", "--nvme-path", *ssds]
    words += ["--host-memory", memory]
    found = command.plan(command.parsed([*words, *machine_and_links(tmp_path, rate)]))
    assert rate == 1e13 or found["config"]["vertical_schedule"]["levels"]
    assert (found["config"]["zero_optimization"]["offload_optimizer"]["device"] == "nvme") == (memory == "3G")
    planned = found["config"]["vertical_schedule"]
    zero = found["config"]["zero_optimization"]
    on_ssd = "nvme" in (zero["offload_param"]["device"], zero["offload_optimizer"]["device"])
    assert planned.get("nvme_paths") == (ssds if len(ssds) > 1 and on_ssd else None) and (on_ssd or memory == "64G")
    assert (planned["activations"]["keep"] == "everything") == (rate == 1e13)
    faster = found["acco"] | {"copies": copies, "step_over_chosen": 0.9, "short": {}}
    line = next(line for line in command.plan_lines(found | {"acco": faster}) if line.startswith("acco"))
    changed = move_levels(as_told(found["config"], line))
    section = load_section(changed)
    assert section is not None and section.acco is not None and section.acco.copies == copies
    check(changed, section, "cpu")  # raises what is wrong
    assert changed["vertical_schedule"]["activations"] == {"device": "device", "keep": "none"}  # as the halves are simulated
    assert resolve(section).levels.ranks_per_node == (2 if copies == "node" else 1)
