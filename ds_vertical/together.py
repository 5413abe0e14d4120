"""Decisions that all ranks take together: another schedule on one rank would leave the others in a collective for ever."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ds_vertical import compat, files, ranks
from ds_vertical.regime import Regime
from ds_vertical.storage import StorageError


def make_files(regime: Regime, one: Mapping[Path, int], both: Mapping[Path, int]) -> None:
    """Preallocate one generation of this rank's files; both where the regime needs them, as long as every rank has room. If
    not the regime is told, or StorageError raised where early steps were asked for. Collective."""
    if regime.generations == 2:
        problem = preallocate(both)
        if problem is None:
            return
        if regime.demanded:
            raise problem
        compat.log(
            "ds_vertical: no early steps, for want of room for a second generation of files, so that all gradients wait until"
            f" after the norm, 4 bytes per parameter, which the budget above may not count: {problem}"
        )
        regime.give_up()
    require(one)


def require(wanted: Mapping[Path, int]) -> None:
    """Preallocate this rank's files, or raise StorageError on every rank. Collective."""
    problem = preallocate(wanted)
    if problem is not None:
        raise problem


def preallocate(wanted: Mapping[Path, int]) -> StorageError | None:
    """`files.preallocate` of this rank's files on every rank, or on none. Collective.

    Returns None, or why not: this rank's own error, or that another rank has one.
    """
    there = {path for path in wanted if path.exists()}
    problem = None
    try:
        files.preallocate(wanted)
    except StorageError as error:
        problem = error
    if ranks.is_true_on_all_ranks(problem is None):
        return None
    if problem is None:
        files.remove(path for path in wanted if path not in there)
        problem = StorageError("another rank could not preallocate its files; its own output says why")
    return problem
