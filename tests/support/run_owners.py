"""Processes that own a run's folder on an SSD, and lock files as others leave them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from places import ROOT

from ds_vertical.engine.checkpoint.parts import PARTS_MARK

# Claims argv[1] / argv[2] as rank argv[3], says so, then does argv[4] when told to by a line on stdin.
OWNER = """
import os, signal, sys
from pathlib import Path
from ds_vertical.io.runs.run_dir import RunFolder
from ds_vertical.errors import StorageError
try:
    folder = RunFolder.claim(sys.argv[1], sys.argv[2], int(sys.argv[3]))
except StorageError as error:
    print("refused", error, flush=True)
    sys.exit(3)
(folder.path / f"swap{sys.argv[3]}").write_bytes(b"x" * 100)
print("claimed", os.getpid(), flush=True)
sys.stdin.readline()
if sys.argv[4] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[4] == "raise":
    raise RuntimeError("boom")
if sys.argv[4] == "fork":
    child = os.fork()
    if child == 0:
        folder.release()
        sys.exit(0)
    os.waitpid(child, 0)
    print("kept" if (folder.path / f"swap{sys.argv[3]}").exists() else "lost", flush=True)
    sys.stdin.readline()
if sys.argv[4] == "orphan":
    if os.fork() == 0:
        os.close(1)
        signal.alarm(60)
        os.read(int(sys.argv[5]), 1)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
"""


class Job:
    """A claiming process of its own."""

    def __init__(self, root: Path, run_id: str, rank: int, then: str = "exit", pass_fd: int | None = None) -> None:
        command = [sys.executable, "-c", OWNER, str(root), run_id, str(rank), then, str(pass_fd)]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=() if pass_fd is None else (pass_fd,),
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline().strip()

    def proceed(self) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def finish(self) -> int:
        _, self.errors = self.process.communicate("\n", timeout=200)
        return self.process.returncode


@contextlib.contextmanager
def jobs() -> Iterator[Callable[..., Job]]:
    """Starts jobs; those that are still there at the end are killed."""
    all_started: list[Job] = []

    def start(*arguments: Any, **keywords: Any) -> Job:
        all_started.append(Job(*arguments, **keywords))
        return all_started[-1]

    yield start
    for started in all_started:
        if started.process.poll() is None:
            started.process.kill()
        started.process.wait(timeout=200)
        for stream in (started.process.stdin, started.process.stdout, started.process.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def write_lock(folder: Path, is_earlier: bool = False, **changes: Any) -> Path:
    """Make a folder with the lock of a gone rank in it. `is_earlier`: as versions wrote it that did not write the run's id."""
    folder.mkdir(mode=0o700)
    told = {} if is_earlier else {"written_by": "ds_vertical", "run": folder.name}
    entry = {"pid": 1, "host": os.uname().nodename, "rank": 0, "start_ticks": 1, "since": "then"} | told | changes
    (folder / "rank0.lock").write_text(json.dumps(entry))
    return folder


def digest(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder, by its path there: a file's bytes, None for what is no file."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() and not path.is_symlink() else None
        for path in sorted(folder.rglob("*"))
    }


def mark_parts(home: Path, tag: Path, token: str) -> None:
    """Let a folder of parts say that they are of the checkpoint `tag`, made by a save with this token."""
    told = {"written_by": "ds_vertical", "run": "20260131-235959-node7-1f2e3d4c", "checkpoint": str(tag), "token": token}
    (home / PARTS_MARK).write_text(json.dumps(told))
