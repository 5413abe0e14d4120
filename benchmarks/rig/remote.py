"""`ssh` and `pdsh` for the hosts of a rig, as far as DeepSpeed's launcher uses them. The rig writes both commands.

    remote.py RIG_FOLDER ssh [-o X] [-p N] HOST COMMAND ...
    remote.py RIG_FOLDER pdsh [-S] [-f N] -w HOST,HOST COMMAND ...

As with the real ssh and pdsh, the command runs in a shell on the host, with the environment of a login and nothing of the
caller's. It goes on when the caller ends. pdsh writes the host's name before each line, and replaces `%n` by the host's number.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import BinaryIO, Final, NoReturn

UNREACHABLE: Final = 255  # ssh's own status
LOGIN_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def ssh(rig: Path, words: Sequence[str]) -> NoReturn:
    """Replace this process by the command on the host."""
    rest = list(words)
    while rest and rest[0].startswith("-"):
        del rest[: 2 if rest[0] in ("-o", "-p") else 1]
    name, command = rest[0], " ".join(rest[1:])
    host = json.loads((rig / "table.json").read_text()).get(name)
    if host is None or not Path(f"/proc/{host['pid']}").exists():
        print(f"ssh: connect to host {name} port 22: No route to host", file=sys.stderr)
        sys.exit(UNREACHABLE)
    for group in host["groups"]:
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    home = str(Path.home())
    login = [f"HOME={home}", "USER=root", "LOGNAME=root", "SHELL=/bin/sh", f"PATH={LOGIN_PATH}"]
    inside = ["env", "-i", *login, "/bin/sh", "-c", f'cd "$HOME"; {command}']
    kinds = ("--mount", "--uts", "--ipc", "--net", "--pid")
    os.execvp("nsenter", ["nsenter", "--target", str(host["pid"]), *kinds, "--", *inside])


def pdsh(rig: Path, words: Sequence[str]) -> int:
    """Run the command on all hosts at once. Returns the largest of their statuses."""
    rest, names = list(words), []
    while rest and rest[0].startswith("-"):
        if rest[0] == "-w":
            names = rest[1].split(",")
        del rest[: 2 if rest[0] in ("-w", "-f") else 1]
    running = []
    for number, name in enumerate(names):
        command = " ".join(rest).replace("%n", str(number))
        process = subprocess.Popen([str(rig / "bin" / "ssh"), name, command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert process.stdout is not None
        thread = threading.Thread(target=_copy, args=(name, process.stdout), daemon=True)
        thread.start()
        running.append((process, thread))

    def end(number: int, _: FrameType | None) -> None:
        for process, _ in running:
            process.terminate()
        os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    statuses = [process.wait() for process, _ in running]
    for _, thread in running:
        thread.join(1.0)  # what a command has left behind may hold its output open
    return max(status if status >= 0 else 128 - status for status in statuses)


def _copy(name: str, output: BinaryIO) -> None:
    for line in output:
        sys.stdout.buffer.write(f"{name}: ".encode() + line)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit({"ssh": ssh, "pdsh": pdsh}[sys.argv[2]](Path(sys.argv[1]), sys.argv[3:]))
