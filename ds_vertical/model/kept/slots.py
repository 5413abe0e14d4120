"""Slots: what stands for a tensor of a block's forward until the block's backward asks for it.

[Note: slots] A slot never holds the memory of a parameter, or of an input of the block. A parameter's memory is another layer's
between the forward and the backward; a view of it that was kept would read that layer's values. Such tensors are told by the
storage that they lie over, since autograd saves views of parameters, too (`weight.t()`). The slot knows the parameter and the
view's place, and makes the view of whatever memory the parameter has when it is asked. An input has moved and come back by
then (`offload.activation_store`), in the same storage. A view of a parameter that is kept where hooks do not see it, as an
attribute of an autograd context, shows by the number of tensors over the parameter's memory: behind the block's forward there
are more than ahead of it.

All other memory is the block's own. A storage that the block has made and that nobody else can reach is kept, and may leave
the device; it counts its holders (`tensor_refs`), so one that others hold as well stays where it is. A view of a small part of
a storage is kept alone, not to hold the rest.

torch does not compare a saved tensor's count of in-place writes where hooks have packed it. A slot does. A tensor and its views
have one count; `tensor.data` has another one over the same memory. So a slot that holds no view of the very tensor that was
saved has that tensor's count in a tensor without elements (`_count_of`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from time import sleep
from typing import NoReturn

import torch
from torch import nn

from ds_vertical.errors import LayerError
from ds_vertical.model.tensor_refs import key_of, num_over

VIEW_LEFT = "its forward leaves a view of a parameter's memory behind, other than as a saved tensor"
_VIEWED = "_base"  # of a tensor: the one that it is a view of
_MOST_LOOKS, _BETWEEN_LOOKS_S = 10, 0.001  # for views that go again
_LEAST_COVERED = 0.6  # of a storage, by the views that are kept of it; below that they are kept alone
_ALIGNED_BYTES = 64  # to which torch's allocators align storages; kernels may choose by a tensor's place in that


@dataclass(frozen=True)
class Layout:
    """How a tensor lies over its storage: elements, strides and first element, in elements of its dtype."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """The layout of a strided tensor."""
        return cls(tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """A tensor of this layout over a storage, without a gradient."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)  # pyright: ignore[reportCallIssue]

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements that it reaches, each counted once where strides are 0."""
        sizes = (size for size, stride in zip(self.size, self.stride, strict=True) if stride or size == 0)
        return torch.Size(sizes).numel() * self.dtype.itemsize

    @property
    def extent(self) -> int:
        """Elements from the first to behind the last one that it reaches."""
        if not self.size.numel():
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))

    @property
    def is_dense_enough(self) -> bool:
        """Whether each element has a place of its own, so that a copy can be put back place by place."""
        return self.size.numel() * self.dtype.itemsize == self.num_bytes and self.size.numel() <= self.extent


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether layout and storage say all about a tensor: no subclass, no sparse layout, nothing conjugated lazily."""
    plain = type(tensor) is torch.Tensor or type(tensor) is nn.Parameter
    return plain and tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_conj() or tensor.is_neg())


def _refuse_written(shape: torch.Size) -> NoReturn:
    raise LayerError(
        f"a tensor of shape {tuple(shape)} that autograd saved in a block's forward was written in place before the"
        ' block\'s backward: write to a copy, or set "keep" of vertical_schedule.activations to "none"'
    )


def _count_of(tensor: torch.Tensor) -> torch.Tensor:
    """What has a tensor's count of in-place writes, and none of its memory."""
    count = tensor.detach()
    count.data = _nothing_on(tensor.device)
    return count


@cache
def _nothing_on(device: torch.device) -> torch.Tensor:
    return torch.empty(0, device=device)


@dataclass(eq=False, slots=True)
class BaseSlot:
    """A view of a parameter or of an input: of the tensor at `index` of `bases`, wherever its memory is when it is asked.

    `size`, `stride`, `offset`: how it lies in that memory, counted from the base's first element, since the base may come back
    at another place of a buffer. `count`: has the count of the writes to what was saved, at `version` then.
    """

    bases: Sequence[object]
    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    count: torch.Tensor
    version: int

    @property
    def is_current(self) -> bool:
        """Whether it was not written in place since it was saved."""
        return self.count._version == self.version

    def tensor(self) -> torch.Tensor:
        """The tensor that was saved. Raises LayerError where it was written in place since."""
        if self.count._version != self.version:
            _refuse_written(self.size)
        base = self.bases[self.index]
        assert isinstance(base, torch.Tensor)
        now = base.data
        if not self.offset and now.size() == self.size and now.stride() == self.stride:
            return now
        return now.as_strided(self.size, self.stride, self.offset + int(now.storage_offset()))


@dataclass(eq=False, slots=True)
class KeptStorage:
    """A storage with tensors that are kept. `views`: an alias of each, which has its tensor's count of in-place writes.

    `alone`: where the storage is given up, for each of the views, by id, how it lay and a copy of its elements one by one.
    `in_memory`: False while its bytes are in another tier.
    """

    storage: torch.UntypedStorage
    num_bytes: int = -1
    views: list[torch.Tensor] = field(default_factory=list)
    alone: dict[int, tuple[Layout, KeptStorage]] | None = None
    in_memory: bool = True

    def __post_init__(self) -> None:
        self.num_bytes = self.storage.nbytes()

    @property
    def is_private(self) -> bool:
        """Whether nothing but the views lies over the storage, so that its memory may go. See [Note: slots]."""
        return num_over(self.storage) <= len(self.views)

    @property
    def is_mostly_kept(self) -> bool:
        """Whether the views reach most of the storage; parts that two views of other layouts reach count twice."""
        least = _LEAST_COVERED * self.num_bytes
        for view in self.views:
            if view.nbytes >= least and 0 not in view.stride():
                return True
        return sum(layout.num_bytes for layout in set(map(Layout.of, self.views))) >= least

    def keep_views_alone(self) -> None:
        """Copy the elements of the views, and give the storage up; the views go on counting writes."""
        copies: dict[Layout, KeptStorage] = {}
        self.alone = {}
        for view in self.views:
            layout = Layout.of(view)
            if layout not in copies:
                copy = view.clone(memory_format=torch.contiguous_format)  # of a contiguous view, too
                copies[layout] = KeptStorage(copy.untyped_storage(), views=[copy])
            self.alone[id(view)] = layout, copies[layout]
        for view in self.views:
            view.data = _nothing_on(view.device)
        self.storage = torch.UntypedStorage(0, device=self.storage.device)
        self.num_bytes = 0

    def require(self) -> None:
        """Raises LayerError while its bytes are away: the schedule did not load them."""
        if not self.in_memory:
            raise LayerError("kept values of a block are away; the schedule did not load them")

    @property
    def resident(self) -> torch.UntypedStorage:
        """The storage. Raises LayerError as `require` does."""
        self.require()
        return self.storage

    def tensor(self, view: torch.Tensor) -> torch.Tensor:
        """A tensor with the elements of one of the views, laid out as that. Raises LayerError while they are away."""
        if self.alone is None:
            self.require()
            return view
        layout, kept = self.alone[id(view)]
        kept.require()
        (dense,) = kept.views
        lead = layout.offset % (_ALIGNED_BYTES // layout.dtype.itemsize)
        room = torch.empty(lead + layout.extent, dtype=layout.dtype, device=dense.device)
        return room.as_strided(layout.size, layout.stride, lead).copy_(dense)

    @property
    def parts(self) -> list[KeptStorage]:
        """What may move by itself: itself, or the views that are kept alone."""
        return [self] if self.alone is None else list(dict.fromkeys(kept for _, kept in self.alone.values()))


def places_by_id(params: Sequence[nn.Parameter]) -> dict[int, int]:
    """The places of the plain ones among parameters, by their ids."""
    return {id(param): place for place, param in enumerate(params) if is_plain(param)}


def _extent_of(tensor: torch.Tensor) -> int:
    """See `Layout.extent`."""
    return tensor.numel() if tensor.is_contiguous() else Layout.of(tensor).extent


@dataclass(eq=False, slots=True)
class OwnSlot:
    """A tensor over memory that is neither a parameter's nor an input's. `view`: of that memory, an alias of the tensor; at
    `version` of its count when it was saved."""

    kept: KeptStorage
    view: torch.Tensor
    version: int

    @property
    def is_current(self) -> bool:
        """Whether it was not written in place since it was saved."""
        return self.view._version == self.version

    def tensor(self) -> torch.Tensor:
        """The tensor that was saved. Raises LayerError where it was written in place since."""
        if self.view._version != self.version:
            alone = self.kept.alone
            _refuse_written(self.view.size() if alone is None else alone[id(self.view)][0].size)
        return self.kept.tensor(self.view)


@dataclass(eq=False, slots=True)
class AliasSlot:
    """A tensor that stays as it is: a subclass's, one whose memory says not all about it, or one that a recompute saves."""

    alias: torch.Tensor
    version: int

    @property
    def is_current(self) -> bool:
        """Whether it was not written in place since it was saved."""
        return self.alias._version == self.version

    def tensor(self) -> torch.Tensor:
        """The tensor that was saved. Raises LayerError where it was written in place since."""
        if self.alias._version != self.version:
            _refuse_written(self.alias.size())
        return self.alias


SavedSlot = BaseSlot | OwnSlot | AliasSlot


class Slots:
    """Makes the slots of one block call. `params`: the block's, and `inputs`: what it was given; both keep their order.
    `places`: see `places_by_id`, where they are known.

    `own`: the storages of everything else, by key; each is held, so that no other takes its key. `made`: all slots.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], inputs: Sequence[object], places: Mapping[int, int] | None = None
    ) -> None:
        self.own: dict[int, KeptStorage] = {}
        self.made: list[SavedSlot] = []
        self._params = params
        self._places = places_by_id(params) if places is None else places
        self._num_over = self._counted()
        self._bases: dict[int, list[tuple[Sequence[object], int]]] = {}  # the inputs, by key; parameters once they are asked
        for index, base in enumerate(inputs):
            if isinstance(base, torch.Tensor) and is_plain(base):
                self._bases.setdefault(key_of(base.untyped_storage()), []).append((inputs, index))
        self._places_over: dict[int, list[int]] = {}  # of the plain parameters, by key; once one is asked
        self._unlisted = dict.fromkeys(self._num_over)  # keys whose parameters are not among the bases yet

    def pack(self, tensor: torch.Tensor) -> SavedSlot:
        """The slot of a tensor that autograd is about to save."""
        slot = self._pack(tensor)
        self.made.append(slot)
        return slot

    def are_current(self) -> bool:
        """Whether no tensor that was saved has been written in place since."""
        return all(slot.is_current for slot in self.made)

    def _pack(self, tensor: torch.Tensor) -> SavedSlot:
        place = self._places.get(id(tensor))
        if place is not None:
            return BaseSlot(self._params, place, tensor.size(), tensor.stride(), 0, tensor, tensor._version)
        if not is_plain(tensor):
            return AliasSlot(tensor.detach(), tensor._version)
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._unlisted:
            self._list_params(key)
        if key in self._bases and (slot := self._base_slot(tensor, key)) is not None:
            return slot
        kept = self.own.get(key)
        if kept is None:
            kept = self.own[key] = KeptStorage(storage)
        view = tensor.detach()
        kept.views.append(view)
        return OwnSlot(kept, view, tensor._version)

    def _list_params(self, key: int) -> None:
        """Take the parameters over a storage among the bases; a buffer may hold several."""
        del self._unlisted[key]
        if not self._places_over:
            for place in self._places.values():
                self._places_over.setdefault(key_of(self._params[place].untyped_storage()), []).append(place)
        plain = self._places_over.get(key, ())
        # a parameter that is given as an argument is a parameter
        self._bases[key] = [*((self._params, place) for place in plain), *self._bases.get(key, ())]

    def _base_slot(self, tensor: torch.Tensor, key: int) -> BaseSlot | None:
        """The slot of a view that lies within a parameter or an input; None where there is none."""
        start, extent = int(tensor.storage_offset()), _extent_of(tensor)
        for bases, index in self._bases[key]:
            base = bases[index]
            assert isinstance(base, torch.Tensor)
            first = int(base.storage_offset())
            if base.dtype == tensor.dtype and first <= start and start + extent <= first + _extent_of(base):
                # an input that a slot held would have one more holder than may be when it moves
                shares = bases is self._params and getattr(tensor, _VIEWED) is base
                count = base if shares else _count_of(tensor)
                return BaseSlot(bases, index, tensor.size(), tensor.stride(), start - first, count, tensor._version)
        return None

    def sees_all(self) -> bool:
        """The block's forward is over and its outputs are dropped: whether it has left no view of a parameter's memory behind
        but as a slot. Such a view would be another layer's values in the backward."""
        for _ in range(_MOST_LOOKS):  # other threads make views, too, of parameters in the same memory, and drop them
            now = self._counted()
            if all(now[key] <= count for key, count in self._num_over.items()):
                return True
            sleep(_BETWEEN_LOOKS_S)
        return False

    def _counted(self) -> dict[int, int]:
        """How many tensors lie over each parameter's memory, by its key."""
        storages = (param.untyped_storage() for param in self._params)
        return {key_of(storage): num_over(storage) for storage in storages}

    def settle(self) -> list[KeptStorage]:
        """The block's forward is over and its outputs are dropped: the storages that only the slots hold."""
        private = [kept for kept in self.own.values() if kept.is_private]
        small = [kept for kept in private if not kept.is_mostly_kept and all(Layout.of(v).is_dense_enough for v in kept.views)]
        if small and self.are_current():  # else the copies would be of what was written since
            for kept in small:
                kept.keep_views_alone()
        return [part for kept in private for part in kept.parts]


def unpack(slot: SavedSlot) -> torch.Tensor:
    """The tensor for which a slot stands."""
    return slot.tensor()
