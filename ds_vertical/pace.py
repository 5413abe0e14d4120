"""How fast steps go: tokens per second, the fraction of the bound, how busy each resource was.

A step's seconds run from the end of the step before to its own, so that all of them together are the wall clock. Rates are
medians over the last steps: a pause between two of them (an evaluation, a save) shows in that step's seconds alone.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import median

from ds_vertical.trace import Tracer, union

WINDOW = 5  # steps of the medians
_MOST_SPANS = 1 << 17  # kept for the next step: an engine that only evaluates from now on has no next step


class BusyMeter(Tracer):
    """A tracer that also keeps when each of `resources` was busy; every record goes on to `inner`."""

    def __init__(self, inner: Tracer, resources: Collection[str]) -> None:
        self.resources = tuple(resources)
        self._inner = inner
        self._spans: deque[tuple[str, float, float]] = deque(maxlen=_MOST_SPANS)  # append and popleft are atomic
        self.wait, self.count = inner.wait, inner.count

    def span(
        self, resource: str, name: object, start: float, end: float, num_bytes: int = 0, *, issue: float | None = None
    ) -> None:
        if resource in self.resources:
            self._spans.append((resource, start, end))
        self._inner.span(resource, name, start, end, num_bytes, issue=issue)

    def step(self) -> contextlib.AbstractContextManager[None]:
        return self._inner.step()

    def take(self, start: float, end: float) -> dict[str, float]:
        """Seconds in which each resource was busy between two times, by the spans it has heard of; these are forgotten."""
        intervals: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for _ in range(len(self._spans)):
            resource, begun, ended = self._spans.popleft()
            intervals[resource].append((max(begun, start), min(ended, end)))
        return {resource: union(intervals[resource]) for resource in self.resources}


@dataclass(frozen=True)
class Goal:
    """The bound of one step in seconds, and the resource that decides it. Without `whole` its computation is not counted,
    since nobody knows its seconds: the true bound is this one or a longer one."""

    seconds: float
    resource: str
    whole: bool


@dataclass(frozen=True)
class Reading:
    """What one step's end says.

    step_s: seconds since the end of the step before. tokens_per_s: median of the last steps. busy: share of step_s in which
    each resource worked, of those that can be told. goal: the step's bound; fraction: of the seconds of the last steps (median)
    the share that their bounds are; both None where no bound is known.
    """

    step_s: float
    tokens_per_s: float
    busy: Mapping[str, float]
    goal: Goal | None
    fraction: float | None

    def words(self, all_told: bool) -> list[str]:
        """For one line on a terminal, the most important first. `all_told`: `busy` names every resource that may be the busiest
        one; otherwise the bound's is named, as the bound's."""
        words = [f"{self.tokens_per_s:,.{0 if self.tokens_per_s >= 10 else 2}f} tokens/s", f"last {self.step_s:.2f} s"]
        if self.goal is not None and self.fraction is not None:
            words.append(f"{'' if self.goal.whole else 'at least '}{self.fraction:.0%} of the bound")
        if all_told and self.busy:
            name = max(self.busy, key=lambda resource: self.busy[resource])
            words.append(f"busiest: {name} {self.busy[name]:.0%}")
        elif self.goal is not None:
            words.append(f"bound by {self.goal.resource}")
        return words

    def scalars(self) -> dict[str, float]:
        """By name, for a monitor."""
        scalars = {"tokens_per_s": self.tokens_per_s, "step_s": self.step_s}
        if self.goal is not None and self.fraction is not None:
            scalars[f"bound_fraction{'' if self.goal.whole else '_without_compute'}"] = self.fraction
        return scalars | {f"{resource}_busy_share": share for resource, share in self.busy.items()}


class Pace:
    """Makes a Reading at the end of each step. `meter`: hears what the resources do; None where nobody says."""

    def __init__(self, meter: BusyMeter | None = None) -> None:
        self.meter = meter
        self._since: float | None = None
        self._rates: deque[float] = deque(maxlen=WINDOW)
        self._fractions: deque[tuple[bool, float]] = deque(maxlen=WINDOW)

    def begin(self, at: float) -> None:
        """A step begins; its seconds run from the end of the step before, if there is one."""
        if self._since is None:
            self._since = at

    def forget(self) -> None:
        """The step has failed: the next one's seconds run from its own beginning."""
        self._since = None

    def end(self, at: float, tokens: int, goal: Goal | None = None) -> Reading:
        """The step has ended; `tokens` of all ranks, `goal` its bound. Raises RuntimeError without a `begin`."""
        if self._since is None:
            raise RuntimeError("Pace.end() without begin()")
        since, self._since = self._since, at
        step_s = max(at - since, 1e-9)
        self._rates.append(tokens / step_s)
        fraction = None
        if goal is not None:
            self._fractions.append((goal.whole, goal.seconds / step_s))
            fraction = median(share for whole, share in self._fractions if whole == goal.whole)
        busy = {} if self.meter is None else self.meter.take(since, at)
        shares = {resource: seconds / step_s for resource, seconds in busy.items()}
        return Reading(step_s, median(self._rates), shares, goal, fraction)
