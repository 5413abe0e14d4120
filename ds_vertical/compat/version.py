"""The DeepSpeed that this package was checked against, and the private methods that it overrides.

`OVERRIDES` has their parameters as they were when the overrides were written. Importing this module compares both with the
installed DeepSpeed (`check_deepspeed`), ahead of every import of a private name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ds_vertical.compat.ops import cache

cache.activate()  # before DeepSpeed can load an op

import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402,F401  (zero.Init patches tensor constructors, under which its first import fails)
from deepspeed.runtime.engine import DeepSpeedEngine  # noqa: E402
from deepspeed.runtime.superoffload import superoffload_stage3  # noqa: E402,F401  (subclasses stage 3 at its import)
from deepspeed.runtime.zero import stage3  # noqa: E402

SUPPORTED = "0.19.8"

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
