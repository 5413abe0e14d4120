"""Reductions in flight, with real processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import reduction_worker
import torch
from processes import start_ranks

from ds_vertical.compat.zero_optimizer import start_reduction


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_reductions_and_norms_that_are_under_way_at_once_have_deepspeeds_bits(tmp_path: Path, num_ranks: int) -> None:
    start_ranks([sys.executable, str(Path(reduction_worker.__file__))], tmp_path, limit_s=200, num_ranks=num_ranks, forked=True)


def test_with_one_rank_the_sums_are_the_shares() -> None:
    sums = [torch.arange(3.0), torch.arange(2.0)]
    shares = start_reduction(sums, None)()
    assert all(share is total for share, total in zip(shares, sums, strict=True))
