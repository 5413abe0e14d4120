"""Files and folders of others beside the tags and in them: no save deletes any. Tags and umasks that break a save half-way."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import zero_to_fp32 as stock_zero_to_fp32
from harness import contents, differing, running
from manifests import write_checkpoint
from resuming import config_in, model_of, train
from run_owners import digest

from ds_vertical.compat.stock_checkpoint import SCRIPTS
from ds_vertical.engine.checkpoint import leftovers, manifest, parts, zero_to_fp32
from ds_vertical.engine.checkpoint.manifest_schema import SIGNPOST
from ds_vertical.engine.checkpoint.shared_dir import check_at_start
from ds_vertical.engine.checkpoint.tag_dir import PLACED, TagFolder, check_tag
from ds_vertical.engine.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from ds_vertical.errors import CheckpointError
from ds_vertical.io.runs import run_dir

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


def refused_for_what_is_in_the_way(engine: Any, above: Path) -> None:
    """Saves, and engines whose `on_signal` saves there."""
    for name, is_portable in (
        ("latest", False),
        ("latest", True),
        *((script, True) for script in SCRIPTS),
        (SCRIPTS[0], False),
    ):
        path = above / f"{is_portable} with {name}" / name
        if name == "latest":
            path.mkdir(parents=True)
        else:
            path.parent.mkdir()
            path.write_text("mine")
        called = [partial(engine.save_checkpoint, str(path.parent), tag="tag", portable=is_portable)]
        if not is_portable:
            called.append(partial(check_at_start, path.parent, node_local=False))
        for call in called:
            with pytest.raises(CheckpointError, match=f"{name}: .*, and the save would replace it; move it away"):
                call()
        assert list(path.parent.rglob("*")) == [path] and (path.is_dir() or path.read_text() == "mine")
        if name == "latest":
            engine.save_checkpoint(str(path.parent), tag="tag", save_latest=False)


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
        refused_for_what_is_in_the_way(engine, tmp_path)
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


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link_to(target: str) -> Callable[[Path], object]:
    return lambda path: path.symlink_to(target)


def text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


IN_THE_WAY = {
    "latest folder": (PLACED[0], Path.mkdir, r"cannot be read \(it is a folder, not a regular file\)"),
    "latest fifo": (PLACED[0], fifo, "it is a FIFO"),
    "latest link to a folder": (PLACED[0], link_to("outside"), "it is a folder"),
    "latest link to nothing": (PLACED[0], link_to("nowhere"), "is a link that leads to no file"),
    "latest link to itself": (PLACED[0], link_to("latest"), "cannot be read"),
    "script of the user": (PLACED[1], text("print('mine')"), "is no script of ours or of DeepSpeed's"),
    "script folder": (PLACED[1], Path.mkdir, "it is a folder"),
    "script fifo": (PLACED[1], fifo, "it is a FIFO"),
    "script link": (PLACED[1], link_to("outside/mine.py"), "is no script of ours or of DeepSpeed's"),
}
TAKEN = {
    "latest link to a file": (PLACED[0], link_to("outside/mine.py")),
    "latest not text": (PLACED[0], lambda path: path.write_bytes(b"\xff")),
    "our script": (PLACED[1], lambda path: shutil.copy(zero_to_fp32.__file__, path)),
    "our first script": (PLACED[1], text('#!/usr/bin/env python\n"""fp32 weights out of a checkpoint of ds_vertical, for')),
    "script that a copy has emptied": (PLACED[1], text("")),
    "DeepSpeed's script": (PLACED[1], lambda path: shutil.copy(stock_zero_to_fp32.__file__, path)),
}


@pytest.mark.timeout(60)  # what waits for a FIFO waits for ever
@pytest.mark.parametrize("case", [*IN_THE_WAY, *TAKEN])
def test_what_a_save_puts_among_the_tags_takes_nobodys_place(tmp_path: Path, case: str) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "mine.py").write_text("mine")
    name, put, *said = (IN_THE_WAY | TAKEN)[case]
    put(tmp_path / name)
    tag = TagFolder(tmp_path, "tag", "00000001")
    if said:
        with pytest.raises(CheckpointError, match=f"{name}: .*{said[0]}.*, and the save would replace it; move it away"):
            tag.make(PLACED)
        assert sorted(os.listdir(tmp_path)) == sorted([name, "outside"])
    else:
        tag.make(PLACED)
    assert (tmp_path / "outside" / "mine.py").read_text() == "mine"


def test_a_file_that_comes_in_while_the_save_writes_is_not_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The tag's earlier folder then stays beside, with that file; the rest of it goes."""
    saved_again(tmp_path, "00000001").switch()
    second = saved_again(tmp_path, "00000002")
    (tmp_path / "tag" / "rank0" / "notes.txt").write_text("mine")
    (tmp_path / "tag" / "thesis.tex").write_text("mine")
    second.switch()
    left = {name: content for name, content in digest(tmp_path / ".tag.00000002").items() if content is not None}
    assert left.pop("ds_vertical.beside") and left == {"rank0/notes.txt": b"mine", "thesis.tex": b"mine"}
    assert ".tag.00000002: holds rank0/notes.txt, which is no part of a checkpoint: left; move that away" in caplog.text
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


NO_MANIFESTS = ("{", "[]", '{"files": {"weight0.bin": 0, "chunk.bin": 0}}', "")


def refused(folder: Path, said: str) -> None:
    """A save to the tag is, by name, and nothing is touched."""
    before = digest(folder)
    with pytest.raises(CheckpointError, match=f"tag: holds {said}.*give another tag, or move it away"):
        TagFolder(folder, "tag", "0000000f").make()
    assert digest(folder) == before


@pytest.mark.parametrize("content", NO_MANIFESTS)
@pytest.mark.parametrize("name", ["weight0.bin", "chunk.bin", "chunk0.master.0.bin"])
def test_beside_a_damaged_manifest_no_name_makes_a_file_ours(tmp_path: Path, name: str, content: str) -> None:
    """It may be a user's. The tag's own files stay with it, and another tag can be saved."""
    saved_again(tmp_path, "00000001").switch()
    (tmp_path / "tag" / "rank0" / name).write_text("mine")
    (tmp_path / "tag" / "rank0" / manifest.NAME).write_text(content)
    refused(tmp_path, r"rank0, which has no ds_vertical\.json that can be read: nothing says which files in it are ours")
    (tmp_path / "tag" / "rank0").rename(tmp_path / "moved away")
    saved_again(tmp_path, "00000003").switch()
    assert (tmp_path / "moved away" / name).read_text() == "mine"
    manifest.check_manifest(tmp_path / "tag", manifest.read_rank(tmp_path / "tag", 0))
    (tmp_path / "tag" / "rank0" / manifest.NAME).unlink()
    refused(tmp_path, "rank0/chunk.bin, which is no part of a checkpoint")


@pytest.mark.parametrize("content", ["{", "[]", '{"train_micro_batch_size_per_gpu": 1}', '{"written_by": "someone"}'])
def test_a_file_with_the_manifests_name_that_is_none_is_not_deleted(tmp_path: Path, content: str) -> None:
    """A user's settings for DeepSpeed, say."""
    (tmp_path / "tag").mkdir()
    (tmp_path / "tag" / manifest.NAME).write_text(content)
    refused(tmp_path, r"ds_vertical\.json, which is no manifest of ours that can be read")


@pytest.mark.parametrize("name", ["ds_vertical.beside", "ds_vertical.portable", SIGNPOST])
def test_a_file_with_a_marks_name_that_is_none_is_not_deleted(tmp_path: Path, name: str) -> None:
    if name == SIGNPOST:  # beside our manifest it is ours
        (tmp_path / "tag").mkdir()
    else:
        saved_again(tmp_path, "00000001").switch()
    (tmp_path / "tag" / name).write_text("mine")
    refused(tmp_path, f"{name}, which is no part of a checkpoint")


def test_a_manifest_that_is_damaged_while_the_save_writes_makes_no_file_ours(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The tag's earlier folder then stays beside; what a killed save has made for itself goes by the names."""
    saved_again(tmp_path, "00000001").switch()
    second = saved_again(tmp_path, "00000002")
    (tmp_path / "tag" / "rank0" / "weight0.bin").write_text("mine")
    (tmp_path / "tag" / "rank0" / manifest.NAME).write_text("{")
    second.switch()
    assert (tmp_path / ".tag.00000002" / "rank0" / "weight0.bin").read_text() == "mine"
    assert ".tag.00000002: holds rank0, which has no ds_vertical.json that can be read: nothing says which" in caplog.text
    killed = saved_again(tmp_path, "00000003")
    (killed.beside / "rank0" / manifest.NAME).write_text("{")
    (killed.beside / "rank0" / "chunk.bin").rename(killed.beside / "rank0" / "chunk0.master.0.bin")
    killed._unlock()
    saved_again(tmp_path, "00000004").switch()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tag.00000002", "tag"]
    assert (tmp_path / ".tag.00000002" / "rank0" / "weight0.bin").read_text() == "mine"


@pytest.mark.parametrize("name", ["weight0.bin", "loose.pt", "chunk0.master.0.bin", "memory.bin"])
def test_a_file_named_like_ours_is_anothers_where_nothing_else_is_ours(tmp_path: Path, name: str) -> None:
    """Another program's `rank0/` has no manifest; one of the tag's says nothing of the files in it."""
    path = tmp_path / "tag" / "rank0" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    refused(tmp_path, f"rank0/{name}, which is no part of a checkpoint")
    (tmp_path / "tag" / manifest.NAME).write_bytes(manifest.folder_manifest("tag", []))
    refused(tmp_path, f"rank0/{name}, which is no part of a checkpoint")


DEEPSPEEDS = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
OURS = {"written_by": "ds_vertical", "run": "20260131-235959-node7-1f2e3d4c"}
OF_NOBODY = [{}, OURS | {"run": ""}, OURS | {"run": 7}, OURS | {"run": "../run"}, OURS | {"more": 1}, {"run": OURS["run"]}]


@pytest.mark.parametrize("mark", [None, manifest.NAME, *OF_NOBODY], ids=str)
def test_a_file_of_deepspeeds_is_ours_only_beside_the_mark_of_a_portable_save(
    tmp_path: Path, mark: str | dict[str, object] | None
) -> None:
    """Neither our manifest nor a file that only has the mark's name makes it ours."""
    if mark == manifest.NAME:
        saved_again(tmp_path, "00000001").switch()
    (tmp_path / "tag").mkdir(exist_ok=True)
    (tmp_path / "tag" / DEEPSPEEDS).write_text("theirs")
    portable = tmp_path / "tag" / "ds_vertical.portable"
    if isinstance(mark, dict):
        portable.write_text(json.dumps(mark))
    refused(tmp_path, f"{DEEPSPEEDS}, which has the name of a file of DeepSpeed's, without the")
    portable.write_text(json.dumps(OURS))
    saved_again(tmp_path, "00000003").switch()
    assert not (tmp_path / "tag" / DEEPSPEEDS).exists()


def test_an_earlier_versions_portable_save_is_refused_by_name(tmp_path: Path) -> None:
    """Its mark has no run's id."""
    (tmp_path / "tag").mkdir()
    (tmp_path / "tag" / "ds_vertical.portable").write_text('{"written_by": "ds_vertical"}')
    refused(tmp_path, r"ds_vertical\.portable, which has no run's id, as an earlier version wrote it")
    (tmp_path / "tag" / DEEPSPEEDS).write_text("theirs")
    refused(tmp_path, f"{DEEPSPEEDS}, which has the name.*beside the ds_vertical.portable which has no run's id")


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


def test_the_mark_has_the_runs_id(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without one that a run may have, it is nobody's."""
    tag = saved_again(tmp_path, "00000001", write=False)
    path = tag.beside / "ds_vertical.beside"
    found = json.loads(path.read_text())
    assert run_dir.is_run_id(found["run"])
    assert found == {"written_by": "ds_vertical", "run": found["run"], "tag": "tag", "token": "00000001", "made": True}
    tag._unlock()
    for run in ("", "../run", " ", "r" * 129, None, ["run"]):
        path.write_text(json.dumps(found | {"run": run}))
        before = digest(tag.beside)
        TagFolder(tmp_path, "other", "00000002").make()
        assert digest(tag.beside) == before
        shutil.rmtree(tmp_path / ".other.00000002")
    path.write_text(json.dumps(found))
    TagFolder(tmp_path, "other", "00000003").make()
    assert not tag.beside.exists()


def laid_aside(folder: Path, is_made: bool | None = False) -> tuple[Path, Path]:
    """What was a tag's folder, beside the tags, with all that a save writes and a part on another SSD; and that part's folder.
    `is_made`: as the mark says; None: it says nothing of that."""
    beside, home = folder / ".tag.00000002", folder / "ssd1" / parts.PARTS_FOLDER / "tag.00000001"
    write_checkpoint(folder, beside.name)
    torch.save({}, beside / SIGNPOST)
    (beside / "ds_vertical.portable").write_text(json.dumps(OURS))
    (home / "rank0").mkdir(parents=True)
    (home / "rank0" / "weight0.ssd1.bin").write_bytes(b"x" * 100)
    whose = {"checkpoint": str(folder / "tag"), "token": "00000001"}
    (home / parts.PARTS_MARK).write_text(json.dumps(OURS | whose))
    (beside / "rank0" / "weight0.ssd1.bin").symlink_to(home / "rank0" / "weight0.ssd1.bin")
    rank = json.loads((beside / "rank0" / manifest.NAME).read_text())
    rank["files"]["weight0.ssd1.bin"] = {}
    (beside / "rank0" / manifest.NAME).write_text(json.dumps(rank))
    told = OURS | {"tag": "tag", "token": "00000002"} | ({} if is_made is None else {"made": is_made})
    (beside / leftovers.MARK).write_text(json.dumps(told))
    return beside, home


REMOVE = """
import sys
from pathlib import Path
from ds_vertical.engine.checkpoint import leftovers
leftovers.remove_leftover(Path(sys.argv[1]), "tag", "00000002")
"""


@pytest.mark.parametrize("seed", range(8))
def test_all_of_an_earlier_folder_goes_whatever_the_order_of_its_names(tmp_path: Path, seed: int) -> None:
    """Its parts on other SSDs, too. Python orders the names in a set by their hashes, of which a process draws a seed."""
    beside, home = laid_aside(tmp_path)
    env = os.environ | {"PYTHONHASHSEED": str(seed)}
    done = subprocess.run([sys.executable, "-c", REMOVE, str(beside)], env=env, capture_output=True, text=True, check=True)
    assert done.stderr == "" and not beside.exists() and not home.exists()


@pytest.mark.parametrize("content", ["mine", None])
def test_a_folder_whose_manifest_has_gone_first_goes_with_the_next_save(tmp_path: Path, content: str | None) -> None:
    """A kill, or an earlier version, has left it. A user's file of the same name stays."""
    beside, home = laid_aside(tmp_path)
    (beside / manifest.NAME).unlink()
    if content is not None:
        (beside / SIGNPOST).write_text(content)
    saved_again(tmp_path, "00000003").switch()
    assert not home.exists()
    if content is None:
        assert not beside.exists()
    else:
        assert sorted(os.listdir(beside)) == [leftovers.MARK, SIGNPOST] and (beside / SIGNPOST).read_text() == content


def test_of_a_mark_that_does_not_say_who_made_the_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As the version before wrote it. A folder for a file among the tags was made; a rank's files may be a user's."""
    beside, _ = laid_aside(tmp_path, is_made=None)
    (beside / "rank0" / manifest.NAME).unlink()
    (beside / "rank0" / "chunk.bin").rename(beside / "rank0" / "chunk0.master.0.bin")
    places = tmp_path / ".tag.00000004.new"
    places.mkdir()
    (places / "latest").write_text("tag")
    (places / leftovers.MARK).write_text(json.dumps(OURS | {"tag": "tag", "token": "00000004"}))
    saved_again(tmp_path, "00000003").switch()
    assert not places.exists() and sorted(os.listdir(beside)) == [leftovers.MARK, "rank0"]
    why = "is no part of a checkpoint, since no ds_vertical.json beside it names it"
    assert f"{beside}: holds rank0/chunk0.master.0.bin, which {why}: left; move that away" in caplog.text


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
