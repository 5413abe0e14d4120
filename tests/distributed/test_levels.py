"""Collectives over levels: sums in one order, with real processes on every shape of levels."""

from __future__ import annotations

import sys
import threading
import weakref
from pathlib import Path

import level_worker
import pytest
import torch
from processes import start_ranks

from ds_vertical.distributed import levels
from ds_vertical.distributed.levels import Issued, clear_padding, cut_into_chunks, joined_chunks, tree_sum
from ds_vertical.distributed.topology import Level, Topology


def command_of(*shapes: str) -> list[str]:
    return [sys.executable, str(Path(level_worker.__file__)), *shapes]


def run(tmp_path: Path, num_ranks: int, *shapes: str) -> None:
    start_ranks(command_of(*shapes), tmp_path, limit_s=850, num_ranks=num_ranks)


def test_four_ranks_as_two_nodes_of_two(tmp_path: Path) -> None:
    start_ranks(command_of("2/2"), tmp_path, limit_s=200, num_ranks=4, forked=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_ranks_in_every_shape(tmp_path: Path) -> None:
    run(tmp_path, 4, "4/4", "4/2", "4/1", "2/2", "2/1", "1/1")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_six_ranks(tmp_path: Path) -> None:
    run(tmp_path, 6, "3/3", "2/2", "6/3", "3/1")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shapes", ["4/2 4/4 4/1 8/2", "8/8 8/4 2/2 2/1"])
def test_eight_ranks(tmp_path: Path, shapes: str) -> None:
    run(tmp_path, 8, *shapes.split())


# -------------------------------------------------------------------------------------------------------------- the tree


def test_neighbours_are_added_first_in_ascending_order() -> None:
    terms = torch.randn(8, 100_000, generator=torch.Generator().manual_seed(0))
    before = terms.clone()

    def added(*parts: torch.Tensor) -> torch.Tensor:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    assert torch.equal(tree_sum(terms, (8,)), added(*terms))
    pairs = [added(*terms[first : first + 2]) for first in (0, 2, 4, 6)]
    assert torch.equal(tree_sum(terms, (2, 4)), added(*pairs))
    assert torch.equal(tree_sum(terms, (2, 2, 2)), added(added(*pairs[:2]), added(*pairs[2:])))
    assert not torch.equal(tree_sum(terms, (2, 4)), tree_sum(terms, (8,)))
    assert torch.equal(tree_sum(terms, (1, 8, 1)), tree_sum(terms, (8,)))
    assert torch.equal(terms, before)


def test_bf16_is_added_in_fp32_and_rounded_once_a_hop() -> None:
    terms = torch.randn(6, 300_001, generator=torch.Generator().manual_seed(0)).bfloat16()
    first, second = (sum(map(torch.Tensor.float, terms[start + 1 : start + 3]), terms[start].float()) for start in (0, 3))
    rounded = first.bfloat16().float() + second.bfloat16().float()
    assert torch.equal(tree_sum(terms, (3, 2)), rounded.bfloat16())


def test_minus_zero_stays_where_all_terms_are() -> None:
    assert tree_sum(torch.full((4, 3), -0.0), (2, 2)).signbit().all()


# ---------------------------------------------------------------------------------------------------- DeepSpeed's layout


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_chunks_are_padded_shards_and_join_again(world: int) -> None:
    tensors = [torch.arange(1.0, numel + 1) for numel in (1, 2, 10, 12, 29)]
    order = list(reversed(range(world)))
    rows = cut_into_chunks(tensors, order)
    sizes = [-(-tensor.numel() // world) for tensor in tensors]
    assert rows.shape == (world, sum(sizes))
    for rank, row in zip(order, rows, strict=True):
        for tensor, size, shard in zip(tensors, sizes, row.split(sizes), strict=True):
            padded = torch.nn.functional.pad(tensor, (0, size * world - tensor.numel()))
            assert torch.equal(shard, padded[rank * size : (rank + 1) * size])
    numels = [tensor.numel() for tensor in tensors]
    assert all(map(torch.equal, joined_chunks(list(reversed(list(rows))), numels), tensors))


def test_what_deepspeed_pads_with_is_cleared() -> None:
    numels = (1, 2, 5, 10, 12)  # of five the last rank has padding alone, two elements of it
    tensors = [torch.arange(1.0, numel + 1) for numel in numels]
    for rank, expected in enumerate(cut_into_chunks(tensors, range(4))):
        share = torch.where(expected == 0, torch.nan, expected)
        clear_padding(share, numels, rank, 4)
        assert torch.equal(share, expected)


def test_a_wait_may_be_repeated() -> None:
    issued = Issued(lambda tensor: tensor.tolist())
    assert not issued.is_over
    issued.end([torch.ones(2)]).set()
    assert issued.is_over and issued.wait() == issued.wait() == [1, 1]


@pytest.mark.parametrize("comes", ["as it is", "out of a collective"])
def test_a_collective_that_is_over_holds_nothing_on_its_lane(monkeypatch: pytest.MonkeyPatch, comes: str) -> None:
    """Whoever has waited for it finds room where the tensor was. Here nobody else has the collective, or its result."""
    monkeypatch.setattr(levels, "_mesh", lambda *_: None)
    direction, gate, there = levels._Direction("test", Topology(1, 1, 1), [], True), threading.Event(), list[bool]()

    class Over(threading.Event):
        def set(self) -> None:
            there.append(tensor() is not None)
            super().set()

    def hop(held: list[torch.Tensor]) -> torch.Tensor:
        gate.wait(60)
        return held.pop()

    given = torch.ones(2)
    tensor = weakref.ref(given)
    source: torch.Tensor | Issued[torch.Tensor] = given
    if comes != "as it is":
        source = Issued(lambda last: last)
        source.end([given]).set()
    issued = direction.issue(source, [(Level.PAIR, hop)], lambda last: last, "")
    issued._over = over = Over()
    del given, source, issued
    gate.set()
    assert over.wait(60) and there == [False]
    direction.close()


# ---------------------------------------------------------------------------------------------------- beside a device


def test_a_hop_that_fails_on_the_callers_thread_is_raised_at_once_and_by_both_directions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other ranks wait in it: what this rank issued behind it they would take for its rest."""
    monkeypatch.setattr(levels, "_mesh", lambda *_: None)
    failed: list[BaseException] = []
    weights, gradients = (levels._Direction(name, Topology(1, 1, 1), failed, False) for name in ("weights", "gradients"))
    issued: list[str] = []

    def hop(held: list[torch.Tensor]) -> torch.Tensor:
        issued.append("hop")
        return held.pop()

    def full(_: list[torch.Tensor]) -> torch.Tensor:
        raise torch.OutOfMemoryError("the device is full")

    given = torch.ones(2)
    assert weights.issue(given, [(Level.WORLD, hop), (Level.NODE, hop)], torch.Tensor.tolist, "1SPREAD").wait() == [1, 1]
    for direction in (weights, gradients, weights):
        with pytest.raises(levels.HopError, match="ends the run: 1SPREAD: the device is full") as caught:
            direction.issue(given, [(Level.WORLD, full), (Level.NODE, hop)], torch.Tensor.tolist, "1SPREAD")
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError) and caught.value.ends_run
    assert issued == ["hop", "hop"]
