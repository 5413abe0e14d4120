"""Assembles what a VerticalEngine is made of besides DeepSpeed's own parts, each from those before it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ds_vertical.compat import accelerator, pinned_memory, swap_buffers, zero_optimizer, zero_params
from ds_vertical.compat import engine as compat_engine
from ds_vertical.compat.ops.load import new_disk_queue
from ds_vertical.distributed import ranks
from ds_vertical.distributed.elastic import ElasticCounts
from ds_vertical.distributed.unit_levels import UnitLevels
from ds_vertical.engine.budget.further import copied_outside
from ds_vertical.engine.handlers import LossScale, ScheduleRunner
from ds_vertical.engine.keeping.growth import PassingBytes, growth
from ds_vertical.engine.keeping.keeping import RunKeeping, describe_keeping
from ds_vertical.engine.keeping.planner import KeepPlanner
from ds_vertical.engine.signals import Stopping
from ds_vertical.engine.zero3.optimizer import VerticalStage3
from ds_vertical.engine.zero3.read_ahead import ReadAheadRoom
from ds_vertical.errors import ConfigError
from ds_vertical.io import host
from ds_vertical.io.aio import DiskQueue
from ds_vertical.io.runs import stripes
from ds_vertical.io.runs.this_host import host_id
from ds_vertical.io.streams import works_beside_host
from ds_vertical.model.kept.kinds import runs_others_code
from ds_vertical.model.layers import LayerMap
from ds_vertical.model.state.forward_state import ForwardState
from ds_vertical.offload.activation_store import ActivationStore
from ds_vertical.offload.grad_accumulator import GradientStore, ParamFacts, SumPlace
from ds_vertical.offload.kept_store import KeptStore
from ds_vertical.offload.param_shards import ShardFiles
from ds_vertical.offload.param_store import ParamSettings, ParamStore
from ds_vertical.offload.tensor_swapper import HostMemory, TensorSwapper, moved_remedy
from ds_vertical.planner.activation_tiers import activation_tiers
from ds_vertical.planner.budget.fewer import FewerMicroBatches
from ds_vertical.planner.memory_budget import BudgetItem, layer_buffers
from ds_vertical.schedule.activations import LOOK_AHEAD
from ds_vertical.schedule.events import Outside, Unit
from ds_vertical.schedule.levels import Arrival
from ds_vertical.schedule.trace import RecordingTracer, Tracer
from ds_vertical.types import HOLDING, PRE, SUF, ActivationSettings, RunSettings, Tier


@dataclass(frozen=True)
class HostBudget:
    """Bytes of this rank's host memory, as the memory check has counted them before the engine is built.

    `needed`: in all, without activations, with what state that is read before the norm may come to. `kept`: how large
    pieces are kept that a backward frees, for the next one; `kept_behind`: so much free memory behind the last piece in
    use. `left`: for activations, whose use `planner` chooses as far as the JSON leaves it open (None: it does not), and for
    that state. `pairs`: whether there is room for a layer's gradients that wait for the next micro-batch's; `keeps_freed`:
    whether there is to keep what any backward frees. `is_short`: whether freed memory goes back to the system within each
    step, since there is no room to keep it, or little is left of what the user has written. `on_device`: what has been
    counted of a device with memory of its own. `fewer`: how the JSON has fewer micro-batches, for advice.
    """

    needed: int
    kept: int
    left: int
    kept_behind: int = 0
    planner: KeepPlanner | None = None
    pairs: bool = True
    keeps_freed: bool = True
    is_short: bool = False
    on_device: tuple[BudgetItem, ...] = ()
    fewer: FewerMicroBatches | None = None


@dataclass(frozen=True)
class StepParts:
    """What every step and evaluation of one engine works with.

    `engine`: for DeepSpeed's own module, hooks and counters. `folder`: of the run, on SSD; None: the run has none.
    """

    engine: compat_engine.DeepSpeedEngine
    vertical: RunSettings
    layers: LayerMap
    optimizer: VerticalStage3
    params: ParamStore
    gradients: GradientStore
    activations: ActivationStore | None
    keeping: RunKeeping
    state: ForwardState
    runner: ScheduleRunner
    folder: Path | None
    budget: HostBudget

    @property
    def module(self) -> nn.Module:
        """The user's model."""
        return compat_engine.model_of(self.engine)

    def mean_over(self, num_micro_batches: float) -> LossScale:
        """What the backward of each of so many micro-batches starts from: its share of the mean loss, times the loss scale.
        No integer where ranks bring different numbers (`step_shares`)."""

        def scale(loss: torch.Tensor) -> torch.Tensor:
            return self.optimizer.scale_if_loss(loss / num_micro_batches)

        return scale

    def outside_of(self, num_calls: int) -> Outside:
        """The units outside the layers in a step of so many calls of the model by each micro-batch. Between two calls the code
        behind the last layer is followed by the one ahead of the first: then none is away."""
        outside = self.layers.outside
        return outside if num_calls == 1 else replace(outside, apart=())

    def standing(self) -> frozenset[Unit] | None:
        """The units whose copy stands when a step begins; None where none outlives a step. Collective where copies do."""
        copies = self.params.copies
        return copies.standing() if copies is not None and self.vertical.levels.copy_on_device else None

    def standing_in_evaluation(self) -> frozenset[Unit] | None:
        """As `build_evaluation` takes them."""
        return self.standing() or frozenset() if self.vertical.levels.are_on else None

    def start_over(self) -> None:
        """Ahead of a further run of a step, which all ranks make: what has been learned holds on all of them."""
        self.state.forget()
        missed = self.layers.apart & set[Unit]().union(*ranks.all_gathered(set(self.layers.missed)))
        self.layers.apart.difference_update(missed)
        for unit in sorted(missed, key=str):
            accelerator.log(
                f"ds_vertical: unit {unit} stays on the device all step: {self._device_bytes(unit) / 2**20:.1f} MiB of"
                " parameters and gradient sums, which the table of memory at the start does not count between the two ends"
            )

    def _device_bytes(self, unit: Unit) -> int:
        """Of a unit's whole parameters and the sums of its gradients."""
        sum_bytes = self.optimizer.gradient_accumulation_dtype.itemsize
        sizes = [(zero_params.full_numel(p), p.element_size() + p.requires_grad * sum_bytes) for p in self.layers.units[unit]]
        return sum(numel * each for numel, each in sizes)

    def as_given(self, _num_micro_batches: float) -> LossScale:
        """What the backward of each micro-batch starts from where the user's code has divided the loss: it, times the loss
        scale."""
        return self.optimizer.scale_if_loss


class StepKind(Protocol):
    """What a step consists of; see `acco.steps`."""

    def open_levels(self, tracer: Tracer) -> UnitLevels | None:
        """What gathers units over levels; None: there is one."""
        ...

    def before_sums(self, optimizer: VerticalStage3) -> Callable[[Unit], None]:
        """Called with a unit whose next gradients are about to be summed."""
        ...


def _before_write(params: Iterable[nn.Parameter], optimizer: VerticalStage3, files: ShardFiles) -> None:
    """A user is about to write these parameters' files: their masters stand, as in stock. Raises RuntimeError within a step
    where masters are compressed, StorageError, DiskError."""
    params = list(params)
    if optimizer.stepper.masters is not None:
        optimizer.live.refuse_compressed_inside("a write of parameters")
        optimizer.stepper.make_whole(params)
    files.note_writing(params)


@dataclass(frozen=True)
class Assembly:
    """Makes the parts of one engine, in the order of the methods. `optimizer`: DeepSpeed has set it up. `aio`: the JSON's
    section with DeepSpeed's defaults. `elastic`: how many micro-batches each rank brings; None: all bring as many."""

    module: nn.Module
    optimizer: VerticalStage3
    vertical: RunSettings
    layers: LayerMap
    tracer: Tracer
    aio: Mapping[str, Any]
    steps: StepKind
    elastic: ElasticCounts | None = None
    fewer: FewerMicroBatches | None = None  # how the JSON has fewer micro-batches, for advice

    def give_memory_back(self) -> None:
        """Return to the system what DeepSpeed's set-up no longer needs: the pages of stock's buffers, and what stock has freed
        of the fp32 copies from which it wrote the optimizer's state."""
        swap_buffers.rest_stock_buffers(self.module.parameters(), self.optimizer)
        host.trim()
        if accelerator.is_one_memory():
            host.keep_freed_memory(0)  # ends what `prepare` has set

    def open_params(self) -> ParamStore:
        """The store of parameters with its host buffers."""
        window = self.vertical.prefetch_layers
        num_buffers = layer_buffers(window, self.layers.num_layers)
        optimizer, new_queue, levels = self.optimizer, self._new_queue, self.steps.open_levels(self.tracer)
        if levels is not None:
            levels.share_memory(self.layers.units, copied_outside(self.layers, self.vertical))
        settings = ParamSettings(
            self._device,
            num_buffers,
            window,
            optimizer.timing.generations,
            optimizer.checksums,
            group=ranks.own_group("gathers"),
            overlap=self.vertical.overlap,
            levels=levels,
            recalls=self.vertical.optimizer_compression,
        )
        return ParamStore(self.layers.units, new_queue, new_queue(), settings)

    def start_pipeline(self, params: ParamStore, is_short: bool = False) -> None:
        """Start the optimizer's own transfers and steps, and let every read or write of a parameter from outside the schedule
        take what is due of the last step first. `is_short`: as `HostBudget` has it."""
        sharing = ranks.ranks_on_these_cores()
        begin = host.thread_for_device(self._device, sharing)
        if works_beside_host(self._device) and host.is_launchers_one():
            accelerator.log(
                "ds_vertical: OMP_NUM_THREADS is 1, which launchers write where nobody has written anything; CPU Adam takes"
                f" {host.team_beside_device(sharing)} threads all the same; write another number, and it takes that"
            )
        self.optimizer.start_pipeline(self._new_queue, params.updates, self.tracer, begin)
        if is_short and accelerator.is_one_memory():
            self.optimizer.driver.trimmed = {self.layers.num_layers - 1, SUF, 0, PRE}
        every = [param for members in self.layers.units.values() for param in members]
        written = partial(_before_write, optimizer=self.optimizer, files=params.files), params.files.note_write
        zero_params.guard_parameters(every, self.optimizer.flush, params.gathers.settle, *written)
        # What stays on the device is there from the first pass on. Else a unit's first gather in it would have more parameters
        # than its second, and a rank that has failed between the two could not tell which of them the others are in.
        self.optimizer.gather_persistent(settled=True)

    def open_gradients(self, budget: HostBudget) -> GradientStore:
        """The sums of the micro-batches' gradients, in pairs and with freed memory kept as far as `budget` has room."""
        optimizer, dtype = self.optimizer, self.optimizer.gradient_accumulation_dtype
        rounding = partial(zero_optimizer.rounding_dtype, optimizer)
        one_memory = accelerator.is_one_memory()
        held = one_memory and ranks.world_size() == 1 and dtype is torch.float32  # see [Note: gradients in place]
        store = GradientStore(
            in_chunk_order(self.layers, optimizer),
            dtype,
            ParamFacts(zero_params.full_numel, rounding, optimizer.steps, partial(runs_others_code, self.layers)),
            self.steps.before_sums(optimizer),
            SumPlace(accelerator.device_name(), joined=held),
            pairs=budget.pairs and one_memory and self.vertical.order == "vertical",  # otherwise layers take turns
        )
        if one_memory and not budget.keeps_freed:
            store.trims_above, store.arrivals.alone = budget.kept, self.layers.num_layers - 1
        return store

    def open_activations(self, folder: Path | None, host_limit: int) -> ActivationStore | None:
        """The store of what passes between layers, below the run's folder; None where nothing moves. `host_limit`: bytes of
        host memory that the budget leaves for it."""
        vertical, layers = self.vertical, self.layers
        shares = vertical.activations.shares
        on_ssd = shares[Tier.SSD] > 0
        if not on_ssd and (not shares[Tier.HOST] or accelerator.is_one_memory()):
            return None
        path = folder / "activations" / f"rank{ranks.rank()}.bin" if on_ssd and folder is not None else None
        if path is not None:
            stripes.spread_file(path, sys.maxsize)  # it grows
        most_loads = (LOOK_AHEAD + 1) * (2 if max(map(len, layers.layers)) == 1 else 3)  # inputs, blocks' inputs, gradients
        store = ActivationStore(TensorSwapper(path, self._new_queue, _HOST_MEMORY, self._device, most_loads, host_limit))
        may_advise_ssd = folder is not None and vertical.activations.device is not Tier.SSD
        store.swapper.host_tier.remedy = partial(moved_remedy, self._fewer.told, may_advise_ssd)
        return store

    def open_keeping(
        self, planner: KeepPlanner | None, folder: Path | None, host_limit: int, activations: ActivationStore | None
    ) -> RunKeeping:
        """What the steps keep of forwards. `planner`: chooses that, where the JSON leaves it open. The others: see
        `open_activations`; what the store of activations has in host memory counts against the limit, too. Collective."""
        elastic, num_layers, num_passes = self.elastic, self.layers.num_layers, 1 if self.vertical.acco is None else 2
        limit = host_limit if elastic is None else -ranks.largest_of_all_ranks(-host_limit)

        def open_store(settings: ActivationSettings, gives_up: bool) -> KeptStore | None:
            store = self._open_kept(settings, gives_up, (folder, host_limit), activations)
            if store is not None:
                store.fewer = self._fewer.told
            if store is not None and elastic is not None and not gives_up:
                store.growth = growth((elastic, self._fewer), num_layers, limit, settings, num_passes)
            return store

        keeping = RunKeeping(self.vertical, self.layers, planner, open_store, (folder, host_limit))
        if elastic is not None and accelerator.is_one_memory() and activations is None:
            keeping.passing = PassingBytes((elastic, self._fewer), num_layers, limit, num_passes)
        return keeping

    def _open_kept(
        self,
        settings: ActivationSettings,
        gives_up: bool,
        place: tuple[Path | None, int],
        activations: ActivationStore | None,
    ) -> KeptStore | None:
        """The store of what forwards keep; None where they keep no bytes."""
        if settings.keep not in HOLDING:
            return None
        (folder, host_limit), one_memory = place, accelerator.is_one_memory()
        may_advise_ssd = folder is not None and settings.keep_device is not Tier.SSD
        tiers = {tier for tier, share in settings.kept_shares.items() if share}
        limit = host_limit if one_memory else None
        if self.layers.num_layers < 2 or not tiers - {Tier.DEVICE, Tier.HOST if one_memory else Tier.DEVICE}:
            return KeptStore(None, limit, gives_up, settings.keep, may_advise_ssd)
        path = folder / "kept" / f"kept{ranks.rank()}.bin" if Tier.SSD in tiers and folder is not None else None
        if path is not None:
            stripes.spread_file(path, sys.maxsize)  # it grows
        swapper = TensorSwapper(path, self._new_queue, _HOST_MEMORY, self._device, LOOK_AHEAD + 1, host_limit)
        host_tier = swapper.host_tier
        host_tier.what = "vertical_schedule.activations.keep: {held} bytes of host memory hold what is kept for the backward"
        if activations is not None:
            host_tier.beside, activations.swapper.host_tier.beside = activations.swapper.host_tier, host_tier
        store = KeptStore(swapper, limit, gives_up, settings.keep, may_advise_ssd)
        host_tier.remedy = store.remedy
        return store

    def watch_state(self) -> ForwardState:
        """What the modules hold that belongs to one forward."""
        optimizer, in_turn = self.optimizer, self.vertical.order == "horizontal"
        agreed = partial(optimizer.live.agreed, "a step or an evaluation")
        num_decided, snake = (lambda: optimizer.driver.num_decided), self.vertical.snake
        return ForwardState(self.module, self.layers, num_decided, in_turn, snake, agreed)

    def new_runner(
        self, params: ParamStore, activations: ActivationStore | None, stopping: Stopping, state: ForwardState, left: int
    ) -> ScheduleRunner:
        """What runs schedules over the model. `left`: see `HostBudget`."""
        optimizer = self.optimizer
        return ScheduleRunner(
            self.layers,
            params,
            overlap=self.vertical.overlap,
            tracer=self.tracer,
            activations=activations,
            others=OtherRanks(params, self.optimizer, stopping) if ranks.world_size() > 1 else None,
            leave=stopping.vote,
            state=state,
            room=ReadAheadRoom(optimizer.pipeline, left) if optimizer.further_slots else None,
        )

    def describe(self, params: ParamStore) -> str:
        """The start-up line."""
        return (
            f"vertical schedule ACTIVE: order {self.vertical.order}, {self.layers.describe()}; bytes of parameters on this"
            f" rank: {describe_tiers(self.layers)}; host buffers {params.host_bytes}; {describe_activations(self.vertical)};"
            f" optimizer {self.optimizer.describe()}"
        )

    @property
    def _fewer(self) -> FewerMicroBatches:
        return FewerMicroBatches(1) if self.fewer is None else self.fewer

    @property
    def _device(self) -> torch.device:
        return torch.device(accelerator.device_name())

    @property
    def _new_queue(self) -> Callable[[], DiskQueue]:
        return partial(new_disk_queue, self.aio, self.tracer)


def open_tracer(folder: str | None) -> Tracer:
    """The tracer that writes to the JSON's `trace`; one that records nothing for None. Raises ConfigError."""
    if folder is None:
        return Tracer()
    try:
        return RecordingTracer(Path(folder), ranks.rank(), host_id())
    except OSError as error:
        raise ConfigError(
            f'vertical_schedule.trace: got "{folder}"; cannot write there ({error}); write a writable folder, or null'
        ) from error


def in_chunk_order(layers: LayerMap, optimizer: VerticalStage3) -> dict[Unit, list[nn.Parameter]]:
    """Each unit's parameters, the optimizer's first and chunk by chunk."""
    return {
        unit: [*optimizer.in_chunk_order(unit), *(param for param in params if not optimizer.steps(param))]
        for unit, params in layers.units.items()
    }


def bytes_by_tier(layers: LayerMap) -> dict[str, int]:
    """Bytes of this rank's shards per tier, where they rest between uses."""
    tiers: dict[str, int] = dict.fromkeys(Tier, 0)
    for param in (param for params in layers.units.values() for param in params):
        tiers[zero_params.shard_tier(param)] += zero_params.shard_bytes(param)
    return tiers


def describe_tiers(layers: LayerMap) -> str:
    """The bytes of each tier for the start-up line; where the JSON puts parameters on SSD and none is there, why not."""
    tiers = bytes_by_tier(layers)
    words = ", ".join(f"{tier} {count}" for tier, count in tiers.items())
    params = [param for params in layers.units.values() for param in params]
    least = max((size for param in params if (size := zero_params.least_file_bytes(param)) is not None), default=None)
    if tiers[Tier.SSD] or least is None:
        return words
    if max(map(zero_params.shard_bytes, params)) < least:
        return f"{words} (every parameter's shard is under {least} bytes, and stays in memory as in stock)"
    return f'{words} ("zero_optimization.offload_param.max_in_cpu" keeps all in memory, as in stock)'


_HOST_MEMORY = HostMemory(pinned_memory.lock_host_bytes, pinned_memory.unlock_host_bytes)


def moved_tiers(vertical: RunSettings, num_micro_batches: int) -> dict[int, Tier]:
    """Where the activations of each micro-batch that moves rest; none go to host memory where that is the device's."""
    stays = (Tier.DEVICE, Tier.HOST) if accelerator.is_one_memory() else (Tier.DEVICE,)
    tiers = enumerate(activation_tiers(num_micro_batches, vertical.activations.shares))
    return {m: tier for m, tier in tiers if tier not in stays}


def describe_activations(vertical: RunSettings) -> str:
    """One phrase for the start-up line."""
    settings = vertical.activations
    return _describe_moves(vertical) + ("" if settings.keep in (None, "none") else f"; {describe_keeping(settings)}")


def _describe_moves(vertical: RunSettings) -> str:
    shares = vertical.activations.shares
    moved = [f"{share:g} of the micro-batches on {tier}" for tier, share in shares.items() if share]
    if not moved:
        return "activations stay on the device"
    same = " (host memory is the device's: no copy)" if shares[Tier.HOST] and accelerator.is_one_memory() else ""
    return f"activations: {', '.join(moved)}{same}"


class OtherRanks:
    """The ranks of the run, for `CollectiveReplay`: see `collective_replay.Others`."""

    def __init__(self, params: ParamStore, optimizer: VerticalStage3, stopping: Stopping) -> None:
        self._params = params
        self._optimizer = optimizer
        self._stopping = stopping

    @property
    def num_gathers(self) -> int:
        """Gathers of units that this rank has issued."""
        return self._params.gathers.num_issued

    @property
    def gathers_lead(self) -> bool:
        """Whether ranks issue the gather of the next backward's unit ahead of a reduction."""
        return self._params.gathers.leads

    @property
    def num_reductions(self) -> int:
        """Reductions of gradients that this rank has taken part in."""
        return self._optimizer.driver.num_reductions

    @property
    def num_votes(self) -> int:
        """Votes on leaving the pass that this rank has begun."""
        return self._stopping.num_votes

    def gather(self, unit: Unit, arrival: Arrival) -> None:
        """Take part in the gather of a unit, whose values nobody will use."""
        self._params.gather_for_others(unit, arrival)

    def renew_copy(self, unit: Unit) -> None:
        """Take part in what makes the node's copy of a unit for the next step."""
        if self._params.copies is not None:
            self._params.copies.join(unit)

    def is_left(self, unit: Unit) -> bool:
        """Whether the step of a unit is left to the next schedule, where steps may be."""
        return self._optimizer.driver.is_left(unit)

    def reductions_of(self, unit: Unit) -> int:
        """Collectives that reduce a unit's gradients."""
        return len(self._optimizer.reductions(unit))

    def reduce(self, unit: Unit, number: int) -> None:
        """Take part in one of them, with zeros."""
        self._optimizer.reduce_for_others(unit, number)

    def vote(self) -> bool:
        """Take part in a vote: whether all ranks leave the pass."""
        return self._stopping.vote()

    def agree(self, error: Exception | None) -> None:
        """Raise on all ranks where one of them has an error; on this one its own."""
        with self._optimizer.live.agreed("a step or an evaluation"):
            if error is not None:
                raise error
