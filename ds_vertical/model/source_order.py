"""In which order a module's forward calls its children, read off its source.

A guess, made before there is a batch: where it is wrong, or the source cannot be read, the first step refuses by name.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

_MOST_METHODS = 4  # called one by another, that are followed


def called_children(module: nn.Module) -> list[str]:
    """Names of the children that the module's forward calls or goes through, in order of their first use."""
    return list(dict.fromkeys(_uses(module, "forward", _MOST_METHODS)))


def called_in_turn(module: nn.Module) -> list[list[str]]:
    """For each loop of the module's forward the names of the children used in it, in order."""
    tree = _tree(module, "forward")
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For)] if tree is not None else []
    return [list(dict.fromkeys(_uses_below(module, loop, 0))) for loop in loops]


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
    for node in sorted(ast.walk(tree), key=lambda node: (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))):
        for name in _names(node):
            if name in module._modules:
                yield name
            elif isinstance(node, ast.Call) and inspect.isfunction(getattr(type(module), name, None)):
                yield from _uses(module, name, depth - 1)


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
