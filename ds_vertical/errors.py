"""The exceptions that a user may catch, and those that the commands print as one message."""

from __future__ import annotations


class ConfigError(ValueError):
    """A configuration that cannot run as written. The message has one fault a line: JSON path, value got, what to write
    instead."""


class ScheduleError(ValueError):
    """A schedule, or a piece of its text, that cannot be run: an event depends on one that does not come, say."""


class CostsError(ValueError):
    """Numbers that describe no machine or no model. The message names the key, the value and what to write instead."""


class MemoryBudgetError(ValueError):
    """A run that would not fit in memory or on the SSD.

    The message names the tier, the bytes, and each number in the JSON whose change alone makes the run fit.
    """


class StorageError(RuntimeError):
    """A file of the run that cannot be read or written. The message names file, operation, errno's text and remedy."""


class LayerError(ValueError):
    """The layers of the model cannot be found, or not be run layer by layer. The message says what to write in the JSON or
    model."""


class LoopError(RuntimeError):
    """The user's training loop does something that layer-major order cannot follow. The message says what, and what to write
    instead. The step under way has not been."""


class Unanimous(BaseException):
    """Raised on every rank at once, by a decision that all ranks took together, to leave a section of code. It is no
    failure."""


class OtherRankError(RuntimeError):
    """A call failed on another rank, so it cannot succeed on this one. The message names that rank and its error."""


class StepLeft(Unanimous):
    """Raised in a step, or an evaluation, that all ranks leave. The engine's call that started it catches it."""


class GradientGoneError(RuntimeError):
    """A gradient was asked for that is no longer kept in memory."""


class NonFiniteError(ArithmeticError):
    """The norm of a step's gradients is not finite, and `on_nonfinite` is "stop". Raised on every rank: the norm is global.

    Where layers had taken the step in place (no clipping, static loss scale, optimizer on SSD) the live state is torn, as
    a note says. Otherwise nothing has been stepped: the state is that of the step before, and may be saved.
    """


class TornStateError(RuntimeError):
    """The live state is torn: a part of it has taken a step that the rest cannot take any more, or a part is lost.

    Training goes on from the last checkpoint. `__cause__`: the error that led to it.
    """


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved or loaded. The message names the file or setting, and what to do."""
