"""A step that starts over, because its forwards changed state of which that was not known as it began."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ds_vertical.errors import LayerError

T = TypeVar("T")
_MOST_RUNS = 10  # of a step
_ENDS = {"pre": "the code ahead of the first layer", "suf": "the code behind the last layer"}
HORIZONTAL = 'or set vertical_schedule.order to "horizontal", which runs one micro-batch after the other'


class StateMissed(LayerError):  # noqa: N818 - a request to start over, as StopIteration is one to stop
    """A forward has changed state in a way that was not known as the step began. It is known now: the step is to be run again.

    All ranks run it again (`ranks.agreed`). `path`: the state that has changed; empty where this run was only to show which
    code changes what. Users see the message only if each of the runs finds something new.
    """

    starts_over = True

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(
            f"{path or 'state'}: in each run of this step the forwards have changed state that they did not change before, this"
            f" time there; keep what changes in the blocks' attributes, or within the model's forward, {HORIZONTAL}"
        )

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return type(self), (self.path,)

    @property
    def fact(self) -> str:
        """What is known now, for the user."""
        return f"forwards change {self.path}"


class HooksMissed(StateMissed):
    """A hook on the block at `path` has computed with a parameter of that block. It is known now: the step is to be run again,
    with the block's hooks as part of the block."""

    @property
    def fact(self) -> str:  # override
        """What is known now, for the user."""
        return f"hooks on {self.path} compute with its parameters"


class UseMissed(StateMissed):
    """Code has computed with parameters outside the layers, of the unit `unit`, where they are away. They stay from now on: the
    step is to be run again. `LayerMap.missed` knows it by then."""

    def __init__(self, unit: str) -> None:
        LayerError.__init__(
            self,
            f"code other than {_ENDS[unit]} computes with parameters that only that end of the model was taken to use; set"
            ' vertical_schedule.outside_layers to "resident"',
        )
        self.path = self.unit = unit

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return type(self), (self.unit,)

    @property
    def fact(self) -> str:  # override
        """What is known now, for the user."""
        return f"other code, too, uses the parameters of {_ENDS[self.unit]}, which therefore stay on the device"


class GradientMissed(StateMissed):
    """Autograd has come twice to a parameter of the layer `path` in one backward of it. It is known now: the step is to be run
    again, with gradients taken behind the whole backward of a layer."""

    @property
    def fact(self) -> str:  # override
        """What is known now, for the user."""
        return f"autograd comes to a parameter of {self.path} several times in one backward"


class CallsMissed(StateMissed):
    """The code of a micro-batch calls the model another number of times than was known as the step began: the step is to be run
    again. `number`: how often, or more often than that. All ranks take the same one: the schedule depends on it."""

    is_everyones = True

    def __init__(self, number: int) -> None:
        LayerError.__init__(
            self,
            f"the code of a micro-batch calls the model {number} time(s), which was not known as the step began: in a Trainer's"
            " micro-steps call it as often in each run of a step; in a loss_fn or the model's own forward call it once only, or"
            " set vertical_schedule.enabled to false",
        )
        self.path = ""
        self.number = number

    def __reduce__(self) -> tuple[type, tuple[int]]:  # type: ignore[override]
        return type(self), (self.number,)


class LearnedCalls:
    """How often the code of a micro-batch calls the model, as far as the steps so far have shown."""

    def __init__(self) -> None:
        self.number = 1


def until_known(
    run: Callable[[], T],
    forget: Callable[[], None],
    say: Callable[[str], None] = lambda _: None,
    calls: LearnedCalls | None = None,
) -> T:
    """Run a step, and again wherever it raises StateMissed, at most _MOST_RUNS times. Returns what the step returns.

    `forget` is called ahead of each further run, so that it learns anew; `say` gets a line for the user. `calls`: what `run`
    reads the number of calls from; None: a step with another number than one is not run again. Raises StateMissed where the
    last run does.
    """
    for _ in range(_MOST_RUNS - 1):
        try:
            return run()
        except CallsMissed as missed:
            if calls is None:
                raise
            calls.number = missed.number
            say(f"this step starts over, with {missed.number} call(s) of the model by each micro-batch's code")
            forget()
        except StateMissed as missed:  # nothing of the step counts
            if missed.path:  # and no trial
                say(f"this step starts over, now that it is known that {missed.fact}")
            forget()
    return run()
