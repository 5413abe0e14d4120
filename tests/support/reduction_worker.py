"""One rank of two: reductions that are under way at once, against DeepSpeed's own one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced

from ds_vertical.compat.accelerator import init_distributed
from ds_vertical.compat.zero_optimizer import start_reduction
from ds_vertical.distributed import ranks

SIZES = ((10,), (7,), (1,), (64, 3, 5), (1, 1, 1), (1 << 16, 33))


def made(sizes: Sequence[int], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + ranks.rank())
    return [torch.randn(size, generator=generator) for size in sizes]


def main() -> None:
    init_distributed(dist_backend="gloo", timeout=timedelta(hours=2))
    ranks.start_distributed()
    group = ranks.own_group("reductions")
    assert group is not None
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(hours=2), "as long as the group that there was"
    assert group is ranks.own_group("reductions") is not ranks.own_group("gathers")
    sums = [made(sizes, seed) for seed, sizes in enumerate(SIZES)]
    started = [start_reduction(each, group) for each in sums]
    for each in sums:
        for total in each:
            total.fill_(float("nan"))  # their memory is in use again
    for seed, (sizes, finish) in enumerate(zip(SIZES, started, strict=True)):
        expected = reduce_scatter_coalesced(made(sizes, seed))
        for _ in range(2):  # an interrupted wait is repeated
            found = finish()
            assert [share.shape for share in found] == [share.shape for share in expected]
            assert all(map(torch.equal, found, expected)), sizes


if __name__ == "__main__":
    main()
