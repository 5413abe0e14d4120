"""Checks of what is installed: versions, DeepSpeed's internals, ninja, the environment, compile locks, ops.

Each is a function that takes a Target and yields CheckResults; `doctor.command` has the table. They run in a worker
(`doctor.worker`), so that torch and deepspeed are imported only where a check needs them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ds_vertical.cli.common import first_line
from ds_vertical.cli.doctor.check import CheckResult, Target, error, ok, split_fault, warning
from ds_vertical.compat.ops import build_lock, cache

_DISTRIBUTION: Final = "ds-vertical"
_EXTRAS: Final = ("hf", "plot", "plan")
_BUILD: Final = "ds-vertical build-ops"

# ---- versions


def supported_versions(case: Target) -> Iterator[CheckResult]:
    """Compares the versions of Python and the packages with those that this package declares."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    try:
        meta = importlib.metadata.metadata(_DISTRIBUTION)
        lines = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        yield warning(f"{_DISTRIBUTION} is not installed as a package, so its requirements are unknown", "pip install -e .")
        return
    python, wanted = platform.python_version(), meta["Requires-Python"] or ""
    if not SpecifierSet(wanted).contains(python):
        yield error(f"python {python}; {_DISTRIBUTION} needs {wanted}", f"python3.11 -m venv .venv  # any {wanted}")
    present = [f"python {python}"]
    for line in lines:
        requirement = Requirement(line)
        needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if not needed and not any(requirement.marker.evaluate({"extra": extra}) for extra in _EXTRAS):  # pyright: ignore
            continue
        installed = _version(requirement.name)
        pip = f"pip install '{requirement.name}{requirement.specifier}'"
        if installed is None and needed:
            yield error(f"{requirement.name} is not installed; needs {requirement.specifier or 'any version'}", pip)
        elif installed is not None and not requirement.specifier.contains(installed.split("+")[0], prereleases=True):
            severity = error if needed else warning
            yield severity(f"{requirement.name} {installed}; {_DISTRIBUTION} needs {requirement.specifier}", pip)
        elif installed is not None:
            present.append(f"{requirement.name} {installed}")
    yield ok(", ".join(present))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def internals(case: Target) -> Iterator[CheckResult]:
    """Compares DeepSpeed's internals with those that `compat` knows: importing `compat` does that."""
    try:
        from ds_vertical.compat import version
    except ImportError as failure:
        if type(failure).__name__ != "DeepSpeedVersionError":
            raise
        yield error(*split_fault(str(failure)))
        return
    yield ok(f"deepspeed {version.SUPPORTED}: all {version.NUM_CHECKED} members in use are those that are known")


# ---- environment


def ninja(case: Target) -> Iterator[CheckResult]:
    """Finds the ninjas on PATH: two of different versions rebuild each other's ops in torch's cache."""
    found = _programs("ninja")
    own = Path(sys.prefix) / "bin" / "ninja"
    first = f"export PATH={own.parent}:$PATH"
    if not found and not own.exists() and importlib.util.find_spec("ninja") is None:
        yield error("there is no ninja: no op can be compiled", "pip install ninja")
    elif not found:
        yield warning("ninja is not on PATH: stock DeepSpeed cannot load its ops (ds_vertical finds its own)", first)
    else:
        told = [f"{path} ({_told(path, '--version')})" for path in found]
        if len({_told(path, "--version") for path in found}) == 1:
            yield ok(f"ninja: {told[0]}")
        elif own.exists() and own.samefile(found[0]):
            yield ok(f"ninja: {told[0]} stands before {', '.join(told[1:])}")
        else:
            why = "rebuild each other's ops, for minutes, wherever PATH has another order"
            yield warning(f"ninjas of different versions on PATH: {', '.join(told)}; they {why}", first)


def _programs(name: str) -> list[Path]:
    """Every program of that name on PATH, in its order; the same file twice (/bin is /usr/bin) counts once."""
    found: list[Path] = []
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        path = Path(folder or ".", name)
        if path.is_file() and os.access(path, os.X_OK) and not any(path.samefile(other) for other in found):
            found.append(path)
    return found


def _told(path: Path, option: str) -> str:
    try:
        done = subprocess.run([path, option], capture_output=True, text=True, check=False, timeout=20)
        return done.stdout.strip().partition("\n")[0] or f"exit status {done.returncode}"
    except (OSError, subprocess.TimeoutExpired) as failure:
        return first_line(failure)


def environment(case: Target) -> Iterator[CheckResult]:
    """Finds variables of the environment that change a run without a word."""
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR")
    if extensions and not Path(extensions).is_relative_to(cache.cache_root()):
        yield warning(
            f"TORCH_EXTENSIONS_DIR is {extensions}: ops are compiled there, not taken from {cache.cache_root()}",
            "unset TORCH_EXTENSIONS_DIR",
        )
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks != "1":
        yield warning(
            f"WORLD_SIZE is {ranks} in this shell: a run without the launcher waits for ranks that never come",
            "unset RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT",
        )
    threads, cores = os.environ.get("OMP_NUM_THREADS", ""), len(os.sched_getaffinity(0))
    if threads.isdigit() and 0 < int(threads) < cores:
        what = f"OMP_NUM_THREADS is {threads}: computation on the host uses {threads} of {cores} cores"
        yield warning(what, "unset OMP_NUM_THREADS")
    root = cache.cache_root()
    there = next(folder for folder in (root, *root.parents) if folder.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        yield warning(f"{there} cannot be written: no op can be compiled into {root}", "export DS_VERTICAL_CACHE=FOLDER")


def compile_locks(case: Target) -> Iterator[CheckResult]:
    """Finds locks of compiles in this cache and in torch's: live ones, and stale ones, which hold up all others."""
    # before anything imports DeepSpeed through `compat`, which clears stale ones in the folder that it uses
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR")
    places = [(cache.cache_root(), "*/jit-*/*/lock"), (Path(caches).expanduser() / "torch_extensions", "*/*/lock")]
    places += [(Path(extensions), "*/lock")] if extensions else []
    locks = {lock.resolve() for root, pattern in places for lock in root.glob(pattern)}
    for lock in sorted(locks):
        holders = build_lock.holders(lock)
        if holders or not build_lock.is_stale(lock):
            who = ", ".join(map(str, holders)) or "that has just ended"
            yield warning(f"{lock}: process {who} compiles {lock.parent.name}", "wait for it; a killed compile starts over")
        else:
            yield warning(f"{lock}: stale, its compile is dead, and stock DeepSpeed waits for it for ever", f"rm {lock}")
    for folder in sorted(cache.cache_root().glob("*")):
        builder = build_lock.builder(folder)
        if builder is not None:
            yield warning(f"{folder}: {builder} compiles ops; runs that need one wait for it", "wait for it")
    if not locks:
        yield ok("no op is being compiled, no lock is left over")


# ---- ops


def ops(case: Target) -> Iterator[CheckResult]:
    """Checks that every op of a run is in the cache and loads, and that CPU Adam steps a tensor right. Compiles nothing."""
    from ds_vertical.compat.ops import load

    cache.activate()
    if not cache.is_own_folder():
        yield warning("the ops lie in TORCH_EXTENSIONS_DIR, where only a compile shows what is current: not tried", _BUILD)
        return
    needed = load.needed_ops()
    missing = [name for name in needed if cache.ready_library(name) is None]
    if missing:
        names = ", ".join(missing)
        yield warning(f"{len(missing)} of {len(needed)} ops are not compiled, so that a run that needs one starts with that: {names}", _BUILD)
        yield from _toolchain()
    loaded = []
    for name in (name for name in needed if name not in missing):
        try:
            needed[name]().load(verbose=False)
            loaded.append(name)
        except (ImportError, OSError) as failure:
            yield error(f"the op {name} does not load: {first_line(failure)}", f"{_BUILD} --force")
    if load.FREE_ADAM.build_name in loaded:
        yield from _adam_step()
    if loaded:
        yield ok(f"loaded from {cache.cache_folder()}: {', '.join(loaded)}")


def _toolchain() -> Iterator[CheckResult]:
    """What a compile would miss."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        yield error(f"there is no C++ compiler ({compiler})", "apt-get install g++")
        return
    program = [compiler, "-E", "-x", "c++", "-"]
    done = subprocess.run(program, input="#include <libaio.h>\n", capture_output=True, text=True, check=False)
    if done.returncode != 0:
        yield error("libaio's headers are missing: async_io and our own queue cannot be compiled", "apt-get install libaio-dev")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        yield error("Python's headers are missing: no op can be compiled", "apt-get install python3-dev")
    if cache.accelerator_name() == "cuda" and shutil.which("nvcc") is None and not os.environ.get("CUDA_HOME"):
        yield error("there is no nvcc: ops for CUDA cannot be compiled", "export CUDA_HOME=/usr/local/cuda")


def _adam_step() -> Iterator[CheckResult]:
    """One step on ones: whatever the vector width, Adam's first step moves by lr against the gradient's sign."""
    import torch

    from ds_vertical.compat.ops import load

    numel, kernel, kernel_id = 1027, load.free_adam(), 1 << 22  # not a multiple of any vector
    tensors = [torch.ones(numel), torch.full((numel,), 2.0), torch.zeros(numel), torch.zeros(numel)]
    kernel.create_adam(kernel_id, 0.125, 0.9, 0.999, 1e-8, 0.0, True, False)
    try:
        kernel.adam_update(kernel_id, 1, 0.125, 0.9, 0.999, 1e-8, 0.0, True, *tensors)
    finally:
        kernel.destroy_adam(kernel_id)
    distance = (tensors[0] - 0.875).abs().max().item()
    if not distance < 1e-5:
        yield error(f"CPU Adam computes wrongly: a step that ends at 0.875 is off by {distance:g}", f"{_BUILD} --force")
