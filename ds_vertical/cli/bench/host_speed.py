"""How fast the machine was in each step of a run.

It follows from the rates measured before and after the run, and from how long a layer took between the run's steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import harmonic_mean, mean

from ds_vertical.cli.common import JsonObject
from ds_vertical.planner.machine import Machine
from ds_vertical.planner.run_record import ExecutedStep

Report = JsonObject  # of `ds-vertical limits`
_KEY = "gauge_s"  # as records spell it


class Conditions:
    """The machine during one run. `reports`: measured beside it, in order of time. Raises CostsError for one without rates."""

    def __init__(self, reports: Sequence[Report]) -> None:
        machines = [report.get("machine", report) for report in reports if Machine.from_dict(report)]
        self._every = [report.get("rates", {}) for report in reports]
        self.machine = Machine.from_dict(_means(machines))
        self.rates: dict[str, float] = _means(self._every)

    @property
    def drift(self) -> float | None:
        """The share by which a layer took longer in one report than in another; None with one report, or without a layer."""
        seconds = [rates.get("layer_forward_s", 0.0) + rates.get("layer_backward_s", 0.0) for rates in self._every]
        return max(seconds) / min(seconds) - 1 if len(seconds) > 1 and min(seconds) > 0 else None

    def slowdown(self, steps: Sequence[ExecutedStep], index: int) -> float:
        """How much slower than in the reports a block was around a step, from its seconds before and after the step.

        1 where no block was timed there.
        """
        known = [step.gauge_s for step in steps[max(0, index - 1) : index + 1] if step.gauge_s is not None]
        usual = self.rates.get(_KEY)
        return mean(known) / usual if known and usual else 1.0

    def during(self, steps: Sequence[ExecutedStep], index: int) -> tuple[Machine, dict[str, float]]:
        """The machine and the rates during a step of the run."""
        factor = self.slowdown(steps, index)
        slowed = {key: value * factor if _is_of_host(key) else value for key, value in self.rates.items()}
        return self.machine.slowed(factor), slowed


_HOST_SECONDS = ("layer_forward_s", "layer_backward_s", "pre_forward_s", "pre_backward_s", "head_s")


def _is_of_host(key: str) -> bool:
    """Whether a rate is seconds of the host's computation."""
    return key in _HOST_SECONDS or key.endswith("_saved_s")


def _means(every: Sequence[JsonObject]) -> JsonObject:
    """By key, the mean of the seconds: of a rate's reciprocals, since it is work over them. What is no float is the first's."""
    found: JsonObject = {}
    for key, first in every[0].items():
        values = [each[key] for each in every if isinstance(each.get(key), float)]
        if isinstance(first, float) and len(values) == len(every):
            found[key] = harmonic_mean(values) if key.endswith("_per_s") else mean(values)
        else:
            found[key] = first
    return found
