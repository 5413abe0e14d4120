"""A checkpoint's files on other SSDs than its folder: a hard link stays within one file system.

[Note: parts] A run with several SSDs saves to a folder on one of them. Its files there get a second name in the folder, as
with one SSD. Those on another SSD get theirs beside the run's folders there, in `ds_vertical_checkpoints/TAG.TOKEN/rank<r>`
below that nvme_path (the parts of the checkpoint), and the checkpoint's folder has a symbolic link to each. So nothing is
copied. Whoever follows links reads the checkpoint like any other. The parts are deleted with the folder that a later save of
the tag replaces. Where a user deletes that folder, they stay: `ds-vertical clean` lists them.

A checkpoint in a folder on none of the run's SSDs is copied whole. Imports neither torch nor deepspeed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ds_vertical.io import remove_tree
from ds_vertical.io.regular_file import parse_json, read_regular
from ds_vertical.io.runs import held_folders, run_dir, stripes

PARTS_FOLDER: Final = "ds_vertical_checkpoints"
PARTS_MARK: Final = "ds_vertical.parts"
LINKED: Final = re.compile(r"(chunk\d+\.\w+\.\d+|weight\d+)\.ssd\d+\.bin")
NO_LINKS: Final = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES)
_RANK: Final = re.compile(r"rank\d+")
_MOST_MARK_BYTES: Final = 1 << 14
_WRITTEN_BY: Final = "ds_vertical"


def can_link(path: Path, folder: Path) -> bool:
    """Whether a file of the run, on another file system than a rank's folder of a checkpoint, can have its second name on its
    own: the folder is on another of the run's SSDs."""
    owner = run_dir.owned(path)
    run = None if owner is None else stripes.run_with(owner.path)
    return run is not None and folder.stat().st_dev in {held_folders.status(each).st_dev for each in run.folders}


def link_part(path: Path, target: Path) -> bool:
    """Give a file of the run its second name on its own SSD, and let `target`, in a rank's folder, be a symbolic link to that.
    Returns whether that could be done. Raises OSError."""
    owner = run_dir.owned(path)
    if owner is None or not can_link(path, target.parent):
        return False
    tag_folder = target.parent.parent
    home = owner.path.parent / PARTS_FOLDER / tag_folder.name.removeprefix(".")
    name, rank = target.name, target.parent.name
    with _made(home, rank, owner.path.name, tag_folder) as place, held_folders.opened_folder(path.parent) as source:
        os.symlink(home / rank / name, target)  # first: by it a killed save's parts are found
        try:
            os.link(path.name, name, src_dir_fd=source, dst_dir_fd=place, follow_symlinks=False)
        except OSError as error:
            target.unlink()
            if error.errno in NO_LINKS:
                return False
            raise
    return True


@contextlib.contextmanager
def _made(home: Path, rank: str, run: str, tag_folder: Path) -> Iterator[int]:
    """A rank's folder below a home, made and marked where it is not there, by its descriptor; no link below the nvme_path is
    followed."""
    with contextlib.ExitStack() as stack:
        fd = stack.enter_context(remove_tree.opened(home.parent.parent, follow=True))
        for name in (home.parent.name, home.name):
            fd = stack.enter_context(_folder_in(fd, name))
        tag, _, token = home.name.rpartition(".")
        _mark(fd, {"run": run, "checkpoint": str(tag_folder.absolute().parent / tag), "token": token})
        yield stack.enter_context(_folder_in(fd, rank))


@contextlib.contextmanager
def _folder_in(above: int, name: str) -> Iterator[int]:
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, mode=0o700, dir_fd=above)
    with remove_tree.opened(name, above) as fd:
        yield fd


def _mark(home: int, told: Mapping[str, str]) -> None:
    with contextlib.suppress(FileExistsError):  # another rank's
        fd = os.open(PARTS_MARK, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=home)
        with os.fdopen(fd, "wb") as file:
            file.write(json.dumps({"written_by": _WRITTEN_BY, **told}).encode())
            file.flush()
            os.fsync(fd)


def places_of(rank_folder: Path) -> set[Path]:
    """The folders of the parts of one rank's share of a checkpoint, which hold the names that its links lead to."""
    found: set[Path] = set()
    for name in os.listdir(rank_folder):
        if LINKED.fullmatch(name):
            with contextlib.suppress(OSError):  # no link
                found.add((rank_folder / os.readlink(rank_folder / name)).parent)
    return found


def homes_of(folder: Path, checkpoint: Path) -> set[Path]:
    """The folders of all parts of a checkpoint, by the links in a folder, which is or was that of its tag. Those that say of
    themselves that they are another checkpoint's are left out. Raises OSError."""
    ranks = [folder / name for name in os.listdir(folder) if _RANK.fullmatch(name)]
    places = {place for rank in ranks if rank.is_dir() and not rank.is_symlink() for place in places_of(rank)}
    return {place.parent for place in places if _is_same(checkpoint_of(place.parent), checkpoint)}


def _is_same(one: Path | None, other: Path) -> bool:
    """Whether two paths are one name in one folder, whatever links lead there. The name need not be there."""
    if one is None or one.name != other.name:
        return False
    try:
        return one.parent.samefile(other.parent)
    except OSError:
        return False


def checkpoint_of(home: Path) -> Path | None:
    """The folder of the checkpoint whose parts a folder holds, as its mark says; None where it is no such folder."""
    if home.parent.name != PARTS_FOLDER:
        return None
    try:
        with remove_tree.opened(home) as fd:
            return _marked_as(fd, home.name)
    except OSError:
        return None


def _marked_as(home: int, name: str) -> Path | None:
    """As `checkpoint_of`, by the folder's descriptor. The mark has to repeat tag and token of the folder's name: what somebody
    has copied or renamed is his."""
    try:
        found = parse_json(read_regular(PARTS_MARK, _MOST_MARK_BYTES, os.O_NOFOLLOW, home))
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or found.pop("written_by", None) != _WRITTEN_BY:
        return None
    if found.keys() != {"run", "checkpoint", "token"} or not all(isinstance(value, str) for value in found.values()):
        return None
    if not run_dir.is_run_id(found["run"]):
        return None
    checkpoint = Path(found["checkpoint"])
    return checkpoint if name == f"{checkpoint.name}.{found['token']}" else None


@dataclass(frozen=True)
class FoundParts:
    """Parts of a checkpoint on one SSD. `checkpoint`: its folder, as they say; `is_used`: it is there, and its links lead to
    them."""

    home: Path
    checkpoint: Path
    is_used: bool


def find_parts(nvme_path: Path) -> Iterator[FoundParts]:
    """All parts of checkpoints on one SSD. Raises OSError."""
    folder = nvme_path / PARTS_FOLDER
    for home in sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else ():
        checkpoint = checkpoint_of(home)
        if checkpoint is not None:
            yield FoundParts(home, checkpoint, _is_used(home, checkpoint))


def _is_used(home: Path, checkpoint: Path) -> bool:
    """By the tag's folder, or by that of a save under way."""
    for folder in (checkpoint, checkpoint.with_name(f".{home.name}"), checkpoint.with_name(f".{home.name}.old")):
        with contextlib.suppress(OSError):
            if home in homes_of(folder, checkpoint):
                return True
    return False


def remove_parts(home: Path) -> None:
    """Delete a folder of parts, and in it what a save writes. Raises OSError, also where it holds something else. Its mark is
    read through the descriptor through which it is deleted."""
    with remove_tree.opened(home.parent) as above, remove_tree.opened(home.name, above) as fd:
        if home.parent.name != PARTS_FOLDER or _marked_as(fd, home.name) is None or os.fstat(fd).st_uid != os.geteuid():
            raise OSError(errno.EINVAL, "no mark in it says that it holds parts of a checkpoint", os.fspath(home))
        for name in os.listdir(fd):
            if not _RANK.fullmatch(name):
                continue
            with remove_tree.opened(name, fd) as rank:
                for each in os.listdir(rank):
                    if LINKED.fullmatch(each):
                        os.unlink(each, dir_fd=rank)
                remove_tree.remove_named(rank, name, fd)
        os.unlink(PARTS_MARK, dir_fd=fd)
        remove_tree.remove_named(fd, home.name, above)
    with contextlib.suppress(OSError):  # others' parts are in it
        home.parent.rmdir()
