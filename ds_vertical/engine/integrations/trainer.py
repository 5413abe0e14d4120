"""Nothing yet."""

from __future__ import annotations


def install() -> None:
    """Does nothing yet."""
