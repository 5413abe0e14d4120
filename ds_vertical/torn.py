"""The live state after a step that was not completed: why it is torn, what that refuses, and the way back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from ds_vertical.checksums import ChecksumError

_TORN = (
    "the live state is torn: {why}. It can be neither trained on nor read nor saved; build a new engine from the last weights"
    " or checkpoint that were saved"
)
_HALF_STEPPED = "part of it has taken a step that the rest has not"
_SPOILT = "part of it is not on the disk any more as it was written"
HALF_LOADED = "part of it is a checkpoint's, the rest is not"

WHOLE = (
    "the live state is whole: nothing of what failed counts, and every step before it has been taken or is due. It may be"
    " saved, to another disk where this one fails or is full, and trained on"
)


class NonFiniteError(ArithmeticError):
    """The norm of a step's gradients is not finite, and `on_nonfinite` is "stop". Raised on every rank: the norm is global.

    Where layers had taken the step in place (no clipping, static loss scale, optimizer on SSD) the live state is torn, as
    a note says. Otherwise nothing has been stepped: the state is that of the step before, and may be saved.
    """


class TornStateError(RuntimeError):
    """Some of the live state has taken a step that the rest has not, and cannot, or is lost. `__cause__`: what failed."""


class Condition:
    """Whether the live state is whole, as far as transfers do not know it themselves, and which checkpoint is the last good
    one. `failure`: what tore the state."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._why: str | None = None
        self._last_good: Path | None = None
        self._told = False

    def note_good(self, checkpoint: Path) -> None:
        """A checkpoint (its folder, named by its tag) has been saved from the whole state, or loaded into it."""
        self._last_good = checkpoint

    def tear(self, failure: BaseException, why: str | None = None) -> None:
        """The state is torn; the first reason counts. `why`: where no step tore it."""
        if self.failure is None:
            self.failure, self._why = failure, why

    @contextlib.contextmanager
    def torn_if_interrupted(self) -> Iterator[None]:
        """What the block does to the live state it does whole, or not at all as far as anybody may go on from it."""
        try:
            yield
        except BaseException as error:
            self.tear(error)
            raise

    def tell(self, error: BaseException) -> None:
        """`error` is about to be raised: say with it what has become of the state."""
        self._told = True
        error.add_note(self._note(error))

    def refuse(self, failure: BaseException) -> NoReturn:
        """Raise `failure` itself where nobody has been told (it came between two calls), else TornStateError."""
        if not self._told:
            self.tell(failure)
            raise failure
        raise TornStateError(f"{self._note(failure)}; what failed: {type(failure).__name__}: {failure}") from failure

    def _note(self, failure: BaseException) -> str:
        good, why = self._last_good, self._why or (_SPOILT if isinstance(failure, ChecksumError) else _HALF_STEPPED)
        last = "no checkpoint has been saved" if good is None else f'the last good tag is "{good.name}" in {good.parent}'
        return f"{_TORN.format(why=why)} ({last})"
