"""The single wiring point: `initialize`, `prepare` and the engine that runs a step layer-major."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import nn

from ds_vertical import compat, compat_pools, compat_state, headroom, hostmemory, limits_cache, ranks, storage, surroundings
from ds_vertical.batches import LossFn, form_of
from ds_vertical.budget import Forecast, check_memory, groups_of, host_room
from ds_vertical.calls import RUNNING
from ds_vertical.choices import choose_gradient_tier, choose_timing
from ds_vertical.compiled import refuse_compiled_around, refuse_engine_compile
from ds_vertical.config import ConfigError, Resolved, explain, load_section, resolve
from ds_vertical.configfile import read_config
from ds_vertical.crosscheck import check
from ds_vertical.files import check_length, make_private
from ds_vertical.foreign import nvme_paths, refuse_float64, refuse_foreign_model, refuse_late_fp32, run_folder, unclaimed_paths
from ds_vertical.forwardstate import ForwardState, until_known
from ds_vertical.gradients import GradientStore
from ds_vertical.hooks import load_joint, suspended_hooks
from ds_vertical.hostthreads import keep_cores_for_this_thread, serve_device
from ds_vertical.layers import LayerMap, check_trainable, map_layers
from ds_vertical.loop import Loop, StockLoop, VerticalLoop
from ds_vertical.memory import backward_bytes, layer_buffers
from ds_vertical.native import new_disk_queue
from ds_vertical.optimizer import VerticalStage3
from ds_vertical.others import OtherRanks
from ds_vertical.params import ParamStore
from ds_vertical.passes import build_evaluation, build_training
from ds_vertical.progress import Progress
from ds_vertical.saving import SavingEngine
from ds_vertical.selfcheck import NUM_MICRO_BATCHES as NUM_CHECKED
from ds_vertical.selfcheck import SelfCheck, model_fingerprint
from ds_vertical.spinwait import WATCH
from ds_vertical.stopping import Stopping, leave_on_sigterm
from ds_vertical.stores import bytes_by_tier, describe_activations, in_chunk_order, moved_tiers, open_activations, open_tracer
from ds_vertical.subgroups import check_optimizer
from ds_vertical.sweeps import Body, Sweeps
from ds_vertical.unfilled import refuse_unfilled

_CALL_TRAIN_BATCH = (
    "engine.{name}() is not available with vertical_schedule: layer-major order needs all micro-batches of a step at once;"
    " call engine.train_batch(data_iter), or set vertical_schedule.enabled to false"
)


def prepare(config: dict[str, Any] | str) -> dict[str, Any]:
    """Validate a DeepSpeed configuration and claim a folder of its own for this run's files.

    `config`: dict, path or base64, as `deepspeed.initialize` takes it. Returns the dict to give to `zero.Init`,
    `HfDeepSpeedConfig` and `initialize`: every nvme_path is replaced by `nvme_path/<run id>`, the same on all ranks, locked
    until the process ends. A configuration that is prepared already is given back. Initialises distributed if needed.

    Raises ConfigError (the JSON path, the value, what to write) and StorageError (the folder is in use).
    """
    raw = read_config(config)
    surroundings.check(nvme_paths(raw))
    section = load_section(raw)
    if section is not None:
        check(raw, section)
        if unclaimed_paths(raw):
            headroom.check_before_the_model(raw)
        if section.enabled and compat.is_one_memory():
            keep_cores_for_this_thread()  # ahead of the first collective
    for path in unclaimed_paths(raw):
        check_length(path)
    if unclaimed_paths(raw):
        leave_on_sigterm()
        return storage.claim_config(raw, ranks.common_run_id(storage.new_run_id()), ranks.rank())
    return raw


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    *positional: Any,
    config: dict[str, Any] | str | None = None,
    config_params: dict[str, Any] | str | None = None,
    **kwargs: Any,
) -> tuple[Any, Any, Any, Any]:
    """`deepspeed.initialize` with the same arguments and results, plus `train_batch` and `eval_batch` on the engine.

    With `vertical_schedule` in the configuration the engine is a VerticalEngine; with the section absent or
    `"enabled": false` it is a plain DeepSpeedEngine. Raises ConfigError, StorageError, LayerError or MemoryBudgetError before
    anything is allocated.
    """
    names = ("distributed_port", "mpu", "dist_init_required", "collate_fn", "config", "mesh_param", "config_params")
    kwargs |= {"config": config, "config_params": config_params}
    kwargs |= dict(zip(names, positional, strict=False))
    kwargs |= dict(model=model, optimizer=optimizer, model_parameters=model_parameters)
    kwargs |= dict(training_data=training_data, lr_scheduler=lr_scheduler)
    args, given = _single_config(args, kwargs.pop("config"), kwargs.pop("config_params"))
    raw = read_config(given)
    surroundings.check(nvme_paths(raw))
    section = load_section(raw)
    resolved = resolve(section, torch.initial_seed()) if section is not None else None
    if resolved is None or not resolved.enabled:
        returned = _initialize_stock(raw, resolved, args=args, **kwargs)
    else:
        with ranks.shared("initialize"):
            returned = _initialize_vertical(raw, resolved, args=args, **kwargs)
    for folder in storage.claimed():
        make_private(folder)
    return returned


def _initialize_stock(config: dict[str, Any], resolved: Resolved | None, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    if resolved is not None and isinstance(kwargs["model"], nn.Module):
        refuse_foreign_model(kwargs["model"], config)
        config = prepare(config)
    returned = compat.stock_initialize(config=config, **kwargs)
    seeded = resolved is not None and resolved.seed_micro_batches
    progress = Progress(returned[0], resolved.progress if resolved is not None else None)
    _bind(returned[0], StockLoop(returned[0], resolved.seed if resolved is not None and seeded else None, progress))
    return returned


def _initialize_vertical(config: dict[str, Any], resolved: Resolved, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    section = load_section(config)
    assert section is not None
    refuse_unfilled(config)
    warnings = check(config, section)
    model = kwargs["model"]
    if not isinstance(model, nn.Module):
        raise ConfigError(f"initialize(model=...): got {type(model).__name__}; vertical_schedule needs a torch.nn.Module")
    if isinstance(kwargs["optimizer"], torch.optim.Optimizer):
        check_optimizer(kwargs["optimizer"])
    refuse_float64(model)
    check_trainable(model)
    layers = map_layers(model, resolved.layers, resolved.blocks_per_layer)
    refuse_compiled_around(model, layers.blocks)
    refuse_foreign_model(model, config)
    refuse_late_fp32(model, config)
    if isinstance(kwargs["model_parameters"], Iterator):
        kwargs["model_parameters"] = list(kwargs["model_parameters"])
    if compat.is_one_memory():
        keep_cores_for_this_thread()
    ranks.start_distributed()
    groups = groups_of(model, kwargs["model_parameters"], kwargs["optimizer"])
    forecast_of = partial(Forecast, layers, groups, config)
    room = host_room(model.parameters(), resolved.host_memory_bytes)
    resolved = choose_gradient_tier(section, resolved, forecast_of, room)
    report = limits_cache.training_report(run_folder(config))
    resolved = choose_timing(section, resolved, forecast_of(resolved), model, report, room)
    forecast = forecast_of(resolved)
    needs, host_bytes, left = check_memory(forecast, model.parameters(), resolved.host_memory_bytes)
    needs += headroom.check(forecast, config, resolved)
    prepared = prepare(config)
    for line in [*(f"warning: {warning}" for warning in warnings), *explain(resolved), *needs]:
        compat.log(f"ds_vertical: {line}")
    kept_bytes = backward_bytes(forecast.shape, forecast.settings) if compat.is_one_memory() else 0
    made_of = dict(vertical=resolved, layers=layers, folder=run_folder(prepared), budget=(host_bytes, kept_bytes, left))
    with compat.substituted_engine(partial(VerticalEngine, **made_of)):
        return compat.stock_initialize(config=prepared, **kwargs)


def _bind(engine: Any, loop: Loop) -> None:
    """Give a plain engine the two calls; the loop holds the engine, as a bound method would."""
    engine.train_batch = MethodType(lambda _, data_iter=None, loss_fn=None: loop.train_batch(data_iter, loss_fn), engine)
    engine.eval_batch = MethodType(lambda _, data_iter, loss_fn=None: loop.eval_batch(data_iter, loss_fn), engine)


def _single_config(args: Any, config: Any, config_params: Any) -> tuple[Any, Any]:
    """The one configuration given, by deepspeed.initialize's rules; args comes back without it."""
    given = config if config is not None else config_params
    from_args = getattr(args, "deepspeed_config", None)
    if from_args is None:
        if given is None:
            raise ConfigError("initialize: no configuration given; pass config=..., or --deepspeed_config through args")
        return args, given
    if given is not None:
        raise ConfigError(
            f"initialize: got both config= and args.deepspeed_config={from_args!r}; pass one:"
            " config=ds_vertical.prepare(args.deepspeed_config), without args"
        )
    args = copy.copy(args)
    args.deepspeed_config = None
    return args, from_args


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
        compat_pools.rest_stock_buffers(self.module.parameters(), self.optimizer)
        hostmemory.trim()  # what stock freed of the fp32 copies from which it wrote the optimizer's state
        device = torch.device(compat.device_name())
        new_queue = partial(new_disk_queue, compat.aio_config(self), self.tracer)
        window = vertical.prefetch_layers
        num_buffers = layer_buffers(window, layers.num_layers)
        generations = self.optimizer.regime.generations
        files = generations, self.optimizer.checksums
        self._params = ParamStore(layers.units, new_queue, num_buffers, device, new_queue(), window, *files)
        begin = partial(serve_device, device, ranks.ranks_on_these_cores())
        self.optimizer.start_pipeline(new_queue, self._params, self.tracer, begin)
        every = [param for params in layers.units.values() for param in params]
        compat.guard_parameters(every, self.optimizer.flush, self._params.note_writing, self._params.note_write)
        self._gradients = self._new_sums()
        self._activations = open_activations(vertical, layers, folder, new_queue, device, left)
        self._stopping = Stopping(vertical.on_signal, self.optimizer.regime)
        in_turn = vertical.order == "horizontal"
        self._state = ForwardState(self.module, layers, lambda: self.optimizer.num_decided, in_turn, vertical.snake)
        self._sweeps = Sweeps(
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
        compat.log(
            f"ds_vertical: vertical schedule ACTIVE: order {vertical.order}, {layers.describe()}; bytes of parameters on this"
            f" rank: {tiers}; host buffers {self._params.host_bytes}; {describe_activations(vertical)}; optimizer"
            f" {self.optimizer.describe()}"
        )

    def _configure_zero_optimizer(self, optimizer: Any) -> Any:  # override
        check_optimizer(optimizer)
        load_joint()  # a compile belongs ahead of the steps
        with compat.substituted_stage3(partial(VerticalStage3, layers=self.layers, vertical=self.vertical)):
            return super()._configure_zero_optimizer(optimizer)

    def _new_sums(self) -> GradientStore:
        return GradientStore(
            in_chunk_order(self.layers, self.optimizer),
            self.optimizer.gradient_accumulation_dtype,
            compat.full_numel,
            partial(compat_state.rounding_dtype, self.optimizer),
            self.optimizer.steps,
            self.optimizer.gradients.drop,
            compat.device_name(),
            pairs=compat.is_one_memory() and self.vertical.order == "vertical",  # otherwise layers take turns
        )

    # ---- training

    def train_batch(self, data_iter: Iterable[Any] | None = None, loss_fn: LossFn | None = None) -> torch.Tensor:
        with self._stopping.obeyed(self), self.optimizer.calls.call("train_batch"), ranks.shared("train_batch"):
            return self._loop.train_batch(data_iter, loss_fn)

    train_batch.__doc__ = Loop.train_batch.__doc__

    def eval_batch(self, data_iter: Iterable[Any], loss_fn: LossFn | None = None) -> torch.Tensor:
        with self._stopping.obeyed(self), self.optimizer.calls.call("eval_batch"), ranks.shared("eval_batch"):
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
            compat.forget_boundary(self)
        self.micro_steps += num_micro_batches - 1
        if self._kept_bytes:  # not before the first step has allocated what stays
            hostmemory.keep_freed_memory(self._kept_bytes)
        rate = self.optimizer.regime.hit_rate
        if rate is not None and self.global_steps % self.steps_per_print() == 0:
            compat.log(f"ds_vertical: step {self.global_steps}: {rate:.0%} of the steps tried early came true")

    def call_module(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's own forward under the JSON's torch_autocast; the loss function runs outside it, as in stock."""
        with compat.autocast_if_enabled(self):
            return self.module(*inputs, **kwargs)

    @ranks.together
    def evaluate(self, bodies: list[Body]) -> list[Any]:
        """Run forwards without training, layer-major or, with "horizontal", one after the other; returns what each returned."""
        in_turn = self.vertical.order == "horizontal"
        with self.optimizer.agreed("evaluation"):
            self.optimizer.flush()
        with self.optimizer.calls.running(), WATCH.watching(), suspended_hooks(self), self.optimizer.schedule_running():
            return [
                result for some in ([[each] for each in bodies] if in_turn else [bodies]) for result in self._evaluated(some)
            ]

    def _evaluated(self, bodies: list[Body]) -> list[Any]:
        schedule = build_evaluation(self.layers.num_layers, len(bodies), window=self.vertical.prefetch_layers)
        return until_known(partial(self._sweeps.evaluate, schedule, bodies), self._state.forget)

    def check_itself(self, bodies: list[Body]) -> None:
        """Before the first step, where the JSON asks for it: see `selfcheck`. Raises SelfCheckError on every rank."""
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
        with self.optimizer.agreed("self_check"):
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
            self.optimizer.schedule_running(),
        ):
            line, error = SelfCheck(*parts).run(bodies)
        hostmemory.trim()  # what whole graphs took is not the steps' memory
        self._state.forget()
        compat.log(f"ds_vertical: {line}")
        with self.optimizer.agreed("self_check"):
            if error is not None:
                raise error

    def train_step(self, bodies: list[Body]) -> list[torch.Tensor]:
        """One step over forwards that return their losses, everything up to and including the units' optimizer steps."""
        run = partial(self._train_step, bodies)
        return until_known(run, self._state.forget, lambda line: compat.log(f"ds_vertical: {line}"))

    def _train_step(self, bodies: list[Body]) -> list[torch.Tensor]:
        vertical = self.vertical
        with self.optimizer.agreed("train_batch"):
            self._params.check_open()
            self.optimizer.check_whole()
            self._gradients.refuse_strays()
            self._gradients.refuse_frozen({id(param): name for name, param in self.module.named_parameters()})
        compat_pools.rest_stock_buffers(self.module.parameters(), self.optimizer)
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
            due=frozenset(self.optimizer.due),
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
            self.optimizer.schedule_running(),
        ):
            return self._sweeps.train(schedule, bodies, self._gradients, self.optimizer, scale)

    def _restore(self, level: int, take_back: Callable[[], None]) -> None:
        """Put in order what a call has left that ended by an error or an interrupt, cut anywhere; where that is cut, again. A
        step that counts is concluded."""
        if level == RUNNING:
            if self._activations is not None:
                self._activations.abandon()  # before the forwards end: see there
            self._sweeps.end_forwards()
            take_back()
            self.optimizer.abandon()  # before the release: steps write into buffers handed over
        self._params.release_all()
        if level == RUNNING:
            self._gradients.drop_all()
            if self.optimizer.counts and self.optimizer.failure is None:
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
