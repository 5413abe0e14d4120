"""Refuses a DeepSpeed whose members are not those that `compat.deepspeed_members` lists.

Importing this module checks the installed DeepSpeed (`check_deepspeed`), ahead of every import of a private name. The check
reads signatures and compiled code only; it makes no engine.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Final

from ds_vertical.compat.ops import cache

cache.activate()  # before DeepSpeed can load an op

import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402,F401  (zero.Init patches tensor constructors, under which its first import fails)
from deepspeed.runtime.superoffload import superoffload_stage3  # noqa: E402,F401  (subclasses stage 3 at its import)

from ds_vertical.compat.deepspeed_members import VERSIONS, Member, members_of  # noqa: E402

SUPPORTED: Final = VERSIONS[-1]
_REMEDY: Final = f"pip install deepspeed=={SUPPORTED}"
_MISSING: Final = "is missing"
_ANYTHING: Final = "(*args, **kwargs)"  # a wrapper that somebody has put there, and that hands on whatever it is given


class DeepSpeedVersionError(ImportError):
    """The installed DeepSpeed is not one of those that `compat.deepspeed_members` knows."""


def check_deepspeed() -> int:
    """Compare the installed DeepSpeed with its column of the table. Returns the number of members compared.

    Raises DeepSpeedVersionError, which names the version, the member, its parameters found and expected, and the remedy.
    """
    installed = deepspeed.__version__.split("+")[0]
    if installed not in VERSIONS:
        raise DeepSpeedVersionError(
            f"ds_vertical needs deepspeed=={SUPPORTED} (it overrides internals), found {deepspeed.__version__}; run: {_REMEDY}"
        )
    members = list(members_of(installed))
    attributes: dict[str, frozenset[str]] = {}
    for member in members:
        owner = _resolve(member.owner)
        if member.parameters is not None:
            found = _found(owner, member.name)
            if found not in (f"({member.parameters})", _ANYTHING):
                raise _error(member, found, f"({member.parameters})")
        elif not hasattr(owner, member.name):
            if member.owner not in attributes:
                attributes[member.owner] = frozenset(_attributes(owner))
            if member.name not in attributes[member.owner]:
                raise _error(member, _MISSING, "an attribute")
    return len(members)


def _error(member: Member, found: str, expected: str) -> DeepSpeedVersionError:
    module, _, cls = member.owner.partition(":")
    return DeepSpeedVersionError(
        f"deepspeed {deepspeed.__version__}: {cls or module}.{member.name} {'takes ' if found != _MISSING else ''}{found};"
        f" ds_vertical.{member.used_by} {member.use} it as {expected}, as it is in an unmodified deepspeed {SUPPORTED};"
        f" run: {_REMEDY} --force-reinstall --no-deps"
    )


def _resolve(owner: str) -> object:
    """The module or class that a row of the table names; None where there is none."""
    module, _, cls = owner.partition(":")
    try:
        found = importlib.import_module(module)
    except ImportError:
        return None
    return getattr(found, cls, None) if cls else found


def _found(owner: object, name: str) -> str:
    """The parameters of a member in parentheses, as a stub file writes them, or `_MISSING`; `_ANYTHING` where it takes what it
    is given, or does not tell."""
    member = getattr(owner, name, None)
    if not callable(member):
        return _MISSING
    try:
        function = _innermost(member)
        return _ANYTHING if _takes_anything(function) else f"({', '.join(_parameters(function))})"
    except ValueError:  # a compiled function without a signature
        return _ANYTHING


def _takes_anything(function: Callable[..., object]) -> bool:
    """Whether a function hands on whatever it is given: it has `*` and `**`, of any name, and at most one parameter before
    them, such as `self`. A functools.partial counts too: its signature lacks the arguments that it holds."""
    if isinstance(function, functools.partial):
        return True
    kinds = [each.kind for each in inspect.signature(function).parameters.values()]
    return kinds[-2:] == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD] and len(kinds) <= 3


def _innermost(function: Callable[..., object]) -> Callable[..., object]:
    """The function behind DeepSpeed's profiling decorator, which keeps no signature."""
    inner = _wrapped(function)
    return function if inner is None else _innermost(inner)


def _parameters(function: Callable[..., object]) -> list[str]:
    """A function's parameters, as a stub file writes them."""
    parameters, written = inspect.signature(function).parameters.values(), []
    star = False
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and not star:
            written.append("*")
        star = star or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        written.append(f"{stars}{each.name}{'' if each.default is each.empty else '=...'}")
    return written


def _wrapped(function: object) -> Callable[..., object] | None:
    """The function behind a decorator that takes anything and keeps no signature; None where there is no such decorator."""
    inner = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    functions = [each for each in inner if inspect.isfunction(each)]
    code = getattr(function, "__code__", None)
    takes_anything = code is not None and code.co_argcount == 0 and code.co_varnames[:2] == ("args", "kwargs")
    return functions[0] if takes_anything and len(functions) == 1 and not hasattr(function, "__wrapped__") else None


def _attributes(owner: object) -> Iterator[str]:
    """Every name that the methods of a class and its bases use as an attribute, and the fields of a pydantic model."""
    yield from getattr(owner, "model_fields", ())
    for cls in owner.__mro__ if isinstance(owner, type) else ():
        for member in vars(cls).values():
            function = getattr(member, "fget", None) or getattr(member, "__func__", None) or member
            function = inspect.unwrap(_wrapped(function) or function)  # those of our own wrapper are none of DeepSpeed's
            if isinstance(code := getattr(function, "__code__", None), CodeType):
                yield from _names(code)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


NUM_CHECKED: Final = check_deepspeed()
