"""DeepSpeed's ZeRO stage-3 optimizer with chunks along layers and a step taken chunk by chunk.

Overridden private methods of DeepSpeed are marked `override` and listed in `compat.OVERRIDES`.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import nn

from ds_vertical import compat, compat_state, files
from ds_vertical.chunks import Cut, Piece, adam_cuts
from ds_vertical.config import ConfigError
from ds_vertical.layers import LayerMap, Unit

# Buffers that stock's pipelined swapper needs to hold one chunk, read the next and write the last (4 + 4 + 3, rounded up).
_PIPELINED_BUFFERS = 12


class CutAdam:
    """Stands in for CPU Adam's module handle and cuts each call as `chunks` says; everything else passes through."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._cuts: Sequence[Cut] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    @contextlib.contextmanager
    def cutting(self, cuts: Sequence[Cut]) -> Iterator[None]:
        """Within the block every `adam_update` is cut into `cuts`."""
        self._cuts = cuts
        try:
            yield
        finally:
            self._cuts = None

    def adam_update(self, *args: Any) -> None:
        """CPU Adam over flat tensors (param, grad, exp_avg, exp_avg_sq are the last four arguments)."""
        settings, tensors = args[:-4], args[-4:]
        cuts = self._cuts if self._cuts is not None else (Cut(0, tensors[0].numel(), tensors[0].numel(), 0),)
        for cut in cuts:
            parts = [tensor.narrow(0, cut.start, cut.numel) for tensor in tensors]
            if cut.in_place:
                self._module.adam_update(*settings, *parts)
                continue
            scratch = [part.new_zeros(cut.span) for part in parts]
            inside = [whole.narrow(0, cut.offset, cut.numel) for whole in scratch]
            for part, copy in zip(parts, inside, strict=True):
                copy.copy_(part)
            self._module.adam_update(*settings, *scratch)
            for part, copy in zip(parts, inside, strict=True):
                part.copy_(copy)


def check_optimizer(optimizer: Any) -> None:
    """Raise ConfigError unless `optimizer` is DeepSpeed's CPU Adam, whose rounding the chunks reproduce."""
    if type(optimizer) is not DeepSpeedCPUAdam:
        raise ConfigError(
            f"optimizer: got {type(optimizer).__name__}; vertical_schedule needs DeepSpeed's CPU Adam: write"
            ' "optimizer": {"type": "AdamW", ...} with zero_optimization.offload_optimizer set, and pass no other optimizer'
        )


class VerticalStage3(DeepSpeedZeroOptimizer_Stage3):
    """Stage 3 whose sub-groups are chunks of one unit (a layer, or what lies outside the layers).

    A step is `open_step` (norm, overflow), `step_unit` for each unit, then `step`, which concludes it. Numbers are those of
    stock's own sub-groups: the norm is combined in stock's grouping and CPU Adam is cut as in `chunks`.
    """

    def __init__(self, *args: Any, layers: LayerMap, **kwargs: Any) -> None:
        self._layers = layers
        self._unit_of = layers.unit_of()
        self._stock_groups: list[list[compat.ZeroParam]] = []
        self._norm: torch.Tensor | None = None
        self._opened = False
        self._timer_names: set[str] = set()
        super().__init__(*args, **kwargs)
        self._stepped = {id(param) for chunk in self.fp16_groups for param in chunk}
        self._cuts = self._cut_chunks()
        adam: Any = self.optimizer
        self._adam = CutAdam(adam.ds_opt_adam)
        adam.ds_opt_adam = self._adam

    # ---- chunks

    def _create_fp16_sub_groups(self, params_group: list[nn.Parameter]) -> list[list[nn.Parameter]]:  # override
        """Chunks: parameters of one unit, split by sub_group_size. Stock's own sub-groups are remembered for the numerics."""
        self._stock_groups += super()._create_fp16_sub_groups(params_group)
        chunks: list[list[nn.Parameter]] = []
        for unit in self._layers.units:
            members = [param for param in params_group if self._unit_of[id(param)] == unit]
            if members:
                chunks += super()._create_fp16_sub_groups(members)
        return chunks

    def _cut_chunks(self) -> list[tuple[Cut, ...]]:
        place: dict[int, tuple[int, int]] = {}
        for group in self._stock_groups:
            total, offset = sum(param.partition_numel() for param in group), 0
            for param in group:
                place[id(param)] = (offset, total)
                offset += param.partition_numel()
        return [adam_cuts([Piece(p.partition_numel(), *place[id(p)]) for p in chunk]) for chunk in self.fp16_groups]

    def steps(self, param: nn.Parameter) -> bool:
        """Whether the parameter belongs to the optimizer."""
        return id(param) in self._stepped

    def chunks_of(self, unit: Unit) -> list[int]:
        """Sub-group numbers of a unit's chunks, ascending."""
        return [index for index, chunk in enumerate(self.fp16_groups) if self._unit_of[id(chunk[0])] == unit]

    def _create_next_swappable_fp32_groups(self) -> None:  # override
        """Stock's swapper reads one chunk ahead in the order of the step: unit by unit."""
        order = [index for unit in self._layers.units for index in self.chunks_of(unit)]
        following: list[torch.Tensor | None] = [None] * len(order)
        upcoming = None
        for index in reversed(order):
            following[index] = upcoming
            if compat_state.is_chunk_on_ssd(self, index):
                upcoming = self.fp32_partitioned_groups_flat[index]
        self.next_swappable_fp32_partitioned_groups = following

    # ---- files

    def initialize_ds_offload(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """As stock, then check every parameter file that zero.Init wrote before anything is read from one."""
        offload = super().initialize_ds_offload(module, *args, **kwargs)
        written = [compat.swap_file(param) for param in module.parameters() if compat.is_on_ssd(param)]
        files.check_files({file.path: file.num_bytes for file in written})
        return offload

    def _configure_tensor_swapping(self, offload_optimizer_config: Any, aio_config: Any) -> None:  # override
        """As stock with enough buffers for several chunks, then preallocate every file of the optimizer."""
        config = offload_optimizer_config
        if config.pipeline and config.buffer_count < _PIPELINED_BUFFERS and len(self.fp16_groups) > 1:
            config = config.model_copy(update={"buffer_count": _PIPELINED_BUFFERS})
        super()._configure_tensor_swapping(config, aio_config)
        compat_state.align_gradients(self)
        files.preallocate(compat_state.optimizer_files(self))

    # ---- gradients

    def create_reduce_and_remove_grad_hooks(self) -> None:  # override
        """None: the schedule reduces each unit once. (Stock also reads every parameter here to install its hooks.)"""
        self.leaf_parameters = defaultdict(list)

    def reduce_unit(self, params: Sequence[nn.Parameter], sums: Sequence[torch.Tensor]) -> None:
        """Average a unit's summed gradients over the ranks and hand each rank's share to its chunk.

        `params`: trainable parameters; `sums`: their flat gradient sums in the accumulation dtype (overwritten).
        """
        if params:
            compat_state.reduce_and_hand_over(self, params, sums)

    def _get_norm_groups(self) -> list[torch.Tensor]:  # override
        """Stock rounds the norm to fp32 once per sub-group, so it is combined in stock's grouping, not in chunks."""
        return [compat_state.group_norm(self, group) for group in self._stock_groups]

    # ---- the step

    def open_step(self) -> None:
        """Take the global norm and decide whether the step is skipped (non-finite norm, overflow)."""
        self._timer_names = set()
        self._norm = compat_state.open_step(self)
        self._opened = True

    def step_unit(self, unit: Unit) -> None:
        """Step a unit's chunks: read state, CPU Adam, write state and parameters. Does nothing in a skipped step."""
        if not self._opened:
            raise RuntimeError(f"step of unit {unit} before the norm is known")
        if self._norm is not None:
            for index in self.chunks_of(unit):
                compat_state.step_sub_group(self, index, self._norm, self._timer_names)

    def _optimizer_step(self, sub_group_id: int) -> None:  # override
        with self._adam.cutting(self._cuts[sub_group_id]):
            super()._optimizer_step(sub_group_id)

    def step(self, closure: Any = None) -> None:  # override
        """Conclude the step that the schedule took; the engine calls this where stock would take the whole step."""
        if not self._opened:
            raise RuntimeError("optimizer.step() outside a schedule: call engine.train_batch(data_iter)")
        self._opened = False
        if self._norm is not None:
            self._norm = None
            compat_state.close_step(self, self._timer_names)
