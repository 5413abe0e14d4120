"""Which bytes of a file are in use: ranges taken and given back."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


class Extents:
    """Ranges of one file, taken first-fit. `end`: the size that the file has needed so far."""

    def __init__(self) -> None:
        self.end = 0
        self.num_used = 0  # bytes
        self._free: list[tuple[int, int]] = []  # (offset, length), ascending, no two adjacent

    def take(self, num_bytes: int) -> int:
        """The offset of `num_bytes` (> 0) that nobody uses."""
        self.num_used += num_bytes
        for index, (offset, length) in enumerate(self._free):
            if length >= num_bytes:
                left = [(offset + num_bytes, length - num_bytes)] if length > num_bytes else []
                self._free[index : index + 1] = left
                return offset
        offset = self._free.pop()[0] if self._free and sum(self._free[-1]) == self.end else self.end
        self.end = offset + num_bytes
        return offset

    def give_back(self, offset: int, num_bytes: int) -> None:
        """Free a range that `take` returned."""
        self.num_used -= num_bytes
        index = bisect_left(self._free, (offset, 0))
        before, after = self._free[:index], self._free[index:]
        if before and sum(before[-1]) == offset:
            offset, num_bytes = before[-1][0], before[-1][1] + num_bytes
            before.pop()
        if after and after[0][0] == offset + num_bytes:
            num_bytes += after[0][1]
            del after[0]
        self._free = [*before, (offset, num_bytes), *after]


@dataclass(frozen=True)
class Extent:
    """A piece of a state file: `num_bytes` at `offset` are transferred, both multiples of the disk's alignment. `spare`: bytes
    behind them that a slot's memory leaves free."""

    path: Path
    offset: int
    num_bytes: int
    spare: int = 0

    def overlaps(self, other: Extent) -> bool:
        """Whether some byte of the file lies in both."""
        end, other_end = self.offset + self.num_bytes, other.offset + other.num_bytes
        return self.path == other.path and self.offset < other_end and other.offset < end


class ExtentIndex:
    """Extents, each as often as it was added, in which those that overlap another one are found without looking at all."""

    def __init__(self) -> None:
        self._ranges: dict[str, list[tuple[int, int]]] = {}  # by path: (offset, end), ascending
        self._longest: dict[str, int] = {}

    def add(self, extents: Iterable[Extent]) -> None:
        """They are in the index once more."""
        for extent in extents:
            key = str(extent.path)
            insort(self._ranges.setdefault(key, []), (extent.offset, extent.offset + extent.num_bytes))
            self._longest[key] = max(self._longest.get(key, 0), extent.num_bytes)

    def remove(self, extents: Iterable[Extent]) -> None:
        """They are in the index once less; those that are not in it are passed over."""
        for extent in extents:
            key, entry = str(extent.path), (extent.offset, extent.offset + extent.num_bytes)
            ranges = self._ranges.get(key, [])
            place = bisect_left(ranges, entry)
            if ranges[place : place + 1] == [entry]:
                del ranges[place]
            if not ranges:
                self._ranges.pop(key, None)
                self._longest.pop(key, None)

    def clear(self) -> None:
        """Nothing is in the index any more."""
        self._ranges.clear()
        self._longest.clear()

    def overlaps(self, extents: Iterable[Extent]) -> bool:
        """Whether one in the index has a byte of one of these."""
        return any(map(self._overlaps, extents))

    def _overlaps(self, extent: Extent) -> bool:
        ranges = self._ranges.get(str(extent.path))
        if ranges is None:
            return False
        end = extent.offset + extent.num_bytes
        first = bisect_left(ranges, (extent.offset - self._longest[str(extent.path)], 0))
        for place in range(first, len(ranges)):
            if ranges[place][0] >= end:
                return False
            if ranges[place][1] > extent.offset:
                return True
        return False
