"""Two ranks, each with a late device of its own: the bits of two ranks on the CPU, and no wait for a device where ranks only
tell each other something."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import harness
import pytest
import torch
from late_worker import LISTENING as NAME
from late_worker import NUM_LAYERS, NUM_MICRO_BATCHES, ONE_LEVEL, Outcome
from places import SUPPORT
from processes import start_ranks

Outcomes = Mapping[str, list[Outcome]]
OF_A_STEP = 8  # waits of the host beside one for each layer's gradients: see `test_late_levels.py`
OF_SHARDS = 24  # of the parameters of three layers in the forward, of one again in the backward, and of what is outside


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """By kind of device, of each rank."""
    return train(tmp_path_factory.mktemp("late_ranks"), [NAME])[NAME]


def train(folder: Path, names: Sequence[str]) -> dict[str, Outcomes]:
    """By case."""
    found: dict[str, dict[str, list[Outcome]]] = {name: {} for name in names}
    for device in ("late", "cpu"):
        worker = [sys.executable, str(SUPPORT / "late_worker.py"), str(folder), device, *names]
        start_ranks(worker, folder, limit_s=250 + 100 * (len(names) - 1), forked=True)
        for name in names:
            paths = [folder / f"{name}.{device}{rank}.pt" for rank in range(2)]
            found[name][device] = [torch.load(path, weights_only=False) for path in paths]
    return dict(found)


def assert_right(outcomes: Outcomes) -> None:
    for late, cpu in zip(outcomes["late"], outcomes["cpu"], strict=True):
        assert late.error is None, late.error
        assert late.violations == [] and late.run is not None and cpu.run is not None
        harness.assert_identical(cpu.run, late.run)


def test_two_ranks_have_the_bits_of_the_cpu(outcomes: Outcomes) -> None:
    assert_right(outcomes)


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_two_ranks_have_the_bits_of_the_cpu_in_other_settings(tmp_path: Path) -> None:
    """Where a rank fails alone, too: it takes part in the others' gathers and reductions in their one order."""
    for name, found in train(tmp_path, list(ONE_LEVEL)).items():
        print(name)
        assert_right(found)


def test_the_devices_budget_covers_what_two_ranks_take(outcomes: Outcomes) -> None:
    """A few tokens a micro-batch: activations, which it leaves out, take less than 1 MiB."""
    for late in outcomes["late"]:
        assert late.peak - (1 << 20) <= late.budget <= 2 * late.peak, (late.peak, late.budget)


def test_a_layers_reduction_is_under_way_in_the_next_layers_backward(outcomes: Outcomes) -> None:
    """And the next layer's gather is not behind it: the two go to the same stream."""
    for late in outcomes["late"]:
        assert len(late.beside) == NUM_LAYERS * NUM_MICRO_BATCHES
        for layer, under_way in late.beside:
            assert under_way == ([] if layer == NUM_LAYERS - 1 else ["_reduce_scatter_base"]), late.beside


def test_a_failed_rank_knows_whether_the_others_gathers_lead(outcomes: Outcomes) -> None:
    assert [late.leads for late in outcomes["late"]] == [True, True]


def test_no_rank_waits_for_its_device_to_hear_of_another_ones_signal(outcomes: Outcomes) -> None:
    for late in outcomes["late"]:
        sites = Counter(wait.site for wait in late.waits[-1].elements())
        assert not [site for site in sites if site.startswith(("ranks.py", "signals.py"))], sites


def test_the_host_waits_for_no_collective(outcomes: Outcomes) -> None:
    """DeepSpeed's gather waits for the copy of each shard, once a gather. Beside that the host waits as with one rank."""
    for late in outcomes["late"]:
        sites = Counter(wait.site for wait in late.waits[-1].elements())
        assert sites.pop("partition_parameters.py:<listcomp>") == OF_SHARDS
        assert sum(sites.values()) <= NUM_LAYERS + OF_A_STEP, sites
