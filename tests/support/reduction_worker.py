"""One of several ranks: reductions that are under way at once, and the norms of all groups by one collective, against
DeepSpeed's own one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from ds_vertical.compat.accelerator import init_distributed
from ds_vertical.compat.zero_optimizer import group_norms, start_reduction
from ds_vertical.distributed import ranks

SIZES = ((10,), (7,), (1,), (64, 3, 5), (1, 1, 1), (1 << 16, 33))


def made(sizes: Sequence[int], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + ranks.rank())
    return [torch.randn(size, generator=generator) for size in sizes]


def check_norms() -> None:
    """Of groups of several parameters and of one, with norms that this rank does not have, and with what is not finite."""
    generator = torch.Generator().manual_seed(ranks.rank())
    optimizer: Any = object.__new__(DeepSpeedZeroOptimizer_Stage3)
    params = [SimpleNamespace(ds_id=number) for number in range(60)]
    scales = torch.logspace(-6, 6, len(params), dtype=torch.float64)
    norms = (torch.rand(len(params), generator=generator, dtype=torch.float64) + 0.5) * scales
    norms[40], norms[50] = float("inf"), float("nan")
    optimizer.norm_for_param_grads = {number: norm for number, norm in enumerate(norms) if number % 7 != ranks.rank()}
    optimizer.dp_process_group = dist.get_world_group()
    optimizer.model_parallel_group, optimizer.model_parallel_rank = None, 0
    groups: Any = [params[:1], params[1:4], *([each] for each in params[4:40]), params[40:42], params[42:50], params[50:]]
    expected = [optimizer.complete_grad_norm_calculation_for_cpu_offload(group) for group in groups]
    calls, real = [], dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: (calls.append(args), real(*args, **kwargs))
    found = group_norms(optimizer, groups)
    dist.all_reduce = real
    assert len(calls) == 1
    assert [float(norm).hex() for norm in found] == [float(norm).hex() for norm in expected]
    assert found[-1] == found[-3] == -1.0


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
    check_norms()


if __name__ == "__main__":
    main()
