"""Each mutation of mutations.toml is noticed by the test that it names; the package as it is passes those tests."""

from __future__ import annotations

import re

import mutate
import pytest
from mutate import MUTATIONS, Mutation

NAMES = [mutation.name for mutation in MUTATIONS]
slow = pytest.mark.slow


@pytest.mark.parametrize("mutation", MUTATIONS, ids=NAMES)
def test_mutation_fits_the_source_and_names_a_test(mutation: Mutation) -> None:
    assert mutate.misfits([mutation]) == []
    file, _, name = mutation.test.partition("::")
    source = (mutate.ROOT / "tests" / file).read_text()
    function = name.partition("[")[0].rpartition("::")[2]  # of the module, or of a class in it
    assert re.search(rf"^ *def {function}\(", source, re.MULTILINE), mutation.test


def test_names_differ_and_an_unknown_one_is_refused() -> None:
    assert len(set(NAMES)) == len(MUTATIONS)
    with pytest.raises(SystemExit, match="no such mutation: nonsense; there are: ticket-wait-removed"):
        mutate.main(["nonsense"])


@pytest.mark.parametrize(
    ("module", "symbol", "old", "words"),
    [
        ("schedule.executor", "Executor.run", "no such text", "schedule.executor, Executor.run holds 0 times 'no such text'"),
        ("schedule.executor", "Executor.run", "flying", r"holds \d+ times 'flying', not once"),
        ("schedule.executor", "", "import", r"schedule.executor, the whole module holds \d+ times 'import', not once"),
        ("schedule.executor", "Executor.nothing", "pass", "schedule.executor has no symbol Executor.nothing"),
        ("schedule.nothing", "Executor.run", "pass", "there is no module schedule.nothing"),
    ],
)
def test_a_text_that_does_not_stand_there_once_is_refused(module: str, symbol: str, old: str, words: str) -> None:
    (wrong,) = mutate.misfits([Mutation("x", module, symbol, old, "", "schedule/test_executor.py::x")])
    assert re.search(words, wrong), wrong


def test_a_text_is_looked_for_within_its_symbol() -> None:
    source = (
        "x = 1\n\n\nclass A:\n    y = 1\n\n    @property\n    def f(self):\n        return 1\n\n    def g(self): return 1\n"
    )
    found = {name: [source[a:b] for a, b in mutate.symbol_spans(source, name)] for name in ("x", "A.y", "A.f", "A.g", "f")}
    assert found == {
        "x": ["x = 1\n"],
        "A.y": ["    y = 1\n"],
        "A.f": ["    @property\n    def f(self):\n        return 1\n"],
        "A.g": ["    def g(self): return 1\n"],
        "f": [],
    }


@slow
@pytest.mark.timeout(1200)
def test_the_package_as_it_is_passes_every_killer() -> None:
    with mutate.package_copy() as folder:
        done = mutate.run_tests(folder, mutate.killers(), limit_s=1100)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" not in done.stdout


@slow
@pytest.mark.timeout(1000)  # a mutant may hang until its own limit
@pytest.mark.parametrize("mutation", MUTATIONS, ids=NAMES)
def test_mutation_is_killed(mutation: Mutation) -> None:
    assert mutate.is_killed(mutation), f"{mutation.name} survives {mutation.test}"
