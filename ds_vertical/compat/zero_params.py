"""ZeRO-3's partitioned parameters: where they rest, how they are gathered and given up. Calls private names of DeepSpeed."""

from __future__ import annotations

from ds_vertical.compat import version  # noqa: F401 - refuses another DeepSpeed before its private names are imported

# isort: split

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
import torch._dynamo
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3, zero3_linear_wrap  # noqa: F401 - used by others
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, is_zero_param
from deepspeed.runtime.zero.utils import apply_to_tensors_only  # noqa: F401 - used by others
from torch.distributed import ProcessGroup

from ds_vertical.compat.accelerator import device_name, get_accelerator
from ds_vertical.interrupts import Changed
from ds_vertical.types import Tier

P = ParamSpec("P")
R = TypeVar("R")

# A torch.nn.Parameter with the attributes that zero.Init grafts on it (ds_tensor, ds_status, ...): no type knows them.
ZeroParam = Any


def keep_signature(function: FunctionType) -> None:
    """Store a function's signature where `inspect.signature` looks first. torch's `Function.apply` asks for it at each call of
    DeepSpeed's linear layer."""
    vars(function)["__signature__"] = inspect.signature(function)


keep_signature(LinearFunctionForZeroStage3.forward)


# ---- parameters


class _ReadPlainly(ZeROOrderedDict):
    """A module's parameters by name, as a dict gives them: no look whether one is gathered."""

    __getitem__: Any = OrderedDict.__getitem__

    def __reduce__(self) -> tuple[type[ZeROOrderedDict], tuple[object], *tuple[object, ...]]:
        return ZeROOrderedDict, *super().__reduce__()[1:]


def reading_plainly(modules: Iterable[torch.nn.Module]) -> Changed:
    """Within the block the modules' parameters are read in less time. DeepSpeed's own dict asks at each read whether to gather
    the parameter, and does so only within the forward of its engine, which does not run in the block."""
    tables = [module._parameters for module in modules]
    kept = [each for each in tables if type(each) is ZeROOrderedDict and not each._in_forward]

    def set_class(cls: type) -> None:
        for each in kept:
            each.__class__ = cls

    return Changed(partial(set_class, ZeROOrderedDict), partial(set_class, _ReadPlainly))


@dataclass(frozen=True)
class SwapFile:
    """A parameter shard's file. `num_bytes`: its size, rounded up to the aio alignment; `numel`: elements of the shard."""

    path: Path
    num_bytes: int
    numel: int


def is_on_ssd(param: ZeroParam) -> bool:
    """Whether the parameter's shard lives in a file (shards under 1 MiB never do)."""
    return is_zero_param(param) and param.ds_tensor.final_location == OffloadDeviceEnum.nvme


def is_partitioned(param: ZeroParam) -> bool:
    """Whether only the shard of the parameter exists at present."""
    return param.ds_status == ZeroParamStatus.NOT_AVAILABLE


def shard(param: ZeroParam) -> torch.Tensor:
    """This rank's elements of a parameter whose shard rests in memory, 1-d."""
    return param.ds_tensor.data.narrow(0, 0, param.partition_numel())


def is_persistent(param: ZeroParam) -> bool:
    """Whether the full parameter stays on the device (it is small). Never one on SSD: it lies in a buffer that others need."""
    return bool(param.ds_persist) and not is_on_ssd(param)


def has_second_partition(param: ZeroParam) -> bool:
    """Whether zero.Init was told of hpZ, with which it also partitions the parameter over a node alone."""
    return is_zero_param(param) and param.ds_zero_param_process_group is not None


def shard_tier(param: ZeroParam) -> Tier:
    """Where the shard rests between uses."""
    if is_on_ssd(param):
        return Tier.SSD
    return Tier.DEVICE if param.ds_persist or param.ds_tensor.device.type != "cpu" else Tier.HOST


def shard_numel(param: ZeroParam) -> int:
    """Elements of this rank's shard."""
    return param.partition_numel()


def shard_bytes(param: ZeroParam) -> int:
    """Bytes of this rank's shard of the parameter."""
    return param.partition_numel() * param.element_size()


def full_numel(param: ZeroParam) -> int:
    """Elements of the whole parameter, partitioned or not."""
    return int(param.ds_numel) if is_zero_param(param) else param.numel()


def full_shape(param: ZeroParam) -> tuple[int, ...]:
    """The shape of the whole parameter, partitioned or not."""
    return tuple(param.ds_shape if is_zero_param(param) else param.shape)


def is_partitioned_model(model: torch.nn.Module) -> bool:
    """Whether every parameter was made under zero.Init."""
    return all(is_zero_param(param) for param in model.parameters())


def keeps_dtypes(params: Iterable[ZeroParam]) -> bool:
    """Whether DeepSpeed leaves each parameter's dtype as it is: it converts a model only where none of it is partitioned."""
    return any(map(is_zero_param, params))


def rounds_late_fp32(config: dict[str, Any]) -> bool:
    """Whether partitioning an existing model at initialize loses fp32: stock takes bf16 where there is no fp16."""
    half = [config.get(name) for name in ("bf16", "bfloat16", "fp16")]
    wants_half = any(isinstance(section, dict) and section.get("enabled") for section in half)
    return not wants_half and not get_accelerator().is_fp16_supported()


def swap_file(param: ZeroParam) -> SwapFile:
    """The file of this rank's shard of a parameter on SSD."""
    swapper = param.nvme_swapper
    numel = param.ds_tensor.ds_numel
    aligned = swapper._io_aligned_numel(numel)
    return SwapFile(Path(swapper.get_path(param, must_exist=True)), aligned * swapper.swap_element_size, numel)


def second_generation(path: Path) -> Path:
    """The file beside `path` that takes what an early step makes, until it counts."""
    return path.parent / "generation_1" / path.name


def set_swap_path(param: ZeroParam, path: str) -> None:
    """Let DeepSpeed's swapper find the parameter's shard in another file."""
    param.nvme_swapper.id_to_path[param.ds_id] = path


def swap_folder(param: ZeroParam) -> Path | None:
    """The folder that the parameter's zero.Init writes to, or None where it has no swapper."""
    swapper = getattr(param, "nvme_swapper", None)
    return None if swapper is None else Path(swapper.swap_folder)


def least_file_bytes(param: ZeroParam) -> int | None:
    """Bytes from which on DeepSpeed keeps a shard in a file; None where the parameter has no swapper: not meant for SSD."""
    swapper = getattr(param, "nvme_swapper", None)
    return None if swapper is None else int(swapper.min_aio_bytes)


def needs_read(param: ZeroParam) -> bool:
    """Whether the shard must come from SSD before the parameter can be gathered."""
    return is_on_ssd(param) and param.ds_tensor.status == PartitionedParamStatus.NOT_AVAILABLE


def bind_shard(param: ZeroParam, shard: torch.Tensor) -> None:
    """Make `shard` (1-d, the parameter's dtype) the parameter's shard in host memory, until it is partitioned again."""
    param.ds_tensor.data = shard
    param.ds_tensor.status = PartitionedParamStatus.AVAILABLE


def guard_parameters(
    params: Iterable[ZeroParam],
    before: Callable[[], None],
    gathering: Callable[[], None],
    writing: Callable[[Iterable[ZeroParam]], None],
    written: Callable[[Iterable[ZeroParam]], None],
) -> None:
    """Call `before` ahead of every gather of these parameters and every read or write of their shards' files by stock;
    ahead of a gather call then `gathering`, ahead of a write `writing` with the parameters, after it `written`.

    Users reach the weights in many ways (GatheredParameters, a direct call of the model, saving, loading); all of them end
    in a parameter's own closures or in the swapper that they share.
    """
    for param in params:
        for name in ("all_gather", "all_gather_coalesced"):
            setattr(param, name, _after(before, _after(gathering, getattr(param, name))))
    swappers = {id(s): s for param in params if (s := getattr(param, "nvme_swapper", None)) is not None}
    for swapper in swappers.values():
        for name in ("swap_in", "swap_into_buffer"):
            setattr(swapper, name, _after(before, getattr(swapper, name)))
        for name in ("swap_out_and_release", "swap_out_partitioned_params"):
            refused = swapper.remove_partition_and_release_buffers
            setattr(swapper, name, _after(before, _noting(writing, refused, written, getattr(swapper, name))))


def note_updates(params: Iterable[ZeroParam], updated: Callable[[], None]) -> None:
    """Call `updated` behind each partition in which shards take new values from full parameters, as at the end of a
    GatheredParameters with a `modifier_rank`, on all ranks."""
    for param in params:
        param.partition = _updating(updated, param.partition)


def _updating(updated: Callable[[], None], partition: Callable[..., None]) -> Callable[..., None]:
    def noted(
        param_list: Sequence[ZeroParam] | None = None,
        hierarchy: int = 0,
        has_been_updated: bool = False,
        free_data: bool = True,
    ) -> None:
        try:
            partition(param_list, hierarchy, has_been_updated, free_data)
        finally:
            if has_been_updated:
                updated()

    return noted


def _after(before: Callable[[], None], then: Callable[P, R]) -> Callable[P, R]:
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        before()
        return then(*args, **kwargs)

    return guarded


def _noting(
    writing: Callable[[Iterable[ZeroParam]], None],
    refused: Callable[[Iterable[ZeroParam]], None],
    written: Callable[[Iterable[ZeroParam]], None],
    write: Callable[P, R],
) -> Callable[P, R]:
    """`write`, whose first argument is the parameters written, by position or name; noted after a failure too. Where `writing`
    raises, `refused` forgets the new values, and the parameters are what their files say."""

    def noted(*args: P.args, **kwargs: P.kwargs) -> R:
        given: Any = args[0] if args else kwargs.get("params", kwargs.get("dst_fp16_params", ()))
        params: list[ZeroParam] = list(given)
        try:
            writing(params)
        except BaseException:
            refused(params)
            raise
        try:
            return write(*args, **kwargs)
        finally:
            written(params)

    return noted


def gather(params: Sequence[ZeroParam], group: ProcessGroup | None = None) -> list[torch.Tensor]:
    """Assemble the full parameters on the device from all ranks' shards; returns them. `group`: see `start_gather`."""
    start_gather(params, group)()
    return [param.data for param in params]


def shard_dtype(param: ZeroParam) -> torch.dtype:
    """The dtype of the parameter's shards. Away from memory DeepSpeed has another tensor in their place."""
    return param.dtype if is_on_ssd(param) else param.ds_tensor.dtype


def expect(params: Iterable[ZeroParam]) -> None:
    """Note that full parameters are on their way. Raises RuntimeError for one that is there."""
    for param in params:
        if param.ds_status != ZeroParamStatus.NOT_AVAILABLE:
            raise RuntimeError(param.ds_summary())
        param.ds_status = ZeroParamStatus.INFLIGHT


def fill(arrived: Iterable[tuple[ZeroParam, torch.Tensor]]) -> None:
    """Have each parameter full: its elements, flat, in memory of their own."""
    for param, flat in arrived:
        param.data = flat.view(param.ds_shape)
        param.ds_status = ZeroParamStatus.AVAILABLE


def expect_no_more(params: Iterable[ZeroParam]) -> None:
    """Nothing of these parameters is on its way any more: another rank is gone, or an interrupt has cut what waits for them."""
    for param in params:
        if param.ds_status == ZeroParamStatus.INFLIGHT:
            _drop_full(param)


def copy_to_device(params: Sequence[ZeroParam]) -> list[torch.Tensor]:
    """Start to copy the shards of a lone rank, which are the whole parameters, to the device beside the host; returns the full
    parameters. The device's current stream has them whole when it comes to them. Stock would wait for the copies: until they
    are complete, the caller leaves the shards alone."""
    expect(params)
    device = device_name()
    try:
        fill((param, param.ds_tensor.data.to(device, non_blocking=True)) for param in params)
    except BaseException:
        expect_no_more(params)
        raise
    return [param.data for param in params]


def start_gather(params: Sequence[ZeroParam], group: ProcessGroup | None = None) -> Callable[[], None]:
    """Start to assemble the full parameters on the device; returns what waits for them. Until then the shards stay as they are.
    `group`: of all ranks, for the collective; None: DeepSpeed's own, in which other code has collectives, too."""
    groups = [param.ds_process_group for param in params]

    def wait() -> None:
        try:
            if handle is not None:
                handle.wait()
        except BaseException:
            expect_no_more(params)
            raise

    try:
        for param in params if group is not None else ():
            param.ds_process_group = group
        handle = params[0].all_gather_coalesced(params) if params else None
    except BaseException:
        expect_no_more(params)
        raise
    finally:
        for param, own in zip(params, groups, strict=True):
            param.ds_process_group = own
    return wait


def partition(params: Iterable[ZeroParam]) -> None:
    """Leave of each gathered parameter this rank's shard only. Collective where ranks share a parameter's state."""
    for param in params:
        param.partition()


def _drop_full(param: ZeroParam) -> None:
    param.data = torch.empty(0, dtype=param.dtype, device=param.device)
    param.ds_status = ZeroParamStatus.NOT_AVAILABLE


def leave_shards(params: Iterable[ZeroParam]) -> None:
    """Leave of each parameter its shard only, where that rests, whatever state an interrupt has left it in. One that is
    persistent, and whole, stays so."""
    for param in params:
        if is_persistent(param) and param.ds_status == ZeroParamStatus.AVAILABLE:
            continue
        if param.ds_status != ZeroParamStatus.NOT_AVAILABLE or param.data.numel():
            _drop_full(param)
        if is_on_ssd(param) and not needs_read(param):
            param.nvme_swapper.remove_partition_and_release_buffers([param])
