"""The runs' folders below an nvme_path: whose they are, whether their owners live, and how a dead run's is deleted.

Whoever looks holds the folder's guard, as ranks do that claim or release: nothing can start or end between the look
and what follows from it. Imports neither torch nor deepspeed.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ds_vertical.errors import StorageError
from ds_vertical.io.runs import run_dir, run_lock
from ds_vertical.io.runs.run_dir import Guard
from ds_vertical.io.runs.run_lock import Owner

_RUN_NAME = re.compile(r"\d{8}-\d{6}-[A-Za-z0-9-]+-[0-9a-f]{8}")  # see storage.new_run_id

Outcome = Literal["removed", "gone", "kept"]


@dataclass(frozen=True)
class FoundRun:
    """A run's folder, with the owners of its locks by how they fare; None: one that did not write its name.

    `fault`: why the folder could not be looked into. `is_ours`: a lock in it says that a run made it under this name; anything
    else that looks like a run's folder is left to people.
    """

    folder: Path
    live: tuple[Owner | None, ...] = ()
    elsewhere: tuple[Owner | None, ...] = ()  # on other hosts, alive or not
    gone: tuple[Owner | None, ...] = ()
    fault: str = ""
    is_ours: bool = True

    @property
    def owners(self) -> tuple[Owner | None, ...]:
        """Of all the run's locks; None for a lock that does not tell its owner."""
        return self.live + self.elsewhere + self.gone

    @property
    def beside(self) -> tuple[Path, ...]:
        """The run's folders on its other SSDs, as its locks say."""
        return tuple(dict.fromkeys(Path(each) for owner in self.owners if owner is not None for each in owner.beside))

    @property
    def state(self) -> Literal["live", "stale", "unknown"]:
        """A run is stale once every owner is known to be gone."""
        if self.live:
            return "live"
        return "stale" if self.gone and self.is_ours and not self.elsewhere and not self.fault else "unknown"


def find_runs(nvme_path: str | os.PathLike[str]) -> list[FoundRun]:
    """The runs' folders below an nvme_path. Raises OSError where that cannot be read."""
    folders = sorted(path for path in Path(nvme_path).iterdir() if path.is_dir() and not path.is_symlink())
    return [found for found in map(examine, folders) if found is not None]


def examine(folder: Path) -> FoundRun | None:
    """The run of one folder; None where it is no run's, or was given up meanwhile."""
    named = _RUN_NAME.fullmatch(folder.name) is not None
    try:
        uid = folder.lstat().st_uid
        if uid != os.geteuid():
            fault = f"of user id {uid}, who alone can see whether it is alive"
            return FoundRun(folder, fault=fault) if named else None
        if not named and not run_lock.lock_names(folder):
            return None
        with run_dir.guarded(folder, create=False) as guard:
            found = _look(guard)
    except FileNotFoundError:
        return None
    except (OSError, StorageError) as error:
        return FoundRun(folder, fault=f"that cannot be looked into: {error}")
    return found if named or found.is_ours else None


def remove_run(folder: Path, named: bool) -> Outcome:
    """Delete a dead run's folder; `named`: also one of which nothing can be told here. "kept": it is live, or may be, or is
    no run's.

    The folder is judged anew under its guard, so a run that has started in it since it was listed keeps it. Raises
    StorageError or OSError, after deleting what could be deleted, where something could not.
    """
    try:
        with run_dir.guarded(folder, create=False) as guard:
            found = _look(guard)
            if found.state == "live" or not found.is_ours or (found.state == "unknown" and not named):
                return "kept"
            run_dir.remove_tree(guard)
    except FileNotFoundError:
        return "gone"
    return "removed"


def _look(guard: Guard) -> FoundRun:
    found = run_lock.locks_in(guard.fd)

    def owners(standing: run_lock.Standing) -> tuple[Owner | None, ...]:
        return tuple(lock.owner for lock in found if lock.standing == standing)

    is_ours = run_lock.is_of_run(found, guard.path.name)
    return FoundRun(guard.path, owners("live"), owners("elsewhere"), owners("gone"), is_ours=is_ours)
