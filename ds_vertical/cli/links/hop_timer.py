"""Seconds of collectives, and what these take of the host's cores, with all ranks at it together.

[Note: kept pages] Training keeps the memory that it frees from step to step. A process that has just begun has none to keep
yet, and its collectives take fresh pages, which the kernel zeroes on the same cores: on a virtual machine behind long runs that
was up to twice what the collectives take themselves. So rounds come first that do not count, until one takes few fresh pages on
every rank. Their chunks are a little larger than those that count, since a block fits only into a larger freed one
(`io.host`, [Note: freed memory]).

[Note: beside a computation] Where ranks compute on the cores, a collective takes more of these beside the computation than by
itself, since both share the caches and the way to memory. And it takes longer: its threads wait for a core with each part that
arrives. So what it takes in training is measured while the calling thread of each rank adds numbers, more than caches hold,
whose own time does not count among the core seconds. Another thread starts the collectives and waits for them.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import torch

from ds_vertical.compat.accelerator import synchronize
from ds_vertical.distributed import ranks

_MOST_UNCOUNTED: Final = 12  # rounds
_FEW_PAGES: Final = 256  # of 4 KiB
LARGER: Final = 1 << 14  # numbers of a chunk, ahead of those that count
_BESIDE: Final = 1 << 22  # numbers


class TimedHop(NamedTuple):
    """A collective that `start` begins with these rows; what it returns has a `wait`. The rows stay as they are."""

    start: Callable[[torch.Tensor], Any]
    rows: torch.Tensor


class BesideComputing(NamedTuple):
    """What hops take while all ranks compute: seconds of a core, in the mean of ranks and of each the median of its rounds; and
    seconds, of the slowest rank in the median round."""

    core_s: float
    seconds: float


def warm(hops_of: Callable[[int], Sequence[TimedHop]], size: int) -> Sequence[TimedHop]:
    """Connect the ranks, and come to memory that stays: see [Note: kept pages]. Collective. `hops_of`: makes the hops for
    chunks of so many numbers; returns those of `size`."""
    hops = hops_of(size + LARGER)
    for number in range(_MOST_UNCOUNTED):
        before = _fresh_pages()
        _run(hops)
        if ranks.is_true_on_all_ranks(number > 0 and _fresh_pages() - before < _FEW_PAGES):
            break
    return hops_of(size)


def seconds(hops: Sequence[TimedHop], rounds: int) -> float:
    """Of the hops one after the other: of the slowest rank in the fastest round. Collective."""
    taken = []
    for _ in range(rounds):
        ranks.is_true_on_all_ranks(True)
        begin = time.perf_counter()
        _run(hops)
        taken.append(time.perf_counter() - begin)
    return min(max(same) for same in zip(*ranks.all_gathered(taken), strict=True))


def beside_computing(hops: Sequence[TimedHop], rounds: int) -> BesideComputing:
    """See [Note: beside a computation]. Collective, on the CPU alone."""
    cores_s, rounds_s, numbers = [], [], torch.ones(2, _BESIDE)
    with ThreadPoolExecutor(1) as thread:
        for _ in range(1 + rounds):  # the first one comes to memory that stays
            ranks.is_true_on_all_ranks(True)
            start, begin = _core_seconds_of_others(), time.perf_counter()
            over = thread.submit(_timed, hops)
            while not over.done():
                numbers[0] += numbers[1]
            rounds_s.append(over.result() - begin)
            cores_s.append(_core_seconds_of_others() - start)
    slowest = (max(same) for same in zip(*ranks.all_gathered(rounds_s[1:]), strict=True))
    core_s = statistics.mean(statistics.median(each[1:]) for each in ranks.all_gathered(cores_s))
    return BesideComputing(core_s, statistics.median(slowest))


def _timed(hops: Sequence[TimedHop]) -> float:
    """When they are over."""
    _run(hops)
    return time.perf_counter()


def _run(hops: Sequence[TimedHop]) -> None:
    for start, rows in hops:
        start(rows).wait()
    synchronize()


def _fresh_pages() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _core_seconds_of_others() -> float:
    """Of all threads of this process but this one."""
    return time.process_time() - time.thread_time()
