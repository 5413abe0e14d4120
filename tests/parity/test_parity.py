"""N1: bit-identical to plain, unmodified stock ZeRO-3."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from harness import MIN_SSD_BYTES, assert_identical, base_config, run_both
from models import tiny_neox, token_batches


@pytest.mark.parametrize(
    ("dtype", "clip"),
    [("bf16", 1.0), ("fp32", 1.0), *(pytest.param(dtype, 0.0, marks=pytest.mark.slow) for dtype in ("bf16", "fp32"))],
)
def test_neox_on_ssd_is_bit_identical_to_stock(tmp_path: Path, dtype: str, clip: float) -> None:
    build = partial(tiny_neox, num_layers=3, dropout=0.1)
    stock, vertical = run_both(base_config(tmp_path, dtype=dtype, clip=clip), build, token_batches(3, 3, rows=1, shortest=4))
    assert_identical(stock, vertical)
    assert vertical.ssd_bytes > 9 * MIN_SSD_BYTES
    assert min(stock.norms) > 1.0, "clipping must act on every step"
