"""What the backward of a block need not compute again, counted on fake tensors: operations and bytes of each activation policy.

[Note: counting] A block's forward is recorded once, operation by operation. Of its recompute those are needed from which what
autograd saved follows; "free" leaves out the others. A kept product stands for its operation, and what only that one read is no
longer needed either. Products are kept in the order of operations saved per byte. What is written in place counts with its
storage, so that an operation counts as needed rather than not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ds_vertical.planner.model_shape import CountedMenu, CountedPoint

_Storages = dict[int, int]  # a storage's number -> its bytes


@dataclass(frozen=True)
class _Operation:
    """`moved_bytes`: of what it reads and makes; 0 for a view. `made`: the storages that it makes or writes."""

    flops: float
    moved_bytes: int
    reads: frozenset[int]
    made: _Storages


class BlockRecord(TorchDispatchMode):
    """The operations of one block's forward, from `__enter__` to `__exit__`."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[_Operation] = []
        self._saved: _Storages = {}
        self._alive: list[torch.Tensor] = []  # a storage's number is free again once it is gone

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> object:
        made = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        flops = 0.0 if count is None else float(count(*args, **(kwargs or {}), out_val=made))
        reads, writes = self._storages((args, kwargs)), self._storages(made)
        if not func._schema.is_mutable:
            writes = {number: size for number, size in writes.items() if number not in reads}
        moved = sum(reads.values()) + sum(writes.values()) if writes else 0
        self._operations.append(_Operation(flops, moved, frozenset(reads), writes))
        return made

    def note_attention(self, flops: float, inputs: Iterable[torch.Tensor], output: torch.Tensor) -> None:
        """The operation before this call stood for attention: these are its operations, inputs and output."""
        reads, made = self._storages(list(inputs)), self._storages(output)
        self._operations[-1] = _Operation(flops, sum(reads.values()) + sum(made.values()), frozenset(reads), made)

    def note_saved(self, tensor: torch.Tensor) -> None:
        """Autograd has saved a tensor."""
        self._saved |= self._storages(tensor)

    def menu(self, kind: str, num_blocks: int, resting: Collection[int]) -> CountedMenu:
        """What keeping saves. `resting`: storages that rest anyway, of weights and of the block's inputs."""
        roots = {number: size for number, size in self._saved.items() if number not in resting}
        needed = self._needed(roots, ())
        points = [self._point("free", roots, (), 0)]
        products = [op for op in needed if op.flops and op.made and not any(number in resting for number in op.made)]
        products.sort(key=lambda op: -op.flops / sum(op.made.values()))
        for count in range(1, len(products) + 1):
            kept = {number for op in products[:count] for number in op.made}
            num_bytes = sum(size for op in products[:count] for size in op.made.values())
            points.append(self._point("products", roots, kept, num_bytes, count if count < len(products) else None))
        flops, moved = (sum(getattr(op, name) for op in self._operations) for name in ("flops", "moved_bytes"))
        points.append(CountedPoint("everything", sum(roots.values()), flops, moved, 0))
        return CountedMenu(kind, num_blocks, flops, moved, tuple(points))

    def _point(
        self, policy: Any, roots: _Storages, kept: Collection[int], num_bytes: int, outputs: int | None = None
    ) -> CountedPoint:
        run = self._needed(roots, kept)
        flops, moved = (
            sum(getattr(op, name) for op in self._operations) - sum(getattr(op, name) for op in run)
            for name in ("flops", "moved_bytes")
        )
        return CountedPoint(policy, num_bytes, flops, moved, len(run), outputs)

    def _needed(self, roots: Collection[int], kept: Collection[int]) -> list[_Operation]:
        """The operations that a recompute has to run, with the storages `kept` at hand."""
        wanted, run = set(roots), []
        for op in reversed(self._operations):
            if any(number in wanted for number in op.made) and not all(number in kept for number in op.made):
                run.append(op)
                wanted |= op.reads
        return run

    def _storages(self, values: object) -> _Storages:
        tensors = [value for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]
        self._alive += tensors
        return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
