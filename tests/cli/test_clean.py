"""`ds-vertical clean`: what it says of run folders, what it removes and what it never does; real processes own them."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from run_owners import Job, jobs, mark_parts, write_lock

from ds_vertical.cli import clean
from ds_vertical.engine.checkpoint import parts
from ds_vertical.io.files import disk_bytes, make_run_private
from ds_vertical.io.runs import run_dir, run_dirs, run_lock
from ds_vertical.io.runs.run_dirs import FoundRun

WITHOUT_LOCK = "20260131-235959-node7-1f2e3d4c"


@pytest.fixture
def job() -> Iterator[Callable[..., Job]]:
    with jobs() as start:
        yield start


@pytest.fixture
def dead(tmp_path: Path, job: Callable[..., Job]) -> Callable[..., Path]:
    """Makes the folder of a run that was killed; returns it."""

    def make(run_id: str, rank: int = 0) -> Path:
        assert job(tmp_path, run_id, rank, "kill").finish() == -signal.SIGKILL
        return tmp_path / run_id

    return make


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    """Exit status, and the JSON with the runs by name."""
    status = clean.main([*map(str, arguments), "--json"])
    report = json.loads(capsys.readouterr().out)
    return status, report | {"runs": {run["run_id"]: run for run in report["runs"]}}


def swapped(folder: Path) -> bool:
    return (folder / "swap0").read_bytes() == b"x" * 100


# ---- what is there


def test_every_state_is_told(
    tmp_path: Path, job: Callable[..., Job], dead: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    live, stale = job(tmp_path, "live", 0), dead("stale")
    write_lock(tmp_path / "far", host="node7", since="2026-11-20 01:02:03 UTC")
    (write_lock(tmp_path / "half") / "rank1.lock").touch()
    for name in (WITHOUT_LOCK, "zero_stage_3", "just_a_folder"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(stale)
    (stale / "state.swp").write_bytes(bytes(3 << 20))
    status, report = said(capsys, "--path", tmp_path)
    runs = report["runs"]
    assert status == 0 and report["counts"] == {"live": 1, "stale": 2, "unknown": 2} and report["freed_bytes"] == 0
    states = {"live": "live", "stale": "stale", "far": "unknown", "half": "stale", WITHOUT_LOCK: "unknown"}
    assert {name: run["state"] for name, run in runs.items()} == states
    assert runs["live"]["owners"][0]["pid"] == live.process.pid and runs["live"]["owners"][0]["state"] == "live"
    assert runs["stale"]["bytes"] >= 3 << 20 and runs["stale"]["folder"] == str(stale)
    assert runs["stale"]["since"] == runs["stale"]["owners"][0]["since"] and "gone" in runs["stale"]["why"]
    assert runs["far"]["since"] == "2026-11-20 01:02:03 UTC" and runs["far"]["owners"][0]["host"] == "node7"
    assert "on another host, so nothing can be told of it here" in runs["far"]["why"]
    assert "no lock in it says that a run made it" in runs[WITHOUT_LOCK]["why"] and runs[WITHOUT_LOCK]["owners"] == []
    assert "and 1 more" in runs["half"]["why"] and len(runs["half"]["owners"]) == 2
    assert all(run["result"] is None for run in runs.values())
    assert clean.main(["--path", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert re.search(rf"stale +3\.\d MiB  stale  pid \d+ on host {os.uname().nodename} \(rank 0\), since .*; gone", text)
    assert f"-> ds-vertical clean --path {tmp_path} --remove far  # once you know that it is over" in text
    assert "1 live, 2 stale (3." in text and "add --remove to delete what is stale" in text
    assert swapped(tmp_path / "live") and swapped(stale)


def test_a_run_is_live_while_one_rank_is_and_unknown_while_one_may_be(
    tmp_path: Path, job: Callable[..., Job], dead: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    job(tmp_path, "half_alive", 1)
    dead("half_alive", 0)
    (dead("half_known") / "rank1.lock").write_text((write_lock(tmp_path / "far", host="node7") / "rank0.lock").read_text())
    dead("both_dead", 0)
    dead("both_dead", 1)
    states = {run.folder.name: run.state for run in run_dirs.find_runs(tmp_path)}
    assert states == {"half_alive": "live", "half_known": "unknown", "far": "unknown", "both_dead": "stale"}
    status, report = said(capsys, "--path", tmp_path, "--remove")
    assert status == 0 and report["counts"] == {"live": 1, "unknown": 2, "removed": 1}
    assert "and 1 more" in report["runs"]["both_dead"]["why"] and len(report["runs"]["both_dead"]["owners"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["far", "half_alive", "half_known"]


def test_bytes_are_what_deleting_frees(tmp_path: Path, dead: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder, checkpoint = dead("run1"), tmp_path / "checkpoint"
    (folder / "inner").mkdir()
    (folder / "inner" / "alone.swp").write_bytes(bytes(2 << 20))
    (folder / "twice.swp").write_bytes(bytes(1 << 20))
    os.link(folder / "twice.swp", folder / "inner" / "again.swp")
    (folder / "linked.swp").write_bytes(b"y" * (4 << 20))
    os.link(folder / "linked.swp", checkpoint)
    assert 3 << 20 <= disk_bytes(folder) < 4 << 20
    status, report = said(capsys, "--path", tmp_path, "--remove")
    assert status == 0 and 3 << 20 <= report["freed_bytes"] < 4 << 20
    assert checkpoint.read_bytes() == b"y" * (4 << 20) and not folder.exists()


def test_what_stock_has_left_is_told_and_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left = tmp_path / "zero_stage_3"
    (left / "float16params" / "rank0").mkdir(parents=True)
    (left / "float16params" / "rank0" / "0_param.tensor.swp").write_bytes(b"x" * 100_000)
    status, report = said(capsys, "--path", tmp_path, "--remove")
    assert (status, report["stock"]) == (0, [{"folder": str(left), "bytes": disk_bytes(left)}])
    assert clean.main(["--path", str(tmp_path), "--remove"]) == 0
    told = capsys.readouterr().out
    assert "zero_stage_3  of runs of stock DeepSpeed, which take no lock" in told and f"rm -r {left}" in told
    assert (left / "float16params" / "rank0" / "0_param.tensor.swp").exists()


def test_another_users_folder_is_told_and_left(
    tmp_path: Path, dead: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, user = dead(WITHOUT_LOCK), os.geteuid()
    dead("by_hand")
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    status, report = said(capsys, "--path", tmp_path, "--remove")
    assert status == 0 and list(report["runs"]) == [WITHOUT_LOCK]
    why = f"a run of user id {user}, who alone can see whether it is alive"
    assert report["runs"][WITHOUT_LOCK]["state"] == "unknown" and report["runs"][WITHOUT_LOCK]["why"] == why
    status, report = said(capsys, "--path", tmp_path, "--remove", WITHOUT_LOCK)
    assert status == 1 and report["runs"][WITHOUT_LOCK]["result"] == "failed" and swapped(folder)


def test_a_folder_that_cannot_be_looked_into_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(folder: int) -> Any:
        raise OSError(5, "Input/output error")

    write_lock(tmp_path / "run1")
    monkeypatch.setattr(run_lock, "locks_in", fails)
    status, report = said(capsys, "--path", tmp_path, "--remove")
    assert status == 0 and report["counts"] == {"unknown": 1}
    assert report["runs"]["run1"]["why"].startswith("a run that cannot be looked into: [Errno 5]")


# ---- what is removed


def test_only_stale_ones_are_removed_unless_named(
    tmp_path: Path, job: Callable[..., Job], dead: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    live = job(tmp_path, "live", 0)
    dead("one"), dead("two")
    write_lock(tmp_path / "far", host="node7")
    (tmp_path / WITHOUT_LOCK / "zero_stage_3").mkdir(parents=True)
    status, report = said(capsys, "--path", tmp_path, "--remove", "one")
    assert status == 0 and report["counts"] == {"live": 1, "removed": 1, "stale": 1, "unknown": 2}
    assert not (tmp_path / "one").exists() and swapped(tmp_path / "two")
    assert clean.main(["--path", str(tmp_path), "--remove"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^  removed  .*two", text, re.M) and text.endswith("1 live, 1 removed (0.0 MiB), 2 unknown\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == [WITHOUT_LOCK, "far", "live"]
    status, report = said(capsys, "--path", tmp_path, "--remove", "far", WITHOUT_LOCK)
    assert status == 1 and report["counts"] == {"live": 1, "removed": 1, "kept": 1}
    assert clean.main(["--path", str(tmp_path), "--remove", WITHOUT_LOCK]) == 1
    assert f"-> never removed here: rm -r {tmp_path}/{WITHOUT_LOCK}" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == [WITHOUT_LOCK, "live"] and swapped(tmp_path / "live")
    assert live.finish() == 0 and (tmp_path / WITHOUT_LOCK / "zero_stage_3").is_dir()


def test_a_live_run_is_not_removed_by_name_either(
    tmp_path: Path, job: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    live = job(tmp_path, "live", 0)
    assert clean.main(["--path", str(tmp_path), "--remove", "live", "nobody"]) == 1
    text = capsys.readouterr().out
    assert "  kept " in text and "-> not removed: end the run first" in text
    assert "nobody: no folder of a run has that name" in text
    assert swapped(tmp_path / "live") and live.finish() == 0
    status, report = said(capsys, "--path", tmp_path, "--remove", "live")
    assert status == 1 and report["not_found"] == ["live"]


def test_a_lock_that_is_held_is_live_whatever_host_it_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A container on this machine has a host name and process numbers of its own; its flock is seen."""
    lock = write_lock(tmp_path / "run1", host="container", pid=2**22) / "rank0.lock"
    with open(lock) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        status, report = said(capsys, "--path", tmp_path, "--remove", "run1")
        assert status == 1 and report["runs"]["run1"]["state"] == "live" and lock.exists()
    assert said(capsys, "--path", tmp_path, "--remove", "run1")[0] == 0
    assert list(tmp_path.iterdir()) == []


# A child in which the last file but the locks cannot be deleted; argv: nvme_path, "kill" or an errno, code to run.
NO_DELETE = """
import os, signal, sys
from ds_vertical.cli import clean
from ds_vertical.io.runs import run_dir
left = 20
def refuse(event, arguments):
    global left
    if event == "os.remove" and not str(arguments[0]).endswith(".lock"):
        left -= 1
        if not left and sys.argv[2] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if not left:
            raise OSError(int(sys.argv[2]), os.strerror(int(sys.argv[2])))
sys.addaudithook(refuse)
exec(sys.argv[3])
"""
CLEAN = "sys.exit(clean.main(['--path', sys.argv[1], '--remove']))"
RUN = """
folder = run_dir.RunFolder.claim(sys.argv[1], "run1", 0)
for number in range(20):
    (folder.path / f"swap{number}").write_bytes(b"x" * 100)
"""


def without_deleting(folder: Path, how: object, code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", NO_DELETE, str(folder), str(how), code]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.parametrize("code", [RUN, CLEAN], ids=["at exit", "clean"])
def test_what_a_kill_leaves_of_a_removal_is_still_known_for_a_dead_runs(
    tmp_path: Path, dead: Callable[..., Path], code: str
) -> None:
    folder = write_lock(tmp_path / "run1")
    ranks = [f"rank{rank}.lock" for rank in range(10)]  # so many that no order of a folder has all of them last by chance
    for name in ranks[1:]:
        (folder / name).write_text((folder / ranks[0]).read_text())
    if code == CLEAN:
        dead("run1")
        for number in range(1, 20):
            (folder / f"swap{number}").write_bytes(b"x" * 100)
    assert without_deleting(tmp_path, "kill", code).returncode == -signal.SIGKILL
    left = sorted(path.name for path in folder.iterdir())
    assert left[:10] == ranks and len(left) == 11
    assert [run.state for run in run_dirs.find_runs(tmp_path)] == ["stale"]
    assert clean.main(["--path", str(tmp_path), "--remove"]) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_deleted_is_named_and_the_rest_goes(tmp_path: Path, dead: Callable[..., Path]) -> None:
    folder = dead("run1")
    for number in range(1, 20):
        (folder / f"swap{number}").write_bytes(b"x")
    done = without_deleting(tmp_path, 5, CLEAN)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert re.search(r"  failed .*run1", done.stdout)
    assert re.search(r"-> \S+/run1/swap\d+: delete: Input/output error \(errno EIO\); delete it by hand", done.stdout)
    (run,) = run_dirs.find_runs(tmp_path)
    assert run.state == "stale" and len(list(run.folder.iterdir())) == 2
    assert run_dirs.remove_run(run.folder, named=False) == "removed"


# ---- runs that start and end meanwhile


def test_a_run_that_starts_after_the_list_keeps_its_folder(
    tmp_path: Path, job: Callable[..., Job], dead: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = dead("run1", 1)
    (listed,) = run_dirs.find_runs(tmp_path)
    assert listed.state == "stale"
    started = job(tmp_path, "run1", 0)
    assert run_dirs.remove_run(folder, named=False) == "kept"
    assert run_dirs.remove_run(folder, named=True) == "kept"
    monkeypatch.setattr(clean, "find_runs", lambda root: [listed])
    assert clean.main(["--path", str(tmp_path), "--remove"]) == 0
    assert clean.main(["--path", str(tmp_path), "--remove", "run1"]) == 1
    assert swapped(folder) and started.finish() == 0


def test_a_run_that_is_unknown_by_now_is_kept_unless_named(tmp_path: Path) -> None:
    folder = write_lock(tmp_path / "run1", host="node7")
    assert run_dirs.remove_run(folder, named=False) == "kept"
    assert run_dirs.remove_run(folder, named=True) == "removed"
    assert run_dirs.remove_run(folder, named=True) == "gone"
    assert run_dirs.examine(folder) is None


def test_a_run_that_ends_after_the_list_is_no_failure(
    tmp_path: Path, dead: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (listed,) = run_dirs.find_runs(dead("run1").parent)
    run_dir.RunFolder.claim(tmp_path, "run1", 0).release()
    monkeypatch.setattr(clean, "find_runs", lambda root: [listed])
    status, report = said(capsys, "--path", tmp_path, "--remove")
    assert status == 0 and report["counts"] == {"gone": 1} and report["freed_bytes"] == 0


def waits() -> bool:
    """Whether a thread of this process waits for a flock, says the kernel."""
    lines = Path("/proc/locks").read_text().splitlines()
    return any(re.search(rf"-> FLOCK .* {os.getpid()} ", line) for line in lines)


def behind_the_guard(folder: Path, act: Callable[[], Any], meanwhile: Callable[[run_dir.Guard], None]) -> Any:
    """What `act` returns in a thread that has to wait for the folder's guard, held here until `meanwhile` has run."""
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(act()))
    with run_dir.guarded(folder, create=False) as guard:
        thread.start()
        while thread.is_alive() and not waits():
            time.sleep(0.005)
        assert thread.is_alive(), "it did not wait"
        meanwhile(guard)
    thread.join(timeout=200)
    return result[0]


def test_a_removal_waits_for_a_claim_that_is_under_way(tmp_path: Path, dead: Callable[..., Path]) -> None:
    folder, held = dead("run1"), []
    outcome = behind_the_guard(
        folder, lambda: run_dirs.remove_run(folder, named=True), lambda guard: held.append(run_dir._take_lock(guard, 1))
    )
    assert outcome == "kept" and swapped(folder)
    os.close(held[0])


def test_a_look_waits_for_a_claim_that_is_under_way(tmp_path: Path, dead: Callable[..., Path]) -> None:
    """A lock that is looked at cannot be taken at that moment: the run would be refused."""
    folder, held = dead("run1"), []
    found = behind_the_guard(folder, lambda: run_dirs.examine(folder), lambda guard: held.append(run_dir._take_lock(guard, 1)))
    assert isinstance(found, FoundRun) and found.state == "live"
    os.close(held[0])


# Runs that come and go, each in a folder in which another of its ranks has just died: stale when it starts.
COME_AND_GO = """
import os, sys
from ds_vertical.io.runs.run_dir import RunFolder
for number in range(40):
    if os.fork() == 0:
        RunFolder.claim(sys.argv[1], f"run{number}", 1)
        os._exit(0)
    os.wait()
    folder = RunFolder.claim(sys.argv[1], f"run{number}", 0)
    for turn in range(5):
        (folder.path / "swap").write_bytes(b"%d" % turn)
        assert folder.lock_path.exists() and (folder.path / "swap").read_bytes() == b"%d" % turn
    folder.release()
"""


def test_runs_that_come_and_go_never_notice(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", COME_AND_GO, str(tmp_path)], stderr=subprocess.PIPE, text=True)
    rounds, status = 0, 0
    while process.poll() is None:
        status |= clean.main(["--path", str(tmp_path), "--remove"])
        rounds += 1
    assert process.returncode == 0, process.communicate()[1]
    assert process.stderr is not None
    process.stderr.close()
    assert rounds > 1 and status == 0
    assert clean.main(["--path", str(tmp_path), "--remove"]) == 0 and list(tmp_path.iterdir()) == []


# ---- the command line


def test_the_jsons_folders_are_meant(tmp_path: Path, job: Callable[..., Job], capsys: pytest.CaptureFixture[str]) -> None:
    roots = {"offload_param": tmp_path / "a", "offload_optimizer": tmp_path / "b"}
    zero = {name: {"device": "nvme", "nvme_path": str(root)} for name, root in roots.items()}
    (tmp_path / "ds_config.json").write_text(json.dumps({"zero_optimization": zero}))
    assert clean.main(["--config", str(tmp_path / "ds_config.json")]) == 0
    assert f"{tmp_path}/a: no such folder: no run has been there" in capsys.readouterr().out
    for root in roots.values():
        job(root, "run1", 0, "kill").finish()
    status, report = said(capsys, "--config", tmp_path / "ds_config.json", "--path", tmp_path / "b")
    assert status == 0 and report["counts"] == {"stale": 1}
    assert clean.main(["--config", str(tmp_path / "ds_config.json"), "--remove"]) == 0
    assert not any(list(root.iterdir()) for root in roots.values())
    (tmp_path / "ds_config.json").write_text("{}")
    capsys.readouterr()
    assert clean.main(["--config", str(tmp_path / "ds_config.json"), "--remove"]) == 0
    assert capsys.readouterr().out == "no run's folder\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "which folder? write --path /mnt/nvme, or --config ds_config.json"),
        (("--path", "{}/none"), "/none: no such folder; write the nvme_path of the runs"),
        (("--path", "{}/run1"), "/run1: the folder of a run; name the one above it: --path {}"),
        (("--config", "{}/none.json"), "/none.json: no such file; name a DeepSpeed JSON"),
        (("--config", "{}/half.json"), "/half.json: "),
    ],
)
def test_bad_usage_exits_2_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    write_lock(tmp_path / "run1")
    (tmp_path / "half.json").write_text("{")
    with pytest.raises(SystemExit) as caught:
        clean.main([argument.format(tmp_path) for argument in arguments])
    assert caught.value.code == 2 and words.format(tmp_path) in capsys.readouterr().err


def test_help_has_an_example_and_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        clean.main(["--help"])
    text = capsys.readouterr().out
    assert "ds-vertical clean --path /mnt/nvme --remove" in text and "Exit status: 0; 1 where" in text


# ---- modes


def test_folders_that_others_make_below_a_runs_become_private(tmp_path: Path) -> None:
    (tmp_path / "run" / "inner" / "leaf").mkdir(parents=True, mode=0o755)
    (tmp_path / "beside").mkdir(mode=0o755)
    (tmp_path / "run" / "link").symlink_to(tmp_path / "beside")
    make_run_private(tmp_path / "run")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("run/inner", "run/inner/leaf", "beside")]
    assert modes == [0o700, 0o700, 0o755]


# ---- several SSDs

TWO_SSDS = """
import sys, time
from ds_vertical.io.runs.run_dir import claim_config
a, b = sys.argv[1:]
zero = {"offload_param": {"device": "nvme", "nvme_path": a}}
claim_config({"zero_optimization": zero}, "20260131-235959-node7-1f2e3d4c", 0, [a, b])
print("ready", flush=True)
time.sleep(60)
"""


def test_the_folders_of_a_killed_run_on_all_ssds_are_listed_and_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the path of one SSD; and the other's by its own path, where somebody has deleted the first."""
    first, second = tmp_path / "ssd0", tmp_path / "ssd1"
    for deletes in (False, True):
        process = subprocess.Popen([sys.executable, "-c", TWO_SSDS, first, second], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        clean.main(["--path", str(first), "--remove", "--json"])
        runs = json.loads(capsys.readouterr().out)["runs"]
        assert [(run["folder"], run["state"], run["result"]) for run in runs] == [
            (str(folder / WITHOUT_LOCK), "live", None) for folder in (first, second)
        ]
        process.kill()
        process.wait()
        for folder in (first, second):
            (folder / WITHOUT_LOCK / "state.swp").write_bytes(bytes(1 << 20))
        if deletes:
            shutil.rmtree(first / WITHOUT_LOCK)
        status, report = said(capsys, "--path", second if deletes else first, "--remove")
        assert status == 0 and report["counts"] == {"removed": 1 if deletes else 2}
        assert not list(first.iterdir()) and not list(second.iterdir())


def test_parts_of_a_deleted_checkpoint_are_listed_and_removed_by_their_name_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, kept = (tmp_path / parts.PARTS_FOLDER / name for name in ("step5.0badcafe", "step6.0badf00d"))
    for each in (home, kept):
        tag = tmp_path / "saved" / each.name.partition(".")[0]
        for folder in (each / "rank0", tag / "rank0"):
            folder.mkdir(parents=True)
        (each / "rank0" / "weight3.ssd1.bin").write_bytes(bytes(4096))
        (tag / "rank0" / "weight3.ssd1.bin").symlink_to(each / "rank0" / "weight3.ssd1.bin")
        mark_parts(each, tag, each.name.rpartition(".")[2])
    assert [part["in_use"] for part in said(capsys, "--path", tmp_path)[1]["parts"]] == [True, True]
    shutil.rmtree(tmp_path / "saved" / "step5")
    status, report = said(capsys, "--path", tmp_path, "--remove")
    assert status == 0 and [part["in_use"] for part in report["parts"]] == [False, True] and home.is_dir()
    assert clean.main(["--path", str(tmp_path)]) == 0
    assert re.search(r"orphan .* step5\.0badcafe .*\n +-> ds-vertical clean --path .* --remove step5", capsys.readouterr().out)
    status, report = said(capsys, "--path", tmp_path, "--remove", home.name, kept.name)
    assert status == 1 and [part["result"] for part in report["parts"]] == ["removed", "kept"]
    assert not home.exists() and (kept / "rank0" / "weight3.ssd1.bin").exists()
