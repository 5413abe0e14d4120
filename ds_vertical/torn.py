"""What becomes of a state of which a part has taken a step and the rest cannot."""

from __future__ import annotations

from typing import NoReturn

_TORN = (
    "the live state is torn: part of it has taken a step that the rest has not. It can be neither trained on nor read nor"
    " saved; build a new engine from the last weights or checkpoint that were saved"
)


class TornStateError(RuntimeError):
    """Some of the live state has taken a step that the rest has not, and cannot. `__cause__`: what failed."""


class TornState:
    """Tells of what failed, once as it is, and refuses everything after that."""

    def __init__(self) -> None:
        self._told = False

    def tell(self, error: BaseException) -> None:
        """`error` is about to be raised: say with it what has become of the state."""
        self._told = True
        error.add_note(_TORN)

    def refuse(self, failure: BaseException) -> NoReturn:
        """Raise `failure` itself where nobody has been told (it came between two calls), else TornStateError."""
        if not self._told:
            self.tell(failure)
            raise failure
        raise TornStateError(f"{_TORN}; what failed: {type(failure).__name__}: {failure}") from failure
