"""Processes that have DeepSpeed imported when they begin: forks of one that does nothing else.

A process that makes an engine computes for six seconds until all is imported, which is more than most ranks of a test compute
afterwards. Here the imports are made once in each process of pytest. A fork has its own memory, pid and environment, and ends
as other processes do.

Those that make engines of ours (`engine`) are forks of a fork that has imported ds_vertical, too, which is another second, and
knows what processor this is, which DeepSpeed asks a process of its own. Others find DeepSpeed without any trace of ds_vertical.

What it shares with the other forks is the seed of Python's hashes. What a process reads from its environment while it imports
torch, DeepSpeed and ds_vertical is as it was when the first one was started. Tests of these start processes of their own.
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
    """The process that forks. It ends with the one that has started it, and its forks with it. `command`: starts this file as a
    script, on this machine unless it is given."""

    def __init__(self, command: Sequence[str] = (sys.executable, str(Path(__file__).resolve()))) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        atexit.register(self.end)

    def ask(self, what: str, of: object) -> Any:
        """Its answer; the questions are `answers`'."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, of]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the server has ended; what it has said stands above"
        return json.loads(answer)

    def end(self) -> None:
        """End the process, and with it its forks. Called again it does nothing."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@functools.cache
def server() -> Server:
    """This process's own."""
    return Server()


def job_of(
    command: Sequence[str], cwd: Path, env: Mapping[str, str], outputs: tuple[Path, Path], engine: bool
) -> dict[str, object]:
    """What a server is asked to start: see `Fork`."""
    interpreter, *argv = command
    assert interpreter == sys.executable
    out, err = map(str, outputs)
    return {"argv": argv, "cwd": str(cwd), "env": dict(env), "out": out, "err": err, "engine": engine}


class Fork:
    """A process that is under way, with what `subprocess.Popen` has."""

    def __init__(
        self, command: Sequence[str], cwd: Path, env: Mapping[str, str], outputs: tuple[Path, Path], engine: bool = False
    ) -> None:
        """`command`: `sys.executable` with a script, or with `-c` or `-m`. `outputs`: the files of stdout and stderr, which may
        be one. `engine`: whether it makes engines of ours."""
        self.pid: int = server().ask("start", job_of(command, cwd, env, outputs, engine))
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


def run(
    folder: Path, command: Sequence[str], env: Mapping[str, str], timeout: float, engine: bool = False
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` in `folder`, with the output as text."""
    out, err = folder / "fork.out", folder / "fork.err"
    fork = Fork(command, folder, env, (out, err), engine)
    try:
        code = fork.wait(timeout)
    finally:
        fork.kill()
    return subprocess.CompletedProcess(command, code, out.read_text(), err.read_text())


# ------------------------------------------------------------------------------------------------------------- the server


class Forks:
    """The forks of this process."""

    def __init__(self) -> None:
        self._under_way: set[int] = set()

    def start(self) -> int:
        """The fork's pid; 0 in the fork."""
        sys.stdout.flush()  # or the fork would say it once more
        pid = os.fork()
        if pid:
            self._under_way.add(pid)
        return pid

    def answer(self, what: str, pid: int) -> int | None:
        """To "poll", an exit status; "kill" has none."""
        if pid not in self._under_way:
            return None
        if what == "kill":
            os.kill(pid, signal.SIGKILL)
            return None
        ended, status = os.waitpid(pid, os.WNOHANG)
        self._under_way -= {ended}
        return os.waitstatus_to_exitcode(status) if ended else None

    def end(self) -> None:
        for pid in self._under_way:
            os.kill(pid, signal.SIGKILL)


class Branch:
    """A fork of the server that forks, too: a pipe to it, or, in that fork, to the server."""

    def __init__(self) -> None:
        questions, answers = os.pipe(), os.pipe()
        self.pid = os.fork()
        used = (answers[0], questions[1]) if self.pid else (questions[0], answers[1])
        for each in {*questions, *answers} - {*used}:
            os.close(each)
        self.heard, self.told = os.fdopen(used[0]), os.fdopen(used[1], "w")
        self.forks: set[int] = set()

    def ask(self, line: str) -> Any:
        self.told.write(line)
        self.told.flush()
        return json.loads(self.heard.readline())

    def close(self) -> None:
        self.told.close()
        self.heard.close()


def answers(questions: IO[str], out: IO[str], engines: bool = False) -> dict[str, Any] | None:
    """Answers until the other end is closed. In a fork: what it has been started for. `engines`: what these need is there."""
    forks, branch = Forks(), None
    while line := questions.readline():
        what, of = json.loads(line)
        if what != "start":
            answer = branch.ask(line) if branch is not None and of in branch.forks else forks.answer(what, of)
        elif of["engine"] and not engines:
            branch = branch or Branch()
            if branch.pid == 0:
                out.close()
                import_for_engines()
                return answers(branch.heard, branch.told, engines=True)
            answer = branch.ask(line)
            branch.forks.add(answer)
        elif not (answer := forks.start()):
            for each in (out, branch) if branch is not None else (out,):
                each.close()
            return of
        print(json.dumps(answer), file=out, flush=True)
    forks.end()
    if branch is not None:
        branch.close()
        os.waitpid(branch.pid, 0)
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


def share_what_is_there() -> None:
    """What has been imported is never looked at again, and so stays one with the forks'."""
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: a fork would have one of them"
    gc.collect()
    gc.freeze()


def import_for_engines() -> None:
    """What a first engine of ours imports, and what it asks of the processor."""
    import deepspeed.module_inject.auto_ep_layer
    import deepspeed.runtime.superoffload.superoffload_stage3  # noqa: F401
    import harness

    import ds_vertical

    assert ds_vertical.initialize
    harness.cpuinfo.get_cpu_info()
    share_what_is_there()


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed prints while it is imported
    import torch._dynamo  # noqa: F401
    from deepspeed.runtime.zero.muon import muon_optimizer  # noqa: F401  # every engine imports it, and the inductor with it

    share_what_is_there()
    job = answers(sys.stdin, out)
    if job is not None:
        begin(job)


if __name__ == "__main__":
    main()
