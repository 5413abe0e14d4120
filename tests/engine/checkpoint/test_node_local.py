"""Folders of each host's own, without an engine: what a load or save does with what a save that ended half-way has left. Two
hosts are two threads here, each a rank with a folder of its own; what they tell each other goes through a barrier."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from run_owners import digest

from ds_vertical.compat import accelerator
from ds_vertical.distributed import ranks
from ds_vertical.engine.checkpoint import leftovers, manifest, shared_dir, tag_dir
from ds_vertical.engine.checkpoint.tag_dir import TagFolder
from ds_vertical.errors import CheckpointError, OtherRankError

TOKEN = "0123abcd"
Call = Callable[[Path], Any]


class Hosts:
    """Two hosts, each with a folder. `run`: what a call on each has come to, an error included."""

    def __init__(self, folder: Path) -> None:
        self.folders = [folder / name for name in ("A", "B")]
        self._here = threading.local()
        self._barrier = threading.Barrier(2)
        self._told: list[Any] = [None, None]
        for each in self.folders:
            each.mkdir()

    def rank(self) -> int:
        return getattr(self._here, "rank", 0)  # 0 in the thread of the test

    def name(self) -> str:
        return self.folders[self.rank()].name

    def all_gathered(self, value: Any) -> list[Any]:
        self._told[self.rank()] = value
        self._barrier.wait(10)
        found = list(self._told)
        self._barrier.wait(10)
        return found

    def run(self, *calls: Call) -> list[Any]:
        said: list[Any] = [None, None]

        def one(rank: int) -> None:
            self._here.rank = rank
            try:
                said[rank] = calls[rank % len(calls)](self.folders[rank])
            except Exception as error:
                said[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return said


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    made = Hosts(tmp_path)
    for name, value in (
        ("rank", made.rank),
        ("world_size", lambda: 2),
        ("ranks_on_this_host", lambda: 1),
        ("all_gathered", made.all_gathered),
        ("is_true_on_all_ranks", lambda flag: all(made.all_gathered(flag))),
    ):
        monkeypatch.setattr(ranks, name, value)
    monkeypatch.setattr(shared_dir, "host_id", made.name)
    monkeypatch.setattr(shared_dir, "BETWEEN_LOOKS_S", 0.01)
    monkeypatch.setattr(socket, "gethostname", made.name)
    monkeypatch.setattr(accelerator.dist, "get_rank", made.rank)
    yield made


def write(folder: Path, text: str, rank_count: int = 2) -> None:
    """All ranks' manifests, of no files, with a text each."""
    for rank in range(rank_count):
        manifest.rank_folder(folder, rank).mkdir(parents=True)
        content = json.dumps({"format": manifest.FORMAT, "files": {}, "text": text})
        (manifest.rank_folder(folder, rank) / manifest.NAME).write_text(content)
    checksums = [(len(text), sum(text.encode()))] * rank_count
    (folder / manifest.NAME).write_bytes(manifest.folder_manifest("two", checksums))


def begun(folder: Path, text: str, token: str = TOKEN) -> TagFolder:
    """A save to the tag "two" that has yet to switch."""
    tag = TagFolder(folder, "two", token)
    tag.make()
    write(tag.beside, text)
    return tag


def text_in(folder: Path) -> str:
    return json.loads((folder / "two" / "rank0" / manifest.NAME).read_text())["text"]


# ---- ahead of a run


def test_a_folder_that_hosts_do_not_share_is_refused_with_the_remedy_of_whoever_names_it(hosts: Hosts) -> None:
    never = 'or pass save_strategy="no" where no checkpoint is wanted'
    for check, remedy in (
        (
            shared_dir.check_at_start,
            'or write "checkpoint": {"use_node_local_storage": true} into the JSON, for a folder on each host',
        ),
        (
            partial(shared_dir.check_output_dir, may_be_apart=True),
            'or pass save_on_each_node=True to TrainingArguments, with "stage3_gather_16bit_weights_on_model_save": false in'
            f" the JSON, for a folder on each host; {never}",
        ),
        (partial(shared_dir.check_output_dir, may_be_apart=False), never),
    ):
        first, second = hosts.run(lambda folder, check=check: check(folder, False))
        assert isinstance(second, CheckpointError) and isinstance(first, OtherRankError)
        assert str(second).startswith(f"{hosts.folders[1]}: host B does not see what rank 0 on host A has just written there. ")
        assert str(second).endswith(f"such as NFS or Lustre, {remedy}") and str(second) in str(first)
        assert hosts.run(lambda folder, check=check: check(folder, True)) == [None, None], "each has its own"
        assert hosts.run(lambda _, check=check: check(hosts.folders[0], False)) == [None, None], "they share it"
        assert [list(each.iterdir()) for each in hosts.folders] == [[], []]


def test_a_file_that_a_host_sees_late_is_waited_for_on_all(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As an NFS client does that takes a folder as absent for a while: host B's third look is the first that sees the file."""
    looks: dict[Path, int] = {}
    exists = Path.exists

    def late(path: Path) -> bool:
        looks[path.parent] = looks.get(path.parent, 0) + 1
        if path.parent == hosts.folders[1] and looks[path.parent] == 3:
            path.touch()
        return exists(path)

    monkeypatch.setattr(Path, "exists", late)
    assert hosts.run(lambda folder: shared_dir.check_at_start(folder, False)) == [None, None]
    assert [looks[folder] for folder in hosts.folders] == [3, 3], "the ranks go on together"
    said = f"{hosts.folders[0]}: not every host sees what rank 0 on host A has just written there; all ranks look again"
    assert capsys.readouterr().out.count(said) == 1


def test_the_wait_for_a_file_ends_with_an_interrupt(tmp_path: Path, hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "is_true_on_all_ranks", lambda flag: flag)
    monkeypatch.setattr(shared_dir, "BETWEEN_LOOKS_S", 20.0)
    start = time.monotonic()
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        shared_dir.check_all_see(tmp_path / "absent", tmp_path, "a test", shared_dir.Place("A", (0,)))
    assert time.monotonic() - start < 10
    timer.join()


# ---- a tag that was not there


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_folder_beside_becomes_the_tags_where_there_was_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr(tag_dir, "_exchange", lambda *_: False)
    folder = begun(tmp_path, "new")
    TagFolder(tmp_path, "two", TOKEN).put_back(folder.beside)
    assert [path.name for path in tmp_path.iterdir()] == ["two"] and text_in(tmp_path) == "new"
    assert not (tmp_path / "two" / "ds_vertical.beside").exists()
    folder._unlock()


def test_a_tag_that_is_absent_between_two_renames_gets_its_earlier_folder_back(tmp_path: Path) -> None:
    write(tmp_path / "two", "old")
    killed = begun(tmp_path, "new")
    killed._mark_earlier()
    old = (tmp_path / "two").rename(tmp_path / f".two.{TOKEN}.old")
    killed._unlock()
    TagFolder(tmp_path, "two", TOKEN).put_back(old)
    assert text_in(tmp_path) == "old" and killed.beside.exists()


@pytest.mark.parametrize("next_one", ["save", "load"])
def test_a_new_tag_that_only_one_host_has_renamed_is_renamed_on_the_other(hosts: Hosts, next_one: str) -> None:
    """Both processes were killed: a later save raises nothing."""
    first, second = (begun(folder, "new") for folder in hosts.folders)
    first.switch(keep=True)
    for killed in (first, second):
        killed._unlock()
    said = hosts.run(shared_dir.mend if next_one == "save" else lambda folder: shared_dir.settle(folder, "two"))
    assert said == [None, None] and [text_in(folder) for folder in hosts.folders] == ["new", "new"]


# ---- what a load says


@pytest.mark.parametrize("saved_by", [1, 2])
def test_files_of_ranks_that_the_save_did_not_have_are_not_missing(hosts: Hosts, saved_by: int) -> None:
    """The load says that their numbers differ; a rank that the save had must have its files."""
    for folder in hosts.folders:
        write(folder / "two", "old", saved_by)
    shutil.rmtree(hosts.folders[1] / "two" / "rank1", ignore_errors=True)
    said = hosts.run(lambda folder: shared_dir.settle(folder, "two"))
    if saved_by == 1:
        assert said == [None, None]
    else:
        assert all("host B (rank 1) lacks two/rank1/ds_vertical.json" in str(each) for each in said)


def test_hosts_that_name_two_complete_tags_load_the_older_one(hosts: Hosts, capsys: pytest.CaptureFixture[str]) -> None:
    """As a save leaves them that was killed between two hosts' writes of `latest`."""
    names = [("two", "three"), ("three", "two"), ("three", None), ("two", "three")]
    for folder in hosts.folders:
        for age, tag in enumerate(("two", "three")):
            write(folder / tag, tag)
            os.utime(folder / tag / manifest.NAME, ns=(age, age))
    for named in names[:2]:
        assert hosts.run(*(agreed(tag) for tag in named)) == ["two", "two"]
        assert "different tags on the hosts" in capsys.readouterr().out
    assert hosts.run(*(agreed(tag) for tag in names[2])) == ["three", "three"]
    shutil.rmtree(hosts.folders[1] / "three")
    for named in names[2:]:
        shown = ["no such file" if tag is None else tag for tag in named]
        for said in hosts.run(*(agreed(tag) for tag in named)):
            assert f"host A (rank 0): {shown[0]}; host B (rank 1): {shown[1]}. Give a tag" in str(said)


def agreed(tag: str | None) -> Call:
    return lambda folder: shared_dir.agreed_latest(folder, tag)


# ---- an error of one host's disk


@pytest.mark.parametrize("what", ["marked_beside", "found_saves", "complete_tags"])
def test_an_error_of_one_hosts_disk_ends_the_call_on_all(hosts: Hosts, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """None waits for what the other does not tell any more."""
    holder = {"marked_beside": leftovers, "found_saves": shared_dir, "complete_tags": manifest}[what]
    real = getattr(holder, what)

    def failing(folder: Path, *more: Any) -> Any:
        if folder == hosts.folders[1]:
            raise OSError(errno.EIO, "the disk of this host is gone")
        return real(folder, *more)

    for folder in hosts.folders:
        begun(folder, "new")._unlock()
    monkeypatch.setattr(holder, what, failing)
    calls: list[tuple[str, Call]] = [("save_checkpoint", shared_dir.mend)]
    if what != "marked_beside":
        calls.append(("load_checkpoint", lambda folder: shared_dir.settle(folder, "two")))
    if what == "complete_tags":
        calls.append(("load_checkpoint", agreed("two")))
    for name, call in calls:
        first, second = hosts.run(call)
        assert isinstance(second, OSError) and second.errno == errno.EIO
        assert str(first).startswith(f"{name} failed on 1 of 2 ranks; rank 1: OSError"), repr(first)


# ---- a save that is under way, and another job


@pytest.mark.parametrize("exchanges", [True, False])
def test_another_jobs_save_leaves_the_earlier_folder_until_all_hosts_have_switched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr(tag_dir, "_exchange", lambda *_: False)
    write(tmp_path / "two", "old")
    for end in ("discard", "settle"):
        first = begun(tmp_path, "new")
        first.switch(keep=True)
        other = TagFolder(tmp_path, "other", "00000002")
        other.make()
        other.discard()
        assert text_in(tmp_path) == "new"
        getattr(first, end)()
        assert text_in(tmp_path) == ("old" if end == "discard" else "new")
        assert [path.name for path in tmp_path.iterdir()] == ["two"]


@pytest.mark.parametrize("earlier", [True, False])
def test_another_job_does_not_undo_a_save_that_is_under_way(hosts: Hosts, earlier: bool) -> None:
    """One host has switched, the other is about to. A save of another tag goes on; a load of the tag is refused by name."""
    saves = []
    for folder in hosts.folders:
        if earlier:
            write(folder / "two", "old")
        saves.append(begun(folder, "new"))
    saves[0].switch(keep=True)
    before = [digest(folder) for folder in hosts.folders]
    assert hosts.run(shared_dir.mend) == [None, None]
    said = f"/two: host{'s A, B (ranks 0, 1)' if earlier else ' B (rank 1)'}: a save to the tag is under way"
    for error in hosts.run(lambda folder: shared_dir.settle(folder, "two")):
        assert isinstance(error, CheckpointError) and said in str(error), repr(error)
    assert [digest(folder) for folder in hosts.folders] == before
    saves[1].switch(keep=True)
    assert hosts.run(lambda folder: shared_dir.settle(folder, "two")) == [None, None]
    for save in saves:
        save.settle()
    assert [text_in(folder) for folder in hosts.folders] == ["new", "new"]
    assert [[path.name for path in folder.iterdir()] for folder in hosts.folders] == [["two"], ["two"]]
