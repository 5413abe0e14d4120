"""What several subcommands share: amounts of bytes as users write them (`300M`, `1.5GiB`, `3e8`), and an error in one line."""

from __future__ import annotations

import re
from typing import Any, Final

JsonObject = dict[str, Any]
"""An object of a JSON file that the user or a command wrote. Code that takes a value out of it checks the value's type."""

_DECIMAL: Final = {letter: 1000**power for power, letter in enumerate("KMGT", 1)}
_BINARY: Final = {f"{letter}I": 1024**power for power, letter in enumerate("KMGT", 1)}
_UNITS: Final = {"": 1, **_DECIMAL, **_BINARY}
_MOST: Final = 2.0**63
_AMOUNT: Final = re.compile(r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*([KMGT]i?|)(?:B?)", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Bytes; units of 1000 (`K`, `M`, `G`, `T`) or 1024 (`Ki`, ...). Raises ValueError for anything else and below one."""
    found = _AMOUNT.fullmatch(text.strip())
    amount = float(found[1]) * _UNITS[found[2].upper()] if found else 0.0
    if not 1 <= amount < _MOST:
        raise ValueError(f"{text!r} is no amount of bytes: write one as 64G, 1.5GiB or 3e8")
    return round(amount)


def first_line(error: BaseException) -> str:
    """The error's class and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def gib(num_bytes: float) -> str:
    """Bytes for people: GiB, or MiB below one."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
