"""A snapshot of all state that a survey has found, taken before a step, and the search for what has changed since.

A step compares state with its snapshot many times, and nearly always nothing has changed. So lists, dicts and names are
compared all at once, and single ones only where that comparison fails.

[Note: a device's answers] Whether a tensor on a device beside the host holds other bits, only the device can tell: torch counts
not all writes. It compares them as they are when it comes to the question, between what it is given before and after, and the
host would wait for all that it was given before. So a step asks behind each prefix, and looks at the answers twice. Behind its
first forward, since a loop of the three calls (engine(...), backward, step) has got no outputs by then, and the step can start
over. And behind its last forward: nothing of the step counts by then. What has changed is found, even if put back meanwhile.
"""

from __future__ import annotations

import contextlib
import gc
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final, NoReturn

import numpy as np
import torch
from torch import nn

from ds_vertical.errors import LayerError
from ds_vertical.model.state.containers import Container, Contents, container_of
from ds_vertical.model.state.fingerprints import LARGEST_NUMEL, Fingerprint, fingerprint, num_bytes_read, same_fingerprint
from ds_vertical.model.state.module_state import (
    Answer,
    Elements,
    GeneratorItem,
    Item,
    Pairs,
    PlaceItem,
    TensorItem,
    Version,
    differs,
    lies_over,
    streams_of,
    tensor_over,
)
from ds_vertical.model.state.survey import OUTSIDE, Names, StateSlot

SMALL_NUMEL: Final = 1 << 16  # elements of a tensor that is copied in every step, lest it change for the first time
MOST_BYTES: Final = 1 << 28  # of all tensors without a copy that one look reads for their fingerprints


@dataclass(frozen=True)
class StateChange:
    """An item that has changed, and its version `before`; that is None for a tensor that was too large to be copied."""

    item: Item
    before: Version


@dataclass(frozen=True, eq=False)
class _Elements:
    """A tensor, or a NumPy array (`owner`), in a snapshot. `before`: a copy of its elements; None where it is too large.
    `memory`: what it lay over. `version`: torch's count of its in-place writes; None where there is none. `told`: of the
    elements without a copy, of this `share` of them; None of an array in a file."""

    path: str
    region: int
    owner: object
    tensor: torch.Tensor
    before: Elements | None
    memory: torch.Tensor
    version: int | None
    told: Fingerprint | None = None
    share: float = 1.0

    def has_changed(self, whole: bool) -> Answer:
        """Whether the elements, or their memory, are others than then. Without a copy only if `whole` by the elements, else by
        the count of writes: some kernels (batch norm's), NumPy and `.data` do not count."""
        if not lies_over(self.tensor, self.memory):
            return True
        if self.before is not None:
            return differs(self.tensor, self.before.copy)
        if self.version is not None and self.tensor._version != self.version:
            return True
        return whole and self.told is not None and self._tells_otherwise(self.told)

    def _tells_otherwise(self, told: Fingerprint) -> Answer:
        now = fingerprint(self.tensor, self.share)
        if isinstance(told, torch.Tensor) and isinstance(now, torch.Tensor):
            return differs(told, now)
        return not same_fingerprint(told, now)


class _Asked:
    """Tensors of which a device is to say whether they have changed. See [Note: a device's answers]."""

    def __init__(self) -> None:
        self._answers: dict[int, tuple[_Elements, torch.Tensor]] = {}

    def note(self, each: _Elements, answer: torch.Tensor) -> None:
        """Let an answer join those that have been noted of the same tensor: one of them is enough."""
        _, before = self._answers.get(id(each.owner), (each, None))
        self._answers[id(each.owner)] = each, answer if before is None else before.logical_or(answer)

    def changed(self) -> list[_Elements]:
        """Wait for the answers noted so far, and forget them; those that have changed."""
        asked, self._answers = list(self._answers.values()), {}
        if not asked:
            return []
        device = asked[0][1].device
        told = torch.stack([answer.to(device) for _, answer in asked]).tolist()
        return [each for (each, _), has_changed in zip(asked, told, strict=True) if has_changed]


_VALUES: Final = operator.methodcaller("values")


class _ListsAndDicts:
    """What many lists and dicts held at the moment of a snapshot: nearly all that it compares, so one call compares them
    all."""

    def __init__(self, names: Sequence[Names], containers: Sequence[tuple[Container, Contents]]) -> None:
        lists = [pair for pair in containers if isinstance(pair[0].live, list)]
        dicts = [pair for pair in containers if not isinstance(pair[0].live, list)]
        held = [*((each.owner, each.before) for each in names), *((container.live, contents) for container, contents in dicts)]
        self._dicts = [mapping for mapping, _ in held]
        self._lists = [container.live for container, _ in lists]
        self._attributes = [container.attributes for container, _ in containers if container.attributes is not None]
        self._sizes = [len(before) for _, before in (*held, *lists)]
        self._keys = [key for _, before in held for key in before]
        self._values = [value for _, before in (*held, *lists) for value in before.values()]

    def are_same(self) -> bool:
        """Whether all of them hold the same objects as then, under the same keys in the same order."""
        values = chain(map(_VALUES, self._dicts), self._lists)
        return (
            list(map(len, chain(self._dicts, self._lists))) == self._sizes
            and all(map(operator.is_, chain.from_iterable(values), self._values))
            and all(map(operator.is_, chain.from_iterable(self._dicts), self._keys))
            and not any(self._attributes)
        )


class Snapshot:
    """The state at the places and names of a survey, and of all that they lead to, at one moment; `changes` compares.

    `closely`: all tensors but the largest (LARGEST_NUMEL) are copied and compared bit by bit; otherwise only the small ones
    (SMALL_NUMEL). Of any other tensor its count of in-place writes tells whether it has changed, and its fingerprint where
    `changes` is to look at the `whole`. Of more such tensors than make MOST_BYTES each fingerprint is of pieces.
    """

    def __init__(self, slots: Sequence[StateSlot], names: Sequence[Names], closely: bool = True) -> None:
        self._slots = slots
        self._closely = closely
        self._names = names
        values = [slot.place.read() for slot in slots]
        keys = {each.key for each in names}
        self._places: dict[Any, list[tuple[StateSlot, Contents]]] = {}  # by the key of the names that they are among
        for slot, before in zip(slots, values, strict=True):
            if slot.place.is_constant:
                continue
            owner = slot.place.owner
            key = owner[0] if isinstance(owner, tuple) and owner[0] in keys else None
            self._places.setdefault(key, []).append((slot, before))
        self._containers: dict[int, tuple[str, int, Container, Contents]] = {}
        self._tensors: dict[int, _Elements] = {}
        self._generators: dict[int, tuple[GeneratorItem, Any]] = {}
        self._held: list[Any] = []  # so that no other object takes the id of one
        self._asked = _Asked()
        carriers = [
            (slot.region, slot.path, value)
            for slot, contents in zip(slots, values, strict=True)
            for _, value in contents.carriers
        ]
        carriers += [(each.region, path, value) for each in names for path, value in each.carriers()]
        for region, path, value in sorted(carriers, key=operator.itemgetter(0)):
            self._note(path, region, (value,))
        self._take_fingerprints()
        pairs = [(container, contents) for _, _, container, contents in self._containers.values()]
        self._lists_and_dicts = _ListsAndDicts(names, [pair for pair in pairs if pair[0].is_list_or_dict()])
        self._others = [each for each in self._containers.values() if not each[2].is_list_or_dict()]

    @property
    def owners(self) -> set[int]:
        """Ids of the dicts that hold the survey's names."""
        return {id(names.owner) for names in self._names}

    def items(self) -> Iterator[Item]:
        """An item for everything that the snapshot holds."""
        for slot in self._slots:
            yield PlaceItem(slot.path, slot.region, slot.place)
        for names in self._names:
            for path, place, _ in names.places():
                yield PlaceItem(path, names.region, place)
        for path, region, container, _ in self._containers.values():
            yield PlaceItem(path, region, container)
        for each in self._tensors.values():
            yield TensorItem(each.path, each.region, each.tensor, each.owner)
        for item, _ in self._generators.values():
            yield item

    def _note(self, path: str, region: int, values: Iterable[object]) -> None:
        """Note what some values lead to. What two regions lead to has the region OUTSIDE."""
        waiting = list(values)
        while waiting:
            value = waiting.pop()
            self._note_leaf(path, region, value)
            if isinstance(value, tuple):
                waiting.extend(value)
                continue
            known = self._containers.get(id(value))
            if known is not None and known[1] in (OUTSIDE, region):
                continue
            container = known[2] if known is not None else container_of(value)
            if container is None:
                continue
            contents = known[3] if known is not None else container.read()
            where = region if known is None else OUTSIDE
            self._containers[id(value)] = (path, where, container, contents)
            if where == region:
                waiting.extend(each for _, each in contents.carriers)
            else:
                self._note(path, OUTSIDE, (each for _, each in contents.carriers))

    def _note_leaf(self, path: str, region: int, value: object) -> None:
        if isinstance(value, nn.Parameter) or (isinstance(value, torch.Tensor) and value.is_meta):
            return
        if isinstance(value, torch.Tensor | np.ndarray):
            self._note_elements(path, region, value)
            return
        streams = streams_of(value)
        if streams is not None:
            known_item = self._generators.get(id(value))
            where = region if known_item is None or known_item[0].region == region else OUTSIDE
            self._held.append(value)
            self._note_generator(id(value), GeneratorItem(path, where, streams, id(value)))

    def _note_elements(self, path: str, region: int, value: torch.Tensor | np.ndarray) -> None:
        known = self._tensors.get(id(value))
        if known is not None:
            self._tensors[id(value)] = replace(known, region=region if known.region == region else OUTSIDE)
            return
        tensor = value if isinstance(value, torch.Tensor) else tensor_over(value)
        if tensor is None or tensor.layout is not torch.strided:
            return
        copied = tensor.numel() <= (LARGEST_NUMEL if self._closely else SMALL_NUMEL)
        counts = tensor is value and not tensor.is_inference()
        memory = tensor.data
        before = Elements(tensor.detach().clone(), memory) if copied else None
        version = tensor._version if counts else None
        self._tensors[id(value)] = _Elements(path, region, value, tensor, before, memory, version)

    def _take_fingerprints(self) -> None:
        """Of the tensors without a copy: of all their elements, or of the share that makes MOST_BYTES."""
        large = {key: each for key, each in self._tensors.items() if each.before is None}
        read = {key: each for key, each in large.items() if not isinstance(each.owner, np.memmap)}
        share = min(1.0, MOST_BYTES / max(1, sum(num_bytes_read(each.tensor) for each in read.values())))
        for key, each in read.items():
            self._tensors[key] = replace(each, told=fingerprint(each.tensor, share), share=share)

    def _note_generator(self, key: int, item: GeneratorItem) -> None:
        self._generators[key] = (item, self._generators[key][1] if key in self._generators else item.capture())

    def changes(self, regions: Iterable[int] | None = None, whole: bool = False, waits: bool = True) -> Iterator[StateChange]:
        """What has changed since the snapshot, in these regions and OUTSIDE; None: everywhere. `whole`: tensors of which there
        is no copy are read from end to end, for writes that torch does not count. `waits` False: what a device was asked here
        is told by the next call that waits, beside what that call finds."""
        wanted = None if regions is None else {OUTSIDE, *regions}
        most_are_same = self._lists_and_dicts.are_same()
        near = [] if most_are_same else [each for each in self._names if wanted is None or each.region in wanted]
        yield from self._changed_names([each for each in near if not each.are_same()], wanted)
        for path, region, container, before in self._others if most_are_same else self._containers.values():
            if (wanted is None or region in wanted) and not container.holds(before):
                yield StateChange(PlaceItem(path, region, container), self._pairs(container, before))
        for each in self._tensors.values():
            if wanted is None or each.region in wanted:
                yield from self._told(each, each.has_changed(whole))
        for each in self._asked.changed() if waits else ():
            yield from self._told(each, True)
        for item, before in self._generators.values():
            if (wanted is None or item.region in wanted) and not item.same(item.capture(), before):
                yield StateChange(item, before)

    def _told(self, each: _Elements, answer: Answer) -> Iterator[StateChange]:
        if isinstance(answer, torch.Tensor):
            self._asked.note(each, answer)
        elif answer:
            yield StateChange(TensorItem(each.path, each.region, each.tensor, each.owner), each.before)

    def _changed_names(self, touched: Sequence[Names], wanted: set[int] | None) -> Iterator[StateChange]:
        """What has changed at places: at those that belong to none of the names, and at those of the `touched` names."""
        for key in (None, *(names.key for names in touched)):
            for slot, before in self._places.get(key, ()):
                if (wanted is None or slot.region in wanted) and not slot.place.holds(before):
                    yield StateChange(PlaceItem(slot.path, slot.region, slot.place), self._pairs(slot.place, before))
        for names in touched:
            for path, place, before in names.places():
                if not place.holds(before):
                    yield StateChange(PlaceItem(path, names.region, place), self._pairs(place, before))
            for path, place in names.new():
                yield StateChange(PlaceItem(path, names.region, place), ((place, Contents()),))

    def _pairs(self, place: Container, contents: Contents) -> Pairs:
        """A place and all containers below it, with their contents at the moment of the snapshot (`module_state.deep`: now)."""
        pairs: dict[int, tuple[Container, Contents]] = {id(place.owner): (place, contents)}
        waiting = [value for _, value in contents.carriers]
        while waiting:
            value = waiting.pop(0)
            if isinstance(value, tuple | frozenset):
                waiting.extend(value)
            elif id(value) in self._containers and id(value) not in pairs:
                pairs[id(value)] = self._containers[id(value)][2:]
                waiting.extend(each for _, each in self._containers[id(value)][3].carriers)
        return tuple(pairs.values())


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Within the block Python's garbage collector is off. A survey makes thousands of objects, none of them garbage, and they
    would set it going."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def refuse_large(item: Item) -> NoReturn:
    """Raise LayerError: the tensor of an item has changed, and there is no copy of what it held before."""
    assert isinstance(item, TensorItem)
    numel = item.tensor.numel()
    if numel > LARGEST_NUMEL:
        raise LayerError(
            f"{item.path} is written during the forward, or given other memory, and has {numel} elements; a tensor of more than"
            f" {LARGEST_NUMEL} is not copied for each micro-batch: write it outside the forward, or into several smaller"
            " tensors"
        )
    raise LayerError(
        f"{item.path} ({numel} elements) is written during the forward, or given other memory, for the first time, after steps"
        " that did neither, so there is no copy of what it held before; write it in the first step, too, and load the last"
        " checkpoint"
    )
