"""What forwards keep for their backwards: stock's bits with every policy, wherever it rests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import TwoMemories, assert_identical, base_config, contents, counters, differing, run_arm, running
from models import MixerModel, tiny_gpt2, tiny_neox, token_batches
from torch import nn

from ds_vertical.engine import assembly
from ds_vertical.engine.keeping import keeping
from ds_vertical.errors import MemoryBudgetError

MIXER = partial(MixerModel, 4, 512, dropout=0.1)
POLICIES = ("free", "products", "everything")


def settings(policy: str, tier: str | None) -> dict[str, Any]:
    return {"keep": policy, "keep_device": tier} if policy in ("products", "everything") else {"keep": policy}


def config_in(
    folder: Path, count: int, activations: dict[str, Any], dtype: str = "fp32", clip: float = 1.0, **section: Any
) -> dict[str, Any]:
    whole = {"seed": 7, "activations": activations, **section}
    return base_config(folder, num_micro_batches=count, dtype=dtype, params="cpu", clip=clip, section=whole)


def compare(folder: Path, build: Callable[[], nn.Module], count: int, activations: dict[str, Any], **options: Any) -> None:
    batches = token_batches(2, count, rows=1, shortest=5)
    plain = run_arm(config_in(folder, count, {}, **options), build, batches, vertical=False)
    assert_identical(plain, run_arm(config_in(folder, count, activations, **options), build, batches, vertical=True))


@pytest.mark.parametrize("policy", ["products", "everything"])
def test_stocks_bits_with_kept_values_on_ssd(tmp_path: Path, policy: str) -> None:
    compare(tmp_path, MIXER, 2, settings(policy, "ssd"))


def counts_of(folder: Path, activations: dict[str, Any], count: int) -> dict[str, int]:
    """The cells that have rested in each tier in a step."""
    with running(config_in(folder, count, activations), MIXER, vertical=True) as (engine, _):
        engine.train_batch(iter(token_batches(1, count, rows=1, shortest=5)[0]))
        return {tier.value: cells for tier, cells in engine.kept.cells if cells}


def test_shares_of_the_cells_keep_on_ssd_and_in_host_memory(tmp_path: Path) -> None:
    """Of 6 cells 4 keep, 2 of them in memory; of those for the SSD the ones of the layer before the last are in memory, too."""
    found = counts_of(tmp_path, settings("everything", "ssd") | {"keep_share": 0.34, "keep_host_share": 0.33}, 2)
    assert sum(found.values()) == 4 and found["ssd"] <= 2 <= found["device"]


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("tier", ["device", "host", "ssd"])
@pytest.mark.parametrize("policy", POLICIES)
def test_stocks_bits_with_every_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, tier: str, share: float
) -> None:
    if tier == "host":
        monkeypatch.setattr(assembly, "accelerator", TwoMemories())
        monkeypatch.setattr(keeping, "accelerator", TwoMemories())
    if policy == "free" and tier != "device":
        pytest.skip("keeps no bytes")
    beside = {"keep_host_share": 0.25} if policy != "free" and tier != "host" and share == 0.5 else {}
    activations = settings(policy, tier) | {"keep_share": share} | beside
    compare(tmp_path, MIXER, 4, activations)
    if policy == "everything":
        wanted = round(12 * (share + beside.get("keep_host_share", 0.0)))
        assert sum(counts_of(tmp_path, activations, 4).values()) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("clip", [0.0, 1e-3])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("tier", ["device", "host", "ssd"])
@pytest.mark.parametrize("policy", ["none", *POLICIES])
def test_stocks_bits_with_every_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, tier: str, dtype: str, dropout: float, count: int, clip: float
) -> None:
    if tier == "host":  # on one memory nothing moves there
        monkeypatch.setattr(assembly, "accelerator", TwoMemories())
        monkeypatch.setattr(keeping, "accelerator", TwoMemories())
    if policy in ("none", "free") and tier != "device":
        pytest.skip("keeps no bytes")
    build = partial(MixerModel, 4, 1024 if dtype == "bf16" else 512, dropout=dropout)
    compare(tmp_path, build, count, settings(policy, tier), dtype=dtype, clip=clip)


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["device", "ssd"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "build", [partial(tiny_gpt2, 4, dropout=0.1), partial(tiny_neox, 4, dropout=0.1)], ids=["gpt2", "neox"]
)
def test_hugging_face_models(tmp_path: Path, build: Callable[[], nn.Module], policy: str, tier: str) -> None:
    batches = token_batches(2, 3, rows=1, shortest=5)
    activations = settings(policy, tier)
    plain = run_arm(config_in(tmp_path, 3, {}), build, batches, vertical=False)
    assert_identical(plain, run_arm(config_in(tmp_path, 3, activations | {"device": "ssd"}), build, batches, vertical=True))
    with running(config_in(tmp_path, 3, activations), build, vertical=True) as (engine, _):
        engine.train_batch(iter(batches[0]))
        assert {(kind.policy, kind.is_tried) for kind in engine._runner.kinds.found} == {(policy, True)}


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "section", [{"snake": True}, {"order": "horizontal"}, {"blocks_per_layer": 2}, {"overlap": False}, {"prefetch_layers": 2}]
)
def test_the_same_bits_in_every_order(tmp_path: Path, policy: str, section: dict[str, Any]) -> None:
    batches = token_batches(2, 3, rows=1, shortest=5)
    plain = run_arm(config_in(tmp_path, 3, {}, **section), MIXER, batches, vertical=True)
    tier = "ssd"
    assert_identical(plain, run_arm(config_in(tmp_path, 3, settings(policy, tier), **section), MIXER, batches, vertical=True))
    assert torch.isfinite(torch.tensor(plain.losses)).all()


@pytest.mark.slow
@pytest.mark.parametrize("then", ["none", *POLICIES])
@pytest.mark.parametrize("first", ["none", *POLICIES])
def test_a_resume_with_another_policy_has_the_same_bits(tmp_path: Path, first: str, then: str) -> None:
    batches = token_batches(4, 2, rows=1, shortest=5)
    train = lambda engine, steps: [engine.train_batch(iter(batches[step])).item() for step in steps]  # noqa: E731
    saving, resuming = (config_in(tmp_path / "ssd", 2, settings(policy, "ssd")) for policy in (first, then))
    with running(saving, MIXER, vertical=True) as (engine, model):
        train(engine, range(2))
        engine.save_checkpoint(str(tmp_path / "saved"))
        losses, expected, numbers = train(engine, range(2, 4)), contents(engine, model), counters(engine)
    with running(resuming, MIXER, vertical=True) as (engine, model):
        torch.manual_seed(999)  # whatever the new process has drawn
        path, _ = engine.load_checkpoint(str(tmp_path / "saved"))
        assert path is not None and train(engine, range(2, 4)) == losses
        assert differing(expected, contents(engine, model)) == [] and counters(engine) == numbers
        kinds = engine._runner.kinds
        assert {kind.policy for kind in kinds.found} == {then} if then != "none" else kinds is None


@pytest.mark.slow
def test_a_step_that_keeps_more_than_memory_has_fails_whole(tmp_path: Path) -> None:
    batches = token_batches(2, 2, rows=1, shortest=5)
    expected = run_arm(config_in(tmp_path, 2, {}), MIXER, batches[:1], vertical=True)
    with running(config_in(tmp_path, 2, settings("everything", "device")), MIXER, vertical=True) as (engine, _):
        store = engine._keeping.store
        store.device_limit, limit = 1000, store.device_limit
        with pytest.raises(MemoryBudgetError, match=r'activations\.keep: \d+ bytes .* leaves 1000; write fewer .*"products"'):
            engine.train_batch(iter(batches[0]))
        assert store.num_bytes["device"] == 0 and engine.global_steps == 0
        store.device_limit = limit
        assert [engine.train_batch(iter(batches[0])).item()] == expected.losses
        assert store.num_bytes["device"] == 0 < store.most_bytes


@pytest.mark.slow
def test_kept_values_on_ssd_leave_memory_and_come_back_once(tmp_path: Path) -> None:
    batches = token_batches(2, 3, rows=1, shortest=8)
    with running(config_in(tmp_path, 3, settings("everything", "ssd")), MIXER, vertical=True) as (engine, _):
        engine.train_batch(iter(batches[0]))
        queues = engine._keeping.store.swapper.queues
        before = [queue.num_read_bytes + queue.num_written_bytes for queue in queues]
        engine.train_batch(iter(batches[1]))
        read, written = (queue.num_read_bytes + queue.num_written_bytes - b for queue, b in zip(queues, before, strict=True))
        assert read == written > 0
        assert engine._keeping.store.num_bytes["ssd"] == 0
        assert next(tmp_path.rglob("kept/kept0.bin")).stat().st_size >= written
