"""In which memory autograd makes the gradients of a model's ends.

[Note: one block] A gradient of an embedding or a head takes as much memory as the weight, and each micro-batch has one of each.
Where the C library may not keep memory so large, the kernel would map it anew for each, page by page and zeroed. So these are
made in one block, of huge pages where the kernel has them, one micro-batch's after the other's. Two operations make them: a
matrix product, which torch computes into given memory with the same kernel; and the backward of a lookup, which sums the rows
that were looked up. These are few. So torch sums them alone, in the same order, and they are copied into a block of zeros. What
other operations make lies where torch puts it, and so does a gradient that is made while somebody holds the one before.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_vertical.model.tensor_refs import is_alone, key_of

_aten = torch.ops.aten


class GradientBlock(TorchDispatchMode):
    """Within `with block:` large gradients of a backward are made in one block of host memory: see [Note: one block].

    `numels`: elements of the parameters whose gradients may lie there. `above`: bytes; smaller ones lie where torch puts them.
    """

    def __init__(self, numels: Iterable[int], above: int) -> None:
        super().__init__()
        self._numels = frozenset(numels)
        self._above = above
        self._memory: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the block."""
        return 0 if self._memory is None else self._memory.numel()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in the block."""
        return self._memory is not None and key_of(tensor.untyped_storage()) == key_of(self._memory.untyped_storage())

    def drop(self) -> None:
        """Give the block back to the system, once nobody holds a gradient in it."""
        self._memory = None

    def __torch_dispatch__(  # override
        self, func: Any, types: Collection[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = None
        if func is _aten.mm.default and not kwargs:
            made = self._product(*args)
        elif func is _aten.embedding_dense_backward.default and not kwargs:
            made = self._lookup_backward(*args)
        return func(*args, **(kwargs or {})) if made is None else made

    def _product(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
        place = self._place(left, left.shape[0], right.shape[1])
        return None if place is None else _aten.mm.out(left, right, out=place)

    def _lookup_backward(
        self, grad: torch.Tensor, indices: torch.Tensor, num_rows: int, padding: int, by_frequency: bool
    ) -> torch.Tensor | None:
        if (place := self._place(grad, num_rows, grad.shape[-1])) is None:
            return None
        rows, numbers = torch.unique(indices, return_inverse=True)
        place_of_padding = (rows == padding).nonzero()
        number = int(place_of_padding) if place_of_padding.numel() else -1
        summed = _aten.embedding_dense_backward(grad, numbers, rows.numel(), number, by_frequency)
        return place.zero_().index_copy_(0, rows.long(), summed)

    def _place(self, like: torch.Tensor, num_rows: int, num_columns: int) -> torch.Tensor | None:
        """A matrix in the block; None for a result that is to lie elsewhere."""
        numel = num_rows * num_columns
        num_bytes = numel * like.element_size()
        plain = type(like) is torch.Tensor and like.device.type == "cpu" and like.layout is torch.strided
        if not plain or torch.is_grad_enabled() or numel not in self._numels or num_bytes <= self._above:
            return None
        if self._memory is not None and not is_alone(self._memory):  # somebody holds the gradient before
            return None
        if self.num_bytes < num_bytes:
            self._memory = None  # before the larger one is mapped
            pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            pages.madvise(mmap.MADV_HUGEPAGE)
            self._memory = torch.frombuffer(pages, dtype=torch.uint8)
        assert self._memory is not None
        return self._memory[:num_bytes].view(like.dtype).view(num_rows, num_columns)
