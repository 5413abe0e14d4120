"""What `train_batch` and `eval_batch` do in both arms around the work itself: micro-batches in, counters, metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_vertical.compat import accelerator, swap_buffers
from ds_vertical.compat import engine as compat_engine
from ds_vertical.distributed import ranks
from ds_vertical.distributed.elastic import ElasticCounts
from ds_vertical.distributed.step_shares import NUMBERS, Brought, Counts, OwnCounts, StepShares, refuse_unequal
from ds_vertical.engine import metrics
from ds_vertical.engine.assembly import StepParts, moved_tiers
from ds_vertical.engine.call_guard import RUNNING
from ds_vertical.engine.handlers import LossScale
from ds_vertical.engine.keeping.device_full import DeviceFull
from ds_vertical.engine.keeping.keeping import refuse_several_calls
from ds_vertical.engine.metrics import DeviceUse, StepRecorder
from ds_vertical.engine.module_hooks import suspended_hooks
from ds_vertical.engine.progress import Progress
from ds_vertical.engine.run_log import RunLogger, model_config
from ds_vertical.engine.self_check.evaluation_order import EvaluationPasses
from ds_vertical.engine.self_check.first_step import FirstStepCheck
from ds_vertical.engine.zero3.interface import Optimizer
from ds_vertical.interrupts import Changed
from ds_vertical.io import host
from ds_vertical.io.openmp_wait import WATCH
from ds_vertical.model import batch as micro
from ds_vertical.model.batch import LossFn
from ds_vertical.model.layers import check_trainable, refuse_batch_flags, shares_weights
from ds_vertical.model.micro_batch import Body
from ds_vertical.model.state.module_state import global_generators_seeded
from ds_vertical.model.state.restart import LearnedCalls, until_known
from ds_vertical.model.thread_state import ThreadState, applied
from ds_vertical.planner.run_record import DTYPES
from ds_vertical.schedule.events import Cell, Schedule
from ds_vertical.schedule.passes import TrainingStep, build_training
from ds_vertical.schedule.trace import Tracer


def device_use() -> DeviceUse:
    """Of this process's device, so far."""
    asked = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    return DeviceUse(accelerator.peak_device_bytes(), repeatable=asked or accelerator.is_one_memory())


class TrainLoop:
    """One arm's training loop over an engine; subclasses do the work of a step.

    `seed`: base of the micro-batches' random streams, None where the caller's own stream is used. `progress`: hears of every
    step.
    """

    def __init__(self, engine: compat_engine.DeepSpeedEngine, seed: int | None, progress: Progress) -> None:
        self.engine = engine
        self.ran: Schedule | None = None  # of the last step; a plain engine runs none
        self.seed = seed
        self.progress = progress
        self.device = torch.device(accelerator.device_name())
        self._recorder: StepRecorder | None = None
        self._recorder_asked = False
        self._run_logger: RunLogger | None = None
        self._own_data: Iterator[object] | None = None
        self._loss: torch.Tensor | None = None  # of the last `run`
        self.elastic: ElasticCounts | None = None  # how many micro-batches each rank takes; None: what the JSON has
        self.shares = StepShares(())  # of the step under way, or of the one before
        self.num_tokens = 0  # of this rank, likewise
        self._timed_tokens = 0

    # ---- the work, by arm

    def run(self, batches: list[object], loss_fn: LossFn | None) -> list[torch.Tensor]:
        """One step over the micro-batches; returns their losses. Sets `shares`, and notes the losses (`note_losses`)."""
        raise NotImplementedError

    def evaluate(self, batches: list[object], loss_fn: LossFn | None) -> list[torch.Tensor]:
        """Losses of the micro-batches without training."""
        raise NotImplementedError

    # ---- what engines expose

    def train_batch(self, data_iter: Iterable[object] | None = None, loss_fn: LossFn | None = None) -> torch.Tensor:
        """One optimizer step over up to `gradient_accumulation_steps` micro-batches.

        `data_iter` yields micro-batches: dict (keyword arguments of the model), tuple (positional) or tensor; None takes
        the engine's own dataloader. `loss_fn(outputs, batch)` defaults to the model's own loss; where it has a method
        `num_items(batch)`, each micro-batch counts with that number of items. With 0 < m < M micro-batches left, the mean is
        over m. Returns the mean loss, a 0-d fp32 tensor: of this rank's micro-batches where all ranks bring as many, and none
        is weighted; else of all ranks'.

        Raises StopIteration, with nothing touched, when no micro-batch is left.
        """
        recorder = self._metrics()
        if recorder is not None:
            recorder.check_budget()
        most = self.engine.gradient_accumulation_steps()
        if self.elastic is not None:
            most = self.elastic.begin(self.engine.global_steps + 1)
        batches = micro.collect(self._iterator(data_iter), most, self.device)
        if not self.module.training:
            self.module.train()
        self.num_tokens = micro.count_tokens(batches)
        with self.progress.step():
            self._recorded(recorder, partial(self.run, batches, loss_fn), batches)
        loss, self._loss = self._loss, None
        assert loss is not None  # `run` has noted it
        self.progress.note(loss, batches, self.shares.num_tokens)
        return loss

    def eval_batch(self, data_iter: Iterable[object], loss_fn: LossFn | None = None) -> torch.Tensor:
        """Mean loss over up to `gradient_accumulation_steps` micro-batches, in evaluation mode, without gradients.

        Raises StopIteration when no micro-batch is left.
        """
        batches = micro.collect(micro.as_iterator(data_iter), self.engine.gradient_accumulation_steps(), self.device)
        with torch.no_grad(), evaluating(self.module):
            return micro.mean_loss(self.evaluate(batches, loss_fn))

    # ---- shared details

    def seed_of(self, micro_batch: int) -> int | None:
        """Seed of a micro-batch's streams in the step about to run."""
        seed = self.seed
        return None if seed is None else micro.stream_seed(seed, self.engine.global_steps, micro_batch, ranks.rank())

    def count_samples(self, num_micro_batches: int) -> None:
        """The engine adds a full batch's samples in its step; take off those that a short last batch did not have.
        `num_micro_batches`: of all ranks."""
        missing = self.engine.gradient_accumulation_steps() * ranks.world_size() - num_micro_batches
        self.engine.global_samples -= missing * self.engine.train_micro_batch_size_per_gpu()

    def note_losses(self, losses: Sequence[torch.Tensor], weights: Sequence[float] | None) -> None:
        """Take the mean of a step's losses: see `train_batch`. `weights`: of this rank's, None where all are the same.
        Collective where the mean is of all ranks'."""
        self._loss = micro.mean_loss(list(losses))
        if weights is None and self.shares.are_equal:
            return
        own = sum(float(loss) * weight for loss, weight in zip(losses, weights or [1.0] * len(losses), strict=True))
        self._loss = torch.full_like(self._loss, ranks.sum_of_all_ranks(own) / self.shares.total)

    def _iterator(self, data_iter: Iterable[object] | None) -> Iterator[object]:
        if data_iter is not None:
            return micro.as_iterator(data_iter)
        if self.engine.training_dataloader is None:
            raise ValueError("train_batch(data_iter): got None, and initialize was given no training_data; pass an iterator")
        if self._own_data is None:
            self._own_data = _epochs(self.engine.training_dataloader)
        return self._own_data

    def _recorded(
        self, recorder: StepRecorder | None, run: Callable[[], list[torch.Tensor]], batches: Sequence[object]
    ) -> list[torch.Tensor]:
        """`run` these micro-batches, with the step's record where somebody asked for one."""
        if recorder is None:
            return run()
        recorder.begin()
        losses = run()
        recorder.end(
            engine=type(self.engine).__name__,
            losses=[float(loss) for loss in losses],
            tokens=micro.count_tokens(list(batches)),
            tied=shares_weights(self.module),
            device=device_use(),
        )
        tokens = micro.count_tokens(list(batches[:1]))
        self._log_step(recorder, tokens, self._host_speed(tokens))
        return losses

    def _host_speed(self, tokens: int) -> float | None:
        """How fast the host is behind this step, where that is asked; of both arms, which have the same rest between steps so.
        `tokens` of one micro-batch."""
        if not (metrics.asked() and accelerator.is_one_memory() and ranks.world_size() == 1):
            return None
        self._timed_tokens = self._timed_tokens or tokens  # of the step for which `limits` measures, however long others are
        module, sequences = self.module, self.engine.train_micro_batch_size_per_gpu()
        dtype = DTYPES.get(str(next(module.parameters()).dtype).removeprefix("torch."))
        batch = {"tokens": self._timed_tokens, "sequences": sequences, "dtype": dtype}
        return metrics.measure_between_steps(model_config(module) if dtype else None, batch, torch.get_num_threads())

    def _log_step(self, recorder: StepRecorder, tokens: int, gauge_s: float | None) -> None:
        """The vertical arm's account of the step, beside its record."""
        if self.ran is None or ranks.rank() != 0:
            return
        if self._run_logger is None:
            self._run_logger = RunLogger(self.engine, recorder.folder, tokens)
        self._run_logger.step(gauge_s)

    @property
    def module(self) -> nn.Module:
        """The user's model."""
        return compat_engine.model_of(self.engine)

    @property
    def is_recorded(self) -> bool:
        """Whether `ds-vertical ab` has asked for a record of each step; known from the first `train_batch` on."""
        return self._recorder is not None

    def _metrics(self) -> StepRecorder | None:
        if not self._recorder_asked:
            self._recorder_asked = True
            self._recorder = StepRecorder.from_environment(ranks.rank())
        return self._recorder


def _epochs(loader: Iterable[object]) -> Iterator[object]:
    while True:
        yield from loader


def evaluating(module: nn.Module) -> Changed:
    """Evaluation mode for the block; every submodule's own mode is put back."""
    modes = [(each, each.training) for each in module.modules()]

    def put_back() -> None:
        for each, training in modes:
            each.training = training

    return Changed(put_back, module.eval)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within the block torch's, Python's and NumPy's random streams are those of a micro-batch's seed."""
    with applied(ThreadState.capture().seeded(seed)), global_generators_seeded(seed):
        yield


@dataclass(frozen=True)
class ModelCall:
    """Calls the user's model as stock's `forward` would, and makes the forwards of micro-batches out of such calls."""

    engine: compat_engine.DeepSpeedEngine

    def __call__(self, *inputs: object, **kwargs: object) -> Any:
        """The model's own forward under the JSON's torch_autocast; the loss function runs outside it, as in stock."""
        with compat_engine.autocast_if_enabled(self.engine):
            return compat_engine.model_of(self.engine)(*inputs, **kwargs)

    def body(self, batch: object, seed: int | None, loss_fn: LossFn | None) -> Body:
        """The forward of one micro-batch, which returns its loss."""
        functions = () if loss_fn is None else (loss_fn,)
        return Body(partial(self._loss, batch, loss_fn), seed, micro.form_of(batch), functions)

    def _loss(self, batch: object, loss_fn: LossFn | None) -> torch.Tensor:
        inputs = compat_engine.inputs_of(self.engine, batch)
        return micro.loss_of(micro.call_model(self, inputs), batch, loss_fn)


class VerticalLoop(TrainLoop):
    """The vertical arm: a step takes all its micro-batches, builds their schedule, runs it and concludes."""

    def __init__(self, parts: StepParts, check: FirstStepCheck, tracer: Tracer, progress: Progress) -> None:
        vertical = parts.vertical
        super().__init__(parts.engine, vertical.seed if vertical.seed_micro_batches else None, progress)
        self.call_model = ModelCall(parts.engine)
        self._parts = parts
        self._check, self._evaluations = check, EvaluationPasses(parts, check)
        self._tracer, self._full = tracer, DeviceFull(parts)
        self._counts: Counts = OwnCounts(0)  # of the step under way, or of the one before
        self._weights: list[float] | None = None  # likewise: of this rank's losses in the mean; None: all the same
        self.scheduler_steps = 1  # of the learning rate scheduler, for a step that counts
        self._calls = LearnedCalls()  # in the step under way, or in the one before
        self._calls_of_windows = LearnedCalls()

    def run(self, batches: list[object], loss_fn: LossFn | None) -> list[torch.Tensor]:  # override
        """One step over the micro-batches; returns their losses. See `step`."""
        check_trainable(self.module, _log)
        for batch in batches:
            refuse_batch_flags(batch)
        bodies = [self.call_model.body(batch, None, loss_fn) for batch in batches]
        items = partial(micro.items_of, loss_fn, batches)
        losses = self.step(bodies, self._parts.mean_over, OwnCounts(len(bodies), items))
        self.note_losses(losses, self._weights)
        return losses

    def train_window(self, bodies: Sequence[Body], counts: Counts, batches: Sequence[object]) -> None:
        """One step over the forwards of another loop's micro-batches, whose losses that loop has scaled: their sum is the
        step's loss. `batches`: for metrics alone."""
        recorder = self._metrics()
        if recorder is not None:
            recorder.end_at_budget()
        if self.elastic is not None:
            self.elastic.refuse_loop()
        check_trainable(self.module, _log)
        self.num_tokens = micro.count_tokens(list(batches))
        with self.progress.step():
            run = partial(self.step, bodies, self._parts.as_given, counts, self._calls_of_windows)
            losses = self._recorded(recorder, run, batches)
        self.progress.note(micro.mean_loss(losses) * len(losses), batches, self.shares.num_tokens)

    def step(
        self,
        bodies: Sequence[Body],
        scale_of: Callable[[float], LossScale],
        counts: Counts,
        calls: LearnedCalls | None = None,
    ) -> list[torch.Tensor]:
        """One step over forwards that return their losses; returns those. Each forward gets the seed of its micro-batch.

        `scale_of`: for a number of micro-batches, what the backward of each starts from. `calls`: of the model by each forward,
        learned if need be; None: one, and CallsMissed is raised for a further one. A step that does not count leaves
        torch's random state as it was.
        """
        self._counts, self._calls = counts, calls or LearnedCalls()
        if self.engine.training_dataloader is None:
            self.engine.tput_timer.start()
        seeds = [self.seed_of(index) for index in range(len(bodies))]
        optimizer, random_state = self._parts.optimizer, torch.get_rng_state()
        num_decided = optimizer.driver.num_decided

        def put_back() -> None:
            if optimizer.driver.num_decided == num_decided:
                torch.set_rng_state(random_state)

        with Changed(put_back, only_if_failed=True):
            fresh = [int(torch.randint(2**62, ()).item()) if seed is None else seed for seed in seeds]
            seeded_bodies = [replace(body, seed=seed) for body, seed in zip(bodies, fresh, strict=True)]
            if not self.is_recorded or self._parts.vertical.self_check:  # `ab` compares the losses itself
                with self._full.explaining(0, None):
                    self._check.run(seeded_bodies, scale_of)
            taken = partial(self._check.bytes_taken, seeded_bodies, scale_of)
            with self._full.explaining(len(bodies), taken), self._tracer.step():
                run = partial(self.run_schedules, seeded_bodies, scale_of)
                losses = until_known(run, partial(self._check.run_again, seeded_bodies, scale_of), _log, calls)
                self.conclude()
            self._parts.keeping.close_step(self._parts.runner, self._calls.number)
        return losses

    def run_schedules(self, bodies: Sequence[Body], scale_of: Callable[[float], LossScale]) -> list[torch.Tensor]:
        """The step up to and including the units' optimizer steps. Returns the losses."""
        bodies = self.check_ready(bodies)
        return self.run_pass(bodies, scale_of(self.shares.mean_over), self._parts.optimizer.driver)

    def run_pass(self, bodies: Sequence[Body], scale: LossScale, optimizer: Optimizer) -> list[torch.Tensor]:
        """One schedule (`training_step`), up to its end. Returns the losses."""
        parts = self._parts
        swap_buffers.rest_stock_buffers(parts.module.parameters(), parts.optimizer)
        tiers = moved_tiers(parts.vertical, len(bodies))
        if parts.activations is not None:
            parts.activations.open_step(tiers)
        cells = parts.keeping.open_step(parts.runner, len(bodies), self._calls.number)
        schedule = self.ran = build_training(self.training_step(len(bodies), tuple(tiers), cells))
        with (
            parts.optimizer.calls.running(),
            WATCH.watching(),
            suspended_hooks(parts.engine, parts.layers, noted=parts.activations is not None),
            torch.enable_grad(),
            parts.optimizer.live.schedule_running(),
        ):
            return parts.runner.train(schedule, bodies, parts.gradients, optimizer, scale)

    def check_ready(self, bodies: Sequence[Body]) -> Sequence[Body]:
        """Raise, on every rank, where a step cannot begin on one. Otherwise all know what each brings. Returns the forwards
        with what they weigh."""
        parts, items_of, step = self._parts, self._counts.items, self.engine.global_steps + 1
        items: list[int] | None = None
        with parts.optimizer.live.agreed("train_batch", num_said=NUMBERS) as said:
            parts.params.check_open()
            parts.optimizer.live.check_whole()
            parts.gradients.refuse_strays()
            parts.gradients.refuse_frozen({id(param): name for name, param in parts.module.named_parameters()})
            moves = bool(moved_tiers(parts.vertical, len(bodies)))  # of a short step there may be nothing to move
            refuse_several_calls(moves or parts.keeping.is_asked, self._calls.number)
            items = None if items_of is None else items_of()
            num_items = None if items is None else sum(items)
            nanoseconds = 0 if self.elastic is None else self.elastic.nanoseconds(step)
            said.own[:] = Brought(len(bodies), num_items, self.num_tokens, nanoseconds).numbers()
        self.shares = StepShares.of(said.of_all)
        if self.elastic is not None:
            self.elastic.note(step, self.shares)
        refuse_unequal(self.shares, parts.vertical.order)
        self._weights = weights = self.shares.weights(items)
        return bodies if weights is None else [replace(each, weight=w) for each, w in zip(bodies, weights, strict=True)]

    def training_step(self, num_micro_batches: int, moved: tuple[int, ...], kept: tuple[Cell, ...]) -> TrainingStep:
        """What the schedule is made of. `moved`: micro-batches whose activations leave the device; `kept`: cells whose kept
        values do."""
        parts, vertical, optimizer = self._parts, self._parts.vertical, self._parts.optimizer
        return TrainingStep(
            *(parts.layers.num_layers, num_micro_batches),
            *(vertical.order, vertical.snake, vertical.prefetch_layers),
            delayed=optimizer.timing.leaves_steps,
            due=frozenset(optimizer.driver.backlog.due),
            early=optimizer.timing.early,
            ahead=vertical.prefetch_layers > 0,
            hold=optimizer.holding,
            moved=moved,
            calls=self._calls.number,
            kept=kept,
            outside=parts.outside_of(self._calls.number),
            reduces_beside=vertical.overlap and ranks.world_size() > 1,
            copy_share=vertical.levels.share,
            standing=parts.standing(),
        )

    def conclude(self) -> None:
        """A step counts: so do its samples. What stock's `step` does at the boundary: optimizer, scheduler, counters, monitor,
        printing."""
        with self._parts.optimizer.condition.torn_if_interrupted():
            self.count_samples(self._counts.num_sampled(self.shares))
            compat_engine.conclude_step(self.engine, self.scheduler_steps)
            self.engine.micro_steps += self._counts.num_calls - 1
            if self._parts.budget.kept:  # not before the first step has allocated what stays
                host.keep_freed_memory(self._parts.budget.kept, self._parts.budget.kept_behind)
            rate, every = self._parts.optimizer.timing.hit_rate, self.engine.steps_per_print()
            if rate is not None and every and self.engine.global_steps % every == 0:  # None: DeepSpeed prints no steps either
                _log(f"step {self.engine.global_steps}: {rate:.0%} of the steps tried early came true")

    def restore(self, level: int, take_back: Callable[[], None]) -> None:
        """Put in order what a call of the engine has left that ended by an error or an interrupt, cut anywhere; where that is
        cut, again. A step that counts is concluded. `level`, `take_back`: see `Calls`."""
        parts = self._parts
        if level == RUNNING:
            for store in (parts.activations, parts.keeping):
                if store is not None:
                    store.abandon()  # before the forwards end: see there
            parts.runner.end_forwards()
            take_back()
            parts.optimizer.driver.abandon()  # before the release: steps write into buffers handed over
        parts.params.release_all()
        if level == RUNNING:
            parts.gradients.drop_all()
            if parts.optimizer.driver.phase.counts and parts.optimizer.live.failure is None:
                self.conclude()

    # ---- without training

    def evaluate(self, batches: list[object], loss_fn: LossFn | None) -> list[torch.Tensor]:  # override
        """Losses of the micro-batches without training."""
        return self.evaluate_bodies([self.call_model.body(batch, None, loss_fn) for batch in batches])

    def evaluate_bodies(self, bodies: Sequence[Body]) -> list[Any]:
        """Run forwards without training; returns what each returned. See `EvaluationPasses.run`."""
        return self._evaluations.run(bodies)

    def forward(self, *inputs: object, **kwargs: object) -> Any:
        """The model's outputs for one call, without training."""
        body = Body(partial(self.call_model, *inputs, **kwargs), None, micro.form_of((inputs, kwargs)))
        return self._evaluations.run_one(body)


def _log(line: str) -> None:
    accelerator.log(f"ds_vertical: {line}")
