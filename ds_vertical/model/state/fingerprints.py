"""Fingerprints of tensors' elements, which tell that a tensor was written although torch has not counted it.

`tensor.data.add_()`, NumPy's writes, and some kernels change elements without a trace in the tensor's count of in-place writes.
Where no copy of the elements is kept, their fingerprint is. A fingerprint is of the whole tensor, or of pieces of it.

[Note: others' memory] A tensor that is a part of larger memory has no fingerprint: it may lie in a buffer in which a parameter
was when the tensor was made (`self.seen = self.weight.detach()`), and another one is now. Nor has a subclass that wraps other
tensors. Both have UNREAD in its place.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch
import xxhash
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Fingerprint = int | torch.Tensor

LARGEST_NUMEL: Final = 1 << 24  # elements of a tensor that are looked at, at most
_MOST_PIECES: Final = 1 << 8  # of a tensor of which not all elements are looked at; they are evenly spread
_PIECE: Final = 1 << 12  # elements of a piece, at least, unless there are two pieces only
_SUMMED: Final = 1 << 12  # elements behind one sum
UNREAD: Final = 0  # of which nothing is looked at: see [Note: others' memory]
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def fingerprint(tensor: torch.Tensor, share: float = 1.0) -> Fingerprint:
    """Of a tensor's elements now: XXH3 in host memory, sums of its bits as integers on a device, which nobody waits for.
    `share`: of what is looked at of a tensor by itself."""
    if not _is_read(tensor):
        return UNREAD
    pieces = _pieces(tensor.detach(), share)
    if tensor.device.type != "cpu":
        return torch.cat([sums_of_bits(piece) for piece in pieces])
    found = xxhash.xxh3_64()
    for piece in pieces:
        found.update(piece.view(torch.uint8).numpy())  # type: ignore[arg-type] - it takes every buffer
    return found.intdigest()


def num_bytes_read(tensor: torch.Tensor) -> int:
    """How much of a tensor its fingerprint is of, where nothing else asks for one."""
    numel = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return min(numel, LARGEST_NUMEL) * tensor.element_size() if _is_read(tensor) else 0


def same_fingerprint(one: Fingerprint, other: Fingerprint) -> bool:
    """Whether two fingerprints are equal."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return one is other or bool(one == other)


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements in one dimension, one behind the other: over its memory, or a copy."""
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))  # view(-1) may have another stride, of one element


def sums_of_bits(flat: torch.Tensor) -> torch.Tensor:
    """The bits of a flat tensor as integers, summed piece by piece, each times an odd number of its place: elements that change
    places give another sum."""
    integers = _INTEGERS[min(flat.element_size(), 8)]  # complex numbers are two
    bits = flat.view(integers)
    whole = bits.numel() // _SUMMED * _SUMMED
    weights = torch.arange(1, 2 * _SUMMED, 2, device=flat.device)
    rest = bits[whole:]
    return torch.cat([(bits[:whole].view(-1, _SUMMED) * weights).sum(1), (rest * weights[: rest.numel()]).sum().view(1)])


def _span(tensor: torch.Tensor) -> int:
    """Elements from a tensor's first to its last one in memory, both included."""
    return (
        1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.numel()
        else 0
    )


def _is_read(tensor: torch.Tensor) -> bool:
    is_plain = not (is_traceable_wrapper_subclass(tensor) or tensor.is_conj() or tensor.is_neg())
    return is_plain and _has_own_memory(tensor)


def _has_own_memory(tensor: torch.Tensor) -> bool:
    """Whether all memory below a tensor is the tensor's."""
    return tensor.untyped_storage().nbytes() <= _span(tensor) * tensor.element_size()


def _pieces(tensor: torch.Tensor, share: float) -> list[torch.Tensor]:
    """What is looked at of a tensor, flat and contiguous: nothing twice that lies at one address."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    is_dense = _span(tensor) == tensor.numel()  # then in the order of memory, without a copy
    flat = tensor.as_strided((tensor.numel(),), (1,)) if is_dense else flat_of(tensor)
    most = int(share * min(flat.numel(), LARGEST_NUMEL))
    if flat.numel() <= most:
        return [flat]
    count = max(2, min(_MOST_PIECES, most // _PIECE))
    length = max(1, most // count)
    starts = np.linspace(0, flat.numel() - length, count, dtype=np.int64).tolist()
    return [flat.narrow(0, start, length) for start in starts]
