"""What a measurement was made on: processor, memory, accelerator and the versions of packages, for its report."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from ds_vertical.cli.common import JsonObject
from ds_vertical.config.section import SECTION

_LIMIT_S: Final = 300
_MARK: Final = "ds_vertical process: "  # ahead of what the process says: libraries write to its output, too
_TELL: Final = "import sys; from ds_vertical.cli.bench.machine_info import tell_process_bytes; tell_process_bytes(sys.argv[1])"
_TINY: Final = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 64,
}


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


def process_rate() -> dict[str, float]:
    """`process_bytes` as one of a report's rates; none, and a line on stderr, where that cannot be measured."""
    try:
        return {"process_bytes": process_bytes()}
    except OSError as error:
        print(f"ds-vertical limits: plans will assume what a process holds in host memory: {error}", file=sys.stderr)
        return {}


def process_bytes() -> int:
    """Host memory that a process holds once it has come to `initialize`, beside its model: a process of its own tells. Raises
    OSError where it cannot."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with tempfile.TemporaryDirectory(prefix="ds_vertical.limits.") as folder:
        command = [sys.executable, "-c", _TELL, folder]
        try:
            done = subprocess.run(command, env=os.environ | alone, capture_output=True, text=True, timeout=_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise OSError(f"a process that imports what training needs took more than {_LIMIT_S} s") from error
    said = [line.removeprefix(_MARK) for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode or not said:
        raise OSError(f"a process that imports what training needs has ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return int(said[0])


def tell_process_bytes(folder: str) -> None:
    """Print the bytes that this process holds once it has done what a script does ahead of `initialize`, also one that trains
    by Hugging Face's Trainer. `folder`: for the run's files, of which it makes none."""
    import torch

    from ds_vertical.engine.api import prepare
    from ds_vertical.engine.budget.room import host_room

    config: JsonObject = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": folder}},
        SECTION: {},
    }
    prepare(config)
    parameters = [torch.zeros(1, device=accelerator(), requires_grad=True)]
    if importlib.util.find_spec("transformers") is not None:
        from transformers import Trainer  # noqa: F401  # what it imports

        from ds_vertical.model.hf import build_model

        parameters += build_model("tiny", {"model_type": "llama", **_TINY}, lambda config: None).parameters()
    print(f"\n{_MARK}{host_room(map(torch.nn.Parameter, parameters), None)[1]}", flush=True)


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
