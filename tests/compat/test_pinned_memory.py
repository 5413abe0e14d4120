"""Page-locked host memory: aligned, locked, in huge pages where the kernel grants them, and given back."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
import torch
from processes import status

from ds_vertical.compat import pinned_memory
from ds_vertical.io import host

MIB = 1 << 20


def mapped(address: int) -> dict[str, int]:
    """KiB by name, and 1 for each flag, of the mapping that begins at an address."""
    found: dict[str, int] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = re.match(r"([0-9a-f]+)-[0-9a-f]+ ", line)
        if head:
            inside = int(head[1], 16) == address
        elif inside and line.endswith(" kB"):
            name, value, _ = line.split()
            found[name.removesuffix(":")] = int(value)
        elif inside and line.startswith("VmFlags:"):
            found |= {flag: 1 for flag in line.split()[1:]}
    return found


@pytest.mark.parametrize("num_bytes", [4096, 2 * MIB - 4096, 2 * MIB, 8 * MIB, 9 * MIB + 12345])
def test_memory_is_locked_and_given_back(num_bytes: int) -> None:
    before = status("VmLck")
    for _ in range(3):
        buffer = pinned_memory.lock_host_bytes(num_bytes)
        assert (buffer.dtype, buffer.shape) == (torch.uint8, (num_bytes,)) and buffer.data_ptr() % 4096 == 0
        assert abs(status("VmLck") - before - num_bytes / 1024) <= 8
        buffer.fill_(7)
        assert int(buffer[-1]) == 7
        pinned_memory.unlock_host_bytes(buffer)
        assert status("VmLck") == before


def test_a_large_buffer_is_in_huge_pages_and_its_memory_goes_with_it() -> None:
    buffer = pinned_memory.lock_host_bytes(65 * MIB)
    assert buffer.data_ptr() % host.HUGE_BYTES == 0
    pages = mapped(buffer.data_ptr())
    assert pages["Rss"] == pages["Locked"] == 65 * 1024
    assert "hg" in pages  # asked for: how many a kernel grants is its own affair, and none where it has run out
    address = buffer.data_ptr()
    pinned_memory.unlock_host_bytes(buffer)
    assert mapped(address)["Rss"] == mapped(address)["Locked"] == 0
    del buffer
    gc.collect()
    assert mapped(address) == {}


def test_the_limit_that_is_advised_counts_what_is_locked_already() -> None:
    before = host.limit_to_lock(MIB)
    buffer = pinned_memory.lock_host_bytes(8 * MIB)
    assert before == 1024 + status("VmLck") - 8 * 1024
    assert host.limit_to_lock(MIB) == before + 8 * 1024
    pinned_memory.unlock_host_bytes(buffer)
