"""Which share of a step may be taken before the norm is known, and whether that is worth trying.

[Note: speculation] An early step is taken with the factor that the gradients will have if the norm asks for no clipping. If
the norm then says otherwise, or the step is skipped, the early step is discarded; a step that counts is redone with the true
factor, which costs one more read and write of the state. So without certainty it is tried only where it would lately have
come true: the hit rate is the moving average over the last steps, whether they were tried or not.
"""

from __future__ import annotations

_MEMORY = 0.9  # weight of the past in the hit rate: half of it is the last seven steps
_WORTH = 0.5  # a miss costs about what a hit saves
_EARLY_DELAY = 0.25  # share left to the next forward, which takes about a quarter of a step's compute


class StepTiming:
    """`delay`, `speculation`: the JSON's `optimizer_delay` and `optimizer_speculation` (None: chosen). `certain`: nothing of
    the norm but whether the step counts can change a step (no clipping, static loss scale). `in_files`: the state is in files,
    of which there can be a second generation. `stops`: a non-finite norm ends the run instead of being skipped, so that a
    certain early step never has to be discarded and needs no second generation."""

    def __init__(
        self, delay: float | None, speculation: bool | None, certain: bool, in_files: bool, stops: bool = False
    ) -> None:
        self.stops = stops
        self._delay = delay
        self._always = certain or speculation is True
        self.certain = certain
        self.possible = in_files and delay != 1.0 and (certain or speculation is not False)
        self.demanded = (delay is not None and certain) or speculation is True
        self._rate = 0.0
        self._num_steps = self._num_tried = self._num_hits = 0

    def give_up(self) -> None:
        """There is no room for a second generation: no early steps."""
        self.possible = False

    @property
    def generations(self) -> int:
        """How many generations of state and parameter files the early steps need."""
        return 2 if self.possible and not (self.stops and self.certain) else 1

    @property
    def delay(self) -> float:
        """The share of every layer that is never stepped early."""
        return self._delay if self._delay is not None else _EARLY_DELAY if self.possible else 1.0

    @property
    def early(self) -> bool:
        """Whether the next step is tried early."""
        return self.possible and (self._always or self._rate >= _WORTH)

    @property
    def final(self) -> bool:
        """Whether no early step is ever redone: it counts, or the whole step is skipped."""
        return self.possible and self.certain

    @property
    def can_be_left(self) -> bool:
        """Whether a step that is left before its norm is as if it had not been: early steps in place have changed the state."""
        return not self.early or self.generations > 1

    @property
    def leaves_steps(self) -> bool:
        """Whether part of the step is left to the next forward; otherwise all of it comes at once, after the norm."""
        return self.possible or self.delay > 0

    @property
    def hit_rate(self) -> float | None:
        """Hits among the steps that were tried early; None before the first."""
        return self._num_hits / self._num_tried if self._num_tried else None

    def note(self, tried: bool, hit: bool) -> None:
        """Remember whether the factor guessed was the true one, in a step that was or was not tried early."""
        first = self._num_steps == 0
        self._rate = float(hit) if first else _MEMORY * self._rate + (1 - _MEMORY) * hit
        self._num_steps += 1
        self._num_tried += tried
        self._num_hits += tried and hit

    def describe(self) -> str:
        """For the start-up line."""
        if not self.possible:
            return f"steps {'in the next forward' if self.delay else 'after the norm'}"
        when = "in the backward" if self.certain else "in the backward where the norm has lately asked for no clipping"
        if self.generations == 1:
            when += ", in place (a norm that is not finite tears the state)"
        return f"steps {when}, a share of {self.delay:g} in the next forward"
