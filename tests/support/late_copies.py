"""What of this package copies beside a device, on the late one: see `late_cases`, which runs these."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import late_device
import torch
from chunks import a_chunk, no_queue

from ds_vertical.compat import pinned_memory
from ds_vertical.compat.ops import load
from ds_vertical.distributed.device_parts import DeviceParts
from ds_vertical.distributed.levels import cut_into_chunks
from ds_vertical.io.files import preallocate
from ds_vertical.io.streams import CopyStream, EventWindow, IssuedCopies, OutgoingStream, record_event, recorder
from ds_vertical.model.state.snapshot import SMALL_NUMEL, Snapshot
from ds_vertical.model.state.survey import OUTSIDE, StateSlot, entry_of
from ds_vertical.offload.grad_store import GradientFile, HeldGradients, ReducedSums
from ds_vertical.offload.param_shards import Landing, Resident
from ds_vertical.offload.tensor_swapper import HostMemory, TensorSwapper
from ds_vertical.types import Tier

CASES: dict[str, Callable[[], None]] = {}
DEVICE = torch.device("privateuseone", 0)  # "late" once it is in use


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


@contextmanager
def caught(pattern: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        assert re.search(pattern, str(error)), error
        late_device.library().take_violations()
        return
    raise AssertionError(f"nothing has raised {pattern!r}")


def page_locked(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).pin_memory()


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


@case
def fetched_values_are_there_for_what_is_computed_next() -> None:
    source = page_locked(1, 2)
    copies: list[torch.Tensor] = []

    def copy() -> list[torch.Tensor]:
        copies.append(source.to(DEVICE, non_blocking=True))
        return copies

    with late_device.waits() as waits:
        issued = CopyStream(DEVICE).run(copy)
        issued.land()
        total = copies[0] + 1
        copies.clear()  # given up by code that knows of no other stream
        assert not waits
        issued.wait()
        source.fill_(7)
    assert total.tolist() == [2, 3]


@case
def a_source_is_left_alone_until_its_copies_are_complete() -> None:
    source = page_locked(1, 2)
    lane, copies = CopyStream(DEVICE), []

    def copy() -> list[torch.Tensor]:
        copies.append(source.to(DEVICE, non_blocking=True))
        return copies

    issued = lane.run(copy)
    issued.wait()
    source.fill_(7)
    issued.land()
    assert copies[0].tolist() == [1, 2]


@case
def what_is_computed_ahead_of_a_fetched_layer_does_not_wait_for_its_copies() -> None:
    source = page_locked(1, 2)
    copies: list[torch.Tensor] = []

    def copy() -> list[torch.Tensor]:
        copies.append(source.to(DEVICE, non_blocking=True))
        return copies

    issued = CopyStream(DEVICE).run(copy)
    torch.ones(1, device=DEVICE) + 1  # of the layer before
    assert issued.copied is not None and not issued.copied.query()
    issued.land()
    assert not issued.copied.query()
    assert (copies[0] + 1).tolist() == [2, 3] and issued.copied.query()


@case
def gradients_leave_beside_the_computation() -> None:
    chunk = a_chunk(0.5)
    held = HeldGradients([chunk], GradientFile(Path(), [], no_queue), False, page_locked=True)
    size = sum(chunk.sizes)
    for turn in range(3):  # at first the host's memory is made, and then used again
        with late_device.waits() as waits:
            flat = torch.arange(float(size), device=DEVICE) + turn
            shares = (flat.narrow(0, start, length).clone() for start, length in places(chunk.sizes))
            held.hold(3, [0], ReducedSums(shares, None, lambda _: None), early=True, final=True)
            del flat
            behind = record_event(current())
            torch.ones(1, device=DEVICE) + 1
            assert behind.query()  # the computation goes on
        assert not waits  # and so does the host
        held_parts = held._units[3].parts.values()
        assert all(part.copied is not None and not part.copied.query() for part in held_parts)
        assert all(torch.isnan(part.data).all() for part in held_parts)
        found = torch.cat([held.data(part) for part in chunk.parts("all")])
        assert torch.equal(found, torch.arange(float(size)) + turn)


def places(sizes: list[int]) -> Iterator[tuple[int, int]]:
    start = 0
    for size in sizes:
        yield start, size
        start += size


@case
def gradients_on_their_way_to_an_ssd_are_not_waited_for() -> None:
    from deepspeed.runtime.swap_tensor.aio_config import get_aio_config

    chunk = a_chunk(0.0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "gradients.swp")
        file = GradientFile(path, chunk.parts("all"), partial(load.new_disk_queue, get_aio_config({})))
        preallocate(file.sizes)
        held = HeldGradients([chunk], file, False, page_locked=True)
        flat = torch.arange(float(sum(chunk.sizes)), device=DEVICE)
        with late_device.waits() as waits:
            shares = list(flat.split(list(chunk.sizes)))
            held.hold(3, [0], ReducedSums(shares, None, lambda _: None), early=False, final=False)
            ticket = held.write(3)
        assert ticket is not None and ticket.num_bytes == sum(file.sizes.values()) and not waits
        ticket.wait()
        written = torch.from_file(str(path), size=ticket.num_bytes // 4)
        found = [
            written.narrow(0, extent.offset // 4, part.numel) for part in chunk.parts("all") for extent in file.extents(part)
        ]
        assert torch.equal(torch.cat(found), flat.cpu())
        held.close()


@case
def memory_of_gradients_that_nobody_has_read_is_not_written_under_their_copy() -> None:
    chunk = a_chunk(0.0)
    held = HeldGradients([chunk], GradientFile(Path(), [], no_queue), False, page_locked=True)

    def hold(value: float, missing: int) -> None:
        shares = (torch.full((size - missing,), value, device=DEVICE) for size in chunk.sizes)
        held.hold(3, [0], ReducedSums(shares, None, lambda _: None), early=False, final=False)

    hold(7, 0)
    held.drop(3)
    hold(5, 1)  # in the same memory, whose padding the host writes
    found = torch.cat([held.data(part) for part in chunk.parts("all")])
    assert torch.equal(found, torch.cat([torch.tensor([5.0] * (size - 1) + [0.0]) for size in chunk.sizes]))


@case
def memory_of_a_hold_that_was_cut_off_is_not_written_under_its_copies() -> None:
    chunk = a_chunk(0.0)
    held = HeldGradients([chunk], GradientFile(Path(), [], no_queue), False, page_locked=True)

    def cut_off() -> Iterator[torch.Tensor]:
        yield torch.full((chunk.sizes[0],), 7.0, device=DEVICE)
        raise KeyboardInterrupt

    for _ in range(2):  # in the same memory
        try:
            held.hold(3, [0], ReducedSums(cut_off(), None, lambda _: None), early=False, final=False)
        except KeyboardInterrupt:
            held.abandon([])
        spare = held._reserve._spare
        for memory in spare:
            memory.fill_(5)  # its next user
        torch.accelerator.synchronize()
        assert spare and all(memory.eq(5).all() for memory in spare)


@case
def what_leaves_is_what_has_been_computed() -> None:
    outgoing, target = OutgoingStream(), page_locked(0, 0)
    assert outgoing.mark() is None
    values = torch.ones(2, device=DEVICE)
    values += 1
    outgoing.copy(target, values)
    del values
    copied = outgoing.mark()
    assert copied is not None and not copied.query()
    copied.synchronize()
    assert target.tolist() == [2, 2]


@case
def the_next_user_of_what_leaves_waits_for_the_copy() -> None:
    """What it does not do by itself: memory that is written again, and not given up."""
    outgoing, target = OutgoingStream(), page_locked(0, 0)
    values = torch.ones(2, device=DEVICE)
    outgoing.copy(target, values)
    copied = outgoing.mark()
    assert copied is not None
    with caught("aten::fill_ writes on the default stream what a copy reads"):
        values.fill_(5)
    copied.wait(current())
    values.fill_(5)
    copied.synchronize()
    assert target.tolist() == [1, 1]


@case
def swapped_tensors_come_back_without_a_wait_of_the_host() -> None:
    memory = HostMemory(lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True), lambda _: None)
    swapper = TensorSwapper(None, no_queue, memory, DEVICE, 2)
    for turn in range(3):
        values = torch.full((5000,), turn + 1, dtype=torch.uint8, device=DEVICE)
        with late_device.waits() as waits:
            swapped = swapper.put([values], Tier.HOST)
            del values
            back: list[torch.Tensor] = []

            def land(back: list[torch.Tensor] = back) -> list[torch.Tensor]:
                back.append(torch.empty(5000, dtype=torch.uint8, device=DEVICE))
                return back

            swapper.fetch(swapped, land)
            swapper.arrive(swapped)
            total = back[0].sum(dtype=torch.int64)
            swapper.drop(swapped)
        assert not waits, waits
        assert total.item() == 5000 * (turn + 1)
    swapper.close()


@case
def a_part_of_a_copy_waits_in_host_memory_and_the_host_for_nothing() -> None:
    library = late_device.library()
    registered, _ = library.page_locked_bytes()
    parts = DeviceParts(DEVICE)
    for turn in range(3):  # from the second one on in the same memory, which a part may still be leaving
        with late_device.waits() as waits:
            part = torch.full((2, 5000), turn + 1.0, device=DEVICE)
            parts.make_room([part.nbytes])
            resting = parts.put(part)
            del part
            torch.ones(1, device=DEVICE) + 1
            assert not resting.copied.query(), "what is computed next does not wait for the copy out"
            back = parts.back(resting)
            parts.give_up(resting)
            total = back.sum()
        assert not waits, waits
        assert total.item() == 10000 * (turn + 1)
    assert 40000 <= library.page_locked_bytes()[0] - registered < 40000 + 4096
    del resting
    with late_device.noting() as found:
        parts.close()
    assert not found, found
    assert library.page_locked_bytes()[0] == registered


@case
def a_part_of_a_copy_that_is_gathered_ahead_of_its_copy_back_is_a_race() -> None:
    """What a gather would do, were a wait left out."""
    lane, parts = CopyStream(DEVICE), DeviceParts(DEVICE)
    resting = parts.put(torch.ones(2, 5000, device=DEVICE))
    parts.carry = lambda issue: IssuedCopies(lane.run(issue).copied)  # which never land
    with caught("a race: aten::add reads on the default stream what a copy writes on stream"):
        parts.back(resting) + 1
    with caught("a race: aten::add reads on the default stream what a copy writes on stream"):
        parts.joined([page_locked(1, 2)]) + 1
    torch.accelerator.synchronize()
    parts.give_up(resting)
    parts.close()


@case
def shards_of_both_memories_are_joined_without_a_wait() -> None:
    parts, source = DeviceParts(DEVICE), page_locked(1, 2)
    there = torch.ones(3, device=DEVICE)
    there += 6
    with late_device.waits() as waits:
        joined = parts.joined([source, there, page_locked(5)])
        total = joined + 1
    assert not waits and total.tolist() == [2, 3, 8, 8, 8, 6]


@case
def sums_are_divided_by_257_ranks_as_on_the_processor() -> None:
    """16 bits have no 257: bf16's neighbours are 256 and 258."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        sums = (torch.randn(4000, generator=torch.Generator().manual_seed(1)) * 100).to(dtype)
        found = cut_into_chunks([sums.to(DEVICE)], range(257), 257).cpu()
        assert torch.equal(found, cut_into_chunks([sums], range(257), 257))
        assert not torch.equal(found, cut_into_chunks([sums], range(257), 256))


@case
def a_copy_that_follows_waits_for_what_was_computed_before() -> None:
    lane = CopyStream(DEVICE)
    with caught("a race: "):
        made = torch.ones(3, device=DEVICE) + 1
        lane.run(lambda: [made + 1])
    torch.accelerator.synchronize()
    with late_device.waits() as waits:
        again = torch.ones(3, device=DEVICE) + 1
        lane.follow()
        found: list[torch.Tensor] = []

        def issue() -> list[torch.Tensor]:
            found.append(again + 1)
            return found

        lane.run(issue).land()
        total = found[0].sum()
    assert not waits and total.item() == 9


@case
def host_memory_is_not_given_back_under_the_copy_of_what_was_dropped() -> None:
    memory = HostMemory(pinned_memory.lock_host_bytes, pinned_memory.unlock_host_bytes)
    swapper = TensorSwapper(None, no_queue, memory, DEVICE, 2)
    swapper.drop(swapper.put([torch.ones(5000, dtype=torch.uint8, device=DEVICE)], Tier.HOST))
    with late_device.noting() as found:
        swapper.host_tier.unlock_free()
    assert not found, found
    swapper.close()


@case
def page_locked_memory_is_as_large_as_is_asked_for_and_goes_back() -> None:
    library, size, pages = late_device.library(), (3 << 20) + 5, (3 << 20) + 4096
    registered, from_torch = library.page_locked_bytes()
    for unlocks in (True, False):
        data = pinned_memory.lock_host_bytes(size)
        assert library.page_locked_bytes() == (registered + pages, from_torch)
        assert data.shape == (size,) and data.is_pinned() and data.data_ptr() % 4096 == 0
        with late_device.waits() as waits:
            copy = data.fill_(7).to(DEVICE, non_blocking=True)
        assert not waits and copy.max().item() == copy.min().item() == 7
        if unlocks:
            pinned_memory.unlock_host_bytes(data)
            assert not data.is_pinned()
        del data  # with whatever nobody has unlocked
        assert library.page_locked_bytes() == (registered, from_torch)
    del copy


@case
def gradients_wait_in_page_locked_memory_of_their_size() -> None:
    library, chunk = late_device.library(), a_chunk(0.0)
    registered, from_torch = library.page_locked_bytes()
    held = HeldGradients([chunk], GradientFile(Path(), [], no_queue), False, page_locked=True)
    shares = (torch.ones(size, device=DEVICE) for size in chunk.sizes)
    held.hold(3, [0], ReducedSums(shares, None, lambda _: None), early=False, final=False)
    taken = library.page_locked_bytes()[0] - registered
    assert held.num_bytes <= taken < held.num_bytes + 4096
    held_parts = held._units[3].parts.values()
    assert len({part.data.untyped_storage().data_ptr() for part in held_parts}) == 1 < len(held_parts)  # locked at a time
    del held_parts
    held.close()  # ahead of their last copy
    with late_device.noting() as found:
        del held
    assert not found, found
    assert library.page_locked_bytes() == (registered, from_torch)


@case
def a_pass_ends_when_the_last_shard_is_copied() -> None:
    landing = Landing(DEVICE, None, 1)
    assert landing.is_copy
    with late_device.waits() as waits:
        landing.bring([])
        landing.release({0: Resident(None, [], [])})
        assert not waits
        landing.release({})
    assert [wait.what for wait in waits.elements()] == ["event"]


@case
def the_host_is_so_many_layers_ahead_and_no_more() -> None:
    window = EventWindow(recorder(DEVICE), 2)
    assert window.has_room(3) and window.has_room(9)  # nothing is ahead
    for _ in range(2):
        window.mark()
    assert window.has_room(1) and not window.has_room(2)
    with late_device.waits() as waits:
        window.wait()
        assert not waits
        window.wait(2)  # the device's memory has one layer more: one less may be ahead
    assert sum(waits.values()) == 1
    assert window.has_room(2) and not window.has_room(3)
    torch.ones(1, device=DEVICE) + 1  # the device comes to it by itself
    assert window.has_room(3)


@case
def a_device_tells_once_what_has_changed_though_it_was_put_back() -> None:
    state = {name: torch.zeros(numel, device=DEVICE) for name, numel in (("small", 3), ("large", SMALL_NUMEL + 1), ("same", 5))}
    owner: dict[str, object] = dict(state)
    taken = Snapshot([StateSlot(name, OUTSIDE, entry_of(owner, name)) for name in owner], [], closely=False)

    def told() -> list[str]:
        return [change.item.path for change in taken.changes(whole=True)]

    with late_device.waits() as waits:
        for value in (1, 0):
            state["small"].data.fill_(value)
            assert not list(taken.changes(waits=False))
        assert not waits
        assert told() == ["small"]
    assert sum(waits.values()) == 1, waits
    assert told() == []
    state["large"].data.fill_(1)  # of which there is no copy
    assert told() == ["large"]
