"""Bytes that leave the device for a while: back with the same bits from host memory and from a file, within what the memory
budget leaves, and nothing lost by a refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.swap_tensor.aio_config import get_aio_config
from harness import TwoMemories, assert_identical, base_config, run_arm, running
from models import MixerModel, token_batches

import ds_vertical.engine.assembly
from ds_vertical.compat import pinned_memory
from ds_vertical.compat.ops import load
from ds_vertical.errors import MemoryBudgetError
from ds_vertical.offload.tensor_swapper import HostMemory, SwappedTensor, TensorSwapper
from ds_vertical.types import Tier

PAGE = 4096
NEW_QUEUE = partial(load.new_disk_queue, get_aio_config({}))


class Counting(HostMemory):
    """Host memory that counts how often, and how much of it is locked."""

    def __init__(self) -> None:
        super().__init__(self._lock, self._unlock)
        object.__setattr__(self, "sizes", [])

    def _lock(self, num_bytes: int) -> torch.Tensor:
        data = pinned_memory.lock_host_bytes(num_bytes)
        self.sizes.append(num_bytes)
        return data

    def _unlock(self, data: torch.Tensor) -> None:
        self.sizes.remove(data.numel())
        pinned_memory.unlock_host_bytes(data)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., tuple[TensorSwapper, Counting]]]:
    every: list[tuple[TensorSwapper, Counting]] = []

    def open_swapper(host_limit: int | None = None) -> tuple[TensorSwapper, Counting]:
        memory = Counting()
        every.append((TensorSwapper(tmp_path / "away.bin", NEW_QUEUE, memory, torch.device("cpu"), 3, host_limit), memory))
        return every[-1]

    yield open_swapper
    for swapper, memory in every:
        swapper.close()
        swapper.close()
        assert memory.sizes == []


def some_bytes(*sizes: int) -> list[torch.Tensor]:
    return [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]


def bring_back(swapper: TensorSwapper, swapped: SwappedTensor, sizes: list[int]) -> list[torch.Tensor]:
    landed = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    swapper.fetch(swapped, lambda: landed)
    swapper.arrive(swapped)
    return landed


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.SSD])
def test_what_went_away_comes_back_as_often_as_it_is_asked_for(opened: Any, tier: Tier) -> None:
    swapper, _ = opened()
    sizes = [[5000], [1, 63, 64, 65], [PAGE], [3 * PAGE + 1, 7], [100_000]]
    sent = [some_bytes(*each) for each in sizes]
    copies = [[tensor.clone() for tensor in each] for each in sent]
    away = [swapper.put(each, tier) for each in sent]
    for each in sent:
        for tensor in each:
            tensor.zero_()  # given up
    for _ in range(2):
        for number in (3, 0, 4, 1, 2):
            found = bring_back(swapper, away[number], sizes[number])
            assert all(map(torch.equal, found, copies[number]))
    for swapped in away:
        swapper.drop(swapped)
    assert swapper.ssd_bytes == 0


def test_host_memory_is_used_again(opened: Any) -> None:
    swapper, memory = opened()
    for _ in range(3):
        for swapped in [swapper.put(some_bytes(PAGE), Tier.HOST), swapper.put(some_bytes(2 * PAGE), Tier.HOST)]:
            swapper.drop(swapped)
    assert sorted(memory.sizes) == [PAGE, 2 * PAGE] and swapper.host_bytes == 3 * PAGE


def test_beyond_the_limit_nothing_is_taken_and_what_is_there_comes_back(opened: Any) -> None:
    swapper, memory = opened(host_limit=3 * PAGE)
    (kept,) = some_bytes(2 * PAGE)
    swapped = swapper.put([kept], Tier.HOST)
    with pytest.raises(MemoryBudgetError) as caught:
        swapper.put(some_bytes(2 * PAGE), Tier.HOST)
    told = str(caught.value)
    assert told.startswith("vertical_schedule.activations: 8192 bytes of host memory") and "8192 more" in told
    assert "leaves 12288" in told and "gradient_accumulation_steps" in told and "host_memory_bytes" in told
    assert memory.sizes == [2 * PAGE] and swapper.host_bytes == 2 * PAGE
    second = swapper.put(some_bytes(PAGE), Tier.HOST)  # what fits goes on
    assert torch.equal(bring_back(swapper, swapped, [2 * PAGE])[0], kept)
    swapper.drop(second)


def test_memory_of_a_size_that_nothing_uses_any_more_makes_room(opened: Any) -> None:
    swapper, memory = opened(host_limit=4 * PAGE)
    swapper.drop(swapper.put(some_bytes(3 * PAGE), Tier.HOST))
    swapper.put(some_bytes(2 * PAGE), Tier.HOST)
    assert memory.sizes == [2 * PAGE]


def test_buffers_on_the_way_to_the_file_are_not_counted(opened: Any) -> None:
    swapper, _ = opened(host_limit=PAGE)
    (sent,) = some_bytes(3 * PAGE)
    swapped = swapper.put([sent], Tier.SSD)
    swapper.put(some_bytes(PAGE), Tier.HOST)
    assert torch.equal(bring_back(swapper, swapped, [3 * PAGE])[0], sent)


# ---- in an engine, with host memory as if it were not the device's


MIXER = partial(MixerModel, 3, 512, dropout=0.1)


def config_in(folder: Path, **section: Any) -> dict[str, Any]:
    return base_config(folder, num_micro_batches=4, dtype="fp32", params="cpu", section={"seed": 7} | section)


HALVES = {"device": "ssd", "share": 0.5, "host_share": 0.5}


@pytest.mark.parametrize("given", [pytest.param({"device": "host"}, marks=pytest.mark.slow), HALVES], ids=["host", "both"])
def test_the_same_bits_from_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    batches = token_batches(3, 4, rows=1, shortest=5)
    expected = run_arm(config_in(tmp_path), MIXER, batches, vertical=True)
    monkeypatch.setattr(ds_vertical.engine.assembly, "accelerator", TwoMemories())
    most = 0
    put = TensorSwapper.put

    def watched(self: TensorSwapper, tensors: Any, tier: Tier) -> SwappedTensor:
        nonlocal most
        swapped = put(self, tensors, tier)
        most = max(most, sum(swapped.tier == "host" for swapped in self._kept))
        return swapped

    monkeypatch.setattr(TensorSwapper, "put", watched)
    assert_identical(expected, run_arm(config_in(tmp_path, activations=given), MIXER, batches, vertical=True))
    assert most >= 4  # at least two layers' inputs of two micro-batches


@pytest.mark.slow
def test_too_many_micro_batches_for_the_budget_are_refused_in_the_first_step_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = token_batches(2, 4, rows=1, shortest=5)
    monkeypatch.setattr(ds_vertical.engine.assembly, "accelerator", TwoMemories())
    given = config_in(tmp_path, activations={"device": "host"})
    expected = run_arm(given, MIXER, batches, vertical=True)
    with running(given, MIXER, vertical=True) as (engine, _):
        swapper = engine._activations.swapper
        left, swapper.host_tier.limit = swapper.host_tier.limit, 3 * PAGE
        assert left > 1 << 20
        with pytest.raises(MemoryBudgetError, match=r"vertical_schedule\.activations: .* leaves 12288; write fewer"):
            engine.train_batch(iter(batches[0]))
        assert not swapper._kept and engine.global_steps == 0
        swapper.host_tier.limit = left
        losses = [engine.train_batch(iter(micro_batches)).item() for micro_batches in batches]
    assert losses == expected.losses
