"""What an engine's steps keep of forwards for their backwards: as the JSON asks, or as it is chosen behind the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ds_vertical.compat import accelerator
from ds_vertical.distributed import ranks
from ds_vertical.engine.handlers import ScheduleRunner
from ds_vertical.engine.keeping.growth import PassingBytes
from ds_vertical.engine.keeping.measured import EventTimes, measured_step, nothing_measured
from ds_vertical.engine.keeping.planner import KeepChoice, KeepPlanner
from ds_vertical.errors import LoopError, MemoryBudgetError
from ds_vertical.io.files import free_bytes
from ds_vertical.model.kept.kinds import KeptKinds
from ds_vertical.model.kept.probe import Probe, common_kinds
from ds_vertical.model.layers import LayerMap
from ds_vertical.offload.kept_store import ONE_CELL_REMEDY, KeptStore
from ds_vertical.planner.kept_activations import kept_cells, num_cells
from ds_vertical.planner.run_record import KeptRecord
from ds_vertical.schedule.events import Cell
from ds_vertical.schedule.trace import Tracer
from ds_vertical.types import HOLDING, ActivationSettings, RunSettings, Tier

OpenStore = Callable[[ActivationSettings, bool], KeptStore | None]
_Room = Mapping[Tier, float | None]


@dataclass(eq=False)
class _Measuring:
    """The first step of an engine that has yet to choose: what measures it, and the tracer that it would have."""

    probe: Probe
    times: EventTimes | None
    tracer: Tracer | None
    num_micro_batches: int


@dataclass(frozen=True, eq=False)
class _InForce:
    """By what steps keep. One object, so that an interrupt finds either all of it or all of what was before. `planner`: has yet
    to choose; None: nothing is left to choose."""

    settings: ActivationSettings
    store: KeptStore | None
    kinds: KeptKinds | None
    planner: KeepPlanner | None


class RunKeeping:
    """What the steps keep. `is_chosen`: whether the policy is the run's own choice, and not only its tier.

    `planner`: chooses where the JSON leaves it open; None: there is nothing to choose. `open_store`: makes the store for some
    settings, and is told whether cells give up where there is no room. `place`: the run's folder on SSD, and the bytes of host
    memory that the budget leaves for activations. `passing`: measures a step of a run with `elastic`, if set: the first one, or
    the first that keeps what the JSON asks for.
    """

    def __init__(
        self,
        vertical: RunSettings,
        layers: LayerMap,
        planner: KeepPlanner | None,
        open_store: OpenStore,
        place: tuple[Path | None, int],
    ) -> None:
        self._asked = asked = vertical.activations
        settings = replace(asked, keep=None) if asked.is_open else asked
        self.is_chosen = asked.keep is None
        self._now = _InForce(settings, open_store(settings, False), _kinds_of(settings), planner)
        self._layers = layers
        self._open_store = open_store
        self._folder, self._left = place
        self.passing: PassingBytes | None = None
        self._measuring: _Measuring | None = None
        self._ran: tuple[ActivationSettings, KeptStore | None] | None = None  # of the step under way, or of the last one

    @property
    def settings(self) -> ActivationSettings:
        """Those in force."""
        return self._now.settings

    @property
    def store(self) -> KeptStore | None:
        """Where kept bytes rest; None where none do."""
        return self._now.store

    @property
    def record(self) -> KeptRecord | None:
        """What the last step has kept; None: nothing."""
        settings, store = self._ran or (None, None)
        if settings is None or settings.keep in (None, "none"):
            return None
        held = {} if store is None else store.resting
        cells = tuple((tier, count) for tier, (count, _) in held.items())
        num_bytes = tuple((tier, size) for tier, (_, size) in held.items())
        kinds = self._now.kinds
        policy = settings.keep if kinds is None else kinds.in_force
        outputs = settings.keep_outputs if policy == settings.keep else None
        return KeptRecord(policy, tuple(settings.kept_shares.items()), cells, num_bytes, outputs)

    @property
    def is_asked(self) -> bool:
        """Whether the JSON asks for something to be kept."""
        return self._asked.keep not in (None, "none")

    # ---- a step

    def open_step(self, runner: ScheduleRunner, num_micro_batches: int, num_calls: int) -> tuple[Cell, ...]:
        """Prepare `runner` for a step whose micro-batches call the model so often each. Returns the layers and micro-batches of
        which what the forward keeps leaves the device."""
        self._stop_measuring(runner)  # of a step that starts over
        settings, store, kinds = self._now.settings, self._now.store, self._now.kinds
        runner.kinds, runner.kept = kinds, store
        self._ran = settings, store
        if self.passing is not None and self._tells_passing:
            runner.kept = self.passing.heard_by(store)
        if self.is_chosen and num_calls > 1:
            runner.kinds = runner.kept = self._ran = None
            return ()
        if self._now.planner is not None:
            self._measure(runner, num_micro_batches)
        one_memory, count = accelerator.is_one_memory(), self._layers.num_layers
        cells = kept_cells(count, num_micro_batches, settings.kept_shares, one_memory)
        if kinds is not None:
            kinds.cells = None if len(cells) == num_cells(count, num_micro_batches) else frozenset(cells)
        away = {cell: tier for cell, tier in cells.items() if tier is not Tier.DEVICE}
        if store is not None:
            store.open_step(away, num_cells(count, num_micro_batches))
        return tuple(away) if store is not None else ()

    def close_step(self, runner: ScheduleRunner, num_calls: int) -> None:
        """A step has run: choose what the next ones keep, where that is due. Collective there. Where this ends by an error, the
        next step measures and chooses again."""
        if self.passing is not None and self._tells_passing:
            self.passing.tell(self.store)
            self.passing = None
        planner, measuring = self._now.planner, self._measuring
        if planner is None:
            return
        self._stop_measuring(runner)
        if measuring is None:
            own = nothing_measured(f"the code of a micro-batch calls the model {num_calls} times", self.room())
        else:
            own = measured_step(measuring.probe, measuring.times, self._layers, self.room(), self._asked.keep)
            own = replace(own, num_micro_batches=measuring.num_micro_batches)
        self._take(planner.choose(own))

    def abandon(self) -> None:
        """After an error: forget what is kept."""
        if self.store is not None:
            self.store.abandon()

    def close(self) -> None:
        """Give memory and queues back; twice is harmless."""
        if self.store is not None:
            self.store.close()

    # ---- the choice

    @property
    def _tells_passing(self) -> bool:
        """Whether a step shows what passes and what is kept. While the tier of a written policy is open, a step keeps nothing.
        What the run chooses by itself does not count, since it gives cells up."""
        return self.is_chosen or self._now.planner is None

    def _measure(self, runner: ScheduleRunner, num_micro_batches: int) -> None:
        """Let the step that begins be measured."""
        tracer = runner.tracer
        times = EventTimes(tracer or Tracer()) if accelerator.is_one_memory() else None
        part_rounds = 1 if self._asked.keep is None else 0  # a written policy has no parts
        probe = Probe(accelerator.synchronize, common_kinds(self._layers.keeping_blocks), part_rounds)
        self._measuring = _Measuring(probe, times, tracer, num_micro_batches)
        runner.probe, runner.tracer = self._measuring.probe, times or tracer

    def _stop_measuring(self, runner: ScheduleRunner) -> None:
        if self._measuring is not None:
            runner.probe, runner.tracer, self._measuring = None, self._measuring.tracer, None

    def room(self) -> _Room:
        """Further bytes that what is kept may take of each tier, on this rank."""
        here = ranks.ranks_on_this_host()
        ssd = 0.0 if self._folder is None else free_bytes(self._folder) / here
        device = accelerator.device_room()
        return {Tier.DEVICE: self._left if device is None else device, Tier.HOST: self._left, Tier.SSD: ssd}

    def _take(self, choice: KeepChoice) -> None:
        """Keep so from now on, where every rank can; else as the fixed rule has it, which needs no files."""
        store, error = None, None
        try:
            try:
                store = self._open_store(choice.settings, self.is_chosen)
            except (OSError, RuntimeError) as failure:  # of the kernel's queues, which have their limits
                error = failure
            if not ranks.is_true_on_all_ranks(error is None):
                if store is not None:
                    store.close()
                fixed = self.settings if self.is_chosen else replace(self._asked, keep_device=Tier.DEVICE)
                choice = KeepChoice(fixed, f"a rank could not open its files: {error or 'its own output says why'}")
                store = self._open_store(fixed, self.is_chosen)
            self._now = _InForce(choice.settings, store, _kinds_of(choice.settings), None)
        finally:
            if store is not None and store is not self.store:
                store.close()
        null = "null" if self.is_chosen else "keep_device null"
        accelerator.log(f"ds_vertical: vertical_schedule.{describe_keeping(choice.settings)} ({null}: {choice.reason})")


def _kinds_of(settings: ActivationSettings) -> KeptKinds | None:
    """How block calls keep what their backward needs; None where they keep nothing."""
    policy = settings.keep or "none"
    return None if policy == "none" else KeptKinds(policy, accelerator.log_own, settings.keep_outputs)


def describe_keeping(settings: ActivationSettings) -> str:
    """The policy, and of the cells (one layer of one micro-batch each) the shares in each tier."""
    shares = [f"{share:.0%} of the cells on {tier}" for tier, share in settings.kept_shares.items() if share]
    if settings.is_open and settings.keep is not None:
        shares = [f"{settings.keep_share:.0%} of the cells from the second step on"]
    if settings.keep_outputs is not None:
        shares = [f"{settings.keep_outputs} of each block's products", *shares]
    return f'activations.keep = "{settings.keep or "none"}"' + (f", {', '.join(shares)}" if shares else "")


def check_room(settings: ActivationSettings, needed: int, left: int) -> None:
    """Raises MemoryBudgetError, on every rank, where the memory budget of one, which takes `needed` bytes, leaves none for what
    the JSON has kept in host memory. How much a layer keeps shows with the first batch: see `KeptStore.note`. Collective."""
    tiers = {Tier.DEVICE} if settings.is_open else {tier for tier, share in settings.kept_shares.items() if share}
    in_host = settings.keep in HOLDING and tiers and (accelerator.is_one_memory() or tiers != {Tier.DEVICE})
    if not ranks.is_true_on_all_ranks(bool(left) or not in_host):
        raise MemoryBudgetError(
            f'vertical_schedule.activations.keep: got "{settings.keep}"; the rest of the run takes {needed} bytes of host'
            f" memory, and the memory budget leaves {left} for what one layer keeps of one micro-batch; {ONE_CELL_REMEDY}"
        )


def refuse_several_calls(moves_or_keeps: bool, num_calls: int) -> None:
    """Raises LoopError where activations are to leave the device, or to be kept, and the model is called several times."""
    if moves_or_keeps and num_calls > 1:
        raise LoopError(
            f"the code of a micro-batch calls the model {num_calls} times; vertical_schedule.activations moves and keeps those"
            " of one call alone: leave the key out, or set vertical_schedule.enabled to false"
        )
