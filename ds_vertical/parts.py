"""Parts: the pieces of a chunk that travel through the optimizer pipeline one by one, and their CPU Adam calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ds_vertical.chunks import LANE, Cut

ALIGNMENT = 1024  # elements: a part starts at a multiple, so that its fp32 bytes start at one of 4096 in their files


@dataclass(frozen=True, slots=True)
class Part:
    """Elements [start, start + numel) of a chunk."""

    chunk: int
    start: int
    numel: int


def boundary(sizes: Sequence[int], share: float) -> int:
    """The element nearest to `share` of a chunk at which it can be cut in two, given its parameters' shard sizes.

    The cut must be aligned both in the chunk's state files (fp32) and in the file of the parameter that it goes through
    (2 or 4 bytes an element). 0 and the chunk's end can always be had.
    """
    total = sum(sizes)
    wanted = share * total
    found, start = [0, total], 0
    for size in sizes:
        if start % ALIGNMENT == 0:
            step = 2 * ALIGNMENT
            nearest = round((wanted - start) / step) * step
            found.append(start + min(max(nearest, 0), size - size % step))
        start += size
    return min(found, key=lambda position: abs(position - wanted))


def split_chunk(chunk: int, start: int, end: int, largest: int) -> tuple[Part, ...]:
    """Cut elements [start, end) of a chunk into near-equal parts of at most `largest` elements (at least ALIGNMENT).

    `start` must be a multiple of ALIGNMENT.
    """
    numel = end - start
    if largest < ALIGNMENT:
        raise ValueError(f"a part must be allowed {ALIGNMENT} elements or more, got {largest}")
    if numel == 0:
        return ()
    largest -= largest % ALIGNMENT
    count = -(-numel // largest)
    size = -(-numel // count)
    size += -size % ALIGNMENT
    return tuple(Part(chunk, first, min(size, end - first)) for first in range(start, end, size))


def cuts_within(cuts: Sequence[Cut], start: int, numel: int) -> Iterator[Cut]:
    """The calls of `chunks.adam_cuts` restricted to elements [start, start + numel); positions stay the chunk's.

    Every element keeps its path (vector or scalar): where an in-place vector call is cut off a multiple of LANE, the
    rest goes through a scratch of LANE elements, as in `chunks`.
    """
    end = start + numel
    for cut in cuts:
        first, last = max(start, cut.start), min(end, cut.start + cut.numel)
        if first >= last:
            continue
        if not cut.in_place or cut.span < LANE:
            yield Cut(first, last - first, cut.span, cut.offset + first - cut.start)
            continue
        whole = (last - first) - (last - first) % LANE
        if whole:
            yield Cut(first, whole, whole, 0)
        if last - first > whole:
            yield Cut(first + whole, last - first - whole, LANE, 0)


def spread(first: Sequence[Part], rest: Sequence[Part], share: float) -> frozenset[Part]:
    """About `share` of all elements in whole parts: those of `first` that there is room for, then evenly among `rest`."""
    chosen: set[Part] = set()
    room = share * sum(part.numel for part in (*first, *rest))
    for part in first:
        if part.numel <= room:
            chosen.add(part)
            room -= part.numel
    total, passed, taken = sum(part.numel for part in rest), 0, 0
    for part in rest:
        passed += part.numel
        # to the nearest part: half of this one must still be due
        if room * passed - taken * total >= part.numel * total / 2:
            chosen.add(part)
            taken += part.numel
    return frozenset(chosen)
