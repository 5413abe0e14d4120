"""Two ranks: real processes over gloo, parameters and optimizer on SSD, against stock on the same two ranks and against
one process in fp32."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import forks
import pytest
import rank_worker
import torch
from harness import MIN_SSD_BYTES, Run, differing, largest_relative, read_weights, run_arm, running
from places import SUPPORT
from processes import start_ranks

from ds_vertical.errors import CheckpointError
from ds_vertical.planner.network import Network, network_from_json

WORKER = Path(rank_worker.__file__)
TOLERANCE = 1e-6  # fp32, relative per tensor (the numerics contract)
NUM_MATRICES = 6  # of the blocks: on SSD in both dtypes
DELAYS = (0.3, 1.0)  # without clipping: part of each layer stepped during the backward, or nothing
HOST_SHARES = {0.3: None, 1.0: 0.5}  # of the gradients that wait; the others wait on SSD
Tensors = dict[str, torch.Tensor]
pytestmark = pytest.mark.timeout(1000)  # two processes of one core each, which other work may share


class TwoRanks:
    """What both ranks computed in one dtype; tensors that the ranks share are joined."""

    def __init__(self, ranks: list[dict[str, Any]], swap: Path, dtype: str) -> None:
        self.ranks = ranks
        self.swap = swap
        self.dtype = dtype

    def each(self, arm: str, name: str) -> list[Any]:
        return [rank[f"{self.dtype} {arm}"][name] for rank in self.ranks]

    def grads(self, arm: str, step: int) -> Tensors:
        return self._whole([grads[step] for grads in self.each(arm, "grads")])

    def weights(self, arm: str) -> Tensors:
        return self.each(arm, "weights")[0]

    def state(self, arm: str, kind: str) -> Tensors:
        end = f"/{kind}"
        shares = [{k.removesuffix(end): v for k, v in s.items() if k.endswith(end)} for s in self.each(arm, "state")]
        return self._whole(shares)

    def _whole(self, shares: list[Tensors]) -> Tensors:
        """Both ranks' shares joined, without the last one's padding, in the parameters' shapes."""
        weights = self.weights("stock")
        assert all(share.keys() == weights.keys() for share in shares)
        flat = {name: torch.cat([share[name].flatten() for share in shares]) for name in weights}
        return {name: flat[name][: weight.numel()].view_as(weight) for name, weight in weights.items()}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """Both arms in both dtypes, one after the other in the same two processes: each rank's results, the swap folder."""
    folder = tmp_path_factory.mktemp("ranks")
    swap = folder / "swap"
    runs = [(dtype, arm) for dtype in ("fp32", "bf16") for arm in ("stock", "vertical")]
    listed: list[dict[str, Any]] = [
        {"name": f"{dtype} {arm}", "dtype": dtype, "vertical": arm == "vertical"} for dtype, arm in runs
    ]
    for delay in DELAYS:
        options = {"clip": 0.0, "delay": delay, "share": HOST_SHARES[delay]}
        listed.append({"name": f"fp32 delay {delay}", "dtype": "fp32", "vertical": True, "options": options})
    description = folder / "job.json"
    description.write_text(json.dumps({"folder": str(swap), "out": str(folder), "runs": listed}))
    start_ranks([sys.executable, str(WORKER), str(description)], folder, forked=True)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)], swap


@pytest.fixture(scope="module")
def fp32(job: tuple[list[dict[str, Any]], Path]) -> TwoRanks:
    return TwoRanks(*job, "fp32")


@pytest.fixture(scope="module")
def bf16(job: tuple[list[dict[str, Any]], Path]) -> TwoRanks:
    return TwoRanks(*job, "bf16")


def in_one_process(folder: Path, sizes: str) -> Run:
    """Stock in fp32 in this process, on the micro-batches of both ranks; the model has the sizes for runs in dtype `sizes`."""
    steps = [a + b for a, b in zip(rank_worker.batches(0, 2), rank_worker.batches(1, 2), strict=True)]
    config = rank_worker.config(folder, "fp32", num_micro_batches=4, tier="cpu")
    return run_arm(config, partial(rank_worker.OddModel, sizes), steps, vertical=False)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return in_one_process(tmp_path_factory.mktemp("reference"), "fp32")


@pytest.fixture(scope="module")
def reference_of_bf16(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return in_one_process(tmp_path_factory.mktemp("reference"), "bf16")


def shaped(flat: Tensors, like: Tensors) -> Tensors:
    return {name: flat[name].view_as(tensor) for name, tensor in like.items()}


def assert_close(a: Tensors, b: Tensors, tolerance: float) -> None:
    assert a.keys() == b.keys()
    gaps = largest_relative(a, b)
    assert {name: gap for name, gap in gaps.items() if gap > tolerance} == {}


def test_fp32_gradients_and_weights_are_stocks(fp32: TwoRanks) -> None:
    for step in range(rank_worker.NUM_STEPS):
        assert_close(fp32.grads("stock", step), fp32.grads("vertical", step), TOLERANCE)
    assert_close(fp32.weights("stock"), fp32.weights("vertical"), TOLERANCE)
    assert_close(fp32.state("stock", "master"), fp32.state("vertical", "master"), TOLERANCE)
    for rank in range(2):
        stock, vertical = fp32.each("stock", "losses")[rank], fp32.each("vertical", "losses")[rank]
        assert vertical == pytest.approx(stock, rel=TOLERANCE)
        assert fp32.each("vertical", "norms")[rank] == pytest.approx(fp32.each("stock", "norms")[rank], rel=TOLERANCE)
        assert fp32.each("vertical", "counters")[rank] == fp32.each("stock", "counters")[rank]


def test_a_loop_of_the_three_calls_has_the_bits_of_train_batch(bf16: TwoRanks) -> None:
    for rank, found in enumerate(each["three calls"] for each in bf16.ranks):
        losses = torch.tensor(found["losses"]).view(-1, rank_worker.NUM_MICRO_BATCHES).mean(1).tolist()
        assert losses == pytest.approx(bf16.each("vertical", "losses")[rank], rel=1e-6)
        assert found["norms"] == bf16.each("vertical", "norms")[rank]
        assert differing(found["weights"], bf16.weights("vertical")) == []


def test_the_ranks_work_on_different_data_and_agree(fp32: TwoRanks) -> None:
    losses, norms = fp32.each("vertical", "losses"), fp32.each("vertical", "norms")
    assert all(a != b for a, b in zip(*losses, strict=True))
    assert norms[0] == norms[1]
    assert min(norms[0]) > 0.5, "clipping must act on every step"
    first, second = fp32.each("vertical", "weights")
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    lengths = [[m["input_ids"].shape[1] for m in rank_worker.batches(rank, 2)[0]] for rank in range(2)]
    assert len({length for rank in lengths for length in rank}) == 4


def test_two_ranks_compute_what_one_process_does(fp32: TwoRanks, reference: Run) -> None:
    """Stock beside stock is no proof that the mean over ranks is right: one process is."""
    for arm in ("stock", "vertical"):
        assert_close(shaped(reference.grads[0], reference.weights), fp32.grads(arm, 0), 5e-6)
    start = {name: param.detach() for name, param in rank_worker.OddModel().named_parameters()}
    assert all(not torch.equal(weight, start[name]) for name, weight in fp32.weights("vertical").items())
    assert_close(reference.weights, fp32.weights("vertical"), 1e-4)


def test_the_delay_changes_no_bit_on_either_rank(fp32: TwoRanks) -> None:
    early, late = (fp32.each(f"delay {delay}", "weights") for delay in DELAYS)
    clipped = fp32.weights("vertical")
    assert all(not torch.equal(early[0][name], clipped[name]) for name in clipped), "clipping did nothing"
    for what in ("losses", "norms", "counters"):
        assert fp32.each(f"delay {DELAYS[0]}", what) == fp32.each(f"delay {DELAYS[1]}", what)
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        assert differing(*(fp32.state(f"delay {delay}", kind) for delay in DELAYS)) == []
    assert [differing(early[0], other) for other in (early[1], *late)] == [[], [], []]


@pytest.mark.parametrize("run", ["fp32", "bf16"])
def test_half_of_every_odd_matrix_lies_on_ssd(run: str, request: pytest.FixtureRequest) -> None:
    ranks: TwoRanks = request.getfixturevalue(run)
    assert all(count > NUM_MATRICES * MIN_SSD_BYTES for count in ranks.each("vertical", "ssd_bytes"))
    assert ranks.weights("vertical")["blocks.0.up.weight"].numel() % 2 == 1


@pytest.mark.parametrize("of", ["gradients", "masters", "weights"])
def test_bf16_is_as_near_to_fp32_as_stock_is(bf16: TwoRanks, reference_of_bf16: Run, of: str) -> None:
    reference = reference_of_bf16
    masters = {name: reference.state[f"{name}/master"] for name in reference.weights}
    what: dict[str, tuple[list[Tensors], Callable[[str], list[Tensors]]]] = {
        "gradients": (reference.grads, lambda arm: [bf16.grads(arm, step) for step in range(rank_worker.NUM_STEPS)]),
        "masters": ([masters], lambda arm: [bf16.state(arm, "master")]),
        "weights": ([reference.weights], lambda arm: [bf16.weights(arm)]),
    }
    wanted, found = what[of]
    for index, expected in enumerate(wanted):
        stock, vertical = (distance(expected, found(arm)[index]) for arm in ("stock", "vertical"))
        assert 0 < vertical <= 1.1 * stock


def distance(expected: Tensors, found: Tensors) -> float:
    """Norm of the difference over all tensors."""
    assert expected.keys() == found.keys()
    gaps = [(found[name].double().flatten() - tensor.double().flatten()).norm() for name, tensor in expected.items()]
    return torch.stack(gaps).norm().item()


def test_a_norm_that_is_not_finite_on_one_rank_stops_both(fp32: TwoRanks) -> None:
    """Without clipping in the middle of steps in place: no step and no save after it. With it nothing was stepped, and both go
    on."""
    expected = [["NonFiniteError", *["TornStateError"] * 2], ["NonFiniteError", *["nothing"] * 2]]
    assert [rank["stop"] for rank in fp32.ranks] == [expected, expected]


def test_what_stays_on_the_device_may_be_read_on_one_rank_after_each_step(fp32: TwoRanks) -> None:
    """Without DeepSpeed, which stock allows; the values are stock's, and so is all else."""
    for rank, found in enumerate(each["persistent"] for each in fp32.ranks):
        stock, vertical = found["stock"], found["vertical"]
        for step, (expected, seen) in enumerate(zip(stock["seen"], vertical["seen"], strict=True)):
            assert (seen is None) == (rank == 1)
            assert seen is None or (seen.shape == (rank_worker.VOCAB,) and not torch.equal(seen, torch.ones(rank_worker.VOCAB)))
            if seen is not None:
                assert_close({f"step {step}": expected}, {f"step {step}": seen}, TOLERANCE)
        assert_close(stock["weights"], vertical["weights"], TOLERANCE)
        assert differing(vertical["weights"], fp32.weights("vertical")) == [], "the threshold has changed the result"
        assert vertical["ssd_bytes"] > NUM_MATRICES * MIN_SSD_BYTES


def test_what_stays_on_the_device_is_there_on_all_ranks_when_its_step_fails_on_one(fp32: TwoRanks) -> None:
    expected = [
        ["NonFiniteError", "OtherRankError", "OtherRankError", "OtherRankError"],
        ["NonFiniteError", "OSError", "TornStateError", "TornStateError"],
    ]
    for rank, found in enumerate(each["persistent failed"] for each in fp32.ranks):
        assert [told.partition(":")[0] for told in found["told"]] == expected[rank], found["told"]
        if rank == 0:
            before, not_taken, *torn = found["seen"]
            assert torch.equal(before, not_taken)
            assert [value.shape for value in torn] == [before.shape] * 3
    assert "rank 1: OSError: no luck here" in fp32.ranks[0]["persistent failed"]["told"][1]
    assert not (fp32.swap.parent / "failed").exists()


def test_the_first_rank_alone_says_how_the_steps_go(fp32: TwoRanks) -> None:
    first, second = (rank["watched"] for rank in fp32.ranks)
    assert "step 2 | " in first["line"] and "Train_vertical_tokens_per_s.csv" in first["rows"]
    assert second["line"] == "" and second["rows"] == {}
    seconds, rate = (first["rows"][f"Train_vertical_{name}.csv"].split()[1].split(",") for name in ("step_s", "tokens_per_s"))
    assert float(rate[1]) * float(seconds[1]) == pytest.approx(first["tokens"][0] + second["tokens"][0])  # of both ranks


def test_a_runs_account_says_how_its_ranks_lie_on_hosts(fp32: TwoRanks) -> None:
    assert [network_from_json(rank["watched"]["network"]) for rank in fp32.ranks] == [Network(1, 2, reduces_twice=True)] * 2


def test_a_user_writes_state_that_ranks_share_unequally(fp32: TwoRanks) -> None:
    """Stock's last rank asks for elements behind the last one."""
    assert [rank["watched"]["written"] for rank in fp32.ranks] == [[True, True]] * 2


def test_room_that_one_rank_lacks_no_rank_uses(fp32: TwoRanks) -> None:
    """Both step late, and keep no second generation; where early steps were asked for, both refuse."""
    late = [losses[:2] for losses in fp32.each(f"delay {DELAYS[1]}", "losses")]
    for rank, expected in zip(fp32.ranks, late, strict=True):
        assert rank["room"] == [{"possible": False, "second": [], "losses": expected}, "StorageError"]


def test_room_that_the_ranks_of_a_host_share_is_counted_once(fp32: TwoRanks) -> None:
    assert all("free for each of 2 ranks; free " in rank["shared room"] for rank in fp32.ranks)


def test_room_for_gradients_that_one_rank_lacks_ends_both(fp32: TwoRanks) -> None:
    assert [rank["gradient room"] for rank in fp32.ranks] == [("StorageError", [])] * 2


def test_both_ranks_resume_and_a_save_that_fails_on_one_fails_on_both(fp32: TwoRanks) -> None:
    first, second = (rank["resumed"] for rank in fp32.ranks)
    assert second["told"] == "ValueError: no luck here"
    assert first["told"] == "OtherRankError: save_checkpoint failed on 1 of 2 ranks; rank 1: ValueError: no luck here"
    assert first["left"] == [], "rank 0 has left something behind"
    assert first["differing"] == second["differing"] == []


def test_a_checkpoint_of_two_ranks_is_refused_on_one(fp32: TwoRanks, tmp_path: Path) -> None:
    made = rank_worker.config(tmp_path, "fp32", clip=0.0, delay=0.3)
    made["zero_optimization"]["offload_param"]["buffer_size"] = 600_000  # elements: whole parameters, not halves
    with running(made, rank_worker.OddModel, vertical=True) as (engine, model):
        before = read_weights(model)
        with pytest.raises(CheckpointError, match="does not fit this run(.|\n)*world size: 1 here, 2 in the checkpoint"):
            engine.load_checkpoint(str(fp32.swap.parent / "saved"), tag="good")
        assert differing(before, read_weights(model)) == []


def test_prepare_gives_both_ranks_the_same_folder_and_each_call_another(fp32: TwoRanks) -> None:
    first, second = (rank["prepared twice"] + list(rank["folders"].values()) for rank in fp32.ranks)
    assert first == second
    assert len(set(first)) == 6 + len(DELAYS)
    assert all(Path(folder).parent == fp32.swap for folder in first)


def test_nothing_is_left_on_ssd_after_the_ranks_have_gone(fp32: TwoRanks) -> None:
    assert fp32.swap.is_dir()
    assert list(fp32.swap.iterdir()) == []


# ---- one rank's disk


def assert_told(rank: int, told: tuple[str, str, float], own: tuple[str, ...] = ("DiskError",)) -> None:
    """In the training thread of both, the first cause and its file on top, in time."""
    kind, text, seconds = told
    assert kind in (own if rank == 1 else ("OtherRankError",)), told
    assert seconds < 10
    if rank == 0:
        assert any(f"failed on 1 of 2 ranks; rank 1: {name}: " in text for name in own), text
    assert "rank1" in text, text  # the folder of its files


def test_a_disk_fault_of_one_rank_is_told_on_both_and_the_step_is_taken_when_it_is_over(
    job: tuple[list[dict[str, Any]], Path],
) -> None:
    for rank, results in enumerate(job[0]):
        for told in results["suffered"]["told"]:
            assert_told(rank, told)
        assert results["suffered"]["differing"] == []


def test_a_state_that_one_rank_has_torn_is_neither_trained_on_nor_saved_by_any(job: tuple[list[dict[str, Any]], Path]) -> None:
    for rank, results in enumerate(job[0]):
        for *steps, saved in results["torn"]:
            assert_told(rank, next(told for told in steps if told[0] != "nothing"), ("DiskError", "TornStateError"))
            assert_told(rank, saved, ("TornStateError",))
    assert not (job[1].parent / "torn").exists()


_MAPPED = """
from pathlib import Path
from ds_vertical.compat.ops import cache
from ds_vertical.distributed import ranks
cache.activate()  # or DeepSpeed compiles the op anew in each virtual environment
ranks.start_distributed()
print(*(line.split(maxsplit=5)[5].strip() for line in Path("/proc/self/maps").open() if "allreduce_buffer" in line))
"""


def test_memory_through_which_ranks_of_a_host_reduce_ends_with_them(tmp_path: Path) -> None:
    """As the launcher starts ranks on the CPU: DeepSpeed maps a file in memory, whose name it never removes."""
    launched = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29631")
    done = forks.run(tmp_path, [sys.executable, "-c", _MAPPED], os.environ | launched, timeout=280, engine=True)
    assert done.returncode == 0, done.stderr
    name = f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_29631_0"
    assert f"{name} (deleted)" in done.stdout, "DeepSpeed has not made it, or it is still there"


@pytest.mark.slow
def test_ends_that_are_fetched_where_they_are_used_change_no_bit_on_either_rank(tmp_path: Path) -> None:
    """Where one rank alone uses an end elsewhere, the step starts over on both, and both keep that end. Where the step fails
    on the other one meanwhile, neither keeps it."""
    description = tmp_path / "job.json"
    description.write_text(json.dumps({"folder": str(tmp_path / "swap"), "out": str(tmp_path), "ends": True}))
    start_ranks([sys.executable, str(WORKER), str(description)], tmp_path)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    for rank in ranks:
        resident, fetched = rank["resident"], rank["fetched"]
        assert (resident["losses"], resident["norms"]) == (fetched["losses"], fetched["norms"])
        assert differing(resident["weights"], fetched["weights"]) == []
        kept, missed = rank["one rank, resident"], rank["one rank, fetched"]
        assert (missed["apart"], missed["steps"]) == (("suf",), rank_worker.NUM_STEPS)
        assert kept["losses"] == missed["losses"] and differing(kept["weights"], missed["weights"]) == []
        assert (rank["one rank fails"]["apart"], rank["one rank fails"]["steps"]) == (("pre", "suf"), 2)
    assert [rank["one rank fails"]["failure"] for rank in ranks] == ["ArithmeticError", "OtherRankError"]
    assert differing(*(whole_state(ranks, value) for value in ("resident", "fetched"))) == []
    assert differing(*(rank["one rank, fetched"]["weights"] for rank in ranks)) == []


def whole_state(ranks: list[dict[str, Any]], run: str) -> Tensors:
    """Both ranks' shares joined, without the last one's padding, which nobody initializes."""
    sizes = {name: weight.numel() for name, weight in ranks[0][run]["weights"].items()}
    states = [rank[run]["state"] for rank in ranks]
    return {key: torch.cat([state[key].flatten() for state in states])[: sizes[key.split("/")[0]]] for key in states[0]}


@pytest.mark.slow
def test_what_forwards_keep_changes_no_bit_on_either_rank(tmp_path: Path) -> None:
    """Of four cells half keep products, or half on SSD and half in memory everything; and all of them do. Where one rank cannot
    keep what the other one keeps, its own output says so."""
    start_ranks([sys.executable, str(SUPPORT / "kept_rank_worker.py"), str(tmp_path)], tmp_path)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    cells = {"free": {}, "products": {"ssd": 1, "device": 1}, "everything": {"ssd": 1, "device": 3}, "one rank falls": {}}
    logs = [(tmp_path / f"rank{rank}.log").read_text() for rank in range(2)]
    fall = 'vertical_schedule.activations.keep: "none" in place of "free" for OddBlock (blocks.0): modules inside it have'
    assert f"ds_vertical: rank 1: {fall}" in logs[1] and fall not in logs[0]
    for number, rank in enumerate(ranks):
        none = rank.pop("none")
        for name, found in rank.items():
            assert all(found[what] == none[what] for what in ("losses", "norms", "counters")), name
            assert differing(none["weights"], found["weights"]) == [], name
            policy = {"one rank falls": "free", "all on SSD": "everything"}.get(name, name)
            assert found["policies"] == ([] if name == "one rank falls" and number else [policy])
            assert found["cells"] == cells.get(name, {"ssd": 2, "device": 2})
        rank["none"] = none
    for name in ranks[0]:
        assert differing(whole_state(ranks, "none"), whole_state(ranks, name)) == []
