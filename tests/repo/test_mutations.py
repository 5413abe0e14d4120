"""Each mutation of tests/repo/mutate.py is noticed by the test that it names; the package as it is passes those tests."""

from __future__ import annotations

import re
from pathlib import Path

import mutate
import pytest
from mutate import MUTATIONS, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_mutation_fits_the_source_and_names_a_test(mutation: Mutation) -> None:
    with mutate.package_copy([mutation]) as folder:
        mutated = (folder / mutate.PACKAGE / mutation.file).read_text()
    compile(mutated, mutation.file, "exec")
    file, _, name = mutate.locate(mutation.killer).partition("::")
    source = Path(file).read_text()
    assert re.search(rf"^def {name.partition('[')[0]}\(", source, re.MULTILINE), mutation.killer


def test_names_differ_and_an_unknown_one_is_refused() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    with pytest.raises(SystemExit, match="no such mutation: nonsense; there are: ticket-wait-removed"):
        mutate.main(["nonsense"])


def test_a_text_that_does_not_stand_there_once_is_refused() -> None:
    with pytest.raises(ValueError, match="schedule/executor.py holds 0 times 'no such text', not once"):
        with mutate.package_copy([Mutation("x", "schedule/executor.py", "no such text", "", "test_executor.py::x")]):
            pass


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_package_as_it_is_passes_every_killer() -> None:
    with mutate.package_copy() as folder:
        done = mutate.run_tests(folder, mutate.killers(), limit_s=1100)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" not in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1000)  # a mutant may hang until its own limit
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_mutation_is_killed(mutation: Mutation) -> None:
    assert mutate.is_killed(mutation), f"{mutation.name} survives {mutation.killer}"
