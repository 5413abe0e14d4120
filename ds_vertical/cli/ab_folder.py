"""The folder that `ds-vertical ab --out` writes to, which may hold others' files: an `ab` deletes there, or writes over, only
what one has marked.

The folder has a file AB_MARK with a random id, and so has each folder that an `ab` makes in it. Names say nothing: a
`stock.0.metrics` may be anybody's. Marks are read, and folders deleted, through one descriptor.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
import tempfile
from pathlib import Path
from typing import Final

from ds_vertical.engine.metrics import ARMS, TRACED
from ds_vertical.errors import ConfigError
from ds_vertical.io import remove_tree
from ds_vertical.io.regular_file import parse_json, read_regular

AB_MARK: Final = "ds_vertical.ab"
_WRITTEN_BY: Final = "ds_vertical ab"
_MOST_MARK_BYTES: Final = 1 << 10
_RUN: Final = rf"({'|'.join((*ARMS, TRACED))})"
_OURS: Final = re.compile(rf"(ab|limits)\.json|{_RUN}\.json|{_RUN}\.\d+\.(log|metrics|trace|env)")
_FIRST: Final = "ab.json"  # of what an earlier `ab` has written: it would pass for this one's


def take(out: Path) -> Path:
    """The folder, made where it is not there, and known to be writable; what an earlier `ab` left there cannot pass for this
    one's. Returns its real path. Raises ConfigError where that cannot be, or others' files have the names of ours."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
        with remove_tree.opened(out, follow=True) as fd:
            if (name := _take(fd, out)) is not None:
                raise ConfigError(
                    f"--out {out}: holds {name}, and nothing says that an `ab` has written it; name another folder, or move"
                    " that away"
                )
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot write there ({error}); name a folder that you may write to") from error
    return out.resolve()


def make(out: Path, name: str) -> Path:
    """A folder in `out`, marked as ours. Raises OSError."""
    with remove_tree.opened(out) as fd:
        os.mkdir(name, dir_fd=fd)
        with remove_tree.opened(name, fd) as folder:
            _mark(folder, _id_in(fd) or "")
    return out / name


def _take(out: int, shown: Path) -> str | None:
    """Delete an earlier `ab`'s folders; the name of what is in the way, where something is, and then nothing is deleted."""
    ours, known = sorted(filter(_OURS.fullmatch, os.listdir(out))), _id_in(out)
    with contextlib.ExitStack() as stack:
        folders: dict[str, int] = {}
        for name in ours:
            if stat.S_ISDIR(os.stat(name, dir_fd=out, follow_symlinks=False).st_mode):
                folders[name] = stack.enter_context(remove_tree.opened(name, out))
            if known is None or (name in folders and _id_in(folders[name]) != known):
                return name
        for name, folder in folders.items():
            for path, error in remove_tree.remove_inside(folder, shown / name):
                raise OSError(error.errno, error.strerror, os.fspath(path))
            remove_tree.remove_named(folder, name, out)
    if _FIRST in ours:
        os.unlink(_FIRST, dir_fd=out)
    if known is None:
        _mark(out, secrets.token_hex(8))
    return None


def _mark(folder: int, identity: str) -> None:
    fd = os.open(AB_MARK, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644, dir_fd=folder)
    with os.fdopen(fd, "w") as file:
        json.dump({"written_by": _WRITTEN_BY, "id": identity}, file)


def _id_in(folder: int) -> str | None:
    """What the mark in a folder says; None where there is none of ours."""
    try:
        found = parse_json(read_regular(AB_MARK, _MOST_MARK_BYTES, os.O_NOFOLLOW, folder))
    except (OSError, ValueError):
        return None
    ours = isinstance(found, dict) and found.get("written_by") == _WRITTEN_BY and isinstance(found.get("id"), str)
    return found["id"] if ours else None
