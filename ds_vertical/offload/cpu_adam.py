"""DeepSpeed's CPU Adam over parts of chunks, in calls that round as stock's call over its whole sub-group does.

[Note: powers of beta] One object of CPU Adam keeps beta1^t and beta2^t of its last call: multiplied by beta where the step is
the next one, pow() where the betas are others or the step is any other. The two differ in the last bits. So the bits depend
on the order of the calls (groups with betas of their own take turns) and on those before (after a resume there are none).
`Powers` follows that rule without calling anything; an update says by its `anchor` which powers it is to have, and `CpuAdam`
makes the object have them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ds_vertical.compat.ops.load import AdamModule
from ds_vertical.offload.chunking import LANE, Cut, Part, cuts_within


@dataclass(frozen=True)
class Powers:
    """beta1^t and beta2^t of an object of CPU Adam: pow(beta, anchor), then multiplied by beta for each step up to `step`."""

    step: int
    beta1: float
    beta2: float
    anchor: int

    def after(self, step: int, beta1: float, beta2: float) -> Powers:
        """Those that an update leaves; `Adam_Optimizer::IncrementStep` in DeepSpeed's cpu_adam.h."""
        same = _float32(beta1) == _float32(self.beta1) and _float32(beta2) == _float32(self.beta2)
        return Powers(step, beta1, beta2, self.anchor if same and step in (self.step, self.step + 1) else step)

    @classmethod
    def made_with(cls, betas: tuple[float, float]) -> Powers:
        """Those of a new object."""
        return cls(0, betas[0], betas[1], 0)


def _float32(value: float) -> float:
    return ctypes.c_float(value).value


@dataclass(frozen=True)
class AdamSettings:
    """The hyper-parameters of one optimizer step, taken when the step is: a delayed part runs after the scheduler moved on.
    `anchor`: see [Note: powers of beta]."""

    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    bias_correction: bool
    anchor: int = 0

    @classmethod
    def of_group(cls, group: Mapping[str, Any], powers: Powers) -> AdamSettings:
        """Of a step whose powers are known."""
        rates = (group["eps"], group["weight_decay"], group["bias_correction"])
        return cls(powers.step, group["lr"], powers.beta1, powers.beta2, *rates, powers.anchor)

    @property
    def powers(self) -> Powers:
        """Those that the object of CPU Adam has after this step."""
        return Powers(self.step, self.beta1, self.beta2, self.anchor)


class CpuAdam:
    """`module`: DeepSpeed's compiled CPU Adam, or a binding with its functions; `opt_id`: the object in it, which no other
    code calls; `betas`: those that it was made with. Not for several threads at a time."""

    def __init__(self, module: AdamModule, opt_id: int, betas: tuple[float, float]) -> None:
        self._module = module
        self._is_closed = False
        self._opt_id = opt_id
        self._powers = Powers.made_with(betas)

    def close(self) -> None:
        """Destroy the object: a later `update` raises ValueError. Twice is harmless."""
        if not self._is_closed:
            self._module.destroy_adam(self._opt_id)
        self._is_closed = True

    def update(self, settings: AdamSettings, part: Part, cuts: Sequence[Cut], tensors: Sequence[torch.Tensor]) -> None:
        """Step a part in place. `tensors`: master, gradient, exp_avg, exp_avg_sq of the part, 1-d fp32."""
        if self._powers.after(settings.step, settings.beta1, settings.beta2).anchor != settings.anchor:
            self._replay(settings)
        self._powers = settings.powers
        for cut in cuts_within(cuts, part.start, part.numel):
            pieces = [tensor.narrow(0, cut.start - part.start, cut.numel) for tensor in tensors]
            if cut.in_place:
                self._call(settings, pieces)
            else:
                self._call_in_scratch(settings, cut, pieces)

    def _replay(self, settings: AdamSettings) -> None:
        """Give the object the powers that the settings ask for, by updates of nothing: see [Note: powers of beta]."""
        nothing = [torch.zeros(LANE, dtype=torch.float32) for _ in range(4)]
        far = settings.step + 2  # not next to the anchor, so that the anchor comes from pow()
        for step in (far, *range(settings.anchor, settings.step + 1)):
            self._call(replace(settings, step=step), nothing)

    def _call_in_scratch(self, settings: AdamSettings, cut: Cut, pieces: Sequence[torch.Tensor]) -> None:
        scratch = [piece.new_zeros(cut.span) for piece in pieces]
        inside = [whole.narrow(0, cut.offset, cut.numel) for whole in scratch]
        for piece, copy in zip(pieces, inside, strict=True):
            copy.copy_(piece)
        self._call(settings, scratch)
        for piece, copy in zip(pieces, inside, strict=True):
            piece.copy_(copy)

    def _call(self, settings: AdamSettings, tensors: Sequence[torch.Tensor]) -> None:
        torch.get_num_threads()  # a thread takes its number of cores when torch asks, and the kernel does not: `host`
        s = settings
        rates = (s.step, s.lr, s.beta1, s.beta2, s.eps, s.weight_decay, s.bias_correction)
        self._module.adam_update(self._opt_id, *rates, *tensors)
