"""Several hosts of one run: what each was busy with in a step, and which one is the slowest.

All hosts take equally long for a step, since each waits for the others. So the slowest one is told by its own work: the host
whose disk, cores or optimizer is busy for the longest time beyond that of the next host. Events in which a rank waits for the
others in a collective (REDUCE, NORM) do not count as work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from ds_vertical.cli.report.charts import title
from ds_vertical.cli.report.run_folder import RecordedRun
from ds_vertical.cli.report.timeline import Timeline, by_time
from ds_vertical.errors import ScheduleError
from ds_vertical.schedule.events import Op, parse_event
from ds_vertical.schedule.trace import Span, StepTrace, union

SSD: Final = ("ssd_read", "ssd_write")
COMPARED: Final = ("compute", *SSD, "adam")
_NOTABLE: Final = 0.05  # of a step: less is no difference between hosts


@dataclass(frozen=True)
class HostWork:
    """Medians over the traced steps but the first, of the host's slowest rank: busy seconds and bytes/s, by resource."""

    host: str
    ranks: tuple[int, ...]
    busy_s: dict[str, float]
    rates: dict[str, float]


@dataclass(frozen=True)
class HostsCompared:
    """`slowest`: the host's name, None where no host stands out; `resource`: what keeps it busy. `step_s`: the median step."""

    hosts: tuple[HostWork, ...]
    slowest: str | None
    resource: str
    step_s: float

    def describe(self) -> str:
        """The slowest host, in a sentence."""
        if self.slowest is None:
            return "No host is notably slower than the others."
        first, second, *_ = sorted(self.hosts, key=lambda each: -each.busy_s[self.resource])
        rates = [self._at_rate(host) for host in (first, second)]
        return (
            f"{self.slowest} is the slowest host: {title(self.resource)} took {first.busy_s[self.resource]:.3f} s{rates[0]}"
            f" of its step of {self.step_s:.3f} s, and {second.busy_s[self.resource]:.3f} s{rates[1]} on {second.host}."
        )

    def _at_rate(self, host: HostWork) -> str:
        """Of a disk, so that one that is slow can be told from one that has much to do."""
        rate = host.rates.get(self.resource)
        return "" if rate is None else f" at {rate / 1e6:.3g} MB/s"


def compared(folder: RecordedRun) -> HostsCompared | None:
    """The hosts of a folder's traced run; None where it ran on one, or was not traced."""
    by_host: dict[str, list[Timeline]] = {}
    for line in folder.timelines():
        by_host.setdefault(line.host_id or line.host, []).append(line)
    if len(by_host) < 2 or not all(line.steps for lines in by_host.values() for line in lines):
        return None
    names = [lines[0].host for lines in by_host.values()]
    hosts = tuple(_work(_shown(lines, names), lines) for lines in by_host.values())
    steps = [step for lines in by_host.values() for line in lines for step in _counted(line)]
    step_s = median(step.end - step.start for step in steps)
    excess = {name: _excess([host.busy_s[name] for host in hosts]) for name in COMPARED}
    resource = max(excess, key=excess.__getitem__)
    slowest = max(hosts, key=lambda host: host.busy_s[resource]).host
    return HostsCompared(hosts, slowest if excess[resource] > _NOTABLE * step_s else None, resource, step_s)


def _shown(lines: Sequence[Timeline], names: Sequence[str]) -> str:
    """A host's name; of several with one name, with its ranks."""
    name, ranks = lines[0].host, [str(line.rank) for line in lines]
    return name if names.count(name) == 1 else f"{name} (rank{'s' * (len(ranks) > 1)} {', '.join(ranks)})"


def _excess(seconds: Sequence[float]) -> float:
    """By how much the largest exceeds the next one."""
    *_, second, first = sorted(seconds)
    return first - second


def _counted(line: Timeline) -> list[StepTrace]:
    steps = by_time(line.steps)
    return steps[1:] or steps


def _work(host: str, lines: Sequence[Timeline]) -> HostWork:
    busy: dict[str, float] = {}
    rates: dict[str, float] = {}
    for name in COMPARED:
        spans = [[[span for span in step.spans if _is_work(span, name)] for step in _counted(line)] for line in lines]
        steps = [_counted(line) for line in lines]
        seconds = [[_busy_s(*each) for each in zip(own, taken, strict=True)] for own, taken in zip(steps, spans, strict=True)]
        busy[name] = max(median(each) for each in seconds)
        moved = sum(span.bytes for rank in spans for step in rank for span in step)
        total = sum(map(sum, seconds))
        if name in SSD and total:
            rates[name] = moved / total
    return HostWork(host, tuple(line.rank for line in lines), busy, rates)


def _busy_s(step: StepTrace, spans: Sequence[Span]) -> float:
    return union((max(span.start, step.start), min(span.end, step.end)) for span in spans)


def _is_work(span: Span, resource: str) -> bool:
    if span.resource != resource:
        return False
    try:
        return resource != "compute" or parse_event(span.name).op not in (Op.REDUCE, Op.NORM)
    except ScheduleError:
        return True
