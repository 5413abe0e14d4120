"""Break ds_vertical on purpose, one place at a time, in a copy, and see whether the named tests notice.

    python tests/repo/mutate.py [--list | --check] [NAME ...]      # all of mutations.toml without a name

An entry of mutations.toml names a module, a symbol in it (a function, a class, `Class.method`, a variable; empty: the whole
module), and a text that must stand there exactly once and is replaced. The copy comes first on the path of the tests' process
and of the processes that it starts. A mutation is killed when its test fails; survivors make the exit code 1.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGE = "ds_vertical"
_TESTS_FAILED = 1  # pytest's exit code; any other above 0 says that the tests did not run, below 0 that they crashed


@dataclass(frozen=True)
class Mutation:
    """In `symbol` of ds_vertical's `module`, `old` becomes `new`; `test` (a pytest node below tests/) must fail of it."""

    name: str
    module: str
    symbol: str
    old: str
    new: str
    test: str
    why: str = ""

    @property
    def file(self) -> str:
        """The module's path in the package."""
        return self.module.replace(".", "/") + ".py"

    def mutated(self, package: Path) -> str:
        """The module's source with the fault. Raises ValueError unless the text stands in the symbol exactly once."""
        path = package / self.file
        if not path.is_file():
            raise ValueError(f"mutation {self.name}: there is no module {self.module}")
        source = path.read_text()
        spans = list(symbol_spans(source, self.symbol))
        if not spans:
            raise ValueError(f"mutation {self.name}: {self.module} has no symbol {self.symbol}")
        found = [(start, end) for start, end in spans if self.old in source[start:end]]
        count = sum(source[start:end].count(self.old) for start, end in found)
        if count != 1:
            place = f"{self.module}, {self.symbol or 'the whole module'}"
            raise ValueError(f"mutation {self.name}: {place} holds {count} times {self.old!r}, not once")
        start, end = found[0]
        return source[:start] + source[start:end].replace(self.old, self.new) + source[end:]


def symbol_spans(source: str, symbol: str) -> Iterator[tuple[int, int]]:
    """Where the symbol begins and ends, in characters of whole lines, decorators included; a property is found twice."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    if not symbol:
        yield 0, len(source)
    for name, node in named_nodes(_tree(source)):
        if symbol and name == symbol:
            first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
            yield starts[first - 1], starts[node.end_lineno or node.lineno]


@functools.cache
def _tree(source: str) -> ast.Module:
    """Several mutations change one module."""
    return ast.parse(source)


def named_nodes(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """(dotted name, statement) of all functions, classes and variables of modules and classes."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name, node
            yield from named_nodes(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((prefix + target.id, node) for target in targets if isinstance(target, ast.Name))


def load() -> tuple[Mutation, ...]:
    """All entries of mutations.toml."""
    return tuple(Mutation(**entry) for entry in tomllib.loads((HERE / "mutations.toml").read_text())["mutation"])


MUTATIONS = load()


@contextmanager
def package_copy(mutations: Sequence[Mutation] = ()) -> Iterator[Path]:
    """A folder with a copy of the package, changed by `mutations`."""
    with tempfile.TemporaryDirectory(prefix="ds_vertical-mutant-") as folder:
        package = Path(folder) / PACKAGE
        shutil.copytree(ROOT / PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
        for mutation in mutations:
            (package / mutation.file).write_text(mutation.mutated(package))
        yield Path(folder)


def run_tests(folder: Path, nodes: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    """Run pytest nodes on the package in `folder`. Raises RuntimeError when the tests could not run at all."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    check = [sys.executable, "-c", f"import {PACKAGE}; print({PACKAGE}.__file__)"]
    found = subprocess.run(check, cwd=folder, env=env, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).is_relative_to(folder):
        raise RuntimeError(f"the tests would run on {found}, not on the copy in {folder}")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    command += ["--rootdir", str(ROOT), "--basetemp", str(folder / "tmp")]
    command += [str(ROOT / "tests" / node) for node in nodes]
    done = _run_in_a_session(command, folder, env, limit_s)
    if done.returncode > _TESTS_FAILED:
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}")
    return done


def _run_in_a_session(
    command: list[str], folder: Path, env: dict[str, str], limit_s: float
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run`; what the command leaves running ends with it. A mutant's forked child may hang for ever, and would
    hold a pipe open."""
    with (folder / "stdout").open("w+") as out, (folder / "stderr").open("w+") as err:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=out, stderr=err, start_new_session=True)
        try:
            code = process.wait(limit_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return subprocess.CompletedProcess(
            command, code, (folder / "stdout").read_text(errors="replace"), (folder / "stderr").read_text(errors="replace")
        )


def is_killed(mutation: Mutation, limit_s: float = 900) -> bool:
    """Whether the mutation's test fails on the mutated copy (or crashes: SSD reads into memory given back do that)."""
    with package_copy([mutation]) as folder:
        return run_tests(folder, [mutation.test], limit_s).returncode != 0


def killers(mutations: Sequence[Mutation] = MUTATIONS) -> list[str]:
    """The tests of all mutations, each once."""
    return list(dict.fromkeys(mutation.test for mutation in mutations))


def misfits(mutations: Sequence[Mutation] = MUTATIONS) -> list[str]:
    """What does not fit the package as it is, in words."""
    wrong = []
    for mutation in mutations:
        try:
            compile(mutation.mutated(ROOT / PACKAGE), mutation.file, "exec")
        except (ValueError, SyntaxError) as error:
            wrong.append(str(error))
    return wrong


def _chosen(names: Sequence[str]) -> list[Mutation]:
    known = {mutation.name: mutation for mutation in MUTATIONS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no such mutation: {', '.join(unknown)}; there are: {', '.join(known)}")
    return [known[name] for name in names] or list(MUTATIONS)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code: 1 where a mutation survives or does not fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the mutations and their tests, run nothing")
    parser.add_argument("--check", action="store_true", help="print the mutations that do not fit the source, run nothing")
    args = parser.parse_args(arguments)
    mutations = _chosen(args.names)
    if args.list:
        print("\n".join(f"{m.name:36} {m.module:28} {m.symbol:28} {m.test}" for m in mutations))
        return 0
    if args.check:
        wrong = misfits(mutations)
        print("\n".join([*wrong, f"{len(mutations) - len(wrong)} of {len(mutations)} fit"]))
        return bool(wrong)
    survivors = []
    for mutation in mutations:
        start = time.monotonic()
        killed = is_killed(mutation)
        survivors += [] if killed else [mutation.name]
        verdict = "killed" if killed else "SURVIVED"
        print(f"{verdict:9} {mutation.name:36} {time.monotonic() - start:5.1f} s  {mutation.test}", flush=True)
    print(f"{len(mutations) - len(survivors)} of {len(mutations)} killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
