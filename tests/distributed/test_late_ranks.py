"""Two ranks, each with a late device of its own: the bits of two ranks on the CPU, and no wait for a device where ranks only
tell each other something."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping

import harness
import pytest
import torch
from late_worker import LISTENING as NAME
from late_worker import NUM_LAYERS, NUM_MICRO_BATCHES, Outcome
from places import SUPPORT
from processes import start_ranks

Outcomes = Mapping[str, list[Outcome]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """By kind of device, of each rank."""
    folder = tmp_path_factory.mktemp("late_ranks")
    found: dict[str, list[Outcome]] = {}
    for device in ("late", "cpu"):
        worker = [sys.executable, str(SUPPORT / "late_worker.py"), str(folder), device, NAME]
        start_ranks(worker, folder, limit_s=250, forked=True)
        found[device] = [torch.load(folder / f"{NAME}.{device}{rank}.pt", weights_only=False) for rank in range(2)]
    return found


def test_two_ranks_have_the_bits_of_the_cpu(outcomes: Outcomes) -> None:
    for late, cpu in zip(outcomes["late"], outcomes["cpu"], strict=True):
        assert late.error is None, late.error
        assert late.violations == [] and late.run is not None and cpu.run is not None
        harness.assert_identical(cpu.run, late.run)


def test_a_layers_reduction_is_under_way_in_the_next_layers_backward(outcomes: Outcomes) -> None:
    """And the next layer's gather is not behind it: the two go to the same stream."""
    for late in outcomes["late"]:
        assert len(late.beside) == NUM_LAYERS * NUM_MICRO_BATCHES
        firsts = [under_way[-1:] for under_way in late.beside[::NUM_MICRO_BATCHES]]
        assert firsts == [[], *[["_reduce_scatter_base"]] * (NUM_LAYERS - 1)], late.beside


def test_no_rank_waits_for_its_device_to_hear_of_another_ones_signal(outcomes: Outcomes) -> None:
    for late in outcomes["late"]:
        sites = Counter(wait.site for wait in late.waits[-1].elements())
        assert not [site for site in sites if site.startswith(("ranks.py", "signals.py"))], sites
