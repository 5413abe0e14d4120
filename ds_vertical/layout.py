"""How this rank's parameters lie in chunks: all that a step needs to know of each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ds_vertical import compat_state
from ds_vertical.chunks import Piece, adam_cuts
from ds_vertical.generations import Chunk
from ds_vertical.memory import PART_ELEMENTS


def make_chunks(
    optimizer: Any, stock_groups: Sequence[Sequence[Any]], early_share: float, generations: int
) -> list[Chunk]:
    """The chunks of a ZeRO-3 optimizer, in its order. `stock_groups`: stock's own sub-groups, whose rounding is kept.
    `early_share`: of every chunk on SSD that the schedule steps, the share that may be stepped early; `generations`: of its
    files."""
    place: dict[int, tuple[int, int]] = {}
    for group in stock_groups:
        total, offset = sum(param.partition_numel() for param in group), 0
        for param in group:
            place[id(param)] = (offset, total)
            offset += param.partition_numel()
    groups = enumerate(optimizer.fp16_groups)
    return [_chunk(optimizer, index, params, place, early_share, generations) for index, params in groups]


def _chunk(
    optimizer: Any,
    index: int,
    params: Sequence[Any],
    place: dict[int, tuple[int, int]],
    early_share: float,
    generations: int,
) -> Chunk:
    sizes = [param.partition_numel() for param in params]
    cuts = adam_cuts([Piece(size, *place[id(param)]) for param, size in zip(params, sizes, strict=True)])
    on_ssd = compat_state.is_chunk_on_ssd(optimizer, index)
    waits = not on_ssd or optimizer.is_persistent_chunk(index)
    early, delayed = Chunk.shares(index, sizes, 0.0 if waits else early_share, PART_ELEMENTS)
    return Chunk(
        params,
        sizes,
        cuts,
        early,
        delayed,
        compat_state.file_numel(optimizer, index) if on_ssd else sum(sizes),
        compat_state.state_files(optimizer, index)[:generations] if on_ssd else None,
        None if on_ssd else partial(compat_state.resident_state, optimizer, index),
    )
