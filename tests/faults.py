"""Real faults of a disk, for tests: a full one, and files that may not grow."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, size_bytes: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A file system of `size_bytes` at `folder`; where mounting is not allowed, a folder that is said to be one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=700", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    if not mounted:
        entries = dict(f_bavail=size_bytes // 4096, f_frsize=4096)
        monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(**entries))
    try:
        yield
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def small_files(size_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond `size_bytes`: the kernel refuses, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
