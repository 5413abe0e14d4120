"""What two computations have made, told apart without keeping it: bits, norm and a few random projections of each tensor.

[Note: projections] A projection of x is its product with a vector r of random numbers of mean 0 and variance 1. Those of two
tensors differ by r * (x - y), whose square is |x - y|^2 in the mean; so the root of the mean square over a few r estimates
|x - y|, wherever in the tensors they differ. With eight it is 0.3 to 1.8 times |x - y| in all but one of a thousand cases.
The numbers of r are those of one table of _ROW rows, times a factor for each piece of a tensor that long: no two elements have
the same. All of it is made from fixed seeds and summed in fp64 on the CPU, so that every rank and device has the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from ds_vertical.io.checksums import checksum
from ds_vertical.model.state.containers import container_of, containers
from ds_vertical.model.state.module_state import tensors_of

# relative differences that rounding may make, where bits cannot match (the numerics contract's tolerances)
_TOLERANCES: Final = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-6}


_FP16_STEP: Final = 2.0**-24  # between two numbers next to 0; rounding goes half as far, an estimate twice as far as that
_NUM_PROJECTIONS: Final = 8
_ROW: Final = 1 << 12
_ROWS: Final = 16  # of a tensor, that are in fp64 at a time: within a core's cache
_SEEDS: Final = 20261124, 20261125  # of the table, of the factors
_SHARE: Final = 2.0**-3  # of the norm of the gradients of a module: what smaller ones of it are held against


@dataclass(frozen=True)
class Digest:
    """Of one tensor. See [Note: projections]."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    bits: Any
    norm: float
    projections: tuple[float, ...]

    def distance(self, other: Digest) -> float:
        """0 for the same values; else an estimate of how far the two are apart, in norms of the larger one; inf for other
        shapes, and for numbers that have no norm."""
        if (self.shape, self.dtype, self.bits) == (other.shape, other.dtype, other.bits):
            return 0.0
        if self.shape != other.shape or self.dtype != other.dtype or not self.projections:
            return math.inf
        if not (math.isfinite(self.norm) and math.isfinite(other.norm)):
            return math.inf
        size = max(self.norm, other.norm)
        if size == 0:  # 0 and -0
            return 0.0
        apart = [(a - b) / size for a, b in zip(self.projections, other.projections, strict=True)]
        return math.sqrt(sum(each**2 for each in apart) / len(apart))

    @property
    def tolerance(self) -> float:
        """The distance up to which rounding of its dtype is no difference; 0: bits count."""
        return _TOLERANCES.get(self.dtype, 0.0)

    @property
    def epsilon(self) -> float:
        """Of its dtype, or of fp32 where that is finer; 0: bits count."""
        return min(torch.finfo(self.dtype).eps, 2.0**-23) if self.dtype in _TOLERANCES else 0.0


def digest(tensor: torch.Tensor, made_in: torch.dtype | None = None) -> Digest:
    """Of a tensor's elements, wherever they are. `made_in`: the dtype whose rounding they have, where that is another."""
    flat = tensor.detach().contiguous().view(-1).cpu()
    bits = checksum(flat.view(torch.uint8).numpy())
    if not flat.is_floating_point():
        return Digest(tuple(tensor.shape), tensor.dtype, bits, 0.0, ())
    return Digest(tuple(tensor.shape), made_in or tensor.dtype, bits, *_projected(flat))


def _projected(flat: torch.Tensor) -> tuple[float, tuple[float, ...]]:
    """The norm of a tensor and its projections. See [Note: projections]."""
    table = _table()
    if flat.numel() <= _ROW:
        values = flat.to(torch.float64)
        return float(values.norm()), tuple((values @ table[: flat.numel()]).tolist())
    generator = torch.Generator("cpu").manual_seed(_SEEDS[1])
    squares, sums = 0.0, torch.zeros(_NUM_PROJECTIONS, dtype=torch.float64, device="cpu")
    for piece in flat.split(_ROW * _ROWS):
        values = piece.to(torch.float64)
        squares += float(torch.dot(values, values))
        shape = _ROWS, _NUM_PROJECTIONS
        signed = torch.rand(shape, dtype=torch.float64, device="cpu", generator=generator) - 0.5
        factors = _scaled(signed + 0.5 * signed.sign())  # of either sign, none near 0, no two alike
        num_rows, rest = divmod(values.numel(), _ROW)
        if num_rows:
            sums += (values[: num_rows * _ROW].view(num_rows, _ROW) @ table * factors[:num_rows]).sum(0)
        if rest:
            sums += values[num_rows * _ROW :] @ table[:rest] * factors[num_rows]
    return math.sqrt(squares), tuple(sums.tolist())


@functools.cache
def _table() -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(_SEEDS[0])
    return _scaled(torch.randn((_ROW, _NUM_PROJECTIONS), dtype=torch.float64, device="cpu", generator=generator))


def _scaled(rows: torch.Tensor) -> torch.Tensor:
    """With the mean square of each row 1: what differs in one element is estimated all the better."""
    return rows * (math.sqrt(rows.shape[1]) / rows.norm(dim=1, keepdim=True))


def distance_from_sum(total: Digest, parts: Sequence[Digest]) -> float:
    """How far a tensor is from the sum of others, of which there are digests alone: projections of tensors add up to that of
    their sum. In norms of the largest of all; inf for other numbers of elements, and where only one of the two has a norm. That
    of a sum in fp16 need not have one: it may overflow. Next to 0 fp16 has only multiples of _FP16_STEP: one for each element
    of each part is left out of the distance."""
    if any(math.prod(part.shape) != math.prod(total.shape) for part in parts):
        return math.inf
    if not math.isfinite(total.norm) or not all(math.isfinite(part.norm) for part in parts):
        same = any(not math.isfinite(part.norm) for part in parts) and not math.isfinite(total.norm)
        return 0.0 if same or total.dtype == torch.float16 else math.inf
    size = max([total.norm, *(part.norm for part in parts)])
    if size == 0 or not total.projections:
        return 0.0
    sums = (sum(numbers) for numbers in zip(*(part.projections for part in parts), strict=True))
    expected = tuple(sums) or (0.0,) * len(total.projections)
    apart = [(a - b) / size for a, b in zip(total.projections, expected, strict=True)]
    distance = math.sqrt(sum(each**2 for each in apart) / len(apart))
    if total.dtype != torch.float16:
        return distance
    return max(0.0, distance - _FP16_STEP * math.sqrt(math.prod(total.shape)) * len(parts) / size)


def digests_of(value: Any) -> list[Digest]:
    """Of all tensors that a value holds, in objects too."""
    leaves = pytree.tree_leaves(value)
    own = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    objects = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor) and container_of(leaf, given=True) is not None]
    held = containers(objects, given=True) if objects else []
    inside = [tensor for _, tensor in tensors_of((each, each.read()) for each in held)]
    return [digest(tensor) for tensor in (*own, *inside)]


def largest_distance(ours: Sequence[Digest], theirs: Sequence[Digest]) -> tuple[int, float]:
    """Which of the tensors differ most beyond rounding, and by how much (-1, 0.0: none); infinitely where their numbers do."""
    if len(ours) != len(theirs):
        return min(len(ours), len(theirs)), math.inf
    worst = -1, 0.0
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        distance = a.distance(b)
        if distance > max(a.tolerance, worst[1]):
            worst = index, distance
    return worst


def wrong_gradients(ours: Mapping[str, Digest], theirs: Mapping[str, Digest], largest: float = 0.0) -> dict[str, float]:
    """Which of some parameters' gradients differ beyond rounding, by name, and by how much of their own norm. `largest`: of the
    norms of the model's gradients.

    [Note: small gradients] The gradient of an attention's key bias is 0 in exact arithmetic, since softmax takes no notice of
    what is added to all of a row. What is computed is what rounding has left of a sum over the same terms as the key weight's
    gradient, and the next order of summation leaves something else: in bf16 up to 1.2e-3 of the norm of both gradients, in
    fp32 up to 1e-7 (measured over widths 48 to 512, 5 to 128 tokens). So a gradient that is smaller than an eighth of the norm
    of the gradients of its module (the parameters of the same nn.Module) is held against that eighth: in bf16 and fp16 2^-9 of
    the module's norm, in fp32 1.25e-6. Whatever is larger is held against itself, and so is a module's only one.

    A module may have nothing but what rounding has left: in conditional_detr, made small, the query and key projections of the
    encoder, whose gradients are apart by up to twice their own norm, which is 8e-11 of the largest gradient's. So a difference
    of up to 2^-30 of that is none, which is 2^-7 of fp32's epsilon. No more is let pass in bf16 and fp16, where this was not
    measured; in fp64 it is 2^-59.
    """
    squares: dict[str, float] = {}
    for name, each in theirs.items():
        squares[_module_of(name)] = squares.get(_module_of(name), 0.0) + each.norm**2
    wrong: dict[str, float] = {}
    for name in dict.fromkeys((*theirs, *ours)):
        a, b = ours.get(name), theirs.get(name)
        distance = math.inf if a is None or b is None else a.distance(b)
        if a is not None and b is not None and math.isfinite(distance):
            size, least = max(a.norm, b.norm), _SHARE * math.sqrt(squares[_module_of(name)])
            if (
                distance * min(1.0, size / least if least else 1.0) <= a.tolerance
                or distance * size <= 2**-7 * a.epsilon * largest
            ):
                continue
        if distance > 0:
            wrong[name] = distance
    return wrong


def _module_of(name: str) -> str:
    """The path of the module that a parameter belongs to, whatever stands for it there."""
    return name.partition(".parametrizations.")[0] if ".parametrizations." in name else name.rpartition(".")[0]
