"""Containers: the Python objects that a value leads to and whose contents a forward may change.

A `Container` reads and writes the contents of one object: a list, a dict, a set, a deque, an object with attributes. Its
contents are shallow: references, by key. `containers` finds every container that some values are or lead to. The search ends at
modules, parameters, functions, classes, and objects of torch, DeepSpeed and this package: what these hold is no state of one
forward. The second half of the file says what the code of a function can reach.
"""

from __future__ import annotations

import collections
import contextlib
import dis
import enum
import functools
import operator
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeGuard

import torch
from torch import nn

_Member = types.MemberDescriptorType | types.GetSetDescriptorType
_Collection = list[Any] | collections.deque[Any] | dict[Any, Any] | set[Any]

MISSING: Final = object()  # in the place of a value that is not there
MOST_CONTAINERS: Final = 20_000  # below one value; more are no state of a forward

_ATOMS: Final = (type(None), bool, int, float, complex, str, bytes, type, enum.Enum, nn.Module, torch.dtype, torch.device)
_ATOMS_TOO: Final = (torch.Tensor, torch.Generator, types.ModuleType, types.CodeType, types.BuiltinFunctionType, range, slice)
_CALLED: Final = (types.FunctionType, types.MethodType, partial)
_LEAVES: Final = (*_ATOMS, *_ATOMS_TOO, *_CALLED)
_LIBRARIES: Final = frozenset({"torch", "deepspeed", "ds_vertical", "greenlet", "numpy", "accelerate", "tokenizers"})
_ENDS: Final = _LIBRARIES | (frozenset(sys.stdlib_module_names) - {"collections", "types", "__main__"})

SIMPLE: Final = frozenset({type(None), bool, int, float, complex, str, bytes, type, range, slice})


@functools.lru_cache(maxsize=4096)
def _is_leaf(cls: type) -> bool:
    """Whether the values of a class have no contents that could change: numbers, modules, tensors, functions."""
    return issubclass(cls, _LEAVES)


class Contents(dict[Any, Any]):
    """What a container holds at one moment: references, by key. It is not changed once it is made."""

    @functools.cached_property
    def carriers(self) -> tuple[tuple[int, object], ...]:
        """The values that are more than numbers and strings, with their positions: these may lead to other containers."""
        return tuple((index, value) for index, value in enumerate(self.values()) if type(value) not in SIMPLE)

    def replaced(self, new: Callable[[object], object]) -> Contents | None:
        """These contents with `new(value)` in the place of each of the `carriers`; None where that changes none of them."""
        made = {index: other for index, value in self.carriers if (other := new(value)) is not value}
        if not made:
            return None
        return Contents((key, made.get(index, value)) for index, (key, value) in enumerate(self.items()))


@dataclass(frozen=True, eq=False)
class Container:
    """One object whose contents may change: `read` gives them as they are now, `write` puts others in their place.

    `owner`: the object, or for an entry of a dict or class a tuple that tells it from others. `live`: the list or dict whose
    entries are the contents; None where there is none. `attributes`: those of an object that has a `live`, which are among the
    contents, too. `is_constant`: the contents never change.
    """

    owner: object
    read: Callable[[], Contents]
    write: Callable[[Mapping[Any, Any]], None]
    live: Any = None
    attributes: Mapping[str, Any] | None = None
    is_constant: bool = False

    def is_list_or_dict(self) -> bool:
        """Whether its contents are the entries of one list or dict now, and no attributes beside them."""
        return self.live is not None and not self.attributes

    def holds(self, contents: Contents) -> bool:
        """Whether it holds these contents now."""
        live = self.live
        if live is not None and not self.attributes and len(live) == len(contents):
            if isinstance(live, list):
                if all(map(operator.is_, live, contents.values())):
                    return True
            elif all(map(operator.is_, live.values(), contents.values())) and all(map(operator.is_, live, contents)):
                return True
        return same_contents(self.read(), contents)


@dataclass(frozen=True)
class Attribute:
    """The key of an attribute of an object that has elements, too (a subclass of list or dict). `name`: what its `__dict__`
    calls it, or the descriptor of its slot."""

    name: str | _Member


HOMES: set[str] = {"__main__"}  # top-level packages of the models and functions surveyed so far: their objects are the user's


def note_home(value: object) -> None:
    """Take the objects of the package of a class, or function, for the user's own from now on."""
    HOMES.add((getattr(value, "__module__", None) or "builtins").partition(".")[0])


def note_home_of_attribute(value: object) -> None:
    """Take the objects of the package of a value that a module holds for the user's own, unless that package is installed."""
    root = (type(value).__module__ or "builtins").partition(".")[0]
    if root not in HOMES and root not in _ENDS and not is_installed(root):
        HOMES.add(root)


def owner_key(container: Container) -> Hashable:
    """Tells a container's owner from others while it lives."""
    return container.owner if isinstance(container.owner, tuple) else id(container.owner)


def container_of(value: object, given: bool = False) -> Container | None:
    """The container that a value is; None for a value that cannot change, or that ends the search: an object of a library.

    `given`: a block was handed the value, or returned it, so that only the objects of a few libraries end the search.
    """
    if _is_leaf(type(value)) or isinstance(value, _LEAVES):
        return None
    if isinstance(value, tuple | frozenset):
        return None
    if isinstance(value, list | collections.deque | dict | set):
        return _collection(value)
    if isinstance(value, threading.local):
        return Container(value, lambda: Contents(vars(value)), lambda contents: _update(vars(value), contents))
    if _ends_the_search(type(value), given):
        return None
    members = [member for cls in type(value).__mro__ for member in _members_of(cls)]
    return (
        Container(value, partial(_read_members, value, members), partial(_write_members, value, members)) if members else None
    )


def _collection(value: _Collection) -> Container:
    """The elements of a collection and, of a subclass, its attributes and slots."""
    attributes = getattr(value, "__dict__", None)
    slots = _slots_of(type(value))
    if not isinstance(attributes, dict):
        attributes = None
    if attributes is None and not slots:
        live = value if type(value) in (list, dict) else None
        return Container(value, partial(_elements, value), partial(_set_elements, value), live)

    def read() -> Contents:
        named: dict[Any, Any] = {**(attributes or {}), **_read_members(value, slots)}
        return Contents(_elements(value) | {Attribute(name): each for name, each in named.items()})

    def write(contents: Mapping[Any, Any]) -> None:
        named = {key.name: each for key, each in contents.items() if isinstance(key, Attribute)}
        _set_elements(value, {key: each for key, each in contents.items() if not isinstance(key, Attribute)})
        if attributes is not None:
            _update(attributes, {name: each for name, each in named.items() if isinstance(name, str)})
        _write_members(value, slots, named)

    live = value if type(value) is collections.OrderedDict else None
    return Container(value, read, write, live, attributes)


@functools.lru_cache(maxsize=4096)
def _slots_of(cls: type) -> tuple[_Member, ...]:
    """The descriptors of the slots of a class's objects, but that of a `__dict__`."""
    members = (member for each in cls.__mro__ for member in _members_of(each))
    return tuple(member for member in members if member.__name__ != "__dict__")


def _elements(value: _Collection) -> Contents:
    if isinstance(value, dict):
        return Contents(value.items())
    return Contents((each, each) for each in value) if isinstance(value, set) else Contents(enumerate(value))


def _set_elements(value: _Collection, contents: Mapping[Any, Any]) -> None:
    """Write a collection's elements, by the methods of the built-in types: a subclass may refuse its own."""
    if isinstance(value, dict):
        _update(value, contents)
    elif isinstance(value, set):
        kept = list(contents)
        set.clear(value)
        set.update(value, kept)
    else:
        base: Any = list if isinstance(value, list) else collections.deque
        kept = list(contents.values())
        base.clear(value)
        base.extend(value, kept)


@functools.lru_cache(maxsize=4096)
def _members_of(cls: type) -> tuple[_Member, ...]:
    """The descriptors of a class's slots, and of its objects' `__dict__`: no method of the class is asked."""
    own = vars(cls)
    slots = [each for each in own.values() if isinstance(each, types.MemberDescriptorType)] if "__slots__" in own else []
    held = own.get("__dict__")
    if isinstance(held, _Member) and held.__name__ == "__dict__" and held not in slots:
        return (*slots, held)
    return tuple(slots)


def _read_members(value: object, members: Sequence[_Member]) -> Contents:
    """What stands in an object's slots, and its `__dict__`, which is a container of its own."""
    held = Contents()
    for member in members:
        with contextlib.suppress(AttributeError):  # nothing is set
            held[member] = member.__get__(value)
    return held


def _write_members(value: object, members: Sequence[_Member], contents: Mapping[Any, Any]) -> None:
    for member in members:
        if member in contents:
            member.__set__(value, contents[member])
        else:
            with contextlib.suppress(AttributeError):
                member.__delete__(value)


def _ends_the_search(cls: type, given: bool) -> bool:
    """Whether the instances of a class are a library's (loggers, progress bars), not the user's: their contents are left
    alone."""
    root = cls.__module__.partition(".")[0]
    if issubclass(cls, collections.UserDict | collections.UserList | types.SimpleNamespace):
        return False
    return root in _ENDS or (not given and root not in HOMES)


@functools.cache
def is_installed(root: str) -> bool:
    """Whether a top-level package is the interpreter's or an installed one, not a file of the user's."""
    module = sys.modules.get(root)
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    if file is None:
        return True
    kept = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    path = Path(file).resolve()
    return "site-packages" in path.parts or any(path.is_relative_to(Path(each).resolve()) for each in kept)


def is_users_module(value: object) -> TypeGuard[types.ModuleType]:
    """Whether a value is a module of Python (a file) that the user has written."""
    root = value.__name__.partition(".")[0] if isinstance(value, types.ModuleType) else "builtins"
    return root not in _ENDS and (root in HOMES or not is_installed(root)) and root != "builtins"


def _update(value: dict[Any, Any], contents: Mapping[Any, Any]) -> None:
    base: Any = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
    kept = dict(contents)
    base.clear(value)
    for key, each in kept.items():
        base.__setitem__(value, key, each)


def containers(values: Iterable[object], given: bool = False, most: int = MOST_CONTAINERS) -> list[Container]:
    """Every container that the values are or lead to, each once, in an order that depends on the contents alone.

    `given`: see `container_of`. Raises TooManyError where there are more than `most`.
    """
    found: list[Container] = []
    seen: set[int] = set()
    waiting = collections.deque(values)
    while waiting:
        value = waiting.popleft()
        if isinstance(value, tuple | frozenset):
            waiting.extend(value)
            continue
        container = container_of(value, given)
        if container is None or id(value) in seen:
            continue
        seen.add(id(value))
        found.append(container)
        if len(found) > most:
            raise TooManyError
        waiting.extend(each for _, each in container.read().carriers)
    return found


class TooManyError(Exception):
    """Some values lead to more containers than are looked at; it is caught where the path of the state is known."""


def same_value(one: object, other: object) -> bool:
    """Whether two values are the same object, or numbers and strings that are equal."""
    if one is other:
        return True
    if type(one) is not type(other) or not isinstance(one, int | float | complex | str | bytes) or one != other:
        return False
    return not isinstance(one, float | complex) or repr(one) == repr(other)  # 0.0 and -0.0


def same_contents(one: Contents, other: Contents) -> bool:
    """Whether two contents have the same keys, in the same order, and the same values."""
    if len(one) != len(other):
        return False
    if all(map(operator.is_, one.values(), other.values())) and all(map(operator.is_, one, other)):
        return True
    pairs = zip(one.items(), other.items(), strict=True)
    return all((a is c or (not isinstance(a, torch.Tensor) and a == c)) and same_value(b, d) for (a, b), (c, d) in pairs)


def tensors_in(value: object) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """The tensors that a value is or that lie in its tuples, with their places in these."""
    if isinstance(value, torch.Tensor):
        yield (), value
    elif isinstance(value, tuple):
        for index, member in enumerate(value):
            for place, tensor in tensors_in(member):
                yield (index, *place), tensor


def with_tensors(value: object, replaced: Mapping[int, torch.Tensor]) -> object:
    """The value with tensors replaced, by id, in its tuples too; the same object where none of them is."""
    if isinstance(value, torch.Tensor):
        return replaced.get(id(value), value)
    if isinstance(value, tuple):
        members = [with_tensors(member, replaced) for member in value]
        if all(new is old for new, old in zip(members, value, strict=True)):
            return value
        made: Any = type(value)
        return made(*members) if hasattr(value, "_fields") else made(members)
    return value


# ---- functions: what their code can reach


def is_foreign(function: object) -> bool:
    """Whether a function is a library's, whose globals are no state of a user's forward."""
    home = getattr(function, "__module__", None) or "builtins"
    return home.partition(".")[0] in _ENDS | {"transformers", "builtins"}


def is_internal(function: object) -> bool:
    """Whether a function is this package's, or DeepSpeed's."""
    return (getattr(function, "__module__", None) or "").partition(".")[0] in ("ds_vertical", "deepspeed")


def called(value: object) -> Iterator[types.FunctionType]:
    """The Python functions behind a callable: those that partials, methods and wrappers lead to."""
    while True:
        if isinstance(value, partial):
            value = value.func
        elif isinstance(value, types.MethodType):
            value = value.__func__
        else:
            break
    if isinstance(value, types.FunctionType):
        yield value
        inner = getattr(value, "__wrapped__", None)
        if inner is not None and inner is not value:
            yield from called(inner)


def bound_objects(value: object) -> Iterator[object]:
    """The objects that a callable carries with it: arguments of a partial, the instance of a method, default values."""
    while True:
        if isinstance(value, partial):
            yield from value.args
            yield value.keywords  # itself: a hook may write into it
            value = value.func
        elif isinstance(value, types.MethodType):
            yield value.__self__
            value = value.__func__
        else:
            break
    if not isinstance(value, types.FunctionType):
        yield value
    else:
        yield from value.__defaults__ or ()
        if value.__kwdefaults__ is not None:
            yield value.__kwdefaults__


def names_used(code: types.CodeType) -> Iterator[str]:
    """The global names that a function's code uses, with those of the functions written in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_used(constant)


@functools.lru_cache(maxsize=4096)
def globals_bound(code: types.CodeType) -> frozenset[str]:
    """The global names that a function's code sets, with those of the functions written in it."""
    own = {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_GLOBAL"}
    inner = (globals_bound(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(own).union(*inner)
