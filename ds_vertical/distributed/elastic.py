"""How many micro-batches each rank brings to a step, where the JSON has `vertical_schedule.elastic`.

[Note: agreed counts] Each rank measures the seconds that one micro-batch computes on it, and tells the others as a step begins,
with the numbers of `step_shares`. From the same integers all ranks choose the same counts for the step behind that one. A rank
that is four times as slow so gets about a quarter of another one's micro-batches. The counts change where the slowest rank
would then be done GAIN sooner, by what was measured.

[Note: the record] Rank 0 writes a line to the run's log ahead of the first step of an engine, and of each step whose counts are
others. `"counts"` names a file with such lines, which may be the log itself; what else stands there is ignored. A line holds
from its step on, and replaces what lines above it say of later steps: so the log of a run that was resumed, joined to that of
the run before, says what both did. A run that takes its counts from a log says so in its lines, which are no such lines: in the
same file they would replace what the log says of steps that this run has not come to.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import Final, NoReturn

from ds_vertical.compat import accelerator
from ds_vertical.distributed import ranks
from ds_vertical.distributed.step_shares import StepShares
from ds_vertical.errors import ConfigError, LoopError
from ds_vertical.schedule.events import Event, Op
from ds_vertical.schedule.trace import Tracer
from ds_vertical.types import ElasticSettings

_KEY: Final = "vertical_schedule.elastic"
GAIN: Final = 1.03  # by which the slowest rank's seconds must fall for counts to change
MEASURED: Final = 3  # steps, of whose seconds the median counts
_LINE: Final = re.compile(r"elastic: (?:engine (\d+): )?from step (\d+): micro-batches(( \d+)+)")
_GIGA: Final = 1_000_000_000
RankCounts = tuple[int, ...]  # by rank
_num_engines = 0  # of this process, with `elastic`


class ComputeMeter(Tracer):
    """A tracer that also adds up the seconds of what micro-batches compute; every record goes on to `inner`."""

    def __init__(self, inner: Tracer) -> None:
        self.keeps = inner.keeps
        self.wait, self.count, self.step = inner.wait, inner.count, inner.step
        self._inner = inner
        self._seconds, self._num_micro_batches = 0.0, 0

    def span(
        self, resource: str, name: object, start: float, end: float, num_bytes: int = 0, *, issue: float | None = None
    ) -> None:
        """See `Tracer.span`."""
        if isinstance(name, Event) and name.op in (Op.F, Op.HEAD, Op.B):
            self._seconds += end - start
            self._num_micro_batches += name.op is Op.HEAD
        self._inner.span(resource, name, start, end, num_bytes, issue=issue)

    def take(self) -> float | None:
        """Seconds of one micro-batch since the last call; None where none has been through the model."""
        seconds, count = self._seconds, self._num_micro_batches
        self._seconds, self._num_micro_batches = 0.0, 0
        return seconds / count if count else None


class ElasticCounts:
    """The counts of one engine. `total`: of all ranks in a step; `most`: of a rank. `replayed`: by the step from which they
    hold, those of a log; None: they are measured. `number`: of the engine, see [Note: the record]. See also
    [Note: agreed counts]."""

    def __init__(
        self,
        settings: ElasticSettings,
        total: int,
        most: int,
        replayed: Mapping[int, RankCounts] | None = None,
        number: int = 1,
    ) -> None:
        self._bounds = settings.min_micro_batches, most
        self._name = _named(number)
        self._measures = replayed is None
        self._from_step: dict[int, RankCounts] = dict(replayed or {})
        self._even = even_counts(total, ranks.world_size())
        self._log = settings.counts
        self._told: tuple[int, RankCounts] | None = None  # the last step that began, and its counts
        self._asked: int | None = None  # the last step for which seconds were told
        self._warned = False
        self._meter: ComputeMeter | None = None
        self._measured: deque[int] = deque(maxlen=MEASURED)

    @property
    def is_replayed(self) -> bool:
        """Whether the counts are those of a log."""
        return not self._measures

    @property
    def most(self) -> int:
        """The most micro-batches that a rank brings to a step: of a log, or of the bounds."""
        return self._bounds[1] if self._measures else max(map(max, self._from_step.values()))

    @property
    def least_most(self) -> int:
        """The least `max_micro_batches` with which the ranks can bring their total."""
        return max(self._even)

    @staticmethod
    def count_engine() -> None:
        """The engine of these counts has been made: the next one of this process has the next number."""
        global _num_engines
        _num_engines += 1

    @staticmethod
    def refuse_loop() -> NoReturn:
        """Raises LoopError, in a Trainer or a loop of the three calls: those bring as many micro-batches as they have."""
        raise LoopError(
            f"{_KEY}: got counts for each rank, and a Trainer, or a loop that calls the engine for each micro-batch, which"
            " brings as many as it has; remove elastic, or call engine.train_batch(data_iter)"
        )

    def metered(self, tracer: Tracer) -> Tracer:
        """What the engine takes for its tracer: that one, with a meter before it where counts are measured."""
        if not self._measures:
            return tracer
        self._meter = ComputeMeter(tracer)
        return self._meter

    def counts(self, step: int) -> RankCounts:
        """Those of a step, from 1 on."""
        earlier = [first for first in self._from_step if first <= step]
        return self._from_step[max(earlier)] if earlier else self._even

    def begin(self, step: int) -> int:
        """A step is about to take its micro-batches; returns how many this rank takes. See [Note: the record]. Raises
        ConfigError, on all ranks alike, where a log begins behind this step."""
        self._refuse_earlier(step)
        counts, told = self.counts(step), self._told
        if told is None or told[1] != counts or step not in (told[0], told[0] + 1):
            source = "" if self._measures else "by the log, "
            accelerator.log(f"ds_vertical: {self._name}: {source}from step {step}: micro-batches {' '.join(map(str, counts))}")
        self._told = step, counts
        return counts[ranks.rank()]

    def _refuse_earlier(self, step: int) -> None:
        first = min(self._from_step, default=step)
        if not self._measures and step < first:
            raise ConfigError(
                f"{_KEY}.counts: got {json.dumps(self._log)}, whose first counts hold from step {first} on, and this is step"
                f" {step}; write the log of the run from its start, and behind it those of the runs that resumed it, or null"
            )

    def nanoseconds(self, step: int) -> int:
        """Of a micro-batch on this rank, by the steps before this one; 0 where they are not measured. A step that starts over
        asks again: what has run of it was cut somewhere, and says nothing."""
        seconds = None if self._meter is None else self._meter.take()
        asked, self._asked = self._asked, step
        if seconds is not None and step != asked:
            self._measured.append(max(1, round(seconds * _GIGA)))
        return median_low(self._measured) if self._measured else 0

    def note(self, step: int, shares: StepShares) -> None:
        """All ranks have told what they bring to this step, and have measured ahead of it: choose the counts behind it."""
        self._warn_of_fewer(step, shares)
        nanoseconds = [each.nanoseconds for each in shares.ranks]
        if not self._measures or not all(nanoseconds):
            return
        before = self.counts(step)
        self._from_step = {first: counts for first, counts in self._from_step.items() if first <= step}
        chosen = fastest_counts(nanoseconds, sum(before), self._bounds)
        if _slowest(before, nanoseconds) > GAIN * _slowest(chosen, nanoseconds):
            self._from_step[step + 1] = chosen

    def _warn_of_fewer(self, step: int, shares: StepShares) -> None:
        """Once, where an iterator had fewer than the step's counts. One for each step would, and lose what others have left."""
        if self._warned or shares.counts == self.counts(step):
            return
        self._warned = True
        brought, wanted = (" ".join(map(str, counts)) for counts in (shares.counts, self.counts(step)))
        accelerator.log(
            f"ds_vertical: warning: {self._name}: the ranks bring {brought} micro-batches to step {step}, in place of {wanted}:"
            " an iterator has ended; give train_batch one iterator for the whole run, since a rank leaves in one for each step"
            " what is beyond its count"
        )


def _slowest(counts: RankCounts, nanoseconds: Sequence[int]) -> int:
    return max(count * each for count, each in zip(counts, nanoseconds, strict=True))


def even_counts(total: int, num_ranks: int) -> RankCounts:
    """As equal as may be, the first ranks' the larger ones."""
    return tuple(total // num_ranks + (rank < total % num_ranks) for rank in range(num_ranks))


def fastest_counts(nanoseconds: Sequence[int], total: int, bounds: tuple[int, int]) -> RankCounts:
    """Counts within the bounds (least, most) whose slowest rank is done soonest; of several ranks the first one gets more."""
    least, most = bounds
    counts = [least] * len(nanoseconds)
    for _ in range(total - sum(counts)):
        open_ranks = (rank for rank, count in enumerate(counts) if count < most)
        soonest = min(open_ranks, key=lambda rank: ((counts[rank] + 1) * nanoseconds[rank], rank))
        counts[soonest] += 1
    return tuple(counts)


# ---- from the JSON


def open_elastic(settings: ElasticSettings | None, micro_batches: int, measures: bool = True) -> ElasticCounts | None:
    """The counts of a run whose JSON has `micro_batches` for each rank; None where ranks bring as many. `measures`: whether
    the arm can choose counts itself. Collective. Raises ConfigError, on all ranks alike."""
    if settings is None:
        return None
    num_ranks = ranks.world_size()
    if num_ranks == 1:
        raise ConfigError(
            f"{_KEY}: got {_shown(settings)} with one rank, which has nobody to leave micro-batches to; remove it"
        )
    total, most = settings.total_of(micro_batches, num_ranks), settings.most_of(micro_batches, num_ranks)
    _refuse_total(settings, micro_batches, num_ranks)
    number = _num_engines + 1
    if settings.counts is None:
        _refuse_measuring(measures)
        return ElasticCounts(settings, total, most, number=number)
    with ranks.all_or_none(f"{_KEY}.counts"):
        text = _read(settings.counts) if ranks.rank() == 0 else ""
    text, number = ranks.all_gathered((text, number))[0]
    found = read_counts(text, settings, micro_batches, num_ranks, number)
    return ElasticCounts(settings, total, most, found, number)


def _named(number: int) -> str:
    """What the lines of an engine begin with."""
    return "elastic" if number == 1 else f"elastic: engine {number}"


def _shown(settings: ElasticSettings) -> str:
    written = {key: value for key, value in vars(settings).items() if value is not None}
    return json.dumps(written)


def _refuse_total(settings: ElasticSettings, micro_batches: int, num_ranks: int) -> None:
    """A total that no counts within the bounds make."""
    least, total = settings.min_micro_batches, settings.total_of(micro_batches, num_ranks)
    got = f"{_KEY}.total: got {total}"
    if settings.total is None:
        got = f"{_KEY}.total: got null, which is gradient_accumulation_steps {micro_batches} x {num_ranks} ranks = {total},"
    if total < least * num_ranks:
        raise ConfigError(
            f"{got} for {num_ranks} ranks with min_micro_batches {least}; write {least * num_ranks} or more, or a smaller"
            " min_micro_batches"
        )
    if settings.max_micro_batches is not None and total > settings.max_micro_batches * num_ranks:
        raise ConfigError(
            f"{got} for {num_ranks} ranks with max_micro_batches {settings.max_micro_batches}; write"
            f" {settings.max_micro_batches * num_ranks} or less, or a larger max_micro_batches"
        )


def _refuse_measuring(measures: bool) -> None:
    """Counts that nothing can choose."""
    remedy = "write the log of a run on the CPU with vertical_schedule, which has counts, or remove elastic"
    if not measures:
        raise ConfigError(
            f'{_KEY}.counts: got null with "enabled": false; stock has collectives in each micro-batch, so no counts are faster'
            f" than equal ones; {remedy}"
        )
    if accelerator.device_name() != "cpu":
        raise ConfigError(
            f"{_KEY}.counts: got null on {accelerator.device_name()}, where a micro-batch's seconds are not measured; {remedy}"
        )


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError as error:
        raise ConfigError(
            f"{_KEY}.counts: got {json.dumps(path)}, which cannot be read ({error.strerror}); write the log of a run"
            " with elastic, on the first rank's host, or null"
        ) from error


def read_counts(
    text: str, settings: ElasticSettings, micro_batches: int, num_ranks: int, number: int = 1
) -> dict[int, RankCounts]:
    """The counts of a log for the engine of that number, by the step from which they hold: see [Note: the record]. Raises
    ConfigError."""
    lines = [(int(match[1] or 1), int(match[2]), tuple(map(int, match[3].split()))) for match in _LINE.finditer(text)]
    if not lines:
        raise ConfigError(
            f'{_KEY}.counts: got {json.dumps(settings.counts)}, which has no line such as "elastic: from step 1: micro-batches'
            f' {" ".join(["4"] * num_ranks)}"; write the log of a run with elastic, or null'
        )
    engine = _engine_of({each for each, _, _ in lines}, settings, number)
    found: dict[int, RankCounts] = {}
    for step, counts in ((step, counts) for each, step, counts in lines if each == engine):
        _refuse_counts(step, counts, settings, settings.total_of(micro_batches, num_ranks), num_ranks)
        found = {first: each for first, each in found.items() if first < step} | {step: counts}
    return found


def _engine_of(engines: set[int], settings: ElasticSettings, number: int) -> int:
    """Whose lines the engine of this number takes, of a log with the lines of these engines."""
    if len(engines) == 1:
        return next(iter(engines))
    if number not in engines:
        raise ConfigError(
            f"{_KEY}.counts: got {json.dumps(settings.counts)}, with the counts of engines"
            f" {', '.join(map(str, sorted(engines)))} of one process, and this is engine {number} with elastic in its process;"
            " write a file with the lines of one engine alone, or null"
        )
    return number


def _refuse_counts(step: int, counts: RankCounts, settings: ElasticSettings, total: int, num_ranks: int) -> None:
    got = f"{_KEY}.counts: got micro-batches {', '.join(map(str, counts))} from step {step} on"
    least, most = settings.min_micro_batches, settings.max_micro_batches
    if len(counts) != num_ranks:
        raise ConfigError(f"{got}, for {len(counts)} ranks, in a run of {num_ranks}; write the log of a run of {num_ranks}")
    if sum(counts) != total:
        raise ConfigError(
            f"{got}, which are {sum(counts)} together, with total {total}; write a log whose counts make {total}, or"
            f' "total": {sum(counts)}'
        )
    if min(counts) < least or (most is not None and max(counts) > most):
        wanted = f"min_micro_batches {least}" if min(counts) < least else f"max_micro_batches {most}"
        raise ConfigError(f"{got}, with {wanted}; write a log whose counts are within the bounds, or other bounds")
