"""A step that starts over because state changed in a way that was not known as it began."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ds_vertical.errors import LayerError

T = TypeVar("T")
_MOST_RUNS = 10  # of a step
HORIZONTAL = 'or set vertical_schedule.order to "horizontal", which runs one micro-batch after the other'


class StateMissed(LayerError):
    """State has changed in another way than was known of it. What is known now is right: the step is to be run again, by all
    ranks (`ranks.agreed`). `path`: what has changed; empty where this run was only to show who changes what."""

    starts_over = True

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(
            f"{path or 'state'} changes in each run of this step in a way that could not be foreseen; keep what changes in the"
            f" blocks, or in the model's forward, {HORIZONTAL}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path,)


def until_known(run: Callable[[], T], forget: Callable[[], None], say: Callable[[str], None] = lambda _: None) -> T:
    """What a step returns. It is run again where state has changed in an unknown way, as long as each run learns more of it."""
    for _ in range(_MOST_RUNS - 1):
        try:
            return run()
        except StateMissed as missed:  # nothing of the step counts
            if missed.path:  # and no trial
                say(f"this step starts over, now that it is known that forwards change {missed.path}")
            forget()
    return run()
