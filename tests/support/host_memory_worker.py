"""One rank of four, of which two each share memory: what they gather out of it, and when there is none.

python tests/support/host_memory_worker.py CASE       # of `CASES`
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ds_vertical.compat.accelerator import init_distributed
from ds_vertical.compat.ops import cache
from ds_vertical.distributed import host_memory, levels, ranks
from ds_vertical.distributed.host_memory import SharedMemory, shared_by
from ds_vertical.distributed.levels import LevelCollectives
from ds_vertical.distributed.topology import Level, Topology
from ds_vertical.schedule.trace import Tracer

PAIRS = Topology(4, 2, 2)
UNITS, ROUNDS, NUMEL = 3, 12, 3000  # elements of a rank's chunk
PART = 2 * NUMEL * 4  # bytes of a rank's part of a copy


def opened(num_bytes: int) -> SharedMemory | None:
    """The memory. While the file has a name it is of a page, which is what would stay of a rank that is killed then. Behind
    that no rank finds the file that this one has made or opened."""
    gathered = ranks.all_gathered

    def looked_at(value: Any) -> Any:
        made = [call.args[0] for call in found.call_args_list if call.args[3]]
        assert all(path.stat().st_blocks * 512 <= mmap.PAGESIZE for path in made if path.exists())
        return gathered(value)

    opens = mock.patch.object(host_memory, "_opened", wraps=host_memory._opened)
    with opens as found, mock.patch.object(ranks, "all_gathered", looked_at):
        memory = shared_by(PAIRS.hops(Level.PAIR), num_bytes, "copies")
    ranks.is_true_on_all_ranks(True)
    assert not any(call.args[0].exists() for call in found.call_args_list), "the file has no name any more"
    return memory


def whole(num_bytes: int) -> SharedMemory:
    memory = opened(num_bytes)
    assert memory is not None and mapped() == 1
    return memory


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("/dev/shm/ds_vertical.")


def chunk(rank: int, unit: int, step: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(1000 * step + 10 * unit + rank))


class Links(Tracer):
    """The bytes that this rank has got over the links of a host, hop by hop, by the names of their collectives."""

    def __init__(self) -> None:
        self.local: dict[str, list[int]] = {}

    def span(self, resource: str, name: object, start: float, end: float, num_bytes: int = 0, **_: Any) -> None:
        """See `Tracer.span`."""
        if resource == "net_local":
            self.local.setdefault(str(name), []).append(num_bytes)


def check_all_ranks(found: list[torch.Tensor], unit: int, step: int) -> None:
    for rank, each in enumerate(found):
        assert torch.equal(each, chunk(rank, unit, step)), (rank, unit, step)


def copied(chunks: list[torch.Tensor]) -> list[torch.Tensor]:
    time.sleep(random.random() / 200)  # a rank that reads slowly
    return [each.clone() for each in chunks]


def copies_are_read_and_made_again() -> None:
    """Memory has room for each unit's copy once. A unit's next copy comes while others may read the one before."""
    memory, collectives, me = whole(UNITS * host_memory.padded(PART)), LevelCollectives(PAIRS), ranks.rank()
    links = Links()
    collectives.trace(links)
    random.seed(me)
    copies: dict[int, levels.Issued[torch.Tensor]] = {}
    with mock.patch.object(levels, "_all_gathered", wraps=levels._all_gathered) as gathered:
        for step in range(ROUNDS):
            under_way = []
            for unit in range(UNITS):
                copies.pop(unit, None)
                copies[unit] = collectives.spread(chunk(me, unit, step), memory=memory)
                under_way.append(collectives.gather(copies[unit], join=copied, memory=memory))
                if random.random() < 0.3:
                    time.sleep(0.003)
            under_way += [collectives.gather(copies[unit], join=copied, memory=memory) for unit in range(UNITS)]
            for number, issued in enumerate(under_way):
                check_all_ranks(issued.wait(), number % UNITS, step)
            assert all(memory.has(each.wait()) for each in copies.values())
    assert gathered.call_count == ROUNDS * UNITS, "nothing but what spreads has been sent"
    assert links.local == {"": [0] * (2 * ROUNDS * UNITS)}
    copies.clear()
    del under_way, issued
    collectives.close()
    time.sleep(0.1)  # the lanes let go of their last jobs
    memory.close()
    assert mapped() == 0


def terms_are_added_where_they_lie_with_the_bits_of_those_that_are_sent() -> None:
    """Memory has room for the terms of one reduction. The next one is made while others may read the one before. Rank 1 has no
    room in the last round but one."""
    size = 4 * NUMEL * 4
    memory, collectives, me = whole(host_memory.padded(size)), LevelCollectives(PAIRS), ranks.rank()
    links = Links()
    collectives.trace(links)
    random.seed(me)
    with mock.patch.object(levels, "_scattered_sums", wraps=levels._scattered_sums) as sent:
        for step in range(ROUNDS):
            taken = memory.take((1,), torch.uint8) if me == 1 and step == ROUNDS - 2 else None
            sums = [torch.cat([chunk(me, unit, step) for unit in range(4)]).to(torch.bfloat16 if step % 2 else torch.float32)]
            under_way = []
            for _ in range(3):
                rows = levels.cut_into_chunks(sums, PAIRS.order, 4, collectives.room(memory))
                assert memory.has(rows) == (taken is None)
                under_way.append(collectives.cross(collectives.reduce(rows, what="REDUCE", memory=memory)))
                del rows
                time.sleep(random.random() / 200)
            given = levels.cut_into_chunks(sums, PAIRS.order, 4)
            expected = collectives.cross(collectives.reduce(given)).wait()
            assert all(torch.equal(each.wait(), expected) for each in under_way), step
            collectives.room(memory).new((1,), sums[0])  # waits until all is read
            del taken
    in_pairs = [call for call in sent.call_args_list if call.args[1].size() == 2]
    num_sent = 3 if me < 2 else 0  # of the round in which rank 1 has no room
    assert len(in_pairs) == ROUNDS * (3 + 2) + num_sent  # each CROSS, and both hops of what is compared with
    assert len(links.local["REDUCE"]) == ROUNDS * 3 and sum(map(bool, links.local["REDUCE"])) == num_sent


def a_part_that_lies_elsewhere_is_sent() -> None:
    """That of rank 1, whose memory has no room; then each rank's, in turn."""
    memory, collectives, me = whole(host_memory.padded(PART)), LevelCollectives(PAIRS), ranks.rank()
    taken = memory.take((1,), torch.uint8) if me == 1 else None
    copy = collectives.spread(chunk(me, 0, 0), memory=memory)
    check_all_ranks(collectives.gather(copy, join=copied, memory=memory).wait(), 0, 0)
    assert memory.has(copy.wait()) == (taken is None)
    for rank in range(4):
        given = copy.wait().clone() if rank == me else copy
        check_all_ranks(collectives.gather(given, join=copied, memory=memory).wait(), 0, 0)


def memory_that_is_closed_under_what_is_under_way_is_left() -> None:
    """As by an engine that is destroyed: between what ranks say of where their parts lie and the reads, and ahead of a spread,
    which finds the place in front of a part given up."""
    part = host_memory.padded(PART)
    memory, collectives, me = whole(2 * part), LevelCollectives(PAIRS), ranks.rank()
    ahead = memory.take((part,), torch.uint8)
    copy = collectives.spread(chunk(me, 0, 0), memory=memory)
    assert ahead is not None and memory.has(copy.wait())
    del ahead
    all_gather = ranks.ALL_GATHER

    def closes(found: torch.Tensor, *given: Any, **named: Any) -> None:
        all_gather(found, *given, **named)
        if found.dtype == torch.int64:
            memory.close()

    with mock.patch.object(ranks, "ALL_GATHER", closes):
        check_all_ranks(collectives.gather(copy, join=copied, memory=memory).wait(), 0, 0)
    assert not memory.has(copy.wait())
    again = collectives.spread(chunk(me, 1, 0), memory=memory)
    for unit, each in enumerate((copy, again)):
        check_all_ranks(collectives.gather(each, join=copied, memory=memory).wait(), unit, 0)


def a_folder_that_is_too_small_is_told_and_left() -> None:
    assert opened(shutil.disk_usage("/dev/shm").total) is None and mapped() == 0


def another_folder_of_this_name_is_told_and_left() -> None:
    """That of rank 3, as in a container: there is a file of the name and the size, which rank 2 has not made."""
    opens = host_memory._opened

    def elsewhere(path: Path, size: int, *given: Any) -> tuple[int | None, str]:
        other = path.with_name(f"{path.name}.other")
        os.close(os.open(other, os.O_CREAT | os.O_RDWR))
        os.truncate(other, size)
        try:
            return opens(other, size, *given)
        finally:
            other.unlink()

    with mock.patch.object(host_memory, "_opened", elsewhere if ranks.rank() == 3 else opens):
        assert opened(1 << 20) is None and mapped() == 0


def a_rank_that_is_gone_while_others_read_ends_them() -> None:
    """Rank 1, behind what it has told of its part. Rank 0 hears of it where they meet; the other pair hears of nothing."""
    memory, collectives, me = whole(host_memory.padded(PART)), LevelCollectives(PAIRS), ranks.rank()
    copy = collectives.spread(chunk(me, 0, 0), memory=memory)
    copy.wait()

    def gone(chunks: list[torch.Tensor]) -> list[torch.Tensor]:
        if me == 1:
            os._exit(0)
        return copied(chunks)

    check_all_ranks(collectives.gather(copy, join=gone, memory=memory).wait(), 0, 0)
    try:
        for _ in range(2):  # the first has been read, and the next one comes behind where they meet
            collectives.gather(copy, join=copied, memory=memory).wait()
        collectives.spread(chunk(me, 0, 1), memory=memory).wait()
    except RuntimeError as error:
        assert me == 0 or me > 1, error
        os._exit(0)
    assert me > 1
    os._exit(0)


CASES: dict[str, Callable[[], None]] = {
    "sums": terms_are_added_where_they_lie_with_the_bits_of_those_that_are_sent,
    "again": copies_are_read_and_made_again,
    "elsewhere": a_part_that_lies_elsewhere_is_sent,
    "closed": memory_that_is_closed_under_what_is_under_way_is_left,
    "small": a_folder_that_is_too_small_is_told_and_left,
    "other": another_folder_of_this_name_is_told_and_left,
    "gone": a_rank_that_is_gone_while_others_read_ends_them,
}


def main() -> None:
    cache.activate()
    init_distributed(dist_backend="gloo")
    ranks.start_distributed()
    for case in sys.argv[1:]:
        CASES[case]()
        print(f"{case}: checked", flush=True)
    ranks.is_true_on_all_ranks(True)


if __name__ == "__main__":
    main()
