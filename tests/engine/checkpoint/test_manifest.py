"""Checkpoints as files: checksums of pieces, manifests, and folders that are complete or absent. No torch."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from manifests import CONTENT, write_checkpoint

from ds_vertical.engine.checkpoint import leftovers, manifest, tag_dir
from ds_vertical.engine.checkpoint.tag_dir import TagFolder, check_tag
from ds_vertical.errors import CheckpointError, StorageError
from ds_vertical.io import remove_tree
from ds_vertical.io.checksums import Checksums, Piece, checksum
from ds_vertical.io.files import set_aside

# ---- checksums


def test_pieces_that_were_noted_are_not_read(tmp_path: Path) -> None:
    """The file does not even exist."""
    sums, path = Checksums(), tmp_path / "state"
    sums.note(path, 0, b"abcd")
    sums.note(path, 4, b"efgh")
    assert sums.pieces(path, 0, 8) == [Piece(0, 4, checksum(b"abcd")), Piece(4, 4, checksum(b"efgh"))]
    assert sums.pieces(path, 4, 8) == [Piece(4, 4, checksum(b"efgh"))]


def test_pieces_that_nobody_noted_are_read_once(tmp_path: Path) -> None:
    sums, path = Checksums(), tmp_path / "state"
    path.write_bytes(b"abcdefgh")
    sums.note(path, 0, b"abcd")
    expected = [Piece(0, 8, checksum(b"abcdefgh"))]
    assert sums.pieces(path, 0, 8) == expected
    path.unlink()
    assert sums.pieces(path, 0, 8) == expected


def test_a_write_replaces_what_it_overlaps(tmp_path: Path) -> None:
    sums, path = Checksums(), tmp_path / "state"
    path.write_bytes(b"abXYZfgh")
    for start, data in ((0, b"abcd"), (4, b"efgh"), (2, b"XYZ")):
        sums.note(path, start, data)
    assert sums.pieces(path, 2, 5) == [Piece(2, 3, checksum(b"XYZ"))]
    assert sums.pieces(path, 0, 8) == [Piece(0, 8, checksum(b"abXYZfgh"))]


def test_checksums_follow_a_file_and_are_forgotten(tmp_path: Path) -> None:
    sums, old, new = Checksums(), tmp_path / "old", tmp_path / "new"
    sums.note(old, 0, b"abcd")
    sums.move(old, new)
    assert sums.pieces(new, 0, 4) == [Piece(0, 4, checksum(b"abcd"))]
    new.write_bytes(b"ABCD")
    sums.forget(new)
    assert sums.pieces(new, 0, 4) == [Piece(0, 4, checksum(b"ABCD"))]
    with pytest.raises(FileNotFoundError):
        sums.pieces(old, 0, 4)
    with pytest.raises(EOFError, match="ends at byte 4"):
        sums.pieces(new, 0, 5)


# ---- files of a run that a checkpoint shares


def test_set_aside_puts_new_files_in_the_places(tmp_path: Path) -> None:
    path, aside = tmp_path / "state", tmp_path / "state.1"
    path.write_bytes(b"x" * 5000)
    shared = path.stat().st_ino
    set_aside({path: aside})
    assert aside.stat().st_ino == shared != path.stat().st_ino and aside.read_bytes() == b"x" * 5000
    assert path.read_bytes() == bytes(5000) and path.stat().st_blocks * 512 >= 5000
    assert sorted(each.name for each in tmp_path.iterdir()) == ["state", "state.1"]


def test_set_aside_can_leave_a_place_free(tmp_path: Path) -> None:
    path, other = tmp_path / "state", tmp_path / "other"
    path.write_bytes(b"x" * 5000)
    other.write_bytes(b"y")
    set_aside({path: tmp_path / "state.1", other: tmp_path / "other.1"}, vacated={path})
    left = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    assert left == {"state.1": b"x" * 5000, "other.1": b"y", "other": bytes(1)}


def test_set_aside_without_room_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.touch()
    os.truncate(path, 1 << 43)
    with pytest.raises(StorageError, match="needs"):
        set_aside({path: tmp_path / "state.1"})
    assert [each.name for each in tmp_path.iterdir()] == ["state"] and path.stat().st_size == 1 << 43


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("vacates", [False, True])
@pytest.mark.parametrize("failing", ["link", "replace"])
def test_set_aside_that_fails_half_way_puts_every_file_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, interrupted: bool, vacates: bool
) -> None:
    """`vacates`: the place of the first file is to stay free."""
    paths = [tmp_path / name for name in ("first", "second")]
    for path in paths:
        path.write_bytes(path.name.encode())
    real, calls = getattr(os, failing), []

    def fails_once(*names: str, **folders: Any) -> None:
        calls.append(names)
        now = len(calls) == (1 if vacates and failing == "replace" else 2)
        if now and not interrupted:
            raise OSError(errno.EIO, "Input/output error", str(names[0]))
        real(*names, **folders)
        if now and failing == "replace":
            raise KeyboardInterrupt
        if now:
            raise FileExistsError

    monkeypatch.setattr(os, failing, fails_once)
    said = "second: give it the name second.1 as well: .*Input/output error"
    with pytest.raises((StorageError, KeyboardInterrupt), match=None if interrupted else said):
        set_aside({path: path.with_name(f"{path.name}.1") for path in paths}, vacated=paths[:vacates])
    (tmp_path / "second.1").unlink(missing_ok=True)  # nobody knows whether a name that was interrupted is ours
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"first": b"first", "second": b"second"}


# ---- manifests


def test_manifests_round_trip(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path, "one", rank_count=2)
    assert manifest.read_rank(tmp_path / "one", 0) == written
    assert manifest.read_rank(tmp_path / "one", 1).rank == 1
    assert written.num_bytes == 6
    manifest.check_manifest(tmp_path / "one", written)
    with pytest.raises(CheckpointError, match=r"saved by 2 rank\(s\); rank 2 was none of them"):
        manifest.read_rank(tmp_path / "one", 2)


def test_bytes_that_belong_to_nobody_may_change(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path, "one")
    (tmp_path / "one" / "rank0" / "chunk.bin").write_bytes(b"##" + CONTENT[2:8] + b"##")
    manifest.check_manifest(tmp_path / "one", written)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_bytes(CONTENT[:5] + b"#" + CONTENT[6:]), "bytes 2 to 8 have another checksum"),
        (lambda path: os.truncate(path, 9), "9 bytes, 10 were saved"),
        (lambda path: path.unlink(), "No such file"),
    ],
)
def test_damage_is_named_with_the_last_good_tag(tmp_path: Path, damage: object, said: str) -> None:
    for tag in ("old", "good", "worse"):
        write_checkpoint(tmp_path, tag)
    written = write_checkpoint(tmp_path, "bad")
    (tmp_path / "worse" / "rank0" / "chunk.bin").unlink()
    damage(tmp_path / "bad" / "rank0" / "chunk.bin")  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=f'the last good tag is "good" in {tmp_path}(.|\n)*chunk.bin: .*{said}'):
        manifest.check_manifest(tmp_path / "bad", written)


def test_damaged_manifests_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "one")
    path = tmp_path / "one" / "rank0" / manifest.NAME
    path.write_bytes(path.read_bytes().replace(b"0.001", b"0.002"))
    with pytest.raises(CheckpointError, match="rank0/ds_vertical.json: not as it was saved"):
        manifest.read_rank(tmp_path / "one", 0)
    (tmp_path / "one" / manifest.NAME).write_text('{"format": 1')
    with pytest.raises(CheckpointError, match="not a manifest"):
        manifest.read_folder(tmp_path / "one")
    (tmp_path / "one" / manifest.NAME).write_text(json.dumps({"format": 99}))
    with pytest.raises(CheckpointError, match="format 99; this version reads format 1"):
        manifest.read_folder(tmp_path / "one")


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "one")
    with pytest.raises(CheckpointError, match=f"no such checkpoint; complete ones in {tmp_path}: one"):
        manifest.read_folder(tmp_path / "other")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="not a complete one"):
        manifest.read_folder(tmp_path / "empty")
    (tmp_path / "stock").mkdir()
    (tmp_path / "stock" / "zero_pp_rank_0_mp_rank_00_model_states.pt").touch()
    with pytest.raises(CheckpointError, match="of stock DeepSpeed .*stock's order"):
        manifest.read_folder(tmp_path / "stock")


# ---- folders


def of_save(number: int) -> bytes:
    """The manifest of a folder without ranks, which differs from save to save."""
    return manifest.folder_manifest(str(number), [])


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_folder_takes_the_place_of_the_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool) -> None:
    """On a file system that can exchange two names, and on one that cannot."""
    if not exchanges:
        monkeypatch.setattr(tag_dir, "_exchange", lambda one, other: False)
    for number in range(3):
        folder = TagFolder(tmp_path / "saved", "tag", str(number))
        folder.make()
        (folder.beside / manifest.NAME).write_bytes(of_save(number))
        assert number == 0 or (folder.path / manifest.NAME).read_bytes() == of_save(number - 1)
        folder.switch()
        folder.write_latest()
        assert (folder.path / manifest.NAME).read_bytes() == of_save(number)
        assert sorted(each.name for each in folder.path.parent.iterdir()) == ["latest", "tag"]
    assert (tmp_path / "saved" / "latest").read_text() == "tag"
    folder.discard()
    assert folder.path.exists() and folder.path.stat().st_mode & 0o777 == 0o700


def test_files_of_others_in_the_tags_folder_are_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "tag" / "rank0").mkdir(parents=True)
    (tmp_path / "tag" / manifest.NAME).write_bytes(of_save(0))
    (tmp_path / "tag" / "tokenizer.json").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for tag, named in (("tag", "tokenizer.json"), ("file", "file")):
        with pytest.raises(CheckpointError, match=f"{tag}: holds {named}, which is no part of a checkpoint"):
            TagFolder(tmp_path, tag, "00000001").make()
    (tmp_path / "tag" / "tokenizer.json").unlink()
    TagFolder(tmp_path, "tag", "00000001").make()
    assert sorted(each.name for each in tmp_path.iterdir()) == [".tag.00000001", "file", "tag"]


def test_the_new_folders_above_a_tag_survive_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They and the one that somebody else may just have made."""
    synced: list[Path] = []
    real = os.fsync

    def sync(fd: int) -> None:
        real(fd)
        if (path := Path(os.readlink(f"/proc/self/fd/{fd}"))).is_dir():
            synced.append(path)

    monkeypatch.setattr(os, "fsync", sync)
    TagFolder(tmp_path / "runs" / "one", "tag", "00000001").make()
    assert synced == [tmp_path.parent, tmp_path, tmp_path / "runs"]
    synced.clear()
    TagFolder(tmp_path / "runs" / "one", "tag", "00000002").make()
    assert synced == [tmp_path / "runs"]


def test_a_new_folder_that_is_not_on_the_disk_is_not_left_for_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch, pytest.raises(StorageError, match="create the folder: Input/output error"):
        patch.setattr(os, "fsync", fails)
        TagFolder(tmp_path / "runs", "tag", "00000001").make()
    assert not (tmp_path / "runs").exists()
    TagFolder(tmp_path / "runs", "tag", "00000001").make()


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("earlier", [True, False])
def test_a_switch_that_is_not_on_the_disk_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool, earlier: bool
) -> None:
    """Else the earlier checkpoint would be deleted as what has failed."""
    if not exchanges:
        monkeypatch.setattr(tag_dir, "_exchange", lambda one, other: False)
    folder = TagFolder(tmp_path, "tag", "00000001")
    if earlier:
        folder.path.mkdir()
        (folder.path / manifest.NAME).write_bytes(of_save(0))
    folder.make()
    real = os.fsync

    def fails(fd: int) -> None:
        if os.path.samestat(os.fstat(fd), tmp_path.stat()):
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(StorageError, match="switch to the new folder: Input/output error"):
        folder.switch()
    folder.discard()
    assert [each.name for each in tmp_path.iterdir()] == ["tag"] * earlier
    assert not earlier or (folder.path / manifest.NAME).read_bytes() == of_save(0)


def test_a_switch_without_exchange_that_is_interrupted_leaves_the_earlier_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two renames, when the tag is absent."""
    monkeypatch.setattr(tag_dir, "_exchange", lambda one, other: False)
    folder = TagFolder(tmp_path, "tag", "00000001")
    folder.path.mkdir()
    (folder.path / manifest.NAME).write_bytes(of_save(0))
    folder.make()
    real = os.rename

    def interrupted(one: Path, other: Path) -> None:
        if one == folder.beside:
            raise KeyboardInterrupt
        real(one, other)

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        folder.switch()
    folder.discard()
    assert [each.name for each in tmp_path.iterdir()] == ["tag"]
    assert (folder.path / manifest.NAME).read_bytes() == of_save(0)


def test_a_discarded_folder_leaves_nothing(tmp_path: Path) -> None:
    folder = TagFolder(tmp_path, "tag", "1")
    folder.make()
    (folder.beside / "rank0").mkdir()
    folder.discard()
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from typing import Any
from ds_vertical.engine.checkpoint.tag_dir import TagFolder

folder = TagFolder(Path(sys.argv[1]), "killed", "0123abcd")
folder.make()
(folder.beside / "rank0").mkdir()
(folder.beside / "rank0" / "chunk0.master.0.bin").write_text("half of it")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_save_left_is_deleted_by_the_next(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=100)
    assert done.returncode == -9 and (tmp_path / ".killed.0123abcd" / "rank0").exists()
    under_way = TagFolder(tmp_path, "other", "00000001")
    under_way.make()
    assert sorted(each.name for each in tmp_path.iterdir()) == [".other.00000001"]
    (tmp_path / ".hidden").mkdir()  # somebody else's
    TagFolder(tmp_path, "third", "00000002").make()
    assert under_way.beside.is_dir() and (tmp_path / ".hidden").is_dir(), "a save under way must be left alone"


KILLED_BEFORE_LATEST = """
import os, signal, sys
from pathlib import Path
from typing import Any
from ds_vertical.engine.checkpoint.tag_dir import TagFolder

folder = TagFolder(Path(sys.argv[1]), "killed", "0123abcd")
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
folder.write_latest()
"""


def test_a_file_that_was_to_replace_one_is_deleted_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED_BEFORE_LATEST, str(tmp_path)], timeout=100)
    assert done.returncode == -9 and [path.name for path in tmp_path.iterdir()] == [".killed.0123abcd.new"]
    (tmp_path / ".mine.0123abcd.txt").touch()  # somebody else's
    replace, seen = os.replace, list[str]()

    def watch(new: Path, path: Path) -> None:
        TagFolder(tmp_path, "other", "00000002").make()  # meanwhile
        seen.extend(sorted(each.name for each in tmp_path.iterdir()))
        replace(new, path)

    monkeypatch.setattr(os, "replace", watch)
    TagFolder(tmp_path, "tag", "00000001").write_latest()
    assert seen == [".mine.0123abcd.txt", ".other.00000002", ".tag.00000001.new"]
    assert (tmp_path / "latest").read_text() == "tag"


def test_the_only_copies_of_a_checkpoint_are_no_leftovers(tmp_path: Path) -> None:
    """Killed between the two renames of a file system that cannot exchange names."""
    for name in (".tag.00000001", ".tag.00000001.old", ".tag.00000002"):
        (tmp_path / name).mkdir()
        with remove_tree.opened(tmp_path / name) as fd:
            leftovers.mark(fd, "run", "tag", name.split(".")[2])
    assert [path.name for path, _, _ in leftovers.find_leftovers(tmp_path)] == [".tag.00000002"]
    (tmp_path / "tag").mkdir()
    assert len(leftovers.find_leftovers(tmp_path)) == 3


@pytest.mark.parametrize("tag", ["", ".", "..", ".hidden", "a/b", "latest"])
def test_tags_that_are_no_folders_name_are_refused(tag: str) -> None:
    with pytest.raises(CheckpointError, match="not usable"):
        check_tag(tag)
    check_tag("global_step10")
