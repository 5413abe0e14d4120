"""What trains within how much host memory, and what the kernel kills: a model that is larger than all of it, on SSD.

    python benchmarks/beyond_memory.py [--allowed least,6G,10G,16G] [--stock 7G,14G] [--steps 3] [--micro-batches 4]
        [--tokens 8] [--clip 0] [--before COMMIT]

The model is a Llama of 24 layers x 2048 with an untied vocabulary of 32,000: 1.36 billion parameters, whose bf16 weights and
fp32 optimizer state take 19 GB. Each run is a process of `scripts/train.py` in a memory control group of its own, which may not
take more than is allowed (with its page cache). The vertical arm is told so, as `host_memory_bytes`; DeepSpeed knows no such
key. "least" is what the engine's own refusal of too little names. Writes benchmarks/beyond_memory/DATE.json when all runs have
ended: how each ended, every step, the peak of the group, and the end of the log where it did not train. Needs root, as a rule,
40 GB of the SSD, and nothing else may run on the machine.

Keys of the section may follow a number of bytes: `least:optimizer_compression=true`, `16G:optimizer_host_share=0.6`.
`--before`: the vertical arm of an older commit (or of a checkout's folder) trains as well, first and last, with nothing but
`--whole` to limit its memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import inturn
import portable
from commits import checked_out, describe, made_of

from ds_vertical.cli.common import parse_bytes
from ds_vertical.config.section import SECTION
from ds_vertical.engine.metrics import METRICS_VARIABLE

DIMS: Final = {  # of a Llama
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
BUFFERS: Final = 8  # of offload_param, in both arms: stock holds the seven matrices of a block
LEAST: Final = "least"
TOO_LITTLE: Final = 1  # host_memory_bytes with which the engine says how much it needs
LOG_LINES: Final = 30
LIMIT_S: Final = 1500
_ADVISED: Final = re.compile(rf'"{SECTION}\.host_memory_bytes": (\d+)')
_ENTER: Final = 'echo $$ > "$0" && exec "$@"'  # the shell moves itself, then becomes the command
_REMOVAL_S: Final = 10.0


class NoGroupError(OSError):
    """This machine lets nobody limit the memory of a group of processes."""


@dataclass(frozen=True)
class MemoryGroup:
    """A control group whose processes may take so much memory together. `version`: of the kernel's interface, 1 or 2."""

    folder: Path
    version: int

    def wrap(self, command: Sequence[str]) -> list[str]:
        """The command that runs `command` inside the group."""
        return ["/bin/sh", "-c", _ENTER, str(self.folder / "cgroup.procs"), *command]

    def peak_bytes(self) -> int | None:
        """The most that its processes have taken together, with their page cache; None where the kernel does not say."""
        path = self.folder / ("memory.max_usage_in_bytes" if self.version == 1 else "memory.peak")
        return int(path.read_text()) if path.exists() else None

    def num_kills(self) -> int:
        """Processes that the kernel has killed, since the group was full."""
        text = (self.folder / ("memory.oom_control" if self.version == 1 else "memory.events")).read_text()
        return int(dict(line.split() for line in text.splitlines())["oom_kill"])


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """A group for as long as the block runs. Raises NoGroupError."""
    parent, version = _parent()
    group = MemoryGroup(parent / f"ds_vertical_memory.{os.getpid()}", version)
    try:
        group.folder.mkdir()
        if version == 1:
            (group.folder / "memory.limit_in_bytes").write_text(str(limit_bytes))
            swap = group.folder / "memory.memsw.limit_in_bytes"  # absent where the kernel does not count swap
        else:
            (group.folder / "memory.max").write_text(str(limit_bytes))
            swap = group.folder / "memory.swap.max"
        if swap.exists():
            swap.write_text(str(limit_bytes if version == 1 else 0))
        yield group
    except PermissionError as error:
        raise NoGroupError(f"{error}; run as root on a machine with the cgroup controller memory") from error
    finally:
        _remove(group.folder)


def _parent() -> tuple[Path, int]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mount, (kind, _, options) = Path(before.split()[4]), after.split()[:3]
        if kind == "cgroup" and "memory" in options.split(","):
            return mount, 1
        if kind == "cgroup2" and "memory" in (mount / "cgroup.subtree_control").read_text().split():
            return mount, 2
    raise NoGroupError("no cgroup file system with the controller memory is mounted")


def _remove(folder: Path) -> None:
    """Its processes have ended, but the kernel may take a moment to let go of them."""
    deadline = time.monotonic() + _REMOVAL_S
    while folder.exists():
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def config_of(options: argparse.Namespace, vertical: bool, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of a run. `keys`: of the vertical arm's section."""
    arms = inturn.arms(options)
    arm = arms.vertical if vertical else arms.stock
    zero, hidden = arm["zero_optimization"], options.dims["hidden_size"]
    largest = hidden * max(options.dims["vocab_size"], options.dims["intermediate_size"])
    zero |= {"offload_param": zero["offload_param"] | {"buffer_count": BUFFERS, "buffer_size": largest}}
    section = arm.get(SECTION, {}) | (keys if vertical else {})
    return {**arm, "zero_optimization": zero, SECTION: section}


def run_one(options: argparse.Namespace, vertical: bool, limit: int, **keys: Any) -> dict[str, Any]:
    """One process in a group that may take `limit` bytes: how it ended, and its steps. `keys`: of the vertical arm's section,
    `host_memory_bytes` is `limit` where it is not among them."""
    return _run(options, vertical, limit, {"host_memory_bytes": limit} | keys, inturn.ROOT)


def _run(options: argparse.Namespace, vertical: bool, limit: int, keys: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """`root`: of the checkout that trains."""
    config = config_of(options, vertical, keys)
    with inturn.scratch_folder(options, config) as folder, memory_group(limit) as group:
        (folder / "nvme").mkdir()
        (folder / "config.json").write_text(json.dumps(inturn.placed(config, str(folder / "nvme"))))
        words = ["--deepspeed_config", str(folder / "config.json"), "--model", "llama"]
        words += ["--dims", *(f"{key}={json.dumps(value)}" for key, value in options.dims.items())]
        words += ["--steps", str(options.steps), "--seq", str(options.tokens), "--out", str(folder / "out")]
        command = group.wrap([sys.executable, str(root / "scripts" / "train.py"), *words])
        status, log = _ended(command, folder, root)
        metrics = folder / "metrics" / "rank0.jsonl"
        steps = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        kills, peak = group.num_kills(), group.peak_bytes()
    ended = "killed" if kills else "trained" if status == 0 else "refused" if "MemoryBudgetError" in log else "failed"
    found = {"arm": "vertical" if vertical else "stock", "allowed_bytes": limit, "ended": ended, "status": status}
    found |= {"section": keys} if vertical else {}
    found |= {"group_peak_bytes": peak, "steps": steps}
    return found | {"budget": budget_of(log)} | ({} if ended == "trained" else {"log": log.splitlines()[-LOG_LINES:]})


def _ended(command: Sequence[str], folder: Path, root: Path) -> tuple[int, str]:
    """The exit status of a training process that has ended, and what it has printed."""
    own = {METRICS_VARIABLE: str(folder / "metrics"), "PYTHONPATH": str(root)}
    log = folder / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen(command, cwd=folder, env=inturn.environment() | own, stdout=sink, stderr=subprocess.STDOUT)
        try:
            status = process.wait(LIMIT_S)
        finally:
            process.kill()
            process.wait()
    return status, log.read_text(errors="replace")


def budget_of(log: str) -> list[str]:
    """The lines of the table of memory that the engine prints, if it has."""
    lines = log.splitlines()
    first = next((n for n, line in enumerate(lines) if "memory of this rank" in line), None)
    if first is None:
        return []
    last = next((n for n, line in enumerate(lines[first:], first) if re.match(r".*host\s+total", line)), first)
    return lines[first : last + 1]


def least_bytes(options: argparse.Namespace, **keys: Any) -> int:
    """What the engine's refusal of too little memory says that it needs, with these keys of the section. Raises RuntimeError
    where it refuses nothing."""
    found = run_one(options, True, options.whole, host_memory_bytes=TOO_LITTLE, **keys)
    advised = _ADVISED.search("\n".join(found.get("log", [])))
    if advised is None:
        raise RuntimeError("\n".join([f"no refusal that names a number ({found['ended']}):", *found.get("log", [])]))
    return int(advised[1])


def keys_of(text: str) -> dict[str, Any]:
    """The section's keys of "KEY=VALUE:KEY=VALUE", each value in JSON. Raises SystemExit for anything else."""
    found = {}
    for word in filter(None, text.split(":")):
        key, given, value = word.partition("=")
        if not given or key == "host_memory_bytes":
            raise SystemExit(f"--allowed {text!r}: write KEY=VALUE behind a number of bytes, which is host_memory_bytes itself")
        found[key] = json.loads(value)
    return found


def run_before(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The run of the older commit that `--before` names; [] without."""
    if options.before is None:
        return []
    with tempfile.TemporaryDirectory() as scratch, checked_out(options.before, Path(scratch) / "checkout") as root:
        found = _run(options, True, options.whole, {}, root) | {"checkout": describe(root)}
    print(told(found), flush=True)
    return [found]


def figures(found: Mapping[str, Any]) -> dict[str, Any]:
    """The medians of a run's steps without the first; {} where there are none."""
    steps = found["steps"][1:] or found["steps"]
    names = ("step_s", "read_bytes", "write_bytes", "peak_host_bytes")
    return {name: median(step[name] for step in steps) for name in names} if steps else {}


def told(found: Mapping[str, Any]) -> str:
    """A run in one line."""
    who = f"{found['checkout']['commit']}, " if "checkout" in found else ""
    made, allowed = figures(found), f"{who}{found['arm']}, {found['allowed_bytes'] / 1e9:.2f} GB allowed: {found['ended']}"
    if not made:
        return allowed
    moved = f"{made['read_bytes'] / 1e9:.2f} GB read, {made['write_bytes'] / 1e9:.2f} GB written"
    peak = f"resident {made['peak_host_bytes'] / 1e9:.2f} GB at most"
    return f"{allowed}, {len(found['steps'])} steps, {made['step_s']:.2f} s a step, {moved}, {peak}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all, one after the other, and writes the record. Returns 1 where a run of the vertical arm did not train, or has
    other losses than the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    inturn.add_options(parser)
    parser.set_defaults(micro_batches=4)
    parser.add_argument("--allowed", default=f"{LEAST},6G,10G,16G", help="BYTES[:KEY=VALUE]... of the vertical arm's groups")
    parser.add_argument("--stock", default="7G,14G", help="bytes of the stock arm's groups; empty: none")
    parser.add_argument("--steps", type=int, default=3, help="of each run; the first does not count")
    parser.add_argument("--dims", type=lambda text: DIMS | json.loads(text), default=DIMS, help="others, as a JSON object")
    parser.add_argument("--whole", type=parse_bytes, default=parse_bytes("20G"), help="of the group that finds the least")
    parser.add_argument("--before", metavar="COMMIT", help="an older commit, or a checkout's folder, that trains as well")
    options = parser.parse_args(argv)
    runs = run_before(options)
    given = [(True, text) for text in filter(None, options.allowed.split(","))]
    for vertical, text in given + [(False, text) for text in filter(None, options.stock.split(","))]:
        size, _, words = text.partition(":")
        keys = keys_of(words)
        limit = least_bytes(options, **keys) if size == LEAST else parse_bytes(size)
        runs.append(run_one(options, vertical, limit, **keys))
        print(told(runs[-1]), flush=True)
    runs += run_before(options)
    content: dict[str, Any] = made_of() | {"checkout": describe(inturn.ROOT)}
    content |= {key: getattr(options, key) for key in ("dims", "micro_batches", "tokens", "clip", "steps")}
    content["runs"] = [{**found, "median": figures(found)} for found in runs]
    target = inturn.ROOT / "benchmarks" / "beyond_memory" / f"{content['date'][:10]}.json"
    portable.write(target, content, inturn.ROOT / "runs" / "beyond_memory", "beyond_memory")
    ours = [found for found in runs if found["arm"] == "vertical"]
    losses = {tuple(step["loss"] for step in found["steps"]) for found in ours}
    print(f"losses {'equal' if len(losses) == 1 else 'DIFFERENT'}; written: {target}")
    return 0 if len(losses) == 1 and all(found["ended"] == "trained" for found in ours) else 1


if __name__ == "__main__":
    sys.exit(main())
