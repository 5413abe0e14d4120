"""Runs of a job of ranks in groups: those that slow tests alone need are made only where these run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Found = list[dict[str, Any]]  # by rank


class Groups(dict[str, Found]):
    """{run: what each rank found}. The runs of a group are made together, when the first of them is asked for.

    `make`: runs of a group in a folder, to what they found, by name.
    """

    def __init__(
        self,
        folder: Path,
        make: Callable[[Path, list[dict[str, Any]]], dict[str, Found]],
        *groups: list[dict[str, Any]],
    ) -> None:
        super().__init__()
        self.folder, self._make, self._groups = folder, make, groups

    def __missing__(self, name: str) -> Found:
        number, runs = next((n, runs) for n, runs in enumerate(self._groups) if name in [run["name"] for run in runs])
        folder = self.folder / str(number)
        folder.mkdir()
        self.update(self._make(folder, runs))
        return self[name]
