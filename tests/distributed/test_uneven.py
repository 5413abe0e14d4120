"""Ranks that bring different numbers of micro-batches, with real processes: what they compute is what one process with all
micro-batches does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import uneven_worker
from harness import Run, differing, largest_relative, run_arm
from rank_groups import Found, Groups
from uneven_jobs import run_jobs
from uneven_worker import COUNTS, Job

TOLERANCE = 1e-6  # fp32, relative per tensor
pytestmark = pytest.mark.timeout(1000)  # processes of one core each, which other work may share


def in_one_process(folder: Path, num_ranks: int, weighted: bool = False, clip: float = 0.5) -> Run:
    """Stock in this process, over the micro-batches of all ranks. `weighted`: the losses of a step, by their tokens."""
    steps = uneven_worker.steps_of(COUNTS[num_ranks])
    factors = {b["labels"].data_ptr(): _factor(b, step) if weighted else 1.0 for step in steps for b in step}
    job = Job("one", [], micro_batches=max(map(len, steps)), tier="cpu", clip=clip)

    def loss_fn(loss: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return loss * factors[batch["labels"].data_ptr()]

    return run_arm(job.config(folder), uneven_worker.build, steps, vertical=False, loss_fn=loss_fn)


def _factor(batch: dict[str, torch.Tensor], step: list[dict[str, torch.Tensor]]) -> float:
    return batch["labels"].numel() * len(step) / sum(each["labels"].numel() for each in step)


def whole(shares: list[dict[str, torch.Tensor]], weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All ranks' shares joined, in the parameters' shapes."""
    flat = {name: torch.cat([share[name].flatten() for share in shares]) for name in weights}
    return {name: flat[name][: weight.numel()].view_as(weight) for name, weight in weights.items()}


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    gaps = largest_relative(a, b)
    assert {name: gap for name, gap in gaps.items() if gap > TOLERANCE} == {}


def assert_one_process(found: Found, one: Run) -> None:
    """Losses, norms, gradients and weights of each step; samples and learning rate."""
    for rank in found:
        assert rank["losses"][:2] == pytest.approx(one.losses[:2], rel=TOLERANCE), "the mean of all ranks, on each"
        assert rank["norms"] == pytest.approx(one.norms, rel=TOLERANCE)
        assert_close(one.weights, rank["weights"])
        for name in ("global_steps", "global_samples", "skipped_steps", "lr"):
            assert rank["counters"][name] == one.counters[name], name
    for step, grads in enumerate(one.grads):
        own = {name: grad.view_as(one.weights[name]) for name, grad in grads.items()}
        assert_close(own, whole([rank["grads"][step] for rank in found], one.weights))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Groups:
    runs: list[dict[str, Any]] = [
        {"name": "vertical"},
        {"name": "weighted", "weighted": True, "clip": 0.0, "section": {"optimizer_delay": 0.3}},
        {"name": "failing", "kind": "failing"},
        {"name": "straight", "kind": "straight"},
        {"name": "resumed", "kind": "resumed"},
        {"name": "horizontal", "kind": "refused", "section": {"order": "horizontal"}},
    ]
    of_slow_tests: list[dict[str, Any]] = [
        {"name": "stock", "vertical": False, "tier": "cpu"},
        {"name": "stock weighted", "vertical": False, "tier": "cpu", "weighted": True, "clip": 0.0},
        {"name": "checked", "section": {"self_check": True}},
        {"name": "watched", "kind": "watched", "tier": "cpu"},
    ]
    folder = tmp_path_factory.mktemp("two")
    return Groups(folder, lambda place, group: run_jobs(place, 2, group), runs, of_slow_tests)


def slow(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return in_one_process(tmp_path_factory.mktemp("one"), 2)


@pytest.mark.parametrize("arm", ["vertical", slow("stock"), slow("checked")])
def test_two_ranks_compute_what_one_process_does(two: Groups, one: Run, arm: str) -> None:
    assert_one_process(two[arm], one)


@pytest.mark.parametrize("arm", ["weighted", slow("stock weighted")])
def test_micro_batches_count_by_their_tokens_where_the_loss_function_says_so(two: Groups, tmp_path: Path, arm: str) -> None:
    weighted = in_one_process(tmp_path, 2, weighted=True, clip=0.0)
    assert_one_process(two[arm], weighted)


@pytest.mark.slow
def test_the_monitor_and_the_counters_know_of_all_ranks(two: Groups) -> None:
    counts = COUNTS[2]
    samples = [sum(map(sum, counts[: step + 1])) for step in range(len(counts))]
    tokens = [sum(rank["tokens"][step] for rank in two["watched"]) for step in range(len(counts))]
    for rank in two["watched"]:
        assert [each[0] for each in rank["seen"]] == samples and [each[3] for each in rank["seen"]] == tokens
    assert two["watched"][0]["seen"] == two["watched"][1]["seen"]
    text = two["watched"][0]["rows"]["Train_Samples_train_loss.csv"]
    rows = [line.split(",") for line in text.splitlines()[1:]]
    ours = [(int(row[0]), float(row[1])) for row in rows]
    for number, loss in zip(samples[:2], two["vertical"][0]["losses"], strict=False):
        assert any(step == number and value == pytest.approx(loss, rel=1e-5) for step, value in ours)


def test_an_error_on_the_rank_with_fewer_micro_batches_is_everyones_and_the_step_is_taken_again(two: Groups, one: Run) -> None:
    for number, rank in enumerate(two["failing"]):
        for kind, text, seconds in rank["told"]:
            assert kind == ("RuntimeError" if number == 1 else "OtherRankError") and seconds < 30, text
            assert number == 1 or "rank 1: RuntimeError" in text
        assert rank["skipped"] == 1 and rank["samples"] == sum(COUNTS[2][0])
    first, second = two["failing"]
    assert not differing(first["weights"], second["weights"])


def test_a_run_goes_on_from_a_checkpoint_with_the_same_bits(two: Groups) -> None:
    for straight, rank in zip(two["straight"], two["resumed"], strict=True):
        assert rank["losses"] == straight["losses"][1:]
        assert not differing(rank["weights"], straight["weights"]) and not differing(rank["state"], straight["state"])
        assert rank["samples"] == straight["samples"]


def test_horizontal_order_refuses_unequal_numbers_on_all_ranks_and_goes_on(two: Groups) -> None:
    for rank in two["horizontal"]:
        kind, text, _ = rank["told"]
        assert kind == "LoopError" and "bring 3, 1 micro-batches" in text
        assert rank["then"][0] == "nothing"


def test_four_ranks_compute_what_one_process_does(tmp_path: Path) -> None:
    found = run_jobs(tmp_path, 4, [{"name": "four", "tier": "cpu"}])["four"]
    assert_one_process(found, in_one_process(tmp_path / "one", 4))


@pytest.fixture(scope="module")
def elastic(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    folder = tmp_path_factory.mktemp("elastic")
    common: dict[str, Any] = {"kind": "elastic", "tier": "cpu"}
    replayed = {"elastic": {"counts": str(folder / "measured.log")}}
    runs = [
        {"name": "measured", "slow_s": 0.4, "section": {"elastic": {}}, **common},
        {"name": "replayed", "section": replayed, **common},
        {"name": "stock", "vertical": False, "section": replayed, **common},
        {"name": "stock measured", "kind": "told", "vertical": False, "tier": "cpu", "section": {"elastic": {}}},
        {"name": "too many", "kind": "told", "tier": "cpu", "section": {"elastic": {"total": 7, "max_micro_batches": 3}}},
        {"name": "three calls", "kind": "by calls", "tier": "cpu", "section": {"elastic": {}}},
        {"name": "no log", "kind": "told", "tier": "cpu", "section": {"elastic": {"counts": "nowhere/log"}}},
    ]
    return run_jobs(folder, 2, runs)


def test_a_slow_rank_gets_fewer_micro_batches_and_all_ranks_know_it(elastic: dict[str, Found]) -> None:
    first, second = (rank["taken"] for rank in elastic["measured"])
    assert first == second and first[0] == (3, 3)
    assert all(sum(counts) == 6 for counts in first) and first[-1][0] > first[-1][1] >= 1
    assert elastic["measured"][0]["samples"] == 6 * len(first)


def test_a_run_is_repeated_from_its_log_bit_for_bit(elastic: dict[str, Found]) -> None:
    for measured, replayed in zip(elastic["measured"], elastic["replayed"], strict=True):
        assert replayed["taken"] == measured["taken"] and replayed["losses"] == measured["losses"]
        assert not differing(measured["weights"], replayed["weights"]) and not differing(measured["state"], replayed["state"])


def test_the_lines_of_a_process_say_which_engine_they_are_of(elastic: dict[str, Found]) -> None:
    said = {name: elastic[name][0]["log"] for name in ("measured", "replayed", "stock")}
    assert "ds_vertical: elastic: from step 1: micro-batches 3 3" in said["measured"]
    assert "ds_vertical: elastic: engine 2: by the log, from step 1: micro-batches 3 3" in said["replayed"]
    assert "ds_vertical: elastic: engine 3: by the log, from step 1: micro-batches 3 3" in said["stock"]


def test_the_stock_arm_takes_the_same_counts_from_the_log(elastic: dict[str, Found]) -> None:
    for measured, stock in zip(elastic["measured"], elastic["stock"], strict=True):
        assert stock["losses"] == pytest.approx(measured["losses"], rel=TOLERANCE)
        assert stock["samples"] == measured["samples"]
        assert_close(measured["weights"], stock["weights"])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("stock measured", 'vertical_schedule.elastic.counts: got null with "enabled": false'),
        ("too many", "vertical_schedule.elastic.total: got 7 for 2 ranks with max_micro_batches 3; write 6 or less"),
        ("no log", 'vertical_schedule.elastic.counts: got "nowhere/log", which cannot be read'),
    ],
)
def test_what_cannot_be_is_refused_on_all_ranks(elastic: dict[str, Found], name: str, text: str) -> None:
    for number, rank in enumerate(elastic[name]):
        kind, found, _ = rank["told"]
        assert text in found
        assert kind == ("OtherRankError" if name == "no log" and number == 1 else "ConfigError")


def test_a_loop_of_the_three_calls_is_refused_on_all_ranks(elastic: dict[str, Found]) -> None:
    for rank in elastic["three calls"]:
        kind, found, _ = rank["told"]
        assert kind == "LoopError" and "vertical_schedule.elastic: got counts for each rank" in found
