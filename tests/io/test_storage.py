"""Run folders, locks, file sizes and preallocation, with real files, real processes and a real full disk."""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import json
import logging
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_owners import Job, jobs, write_lock

from ds_vertical.errors import StorageError
from ds_vertical.io import files as io_files
from ds_vertical.io import remove_tree
from ds_vertical.io.files import check_files, free_bytes, preallocate
from ds_vertical.io.runs import run_dir, run_lock, this_host
from ds_vertical.io.runs.run_dir import RunFolder, claim_config, new_run_id, owned

MIB = 2**20


@pytest.fixture
def job() -> Iterator[Callable[..., Job]]:
    with jobs() as start:
        yield start


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def config_with(param: dict[str, Any] | None, optimizer: dict[str, Any] | None) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": 3}
    if param is not None:
        zero["offload_param"] = param
    if optimizer is not None:
        zero["offload_optimizer"] = optimizer
    return {"train_batch_size": 1, "zero_optimization": zero}


def nvme(path: Path | str) -> dict[str, Any]:
    return {"device": "nvme", "nvme_path": str(path), "buffer_count": 5}


# --- claiming and releasing ----------------------------------------------------------------------------------------


def test_run_ids_are_unique_and_safe_names() -> None:
    ids = {new_run_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(re.fullmatch(r"\d{8}-\d{6}-[A-Za-z0-9-]+-[0-9a-f]{8}", name) for name in ids)


def test_claim_makes_a_private_folder_and_lock_and_release_deletes_it(tmp_path: Path) -> None:
    root = tmp_path / "not" / "there" / "yet"
    (tmp_path / "neighbour").write_text("stays")
    folder = RunFolder.claim(root, "run1", 2)
    assert folder.path == root / "run1"
    assert mode_of(folder.path) == 0o700
    assert mode_of(folder.lock_path) == 0o600
    entry = json.loads((root / "run1" / "rank2.lock").read_text())
    assert (entry["pid"], entry["rank"], entry["host"]) == (os.getpid(), 2, os.uname().nodename)
    assert entry["boot"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    assert entry["start_ticks"] == int(ticks)
    (folder.path / "zero_stage_3" / "rank2").mkdir(parents=True)
    (folder.path / "zero_stage_3" / "rank2" / "0.swp").write_bytes(b"x")
    folder.release()
    folder.release()
    assert list(root.iterdir()) == []
    assert (tmp_path / "neighbour").read_text() == "stays"


@pytest.mark.parametrize("run_id", ["", ".", "..", "../other", "a/b", "/abs", "-x", "a" * 129, "a b", "a\n"])
def test_unsafe_run_ids_are_refused(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(StorageError, match="not safe as a folder name"):
        RunFolder.claim(tmp_path, run_id, 0)
    assert list(tmp_path.iterdir()) == []


def test_owned_is_the_folder_and_what_is_below_it(tmp_path: Path) -> None:
    folder = RunFolder.claim(tmp_path, "run1", 0)
    link = tmp_path / "link"
    link.symlink_to(folder.path)
    assert owned(folder.path) is folder
    assert owned(str(folder.path / "zero_stage_3" / "x.swp")) is folder
    assert owned(link / "x") is folder
    assert owned(tmp_path) is None
    assert owned(tmp_path / "run10") is None
    folder.release()
    assert owned(folder.path) is None


def test_claiming_twice_in_one_process_is_refused(tmp_path: Path) -> None:
    folder = RunFolder.claim(tmp_path, "run1", 0)
    with pytest.raises(StorageError, match="this process holds it already; use a new run id"):
        RunFolder.claim(tmp_path, "run1", 0)
    assert folder.lock_path.exists()
    folder.release()


def test_a_live_owner_is_named_and_keeps_its_folder(tmp_path: Path, job: Callable[..., Job]) -> None:
    other = job(tmp_path, "run1", 0)
    assert other.said == f"claimed {other.process.pid}"
    with pytest.raises(StorageError) as caught:
        RunFolder.claim(tmp_path, "run1", 0)
    message = str(caught.value)
    owner = f"pid {other.process.pid} on host {os.uname().nodename} (rank 0)"
    assert message.startswith(f"{tmp_path}/run1/rank0.lock: claim: held by {owner}")
    assert re.search(r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC; end that process or use a new run id", message)
    assert (tmp_path / "run1" / "swap0").exists()
    assert other.finish() == 0
    assert list(tmp_path.iterdir()) == []


def test_two_jobs_on_one_path_have_two_folders(tmp_path: Path, job: Callable[..., Job]) -> None:
    first, second = job(tmp_path, new_run_id(), 0), job(tmp_path, new_run_id(), 0)
    assert first.said.startswith("claimed") and second.said.startswith("claimed")
    assert len(list(tmp_path.iterdir())) == 2
    assert first.finish() == 0
    (left,) = tmp_path.iterdir()
    assert (left / "swap0").stat().st_size == 100
    assert second.finish() == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_last_rank_deletes_the_folder(tmp_path: Path, job: Callable[..., Job], order: tuple[int, int]) -> None:
    ranks = [job(tmp_path, "run1", 0), job(tmp_path, "run1", 1)]
    assert ranks[order[0]].finish() == 0
    assert (tmp_path / "run1" / f"rank{order[1]}.lock").exists()
    assert not (tmp_path / "run1" / f"rank{order[0]}.lock").exists()
    assert (tmp_path / "run1" / f"swap{order[0]}").exists()
    assert ranks[order[1]].finish() == 0
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_claim_and_release_at_once_leave_nothing(tmp_path: Path, job: Callable[..., Job]) -> None:
    ranks = [job(tmp_path, "run1", rank) for rank in range(4)]
    assert all(rank.said.startswith("claimed") for rank in ranks)
    for rank in ranks:
        assert rank.process.stdin is not None
        rank.process.stdin.close()  # all exit now, not one after another
    assert [rank.process.wait(timeout=200) for rank in ranks] == [0] * 4
    assert list(tmp_path.iterdir()) == []


def test_an_exception_that_ends_the_process_releases_too(tmp_path: Path, job: Callable[..., Job]) -> None:
    failing = job(tmp_path, "run1", 0, "raise")
    assert failing.finish() == 1
    assert "boom" in failing.errors
    assert list(tmp_path.iterdir()) == []


def test_a_second_signal_at_the_exit_does_not_cut_the_removal_off(tmp_path: Path) -> None:
    """As a launcher sends SIGTERM: to the process, and again to its group."""
    code = f"""
import os, signal, sys, time
from ds_vertical.io import remove_tree
from ds_vertical.io.runs.run_dir import RunFolder
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
folder = RunFolder.claim({str(tmp_path)!r}, "run1", 0)
(folder.path / "inside").mkdir()
(folder.path / "inside" / "swap").touch()
remove = remove_tree._remove_folder
def slowly(*args):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
    return remove(*args)
remove_tree._remove_folder = slowly
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 143 and done.stderr == "", done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_removal_that_is_cut_off_leaves_the_signals_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    class Folder:
        def release(self) -> None:
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
            raise KeyboardInterrupt

    monkeypatch.setattr(run_dir, "_claimed", {"one": Folder()})
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        run_dir.release_all()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_dead_owners_lock_is_taken_over(tmp_path: Path, job: Callable[..., Job], caplog: pytest.LogCaptureFixture) -> None:
    dead = job(tmp_path, "run1", 0, "kill")
    assert dead.finish() == -signal.SIGKILL
    assert (tmp_path / "run1" / "rank0.lock").exists()
    folder = RunFolder.claim(tmp_path, "run1", 0)
    assert json.loads(folder.lock_path.read_text())["pid"] == os.getpid()
    assert f"left by a process that is gone (pid {dead.process.pid} " in caplog.text
    folder.release()
    assert list(tmp_path.iterdir()) == []


def test_a_dead_ranks_lock_does_not_keep_the_folder(tmp_path: Path, job: Callable[..., Job]) -> None:
    folder = RunFolder.claim(tmp_path, "run1", 0)
    assert job(tmp_path, "run1", 1, "kill").finish() == -signal.SIGKILL
    assert (folder.path / "rank1.lock").exists()
    folder.release()
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_of_a_dead_owner_does_not_hold_its_lock(tmp_path: Path, job: Callable[..., Job]) -> None:
    """Data loader workers outlive a killed rank for a while; they inherit its descriptors."""
    read_end, write_end = os.pipe()
    try:
        dead = job(tmp_path, "run1", 0, "orphan", pass_fd=read_end)
        dead.proceed()
        assert dead.process.wait(timeout=200) == -signal.SIGKILL
        RunFolder.claim(tmp_path, "run1", 0).release()
    finally:
        os.write(write_end, b"x")
        os.close(write_end)
        os.close(read_end)


def test_a_forked_child_releases_nothing(tmp_path: Path, job: Callable[..., Job]) -> None:
    parent = job(tmp_path, "run1", 0, "fork")
    assert parent.proceed() == "kept"
    assert (tmp_path / "run1" / "rank0.lock").exists()
    assert parent.finish() == 0
    assert list(tmp_path.iterdir()) == []


def test_a_child_forked_behind_pythons_back_releases_nothing(tmp_path: Path) -> None:
    """A fork from C runs no at-fork handler; the child then still has the parent's registry, as set up here."""
    folder = RunFolder.claim(tmp_path, "run1", 0)
    child = os.fork()
    if child == 0:
        run_dir._claimed[folder.path] = folder
        folder.release()
        os._exit(0)
    os.waitpid(child, 0)
    assert folder.lock_path.exists()
    folder.release()


def test_the_flock_is_held_for_life(tmp_path: Path) -> None:
    """It is what keeps out a process that cannot see our pid (another container on the same SSD)."""
    folder = RunFolder.claim(tmp_path, "run1", 0)
    with open(folder.lock_path) as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder.release()
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_lock_of_another_host_is_never_taken_over(tmp_path: Path) -> None:
    write_lock(tmp_path / "run1", host="elsewhere", pid=2**22)
    with pytest.raises(StorageError, match="held by pid 4194304 on host elsewhere"):
        RunFolder.claim(tmp_path, "run1", 0)
    folder = RunFolder.claim(tmp_path, "run1", 1)
    folder.release()
    assert (tmp_path / "run1" / "rank0.lock").exists()


def test_a_lock_of_a_past_boot_is_not_alive_by_a_process_id_that_is_in_use_again(tmp_path: Path) -> None:
    ticks = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19])
    write_lock(tmp_path / "run1", pid=os.getppid(), start_ticks=ticks, boot="another")
    RunFolder.claim(tmp_path, "run1", 0).release()
    assert not (tmp_path / "run1").exists()


def test_where_hosts_share_a_file_system_a_lock_of_another_boot_may_be_another_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts from copies of one image have one name."""
    write_lock(tmp_path / "run1", pid=2**22, boot="another")
    with run_dir.guarded(tmp_path / "run1", create=False) as guard:
        assert [lock.standing for lock in run_lock.locks_in(guard.fd)] == ["gone"]
        monkeypatch.setattr(this_host, "_LOCAL", frozenset())  # as if the kind of this file system were a shared one
        assert [lock.standing for lock in run_lock.locks_in(guard.fd)] == ["elsewhere"]
    with pytest.raises(StorageError, match="held by pid 4194304 on host "):
        RunFolder.claim(tmp_path, "run1", 0)


def test_a_container_of_this_kernel_with_a_name_of_its_own_is_no_other_host(tmp_path: Path) -> None:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    folder = write_lock(tmp_path / "run1", host="container", pid=2**22, boot=boot)
    with run_dir.guarded(folder, create=False) as guard, open(folder / "rank0.lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert [lock.standing for lock in run_lock.locks_in(guard.fd)] == ["live"]
        fcntl.flock(held, fcntl.LOCK_UN)
        assert [lock.standing for lock in run_lock.locks_in(guard.fd)] == ["gone"]


def test_a_live_process_is_not_robbed_even_without_its_flock(tmp_path: Path) -> None:
    ticks = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19])
    write_lock(tmp_path / "run1", pid=os.getppid(), start_ticks=ticks)
    with pytest.raises(StorageError, match=f"held by pid {os.getppid()} "):
        RunFolder.claim(tmp_path, "run1", 0)


def test_a_reused_pid_does_not_keep_a_lock(tmp_path: Path) -> None:
    write_lock(tmp_path / "run1", pid=os.getppid(), start_ticks=0x7FFFFFFF)
    RunFolder.claim(tmp_path, "run1", 0).release()


def test_a_lock_that_a_dead_process_has_not_written_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "run1").mkdir(mode=0o700)
    (tmp_path / "run1" / "rank0.lock").touch()
    folder = RunFolder.claim(tmp_path, "run1", 0)
    assert json.loads(folder.lock_path.read_text())["pid"] == os.getpid()
    folder.release()


def test_a_path_inside_another_runs_folder_is_refused(tmp_path: Path, job: Callable[..., Job]) -> None:
    other = job(tmp_path, "run1", 0)
    for inside in (tmp_path / "run1", tmp_path / "run1" / "deeper"):
        with pytest.raises(StorageError, match=f"is the folder of a run, of pid {other.process.pid} .*original config"):
            RunFolder.claim(inside, "run2", 0)
    assert sorted(path.name for path in (tmp_path / "run1").iterdir()) == ["rank0.lock", "swap0"]


def test_claims_that_the_system_refuses_name_path_and_errno(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=rf"{tmp_path}/file: create the swap folder: File exists \(errno EEXIST\)"):
        RunFolder.claim(tmp_path / "file", "run1", 0)
    with pytest.raises(StorageError, match=r"errno ENOTDIR"):
        RunFolder.claim(tmp_path / "file" / "below", "run1", 0)
    (tmp_path / "run1").symlink_to(tmp_path)
    with pytest.raises(StorageError, match=rf"{tmp_path}/run1: open the run's folder: .*errno (ELOOP|ENOTDIR)"):
        RunFolder.claim(tmp_path, "run1", 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run1"]


def test_release_never_follows_links_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "data").write_text("stays")
    folder = RunFolder.claim(tmp_path, "run1", 0)
    (folder.path / "link").symlink_to(tmp_path / "precious")
    folder.release()
    assert (tmp_path / "precious" / "data").read_text() == "stays"


def test_a_folder_that_vanished_is_reported_not_raised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = RunFolder.claim(tmp_path, "run1", 0)
    folder.lock_path.unlink()
    folder.path.rmdir()
    folder.release()
    assert f"{folder.path}: the run's folder was removed by someone else" in caplog.text
    assert owned(folder.path) is None


# --- the configuration ---------------------------------------------------------------------------------------------


def test_claim_config_replaces_nvme_paths_in_a_copy(tmp_path: Path) -> None:
    config = config_with(nvme(tmp_path / "a"), nvme(tmp_path / "b"))
    original = copy.deepcopy(config)
    prepared = claim_config(config, "run1", 0)
    assert config == original
    zero = prepared["zero_optimization"]
    assert zero["offload_param"] == nvme(tmp_path / "a" / "run1")
    assert zero["offload_optimizer"] == nvme(tmp_path / "b" / "run1")
    json.dumps(prepared)
    for name in ("offload_param", "offload_optimizer"):
        folder = owned(zero[name]["nvme_path"])
        assert folder is not None and folder.rank == 0
        folder.release()


def test_the_same_nvme_path_twice_is_one_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "alias").symlink_to(tmp_path / "a")
    zero = claim_config(config_with(nvme(tmp_path / "a"), nvme(tmp_path / "alias")), "run1", 0)["zero_optimization"]
    assert zero["offload_param"]["nvme_path"] == zero["offload_optimizer"]["nvme_path"] == str(tmp_path / "a" / "run1")
    folder = owned(tmp_path / "a" / "run1")
    assert folder is not None
    folder.release()
    assert list((tmp_path / "a").iterdir()) == []


def test_a_prepared_configuration_comes_back_as_it_is(tmp_path: Path) -> None:
    prepared = claim_config(config_with(nvme(tmp_path), nvme(tmp_path)), "run1", 0)
    assert claim_config(prepared, "run2", 0) == prepared
    assert [path.name for path in tmp_path.iterdir()] == ["run1"]
    again = claim_config(config_with(nvme(tmp_path), None), "run2", 0)
    assert again["zero_optimization"]["offload_param"]["nvme_path"] == str(tmp_path / "run2")
    for run_id in ("run1", "run2"):
        folder = owned(tmp_path / run_id)
        assert folder is not None
        folder.release()


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"zero_optimization": {"stage": 3}},
        {"zero_optimization": True},
        config_with({"device": "cpu", "nvme_path": "/unused"}, {"device": "cpu"}),
        config_with({"device": "none"}, None),
    ],
)
def test_without_nvme_nothing_is_claimed(config: dict[str, Any]) -> None:
    prepared = claim_config(config, "run1", 0)
    assert prepared == config
    assert prepared is not config


def test_a_second_claim_that_fails_releases_the_first(tmp_path: Path, job: Callable[..., Job]) -> None:
    (tmp_path / "a").mkdir()
    other = job(tmp_path / "b", "run1", 0)
    with pytest.raises(StorageError, match=f"held by pid {other.process.pid} "):
        claim_config(config_with(nvme(tmp_path / "a"), nvme(tmp_path / "b")), "run1", 0)
    assert list((tmp_path / "a").iterdir()) == []
    assert owned(tmp_path / "a" / "run1") is None
    assert claim_config(config_with(nvme(tmp_path / "a"), None), "run1", 0)
    folder = owned(tmp_path / "a" / "run1")
    assert folder is not None
    folder.release()


# --- sizes ---------------------------------------------------------------------------------------------------------


def test_check_files_accepts_exact_sizes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 10)
    (tmp_path / "b").write_bytes(b"")
    check_files({tmp_path / "a": 10, tmp_path / "b": 0})
    check_files({})


@pytest.mark.parametrize("actual", [9, 11, 0])
def test_check_files_refuses_any_other_size(tmp_path: Path, actual: int) -> None:
    (tmp_path / "a").write_bytes(b"x" * actual)
    with pytest.raises(StorageError) as caught:
        check_files({tmp_path / "a": 10})
    assert "1 of 1 files are missing, of the wrong size or not whole" in str(caught.value)
    assert f"{tmp_path}/a: {actual} bytes, expected 10" in str(caught.value)
    assert "zero.Init's write did not complete (disk full?)" in str(caught.value)


def test_check_files_lists_the_first_offenders_and_counts_the_rest(tmp_path: Path) -> None:
    (tmp_path / "good").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    expected = {tmp_path / "good": 1, tmp_path / "folder": 1} | {tmp_path / f"gone{i}": 4 for i in range(7)}
    with pytest.raises(StorageError) as caught:
        check_files(expected)
    message = str(caught.value)
    assert message.startswith("8 of 9 files are missing")
    assert f"{tmp_path}/folder: not a regular file (expected 1 bytes)" in message
    assert f"{tmp_path}/gone0: stat: No such file or directory (expected 4 bytes)" in message
    assert message.count("stat: No such file") == 4
    assert message.endswith("... and 3 more")


def test_check_files_finds_what_has_not_been_written(tmp_path: Path) -> None:
    with open(tmp_path / "a", "wb") as file:
        file.write(b"x" * 4096)
        file.seek(3 * 4096)
        file.write(b"x" * 4096)
    with pytest.raises(StorageError, match=f"{tmp_path}/a: nothing has been written at byte 4096"):
        check_files({tmp_path / "a": 4 * 4096})


def test_holes_are_no_fault_where_zeros_may_be_kept_as_holes() -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.truncate(MIB)
        assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == 0
        check_files({Path(file.name): MIB})


# --- preallocation -------------------------------------------------------------------------------------------------


def sizes_of(paths: Iterable[Path]) -> dict[Path, int]:
    return {path: path.stat().st_size for path in paths}


def test_preallocate_allocates_blocks_and_modes(tmp_path: Path) -> None:
    files = {tmp_path / "new" / "sub" / "a": MIB, tmp_path / "new" / "b": 4097, tmp_path / "empty": 0}
    preallocate(files)
    assert sizes_of(files) == files
    assert (tmp_path / "new" / "sub" / "a").stat().st_blocks * 512 >= MIB
    assert (tmp_path / "new" / "b").read_bytes() == b"\0" * 4097
    assert [mode_of(path) for path in files] == [0o600] * 3
    assert mode_of(tmp_path / "new") == mode_of(tmp_path / "new" / "sub") == 0o700
    preallocate(files)
    assert sizes_of(files) == files


def test_preallocate_keeps_contents_and_fills_holes(tmp_path: Path) -> None:
    (tmp_path / "same").write_bytes(b"x" * 5000)
    (tmp_path / "short").write_bytes(b"y" * 10)
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(MIB)
    preallocate({tmp_path / "same": 5000, tmp_path / "short": 20, tmp_path / "sparse": MIB})
    assert (tmp_path / "same").read_bytes() == b"x" * 5000
    assert (tmp_path / "short").read_bytes() == b"y" * 10 + b"\0" * 10
    assert (tmp_path / "sparse").stat().st_blocks * 512 >= MIB


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 3 * 4096 + 1), min_size=1, max_size=6))
def test_preallocate_then_check_round_trips(tmp_path_factory: pytest.TempPathFactory, sizes: list[int]) -> None:
    folder = tmp_path_factory.mktemp("sizes")
    files = {folder / f"d{index % 2}" / str(index): size_bytes for index, size_bytes in enumerate(sizes)}
    preallocate(files)
    assert sizes_of(files) == files


def test_more_than_the_disk_has_is_refused_with_the_numbers_before_anything_is_made(tmp_path: Path) -> None:
    half_bytes = free_bytes(tmp_path) // 2 + 2**33
    with pytest.raises(StorageError) as caught:
        preallocate({tmp_path / "new" / "a": half_bytes, tmp_path / "new" / "b": half_bytes})
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/new: preallocate: needs {2 * half_bytes} more bytes (")
    found = re.search(r"the file system has (\d+) free", message)
    assert found is not None
    assert abs(int(found[1]) - free_bytes(tmp_path)) < 2**32
    assert "use another nvme_path" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["larger", "folder", "negative"])
def test_files_that_cannot_be_made_exact_are_refused(tmp_path: Path, kind: str) -> None:
    size_bytes, words = 10, "holds 11 bytes already; remove it"
    if kind == "larger":
        (tmp_path / "a").write_bytes(b"x" * 11)
    elif kind == "folder":
        (tmp_path / "a").mkdir()
        words = "exists and is no file"
    else:
        size_bytes, words = -1, "got -1 bytes"
    with pytest.raises(StorageError, match=words):
        preallocate({tmp_path / "first": 5, tmp_path / "a": size_bytes})
    assert not (tmp_path / "first").exists()


def test_a_failure_half_way_takes_this_call_back(tmp_path: Path) -> None:
    """/proc takes no new files, not even root's, so the third of these fails when two are done."""
    (tmp_path / "short").write_bytes(b"y" * 10)
    files = {tmp_path / "short": 20, tmp_path / "new" / "a": 4096, Path("/proc/self/none"): 0}
    with pytest.raises(StorageError, match=r"^/proc/self/none: preallocate 0 bytes: .*errno ENOENT"):
        preallocate(files)
    assert [path.name for path in tmp_path.iterdir()] == ["short"]
    assert (tmp_path / "short").read_bytes() == b"y" * 10


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path | None]:
    """A file system of 1 MiB, or None where mounting is not permitted."""
    mountpoint = tmp_path / "small"
    mountpoint.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mountpoint)]
    done = subprocess.run(command, capture_output=True, timeout=200, check=False)
    yield mountpoint if done.returncode == 0 else None
    if done.returncode == 0:
        subprocess.run(["umount", str(mountpoint)], timeout=200, check=True)


def test_space_is_counted_per_file_system_and_less_what_exists(tmp_path: Path, small_disk: Path | None) -> None:
    disk, reserve_bytes = (small_disk, 0) if small_disk else (tmp_path, free_bytes(tmp_path))
    held = disk / "held"
    preallocate({held: MIB // 2, tmp_path / "big disk": 2 * MIB})
    if small_disk:
        preallocate({held: MIB * 3 // 4})  # needs 0.25 MiB more, not 0.75
        assert free_bytes(disk) <= MIB // 4
    with pytest.raises(StorageError, match=rf"^{re.escape(str(disk))}: preallocate: needs \d+ more bytes"):
        preallocate({held: reserve_bytes + 2**40, tmp_path / "other": 10})
    assert not (tmp_path / "other").exists()


def test_a_disk_that_fills_after_the_check_is_reported_and_taken_back(tmp_path: Path, small_disk: Path | None) -> None:
    """Another rank may fill the disk between our check and our write; so the write is tried without the check."""
    disk = small_disk or tmp_path
    too_much_bytes = MIB if small_disk else free_bytes(tmp_path) + 2**34
    with pytest.raises(StorageError) as caught, remove_tree.opened(disk) as folder, contextlib.ExitStack() as undo:
        io_files._allocate(folder, disk / "a", MIB // 2, undo)
        io_files._allocate(folder, disk / "b", too_much_bytes, undo)
    code = re.search(r"errno (\w+)\)", str(caught.value))
    assert code is not None and code[1] in (errno.errorcode[errno.ENOSPC], errno.errorcode[errno.EFBIG])
    assert str(caught.value).startswith(f"{disk}/b: preallocate {too_much_bytes} bytes: ")
    assert not (disk / "a").exists() and not (disk / "b").exists()


def test_a_full_disk_leaves_no_folder_behind(small_disk: Path | None, tmp_path: Path) -> None:
    """No space for the lock's text, or (where nothing can be mounted) no room for a folder under /proc."""
    if small_disk is None:
        with pytest.raises(StorageError, match=r"errno ENOENT"):
            RunFolder.claim("/proc/self", "run1", 0)
        return
    (small_disk / "filler").write_bytes(b"x" * free_bytes(small_disk))
    with pytest.raises(StorageError, match=r"run1.*errno ENOSPC"):
        RunFolder.claim(small_disk, "run1", 0)
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_release_reports_what_it_could_not_delete(small_disk: Path | None, tmp_path: Path) -> None:
    """A mount point inside the folder cannot be removed, the rest can."""
    if small_disk is None:
        pytest.skip("nothing can be mounted here")
    folder = RunFolder.claim(tmp_path, "run1", 0)
    stuck = folder.path / "mount"
    stuck.mkdir()
    (folder.path / "other").write_text("goes")
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(stuck)], timeout=200, check=True)
    try:
        words = rf"delete: 1 entries could not be deleted:\n{stuck}: delete: .*errno EBUSY\); delete it by hand"
        with pytest.raises(StorageError, match=words):
            folder.release()
        assert sorted(path.name for path in folder.path.iterdir()) == ["mount", "rank0.lock"], "no longer known for a run's"
        assert owned(folder.path) is None
    finally:
        subprocess.run(["umount", str(stuck)], timeout=200, check=True)


def test_free_bytes_of_a_path_that_does_not_exist_yet(tmp_path: Path) -> None:
    entry = os.statvfs(tmp_path)
    assert abs(free_bytes(tmp_path / "not" / "yet") - entry.f_bavail * entry.f_frsize) < 2**30


def test_undoing_a_failed_preallocation_reports_what_it_could_not_undo(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        io_files._undo(tmp_path / "gone", os.unlink, tmp_path / "gone")
    assert f"{tmp_path}/gone: undo a failed preallocation: No such file" in caplog.text
