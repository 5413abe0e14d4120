"""What a value may lose where it is rounded to few bits."""

from __future__ import annotations

import torch

from ds_vertical.distributed.quantize import Quantizer

SLACK = 2.0**-14  # the roundings in fp32 of scale, quotient and product


def error_bound(rows: torch.Tensor, quantizer: Quantizer, result: torch.dtype | None = None) -> torch.Tensor:
    """Of each element, in fp64: absmax of its block / (2 L), and what the result's dtype rounds off. Segments are not known
    here."""
    numel, block = rows.shape[1], quantizer.block
    blocks = torch.nn.functional.pad(rows.double().abs(), (0, -numel % block)).view(len(rows), -1, block)
    absmax = blocks.amax(2).repeat_interleave(block, 1)[:, :numel]
    bound = (absmax / (2 * quantizer.largest)).clamp_min(2.0**-127) * (1 + SLACK)
    result = result or rows.dtype
    if result == torch.float32:
        return bound
    info = torch.finfo(result)
    largest = rows.double().abs() + bound
    return bound + (largest * info.eps / 2).clamp_min(info.smallest_normal * info.eps / 2)
