"""Large tensors in host memory: torch asks the kernel for huge pages for them, unless the user says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

VARIABLE = "THP_MEM_ALLOC_ENABLE"
SCRIPT = """
import ds_vertical, sys, torch
tensor = torch.ones(int(sys.argv[1]), dtype=torch.uint8)
middle = tensor.data_ptr() + tensor.numel() // 2
with open("/proc/self/smaps") as maps:
    for line in maps:
        first, _, rest = line.partition("-")
        if rest and ":" not in first:
            inside = int(first, 16) <= middle < int(rest.split()[0], 16)
        elif inside and line.startswith("VmFlags"):
            print("hg" in line.split())
"""


def asked_for(num_bytes: int, value: str | None = None) -> bool:
    """Whether a process with the user's `value` asks for huge pages for a tensor of so many bytes."""
    environment = {name: text for name, text in os.environ.items() if name != VARIABLE}
    environment |= {} if value is None else {VARIABLE: value}
    command = [sys.executable, "-c", SCRIPT, str(num_bytes)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout == "True\n"


@pytest.mark.parametrize(
    ("num_bytes", "value", "asked"), [(64 << 20, None, True), (64 << 20, "0", False), (1 << 20, None, False)]
)
def test_torch_asks_for_huge_pages_for_large_tensors_unless_the_user_says_no(
    num_bytes: int, value: str | None, asked: bool
) -> None:
    assert asked_for(num_bytes, value) is asked
