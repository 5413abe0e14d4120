"""In which order a module's forward calls its children, read off its source.

A guess, made before there is a batch: where it is wrong, or the source cannot be read, the first step refuses by name.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from torch import nn

End = Literal["ahead", "between", "behind"]

_MOST_METHODS = 4  # called one by another, that are followed


def called_children(module: nn.Module) -> list[str]:
    """Names of the children that the module's forward calls or goes through, in order of their first use."""
    return list(dict.fromkeys(_uses(module, "forward", _MOST_METHODS)))


def called_in_turn(module: nn.Module) -> list[list[str]]:
    """For each loop of the module's forward the names of the children used in it, in order."""
    tree = _tree(module, "forward")
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For)] if tree is not None else []
    return [list(dict.fromkeys(_uses_below(module, loop, 0))) for loop in loops]


def end_of(model: nn.Module, path: str, first: str, last: str) -> End:
    """Whether the module at `path` runs ahead of the block at `first`, behind the one at `last`, or between. A module that
    holds blocks counts as ahead, and so does one that nobody calls, as a list of parameters: of its own parameters the source
    tells nothing."""
    if type(model.get_submodule(path)).forward is nn.Module.forward or _runs_before(model, path, first) is not False:
        return "ahead"
    return "behind" if _runs_before(model, last, path) else "between"


def _runs_before(model: nn.Module, one: str, other: str) -> bool | None:
    """Whether the module at the path `one` is called ahead of the one at `other`; None where one holds the other. Where the
    source of the module that holds both does not name the two, the order of definition decides."""
    left, right = one.split(".") if one else [], other.split(".") if other else []
    shared = 0
    while shared < min(len(left), len(right)) and left[shared] == right[shared]:
        shared += 1
    if shared == min(len(left), len(right)):
        return None
    holder, names = model.get_submodule(".".join(left[:shared])), (left[shared], right[shared])
    called = called_children(holder)
    order = called if set(names) <= set(called) else list(holder._modules)
    return order.index(names[0]) < order.index(names[1])


def _tree(module: nn.Module, method: str) -> ast.AST | None:
    function: Any = inspect.unwrap(getattr(type(module), method))
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None  # made without a file, or built in


def _uses(module: nn.Module, method: str, depth: int) -> Iterator[str]:
    tree = _tree(module, method) if depth else None
    if tree is not None:
        yield from _uses_below(module, tree, depth)


def _uses_below(module: nn.Module, tree: ast.AST, depth: int) -> Iterator[str]:
    for node in sorted(ast.walk(tree), key=_end):
        for name in _names(node):
            if name in module._modules:
                yield name
            elif isinstance(node, ast.Call) and inspect.isfunction(getattr(type(module), name, None)):
                yield from _uses(module, name, depth - 1)


def _end(node: ast.AST) -> tuple[int, int]:
    """Where a node has been evaluated, by line and column: a call behind its arguments, a loop's range ahead of its body."""
    told = node.iter if isinstance(node, ast.For) else node
    return getattr(told, "end_lineno", None) or 0, getattr(told, "end_col_offset", None) or 0


def _names(node: ast.AST) -> Sequence[str]:
    """`x` of `self.x(...)`, of `self.x[i](...)`, and of loops over `self.x`."""
    if isinstance(node, ast.Call):
        called = node.func.value if isinstance(node.func, ast.Subscript) else node.func
        return _own(called)
    if isinstance(node, ast.For):
        return [name for each in ast.walk(node.iter) for name in _own(each)]
    return ()


def _own(node: ast.AST) -> Sequence[str]:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return (node.attr,)
    return ()
