"""What two computations have made, told apart without keeping it: bits, norms and a few sums of each tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from ds_vertical.checksums import checksum
from ds_vertical.modulestate import tensors_of
from ds_vertical.reachable import container_of, containers

# relative differences that rounding may make, where bits cannot match (the numerics contract's tolerances)
_TOLERANCES: Final = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-6}


@dataclass(frozen=True)
class Digest:
    """Of one tensor. `sums`: with several patterns of signs, so that tensors of different values differ in one of them."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    bits: Any
    norm: float
    sums: tuple[float, ...]

    def distance(self, other: Digest) -> float:
        """0 for the same bits; else how far the two are apart, in norms of the larger one; inf for other shapes."""
        if (self.shape, self.dtype, self.bits) == (other.shape, other.dtype, other.bits):
            return 0.0
        if self.shape != other.shape or self.dtype != other.dtype:
            return math.inf
        size = max(self.norm, other.norm)
        if not math.isfinite(size) or size == 0:
            return math.inf
        pairs = zip((self.norm, *self.sums), (other.norm, *other.sums), strict=True)
        return max(abs(a - b) for a, b in pairs) / size

    @property
    def tolerance(self) -> float:
        return _TOLERANCES.get(self.dtype, 0.0)


def digest(tensor: torch.Tensor) -> Digest:
    """Of a tensor's elements, wherever they are."""
    flat = tensor.detach().contiguous().view(-1)
    data = flat.cpu().view(torch.uint8).numpy()
    shape = tuple(tensor.shape)
    if not (flat.is_floating_point() and flat.numel()):
        return Digest(shape, tensor.dtype, checksum(data), 0.0, ())
    half = flat.numel() // 2
    parts = (flat[::2], flat[1::2], flat[:half], flat[half:])
    even, odd, front, back = (float(part.sum(dtype=torch.float64)) for part in parts)
    norm = float(torch.linalg.vector_norm(flat, dtype=torch.float64))
    return Digest(shape, tensor.dtype, checksum(data), norm, (even + odd, even - odd, front - back))


def digests_of(value: Any) -> list[Digest]:
    """Of all tensors that a value holds, in objects too."""
    leaves = pytree.tree_leaves(value)
    own = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    objects = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor) and container_of(leaf, given=True) is not None]
    held = containers(objects, given=True) if objects else []
    inside = [tensor for _, tensor in tensors_of((each, each.read()) for each in held)]
    return [digest(tensor) for tensor in (*own, *inside)]


def largest_distance(ours: Sequence[Digest], theirs: Sequence[Digest], least_norm: float = 0.0) -> tuple[int, float]:
    """Which of the tensors differ most beyond rounding, and by how much (-1, 0.0: none). Another number of tensors: infinitely.
    What is smaller than `least_norm` is held against that."""
    if len(ours) != len(theirs):
        return min(len(ours), len(theirs)), math.inf
    worst = -1, 0.0
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        distance = a.distance(b)
        if math.isfinite(distance) and least_norm > max(a.norm, b.norm):
            distance *= max(a.norm, b.norm) / least_norm
        if distance > max(a.tolerance, worst[1]):
            worst = index, distance
    return worst


def total_norm(digests: Iterable[Digest]) -> float:
    return math.sqrt(sum(each.norm**2 for each in digests))
