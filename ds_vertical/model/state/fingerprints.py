"""Fingerprints of tensors' elements, which tell that a tensor was written although torch has not counted it.

`tensor.data.add_()`, NumPy's writes, and some kernels change elements without a trace in the tensor's count of in-place writes.
Where no copy of the elements is kept, their fingerprint is.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
import xxhash

Fingerprint = int | torch.Tensor

LARGEST_NUMEL: Final = 1 << 24  # elements of a tensor of which each one counts
_BLOCK: Final = 1 << 16  # elements; of a larger tensor as many blocks are looked at, evenly spread, as make LARGEST_NUMEL
_SUMMED: Final = 1 << 12  # elements behind one sum
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """Of a tensor's elements now: XXH3 in host memory, sums of its bits as integers on a device, which nobody waits for."""
    blocks = _blocks(tensor.detach())
    if tensor.device.type != "cpu":
        return torch.cat([sums_of_bits(block) for block in blocks])
    found = xxhash.xxh3_64()
    for block in blocks:
        found.update(block.view(torch.uint8).numpy())  # type: ignore[arg-type] - it takes every buffer
    return found.intdigest()


def same_fingerprint(one: Fingerprint, other: Fingerprint) -> bool:
    """Whether two fingerprints are equal."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return one is other or bool(one == other)


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements in one dimension, one behind the other: over its memory, or a copy."""
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))  # view(-1) may have another stride, of one element


def sums_of_bits(flat: torch.Tensor) -> torch.Tensor:
    """The bits of a flat tensor as integers, summed piece by piece."""
    integers = _INTEGERS[min(flat.element_size(), 8)]  # complex numbers are two
    bits = flat.view(integers)
    whole = bits.numel() // _SUMMED * _SUMMED
    return torch.cat([bits[:whole].view(-1, _SUMMED).sum(1, dtype=torch.int64), bits[whole:].sum(dtype=torch.int64).view(1)])


def _blocks(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What is looked at of a tensor, flat and contiguous: nothing twice that lies at one address."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    flat = flat_of(tensor)
    if flat.numel() <= LARGEST_NUMEL:
        return [flat]
    starts = np.linspace(0, flat.numel() - _BLOCK, LARGEST_NUMEL // _BLOCK, dtype=np.int64).tolist()
    return [flat.narrow(0, start, _BLOCK) for start in starts]
