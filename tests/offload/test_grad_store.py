"""Which gradients wait where, and the memory that they are given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chunks import a_chunk, no_queue
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_vertical.errors import GradientGoneError
from ds_vertical.io import streams
from ds_vertical.io.buffers import Reserve
from ds_vertical.offload import grad_store
from ds_vertical.offload.chunking import ALIGNMENT, Part, spread_parts
from ds_vertical.offload.grad_store import GradientFile, HeldGradients, ReducedSums, aligned, beyond_host
from ds_vertical.offload.state_files import Chunk


class Sums:
    """A unit's sums, and what came back of their memory."""

    def __init__(self, sizes: list[int]) -> None:
        self.flat = torch.arange(float(sum(sizes)) + 7)  # somewhat larger than asked for
        self.shares = list(self.flat.narrow(0, 0, sum(sizes)).split(sizes))
        self.given_back: list[torch.Tensor] = []


def holding(early_share: float, *, keep: bool = False, **options: bool) -> tuple[HeldGradients, Chunk, Sums, bool]:
    chunk = a_chunk(early_share)
    held = HeldGradients([chunk], GradientFile(Path(), [], no_queue), keep, page_locked=False)
    sums = Sums(list(chunk.sizes))
    kept = held.hold(3, [0], ReducedSums(sums.shares, sums.flat, sums.given_back.append), **options)
    return held, chunk, sums, kept


def values(held: HeldGradients, chunk: Chunk) -> torch.Tensor:
    return torch.cat([held.data(part) for part in chunk.parts("all")])


def test_the_last_early_step_gives_the_sums_back_and_what_waits_has_been_copied() -> None:
    held, chunk, sums, kept = holding(0.5, early=True, final=True)
    assert kept and chunk.early and chunk.delayed
    expected = sums.flat[: chunk.numel].clone()
    assert torch.equal(values(held, chunk), expected)
    for part in chunk.early:
        assert sums.given_back == []
        held.finish(part, "step")  # not the use that there is
        held.finish(part, "early step")
    assert [each.data_ptr() for each in sums.given_back] == [sums.flat.data_ptr()]
    sums.flat.zero_()
    assert torch.equal(torch.cat([held.data(part) for part in chunk.delayed]), expected[chunk.boundary :])
    with pytest.raises(GradientGoneError):
        held.data(chunk.early[0])
    with pytest.raises(GradientGoneError):
        held.share(0, 0)


def test_what_may_be_redone_is_held_in_place_until_the_step_is_concluded() -> None:
    for hit, due in ((True, (3,)), (False, (3,)), (False, ())):
        held, chunk, sums, kept = holding(0.5, early=True, final=False)
        assert kept and held.num_bytes == 0
        for part in chunk.early:
            held.finish(part, "early step")
        assert torch.equal(values(held, chunk), sums.flat[: chunk.numel])
        held.conclude(due, hit)
        assert len(sums.given_back) == (not due)
        left = chunk.delayed if hit else chunk.parts("all")
        for part in left if due else ():
            assert sums.given_back == []
            held.finish(part, "step")
        assert len(sums.given_back) == 1


def test_kept_gradients_stay_until_the_next_sums() -> None:
    held, chunk, sums, kept = holding(0.5, keep=True, early=True, final=True)
    for part in chunk.parts("all"):
        held.finish(part, "early step" if part in chunk.early else "step")
    held.conclude((), True)
    assert kept and sums.given_back == []
    found = [held.share(0, place) for place in range(len(chunk.sizes))]
    assert all(torch.equal(a, b) for a, b in zip(found, sums.shares, strict=True) if a is not None)
    held.drop(3)
    assert len(sums.given_back) == 1


@pytest.mark.parametrize("spoil", ["dtype", "short", "scattered"])
def test_sums_that_are_not_the_ranks_own_shares_are_copied(spoil: str) -> None:
    chunk = a_chunk(0.5)
    held = HeldGradients([chunk], GradientFile(Path(), [], no_queue), False, page_locked=False)
    for _ in range(2):  # into memory used before
        sums = Sums(list(chunk.sizes))
        change: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "dtype": lambda share: share.to(torch.float64),
            "short": lambda share: share[:-3],  # the rest is padding
            "scattered": torch.clone,
        }
        shares = [change[spoil](share) for share in sums.shares]
        assert not held.hold(3, [0], ReducedSums(shares, sums.flat, sums.given_back.append), early=True, final=True)
        expected = sums.flat[: chunk.numel].clone()
        ends = torch.tensor(chunk.sizes).cumsum(0)
        for end in ends if spoil == "short" else ():
            expected[end - 3 : end] = 0.0
        sums.flat.fill_(-1.0)
        assert torch.equal(values(held, chunk), expected)
        for part in chunk.parts("all"):
            held.finish(part, "early step")
            held.finish(part, "step")
        assert sums.given_back == []
    assert held.num_bytes <= 4 * (chunk.numel + ALIGNMENT * len(chunk.parts("all")))


def test_a_reserve_prefers_the_very_size_and_makes_no_more_than_were_taken() -> None:
    reserve = Reserve(torch.empty)
    large, small = reserve.take(16), reserve.take(10)
    for tensor in (large, small, large):  # given up twice
        reserve.put_back(tensor)
    assert reserve.take(10) is small and reserve.take(9) is large
    assert reserve.num_bytes == 4 * 26
    assert reserve.take(16) is not large and reserve.num_bytes == 4 * 42
    reserve.put_back(large)
    assert reserve.take(7) is not large, "more than twice the size"
    reserve.clear()
    assert reserve.num_bytes == 4 * (26 + 7)


def taken(reserve: Reserve, numels: list[int]) -> list[torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    reserve.take_all(numels, found.__setitem__)
    return [found[index] for index in range(len(numels))]


@pytest.mark.parametrize("spare", [False, True])
def test_an_interrupt_loses_none_of_a_units_memory(monkeypatch: pytest.MonkeyPatch, spare: bool) -> None:
    """While it is taken: part of it is held by then, the rest is not."""
    chunk = a_chunk(0.5)
    held = HeldGradients([chunk], GradientFile(Path(), [], no_queue), False, page_locked=False)

    def hold() -> None:
        shares = list(torch.arange(float(chunk.numel)).split(list(chunk.sizes)))
        held.hold(3, [0], ReducedSums(shares, None, lambda _: None), early=True, final=False)

    if spare:
        hold()
        held.drop(3)
    calls: list[int] = []

    def cut_off(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(*args)

    whole = grad_store._Held
    monkeypatch.setattr(grad_store, "_Held", cut_off)
    with pytest.raises(KeyboardInterrupt):
        hold()
    num_bytes = held.num_bytes
    monkeypatch.setattr(grad_store, "_Held", whole)
    held.abandon([])
    hold()
    assert held.num_bytes == num_bytes > 0  # nothing was made anew
    held.drop(3)
    held.close()
    assert held.num_bytes == 0


def test_what_a_reserve_lacks_is_made_in_one_piece() -> None:
    made: list[int] = []

    def make(numel: int) -> torch.Tensor:
        if numel > 99:
            raise MemoryError
        made.append(numel)
        return torch.arange(float(numel))

    reserve = Reserve(make)
    reserve.put_back(reserve.take(6))
    tensors = taken(reserve, [10, 5, 20])
    assert made == [6, 30] and [tensor.tolist() for tensor in tensors[::2]] == [[*range(10)], [*range(10, 30)]]
    assert tensors[1].numel() == 6 and reserve.num_bytes == 4 * 36
    for tensor in tensors:
        reserve.put_back(tensor)
    handed: list[torch.Tensor] = []
    with pytest.raises(MemoryError):
        reserve.take_all([20, 100], lambda _, tensor: handed.append(tensor))
    reserve.put_back(handed.pop())  # what was handed before is the holder's
    again = taken(reserve, [20, 10, 6])
    assert made == [6, 30] and {tensor.data_ptr() for tensor in again} == {tensor.data_ptr() for tensor in tensors}
    reserve.clear()
    assert reserve.num_bytes == 4 * 36


def test_memory_for_the_disk_starts_where_it_can_be_read() -> None:
    assert {aligned(numel).data_ptr() % (4 * ALIGNMENT) for numel in (1, 1000, 5000)} == {0}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 4), st.lists(st.integers(1, 100), min_size=1, max_size=30), st.floats(0, 1))
def test_the_hosts_share_is_kept_as_far_as_whole_parts_allow(num_first: int, sizes: list[int], share: float) -> None:
    parts = [Part(index, 0, size) for index, size in enumerate(sizes)]
    kept = spread_parts(parts[:num_first], parts[num_first:], share)
    total = sum(part.numel for part in kept)
    largest_first = max((part.numel for part in parts[:num_first] if part not in kept), default=0)
    assert abs(total - share * sum(sizes)) <= max(sizes) / 2 + largest_first + 1e-6
    if share in (0.0, 1.0):
        assert len(kept) == (len(parts) if share else 0)


def test_pre_waits_in_memory_first_and_the_layers_share_the_rest_evenly() -> None:
    waiting = {"pre": [Part(9, 0, 10)]} | {layer: [Part(layer, 0, 10)] for layer in range(8)}
    assert {part.chunk for part in beyond_host(waiting, 5 / 9)} in ({0, 2, 4, 6}, {1, 3, 5, 7})
    assert beyond_host(waiting, 1.0) == [] and len(beyond_host(waiting, 0.0)) == 9


class Ending(streams.DeviceEvent):
    """The event of a device, whose waits end with these errors, one after the other."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)

    def synchronize(self) -> None:
        raise self.errors.pop(0)


def test_a_wait_that_is_cut_off_keeps_the_memory_and_a_failed_device_gives_it_back() -> None:
    held, chunk, sums, _ = holding(0.0, early=False, final=False)
    event = Ending(KeyboardInterrupt(), *[RuntimeError("the device is gone")] * len(chunk.delayed))
    for part in held._units[3].parts.values():
        part.copied = event
    with pytest.raises(KeyboardInterrupt):
        held.finish(chunk.delayed[0], "step")
    assert sums.given_back == [] and len(held._units[3].parts) == len(chunk.delayed)
    held.abandon([])
    assert [each.data_ptr() for each in sums.given_back] == [sums.flat.data_ptr()] and event.errors == []
