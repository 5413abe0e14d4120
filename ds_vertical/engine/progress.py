"""What rank 0 says of a run's steps while it trains: a line on the terminal, and scalars to DeepSpeed's monitor.

All of it is read off what is there anyway: the clock at each step's end, the tokens, the spans that the engine gives its
tracer, the schedule that ran. Nothing waits for the device: on one that computes asynchronously the computation's seconds
cannot be told, so the resource that decides the bound is named instead of the busiest one.

A step's seconds run from the end of the step before to its own, so that all of them together are the wall clock. Rates are
medians over the last steps: a pause between two of them (an evaluation, a save) shows in that step's seconds alone.

[Note: giving way] Text that is printed while the line stands would begin at the line's end. So for that time the terminal's
`sys.stdout` and `sys.stderr`, and whoever holds them (logging does), write through a detour: the line is taken away, the text
written, and the line drawn again once the text has ended in a newline. What is written past Python's streams is not seen.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TextIO

import torch
from tqdm import tqdm

from ds_vertical.compat import accelerator
from ds_vertical.distributed import ranks
from ds_vertical.engine.machine_cache import kept_links, training_report
from ds_vertical.engine.run_log import Follower, facts_of
from ds_vertical.errors import ConfigError, CostsError
from ds_vertical.io.contention import OtherWork
from ds_vertical.io.runs import stripes
from ds_vertical.model import batch as micro
from ds_vertical.planner.bound import step_bound
from ds_vertical.planner.machine import Machine
from ds_vertical.planner.network import knows_links, with_pairs
from ds_vertical.planner.run_record import Account, ExecutedStep, KeptRecord, RunInfo, Share
from ds_vertical.schedule.events import Schedule
from ds_vertical.schedule.trace import Tracer, now, union

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_ON_THE_HOST = ("ssd_read", "ssd_write", "adam")  # work whose seconds the host knows whatever the device does
_RATES = 2  # words ahead of those about others: what a step takes, which they explain
_NOT_OF_THE_SHAPE = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")


class Progress:
    """One engine's steps, as rank 0 tells them; silent on other ranks, and where nobody looks.

    `shown`: whether to draw the line; None where `sys.stderr` is a terminal. `folder`: on the disk that the run uses.
    """

    def __init__(self, engine: Any, shown: bool | None, folder: Path | None = None) -> None:
        first = ranks.rank() == 0
        self._engine = engine
        self._folder = folder
        self._forced = shown is True
        self._drawn = first and (is_terminal(sys.stderr) if shown is None else shown)
        self._monitored = first and engine.monitor.enabled
        self._pace = Pace()
        self._other_work = OtherWork()
        self._goals: Goals | None = None
        self._asked_for_goals = False
        self._words: list[str] = []

    @property
    def _watched(self) -> bool:
        return self._drawn or self._monitored

    def metered(self, tracer: Tracer) -> Tracer:
        """What the engine takes for its tracer: that one, with a meter before it where somebody looks."""
        if not self._watched:
            return tracer
        meter = BusyMeter(tracer, (*_ON_THE_HOST, "compute") if accelerator.is_one_memory() else _ON_THE_HOST)
        self._pace = Pace(meter)
        return meter

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """The block is a step; the line stands below whatever it prints."""
        if not self._watched:
            yield
            return
        self._pace.begin(now())
        self._other_work.begin()
        words = [f"step {self._engine.global_steps + 1}", *self._words]
        drawn = self._drawn and (self._forced or is_terminal(sys.stderr))  # which somebody may have redirected since
        try:
            with StatusLine(words) if drawn else contextlib.nullcontext():
                yield
        except BaseException:
            self._pace.forget()
            raise

    def note(self, loss: torch.Tensor, batches: Sequence[Any], tokens_of_all: int) -> None:
        """The step over these micro-batches has ended, with this mean loss. `tokens_of_all`: those of all ranks."""
        if not self._watched:
            return
        tokens = micro.count_tokens(list(batches))
        reading = self._pace.end(now(), tokens_of_all, self._goal(tokens, batches))
        all_told = self._pace.meter is not None and "compute" in self._pace.meter.resources
        self._words = reading.words(all_told)
        self._words[_RATES:_RATES] = self._other_work.words()
        if self._monitored:
            self._write(reading, loss)

    def _write(self, reading: Reading, loss: torch.Tensor) -> None:
        scalars = reading.scalars()
        timing = getattr(self._engine.optimizer, "timing", None)  # a plain engine's optimizer has none
        if timing is not None and not timing.certain and timing.hit_rate is not None:
            scalars["speculation_hit_rate"] = timing.hit_rate
        # the norm, which was taken after the last loss, has waited for the device already
        events = {"Train/Samples/train_loss": float(loss)} | {f"Train/vertical/{name}": scalars[name] for name in scalars}
        samples = self._engine.global_samples
        self._engine.monitor.write_events([(name, value, samples) for name, value in events.items()])

    def _goal(self, tokens: int, batches: Sequence[Any]) -> Goal | None:
        if not self._asked_for_goals:
            self._asked_for_goals = True
            self._goals = self._make_goals(micro.count_tokens(list(batches[:1])))
        return None if self._goals is None else self._goals.of_step(tokens)

    def _make_goals(self, tokens: int) -> Goals | None:
        """Where a schedule runs, on a machine that was measured. `tokens` of one micro-batch."""
        if not hasattr(self._engine, "ran"):
            return None
        try:
            run = None if self._folder is None else stripes.run_of(self._folder)
            report = training_report(self._folder) if run is None else training_report(self._folder, run.folders[1:])
            return None if report is None else Goals(self._engine, report, tokens)
        except (ConfigError, CostsError) as error:
            accelerator.log(f"ds_vertical: no bound beside the steps: {error}")
            return None


class Goals:
    """The bounds of an engine's steps at the rates of a report of `ds-vertical limits`; made at the end of its first step.

    `tokens` of one micro-batch. Raises CostsError for rates that are none, or those of another kind of machine.
    """

    def __init__(self, engine: Any, report: Mapping[str, Any], tokens: int) -> None:
        self._facts = facts_of(engine, tokens)
        self._machine, self._with_links = with_known_links(Machine.from_dict(report), self._facts, engine.host_names)
        self._facts = self._facts.on(self._machine)
        if self._machine.one_memory != self._facts.one_memory:
            raise CostsError("the machine was measured with another accelerator; run `ds-vertical limits` again")
        self._rates = layer_rates(report, self._facts, getattr(engine.module, "config", None))
        self._facts.shape(self._rates)  # seconds that are none are told here, not by a later step
        self._follower = Follower(engine)
        self._known: dict[tuple[Schedule, Share, bool, KeptRecord | None], Goal] = {}

    def of_step(self, tokens: int) -> Goal:
        """Of the step that has just ended, over so many tokens of this rank. To be asked after every step."""
        return self.of(self._follower.step(), tokens)

    def of(self, ran: ExecutedStep, tokens: int) -> Goal:
        """Of a step with that schedule. Its computation counts where each micro-batch has the tokens that were measured."""
        whole = bool(self._rates) and tokens == self._facts.tokens * ran.schedule.num_micro_batches
        key = (ran.schedule, ran.due, whole, ran.kept)
        if key not in self._known:
            account, rates = Account(self._facts, (ran,)), self._rates if whole else {}
            bound = step_bound(ran.schedule, self._machine, account.shape(ran, rates), parts=account.parts(ran))
            self._known[key] = Goal(bound.seconds, bound.resource, whole, self._with_links)
        return self._known[key]


def with_known_links(machine: Machine, facts: RunInfo, hosts: Sequence[str]) -> tuple[Machine, bool]:
    """The machine with the links between a run's ranks, where these are known: as the machine says, or else as `limits --links`
    has kept them of as many ranks on these hosts. And whether they are known."""
    network = facts.network
    if network is None:
        return machine, facts.num_shards == 1  # else hosts have unequal numbers of ranks
    if not knows_links(machine, with_pairs(network, machine)):
        links = kept_links(hosts, network.ranks_per_node, accelerator.device_name())
        machine = machine.with_links(links or {})
    return machine, knows_links(machine, with_pairs(network, machine))


def layer_rates(report: Mapping[str, Any], facts: RunInfo, config: Any) -> Mapping[str, float]:
    """The report's rates where its layer is that of this run: the same model, micro-batch, dtype and threads. Otherwise none:
    the seconds of this run's computation were not measured. `config`: the model's Hugging Face configuration, if it has one."""
    settings, rates = report.get("settings") or {}, report.get("rates") or {}
    wanted = {"dtype": _DTYPES.get(facts.dtype), "tokens": facts.tokens, "sequences": facts.sequences}
    same = all(settings.get(name) == value for name, value in wanted.items())
    same = same and settings.get("threads") in (None, facts.threads) and "layer_forward_s" in rates
    return rates if same and _describes(settings.get("model"), config) else {}


def _describes(path: str | None, config: Any) -> bool:
    """Whether the Hugging Face configuration in the file is that of the model, defaults filled in."""
    if path is None or not hasattr(config, "to_dict"):
        return False
    try:
        fields = json.loads(Path(path).read_text())
        written = type(config).from_dict(fields).to_dict()
    except (OSError, ValueError, TypeError):  # gone, or another file now
        return False
    own = config.to_dict()
    keys = (written.keys() | own.keys()) - set(_NOT_OF_THE_SHAPE)
    return fields.get("model_type") == own.get("model_type") and all(written.get(key) == own.get(key) for key in keys)


WINDOW = 5  # steps of the medians
_MOST_SPANS = 1 << 17  # kept for the next step: an engine that only evaluates from now on has no next step


class BusyMeter(Tracer):
    """A tracer that also keeps when each of `resources` was busy; every record goes on to `inner`."""

    def __init__(self, inner: Tracer, resources: Collection[str]) -> None:
        self.resources = tuple(resources)
        self._inner = inner
        self._spans: deque[tuple[str, float, float]] = deque(maxlen=_MOST_SPANS)  # append and popleft are atomic
        self.wait, self.count, self.step = inner.wait, inner.count, inner.step

    def span(
        self, resource: str, name: object, start: float, end: float, num_bytes: int = 0, *, issue: float | None = None
    ) -> None:
        """A resource has worked from `start` to `end`: see `Tracer.span`."""
        if resource in self.resources:
            self._spans.append((resource, start, end))
        self._inner.span(resource, name, start, end, num_bytes, issue=issue)

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
    and without `with_links` what ranks send each other, since nobody knows the seconds: the true bound is this one or a longer
    one."""

    seconds: float
    resource: str
    whole: bool
    with_links: bool = True


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
            complete = self.goal.whole and self.goal.with_links
            words.append(f"{'' if complete else 'at least '}{self.fraction:.0%} of the bound")
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
            missing = [name for name, known in (("compute", self.goal.whole), ("links", self.goal.with_links)) if not known]
            scalars["bound_fraction" + ("_without_" + "_and_".join(missing) if missing else "")] = self.fraction
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


_SIZE = (120, 24)  # columns and lines, where the terminal does not say


class _Bar(tqdm):
    monitor_interval = 0  # no thread beside it: it is drawn once


def is_terminal(stream: TextIO | None) -> bool:
    """Whether somebody may be looking at the stream."""
    return stream is not None and stream.isatty()


def fit(words: Sequence[str], columns: int) -> str:
    """The words in one line that leaves the last column free; those that find no room are left out, from the end."""
    words = list(words)
    while len(words) > 1 and len(" | ".join(words)) >= columns:
        words.pop()
    return " | ".join(words)[: max(0, columns - 1)]


# not rich.live: it replaces sys.stdout and sys.stderr, past which loggers write that hold the streams; the detours would stay
class StatusLine:
    """The words below what is printed, on `sys.stderr`, within a `with` block; afterwards the terminal is as if they had
    never been there. See [Note: giving way]."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self._detours = contextlib.ExitStack()

    def __enter__(self) -> None:
        stream = sys.stderr
        columns, lines = _size(stream)
        text = fit(self._words, columns)
        # before the detours: tqdm keeps the stream's own `write`
        self._bar = _Bar(desc=text, bar_format="{desc}", leave=False, file=stream, ncols=columns, nrows=lines)
        self._stands = True
        terminals = {id(stream): stream for stream in (sys.stdout, sys.stderr) if is_terminal(stream)}
        for each in terminals.values():
            self._detours.enter_context(self._detour(each))

    def __exit__(self, *_: object) -> None:
        self._detours.close()
        if not self._stands:
            self._bar.delay = float("inf")  # for `close`, which would go back to the start of an unfinished text
        self._bar.close()

    @contextlib.contextmanager
    def _detour(self, stream: TextIO) -> Iterator[None]:
        """A stream that takes no attributes is left as it is."""
        attributes: dict[str, Any] = getattr(stream, "__dict__", {})
        before, straight = attributes.get("write"), stream.write

        def write(text: str) -> int:
            with self._bar.get_lock():
                self._give_way()
                try:
                    return straight(text)
                finally:
                    if text.endswith("\n"):
                        self._come_back()

        attributes["write"] = write
        try:
            yield
        finally:
            if attributes.get("write") is write:  # nobody else has taken another detour meanwhile
                del attributes["write"]
                if before is not None:
                    attributes["write"] = before

    def _give_way(self) -> None:
        if self._stands:
            self._bar.clear(nolock=True)
        self._stands = False

    def _come_back(self) -> None:
        self._bar.refresh(nolock=True)
        self._stands = True


def _size(stream: TextIO) -> tuple[int, int]:
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):  # no terminal, or no file
        return _SIZE
    return (size.columns, size.lines) if size.columns and size.lines else _SIZE
