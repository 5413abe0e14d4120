"""What rank 0 says of a run's steps while it trains: a line on the terminal, and scalars to DeepSpeed's monitor.

All of it is read off what is there anyway: the clock at each step's end, the tokens, the spans that the engine gives its
tracer, the schedule that ran. Nothing waits for the device: on one that computes asynchronously the computation's seconds
cannot be told, so the resource that decides the bound is named instead of the busiest one.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ds_vertical import batches as micro
from ds_vertical import compat, ranks
from ds_vertical.account import Account, Facts, RanStep, Share
from ds_vertical.bound import step_bound
from ds_vertical.config import ConfigError
from ds_vertical.contention import Neighbours
from ds_vertical.limits_cache import training_report
from ds_vertical.machine import CostsError, Machine
from ds_vertical.pace import BusyMeter, Goal, Pace, Reading
from ds_vertical.schedule import Schedule
from ds_vertical.statusline import StatusLine, is_terminal
from ds_vertical.survey import Follower, facts_of
from ds_vertical.trace import Tracer, now

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
        self._neighbours = Neighbours()
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
        meter = BusyMeter(tracer, (*_ON_THE_HOST, "compute") if compat.is_one_memory() else _ON_THE_HOST)
        self._pace = Pace(meter)
        return meter

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """The block is a step; the line stands below whatever it prints."""
        if not self._watched:
            yield
            return
        self._pace.begin(now())
        self._neighbours.begin()
        words = [f"step {self._engine.global_steps + 1}", *self._words]
        drawn = self._drawn and (self._forced or is_terminal(sys.stderr))  # which somebody may have redirected since
        try:
            with StatusLine(words) if drawn else contextlib.nullcontext():
                yield
        except BaseException:
            self._pace.forget()
            raise

    def note(self, loss: torch.Tensor, batches: Sequence[Any]) -> None:
        """The step over these micro-batches has ended, with this mean loss."""
        if not self._watched:
            return
        tokens = micro.count_tokens(list(batches))
        reading = self._pace.end(now(), tokens * ranks.world_size(), self._goal(tokens, batches))
        all_told = self._pace.meter is not None and "compute" in self._pace.meter.resources
        self._words = reading.words(all_told)
        self._words[_RATES:_RATES] = self._neighbours.words()
        if self._monitored:
            self._write(reading, loss)

    def _write(self, reading: Reading, loss: torch.Tensor) -> None:
        scalars = reading.scalars()
        regime = getattr(self._engine.optimizer, "regime", None)  # a plain engine's optimizer has none
        if regime is not None and not regime.certain and regime.hit_rate is not None:
            scalars["speculation_hit_rate"] = regime.hit_rate
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
            report = training_report(self._folder)
            return None if report is None else Goals(self._engine, report, tokens)
        except (ConfigError, CostsError) as error:
            compat.log(f"ds_vertical: no bound beside the steps: {error}")
            return None


class Goals:
    """The bounds of an engine's steps at the rates of a report of `ds-vertical limits`; made at the end of its first step.

    `tokens` of one micro-batch. Raises CostsError for rates that are none, or those of another kind of machine.
    """

    def __init__(self, engine: Any, report: Mapping[str, Any], tokens: int) -> None:
        self._facts = facts_of(engine, tokens)
        self._machine = Machine.from_dict(report)
        if self._machine.one_memory != self._facts.one_memory:
            raise CostsError("the machine was measured with another accelerator; run `ds-vertical limits` again")
        self._rates = layer_rates(report, self._facts, getattr(engine.module, "config", None))
        self._facts.shape(self._rates)  # seconds that are none are told here, not by a later step
        self._follower = Follower(engine)
        self._known: dict[tuple[Schedule, Share, bool], Goal] = {}

    def of_step(self, tokens: int) -> Goal:
        """Of the step that has just ended, over so many tokens of this rank. To be asked after every step."""
        return self.of(self._follower.step(), tokens)

    def of(self, ran: RanStep, tokens: int) -> Goal:
        """Of a step with that schedule. Its computation counts where each micro-batch has the tokens that were measured."""
        whole = bool(self._rates) and tokens == self._facts.tokens * ran.schedule.num_micro_batches
        key = (ran.schedule, ran.due, whole)
        if key not in self._known:
            account, rates = Account(self._facts, (ran,)), self._rates if whole else {}
            bound = step_bound(ran.schedule, self._machine, account.shape(ran, rates), parts=account.parts(ran))
            self._known[key] = Goal(bound.seconds, bound.resource, whole)
        return self._known[key]


def layer_rates(report: Mapping[str, Any], facts: Facts, config: Any) -> Mapping[str, float]:
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
