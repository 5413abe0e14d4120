"""Folders that a save makes beside the tags: marked as ours before anything else is in them, and deleted by that mark only.

The name says nothing of whose a folder is: `.backup.20261124` is somebody's. The mark, a file of a fixed name, holds the
run's id, the tag and the save's token, which the folder's own name has to repeat. It is read, and what is ours is deleted,
through the folder's descriptor; a file that no save writes stays, and its folder with it. Folders of versions that wrote no
mark are left to people.

[Note: DeepSpeed's names] A portable save and DeepSpeed's own give their files the same names. So those in a folder are ours
only beside the mark PORTABLE, which a portable save writes ahead of its first file, and which stays there.

[Note: damaged manifests] A rank's manifest says what of its folder is ours. Where that cannot be read, the names say it, so
that a tag whose checkpoint is damaged can be saved again. But names count only beside a trace of ours: a manifest of the rank's
or the folder's, whatever is in it, or the mark of a save. Imports neither torch nor deepspeed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from ds_vertical.engine.checkpoint import parts
from ds_vertical.engine.checkpoint.manifest_schema import NAME, SIGNPOST
from ds_vertical.io import remove_tree
from ds_vertical.io.regular_file import is_plain_name, parse_json, read_regular

logger = logging.getLogger(__name__)

MARK: Final = "ds_vertical.beside"
PORTABLE: Final = "ds_vertical.portable"
_WRITTEN_BY: Final = {"written_by": "ds_vertical"}
_BESIDE: Final = re.compile(r"\.(?P<tag>.+)\.(?P<token>[0-9a-f]{8})(?P<end>\.old|\.new)?", re.DOTALL)
_RANK: Final = re.compile(r"rank\d+")
_OF_A_TAG: Final = (NAME, SIGNPOST, PORTABLE)
_DEEPSPEEDS: Final = re.compile(r"((bf|fp)16_)?(zero_pp_rank_\d+_)?mp_rank_\d+_(model|optim)_states\.pt")
_SCRATCH: Final = re.compile(r"scratch\d+")  # of a portable save
_PLACED: Final = re.compile(r"latest|zero_to_fp32\.py")  # on their way among the tags, in a folder of their own
_OF_A_RANK: Final = re.compile(r"chunk\d+\.\w+\.\d+(\.ssd\d+)?\.bin|weight\d+(\.ssd\d+)?\.bin|memory\.bin|loose\.pt")
_MOST_MARK_BYTES: Final = 1 << 14
_MOST_MANIFEST_BYTES: Final = 1 << 31


def mark(folder: int, run: str, tag: str, token: str) -> None:
    """Let a folder, given its descriptor, be ours to delete while its name has this tag and token. Raises OSError."""
    unmark(folder)
    fd = os.open(MARK, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    with os.fdopen(fd, "wb") as file:
        os.fchmod(fd, 0o600)
        file.write(json.dumps(_WRITTEN_BY | {"run": run, "tag": tag, "token": token}).encode())
        file.flush()
        os.fsync(fd)


def mark_portable(folder: Path) -> None:
    """Let files with DeepSpeed's names in a folder, which has none yet, be ours to delete. Raises OSError."""
    fd = os.open(folder / PORTABLE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:
        os.fchmod(fd, 0o600)
        file.write(json.dumps(_WRITTEN_BY).encode())
        file.flush()
        os.fsync(fd)


def _is_portable(folder: int) -> bool:
    """Whether a portable save has written a folder, given its descriptor: see [Note: DeepSpeed's names]."""
    try:
        return parse_json(read_regular(PORTABLE, _MOST_MARK_BYTES, os.O_NOFOLLOW, folder)) == _WRITTEN_BY
    except (OSError, ValueError):
        return False


def unmark(folder: int) -> None:
    """Remove the mark of a save from a folder, if there is one. `folder`: its descriptor."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(MARK, dir_fd=folder)


def is_marked(folder: int, tag: str, token: str) -> bool:
    """Whether a save of this tag with this token has marked the folder. `folder`: its descriptor."""
    try:
        found = parse_json(read_regular(MARK, _MOST_MARK_BYTES, os.O_NOFOLLOW, folder))
    except (OSError, ValueError):
        return False
    expected = _WRITTEN_BY | {"tag": tag, "token": token}
    return isinstance(found, dict) and isinstance(found.pop("run", None), str) and found == expected


def find_leftovers(save_dir: Path) -> list[tuple[Path, str, str]]:
    """Folders that killed saves left in `save_dir`, that nobody writes and nobody needs, with tag and token."""
    names = {name: match for name in sorted(os.listdir(save_dir)) if (match := _BESIDE.fullmatch(name)) is not None}
    olds = [match for match in names.values() if match["end"] == ".old"]
    between = {match["token"] for match in olds if not (save_dir / match["tag"]).exists()}  # only copies
    found = []
    for name, match in names.items():
        with contextlib.suppress(OSError), remove_tree.opened(save_dir / name) as fd:
            if not is_marked(fd, match["tag"], match["token"]):
                _tell_unmarked(save_dir / name, fd)
            elif match["token"] not in between and is_free(fd):
                found.append((save_dir / name, match["tag"], match["token"]))
    return found


def marked_beside(save_dir: Path) -> list[tuple[Path, str, str]]:
    """Folders beside the tags' that saves have marked, each with its tag and its save's token. Raises OSError."""
    found = []
    for name in sorted(os.listdir(save_dir)):
        match = _BESIDE.fullmatch(name)
        if match is None or match["end"] == ".new":
            continue
        with contextlib.suppress(OSError), remove_tree.opened(save_dir / name) as fd:
            if is_marked(fd, match["tag"], match["token"]):
                found.append((save_dir / name, match["tag"], match["token"]))
    return found


def _tell_unmarked(path: Path, fd: int) -> None:
    if any(name == NAME or _RANK.fullmatch(name) for name in os.listdir(fd)):
        logger.warning(
            "%s: may be what a killed save of an earlier version left; nothing in it says so, and it is not deleted:"
            " if you know it, rm -r it by hand",
            path,
        )


def is_free(folder: int) -> bool:
    """Whether no save is writing to the folder; False where that cannot be told. Holds its lock from then on."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def is_held(path: Path) -> bool:
    """Whether a save writes the folder, or keeps it for now; False where that cannot be told. Takes no lock that would keep
    another process from asking the same."""
    with contextlib.suppress(OSError), remove_tree.opened(path) as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def remove_leftover(path: Path, tag: str, token: str) -> None:
    """Delete a folder with this mark, and in it what a save writes; what cannot be deleted does no harm, and is told."""
    try:
        with remove_tree.opened(path.parent, follow=True) as root, remove_tree.opened(path.name, root) as fd:
            if not is_marked(fd, tag, token) or os.fstat(fd).st_uid != os.geteuid():
                logger.warning("%s: nothing in it says that this save made it: left; if you know it, delete it by hand", path)
                return
            homes = parts.homes_of(path, path.with_name(tag))
            _empty(fd, path.name.endswith(".new"))
            left = sorted(set(os.listdir(fd)) - {MARK})
            if left:
                logger.warning("%s: holds %s, which no save writes: left; move that away, then delete the rest", path, left[0])
                return
            unmark(fd)
            remove_tree.remove_named(fd, path.name, root)
        _remove_all_parts(homes)
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s: delete: %s; delete it by hand", path, error.strerror)


def _remove_all_parts(homes: Iterable[Path]) -> None:
    for home in homes:
        try:
            parts.remove_parts(home)
        except OSError as error:
            logger.warning("%s: delete: %s; delete it by hand", home, error.strerror)


def _empty(fd: int, places: bool) -> None:
    is_portable = _is_portable(fd)
    for name in sorted(os.listdir(fd), key=_OF_A_TAG.__contains__):  # what tells whose the others are goes last
        if _RANK.fullmatch(name):
            with contextlib.suppress(NotADirectoryError, FileNotFoundError), remove_tree.opened(name, fd) as rank:
                if remove_tree.mount(rank) == remove_tree.mount(fd):
                    _empty_rank(rank)
                    with contextlib.suppress(OSError):  # not empty
                        remove_tree.remove_named(rank, name, fd)
        elif _is_of_a_tag(name, is_portable) or _SCRATCH.fullmatch(name) or (places and _PLACED.fullmatch(name)):
            _unlink(name, fd)


def _is_of_a_tag(name: str, is_portable: bool) -> bool:
    return name in _OF_A_TAG or (is_portable and is_deepspeeds(name))


def is_deepspeeds(name: str) -> bool:
    """Whether a file in a tag's folder has the name of one of DeepSpeed's checkpoints."""
    return _DEEPSPEEDS.fullmatch(name) is not None


def _empty_rank(rank: int) -> None:
    """Its manifest goes last: what a kill leaves can still be told from others' files."""
    for name in _ours(rank) - {NAME}:
        _unlink(name, rank)
    _unlink(NAME, rank)


def _ours(rank: int, has_trace: bool = True) -> set[str]:
    """What is in a rank's folder and a save has written: what its manifest names; by the names, where that cannot be read. See
    [Note: damaged manifests]. `has_trace`: the folder above has a trace of ours."""
    names, listed = set(os.listdir(rank)), _listed(rank)
    if listed is not None:
        return names & (listed | {NAME})
    return {name for name in names if name == NAME or _OF_A_RANK.fullmatch(name)} if has_trace or NAME in names else set()


def _unlink(name: str, folder: int) -> None:
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        os.unlink(name, dir_fd=folder)


def _listed(rank: int) -> set[str] | None:
    """Names of the files that a rank's manifest has; None where it cannot be read."""
    try:
        found: Any = parse_json(read_regular(NAME, _MOST_MANIFEST_BYTES, os.O_NOFOLLOW, rank))
    except (OSError, ValueError):
        return None
    files = found.get("files") if isinstance(found, dict) else None
    return {name for name in files if is_plain_name(name)} if isinstance(files, Mapping) else None


def _is_saved(name: str, rank: int) -> bool:
    """Whether a save may have made what is in a rank's folder under this name: a file, or a link to a part."""
    mode = os.stat(name, dir_fd=rank, follow_symlinks=False).st_mode
    return stat.S_ISREG(mode) or (stat.S_ISLNK(mode) and parts.LINKED.fullmatch(name) is not None)


def others_files(path: Path) -> Iterator[str]:
    """What is in a tag's folder, or in a rank's of it, and belongs to no checkpoint, by its path there. Raises OSError."""
    with remove_tree.opened(path) as fd:
        names, is_portable = sorted(os.listdir(fd)), _is_portable(fd)
        has_trace = not {NAME, MARK}.isdisjoint(names)
        for name in names:
            if not _RANK.fullmatch(name):
                if name != MARK and not (_is_of_a_tag(name, is_portable) and os.path.isfile(path / name)):
                    yield name
                continue
            try:
                with remove_tree.opened(name, fd) as rank:
                    ours = _ours(rank, has_trace) if remove_tree.mount(rank) == remove_tree.mount(fd) else set()
                    for each in sorted(os.listdir(rank)):
                        if each not in ours or not _is_saved(each, rank):
                            yield f"{name}/{each}"
            except OSError as error:
                if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                    raise
                yield name
