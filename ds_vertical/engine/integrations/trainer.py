"""Hugging Face's Trainer, of whatever subclass: each instance hands its engine whole steps, and evaluations in windows.

`get_batch_samples` takes all micro-batches of a step from the loader, so nothing is predicted. The first `training_step` of
these runs all of them as micro-steps, and the optimizer's step; the others return what is there already.

[Note: what differs] Callbacks are called in stock's order, with stock's values. But `on_substep_end` comes when the step has
been: a callback that ends training there ends it one step later than under stock. A step that starts over calls the
micro-steps again; what the Trainer and its subclasses have counted in their attributes is put back before (`counted`).
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from torch import nn

from ds_vertical.compat import accelerator
from ds_vertical.compat.engine import DeepSpeedEngine
from ds_vertical.distributed import ranks
from ds_vertical.engine.checkpoint import shared_dir
from ds_vertical.engine.integrations.counted import CountedByTrainer
from ds_vertical.engine.integrations.engine_calls import CallableEngine
from ds_vertical.engine.integrations.eval_windows import EvaluationWindows, Preprocessing, fitting
from ds_vertical.engine.integrations.made_trainers import CALLED_WITH, Trainer, check_signature, set_sync_gradients
from ds_vertical.engine.integrations.micro_steps import GenerationError, refuse_in_a_step
from ds_vertical.engine.integrations.stock_calls import in_micro_step
from ds_vertical.errors import ConfigError, LayerError, LoopError

T = TypeVar("T")
_MARK: Final = "refuses_micro_steps"
# by class: their micro-steps have the model generate, which calls its layers once for each token
_GENERATING: Final = (
    "GRPOTrainer",
    "RLOOTrainer",
    "DistillationTrainer",
    "OnlineDPOTrainer",
    "GKDTrainer",
    "GOLDTrainer",
    "PPOTrainer",
    "SDPOTrainer",
    "SDFTTrainer",
    "IWOPDTrainer",
    "A2POTrainer",
)
_ADAPTED: Final = ("PeftModel", "PeftMixedModel")  # by class: the Trainer gathers what is trained, whatever the JSON says
_GATHER: Final = "zero_optimization.stage3_gather_16bit_weights_on_model_save"


def bridge(trainer: Trainer) -> None:
    """Let one Trainer hand its engine whole steps. Raises ConfigError where a subclass's methods take other arguments."""
    watch_generation()
    Bridge(trainer).install()


def watch_generation() -> None:
    """Have `generate` of transformers' models raise GenerationError within a micro-step, from here on. Twice is harmless."""
    from transformers import GenerationMixin

    stock: Callable[..., object] = vars(GenerationMixin)["generate"]  # which is declared for its subclasses alone
    if getattr(stock, _MARK, False):
        return

    @functools.wraps(stock)
    def generate(model: nn.Module, *args: object, **kwargs: object) -> object:
        refuse_in_a_step(f"{type(model).__name__}.generate", model)
        return stock(model, *args, **kwargs)

    setattr(generate, _MARK, True)
    setattr(GenerationMixin, "generate", generate)  # noqa: B010 - whose signature is another one


class Bridge:
    """Between one Trainer and its engine. The Trainer's own methods, of its most derived class, are what a micro-step runs."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._take_batches = trainer.get_batch_samples
        self._micro_step = trainer.training_step
        self._evaluations = Evaluations(trainer, self._counted)
        self._batches: Sequence[object] = ()
        self._results: list[object] = []
        self._checked_dir = ""  # an `output_dir` that `_check_output_dir` has found fit

    def install(self) -> None:
        """Put the bridge's methods in the place of the Trainer's. Raises ConfigError where a subclass's take others."""
        trainer = self._trainer
        for name, arguments in CALLED_WITH.items():
            check_signature(f"{type(trainer).__name__}.{name}", getattr(trainer, name), arguments)
        trainer.get_batch_samples = self.get_batch_samples
        trainer.training_step = self.training_step
        trainer.prediction_step = self._evaluations.prediction_step
        trainer.evaluation_loop = self._evaluations.evaluation_loop

    def get_batch_samples(self, *args: object, **kwargs: object) -> tuple[Sequence[object], object]:
        """As the Trainer's own; what it returns is the next step's."""
        batches, num_items = self._take_batches(*args, **kwargs)
        self._batches, self._results = batches, []
        return batches, num_items

    def training_step(self, model: nn.Module, inputs: object, *args: object, **kwargs: object) -> object:
        """Of the first micro-batch: the whole step. Of each: what the Trainer's own has returned for it."""
        if not isinstance(model, CallableEngine):
            self._refuse_evaluated(model)
            return in_micro_step(model, inputs, functools.partial(self._micro_step, model, inputs, *args, **kwargs))
        batches = self._batches
        position = next((index for index, batch in enumerate(batches) if batch is inputs), None)
        if position is None:
            raise LoopError(
                f"{type(self._trainer).__name__}.training_step: got a batch that get_batch_samples has not returned for this"
                " step; with vertical_schedule the Trainer's own loop must call both, or call engine.train_batch"
            )
        if position == 0:
            self._refuse_generation()
            self._check_output_dir(model)
            self._results = self._step(model, batches, lambda batch: self._micro_step(model, copy.copy(batch), *args, **kwargs))
        return self._results[position]

    def _step(self, engine: CallableEngine, batches: Sequence[T], run: Callable[[T], object]) -> list[object]:
        """All micro-steps of a step, each on a copy of its batch: the user's code takes labels out, and may run again."""
        before = self._trainer.accelerator.gradient_state.sync_gradients

        def entering(index: int) -> None:
            set_sync_gradients(self._trainer, index == len(batches) - 1)

        engine.train()
        try:
            runs = [functools.partial(run, batch) for batch in batches]
            return engine.train_window(runs, batches, entering, self._counted())
        finally:
            set_sync_gradients(self._trainer, before)

    def _counted(self) -> CountedByTrainer:
        return CountedByTrainer(self._trainer, lambda line: accelerator.log(f"ds_vertical: warning: {line}"))

    def _check_output_dir(self, engine: CallableEngine) -> None:
        """Refuse a folder for checkpoints that not all hosts see, ahead of the first step: the first save would. The Trainer
        saves a checkpoint in place of a model whose weights it does not gather."""
        args = self._trainer.args
        if args.save_strategy == "no" or args.output_dir == self._checked_dir:
            return
        has_adapters = any(cls.__name__ in _ADAPTED for cls in type(self._trainer.model).__mro__)
        gathers = has_adapters or engine.zero_gather_16bit_weights_on_model_save()
        with ranks.collective_section("TrainingArguments.output_dir"):
            if gathers and args.save_on_each_node:
                _refuse_on_each_node(has_adapters)
            if not (gathers and args.save_only_model):
                shared_dir.check_output_dir(Path(args.output_dir), engine.use_node_local_storage(), not has_adapters)
        self._checked_dir = args.output_dir

    def _refuse_evaluated(self, model: nn.Module) -> None:
        """An evaluation, or a prediction, ahead of `train` has made an engine without an optimizer: stock breaks at its first
        backward."""
        if isinstance(model, DeepSpeedEngine) and self._trainer.accelerator.deepspeed_engine_wrapped is None:
            name = type(self._trainer).__name__
            raise LoopError(
                f"{name}.evaluate, or predict, was called ahead of train, and has made this Trainer's engine, which has no"
                f" optimizer; call it behind train, or in another {name} with a copy of the model"
            )

    def _refuse_generation(self) -> None:
        for cls in type(self._trainer).__mro__:
            if cls.__name__ in _GENERATING:
                raise LoopError(
                    f"{cls.__name__}: its micro-steps generate text, which calls the model's layers once for each token;"
                    " layer-major order cannot follow it: set vertical_schedule.enabled to false"
                )


def _refuse_on_each_node(has_adapters: bool) -> None:
    """The Trainer gathers weights on rank 0 alone; on the other hosts it then saves a checkpoint, for which nobody waits with
    it. `has_adapters`: PEFT has made the model, and the Trainer gathers whatever the JSON says."""
    if ranks.ranks_on_this_host() == ranks.world_size():
        return
    shared = "pass save_on_each_node=False and an output_dir on a file system that all hosts share"
    if has_adapters:
        cause, remedy = "a model of PEFT", shared
    else:
        cause, remedy = f"{_GATHER} true", f"write {_GATHER} false into the JSON, or {shared}"
    raise ConfigError(
        f"TrainingArguments.save_on_each_node: got True with {cause} on several hosts: the Trainer gathers the weights on rank"
        f" 0 alone, and the first save would stand still; {remedy}"
    )


class _TooLargeError(Exception):
    """The results of an evaluation's micro-batches cannot all wait at once. `fitting`: how many can."""

    def __init__(self, fitting: int) -> None:
        super().__init__(fitting)
        self.fitting = fitting


class Evaluations:
    """Those of one Trainer: in windows, each of which reads all layers once.

    What the micro-batches of a window return (logits, say) waits until the Trainer's loop comes to it. How many such results
    fit shows with the first one, and the evaluations behind it begin with what is known. `counted`: see `train_window`.
    """

    def __init__(self, trainer: Trainer, counted: Callable[[], CountedByTrainer]) -> None:
        self._trainer = trainer
        self._counted = counted
        self._predict = trainer.prediction_step
        self._evaluate = trainer.evaluation_loop
        self._windows: EvaluationWindows[object] | None = None
        self._predicted: list[object] = []
        self._has_results = False  # more than losses
        self._most: int | None = None  # of micro-batches with results that may wait; None: no evaluation has shown it
        self._preprocessing = Preprocessing(trainer)

    def evaluation_loop(self, dataloader: Iterable[object], *args: object, **kwargs: object) -> object:
        """As the Trainer's own, with the batches taken from the loader some at a time."""
        engine = self._trainer.model_wrapped
        if not isinstance(engine, CallableEngine):
            return self._evaluate(dataloader, *args, **kwargs)
        given = inspect.signature(self._evaluate).bind(dataloader, *args, **kwargs).arguments
        loss_only = given.get("prediction_loss_only")
        loss_only = self._trainer.args.prediction_loss_only if loss_only is None else loss_only
        size = engine.gradient_accumulation_steps()
        if not loss_only:  # several ranks begin with one: they could not start over together
            size = self._most or (size if ranks.world_size() == 1 else 1)
        before = self._windows, self._has_results
        self._windows, self._has_results = EvaluationWindows(dataloader, size), not loss_only
        try:
            with self._preprocessing.at_once():
                return self._evaluate(self._windows, *args, **kwargs)
        finally:
            (self._windows, self._has_results), self._predicted = before, []

    def prediction_step(self, model: nn.Module, inputs: object, *args: object, **kwargs: object) -> object:
        """Of a window's first batch: all of it. Of each: what the Trainer's own has returned for it."""
        engine, windows = self._trainer.model_wrapped, self._windows
        predict = functools.partial(self._predict, model)
        if isinstance(engine, CallableEngine) and windows is not None and windows.window and windows.window[0] is inputs:
            try:
                if not self._predicted:
                    self._predict_window(engine, windows, lambda batch: predict(copy.copy(batch), *args, **kwargs))
                return self._preprocessing.handed_on(self._predicted.pop(0))
            except (LayerError, GenerationError) as error:  # TRL's SFT calls the model twice where it is asked for logits, say
                self._windows = None
                name = f"{type(self._trainer).__name__}.prediction_step"
                accelerator.log(f"ds_vertical: this evaluation reads all layers for each batch: {name}: {error}")
        return self._preprocessing.handed_on(predict(inputs, *args, **kwargs))

    def _predict_window(
        self, engine: CallableEngine, windows: EvaluationWindows[object], predict: Callable[[object], object]
    ) -> None:
        """Have the results of the window's batches, or of as many of these as can wait."""
        while not self._predicted:
            batches = windows.window[: windows.size]
            runs = [functools.partial(self._predict_one, predict, batch, len(batches)) for batch in batches]
            try:
                self._predicted = engine.eval_window(runs, batches, self._counted())
            except _TooLargeError as error:
                windows.size = self._most = error.fitting
        num_fitting = fitting(self._predicted, engine.gradient_accumulation_steps())
        with ranks.collective_section("eval_window"):  # all ranks take windows of one size
            windows.size = -ranks.largest_of_all_ranks(-num_fitting)
        if self._has_results:
            self._most = windows.size

    def _predict_one(self, predict: Callable[[object], object], batch: object, num_batches: int) -> object:
        """The result of one micro-batch. Raises _TooLargeError where `num_batches` of these could not wait, if nobody has known
        the size of any."""
        result = self._preprocessing.applied(predict(batch))
        is_unknown = self._has_results and self._most is None and ranks.world_size() == 1
        if is_unknown and (num_fitting := fitting([result], num_batches)) < num_batches:
            raise _TooLargeError(num_fitting)
        return result
