"""What a forward can change besides its own variables: attributes and buffers of modules, hooks' collections, generators.

`survey` lists the places where such state may lie, `Snapshot` finds those that have changed since, and an `Item` is one of
them that changes: it can be captured and put back. A capture holds references to what is replaced and copies of what is
written in place.
"""

from __future__ import annotations

import contextlib
import contextvars
import random
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import nn

from ds_vertical.layers import LayerError
from ds_vertical.reachable import (
    MISSING,
    Container,
    Contents,
    TooMany,
    bound,
    called,
    container_of,
    containers,
    is_foreign,
    is_internal,
    is_users_module,
    names_used,
    note_home,
    owner_key,
    same_contents,
    tensors_in,
)

OUTSIDE: Final = -1  # the region of what no block holds alone; otherwise the block's number
LARGEST_NUMEL: Final = 1 << 24  # elements of a tensor that each micro-batch may have a copy of
SMALL_NUMEL: Final = 1 << 16  # elements of a tensor that is copied in every step, lest it change for the first time
_FOLLOWED: Final = (types.FunctionType, types.MethodType, partial, nn.Module)

Pairs = tuple[tuple[Container, Contents], ...]
Streams = tuple[Callable[[], Any], Callable[[Any], None]]  # what reads a generator's state, and what sets it

# what torch and DeepSpeed keep in a module's __dict__
_INTERNAL: Final = frozenset(vars(nn.Module())) | {
    "forward",
    "_compiled_call_impl",
    "_external_params",
    "pre_bwd_fn",
    "post_bwd_fn",
    "applied_pre_backward_ref_cnt",
}


# ---- places


@dataclass(frozen=True, eq=False)
class Slot:
    """A name under which a value stands: an attribute, a buffer, a global. `path`: for messages; `place`: with that one key."""

    path: str
    region: int
    place: Container

    @property
    def value(self) -> Any:
        return next(iter(self.place.read().values()), MISSING)


def entry_of(owner: dict[str, Any], name: str) -> Container:
    """The place of one entry of a dict."""

    def read() -> dict[Any, Any]:
        return {name: owner[name]} if name in owner else {}

    def write(contents: Contents) -> None:
        if name in contents:
            owner[name] = contents[name]
        else:
            owner.pop(name, None)

    return Container((id(owner), name), read, write)


def _attribute_of(cls: type, name: str) -> Container:
    def read() -> dict[Any, Any]:
        return {name: vars(cls)[name]} if name in vars(cls) else {}

    def write(contents: Contents) -> None:
        if name in contents:
            setattr(cls, name, contents[name])
        elif name in vars(cls):
            delattr(cls, name)

    return Container((cls, name), read, write)


def _cell(cell: types.CellType) -> Container:
    def read() -> dict[Any, Any]:
        try:
            return {"": cell.cell_contents}
        except ValueError:  # nothing is bound yet
            return {}

    def write(contents: Contents) -> None:
        if contents:
            cell.cell_contents = contents[""]

    return Container(cell, read, write)


def _constant(value: Any) -> Container:
    return Container(value, lambda: {"": value}, lambda _: None)


def is_state(name: str) -> bool:
    """Whether a name in a module's `__dict__` is the user's."""
    return name not in _INTERNAL and not name.startswith(("ds_", "_ds_"))


def survey(model: nn.Module, blocks: Sequence[nn.Module], functions: Sequence[Any]) -> list[Slot]:
    """Every place where a model's forward may keep state: of its modules, of what their code and hooks use, of `functions`.

    What lies in one of the `blocks` has the block's number as region.
    """
    found = _Survey(set(map(id, model.modules())))
    region_of = {id(each): index for index, block in enumerate(blocks) for each in block.modules()}
    for each in (*map(type, model.modules()), *functions):
        note_home(each)
    for path, module in model.named_modules():
        found.module(path or type(model).__name__, module, region_of.get(id(module), OUTSIDE))
    for function in functions:
        found.follow(getattr(function, "__qualname__", type(function).__name__), OUTSIDE, function)
    for variable, value in contextvars.copy_context().items():
        found.constant(f"context variable {variable.name}", OUTSIDE, value)
    return found.slots


class _Survey:
    """`registered`: ids of the model's modules, which are looked at one by one."""

    def __init__(self, registered: set[int]) -> None:
        self.slots: list[Slot] = []
        self._registered = registered
        self._seen: set[int] = set()  # functions, classes, containers and modules that are not the model's
        self._places: set[Any] = set()

    def module(self, path: str, module: nn.Module, region: int) -> None:
        own = vars(module)
        for name in filter(is_state, list(own)):
            self._add(f"{path}.{name}", region, entry_of(own, name))
        for name in own["_buffers"]:
            self._add(f"{path}.{name}", region, entry_of(own["_buffers"], name))
        for hooks in (own["_forward_hooks"], own["_forward_pre_hooks"]):
            for hook in hooks.values():
                if not is_foreign(next(called(hook), hook)):
                    note_home(next(called(hook), type(hook)))
                    self.function(f"a hook of {path}", hook, OUTSIDE)  # several modules' hooks may share what they write to
            if hooks:  # one may take itself off
                self._add(f"the hooks of {path}", region, _constant(hooks))
        if "forward" in own:
            self.function(f"{path}.forward", own["forward"], OUTSIDE)
        self._class(type(module))

    def function(self, path: str, function: Any, region: int) -> None:
        """Closures, globals and bound objects of a function, and of the user's functions that it calls."""
        for value in bound(function):
            self.constant(path, region, value)
        for each in called(function):
            if id(each) in self._seen:
                continue
            self._seen.add(id(each))
            if is_internal(each):
                continue
            for name, cell in zip(each.__code__.co_freevars, each.__closure__ or (), strict=True):
                self._value(f"{name} of {each.__qualname__}", region, _cell(cell))
            if not is_foreign(each):
                names = set(names_used(each.__code__))
                for name in names & each.__globals__.keys():
                    self._value(f"{each.__module__}.{name}", OUTSIDE, entry_of(each.__globals__, name))
                    if is_users_module(module := each.__globals__[name]):
                        for inner in names & vars(module).keys():
                            self._value(f"{module.__name__}.{inner}", OUTSIDE, entry_of(vars(module), inner))

    def _value(self, path: str, region: int, place: Container) -> None:
        value = next(iter(place.read().values()), None)
        if isinstance(value, type):
            self._class(value)
        elif not isinstance(value, types.ModuleType | types.BuiltinFunctionType):
            self._add(path, region, place)

    def _class(self, cls: type) -> None:
        for each in cls.__mro__:
            if each is nn.Module or is_foreign(each):
                return
            if id(each) in self._seen:
                continue
            self._seen.add(id(each))
            for name, value in list(vars(each).items()):
                if isinstance(value, types.FunctionType):
                    self.function(value.__qualname__, value, OUTSIDE)
                elif not (name.startswith("__") or hasattr(value, "__get__") or isinstance(value, type)):
                    self._add(f"{each.__qualname__}.{name}", OUTSIDE, _attribute_of(each, name))

    def _add(self, path: str, region: int, place: Container) -> None:
        key = owner_key(place)
        if key not in self._places:
            self._places.add(key)
            self.slots.append(Slot(path, region, place))
            for value in place.read().values():
                self.follow(path, region, value)

    def constant(self, path: str, region: int, value: Any) -> None:
        """A value that stands under no name of its own."""
        if container_of(value) is not None:
            self._add(path, region, _constant(value))
        else:
            self.follow(path, region, value)

    def follow(self, path: str, region: int, value: Any) -> None:
        """Go on to the functions, and to the modules that are not the model's, that a value leads to."""
        waiting = [value]
        while waiting:
            value = waiting.pop()
            if isinstance(value, tuple):
                waiting.extend(value)
            elif isinstance(value, _FOLLOWED):
                self._go_on(path, region, value)
            elif id(value) not in self._seen and (container := container_of(value)) is not None:
                self._seen.add(id(value))
                waiting.extend(container.read().values())

    def _go_on(self, path: str, region: int, value: Any) -> None:
        if not isinstance(value, nn.Module):
            self.function(path, value, region)
        elif id(value) not in self._registered:
            for inner, module in value.named_modules():
                if id(module) not in self._seen and id(module) not in self._registered:
                    self._seen.add(id(module))
                    self.module(f"{path}.{inner}" if inner else path, module, region)


# ---- items


class Item(Protocol):
    """State that changes. Of one version, nothing is written in place any more."""

    path: str
    region: int
    is_generator: bool
    is_global: bool

    def capture(self) -> Any: ...

    def install(self, version: Any) -> None: ...

    def same(self, one: Any, other: Any) -> bool: ...


class PlaceItem:
    """A place with all containers below what stands there. A version: pairs of container and contents."""

    is_generator = is_global = False

    def __init__(self, path: str, region: int, place: Container) -> None:
        self.path, self.region, self.place = path, region, place

    def capture(self) -> Pairs:
        return deep(self.place, self.path)

    def install(self, version: Pairs) -> None:
        put_back(version)

    def same(self, one: Pairs, other: Pairs) -> bool:
        return len(one) == len(other) and all(
            a.owner is b.owner and same_contents(c, d) for (a, c), (b, d) in zip(one, other, strict=True)
        )


class TensorItem:
    """The elements of a tensor, or of a NumPy array (`owner`), that is written in place. A version: a copy."""

    is_generator = is_global = False

    def __init__(self, path: str, region: int, tensor: torch.Tensor, owner: Any) -> None:
        self.path, self.region, self.tensor, self.owner = path, region, tensor, owner

    def capture(self) -> torch.Tensor:
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

    def capture(self) -> Any:
        return self._read()

    def install(self, version: Any) -> None:
        self._write(version)

    def same(self, one: Any, other: Any) -> bool:
        return _same_state(one, other)


def deep(place: Container, path: str) -> Pairs:
    """A place and all containers below it, with their contents now. Raises LayerError where they are too many."""
    contents = place.read()
    try:
        below = containers(contents.values())
    except TooMany:
        raise LayerError(
            f"{path} changes during the forward and holds too many objects to be kept for each micro-batch; keep what changes"
            ' in an object of its own, or set vertical_schedule.order to "horizontal", which is exact'
        ) from None
    return ((place, contents), *((container, container.read()) for container in below))


def put_back(pairs: Iterable[tuple[Container, Contents]]) -> None:
    """Make the contents of containers what they were."""
    for container, contents in pairs:
        if not same_contents(container.read(), contents):
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
    if isinstance(one, tuple):
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


def _streams_of(value: Any) -> Streams | None:
    if isinstance(value, torch.Generator) and value is not torch.default_generator:
        return value.get_state, partial(_call, value.set_state)
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if isinstance(value, np.random.RandomState):
        return partial(value.get_state, legacy=False), value.set_state
    if isinstance(value, np.random.Generator):
        source = value.bit_generator
        return partial(getattr, source, "state"), partial(setattr, source, "state")
    return None


def _tensor_over(array: np.ndarray) -> torch.Tensor | None:
    """A tensor over the memory of an array; None where there is none."""
    try:
        return torch.from_numpy(array) if array.flags.writeable else None
    except (TypeError, ValueError):
        return None


def _call(function: Callable[[Any], Any], value: Any) -> None:
    function(value)


# ---- what has changed


@dataclass(frozen=True)
class Change:
    """An item that has changed, and what it was; None of a tensor that is too large to be copied."""

    item: Item
    before: Any


@dataclass(frozen=True, eq=False)
class _Elements:
    """A tensor, or an array, in a snapshot: `before` is a copy, None of one that is too large; `version`: its count of writes,
    None where it keeps none."""

    path: str
    region: int
    owner: Any
    tensor: torch.Tensor
    before: torch.Tensor | None
    version: int | None

    def has_changed(self) -> bool:
        if self.before is not None:  # some kernels write without counting (batch norm's)
            return not same_bits(self.tensor, self.before)
        return self.version is not None and self.tensor._version != self.version


class Snapshot:
    """The state of all places at one moment; `changes` compares. See `survey`.

    `closely`: all tensors but the largest are copied and compared bit by bit; otherwise the small ones. Another one has changed
    when its count of writes has.
    """

    def __init__(self, slots: Sequence[Slot], closely: bool = True) -> None:
        self._slots = slots
        self._closely = closely
        self._values: list[Contents] = [slot.place.read() for slot in slots]
        self._containers: dict[int, tuple[str, int, Container, Contents]] = {}
        self._tensors: dict[int, _Elements] = {}
        self._generators: dict[int, tuple[GeneratorItem, Any]] = {}
        self._held: list[Any] = []  # so that no other object takes the id of one
        for slot, contents in sorted(zip(slots, self._values, strict=True), key=lambda pair: pair[0].region):
            self._note(slot.path, slot.region, contents.values())

    def items(self) -> Iterator[Item]:
        """What may change, as items."""
        for slot in self._slots:
            yield PlaceItem(slot.path, slot.region, slot.place)
        for path, region, container, _ in self._containers.values():
            yield PlaceItem(path, region, container)
        for each in self._tensors.values():
            yield TensorItem(each.path, each.region, each.tensor, each.owner)
        for item, _ in self._generators.values():
            yield item

    def _note(self, path: str, region: int, values: Iterable[Any]) -> None:
        """What some values lead to. What two regions lead to is nobody's alone."""
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
                waiting.extend(contents.values())
            else:
                self._note(path, OUTSIDE, contents.values())

    def _note_leaf(self, path: str, region: int, value: Any) -> None:
        if isinstance(value, nn.Parameter) or (isinstance(value, torch.Tensor) and value.is_meta):
            return
        if isinstance(value, torch.Tensor | np.ndarray):
            self._note_elements(path, region, value)
            return
        streams = _streams_of(value)
        if streams is not None:
            known_item = self._generators.get(id(value))
            where = region if known_item is None or known_item[0].region == region else OUTSIDE
            self._held.append(value)
            self._note_generator(id(value), GeneratorItem(path, where, streams, id(value)))

    def _note_elements(self, path: str, region: int, value: Any) -> None:
        known = self._tensors.get(id(value))
        if known is not None:
            self._tensors[id(value)] = replace(known, region=region if known.region == region else OUTSIDE)
            return
        tensor = value if isinstance(value, torch.Tensor) else _tensor_over(value)
        if tensor is None or tensor.layout is not torch.strided:
            return
        copied = tensor.numel() <= (LARGEST_NUMEL if self._closely else SMALL_NUMEL)
        counts = tensor is value and not tensor.is_inference()
        before = tensor.detach().clone() if copied else None
        self._tensors[id(value)] = _Elements(path, region, value, tensor, before, tensor._version if counts else None)

    def _note_generator(self, key: int, item: GeneratorItem) -> None:
        self._generators[key] = (item, self._generators[key][1] if key in self._generators else item.capture())

    def changes(self, regions: Iterable[int] | None = None) -> Iterator[Change]:
        """What has changed since, in these regions; None: in all."""
        wanted = None if regions is None else {OUTSIDE, *regions}
        for slot, before in zip(self._slots, self._values, strict=True):
            if (wanted is None or slot.region in wanted) and not same_contents(slot.place.read(), before):
                yield Change(PlaceItem(slot.path, slot.region, slot.place), self._pairs(slot.place, before))
        for path, region, container, before in self._containers.values():
            if (wanted is None or region in wanted) and not same_contents(container.read(), before):
                yield Change(PlaceItem(path, region, container), self._pairs(container, before))
        for each in self._tensors.values():
            if (wanted is None or each.region in wanted) and each.has_changed():
                yield Change(TensorItem(each.path, each.region, each.tensor, each.owner), each.before)
        for item, before in self._generators.values():
            if (wanted is None or item.region in wanted) and not item.same(item.capture(), before):
                yield Change(item, before)

    def _pairs(self, place: Container, contents: Contents) -> Pairs:
        """As `deep`, at the moment of the snapshot."""
        pairs: dict[int, tuple[Container, Contents]] = {id(place.owner): (place, contents)}
        waiting = list(contents.values())
        while waiting:
            value = waiting.pop(0)
            if isinstance(value, tuple | frozenset):
                waiting.extend(value)
            elif id(value) in self._containers and id(value) not in pairs:
                pairs[id(value)] = self._containers[id(value)][2:]
                waiting.extend(self._containers[id(value)][3].values())
        return tuple(pairs.values())


def tensors_of(pairs: Iterable[tuple[Container, Contents]]) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """The tensors that containers hold that require grad, with their positions: container, key, place in tuples, by number."""
    for number, (_, contents) in enumerate(pairs):
        for index, value in enumerate(contents.values()):
            for place, tensor in tensors_in(value):
                if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                    yield (number, index, *place), tensor
