"""Files that lie on several SSDs at once: which of a file's bytes are where.

[Note: stripes] A run with several SSDs has a folder on each, under one run id. A file of such a run keeps the one name that it
has with one SSD, below the first folder, and everybody speaks of it by this name. No file has that name: the bytes are in one
file on each SSD, `NAME.ssd0`, `NAME.ssd1`, ..., at the same place below its folder. Bytes [0, a) are on one SSD, [a, b) on the
next, and so on up to the period's end, where it begins anew. The widths are in proportion to the SSDs' rates, so that a
transfer of a period or more takes all of them for the same time. Parameters, which are read whole, have one period.

Whoever opens a file asks `stripes_of`, `files_of` or `sizes_of` first; who forgets that finds no file. Imports neither torch
nor deepspeed.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from ds_vertical.io.runs import held_folders
from ds_vertical.io.runs.held_folders import AnyPath

SEGMENT_BYTES: Final = 2 << 20  # of a period, for each SSD, where they are equally fast
_GRAIN: Final = 4096  # every SSD's bytes begin at a multiple of it


class Stripe(NamedTuple):
    """Neighbouring bytes of one file: `num_bytes` from `offset` on in `path`, which is on the SSD of number `lane`. `start`:
    how far they are behind the first byte that was asked for."""

    path: str
    offset: int
    num_bytes: int
    start: int = 0
    lane: int = 0


@dataclass(frozen=True)
class FileStripes:
    """Where one file's bytes are. `paths`: its files in the order in which a period goes through them, each on the SSD of the
    number in `lanes`; `ends`: of each one's bytes in a period."""

    paths: tuple[str, ...]
    lanes: tuple[int, ...]
    ends: tuple[int, ...]

    def pieces(self, offset: int, num_bytes: int) -> Iterator[Stripe]:
        """Bytes [offset, offset + num_bytes), in order."""
        position, end, period = offset, offset + num_bytes, self.ends[-1]
        while position < end:
            turn, inside = divmod(position, period)
            index = bisect_right(self.ends, inside)
            first = self.ends[index - 1] if index else 0
            count = min(self.ends[index] - inside, end - position)
            place = turn * (self.ends[index] - first) + inside - first
            yield Stripe(self.paths[index], place, count, position - offset, self.lanes[index])
            position += count

    def sizes(self, num_bytes: int) -> list[int]:
        """Bytes of each of `paths`, where the file has so many."""
        turns, rest = divmod(num_bytes, self.ends[-1])
        segments = pairwise((0, *self.ends))
        return [turns * (end - start) + min(max(rest - start, 0), end - start) for start, end in segments]


@dataclass(frozen=True)
class StripedRun:
    """The run's folder on each SSD, and the share of all bytes that goes to each."""

    folders: tuple[Path, ...]
    shares: tuple[float, ...]


_runs: dict[Path, StripedRun] = {}  # by the first folder
_files: dict[str, FileStripes] = {}  # by the name that everybody uses


def open_run(folders: Sequence[Path], shares: Sequence[float]) -> None:
    """Files below `folders[0]` may be spread over all folders from now on, in these shares, which add up to 1."""
    if len(folders) > 1:
        _runs[folders[0]] = StripedRun(tuple(folders), tuple(shares))


def close_run(first: Path) -> None:
    """Forget the files below a folder that the run has given up."""
    if _runs.pop(first, None) is not None:
        for path in [path for path in _files if Path(path).is_relative_to(first)]:
            del _files[path]


def run_of(path: AnyPath) -> StripedRun | None:
    """The striped run whose first folder a path is, or lies in."""
    where = Path(path)
    return next((_runs[parent] for parent in (where, *where.parents) if parent in _runs), None) if _runs else None


def run_with(folder: Path) -> StripedRun | None:
    """The striped run of which this is a folder, be it the first or another one."""
    return next((run for run in _runs.values() if folder in run.folders), None)


def most_lanes() -> int:
    """SSDs of the run that has most of them."""
    return max((len(run.folders) for run in _runs.values()), default=1)


def spread_file(path: AnyPath, num_bytes: int, whole: bool = False) -> None:
    """Let a file, which is yet to be made, lie on all SSDs of its run. Nothing happens for one that is there already, one that
    is too small, and in a run with one SSD. `whole`: it will be read whole each time, so one period is the best.
    """
    run, name = run_of(path), os.fspath(path)
    if run is None or name in _files or held_folders.exists(name):
        return
    count = len(run.folders)
    period = num_bytes if whole else _period(num_bytes, count * SEGMENT_BYTES)
    if min(num_bytes, period) < count * _GRAIN:
        return
    first = len(_files) % count  # another SSD first in each file: what is no whole number of periods evens out
    lanes = tuple((first + index) % count for index in range(count))
    below = Path(name).relative_to(run.folders[0])
    paths = tuple(os.fspath(run.folders[lane] / f"{below}.ssd{lane}") for lane in lanes)
    _files[name] = FileStripes(paths, lanes, _ends(period, [run.shares[lane] for lane in lanes]))


def _period(num_bytes: int, most: int) -> int:
    """As many equal periods as a file needs for none to be longer than `most`."""
    turns = -(-num_bytes // most)
    return -(-num_bytes // (turns * _GRAIN)) * _GRAIN


def _ends(period: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Of each SSD's bytes in a period: in proportion, at multiples of _GRAIN, one of them at least."""
    ends: list[int] = []
    whole, behind = sum(shares), len(shares)
    for number in range(len(shares) - 1):
        behind -= 1
        wanted = round(period * sum(shares[: number + 1]) / whole / _GRAIN) * _GRAIN
        least, most = (ends[-1] if ends else 0) + _GRAIN, (period // _GRAIN - behind) * _GRAIN
        ends.append(min(max(wanted, least), most))
    return (*ends, period)


def spread_as(path: AnyPath, other: AnyPath) -> None:
    """Let a file that is made of another one, or in its place, lie as that one does."""
    found = _files.get(os.fspath(other))
    run = run_of(path)
    if found is not None and run is not None:
        below = Path(path).relative_to(run.folders[0])
        paths = tuple(os.fspath(run.folders[lane] / f"{below}.ssd{lane}") for lane in found.lanes)
        _files[os.fspath(path)] = FileStripes(paths, found.lanes, found.ends)


def forget_file(path: AnyPath) -> None:
    """The file is gone."""
    _files.pop(os.fspath(path), None)


def stripes_of(path: AnyPath, offset: int, num_bytes: int) -> list[Stripe]:
    """Where bytes [offset, offset + num_bytes) of a file are, in order; of a file that is not spread, the same in one piece."""
    name = os.fspath(path)
    found = _files.get(name)
    return [Stripe(name, offset, num_bytes)] if found is None or not num_bytes else list(found.pieces(offset, num_bytes))


def files_of(path: AnyPath) -> list[Path]:
    """The files that a file consists of; of one that is not spread, itself."""
    found = _files.get(os.fspath(path))
    return [Path(path)] if found is None else [Path(each) for each in found.paths]


def sizes_of(path: AnyPath, num_bytes: int) -> dict[Path, int]:
    """The same with their sizes, where the file has `num_bytes`."""
    found = _files.get(os.fspath(path))
    return {Path(path): num_bytes} if found is None else dict(zip(files_of(path), found.sizes(num_bytes), strict=True))
