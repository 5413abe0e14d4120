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

from ds_vertical import storage
from ds_vertical.storage import Owner, StorageError

_RUN_NAME = re.compile(r"\d{8}-\d{6}-[A-Za-z0-9-]+-[0-9a-f]{8}")  # see storage.new_run_id

Outcome = Literal["removed", "gone", "kept"]


@dataclass(frozen=True)
class Tenant:
    """A run's folder, with the owners of its locks by how they fare; None: one that did not write its name.

    `fault`: why the folder could not be looked into.
    """

    folder: Path
    live: tuple[Owner | None, ...] = ()
    elsewhere: tuple[Owner | None, ...] = ()  # on other hosts, alive or not
    gone: tuple[Owner | None, ...] = ()
    fault: str = ""

    @property
    def owners(self) -> tuple[Owner | None, ...]:
        return self.live + self.elsewhere + self.gone

    @property
    def state(self) -> Literal["live", "stale", "unknown"]:
        """A run is stale once every owner is known to be gone."""
        if self.live:
            return "live"
        return "stale" if self.gone and not self.elsewhere and not self.fault else "unknown"


def tenants(nvme_path: str | os.PathLike[str]) -> list[Tenant]:
    """The runs' folders below an nvme_path. Raises OSError where that cannot be read."""
    folders = sorted(path for path in Path(nvme_path).iterdir() if path.is_dir() and not path.is_symlink())
    return [found for found in map(examine, folders) if found is not None]


def examine(folder: Path) -> Tenant | None:
    """The tenant of one folder; None where it is no run's, or was given up meanwhile."""
    named = _RUN_NAME.fullmatch(folder.name) is not None
    try:
        uid = folder.stat().st_uid
        if uid != os.geteuid():
            fault = f"of user id {uid}, who alone can see whether it is alive"
            return Tenant(folder, fault=fault) if named else None
        if not named and not storage.lock_files(folder):
            return None
        with storage.guarded(folder, create=False):
            return _look(folder)
    except FileNotFoundError:
        return None
    except (OSError, StorageError) as error:
        return Tenant(folder, fault=f"that cannot be looked into: {error}")


def remove(folder: Path, named: bool) -> Outcome:
    """Delete a dead run's folder; `named`: also one of which nothing can be told here. "kept": it is live, or may be.

    The folder is judged anew under its guard, so a run that has started in it since it was listed keeps it. Raises
    StorageError or OSError, after deleting what could be deleted, where something could not.
    """
    try:
        with storage.guarded(folder, create=False):
            state = _look(folder).state
            if state == "live" or (state == "unknown" and not named):
                return "kept"
            storage.remove_tree(folder)
    except FileNotFoundError:
        return "gone"
    return "removed"


def _look(folder: Path) -> Tenant:
    """To be called under the folder's guard."""
    locks = storage.locks(folder)

    def owners(standing: storage.Standing) -> tuple[Owner | None, ...]:
        return tuple(lock.owner for lock in locks if lock.standing == standing)

    return Tenant(folder, owners("live"), owners("elsewhere"), owners("gone"))
