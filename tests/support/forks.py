"""Processes that have DeepSpeed imported when they begin: forks of one that does nothing else.

A process that makes an engine computes for six seconds until all is imported, which is more than most ranks of a test compute
afterwards. Here the imports are made once in each process of pytest. A fork has its own memory, pid and environment, and ends
as other processes do.

What it shares with the other forks is the seed of Python's hashes. What a process reads from its environment while it imports
torch and DeepSpeed is as it was when the first one was started. Tests of either start processes of their own.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any


class Server:
    """The process that forks. It ends with the one that has started it, and its forks with it."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).resolve())]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        atexit.register(self._end)

    def ask(self, what: str, of: object) -> Any:
        """Its answer; the questions are `answers`'."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, of]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the server has ended; what it has said stands above"
        return json.loads(answer)

    def _end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@functools.cache
def server() -> Server:
    """This process's own."""
    return Server()


class Fork:
    """A process that is under way, with what `subprocess.Popen` has."""

    def __init__(self, command: Sequence[str], cwd: Path, env: Mapping[str, str], out: Path, err: Path) -> None:
        """`command`: `sys.executable` with a script, or with `-c` or `-m`; its output goes to files, which may be one."""
        interpreter, *argv = command
        assert interpreter == sys.executable
        job = {"argv": argv, "cwd": str(cwd), "env": dict(env), "out": str(out), "err": str(err)}
        self.pid: int = server().ask("start", job)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = server().ask("poll", self.pid)
        return self.returncode

    def kill(self) -> None:
        server().ask("kill", self.pid)

    def wait(self, timeout: float | None = None) -> int:
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0.0)
            time.sleep(0.05)
        return code


def run(folder: Path, command: Sequence[str], env: Mapping[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` in `folder`, with the output as text."""
    out, err = folder / "fork.out", folder / "fork.err"
    fork = Fork(command, folder, env, out, err)
    try:
        code = fork.wait(timeout)
    finally:
        fork.kill()
    return subprocess.CompletedProcess(command, code, out.read_text(), err.read_text())


# ------------------------------------------------------------------------------------------------------------- the server


def answers(out: IO[str]) -> dict[str, Any] | None:
    """Answers until the other end is closed. In a fork: what it has been started for."""
    under_way: set[int] = set()
    while line := sys.stdin.readline():
        what, of = json.loads(line)
        answer = None
        if what == "start":
            sys.stdout.flush()  # or the fork would say it once more
            answer = os.fork()
            if answer == 0:
                out.close()
                return of
            under_way.add(answer)
        elif of in under_way and what == "kill":
            os.kill(of, signal.SIGKILL)
        elif of in under_way:
            pid, status = os.waitpid(of, os.WNOHANG)
            under_way -= {pid}
            answer = os.waitstatus_to_exitcode(status) if pid else None
        print(json.dumps(answer), file=out, flush=True)
    for pid in under_way:
        os.kill(pid, signal.SIGKILL)
    return None


def begin(job: dict[str, Any]) -> None:
    """From here on this process is one that Python has just started with the job's command line."""
    for number, name, flags in ((0, os.devnull, os.O_RDONLY), (1, job["out"], os.O_WRONLY), (2, job["err"], os.O_WRONLY)):
        opened = os.open(name, flags | (os.O_CREAT | os.O_APPEND if number else 0), 0o644)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    name, *rest = job["argv"]
    main = sys.modules["__main__"] = ModuleType("__main__")
    if name == "-m":
        sys.argv, sys.path[0] = rest, job["cwd"]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    text = rest.pop(0) if name == "-c" else Path(name).read_text()
    sys.argv, sys.path[0] = [name, *rest], "" if name == "-c" else str(Path(name).resolve().parent)
    if name != "-c":
        main.__file__ = name
    exec(compile(text, "<string>" if name == "-c" else name, "exec", dont_inherit=True), vars(main))


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed prints while it is imported
    import torch._dynamo  # noqa: F401
    from deepspeed.runtime.zero.muon import muon_optimizer  # noqa: F401  # every engine imports it, and the inductor with it

    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: a fork would have one of them"
    gc.collect()
    gc.freeze()  # what is there is never looked at again, and so stays shared
    job = answers(out)
    if job is not None:
        begin(job)


if __name__ == "__main__":
    main()
