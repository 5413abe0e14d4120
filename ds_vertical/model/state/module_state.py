"""Items of state, which a forward may change: a place and what lies below it, a tensor's elements, a generator.

An item is captured, which gives a version, and a version is installed, which puts the state back. A version holds references to
what a forward replaces, and copies of what it writes in place.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn

from ds_vertical.errors import LayerError
from ds_vertical.interrupts import Changed
from ds_vertical.io.streams import works_beside_host
from ds_vertical.model.state.containers import (
    Container,
    Contents,
    TooManyError,
    containers,
    owner_key,
    same_contents,
    same_value,
    tensors_in,
)
from ds_vertical.model.state.fingerprints import flat_of
from ds_vertical.model.state.survey import OUTSIDE

Pairs = tuple[tuple[Container, Contents], ...]
Version = Any  # `Pairs` of a `PlaceItem`, `Elements` of a `TensorItem`, the library's own object of a `GeneratorItem`
Answer = bool | torch.Tensor  # of a device that has yet to come to the question: a tensor
Streams = tuple[Callable[[], Version], Callable[[Version], None]]  # reads the state of a generator; sets it


# ---- items


class Item(Protocol):
    """One piece of state that may change.

    `path` names it in messages. `region`: the number of the block that alone leads to it, or `survey.OUTSIDE`. `is_global`: all
    code may draw from it, as from Python's own generator.
    """

    path: str
    region: int
    is_generator: bool
    is_global: bool

    def capture(self, last: Version = None) -> Version:
        """The version that the item holds now, in which nothing is written in place any more. If that is `last`, `last`
        itself."""
        ...

    def install(self, version: Version) -> None:
        """Let the item hold a version."""
        ...

    def same(self, one: Version, other: Version) -> bool:
        """Whether two versions are equal."""
        ...


class PlaceItem:
    """A place with all containers below what stands there. A version: pairs of container and contents, the place's first."""

    is_generator = is_global = False

    def __init__(self, path: str, region: int, place: Container) -> None:
        self.path, self.region, self.place = path, region, place

    def capture(self, last: Pairs | None = None) -> Pairs:
        """The place and all containers below it with their contents now; `last` where they hold what they held then."""
        if last is not None and all(container.holds(contents) for container, contents in last):
            return last
        return deep(self.place, self.path)

    def install(self, version: Pairs) -> None:
        """Let each container of a version hold its contents of then."""
        put_back(version)

    def same(self, one: Pairs, other: Pairs) -> bool:
        """Whether two versions have the same containers with the same contents."""
        return (
            one is other
            or len(one) == len(other)
            and all(a.owner is b.owner and same_contents(c, d) for (a, c), (b, d) in zip(one, other, strict=True))
        )


class Elements(NamedTuple):
    """What a tensor holds at one moment: a copy, and the memory over which it lies, as a tensor of its own.

    `tensor.data = other` gives a tensor other memory, which it shares from then on with whatever else lies there.
    """

    copy: torch.Tensor
    memory: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Elements:
        """What a tensor holds now."""
        return cls(tensor.detach().clone(), tensor.data)

    def restore(self, tensor: torch.Tensor) -> None:
        """Let a tensor lie over the memory of then, and that hold what it held."""
        if not lies_over(tensor, self.memory):
            tensor.data = self.memory
        tensor.data.copy_(self.copy)  # .data: what autograd has saved of it counts no write

    def same(self, other: Elements) -> bool:
        """Whether the memory is the same, with the same bits in it."""
        return lies_over(self.memory, other.memory) and same_bits(self.copy, other.copy)


def lies_over(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    """Whether both tensors have the same elements, in one memory."""
    one, other = ((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (tensor, memory))
    return one == other


class TensorItem:
    """The elements of a tensor that is written in place, or given other memory. `owner`: the tensor, or the NumPy array over
    whose memory `tensor` lies."""

    is_generator = is_global = False

    def __init__(self, path: str, region: int, tensor: torch.Tensor, owner: object) -> None:
        self.path, self.region, self.tensor, self.owner = path, region, tensor, owner

    def capture(self, last: Elements | None = None) -> Elements:
        """A copy of the elements, and their memory."""
        return Elements.of(self.tensor)

    def install(self, version: Elements) -> None:
        """Give the tensor the memory and the elements of a version."""
        version.restore(self.tensor)

    def same(self, one: Elements, other: Elements) -> bool:
        """Whether two versions have the same memory and the same bits."""
        return one.same(other)


class GeneratorItem:
    """A generator of random numbers. A version: its state, as its library gives it.

    `streams`: the functions that read and write the state. `is_global`: all code draws from it (Python's own, NumPy's own), so
    each micro-batch has a stream of its own, as of torch's.
    """

    is_generator = True

    def __init__(self, path: str, region: int, streams: Streams, key: int, is_global: bool = False) -> None:
        self.path, self.region, self.key, self.is_global = path, region, key, is_global
        self._read, self._write = streams

    def capture(self, last: Version = None) -> Version:
        """The state of the generator."""
        return self._read()

    def install(self, version: Version) -> None:
        """Set the state of the generator."""
        self._write(version)

    def same(self, one: Version, other: Version) -> bool:
        """Whether two states are equal."""
        return _same_state(one, other)


def key_of_item(item: Item) -> Hashable:
    """Tells an item from others while what it stands for lives."""
    if isinstance(item, PlaceItem):
        return owner_key(item.place)
    if isinstance(item, TensorItem):
        return "tensor", id(item.owner)
    assert isinstance(item, GeneratorItem)
    return "generator", item.key


def deep(place: Container, path: str) -> Pairs:
    """A place and all containers below it, with their contents now. Raises LayerError where they are too many."""
    contents = place.read()
    try:
        below = containers(value for _, value in contents.carriers)
    except TooManyError:
        raise LayerError(
            f"{path} changes during the forward and holds too many objects to be kept for each micro-batch; keep what changes"
            ' in an object of its own, or set vertical_schedule.order to "horizontal", which is exact'
        ) from None
    return ((place, contents), *((container, container.read()) for container in below))


def put_back(pairs: Iterable[tuple[Container, Contents]]) -> None:
    """Let each container hold the contents it is paired with; one that holds them already is not written."""
    for container, contents in pairs:
        if not container.holds(contents):
            container.write(contents)


def equal_values(one: Pairs, other: Pairs) -> bool:
    """Whether two versions hold the same values, in containers that need not be the same objects: a list made anew."""
    if len(one) != len(other):
        return False
    for (_, before), (_, now) in zip(one, other, strict=True):
        if list(before) != list(now):
            return False
        for old, new in zip(before.values(), now.values(), strict=True):
            if not (same_value(old, new) or (type(old) is type(new) and isinstance(old, list | dict))):
                return False
    return True


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits."""
    return not bool(differs(one, other))


def differs(one: torch.Tensor, other: torch.Tensor) -> Answer:
    """Whether two tensors differ in shape, dtype or bits. A device beside the host compares the bits when it comes to it: its
    answer is a tensor of one truth value, for which nobody has waited."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return True
    if one.numel() == 0:
        return False
    if not works_beside_host(one.device):
        return not torch.equal(_bytes(one), _bytes(other))
    return _bytes(one).ne(_bytes(other)).any()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return flat_of(tensor).view(torch.uint8)


def tensor_over(array: np.ndarray) -> torch.Tensor | None:
    """A tensor over the memory of a NumPy array; None where torch has no such tensor, or the array cannot be written."""
    try:
        return torch.from_numpy(array) if array.flags.writeable else None
    except (TypeError, ValueError):
        return None


def _same_state(one: Version, other: Version) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same_state(one[key], other[key]) for key in one)
    if isinstance(one, tuple) and not {int}.issuperset(map(type, one)):  # hundreds of them are Python's generator
        return len(one) == len(other) and all(map(_same_state, one, other))
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else one == other


# ---- generators


def global_generators() -> list[GeneratorItem]:
    """Python's and NumPy's own generators, which any code may use without holding them."""
    numpy_streams = (partial(np.random.get_state, legacy=False), np.random.set_state)
    return [
        GeneratorItem("Python's random", OUTSIDE, (random.getstate, random.setstate), id(random), is_global=True),
        GeneratorItem("NumPy's random", OUTSIDE, numpy_streams, id(np.random), is_global=True),
    ]


def seeded_states(seed: int) -> list[Version]:
    """The states of `global_generators` for a seed, in their order."""
    legacy = np.random.RandomState(seed % (1 << 32))
    return [random.Random(seed).getstate(), legacy.get_state(legacy=False)]


@contextlib.contextmanager
def global_generators_seeded(seed: int) -> Iterator[None]:
    """Within the block Python's and NumPy's own generators give the numbers of a seed."""
    items = global_generators()
    before = [item.capture() for item in items]

    def install(states: Iterable[Version]) -> None:
        for item, state in zip(items, states, strict=True):
            item.install(state)

    with Changed(partial(install, before), partial(install, seeded_states(seed))):
        yield


def streams_of(value: object) -> Streams | None:
    """The functions that read and set the state of a generator that a module or object holds; None for any other value."""
    if isinstance(value, torch.Generator) and value is not torch.default_generator:
        return value.get_state, partial(_call, value.set_state)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate, value.setstate
    if isinstance(value, np.random.RandomState):
        return partial(value.get_state, legacy=False), value.set_state
    if isinstance(value, np.random.Generator):
        source = value.bit_generator
        return partial(getattr, source, "state"), partial(setattr, source, "state")
    return None


def _call(function: Callable[[Version], object], value: Version) -> None:
    function(value)


def tensors_of(pairs: Iterable[tuple[Container, Contents]]) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """The tensors that require grad in containers, with their positions: the numbers of the container, of the key in it, and of
    each tuple's member on the way."""
    for number, (_, contents) in enumerate(pairs):
        for index, value in contents.carriers:
            for place, tensor in tensors_in(value):
                if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                    yield (number, index, *place), tensor
