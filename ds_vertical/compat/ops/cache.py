"""One cache of DeepSpeed's compiled ops per user, so that nobody waits twice, and nobody waits in silence.

[Note: why not torch's own cache] DeepSpeed compiles its ops at first use through `torch.utils.cpp_extension.load`,
which asks ninja whether the build is still current. Ninja compares command lines, and they differ between two clones
(paths of the virtual environment) and between two ninjas (1.11 and 1.13 hash the same line differently): each
rebuilds the other's ops, for minutes, silently. So a finished op is copied to `KEY/lib` and from then on imported as
the file that it is; what could make it wrong (versions, compiler, flags, processor) is in KEY instead. torch's own
build folder is `KEY/jit-HASH`, one per virtual environment, so that a DeepSpeed run without this module cannot spoil
what the others share.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ds_vertical.compat.ops.build_lock import HEARTBEAT_S, build_turn, clear_stale_lock, say, wait_for_lock
from ds_vertical.compat.ops.build_lock import builder as builder_of
from ds_vertical.errors import ConfigError

if TYPE_CHECKING:
    from deepspeed.ops.op_builder.builder import OpBuilder

    StockLoad = Callable[[OpBuilder, bool], Any]  # DeepSpeed's OpBuilder.jit_load: the module

ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"
FLAG_VARIABLES = ("CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", ARCHITECTURES)


@dataclass(frozen=True, kw_only=True)
class BuildFacts:
    """Everything that decides whether a compiled op fits this process."""

    python: str
    torch: str
    deepspeed: str
    accelerator: str
    compiler: str
    ninja: str
    cpu: str
    libc: str
    cuda: str
    flags: tuple[str, ...]

    def key(self) -> str:
        """Name of the cache folder: versions that a person recognises, then a hash over all facts."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]
        return f"ds{self.deepspeed}-{self.python}-{self.accelerator}-{digest}"


# ---------------------------------------------------------------------------------------------------------------- key


def accelerator_name() -> str:
    """What DeepSpeed will choose of the devices that plain torch knows: `DS_ACCELERATOR`, else XPU or CUDA (ROCm, too) where
    torch can use it, else the CPU."""
    named = os.environ.get("DS_ACCELERATOR")
    if named:
        return named
    import torch

    return next((kind for kind in ("xpu", "cuda") if torch.get_device_module(kind).is_available()), "cpu")


def _command_line_output(*command: str) -> str:
    """First line that `command` prints, or "none" where there is no such program."""
    if shutil.which(command[0]) is None:
        return "none"
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip().splitlines()
    return lines[0] if lines else "none"


def _torch_build() -> str:
    # version.py also names torch's CUDA and its commit; reading it spares the import of torch
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("torch is not installed here; run `bash scripts/setup.sh`")
    text = (Path(spec.origin).parent / "version.py").read_bytes()
    return f"{importlib.metadata.version('torch')}-{hashlib.sha256(text).hexdigest()[:8]}"


def _cpu_features() -> str:
    # DeepSpeed compiles with -march=native, so an op from another processor may die of an illegal instruction
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    features = next((line.partition(":")[2] for line in lines if re.match(r"(flags|Features)\s*:", line)), "")
    digest = hashlib.sha256(" ".join(sorted(features.split())).encode()).hexdigest()[:8]
    return f"{platform.machine()}-{digest}"


def _cuda_toolchain(accelerator: str) -> str:
    if accelerator != "cuda":
        return "none"
    nvcc = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
    version = (
        subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
        if os.path.exists(nvcc)  # noqa: PTH110  # Path.exists raises where the folder may not be entered
        else _command_line_output("nvcc", "--version")
    )
    gpu = _command_line_output("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    return f"{version.strip()} {gpu}"


@functools.cache
def build_facts() -> BuildFacts:
    """The facts of this process; the environment is read once."""
    accelerator = accelerator_name()
    return BuildFacts(
        python=sys.implementation.cache_tag or platform.python_version(),
        torch=_torch_build(),
        deepspeed=importlib.metadata.version("deepspeed"),
        accelerator=accelerator,
        compiler=_command_line_output(os.environ.get("CXX", "c++"), "--version"),
        ninja=importlib.metadata.version("ninja"),
        cpu=_cpu_features(),
        libc="-".join(platform.libc_ver()),
        cuda=_cuda_toolchain(accelerator),
        flags=tuple(f"{name}={os.environ.get(name, '')}" for name in FLAG_VARIABLES),
    )


def cache_root() -> Path:
    """`DS_VERTICAL_CACHE`, else `XDG_CACHE_HOME/ds_vertical`, else `~/.cache/ds_vertical`; the ops are in `ops/`."""
    named = os.environ.get("DS_VERTICAL_CACHE")
    if named:
        return Path(named).expanduser() / "ops"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "ds_vertical" / "ops"


def cache_folder() -> Path:
    """Folder of the ops that fit this process: `lib/` (finished, shared), `jit-HASH/` (torch's build, one per venv)."""
    return cache_root() / build_facts().key()


def jit_folder() -> Path:
    """`TORCH_EXTENSIONS_DIR` of this virtual environment."""
    return cache_folder() / f"jit-{hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]}"


def is_own_folder() -> bool:
    """Whether torch builds in our cache, after `set_environment`; in a folder of the user's it alone knows what is current."""
    return Path(os.environ["TORCH_EXTENSIONS_DIR"]) == jit_folder()


# -------------------------------------------------------------------------------------------------------- ready ops


def ready_library(name: str) -> Path | None:
    """The finished library of an op, or None if there is none or it is not what was recorded."""
    library = cache_folder() / "lib" / f"{name}.so"
    try:
        record = json.loads(library.with_suffix(".json").read_text())
        return library if library.stat().st_size == record["size_bytes"] else None
    except (FileNotFoundError, json.JSONDecodeError, KeyError):
        return None


def _record_ready(built: Path, seconds: float) -> None:
    library = cache_folder() / "lib" / built.name
    library.parent.mkdir(parents=True, exist_ok=True)
    part = library.with_suffix(f".{os.getpid()}")
    shutil.copyfile(built, part)
    part.replace(library)
    record = {"size_bytes": library.stat().st_size, "build_s": round(seconds, 1), **asdict(build_facts())}
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(library.with_suffix(".json"))


def forget(name: str) -> None:
    """Throw an op away, so that its next load compiles it."""
    with build_turn(cache_folder()):
        wait_for_lock(jit_folder() / name / "lock")
        for suffix in (".json", ".so"):
            (cache_folder() / "lib" / f"{name}{suffix}").unlink(missing_ok=True)
        shutil.rmtree(jit_folder() / name, ignore_errors=True)


def _import_library(name: str, library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, library)
    if spec is None or spec.loader is None:
        raise ImportError(f"{library} is not a Python extension; run `ds-vertical build-ops --force`")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------------------------------------- build


@contextlib.contextmanager
def _heartbeat(name: str, log: Path) -> Iterator[None]:
    """Say every few seconds how far the compile of `name` is, as ninja counts in `log`."""
    done, start = threading.Event(), time.monotonic()

    def beat() -> None:
        while not done.wait(HEARTBEAT_S):
            counts = re.findall(r"^\[(\d+/\d+)\]", log.read_text(errors="replace"), re.MULTILINE)
            say(f"  {name}: {time.monotonic() - start:4.0f} s, {counts[-1] if counts else '0'} objects")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def _stdout_into(log: Path) -> Iterator[None]:
    # by descriptor: ninja is a child process, which does not know sys.stdout
    sys.stdout.flush()
    saved = os.dup(1)
    with log.open("wb") as sink:
        os.dup2(sink.fileno(), 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(saved, 1)
            os.close(saved)


def readable_architectures(named: str) -> str:
    """A TORCH_CUDA_ARCH_LIST as DeepSpeed's builder reads it: without the letters of "9.0a" and "10.0f". They ask for what one
    architecture alone has, in code for a GPU, and none of ours has such code. Raises ConfigError for words."""
    found = []
    for each in named.replace(";", " ").split():
        known = re.fullmatch(r"(\d+\.\d+)[a-z]?(\+PTX)?", each)
        if known is None:
            raise ConfigError(
                f"{ARCHITECTURES}: got {named!r}; DeepSpeed's builder reads numbers alone; write one such as 9.0, or several"
                ' with ";" between them, or unset the variable: then the architectures of the GPUs that are there are taken'
            )
        found.append(known[1] + (known[2] or ""))
    return ";".join(dict.fromkeys(found))


@functools.cache
def _said_architectures(named: str) -> str:
    """`readable_architectures`; says once where that is another list."""
    readable = readable_architectures(named)
    if re.search("[a-z]", named) and not _in_turn():
        say(f"{ARCHITECTURES} is {named!r}, whose letters DeepSpeed's builder does not read: compiling for {readable!r}")
    return readable


@contextlib.contextmanager
def architectures_readable(builder: OpBuilder) -> Iterator[None]:
    """Within the block the variable is one that DeepSpeed reads. Other code in this process finds what the user has written,
    and so does whatever asks for this cache's key. Only a CUDAOpBuilder of DeepSpeed's reads it. Raises ConfigError."""
    from deepspeed.ops.op_builder.builder import CUDAOpBuilder

    named = os.environ.get(ARCHITECTURES)
    if not named or accelerator_name() != "cuda" or not isinstance(builder, CUDAOpBuilder):
        yield
        return
    os.environ[ARCHITECTURES] = _said_architectures(named)
    try:
        yield
    finally:
        os.environ[ARCHITECTURES] = named


def _compile(stock_load: StockLoad, builder: OpBuilder, op_folder: Path) -> ModuleType:
    """Let DeepSpeed compile one op, visibly; the compiler's lines go to a log beside the folder."""
    op_folder.parent.mkdir(parents=True, exist_ok=True)
    log = op_folder.parent / f"{op_folder.name}.log"
    say(f"compiling the op {builder.name} into {op_folder} (once per machine; log: {log})")
    start = time.monotonic()
    try:
        log.write_text("")
        with architectures_readable(builder), _stdout_into(log), _heartbeat(builder.name, log):
            module = stock_load(builder, True)
    except Exception:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        say(f"the compile of {builder.name} failed; the end of {log}:\n{tail}")
        raise
    say(f"{builder.name} is ready after {time.monotonic() - start:.0f} s")
    return module


_holders_of_turn: list[int] = []  # process ids


def join_turn(holder: int) -> None:
    """Compile from now on in the turn that the process `holder`, which this one was started for, holds until this one ends."""
    _holders_of_turn[:] = [holder]


def _in_turn() -> bool:
    """Whether the turn is still that of the holder: one that was killed holds nothing any more."""
    who = builder_of(cache_folder()) if _holders_of_turn else None
    return who is not None and any(who.startswith(f"process {holder} on ") for holder in _holders_of_turn)


def _turn() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if _in_turn() else build_turn(cache_folder())


def _load(stock_load: StockLoad, builder: OpBuilder, verbose: bool) -> ModuleType:
    """Stand-in for `OpBuilder.jit_load`: the cached library if there is one, else a visible compile."""
    extensions = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    op_folder = extensions / builder.name
    if not is_own_folder():  # we only keep the compile visible
        wait_for_lock(op_folder / "lock")
        with architectures_readable(builder):
            return stock_load(builder, verbose)
    library = ready_library(builder.name)
    if library is None:
        with _turn():
            library = ready_library(builder.name)
            if library is None:
                wait_for_lock(op_folder / "lock")
                library = ready_library(builder.name)  # a process beside this one may have compiled it within this turn
            if library is None:
                start = time.monotonic()
                module = _compile(stock_load, builder, op_folder)
                _record_ready(op_folder / f"{builder.name}.so", time.monotonic() - start)
                return module
    return _import_library(builder.name, library)


# ---------------------------------------------------------------------------------------------------------- activate


def _put_ninja_first() -> None:
    scripts = Path(sys.prefix) / "bin"
    if not (scripts / "ninja").exists():
        import ninja

        scripts = Path(ninja.BIN_DIR)
    rest = [entry for entry in os.environ.get("PATH", "").split(os.pathsep) if entry != str(scripts)]
    os.environ["PATH"] = os.pathsep.join([str(scripts), *rest])


def _choose_folder() -> None:
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    # a folder below our root was inherited from a parent process and may be of another accelerator
    if not named or Path(named).is_relative_to(cache_root()):
        os.environ["TORCH_EXTENSIONS_DIR"] = str(jit_folder())


def set_environment() -> None:
    """The part of `activate()` that child processes inherit; imports no DeepSpeed."""
    _put_ninja_first()
    _choose_folder()
    os.environ.setdefault("MAX_JOBS", "2" if (os.cpu_count() or 1) < 4 else str(min(8, os.cpu_count() or 1)))


def activate() -> None:
    """Load DeepSpeed's ops from the user's cache from now on, compile missing ones visibly, hang on no dead lock.

    Idempotent. Must run before the first op is loaded. A `TORCH_EXTENSIONS_DIR` that the user set is kept.
    """
    set_environment()
    # whoever compiles may do so on another host of a shared home, where nobody here sees it hold its lock
    if builder_of(cache_folder()) is None:
        for lock in Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("*/lock"):
            clear_stale_lock(lock)
    from deepspeed.ops.op_builder.builder import OpBuilder

    if not getattr(OpBuilder.jit_load, "from_ds_vertical", False):
        stock_load = OpBuilder.jit_load

        @functools.wraps(stock_load)
        def jit_load(self: OpBuilder, verbose: bool = True) -> ModuleType:
            return _load(stock_load, self, verbose)

        jit_load.from_ds_vertical = True  # type: ignore[attr-defined]
        OpBuilder.jit_load = jit_load
