"""Locks around the compile of an op: nobody waits in silence, and nobody waits for the dead.

[Note: two locks] torch guards a build with a file `lock` that outlives a killed compiler and on which every later
process waits for ever. That file is stale when no process holds it open. Builders that come through this module also
take turns through `flock`, which the kernel drops with its process, and which other hosts of a shared home see as well.

[Note: other hosts] On some shared file systems `flock` does not reach other hosts. So whoever has its turn also makes a file
with its hostname and boot id, and touches that file every few seconds. A file of another host counts while it is touched; one
of this host does not count, since here `flock` tells.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from ds_vertical.io.runs.this_host import host_id

HEARTBEAT_S = 5.0
RELEASE_S = 15.0  # torch closes its lock before it removes it, and the removal waits for a busy file system's journal
TURN_POLL_S = 0.5  # between two looks of a process that waits for its turn, or for torch's lock
TURN_FILE = "builder.flock"
HOST_FILE = "builder.host"
HOST_S = 30.0  # untouched for so long, a file of another host is that of a dead builder


def say(text: str) -> None:
    """Print a line to standard error, at once: a compile takes minutes. In one piece: other processes print there, too."""
    print(f"ds_vertical: {text}\n", end="", file=sys.stderr, flush=True)


def holders(path: Path) -> list[int]:
    """Ids of this machine's processes that hold `path` open, as far as this user may see them."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended since, or belongs to somebody else
            if any(_is_open_file(link, path) for link in (process / "fd").iterdir()):
                found.append(int(process.name))
    return sorted(found)


def _is_open_file(link: Path, path: Path) -> bool:
    with contextlib.suppress(OSError):  # closed since
        return link.samefile(path)
    return False


def is_stale(lock: Path) -> bool:
    """Whether torch's `lock` file stays there though no process that this user may see holds it open."""
    made, end = _made(lock), time.monotonic() + RELEASE_S
    while made is not None and made == _made(lock) and not holders(lock):  # not one that another compile has made since
        if time.monotonic() > end:
            return True
        time.sleep(min(TURN_POLL_S, RELEASE_S))
    return False


def _made(lock: Path) -> tuple[int, int] | None:
    """What tells a lock from one that is made later in its place; None where there is none."""
    with contextlib.suppress(FileNotFoundError):
        found = lock.stat()
        return found.st_ino, found.st_ctime_ns
    return None


def builder(folder: Path) -> str | None:
    """Who has its turn to build in a cache folder ("process 17 on node7 since 12:01:02"); None where nobody does."""
    path = folder / TURN_FILE
    try:
        # NFS locks only what is open for writing
        with path.open("r+" if os.access(path, os.W_OK) else "r", encoding="utf-8") as turn:
            if not _try_flock(turn.fileno()):
                return turn.read().strip() or "another builder"
        return _other_host(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None


def clear_stale_lock(lock: Path) -> bool:
    """Remove torch's `lock` file if its compile was killed; True if it did."""
    if not lock.exists() or not is_stale(lock):
        return False
    say(f"removed {lock}: the compile that made it is dead, and every process would have waited for it")
    lock.unlink(missing_ok=True)
    return True


def wait_for_lock(lock: Path) -> None:
    """Return once nobody compiles under torch's `lock`; says every few seconds for whom it waits."""
    start, next_word = time.monotonic(), 0.0
    while lock.exists() and not clear_stale_lock(lock):
        waited = time.monotonic() - start
        if waited >= next_word:
            say(f"waiting for process {holders(lock)}, which compiles {lock.parent.name} ({waited:.0f} s so far)")
            next_word = waited + HEARTBEAT_S
        time.sleep(TURN_POLL_S)


@contextlib.contextmanager
def build_turn(folder: Path) -> Iterator[None]:
    """Only one builder at a time per cache folder; the others say for whom they wait."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / TURN_FILE).open("a+") as turn:
        start, next_word = time.monotonic(), 0.0
        me = f"process {os.getpid()} on {platform.node()} since {time.strftime('%H:%M:%S')}"
        while (ahead := _ahead(turn, folder, me)) is not None:
            waited = time.monotonic() - start
            if waited >= next_word:
                say(f"waiting for the other builder ({ahead}) in {folder} ({waited:.0f} s so far)")
                next_word = waited + HEARTBEAT_S
            time.sleep(TURN_POLL_S)
        turn.truncate(0)
        turn.write(me)
        turn.flush()
        with _touched(folder / HOST_FILE):
            yield


def _ahead(turn: TextIO, folder: Path, me: str) -> str | None:
    """Who has its turn before this process; None once it is this process's."""
    if not _try_flock(turn.fileno()):
        turn.seek(0)
        return turn.read().strip() or "another builder"
    if (other := _other_host(folder)) is not None:
        return other
    path = folder / HOST_FILE
    if path.exists():
        path.unlink(missing_ok=True)  # of a builder that was killed
    try:
        with path.open("x", encoding="utf-8") as file:  # fails where a host is quicker, on NFS too
            file.write(f"{host_id()}\n{me}")
    except FileExistsError:
        return "another host's"
    return None


def _other_host(folder: Path) -> str | None:
    """Who builds on another host; None where nobody does. See [Note: other hosts]."""
    try:
        with (folder / HOST_FILE).open(encoding="utf-8") as file:  # opened each time: NFS then asks the server
            host, _, who = file.read().partition("\n")
            untouched_s = _now(folder) - os.fstat(file.fileno()).st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return None
    return (who or "another host's") if host != host_id() and untouched_s < HOST_S else None


def _now(folder: Path) -> float:
    """By the clock of the folder's file system, which may be another machine's."""
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as probe:
        return os.fstat(probe.fileno()).st_mtime
    return time.time()


@contextlib.contextmanager
def _touched(path: Path) -> Iterator[None]:
    """Touch a file every few seconds; remove it at the end."""
    done = threading.Event()

    def touch() -> None:
        while not done.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError):
                os.utime(path)

    thread = threading.Thread(target=touch, name="ds_vertical builder", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        path.unlink(missing_ok=True)


def _try_flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
