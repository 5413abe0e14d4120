"""DeepSpeed's public routes to gradients, masters and moments (`safe_get_*`, `safe_set_*`, checkpoints), flushed first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from ds_vertical.compat import accelerator, zero_optimizer
from ds_vertical.compat.zero_optimizer import DeepSpeedZeroOptimizer_Stage3
from ds_vertical.compat.zero_params import ZeroParam
from ds_vertical.engine.zero3.live_state import LiveState
from ds_vertical.errors import GradientGoneError
from ds_vertical.io.checksums import Checksums

_TOO_LATE = (
    "{call}: train_batch has decided the step of these gradients already, and nothing would come of the new ones;"
    " to change gradients between backward and step set vertical_schedule.enabled to false"
)
_NO_POWERS = (
    "optimizer.load_state_dict: a state dictionary of DeepSpeed's lacks CPU Adam's powers of beta and what is on SSD; save with"
    " engine.save_checkpoint, load with engine.load_checkpoint"
)
_GONE = (
    "the last step's gradient of this parameter is not in host memory any more: it was given up once its optimizer step was"
    ' taken, or waits on SSD; write "vertical_schedule": {"keep_gradients": true} to keep every gradient until the next step'
    " sums new ones (4 bytes per parameter of host memory)"
)


class StateRoutes(DeepSpeedZeroOptimizer_Stage3):
    """Stage 3 whose public methods on state see every step taken. The subclass says how to flush and what it holds.

    `checksums`: of the files of state. `after_writes`: called when a user has written a master or a moment. `live`: whether a
    step or an evaluation is running, which refuses changes of state.
    """

    checksums: Checksums
    after_writes: list[Callable[[], None]]
    live: LiveState

    def flush_state(self) -> None:
        """Take every step that is due, and bring all state to where DeepSpeed looks for it."""
        raise NotImplementedError

    def steps(self, param: nn.Parameter) -> bool:
        """Whether the parameter belongs to the optimizer."""
        raise NotImplementedError

    def held_share(self, param: nn.Parameter) -> torch.Tensor | None:
        """This rank's share of a parameter's gradient in the last step, flat fp32; None where there never was one. Raises
        GradientGoneError."""
        raise NotImplementedError

    # ---- gradients

    def get_local_fp32_grad_for_param(  # pyright: ignore[reportIncompatibleMethodOverride] - stock names no None
        self, param: nn.Parameter
    ) -> torch.Tensor | None:
        """This rank's share (flat fp32) of the last step's gradient: summed over the micro-batches, neither clipped nor
        freed of the loss scale. None before the first step, and for a parameter that the optimizer does not have. Raises
        RuntimeError where it is in memory no longer: `keep_gradients` keeps it."""
        try:
            share = self.held_share(param)
        except GradientGoneError as error:
            raise RuntimeError(_GONE) from error
        return None if share is None else share.to(accelerator.device_name(), copy=True)

    def get_fp32_grad_for_param(  # pyright: ignore[reportIncompatibleMethodOverride] - stock names no None
        self, param: nn.Parameter
    ) -> torch.Tensor | None:
        """As `get_local_fp32_grad_for_param`, of all ranks, in the parameter's shape."""
        share = self.get_local_fp32_grad_for_param(param)
        return None if share is None else zero_optimizer.gather_shares(self, param, share)

    def set_fp32_grad_for_param(self, value: torch.Tensor, param: nn.Parameter) -> NoReturn:
        """Raises RuntimeError: the step of the gradients that a user reads has been decided."""
        raise RuntimeError(_TOO_LATE.format(call="safe_set_full_grad"))

    def set_local_grad_for_param(self, value: torch.Tensor, param: nn.Parameter) -> NoReturn:
        """Raises RuntimeError: the step of the gradients that a user reads has been decided."""
        raise RuntimeError(_TOO_LATE.format(call="safe_set_local_grad"))

    def update_fp32_grad_for_param_vectorized(
        self, update_func: Callable[..., object], param_list: Sequence[nn.Parameter]
    ) -> NoReturn:
        """Raises RuntimeError: the step of the gradients that a user reads has been decided."""
        raise RuntimeError(_TOO_LATE.format(call="safe_update_full_grad_vectorized"))

    # ---- masters and moments

    def get_full_hp_param(  # pyright: ignore[reportIncompatibleMethodOverride] - stock names no None
        self, param: nn.Parameter, optim_state_key: str | None = None
    ) -> torch.Tensor | None:
        """As stock's, after a flush: fp32, in the parameter's shape, of all ranks.

        `optim_state_key`: a moment's name; None: the master."""
        self.flush_state()
        return super().get_full_hp_param(param, optim_state_key)

    def set_full_hp_param(self, value: torch.Tensor, param: ZeroParam, optim_state_key: str | None = None) -> None:
        """As stock's, after a flush, and also for a parameter that ranks share unequally, where stock asks the last ones for
        elements that it has not. Raises ValueError for a wrong number of elements, RuntimeError within a step."""
        self.live.refuse_inside("safe_set_full_fp32_param or safe_set_full_optimizer_state")
        if value.numel() != param.ds_numel:
            raise ValueError(f"got {value.numel()} elements for a parameter of {param.ds_numel}")
        self.flush_state()
        if self.steps(param):
            zero_optimizer.set_share(self, param, zero_optimizer.own_share(self, param, value), optim_state_key)
            self._note_write()

    def get_local_fp32_param(  # pyright: ignore[reportIncompatibleMethodOverride] - stock names no None
        self, param: nn.Parameter, optim_state_key: str | None = None
    ) -> torch.Tensor | None:
        """As stock's, after a flush: a copy of this rank's share, flat fp32."""
        self.flush_state()
        share = super().get_local_fp32_param(param, optim_state_key)
        return None if share is None else share.clone()  # stock's is part of a buffer that the next read takes

    def set_local_hp_param(self, value: torch.Tensor, param: ZeroParam, optim_state_key: str | None = None) -> None:
        """As stock's, after a flush, and also for a parameter on SSD, where stock refuses every value. Raises ValueError for a
        wrong number of elements, RuntimeError within a step."""
        self.live.refuse_inside("safe_set_local_fp32_param or safe_set_local_optimizer_state")
        if value.numel() != param.partition_numel():
            raise ValueError(f"got {value.numel()} elements for this rank's share of {param.partition_numel()}")
        self.flush_state()
        if self.steps(param):
            zero_optimizer.set_share(self, param, value, optim_state_key)
            self._note_write()

    def _note_write(self) -> None:
        for call in self.after_writes:
            call()

    def state_dict(self) -> dict[str, Any]:
        """As stock's, after a flush."""
        self.flush_state()
        return super().state_dict()

    def load_state_dict(self, *args: object, **kwargs: object) -> NoReturn:
        """Raises RuntimeError: which bits CPU Adam goes on with is in no such dictionary."""
        raise RuntimeError(_NO_POWERS)
