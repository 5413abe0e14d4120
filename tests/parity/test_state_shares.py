"""A share of the optimizer's state in host memory and the rest on SSD: the bits are stock's whatever the share, with one rank
and with two, and every layer moves fewer bytes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import rank_worker
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param, safe_set_full_optimizer_state
from harness import Run, assert_identical, base_config, differing, largest_relative, run_arm, running, small_buffers
from models import token_batches
from processes import start_ranks
from tier_runs import CLIPS, FREE, NUM_LAYERS, NUM_STEPS, config, mixer, stock_runs

TOLERANCE = 1e-6  # of two ranks, fp32: relative per tensor (the numerics contract)
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, float], Run]:
    """Stock's run of the same JSON, trained once."""
    return stock_runs(tmp_path_factory)


def in_memory(engine: Any) -> dict[Any, float]:
    """Of each unit's state, the share in host memory."""
    optimizer = engine.optimizer
    chunks = {unit: [optimizer.stepper.chunks[i] for i in optimizer.chunks_of(unit)] for unit in engine.layers.units}
    resting = {unit: sum(chunk.numel for chunk in members if chunk.files is None) for unit, members in chunks.items()}
    return {unit: resting[unit] / sum(chunk.numel for chunk in members) for unit, members in chunks.items()}


# ---- N1, N2: whatever the share


@pytest.mark.parametrize(
    ("dtype", "clip", "delay", "speculation", "share"),
    [
        ("fp32", 0.0, 0.3, None, 0.6),
        *(pytest.param("fp32", 0.0, delay, None, share, marks=slow) for delay in (0.0, 0.3, 1.0) for share in (0.3, 1.0)),
        *(pytest.param("fp32", CLIPS, 0.3, True, share, marks=slow) for share in (0.3, 0.6)),  # every early step is redone
        *(pytest.param("fp32", FREE, delay, True, 0.6, marks=slow) for delay in (0.0, 0.3)),  # none is
        *(pytest.param("fp32", CLIPS, delay, False, 0.6, marks=slow) for delay in (0.0, 1.0)),
        *(pytest.param("fp32", FREE, None, None, share, marks=slow) for share in (0.1, 0.6)),
        *(pytest.param("bf16", clip, 0.3, True, 0.6, marks=slow) for clip in (0.0, CLIPS)),
    ],
)
def test_bits_are_stocks_whatever_the_share(
    tmp_path: Path,
    stock: Callable[[str, float], Run],
    dtype: str,
    clip: float,
    delay: float | None,
    speculation: bool | None,
    share: float,
) -> None:
    seen: list[dict[Any, float]] = []
    section = {"optimizer_delay": delay, "optimizer_speculation": speculation, "optimizer_host_share": share}
    made = config(tmp_path, dtype, clip, **section)
    note = lambda engine, _: seen.append(in_memory(engine))  # noqa: E731
    vertical = run_arm(made, partial(mixer, dtype), token_batches(NUM_STEPS, 2), vertical=True, between=note)
    assert_identical(stock(dtype, clip), vertical)
    layers = [seen[-1][layer] for layer in range(NUM_LAYERS)]
    if share == 0.6:  # of the two matrices of each layer one is in memory, and the model's ends are as a whole
        assert all(0.4 < each < 0.6 for each in layers) and seen[-1]["pre"] == 1.0
    assert share < 1 or set(layers) == {1.0}


@slow
@pytest.mark.parametrize(
    "more",
    [
        {"gradient_host_share": 0.0, "optimizer_delay": 1.0},  # gradients of state in memory wait on SSD
        {"on_nonfinite": "stop", "optimizer_delay": 0.3},  # steps in place, one generation of files
        {"overlap": False},
        {"verify": True, "optimizer_delay": 0.3},
        {"keep_gradients": True},
        {"outside_layers": "fetched", "optimizer_delay": 0.3},
        {"order": "horizontal"},
    ],
    ids=str,
)
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_bits_are_stocks_beside_other_settings(
    tmp_path: Path, stock: Callable[[str, float], Run], share: float, more: dict[str, Any]
) -> None:
    made = config(tmp_path, "fp32", 0.0, optimizer_host_share=share, **more)
    seen: list[dict[Any, float]] = []
    note = lambda engine, _: seen.append(in_memory(engine))  # noqa: E731
    vertical = run_arm(made, partial(mixer, "fp32"), token_batches(NUM_STEPS, 2), vertical=True, between=note)
    assert_identical(stock("fp32", 0.0), vertical)
    assert 0 < sum(seen[-1][layer] for layer in range(NUM_LAYERS)) < NUM_LAYERS


@slow
@pytest.mark.parametrize("options", [{"max_in_cpu": 600_000}, {"params": "cpu"}, {"persistence": None}], ids=str)
def test_bits_are_stocks_wherever_parameters_rest(tmp_path: Path, options: dict[str, Any]) -> None:
    """Both arms with the same JSON but for the share."""
    runs: list[Run] = []
    seen: list[dict[Any, float]] = []
    note = lambda engine, _: seen.append(in_memory(engine)) if hasattr(engine, "vertical") else None  # noqa: E731
    for vertical, share in ((False, {}), (True, {"optimizer_host_share": 0.6})):
        section = {"seed": 11, "optimizer_delay": 0.3} | share
        made = base_config(tmp_path, num_micro_batches=2, dtype="fp32", clip=0.0, section=section, **options)
        made = small_buffers(made, 600_000) if options.get("params", "nvme") == "nvme" else made
        runs.append(run_arm(made, partial(mixer, "fp32"), token_batches(NUM_STEPS, 2), vertical=vertical, between=note))
    assert_identical(*runs)
    assert all(0 < seen[-1][layer] < 1 for layer in range(NUM_LAYERS))


# ---- written by the user


@slow
def test_state_that_a_user_writes_is_trained_on_in_either_tier(tmp_path: Path) -> None:
    def write(engine: Any, step: int) -> None:
        if step == 1:
            for name, param in engine.module.named_parameters():
                if name.startswith("blocks.1."):
                    master = safe_get_full_fp32_param(param)
                    safe_set_full_fp32_param(param, master + 0.25)
                    safe_set_full_optimizer_state(param, torch.full_like(master, 0.01), "exp_avg_sq")

    runs = []
    for vertical, share in ((False, {}), (True, {"optimizer_host_share": 0.6})):
        made = config(tmp_path, "fp32", 0.0, optimizer_delay=0.3, **share)
        made["zero_optimization"]["offload_optimizer"]["device"] = "nvme"
        runs.append(run_arm(made, partial(mixer, "fp32"), token_batches(NUM_STEPS, 2), vertical=vertical, between=write))
    assert_identical(*runs)


# ---- two ranks


@slow
@pytest.mark.timeout(1000)
def test_two_ranks_have_the_bits_that_they_have_without_a_share(tmp_path: Path) -> None:
    """And so stock's within the numerics contract's tolerance."""
    shares = {"stock": None, "none": None, "some": 0.5, "clipped, none": None, "clipped, some": 0.5, "all": 1.0}
    runs = [
        {
            "name": name,
            "dtype": "fp32",
            "vertical": name != "stock",
            "options": {"clip": 0.5 if "clipped" in name else 0.0, "delay": 0.3, "state_share": share},
        }
        for name, share in shares.items()
    ]
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"folder": str(tmp_path / "swap"), "out": str(tmp_path), "alone": runs}))
    start_ranks([sys.executable, rank_worker.__file__, str(job)], tmp_path, forked=True)
    for rank in range(2):
        found = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        for one, other in (("none", "some"), ("none", "all"), ("clipped, none", "clipped, some")):
            assert found[one]["losses"] == found[other]["losses"] and found[one]["norms"] == found[other]["norms"]
            assert differing(found[one]["weights"], found[other]["weights"]) == []
            assert differing(own_state(found[one], rank), own_state(found[other], rank)) == []
        gaps = largest_relative(found["stock"]["weights"], found["some"]["weights"])
        assert {name: gap for name, gap in gaps.items() if gap > TOLERANCE} == {}


def own_state(run: dict[str, Any], rank: int) -> dict[str, torch.Tensor]:
    """A rank's shares of the state, without what stands behind a parameter's end, which is nobody's."""
    numels = {name: weight.numel() for name, weight in run["weights"].items()}
    places = {key: numels[key.partition("/")[0]] for key in run["state"]}
    return {key: share[: places[key] - rank * -(-places[key] // 2)] for key, share in run["state"].items()}


# ---- how few bytes


@slow
def test_each_step_reads_and_writes_fewer_bytes_of_state_by_the_share(tmp_path: Path) -> None:
    moved = []
    for share in (0.0, 0.6, 1.0):
        made = config(tmp_path, "fp32", 0.0, optimizer_delay=0.3, optimizer_host_share=share)
        with running(made, partial(mixer, "fp32"), vertical=True) as (engine, _):
            for step in token_batches(2, 2):
                engine.train_batch(iter(step))
            engine.flush()
            pipeline, rests = engine.optimizer.pipeline, in_memory(engine)
            before = pipeline.reader.num_read_bytes, pipeline.writer.num_written_bytes
            engine.train_batch(iter(token_batches(1, 2, seed=5)[0]))
            engine.flush()
            after = pipeline.reader.num_read_bytes, pipeline.writer.num_written_bytes
            moved.append(tuple(end - start for start, end in zip(before, after, strict=True)))
            elements = {unit: sum(p.ds_numel for p in params) for unit, params in engine.layers.units.items()}
            in_files = sum(elements[unit] * (1 - rest) for unit, rest in rests.items())
            assert moved[-1] == pytest.approx((12 * in_files, 12 * in_files), rel=0.02, abs=1)
    assert moved[0] > moved[1] > moved[2] == (0, 0)
