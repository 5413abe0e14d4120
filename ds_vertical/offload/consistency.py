"""The live state after a step that was not completed: why it is torn, what that refuses, and the way back."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from ds_vertical.errors import TornStateError
from ds_vertical.interrupts import deferred
from ds_vertical.io.checksums import ChecksumError

_TORN = (
    "the live state is torn: {why}. It can be neither trained on nor read nor saved; build a new engine from the last weights"
    " or checkpoint that were saved"
)
_HALF_DONE = "an interrupt has cut what must be done whole"
_HALF_STEPPED = "part of it has taken a step that the rest has not"
_SPOILT = "part of it is not on the disk any more as it was written"
HALF_LOADED = "part of it is a checkpoint's, the rest is not"

WHOLE = (
    "the live state is whole: nothing of what failed counts, and every step before it has been taken or is due. It may be"
    " saved, to another disk where this one fails or is full, and trained on"
)


class Interrupted(RuntimeError):  # noqa: N818 - messages to users hold the name
    """An interrupt has come in the middle of a change of state, and which interrupt it was is known no more."""


class _Section:
    """See `StateGuard.torn_if_interrupted`. It is open before the first change and after the last: an interrupt may come ahead
    of any `except`."""

    def __init__(self, condition: StateGuard, opened: list[_Section]) -> None:
        self._condition = condition
        self._opened = opened
        self._deferred = deferred(firmly=True)
        self.cut = Interrupted("an interrupt, while state was changed")

    def __enter__(self) -> None:
        self._deferred.__enter__()
        self._opened.append(self)

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is not None:
            self._condition.tear(error)
        self._opened.remove(self)
        self._deferred.__exit__()


class StateGuard:
    """Whether the live state is whole, as far as transfers do not know it themselves, and which checkpoint is the last good
    one."""

    def __init__(self) -> None:
        self._failure: BaseException | None = None
        self._why: str | None = None
        self._open: list[_Section] = []
        self._last_good: Path | None = None
        self._told = False

    @property
    def failure(self) -> BaseException | None:
        """What tore the state."""
        if self._failure is None and self._open:  # an interrupt has cut the section, or its own thread asks within it
            self.tear(self._open[0].cut, _HALF_DONE)
        return self._failure

    def note_good(self, checkpoint: Path) -> None:
        """A checkpoint (its folder, named by its tag) has been saved from the whole state, or loaded into it."""
        self._last_good = checkpoint

    def tear(self, failure: BaseException, why: str | None = None) -> None:
        """The state is torn; the first reason counts. `why`: where no step tore it."""
        if self._failure is None:
            self._failure, self._why = failure, why

    def torn_if_interrupted(self) -> _Section:
        """What the block does to the live state it does whole, or not at all as far as anybody may go on from it."""
        return _Section(self, self._open)

    def tell(self, error: BaseException) -> None:
        """`error` is about to be raised: say with it what has become of the state."""
        self._told = True
        error.add_note(self._note(error))

    def refuse(self, failure: BaseException) -> NoReturn:
        """Raise `failure` itself where no call has raised it yet (it came between two calls), else TornStateError; so after an
        interrupt, which everybody has heard of."""
        if not self._told and isinstance(failure, Exception) and not isinstance(failure, Interrupted):
            self.tell(failure)
            raise failure
        raise TornStateError(f"{self._note(failure)}; what failed: {type(failure).__name__}: {failure}") from failure

    def _note(self, failure: BaseException) -> str:
        good, why = self._last_good, self._why or (_SPOILT if isinstance(failure, ChecksumError) else _HALF_STEPPED)
        last = "no checkpoint has been saved" if good is None else f'the last good tag is "{good.name}" in {good.parent}'
        return f"{_TORN.format(why=why)} ({last})"
