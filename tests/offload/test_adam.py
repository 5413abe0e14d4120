"""CPU Adam in other groups and pieces than stock's: the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from ds_vertical.offload.chunking import (
    ALIGNMENT,
    LANE,
    ChunkPiece,
    Cut,
    Part,
    adam_cuts,
    chunk_layout,
    split_chunk,
    spread_params,
)
from ds_vertical.offload.cpu_adam import AdamSettings, CpuAdam


@dataclass(frozen=True)
class Regrouping:
    """Sizes of parameters in stock's order; stock's sub-groups as numbers of parameters; chunks as lists of them."""

    sizes: tuple[int, ...]
    stock: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]

    def stock_ranges(self) -> list[range]:
        """Elements of each stock sub-group in stock's order of all elements."""
        ranges, first, start = [], 0, 0
        for count in self.stock:
            numel = sum(self.sizes[first : first + count])
            ranges.append(range(start, start + numel))
            first, start = first + count, start + numel
        return ranges

    def pieces(self) -> list[list[ChunkPiece]]:
        """Each chunk's pieces."""
        starts = [sum(self.sizes[:i]) for i in range(len(self.sizes) + 1)]
        groups = self.stock_ranges()

        def piece(param: int) -> ChunkPiece:
            group = next(g for g in groups if starts[param] in g)
            return ChunkPiece(self.sizes[param], starts[param] - group.start, len(group))

        return [[piece(param) for param in chunk] for chunk in self.chunks]

    def elements(self) -> list[torch.Tensor]:
        """For each chunk, where its elements lie in stock's order of all elements."""
        starts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        return [torch.cat([torch.arange(starts[p], starts[p] + self.sizes[p]) for p in chunk]) for chunk in self.chunks]


@st.composite
def regroupings(draw: st.DrawFn) -> Regrouping:
    sizes = tuple(draw(st.lists(st.integers(1, 70), min_size=1, max_size=12)))
    order = draw(st.permutations(range(len(sizes))))
    ends = sorted(draw(st.sets(st.integers(1, len(sizes)))) | {len(sizes)})
    stops = sorted(draw(st.sets(st.integers(1, len(sizes)))) | {len(sizes)})
    chunks = tuple(tuple(order[a:b]) for a, b in zip([0, *stops], stops, strict=False))
    return Regrouping(sizes, tuple(b - a for a, b in zip([0, *ends], ends, strict=False)), chunks)


# stock's remainder of 7 + 5 elements lies in three chunks, the middle of it in a chunk of its own
SPLIT_REMAINDER = Regrouping((20, 5, 3, 4), (4,), ((0,), (2,), (3, 1)))


@given(regroupings())
@example(SPLIT_REMAINDER)
@settings(deadline=None, max_examples=300)
def test_cuts_cover_a_chunk_once_in_order(regrouping: Regrouping) -> None:
    for pieces in regrouping.pieces():
        position = 0
        for cut in adam_cuts(pieces):
            assert cut.start == position and cut.numel > 0
            assert cut.offset >= 0 and cut.offset + cut.numel <= cut.span
            assert cut.span <= LANE or cut.in_place and cut.span % LANE == 0
            position += cut.numel
        assert position == sum(piece.numel for piece in pieces)


def test_a_piece_outside_its_sub_group_is_refused() -> None:
    with pytest.raises(ValueError, match="does not lie inside its sub-group"):
        adam_cuts([ChunkPiece(numel=4, stock_offset=14, stock_numel=17)])


@pytest.fixture(scope="module")
def cpu_adam() -> DeepSpeedCPUAdam:
    return DeepSpeedCPUAdam([nn.Parameter(torch.zeros(1))], lr=1e-2, weight_decay=0.1)


def adam_step(module: Any, opt_id: int, step: int, tensors: Sequence[torch.Tensor]) -> None:
    module.adam_update(opt_id, step, 1e-2, 0.9, 0.999, 1e-8, 0.1, True, *tensors)


def adam_settings(step: int) -> AdamSettings:
    return AdamSettings(step, 1e-2, 0.9, 0.999, 1e-8, 0.1, True, anchor=0)


def pairwise_ranges(numel: int, largest: int) -> list[tuple[int, int]]:
    return [(start, min(largest, numel - start)) for start in range(0, numel, largest)]


def regrouped_matches_stock(adam: DeepSpeedCPUAdam, regrouping: Regrouping, cut: bool, part_numel: int = 1 << 20) -> bool:
    """Whether two steps chunk by chunk, part by part, give the bits of two steps sub-group by sub-group."""
    generator = torch.Generator().manual_seed(sum(regrouping.sizes))
    numel = sum(regrouping.sizes)
    param, exp_avg, exp_avg_sq = torch.randn(numel, generator=generator), torch.zeros(numel), torch.zeros(numel)
    whole = [param, torch.randn(numel, generator=generator), exp_avg, exp_avg_sq]
    chunks = [[tensor[index].clone() for tensor in whole] for index in regrouping.elements()]
    kernel = CpuAdam(adam.ds_opt_adam, adam.opt_id, (0.9, 0.999))
    for step in (1, 2):
        for group in regrouping.stock_ranges():
            adam_step(adam.ds_opt_adam, adam.opt_id, step, [tensor[group.start : group.stop] for tensor in whole])
        for chunk, pieces in zip(chunks, regrouping.pieces(), strict=True):
            size = chunk[0].numel()
            cuts = adam_cuts(pieces) if cut else (Cut(0, size, size, 0),)
            for start, count in pairwise_ranges(size, part_numel):
                tensors = [tensor.narrow(0, start, count) for tensor in chunk]
                kernel.update(adam_settings(step), Part(0, start, count), cuts, tensors)
    return all(
        torch.equal(whole[kind][index], chunk[kind])
        for index, chunk in zip(regrouping.elements(), chunks, strict=True)
        for kind in (0, 2, 3)
    )


@given(regroupings())
@example(SPLIT_REMAINDER)
@settings(deadline=None, max_examples=300)
def test_cut_adam_gives_the_bits_of_stocks_sub_groups(cpu_adam: DeepSpeedCPUAdam, regrouping: Regrouping) -> None:
    assert regrouped_matches_stock(cpu_adam, regrouping, cut=True)


@given(regroupings(), st.integers(1, 80))
@settings(deadline=None, max_examples=200)
def test_parts_cut_anywhere_give_the_same_bits(cpu_adam: DeepSpeedCPUAdam, regrouping: Regrouping, numel: int) -> None:
    assert regrouped_matches_stock(cpu_adam, regrouping, cut=True, part_numel=numel)


@given(st.integers(0, 40_000), st.integers(ALIGNMENT, 12_000))
def test_parts_cover_a_chunk_once_from_aligned_starts(numel: int, largest: int) -> None:
    parts = split_chunk(3, 0, numel, largest)
    assert [part.start for part in parts] == [0, *(part.start + part.numel for part in parts[:-1])][: len(parts)]
    assert sum(part.numel for part in parts) == numel
    assert all(part.chunk == 3 and 0 < part.numel <= largest and part.start % ALIGNMENT == 0 for part in parts)


def test_a_part_smaller_than_the_alignment_is_refused() -> None:
    with pytest.raises(ValueError, match="must be allowed 1024 elements or more, got 1023"):
        split_chunk(0, 0, 5000, 1023)


def test_uncut_adam_does_not(cpu_adam: DeepSpeedCPUAdam) -> None:
    """Otherwise the test above shows nothing on this processor."""
    sizes = tuple(range(7, 67, 3))
    regrouping = Regrouping(sizes, (len(sizes),), tuple((index,) for index in range(len(sizes))))
    assert regrouped_matches_stock(cpu_adam, regrouping, cut=True)
    assert not regrouped_matches_stock(cpu_adam, regrouping, cut=False)


# ---- chunks


@pytest.mark.parametrize("sizes", [[], [4, 4, 0], [8, 0, 0], [8, 8, 0], [3, 9, 0, 1, 8], [0, 0], [7], [9, 1]], ids=str)
def test_chunks_are_cut_as_stock_cuts_sub_groups(sizes: list[int]) -> None:
    params = [SimpleNamespace(partition_numel=partial(int, size)) for size in sizes]
    stock = DeepSpeedZeroOptimizer_Stage3._create_fp16_sub_groups
    expected = stock(cast(Any, SimpleNamespace(sub_group_size=8)), params) if params else []
    found = chunk_layout(params, lambda param: param.partition_numel(), lambda _: False, 8)
    assert [chunk for chunk, _ in found] == expected


def test_state_in_host_memory_has_chunks_of_its_own() -> None:
    sizes = (4, 5, 1, 6, 2)
    layout = chunk_layout(range(5), sizes.__getitem__, lambda each: each == 2, 8, lambda each: each in (1, 2, 3))
    assert list(layout) == [([0, 4], False), ([1, 3], False), ([2], True)]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.25, 0.3, 0.5, 0.77, 0.99, 1.0])
@pytest.mark.parametrize("outside", [(), (30, 30), (300,)], ids=str)
def test_a_share_is_spread_evenly_over_the_layers_and_never_exceeded(outside: tuple[int, ...], share: float) -> None:
    """In whole parameters: every layer is within its largest one of its part, and so is the total."""
    block = (30, 10, 40, 40, 1, 1)
    first = [(0, index) for index in range(len(outside))]
    layers = [[(layer, index) for index in range(len(block))] for layer in range(1, 9)]

    def numel(param: tuple[int, int]) -> int:
        return outside[param[1]] if not param[0] else block[param[1]]

    chosen = set(spread_params(first, layers, numel, share))
    total, taken = sum(outside) + 8 * sum(block), sum(map(numel, chosen))
    assert share * total - max(block) < taken <= share * total or (taken == total and share == 1)
    room = share * total - sum(numel(param) for param in chosen if not param[0])
    for members in layers:
        assert abs(sum(numel(param) for param in members if param in chosen) - room / 8) <= max(block)
    assert all((param in chosen) <= (numel(param) <= share * total) for param in first)
