"""The two names by which scripts call DeepSpeed, `deepspeed.initialize` and `deepspeed.zero.Init`, and what takes their place.

Importing this module holds both signatures against `compat.deepspeed_members`.
"""

from __future__ import annotations

from ds_vertical.compat import version  # noqa: F401 - refuses another DeepSpeed before its private names are imported

# isort: split

import functools
from collections.abc import Callable
from typing import Any

import deepspeed

Engines = tuple[Any, Any, Any, Any]  # what deepspeed.initialize returns

_INITIALIZE = (
    *("args", "model", "optimizer", "model_parameters", "training_data", "lr_scheduler", "distributed_port", "mpu"),
    *("dist_init_required", "collate_fn", "config", "mesh_param", "config_params"),
)
_POSITION_IN_INIT = 5  # of config_dict_or_path, `self` not counted
_CONFIGS_OF_INIT = ("config_dict_or_path", "config")

_stock: list[Callable[..., Engines]] = []  # deepspeed.initialize as it was before `replace`


def original_initialize(**kwargs: object) -> Engines:
    """DeepSpeed's own `initialize`: what `replace` found, or else `deepspeed.initialize`, looked up at call time."""
    initialize: Callable[..., Engines] = _stock[0] if _stock else deepspeed.initialize
    return initialize(**kwargs)


def is_replaced() -> bool:
    """Whether `replace` has been called in this process."""
    return bool(_stock)


def replace(initialize: Callable[..., Engines], config_of_init: Callable[[object], object]) -> None:
    """From now on a script's `deepspeed.initialize` calls `initialize`, with all arguments by name, and `deepspeed.zero.Init`
    takes what `config_of_init` makes of its configuration. To be called once in a process."""
    stock, init = deepspeed.initialize, deepspeed.zero.Init.__init__

    @functools.wraps(stock)
    def replaced(*args: object, **kwargs: object) -> Engines:
        return initialize(**dict(zip(_INITIALIZE, args, strict=False)), **kwargs)

    @functools.wraps(init)
    def replaced_init(self: deepspeed.zero.Init, *args: object, **kwargs: object) -> None:
        given = list(args)
        if len(given) > _POSITION_IN_INIT:
            given[_POSITION_IN_INIT] = config_of_init(given[_POSITION_IN_INIT])
        for name in _CONFIGS_OF_INIT:
            if kwargs.get(name) is not None:
                kwargs[name] = config_of_init(kwargs[name])
        init(self, *given, **kwargs)  # pyright: ignore[reportArgumentType] - as the script gave them

    deepspeed.initialize = replaced
    deepspeed.zero.Init.__init__ = replaced_init
    _stock.append(stock)
