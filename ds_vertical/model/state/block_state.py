"""The state that one call of a block finds in modules and in objects that it is given, and what the block writes there.

`recorded_blocks` makes the calls. `tracks` has the items of which the state in modules consists.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Final

import numpy as np
import torch

from ds_vertical.interrupts import Changed
from ds_vertical.model.state.containers import (
    Container,
    Contents,
    container_of,
    containers,
    owner_key,
    tensors_in,
    with_tensors,
)
from ds_vertical.model.state.fingerprints import Fingerprint, fingerprint, same_fingerprint
from ds_vertical.model.state.module_state import (
    Elements,
    Pairs,
    PlaceItem,
    TensorItem,
    Version,
    lies_over,
    put_back,
    same_bits,
    tensor_over,
    tensors_of,
)
from ds_vertical.model.state.survey import OUTSIDE
from ds_vertical.model.state.tracks import Track, TrackedState
from ds_vertical.model.tensor_refs import key_of

_SMALL: Final = 1 << 12  # elements of a tensor of which a block gets a copy that it may write


class FoundElements:
    """The elements, at a block's call, of the tensors without gradient, and of the NumPy arrays, that the block finds.

    `copies`: the elements are kept; else, of what stands `near`, their fingerprints. The step is to start over with copies once
    a tensor was written, or was given other memory. Of what other blocks have made, torch's count alone tells that it was
    written: with a look at all of it in each block a step would take the square of the time.
    """

    def __init__(self, tracked: TrackedState, pairs: Pairs, near: Pairs, copies: bool) -> None:
        self._tracked = tracked
        self._found: list[tuple[torch.Tensor, int, torch.Tensor, Elements | Fingerprint | None]] = []
        self._num_watched = 0
        if not pairs:
            return
        watched = {id(tensor): tensor for tensor in _without_gradient(near)}
        others = [tensor for tensor in _without_gradient(pairs) if id(tensor) not in watched]
        self._found += [(each, each._version, each.data, _kept(each, copies)) for each in watched.values()]
        self._found += [(each, each._version, each.data, Elements.of(each) if copies else None) for each in others]
        self._num_watched = len(watched)

    def restore(self) -> list[tuple[torch.Tensor, Elements]]:
        """Give tensors that were written in place since the call, or given other memory, what they held then. Returns what they
        hold now.

        Raises StateMissed where there is such a tensor and no elements were kept.
        """
        written = [
            (tensor, before)
            for index, (tensor, count, memory, before) in enumerate(self._found)
            if tensor._version != count
            or not lies_over(tensor, memory)
            or (index < self._num_watched and not _is_as_kept(tensor, before))
        ]
        if not all(isinstance(before, Elements) for _, before in written):
            self._tracked.copy_from_now_on(f"a tensor of shape {tuple(written[0][0].shape)} that a block finds in state")
        now = [(tensor, Elements.of(tensor)) for tensor, _ in written]
        for tensor, before in written:
            assert isinstance(before, Elements)
            before.restore(tensor)
        return now


class _Given:
    """The objects that a block is given and may write into. `were_empty`: at the call they were lists and dicts, in which
    nothing lay."""

    def __init__(self, values: Sequence[object]) -> None:
        self.values = values
        self.were_empty = not any(type(each) not in (dict, list) or each for each in values)

    @cached_property
    def pairs(self) -> Pairs:
        """The containers among the objects with their contents at the call. Asked for then, unless they were empty."""
        if self.were_empty:
            found = (container_of(value, given=True) for value in self.values)
            return tuple((container, Contents()) for container in found if container is not None)
        return tuple((container, container.read()) for container in containers(self.values, given=True))


class BlockState:
    """The state that a block's call finds, so that the recompute in the backward finds it, too.

    It also keeps the block's graph apart from the rest. While the block runs, a twin (a detached copy over the same storage)
    stands for each tensor that requires grad and that the block can reach, as for its arguments. What the block writes that
    requires grad is an output of the block, like those that it returns. A small tensor it may write in place (`aux += ...`): it
    gets a copy of the twin.

    `tracks`: of the items that the block may find. `values`: the objects that it is given and may write into. `copies`: the
    elements of tensors that require no grad are kept, too.
    """

    def __init__(
        self, tracked: TrackedState, block: int, tracks: Sequence[Track], values: Sequence[object], copies: bool
    ) -> None:
        self._tracked = tracked
        self._block = block
        self._given = _Given(values)
        self._began_empty = not tracks and self._given.were_empty
        self._quiet: set[int] = set()
        self._versions: list[tuple[Track, Version]] = []
        self._lent: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id: a copy of a twin, and the twin
        self._elements: FoundElements | None = None
        if not self._began_empty:
            quiet = (track for track in tracks if tracked.is_quiet(track) and not any(tensors_of(track.installed)))
            self._quiet = {id(track) for track in quiet}  # and nothing of them is lent
            self._versions += [(track, self._now_of(track, track.installed)) for track in tracks]
            near = [t for t, _ in self._versions if t.item.region in (OUTSIDE, block)]
            self._elements = FoundElements(tracked, self._pairs(), self._pairs(near), copies)

    def _found_nothing(self) -> bool:
        """Whether no state changes, and the block was given no objects but empty lists and dicts."""
        return self._began_empty and not self._versions

    def is_empty(self) -> bool:
        """Whether, besides, these lists and dicts are empty now. transformers gives every block a dict in which to collect
        outputs, and most calls leave it empty."""
        return self._found_nothing() and not any(self._given.values)

    def _now_of(self, track: Track, last: Version) -> Version:
        return last if id(track) in self._quiet else track.item.capture(last)

    def _pairs(self, tracks: Collection[Track] | None = None) -> Pairs:
        """All places and containers with their contents at the call; of places those of these tracks alone."""
        wanted = None if tracks is None else set(map(id, tracks))
        versions = (pair for pair in self._versions if wanted is None or id(pair[0]) in wanted)
        places = (pair for track, version in versions if isinstance(track.item, PlaceItem) for pair in version)
        return _once((*places, *self._given.pairs))

    def inputs(self) -> list[torch.Tensor]:
        """The tensors that require grad which the block can reach, each once."""
        if self._found_nothing():
            return []
        return list({id(tensor): tensor for _, tensor in tensors_of(self._pairs())}.values())

    def lend(self, twins: dict[int, torch.Tensor]) -> None:
        """Put twins in the places of the tensors, for the time in which the block runs. `twins`: by the tensors' ids."""
        if not twins or self._found_nothing():
            return
        own = {id(tensor) for tensor in self.inputs()}
        lent = {key: twin.clone() if key in own and twin.numel() <= _SMALL else twin for key, twin in twins.items()}
        self._lent = {id(copy): (copy, twins[key]) for key, copy in lent.items() if copy is not twins[key]}
        for container, contents in self._pairs():
            if (changed := contents.replaced(partial(with_tensors, replaced=lent))) is not None:
                container.write(changed)

    def settle(self, twins: dict[int, torch.Tensor], originals: dict[int, torch.Tensor]) -> None:
        """The block has run: put the tensors back in the places of their twins. `originals`: the tensors, by their ids."""
        known = {id(track) for track, _ in self._versions}
        self._tracked.learn([self._block])
        for track in self._tracked.tracks:  # new ones: they were at the call what they were before the step
            if id(track) not in known and (track.item.region in (OUTSIDE, self._block) or isinstance(track.item, PlaceItem)):
                self._versions.append((track, track.base))
        if self.is_empty():
            return
        given = {id(twin): originals[key] for key, twin in twins.items()}
        given |= {id(copy): given[id(twin)] for copy, twin in self._lent.values() if copy._version == 0}  # not written
        self._lent = {}
        _replace(self._now(), given)

    def written(self, but: Collection[int] = ()) -> dict[tuple[int, ...], torch.Tensor]:
        """The tensors that require grad and that the block has left in what it found, by position, but those with an id in
        `but`."""
        return {place: tensor for place, tensor in tensors_of(self._now()) if id(tensor) not in but}

    def replace(self, leaves: dict[int, torch.Tensor]) -> None:
        """Put leaves in the places of the tensors that the block has written, from now on. `leaves`: by these tensors' ids."""
        if leaves:
            _replace(self._now(), leaves)

    def tensors(self) -> set[int]:
        """Keys (`tensor_refs.key_of`) of the storages whose elements are kept as versions of an item."""
        items = (track.item for track, _ in self._versions)
        return {key_of(item.tensor.untyped_storage()) for item in items if isinstance(item, TensorItem)}

    def _now(self) -> Pairs:
        if self.is_empty():
            return ()
        versions = [self._now_of(track, last) for track, last in self._versions if isinstance(track.item, PlaceItem)]
        places = [pair for version in versions for pair in version]
        return _once((*places, *self._carried_now()))

    def _carried_now(self) -> Pairs:
        if not self._given.pairs or self.is_empty():
            return tuple((container, Contents()) for container, _ in self._given.pairs)
        below = containers([container.owner for container, _ in self._given.pairs], given=True)
        return tuple((container, container.read()) for container in below)

    @contextlib.contextmanager
    def replayed(self, twins: dict[int, torch.Tensor]) -> Iterator[Callable[[], None]]:
        """Within the block all state is as at the call, with the twins in the tensors' places; afterwards it is as before.

        It gives a function, to be called once the block's forward has run again: from then on places hold what they held
        before, and what hooks of the backward write there stays. The elements of tensors are put back at the end of the block
        only: autograd may have saved them.
        """
        after = [(track, self._now_of(track, track.installed)) for track, _ in self._versions]
        carried = self._carried_now()
        now: list[tuple[torch.Tensor, Elements]] = []
        waiting = [
            (track, version)
            for (track, version), (_, before) in zip(after, self._versions, strict=True)
            if not (version is before and id(track) in self._quiet)
        ]
        places = [pair for pair in waiting if isinstance(pair[0].item, PlaceItem)]

        def put_call_there() -> None:
            now.extend([] if self._elements is None else self._elements.restore())
            self._install([held for _, held in after])
            self.lend(twins)

        def put_places_back() -> None:
            nonlocal carried
            put_back(carried)
            carried = ()
            while places:
                track, version = places.pop()
                track.item.install(version)

        def put_all_back() -> None:
            put_places_back()
            for track, version in waiting:
                if not isinstance(track.item, PlaceItem):
                    track.item.install(version)
            for tensor, elements in now:
                elements.restore(tensor)

        with Changed(put_all_back, put_call_there):
            yield put_places_back

    def _install(self, held: Sequence[Version]) -> None:
        """Let everything hold what it held at the call. `held`: what each track holds now."""
        for (track, version), now_held in zip(self._versions, held, strict=True):
            if version is not now_held:
                track.item.install(version)
        put_back(self._given.pairs)


def tensors_in_objects(values: Iterable[object]) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """The tensors that require grad in objects among the values, with their positions."""
    objects = [value for value in values if not isinstance(value, torch.Tensor) and container_of(value, given=True)]
    return list(tensors_of((each, each.read()) for each in containers(objects, given=True))) if objects else []


def replace_in_objects(values: Iterable[object], leaves: dict[int, torch.Tensor]) -> None:
    """Let leaves stand for tensors in objects among the values, by id."""
    objects = [value for value in values if not isinstance(value, torch.Tensor) and container_of(value, given=True)]
    if objects:
        _replace(tuple((each, each.read()) for each in containers(objects, given=True)), leaves)


def _replace(pairs: Pairs, replaced: dict[int, torch.Tensor]) -> None:
    for container, contents in pairs:
        if (changed := contents.replaced(partial(with_tensors, replaced=replaced))) is not None:
            container.write(changed)


def _kept(tensor: torch.Tensor, copies: bool) -> Elements | Fingerprint:
    return Elements.of(tensor) if copies else fingerprint(tensor)


def _is_as_kept(tensor: torch.Tensor, kept: Elements | Fingerprint | None) -> bool:
    """Whether a tensor holds what it held, by its elements or their fingerprint: torch does not count writes by `.data`."""
    if isinstance(kept, Elements):
        return same_bits(tensor, kept.copy)
    return kept is None or same_fingerprint(kept, fingerprint(tensor))


def _without_gradient(pairs: Pairs) -> list[torch.Tensor]:
    """The tensors in containers that require no grad and count how often they are written, each once, and a tensor over each
    NumPy array."""
    values = [value for _, contents in pairs for _, value in contents.carriers]
    found = (tensor for value in values for _, tensor in tensors_in(value))
    plain = (t for t in found if not (t.requires_grad or t.is_inference() or t.layout is not torch.strided or t.is_meta))
    arrays = {id(value): value for value in values if isinstance(value, np.ndarray) and not isinstance(value, np.memmap)}
    over = [tensor for array in arrays.values() if (tensor := tensor_over(array)) is not None]
    return [*{id(tensor): tensor for tensor in plain}.values(), *over]


def _once(pairs: Iterable[tuple[Container, Contents]]) -> Pairs:
    """Each container once, in the order in which they come."""
    found: dict[Hashable, tuple[Container, Contents]] = {}
    for container, contents in pairs:
        found.setdefault(owner_key(container), (container, contents))
    return tuple(found.values())
