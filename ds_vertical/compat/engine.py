"""DeepSpeed's engine: how it is made, called and asked for its weights."""

from __future__ import annotations

from ds_vertical.compat import version  # noqa: F401 - refuses another DeepSpeed before its private names are imported

# isort: split

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import deepspeed
import torch
import torch._dynamo
from deepspeed import comm as dist
from deepspeed.runtime.engine import DeepSpeedEngine, autocast_if_enabled  # noqa: F401 - used by others
from deepspeed.runtime.zero import stage3
from torch.utils.hooks import RemovableHandle

from ds_vertical.compat import entry_points
from ds_vertical.compat.zero_params import ZeroParam
from ds_vertical.interrupts import Changed

# ---- the engine


def stock_initialize(**kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """DeepSpeed's own `initialize`, also where `ds_vertical.patch()` has put another function in its place."""
    return entry_points.original_initialize(**kwargs)


def is_patched() -> bool:
    """Whether `ds_vertical.patch()` has been called: then scripts that know nothing of ds_vertical make the calls."""
    return entry_points.is_replaced()


def model_of(engine: DeepSpeedEngine) -> torch.nn.Module:
    """The user's model, as the engine holds it now."""
    module: Any = engine.module
    return module


class _Repeated:
    """A learning rate scheduler that takes several steps, or none, for each one that is asked for."""

    def __init__(self, scheduler: object, times: int) -> None:
        self._scheduler: Any = scheduler
        self._times = times

    def step(self, *args: object, **kwargs: object) -> None:
        for _ in range(self._times):
            self._scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> object:
        return getattr(self._scheduler, name)


def conclude_step(engine: DeepSpeedEngine, scheduler_steps: int = 1) -> None:
    """Do what DeepSpeed's own `step` does at the boundary of gradient accumulation: optimizer, scheduler, counters, monitor,
    printing. `engine` itself may override `step`. `scheduler_steps`: of the learning rate scheduler, where the step counts."""
    scheduler: Any = engine.lr_scheduler
    repeated = scheduler if scheduler is None or scheduler_steps == 1 else _Repeated(scheduler, scheduler_steps)
    engine.set_gradient_accumulation_boundary(True)
    try:
        with Changed(lambda: setattr(engine, "lr_scheduler", scheduler), lambda: setattr(engine, "lr_scheduler", repeated)):
            DeepSpeedEngine.step(engine)
    finally:
        forget_boundary(engine)


def explicit_boundary(engine: DeepSpeedEngine) -> bool | None:
    """What the user's loop has said with `set_gradient_accumulation_boundary`; None where the engine counts by itself."""
    return engine._is_gradient_accumulation_boundary


def forget_boundary(engine: DeepSpeedEngine) -> None:
    """Let the engine find the gradient accumulation boundary itself again, after `set_gradient_accumulation_boundary`."""
    engine._is_gradient_accumulation_boundary = None
    optimizer: Any = engine.optimizer  # of any class, in the stock arm
    optimizer.set_gradient_accumulation_boundary(True)


@dataclass(frozen=True)
class ModuleHooks:
    """Handles of the hooks that DeepSpeed has put on the model's modules. `others`: None where there is no such hook."""

    forward: tuple[RemovableHandle, ...]
    backward: tuple[RemovableHandle, ...]
    others: tuple[RemovableHandle | None, ...]


def module_hooks(engine: DeepSpeedEngine) -> ModuleHooks:
    """Those of ZeRO stage 3, and the engine's own two around the whole model."""
    optimizer: Any = engine.optimizer
    offload = optimizer.parameter_offload
    others = offload.fwd_pre_hook, engine.module_forward_pre_hook, engine.module_forward_post_hook
    return ModuleHooks(tuple(offload.forward_hooks), tuple(offload.backward_hooks), others)


def check_forwards(offload: object, check: Callable[[], None]) -> None:
    """Call `check` ahead of what stage 3's part for parameters does first in each forward of the whole model by its own hooks,
    the user's direct calls: that waits for the other ranks."""
    made: Any = offload
    handle: RemovableHandle = made.fwd_pre_hook
    hooks: Any = handle.hooks_dict_ref()
    stock = hooks[handle.id]

    def checked(module: torch.nn.Module, inputs: tuple[object, ...]) -> object:
        check()
        return stock(module, inputs)

    hooks[handle.id] = checked


def take_hooks_off(engine: DeepSpeedEngine) -> None:
    """Leave the model's modules without the hooks of an engine of ZeRO stage 3 that has no optimizer, for another engine's, and
    no parameter gathered."""
    offload: Any = engine.optimizer  # stage 3's own part for parameters
    offload.partition_all_parameters()
    offload.destroy()
    for handle in (engine.module_forward_pre_hook, engine.module_forward_post_hook):
        if handle is not None:
            handle.remove()


@contextlib.contextmanager
def gathering_on_save(engine: DeepSpeedEngine) -> Iterator[bool]:
    """Within the block `save_16bit_model` gathers; yields whether the JSON had asked for it."""
    config: Any = engine._config  # declared as optional
    zero = config.zero_config
    asked = zero.gather_16bit_weights_on_model_save
    name = "gather_16bit_weights_on_model_save"
    with Changed(lambda: setattr(zero, name, asked), lambda: setattr(zero, name, True)):
        yield asked


def aio_config(engine: DeepSpeedEngine) -> dict[str, Any]:
    """The JSON's `aio` section with DeepSpeed's defaults."""
    config: Any = engine._config  # declared as optional
    return config.aio_config


def inputs_of(engine: DeepSpeedEngine, batch: Any) -> Any:
    """The micro-batch as stock's forward would pass it on (fp16 auto-cast)."""
    return engine._cast_inputs_half(batch) if engine.fp16_auto_cast() else batch


def consolidated_weights(
    engine: DeepSpeedEngine,
    wanted: Callable[[str, ZeroParam], bool],
    copied: Callable[[torch.Tensor], torch.Tensor] = lambda weight: weight.detach().to("cpu", copy=True),
    root: torch.nn.Module | None = None,
) -> dict[str, torch.Tensor] | None:
    """The model's state dict with full weights on the host, on rank 0; None on the other ranks. Collective.

    `wanted(name, parameter)`: what is left out is not gathered either. `copied`: of a weight, on the host. `root`: the part of
    the model that is meant, with names of its own; None: all of it. Gathers one module at a time. As
    `_zero3_consolidated_16bit_state_dict`, except that every weight is a copy: stock's alias the swap buffers where the device
    is the host, and the next gather overwrites them.
    """
    optimizer: Any = engine.optimizer
    model: Any = engine.module if root is None else root
    optimizer.checkpoint_event_prologue()
    state: dict[str, torch.Tensor] = {}
    shared: dict[int, torch.Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        every: dict[str, ZeroParam] = dict(module.named_parameters(recurse=False))
        own = {name: param for name, param in every.items() if wanted(prefix + name, param)}
        with deepspeed.zero.GatheredParameters(list(own.values())):
            for name, param in own.items() if dist.get_rank() == 0 else ():
                if param.ds_id not in shared:
                    shared[param.ds_id] = copied(param)
                state[prefix + name] = shared[param.ds_id]
        for name, buffer in module.named_buffers(recurse=False):
            if name in persistent_buffers(module):
                state[prefix + name] = buffer.detach().cpu()
    optimizer.checkpoint_event_epilogue()
    return state if dist.get_rank() == 0 else None


def partitions_weights(engine: DeepSpeedEngine) -> bool:
    """Whether each rank holds a share of every weight only (ZeRO stage 3)."""
    return engine.zero_optimization_partition_weights()


def persistent_buffers(module: torch.nn.Module) -> set[str]:
    """Names of a module's own buffers that its state dict has."""
    return {name for name, _ in module.named_buffers(recurse=False)} - module._non_persistent_buffers_set


# ---- seams


def substituted_engine(factory: Callable[..., DeepSpeedEngine]) -> Changed:
    """Within the block `deepspeed.initialize` builds its engine with `factory`."""
    return _substituted(deepspeed, "DeepSpeedEngine", factory)


def substituted_stage3(factory: Callable[..., Any]) -> Changed:
    """Within the block the engine builds its ZeRO stage-3 optimizer with `factory`."""
    return _substituted(stage3, "DeepSpeedZeroOptimizer_Stage3", factory)


def _substituted(module: ModuleType, name: str, factory: Callable[..., object]) -> Changed:
    """No generator: an interrupt must not put off the end of the block to another `initialize`."""
    stock = getattr(module, name)
    return Changed(lambda: setattr(module, name, stock), lambda: setattr(module, name, factory))
