"""Every Trainer that a script makes, from the import of transformers.trainer on.

A Trainer may be the first to import DeepSpeed, within its `__init__`: with a model that is built already, and arguments that
hold the JSON. So `Trainer.__init__` is wrapped before that, and whether DeepSpeed is in use is asked when it returns. Imports
neither torch nor deepspeed: a script that does not use DeepSpeed shall not import it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol, cast

from ds_vertical.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

CALLED_WITH: Final = {
    "get_batch_samples": ("iterator", 1, "device"),
    "training_step": ("model", {}, None),
    "prediction_step": ("model", {}, True),
    "evaluation_loop": ([], "Evaluation"),
}
_MARK: Final = "hands_over_whole_steps"


class _GradientState(Protocol):
    sync_gradients: bool

    def _set_sync_gradients(self, sync_gradients: bool) -> None: ...


class _Accelerator(Protocol):
    gradient_state: _GradientState
    deepspeed_engine_wrapped: object


class _Arguments(Protocol):
    output_dir: str
    prediction_loss_only: bool
    save_on_each_node: bool
    save_only_model: bool
    save_strategy: str


class Trainer(Protocol):
    """What is used of a `transformers.Trainer`."""

    accelerator: _Accelerator
    args: _Arguments
    model: nn.Module
    model_wrapped: nn.Module
    get_batch_samples: Callable[..., tuple[Sequence[object], object]]
    training_step: Callable[..., object]
    prediction_step: Callable[..., object]
    evaluation_loop: Callable[..., object]
    preprocess_logits_for_metrics: Callable[[object, object], object] | None


def set_sync_gradients(trainer: Trainer, is_last: bool) -> None:
    """Tell Accelerate whether the micro-step under way is its step's last one."""
    trainer.accelerator.gradient_state._set_sync_gradients(is_last)


def bridge_trainers(bridge: Callable[[Trainer], None]) -> None:
    """Have `bridge` called with every Trainer that the script makes from here on, as soon as it is made, where it may use
    DeepSpeed.

    Call it once transformers.trainer is imported; twice is harmless. Raises ConfigError where this version's methods take other
    arguments.
    """
    from transformers import Trainer as Stock

    cls = cast("type[Trainer]", Stock)
    stock = cls.__init__
    if getattr(stock, _MARK, False):
        return
    for name, arguments in CALLED_WITH.items():
        check_signature(f"transformers.Trainer.{name}", getattr(cls, name), (None, *arguments))

    @functools.wraps(stock)
    def init(trainer: Trainer, *args: object, **kwargs: object) -> None:
        stock(trainer, *args, **kwargs)
        if "deepspeed" in sys.modules or getattr(trainer, "is_deepspeed_enabled", False):
            bridge(trainer)

    setattr(init, _MARK, True)
    setattr(cls, "__init__", init)  # noqa: B010 - a protocol's own could not be assigned


def check_signature(name: str, method: Callable[..., object], arguments: tuple[object, ...]) -> None:
    """Raises ConfigError for a method that cannot be called with these."""
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{name}{inspect.signature(method)}: with vertical_schedule it gets {len(arguments)} positional arguments,"
            f" as in transformers 5.23 ({error}); install that version, or set vertical_schedule.enabled to false"
        ) from error
