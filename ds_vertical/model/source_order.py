"""In which order a module's forward calls its children, read off its source.

A guess, made before there is a batch: where it is wrong, or the source cannot be read, the first step refuses by name.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

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


def are_ends_told(model: nn.Module, blocks: Sequence[str], outside: Collection[int]) -> bool:
    """Whether the sources of the model's forwards show where each parameter outside the blocks is used: each holder of blocks
    names each child that has such parameters, either ahead of the blocks, or behind, or between; and no other module reads such
    a parameter or passes on a module that has one. Not seen: what functions outside of these modules, and hooks, compute with.
    `blocks`: their paths; `outside`: ids of the parameters."""
    inside = {id(module) for path in blocks for module in model.get_submodule(path).modules()}
    around = {".".join(path.split(".")[:depth]) for path in blocks for depth in range(path.count(".") + 1)}
    holders = [model.get_submodule(path) for path in sorted(around)]
    told = [holder for holder in holders if type(holder).forward is not nn.Module.forward]
    if not all(_uses_each_once(holder, outside, inside) for holder in told):
        return False
    owners = [(module, name) for module in model.modules() for name, p in module._parameters.items() if id(p) in outside]
    if any(isinstance(module, ParametrizationList) for module, _ in owners):
        return False  # read by another module, under another name
    names, every = {name for _, name in owners}, list(model.modules())
    alike = {(type(module), tuple(module._modules)): module for module in every if id(module) in inside}
    return all(_keeps_to_itself(module, names, ()) for module in alike.values()) and all(
        _keeps_to_itself(module, names, outside) for module in every if id(module) not in inside
    )


def _uses_each_once(holder: nn.Module, outside: Collection[int], inside: Collection[int]) -> bool:
    """Whether the holder's source names all of its children with blocks or such parameters, the latter at one place alone:
    ahead of all blocks, behind all, or between. `inside`: ids of the modules in blocks."""
    uses = list(_uses(holder, "forward", _MOST_METHODS))
    children = {name: child for name, child in holder._modules.items() if child is not None}
    inner = [name for name, child in children.items() if any(id(module) in inside for module in child.modules())]
    apart = [name for name, child in children.items() if name not in inner and _has_any(child, outside)]
    if "forward" in vars(holder) or not {*inner, *apart} <= set(uses):
        return False
    stack = [index for index, name in enumerate(uses) if name in inner]
    places = {name: [index for index, used in enumerate(uses) if used == name] for name in apart}
    return all(max(at) < stack[0] or min(at) > stack[-1] or stack[0] < min(at) <= max(at) < stack[-1] for at in places.values())


def _has_any(module: nn.Module | None, params: Collection[int]) -> bool:
    return module is not None and any(id(param) in params for param in module.parameters())


def _keeps_to_itself(module: nn.Module, names: Collection[str], outside: Collection[int]) -> bool:
    """Whether the sources of the module's forward, and of its methods that this calls, read no parameter of another module by
    one of the `names`, unless it lies below a module of a block, and pass on no module that has one of `outside`."""
    if type(module).__module__.startswith("torch.nn."):
        return True
    trees = _trees(type(module))
    return bool(trees) and not any(_passes_on(module, node, names, outside) for tree in trees for node in ast.walk(tree))


@functools.cache
def _trees(kind: type) -> tuple[ast.AST, ...]:
    """Of a class's forward and of each method that it calls, in all classes that define it; none where one has no source."""
    todo, found, trees = ["forward"], {"forward"}, list[ast.AST]()
    while todo:
        name = todo.pop()
        for each in kind.__mro__[: kind.__mro__.index(nn.Module)]:
            if not inspect.isfunction(vars(each).get(name)):
                continue
            if (tree := _tree_of(vars(each)[name])) is None:
                return ()
            trees.append(tree)
            called = {n for node in ast.walk(tree) for n in _own(node)} - found
            todo += called
            found |= called
    return tuple(trees) or (ast.Module([], []),)


def _passes_on(module: nn.Module, node: ast.AST, names: Collection[str], outside: Collection[int]) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in names and not _is_own(module, node.value, outside)
    if isinstance(node, ast.Call):
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        method = isinstance(node.func, ast.Attribute) and _has_any(_child(module, node.func.value), outside)
        itself = _has_any(module, outside) and any(isinstance(each, ast.Name) and each.id == "self" for each in given)
        return method or itself or _any_child(module, given, outside)
    if isinstance(node, ast.Assign | ast.Return | ast.NamedExpr) and node.value is not None:
        return _any_child(module, [node.value], outside)
    return False


def _is_own(module: nn.Module, value: ast.AST, outside: Collection[int]) -> bool:
    """Whether an attribute of `value` is the module's own, or that of a module below it which has no such parameter."""
    if isinstance(value, ast.Name) and value.id == "self":
        return True
    child = _child(module, value)
    return child is not None and not _has_any(child, outside)


def _any_child(module: nn.Module, values: Sequence[ast.AST], outside: Collection[int]) -> bool:
    return any(_has_any(_child(module, value), outside) for value in values)


def _child(module: nn.Module, node: ast.AST) -> nn.Module | None:
    """The module that `self.x.y` stands for; None where `node` is nothing such."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    if not names or not isinstance(node, ast.Name) or node.id != "self":
        return None
    found: nn.Module | None = module
    for name in names:
        found = found._modules.get(name) if found is not None else None
    return found


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
    return _tree_of(getattr(type(module), method))


def _tree_of(method: Callable[..., object]) -> ast.AST | None:
    function: Any = inspect.unwrap(method)
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
