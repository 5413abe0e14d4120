"""What a measurement was made on: processor, memory, accelerator and the versions of packages, for its report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path


def accelerator() -> str:
    """The accelerator that runs will use; DeepSpeed's own choice unless DS_ACCELERATOR says otherwise."""
    from ds_vertical.compat.accelerator import get_accelerator

    return os.environ.get("DS_ACCELERATOR") or get_accelerator().device_name()


def describe_machine() -> dict[str, object]:
    """JSON fields of this machine; the load average says whether others used it at the same time."""
    import torch

    from ds_vertical.io import streams

    cpu = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = next(line.split()[1] for line in _lines("/proc/meminfo") if line.startswith("MemTotal"))
    name = accelerator()
    return {
        "accelerator": name,
        "device": name if name == "cpu" else streams.module_of(torch.device(name)).get_device_name(0),
        "cpu": cpu[0] if cpu else platform.processor(),
        "num_cores": os.cpu_count(),
        "host_bytes": 1024 * int(memory),
        "kernel": platform.release(),
        "load_average_at_end": list(os.getloadavg()),
    }


def versions() -> dict[str, str | None]:
    """Versions of Python and the packages; None for one that is not installed. `commit`: of this checkout, if it is one."""
    packages = ("torch", "deepspeed", "transformers", "ds-vertical")
    found = {name: _version(name) for name in packages}
    return found | {"commit": _commit(Path(__file__).parents[3]), "python": platform.python_version()}


def _commit(checkout: Path) -> str | None:
    """With `-dirty` where files differ from it, but for those of results, which a measurement writes."""
    if not (checkout / ".git").exists() or shutil.which("git") is None:
        return None

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(checkout), *words], capture_output=True, text=True).stdout.strip()

    commit = git("rev-parse", "--verify", "--quiet", "--short=12", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)benchmarks")
    return f"{commit}-dirty" if commit and changed else commit or None


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
