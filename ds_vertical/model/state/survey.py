"""A survey of the places where a model's forward may keep state: what its modules hold, and what their code and hooks can
reach.

A place is a name under which a value stands: an attribute, a buffer, a global variable, a cell of a closure. A region says
which block alone leads to a place. The survey is made once a step. `snapshot` then notes what stands at the places, and finds
what has changed since.
"""

from __future__ import annotations

import contextvars
import itertools
import operator
import random
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from torch import nn

from ds_vertical.errors import LayerError
from ds_vertical.model.state.containers import (
    MISSING,
    SIMPLE,
    Container,
    Contents,
    bound_objects,
    called,
    container_of,
    globals_bound,
    is_foreign,
    is_internal,
    is_users_module,
    names_used,
    note_home,
    note_home_of_attribute,
    owner_key,
)

OUTSIDE: Final = -1  # the region of what no block, or more than one, leads to; any other region is a block's number
_FEW: Final = 100  # elements of a collection that are looked at one by one
_BUILT_IN: Final = ([], (), {}, {}.values(), {}.items(), set[int](), "", b"", range(0), reversed([]))
_ONE_WAY: Final = frozenset(
    {types.GeneratorType, random.SystemRandom, zip, map, filter, enumerate, *(type(iter(each)) for each in _BUILT_IN)}
    | {each for each in vars(itertools).values() if isinstance(each, type)}
)  # iterators, and what takes its numbers from the system
_FOLLOWED: Final = (types.FunctionType, types.MethodType, partial, nn.Module)

# what torch and DeepSpeed keep in a module's __dict__
_INTERNAL: Final = (frozenset(vars(nn.Module())) - {"training"}) | {
    "forward",
    "_compiled_call_impl",
    "_external_params",
    "pre_bwd_fn",
    "post_bwd_fn",
    "applied_pre_backward_ref_cnt",
    "all_parameters",
    "_original_parameters",
}


@dataclass(frozen=True, eq=False)
class StateSlot:
    """A place and its region. `path` names it in messages. The contents of `place` are one entry, or none while nothing stands
    there."""

    path: str
    region: int
    place: Container

    @property
    def value(self) -> object:
        """What stands at the place now; MISSING where nothing does."""
        return next(iter(self.place.read().values()), MISSING)


def entry_of(owner: dict[str, object], name: str) -> Container:
    """The place of one entry of a dict: `name` need not be among its keys now."""

    def read() -> Contents:
        return Contents({name: owner[name]} if name in owner else {})

    def write(contents: Mapping[Any, Any]) -> None:
        if name in contents:
            owner[name] = contents[name]
        else:
            owner.pop(name, None)

    return Container((id(owner), name), read, write)


def _attribute_of(cls: type, name: str) -> Container:
    def read() -> Contents:
        return Contents({name: vars(cls)[name]} if name in vars(cls) else {})

    def write(contents: Mapping[Any, Any]) -> None:
        if name in contents:
            setattr(cls, name, contents[name])
        elif name in vars(cls):
            delattr(cls, name)

    return Container((cls, name), read, write)


def _cell(cell: types.CellType) -> Container:
    def read() -> Contents:
        try:
            return Contents({"": cell.cell_contents})
        except ValueError:  # nothing is bound yet
            return Contents()

    def write(contents: Mapping[Any, Any]) -> None:
        if contents:
            cell.cell_contents = contents[""]

    return Container(cell, read, write)


def _constant(value: object) -> Container:
    return Container(value, lambda: Contents({"": value}), lambda _: None, is_constant=True)


def is_state(name: str) -> bool:
    """Whether a name in a module's `__dict__` is the user's."""
    return name not in _INTERNAL and not name.startswith(("ds_", "_ds_"))


class Names:
    """The names of one module, class or file, or the entries of a dict of a module's hooks, with the values of one moment.

    A step compares them all at once (`are_same`), and looks at single places only where that fails. `owner`: the dict.
    `before`: a copy of it. `key`: the first part of the owner of a place with such a name (`Container.owner`), by which
    `Snapshot` finds the slots of places among these names. A subclass gives the places that have no slot (`places`, `new`).
    """

    def __init__(self, path: str, region: int, key: Hashable, owner: Mapping[Any, Any]) -> None:
        self.path, self.region, self.key, self.owner = path, region, key, owner
        self.before: Mapping[Any, Any] = dict(owner)

    def are_same(self) -> bool:
        """Whether the same names stand for the same objects as at that moment, in the same order."""
        now, then = self.owner, self.before
        same_values = len(now) == len(then) and all(map(operator.is_, now.values(), then.values()))
        return same_values and list(now) == list(then)

    def places(self) -> Iterator[tuple[str, Container, Contents]]:
        """Path, place and contents of then, of each place that has no slot."""
        return iter(())

    def new(self) -> Iterator[tuple[str, Container]]:
        """Places of state that have come since, with their paths."""
        return iter(())

    def carriers(self) -> list[tuple[str, object]]:
        """The values of then at `places` that are more than numbers and strings, with their paths."""
        return []


class _NamesOfClass(Names):
    """The attributes of a class that the user has written: the `key`."""

    key: type

    def new(self) -> Iterator[tuple[str, Container]]:
        for name in self.owner:
            if name not in self.before and is_state(name):
                yield f"{self.path}.{name}", _attribute_of(self.key, name)


class _NamesOfModule(Names):
    """The attributes of a module or of another object, or a module's buffers. Few of them ever change, so each gets a place
    only once it has changed.

    `of`: whether a name is state.
    """

    owner: dict[str, Any]

    def __init__(self, path: str, region: int, owner: dict[str, object], of: Callable[[str], bool]) -> None:
        super().__init__(path, region, id(owner), owner)
        self._of = of

    def places(self) -> Iterator[tuple[str, Container, Contents]]:
        for name, value in self.before.items():
            if self._of(name):
                yield f"{self.path}.{name}", entry_of(self.owner, name), Contents({name: value})

    def new(self) -> Iterator[tuple[str, Container]]:
        for name in self.owner:
            if name not in self.before and self._of(name):
                yield f"{self.path}.{name}", entry_of(self.owner, name)

    def carriers(self) -> list[tuple[str, object]]:
        found = ((name, value) for name, value in self.before.items() if type(value) not in SIMPLE)
        return [(f"{self.path}.{name}", value) for name, value in found if self._of(name)]


def names_of_object(holder: object, of: Callable[[str], bool]) -> Names:
    """The attributes of an object that is no module, of those names that `of` says are state."""
    return _NamesOfModule(type(holder).__name__, OUTSIDE, vars(holder), of)


class _Apart(Contents):
    """Contents whose values are no part of the state that changes with them: a hook that is an object has places of its own."""

    carriers: tuple[tuple[int, object], ...] = ()  # type: ignore[assignment]


class _Whole(Names):
    """A dict whose entries change together: the hooks of a module, its modules."""

    owner: dict[Any, Any]

    def __init__(self, path: str, region: int, owner: dict[Hashable, object]) -> None:
        super().__init__(path, region, id(owner), owner)

    def places(self) -> Iterator[tuple[str, Container, Contents]]:
        def write(contents: Mapping[Any, Any]) -> None:
            self.owner.clear()
            self.owner.update(contents)

        place = Container((self.key, None), lambda: _Apart(self.owner), write, self.owner)
        yield self.path, place, _Apart(self.before)


def _members(value: object) -> Iterable[object]:
    """The elements of a small collection."""
    if not isinstance(value, list | tuple | dict) or len(value) >= _FEW:
        return ()
    return value.values() if isinstance(value, dict) else value


def _note_attribute(path: str, value: object) -> None:
    """What a module holds at a path, and its elements, are the user's own, and can be put back. Raises LayerError."""
    for each in (value, *_members(value)):
        note_home_of_attribute(each)
        if type(each) in _ONE_WAY:
            _refuse_one_way(path, each)


def _refuse_one_way(path: str, value: object) -> None:
    """Raise LayerError for an object that no forward can be given as it found it, unless it is at its end."""
    if isinstance(value, types.GeneratorType) and value.gi_frame is None:
        return
    if isinstance(value, random.SystemRandom):
        what, instead = "whose numbers never come again", "random.Random(seed), or torch's random numbers"
    else:
        what, instead = (
            "whose place can be neither read nor put back",
            "a number that the forward counts up, and a list that it indexes,",
        )
    raise LayerError(
        f"{path}: holds a {type(value).__name__}, {what}; forwards of several micro-batches share it, and the backward runs"
        f" blocks once more: keep {instead} there instead, or keep it outside the model's modules if no forward uses it"
    )


def _regions(blocks: Sequence[nn.Module]) -> dict[int, int]:
    return {id(each): index for index, block in enumerate(blocks) for each in block.modules()}


def survey(
    model: nn.Module, blocks: Sequence[nn.Module], functions: Sequence[Callable[..., object]]
) -> tuple[list[StateSlot], list[Names], set[int]]:
    """Every place where a model's forward may keep state: in its modules, and in what their code, their hooks and `functions`
    use. Raises LayerError where a module holds an iterator, which cannot be put back.

    `functions`: those of the user that a forward calls, its `loss_fn` say. A place in one of the `blocks`, which are in order
    of execution, has the block's number as region. Returns places, names of which each gets a place once it has changed, and
    the numbers of the blocks to which other blocks, hooks or lists lead.
    """
    found = _Survey(set(map(id, model.modules())))
    region_of = _regions(blocks)
    for each in (*map(type, model.modules()), *functions):
        note_home(each)
    for path, module in model.named_modules():
        found.module(path or type(model).__name__, module, region_of.get(id(module), OUTSIDE))
    reached = _reached(model, region_of, found.reached)  # what `functions` lead to is read in the prefix and in the suffix
    for function in functions:
        found.follow(getattr(function, "__qualname__", type(function).__name__), OUTSIDE, function)
    for variable, value in contextvars.copy_context().items():
        found.constant(f"context variable {variable.name}", OUTSIDE, value)
    return found.slots, found.names, reached


def _reached(model: nn.Module, region_of: dict[int, int], found: set[tuple[int, int]]) -> set[int]:
    """The regions of modules to which another region leads. `found`: regions, and ids of modules that they lead to."""
    modules = {id(module): module for module in model.modules()} if found else {}
    pairs = {(region, region_of.get(id(each), OUTSIDE)) for region, key in found for each in modules[key].modules()}
    return {there for region, there in pairs if there not in (region, OUTSIDE)}


class _Survey:
    """A survey under way. `registered`: ids of the model's modules, each of which is surveyed by a call of `module`.

    `reached`: the regions that lead to one of these, each with the module's id.
    """

    def __init__(self, registered: set[int]) -> None:
        self.slots: list[StateSlot] = []
        self.names: list[Names] = []
        self._registered = registered
        self._seen: set[int] = set()  # functions, classes, containers and modules that are not the model's
        self._places: set[Any] = set()
        self.reached: set[tuple[int, int]] = set()

    def module(self, path: str, module: nn.Module, region: int) -> None:
        """Note a module's attributes and buffers, its dicts of hooks and modules, and what its hooks and its class's code
        use."""
        own = vars(module)
        attributes = _NamesOfModule(path, region, own, is_state)
        for where, value in attributes.carriers():
            _note_attribute(where, value)
            self.follow(where, region, value)
        self.names += [attributes, _NamesOfModule(path, region, own["_buffers"], lambda _: True)]
        for hooks in (own["_forward_hooks"], own["_forward_pre_hooks"]):
            for hook in hooks.values():
                self._hook(path, region, hook)
            if hooks:  # one may take itself off
                self.names.append(_Whole(f"the hooks of {path}", region, hooks))
        for name in ("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called"):
            if own[name]:
                self.names.append(_Whole(f"{name} of {path}", region, own[name]))  # which hooks take kwargs, or run always
        if own["_modules"]:
            self.names.append(_Whole(f"the modules of {path}", region, own["_modules"]))
            for name, value in own["_modules"].items():
                if id(value) not in self._registered:
                    self.follow(f"{path}.{name}", region, value)
        if "forward" in own:
            self.function(f"{path}.forward", own["forward"], OUTSIDE)
        self._class(type(module))

    def _hook(self, path: str, region: int, hook: object) -> None:
        functions = list(called(hook))
        if functions and all(map(is_internal, functions)) and not list(bound_objects(hook)):
            return  # a hook that DeepSpeed puts on every module: it reaches nothing of the user's
        if not is_foreign(next(iter(functions), hook)):
            note_home(next(iter(functions), type(hook)))
            region = OUTSIDE  # several modules' hooks may share what they write to
        self.function(f"a hook of {path}", hook, region)

    def function(self, path: str, function: object, region: int) -> None:
        """Note closures, globals and bound objects of a callable, and of the user's functions that it calls."""
        for value in bound_objects(function):
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
                self._file(each.__globals__)
                self._add(f"attributes of {each.__qualname__}", OUTSIDE, _constant(vars(each)))
                names = set(names_used(each.__code__))
                for name in globals_bound(each.__code__) - each.__globals__.keys():
                    self._add(f"{each.__module__}.{name}", OUTSIDE, entry_of(each.__globals__, name))
                for name in names & each.__globals__.keys():
                    self._value(f"{each.__module__}.{name}", OUTSIDE, entry_of(each.__globals__, name))
                    self._imported(each.__globals__[name], names, set())

    def _imported(self, value: object, names: set[str], visited: set[int]) -> None:
        """If a value is a module of Python that the user has written: note the attributes with these names, and those of the
        modules among them."""
        if id(value) in visited or not is_users_module(value):
            return
        visited.add(id(value))
        for name in names & vars(value).keys():
            self._value(f"{value.__name__}.{name}", OUTSIDE, entry_of(vars(value), name))
            self._imported(vars(value)[name], names, visited)

    def _file(self, own: dict[str, object]) -> None:
        if id(own) not in self._seen:
            self._seen.add(id(own))
            self.names.append(Names(str(own.get("__name__")), OUTSIDE, id(own), own))

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
            own = vars(each)
            self.names.append(_NamesOfClass(each.__qualname__, OUTSIDE, each, own))
            for name, value in list(own.items()):
                value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                if isinstance(value, types.FunctionType):
                    self.function(value.__qualname__, value, OUTSIDE)
                elif not (name.startswith("__") or hasattr(value, "__get__") or isinstance(value, type)):
                    self._add(f"{each.__qualname__}.{name}", OUTSIDE, _attribute_of(each, name))

    def _add(self, path: str, region: int, place: Container) -> None:
        key = owner_key(place)
        if key not in self._places:
            self._places.add(key)
            self.slots.append(StateSlot(path, region, place))
            for value in place.read().values():
                self.follow(path, region, value)

    def constant(self, path: str, region: int, value: object) -> None:
        """Note a value that stands under no name of its own: only what it leads to can change."""
        if container_of(value) is not None:
            self._add(path, region, _constant(value))
        else:
            self.follow(path, region, value)

    def follow(self, path: str, region: int, value: object) -> None:
        """Survey the functions, and the modules that are not the model's, that a value leads to."""
        waiting = [(value, region)]
        while waiting:
            value, holder = waiting.pop()
            if isinstance(value, tuple):
                waiting.extend((each, holder) for each in value)
            elif id(value) in self._registered:
                self.reached.add((holder, id(value)))
            elif isinstance(value, _FOLLOWED):
                self._go_on(path, region, value)
            elif id(value) not in self._seen and (container := container_of(value)) is not None:
                self._seen.add(id(value))
                waiting.extend((each, OUTSIDE) for _, each in container.read().carriers)  # other blocks may hold it, too

    def _go_on(self, path: str, region: int, value: object) -> None:
        if not isinstance(value, nn.Module):
            self.function(path, value, region)
        else:
            for inner, module in value.named_modules():
                if id(module) in self._registered:
                    self.reached.add((OUTSIDE, id(module)))
                elif id(module) not in self._seen:
                    self._seen.add(id(module))
                    self.module(f"{path}.{inner}" if inner else path, module, region)
