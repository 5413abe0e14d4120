"""Training on the late device has the CPU's bits, and the device finds nothing wrong: no race, no memory freed under a copy.

The device does what it is given only when somebody waits for it (`late_device`), so a wait that is missing shows.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path

import forks
import harness
import pytest
import torch
from late_worker import BUFFERED, CASES, NUM_LAYERS, Outcome, train
from places import SUPPORT

FAST = [name for name, case in CASES.items() if case.fast]
BUDGETED = [
    "bf16, clipped",
    "fp32, clipped",
    "fp32, half of each layer late",
    "bf16, all in host memory",
    "fp32, no layer ahead",
]
ALL = [pytest.param(name, marks=() if case.fast else pytest.mark.slow) for name, case in CASES.items()]


def train_late(folder: Path, names: Collection[str]) -> dict[str, Outcome]:
    """Each case, one after the other in one process whose accelerator the late device is."""
    command = [sys.executable, str(SUPPORT / "late_worker.py"), str(folder), "late", *names]
    done = forks.run(folder, command, os.environ | {"OMP_NUM_THREADS": "1"}, timeout=250, engine=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: torch.load(folder / f"{name}.pt", weights_only=False) for name in names}


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """The outcome of a case. Those of the fast suite are trained together, and so are the others."""
    found: dict[str, Outcome] = {}

    def get(name: str) -> Outcome:
        if name not in found:
            together = FAST if name in FAST else [other for other in CASES if other not in FAST]
            found.update(train_late(tmp_path_factory.mktemp("late"), together))
        return found[name]

    return get


@pytest.mark.parametrize("name", ALL)
def test_training_has_the_bits_of_the_cpu(tmp_path: Path, late: Callable[[str], Outcome], name: str) -> None:
    outcome = late(name)
    assert outcome.error is None, outcome.error
    assert outcome.violations == [] and outcome.run is not None and outcome.registered == 0
    harness.assert_identical(train(CASES[name], tmp_path), outcome.run)


@pytest.mark.parametrize("name", ["fp32, clipped", BUFFERED])
def test_the_host_waits_a_few_times_a_step_and_for_no_fetch_nor_micro_batch(late: Callable[[str], Outcome], name: str) -> None:
    waits = late(name).waits[-1]
    by_site = Counter[str]()
    for wait, count in waits.items():
        by_site[wait.site] += count
    assert by_site.pop("snapshot.py:changed", 0) == (2 if name == BUFFERED else 0)  # whether any buffer was written
    assert by_site.pop("zero_optimizer.py:group_norms") == 1
    assert by_site.pop("zero_optimizer.py:open_step") == 1
    known = {"streams.py:wait", "streams.py:mark", "grad_store.py:wait", "buffers.py:take", "param_shards.py:wait_copies"}
    assert set(by_site) <= known, by_site
    assert sum(by_site.values()) <= 2 * NUM_LAYERS + 2, by_site


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in BUDGETED])
def test_the_devices_budget_covers_what_training_takes(late: Callable[[str], Outcome], name: str) -> None:
    """A few tokens a micro-batch: activations, which it leaves out, take less than 1 MiB."""
    outcome = late(name)
    assert outcome.peak - (1 << 20) <= outcome.budget <= 1.5 * outcome.peak, (outcome.peak, outcome.budget)
