"""DeepSpeed's CPU Adam over parts of chunks, in calls that round as stock's call over its whole sub-group does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ds_vertical.chunks import Cut
from ds_vertical.parts import Part, cuts_within


@dataclass(frozen=True)
class AdamSettings:
    """The hyper-parameters of one optimizer step, taken when the step is: a delayed part runs after the scheduler moved on."""

    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    bias_correction: bool

    @classmethod
    def of_group(cls, group: Mapping[str, Any], step: int) -> AdamSettings:
        beta1, beta2 = group["betas"]
        return cls(step, group["lr"], beta1, beta2, group["eps"], group["weight_decay"], group["bias_correction"])


class CpuAdam:
    """`module`: DeepSpeed's compiled CPU Adam, or a binding with its functions; `opt_id`: the object in it."""

    def __init__(self, module: Any, opt_id: int) -> None:
        self._module = module
        self._opt_id = opt_id

    def update(self, settings: AdamSettings, part: Part, cuts: Sequence[Cut], tensors: Sequence[torch.Tensor]) -> None:
        """Step a part in place. `tensors`: master, gradient, exp_avg, exp_avg_sq of the part, 1-d fp32."""
        for cut in cuts_within(cuts, part.start, part.numel):
            pieces = [tensor.narrow(0, cut.start - part.start, cut.numel) for tensor in tensors]
            if cut.in_place:
                self._call(settings, pieces)
            else:
                self._call_in_scratch(settings, cut, pieces)

    def _call_in_scratch(self, settings: AdamSettings, cut: Cut, pieces: Sequence[torch.Tensor]) -> None:
        scratch = [piece.new_zeros(cut.span) for piece in pieces]
        inside = [whole.narrow(0, cut.offset, cut.numel) for whole in scratch]
        for piece, copy in zip(pieces, inside, strict=True):
            copy.copy_(piece)
        self._call(settings, scratch)
        for piece, copy in zip(pieces, inside, strict=True):
            piece.copy_(copy)

    def _call(self, settings: AdamSettings, tensors: Sequence[torch.Tensor]) -> None:
        s = settings
        rates = (s.step, s.lr, s.beta1, s.beta2, s.eps, s.weight_decay, s.bias_correction)
        self._module.adam_update(self._opt_id, *rates, *tensors)
