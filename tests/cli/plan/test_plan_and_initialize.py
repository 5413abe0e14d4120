"""`plan` and `initialize` reckon alike: what one counts the other counts, what one takes the other takes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from harness import base_config, start_process_group
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from planned_runs import BASELINE, CPU, MODELS, Setting, forecast_of, limits, planned_bytes, run_bytes

from ds_vertical.cli.plan.counted_specs import counted_spec
from ds_vertical.distributed import ranks as distributed_ranks
from ds_vertical.engine import memory_check
from ds_vertical.model.hf import SHAPES, read_fields
from ds_vertical.planner import machine, memory_budget
from ds_vertical.planner.budget.shortage import refusal
from ds_vertical.planner.candidate import Candidate, fits
from ds_vertical.planner.linear_program import LpProblem, solve, tier_bytes
from ds_vertical.planner.model_shape import ModelShape, estimated
from ds_vertical.planner.search import _LIBRARIES, PlanError, Task, _Search, _Sizes, _Timing, choose
from ds_vertical.types import Placement, TensorKind, Tier

MIB = 1 << 20
NO_ROOM = (0, BASELINE)
PADDING = 64 << 10  # whole blocks of I/O, and shares in whole numbers
# A run cannot know before its first batch what autograd keeps of a block and of the head, in "one layer's backward" here.
# Where the plan may count more: pieces as large as any may be, a layer's small tensors in its buffers, shares of the state in
# whole parameters. Of these models.
MOST_MORE = {
    "optimizer slots": 97 * MIB,
    "parameter buffers": 38 * MIB,
    "gradients": 16 * MIB,
    "one layer's backward": 16 * MIB,
}
MOST_MORE_SHARED = MOST_MORE | {"gradients": 64 * MIB}  # those of four parameters as large as an embedding


@st.composite
def settings_of(
    draw: st.DrawFn, models: Sequence[str] = tuple(MODELS), dtypes: Sequence[str] = ("bf16", "fp16", "fp32")
) -> Setting:
    found = Setting(
        draw(st.sampled_from(models)),
        draw(st.sampled_from(dtypes)),
        draw(st.sampled_from([0.0, 1.0])),
        draw(st.sampled_from([1, 2, 8])),
        draw(st.sampled_from([1, 2])),
        draw(st.integers(0, 3)),
        state_on_ssd=draw(st.sampled_from([1.0, 0.8, 0.4, 0.0])),
    )
    early = found.task.certain and found.state_on_ssd > 0
    return replace(found, delay=draw(st.sampled_from([0.0, 0.25, 0.9, 1.0])) if early else 1.0)


SOME = settings_of(("gpt, tied", "llama, many layers", "llama, wide vocabulary"), ("bf16",))
BUDGETS = st.integers(850, 2600).map(lambda count: count * 10**6)
FEW = settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),  # a smaller example says no more than the setting itself
)
MANY = settings(FEW, max_examples=400)


def check_items(setting: Setting, host_bytes: int) -> None:
    found = setting.candidate(host_bytes)
    assume(found is not None)
    assert found is not None
    config = setting.config(found, host_bytes)
    forecast = setting.forecast(config)
    terms = found.case.terms  # a run takes what is faster where it fits, so that it refuses nothing
    forecast.pairs, forecast.keeps_freed = terms.pairs, terms.keeps_freed
    plan, run = planned_bytes(found), run_bytes(forecast, setting.baseline)
    what = "interpreter and libraries"  # a little more where it was measured, since starts differ
    assert plan.pop(what) - run.pop(what) == (
        0 if setting.process_bytes is None else round(1.1 * setting.baseline) - setting.baseline
    )
    is_shared = found.choice.placement.named()["state_on_ssd"] not in (0.0, 1.0)
    if not is_shared:
        more = {what: run[what] - plan.get(what, 0) for what in run if run[what] > plan.get(what, 0) + PADDING}
        assert not more, "initialize counts what the plan does not"
        for what in ("fp64 copy for a norm", "freed memory that is kept", "scaled gradient"):
            assert -PADDING <= plan.get(what, 0) - run.get(what, 0) <= 2 * PADDING, what  # small tensors of two blocks in fp32
    most_more = MOST_MORE_SHARED if is_shared else MOST_MORE
    in_host = found.choice.placement.share(TensorKind.PARAMETERS, Tier.HOST)
    if 0 < in_host < 1:  # whose buffers a run does not have
        resting = in_host * setting.spec.num_elements * found.shape.param_bytes
        most_more = most_more | {"parameter buffers": most_more["parameter buffers"] + resting}
    assert all(plan[what] - run.get(what, 0) <= most for what, most in most_more.items() if what in plan)
    room = (host_bytes, setting.baseline)
    assert memory_check._fault(forecast.paired(room), room, host_bytes, 1) is None


@FEW
@given(SOME, BUDGETS)
def test_a_plan_counts_all_that_initialize_counts_item_by_item(setting: Setting, host_bytes: int) -> None:
    check_items(setting, host_bytes)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_plans_for_several_ranks_count_all_that_initialize_counts(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
    """Of each rank, among others what a reduction copies."""
    monkeypatch.setattr(distributed_ranks, "world_size", lambda: num_ranks)
    for name, clip, count, host_bytes in itertools.product(MODELS, (0.0, 1.0), (1, 8), (1.3e9, 2.6e9)):
        setting = Setting(name, "bf16", clip, count, delay=0.25 if clip == 0 else 1.0, num_ranks=num_ranks)
        found = setting.candidate(host_bytes)
        if found is None:
            continue
        forecast = setting.forecast(setting.config(found, num_ranks * host_bytes))
        forecast.pairs, forecast.keeps_freed = found.case.terms.pairs, found.case.terms.keeps_freed
        plan, run = planned_bytes(found), run_bytes(forecast)
        for items in (plan, run):  # the norm's are what it needs beyond a backward's, of which a plan knows more
            items["one layer's backward"] = items.get("one layer's backward", 0) + items.pop("norm of a gradient", 0)
        more = {what: run[what] - plan.get(what, 0) for what in run if run[what] > plan.get(what, 0) + PADDING}
        assert not more, (setting, "initialize counts what the plan does not")
        room = (int(host_bytes), BASELINE)
        assert memory_check._fault(forecast.paired(room), room, int(num_ranks * host_bytes), num_ranks) is None


@pytest.mark.slow
@MANY
@given(settings_of(), BUDGETS)
def test_many_plans_count_all_that_initialize_counts(setting: Setting, host_bytes: int) -> None:
    check_items(setting, host_bytes)


def check_found(setting: Setting) -> None:
    """What `initialize` accepts at its own minimum `plan` finds, with room for what only batches show."""
    roomy = setting.candidate(8e9)
    assume(roomy is not None)
    assert roomy is not None
    forecast = setting.forecast(setting.config(roomy, 8e9))
    forecast.paired((0, setting.baseline))
    least = sum(run_bytes(forecast, setting.baseline).values())
    room = (least, setting.baseline)
    assert memory_check._fault(forecast, room, least, 1) is None
    more = memory_budget.libraries(setting.process_bytes).num_bytes - memory_budget.LATER_BYTES - setting.baseline
    assert more <= 0.1 * setting.baseline + 1
    more += sum(planned_bytes(roomy).get(what, 0) for what in ("activations between layers", "activations"))
    more += sum(MOST_MORE[what] for what in ("optimizer slots", "one layer's backward", "parameter buffers"))
    host = (least + more) / (1 - 0.006)  # a plan leaves half a percent of a tier free
    searches = (setting.search(host), replace(setting.search(host), window=0))
    assert any(each.fits() for each in searches), "plan refuses a budget that initialize accepts"


@FEW
@given(SOME)
def test_what_initialize_accepts_a_plan_finds(setting: Setting) -> None:
    check_found(setting)


@pytest.mark.slow
@MANY
@given(settings_of())
def test_what_initialize_accepts_plans_find(setting: Setting) -> None:
    check_found(setting)


PROCESSES = st.sampled_from([300, 450, 1200]).map(lambda count: count * 10**6)


@FEW
@given(SOME, BUDGETS, PROCESSES)
def test_plan_and_initialize_are_one_whatever_the_process_holds(setting: Setting, host_bytes: int, process_bytes: int) -> None:
    """As it was measured on the machine of the plan. Without that a plan assumes 704 MiB."""
    measured = replace(setting, process_bytes=process_bytes)
    check_items(measured, host_bytes)
    check_found(measured)


# ---- defects found so


def test_fp16_keeps_every_gradient_in_plans_as_in_runs() -> None:
    """The loss scale may skip any step, so that no early one is final."""
    setting = Setting("gpt", "fp16", 0.0, 2)
    assert not setting.task.certain and Setting("gpt", "bf16", 0.0, 2).task.certain
    found = choose(setting.task, CPU, limits(1.5e9)).chosen
    forecast = setting.forecast(setting.config(found, 1.5e9))
    assert found.case.terms.held_share == forecast.terms.held_share == 1.0 and not found.choice.early


@pytest.mark.parametrize(("on_ssd", "state_on_ssd"), [(0.0, 1.0), (0.0, 0.4), (0.5, 1.0)])
def test_early_values_of_parameters_in_memory_count_in_plans_as_in_runs(on_ssd: float, state_on_ssd: float) -> None:
    """Weights in memory, state on SSD: until the norm three quarters of them are there once more."""
    setting = Setting("gpt", "bf16", 0.0, 2, delay=0.25, state_on_ssd=state_on_ssd)
    found = setting.candidate(8e9)
    assert found is not None
    placement = found.choice.placement.with_shares(TensorKind.PARAMETERS, {Tier.SSD: on_ssd})
    case = replace(found.case, shape=replace(found.shape, placement=placement))
    found = replace(found, choice=replace(found.choice, placement=placement), case=case)
    what, run = "early values of parameters", run_bytes(setting.forecast(setting.config(found, 8e9)))
    early = 0.75 * min(1 - on_ssd, state_on_ssd) * 2 * setting.spec.num_elements
    plan, at_rest = planned_bytes(found), "optimizer state at rest"  # of which a run may have less, by one parameter
    assert 0.8 * early < run[what] <= plan[what] + plan.get(at_rest, 0) - run.get(at_rest, 0) + PADDING
    assert plan[what] <= early + 2 * found.shape.small.parameters + PADDING


def test_a_set_up_that_takes_more_than_the_steps_is_planned_for() -> None:
    """A wide vocabulary: stock's buffers for the embedding's state take more than any step."""
    setting = Setting("llama, wide vocabulary", "bf16", 0.0, 2, delay=0.0)
    found = setting.candidate(2.6e9)
    assert found is not None
    forecast = setting.forecast(setting.config(found, 2.6e9))
    assert found.case.setup_bytes == pytest.approx(BASELINE + forecast.setup_bytes, rel=0.001)
    room = 2 * sum(planned_bytes(found).values())  # twice what steps take
    for setup, has_room in ((room - 64 * MIB, True), (room + MIB, False)):
        case = replace(found.case, limits=limits(room), setup_bytes=setup)
        assert (solve(case) is not None) == fits(replace(found, case=case)) == has_room


@pytest.mark.parametrize("name", ["gpt", "gpt, tied", "gpt, one layer above a sub-group"])
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_share_of_the_parameters_in_host_memory_is_of_each_ranks_shards(
    monkeypatch: pytest.MonkeyPatch, name: str, num_ranks: int
) -> None:
    """Some of every layer, in whole parameters. A plan counts buffers as large as without them."""
    setting = Setting(name, "bf16", 1.0, 2, num_ranks=num_ranks)
    found = setting.candidate(4e9)
    assert found is not None
    placement = found.choice.placement.with_shares(TensorKind.PARAMETERS, {Tier.SSD: 0.5})
    case = replace(found.case, shape=replace(found.shape, placement=placement))
    found = replace(found, choice=replace(found.choice, placement=placement), case=case)
    monkeypatch.setattr(distributed_ranks, "world_size", lambda: num_ranks)
    forecast = setting.forecast(setting.config(found, 4e9 * num_ranks))
    forecast.pairs, forecast.keeps_freed = case.terms.pairs, case.terms.keeps_freed
    plan, run = planned_bytes(found), run_bytes(forecast)
    of_rank, small = 2 * setting.spec.num_elements / num_ranks, 2 * found.shape.small.parameters
    assert 0.3 * of_rank < run["parameters at rest"] <= plan["parameters at rest"] <= 0.51 * of_rank + small
    assert run.get("parameter buffers", 0) <= plan["parameter buffers"] + PADDING


def test_a_program_has_all_of_the_parameters_in_host_memory_only_without_buffers_for_them() -> None:
    """Between none and all of them a plan counts no buffers less; where all fit that way, they are there."""
    setting = Setting("gpt, tied", "bf16", 1.0, 2)
    found = setting.candidate(8e9)
    assert found is not None and not found.shape.in_files(TensorKind.PARAMETERS)
    sizes = {on_ssd: _host_bytes(found, on_ssd) for on_ssd in (1.0, 0.5, 0.02, 0.0)}
    weights = 2 * setting.spec.num_elements
    assert sizes[0.5] - sizes[1.0] == pytest.approx(0.5 * weights, rel=0.05)
    assert sizes[0.0] < sizes[0.02]
    limit = sizes[0.0] / 0.99
    solved = solve(replace(found.case, shape=_resting(found, 1.0), limits=limits(limit)))
    assert solved is not None and solved.placement(1.0).share(TensorKind.PARAMETERS, Tier.HOST) == 1.0


def _resting(found: Candidate, on_ssd: float) -> ModelShape:
    return replace(found.shape, placement=found.shape.placement.with_shares(TensorKind.PARAMETERS, {Tier.SSD: on_ssd}))


def _host_bytes(found: Candidate, on_ssd: float) -> float:
    shape = _resting(found, on_ssd)
    return tier_bytes(replace(found.case, setup_bytes=0.0), shape.placement, Tier.HOST)


def test_frozen_parameters_take_no_part_in_a_share_in_host_memory() -> None:
    """DeepSpeed leaves them on SSD, unless all parameters are in host memory. The SSD decides here, and half of them fit."""
    setting = Setting("gpt", "bf16", 1.0, 2)
    found = setting.candidate(2e9)
    assert found is not None
    rates = (f"ssd_{way}_{both}bytes_per_s" for way in ("read", "write") for both in ("", "together_"))
    slow = replace(CPU, **dict.fromkeys(rates, 1e8))
    deep = replace(_resting(found, 1.0), layer_elements=5 * found.shape.layer_elements)
    case = replace(found.case, shape=deep, machine=slow, fixed={"gradients_on_ssd": 0.0})
    trained = (0, *(elements // 10 for elements in deep.layer_elements))
    for gradients, share in ((None, 0.5), (trained, sum(trained) / deep.num_elements)):
        own = replace(case, shape=replace(case.shape, gradients=gradients))
        least = tier_bytes(own, own.shape.placement, Tier.HOST)
        limit = (least + deep.num_elements) / 0.995  # which a plan leaves free in part
        solved = solve(replace(own, limits=limits(limit)))
        assert solved is not None
        assert solved.placement(1.0).share(TensorKind.PARAMETERS, Tier.HOST) == pytest.approx(share, rel=0.05)


# ---- refusals


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_plan_that_is_refused_says_what_mends_it_and_that_does(clip: float) -> None:
    setting = Setting("gpt, tied", "bf16", clip, 8)
    with pytest.raises(PlanError) as caught:
        choose(setting.task, CPU, limits(1.2e9))
    message = str(caught.value)
    assert re.search(r"host memory: \d+ MiB short \(most is [a-z' .]+: \d+ MiB\)", message) and "ranks" not in message
    (more,) = re.findall(r"(\d+) GB more host memory", message)
    choose(setting.task, CPU, limits(1.2e9 + int(more) * 1e9))
    if length := re.search(r"--sequence-length (\d+)", message):
        spec = setting.spec.shortened(int(length[1]))
        choose(replace(setting.task, spec=spec), CPU, limits(1.2e9))


def test_the_item_that_a_refusal_names_is_there_with_what_it_is_short_by() -> None:
    """Shares are chosen so that as little as can be is lacking: most of 30 GB of gradients is then on SSD."""
    path = SHAPES / "llama_3_8b.json"
    spec = counted_spec(path, read_fields(path), 2048, "bf16")
    assert spec is not None
    task = Task(spec, 2048, lambda size: estimated(spec, size, 1e14), micro_batch_size=1, keep=False)
    search = _Search(task, machine.read_profile("a100_server").machine, limits(9e9), (_LIBRARIES,))
    message = refusal(OneCase(search._case(_Sizes(1, 1, 1), _Timing(1.0, 1.0, False))))
    found = re.search(r"host memory: (\d+) MiB short \(most is ([a-z' .]+): (\d+) MiB\)", message)
    assert found is not None and int(found[3]) <= 9e9 / MIB + int(found[1])


@dataclass
class OneCase:
    """A search with one case, which has found nothing."""

    case: LpProblem

    def cases(self) -> Iterator[tuple[LpProblem, int, int]]:
        yield self.case, 1, 1

    def placed(self) -> Iterator[tuple[LpProblem, Placement, int]]:
        yield from ()

    def remedies(self, lacking: Mapping[Tier, float]) -> Iterator[str]:
        assert lacking
        yield "so much"


def test_a_plan_that_whole_micro_batches_keep_from_fitting_names_the_tier() -> None:
    """By the program a third of the activations may be in each tier; of one micro-batch all are in one."""
    setting = Setting("gpt", "bf16", 0.0, 1)
    found = setting.candidate(2e9)
    assert found is not None
    needed = {tier: tier_bytes(found.case, found.shape.placement, tier) for tier in Tier}
    short = replace(found.case, limits=limits(needed[Tier.HOST] - 3 * MIB))

    class Nothing:
        def cases(self) -> Iterator[tuple[LpProblem, int, int]]:
            yield replace(short, limits=limits(1e12)), 1, 1

        def placed(self) -> Iterator[tuple[LpProblem, Placement, int]]:
            yield short, found.shape.placement, 1

        def remedies(self, lacking: Mapping[Tier, float]) -> Iterator[str]:
            assert set(lacking) == {Tier.HOST}
            yield "so much"

    message = refusal(Nothing())
    words = (
        r"no setting fits; the least is short of host memory: 3 MiB short \(most is .*: \d+ MiB\) \(whole micro-batches of 1\)"
    )
    assert re.match(words, message) and message.endswith("it takes so much")


def _changed(config: dict[str, Any], path: str, value: float) -> dict[str, Any]:
    key, _, inner = path.partition(".")
    return {**config, key: _changed(config[key], inner, value) if inner else value}


@pytest.mark.parametrize(
    ("name", "clip", "changes", "short", "advised"),
    [
        ("llama, many layers", 1.0, {"prefetch_layers": 3}, 8 * MIB, "sub_group_size"),
        ("gpt, tied", 0.0, {"optimizer_delay": 0.9}, 8 * MIB, "optimizer_delay"),
        ("gpt", 1.0, {}, 4 * MIB, "prefetch_layers"),
    ],
)
def test_every_number_that_initialize_advises_makes_the_run_fit(
    name: str, clip: float, changes: dict[str, float], short: int, advised: str
) -> None:
    setting = Setting(name, "bf16", clip, 8, delay=0.25 if clip == 0 else 1.0)
    found = setting.candidate(8e9)
    assert found is not None
    config = setting.config(found, 8e9)
    config["vertical_schedule"] |= changes
    forecast = setting.forecast(config)
    forecast.paired(NO_ROOM)  # what a run gives up before it refuses
    allowed = sum(run_bytes(forecast).values()) - short
    message = memory_check._fault(forecast, (allowed, BASELINE), allowed, 1)
    assert message is not None
    first = message.splitlines()[0]
    assert re.match(rf"host memory: needs \d+ bytes, {allowed} are allowed, {short} too few \(most is [^:]+: \d+\); ", first)
    found_changes = re.findall(r'"([a-z_.]+)": ([0-9.]+) \(now', first)
    assert advised in {path.rpartition(".")[2] for path, _ in found_changes} and "rank" not in first
    for path, value in found_changes:
        other = setting.forecast(_changed(config, path, float(value) if "." in value else int(value)))
        limit = int(value) if path.endswith("host_memory_bytes") else allowed
        assert memory_check._fault(other.paired((limit, BASELINE)), (limit, BASELINE), limit, 1) is None, (path, value)


@pytest.mark.parametrize(
    ("section", "top", "advised"),
    [
        ({}, {}, [("gradient_accumulation_steps", 1)]),
        ({}, {"train_batch_size": 32}, [("gradient_accumulation_steps", 1), ("train_batch_size", 4)]),
        (
            {"elastic": {}},
            {},
            [("vertical_schedule.elastic.total", 4), ("vertical_schedule.elastic.max_micro_batches", 1)],
        ),
        ({"elastic": {"min_micro_batches": 2}}, {}, []),
        ({"acco": {}}, {}, []),
    ],
    ids=str,
)
def test_fewer_micro_batches_are_advised_as_the_run_takes_them(
    monkeypatch: pytest.MonkeyPatch, section: dict[str, Any], top: dict[str, Any], advised: list[tuple[str, int]]
) -> None:
    """With several ranks those of one micro-batch need no sums. `elastic` has others keys for it, two halves have none."""
    start_process_group()
    monkeypatch.setattr(distributed_ranks, "world_size", lambda: 4)

    def forecast(**changed: Any) -> memory_check.Forecast:
        config = base_config("/ssd", num_micro_batches=8, params="cpu", optimizer="cpu", section={"prefetch_layers": 0})
        config["vertical_schedule"] |= section
        return forecast_of("gpt", "bf16", config | top | changed).paired(NO_ROOM)

    least = sum(run_bytes(forecast(**advised_in(section, advised))).values())
    room = (least + MIB, BASELINE)
    message = memory_check._fault(forecast(), room, None, 1)
    assert (message is None) == (not advised)
    if message is not None:
        first = message.splitlines()[0]
        assert all(re.search(rf'"{path}": {value} \(now \d+\)', first) for path, value in advised), first
        assert memory_check._fault(forecast(**advised_in(section, advised)), room, None, 1) is None
    tight = memory_check._fault(forecast(), (least - 9 * MIB, BASELINE), None, 1)
    assert tight is not None
    steps = [int(number) for number in re.findall(r'"gradient_accumulation_steps": (\d+)', tight.splitlines()[0])]
    assert "elastic" not in section or not steps, "they say only what the ranks' numbers add up to"
    assert "acco" not in section or not any(number % 2 for number in steps)


def advised_in(section: dict[str, Any], advised: list[tuple[str, int]]) -> dict[str, Any]:
    """The keys of a JSON that follows the advice."""
    found: dict[str, Any] = {path: value for path, value in advised if "." not in path}
    own = {path.rpartition(".")[2]: value for path, value in advised if "." in path}
    made = {"prefetch_layers": 0} | section | ({"elastic": section["elastic"] | own} if own else {})
    return found | {"vertical_schedule": made}


def test_a_chunk_that_makes_the_set_up_too_large_is_what_the_advice_is_about() -> None:
    setting = Setting("gpt, one layer above a sub-group", "bf16", 0.0, 2, blocks_per_layer=2, delay=0.0)
    found = setting.candidate(8e9)
    assert found is not None
    config = setting.config(found, 8e9)
    config["zero_optimization"]["sub_group_size"] = 10**9
    forecast = setting.forecast(config)
    forecast.paired(NO_ROOM)
    allowed = BASELINE + forecast.setup_bytes - MIB
    assert run_bytes(forecast)["stock's set-up beyond the rest"] > MIB
    message = memory_check._fault(forecast, (allowed, BASELINE), None, 1)
    assert message is not None
    (size,) = re.findall(r'"zero_optimization.sub_group_size": (\d+) \(now 1000000000\)', message.splitlines()[0])
    config["zero_optimization"]["sub_group_size"] = int(size)
    other = setting.forecast(config)
    other.paired(NO_ROOM)
    assert memory_check._fault(other, (allowed, BASELINE), None, 1) is None
