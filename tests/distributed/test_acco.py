"""Steps of two halves with real processes: what they commit is what the paper's formulas say, and what an exact step would
commit where both halves have the same micro-batches."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import acco_worker
import pytest
import torch
from acco_worker import ADAM, CURVATURES, NUM_DESCENTS, VOCAB, Batch, Model, batches, items_of
from harness import differing, largest_relative
from processes import start_ranks
from rank_groups import Found, Groups

from ds_vertical.schedule.trace import read_trace

TOLERANCE = 1e-6  # fp32, relative per tensor
EVEN = [[4, 4]] * 4
RATES = (0.1, 0.2, 0.33)
UNEVEN = [[4, 2], [2, 5], [3, 4], [5, 4]]
SHORT = [[4, 4], [2, 2], [2, 2], [4, 4], [3, 3]]
BY_TOTAL = [[5, 3], [2, 2], [3, 2], [3, 5], [3, 5]]  # of the log's 5 and 3, then 3 and 5: steps 2 and 3 bring fewer
pytestmark = pytest.mark.timeout(1000)  # processes of one core each, which other work may share


def run_jobs(folder: Path, num_ranks: int, runs: list[dict[str, Any]]) -> dict[str, Found]:
    """{run: what each rank found}."""
    description = folder / "job.json"
    given = [{"counts": EVEN, "acco": {}} | run for run in runs]
    description.write_text(json.dumps({"folder": str(folder / "swap"), "out": str(folder), "runs": given}))
    command = [sys.executable, str(Path(acco_worker.__file__)), str(description)]
    start_ranks(command, folder, num_ranks=num_ranks, limit_s=900, forked=True)
    loaded = {run["name"]: [folder / f"{run['name']}.rank{rank}.pt" for rank in range(num_ranks)] for run in runs}
    return {name: [torch.load(path, weights_only=True) for path in paths] for name, paths in loaded.items()}


# ---- the paper's formulas, in one process


@dataclass
class Adam:
    """AdamW in fp32 over named tensors: (weights, state) -> (weights, state), nothing in place."""

    step: int = 0
    first: dict[str, torch.Tensor] = field(default_factory=dict)
    second: dict[str, torch.Tensor] = field(default_factory=dict)

    def after(
        self, weights: dict[str, torch.Tensor], gradient: dict[str, torch.Tensor], lr: float
    ) -> tuple[dict[str, torch.Tensor], Adam]:
        beta1, beta2 = torch.tensor(ADAM["betas"], dtype=torch.float32).tolist()  # as the kernel takes them
        then = Adam(self.step + 1)
        found = {}
        for name, grad in gradient.items():
            then.first[name] = beta1 * self.first.get(name, torch.zeros_like(grad)) + (1 - beta1) * grad
            then.second[name] = beta2 * self.second.get(name, torch.zeros_like(grad)) + (1 - beta2) * grad**2
            mean, square = then.first[name] / (1 - beta1**then.step), then.second[name] / (1 - beta2**then.step)
            found[name] = weights[name] * (1 - lr * ADAM["weight_decay"]) - lr * mean / (square.sqrt() + ADAM["eps"])
        return found, then


@dataclass
class Reference:
    """What the steps commit: losses, norms and gradients (of the mean, not clipped) of each, the weights and moments at the
    end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: list[dict[str, torch.Tensor]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    adam: Adam = field(default_factory=Adam)


def clipped(gradient: dict[str, torch.Tensor], clip: float) -> tuple[dict[str, torch.Tensor], float]:
    norm = torch.cat([grad.flatten() for grad in gradient.values()]).norm().item()
    factor = max(1.0, (norm + 1e-6) / clip) if clip else 1.0
    return {name: grad / factor for name, grad in gradient.items()}, norm


def sums(
    model: Model, weights: dict[str, torch.Tensor], given: list[tuple[Batch, float]]
) -> tuple[dict[str, torch.Tensor], float]:
    """Of the weighted losses of some micro-batches at `weights`: the gradients, and the losses themselves."""
    model.load_state_dict(weights)
    model.zero_grad()
    total = 0.0
    for batch, weight in given:
        loss = model(**batch) * weight
        loss.backward()
        total += loss.item()
    return {name: param.grad.double() for name, param in model.named_parameters() if param.grad is not None}, total


def reference(
    counts: list[list[int]], rates: list[float], clip: float, weighted: bool = False, blank: int | None = None
) -> Reference:
    """Of all ranks' micro-batches: theta~' = Opt(theta, s, g~/N~), then theta', s' = Opt(theta, s, (g~ + g)/(N~ + N)). Where
    N~ is 0 nothing is predicted: the next g~ is taken at theta'."""
    torch.manual_seed(0)
    model, found = Model(), Reference()
    committed = {name: param.detach().clone() for name, param in model.named_parameters()}
    predicted, by_rank = committed, [batches(counts, rank, blank=blank) for rank in range(len(counts[0]))]
    for step, rate in enumerate(rates):
        halves: list[list[tuple[Batch, float]]] = [[], []]
        for own in (each[step] for each in by_rank):
            for index, batch in enumerate(own):
                halves[index >= len(own) // 2].append((batch, float(items_of(batch)) if weighted else 1.0))
        before, first_loss = sums(model, predicted, halves[0])
        behind, second_loss = sums(model, committed, halves[1])
        first, both = sum(weight for _, weight in halves[0]), sum(weight for half in halves for _, weight in half)
        guess, _ = clipped({name: grad / max(first, 1.0) for name, grad in before.items()}, clip)
        whole = {name: (grad + behind[name]) / both for name, grad in before.items()}
        gradient, norm = clipped(whole, clip)
        predicted, _ = found.adam.after(committed, guess, rate)
        committed, found.adam = found.adam.after(committed, gradient, rate)
        predicted = predicted if first else committed
        found.losses.append((first_loss + second_loss) / both)
        found.norms.append(norm)
        found.grads.append(whole)
    found.weights = committed
    return found


def whole(shares: list[dict[str, torch.Tensor]], weights: dict[str, torch.Tensor], kind: str = "") -> dict[str, torch.Tensor]:
    """All ranks' shares joined, in the parameters' shapes."""
    return {name: torch.cat([share[name + kind] for share in shares]).view_as(weight) for name, weight in weights.items()}


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    gaps = largest_relative(a, b)
    assert {name: gap for name, gap in gaps.items() if gap > TOLERANCE} == {}


def assert_committed(found: Found, expected: Reference, has_mean_of_all: bool) -> None:
    """Norms, gradients, weights and moments of each commit; losses where each rank has the mean of all."""
    for rank in found:
        assert rank["norms"] == pytest.approx(expected.norms, rel=TOLERANCE)
        if has_mean_of_all:
            assert rank["losses"] == pytest.approx(expected.losses, rel=TOLERANCE)
        assert_close(expected.weights, rank["weights"])
    if not has_mean_of_all:
        means = [sum(losses) / len(found) for losses in zip(*(rank["losses"] for rank in found), strict=True)]
        assert means == pytest.approx(expected.losses, rel=TOLERANCE)
    for step, grads in enumerate(expected.grads):
        assert_close(grads, whole([rank["grads"][step] for rank in found], expected.weights))
    states = [rank["state"] for rank in found]
    for kind, moments in (("/exp_avg", expected.adam.first), ("/exp_avg_sq", expected.adam.second)):
        assert_close(moments, whole(states, expected.weights, kind))


# ---- two ranks


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Groups:
    folder = tmp_path_factory.mktemp("two")
    apart = {"overlap": False}
    one_half: dict[str, Any] = {"acco": None, "counts": [[2, 2]] * 4, "micro_batches": 2}
    traced = {"trace": str(folder / "trace")}
    log = folder / "counts.log"
    log.write_text("elastic: from step 1: micro-batches 5 3\nelastic: from step 3: micro-batches 3 5\n")
    by_log = {"min_micro_batches": 2, "total": 8, "counts": str(log)}
    runs: list[dict[str, Any]] = [
        {"name": "exact", **one_half},
        {"name": "same", "repeated": True},
        {"name": "other", "section": traced},
        {"name": "uneven", "counts": UNEVEN, "micro_batches": 6},
        {"name": "blank", "counts": UNEVEN, "micro_batches": 6, "weighted": True, "blank": 1},
        {"name": "untouched", "kind": "untouched"},
        {"name": "resumed", "kind": "resumed"},
        {"name": "failing", "kind": "failing"},
        {"name": "beside", "kind": "beside", "section": {"trace": str(folder / "trace of beside")}},
        {"name": "broken", "kind": "broken"},
        {"name": "poisoned", "kind": "poisoned"},
        {"name": "short", "counts": SHORT},
        {"name": "short resumed", "kind": "resumed", "counts": SHORT},
        {"name": "by total", "counts": BY_TOTAL, "micro_batches": 6, "section": {"elastic": by_log}},
        {"name": "ending", "kind": "ending", "counts": [[8, 5]]},
        {"name": "by calls", "kind": "by calls"},
        *_bowls(RATES[1]),
    ]
    of_slow_tests: list[dict[str, Any]] = [
        {"name": "same apart", "repeated": True, "section": apart},
        {"name": "exact bf16", "dtype": "bf16", "clip": 0.0, **one_half},
        {"name": "same bf16", "repeated": True, "dtype": "bf16", "clip": 0.0},
        {"name": "exact frozen", "frozen": True, **one_half},
        {"name": "same frozen", "frozen": True, "repeated": True},
        {"name": "frozen", "frozen": True},
        {"name": "frozen resumed", "frozen": True, "kind": "resumed"},
        {"name": "other apart", "section": apart},
        {"name": "broken apart", "kind": "broken", "section": apart},
        {"name": "weighted", "counts": UNEVEN, "micro_batches": 6, "weighted": True, "clip": 0.0},
        {"name": "blank unclipped", "counts": UNEVEN, "micro_batches": 6, "weighted": True, "blank": 1, "clip": 0.0},
        {"name": "fetched", "section": {"outside_layers": "fetched", "prefetch_layers": 2}},
        {"name": "kept", "section": {"activations": {"keep": "everything"}}},
        {"name": "evaluated", "kind": "evaluated"},
        {"name": "poisoned late", "kind": "poisoned", "first": 2},
        {"name": "written", "kind": "written"},
        {"name": "gathered", "kind": "gathered"},
        {"name": "checked", "section": {"self_check": True}},
        {"name": "measured", "kind": "elastic", "counts": [[6, 6]] * 5, "section": {"elastic": {"min_micro_batches": 2}}},
        {"name": "derived", "kind": "told", "top": {"gradient_accumulation_steps": None, "train_batch_size": 6}},
        *_bowls(RATES[0]),
        *_bowls(RATES[2]),
    ]
    cuts: list[dict[str, Any]] = [{"name": "cut", "kind": "cut", "counts": [[2, 2]] * 16}]  # alone: it takes minutes
    return Groups(folder, lambda place, group: run_jobs(place, 2, group), runs, of_slow_tests, cuts)


def _bowls(rate: float) -> list[dict[str, Any]]:
    common = {"kind": "descend", "rate": rate, "clip": 0.0}
    return [{"name": f"bowl {rate}", **common}, {"name": f"exact bowl {rate}", **common, "acco": None}]


def slow(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("exact", "acco"),
    [("exact", "same"), *map(slow, ("exact", "exact bf16", "exact frozen"), ("same apart", "same bf16", "same frozen"))],
)
def test_halves_of_the_same_micro_batches_commit_the_bits_of_exact_steps(two: Groups, exact: str, acco: str) -> None:
    for a, b in zip(two[exact], two[acco], strict=True):
        assert a["norms"] == b["norms"] and a["rates"] == b["rates"]
        assert b["losses"] == pytest.approx(a["losses"], rel=TOLERANCE), "means of as many losses again"
        assert not differing(a["weights"], b["weights"]) and not differing(a["state"], b["state"])
        assert all(not differing(c, d) for c, d in zip(a["grads"], b["grads"], strict=True))


@pytest.mark.parametrize("name", ["other", *map(slow, ("other apart", "fetched", "kept", "checked"))])
def test_other_micro_batches_commit_what_the_formulas_say(two: Groups, name: str) -> None:
    assert_committed(two[name], reference(EVEN, two[name][0]["taken"], 0.5), has_mean_of_all=False)


@pytest.mark.parametrize(("name", "clip"), [("uneven", 0.5), slow("weighted", 0.0)])
def test_other_numbers_of_micro_batches_do_too(two: Groups, name: str, clip: float) -> None:
    rates = two[name][0]["taken"]
    assert_committed(two[name], reference(UNEVEN, rates, clip, weighted=name == "weighted"), has_mean_of_all=True)


@pytest.mark.parametrize(("name", "clip"), [("blank", 0.5), slow("blank unclipped", 0.0)])
def test_a_first_half_that_weighs_nothing_predicts_nothing(two: Groups, name: str, clip: float) -> None:
    """In the second of four steps `num_items` is 0 for all micro-batches of both ranks' first halves."""
    expected = reference(UNEVEN, two[name][0]["taken"], clip, weighted=True, blank=1)
    assert_committed(two[name], expected, has_mean_of_all=True)


def test_a_tentative_step_leaves_masters_moments_powers_and_weights_as_they_are(two: Groups) -> None:
    for rank in two["untouched"]:
        assert rank["num"] == 4 * 4, "each of four steps predicts each of four units"
        assert rank["changed"] == []


def descended(rate: float, delay: int) -> list[float]:
    """The losses of gradient descent on the quadratic, with gradients of so many steps ago."""
    places, losses = [[1.0] * len(CURVATURES)], []
    for step in range(NUM_DESCENTS):
        losses.append(sum(each / 2 * x * x for each, x in zip(CURVATURES, places[-1], strict=True)))
        old = places[max(0, step - delay)]
        places.append([x - rate * each * y for each, x, y in zip(CURVATURES, places[-1], old, strict=True)])
    return losses


@pytest.mark.parametrize("rate", [slow(RATES[0]), RATES[1], slow(RATES[2])])
def test_a_quadratic_descends_as_without_delay_where_a_delay_of_one_step_diverges(two: Groups, rate: float) -> None:
    for rank, exact in zip(two[f"bowl {rate}"], two[f"exact bowl {rate}"], strict=True):
        assert rank["losses"] == exact["losses"]
        assert rank["losses"] == pytest.approx(descended(rate, 0), rel=1e-3)
        assert rank["losses"][-1] < rank["losses"][0] / 2
    assert (descended(rate, 1)[-1] > descended(rate, 1)[0]) == (rate >= 0.2)


def test_the_learning_rate_follows_the_gradients_that_were_counted(two: Groups) -> None:
    """With M = 4 the ranks bring 8, 4, 4, 8 and 6 gradients: the scheduler is at 1, 1, 2, 3 and 3 steps."""
    steps = two["other"][0]["rates"]  # one step each
    for rank in two["short"]:
        assert rank["rates"] == [steps[0], steps[0], steps[1], steps[2], steps[2]]
        assert rank["counters"]["global_samples"] == 8 + 4 + 4 + 8 + 6


def test_with_elastic_the_learning_rate_follows_its_total(two: Groups) -> None:
    """With M = 6 and a total of 8 the ranks bring 8, 4, 5, 8 and 8 gradients: the scheduler is at 1, 1, 2, 3 and 4 steps."""
    steps, found = two["other"][0]["rates"], two["by total"]
    for rank in found:
        assert rank["rates"] == [steps[0], steps[0], steps[1], steps[2], steps[3]]
        assert rank["counters"]["global_samples"] == 8 + 4 + 5 + 8 + 8
    assert_committed(found, reference(BY_TOTAL, found[0]["taken"], 0.5), has_mean_of_all=False)


@pytest.mark.slow
def test_with_elastic_that_measures_each_step_brings_the_total(two: Groups) -> None:
    steps = two["other"][0]["rates"]
    for rank in two["measured"]:
        assert [sum(counts) for counts in rank["counts"]] == [8] * 5 and min(map(min, rank["counts"])) >= 2
        assert rank["rates"][:4] == steps and 0 < rank["loss"] < 10


STAY = [slow("other", "evaluated"), slow("frozen", "frozen resumed")]


@pytest.mark.parametrize(("plain", "name"), [("other", "resumed"), ("short", "short resumed"), ("other", "failing"), *STAY])
def test_a_load_evaluations_and_steps_that_fail_change_no_bit(two: Groups, plain: str, name: str) -> None:
    """The short steps leave gradients that have not moved the learning rate yet when they are saved."""
    for without, found in zip(two[plain], two[name], strict=True):
        assert found["losses"] == without["losses"] and found["lr"][0] == without["rates"][-1]
        assert not differing(without["weights"] | without["state"], found["contents"])


@pytest.mark.slow
def test_an_evaluation_is_of_the_committed_weights(two: Groups) -> None:
    for rank in two["evaluated"]:
        assert [value for value, _ in rank["seen"]] == pytest.approx([plain for _, plain in rank["seen"]], rel=TOLERANCE)


def test_all_ranks_hear_of_one_that_fails_in_either_half(two: Groups) -> None:
    other, own = ([told for told, _, _ in rank["told"]] for rank in two["failing"])
    assert own == ["RuntimeError"] * 2 and other == ["OtherRankError"] * 2


@pytest.mark.parametrize("name", ["poisoned", slow("poisoned late")])
def test_gradients_that_are_not_finite_are_skipped_and_nothing_is_predicted(two: Groups, name: str) -> None:
    """In both halves, or in the second one, which finds a prediction from the first. Both halves of the next step compute at
    the committed weights then."""
    for rank in two[name]:
        assert rank["skipped"] == 1 and rank["changed"] == [] and not rank["predicts"]
        assert rank["losses"][0] == pytest.approx(rank["plain"], rel=TOLERANCE)
        assert rank["again"] and all(0 < loss < 10 for loss in rank["losses"])


@pytest.mark.slow
def test_a_master_that_a_user_writes_ends_the_prediction(two: Groups) -> None:
    assert [(rank["before"], rank["behind"]) for rank in two["written"]] == [(True, False)] * 2


@pytest.mark.slow
def test_a_weight_that_a_user_writes_is_seen_by_both_halves(two: Groups) -> None:
    """All logits are then 0, so the loss is the logarithm of their number. To read a weight changes nothing."""
    for rank in two["gathered"]:
        assert rank["before"] and rank["read"]
        assert rank["loss"] == pytest.approx(math.log(VOCAB), rel=1e-6)


def test_a_rank_without_a_micro_batch_for_each_half_is_refused_on_all_ranks(two: Groups) -> None:
    for rank in two["ending"]:
        kind, told, _ = rank["told"]
        assert kind == "LoopError" and "the ranks bring 4, 1 micro-batches with vertical_schedule.acco" in told
        assert "let each rank's iterator go on into the next epoch" in told
        assert rank["steps"] == 2 and rank["brought"] == (4, 4) and 0 < rank["again"] < 10


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_a_step_that_is_cut_at_a_boundary_of_its_halves(two: Groups) -> None:
    """Both ranks at the same one. What follows has the bits of a run without cuts, or both engines say that it has not."""
    for rank in two["cut"]:
        assert rank["wrong"] == [], "\n".join(rank["wrong"])
        assert rank["reached"] and rank["num"] > 50
        assert len(rank["torn"]) < 0.35 * rank["num"], "\n".join(rank["torn"])


@pytest.mark.slow
def test_an_odd_number_that_follows_from_the_batch_size_is_refused(two: Groups) -> None:
    kind, told, _ = two["derived"][0]["told"]
    assert kind == "ConfigError"
    assert "gradient_accumulation_steps: got 3 (train_batch_size over 2 ranks) with vertical_schedule.acco" in told


def test_a_loop_of_the_three_calls_is_refused(two: Groups) -> None:
    for rank in two["by calls"]:
        kind, told, _ = rank["told"]
        assert kind == "LoopError" and "remove acco, or call engine.train_batch(data_iter)" in told


def test_the_first_halfs_last_gradients_travel_while_the_second_half_computes(two: Groups) -> None:
    """They are held back until the second half comes to NORM@-1, behind the first layer's forwards: where the first half waited
    for them, nothing would let them through. They change no bit."""
    assert_beside(two["other"], two["beside"], EVEN)
    steps = read_trace(two.folder / "trace of beside" / "rank0.jsonl")
    assert len(steps) == len(EVEN)
    for step in steps:
        (waited,) = [wait for wait in step.waits if wait.by == "NORM@-1"]
        (decided,) = [span for span in step.spans if span.name == "NORM@-1"]
        (_, last) = [span for span in step.spans if span.name == "0F1"]
        assert waited.name == "reduce 0, pre" and last.end <= waited.start < waited.end <= decided.start
        assert not any(wait.name.startswith("reduce pre") and wait.by == "end" for wait in step.waits)


def assert_beside(plain: Found, found: Found, counts: list[list[int]]) -> None:
    """All reductions came through the gate, which was closed ahead of the first half's last one, and they changed nothing."""
    num_steps, num_units = len(counts), 4
    for number, (rank, own) in enumerate(zip(plain, found, strict=True)):
        seconds = [step[number] - step[number] // 2 for step in counts]
        assert own["opened"] == [f"0F{count - 1}" for count in seconds] and own["late"] == 0
        assert own["passed"] >= 2 * num_units * num_steps
        assert all(own[key] == rank[key] for key in ("losses", "norms", "rates"))
        assert not differing(rank["weights"] | rank["state"], own["weights"] | own["state"])
        assert all(not differing(a, b) for a, b in zip(rank["grads"], own["grads"], strict=True))


@pytest.mark.parametrize("name", ["broken", slow("broken apart")])
def test_a_step_that_fails_with_gradients_of_its_first_half_on_their_way_can_be_taken_again(two: Groups, name: str) -> None:
    """On one rank, or on both by an interrupt, in whichever place between the first half's last REDUCE and what is made of it.
    What follows has the bits of a run without failures."""
    alone, places = ["left", "forward", "waiting", "made"], ["left", "between", "forward", "waiting", "deciding", "made"]
    for number, (plain, found) in enumerate(zip(two["other"], two[name], strict=True)):
        raised = "RuntimeError" if number == 1 else "OtherRankError"
        assert found["told"] == [*((each, raised) for each in alone), *((each, "KeyboardInterrupt") for each in places)]
        if name == "broken":
            assert found["passed"] > 0
            early = [each for each in [*alone * number, *places] if each not in ("deciding", "made")]
            assert found["in_flight"] == early
        assert found["late"] == 0 and found["losses"] == plain["losses"] and found["lr"][0] == plain["rates"][-1]
        assert not differing(plain["weights"] | plain["state"], found["contents"])


def test_both_steps_of_a_unit_are_taken_while_a_half_computes(two: Groups) -> None:
    """In a trace of rank 0: the step before is committed behind the first forward, and the prediction is made behind the last
    backward of the first half."""
    assert two["other"]
    steps = read_trace(two.folder / "trace" / "rank0.jsonl")
    spans = steps[2].spans
    first = min(span.start for span in spans if span.name == "0F0")
    backwards = sorted(span.start for span in spans if span.name == "0B0")
    committed = [span.start for span in spans if span.resource == "adam" and span.name.startswith("step 1")]
    made = [span.start for span in spans if span.resource == "adam" and span.name.startswith("predict 1")]
    assert len(backwards) == 2 and len(committed) == len(made) == 1
    assert first < committed[0] < backwards[0] < made[0] < backwards[1]


# ---- four ranks, of which two are a node


FOUR = [[2, 4, 3, 2], [2, 2, 2, 2], [3, 2, 2, 4], [2, 2, 2, 2]]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    folder, counts = tmp_path_factory.mktemp("four"), FOUR
    traced = {"trace": str(folder / "trace")}
    node: dict[str, Any] = {"zero": {"zero_hpz_partition_size": 2}}
    same: dict[str, Any] = {"repeated": True, "micro_batches": 2, **node}
    runs: list[dict[str, Any]] = [
        {"name": "rank", "counts": counts},
        {"name": "node", "counts": counts, "acco": {"copies": "node"}, **node},
        {"name": "sent node", "counts": counts, "acco": {"copies": "node"}, **node, "shares": False},
        {"name": "beside node", "kind": "beside", "counts": counts, "acco": {"copies": "node"}, **node, "section": traced},
        {"name": "broken node", "kind": "broken", "counts": counts, "acco": {"copies": "node"}, **node},
        {"name": "resumed node", "kind": "resumed", "counts": counts, "acco": {"copies": "node"}, **node},
        {"name": "exact node", "counts": [[2] * 4] * 3, "acco": None, **same},
        {"name": "same node", "counts": [[2] * 4] * 3, "acco": {"copies": "node"}, **same},
        {"name": "all one node", "kind": "told", "acco": {"copies": "node"}, "zero": {"zero_hpz_partition_size": 4}},
    ]
    found = run_jobs(folder, 4, runs)
    return found | {"steps": [{"steps": read_trace(folder / "trace" / "rank0.jsonl")}]}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rank", "node"])
def test_copies_of_each_rank_and_of_each_node_commit_what_the_formulas_say(four: dict[str, Found], name: str) -> None:
    rates = four[name][0]["taken"]
    assert_committed(four[name], reference(FOUR, rates, 0.5), has_mean_of_all=False)


@pytest.mark.slow
def test_copies_of_a_node_in_memory_of_the_host_have_the_bits_of_those_that_are_sent(four: dict[str, Found]) -> None:
    """Nothing is sent but by a rank that has failed, and its neighbour; all is given back with the engines."""
    for plain, found in zip(four["sent node"], four["node"], strict=True):
        assert plain["losses"] == found["losses"] and plain["norms"] == found["norms"]
        assert not differing(plain["weights"] | plain["state"], found["weights"] | found["state"])
        assert plain["gathers"] == {"mapped": 0}
    assert [rank["gathers"].get("sent", 0) > 0 for rank in four["broken node"]] == [True, True, False, False]
    assert all(rank["gathers"]["mapped"] == 0 for rank in four["broken node"])
    for name in ("node", "beside node", "resumed node", "same node"):
        for rank in four[name]:
            gathers = rank["gathers"]
            assert gathers["read"] > 0 and gathers["summed"] > 0 and set(gathers) == {"read", "summed", "mapped"}, name
            assert gathers["mapped"] == 0, name


@pytest.mark.slow
def test_with_copies_of_a_node_a_run_that_resumes_has_the_bits_of_one_that_does_not(four: dict[str, Found]) -> None:
    for plain, found in zip(four["node"], four["resumed node"], strict=True):
        assert found["losses"] == plain["losses"] and found["lr"][0] == plain["rates"][-1]
        assert not differing(plain["weights"] | plain["state"], found["contents"])


@pytest.mark.slow
def test_with_copies_of_a_node_the_same_micro_batches_commit_the_bits_of_exact_steps(four: dict[str, Found]) -> None:
    for a, b in zip(four["exact node"], four["same node"], strict=True):
        assert a["losses"] == b["losses"] and a["norms"] == b["norms"]
        assert not differing(a["weights"] | a["state"], b["weights"] | b["state"])


@pytest.mark.slow
def test_with_copies_of_a_node_the_first_halfs_last_gradients_cross_the_link_while_the_second_half_computes(
    four: dict[str, Found],
) -> None:
    """By the trace, in which each hop of a reduction over levels stands."""
    assert_beside(four["node"], four["beside node"], FOUR)
    for step in four["steps"][0]["steps"]:
        starts = {name: sorted(span.start for span in step.spans if span.name == name) for name in ("preF0", "0F0", "NORM@-1")}
        hops = [span for span in step.spans if span.resource == "net_cross" and span.end > starts["0F0"][1]]
        left = min((span for span in hops if span.name == "preCROSS"), key=lambda span: span.end)
        (decided,) = starts["NORM@-1"]
        assert starts["preF0"][1] < starts["0F0"][1] < left.end <= decided


@pytest.mark.slow
def test_with_copies_of_a_node_a_step_that_fails_between_its_halves_can_be_taken_again(four: dict[str, Found]) -> None:
    """All four ranks hear of it where one of them has failed."""
    for number, (plain, found) in enumerate(zip(four["node"], four["broken node"], strict=True)):
        assert [told for _, told in found["told"][:4]] == ["RuntimeError" if number == 1 else "OtherRankError"] * 4
        assert found["late"] == 0 and found["losses"] == plain["losses"]
        assert not differing(plain["weights"] | plain["state"], found["contents"])


@pytest.mark.slow
def test_a_node_of_all_ranks_is_refused(four: dict[str, Found]) -> None:
    kind, told, _ = four["all one node"][0]["told"]
    assert kind == "ConfigError" and "zero_hpz_partition_size (vertical_schedule.levels.ranks_per_node): got 4" in told
