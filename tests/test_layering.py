"""The rooms and arrows that docs/architecture.md draws are those of the code; sizes stay readable."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import ds_vertical

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ds_vertical"
PAGE = "docs/architecture.md"
COMPAT = ("compat", "compat_pools", "compat_state")
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 50
GROUPS = ("core", "runtime", "deepspeed side", "tools")
FORBIDDEN = {"core": {"torch", "deepspeed"}, "runtime": {"deepspeed"}}
PRIVATE = re.compile(r"_[A-Za-z]\w*$")


# --------------------------------------------------------------------------------------------------------- what is drawn


@dataclass(frozen=True)
class Picture:
    """Arrows and groups as drawn: module -> modules it may import; module -> group."""

    arrows: dict[str, frozenset[str]]
    groups: dict[str, str]


def read_picture(markdown: str) -> Picture:
    """Parse the first fenced block with arrows below the heading that contains `Architecture`."""
    _, heading, section = markdown.partition("\n" + next(iter(re.findall(r"^#+ .*Architecture.*$", markdown, re.M)), "?"))
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", section, re.M | re.S)
    drawn = next((block for block in blocks if "->" in block), None)
    if not heading or drawn is None:
        raise ValueError(f"{PAGE} needs a section 'Architecture' with a fenced block of lines `module -> module, module`")
    arrows: dict[str, frozenset[str]] = {}
    groups: dict[str, str] = {}
    group = GROUPS[0]
    for line in filter(None, map(str.strip, drawn.splitlines())):
        if line.startswith("#"):
            group = next((name for name in GROUPS if line.lstrip("# ").lower().startswith(name)), group)
            continue
        module, arrow, targets = line.partition("->")
        if not arrow:
            raise ValueError(f"{PAGE}, Architecture: {line!r} is no line `module -> module, module`")
        arrows[module.strip()] = frozenset(filter(None, re.split(r"[,\s]+", targets.split("#")[0])))
        groups[module.strip()] = group
    return Picture(arrows, groups)


@functools.cache
def picture() -> Picture:
    return read_picture((ROOT / PAGE).read_text())


# ------------------------------------------------------------------------------------------------- what the code imports


@functools.cache
def trees() -> dict[str, ast.Module]:
    paths = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
    return {".".join(path.relative_to(PACKAGE).with_suffix("").parts): ast.parse(path.read_text()) for path in paths}


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all imports, wherever they stand; a string that is a module's name counts (imported by table)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = ("ds_vertical." * bool(node.level) + (node.module or "")).rstrip(".")
            yield from (f"{source}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"ds_vertical(\.\w+)+", node.value)
        ):
            yield node.value


def imported_modules(tree: ast.AST, modules: set[str]) -> set[str]:
    """The package's own modules that `tree` imports; names that the package exports lazily count as their home."""
    found = set()
    for name in imported_names(tree):
        head, _, rest = name.partition(".")
        if head != "ds_vertical" or not rest:
            continue
        rest = ds_vertical._HOMES.get(rest, name).removeprefix("ds_vertical.")
        found |= {module for module in modules if rest == module or rest.startswith(module + ".")}
    return found


def arrows() -> dict[str, set[str]]:
    modules = set(trees())
    return {name: imported_modules(tree, modules) - {name} for name, tree in trees().items()}


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """One cycle of the graph as a path that ends where it begins, or []."""
    finished: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in finished:
            return []
        for target in sorted(graph.get(node, ())):
            if cycle := visit(target, [*path, node]):
                return cycle
        finished.add(node)
        return []

    return next((cycle for node in sorted(graph) if (cycle := visit(node, []))), [])


def test_every_import_is_an_arrow_of_the_picture() -> None:
    drawn = picture().arrows
    missing = [f"{name} -> {target}" for name, targets in arrows().items() for target in targets - drawn.get(name, set())]
    unlisted = sorted(set(trees()) - set(drawn))
    assert not missing and not unlisted, f"{PAGE} lacks arrows {sorted(missing)} and modules {unlisted}"


def test_the_picture_has_no_arrow_that_the_code_has_not() -> None:
    real = arrows()
    stale = [f"{name} -> {target}" for name, targets in picture().arrows.items() for target in targets - real.get(name, set())]
    gone = sorted(set(picture().arrows) - set(real))
    assert not stale and not gone, f"{PAGE} draws arrows {sorted(stale)} and modules {gone} that are not there"


def test_no_cycle() -> None:
    assert find_cycle(arrows()) == []


def test_groups_import_downward() -> None:
    rank = {name: GROUPS.index(group) for name, group in picture().groups.items()}
    upward = [
        f"{name} -> {target}"
        for name, targets in arrows().items()
        for target in targets
        if rank.get(target, 0) > rank.get(name, len(GROUPS))  # modules that the page lacks fail another test
    ]
    assert upward == []


@pytest.mark.parametrize("group", sorted(FORBIDDEN))
def test_group_keeps_its_hands_off(group: str) -> None:
    members = [name for name, its in picture().groups.items() if its == group]
    assert members, f"{PAGE} has no group {group!r}"
    wrong = [
        f"{name} imports {imported}"
        for name in members
        for imported in imported_names(trees()[name])
        if imported.split(".")[0] in FORBIDDEN[group]
    ]
    assert wrong == []


# ----------------------------------------------------------------------------------- private names of DeepSpeed's classes


@functools.cache
def deepspeed_private_names() -> frozenset[str]:
    """Private functions, methods and attributes that DeepSpeed's own sources define."""
    import importlib.util

    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None and spec.origin is not None
    names: set[str] = set()
    for path in Path(spec.origin).parent.rglob("*.py"):
        text = path.read_text(errors="replace")
        names.update(re.findall(r"\bdef (_[A-Za-z]\w*)\s*\(", text))
        names.update(re.findall(r"\bself\.(_[A-Za-z]\w*)\s*(?::[^=\n]+)?=[^=]", text))
    return frozenset(name for name in names if not name.endswith("__"))


def defined_private_names(tree: ast.AST) -> set[str]:
    """Private names that this file itself defines: functions, methods, variables, `self._x = ...`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            root = node.value if isinstance(node, ast.Attribute) else None
            if root is None or (isinstance(root, ast.Name) and root.id in ("self", "cls")):
                names.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return {name for name in names if PRIVATE.match(name)}


def bound_by_import(tree: ast.AST) -> dict[str, str]:
    """Local name -> dotted name it was imported as."""
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            bound |= {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return bound


def root_name(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def private_uses(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """(line, root of the expression, private name) of every `x._y`, `getattr(x, "_y")` and `from a import _y`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.match(node.attr) and not node.attr.endswith("__"):
            yield node.lineno, root_name(node.value), node.attr
        elif isinstance(node, ast.ImportFrom):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from (
                (node.lineno, "", part) for part in parts if (node.module or "").startswith("deepspeed") and PRIVATE.match(part)
            )
        elif isinstance(node, ast.Call) and root_name(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            name = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else ""
            if isinstance(name, str) and PRIVATE.match(name) and not name.endswith("__"):
                yield node.lineno, root_name(node.args[0]), name


def foreign_privates(tree: ast.AST) -> list[str]:
    """Uses of names that are private to DeepSpeed, as far as the text tells; `self._x` that this file defines is its own."""
    own, bound = defined_private_names(tree), bound_by_import(tree)
    found = []
    for line, root, name in private_uses(tree):
        origin = bound.get(root, "deepspeed" if root in ("", "super") else "unknown")
        if origin.split(".")[0] not in ("deepspeed", "unknown"):
            continue
        from_deepspeed = origin.startswith("deepspeed") and (root in bound or root == "")
        if from_deepspeed or (name in deepspeed_private_names() and name not in own):
            found.append(f"line {line}: {name}")
    return found


def test_private_names_of_deepspeed_only_in_compat() -> None:
    wrong = {name: uses for name, tree in trees().items() if name not in COMPAT and (uses := foreign_privates(tree))}
    assert wrong == {}


# ------------------------------------------------------------------------------------------------------------------ sizes


def test_files_fit_on_few_screens() -> None:
    lines = {path.name: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {name: num for name, num in lines.items() if num > MAX_FILE_LINES} == {}


def test_functions_fit_on_one_screen() -> None:
    functions = (
        (f"{name}.{node.name}", (node.end_lineno or node.lineno) - node.lineno + 1)
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    assert {name: num for name, num in functions if num > MAX_FUNCTION_LINES} == {}


# ---------------------------------------------------------------------------------------------- the checks can themselves fail


def test_picture_is_read_from_markdown() -> None:
    text = (
        "# A\n\n## 3. Architecture\ntext\n```\nno arrow\n```\n```text\n# core: x\na ->\n# tools\nb -> a, c  # why\n```\n## B\n"
    )
    drawn = read_picture(text)
    assert drawn == Picture({"a": frozenset(), "b": frozenset({"a", "c"})}, {"a": "core", "b": "tools"})
    with pytest.raises(ValueError, match="Architecture"):
        read_picture("# A\n```\na -> b\n```\n")


def test_imports_are_found_in_every_form() -> None:
    code = """
import ds_vertical.ab
from ds_vertical import config as c, __version__, initialize
from .storage import x
def f():
    from ds_vertical.a.b import y
TABLE = {"z": "ds_vertical.opcache"}
"""
    modules = {"ab", "config", "engine", "storage", "a", "opcache", "unused"}
    assert imported_modules(ast.parse(code), modules) == modules - {"unused"}


def test_a_cycle_is_found() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize(
    "code",
    [
        "from deepspeed.runtime.engine import _private",
        "import deepspeed\ndeepspeed.zero._thing()",
        "from deepspeed.runtime import engine as e\ne.DeepSpeedEngine._anything",
        "def f(optimizer): return optimizer._get_norm_groups()",
        "class A(B):\n  def f(self): self._partitioned_params_swap_out(1)",
        "def f(x): return getattr(x, '_get_norm_groups')",
    ],
)
def test_private_uses_are_found(code: str) -> None:
    assert len(foreign_privates(ast.parse(code))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "class A:\n  def _step(self): ...\n  def f(self): self._step()",
        "import torch\ntorch._C._get_tracing_state()",
        "def f(x): return x.__class__, x._a_name_that_deepspeed_does_not_have",
        "from deepspeed.accelerator import get_accelerator\nget_accelerator().device_name()",
    ],
)
def test_own_and_public_names_pass(code: str) -> None:
    assert foreign_privates(ast.parse(code)) == []
