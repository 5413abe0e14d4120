"""What the late device does, and what it catches. Run by tests/io/test_late_device.py, in a process of their own, with those
of `late_copies`, which are of our code:

    python tests/support/late_cases.py FILE

Writes by case None, or how it failed. Each case plants what a test of the product is to find, and the same made right.
"""

from __future__ import annotations

import json
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import late_accelerator
import late_copies
import late_device
import torch
from late_copies import DEVICE, caught, current, page_locked
from places import ROOT
from torch import nn

from ds_vertical.cli.bench.block_timer import BlockBatch, BlockTimer

CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


@case
def a_copy_happens_when_a_kernel_behind_it_needs_it() -> None:
    source = page_locked(1, 2)
    copy = source.to(DEVICE, non_blocking=True)
    source.fill_(3)  # the host has waited for nothing: what arrives is what stands there by then
    assert copy.tolist() == [3, 3]
    copy = source.to(DEVICE, non_blocking=True)
    current().record_event().synchronize()
    source.fill_(4)
    assert copy.tolist() == [3, 3]


@case
def another_stream_has_to_wait_for_a_copy() -> None:
    lane = torch.Stream(DEVICE)
    copies = []
    with lane:
        copies.append(page_locked(1, 2).to(DEVICE, non_blocking=True))
        copied = lane.record_event()
    assert not copied.query()
    with caught("a race: aten::add reads on the default stream what a copy writes on stream"):
        copies[0] + 1
    with late_device.noting() as found:
        assert torch.isnan(copies[0] + 1).all()  # poison
        copies[0].record_stream(current())
    assert len(found) == 1
    with lane:
        copies.append(page_locked(1, 2).to(DEVICE, non_blocking=True))
        copied = lane.record_event()
    current().wait_event(copied)
    assert (copies[1] + 1).tolist() == [2, 3] and copied.query()
    copies[1].record_stream(current())


@case
def the_host_reads_poison_until_it_waits() -> None:
    target = page_locked(0, 0)
    target.copy_(torch.ones(2, device=DEVICE), non_blocking=True)
    copied = current().record_event()
    assert torch.isnan(target).all() and not copied.query()
    copied.synchronize()
    assert target.tolist() == [1, 1] and copied.query()


@case
def a_kernel_that_lags_is_waited_for() -> None:
    lane = torch.Stream(DEVICE)
    values = torch.zeros(4, device=DEVICE)
    values += 1
    with lane, caught("aten::mul reads on stream"):
        values[1:] * 2
    lane.wait_stream(current())
    with lane:
        values[:2].add_(1)
    with caught("aten::sum reads on the default stream what aten::add_ writes"):
        values.sum()
    values[2:].sum()  # another part of it
    current().wait_stream(lane)
    assert values.sum().item() == 6


@case
def two_copies_share_a_host_buffer_one_behind_the_other() -> None:
    lane = torch.Stream(DEVICE)
    buffer = page_locked(1, 2)
    with lane:
        buffer.to(DEVICE, non_blocking=True)
    with caught("a copy writes on the default stream what a copy reads"):
        buffer.copy_(torch.ones(2, device=DEVICE), non_blocking=True)
    current().wait_stream(lane)
    buffer.copy_(torch.ones(2, device=DEVICE), non_blocking=True)
    torch.accelerator.synchronize()
    assert buffer.tolist() == [1, 1]


@case
def memory_is_not_freed_under_another_stream() -> None:
    lane = torch.Stream(DEVICE)
    for kept in ("nothing", "recorded", "waited for"):
        values = torch.ones(8, device=DEVICE)
        lane.wait_stream(current())
        with lane:
            values * 2
        if kept == "recorded":
            values.record_stream(lane)
        if kept == "waited for":
            current().wait_stream(lane)
        with late_device.noting() as found:
            del values
        assert len(found) == (kept == "nothing"), (kept, found)
        assert all("is freed while aten::mul on stream" in text for text in found)


@case
def what_is_freed_wrongly_raises_at_the_next_kernel() -> None:
    lane = torch.Stream(DEVICE)
    values = torch.ones(8, device=DEVICE)
    lane.wait_stream(current())
    with lane:
        values * 2
    del values
    with caught("record_stream"):
        torch.zeros(1, device=DEVICE)


@case
def memory_is_made_on_a_stream_that_others_wait_for() -> None:
    """Whoever had it before may have work for it in that stream."""
    lane = torch.Stream(DEVICE)
    target = torch.empty(2, device=DEVICE)
    with lane, caught("a copy writes on stream .* what its allocation writes on the default stream"):
        target.copy_(page_locked(1, 2), non_blocking=True)
    lane.wait_stream(current())
    with lane:
        target.copy_(page_locked(1, 2), non_blocking=True)
    current().wait_stream(lane)
    assert target.tolist() == [1, 2]


@case
def fresh_memory_is_poison() -> None:
    assert torch.isnan(torch.empty(3, device=DEVICE)).all()
    values = torch.ones(6, device=DEVICE)
    values.untyped_storage().resize_(0)
    values.untyped_storage().resize_(24)
    assert torch.isnan(values).all()


@case
def each_wait_of_the_host_is_counted_where_it_is() -> None:
    values = torch.ones(2, device=DEVICE)
    with late_device.waits() as found:
        values.sum().item()
        values.cpu()
        torch.zeros(2).to(DEVICE, non_blocking=True)
        torch.zeros(2).pin_memory().to(DEVICE, non_blocking=True)  # waits for nothing
        torch.nonzero(values)
        current().synchronize()  # all is done by then
        values += 1
        current().synchronize()
        values += 1
        event = current().record_event()
        event.synchronize()
        event.synchronize()
        values += 1
        torch.accelerator.synchronize()
    kinds = {wait.what: count for wait, count in found.items()}
    assert kinds == dict.fromkeys(
        ("item", "copy", "copy of pageable memory", "aten::nonzero", "stream", "event", "device"), 1
    ), found
    assert {wait.site for wait in found} == {"late_cases.py:each_wait_of_the_host_is_counted_where_it_is"}


@case
def memory_is_counted_and_runs_out() -> None:
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    large = torch.empty(1 << 18, device=DEVICE)
    assert torch.accelerator.memory_allocated() - before == 1 << 20
    lane = torch.Stream(DEVICE)
    lane.wait_stream(current())
    with lane:
        large.fill_(1)
    large.record_stream(lane)
    del large
    assert torch.accelerator.memory_allocated() == before
    stats = torch.accelerator.memory_stats()
    assert stats["active_bytes.all.current"] - before == 1 << 20  # until somebody has waited for the lane
    late_device.library().set_capacity(0, before + (1 << 20) + (1 << 19))
    try:
        with caught("out of memory"):
            torch.empty(1 << 18, device=DEVICE)
        lane.synchronize()
        torch.empty(1 << 18, device=DEVICE)
    finally:
        late_device.library().set_capacity(0, 1 << 40)


@case
def kernels_have_the_processors_bits() -> None:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True, norm_first=True)
    there = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True, norm_first=True).to(DEVICE)
    there.load_state_dict(layer.state_dict())
    for dtype in (torch.float32, torch.bfloat16):
        layer, there = layer.to(dtype), there.to(dtype)
        inputs = torch.randn(2, 5, 16, dtype=dtype)
        torch.manual_seed(3)
        loss = layer(inputs).square().sum()
        late_device.generator().manual_seed(3)
        late_loss = there(inputs.to(DEVICE)).square().sum()
        loss.backward()
        late_loss.backward()
        assert loss.item() == late_loss.item()
        for param, late in zip(layer.parameters(), there.parameters(), strict=True):
            assert param.grad is not None and late.grad is not None and torch.equal(param.grad, late.grad.cpu())


@case
def a_backward_runs_on_a_thread_of_autograds() -> None:
    threads = []
    values = torch.ones(2, device=DEVICE, requires_grad=True)
    values.register_hook(lambda _: threads.append(threading.get_ident()))
    (values * 2).sum().backward()
    assert threads and threads != [threading.get_ident()]
    assert values.grad is not None and values.grad.tolist() == [2, 2]


@case
def registered_memory_is_kept_while_it_is_used() -> None:
    values = torch.arange(1024.0)
    library = late_device.library()
    for waits in (False, True):
        library.register_host(values.data_ptr(), 4096)
        assert values.is_pinned()
        copy = values.to(DEVICE, non_blocking=True)
        if waits:
            torch.accelerator.synchronize()
        with late_device.noting() as found:
            assert library.unregister_host(values.data_ptr())
        assert len(found) == (not waits), found
        assert not values.is_pinned()
        del copy
    torch.accelerator.synchronize()


@case
def a_second_device_has_streams_and_memory_of_its_own() -> None:
    other = torch.device("late", 1)
    values = torch.ones(2, device=other)
    assert values.device == other and torch.accelerator.memory_allocated(1) == 512
    assert (values + 1).device == other and (values + 1).tolist() == [2, 2]
    with torch.accelerator.device_index(1):
        assert torch.empty(1, device="late").device == other


@case
def a_layers_launch_is_timed_without_a_wait() -> None:
    timer = BlockTimer(ROOT / "configs" / "models" / "gpt_13m.json", BlockBatch(8, 1, "fp32"), "late:0")
    assert timer.once.entered is not None
    with late_device.waits() as waits:
        assert 0 < timer.launch_s(1) < 10
    assert not {wait.what for wait in waits} - {"device"}, waits  # ahead of the call: the device is to be idle


def main(file: str) -> int:
    late_accelerator.use()  # ours asks DeepSpeed's for page-locked memory
    found: dict[str, str | None] = {}
    for name, function in (CASES | late_copies.CASES).items():
        try:
            function()
            left = late_device.library().take_violations()
            found[name] = f"left behind: {left}" if left else None
        except Exception:
            found[name] = traceback.format_exc()
    Path(file).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
