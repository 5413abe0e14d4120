"""The places where a model's forward may keep state: attributes and buffers of modules, and what their code and hooks use."""

from __future__ import annotations

import contextvars
import types
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from torch import nn

from ds_vertical.reachable import (
    MISSING,
    Container,
    Contents,
    bound,
    called,
    container_of,
    is_foreign,
    is_internal,
    is_users_module,
    names_used,
    note_home,
    note_home_of_attribute,
    owner_key,
)

OUTSIDE: Final = -1  # the region of what no block holds alone; otherwise the block's number
_FOLLOWED: Final = (types.FunctionType, types.MethodType, partial, nn.Module)

# what torch and DeepSpeed keep in a module's __dict__
_INTERNAL: Final = frozenset(vars(nn.Module())) | {
    "forward",
    "_compiled_call_impl",
    "_external_params",
    "pre_bwd_fn",
    "post_bwd_fn",
    "applied_pre_backward_ref_cnt",
}


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


@dataclass(frozen=True, eq=False)
class Names:
    """The names of one module's attributes, or buffers, at one moment. `owner`: the dict that has them."""

    path: str
    region: int
    owner: dict[str, Any]
    known: frozenset[str]

    def new(self) -> list[str]:
        """Those of the user's that were not there."""
        if len(self.owner) == len(self.known) and self.owner.keys() == self.known:
            return []
        return [name for name in self.owner if name not in self.known and is_state(name)]


def names_in(model: nn.Module, blocks: Sequence[nn.Module]) -> list[Names]:
    """Of all modules, as `survey` goes through them."""
    region_of = _regions(blocks)
    found = []
    for path, module in model.named_modules():
        for owner in (vars(module), vars(module)["_buffers"]):
            region = region_of.get(id(module), OUTSIDE)
            found.append(Names(path or type(model).__name__, region, owner, frozenset(owner)))
    return found


def _regions(blocks: Sequence[nn.Module]) -> dict[int, int]:
    return {id(each): index for index, block in enumerate(blocks) for each in block.modules()}


def survey(model: nn.Module, blocks: Sequence[nn.Module], functions: Sequence[Any]) -> list[Slot]:
    """Every place where a model's forward may keep state: of its modules, of what their code and hooks use, of `functions`.

    What lies in one of the `blocks` has the block's number as region.
    """
    found = _Survey(set(map(id, model.modules())))
    region_of = _regions(blocks)
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
            note_home_of_attribute(own[name])
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
