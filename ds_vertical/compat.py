"""With `compat_state` the only file that calls private names of DeepSpeed, for the one version that it was checked against.

A new DeepSpeed version is a change here. `OVERRIDES` lists the private methods that other files override, with the
parameters they had when the override was written; `check_deepspeed` compares them with the installed DeepSpeed.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_vertical import opcache
from ds_vertical.changes import Changed

opcache.activate()  # before DeepSpeed can load an op

import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402,F401  (zero.Init patches tensor constructors, under which its first import fails)
from deepspeed import comm as dist  # noqa: E402
from deepspeed.accelerator import get_accelerator as _get_accelerator  # noqa: E402
from deepspeed.runtime.engine import DeepSpeedEngine, autocast_if_enabled  # noqa: E402,F401
from deepspeed.runtime.superoffload import superoffload_stage3  # noqa: E402,F401  (subclasses stage 3 at its import)
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus  # noqa: E402
from deepspeed.runtime.zero import stage3  # noqa: E402
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3  # noqa: E402
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum  # noqa: E402
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, is_zero_param  # noqa: E402

SUPPORTED = "0.19.8"

# A torch.nn.Parameter with the attributes that zero.Init grafts on it (ds_tensor, ds_status, ...): no type knows them.
ZeroParam = Any

# class -> {overridden private method: its parameters in the supported version}
OVERRIDES: dict[type, dict[str, tuple[str, ...]]] = {
    stage3.DeepSpeedZeroOptimizer_Stage3: {
        "_create_fp16_sub_groups": ("self", "params_group"),
        "_configure_tensor_swapping": ("self", "offload_optimizer_config", "aio_config"),
        "_get_norm_groups": ("self",),
        "_setup_for_real_optimizer": ("self",),
        "create_reduce_and_remove_grad_hooks": ("self",),
        "step": ("self", "closure"),
    },
    DeepSpeedEngine: {
        "_configure_zero_optimizer": ("self", "optimizer"),
        "forward": ("self", "inputs", "kwargs"),
        "backward": ("self", "loss", "retain_graph", "scale_wrt_gas"),
        "step": ("self", "lr_kwargs"),
        "_zero3_consolidated_16bit_state_dict": ("self", "exclude_frozen_parameters"),
    },
}


class DeepSpeedVersionError(ImportError):
    """The installed DeepSpeed is not the supported one."""


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of a function's parameters, looking through DeepSpeed's profiling decorator (it keeps no signature)."""
    inner = [cell.cell_contents for cell in function.__closure__ or () if inspect.isfunction(cell.cell_contents)]
    names = tuple(inspect.signature(function).parameters)
    return _parameters(inner[0]) if names == ("args", "kwargs") and len(inner) == 1 else names


def keep_signature(function: Any) -> None:
    """Let `inspect.signature` read what it would find out anew. torch's `Function.apply` asks at each call: for DeepSpeed's
    linear layer that was 1 % of a step."""
    function.__signature__ = inspect.signature(function)


def check_deepspeed() -> None:
    """Raise DeepSpeedVersionError unless the installed DeepSpeed is the one whose internals this file knows."""
    if deepspeed.__version__.split("+")[0] != SUPPORTED:
        raise DeepSpeedVersionError(
            f"ds_vertical needs deepspeed=={SUPPORTED} (it overrides internals), found {deepspeed.__version__};"
            f" run: pip install deepspeed=={SUPPORTED}"
        )
    for cls, methods in OVERRIDES.items():
        for name, expected in methods.items():
            found = _parameters(getattr(cls, name))
            if found != expected:
                raise DeepSpeedVersionError(
                    f"deepspeed {deepspeed.__version__}: {cls.__name__}.{name} takes {found}, ds_vertical was written"
                    f" for {expected}; reinstall deepspeed=={SUPPORTED} unmodified"
                )


check_deepspeed()
keep_signature(LinearFunctionForZeroStage3.forward)


def get_accelerator() -> Any:
    """DeepSpeed's accelerator (typed loosely: its declaration allows None)."""
    return _get_accelerator()


def is_one_memory() -> bool:
    """Whether the device computes in host memory."""
    return get_accelerator().is_synchronized_device()


def device_name() -> str:
    """The accelerator's current device, as torch names it."""
    return str(get_accelerator().current_device_name())


def log(line: str) -> None:
    """One line on rank 0, whatever the logger's level."""
    if dist.get_rank() == 0:
        print(line, flush=True)


# ---- the engine


def stock_initialize(**kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """`deepspeed.initialize`, looked up at call time."""
    return deepspeed.initialize(**kwargs)


def forget_boundary(engine: Any) -> None:
    """Let the engine find the gradient accumulation boundary itself again."""
    engine._is_gradient_accumulation_boundary = None
    engine.optimizer.set_gradient_accumulation_boundary(True)


@contextlib.contextmanager
def gathering_on_save(engine: Any) -> Iterator[bool]:
    """Within the block `save_16bit_model` gathers; yields whether the JSON had asked for it."""
    zero = engine._config.zero_config
    asked = zero.gather_16bit_weights_on_model_save
    name = "gather_16bit_weights_on_model_save"
    with Changed(lambda: setattr(zero, name, asked), lambda: setattr(zero, name, True)):
        yield asked


def aio_config(engine: Any) -> dict[str, Any]:
    """The JSON's `aio` section with DeepSpeed's defaults."""
    return engine._config.aio_config


def inputs_of(engine: Any, batch: Any) -> Any:
    """The micro-batch as stock's forward would pass it on (fp16 auto-cast)."""
    return engine._cast_inputs_half(batch) if engine.fp16_auto_cast() else batch


def consolidated_weights(engine: Any, exclude_frozen: bool) -> dict[str, torch.Tensor] | None:
    """The model's state dict with full weights on the host, on rank 0; None on the other ranks.

    Gathers one module at a time. As `_zero3_consolidated_16bit_state_dict`, except that every weight is a copy: stock's
    alias the swap buffers where the device is the host, and the next gather overwrites them.
    """
    engine.optimizer.checkpoint_event_prologue()
    state: dict[str, torch.Tensor] = {}
    shared: dict[int, torch.Tensor] = {}
    for path, module in engine.module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        own: dict[str, ZeroParam] = dict(module.named_parameters(recurse=False))
        with deepspeed.zero.GatheredParameters(list(own.values())):
            for name, param in own.items() if dist.get_rank() == 0 else ():
                if param.requires_grad or not exclude_frozen:
                    if param.ds_id not in shared:
                        shared[param.ds_id] = param.detach().to("cpu", copy=True)
                    state[prefix + name] = shared[param.ds_id]
        for name, buffer in module.named_buffers(recurse=False):
            if name in persistent_buffers(module):
                state[prefix + name] = buffer.detach().cpu()
    engine.optimizer.checkpoint_event_epilogue()
    return state if dist.get_rank() == 0 else None


def persistent_buffers(module: torch.nn.Module) -> set[str]:
    """Names of a module's own buffers that its state dict has."""
    return {name for name, _ in module.named_buffers(recurse=False)} - module._non_persistent_buffers_set


# ---- seams


@contextlib.contextmanager
def substituted_engine(factory: Callable[..., DeepSpeedEngine]) -> Iterator[None]:
    """Within the block `deepspeed.initialize` builds its engine with `factory`."""
    stock = deepspeed.DeepSpeedEngine
    deepspeed.DeepSpeedEngine = factory  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        deepspeed.DeepSpeedEngine = stock  # type: ignore[misc]


@contextlib.contextmanager
def substituted_stage3(factory: Callable[..., Any]) -> Iterator[None]:
    """Within the block the engine builds its ZeRO stage-3 optimizer with `factory`."""
    stock = stage3.DeepSpeedZeroOptimizer_Stage3
    stage3.DeepSpeedZeroOptimizer_Stage3 = factory  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        stage3.DeepSpeedZeroOptimizer_Stage3 = stock  # type: ignore[misc]


# ---- parameters


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


def shard_tier(param: ZeroParam) -> str:
    """`ssd`, `host` or `device`: where the shard rests between uses."""
    if is_on_ssd(param):
        return "ssd"
    return "device" if param.ds_persist or param.ds_tensor.device.type != "cpu" else "host"


def shard_bytes(param: ZeroParam) -> int:
    return param.partition_numel() * param.element_size()


def full_numel(param: ZeroParam) -> int:
    return int(param.ds_numel) if is_zero_param(param) else param.numel()


def full_shape(param: ZeroParam) -> tuple[int, ...]:
    return tuple(param.ds_shape if is_zero_param(param) else param.shape)


def is_partitioned_model(model: torch.nn.Module) -> bool:
    """Whether every parameter was made under zero.Init."""
    return all(is_zero_param(param) for param in model.parameters())


def rounds_late_fp32(config: dict[str, Any]) -> bool:
    """Whether partitioning an existing model at initialize loses fp32: stock takes bf16 where there is no fp16."""
    half = [config.get(name) for name in ("bf16", "bfloat16", "fp16")]
    wants_half = any(isinstance(section, dict) and section.get("enabled") for section in half)
    return not wants_half and not get_accelerator().is_fp16_supported()


def swap_file(param: ZeroParam) -> SwapFile:
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
    writing: Callable[[Iterable[ZeroParam]], None],
    written: Callable[[Iterable[ZeroParam]], None],
) -> None:
    """Call `before` ahead of every gather of these parameters and every read or write of their shards' files by stock;
    ahead of a write call then `writing` with the parameters, after it `written`.

    Users reach the weights in many ways (GatheredParameters, a direct call of the model, saving, loading); all of them end
    in a parameter's own closures or in the swapper that they share.
    """
    for param in params:
        for name in ("all_gather", "all_gather_coalesced"):
            setattr(param, name, _after(before, getattr(param, name)))
    swappers = {id(s): s for param in params if (s := getattr(param, "nvme_swapper", None)) is not None}
    for swapper in swappers.values():
        for name in ("swap_in", "swap_into_buffer"):
            setattr(swapper, name, _after(before, getattr(swapper, name)))
        for name in ("swap_out_and_release", "swap_out_partitioned_params"):
            refused = swapper.remove_partition_and_release_buffers
            setattr(swapper, name, _after(before, _noting(writing, refused, written, getattr(swapper, name))))


def _after(before: Callable[[], None], then: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        before()
        return then(*args, **kwargs)

    return guarded


def _noting(
    writing: Callable[[Iterable[ZeroParam]], None],
    refused: Callable[[Iterable[ZeroParam]], None],
    written: Callable[[Iterable[ZeroParam]], None],
    write: Callable[..., Any],
) -> Callable[..., Any]:
    """`write`, whose first argument is the parameters written, by position or name; noted after a failure too. Where `writing`
    raises, `refused` forgets the new values, and the parameters are what their files say."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        params = list(args[0] if args else kwargs.get("params", kwargs.get("dst_fp16_params", ())))
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


def gather(params: Sequence[ZeroParam]) -> list[torch.Tensor]:
    """Assemble the full parameters on the device from all ranks' shards; returns them."""
    try:
        if params:
            params[0].all_gather_coalesced(params).wait()
    except BaseException:  # another rank is gone: nothing is under way any more
        for param in (param for param in params if param.ds_status == ZeroParamStatus.INFLIGHT):
            param.ds_status = ZeroParamStatus.NOT_AVAILABLE
        raise
    return [param.data for param in params]


def partition(params: Iterable[ZeroParam]) -> None:
    for param in params:
        param.partition()


def rest(params: Iterable[ZeroParam]) -> None:
    """Leave of each parameter its shard only, where that rests, whatever state an interrupt has left it in. One that is
    persistent, and whole, stays so."""
    for param in params:
        if is_persistent(param) and param.ds_status == ZeroParamStatus.AVAILABLE:
            continue
        if param.ds_status != ZeroParamStatus.NOT_AVAILABLE or param.data.numel():
            param.data = torch.empty(0, dtype=param.dtype, device=param.device)
            param.ds_status = ZeroParamStatus.NOT_AVAILABLE
        if is_on_ssd(param) and not needs_read(param):
            param.nvme_swapper.remove_partition_and_release_buffers([param])


def unlink_shared_workspace(rank: int) -> None:
    """Of the memory through which the CPU accelerator's ranks of one host reduce (66 MiB each) remove the name: DeepSpeed
    never does, and it would outlive its processes. All ranks must have opened it."""
    parts = (os.getuid(), os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""), rank)
    Path("/dev/shm", "_".join(("deepspeed_allreduce_buffer", *map(str, parts)))).unlink(missing_ok=True)
