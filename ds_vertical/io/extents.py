"""Which bytes of a file are in use: ranges taken and given back."""

from __future__ import annotations

from bisect import bisect_left
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
