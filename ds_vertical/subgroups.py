"""ZeRO-3 whose sub-groups are chunks: parameters of one unit (a layer, or what lies outside the layers).

Overridden private methods of DeepSpeed are marked `override` and listed in `compat.OVERRIDES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import nn

from ds_vertical import compat, compat_state
from ds_vertical.config import ConfigError
from ds_vertical.layers import LayerMap, Unit
from ds_vertical.routes import StateRoutes
from ds_vertical.transfer import Ticket


def check_optimizer(optimizer: Any) -> None:
    """Raise ConfigError unless `optimizer` is DeepSpeed's CPU Adam, whose rounding the chunks reproduce."""
    if type(optimizer) is not DeepSpeedCPUAdam:
        raise ConfigError(
            f"optimizer: got {type(optimizer).__name__}; vertical_schedule needs DeepSpeed's CPU Adam: write"
            ' "optimizer": {"type": "AdamW", ...} with zero_optimization.offload_optimizer set, and pass no other optimizer'
        )


class ChunkedStage3(StateRoutes):
    """Stage 3 over the units of `layers`."""

    def __init__(self, *args: Any, layers: LayerMap, **kwargs: Any) -> None:
        self._layer_map = layers
        self._unit_of = layers.unit_of()
        self._stock_groups: list[list[compat.ZeroParam]] = []
        self._persistent: set[int] = set()
        super().__init__(*args, **kwargs)
        compat_state.place_as_stock(self)
        self._stepped = {id(param) for chunk in self.fp16_groups for param in chunk}

    def _create_fp16_sub_groups(self, params_group: list[nn.Parameter]) -> list[list[nn.Parameter]]:  # override
        """Chunks: parameters of one unit, split by sub_group_size, those that stay on the device apart from the others.
        Stock's own sub-groups are remembered for the numerics."""
        self._stock_groups += super()._create_fp16_sub_groups(params_group)
        self._persistent |= {id(param) for param in params_group if compat.is_persistent(param)}
        chunks: list[list[nn.Parameter]] = []
        for unit in self._layer_map.in_chunk_order(self.params_in_nvme_and_cpu):
            members = [param for param in params_group if self._unit_of[id(param)] == unit]
            for stays in (False, True):
                if chosen := [param for param in members if (id(param) in self._persistent) == stays]:
                    chunks += super()._create_fp16_sub_groups(chosen)
        return chunks

    def steps(self, param: nn.Parameter) -> bool:
        """Whether the parameter belongs to the optimizer."""
        return id(param) in self._stepped

    def chunks_of(self, unit: Unit) -> list[int]:
        """Sub-group numbers of a unit's chunks, ascending."""
        return [index for index, chunk in enumerate(self.fp16_groups) if self._unit_of[id(chunk[0])] == unit]

    def is_persistent_chunk(self, index: int) -> bool:
        """Whether a chunk's parameters stay on the device, where they must have their new values once a step is over."""
        return id(self.fp16_groups[index][0]) in self._persistent

    def scheduled_chunks_of(self, unit: Unit) -> list[int]:
        """A unit's chunks without persistent ones: those that the schedule steps, early or in the next forward."""
        return [index for index in self.chunks_of(unit) if not self.is_persistent_chunk(index)]

    def step_persistent(self, step: Callable[[Unit, list[int]], Ticket | None]) -> None:
        """Step what stays on the device, and wait for it. `step` issues a unit's chunks."""
        tickets = []
        for unit in self._layer_map.units:
            if indices := list(filter(self.is_persistent_chunk, self.chunks_of(unit))):
                tickets.append(step(unit, indices))
        for ticket in tickets:
            if ticket is not None:
                ticket.wait()

    def gather_persistent(self, settled: bool = False) -> None:
        """Bring what stays on the device back there, with its new values: users read it without DeepSpeed, on one rank alone,
        too. Collective where it is not there. `settled`: nothing is due, of those either that count as persistent and lay on
        SSD when chunks were made."""
        with self.inside():
            compat_state.gather_persistent(self, lambda param: settled or not self._waits(param))

    def _waits(self, param: compat.ZeroParam) -> bool:
        return compat.is_on_ssd(param) or (self.steps(param) and id(param) not in self._persistent)

    def in_chunk_order(self, unit: Unit) -> list[nn.Parameter]:
        """The unit's parameters that the optimizer has, chunk by chunk: so a chunk's gradient sums are neighbours."""
        return [param for index in self.chunks_of(unit) for param in self.fp16_groups[index]]

    def reduce_for_others(self, unit: Unit) -> None:
        """Take part in the reduction of a unit's gradients with zeros: this rank's part of the step has failed."""
        params, dtype = self.in_chunk_order(unit), self.gradient_accumulation_dtype
        if params:
            device = compat.device_name()
            compat_state.reduce(self, params, [torch.zeros(compat.full_numel(p), dtype=dtype, device=device) for p in params])
