"""Checks in a process of their own: one that dies, hangs or raises becomes a finding and takes no other along.

[Note: process] An op that was compiled for another processor ends its process (SIGILL), and so does DeepSpeed where memory
cannot be page-locked (an assertion in C). A worker runs the checks in order and reports each finding as a line of JSON; where
it ends, or says nothing for too long, the check under way is given up and another worker goes on with the next one. What
checks print goes to a file, of which the end is shown only where a check died.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, NamedTuple

from ds_vertical.cli.common import JsonObject, first_line
from ds_vertical.cli.doctor.check import CheckResult, Target, error

LIMIT_S = 180.0  # of silence: a first import of torch from a slow disk takes a minute
_GOODBYE_S = 5.0
# It finds the same modules as this process, whatever the working folder.
_WORKER = "import sys; sys.path[:] = sys.argv[1:]; from ds_vertical.cli.doctor.worker import main; sys.exit(main())"
_REPORT = "this is a fault of the check or of what it looked at; the other checks have run"


class Check(NamedTuple):
    """A row of the command's table.

    `function`: dotted name of a function that takes a Target and yields CheckResults; the worker imports it. `remedy`: what to
    do where the check itself dies or hangs.
    """

    name: str
    function: str
    remedy: str = _REPORT


def run_checks(checks: Sequence[Check], case: Target, limit_s: float = LIMIT_S) -> Iterator[CheckResult]:
    """The findings of all checks, in order, as they come. `limit_s`: seconds without a word after which one is given up."""
    rest = list(checks)
    while rest:
        num_over = yield from _one_worker(rest, case, limit_s)
        rest = rest[num_over:]


def _one_worker(checks: Sequence[Check], case: Target, limit_s: float) -> Generator[CheckResult, None, int]:
    """Findings until the worker ends; returns how many checks are over, at least one."""
    under_way, num_ended = -1, 0
    with tempfile.TemporaryFile() as words, _worker(checks, case, words) as worker:
        silent = False
        try:
            for report in _reports(worker, limit_s):
                if "finding" in report:
                    yield CheckResult(**report["finding"])
                under_way = report.get("begin", under_way)
                num_ended = report.get("end", num_ended - 1) + 1
        except TimeoutError:
            silent = True
        if num_ended == len(checks):
            return num_ended
        status = None if silent else worker.wait()
        if under_way < num_ended:  # it never came to a check: neither would another worker
            yield error(
                f"the checks cannot be run: {_last_words(words)}", f"{sys.executable} -c 'import ds_vertical.config.section'"
            )
            return len(checks)
        check = checks[under_way]
        how = f"said nothing for {limit_s:g} s and was given up" if silent else f"died: {_cause(status)}"
        yield replace(error(f"the check {how}{_quoted(words)}", check.remedy), check=check.name)
        return under_way + 1


@contextlib.contextmanager
def _worker(checks: Sequence[Check], case: Target, words: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """A worker that has its orders; it and its children are ended with the block, whatever happens in it."""
    orders = {"checks": [check[:2] for check in checks], "case": asdict(case)}
    command = [sys.executable, "-P", "-c", _WORKER, *sys.path]
    pipe = subprocess.PIPE
    worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=words, start_new_session=True)
    assert worker.stdin is not None
    try:
        with contextlib.suppress(BrokenPipeError), worker.stdin:  # it died at once: its last words say why
            worker.stdin.write(json.dumps(orders, default=str).encode())
        yield worker
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits for a dead disk cannot even be killed
            worker.wait(_GOODBYE_S)


def _reports(worker: subprocess.Popen[bytes], limit_s: float) -> Iterator[JsonObject]:
    """The worker's lines until it ends. Raises TimeoutError where none comes for `limit_s` seconds."""
    assert worker.stdout is not None
    rest = b""
    while True:
        ready, _, _ = select.select([worker.stdout], [], [], limit_s)
        if not ready:
            raise TimeoutError
        chunk = os.read(worker.stdout.fileno(), 1 << 16)
        if not chunk:
            return
        *lines, rest = (rest + chunk).split(b"\n")
        yield from map(json.loads, lines)


def _cause(status: int | None) -> str:
    if status is not None and status < 0:
        return f"signal {signal.Signals(-status).name}"
    return f"exit status {status}"


def _last_words(words: IO[bytes]) -> str:
    words.seek(0, os.SEEK_END)
    words.seek(max(0, words.tell() - 4000))
    lines = [line.strip() for line in words.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][-300:] if lines else ""


def _quoted(words: IO[bytes]) -> str:
    last = _last_words(words)
    return f"; its last words: {last}" if last else ""


# ---- the worker


def _findings(name: str, function: str, case: Target) -> Iterator[CheckResult]:
    try:
        module, _, attribute = function.rpartition(".")
        for finding in getattr(importlib.import_module(module), attribute)(case):
            yield replace(finding, check=name)
    except Exception as failure:
        frame = traceback.extract_tb(failure.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        yield replace(error(f"the check itself failed: {first_line(failure)} ({where})", _REPORT), check=name)


def main() -> int:
    """Run the checks that stdin orders; reports go to the original stdout, everything else that is printed to stderr."""
    orders = json.load(sys.stdin)
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def report(**words: object) -> None:
        print(json.dumps(words), file=reports, flush=True)

    paths = {key: None if value is None else Path(value) for key, value in orders["case"].items() if key != "arm"}
    case = Target(**paths, arm=orders["case"]["arm"])
    for index, (name, function) in enumerate(orders["checks"]):
        report(begin=index)
        for finding in _findings(name, function, case):
            report(finding=asdict(finding))
        report(end=index)
    return 0
