"""The lines in which rank 0 says what it has found. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

RESULT: Final = "ds_vertical links: "
REFUSED: Final = "ds_vertical links refused: "


def after(lines: Sequence[str], beginning: str) -> str | None:
    """What follows `beginning` in the last line that has it, behind the host's name that a launcher puts there."""
    found = [line.partition(beginning)[2] for line in lines if beginning in line]
    return found[-1] if found else None
