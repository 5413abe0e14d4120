"""The op cache with real compiles of a tiny op through DeepSpeed's own builder: shared, visible, and safe after a kill."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
import pytest
from places import ROOT

from ds_vertical.compat.ops import build_lock, cache
from ds_vertical.compat.ops import load as native
from ds_vertical.errors import ConfigError

TINY_SOURCE = """
#include <Python.h>
static PyModuleDef tiny = {PyModuleDef_HEAD_INIT, "tiny", nullptr, -1, nullptr};
PyMODINIT_FUNC PyInit_tiny() { return PyModule_Create(&tiny); }
"""

# what a process of a user does: activate, then let DeepSpeed load an op
LOAD_TINY = """
import shutil, sys
from ds_vertical.compat.ops import build_lock, cache
build_lock.RELEASE_S = 1.0  # no file system is that busy here
cache.activate()
from deepspeed.ops.op_builder.cpu.builder import CPUOpBuilder

class TinyBuilder(CPUOpBuilder):
    def __init__(self): super().__init__(name="tiny")
    def absolute_name(self): return "deepspeed.ops.tiny_op"
    def sources(self): return [sys.argv[1]]
    def include_paths(self): return []
    def cxx_args(self): return ["-O0"]

print("LOADED", TinyBuilder().load(verbose=False).__file__)
print("NINJA", shutil.which("ninja"))
"""

# Stands before the real compiler on PATH: slow, so that a second process or a kill can come in between. ninja gives it a
# process group of its own, which a kill of the builder's leaves alone: it ends with the test, or with the test's folder.
SLOW_COMPILER = """#!/bin/sh
case "$*" in *-c*)
    touch "$COMPILING"
    while [ -n "$UNTIL" ] && [ ! -e "$UNTIL" ]; do [ -e "$OVER" -o ! -e "$COMPILING" ] && exit 1; sleep 0.1; done;;
esac
exec {compiler} "$@"
"""


class User:
    """Starts processes that share one cache, below a folder of this test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = 0
        self.source = folder / "tiny.cpp"
        self.source.write_text(TINY_SOURCE)
        self.compiling = folder / "compiling"
        self.over = folder / "over"
        compiler = shutil.which("c++")
        tools = folder / "bin"
        tools.mkdir()
        (tools / "c++").write_text(SLOW_COMPILER.replace("{compiler}", compiler or ""))
        (tools / "c++").chmod(0o755)
        own = ("TORCH_EXTENSIONS_DIR", "CXX", "DS_VERTICAL_CACHE")
        self.environment = {name: value for name, value in os.environ.items() if name not in own} | {
            "PATH": f"{tools}:/usr/bin:{os.environ['PATH']}",  # Debian's ninja, where there is one, comes first
            "DS_VERTICAL_CACHE": str(folder / "cache"),
            "DS_ACCELERATOR": "cpu",
            "PYTHONPATH": str(ROOT),
            "COMPILING": str(self.compiling),
            "OVER": str(self.over),
        }

    def start(self, python: str = sys.executable, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [python, "-c", LOAD_TINY, str(self.source)],
            env=self.environment | environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def run(self) -> subprocess.CompletedProcess[str]:
        """As `start`, to its end: in a process that has DeepSpeed imported when it begins."""
        self.runs += 1
        folder = self.folder / f"run {self.runs}"
        folder.mkdir()
        return forks.run(folder, [sys.executable, "-c", LOAD_TINY, str(self.source)], self.environment, timeout=280)

    def load(self) -> tuple[str, str]:
        """Library that a new process loaded, and what it said meanwhile."""
        return told(self.run())

    def await_compile(self) -> None:
        deadline = time.monotonic() + 200
        while not self.compiling.exists():
            assert time.monotonic() < deadline, "the compiler was never called"
            time.sleep(0.05)


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(timeout=280)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def told(done: subprocess.CompletedProcess[str]) -> tuple[str, str]:
    """The library that the process has loaded, and its other words."""
    assert done.returncode == 0, done.stderr
    return next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("LOADED")), done.stderr


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    user = User(tmp_path)
    yield user
    user.over.touch()


@pytest.fixture
def fresh_facts(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """`build_facts` is read once per process: forget it before and after."""
    cache.build_facts.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    cache.build_facts.cache_clear()


# -------------------------------------------------------------------------------------------------------------- the key


@pytest.mark.parametrize(("variable", "value"), [("CXXFLAGS", "-O1"), ("LDFLAGS", "-L/opt"), ("CXX", "cat")])
def test_key_depends_on_compiler_and_flags(fresh_facts: pytest.MonkeyPatch, variable: str, value: str) -> None:
    before = cache.build_facts().key()
    cache.build_facts.cache_clear()
    fresh_facts.setenv(variable, value)
    assert cache.build_facts().key() != before


def test_key_depends_on_the_accelerator(fresh_facts: pytest.MonkeyPatch) -> None:
    keys = set()
    for name in ("cpu", "cuda"):
        fresh_facts.setenv("DS_ACCELERATOR", name)
        cache.build_facts.cache_clear()
        keys.add(cache.build_facts().key())
    assert len(keys) == 2


def test_cache_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DS_VERTICAL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_root() == tmp_path / "ds_vertical" / "ops"
    monkeypatch.setenv("DS_VERTICAL_CACHE", str(tmp_path / "mine"))
    assert cache.cache_root() == tmp_path / "mine" / "ops"


# ---------------------------------------------------------------------------------------------------------- environment


def test_the_venvs_ninja_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = tmp_path / "ninja"
    other.write_text("#!/bin/sh\necho 1.11.1\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    cache.set_environment()
    assert shutil.which("ninja") == str(Path(sys.prefix) / "bin" / "ninja")
    path = os.environ["PATH"]
    cache.set_environment()
    assert os.environ["PATH"] == path, "a second call must change nothing"


def test_a_folder_that_the_user_chose_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    cache.set_environment()
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(tmp_path)


def test_a_folder_inherited_from_another_accelerator_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(cache.cache_root() / "other-key" / "jit-0"))
    cache.set_environment()
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(cache.jit_folder())


# ---------------------------------------------------------------------------------------------------------------- locks


def hold(lock: Path) -> subprocess.Popen[bytes]:
    """A process that compiles, as far as torch's lock tells: it holds the file open, and removes it when told to."""
    code = f"import os; os.open({str(lock)!r}, os.O_CREAT | os.O_EXCL); input(); os.remove({str(lock)!r})"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    while not lock.exists():
        time.sleep(0.01)
    return process


def test_lock_of_a_dead_compile_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build_lock, "RELEASE_S", 0.1)
    lock = tmp_path / "op" / "lock"
    lock.parent.mkdir()
    builder = hold(lock)
    builder.send_signal(signal.SIGKILL)
    builder.wait()
    assert lock.exists()
    build_lock.wait_for_lock(lock)
    assert not lock.exists()
    assert str(lock) in capsys.readouterr().err


def test_lock_that_another_compile_has_made_meanwhile_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that load an op at once have it one after the other; a look may miss each of them."""
    lock = tmp_path / "op" / "lock"
    lock.parent.mkdir()
    lock.touch()

    def hand_on(_: float) -> None:
        lock.rename(lock.with_name("released"))
        lock.touch()

    monkeypatch.setattr(build_lock.time, "sleep", hand_on)
    assert not build_lock.clear_stale_lock(lock) and lock.exists()


def test_lock_whose_compile_has_ended_is_left_to_the_one_that_made_it(tmp_path: Path) -> None:
    """Between the two calls of a release a process waits for a busy file system, for seconds."""
    lock = tmp_path / "op" / "lock"
    lock.parent.mkdir()
    descriptor = os.open(lock, os.O_CREAT | os.O_EXCL)
    released: list[object] = []

    def release() -> None:
        os.close(descriptor)
        released.append(None)
        time.sleep(3)
        lock.unlink()  # raises where somebody else has removed it
        released.append(None)

    releasing = threading.Thread(target=release)
    releasing.start()
    while not released:
        time.sleep(0.01)
    assert not build_lock.clear_stale_lock(lock) and not lock.exists()
    releasing.join()
    assert len(released) == 2


def test_lock_of_a_live_compile_is_waited_for_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "op" / "lock"
    lock.parent.mkdir()
    builder = hold(lock)
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if builder.stdin is not None and not builder.stdin.closed:
            builder.communicate(b"\n")  # it has been waited for

    monkeypatch.setattr(build_lock, "say", say)
    assert not build_lock.clear_stale_lock(lock)
    build_lock.wait_for_lock(lock)
    assert not lock.exists()
    assert [f"waiting for process [{builder.pid}]" in words for words in said] == [True]
    assert builder.wait() == 0, "its lock was taken from under it"


def test_a_lock_stays_while_somebody_compiles_whom_this_host_does_not_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_VERTICAL_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(cache.jit_folder()))
    lock = cache.jit_folder() / "op" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    monkeypatch.setattr(build_lock, "RELEASE_S", 0.1)
    with build_lock.build_turn(cache.cache_folder()):
        cache.activate()
        assert lock.exists()
    cache.activate()
    assert not lock.exists()


def test_where_flock_does_not_reach_other_hosts_their_builders_are_told_by_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_VERTICAL_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(cache.jit_folder()))
    for name, seconds in (("RELEASE_S", 0.1), ("HEARTBEAT_S", 0.1), ("HOST_S", 1.0)):
        monkeypatch.setattr(build_lock, name, seconds)
    monkeypatch.setattr(build_lock.fcntl, "flock", lambda *_: None)  # as of a file system that keeps it to each host
    folder, lock = cache.cache_folder(), cache.jit_folder() / "op" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    hosts, entered, end = {"building": "clone boot1"}, threading.Event(), threading.Event()
    monkeypatch.setattr(build_lock, "host_id", lambda: hosts.get(threading.current_thread().name, "clone boot2"))

    def build() -> None:
        with build_lock.build_turn(folder):
            entered.set()
            end.wait(60)

    building = threading.Thread(target=build, name="building")
    building.start()
    assert entered.wait(60)
    time.sleep(1.5)  # longer than a dead builder's file counts
    assert f"process {os.getpid()} on " in (build_lock.builder(folder) or "")
    cache.activate()
    assert lock.exists(), "its compile runs on another host"
    said: list[str] = []
    monkeypatch.setattr(build_lock, "say", lambda text: (said.append(text), end.set()))
    with build_lock.build_turn(folder):
        assert not building.is_alive() or (building.join(60), not building.is_alive())[1]
        assert f"waiting for the other builder (process {os.getpid()} on " in said[0]
    assert build_lock.builder(folder) is None and not (folder / build_lock.HOST_FILE).exists()
    cache.activate()
    assert not lock.exists()


def test_the_file_of_a_builder_that_was_killed_on_another_host_counts_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_lock, "HOST_S", 1.0)
    monkeypatch.setattr(build_lock, "say", lambda _: None)
    (tmp_path / build_lock.TURN_FILE).touch()
    (tmp_path / build_lock.HOST_FILE).write_text("node7 boot7\nprocess 17 on node7 since 12:01:02")
    assert build_lock.builder(tmp_path) == "process 17 on node7 since 12:01:02"
    start = time.monotonic()
    with build_lock.build_turn(tmp_path):
        assert time.monotonic() - start > 0.5
        assert (tmp_path / build_lock.HOST_FILE).read_text().startswith(f"{build_lock.host_id()}\n")
    (tmp_path / build_lock.HOST_FILE).write_text(f"{build_lock.host_id()}\nprocess 17, killed here")
    assert build_lock.builder(tmp_path) is None


# ------------------------------------------------------------------------------------------------------- compile and share


def test_compiled_once_then_imported_also_by_a_second_clone(user: User, tmp_path: Path) -> None:
    library, words = user.load()
    assert "compiling the op tiny" in words and Path(library).is_relative_to(tmp_path)
    user.compiling.unlink()
    again, words = user.load()
    shared = next((tmp_path / "cache" / "ops").glob("*/lib/tiny.so"))
    assert again == str(shared) and "compiling" not in words

    # a clone has its own virtual environment, hence other paths on every command line of the compiler
    clone = tmp_path / "clone"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", clone], check=True)
    packages = next(clone.glob("lib/python*/site-packages"))
    here = Path(cache.__file__).parents[1]
    ours = next(entry for entry in sys.path if entry.endswith("site-packages"))
    (packages / "main.pth").write_text(f"{ours}\n{here}\n")
    (clone / "bin" / "ninja").symlink_to(Path(sys.prefix) / "bin" / "ninja")
    from_clone, words = told(finish(user.start(str(clone / "bin" / "python"))))
    assert from_clone == str(shared) and "compiling" not in words
    assert not user.compiling.exists(), "the compiler was called again"


def test_killed_compile_does_not_hang_the_next_process(user: User) -> None:
    victim = user.start(UNTIL="/nonexistent")
    user.await_compile()
    os.killpg(victim.pid, signal.SIGKILL)
    victim.communicate()
    assert list((user.folder / "cache").rglob("tiny/lock")), "torch left no lock: this test shows nothing"
    library, words = user.load()
    assert Path(library).exists() and "is dead" in words and "compiling" in words


@pytest.mark.slow
def test_two_builders_take_turns_visibly(user: User) -> None:
    go_on = user.folder / "go on"
    first = user.start(UNTIL=str(go_on))
    user.await_compile()
    second = user.start()
    second_words = words_until(second, rf"waiting for the other builder \(process {first.pid} on")
    words_until(first, r"tiny: +\d+ s, 0 objects")  # a long compile must give signs of life
    go_on.touch()
    rest(first)
    assert "compiling" not in second_words + rest(second)


def words_until(process: subprocess.Popen[str], pattern: str) -> str:
    """What a process said as far as the line with the pattern; a process that ends before that fails the test."""
    assert process.stderr is not None
    words = ""
    for line in process.stderr:
        words += line
        if re.search(pattern, line):
            return words
    raise AssertionError(words)


def rest(process: subprocess.Popen[str]) -> str:
    """What else a process says, to its end."""
    assert process.stderr is not None and process.stdout is not None
    words, out = process.stderr.read(), process.stdout.read()
    assert process.wait(280) == 0 and "LOADED" in out, words
    return words


def test_failed_compile_shows_the_compilers_words_and_leaves_no_lock(user: User) -> None:
    user.source.write_text("#error this op does not compile\n")
    done = user.run()
    assert done.returncode != 0 and "error: #error this op does not compile" in done.stderr
    user.source.write_text(TINY_SOURCE)
    assert Path(user.load()[0]).exists()


def test_a_damaged_library_does_not_count_as_ready(fresh_facts: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh_facts.setenv("DS_VERTICAL_CACHE", str(tmp_path / "cache"))
    built = tmp_path / "tiny.so"
    built.write_bytes(b"a whole library")
    assert cache.ready_library("tiny") is None
    cache._record_ready(built, 1.0)
    shared = cache.ready_library("tiny")
    assert shared is not None and shared.read_bytes() == b"a whole library"
    shared.write_bytes(b"half")
    assert cache.ready_library("tiny") is None


# -------------------------------------------------------------------------------------------------------- architectures


@pytest.mark.parametrize(
    ("named", "readable"),
    [("9.0a", "9.0"), ("8.0;9.0a+PTX 10.0f", "8.0;9.0+PTX;10.0"), (" 9.0  9.0a ", "9.0"), ("8.6;12.1", "8.6;12.1"), ("", "")],
)
def test_architectures_are_ones_that_deepspeeds_builder_reads(
    monkeypatch: pytest.MonkeyPatch, named: str, readable: str
) -> None:
    from deepspeed.ops.op_builder.async_io import AsyncIOBuilder

    assert cache.readable_architectures(named) == readable
    builder = AsyncIOBuilder()
    monkeypatch.setattr(builder, "jit_mode", True)
    monkeypatch.setenv(cache.ARCHITECTURES, readable)
    for each in [readable] if readable else []:
        monkeypatch.setattr(builder, "_jit_arch_list", each, raising=False)
        builder.compute_capability_args()
    if any(letter in named for letter in "af"):
        monkeypatch.setattr(builder, "_jit_arch_list", named, raising=False)
        with pytest.raises(ValueError, match="invalid literal"):  # else nothing has to be left out any more
            builder.compute_capability_args()


@pytest.fixture
def for_cuda(fresh_facts: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """A cache of this test's own, of a process whose accelerator CUDA would be."""
    fresh_facts.setenv("DS_ACCELERATOR", "cuda")
    fresh_facts.setenv("DS_VERTICAL_CACHE", str(tmp_path / "cache"))
    fresh_facts.setenv("TORCH_EXTENSIONS_DIR", "")
    cache._said_architectures.cache_clear()
    yield fresh_facts
    cache._said_architectures.cache_clear()


def cuda_builder(name: str) -> Any:
    """One of DeepSpeed's builders that read the list."""
    from deepspeed.ops.op_builder.async_io import AsyncIOBuilder

    builder = AsyncIOBuilder()
    builder.name = name
    return builder


def test_a_compile_finds_architectures_without_letters_and_nobody_else_does(
    for_cuda: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for_cuda.setenv(cache.ARCHITECTURES, "9.0a")
    cache.set_environment()
    seen = []

    def compile_tiny(builder: Any, _: bool) -> None:
        seen.append(os.environ[cache.ARCHITECTURES])
        built = cache.jit_folder() / builder.name / f"{builder.name}.so"
        built.parent.mkdir(parents=True)
        built.touch()

    for name in ("one", "two"):
        cache._load(compile_tiny, cuda_builder(name), True)
    cache._load(compile_tiny, SimpleNamespace(name="reads no list"), True)
    assert seen == ["9.0", "9.0", "9.0a"] and os.environ[cache.ARCHITECTURES] == "9.0a"
    said = capsys.readouterr().err
    assert said.count("TORCH_CUDA_ARCH_LIST is '9.0a', whose letters") == 1 and "compiling for '9.0'" in said


def test_architectures_by_name_are_refused_before_anything_is_compiled(for_cuda: pytest.MonkeyPatch) -> None:
    for_cuda.setenv(cache.ARCHITECTURES, "8.0;Hopper")
    cache.set_environment()
    with pytest.raises(ConfigError, match=r"TORCH_CUDA_ARCH_LIST: got '8.0;Hopper'; .* write one such as 9.0, .* or unset"):
        cache._load(lambda *_: pytest.fail("compiled"), cuda_builder("one"), True)
    for_cuda.setattr(
        native.OwnOp, "builder", lambda _: SimpleNamespace(load=lambda **_: cache.readable_architectures("Hopper"))
    )
    for_cuda.setattr(cache, "activate", lambda: None)
    with_stand_in = native.free_adam, native.identity_node, native.state_reader, native.block_quantizer, native.master_halves
    for load_own in (native.checked_aio, *with_stand_in):
        with pytest.raises(ConfigError, match="write one such as"):  # neither a stand-in nor another reason
            load_own.__wrapped__()


# ------------------------------------------------------------------------------------------------------------ real ops


def test_all_ops_load_from_the_users_cache(tmp_path: Path) -> None:
    code = """
from ds_vertical.compat.ops import load
from ds_vertical.compat.ops import cache
cache.activate()
for builder in load.needed_ops().values():
    print(builder().load(verbose=False).__file__)
"""
    environment = os.environ | {"TORCH_EXTENSIONS_DIR": ""}
    run = forks.run(tmp_path, [sys.executable, "-c", code], environment, timeout=280)
    assert run.returncode == 0, run.stderr
    files = [line for line in run.stdout.splitlines() if line.endswith(".so")]
    assert files == [str(cache.cache_folder() / "lib" / f"{name}.so") for name in native.needed_ops()]
    assert "compiling" not in run.stderr


@pytest.mark.slow
def test_build_ops_compiles_a_real_op_into_an_empty_cache(user: User) -> None:
    load = "load.needed_ops()['deepspeed_shm_comm']().load(verbose=False)"
    code = f"from ds_vertical.compat.ops import cache, load; cache.activate(); {load}"
    run = subprocess.run([sys.executable, "-c", code], env=user.environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    # both of its files may be finished between two signs of life: then these never count above 0
    assert "deepspeed_shm_comm is ready after" in run.stderr and " objects\n" in run.stderr


def test_a_rank_that_no_engine_has_started_takes_its_op_from_the_users_cache(user: User) -> None:
    """`limits --links` has such ranks: they waited for ever where a killed process had left its lock in DeepSpeed's folder."""
    code = (
        "import os; from ds_vertical.distributed import ranks;"
        " ranks.init_distributed = lambda **_: (print(os.environ.get('TORCH_EXTENSIONS_DIR'), flush=True), os._exit(0));"
        " ranks.start_distributed()"
    )
    folder = user.folder / "rank"
    folder.mkdir()
    done = forks.run(folder, [sys.executable, "-c", code], user.environment | {"RANK": "0"}, timeout=120)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.split()[-1]).is_relative_to(user.folder / "cache"), done.stdout
