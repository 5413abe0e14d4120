"""One run of a training script under the deepspeed launcher, in a process group of its own, with its output in a log."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from ds_vertical.cli.bench.disk_limit import LimitedGroup
from ds_vertical.cli.bench.hosts import Hosts, own_variables
from ds_vertical.cli.bench.machine_info import accelerator
from ds_vertical.engine.metrics import METRICS_VARIABLE, STEPS_VARIABLE, StepRecord, read_records

_LOG_LINES_SHOWN = 25
_GRACE_S = 30.0  # between asking a run's processes to end and ending them
_POLL_S = 0.25
_REPORT_EVERY_S = 30.0  # without a terminal; with one, the line is redrawn at each poll


class RunError(Exception):
    """A run that did not end well; the message says where its output lies."""


@dataclass(frozen=True)
class Script:
    """What is run, and how: `num_steps` steps on `num_ranks` local processes, under a disk limit if there is a `group`, with
    the variables `environment` besides this process's. An argument that names the file `config` names a run's own JSON there.
    `with_local_rank`: whether the launcher gives the script `--local_rank`, as it does by itself. `hosts`: the
    ranks are on these; None: on this machine.
    """

    path: Path
    arguments: tuple[str, ...]
    num_steps: int
    num_ranks: int = 1
    group: LimitedGroup | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    config: Path | None = None
    with_local_rank: bool = True
    hosts: Hosts | None = None

    def run(self, config: Path, out: Path, name: str, title: str) -> dict[int, list[StepRecord]]:
        """Trains with the JSON `config`; the records by rank. Writes `out/<name>.log` and `.metrics`. Raises RunError."""
        log, metrics = out / f"{name}.log", out / f"{name}.metrics"
        variables = {METRICS_VARIABLE: str(metrics), STEPS_VARIABLE: str(self.num_steps), "DS_ACCELERATOR": accelerator()}
        environment = dict(os.environ) | dict(self.environment) | variables
        if self.hosts is not None:
            handed = out / f"{name}.env"
            self.hosts.write_environment(handed, own_variables() | dict(self.environment) | variables)
            environment["DS_ENV_FILE"] = str(handed)
        # The launcher's children find this interpreter's tools (ninja, for ops) before the system's.
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
        command = [
            *(sys.executable, "-m", "deepspeed.launcher.runner"),
            *(local_options(self.num_ranks) if self.hosts is None else self.hosts.options(_any_port())),
            *(() if self.with_local_rank else ("--no_local_rank",)),
            *("--module", "ds_vertical.run", str(self.path), *self._arguments(config)),
        ]
        progress = LaunchProgress(title, self.num_steps, metrics, log)
        status = _run_process(self.group.wrap(command) if self.group else command, environment, log, progress)
        if status != 0:
            raise RunError(_failure(name, f"ended with status {status}", log))
        try:
            return read_records(metrics)
        except ValueError as error:
            told = f"trained nothing by a DeepSpeed engine with this JSON ({error})"
            raise RunError(_failure(name, told, log)) from error

    def _arguments(self, config: Path) -> list[str]:
        """The script's, with this run's JSON in the place of the one that they name; behind them where they name none."""
        arguments = [self._with_config(argument, config) for argument in self.arguments]
        return arguments if arguments != list(self.arguments) else [*arguments, "--deepspeed_config", str(config)]

    def _with_config(self, argument: str, config: Path) -> str:
        option, equals, value = argument.rpartition("=")
        return f"{option}{equals}{config}" if is_same_file(value, self.config) else argument


def is_same_file(path: str, other: Path | None) -> bool:
    """Whether an argument is the path of a file."""
    try:
        return other is not None and Path(path).samefile(other)
    except OSError:  # the argument is no path
        return False


def _run_process(command: Sequence[str], environment: dict[str, str], log: Path, progress: LaunchProgress) -> int:
    """Runs the command in a process group of its own with its output in `log`; ends the group if interrupted."""
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                progress.show()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
        except BaseException:
            _end_group(process)
            raise
    progress.finish(process.returncode == 0)
    return process.returncode


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends the launcher and what it started, gently first, so that a run can remove its swap files."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        end = time.monotonic() + _GRACE_S
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal_number)
            os.killpg(process.pid, signal.SIGCONT)  # one that is stopped (see `metrics`) hears no other
            # The launcher may end before the training processes: the group is gone when nobody is left in it.
            while time.monotonic() < end:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(_POLL_S)


@contextlib.contextmanager
def terminations_raised() -> Iterator[None]:
    """SIGTERM becomes SystemExit, so that an ended A/B does not leave its run training on."""

    def raise_exit(signal_number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signal_number)

    previous = signal.signal(signal.SIGTERM, raise_exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def local_options(num_ranks: int) -> list[str]:
    """The launcher's options. No host file: a machine that has /job/hostfile would otherwise train on all its hosts."""
    return ["--hostfile", os.devnull, *_devices(num_ranks), "--master_port", str(_free_port())]


def _devices(num_ranks: int) -> tuple[str, str]:
    """The launcher's option for this many local processes, on the devices that the caller has made visible."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if accelerator() != "cuda" or len([device for device in visible if device]) < num_ranks:
        return "--num_accelerators", str(num_ranks)
    return "--include", f"localhost:{','.join(visible[:num_ranks])}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _any_port() -> int:
    """A port of another host. Nobody here can ask which are free there, so it is below those that kernels give to clients."""
    return 20000 + secrets.randbelow(10000)


def _failure(name: str, what: str, log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES_SHOWN:]
    return f"{name} {what}; the end of its log:\n" + "".join(f"    {line}\n" for line in lines) + f"whole log: {log}"


class LaunchProgress:
    """One line about the run under way: redrawn on a terminal, repeated now and then without one."""

    def __init__(self, name: str, num_steps: int, metrics: Path, log: Path) -> None:
        self._name, self._num_steps, self._log = name, num_steps, log
        self._records = metrics / "rank0.jsonl"
        self._terminal = sys.stdout.isatty()
        self._start = self._last_report = time.monotonic()
        if not self._terminal:
            print(f"{name}: started, log {log}", flush=True)

    def show(self) -> None:
        """Says how far the run is, if it is time to."""
        now = time.monotonic()
        if self._terminal:
            print(f"\r\033[K{self._text(now)}", end="", flush=True)
        elif now - self._last_report >= _REPORT_EVERY_S:
            self._last_report = now
            print(self._text(now), flush=True)

    def finish(self, good: bool) -> None:
        """Leaves the last line about the run. `good`: it ended with status 0."""
        start, end = ("\r\033[K", "") if self._terminal else ("", "")
        print(f"{start}{self._text(time.monotonic())}, {'done' if good else 'failed'}{end}", flush=True)

    def _text(self, now: float) -> str:
        done = self._records.read_bytes().count(b"\n") if self._records.exists() else 0
        waiting = "" if done else f" (setting up, see {self._log})"
        return f"{self._name}: step {done}/{self._num_steps}, {now - self._start:.0f} s{waiting}"
