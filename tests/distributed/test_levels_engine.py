"""Training over two levels, with real processes: four ranks on one host, of which two each are a node."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import level_training_worker
import pytest
import torch
from harness import differing, largest_relative
from hops import HOPS
from processes import free_port, start_ranks

from ds_vertical.cli.report.timeline import kind_of
from ds_vertical.planner.network import Network
from ds_vertical.schedule.events import Schedule
from ds_vertical.schedule.trace import read_trace

TOLERANCE = 1e-6  # fp32, relative per tensor: sums in another order
pytestmark = pytest.mark.timeout(1000)  # processes of one core each, which other work may share


@dataclass(frozen=True)
class Found:
    """What a rank found in each run, by the run's name."""

    folder: Path
    rank: int

    def __getitem__(self, name: str) -> dict[str, Any]:
        return _loaded(self.folder / f"{name}.rank{self.rank}.pt")


@functools.lru_cache(maxsize=16)
def _loaded(file: Path) -> dict[str, Any]:
    return torch.load(file, weights_only=True)


def command_of(folder: Path, runs: list[dict[str, Any]]) -> list[str]:
    description = folder / "job.json"
    description.write_text(json.dumps({"folder": str(folder / "swap"), "out": str(folder), "runs": runs}))
    return [sys.executable, str(Path(level_training_worker.__file__)), str(description)]


def start_jobs(folder: Path, runs: list[dict[str, Any]]) -> list[subprocess.Popen[bytes]]:
    """The ranks' processes, which nobody ends where one of them fails."""
    number, command = str(level_training_worker.NUM_RANKS), command_of(folder, runs)
    common = {"WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = []
    for rank in range(level_training_worker.NUM_RANKS):
        env = os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        with (folder / f"rank{rank}.log").open("w") as out:
            processes.append(subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT))
    return processes


def run_jobs(
    folder: Path, runs: list[dict[str, Any]], num_ranks: int = level_training_worker.NUM_RANKS, forked: bool = False
) -> list[Found]:
    """What each rank found."""
    start_ranks(command_of(folder, runs), folder, num_ranks=num_ranks, limit_s=900, forked=forked)
    return [Found(folder, rank) for rank in range(num_ranks)]


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float = TOLERANCE) -> None:
    gaps = largest_relative(a, b)
    assert {name: gap for name, gap in gaps.items() if gap > tolerance} == {}


STANDING = {"copy_on_device": True}
SET = ("embed.weight", "blocks.1.up.weight")  # by the worker
SPREAD_BEHIND_STEPS = ["preSPREAD", "preSPREAD@+1", "0SPREAD@+1", "1SPREAD@+1", "2SPREAD@+1"]  # with copies that stand
AT_ONCE = {"section": {"optimizer_delay": 0.0}}  # no step is left to the next forward, which would need another copy


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    folder = tmp_path_factory.mktemp("levels")
    traced = {"name": "copies", "levels": {}, "section": {"trace": str(folder / "trace")}}
    runs = [{"name": "flat"}, traced, {"name": "standing", "levels": STANDING, **AT_ONCE}]
    runs += [{"name": "standing, sent", "levels": STANDING, "shares": False, **AT_ONCE}]
    return run_jobs(folder, [run | {"sets": True} for run in runs], forked=True)


def assert_same_bits(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert (a["losses"], a["norms"], a["evaluated"]) == (b["losses"], b["norms"], b["evaluated"])
    assert not differing(a["weights"], b["weights"]) and not differing(a["state"], b["state"])
    assert all(not differing(*each) for each in zip(a["grads"], b["grads"], strict=True))


def test_copies_in_memory_of_the_host_have_the_bits_of_those_that_are_sent(trained: list[Found]) -> None:
    """Each gather of a copy that is kept reads that memory, and it is given back with the engine."""
    for rank in trained:
        assert_same_bits(rank["standing"], rank["standing, sent"])
        assert rank["flat"]["gathers"] == rank["standing, sent"]["gathers"] == {"mapped": 0}
        for name in ("copies", "standing"):
            found = rank[name]["gathers"]
            assert found["read"] > 0 and found["summed"] > 0 and set(found) == {"read", "summed", "mapped"}
            assert found["mapped"] == 0
        assert rank["standing"]["gathers"]["read"] > rank["copies"]["gathers"]["read"]


def test_weights_and_gradients_are_those_of_one_level(trained: list[Found]) -> None:
    for rank in trained:
        flat, found = rank["flat"], rank["copies"]
        assert flat["losses"][0] == found["losses"][0], "gathers have the same bits"
        for name in ("losses", "norms", "evaluated"):
            assert found[name] == pytest.approx(flat[name], rel=TOLERANCE)
        for a, b in zip(flat["grads"], found["grads"], strict=True):
            assert_close(a, b)
        assert_close(flat["weights"], found["weights"])


def test_state_is_read_and_set_over_levels_and_the_next_step_starts_from_it(trained: list[Found]) -> None:
    """Each run has set the same parameters behind its first step, one in host memory and one on SSD, and has compared what it
    then read with what it had set. The second step writes them to the weights, and to copies that stand."""
    for rank in trained:
        flat, kept, found = (rank[name] for name in ("flat", "copies", "standing"))
        assert_close(flat["gave"], kept["gave"])
        assert not differing(kept["gave"], found["gave"])
        for each in (flat, kept, found):
            raised = {name: each["weights"][name] / 1.25 for name in SET}
            assert_close({name: each["gave"][name] for name in SET}, raised, tolerance=0.02)
        assert kept["evaluated"] == found["evaluated"]


def test_a_unit_crosses_the_link_once_where_its_copy_is_kept(trained: list[Found]) -> None:
    spreads = {name: trained[0][name]["schedule"].count("0SPREAD") for name in ("flat", "copies")}
    assert spreads == {"flat": 0, "copies": 1}


def test_a_trace_has_the_hops_and_their_bytes(trained: list[Found]) -> None:
    """Two nodes: of a unit each rank receives its own number of bytes once, and of its gradients, too."""
    rank = trained[3]
    step = read_trace(rank.folder / "trace" / "rank3.jsonl")[0]  # what an evaluation sends stands in the step behind it
    hops = [span for span in step.spans if span.resource.startswith("net_")]
    names = {(span.resource, span.name) for span in hops}
    assert {("net_cross", "0SPREAD"), ("net_cross", "0CROSS"), ("net_local", "0FETCH"), ("net_local", "0REDUCE")} <= names
    assert ("net_cross", "0FETCH") not in names, "its copy is there"
    assert {kind_of(span) for span in hops} == {"SPREAD", "SPREAD local", "FETCH local", "REDUCE local", "CROSS"}
    chunk_bytes = 4 * sum(-(-weight.numel() // 4) for weight in rank["copies"]["weights"].values())
    assert sum(span.bytes for span in hops if span.resource == "net_cross") == 2 * chunk_bytes
    assert all(span.end >= span.start >= span.issue for span in hops)


def test_a_copy_that_stands_has_the_same_bits_and_no_forward_crosses_the_link(trained: list[Found]) -> None:
    for rank in trained:
        kept, found = rank["copies"], rank["standing"]
        assert (kept["losses"], kept["norms"], kept["evaluated"]) == (found["losses"], found["norms"], found["evaluated"])
        assert not differing(kept["weights"], found["weights"]) and not differing(kept["state"], found["state"])
        assert all(not differing(a, b) for a, b in zip(kept["grads"], found["grads"], strict=True))
        header, *events = found["schedule"].split("\n")
        assert header.endswith(" standing=0-2"), "what has its state in memory is stepped in the next forward"
        spread = [word for line in events for word in line.split() if "SPREAD" in word]
        assert spread == SPREAD_BEHIND_STEPS


# how steps are taken, beside copies that stand; how many of the four units' copies do stand in the second step
STANDING_RUNS: dict[str, tuple[dict[str, Any], int]] = {
    "behind each step": ({"places": {"params": "cpu", "optimizer": "cpu"}, "clip": 0.5, **AT_ONCE}, 4),
    "from buffers": ({"places": {"optimizer": "cpu"}, "steps": 4, **AT_ONCE}, 4),
    "half of them": ({"share": 0.5, **AT_ONCE}, 2),
    "waited for at once": ({"section": {"optimizer_delay": 0.0, "overlap": False}}, 3),
    "steps left": ({"section": {"optimizer_delay": 1.0}}, 0),
    "parts of steps left": ({"section": {"optimizer_delay": 0.3, "prefetch_layers": 2}}, 0),
    "ends fetched": ({"section": {"optimizer_delay": 0.0, "outside_layers": "fetched"}}, 3),
    "INT8": ({"zero": {"zero_quantized_weights": True}, **AT_ONCE}, 3),
}


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    runs: list[dict[str, Any]] = []
    for name, (given, _) in STANDING_RUNS.items():
        options = {key: value for key, value in given.items() if key != "share"}
        kept, stands = {"copy_share": given.get("share", 1.0)}, {"copy_share": given.get("share", 1.0), **STANDING}
        runs += [{"name": f"{name}, kept", "levels": kept, **options}, {"name": name, "levels": stands, **options}]
    runs += [{"name": f"written, {name}", "kind": "written", "levels": levels, **AT_ONCE} for name, levels in WRITTEN.items()]
    return run_jobs(tmp_path_factory.mktemp("standing"), runs)


WRITTEN: dict[str, dict[str, Any]] = {"kept": {}, "standing": STANDING}


@pytest.mark.slow
@pytest.mark.parametrize("name", STANDING_RUNS)
def test_however_steps_are_taken_copies_that_stand_change_no_bit(standing: list[Found], name: str) -> None:
    for rank in standing:
        kept, found = rank[f"{name}, kept"], rank[name]
        assert (kept["losses"], kept["norms"], kept["evaluated"]) == (found["losses"], found["norms"], found["evaluated"])
        assert not differing(kept["weights"], found["weights"]) and not differing(kept["state"], found["state"])
        stood = Schedule.from_text(found["schedule"]).standing
        assert stood is not None and len(stood) == STANDING_RUNS[name][1]


@pytest.mark.slow
def test_waiting_at_once_has_the_same_bits_over_levels(standing: list[Found]) -> None:
    """Half of the copies, so that in the backward units are spread, too."""
    for rank in standing:
        at_once, beside = rank["waited for at once, kept"], rank["half of them, kept"]
        for name in ("losses", "norms", "evaluated"):
            assert at_once[name] == beside[name]
        assert not differing(at_once["weights"], beside["weights"]) and not differing(at_once["state"], beside["state"])
        assert all(not differing(a, b) for a, b in zip(at_once["grads"], beside["grads"], strict=True))


@pytest.mark.slow
def test_what_a_user_writes_between_two_steps_makes_copies_old(standing: list[Found]) -> None:
    for rank in standing:
        kept, found = rank["written, kept"], rank["written, standing"]
        assert (kept["loss"], kept["evaluated"]) == (found["loss"], found["evaluated"])
        assert found["evaluated"][0] != found["evaluated"][1] and not differing(kept["weights"], found["weights"])
        assert sorted(map(str, found["stood"])) == ["0", "2"], "without those of which a parameter was written"


# what is varied beside levels; each with a flat run of its own
MATRIX: dict[str, dict[str, Any]] = {
    "one micro-batch": {"micro_batches": 1},
    "four micro-batches": {"micro_batches": 4},
    "clipping": {"clip": 0.5},
    "at once": {"section": {"overlap": False}},
    "all delayed": {"section": {"optimizer_delay": 1.0}},
    "some delayed, two ahead": {"section": {"optimizer_delay": 0.3, "prefetch_layers": 2}},
    "horizontal": {"section": {"order": "horizontal"}},
    "ends fetched": {"section": {"outside_layers": "fetched"}},
    "nothing ahead": {"section": {"prefetch_layers": 0}},
}


# pairs that share copies, and nodes of all four ranks that add their gradients: the same sums, hop by hop
IN_A_NODE = {"gradients": 4}
# by name: levels, and what else is set
OTHERS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "pairs in a node": (IN_A_NODE, MATRIX["four micro-batches"]),
    "pairs in a node, kept": (IN_A_NODE, AT_ONCE),
    "pairs in a node, standing": (IN_A_NODE | STANDING, AT_ONCE),
    "bf16, flat": (None, {"dtype": "bf16"}),
    "bf16, none kept": ({"copy_share": 0.0}, {"dtype": "bf16"}),
    "bf16, kept": ({}, {"dtype": "bf16"}),
    "bf16, pairs in a node, standing": (IN_A_NODE | STANDING, {"dtype": "bf16", **AT_ONCE}),
    "bf16, pairs in a node, kept": (IN_A_NODE, {"dtype": "bf16", **AT_ONCE}),
}
SAME_BITS = [
    ("four micro-batches, 1.0", "pairs in a node"),
    ("pairs in a node, kept", "pairs in a node, standing"),
    ("bf16, none kept", "bf16, kept"),
    ("bf16, pairs in a node, kept", "bf16, pairs in a node, standing"),
]


# by name: levels that keep copies, and what else is set
KEPT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "kept": ({}, MATRIX["four micro-batches"]),
    "half kept": ({"copy_share": 0.5}, MATRIX["nothing ahead"]),
    "half standing": ({"copy_share": 0.5} | STANDING, AT_ONCE),
    "at once": (STANDING, {"section": {"optimizer_delay": 0.0, "overlap": False}}),
    "horizontal": ({}, MATRIX["horizontal"]),
    "ends fetched": (STANDING, {"section": {"optimizer_delay": 0.0, "outside_layers": "fetched"}}),
    "in a node": (IN_A_NODE | STANDING, {"dtype": "bf16", **AT_ONCE}),
    "int8": (STANDING, {"zero": {"zero_quantized_weights": True}, **AT_ONCE}),
}


def shares_of(name: str) -> tuple[float, ...]:
    """With nothing read ahead two layers are fetched again, of which one can be kept."""
    return (0.0, 0.5, 1.0) if name == "nothing ahead" else (0.0, 1.0)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    runs: list[dict[str, Any]] = []
    for name, options in MATRIX.items():
        runs.append({"name": f"{name}, flat", **options})
        runs += [{"name": f"{name}, {share}", "levels": {"copy_share": share}, **options} for share in shares_of(name)]
    runs += [{"name": name, "levels": levels, **options} for name, (levels, options) in OTHERS.items()]
    return run_jobs(tmp_path_factory.mktemp("matrix"), runs)


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """Each run with memory of the host, and without."""
    runs: list[dict[str, Any]] = [{"name": name, "levels": levels, **options} for name, (levels, options) in KEPT.items()]
    runs += [each | {"name": f"{each['name']}, sent", "shares": False} for each in runs]
    return run_jobs(tmp_path_factory.mktemp("sent"), runs)


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_however_copies_are_kept_memory_of_the_host_changes_no_bit(sent: list[Found], name: str) -> None:
    for rank in sent:
        assert_same_bits(rank[name], rank[f"{name}, sent"])
        found = rank[name]["gathers"]
        assert found["read"] > 0 and found["summed"] > 0 and set(found) == {"read", "summed", "mapped"}


@pytest.mark.slow
@pytest.mark.parametrize("names", SAME_BITS, ids=[second for _, second in SAME_BITS])
def test_wherever_pairs_lie_and_copies_rest_bits_are_the_same(matrix: list[Found], names: tuple[str, str]) -> None:
    for rank in matrix:
        first, second = (rank[name] for name in names)
        assert first["losses"] == second["losses"] and first["norms"] == second["norms"]
        assert not differing(first["weights"], second["weights"]) and not differing(first["state"], second["state"])


@pytest.mark.slow
def test_in_bf16_the_first_gradients_are_those_of_one_level(matrix: list[Found]) -> None:
    """Behind them a weight may be rounded to its other neighbour."""
    for rank in matrix:
        flat, found = rank["bf16, flat"], rank["bf16, kept"]
        assert flat["losses"][0] == found["losses"][0] and flat["losses"] == pytest.approx(found["losses"], rel=1e-3)
        assert_close(flat["grads"][0], found["grads"][0])


@pytest.mark.slow
@pytest.mark.parametrize("name", MATRIX)
def test_whatever_else_is_set_weights_and_gradients_are_those_of_one_level(matrix: list[Found], name: str) -> None:
    for rank in matrix:
        flat, *found = (rank[f"{name}, {each}"] for each in ("flat", *shares_of(name)))
        crossing = [each["schedule"].count("SPREAD") for each in found]
        assert crossing == sorted(crossing, reverse=True)
        assert name != "nothing ahead" or len(set(crossing)) == 3, "each share is another schedule"
        for each in found:
            assert each["losses"][0] == flat["losses"][0]
            assert each["norms"] == pytest.approx(flat["norms"], rel=TOLERANCE)
            for a, b in zip(flat["grads"], each["grads"], strict=True):
                assert_close(a, b)
            assert_close(flat["weights"], each["weights"])
        for each in found[1:]:  # a copy changes no bit
            assert not differing(found[0]["weights"], each["weights"]) and not differing(found[0]["state"], each["state"])


@pytest.mark.slow
def test_a_checkpoint_goes_from_levels_to_one_level_and_back(tmp_path: Path) -> None:
    for rank in run_jobs(tmp_path, [{"name": "resume", "kind": "resume", "levels": {}}]):
        found = rank["resume"]
        assert found["from levels"] == found["from flat"] == [], "bits of weights, masters and moments"
        assert_close(found["from levels, then"], found["from flat, then"])


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_rank_that_fails_on_its_way_to_a_spread_is_named_and_the_step_is_taken_again(tmp_path: Path, share: float) -> None:
    levels = {"copy_share": share}
    runs = [{"name": "suffer", "kind": "suffer", "levels": levels}, {"name": "whole", "levels": levels}]
    for number, rank in enumerate(run_jobs(tmp_path, runs)):
        for kind, text, seconds in rank["suffer"]["told"]:
            assert kind == ("DiskError" if number == 1 else "OtherRankError") and seconds < 30, text
            assert number == 1 or "rank 1: DiskError" in text
        assert not differing(rank["suffer"]["weights"], rank["whole"]["weights"])


def lanes_of_fetches(trace: Path) -> set[str]:
    """On which links fetches move bytes, in all steps of a trace."""
    hops = [span for step in read_trace(trace) for span in step.spans if span.resource.startswith("net_") and span.bytes]
    return {span.resource for span in hops if "FETCH" in span.name}


@pytest.mark.slow
def test_eight_ranks_as_pairs_in_two_nodes_have_the_bits_of_one_level_and_move_what_the_formula_says(tmp_path: Path) -> None:
    """Pairs share copies, nodes of four add gradients: 2 x 2 x 2. One level: gathers over all ranks, and sums that go to their
    owner in one hop over all ranks and are added in the same order. Of copies that stand no fetch crosses the link."""
    levels, traced = {"gradients": 4}, {"section": {"trace": str(tmp_path / "trace")}}
    stands = {"section": {"trace": str(tmp_path / "standing"), **AT_ONCE["section"]}}
    runs: list[dict[str, Any]] = [
        {"name": "flat"},
        {"name": "one hop", "kind": "one hop", "levels": levels},
        {"name": "levels", "levels": levels, **traced},
        {"name": "standing", "levels": levels | STANDING, **stands},
    ]
    found = run_jobs(tmp_path, runs, num_ranks=8)
    crossed = dict.fromkeys(("SPREAD", "CROSS"), 0)  # into the first node
    for rank in found:
        flat, one, three, standing = (rank[each["name"]] for each in runs)
        assert flat["losses"][0] == three["losses"][0] and one["losses"] == three["losses"]
        assert not differing(one["weights"], three["weights"]) and not differing(one["state"], three["state"])
        assert_close(flat["weights"], three["weights"])
        assert not differing(three["weights"], standing["weights"]) and not differing(three["state"], standing["state"])
        assert [word for word in standing["schedule"].split() if "SPREAD" in word] == SPREAD_BEHIND_STEPS
        assert lanes_of_fetches(tmp_path / "standing" / f"rank{rank.rank}.jsonl") == {"net_local"}
        step = read_trace(tmp_path / "trace" / f"rank{rank.rank}.jsonl")[0]
        hops = [span for span in step.spans if span.resource.startswith("net_") and rank.rank < 4]
        for span in (span for span in hops if span.resource == "net_cross"):
            crossed["SPREAD" if "SPREAD" in span.name else "CROSS"] += span.bytes
    elements = 8.0 * sum(-(-weight.numel() // 8) for weight in found[0]["levels"]["weights"].values())
    network = Network(2, 4, levels=True, copy_ranks=2, sum_ranks=4)
    spread, cross = network.spread(elements, 4), network.cross(elements, 4)
    assert crossed["CROSS"] == pytest.approx(sum(hop.num_bytes for hop in cross if hop.lane == "net_cross"), rel=0.02)
    assert crossed["SPREAD"] == pytest.approx(sum(hop.num_bytes for hop in spread if hop.lane == "net_cross"), rel=0.02)


@pytest.mark.slow
def test_one_json_with_hpz_trains_in_both_arms(tmp_path: Path) -> None:
    runs = [{"name": "one", "kind": "both arms", "levels": {}, "places": {"params": "cpu", "optimizer": "cpu"}, "clip": 0.5}]
    for rank in run_jobs(tmp_path, runs):
        stock, vertical = (rank["one"][arm] for arm in ("stock", "vertical"))
        for name in ("losses", "norms"):
            assert vertical[name] == pytest.approx(stock[name], rel=TOLERANCE)
        assert_close(stock["weights"], vertical["weights"])


FIRST = {"kind": "suffer first", "places": {"params": "cpu"}, "persistence": 2000}


@pytest.mark.slow
def test_a_rank_that_fails_in_its_first_pass_leaves_nobody_in_a_gather_of_another_size(tmp_path: Path) -> None:
    """Parameters in host memory, of which small ones stay on the device: a layer is gathered twice in the first pass, and with
    its small parameter once."""
    runs = [
        {"name": name, "levels": levels, **FIRST}
        for name, levels in (("flat", None), ("kept", {}), ("none", {"copy_share": 0}))
    ]
    for number, rank in enumerate(run_jobs(tmp_path, runs)):
        for name in ("flat", "kept", "none"):
            kind, text, seconds = rank[name]["told"]
            assert kind == ("OSError" if number == 1 else "OtherRankError") and seconds < 60, text
            assert_close(rank["flat"]["weights"], rank[name]["weights"])


QUANTIZED: dict[str, dict[str, Any]] = {
    "int8 weights": {"levels": {}, "zero": {"zero_quantized_weights": True}},
    "int4 gradients": {"levels": {}, "zero": {"zero_quantized_gradients": True}},
    "int8 and int4": {"levels": {"gradient_bits": [8, 4], "copy_share": 0.5}, "zero": level_training_worker.QUANTIZED},
}
# Of a matrix's norm, whose many blocks are like blocks of normal numbers: these lose 12.6 % to INT4. A single block with a few
# large numbers loses more. What an element may lose is tested in test_quantize.py.
ROUNDED = {"int8 weights": 0.03, "int4 gradients": 0.2, "int8 and int4": 0.2}


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    runs: list[dict[str, Any]] = [{"name": "flat"}]
    for name, options in QUANTIZED.items():
        runs += [{"name": name, **options}, {"name": f"{name}, not finite", "kind": "poisoned", **options}]
    return run_jobs(tmp_path_factory.mktemp("quantized"), runs)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTIZED)
def test_what_is_rounded_on_its_way_is_near_to_what_is_not(quantized: list[Found], name: str) -> None:
    for rank in quantized:
        flat, found = rank["flat"], rank[name]
        assert found["losses"] == pytest.approx(flat["losses"], rel=0.01)
        matrices = [name for name, weight in flat["weights"].items() if weight.ndim == 2]
        gaps = largest_relative(*({name: run["grads"][0][name] for name in matrices} for run in (flat, found)))
        assert max(gaps.values()) < ROUNDED[name], gaps
        assert ("int8" in name) == (found["losses"][0] != flat["losses"][0]), "gradients alone leave the first forward exact"


@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTIZED)
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(quantized: list[Found], name: str) -> None:
    for rank in quantized:
        found = rank[f"{name}, not finite"]
        assert found["skipped"] == (1, []) and found["changed"] and found["loss"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("event", HOPS)
def test_a_rank_that_is_killed_within_a_hop_is_named_by_all_others_and_the_last_checkpoint_loads(
    tmp_path: Path, event: str
) -> None:
    """With its bits: weights, masters and moments. What follows has those of a run that nobody has killed."""
    runs: list[dict[str, Any]] = [{"name": "killed", "kind": "killed", "levels": {}, "hop": event}]
    processes = start_jobs(tmp_path, runs)
    try:
        codes = [process.wait(300) for process in processes]
        seconds = time.time() - (tmp_path / "failing").stat().st_mtime
    finally:
        for process in processes:
            process.kill()
            process.wait()
    logs = [(tmp_path / f"rank{rank}.log").read_text() for rank in range(len(processes))]
    assert codes == [1, -9, 1, 1], logs[0]
    assert seconds < 60
    assert json.loads((tmp_path / "failing").read_text()) == ([1, 3] if HOPS[event][1] else [0, 1])
    for rank in (0, 2, 3):
        assert "OtherRankError: train_batch: rank 1 is gone without a word" in logs[rank], logs[rank]
    runs = [{"name": "loaded", "kind": "loaded", "levels": {}}, {"name": "whole", "levels": {}}]
    for found in run_jobs(tmp_path, runs):
        assert found["loaded"]["differing"] == []
        assert not differing(found["loaded"]["weights"], found["whole"]["weights"])
