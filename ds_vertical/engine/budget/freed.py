"""What the backwards of a run make and free again."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from ds_vertical.compat import accelerator, zero_params
from ds_vertical.engine.budget.kernel_copies import are_summed_in_fp32
from ds_vertical.model.compiled_blocks import is_compiled
from ds_vertical.model.kept.kinds import runs_others_code
from ds_vertical.model.layers import LayerMap
from ds_vertical.offload.grad_accumulator import LARGE
from ds_vertical.planner.model_shape import FreedBytes, kernel_copy_bytes
from ds_vertical.schedule.events import Unit


def freed_bytes(layers: LayerMap, stepped: Collection[int], param_bytes: int, rounds: bool) -> FreedBytes:
    """A unit's gradients as autograd makes them, and a copy of the largest one in fp32, where a kernel sums it so or the engine
    `rounds` gradients ahead of their sum; of the largest parameter that is not trained, a copy in the kernel's order.
    `stepped`: ids of the parameters that the optimizer has."""
    params = [param for members in layers.units.values() for param in members]
    shapes, dtypes = map(zero_params.full_shape, params), _dtypes(params, param_bytes)
    in_fp32 = rounds or not accelerator.is_one_memory() or are_summed_in_fp32(shapes, dtypes)

    def most_of(units: Sequence[Unit]) -> int:
        sizes = [(zero_params.full_numel(param), id(param) in stepped) for unit in units for param in layers.units[unit]]
        trained, frozen = (max((size for size, steps in sizes if steps is each), default=0) for each in (True, False))
        made = max(_made_at_once(layers, unit, stepped) for unit in units)
        return made * param_bytes + kernel_copy_bytes(trained, frozen, param_bytes, in_fp32)

    of_layers = most_of(range(layers.num_layers))
    return FreedBytes(most_of([*layers.units]), of_layers, of_layers)


def _dtypes(params: Sequence[nn.Parameter], param_bytes: int) -> set[torch.dtype]:
    """Of the gradients; those that are possible where DeepSpeed has yet to convert the model."""
    found = {param.dtype for param in params if param.element_size() == param_bytes}
    return found or {torch.bfloat16, torch.float16}


def _made_at_once(layers: LayerMap, unit: Unit, stepped: Collection[int]) -> int:
    """Elements of a unit's gradients that are there at a time: see [Note: as they are made] in `grad_accumulator`. A compiled
    block makes all of its gradients in one operation. `stepped`: ids of the parameters that the optimizer has."""
    params = [param for param in layers.units[unit] if id(param) in stepped]
    sizes = [zero_params.full_numel(param) for param in params]
    blocks = layers.layers[unit] if isinstance(unit, int) else ()
    compiled = any(is_compiled(module) for block in blocks for module in layers.blocks[block].module.modules())
    if not isinstance(unit, int):  # those of the suffix have been added by the time that the others are made
        behind = sum(size for param, size in zip(params, sizes, strict=True) if id(param) in layers.used_behind)
        return max(behind, sum(sizes) - behind)
    if compiled or runs_others_code(layers, unit):
        return sum(sizes)
    return sum(size for size in sizes if size < LARGE) + max((size for size in sizes if size >= LARGE), default=0)
