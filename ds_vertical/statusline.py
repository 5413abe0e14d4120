"""One line on the terminal for as long as something runs, which gives way to whatever else is printed meanwhile.

[Note: giving way] Text that is printed while the line stands would begin at the line's end. So for that time the terminal's
`sys.stdout` and `sys.stderr`, and whoever holds them (logging does), write through a detour: the line is taken away, the text
written, and the line drawn again once the text has ended in a newline. What is written past Python's streams is not seen.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from tqdm import tqdm

_SIZE = (120, 24)  # columns and lines, where the terminal does not say


class _Bar(tqdm):
    monitor_interval = 0  # no thread beside it: it is drawn once


def is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def fit(words: Sequence[str], columns: int) -> str:
    """The words in one line that leaves the last column free; those that find no room are left out, from the end."""
    words = list(words)
    while len(words) > 1 and len(" | ".join(words)) >= columns:
        words.pop()
    return " | ".join(words)[: max(0, columns - 1)]


class StatusLine:
    """The words below what is printed, on `sys.stderr`, within a `with` block; afterwards the terminal is as if they had
    never been there. See [Note: giving way]."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self._detours = contextlib.ExitStack()

    def __enter__(self) -> None:
        stream = sys.stderr
        columns, lines = _size(stream)
        text = fit(self._words, columns)
        # before the detours: tqdm keeps the stream's own `write`
        self._bar = _Bar(desc=text, bar_format="{desc}", leave=False, file=stream, ncols=columns, nrows=lines)
        self._stands = True
        terminals = {id(stream): stream for stream in (sys.stdout, sys.stderr) if is_terminal(stream)}
        for each in terminals.values():
            self._detours.enter_context(self._detour(each))

    def __exit__(self, *_: object) -> None:
        self._detours.close()
        if not self._stands:
            self._bar.delay = float("inf")  # for `close`, which would go back to the start of an unfinished text
        self._bar.close()

    @contextlib.contextmanager
    def _detour(self, stream: TextIO) -> Iterator[None]:
        """A stream that takes no attributes is left as it is."""
        attributes: dict[str, Any] = getattr(stream, "__dict__", {})
        before, straight = attributes.get("write"), stream.write

        def write(text: str) -> int:
            with self._bar.get_lock():
                self._give_way()
                try:
                    return straight(text)
                finally:
                    if text.endswith("\n"):
                        self._come_back()

        attributes["write"] = write
        try:
            yield
        finally:
            if attributes.get("write") is write:  # nobody else has taken another detour meanwhile
                del attributes["write"]
                if before is not None:
                    attributes["write"] = before

    def _give_way(self) -> None:
        if self._stands:
            self._bar.clear(nolock=True)
        self._stands = False

    def _come_back(self) -> None:
        self._bar.refresh(nolock=True)
        self._stands = True


def _size(stream: TextIO) -> tuple[int, int]:
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):  # no terminal, or no file
        return _SIZE
    return (size.columns, size.lines) if size.columns and size.lines else _SIZE
