"""Copies to the device: beside its computation, complete before their use, their source left alone until then."""

from __future__ import annotations

import pytest
import torch

from ds_vertical.io.streams import CopyStream


def test_where_host_and_device_are_one_memory_a_copy_is_complete_at_once() -> None:
    made: list[torch.Tensor] = []

    def copy() -> list[torch.Tensor]:
        made.append(torch.ones(3))
        return made

    copies = CopyStream(torch.device("cpu")).run(copy)
    assert len(made) == 1
    copies.land()
    copies.wait()
    assert len(made) == 1


@pytest.mark.gpu
def test_copies_overlap_with_computation_and_come_before_their_use() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    source = torch.arange(1 << 22, dtype=torch.float32).pin_memory()
    lane = CopyStream(device)
    lane.run(lambda: [source.to(device, non_blocking=True)]).wait()  # allocations and first launches out of the way
    torch.cuda.synchronize()

    torch.cuda._sleep(2_000_000_000)  # the computation: about a second
    busy = torch.cuda.current_stream().record_event()
    copies: list[torch.Tensor] = []

    def copy() -> list[torch.Tensor]:
        copies.append(source.to(device, non_blocking=True))
        return copies

    lane.run(copy).wait()
    assert not busy.query()  # copied while the device computes
    total = copies[0].sum(dtype=torch.float64)
    source.zero_()  # allowed: wait_copies has returned
    copies.clear()  # freed on the host while the device has yet to read it
    lane.run(lambda: [torch.full((1 << 22,), -1.0, device=device)]).wait()  # must not land in the freed memory
    assert total.item() == float((1 << 22) * ((1 << 22) - 1) // 2)


@pytest.mark.gpu
def test_the_device_waits_for_a_copy_still_under_way() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    source = torch.ones(1 << 26).pin_memory()
    lane = CopyStream(device)
    copies: list[torch.Tensor] = []

    def copy() -> list[torch.Tensor]:
        torch.cuda._sleep(500_000_000)
        copies.append(source.to(device, non_blocking=True))
        return copies

    issued = lane.run(copy)
    issued.land()
    assert copies[0].sum(dtype=torch.float64).item() == source.numel()
    issued.wait()
