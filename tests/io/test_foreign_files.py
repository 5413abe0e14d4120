"""Folders and files beside a run's that are not ours, and neighbours who rename meanwhile: nothing of theirs is deleted."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harness import base_config, build_engine, dispose, small_buffers
from models import MixerModel, token_batches
from neighbours import CALLS, RUN, Place
from run_owners import digest, mark_parts, write_lock

from ds_vertical.cli import clean
from ds_vertical.engine.checkpoint import parts
from ds_vertical.errors import StorageError
from ds_vertical.io import files as io_files
from ds_vertical.io.runs import run_dir, run_dirs
from ds_vertical.io.runs.run_dir import RunFolder

ANOTHER_PROGRAMS = '{"pid": 1, "owner": "backup"}'
slow = pytest.mark.slow


# ---- folders that only look like a run's


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("lock", ["", "{", "[]", '{"pid": 3}', ANOTHER_PROGRAMS, "[" * 100_000, b"\xff\xfe", "fifo", "folder"])
def test_a_folder_with_another_programs_lock_is_never_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], named: bool, lock: str | bytes
) -> None:
    folder = tmp_path / (RUN if named else "backup")
    folder.mkdir(mode=0o700)
    (folder / "thesis.tex").write_text("mine")
    put(folder / "rank0.lock", lock)
    before = digest(folder)
    for words in (["--remove"], ["--remove", folder.name]):
        clean.main(["--path", str(tmp_path), *words])
        assert digest(folder) == before, "something of theirs is gone"
    assert (f"rm -r {folder}" in capsys.readouterr().out) == named
    assert run_dirs.remove_run(folder, named=True) == "kept"
    with pytest.raises(StorageError, match=r"claim: holds .*no lock in it says that a run made it"):
        RunFolder.claim(tmp_path, folder.name, 0)
    assert digest(folder) == before


def put(path: Path, content: str | bytes) -> None:
    if content == "fifo":
        os.mkfifo(path)
    elif content == "folder":
        path.mkdir()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def test_a_copy_of_a_run_under_another_name_is_not_the_runs(tmp_path: Path) -> None:
    """The lock says of which run it is."""
    folder = RunFolder.claim(tmp_path, RUN, 0)
    shutil.copytree(folder.path, tmp_path / "kept")
    entry = json.loads(folder.lock_path.read_text())
    assert (entry["written_by"], entry["run"]) == ("ds_vertical", RUN)
    folder.release()
    assert [run.folder.name for run in run_dirs.find_runs(tmp_path)] == []
    dead = write_lock(tmp_path / "dead")
    assert [(run.folder, run.state) for run in run_dirs.find_runs(tmp_path)] == [(dead, "stale")]
    assert clean.main(["--path", str(tmp_path), "--remove"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("name", [RUN, "backup"])
def test_a_folder_whose_locks_name_no_run_is_left_to_people(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Earlier versions wrote such locks, and another program's may have the same fields."""
    folder = write_lock(tmp_path / name, is_earlier=True)
    (folder / "thesis.tex").write_text("mine")
    before = digest(folder)
    for words in (["--remove"], ["--remove", name]):
        clean.main(["--path", str(tmp_path), *words])
        assert digest(folder) == before, "something of theirs is gone"
    assert (f"rm -r {folder}" in capsys.readouterr().out) == (name == RUN)
    with pytest.raises(StorageError, match="claim: holds rank0.lock, and no lock in it says that a run made it"):
        RunFolder.claim(tmp_path, name, 0)
    assert digest(folder) == before


@pytest.mark.parametrize("name", ["copy", "step5.0badf00d", "step6.0badcafe"])
def test_a_folder_of_parts_whose_name_its_mark_does_not_repeat_is_never_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    home = tmp_path / parts.PARTS_FOLDER / name
    (home / "rank0").mkdir(parents=True)
    (home / "rank0" / "weight3.ssd1.bin").write_bytes(b"somebody's copy")
    mark_parts(home, tmp_path / "saved" / "step5", "0badcafe")
    before = digest(home)
    assert clean.main(["--path", str(tmp_path), "--json", "--remove", name]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["parts"], told["not_found"]) == ([], [name])
    with pytest.raises(OSError, match="no mark in it says that it holds parts"):
        parts.remove_parts(home)
    assert digest(home) == before


def test_a_lock_of_another_program_in_a_runs_folder_is_not_taken_over(tmp_path: Path) -> None:
    (write_lock(tmp_path / "run1", host="node7") / "rank1.lock").write_text(ANOTHER_PROGRAMS)
    with pytest.raises(StorageError, match=r"rank1.lock: claim: no lock of ours, by what is in it"):
        RunFolder.claim(tmp_path, "run1", 1)
    assert (tmp_path / "run1" / "rank1.lock").read_text() == ANOTHER_PROGRAMS


# ---- neighbours who rename


def acted_at(number: int, place: Place, prepare: str, neighbour: str) -> bool:
    """Fork; there let the neighbour act just before the call of that number; whether there were so many."""
    pid = os.fork()
    if pid == 0:
        count, acting = 0, False

        def hear(event: str, _: Any) -> None:
            nonlocal count, acting
            if event not in CALLS or acting:
                return
            acting = True
            if count == number:
                with contextlib.suppress(FileNotFoundError):
                    getattr(place, neighbour)()
            count, acting = count + 1, False

        status = 2
        try:
            act = getattr(place, prepare)()
            sys.addaudithook(hear)
            with contextlib.suppress(OSError, StorageError):
                act()
            status = int(count <= number)
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, 1), status
    return status == 0


@pytest.mark.parametrize(
    ("prepare", "neighbour"),
    [
        ("dead", "link_run"),
        pytest.param("own", "replace_run", marks=slow),
        ("grown", "link_rank"),
        pytest.param("parts", "link_home", marks=slow),
        ("parts", "replace_home"),
        *(
            pytest.param(prepare, neighbour, marks=slow)
            for prepare in ("dead", "own", "files", "cleaned", "grown", "aside")
            for neighbour in ("link_run", "replace_run", "link_zero", "link_rank")
        ),
    ],
)
def test_nothing_outside_is_deleted_whenever_a_neighbour_acts(tmp_path: Path, prepare: str, neighbour: str) -> None:
    """Once before each call that looks, opens or deletes, one after another."""
    before = os.umask(0o022)
    if prepare == "cleaned":
        clean.main(["--path", str(tmp_path)])  # its imports open files as well
    try:
        number = 0
        while True:
            place = Place(tmp_path / str(number))
            more = acted_at(number, place, prepare, neighbour)
            assert not place.harmed(), f"before call {number}"
            if not more:
                break
            number += 1
        assert number > 5
    finally:
        os.umask(before)


def restless(place: Place) -> None:
    """Swap folders of the run with links to folders outside, and back, for ever."""
    while True:
        for name, target in (("", ""), (place.inner, "zero"), (f"{place.inner}/rank0", "zero/rank0")):
            path, aside = place.run / name, place.root / "aside"
            with contextlib.suppress(OSError):
                path.rename(aside)
                path.symlink_to(place.outside / target)
                path.unlink()
                aside.rename(path)
            if path.is_symlink():
                path.unlink()
            if aside.exists() and not path.exists():
                with contextlib.suppress(OSError):
                    aside.rename(path)
            shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def neighbour_of(place: Place) -> Iterator[None]:
    pid = os.fork()
    if pid == 0:
        restless(place)
        os._exit(1)
    try:
        yield
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("trials", [100, pytest.param(3000, marks=slow)])
def test_nothing_outside_is_deleted_beside_a_neighbour_who_renames_all_the_time(tmp_path: Path, trials: int) -> None:
    place = Place(tmp_path / "ssd")
    with neighbour_of(place):
        for trial in range(trials):
            act = None
            with contextlib.suppress(OSError, StorageError):
                act = (place.dead, place.own, place.grown)[trial % 3]()
            with contextlib.suppress(OSError, StorageError):
                if act is not None:
                    act()
            assert digest(place.outside) == place.before, f"trial {trial}"
            run_dir._claimed.pop(place.run, None)
            if place.run.is_symlink():
                continue
            shutil.rmtree(place.run, ignore_errors=True)
    assert digest(place.root / "theirs") == place.before


@pytest.mark.parametrize("engines", [1, pytest.param(30, marks=slow)])
def test_nothing_outside_is_deleted_while_engines_are_destroyed(tmp_path: Path, engines: int) -> None:
    """Which deletes its activations' file, and by what the run's end deletes then, beside the same neighbour."""
    section = {"activations": {"device": "ssd"}}
    for number in range(engines):
        place = Place(tmp_path / str(number))
        config = small_buffers(base_config(place.root, num_micro_batches=2, dtype="fp32", section=section))
        engine, _ = build_engine(config, partial(MixerModel, 2, 64), vertical=True)
        engine.train_batch(iter(token_batches(1, 2)[0]))
        (place.run,) = (path for path in run_dir.claimed() if path.parent == place.root)
        folder = run_dir.owned(place.run)
        assert folder is not None
        place.inner = min(path.name for path in place.run.iterdir() if path.is_dir())
        with neighbour_of(place):
            for end in (engine.destroy, folder.release):
                with contextlib.suppress(OSError, StorageError):
                    end()
        dispose(engine)
        assert place.run not in run_dir.claimed()
        assert digest(place.outside) == digest(place.root / "theirs") == place.before, number


def test_what_is_mounted_below_a_runs_folder_is_left(tmp_path: Path) -> None:
    """A folder of the same file system mounted a second time, too: its files are somebody's outside."""
    import subprocess

    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "thesis.tex").write_text("mine")
    folder = RunFolder.claim(tmp_path / "ssd", RUN, 0)
    (folder.path / "zero" / "inner").mkdir(parents=True)
    mount = ["mount", "--bind", str(tmp_path / "outside"), str(folder.path / "zero" / "inner")]
    if subprocess.run(mount, capture_output=True, timeout=100).returncode:
        folder.release()
        pytest.skip("nothing can be mounted here")
    try:
        with pytest.raises(StorageError, match=rf"{RUN}/zero/inner: delete: something is mounted there.*EBUSY"):
            folder.release()
        assert (tmp_path / "outside" / "thesis.tex").read_text() == "mine"
    finally:
        subprocess.run(["umount", str(folder.path / "zero" / "inner")], timeout=100, check=True)
    shutil.rmtree(folder.path)


def put_folder(ssd: Path) -> None:
    (ssd / "run1").rename(ssd.parent / "moved")
    (ssd / "run1").mkdir()


def put_another_users_folder(ssd: Path) -> None:
    put_folder(ssd)
    os.chown(ssd / "run1", 1000, 1000)


def put_file(ssd: Path) -> None:
    (ssd / "run1").rename(ssd.parent / "moved")
    (ssd / "run1").touch()


def put_loop_above(ssd: Path) -> None:
    (ssd / "run1").rename(ssd.parent / "moved")
    ssd.rmdir()
    ssd.symlink_to(ssd)


def put_file_above(ssd: Path) -> None:
    (ssd / "run1").rename(ssd.parent / "moved")
    ssd.rmdir()
    ssd.touch()


@pytest.mark.parametrize("put", [put_folder, put_another_users_folder, put_file, put_loop_above, put_file_above])
def test_a_run_says_where_its_folder_is_whatever_is_in_its_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, put: Callable[[Path], None]
) -> None:
    if put is put_another_users_folder and os.geteuid():
        pytest.skip("only root can give a folder to another user")
    folder = RunFolder.claim(tmp_path / "ssd", "run1", 0)
    put(tmp_path / "ssd")
    before = (tmp_path / "ssd").lstat()
    folder.release()
    assert f"or renamed: it is {tmp_path}/moved now; delete it by hand" in caplog.text
    assert (tmp_path / "moved" / "rank0.lock").exists() and (tmp_path / "ssd").lstat().st_ino == before.st_ino
    assert put not in (put_folder, put_another_users_folder, put_file) or (tmp_path / "ssd" / "run1").exists()


def test_a_run_whose_folder_was_moved_deletes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = RunFolder.claim(tmp_path, "run1", 0)
    folder.path.rename(tmp_path / "moved")
    (tmp_path / "run1").mkdir()
    (tmp_path / "run1" / "thesis.tex").write_text("mine")
    folder.release()
    assert f"or renamed: it is {tmp_path}/moved now; delete it by hand" in caplog.text
    assert (tmp_path / "run1" / "thesis.tex").read_text() == "mine" and (tmp_path / "moved" / "rank0.lock").exists()


# ---- modes


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_a_runs_folder_has_its_modes_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        folder = RunFolder.claim(tmp_path / "new" / "ssd", "run1", 0)
        io_files.preallocate({folder.path / "below" / "state.swp": 4096})
    finally:
        os.umask(before)
    modes = {str(path.relative_to(tmp_path)): stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    ours = {name: mode for name, mode in modes.items() if name.startswith("new/ssd/")}
    names = ("run1", "run1/below", "run1/below/state.swp", "run1/rank0.lock")
    assert ours == dict(zip((f"new/ssd/{name}" for name in names), (0o700, 0o700, 0o600, 0o600), strict=True))
    assert not any(mode & 0o002 for mode in modes.values())
    for name in ("new", "new/ssd"):
        (tmp_path / name).chmod(0o700)
    folder.release()
