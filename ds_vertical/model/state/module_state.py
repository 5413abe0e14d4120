"""State of a forward that changes, as items: a place and what lies below it, a tensor's elements, a generator.

An `Item` can be captured and put back. A capture holds references to what is replaced and copies of what is written in place.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from ds_vertical.errors import LayerError
from ds_vertical.model.state.containers import Container, Contents, TooMany, containers, same_contents, tensors_in
from ds_vertical.model.state.survey import OUTSIDE

Pairs = tuple[tuple[Container, Contents], ...]
Streams = tuple[Callable[[], Any], Callable[[Any], None]]  # what reads a generator's state, and what sets it


# ---- items


class Item(Protocol):
    """State that changes. Of one version, nothing is written in place any more."""

    path: str
    region: int
    is_generator: bool
    is_global: bool

    def capture(self, last: Any = None) -> Any:
        """`last`: a version that may still stand there; then it is returned."""
        ...

    def install(self, version: Any) -> None: ...

    def same(self, one: Any, other: Any) -> bool: ...


class PlaceItem:
    """A place with all containers below what stands there. A version: pairs of container and contents."""

    is_generator = is_global = False

    def __init__(self, path: str, region: int, place: Container) -> None:
        self.path, self.region, self.place = path, region, place

    def capture(self, last: Pairs | None = None) -> Pairs:
        if last is not None and all(container.holds(contents) for container, contents in last):
            return last
        return deep(self.place, self.path)

    def install(self, version: Pairs) -> None:
        put_back(version)

    def same(self, one: Pairs, other: Pairs) -> bool:
        return (
            one is other
            or len(one) == len(other)
            and all(a.owner is b.owner and same_contents(c, d) for (a, c), (b, d) in zip(one, other, strict=True))
        )


class TensorItem:
    """The elements of a tensor, or of a NumPy array (`owner`), that is written in place. A version: a copy."""

    is_generator = is_global = False

    def __init__(self, path: str, region: int, tensor: torch.Tensor, owner: Any) -> None:
        self.path, self.region, self.tensor, self.owner = path, region, tensor, owner

    def capture(self, last: torch.Tensor | None = None) -> torch.Tensor:
        return self.tensor.detach().clone()

    def install(self, version: torch.Tensor) -> None:
        self.tensor.data.copy_(version)  # .data: what autograd has saved of it counts no write

    def same(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        return same_bits(one, other)


class GeneratorItem:
    """A generator of random numbers. `streams`: how its state is read and written; `is_global`: its numbers are anybody's, so
    each micro-batch has a stream of its own, as of torch's."""

    is_generator = True

    def __init__(self, path: str, region: int, streams: Streams, key: int, is_global: bool = False) -> None:
        self.path, self.region, self.key, self.is_global = path, region, key, is_global
        self._read, self._write = streams

    def capture(self, last: Any = None) -> Any:
        return self._read()

    def install(self, version: Any) -> None:
        self._write(version)

    def same(self, one: Any, other: Any) -> bool:
        return _same_state(one, other)


def deep(place: Container, path: str) -> Pairs:
    """A place and all containers below it, with their contents now. Raises LayerError where they are too many."""
    contents = place.read()
    try:
        below = containers(value for _, value in contents.carriers)
    except TooMany:
        raise LayerError(
            f"{path} changes during the forward and holds too many objects to be kept for each micro-batch; keep what changes"
            ' in an object of its own, or set vertical_schedule.order to "horizontal", which is exact'
        ) from None
    return ((place, contents), *((container, container.read()) for container in below))


def put_back(pairs: Iterable[tuple[Container, Contents]]) -> None:
    """Make the contents of containers what they were."""
    for container, contents in pairs:
        if not container.holds(contents):
            container.write(contents)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return one.numel() == 0 or torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _same_state(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same_state(one[key], other[key]) for key in one)
    if isinstance(one, tuple) and not {int}.issuperset(map(type, one)):  # hundreds of them are Python's generator
        return len(one) == len(other) and all(map(_same_state, one, other))
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else one == other


# ---- generators


def global_generators() -> list[GeneratorItem]:
    """Python's and NumPy's own generators, which modules' code may use without holding them."""
    numpy_streams = (partial(np.random.get_state, legacy=False), np.random.set_state)
    return [
        GeneratorItem("Python's random", OUTSIDE, (random.getstate, random.setstate), id(random), is_global=True),
        GeneratorItem("NumPy's random", OUTSIDE, numpy_streams, id(np.random), is_global=True),
    ]


def seeded_states(seed: int) -> list[Any]:
    """The states of `global_generators` for a seed, in their order."""
    legacy = np.random.RandomState(seed % (1 << 32))
    return [random.Random(seed).getstate(), legacy.get_state(legacy=False)]


@contextlib.contextmanager
def global_generators_seeded(seed: int) -> Iterator[None]:
    """Within the block Python's and NumPy's own generators give the numbers of a seed."""
    items = global_generators()
    before = [item.capture() for item in items]
    try:
        for item, state in zip(items, seeded_states(seed), strict=True):
            item.install(state)
        yield
    finally:
        for item, state in zip(items, before, strict=True):
            item.install(state)


def streams_of(value: Any) -> Streams | None:
    """Of a generator of random numbers that somebody holds; None for anything else."""
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


def _call(function: Callable[[Any], Any], value: Any) -> None:
    function(value)


def tensors_of(pairs: Iterable[tuple[Container, Contents]]) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """The tensors that containers hold that require grad, with their positions: container, key, place in tuples, by number."""
    for number, (_, contents) in enumerate(pairs):
        for index, value in contents.carriers:
            for place, tensor in tensors_in(value):
                if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                    yield (number, index, *place), tensor
