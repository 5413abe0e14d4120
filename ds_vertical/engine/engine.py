"""The single wiring point: `initialize`, `prepare` and the engine that runs a step layer-major.

What an engine is made of besides DeepSpeed's own, from the resolved section.

The ranks of a run, as a pass of the schedule knows them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from ds_vertical.compat import accelerator, engine, pinned_memory, swap_buffers, zero_optimizer, zero_params
from ds_vertical.compat.ops.load import new_disk_queue
from ds_vertical.config.resolve import Resolved
from ds_vertical.distributed import ranks
from ds_vertical.engine.call_guard import RUNNING
from ds_vertical.engine.checkpoint.mixin import SavingEngine
from ds_vertical.engine.handlers import Body, ScheduleRunner
from ds_vertical.engine.module_hooks import load_joint, suspended_hooks
from ds_vertical.engine.progress import Progress
from ds_vertical.engine.self_check.check import NUM_MICRO_BATCHES as NUM_CHECKED
from ds_vertical.engine.self_check.check import SelfCheck, model_fingerprint
from ds_vertical.engine.signals import Stopping
from ds_vertical.engine.train_loop import Loop, VerticalLoop
from ds_vertical.engine.zero3.chunks import check_optimizer
from ds_vertical.engine.zero3.optimizer import VerticalStage3
from ds_vertical.errors import ConfigError
from ds_vertical.io import host
from ds_vertical.io.aio import DiskQueue
from ds_vertical.io.host import serve_device
from ds_vertical.io.openmp_wait import WATCH
from ds_vertical.model.batch import LossFn, form_of
from ds_vertical.model.compiled_blocks import refuse_engine_compile
from ds_vertical.model.layers import LayerMap
from ds_vertical.model.state.forward_state import ForwardState
from ds_vertical.model.state.restart import until_known
from ds_vertical.offload.activation_store import ActivationStore
from ds_vertical.offload.grad_accumulator import GradientStore, ParamFacts
from ds_vertical.offload.param_store import ParamStore
from ds_vertical.offload.tensor_swapper import AwayTier, HostMemory, TensorSwapper
from ds_vertical.planner.activation_policy import spread
from ds_vertical.planner.memory_budget import layer_buffers
from ds_vertical.schedule.activations import LOOK_AHEAD
from ds_vertical.schedule.events import Unit
from ds_vertical.schedule.passes import build_evaluation, build_training
from ds_vertical.schedule.trace import RecordingTracer, Tracer

_CALL_TRAIN_BATCH = (
    "engine.{name}() is not available with vertical_schedule: layer-major order needs all micro-batches of a step at once;"
    " call engine.train_batch(data_iter), or set vertical_schedule.enabled to false"
)


class VerticalEngine(SavingEngine):
    """DeepSpeed's engine with layer-major training: `train_batch`, `eval_batch`, and forward in evaluation mode."""

    optimizer: VerticalStage3
    module: nn.Module

    def __init__(
        self, *args: Any, vertical: Resolved, layers: LayerMap, folder: Path | None, budget: tuple[int, int, int], **kwargs: Any
    ) -> None:
        self.vertical = vertical
        self.host_bytes, self._kept_bytes, left = budget  # in all; of what a backward frees, for the next; for activations
        self.layers = layers
        self.tracer = open_tracer(vertical.trace)
        super().__init__(*args, **kwargs)
        progress = Progress(self, vertical.progress, folder)
        self.tracer = progress.metered(self.tracer)
        swap_buffers.rest_stock_buffers(self.module.parameters(), self.optimizer)
        host.trim()  # what stock freed of the fp32 copies from which it wrote the optimizer's state
        device = torch.device(accelerator.device_name())
        new_queue = partial(new_disk_queue, engine.aio_config(self), self.tracer)
        window = vertical.prefetch_layers
        num_buffers = layer_buffers(window, layers.num_layers)
        generations = self.optimizer.regime.generations
        files = generations, self.optimizer.checksums
        self._params = ParamStore(layers.units, new_queue, num_buffers, device, new_queue(), window, *files)
        begin = partial(serve_device, device, ranks.ranks_on_these_cores())
        self.optimizer.start_pipeline(new_queue, self._params, self.tracer, begin)
        every = [param for params in layers.units.values() for param in params]
        zero_params.guard_parameters(every, self.optimizer.flush, self._params.note_writing, self._params.note_write)
        self._gradients = self._new_sums()
        self._activations = open_activations(vertical, layers, folder, new_queue, device, left)
        self._stopping = Stopping(vertical.on_signal, self.optimizer.regime)
        in_turn = vertical.order == "horizontal"
        self._state = ForwardState(self.module, layers, lambda: self.optimizer.driver.num_decided, in_turn, vertical.snake)
        self._sweeps = ScheduleRunner(
            layers,
            self._params,
            overlap=vertical.overlap,
            tracer=self.tracer,
            activations=self._activations,
            others=OtherRanks(self._params, self.optimizer, self._stopping) if ranks.world_size() > 1 else None,
            leave=self._stopping.vote,
            state=self._state,
        )
        self._loop = VerticalLoop(self, vertical.seed if vertical.seed_micro_batches else None, progress)
        self._num_running = 0
        self._folder = folder
        self._is_checked = False
        self.checked_model: str | None = None  # that of a self-check, or of the checkpoint that was loaded
        self.optimizer.calls.restore, self.optimizer.calls.tear = self._restore, self.optimizer.condition.tear
        tiers = ", ".join(f"{tier} {count}" for tier, count in bytes_by_tier(layers).items())
        accelerator.log(
            f"ds_vertical: vertical schedule ACTIVE: order {vertical.order}, {layers.describe()}; bytes of parameters on this"
            f" rank: {tiers}; host buffers {self._params.host_bytes}; {describe_activations(vertical)}; optimizer"
            f" {self.optimizer.describe()}"
        )

    def _configure_zero_optimizer(self, optimizer: Any) -> Any:  # override
        check_optimizer(optimizer)
        load_joint()  # a compile belongs ahead of the steps
        with engine.substituted_stage3(partial(VerticalStage3, layers=self.layers, vertical=self.vertical)):
            return super()._configure_zero_optimizer(optimizer)

    def _new_sums(self) -> GradientStore:
        return GradientStore(
            in_chunk_order(self.layers, self.optimizer),
            self.optimizer.gradient_accumulation_dtype,
            ParamFacts(zero_params.full_numel, partial(zero_optimizer.rounding_dtype, self.optimizer), self.optimizer.steps),
            self.optimizer.gradients.drop,
            accelerator.device_name(),
            pairs=accelerator.is_one_memory() and self.vertical.order == "vertical",  # otherwise layers take turns
        )

    # ---- training

    def train_batch(self, data_iter: Iterable[Any] | None = None, loss_fn: LossFn | None = None) -> torch.Tensor:
        with self._stopping.obeyed(self), self.optimizer.calls.call("train_batch"), ranks.collective_section("train_batch"):
            return self._loop.train_batch(data_iter, loss_fn)

    train_batch.__doc__ = Loop.train_batch.__doc__

    def eval_batch(self, data_iter: Iterable[Any], loss_fn: LossFn | None = None) -> torch.Tensor:
        with self._stopping.obeyed(self), self.optimizer.calls.call("eval_batch"), ranks.collective_section("eval_batch"):
            return self._loop.eval_batch(data_iter, loss_fn)

    eval_batch.__doc__ = Loop.eval_batch.__doc__

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:  # override
        """The model's outputs in evaluation mode, without gradients. In training mode raises RuntimeError."""
        if self.module.training:
            raise RuntimeError(_CALL_TRAIN_BATCH.format(name="forward"))
        with self._stopping.obeyed(self), self.optimizer.calls.call("forward"), torch.no_grad():
            return self.evaluate([Body(partial(self.call_module, *inputs, **kwargs), None, form_of((inputs, kwargs)))])[0]

    def backward(self, loss: Any, retain_graph: bool = False, scale_wrt_gas: bool = True) -> NoReturn:  # override
        raise RuntimeError(_CALL_TRAIN_BATCH.format(name="backward"))

    def step(self, lr_kwargs: Any = None) -> NoReturn:  # override
        raise RuntimeError(_CALL_TRAIN_BATCH.format(name="step"))

    def compile(self, *_: Any, **__: Any) -> NoReturn:  # override
        refuse_engine_compile()

    def conclude_step(self, num_micro_batches: int) -> None:
        """What stock's `step` does at the boundary: optimizer, scheduler, counters, monitor, printing."""
        self.set_gradient_accumulation_boundary(True)
        try:
            super().step()
        finally:
            engine.forget_boundary(self)
        self.micro_steps += num_micro_batches - 1
        if self._kept_bytes:  # not before the first step has allocated what stays
            host.keep_freed_memory(self._kept_bytes)
        rate = self.optimizer.regime.hit_rate
        if rate is not None and self.global_steps % self.steps_per_print() == 0:
            accelerator.log(f"ds_vertical: step {self.global_steps}: {rate:.0%} of the steps tried early came true")

    def call_module(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's own forward under the JSON's torch_autocast; the loss function runs outside it, as in stock."""
        with engine.autocast_if_enabled(self):
            return self.module(*inputs, **kwargs)

    @ranks.collective
    def evaluate(self, bodies: list[Body]) -> list[Any]:
        """Run forwards without training, layer-major or, with "horizontal", one after the other; returns what each returned."""
        in_turn = self.vertical.order == "horizontal"
        with self.optimizer.live.agreed("evaluation"):
            self.optimizer.flush()
        with self.optimizer.calls.running(), WATCH.watching(), suspended_hooks(self), self.optimizer.live.schedule_running():
            return [
                result for some in ([[each] for each in bodies] if in_turn else [bodies]) for result in self._evaluated(some)
            ]

    def _evaluated(self, bodies: list[Body]) -> list[Any]:
        schedule = build_evaluation(self.layers.num_layers, len(bodies), window=self.vertical.prefetch_layers)
        return until_known(partial(self._sweeps.evaluate, schedule, bodies), self._state.forget)

    def check_itself(self, bodies: list[Body]) -> None:
        """Before the first step, where the JSON asks for it: see `check`. Raises SelfCheckError on every rank."""
        wanted = self.vertical.self_check
        if self._is_checked or wanted is False:
            return
        model = model_fingerprint(self.module, self.vertical)
        if wanted or self.checked_model != model:
            count = min(len(bodies), NUM_CHECKED)  # a single one has no other beside it in the steps either
            self._check_itself([replace(bodies[index], seed=index) for index in range(count)])
        self._is_checked, self.checked_model = True, model

    def _check_itself(self, bodies: list[Body]) -> None:
        order, snake, window = self.vertical.order, self.vertical.snake, self.vertical.prefetch_layers
        schedule = build_training(self.layers.num_layers, len(bodies), order=order, snake=snake, window=window)
        with self.optimizer.live.agreed("self_check"):
            self._params.check_open()
            self._gradients.refuse_strays()
            self.optimizer.flush()

        def scale(loss: torch.Tensor) -> torch.Tensor:
            return self.optimizer.scale_if_loss(loss / len(bodies))

        parts = self.module, self.layers, self._sweeps, self._gradients, schedule, scale, self._folder
        with (
            self.optimizer.calls.running(),
            WATCH.watching(),
            suspended_hooks(self),
            torch.enable_grad(),
            self.optimizer.live.schedule_running(),
        ):
            line, error = SelfCheck(*parts).run(bodies)
        host.trim()  # what whole graphs took is not the steps' memory
        self._state.forget()
        accelerator.log(f"ds_vertical: {line}")
        with self.optimizer.live.agreed("self_check"):
            if error is not None:
                raise error

    def train_step(self, bodies: list[Body]) -> list[torch.Tensor]:
        """One step over forwards that return their losses, everything up to and including the units' optimizer steps."""
        run = partial(self._train_step, bodies)
        return until_known(run, self._state.forget, lambda line: accelerator.log(f"ds_vertical: {line}"))

    def _train_step(self, bodies: list[Body]) -> list[torch.Tensor]:
        vertical = self.vertical
        with self.optimizer.live.agreed("train_batch"):
            self._params.check_open()
            self.optimizer.live.check_whole()
            self._gradients.refuse_strays()
            self._gradients.refuse_frozen({id(param): name for name, param in self.module.named_parameters()})
        swap_buffers.rest_stock_buffers(self.module.parameters(), self.optimizer)
        tiers = moved_tiers(vertical, len(bodies))
        if self._activations is not None:
            self._activations.open_step(tiers)
        schedule = self.ran = build_training(
            self.layers.num_layers,
            len(bodies),
            order=vertical.order,
            snake=vertical.snake,
            window=vertical.prefetch_layers,
            delayed=self.optimizer.regime.leaves_steps,
            due=frozenset(self.optimizer.driver.backlog.due),
            early=self.optimizer.regime.early,
            ahead=vertical.prefetch_layers > 0,
            hold=self.optimizer.holding,
            moved=tuple(tiers),
        )

        def scale(loss: torch.Tensor) -> torch.Tensor:
            return self.optimizer.scale_if_loss(loss / len(bodies))

        noted = self._activations is not None
        self._num_running = len(bodies)
        with (
            self.optimizer.calls.running(),
            WATCH.watching(),
            suspended_hooks(self, noted=noted),
            torch.enable_grad(),
            self.optimizer.live.schedule_running(),
        ):
            return self._sweeps.train(schedule, bodies, self._gradients, self.optimizer.driver, scale)

    def _restore(self, level: int, take_back: Callable[[], None]) -> None:
        """Put in order what a call has left that ended by an error or an interrupt, cut anywhere; where that is cut, again. A
        step that counts is concluded."""
        if level == RUNNING:
            if self._activations is not None:
                self._activations.abandon()  # before the forwards end: see there
            self._sweeps.end_forwards()
            take_back()
            self.optimizer.driver.abandon()  # before the release: steps write into buffers handed over
        self._params.release_all()
        if level == RUNNING:
            self._gradients.drop_all()
            if self.optimizer.driver.phase.counts and self.optimizer.live.failure is None:
                self._loop.conclude(self._num_running)

    def flush(self) -> None:
        """Take the optimizer steps that the last `train_batch` left to the next forward. Whatever reads the weights
        through DeepSpeed does this by itself; calling it twice is harmless."""
        self.optimizer.flush()

    def destroy(self) -> None:
        """As DeepSpeed's, and give the host buffers back. Calling it twice is harmless."""
        if (calls := getattr(getattr(self, "optimizer", None), "calls", None)) is not None:
            calls.check_process("destroy")
        params = getattr(self, "_params", None)  # absent where the engine's construction failed
        activations = getattr(self, "_activations", None)
        stopping = getattr(self, "_stopping", None)
        with contextlib.ExitStack() as cleanup:  # each is called, the last one first, whatever another one raises
            cleanup.callback(super().destroy)
            if params is not None:
                cleanup.callback(params.close)
                cleanup.callback(self.optimizer.close)
            if activations is not None:
                cleanup.callback(activations.close)
            if stopping is not None:
                cleanup.callback(stopping.close)

    @property
    def param_store(self) -> ParamStore:
        return self._params

    @property
    def stream_seed(self) -> int | None:
        """Base of the micro-batches' random streams; None where the caller's own stream is used."""
        return self._loop.seed

    @stream_seed.setter
    def stream_seed(self, seed: int | None) -> None:
        self._loop.seed = seed


_TIERS: tuple[AwayTier, ...] = ("host", "ssd")


def open_tracer(folder: str | None) -> Tracer:
    if folder is None:
        return Tracer()
    try:
        return RecordingTracer(Path(folder), ranks.rank())
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
    tiers = {"device": 0, "host": 0, "ssd": 0}
    for param in (param for params in layers.units.values() for param in params):
        tiers[zero_params.shard_tier(param)] += zero_params.shard_bytes(param)
    return tiers


def open_activations(
    vertical: Resolved,
    layers: LayerMap,
    folder: Path | None,
    new_queue: Callable[[], DiskQueue],
    device: torch.device,
    host_limit: int,
) -> ActivationStore | None:
    """The store of what passes between layers, below the run's folder; None where nothing moves. `host_limit`: bytes of host
    memory that the budget leaves for it."""
    on_ssd = vertical.moved_shares[1] > 0
    if not on_ssd and (not vertical.moved_shares[0] or accelerator.is_one_memory()):
        return None
    path = folder / "activations" / f"rank{ranks.rank()}.bin" if on_ssd and folder is not None else None
    memory = HostMemory(pinned_memory.lock_host_bytes, pinned_memory.unlock_host_bytes)
    most_loads = (LOOK_AHEAD + 1) * (2 if max(map(len, layers.layers)) == 1 else 3)  # inputs, blocks' inputs, gradients
    return ActivationStore(TensorSwapper(path, new_queue, memory, device, most_loads, host_limit))


def moved_tiers(vertical: Resolved, num_micro_batches: int) -> dict[int, AwayTier]:
    """Where the activations of each micro-batch that moves rest; none go to host memory where that is the device's."""
    numbers = enumerate(spread(num_micro_batches, vertical.moved_shares))
    chosen: list[tuple[int, AwayTier]] = [(m, _TIERS[number]) for m, number in numbers if number >= 0]
    return {m: tier for m, tier in chosen if tier == "ssd" or not accelerator.is_one_memory()}


def describe_activations(vertical: Resolved) -> str:
    """One phrase for the start-up line."""
    host, ssd = vertical.moved_shares
    shares = [f"{share:g} of the micro-batches on {tier}" for tier, share in (("host", host), ("ssd", ssd)) if share]
    if not shares:
        return "activations stay on the device"
    same = " (host memory is the device's: no copy)" if host and accelerator.is_one_memory() else ""
    return f"activations: {', '.join(shares)}{same}"


class OtherRanks:
    """See `collective_replay.Others`."""

    def __init__(self, params: ParamStore, optimizer: VerticalStage3, stopping: Stopping) -> None:
        self._params = params
        self._optimizer = optimizer
        self._stopping = stopping

    @property
    def num_gathers(self) -> int:
        return self._params.num_gathers

    @property
    def num_reductions(self) -> int:
        return self._optimizer.driver.num_reductions

    @property
    def num_votes(self) -> int:
        return self._stopping.num_votes

    def gather(self, unit: Unit) -> None:
        self._params.gather_for_others(unit)

    def reduce(self, unit: Unit) -> None:
        self._optimizer.reduce_for_others(unit)

    def vote(self) -> bool:
        return self._stopping.vote()

    def agree(self, error: Exception | None) -> None:
        with self._optimizer.live.agreed("a pass"):
            if error is not None:
                raise error
