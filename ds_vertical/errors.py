"""The exceptions that a user may catch, and those that commands turn into messages."""

from __future__ import annotations


class ConfigError(ValueError):
    """A configuration that cannot run as written. One fault per line: JSON path, value got, what to write instead."""


class ScheduleError(ValueError):
    """A schedule, or a piece of its text, that cannot be run as it stands."""


class CostsError(ValueError):
    """Numbers that describe no machine or no model; names the key, the value and what to write instead."""


class MemoryBudgetError(ValueError):
    """A run that would not fit; names the tier, the bytes, and each number in the JSON whose change alone makes it fit."""


class StorageError(RuntimeError):
    """A file of the run that cannot be used; the message names file, operation, errno text and remedy."""


class LayerError(ValueError):
    """The layers of the model cannot be found or used; the message says what to write in the JSON."""


class Unanimous(BaseException):
    """What all ranks have decided together, and leave a section with: no failure."""


class OtherRankError(RuntimeError):
    """What this rank was asked for has failed on another one; the message says which, and how."""


class StepLeft(Unanimous):
    """Raised in a step, or an evaluation, that all ranks leave, and caught by whoever started it."""


class GradientGoneError(RuntimeError):
    """A gradient that is in memory no longer."""


class NonFiniteError(ArithmeticError):
    """The norm of a step's gradients is not finite, and `on_nonfinite` is "stop". Raised on every rank: the norm is global.

    Where layers had taken the step in place (no clipping, static loss scale, optimizer on SSD) the live state is torn, as
    a note says. Otherwise nothing has been stepped: the state is that of the step before, and may be saved.
    """


class TornStateError(RuntimeError):
    """Some of the live state has taken a step that the rest has not, and cannot, or is lost. `__cause__`: what failed."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be saved or loaded; the message names the file or setting, and what to do."""
