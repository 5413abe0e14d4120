"""Where CPU Adam's calls are cut, so that chunks along layers give the bits of stock's sub-groups.

[Note: lanes] DeepSpeed's CPU Adam runs the elements of one call in vector lanes and the last few, which fill no vector,
one by one; the two round differently (fused multiply-add against separate operations). In stock the call covers one
sub-group, so an element's rounding depends on whether it lies in the last `numel % LANE` elements of ITS sub-group.
Our chunks follow layers. Every element must still take the path that it takes in stock: elements of the vector part are
run in calls of a multiple of LANE (a shorter rest travels through a zero-padded scratch of LANE elements), elements
of stock's remainder in a call as long as that remainder. Position inside a vector has no effect on the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LANE = 16  # elements of the widest vector unit (AVX-512, fp32); narrower units divide it


@dataclass(frozen=True, slots=True)
class Piece:
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
        return self.span == self.numel


def adam_cuts(pieces: Sequence[Piece]) -> tuple[Cut, ...]:
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
