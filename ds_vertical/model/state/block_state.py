"""What a block finds in modules and in objects that it is given, as it is called, and what it leaves there.

See `forward_state` for the items of which this is made, and `micro_batch` for the calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NoReturn, Protocol

import torch

from ds_vertical.model.state.accumulated import sum_of_tensors, sum_up
from ds_vertical.model.state.containers import (
    Container,
    Contents,
    container_of,
    containers,
    owner_key,
    tensors_in,
    with_tensors,
)
from ds_vertical.model.state.module_state import Item, Pairs, PlaceItem, TensorItem, put_back, tensors_of
from ds_vertical.model.state.survey import OUTSIDE
from ds_vertical.model.tensor_refs import key_of

_SMALL: Final = 1 << 12  # elements of a tensor of which a block gets a copy that it may write


@dataclass(eq=False)
class Known:
    """An item that changes, and the parts of the forward that change it, by the layers that they go through. `spread`: these
    are several; `settled`: a whole forward has shown it; `adds_up`: after a step it may hold what all forwards have added;
    `replaced`: what the last one has left, where it holds that instead. `sample`: what a forward has left in it, to see whether
    the code ahead of its writer resets it; `tried`: that has been seen;
    `resets`: it does. `backward`: hooks of the backward write there, too."""

    item: Item
    spread: bool = False
    settled: bool = False
    adds_up: bool = True
    replaced: Any = None
    sample: Any = None
    tried: bool = False
    resets: bool = False
    backward: bool = False
    writers: set[int] = field(default_factory=set)


@dataclass(eq=False)
class Track:
    """An item and its versions in the step that runs: the one before it, each micro-batch's own, the one that is installed.

    `begun`: what micro-batches that have none of their own go on with.
    """

    known: Known
    base: Any
    installed: Any
    own: dict[int, Any] = field(default_factory=dict)
    begun: dict[int, Any] = field(default_factory=dict)

    @property
    def item(self) -> Item:
        return self.known.item

    def version(self, micro_batch: int) -> Any:
        """See [Note: versions]."""
        if micro_batch in self.own:
            return self.own[micro_batch]
        if not (self.known.spread and micro_batch in self.begun):
            before = [] if self.known.spread else [index for index in self.own if index < micro_batch]
            self.begun[micro_batch] = self.own[max(before)] if before else self.base
        return self.begun[micro_batch]

    def final(self, compares: bool) -> Any:
        """What the item holds after the step. `compares`: the last version is kept, too, as `Known.replaced`."""
        last, known = self.own[max(self.own)] if self.own else self.base, self.known
        known.replaced = None
        is_place = isinstance(self.item, PlaceItem)
        if (
            known.spread
            and len(self.own) > 1
            and known.adds_up
            and not (self.item.is_generator or (known.resets and not is_place))
        ):
            own = [self.own[index] for index in sorted(self.own)]
            added: Any = sum_up(self.base, own) if is_place else sum_of_tensors(self.base, own)
            if not self.item.same(added, last):
                known.replaced = last if compares else None
                return added
        return last

    def install(self, version: Any) -> None:
        if version is not self.installed:
            self.item.install(version)
            self.installed = version


class Learner(Protocol):
    """The step that a call belongs to. `is_quiet`: no code of the layer under way changes the item, as far as is known."""

    def is_quiet(self, track: Track) -> bool: ...

    tracks: list[Track]

    def learn(self, regions: Iterable[int] | None) -> list[Track]:
        """Find what has changed in these regions that nobody knew of; `tracks` have it afterwards."""
        ...

    def copy_from_now_on(self, path: str) -> NoReturn:
        """A tensor that a block found has been written in place: the step is to start over, with copies."""
        ...


class BlockState:
    """The state that a block's call began with, so that the recompute in the backward begins with it, too.

    What the block reads of it that requires grad stands for itself by a twin while the block runs, as an argument does, and
    what it writes that requires grad is an output like those that it returns. A small one it may write in place (`aux += ...`):
    it gets a copy of the twin. `copies`: of tensors that require none, too, the elements are kept.
    """

    def __init__(self, step: Learner, block: int, tracks: Sequence[Track], carriers: Sequence[Container], copies: bool) -> None:
        self._step = step
        self._block = block
        self._carriers = carriers
        self._began_empty = not tracks and all(type(each.owner) in (dict, list) and not each.owner for each in carriers)
        quiet = (track for track in tracks if step.is_quiet(track) and not any(tensors_of(track.installed)))
        self._quiet = {id(track) for track in quiet}  # and nothing of them is lent
        self._versions: list[tuple[Track, Any]] = [(track, self._now_of(track, track.installed)) for track in tracks]
        self._carried: Pairs = tuple((container, container.read()) for container in carriers)
        self._lent: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id: a copy of a twin, and the twin
        self._plain = [(tensor, tensor._version, tensor.clone() if copies else None) for tensor in self._without_gradient()]

    def _found_nothing(self) -> bool:
        """Whether no state changes, and the block was given no objects but empty lists and dicts."""
        return self._began_empty and not self._versions

    def _is_empty(self) -> bool:
        """Whether, besides, these are empty now. transformers gives every block a dict in which to collect outputs, and most
        calls leave it so."""
        return self._found_nothing() and not any(each.owner for each in self._carriers)

    def _now_of(self, track: Track, last: Any) -> Any:
        return last if id(track) in self._quiet else track.item.capture(last)

    def _without_gradient(self) -> list[torch.Tensor]:
        pairs = (contents for _, contents in self._pairs())
        found = (tensor for contents in pairs for _, value in contents.carriers for _, tensor in tensors_in(value))
        plain = (t for t in found if not (t.requires_grad or t.is_inference() or t.layout is not torch.strided or t.is_meta))
        return list({id(tensor): tensor for tensor in plain}.values())

    def _pairs(self) -> Pairs:
        """All places and containers with their contents at the call."""
        places = (pair for track, version in self._versions if isinstance(track.item, PlaceItem) for pair in version)
        return _once((*places, *self._carried))

    def inputs(self) -> list[torch.Tensor]:
        """The tensors that require grad which the block can reach, each once."""
        if self._found_nothing():
            return []
        return list({id(tensor): tensor for _, tensor in tensors_of(self._pairs())}.values())

    def lend(self, twins: dict[int, torch.Tensor]) -> None:
        """Let twins stand for the tensors, while the block runs. `twins`: by the tensors' ids."""
        if not twins or self._found_nothing():
            return
        own = {id(tensor) for tensor in self.inputs()}
        lent = {key: twin.clone() if key in own and twin.numel() <= _SMALL else twin for key, twin in twins.items()}
        self._lent = {id(copy): (copy, twins[key]) for key, copy in lent.items() if copy is not twins[key]}
        for container, contents in self._pairs():
            if (changed := contents.replaced(partial(with_tensors, replaced=lent))) is not None:
                container.write(changed)

    def settle(self, twins: dict[int, torch.Tensor], originals: dict[int, torch.Tensor]) -> None:
        """The block has run: twins give way to the tensors that they stood for (`originals`: by id)."""
        known = {id(track) for track, _ in self._versions}
        self._step.learn([self._block])
        for track in self._step.tracks:  # new ones: they were at the call what they were before the step
            if id(track) not in known and (track.item.region in (OUTSIDE, self._block) or isinstance(track.item, PlaceItem)):
                self._versions.append((track, track.base))
        if self._is_empty():
            return
        given = {id(twin): originals[key] for key, twin in twins.items()}
        given |= {id(copy): given[id(twin)] for copy, twin in self._lent.values() if copy._version == 0}  # not written
        self._lent = {}
        _replace(self._now(), given)

    def written(self, but: Collection[int] = ()) -> dict[tuple[int, ...], torch.Tensor]:
        """The tensors that require grad, by position, `but` those with these ids."""
        return {place: tensor for place, tensor in tensors_of(self._now()) if id(tensor) not in but}

    def replace(self, leaves: dict[int, torch.Tensor]) -> None:
        """Let leaves stand for what the block has written, from now on. `leaves`: by the ids of what was written."""
        if leaves:
            _replace(self._now(), leaves)

    def tensors(self) -> set[int]:
        """Keys of the storages whose elements are kept (`tensor_refs.key_of`)."""
        items = (track.item for track, _ in self._versions)
        return {key_of(item.tensor.untyped_storage()) for item in items if isinstance(item, TensorItem)}

    def _now(self) -> Pairs:
        if self._is_empty():
            return ()
        versions = [self._now_of(track, last) for track, last in self._versions if isinstance(track.item, PlaceItem)]
        places = [pair for version in versions for pair in version]
        return _once((*places, *self._carried_now()))

    def _carried_now(self) -> Pairs:
        if not self._carriers or self._is_empty():
            return tuple((container, Contents()) for container in self._carriers)
        below = containers([container.owner for container in self._carriers], given=True)
        return tuple((container, container.read()) for container in below)

    @contextlib.contextmanager
    def replayed(self, twins: dict[int, torch.Tensor]) -> Iterator[Callable[[], None]]:
        """Within the block everything is as at the call, with the twins in their places; afterwards as before. What it gives is
        to be called once the forward has been replayed: from then on places are as before, and what hooks of the backward write
        there stays. Elements of tensors are not yet: autograd may have saved them."""
        after = [(track, self._now_of(track, track.installed)) for track, _ in self._versions]
        carried = self._carried_now()
        now = self._restore_elements()
        for (track, version), (_, now_held) in zip(self._versions, after, strict=True):
            if version is not now_held:
                track.item.install(version)
        put_back(self._carried)
        self.lend(twins)
        waiting = [
            (track, version)
            for (track, version), (_, before) in zip(after, self._versions, strict=True)
            if not (version is before and id(track) in self._quiet)
        ]
        places = [pair for pair in waiting if isinstance(pair[0].item, PlaceItem)]

        def put_places_back() -> None:
            nonlocal carried
            put_back(carried)
            carried = ()
            while places:
                track, version = places.pop()
                track.item.install(version)

        try:
            yield put_places_back
        finally:
            put_places_back()
            for track, version in waiting:
                if not isinstance(track.item, PlaceItem):
                    track.item.install(version)
            for tensor, elements in now:
                tensor.data.copy_(elements)

    def _restore_elements(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Give tensors that were written in place since the call their elements of then. Returns those of now."""
        written = [(tensor, before) for tensor, count, before in self._plain if tensor._version != count]
        if any(before is None for _, before in written):
            self._step.copy_from_now_on(f"a tensor of {tuple(written[0][0].shape)} in state that a block finds")
        now = [(tensor, tensor.clone()) for tensor, _ in written]
        for tensor, before in written:
            assert before is not None
            tensor.data.copy_(before)
        return now


def tensors_in_objects(values: Iterable[Any]) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """The tensors that require grad in objects among the values, with their positions."""
    objects = [value for value in values if not isinstance(value, torch.Tensor) and container_of(value, given=True)]
    return list(tensors_of((each, each.read()) for each in containers(objects, given=True))) if objects else []


def replace_in_objects(values: Iterable[Any], leaves: dict[int, torch.Tensor]) -> None:
    """Let leaves stand for tensors in objects among the values, by id."""
    objects = [value for value in values if not isinstance(value, torch.Tensor) and container_of(value, given=True)]
    if objects:
        _replace(tuple((each, each.read()) for each in containers(objects, given=True)), leaves)


def _replace(pairs: Pairs, replaced: dict[int, torch.Tensor]) -> None:
    for container, contents in pairs:
        if (changed := contents.replaced(partial(with_tensors, replaced=replaced))) is not None:
            container.write(changed)


def _once(pairs: Iterable[tuple[Container, Any]]) -> Pairs:
    """Each container once, in the order in which they come."""
    found: dict[Hashable, tuple[Container, Any]] = {}
    for container, contents in pairs:
        found.setdefault(owner_key(container), (container, contents))
    return tuple(found.values())
