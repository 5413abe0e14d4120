"""Where CPU Adam's calls are cut, so that chunks along layers give the bits of stock's sub-groups.

[Note: lanes] DeepSpeed's CPU Adam runs the elements of one call in vector lanes and the last few, which fill no vector,
one by one; the two round differently (fused multiply-add against separate operations). In stock the call covers one
sub-group, so an element's rounding depends on whether it lies in the last `numel % LANE` elements of ITS sub-group.
Our chunks follow layers. Every element must still take the path that it takes in stock: elements of the vector part are
run in calls of a multiple of LANE (a shorter rest travels through a zero-padded scratch of LANE elements), elements
of stock's remainder in a call as long as that remainder. Position inside a vector has no effect on the result.

Parts: the pieces of a chunk that travel through the optimizer pipeline one by one, and their CPU Adam calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

LANE = 16  # elements of the widest vector unit (AVX-512, fp32); narrower units divide it


@dataclass(frozen=True, slots=True)
class ChunkPiece:
    """One parameter's partition inside a chunk, with its place in stock's sub-group. All counts are elements."""

    numel: int
    stock_offset: int
    stock_numel: int


@dataclass(frozen=True, slots=True)
class Cut:
    """One call of CPU Adam: `numel` elements at `start` of the chunk, run as elements `offset..offset+numel` of a call
    of `span` elements. `span == numel` is a call in place; otherwise the elements travel through a scratch."""

    start: int
    numel: int
    span: int
    offset: int

    @property
    def in_place(self) -> bool:
        """Whether the elements are stepped where they lie."""
        return self.span == self.numel


def adam_cuts(pieces: Sequence[ChunkPiece]) -> tuple[Cut, ...]:
    """Cut a chunk, given its pieces in order, into calls with stock's rounding. See [Note: lanes].

    The cuts cover the chunk's elements exactly once, in order. Raises ValueError for a piece outside its sub-group.
    """
    cuts: list[Cut] = []
    vector_start = position = 0
    vector_numel = 0

    def close_vector_run() -> None:
        whole = vector_numel - vector_numel % LANE
        if whole:
            cuts.append(Cut(vector_start, whole, whole, 0))
        if vector_numel > whole:
            cuts.append(Cut(vector_start + whole, vector_numel - whole, LANE, 0))

    for piece in pieces:
        end = piece.stock_offset + piece.numel
        if piece.numel < 0 or piece.stock_offset < 0 or end > piece.stock_numel:
            raise ValueError(f"{piece} does not lie inside its sub-group")
        remainder = piece.stock_numel % LANE
        boundary = piece.stock_numel - remainder
        vector = max(0, min(end, boundary) - piece.stock_offset)
        if vector and not vector_numel:
            vector_start = position
        vector_numel += vector
        scalar = piece.numel - vector
        if scalar:
            close_vector_run()
            vector_numel = 0
            _append_remainder(cuts, Cut(position + vector, scalar, remainder, max(piece.stock_offset, boundary) - boundary))
        position += piece.numel
    close_vector_run()
    return tuple(cuts)


def _append_remainder(cuts: list[Cut], cut: Cut) -> None:
    """Join a remainder with the one before it where both are neighbours in the chunk and in stock's remainder."""
    if cuts:
        last = cuts[-1]
        joins = last.span == cut.span < LANE and last.start + last.numel == cut.start
        if joins and last.offset + last.numel == cut.offset:
            cuts[-1] = Cut(last.start, last.numel + cut.numel, cut.span, last.offset)
            return
    cuts.append(cut)


ALIGNMENT = 1024  # elements: a part starts at a multiple, so that its fp32 bytes start at one of 4096 in their files
FP32_BYTES = 4

_Param = TypeVar("_Param")


def chunk_layout(
    members: Iterable[_Param],
    numel: Callable[[_Param], int],
    stays: Callable[[_Param], bool],
    largest: int,
    in_host: Callable[[_Param], bool] = lambda _: False,
) -> Iterator[tuple[list[_Param], bool]]:
    """The chunks of one unit and optimizer group: the parameters of each, and whether they stay on the device.

    Those that stay are apart from the others, behind them; so are those whose state is to rest in host memory (`in_host`).
    Each kind is cut as stock cuts sub-groups (DeepSpeed 0.19.8, `_create_fp16_sub_groups`): all in one chunk if they have no
    more than `largest` elements on this rank; else a chunk is full when it holds as many. `numel`: a parameter's elements on
    this rank. Set-up makes chunks by it, and the memory budget foretells them.
    """
    params = list(members)
    kinds = [(stays(each), not stays(each) and in_host(each)) for each in params]
    for staying, resting in ((False, False), (False, True), (True, False)):
        alike = [each for each, kind in zip(params, kinds, strict=True) if kind == (staying, resting)]
        if alike and sum(map(numel, alike)) <= largest:  # a parameter without elements behind a full chunk begins no new one
            yield alike, staying
            continue
        chunk: list[_Param] = []
        size = 0
        for param in alike:
            chunk.append(param)
            size += numel(param)
            if size >= largest:
                yield chunk, staying
                chunk, size = [], 0
        if chunk:
            yield chunk, staying


def spread_params(
    first: Sequence[_Param], layers: Sequence[Sequence[_Param]], numel: Callable[[_Param], int], share: float | Fraction
) -> list[_Param]:
    """About `share` of all elements in whole parameters, never more: those of `first` that there is room for, then evenly among
    the layers. What a layer has no parameter small enough for, the next ones make up for."""
    total = sum(numel(param) for members in (first, *layers) for param in members)
    chosen = _largest_within(first, numel, int(share * total))
    room = int(share * total) - sum(map(numel, chosen))
    rest, passed, taken = sum(numel(param) for members in layers for param in members), 0, 0
    for members in layers:
        passed += sum(map(numel, members))
        found = _largest_within(members, numel, room * passed // max(rest, 1) - taken)
        taken += sum(map(numel, found))
        chosen += found
    return chosen


def _largest_within(params: Sequence[_Param], numel: Callable[[_Param], int], room: int) -> list[_Param]:
    """Parameters of `room` elements at most, the largest first."""
    chosen: list[_Param] = []
    for param in sorted(params, key=numel, reverse=True):
        if 0 < numel(param) <= room:
            chosen.append(param)
            room -= numel(param)
    return chosen


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
    """The calls of `chunking.adam_cuts` restricted to elements [start, start + numel); positions stay the chunk's.

    Every element keeps its path (vector or scalar): where an in-place vector call is cut off a multiple of LANE, the
    rest goes through a scratch of LANE elements, as in `chunking`.
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


def spread_parts(first: Sequence[Part], rest: Sequence[Part], share: float) -> frozenset[Part]:
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
