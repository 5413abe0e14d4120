"""Layer inputs and the gradients between layers, over device, host memory and SSD.

[Note: what moves] A tensor moves by its storage: its bytes are copied out, the storage is emptied, and filled again later.
Everybody who holds the tensor keeps it, with its place in autograd's graph and its count of in-place writes; only its memory
goes. So no code may read it meanwhile. That holds whatever the model does:

- A micro-batch's forward runs on to the call of the next layer before it parks. Taken away then is what it hands to that
  layer, provided that the forward itself has made it and that no other code can reach it: no other tensor over the storage,
  no reference but those of its own frames (see `tensor_refs`). It is there again before the forward goes on.
- What a layer has used is taken away only if all references are ours: no code can get at it.
- What autograd has saved for the backward of the model's glue stays: that backward may run at any time. So do tensors
  that a later layer is given as well, views, masks and whatever requires no grad, and what is smaller than a page.

What stays is right in any case and costs memory on the device: Hugging Face models keep the first layer's input in a variable
to their end, for one. Gradients between layers are ours: they are taken out and new tensors are put in their places.

Random states stay in host memory: 5 KiB per block and micro-batch, less than one row of one input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch

from ds_vertical.io.ticket import Ticket
from ds_vertical.model.boundary_tensors import BoundaryTensors
from ds_vertical.model.tensor_refs import Privacy, has_others, is_known, key_of, over
from ds_vertical.offload.tensor_swapper import SwappedTensor, TensorSwapper
from ds_vertical.schedule.events import Event, Op, Unit
from ds_vertical.schedule.executor import Handler
from ds_vertical.types import SUF, Tier

SMALLEST_BYTES = 4096


@dataclass(eq=False)
class Kept:
    """A storage whose bytes have been saved. `used`: its layer has run forward. `stays`: it leaves memory no more."""

    storage: torch.UntypedStorage
    num_bytes: int
    swapped: SwappedTensor
    in_memory: bool = False
    used: bool = False
    stays: bool = False


@dataclass(frozen=True)
class KeptGradient:
    """A gradient that was taken out: how to make room for it anew, and what puts it back."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    put_back: Callable[[torch.Tensor], None]


class GradientsBetweenLayers:
    """The gradients that wait for a unit's backward, away from the device meanwhile.

    `tiers`: as in `ActivationStore.open_step`.
    """

    def __init__(self, swapper: TensorSwapper) -> None:
        self.tiers: dict[int, Tier] = {}
        self.swapper = swapper
        self._kept: dict[tuple[Unit, int], tuple[SwappedTensor, list[KeptGradient]]] = {}  # by unit and micro-batch

    def save(self, unit: Unit, index: int, boundary: BoundaryTensors) -> Ticket | None:
        """Save the gradients that wait for the unit's backward."""
        taken = boundary.take_gradients(unit, _is_movable_gradient)
        if not taken:
            return None
        swapped = self.swapper.put([_dense_bytes(grad) for grad, _ in taken], self.tiers[index])
        kept = [KeptGradient(g.size(), g.stride(), g.dtype, g.device, put_back) for g, put_back in taken]
        self._kept[unit, index] = (swapped, kept)
        return _saved(self.swapper, f"save gradient {unit} of {index}", [swapped])

    def load(self, unit: Unit, index: int) -> Ticket | None:
        """Bring the unit's gradients back; the ticket's wait puts them in their places."""
        if (unit, index) not in self._kept:
            return None
        swapped, all_kept = self._kept[unit, index]
        grads: list[torch.Tensor] = []

        def land() -> list[torch.Tensor]:
            grads.extend(torch.empty_strided(k.size, k.stride, dtype=k.dtype, device=k.device) for k in all_kept)
            return [_dense_bytes(grad) for grad in grads]

        def wait() -> None:
            self.swapper.arrive(swapped)
            for kept, grad in zip(all_kept, grads, strict=True):
                kept.put_back(grad)
            grads.clear()

        self.swapper.fetch(swapped, land)
        return Ticket(f"load gradient {unit} of {index}", wait, swapped.num_bytes)

    def drop(self, unit: Unit, index: int) -> None:
        """Forget what was saved of the unit's gradients: they are back."""
        swapped, _ = self._kept.pop((unit, index), (None, []))
        if swapped is not None:
            self.swapper.drop(swapped)

    def forget(self) -> None:
        """Forget everything, after an error: `TensorSwapper.abandon` has."""
        self._kept.clear()


class ActivationStore:
    """Which layer inputs have moved and where they are. `gradients`: those between layers; `swapper`: moves both.

    The schedule's events call the methods, those of one micro-batch in the order that its dependencies leave.
    """

    def __init__(self, swapper: TensorSwapper) -> None:
        self.swapper = swapper
        self._privacy = Privacy()
        self._tiers: dict[int, Tier] = {}
        self._kept: dict[tuple[int, int], list[Kept]] = {}  # by layer and micro-batch
        self._by_storage: dict[int, Kept] = {}
        self.gradients = GradientsBetweenLayers(swapper)

    @property
    def num_bytes(self) -> dict[str, int]:
        """Bytes held per tier."""
        return {Tier.HOST: self.swapper.host_bytes, Tier.SSD: self.swapper.ssd_bytes}

    def open_step(self, tiers: dict[int, Tier]) -> None:
        """`tiers`: where each micro-batch that moves rests, in the step that begins."""
        self._tiers = self.gradients.tiers = tiers

    def handlers(self, boundary_of: Callable[[int], BoundaryTensors]) -> dict[Op, Handler]:
        """What the schedule's events do here. `boundary_of`: the tensors of a micro-batch, by its number."""

        def layer(event: Event) -> tuple[int, int]:
            assert isinstance(event.layer, int) and event.micro_batch is not None
            return event.layer, event.micro_batch

        def unit(event: Event) -> tuple[Unit, int]:
            assert event.layer is not None and event.layer != SUF and event.micro_batch is not None
            return event.layer, event.micro_batch

        def own(event: Event) -> BoundaryTensors:
            return boundary_of(unit(event)[1])

        return {
            Op.SAVE: lambda event: self.save(*layer(event), own(event)),
            Op.LOAD: lambda event: self.load(*layer(event)),
            Op.DROP: lambda event: self.drop(*layer(event)),
            Op.GSAVE: lambda event: self.gradients.save(*unit(event), own(event)),
            Op.GLOAD: lambda event: self.gradients.load(*unit(event)),
            Op.GDROP: lambda event: self.gradients.drop(*unit(event)),
        }

    # ---- layer inputs

    def save(self, layer: int, index: int, boundary: BoundaryTensors) -> Ticket | None:
        """Save what micro-batch `index` hands to the layer, and what only we still hold of layers that it has been through."""
        all_swapped: list[SwappedTensor] = []
        for used in range(max(0, layer - 1), layer + 1):
            storages = self._movable(boundary.inputs(used), boundary)
            ours = [storage for storage in storages if _is_ours(storage, boundary.lists(used))]
            if ours:
                all_swapped.append(self._put(used, index, ours, used=True))
        handed = self._handed(layer, boundary)
        if handed:
            all_swapped.append(self._put(layer, index, handed, used=False))
        return _saved(self.swapper, f"save {layer} of {index}", all_swapped)

    def _movable(self, tensors: Sequence[torch.Tensor], boundary: BoundaryTensors) -> list[torch.UntypedStorage]:
        """The storages of those tensors that are worth moving, and the micro-batch's own."""
        found = {
            key_of(storage): storage
            for tensor in tensors
            if type(tensor) is torch.Tensor and tensor.layout is torch.strided
            if tensor.requires_grad and boundary.has_made(tensor)
            if key_of(storage := tensor.untyped_storage()) not in self._by_storage
            if storage.nbytes() >= SMALLEST_BYTES and storage.resizable()
        }
        return list(found.values())

    def _handed(self, layer: int, boundary: BoundaryTensors) -> list[torch.UntypedStorage]:
        given = boundary.handed_over(layer)
        for tensor in given:
            kept = self._by_storage.get(key_of(tensor.untyped_storage()))
            if kept is not None:
                kept.stays = True  # an earlier layer had it too
        lists = boundary.lists(layer)
        handed: list[torch.UntypedStorage] = []
        for storage in self._movable(given, boundary):
            tensors = over(storage, chain(given, *lists))
            if is_known(storage, tensors) and self._privacy.is_private(
                tensors, boundary.frame, layer, [given, boundary.parked_call, *lists]
            ):
                handed.append(storage)
        return handed

    def _put(self, layer: int, index: int, storages: Sequence[torch.UntypedStorage], used: bool) -> SwappedTensor:
        swapped = self.swapper.put([_storage_bytes(storage) for storage in storages], self._tiers[index])
        for storage in storages:
            kept = Kept(storage, storage.nbytes(), swapped, used=used)
            self._kept.setdefault((layer, index), []).append(kept)
            self._by_storage[key_of(storage)] = kept
            storage.resize_(0)
        return swapped

    def load(self, layer: int, index: int) -> Ticket | None:
        """Bring what was saved of the layer's inputs back; the ticket's wait completes it."""
        away: dict[SwappedTensor, list[Kept]] = {}
        for kept in self._kept.get((layer, index), ()):
            if not kept.in_memory:
                away.setdefault(kept.swapped, []).append(kept)
        for swapped, all_kept in away.items():
            self.swapper.fetch(swapped, partial(_refill, all_kept))

        def wait() -> None:
            for swapped, all_kept in away.items():
                self.swapper.arrive(swapped)
                for kept in all_kept:
                    kept.in_memory = True

        return Ticket(f"load {layer} of {index}", wait, sum(p.num_bytes for p in away)) if away else None

    def require(self, layer: int, index: int) -> None:
        """Raises RuntimeError unless the layer's inputs are in memory: the schedule did not load them."""
        if not all(kept.in_memory for kept in self._kept.get((layer, index), ())):
            raise RuntimeError(f"inputs of layer {layer}, micro-batch {index}, are away; the schedule did not load them")

    def leave(self, layer: int, index: int, boundary: BoundaryTensors) -> None:
        """The layer's forward is over: take the memory of its inputs away, of those that only we still hold."""
        for kept in self._kept.get((layer, index), ()):
            kept.used = True
            if kept.stays or not _is_ours(kept.storage, boundary.lists(layer)):
                kept.stays = True
            else:
                kept.storage.resize_(0)
                kept.in_memory = False

    def drop(self, layer: int, index: int) -> None:
        """Forget the layer's inputs: its backward is over."""
        for kept in self._kept.pop((layer, index), ()):
            del self._by_storage[key_of(kept.storage)]
            self.swapper.drop(kept.swapped)

    # ---- the end

    def abandon(self) -> None:
        """After an error: complete what is in flight and forget everything. Storages that are away get memory of any content,
        since the parked forwards are about to be ended, and a `finally` of the user's may look at them."""
        self.swapper.abandon()
        for kept in self._by_storage.values():
            if not kept.in_memory and not kept.used:
                kept.storage.resize_(kept.num_bytes)
        self._kept.clear()
        self._by_storage.clear()
        self.gradients.forget()

    def close(self) -> None:
        """Give buffers and queues back; twice is harmless."""
        self.swapper.close()


def _saved(swapper: TensorSwapper, what: str, all_swapped: Sequence[SwappedTensor]) -> Ticket | None:
    """Of swapped tensors on their way out; None where there are none."""
    if not all_swapped:
        return None

    def wait() -> None:
        for swapped in all_swapped:
            swapper.wait_written(swapped)

    return Ticket(what, wait, sum(swapped.num_bytes for swapped in all_swapped))


def _is_ours(storage: torch.UntypedStorage, lists: Sequence[list[object]]) -> bool:
    """Whether these lists have the only references to the tensors over a storage."""
    tensors = over(storage, chain(*lists))
    if not is_known(storage, tensors):
        return False
    for tensor in tensors:
        listed = sum(value is tensor for values in lists for value in values)
        if has_others(tensor, listed + 2):  # `tensors` and `tensor`
            return False
    return True


def _is_movable_gradient(grad: torch.Tensor) -> bool:
    if type(grad) is not torch.Tensor or grad.layout is not torch.strided:
        return False
    num_dense = 1
    for stride, size in sorted(zip(grad.stride(), grad.size(), strict=True)):
        if size != 1 and stride != num_dense:
            return False  # with gaps, or expanded
        num_dense *= size
    return num_dense * grad.element_size() >= SMALLEST_BYTES


def _storage_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _dense_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor without gaps, as 1-d uint8 in the order in which they lie in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _refill(all_kept: Sequence[Kept]) -> list[torch.Tensor]:
    for kept in all_kept:
        kept.storage.resize_(kept.num_bytes)
    return [_storage_bytes(kept.storage) for kept in all_kept]
