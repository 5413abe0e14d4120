"""Collectives over levels beside late devices: four ranks, each with a device of its own, and two of them a node. They have the
bits of the same four ranks on the CPU, and the device finds no race."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import harness
import pytest
import torch
from late_worker import COPIES_IN_A_NODE, FLAT, LEVELS, NUM_LAYERS, ON_LEVELS, STANDS, Outcome
from places import SUPPORT
from processes import start_ranks

pytestmark = pytest.mark.timeout(1000)  # processes of one core each, which other work may share
Find = Callable[[str, str], list[Outcome]]
SLOW = [name for name in ON_LEVELS if name != LEVELS]
TOGETHER = 4  # slow cases
# Waits of the host beside one for each layer's gradients: the norm's, and those at the end of a forward and a step. 7 or 8: a
# copy has come by itself, or is waited for.
OF_A_STEP = 8


def train(folder: Path, device: str, names: Sequence[str], num_ranks: int) -> dict[str, list[Outcome]]:
    """What each rank has, by case."""
    worker = [sys.executable, str(SUPPORT / "late_worker.py"), str(folder), device, *names]
    start_ranks(worker, folder, limit_s=450, num_ranks=num_ranks, forked=True)
    return {name: [load(folder / f"{name}.{device}{rank}.pt") for rank in range(num_ranks)] for name in names}


def load(path: Path) -> Outcome:
    return torch.load(path, weights_only=False)


def assert_right(late: Sequence[Outcome], expected: Sequence[Outcome]) -> None:
    """Without an error, nor a race, and with these bits."""
    for found, other in zip(late, expected, strict=True):
        assert found.error is None, found.error
        assert found.violations == [] and found.run is not None and other.run is not None
        harness.assert_identical(other.run, found.run)
        assert found.registered == 0, "page-locked bytes that nobody has given back"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Find:
    """Of four ranks, by case and kind of device. Some slow cases train together."""
    folder = tmp_path_factory.mktemp("late_levels")
    trained: dict[tuple[str, str], list[Outcome]] = {}

    def find(name: str, device: str) -> list[Outcome]:
        if (name, device) not in trained:
            first = 0 if name == LEVELS else SLOW.index(name) // TOGETHER * TOGETHER
            together = [LEVELS] if name == LEVELS else SLOW[first : first + TOGETHER]
            trained.update({(case, device): each for case, each in train(folder, device, together, 4).items()})
        return trained[name, device]

    return find


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == LEVELS else pytest.mark.slow) for name in ON_LEVELS])
def test_four_ranks_have_the_bits_of_the_cpu(outcomes: Find, name: str) -> None:
    assert_right(outcomes(name, "late"), outcomes(name, "cpu"))


def test_one_thread_issues_all_hops_beside_a_device(outcomes: Find) -> None:
    """In the order of the schedule: that of threads of their own would be the ranks' own."""
    assert [late.lanes for late in outcomes(LEVELS, "late")] == [[]] * 4
    assert all(cpu.lanes for cpu in outcomes(LEVELS, "cpu"))


@pytest.mark.parametrize("name", [LEVELS, *(pytest.param(name, marks=pytest.mark.slow) for name in STANDS)])
def test_the_host_waits_for_no_hop(outcomes: Find, name: str) -> None:
    """Nor for a copy of a fetch, nor for one of a node's copy. Where copies stand, once for each unit that is made anew."""
    for late in outcomes(name, "late"):
        sites = Counter(wait.site for wait in late.waits[-1].elements())
        assert not [site for site in sites if site.startswith(("levels.py", "unit_levels.py", "device_parts.py"))], sites
        assert not [wait for wait in late.waits[-1] if wait.what in ("item", "copy of pageable memory")], sites
        del sites["late_accelerator.py:synchronize"]  # a probe of what forwards could keep, in some steps
        assert sum(sites.values()) <= NUM_LAYERS + OF_A_STEP + (NUM_LAYERS + 2) * (name in STANDS), sites


def test_the_devices_budget_covers_what_training_takes(outcomes: Find) -> None:
    """A few tokens a micro-batch: activations, which it leaves out, take less than 1 MiB."""
    for late in outcomes(LEVELS, "late"):
        assert late.peak - (1 << 20) <= late.budget <= 1.5 * late.peak, (late.peak, late.budget)


@pytest.mark.slow
def test_four_ranks_of_a_node_of_two_copies_go_over_pairs_and_their_node(outcomes: Find) -> None:
    """There are four late devices: nothing tests several such nodes on them."""
    assert [late.hops for late in outcomes(COPIES_IN_A_NODE, "late")] == [["pair", "node"]] * 4


@pytest.mark.slow
def test_two_ranks_have_the_bits_of_one_level_on_the_device(tmp_path: Path) -> None:
    """Two terms have one sum, in whatever order."""
    found = train(tmp_path, "late", [LEVELS, FLAT], 2)
    assert_right(found[LEVELS], found[FLAT])
