"""Folders that a save makes beside the tags: marked as ours before anything else is in them, and deleted by that mark only.

The name says nothing of whose a folder is: `.backup.20261124` is somebody's. The mark, a file of a fixed name, holds the
run's id, the tag and the save's token, which the folder's own name has to repeat. It is read, and what is ours is deleted,
through the folder's descriptor; a file that no save writes stays, and its folder with it. Folders of versions that wrote no
mark are left to people.

[Note: what names say] The manifest of a rank's folder says which files there are ours. A save that was killed has not written
it yet. So in a folder that a save has made for itself, as its mark says, the names say it. A tag's folder is different: there a
user's file may have any name. Where its manifests cannot be read, nothing there is ours to delete, and the save is refused.

[Note: DeepSpeed's names] A portable save and DeepSpeed's own give their files the same names. So those in a folder are ours
only beside the mark PORTABLE, which a portable save writes ahead of its first file, and which stays there. Earlier versions
wrote none, or one without the run's id. Imports neither torch nor deepspeed.
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
from typing import Any, Final, NamedTuple

from ds_vertical.engine.checkpoint import parts
from ds_vertical.engine.checkpoint.manifest_schema import NAME, SIGNPOST
from ds_vertical.io import remove_tree
from ds_vertical.io.regular_file import is_plain_name, parse_json, read_regular
from ds_vertical.io.runs import run_dir

logger = logging.getLogger(__name__)

MARK: Final = "ds_vertical.beside"
PORTABLE: Final = "ds_vertical.portable"
_WRITTEN_BY: Final = "ds_vertical"
_BESIDE: Final = re.compile(r"\.(?P<tag>.+)\.(?P<token>[0-9a-f]{8})(?P<end>\.old|\.new)?", re.DOTALL)
_RANK: Final = re.compile(r"rank\d+")
_OF_A_TAG: Final = (NAME, SIGNPOST, PORTABLE)
_MARKS: Final = (*_OF_A_TAG, MARK)
_DEEPSPEEDS: Final = re.compile(r"((bf|fp)16_)?(zero_pp_rank_\d+_)?mp_rank_\d+_(model|optim)_states\.pt")
_SCRATCH: Final = re.compile(r"scratch\d+")  # of a portable save
_PLACED: Final = re.compile(r"latest|zero_to_fp32\.py")  # on their way among the tags, in a folder of their own
_OF_A_RANK: Final = re.compile(r"chunk\d+\.\w+\.\d+(\.ssd\d+)?\.bin|weight\d+(\.ssd\d+)?\.bin|memory\.bin|loose\.pt")
_NO_PART: Final = "is no part of a checkpoint"
_NO_WEIGHTS: Final = b"\x80\x02}q\x00."  # an empty dict, as torch.save has pickled it
_MOST_MARK_BYTES: Final = 1 << 14
_MOST_MANIFEST_BYTES: Final = 1 << 31


class Other(NamedTuple):
    """What is in a tag's folder and is not ours to delete: its path there, and why, as the end of a sentence."""

    path: str
    why: str = _NO_PART


def mark(folder: int, run: str, tag: str, token: str, is_made: bool = True) -> None:
    """Let a folder, given its descriptor, be ours to delete while its name has this tag and token. `is_made`: by this save, for
    itself; else what is in it was there: see [Note: what names say]. Raises OSError."""
    unmark(folder)
    _write_mark(MARK, folder, {"run": run, "tag": tag, "token": token, "made": is_made})


def mark_portable(folder: Path, run: str) -> None:
    """Let files with DeepSpeed's names in a folder, which has none yet, be ours to delete. Raises OSError."""
    with remove_tree.opened(folder) as fd:
        _write_mark(PORTABLE, fd, {"run": run})


def _write_mark(name: str, folder: int, told: Mapping[str, object]) -> None:
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    with os.fdopen(fd, "wb") as file:
        os.fchmod(fd, 0o600)
        file.write(json.dumps({"written_by": _WRITTEN_BY, **told}).encode())
        file.flush()
        os.fsync(fd)


def _read_mark(name: str, folder: int, limit: int = _MOST_MARK_BYTES) -> dict[str, object] | None:
    """What a file of ours says besides that we have written it; None for one that does not say that, or cannot be read."""
    try:
        found = parse_json(read_regular(name, limit, os.O_NOFOLLOW, folder))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.pop("written_by", None) == _WRITTEN_BY else None


def _has_run(told: dict[str, object] | None) -> bool:
    """Whether a mark has a run's id, which is taken from it."""
    return told is not None and run_dir.is_run_id(told.pop("run", None))


def _is_portable(folder: int) -> bool:
    """Whether a portable save has written a folder, given its descriptor: see [Note: DeepSpeed's names]."""
    told = _read_mark(PORTABLE, folder)
    return _has_run(told) and told == {}


def unmark(folder: int) -> None:
    """Remove the mark of a save from a folder, if there is one. `folder`: its descriptor."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(MARK, dir_fd=folder)


def is_marked(folder: int, tag: str, token: str) -> bool:
    """Whether a save of this tag with this token has marked the folder. `folder`: its descriptor."""
    return _marked(folder, tag, token) is not None


def _marked(folder: int, tag: str, token: str, places: bool = False) -> bool | None:
    """Whether the folder that a save has so marked was made by it; None where none has. Earlier versions did not say. One that
    `places` a file among the tags always was."""
    told = _read_mark(MARK, folder)
    if told is None or not _has_run(told):
        return None
    is_made = told.pop("made", places)
    return is_made if isinstance(is_made, bool) and told == {"tag": tag, "token": token} else None


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
            is_made = _marked(fd, tag, token, path.name.endswith(".new"))
            if is_made is None or os.fstat(fd).st_uid != os.geteuid():
                logger.warning("%s: nothing in it says that this save made it: left; if you know it, delete it by hand", path)
                return
            homes, others = parts.homes_of(path, path.with_name(tag)), list(_others_in(fd))
            _empty(fd, is_made, path.name.endswith(".new"))
            if left := sorted(set(os.listdir(fd)) - {MARK}):
                other = next((each for each in others if _is_there(each.path, fd)), Other(left[0]))
                logger.warning("%s: holds %s, which %s: left; move that away, then delete the rest", path, *other)
                _remove_all_parts(homes - parts.homes_of(path, path.with_name(tag)))  # no link leads there any more
                return
            try:
                _remove_empty(fd, path.name, root)
            finally:
                _remove_all_parts(homes)  # no link leads there any more
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s: delete: %s; delete it by hand", path, error.strerror)


def _remove_empty(fd: int, name: str, root: int) -> None:
    """Delete a folder in which there is only its mark. Raises OSError."""
    try:
        unmark(fd)
        remove_tree.remove_named(fd, name, root)
    except OSError:
        raise
    except BaseException:  # a second Ctrl-C: without the mark nobody could tell later that the folder is ours
        with contextlib.suppress(OSError):  # the mark is still there
            os.rmdir(name, dir_fd=root)
        raise


def _is_there(path: str, folder: int) -> bool:
    try:
        os.stat(path, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return True


def _remove_all_parts(homes: Iterable[Path]) -> None:
    for home in homes:
        try:
            parts.remove_parts(home)
        except OSError as error:
            logger.warning("%s: delete: %s; delete it by hand", home, error.strerror)


def _empty(fd: int, is_made: bool, places: bool) -> None:
    for name in _to_delete(fd, is_made, places):
        if not _RANK.fullmatch(name):
            _unlink(name, fd)
            continue
        with contextlib.suppress(NotADirectoryError, FileNotFoundError), remove_tree.opened(name, fd) as rank:
            if remove_tree.mount(rank) == remove_tree.mount(fd):
                _empty_rank(rank, is_made)
                with contextlib.suppress(OSError):  # not empty
                    remove_tree.remove_named(rank, name, fd)


def _to_delete(fd: int, is_made: bool, places: bool) -> list[str]:
    """What is ours in a folder with our mark, and its ranks' folders, in the order to delete them. All are judged ahead of the
    first deletion. What tells whose the others are goes last, the manifest behind all: a kill may come in between."""
    is_portable = _is_portable(fd)
    found = [
        name
        for name in set(os.listdir(fd)) - {MARK}  # which `remove_leftover` removes, or leaves with the rest
        if _RANK.fullmatch(name)
        or (is_made and _is_a_saves(name, places))
        or _is_of_a_tag(name, fd, is_portable)
        or (name == SIGNPOST and _is_signpost(fd))
    ]
    return sorted(found, key=lambda name: (name in _OF_A_TAG, name == NAME, name))


def _is_signpost(folder: int) -> bool:
    """Whether a folder's file of that name holds what a save writes there, or nothing: the manifest beside it may be gone."""
    try:
        content = read_regular(SIGNPOST, _MOST_MARK_BYTES, os.O_NOFOLLOW, folder)
    except (OSError, ValueError):
        return False
    return not content or _NO_WEIGHTS in content


def _is_a_saves(name: str, places: bool) -> bool:
    """Whether a save gives such a name to what it writes into a folder that it has made."""
    return name in _OF_A_TAG or bool(_SCRATCH.fullmatch(name)) or (places and bool(_PLACED.fullmatch(name)))


def _is_of_a_tag(name: str, folder: int, is_portable: bool) -> bool:
    """Whether what is in a tag's folder under this name is ours, as it says itself or the mark beside it."""
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(status.st_mode):
        return False
    if name == MARK:  # nothing is in it where its save was killed
        return status.st_size == 0 or _has_run(_read_mark(MARK, folder))
    if name in (NAME, SIGNPOST):  # a save writes both
        return _read_mark(NAME, folder, _MOST_MANIFEST_BYTES) is not None
    return is_portable and (name == PORTABLE or is_deepspeeds(name))


def is_deepspeeds(name: str) -> bool:
    """Whether a file in a tag's folder has the name of one of DeepSpeed's checkpoints."""
    return _DEEPSPEEDS.fullmatch(name) is not None


def _empty_rank(rank: int, is_made: bool) -> None:
    """Its manifest goes last: what a kill leaves can still be told from others' files."""
    ours = _ours(rank)
    if ours is None:
        ours = {name for name in os.listdir(rank) if name == NAME or _OF_A_RANK.fullmatch(name)} if is_made else set()
    for name in sorted(ours, key=NAME.__eq__):
        _unlink(name, rank)


def _ours(rank: int) -> set[str] | None:
    """What is in a rank's folder and its manifest names; None where that cannot be read. See [Note: what names say]."""
    listed = _listed(rank)
    return None if listed is None else set(os.listdir(rank)) & (listed | {NAME})


def _unlink(name: str, folder: int) -> None:
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        os.unlink(name, dir_fd=folder)


def _listed(rank: int) -> set[str] | None:
    """Names of the files that a rank's manifest has; None where it cannot be read, or is none."""
    try:
        found: Any = parse_json(read_regular(NAME, _MOST_MANIFEST_BYTES, os.O_NOFOLLOW, rank))
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("format"), int):
        return None
    files = found.get("files")
    return {name for name in files if is_plain_name(name)} if isinstance(files, Mapping) else None


def _is_saved(name: str, rank: int) -> bool:
    """Whether a save may have made what is in a rank's folder under this name: a file, or a link to a part."""
    mode = os.stat(name, dir_fd=rank, follow_symlinks=False).st_mode
    return stat.S_ISREG(mode) or (stat.S_ISLNK(mode) and parts.LINKED.fullmatch(name) is not None)


def others_files(path: Path) -> Iterator[Other]:
    """What is in a tag's folder, or in a rank's of it, and belongs to no checkpoint. Raises OSError."""
    with remove_tree.opened(path) as fd:
        yield from _others_in(fd)


def _others_in(fd: int) -> Iterator[Other]:
    is_portable = _is_portable(fd)
    for name in sorted(os.listdir(fd), key=lambda name: (name in _MARKS, name)):
        if _RANK.fullmatch(name):
            yield from _others_of_a_rank(name, fd)
        elif not _is_of_a_tag(name, fd, is_portable):
            yield Other(name, _why_not(name, fd))


def _why_not(name: str, folder: int) -> str:
    """Of a name in a tag's folder that is not ours."""
    if name == NAME:
        return "is no manifest of ours that can be read: nothing says whose the folder is"
    is_earlier = _read_mark(PORTABLE, folder) == {}
    if name == PORTABLE and is_earlier:
        return "has no run's id, as an earlier version wrote it"
    if is_deepspeeds(name):
        whose = "which has no run's id, as an earlier version wrote it" if is_earlier else "that says that it is ours"
        return f"has the name of a file of DeepSpeed's, {'beside the' if is_earlier else 'without the'} {PORTABLE} {whose}"
    return Other(name).why


def _others_of_a_rank(name: str, folder: int) -> Iterator[Other]:
    try:
        with remove_tree.opened(name, folder) as rank:
            ours = _ours(rank) if remove_tree.mount(rank) == remove_tree.mount(folder) else set()
            names = sorted(os.listdir(rank))
            if ours is None and NAME in names:
                yield Other(name, f"has no {NAME} that can be read: nothing says which files in it are ours")
                return
            for each in names:
                if ours is None and _OF_A_RANK.fullmatch(each):
                    yield Other(f"{name}/{each}", f"{_NO_PART}, since no {NAME} beside it names it")
                elif each not in (ours or ()) or not _is_saved(each, rank):
                    yield Other(f"{name}/{each}")
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        yield Other(name)
