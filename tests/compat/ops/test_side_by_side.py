"""Ops that are compiled at the same time, with compilers that only wait for each other: the turn, the words, the failures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from places import ROOT

from ds_vertical.cli import build_ops
from ds_vertical.compat.ops import build_lock, cache, load, side_by_side

# as `ds-vertical build-ops --only` does it, with a compiler of this test's: argv has the op, the turn's holder, a folder, and
# how many compiles are to be under way before one of them ends
COMPILE = """
import contextlib, os, sys, time
from pathlib import Path
from types import SimpleNamespace
from ds_vertical.compat.ops import build_lock, cache
name, holder, folder, together = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])

def compile_it(builder, verbose):
    (folder / f"{name}.begun").write_text(f"{os.getpid()} {os.environ['MAX_JOBS']}")
    assert f"process {holder} on " in build_lock.builder(cache.cache_folder())
    while len(list(folder.glob("*.begun"))) < together:
        time.sleep(0.02)
    if name == "killed_stand_in":
        os.kill(os.getpid(), 9)  # as where memory is short
    if name == "broken_stand_in":
        sys.exit(17)
    if name.startswith("broken"):
        os.write(1, b"error: on purpose\\n")
        raise RuntimeError("ninja")
    built = cache.jit_folder() / name / f"{name}.so"
    built.parent.mkdir(parents=True)
    built.write_text(name)

cache.architectures_readable = lambda _: contextlib.nullcontext()  # it would import DeepSpeed, whose compiler this is not
cache.set_environment()
cache.join_turn(holder)
cache._load(compile_it, SimpleNamespace(name=name), True)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of this test's own, and where the compiles leave their notes."""
    cache.build_facts.cache_clear()
    for name, value in (("DS_VERTICAL_CACHE", str(tmp_path / "cache")), ("TORCH_EXTENSIONS_DIR", ""), ("MAX_JOBS", "8")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cache.set_environment()
    yield tmp_path
    monkeypatch.undo()
    cache.build_facts.cache_clear()


def compiling(folder: Path, together: int, name: str, holder: int) -> list[str]:
    return [sys.executable, "-c", COMPILE, name, str(holder), str(folder), str(together)]


def test_ops_are_compiled_at_the_same_time_within_one_turn(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cache.jit_folder().mkdir(parents=True)
    (cache.jit_folder() / "known.so").touch()
    cache._record_ready(cache.jit_folder() / "known.so", 1.0)
    files = {"one": 2, "broken": 1, "known": 9, "two": 4, "three": 1}
    slow, failed = side_by_side.compile_side_by_side(files, 4, lambda name, pid: compiling(folder, 2, name, pid))
    assert slow == [] and failed == ["broken"]
    begun = {path.stem: path.read_text().split() for path in folder.glob("*.begun")}
    assert len({pid for pid, _ in begun.values()}) == 4  # by processes of their own, files at a time by how many each has
    assert {name: jobs for name, (_, jobs) in begun.items()} == {"one": "1", "broken": "1", "two": "2", "three": "1"}
    assert [name for name in files if cache.ready_library(name) is None] == ["broken"]
    said = capfd.readouterr().err
    assert "4 ops are compiled side by side, up to 4 files at a time" in said and "error: on purpose" in said
    assert all(f"compiling the op {name} into" in said for name in begun) and said.count(" is ready after") == 3
    assert build_lock.builder(cache.cache_folder()) is None


def test_other_builders_wait_for_all_of_them_and_then_find_them(folder: Path) -> None:
    code = f"""
from pathlib import Path
from types import SimpleNamespace
from ds_vertical.compat.ops import build_lock, cache

def say(words):
    print(words)
    Path({str(folder)!r}, "waiter.begun").touch()  # the compiles end no earlier

cache.set_environment()
build_lock.say = say
cache._import_library = lambda name, library: print("found", library.read_text())
cache._load(lambda *_: print("compiled"), SimpleNamespace(name="one"), True)
"""
    others: list[subprocess.Popen[str]] = []

    def command(name: str, pid: int) -> list[str]:
        if not others:
            others.append(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True))
        return compiling(folder, 3, name, pid)

    assert side_by_side.compile_side_by_side({"one": 1, "two": 1}, 4, command) == ([], [])
    said = others[0].communicate(timeout=60)[0].splitlines()
    assert f"waiting for the other builder (process {os.getpid()} on " in said[0] and said[-1] == "found one"


def test_an_op_that_a_process_beside_this_one_compiles_is_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSpeed's cpu_adam, which stands in for ours where that cannot be compiled."""

    def compiled_meanwhile(lock: Path) -> None:
        built = lock.parent / "one.so"
        built.parent.mkdir(parents=True)
        built.write_text("one")
        cache._record_ready(built, 1.0)

    monkeypatch.setattr(cache, "wait_for_lock", compiled_meanwhile)
    monkeypatch.setattr(cache, "_import_library", lambda _, library: library.read_text())
    assert cache._load(lambda *_: pytest.fail("compiled again"), SimpleNamespace(name="one"), True) == "one"


def test_an_interrupt_ends_all_of_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: float) -> None:
        if sum(bool(path.read_text()) for path in folder.glob("*.begun")) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(side_by_side, "time", SimpleNamespace(sleep=interrupted))
    with pytest.raises(KeyboardInterrupt):
        side_by_side.compile_side_by_side({"one": 1, "two": 1}, 4, lambda name, pid: compiling(folder, 3, name, pid))
    for path in folder.glob("*.begun"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text().split()[0]), 0)
    assert build_lock.builder(cache.cache_folder()) is None


def test_a_termination_ends_the_compilers_and_lets_go_of_the_turn(folder: Path) -> None:
    code = f"""
import subprocess
from ds_vertical.cli import build_ops
from ds_vertical.compat.ops import build_lock, cache

def build(_):
    with build_lock.build_turn(cache.cache_folder()):
        compiler = "sleep 300 & echo $! >{folder}/part; mv {folder}/part {folder}/compiler; wait"
        subprocess.run(["bash", "-c", compiler])

build_ops._build = build
build_ops.main([])
"""
    building = subprocess.Popen([sys.executable, "-c", code])
    end = time.monotonic() + 60
    while not (folder / "compiler").exists():
        assert time.monotonic() < end and building.poll() is None
        time.sleep(0.02)
    assert build_lock.builder(cache.cache_folder()) is not None
    building.terminate()
    assert building.wait(60) == 128 + signal.SIGTERM
    assert not list(cache.cache_folder().glob("builder.host")) and build_lock.builder(cache.cache_folder()) is None
    compiler = Path("/proc", (folder / "compiler").read_text().strip(), "stat")
    while compiler.exists() and compiler.read_text().split()[2] != "Z":
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_process_whose_holder_is_gone_takes_a_turn_of_its_own(folder: Path) -> None:
    code = f"""
import os, time
from ds_vertical.compat.ops import build_lock, cache
cache.join_turn({os.getpid()})
assert cache._in_turn()
if os.fork() == 0:
    while cache._in_turn():
        time.sleep(0.02)
    with cache._turn():
        open({str(folder / "turn")!r}, "w").write(build_lock.builder(cache.cache_folder()) + f" {{os.getpid()}}")
"""
    with build_lock.build_turn(cache.cache_folder()):  # by a process of a process: some interpreters start another one
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
        assert not (folder / "turn").exists()
    end = time.monotonic() + 60
    while not (folder / "turn").exists() or not (folder / "turn").read_text():
        assert time.monotonic() < end
        time.sleep(0.02)
    words = (folder / "turn").read_text().split()
    assert words[:2] == ["process", words[-1]]


def test_build_ops_tells_stand_ins_from_what_nothing_stands_in_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stand_in, killed = "broken_stand_in", "killed_stand_in"
    names = [load.LINKED_BY_OTHERS, "one", "broken", stand_in, killed]
    builder = SimpleNamespace(sources=lambda: ["one.cpp"])
    monkeypatch.setattr(load, "needed_ops", lambda: dict.fromkeys(names, lambda: builder))
    monkeypatch.setattr(build_ops, "_with_stand_in", lambda: dict.fromkeys([stand_in, killed], lambda: None))
    monkeypatch.setattr(build_ops, "_command", lambda name, pid: compiling(folder, 2, name, pid))
    alone: list[str] = []
    monkeypatch.setattr(build_ops, "_load", alone.append)
    assert build_ops.main([]) == 1
    assert alone == [load.LINKED_BY_OTHERS]  # here, ahead of those that load it
    said = capfd.readouterr()
    [failed] = [line for line in said.err.splitlines() if "not compiled; the compiler's words are above" in line]
    assert set(failed.partition(":")[0].split(", ")) == {"broken", killed}
    assert "are ready" not in said.out
    assert f"{stand_in}: not compiled, slower stand-ins work in their place" in said.err


@pytest.mark.parametrize(("jobs", "most"), [("2", 1), ("1", 1), ("4", 4), ("8", 8), ("some", 1)])
def test_as_many_files_are_compiled_at_a_time_as_max_jobs_allows(monkeypatch: pytest.MonkeyPatch, jobs: str, most: int) -> None:
    monkeypatch.setenv("MAX_JOBS", jobs)
    assert side_by_side.files_at_a_time() == most


@pytest.mark.parametrize("jobs", [8, 16, 64])
def test_the_largest_op_begins_first_and_has_most_of_the_files_at_a_time(jobs: int) -> None:
    files = {"cpu_adam": 2, "free_adam": 2, "async_io": 12, "joint": 1, "checked_aio": 3}
    shares = side_by_side.files_each(files, jobs)
    assert next(iter(shares)) == "async_io" and all(1 <= share <= files[name] for name, share in shares.items())
    waves = {name: files[name] / shares[name] for name in files}
    assert waves["async_io"] <= max(2 * waves["cpu_adam"], 1.0)
    assert sum(shares.values()) <= jobs + len(files)


@pytest.mark.slow
def test_a_single_op_is_loaded_within_the_turn_of_another_process() -> None:
    name = load.IDENTITY_NODE.build_name
    with build_lock.build_turn(cache.cache_folder()):
        command = build_ops._command(name, os.getpid())
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
