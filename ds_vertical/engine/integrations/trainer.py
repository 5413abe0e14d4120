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
from typing import Final, TypeVar

from torch import nn

from ds_vertical.compat import accelerator
from ds_vertical.engine.integrations.counted import CountedByTrainer
from ds_vertical.engine.integrations.engine_calls import CallableEngine
from ds_vertical.engine.integrations.eval_windows import EvaluationWindows, fitting
from ds_vertical.engine.integrations.made_trainers import CALLED_WITH, Trainer, check_signature, set_sync_gradients
from ds_vertical.engine.integrations.stock_calls import in_micro_step
from ds_vertical.errors import LayerError, LoopError

T = TypeVar("T")
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


def bridge(trainer: Trainer) -> None:
    """Let one Trainer hand its engine whole steps. Raises ConfigError where a subclass's methods take other arguments."""
    Bridge(trainer).install()


class Bridge:
    """Between one Trainer and its engine. The Trainer's own methods, of its most derived class, are what a micro-step runs."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._take_batches = trainer.get_batch_samples
        self._micro_step = trainer.training_step
        self._predict = trainer.prediction_step
        self._evaluate = trainer.evaluation_loop
        self._batches: Sequence[object] = ()
        self._results: list[object] = []
        self._windows: EvaluationWindows[object] | None = None
        self._predicted: list[object] = []

    def install(self) -> None:
        """Put the bridge's methods in the place of the Trainer's. Raises ConfigError where a subclass's take others."""
        trainer = self._trainer
        for name, arguments in CALLED_WITH.items():
            check_signature(f"{type(trainer).__name__}.{name}", getattr(trainer, name), arguments)
        trainer.get_batch_samples = self.get_batch_samples
        trainer.training_step = self.training_step
        trainer.prediction_step = self.prediction_step
        trainer.evaluation_loop = self.evaluation_loop

    # ---- training

    def get_batch_samples(self, *args: object, **kwargs: object) -> tuple[Sequence[object], object]:
        """As the Trainer's own; what it returns is the next step's."""
        batches, num_items = self._take_batches(*args, **kwargs)
        self._batches, self._results = batches, []
        return batches, num_items

    def training_step(self, model: nn.Module, inputs: object, *args: object, **kwargs: object) -> object:
        """Of the first micro-batch: the whole step. Of each: what the Trainer's own has returned for it."""
        if not isinstance(model, CallableEngine):
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

    def _refuse_generation(self) -> None:
        for cls in type(self._trainer).__mro__:
            if cls.__name__ in _GENERATING:
                raise LoopError(
                    f"{cls.__name__}: its micro-steps generate text, which calls the model's layers once for each token;"
                    " layer-major order cannot follow it: set vertical_schedule.enabled to false"
                )

    # ---- evaluation

    def evaluation_loop(self, dataloader: Iterable[object], *args: object, **kwargs: object) -> object:
        """As the Trainer's own, with the batches taken from the loader some at a time."""
        engine = self._trainer.model_wrapped
        if not isinstance(engine, CallableEngine):
            return self._evaluate(dataloader, *args, **kwargs)
        given = inspect.signature(self._evaluate).bind(dataloader, *args, **kwargs).arguments
        loss_only = given.get("prediction_loss_only")
        loss_only = self._trainer.args.prediction_loss_only if loss_only is None else loss_only
        before = self._windows
        # logits may be large: one micro-batch's tell how many may wait
        self._windows = EvaluationWindows(dataloader, engine.gradient_accumulation_steps() if loss_only else 1)
        try:
            return self._evaluate(self._windows, *args, **kwargs)
        finally:
            self._windows, self._predicted = before, []

    def prediction_step(self, model: nn.Module, inputs: object, *args: object, **kwargs: object) -> object:
        """Of a window's first batch: all of it. Of each: what the Trainer's own has returned for it."""
        engine, windows = self._trainer.model_wrapped, self._windows
        if not isinstance(engine, CallableEngine) or windows is None or not windows.window or windows.window[0] is not inputs:
            return self._predict(model, inputs, *args, **kwargs)
        if not self._predicted:
            runs = [functools.partial(self._predicted_one, model, batch, args, kwargs) for batch in windows.window]
            try:
                self._predicted = engine.eval_window(runs, windows.window, self._counted())
            except LayerError as error:  # TRL's SFT calls the model twice where it is asked for logits, say
                self._windows = None
                name = f"{type(self._trainer).__name__}.prediction_step"
                accelerator.log(f"ds_vertical: this evaluation reads all layers for each batch: {name}: {error}")
                return self._predict(model, inputs, *args, **kwargs)
            windows.size = fitting(self._predicted, engine.gradient_accumulation_steps())
        return self._predicted.pop(0)

    def _predicted_one(self, model: nn.Module, batch: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        return self._predict(model, copy.copy(batch), *args, **kwargs)
