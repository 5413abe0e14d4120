"""An unchanged stage-3 JSON runs: every tier of parameters and optimizer, exact against stock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import MIN_SSD_BYTES, assert_identical, base_config, run_both, small_buffers
from models import MixerModel, token_batches

NUM_LAYERS = 3
NUM_MATRICES = 2 * NUM_LAYERS

# tier -> (offload_param.device, max_in_cpu in elements, matrices that then rest on SSD: in stock, in the vertical arm)
PARAMS: dict[str, tuple[str, int, int, int]] = {
    "nvme": ("nvme", 0, NUM_MATRICES, NUM_MATRICES),
    "nvme_part_in_cpu": ("nvme", 1_000_000, NUM_MATRICES - 3, NUM_MATRICES - 3),
    "cpu": ("cpu", 0, 0, 0),
    "none": ("none", 0, 0, 0),
}


# Every pair of tiers once, with either number of micro-batches and either threshold; the other half is slow, and of these rows
# those of tests/conftest.py, which leaves one of each tier.
FAST = [((0, 3), (None, 1)), ((None, 3), (0, 1))]
CASES = [
    pytest.param(
        params,
        optimizer,
        persistence,
        num_micro_batches,
        id=f"{params}-{optimizer}-threshold{'_default' if persistence is None else persistence}-{num_micro_batches}",
        marks=[] if (persistence, num_micro_batches) == FAST[row % 2][column] else pytest.mark.slow,
    )
    for row, params in enumerate(PARAMS)
    for column, optimizer in enumerate(("nvme", "cpu"))
    for persistence in (0, None)
    for num_micro_batches in (1, 3)
]


@pytest.mark.parametrize(("params", "optimizer", "persistence", "num_micro_batches"), CASES)
def test_every_tier_is_bit_identical_to_stock(
    tmp_path: Path, params: str, optimizer: str, persistence: int | None, num_micro_batches: int
) -> None:
    device, max_in_cpu, stock_on_ssd, on_ssd = PARAMS[params]
    config: dict[str, Any] = base_config(
        tmp_path,
        num_micro_batches=num_micro_batches,
        dtype="fp32",
        clip=0.1,
        params=device,
        optimizer=optimizer,
        max_in_cpu=max_in_cpu,
        persistence=persistence,
    )
    if device == "nvme":
        small_buffers(config)
    stock, vertical = run_both(config, lambda: MixerModel(NUM_LAYERS), token_batches(2, num_micro_batches))
    assert_identical(stock, vertical)
    assert min(stock.norms) > 0.1, "clipping must act on every step"
    assert (stock.ssd_bytes, vertical.ssd_bytes) == (stock_on_ssd * MIN_SSD_BYTES, on_ssd * MIN_SSD_BYTES)
