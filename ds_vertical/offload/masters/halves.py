"""The two halves of an fp32 number: the low 16 bits are kept, the high 16 follow from the number rounded to bf16.

[Note: halves] bf16 has the high 16 bits of fp32. A number is rounded to it by adding one to the high half where the low half is
more than 0x8000, and at 0x8000, a tie, where that makes the high half even. So the high half is the rounded number where the
low half is below 0x8000, and one less where it is above. At a tie one less is taken, too. Whatever that gives wrongly (the ties
that were rounded down, and NaN, whose rounding is no arithmetic) is an exception: its place is kept, and its high half. An
exception is found by comparing, so the way back is exact for all 2^32 patterns, whoever rounded.

A compiled kernel goes through memory once in each direction. Where it cannot be compiled, torch stands in with the same bits,
block by block, in memory of its own that stays in the processor's caches. Bits are those of a machine that is little-endian.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ds_vertical.compat.ops import load

BLOCK_ELEMENTS = 1 << 18  # that torch works on at a time
_BITS = 15  # by which the low half is shifted to be -1 from 0x8000 on, and else 0


@dataclass(frozen=True, eq=False)
class Exceptions:
    """Elements whose high half does not follow: their `places` (int32), and the high halves (int16)."""

    places: torch.Tensor
    high: torch.Tensor


def split(master: torch.Tensor, rounded: Sequence[torch.Tensor], low: torch.Tensor, most: int) -> Exceptions | None:
    """Fill `low` (int16) with the low halves of `master` (fp32, 1-d), which stays as it is. `rounded`: bf16, one tensor behind
    the other as many elements. Returns the exceptions; None where there are more than `most`, and `low` is undefined."""
    kernel = load.master_halves()
    if kernel is None:
        return _split(master, rounded, low, most)
    found = kernel.split(master, rounded, low, most, torch.get_num_threads())
    return None if found is None else Exceptions(*found)


def join(low: torch.Tensor, rounded: Sequence[torch.Tensor], exceptions: Exceptions, master: torch.Tensor) -> None:
    """Fill `master` from what `split` has made of it. `low` may lie where `master` begins: then it is gone."""
    kernel = load.master_halves()
    if kernel is None:
        _join(low, rounded, exceptions, master)
    else:
        kernel.join(low, rounded, exceptions.places, exceptions.high, master, torch.get_num_threads())


# ---- the same in torch


def _split(master: torch.Tensor, rounded: Sequence[torch.Tensor], low: torch.Tensor, most: int) -> Exceptions | None:
    halves = master.view(torch.int16).view(-1, 2)
    places: list[torch.Tensor] = []
    count = 0
    for start, values in _blocks(rounded):
        block, part = halves.narrow(0, start, values.numel()), low.narrow(0, start, values.numel())
        part.copy_(block[:, 0])
        wrong = (_high(part, values) != block[:, 1]).nonzero().flatten()
        count += wrong.numel()
        if count > most:
            return None
        if wrong.numel():
            places.append(wrong.add_(start))
    found = torch.cat(places) if places else torch.empty(0, dtype=torch.int64)
    return Exceptions(found.to(torch.int32), halves[found, 1])


def _join(low: torch.Tensor, rounded: Sequence[torch.Tensor], exceptions: Exceptions, master: torch.Tensor) -> None:
    halves = master.view(torch.int16).view(-1, 2)
    for start, values in reversed(list(_blocks(rounded))):  # so the low halves that are still to be read lie ahead
        part = low.narrow(0, start, values.numel()).clone()
        block = halves.narrow(0, start, values.numel())
        block[:, 0].copy_(part)
        block[:, 1].copy_(_high(part, values))
    halves[exceptions.places.long(), 1] = exceptions.high


def _high(low: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The high halves, but of exceptions, in memory of their own."""
    return (low >> _BITS).add_(values.view(torch.int16))


def _blocks(rounded: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
    """The first element of each block, and its rounded values."""
    start = 0
    for values in rounded:
        for piece in values.split(BLOCK_ELEMENTS):
            yield start, piece
            start += piece.numel()
