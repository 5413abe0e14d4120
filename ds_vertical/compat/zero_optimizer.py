"""DeepSpeed's ZeRO-3 optimizer and its state on SSD: what of their private names this package calls."""

from __future__ import annotations

from ds_vertical.compat import version  # noqa: F401 - refuses another DeepSpeed before its private names are imported

# isort: split

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam  # noqa: F401 - used by others
from deepspeed.runtime.utils import combine_grad_norm_groups, is_invalid_grad_norm, mask_nan_or_inf_with_val_inplace
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch.distributed import ProcessGroup

from ds_vertical.compat.accelerator import device_name, get_accelerator
from ds_vertical.compat.gradient_norm import NormMemory
from ds_vertical.compat.zero_params import ZeroParam, is_persistent, second_generation

# ---- the step of the ZeRO-3 optimizer, taken apart


def open_step(optimizer: DeepSpeedZeroOptimizer_Stage3) -> torch.Tensor | None:
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


def tentative_norm(optimizer: DeepSpeedZeroOptimizer_Stage3) -> torch.Tensor | None:
    """The norm of the gradients noted so far, times the loss scale; None where it is not finite. Nothing of the optimizer
    changes: `open_step` decides. Collective."""
    norm = combine_grad_norm_groups(optimizer._get_norm_groups())
    return None if is_invalid_grad_norm(norm) else norm


def close_step(optimizer: DeepSpeedZeroOptimizer_Stage3) -> None:
    """The end of stock's `_post_step` that does not need the new parameters."""
    optimizer.reset_cpu_buffers()
    optimizer.invalidate_secondary_tensor()


def gather_persistent(optimizer: DeepSpeedZeroOptimizer_Stage3, chosen: Callable[[ZeroParam], bool] = lambda _: True) -> None:
    """Bring the parameters that stay on the device (those `chosen`) back there, with their new values. Those that lie on SSD
    do not stay, though DeepSpeed counts them: at once they would need more buffers than there are."""
    away = (param for param in optimizer.persistent_parameters if param.ds_status == ZeroParamStatus.NOT_AVAILABLE)
    params = [param for param in away if is_persistent(param) and chosen(param)]
    if params:
        params[0].all_gather(params)


def partition_all(optimizer: DeepSpeedZeroOptimizer_Stage3) -> None:
    """Leave of every parameter its shard only, of persistent ones too."""
    optimizer._partition_all_parameters()


def combined_scale(optimizer: DeepSpeedZeroOptimizer_Stage3, norm: torch.Tensor) -> torch.Tensor | float:
    """What stock divides the gradients by: loss scale times the excess of the norm over the clip (at least 1)."""
    if optimizer.clip_grad > 0.0:
        excess = ((norm / optimizer.loss_scale) + 1e-6) / optimizer.clip_grad
        return torch.clamp(excess, min=1.0) * optimizer.loss_scale
    return optimizer.loss_scale


def group_norms(optimizer: DeepSpeedZeroOptimizer_Stage3, groups: Sequence[Sequence[ZeroParam]]) -> list[torch.Tensor]:
    """The norms of groups of gradients as stock takes them, each rounded to fp32 once. One collective, whereas stock has one
    for each group.

    The order in which ranks are added depends on a number's place: gloo's ring cuts a tensor of W ranks into 2 W segments, and
    begins at another rank in each. Stock adds tensors of one number, which is all of the first segment. So all numbers lie in
    the first segment here, and have stock's bits with any number of ranks.
    """
    known = optimizer.norm_for_param_grads
    ids = [[optimizer.get_param_id(param) for param in params] for params in groups]
    norms = [[norm for each in members if (norm := known.get(each)) is not None] for members in ids]
    group, device = optimizer._get_param_partition_group(groups[0][0]), device_name()
    totals = torch.zeros(2 * dist.get_world_size(group), len(groups), dtype=torch.float32, device=device)
    if any(norms):
        # where they are, one after the other as stock adds them: the host waits for the roots alone
        squares = torch.stack([norm for members in norms for norm in members]) ** 2
        totals[0] = sum(torch.nn.utils.rnn.pad_sequence([*squares.split([*map(len, norms)])]).unbind())
    dist.all_reduce(totals, op=dist.ReduceOp.SUM, group=group)
    roots = torch.stack([total**0.5 for total in totals[0]]).cpu()  # one by one: torch's root of several may be another
    mask_nan_or_inf_with_val_inplace(roots, device=roots.device)
    return list(roots)


def start_reduction(sums: Sequence[torch.Tensor], group: ProcessGroup | None) -> Callable[[], list[torch.Tensor]]:
    """Start to average summed gradients over the ranks, once. Returns what waits for that: this rank's share of each, flat.

    `sums`: flat gradients of full parameters in the accumulation dtype. With several ranks they are copied, as DeepSpeed's
    `reduce_scatter_coalesced` does: of each rank's shares, one behind the other, the sums' quotients by the number of ranks.
    `group`: of all ranks, for reductions alone; None: there is one rank, whose shares the sums are.
    """
    if group is None:
        own = list(sums)
        return lambda: own
    rank, count = dist.get_rank(group), dist.get_world_size(group)
    sizes = [-(-total.numel() // count) for total in sums]
    buffer = _averaged_rows(sums, sizes, count)
    share = buffer.chunk(count)[rank]
    work = torch.distributed.reduce_scatter_tensor(share, buffer, group=group, async_op=True)
    lengths = [max(0, min(size, total.numel() - rank * size)) for total, size in zip(sums, sizes, strict=True)]

    def finish() -> list[torch.Tensor]:
        assert work is not None  # this rank is in the group
        work.wait()
        return [place[:length] for place, length in zip(share.split(sizes), lengths, strict=True)]

    return finish


def _averaged_rows(sums: Sequence[torch.Tensor], sizes: Sequence[int], count: int) -> torch.Tensor:
    """A row for each of `count` ranks, one behind the other: its shares of the sums' quotients by `count`, each in a place of
    its size. What a share leaves of that, where ranks do not share a sum evenly, is zero."""
    rows = sums[0].new_empty(count * sum(sizes))
    for number, row in enumerate(rows.chunk(count)):
        for total, size, place in zip(sums, sizes, row.split(sizes), strict=True):
            piece = total[number * size : (number + 1) * size]
            torch.div(piece, count, out=place[: piece.numel()])
            place[piece.numel() :].zero_()
    return rows


def note_gradient(optimizer: DeepSpeedZeroOptimizer_Stage3, param: ZeroParam, share: torch.Tensor, memory: NormMemory) -> None:
    """Tell stock of a gradient's norm, given this rank's share of it (flat). On a GPU the norm is stock's own, which copies up
    to 250 million elements at a time to fp64: the order of additions there is the kernel's, and differs with the size.

    A rank whose share lies wholly in the padding has nothing to add to the norm.
    """
    if param.partition_numel() * optimizer._get_param_partition_rank(param) < param.ds_numel:
        in_host = share.device.type == "cpu" and share.numel() > 0
        norm = memory.norm(share) if in_host else optimizer._constant_buffered_norm2(share)
        optimizer.norm_for_param_grads[optimizer.get_param_id(param)] = norm


def gather_shares(optimizer: DeepSpeedZeroOptimizer_Stage3, param: ZeroParam, share: torch.Tensor) -> torch.Tensor:
    """The full fp32 tensor, in the parameter's shape, of which every rank has a share (flat)."""
    return optimizer._fp32_state_allgather(param, share)


def rounding_dtype(optimizer: DeepSpeedZeroOptimizer_Stage3, param: ZeroParam) -> torch.dtype:
    """The dtype in which stock communicates a micro-batch's gradient: it rounds there even with one rank."""
    return optimizer.get_param_comm_dtype(param)


# ---- files of the optimizer


def is_chunk_on_ssd(optimizer: DeepSpeedZeroOptimizer_Stage3, chunk: int) -> bool:
    """Whether the optimizer state of a chunk lives in files (state under 1 MiB never does, nor a share kept in host memory)."""
    return optimizer._swappable_optimizer_subgroup(chunk)


def optimizer_files(optimizer: DeepSpeedZeroOptimizer_Stage3, generations: int) -> dict[Path, int]:
    """Every file that the optimizer of this rank will write, with its size in bytes: fp32 master and moments, in as many
    `generations` (1 or 2). Empty where no state is on SSD."""
    swapper: Any = optimizer.optimizer_swapper  # None where no state is on SSD
    return {
        path: file_numel(optimizer, index) * swapper.swap_element_size
        for index in range(len(optimizer.fp16_groups))
        if is_chunk_on_ssd(optimizer, index)
        for files in state_files(optimizer, index)[:generations]
        for path in files
    }


def state_files(
    optimizer: DeepSpeedZeroOptimizer_Stage3, chunk: int
) -> tuple[tuple[Path, Path, Path], tuple[Path, Path, Path]]:
    """Master, exp_avg and exp_avg_sq of a chunk on SSD under the names that stock gives them, then a second generation."""
    swapper: Any = optimizer.optimizer_swapper
    folder = Path(swapper.swap_folder)
    ids = optimizer.fp16_partitioned_groups_flat_id[chunk]
    name = f"{ids[0]}_{ids[-1]}.tensor.swp"
    master, first, second = folder / name, folder / f"exp_avg-{name}", folder / f"exp_avg_sq-{name}"
    beside = second_generation(master), second_generation(first), second_generation(second)
    return (master, first, second), beside


def low_files(optimizer: DeepSpeedZeroOptimizer_Stage3, chunk: int) -> tuple[Path, Path]:
    """The files of a chunk's compressed masters, of each generation, beside those of the masters."""
    (master, *_), (beside, *_) = state_files(optimizer, chunk)
    return master.with_name(f"low-{master.name}"), beside.with_name(f"low-{beside.name}")


def chunk_numel(optimizer: DeepSpeedZeroOptimizer_Stage3, chunk: int) -> int:
    """This rank's elements of a chunk."""
    return optimizer.fp16_partitioned_groups_flat_numel[chunk]


def gradient_file(optimizer: DeepSpeedZeroOptimizer_Stage3) -> Path:
    """The file of the gradients that wait on SSD for their step: it lies beside the optimizer's files."""
    swapper: Any = optimizer.optimizer_swapper
    return Path(swapper.swap_folder) / "gradients.swp"


def file_numel(optimizer: DeepSpeedZeroOptimizer_Stage3, chunk: int) -> int:
    """Elements of each state file of a chunk: the chunk's, rounded up to the disk's alignment."""
    swapper: Any = optimizer.optimizer_swapper
    return swapper._io_aligned_numel(chunk_numel(optimizer, chunk))


# ---- state


def moments(optimizer: DeepSpeedZeroOptimizer_Stage3, chunk: int) -> dict[str, Any]:
    """The torch optimizer's state entry of a chunk; made (step 0, zeros) where the first step is yet to come.

    Of a chunk on SSD the tensors are empty: stock's swapper, told here of their files, fills them when it reads.
    """
    master = optimizer.fp32_partitioned_groups_flat[chunk]
    state = optimizer.optimizer.state[master]
    if "exp_avg" not in state:
        numel = chunk_numel(optimizer, chunk)
        on_ssd = is_chunk_on_ssd(optimizer, chunk)
        zeros = torch.zeros(1).expand if on_ssd else torch.zeros  # stock asks for the size only
        state |= {"step": 0, "exp_avg": zeros(numel), "exp_avg_sq": zeros(numel)}
        if on_ssd:
            swapper: Any = optimizer.optimizer_swapper
            swapper._get_param_swap_info(master).release_memory()
    return state


def resident_state(optimizer: DeepSpeedZeroOptimizer_Stage3, chunk: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Master and moments of a chunk that lives in host memory, flat fp32."""
    state = moments(optimizer, chunk)
    return optimizer.fp32_partitioned_groups_flat[chunk].data, state["exp_avg"], state["exp_avg_sq"]


def own_share(optimizer: DeepSpeedZeroOptimizer_Stage3, param: ZeroParam, value: torch.Tensor) -> torch.Tensor:
    """Of a parameter's elements those that this rank has, flat. What it has behind the last one is 0."""
    size = param.partition_numel()
    share = value.flatten()[size * optimizer._get_param_partition_rank(param) :][:size]
    return torch.nn.functional.pad(share, (0, size - share.numel()))


def set_share(optimizer: DeepSpeedZeroOptimizer_Stage3, param: ZeroParam, value: torch.Tensor, kind: str | None) -> None:
    """Overwrite this rank's share of a parameter's master (`kind` None) or moment, in memory or in its file."""
    share, chunk = optimizer._get_fp32_opt_state_partition(param, release_swap_buffers=False, optim_state_key=kind)
    share.data.copy_(value.flatten())
    if is_chunk_on_ssd(optimizer, chunk):
        optimizer._optimizer_states_and_gradient_swap_out(chunk)


def parameter_group(optimizer: DeepSpeedZeroOptimizer_Stage3, chunk: int) -> dict[str, Any]:
    """The torch optimizer's group (lr, betas, ...) that a chunk belongs to."""
    return optimizer.optimizer.param_groups[optimizer.sub_group_to_group_id[chunk]]


def group_of(optimizer: DeepSpeedZeroOptimizer_Stage3, chunk: int) -> int:
    """The number of a chunk's group in the torch optimizer."""
    return optimizer.sub_group_to_group_id[chunk]


# ---- where parameters rest in memory


_LINE_BYTES = 64


def place_as_stock(optimizer: DeepSpeedZeroOptimizer_Stage3) -> None:
    """Give every parameter that a lone rank on the CPU computes with where it rests an address as far behind a cache line as
    in stock's buffer: a product with a single row rounds by it (MKL's matrix-vector product in fp32, by address modulo 16).

    Stock lays a group's parameters one behind the other in the model's order; here they come chunk by chunk. Those that so
    begin elsewhere, which takes a parameter of odd size ahead of them, get memory of their own. With parameters on SSD stock
    has no such buffer."""
    if optimizer.params_in_nvme_and_cpu or not get_accelerator().is_synchronized_device() or dist.get_world_size() > 1:
        return
    in_stock = _starts([list(group["params"]) for group in optimizer.trainable_param_groups], optimizer.offload_param)
    by_group: dict[int, list[ZeroParam]] = {}
    for chunk, params in enumerate(optimizer.fp16_groups):
        by_group.setdefault(group_of(optimizer, chunk), []).extend(params)
    here = _starts(list(by_group.values()), optimizer.offload_param)
    for params in optimizer.fp16_groups:
        for param in params:
            start = in_stock[param.ds_id]
            if (start - here[param.ds_id]) % _LINE_BYTES and param.ds_tensor.device.type == "cpu":
                param.ds_tensor.data = _copy_at(param.ds_tensor.data, start % _LINE_BYTES)


def _starts(groups: Sequence[Sequence[ZeroParam]], separate: bool) -> dict[int, int]:
    """Where each parameter begins in its buffer, in bytes, by ds_id: one buffer for each group, or one for all."""
    starts: dict[int, int] = {}
    offset = 0
    for params in groups:
        offset = 0 if separate else offset
        for param in params:
            starts[param.ds_id] = offset
            offset += param.ds_tensor.ds_numel * param.element_size()
    return starts


def _copy_at(flat: torch.Tensor, remainder: int) -> torch.Tensor:
    """A copy that begins `remainder` bytes behind a cache line."""
    size = flat.element_size()
    memory = torch.empty(flat.numel() + _LINE_BYTES // size, dtype=flat.dtype)
    first = (remainder - memory.data_ptr()) % _LINE_BYTES // size
    copy = memory.narrow(0, first, flat.numel())
    return copy.copy_(flat)


_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def loss_scaler_numbers(optimizer: DeepSpeedZeroOptimizer_Stage3) -> dict[str, float]:
    """What a dynamic loss scaler has come to; {} of a static one, whose scale the JSON gives."""
    scaler = optimizer.loss_scaler
    return {name: getattr(scaler, name) for name in _SCALER} if scaler.dynamic else {}


def set_loss_scaler_numbers(optimizer: DeepSpeedZeroOptimizer_Stage3, numbers: dict[str, float]) -> None:
    """Raises ValueError where one scaler is dynamic and the other is not."""
    if bool(numbers) != bool(optimizer.loss_scaler.dynamic):
        raise ValueError("a dynamic loss scale here or there, and a static one in the other place")
    for name, value in numbers.items():
        setattr(optimizer.loss_scaler, name, value)


def set_up(optimizer: DeepSpeedZeroOptimizer_Stage3) -> None:
    """As stock's `_setup_for_real_optimizer`, without its buffers for gradients of the whole partition (in fp32 4 bytes
    per parameter) and for reduction buckets: gradients leave the device once per unit into memory of our own."""
    optimizer._create_fp32_partitions()
    dist.barrier()
    optimizer._create_next_swappable_fp32_groups()
    optimizer.initialize_optimizer_states()
    dist.barrier()
    optimizer.grad_partitions_flat_buffer = torch.empty(0, dtype=optimizer.gradient_accumulation_dtype)
    optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition = {}  # type: ignore[attr-defined] - mangled there
    for master in optimizer.fp32_partitioned_groups_flat:
        master.grad = None
