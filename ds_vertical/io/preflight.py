"""What of this process keeps files on SSD from being written, or written where the JSON says: told before anything is made."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from ds_vertical.errors import ConfigError

_PATH = "zero_optimization.offload_*.nvme_path"


def check_process(nvme_paths: Iterable[str]) -> None:
    """Raise ConfigError where files below these paths could not be made or used by this process."""
    for path in nvme_paths:
        if sys.flags.optimize:
            raise ConfigError(
                f"{_PATH}: got {path!a} under python -O (PYTHONOPTIMIZE): DeepSpeed reads and writes its files within assert"
                " statements, which -O leaves out, so nothing would be written there; run python without -O"
            )
        _check_name(path)
        umask = _umask()
        if umask & 0o700:
            raise ConfigError(
                f"{_PATH}: got {path!a} under the umask {umask:04o}, which takes its owner's rights from every folder that"
                " DeepSpeed makes there; set the umask 0077"
            )


def _check_name(path: str) -> None:
    """DeepSpeed's own code names files in UTF-8, Python in the locale's encoding: they must be the same bytes."""
    try:
        is_same = os.fsencode(path) == path.encode()
    except UnicodeEncodeError:
        is_same = False
    if not is_same:
        raise ConfigError(
            f"{_PATH}: got {path!a}: in this process's locale, whose file names are {sys.getfilesystemencoding()}, that is not"
            " the name that DeepSpeed's ops would use (UTF-8); set LC_ALL=C.UTF-8, or PYTHONUTF8=1, or write an ASCII path"
        )


def _umask() -> int:
    """Read without setting it: other threads make files meanwhile."""
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0
