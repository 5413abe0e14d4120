"""The file that a command writes its result to: refused before the work begins, put in place whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ds_vertical.errors import ConfigError

_OPTION = "--out"


def check_out(out: Path | None) -> None:
    """Raise ConfigError where `write_out` could not make a file; `out` itself is left as it is."""
    if out is None or _is_stream(out):
        return
    try:
        try_place(out)
    except OSError as error:
        raise _refused(out, error) from error


def try_place(out: Path) -> None:
    """As `check_out`, of a file; raises OSError."""
    if out.is_dir():
        raise IsADirectoryError("it is a folder")
    _beside(out).unlink()


def write_out(out: Path, text: str) -> None:
    """What was there before stays unless all of `text` is on the disk. Raises ConfigError."""
    try:
        if _is_stream(out):
            out.write_text(text, encoding="utf-8")
        else:
            replace_file(out, text)
    except OSError as error:
        raise _refused(out, error) from error


def _is_stream(out: Path) -> bool:
    """Whether it is a device or a pipe (/dev/stdout), whose place no file may take."""
    return out.exists() and not out.is_file() and not out.is_dir()


def replace_file(out: Path, text: str) -> None:
    """As `write_out`, of a file; raises OSError."""
    beside = _beside(out)
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        beside.chmod(out.stat().st_mode & 0o777 if out.exists() else 0o666 & ~mask)
        beside.replace(out.resolve())
    except BaseException:
        beside.unlink()
        raise


def _beside(out: Path) -> Path:
    """A new empty file in the folder of `out`, of whatever a link leads to."""
    real = out.resolve()
    descriptor, name = tempfile.mkstemp(prefix=f".{real.name[:100]}.", dir=real.parent)
    os.close(descriptor)
    return Path(name)


def _refused(out: Path, error: OSError) -> ConfigError:
    reason = error.strerror or error
    return ConfigError(f"{_OPTION} {out}: cannot be written ({reason}); name a file in a folder that you may write to")
