"""References to a tensor: may its memory be taken away without any code reading it meanwhile?

[Note: holders] Python counts the references to a tensor. Torch counts its own references (autograd's saved tensors), and the
tensors over a storage: the leaf that stands for a block's output, and one more for each identity node that it has passed
(`module_hooks`). If these counts equal the references that this package holds, no other code can reach the tensor.

While a forward is parked, its frames hold the tensors that it hands to the next block, and frames cannot be asked which. But
Python's garbage collector tracks every other holder. If only tuples, lists, dicts and closures lead to a tensor, and nothing
leads to those, then only frames hold it: those of this forward. That search takes some tenths of a second, so its verdict is
kept for the same layer, place in the code and numbers of references.

The search goes from holder to holder, _MOST_ROUNDS times at most. Where more holders lead to the tensor in a row, or each round
makes new ones, as a tool does that has replaced `gc.get_referrers` by a function of its own, the verdict is that others hold
the tensor: then it stays where it is.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Iterable, Sequence
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any, Final

import torch
from torch.autograd.graph import get_gradient_edge

_Site = tuple[int, tuple[int, ...], tuple[tuple[int, int], ...]]


def has_others(tensor: torch.Tensor, known: int) -> bool:
    """Whether more than `known` variables and containers refer to the tensor, the caller's included."""
    held_by_torch = _held_by_torch() if tensor._use_count() > 1 else 0  # type: ignore[attr-defined]
    return sys.getrefcount(tensor) - _OWN > known + held_by_torch


@functools.cache
def _held_by_torch() -> int:
    """References to a tensor in Python that torch adds where it holds the tensor itself, as a leaf's accumulator does."""
    leaf = torch.zeros(1, requires_grad=True)
    before = sys.getrefcount(leaf)
    accumulator = get_gradient_edge(leaf)
    added = sys.getrefcount(leaf) - before
    del accumulator
    return added


def _measured() -> int:
    probe = object()

    def count(value: object) -> int:
        return sys.getrefcount(value)

    return count(probe) - 1


_OWN = _measured()  # references that such a call adds


_TRANSPARENT = (tuple, list, dict, CellType, FunctionType)  # they hold, and who holds them is asked in turn
_MOST_ROUNDS: Final = 16  # of the search for holders
_aliases: dict[int, dict[int, weakref.ref[torch.Tensor]]] = {}  # by storage, by tensor: alive ones that were noted
_FEW: Final = 64  # storages in _aliases; up to here those whose tensors are all gone may stay there
_next_sweep = _FEW  # storages in _aliases at which those whose tensors are all gone are dropped


def note_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Note that a tensor lies over its storage beside the tensor that it was made of, so that `over` finds it. Returns it."""
    noted = _aliases.setdefault(key_of(tensor.untyped_storage()), {})
    # `pop` itself is called back, with the reference as its default. An interrupt within Python's code that a reference calls
    # back would be printed, and lost.
    noted[id(tensor)] = weakref.ref(tensor, functools.partial(noted.pop, id(tensor)))
    _drop_empty()
    return tensor


def _drop_empty() -> None:
    global _next_sweep
    if len(_aliases) >= _next_sweep:
        for key, noted in list(_aliases.items()):
            if not noted:
                del _aliases[key]
        _next_sweep = max(_FEW, 2 * len(_aliases))


def key_of(storage: torch.UntypedStorage) -> int:
    """A number that tells a storage from others while it lives."""
    return storage._cdata


def over(storage: torch.UntypedStorage, listed: Iterable[object]) -> list[torch.Tensor]:
    """The known tensors over a storage: those among `listed`, and the noted ones that are alive."""
    key = storage._cdata
    own = {id(v): v for v in listed if isinstance(v, torch.Tensor) and v.untyped_storage()._cdata == key}
    noted = (reference() for reference in list(_aliases.get(key, {}).values()))
    return list((own | {id(tensor): tensor for tensor in noted if tensor is not None}).values())


def is_known(storage: torch.UntypedStorage, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether no tensors but these lie over the storage, and autograd has saved none of them."""
    return is_over(storage, len(tensors)) and not any(map(_is_saved, tensors))


def is_alone(tensor: torch.Tensor) -> bool:
    """Whether no other tensor lies over the memory of this one."""
    return is_over(tensor.untyped_storage(), 1)


def is_over(storage: torch.UntypedStorage, num_tensors: int) -> bool:
    """Whether no more tensors than these lie over the storage."""
    return num_over(storage) <= num_tensors


def num_over(storage: torch.UntypedStorage) -> int:
    """How many tensors lie over the storage. Torch counts each of them once, and `storage` itself."""
    return torch._C._storage_Use_Count(storage._cdata) - 1  # pyright: ignore[reportAttributeAccessIssue]


def _is_saved(tensor: torch.Tensor) -> bool:
    if not (tensor.is_leaf and tensor.requires_grad):
        return tensor._use_count() > 1  # type: ignore[attr-defined]
    accumulator = get_gradient_edge(tensor)  # which holds the leaf, and lives at least as long as this name
    saved = tensor._use_count() > 2  # type: ignore[attr-defined]
    del accumulator
    return saved


class Privacy:
    """Finds out whether a parked forward alone holds the tensors that it hands to a block, and keeps the verdicts.

    See [Note: holders].
    """

    def __init__(self) -> None:
        self._verdicts: dict[_Site, bool] = {}
        self._codes: set[CodeType] = set()  # kept, so that no other code takes the id of one

    def is_private(self, tensors: list[torch.Tensor], frame: FrameType | None, layer: int, ours: Sequence[object]) -> bool:
        """Whether the forward alone holds the tensors with which it is parked ahead of a layer.

        `frame`: its innermost frame. `ours`: the caller's own lists and tuples, which do not count as holders.
        """
        frames = _chain(frame)
        self._codes.update(each.f_code for each in frames)
        counts = tuple(sorted(map(sys.getrefcount, tensors)))
        site = (layer, counts, tuple((id(each.f_code), each.f_lasti) for each in frames))
        verdict = self._verdicts.get(site)
        if verdict is None:
            verdict = self._verdicts[site] = _only_frames_hold(tensors, [*frames, *_chain(sys._getframe())], ours)
        return verdict


def _chain(frame: FrameType | None) -> list[FrameType]:
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _only_frames_hold(tensors: list[torch.Tensor], frames: list[FrameType], ours: Sequence[object]) -> bool:
    if gc.get_freeze_count():  # gc.freeze() hides from the search who holds what
        return False
    known = {id(value) for value in (*frames, *ours, frames, ours)}
    found: list[Any] = tensors
    for _ in range(_MOST_ROUNDS):
        known.update(map(id, (found, *found)))
        holders = gc.get_referrers(*found)
        known.add(id(holders))
        found = [holder for holder in holders if id(holder) not in known]
        if not found:
            return True
        if any(type(holder) not in _TRANSPARENT for holder in found):
            return False
    return False
