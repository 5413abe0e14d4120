"""Interrupts at function boundaries of the package's code, one at a time, as a signal's handler raises them."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

PACKAGE = str(Path(__import__("ds_vertical").__file__).parent)
# what only shows, measures or plans; the rest is the engine's, the stores' and the queue's
_LEFT_OUT = set(
    "account blocktime costs cgroup gauge headroom hostload limits metrics plan planner progress simulate statusline survey"
    " trace dependencies schedule program hostmemory opcache finding".split()
)
_INNER = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>")


class Site(NamedTuple):
    """A place between two bytecodes: a function's start ("call") or end ("return"), or the end of one of C ("c_return")."""

    file: str
    function: str
    line: int
    event: str
    callee: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function} {self.event} {self.callee}".rstrip()


def _site(frame: FrameType, event: str, arg: Any) -> Site | None:
    code = frame.f_code
    if event not in ("call", "return", "c_return") or not code.co_filename.startswith(PACKAGE):
        return None
    name = code.co_filename[len(PACKAGE) + 1 :]
    if name.removesuffix(".py") in _LEFT_OUT or code.co_name in _INNER:
        return None
    callee = getattr(arg, "__name__", "") if event == "c_return" else ""
    line = frame.f_lineno if event == "c_return" else code.co_firstlineno
    return Site(name, code.co_qualname, line, event, callee)


@contextlib.contextmanager
def recorded() -> Iterator[Counter[Site]]:
    """How often each site is passed within the block."""
    found: Counter[Site] = Counter()

    def hook(frame: FrameType, event: str, arg: Any) -> None:
        if (site := _site(frame, event, arg)) is not None:
            found[site] += 1

    before = sys.getprofile()
    sys.setprofile(hook)
    try:
        yield found
    finally:
        sys.setprofile(before)


class Cut:
    """Raises `error()` where a site is passed for the `number`-th time (from 1). `done`: it has."""

    def __init__(self, site: Site, number: int, error: Callable[[], BaseException] = KeyboardInterrupt) -> None:
        self.site = site
        self.number = number
        self.done = False
        self._error = error

    def __str__(self) -> str:
        return f"{self.site} #{self.number}"

    def __enter__(self) -> Cut:
        left = self.number

        def hook(frame: FrameType, event: str, arg: Any) -> None:
            nonlocal left
            if not self.done and _site(frame, event, arg) == self.site:
                left -= 1
                if left == 0:
                    self.done = True
                    raise self._error()

        sys.setprofile(hook)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
