"""Memory that the ranks of a host share: where parts lie in it, and, with real processes, what is gathered out of it.

Training with it is in test_levels_engine.py and test_acco.py."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path

import host_memory_worker
import pytest
import torch
from processes import start_ranks

from ds_vertical.distributed import host_memory
from ds_vertical.distributed.host_memory import PartPlace, SharedMemory


def of_one_rank(num_bytes: int) -> SharedMemory:
    return SharedMemory(torch.zeros(host_memory._HEAD + num_bytes, dtype=torch.uint8), 0, 1)


def test_what_is_given_up_makes_room_for_the_next_part_of_its_size() -> None:
    memory = of_one_rank(128 + 64 + 64)
    large, held, small = (memory.take((size,), torch.uint8) for size in (128, 64, 33))
    assert large is not None and held is not None and small is not None
    places = [each.data_ptr() for each in (large, held, small)]
    assert sorted(places) == places and memory.take((1,), torch.uint8) is None
    del large, small
    again = memory.take((8, 2), torch.float32)  # which leaves the large gap to a large part
    assert again is not None and again.data_ptr() == places[2] and again.shape == (8, 2)
    assert memory.take((129,), torch.uint8) is None
    whole = memory.take((128,), torch.uint8)
    assert whole is not None and whole.data_ptr() == places[0]
    del held, again
    both = memory.take((128,), torch.uint8)  # of two neighbours that were given up
    assert both is not None and both.data_ptr() == places[1]


def test_a_view_of_a_part_is_no_part_and_the_part_stays_while_it_is_there() -> None:
    memory = of_one_rank(128)
    part = memory.take((4,), torch.int64)
    assert part is not None and memory.has(part) and not memory.has(torch.zeros(4))
    assert memory.take((16,), torch.int64) is None
    del part
    assert memory.take((16,), torch.int64) is not None


def test_memory_that_is_closed_has_no_parts() -> None:
    memory = of_one_rank(128)
    part = memory.take((4,), torch.int64)
    assert part is not None
    memory.close()
    assert not memory.has(part) and memory.take((1,), torch.uint8) is None
    part.fill_(3)  # whose memory stays for as long


def test_memory_that_is_closed_has_no_room_between_its_parts() -> None:
    """An engine's last collectives may come behind its end, and their error would be the next engine's."""
    memory = of_one_rank(128 + 64)
    before, behind = memory.take((128,), torch.uint8), memory.take((64,), torch.uint8)
    assert before is not None and behind is not None
    del before
    memory.close()
    assert memory.take((4,), torch.float32) is None and memory.take((1,), torch.uint8) is None


def test_an_interrupt_while_a_part_is_taken_leaves_its_place_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = of_one_rank(64)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(weakref, "finalize", interrupted)
        with pytest.raises(KeyboardInterrupt):
            memory.take((64,), torch.uint8)
    assert memory.take((64,), torch.uint8) is not None


def test_where_there_is_no_room_a_part_lies_elsewhere_behind_what_may_be_read() -> None:
    """It first waits until the others have read what may give way."""
    memory, waited = of_one_rank(64), []
    held = [memory.take((64,), torch.uint8)]

    def read() -> None:
        waited.append(len(held))
        held.clear()

    place, part = PartPlace(memory, read), torch.ones(8, dtype=torch.int64)
    settled = place.settled(part)
    assert waited == [1] and memory.has(settled) and torch.equal(settled, part)
    assert place.settled(settled) is settled and waited == [1]
    other = place.settled(part)
    assert waited == [1, 0] and not memory.has(other) and torch.equal(other, part)
    assert PartPlace(None).settled(part) is part


def run(folder: Path, case: str) -> str:
    """What rank 0 says."""
    command = [sys.executable, str(Path(host_memory_worker.__file__)), case]
    start_ranks(command, folder, limit_s=200, num_ranks=4, forked=True)
    return (folder / "rank0.log").read_text()


@pytest.mark.parametrize("case", ["again", "sums", "elsewhere", "closed", "gone"])
def test_four_ranks(tmp_path: Path, case: str) -> None:
    assert "send each other copies" not in run(tmp_path, case)


@pytest.mark.parametrize(
    ("case", "told"),
    [("small", "rank 0: OSError: [Errno 28] No space left on device"), ("other", "rank 3: /dev/shm/ds_vertical.")],
    ids=["small", "other"],
)
def test_where_one_rank_has_no_part_in_it_all_do_without_and_a_line_says_why(tmp_path: Path, case: str, told: str) -> None:
    log = run(tmp_path, case)
    (line,) = [line for line in log.splitlines() if "send each other copies that they could share in memory" in line]
    assert told in line
