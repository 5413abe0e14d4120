"""The optimizer's half of `compat`: private names of DeepSpeed's ZeRO-3 optimizer and of its state on SSD."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced
from deepspeed.runtime.utils import combine_grad_norm_groups, is_invalid_grad_norm

from ds_vertical.compat import ZeroParam, get_accelerator

# ---- the step of the ZeRO-3 optimizer, taken apart


def open_step(optimizer: Any) -> torch.Tensor | None:
    """Norm, overflow check and loss-scale update of stock's step. Returns the scaled norm, or None for a skipped step."""
    # Gradients may still be on their way to pinned host memory, where the overflow check reads them (stock waits likewise).
    if not get_accelerator().resolves_data_dependency():
        get_accelerator().current_stream().synchronize()
    optimizer._pre_step()
    optimizer._partition_all_parameters()
    optimizer._overflow_check_and_loss_scale_update(update_scale=False)
    norm = None
    if not optimizer.overflow:
        norm = combine_grad_norm_groups(optimizer._get_norm_groups())
        if is_invalid_grad_norm(norm):
            optimizer.overflow = True
    if optimizer._loss_scale_update_and_overflow_cleanup():
        return None
    assert norm is not None
    optimizer._global_grad_norm = norm / optimizer.loss_scale
    return norm


def step_sub_group(optimizer: Any, sub_group: int, norm: torch.Tensor, timer_names: set[str]) -> None:
    """Read, scale and clip, CPU Adam, write: stock's own sequence for one chunk."""
    optimizer._prepare_sub_group(sub_group, timer_names)
    optimizer.unscale_and_clip_grads(sub_group, norm)
    optimizer._optimizer_step(sub_group)
    optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)
    optimizer._release_sub_group(sub_group, timer_names)


def close_step(optimizer: Any, timer_names: set[str]) -> None:
    optimizer._post_step(timer_names)


def group_norm(optimizer: Any, params: Sequence[ZeroParam]) -> torch.Tensor:
    """The norm of one group of gradients as stock takes it: rounded to fp32 once per group."""
    return optimizer.complete_grad_norm_calculation_for_cpu_offload(params)


def reduce_and_hand_over(optimizer: Any, params: Sequence[ZeroParam], sums: Sequence[torch.Tensor]) -> None:
    """Average summed gradients over the ranks, once, and hand each rank's share to the optimizer.

    `sums`: flat gradients of full parameters in the accumulation dtype; overwritten.
    """
    optimizer.set_gradient_accumulation_boundary(True)
    optimizer.micro_step_id = 0
    shares = list(sums)
    group = optimizer._get_param_partition_group(params[0])
    if dist.get_world_size(group) > 1:
        shares = reduce_scatter_coalesced(list(sums), group)
    optimizer.partition_grads(list(params), shares)


def rounding_dtype(optimizer: Any, param: ZeroParam) -> torch.dtype:
    """The dtype in which stock communicates a micro-batch's gradient: it rounds there even with one rank."""
    return optimizer.get_param_comm_dtype(param)


# ---- files of the optimizer


def is_chunk_on_ssd(optimizer: Any, chunk: int) -> bool:
    """Whether the optimizer state of a chunk lives in files (state under 1 MiB never does)."""
    return optimizer._swappable_optimizer_subgroup(chunk)


def settle(optimizer: Any) -> None:
    """Complete gradient writes that a failed step left in flight: an aio handle dropped with some aborts the process."""
    swapper = getattr(optimizer, "optimizer_swapper", None)
    if swapper is not None:
        swapper._flush_gradient_swapper(swapper.gradient_swapper)


def optimizer_files(optimizer: Any) -> dict[Path, int]:
    """Every file that the optimizer of this rank will write, with its size in bytes: fp32 master, moments, gradients."""
    swapper = optimizer.optimizer_swapper
    folder, item = Path(swapper.swap_folder), swapper.swap_element_size
    files: dict[Path, int] = {}
    for index, numel in enumerate(optimizer.fp16_partitioned_groups_flat_numel):
        if not is_chunk_on_ssd(optimizer, index):
            continue
        ids = optimizer.fp16_partitioned_groups_flat_id[index]
        name = f"{ids[0]}_{ids[-1]}"
        for prefix in ("", "exp_avg-", "exp_avg_sq-"):
            files[folder / f"{prefix}{name}.tensor.swp"] = swapper._io_aligned_numel(numel) * item
        offset = 0
        for param in optimizer.fp16_groups[index]:
            share = param.partition_numel()
            for start, piece in gradient_pieces(swapper, offset, share):
                if swapper.is_swappable_tensor(numel=piece):
                    files[folder / f"{name}_gradient_{start}_{piece}.tensor.swp"] = piece * item
            offset += share
    return files


def gradient_pieces(swapper: Any, offset: int, numel: int) -> list[tuple[int, int]]:
    """(offset, numel) of the pieces of a gradient at `offset` in its chunk: head, aligned body, tail.

    [Note: aligned gradients] The step reads a gradient's file straight into the chunk's buffer at the gradient's
    offset. SSD reads need an aligned address there; at another one the read fails, and stock, which cuts off only the
    tail, goes on with what the buffer held. So the body starts and ends at the alignment; head and tail stay in memory.
    """
    if not swapper.is_swappable_tensor(numel=numel):
        return [(offset, numel)]
    alignment, end = swapper.numel_alignment, offset + numel
    bounds = (offset, -(-offset // alignment) * alignment, end // alignment * alignment, end)
    return [(start, stop - start) for start, stop in zip(bounds, bounds[1:], strict=False) if stop > start]


def align_gradients(optimizer: Any) -> None:
    """Cut gradients on their way to SSD as `gradient_pieces` says."""
    swapper = optimizer.optimizer_swapper

    def adjust(tensors: Sequence[torch.Tensor], offsets: Sequence[int]) -> tuple[list[torch.Tensor], list[int]]:
        cut = [
            (tensor.narrow(0, start - offset, numel), start)
            for tensor, offset in zip(tensors, offsets, strict=True)
            for start, numel in gradient_pieces(swapper, offset, tensor.numel())
        ]
        return [tensor for tensor, _ in cut], [start for _, start in cut]

    swapper._adjust_for_misaligned_lengths = adjust
