"""Files and folders of others beside the tags and in them: no save deletes any. Tags and umasks that break a save half-way."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness import contents, differing, running
from manifests import write_checkpoint
from resuming import config_in, model_of, train
from run_owners import digest

from ds_vertical.engine.checkpoint import manifest
from ds_vertical.engine.checkpoint.tag_dir import TagFolder, check_tag
from ds_vertical.engine.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from ds_vertical.errors import CheckpointError

THEIRS = (
    ".backup.20261124/thesis.tex",
    ".git.deadbeef/HEAD",
    ".git.deadbeef/rank0/chunk0.master.0.bin",  # as a killed save of a version without marks would leave it
    ".tag.00000001.old/ds_vertical.json",
    ".my.20261124.latest",
    ".my.20261124.zero_to_fp32.py",
    ".notes.0badcafe.new/latest",
    "notes.txt",
)


def theirs(folder: Path) -> dict[str, bytes | None]:
    for name in THEIRS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    return {name: content for name, content in digest(folder).items() if content is not None}


def kept(folder: Path) -> dict[str, bytes | None]:
    return {name: (folder / name).read_bytes() if (folder / name).is_file() else None for name in THEIRS}


@contextlib.contextmanager
def umask(value: int) -> Iterator[None]:
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


def test_saves_delete_nothing_of_others_and_break_at_no_tag_or_umask(tmp_path: Path) -> None:
    """With an engine: folders beside, files inside a rank's folder, links, tags, umasks, portable saves too."""
    saved = tmp_path / "saved"
    with running(config_in(tmp_path / "ssd"), model_of, vertical=True) as (engine, model):
        train(engine, range(1))
        before = theirs(saved)
        for portable in (False, True):
            with umask(0):
                engine.save_checkpoint(str(tmp_path / "made" / str(portable)), tag="open", portable=portable)
            engine.save_checkpoint(str(saved), tag="tag", portable=portable)
            engine.save_checkpoint(str(saved), tag="tag", portable=portable)
            assert kept(saved) == before
        modes = {str(path): stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "made").rglob("*")}
        assert modes and {path: mode for path, mode in modes.items() if mode & 0o002} == {}
        with umask(0o777):
            engine.save_checkpoint(str(saved), tag="closed")
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (saved / "closed").rglob("*")}
        assert {modes.pop("rank0"), stat.S_IMODE((saved / "closed").stat().st_mode)} == {0o700} and set(modes.values()) == {
            0o600
        }
        (saved / "closed" / "rank0" / "notes.txt").write_text("mine")
        (saved / "linked").symlink_to("closed")
        everything = digest(saved)
        for tag, said in (
            ("closed", "closed: holds rank0/notes.txt, which is no part of a checkpoint"),
            ("linked", "linked: a symbolic link"),
            ("blank ", "begins or ends with a blank, or .*; write 'blank'"),
            ("blanks \t  ", "begins or ends with a blank, or .*; write 'blanks'"),
            ("line\n", "begins or ends with a blank, or .*; write 'line'"),
            ("in\nside", "what cannot be printed; write 'inside'"),
            ("t" * 242, "has 242 bytes; write one of at most 241"),
            ("\udcff", "what cannot be printed"),
            ("zero_to_fp32.py", "not usable"),
        ):
            for portable in (False, True):
                with pytest.raises(CheckpointError, match=said):
                    engine.save_checkpoint(str(saved), tag=tag, portable=portable)
        assert digest(saved) == everything
        for tag in ("dots..", "t" * 240, "t" * 241, "ä b"):
            engine.save_checkpoint(str(saved), tag=tag)
            expected = contents(engine, model)
            train(engine, range(1, 2))
            engine.load_checkpoint(str(saved))
            assert differing(expected, contents(engine, model)) == [] and (saved / "latest").read_text() == tag
            assert torch.equal(get_fp32_state_dict_from_zero_checkpoint(saved)["norm.bias"], expected["norm.bias/master"])
        left = {path.name for path in saved.iterdir() if path.name.startswith(".")}
        assert left == {name.partition("/")[0] for name in THEIRS} - {"notes.txt"}


# ---- without an engine


def saved_again(folder: Path, token: str, write: bool = True) -> TagFolder:
    """A whole save to a tag, of one small file."""
    tag = TagFolder(folder, "tag", token)
    tag.make()
    if write:
        write_checkpoint(folder, tag.beside.name)
    return tag


def test_a_file_that_comes_in_while_the_save_writes_is_not_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The tag's earlier folder then stays beside, with that file; the rest of it goes."""
    saved_again(tmp_path, "00000001").switch()
    second = saved_again(tmp_path, "00000002")
    (tmp_path / "tag" / "rank0" / "notes.txt").write_text("mine")
    (tmp_path / "tag" / "thesis.tex").write_text("mine")
    second.switch()
    left = {name: content for name, content in digest(tmp_path / ".tag.00000002").items() if content is not None}
    assert left.pop("ds_vertical.beside") and left == {"rank0/notes.txt": b"mine", "thesis.tex": b"mine"}
    assert ".tag.00000002: holds rank0, which no save writes: left; move that away" in caplog.text
    saved_again(tmp_path, "00000003").switch()
    assert digest(tmp_path / ".tag.00000002")["rank0/notes.txt"] == b"mine"
    manifest.check_manifest(tmp_path / "tag", manifest.read_rank(tmp_path / "tag", 0))
    assert not (tmp_path / "tag" / "ds_vertical.beside").exists()


@pytest.mark.parametrize("inside", ["notes.txt", "weight0.bin", ".hidden", "folder/notes.txt", "chunk.bin/notes.txt"])
def test_only_what_the_earlier_manifest_names_may_be_in_a_ranks_folder(tmp_path: Path, inside: str) -> None:
    """A file of others may have a name that some rank's would have."""
    saved_again(tmp_path, "00000001").switch()
    path = tmp_path / "tag" / "rank0" / inside
    if inside.startswith("chunk.bin"):
        path.parent.unlink()
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    before = digest(tmp_path)
    with pytest.raises(CheckpointError, match=f"tag: holds rank0/{inside.partition('/')[0]}, which is no part"):
        TagFolder(tmp_path, "tag", "00000002").make()
    assert digest(tmp_path) == before


def test_a_tag_whose_checkpoint_is_damaged_can_be_saved_again(tmp_path: Path) -> None:
    """Which files are its own is then told by their names."""
    saved_again(tmp_path, "00000001").switch()
    rank = tmp_path / "tag" / "rank0"
    (rank / manifest.NAME).write_text("{")
    (rank / "chunk.bin").rename(rank / "chunk0.master.0.bin")
    saved_again(tmp_path, "00000002").switch()
    assert [path.name for path in tmp_path.iterdir()] == ["tag"]
    manifest.check_manifest(tmp_path / "tag", manifest.read_rank(tmp_path / "tag", 0))
    (rank / manifest.NAME).unlink()
    with pytest.raises(CheckpointError, match="holds rank0/chunk.bin, which is no part"):
        TagFolder(tmp_path, "tag", "00000003").make()


@pytest.mark.parametrize("name", ["weight0.bin", "loose.pt", "chunk0.master.0.bin", "memory.bin"])
def test_a_file_named_like_ours_is_anothers_where_nothing_else_is_ours(tmp_path: Path, name: str) -> None:
    """Names count beside a damaged manifest; another program's `rank0/` has none, and no mark."""
    path = tmp_path / "tag" / "rank0" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    before = digest(tmp_path)
    with pytest.raises(CheckpointError, match=f"tag: holds rank0/{name}, which is no part of a checkpoint"):
        TagFolder(tmp_path, "tag", "00000001").make()
    assert digest(tmp_path) == before
    (tmp_path / "tag" / manifest.NAME).write_text("{")
    saved_again(tmp_path, "00000002").switch()
    manifest.check_manifest(tmp_path / "tag", manifest.read_rank(tmp_path / "tag", 0))


DEEPSPEEDS = "zero_pp_rank_0_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize("beside", ["", manifest.NAME, "ds_vertical.portable"])
def test_a_file_of_deepspeeds_is_ours_only_beside_the_mark_of_a_portable_save(tmp_path: Path, beside: str) -> None:
    """Neither our manifest nor a file that only has the mark's name makes it ours."""
    if beside == manifest.NAME:
        saved_again(tmp_path, "00000001").switch()
    (tmp_path / "tag").mkdir(exist_ok=True)
    (tmp_path / "tag" / DEEPSPEEDS).write_text("theirs")
    if beside == "ds_vertical.portable":
        (tmp_path / "tag" / beside).write_text("{}")
    before = digest(tmp_path)
    with pytest.raises(CheckpointError, match=f"tag: holds {DEEPSPEEDS}, which has the name.*another tag"):
        TagFolder(tmp_path, "tag", "00000002").make()
    assert digest(tmp_path) == before
    if beside == "ds_vertical.portable":
        (tmp_path / "tag" / beside).write_text('{"written_by": "ds_vertical"}')
        saved_again(tmp_path, "00000003").switch()
        assert not (tmp_path / "tag" / DEEPSPEEDS).exists()


def test_a_file_of_deepspeeds_that_comes_in_while_the_save_writes_is_not_deleted(tmp_path: Path) -> None:
    saved_again(tmp_path, "00000001").switch()
    second = saved_again(tmp_path, "00000002")
    (tmp_path / "tag" / DEEPSPEEDS).write_text("theirs")
    second.switch()
    assert (tmp_path / ".tag.00000002" / DEEPSPEEDS).read_text() == "theirs"


def test_a_mark_counts_only_under_the_name_that_it_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A copy of what a killed save left, under another name, is somebody's; a link to one is too."""
    killed = saved_again(tmp_path, "00000001")
    killed._unlock()
    killed.beside.rename(tmp_path / ".mine.00000001")
    (tmp_path / ".tag.00000009").symlink_to(".mine.00000001")
    before = digest(tmp_path / ".mine.00000001")
    with caplog.at_level(logging.WARNING):
        saved_again(tmp_path, "00000002", write=False)
    assert digest(tmp_path / ".mine.00000001") == before and (tmp_path / ".tag.00000009").is_symlink()
    assert "/.mine.00000001: may be what a killed save of an earlier version left" in caplog.text
    (tmp_path / ".mine.00000001").rename(tmp_path / ".tag.00000001")
    saved_again(tmp_path, "00000003", write=False)
    assert not (tmp_path / ".tag.00000001").exists()


def test_the_mark_has_the_runs_id(tmp_path: Path) -> None:
    tag = saved_again(tmp_path, "00000001", write=False)
    found = json.loads((tag.beside / "ds_vertical.beside").read_text())
    assert found.pop("run") and found == {"written_by": "ds_vertical", "tag": "tag", "token": "00000001"}


@pytest.mark.parametrize("tag", ["t" * 241, "dots..", "ä", "a b"])
def test_tags_that_are_unusual_names_are_taken(tmp_path: Path, tag: str) -> None:
    check_tag(tag, tmp_path)
    folder = TagFolder(tmp_path, tag, "00000001")
    for _ in range(2):
        folder.make()
        folder.switch()
        folder.write_latest()
    assert (tmp_path / "latest").read_text() == tag
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["latest", tag])


def test_a_tag_too_deep_for_its_files_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / "/".join(["d" * 200] * 18) / ("e" * (4095 - len(str(tmp_path)) - 18 * 201 - 150))
    check_tag("tag", deep.parent)
    with pytest.raises(CheckpointError, match="has 60 bytes; write one of at most"):
        check_tag("t" * 60, deep)
