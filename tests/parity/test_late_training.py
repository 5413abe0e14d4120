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
from late_models import NUM_LAYERS
from late_worker import BUFFERED, CASES, DEEPER, IN_MEMORY, NUM_MICRO_BATCHES, ON_SSD, REDONE, Outcome, train
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
    done = forks.run(folder, command, os.environ | {"OMP_NUM_THREADS": "1"}, timeout=280, engine=True)
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


def waits_by_site(outcome: Outcome) -> Counter[str]:
    """Of the last step."""
    return Counter(wait.site for wait in outcome.waits[-1].elements())


BY_LAYER = {"streams.py:wait", "streams.py:mark", "grad_store.py:wait", "grad_store.py:start_writes"}  # not by micro-batch


@pytest.mark.parametrize(
    ("name", "num_layers"), [("fp32, clipped", NUM_LAYERS), (BUFFERED, NUM_LAYERS), (DEEPER, 2 * NUM_LAYERS)]
)
def test_the_host_waits_a_few_times_a_step_and_for_no_fetch_nor_micro_batch(
    late: Callable[[str], Outcome], name: str, num_layers: int
) -> None:
    """Twice for each layer: to be no further ahead of the device than is counted, and for the gradients of the layer before."""
    by_site = waits_by_site(late(name))
    assert by_site.pop("snapshot.py:changed", 0) == (2 if name == BUFFERED else 0)  # whether any buffer was written
    assert by_site.pop("zero_optimizer.py:group_norms") == 1
    assert by_site.pop("zero_optimizer.py:open_step") == 1
    assert set(by_site) <= BY_LAYER, by_site
    assert sum(by_site.values()) <= 2 * num_layers + 2, by_site


@pytest.mark.parametrize(
    ("name", "moves"), [(REDONE, 2 * NUM_LAYERS * NUM_MICRO_BATCHES), (ON_SSD, NUM_LAYERS * NUM_MICRO_BATCHES)]
)
def test_what_leaves_the_device_for_its_backward_is_waited_for_once(
    late: Callable[[str], Outcome], name: str, moves: int
) -> None:
    """An input and a gradient of each layer and micro-batch, or what its forward keeps; nothing else by the micro-batch."""
    by_site = waits_by_site(late(name))
    assert 0 < by_site.pop("tensor_swapper.py:wait_written") <= moves
    assert by_site.pop("zero_optimizer.py:group_norms") == 1
    assert set(by_site) <= BY_LAYER, by_site
    assert sum(by_site.values()) <= 2 * NUM_LAYERS + 2, by_site


@pytest.mark.parametrize("name", [IN_MEMORY, "fp32, clipped"])
def test_parameters_are_on_their_way_before_their_use_and_the_host_waits_for_none(
    late: Callable[[str], Outcome], name: str
) -> None:
    """Of host memory all but the first unit's. What is on SSD has to be read first, and may come too late for that."""
    fetches = late(name).fetches
    assert len(fetches) == 2 * NUM_LAYERS - 1  # the last layer's stay for its backward
    ahead = [each for each in fetches if each.is_issued]
    assert len(ahead) == len(fetches) - 1 if name == IN_MEMORY else ahead
    assert all(each.is_under_way for each in ahead)  # the device waits for them, and not the host


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in BUDGETED])
def test_the_devices_budget_covers_what_training_takes(late: Callable[[str], Outcome], name: str) -> None:
    """A few tokens a micro-batch: activations, which it leaves out, take less than 1 MiB."""
    outcome = late(name)
    assert outcome.peak - (1 << 20) <= outcome.budget <= 1.5 * outcome.peak, (outcome.peak, outcome.budget)
