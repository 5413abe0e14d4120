"""DeepSpeed's three calls on a vertical engine: who is making them, and what takes them there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ds_vertical.distributed import ranks
from ds_vertical.engine.checkpoint.mixin import SavingEngine
from ds_vertical.engine.integrations.bridge_line import tell_bridge
from ds_vertical.engine.integrations.counted import Counted
from ds_vertical.engine.integrations.micro_steps import EvaluatedStep, Runs, Window, running_step
from ds_vertical.engine.integrations.three_calls import ThreeCalls
from ds_vertical.engine.signals import Stopping
from ds_vertical.engine.train_loop import VerticalLoop
from ds_vertical.model import batch as micro
from ds_vertical.model.layers import LayerMap

T = TypeVar("T")


class CallableEngine(SavingEngine):
    """DeepSpeed's engine whose `forward`, `backward` and `step` go to the micro-step that makes them. The subclass sets the
    attributes."""

    layers: LayerMap
    _loop: VerticalLoop
    _stopping: Stopping
    _three_calls: ThreeCalls

    def train_window(
        self,
        micro_steps: Sequence[Callable[[], T]],
        batches: Sequence[object],
        entering: Callable[[int], None] = lambda _: None,
        counted: Counted | None = None,
    ) -> list[T]:
        """One optimizer step over the user's whole micro-steps; returns what each returned.

        Each calls the model (through this engine, at least for the first time), as often as the others do, `backward(loss)`
        once, and the last one `step()`. The losses are taken as `backward` scales them. `entering(i)` is called as micro-step i
        begins, and as it goes on behind each of its model calls. `batches`: the micro-batches, for metrics. Where a step starts
        over, the micro-steps are called again; `counted` puts back what they have counted. Raises LoopError where one does
        something else; the step then has not been.
        """
        tell_bridge(self, "Trainer", self.layers.num_layers, len(micro_steps))
        window = Window(self._loop.call_model, micro_steps, [micro.form_of(batch) for batch in batches], entering, counted)
        with (
            self._stopping.obeyed(self),
            self.optimizer.calls.call("train_window"),
            ranks.collective_section("train_window"),
        ):
            self._loop.train_window(window.bodies, window, batches)
        return window.results

    def eval_window(
        self, runs: Sequence[Callable[[], T]], batches: Sequence[object], counted: Counted | None = None
    ) -> list[T]:
        """Run the user's code for some micro-batches without training, each of which calls the model as often as the others;
        returns what each returned. `counted`: see `train_window`; after an error, too, nothing has been counted."""
        model, all_runs = self._loop.call_model, Runs(counted)
        pairs = enumerate(zip(runs, batches, strict=True))
        steps = [EvaluatedStep(model, index, all_runs).body(run, micro.form_of(batch)) for index, (run, batch) in pairs]
        with self._stopping.obeyed(self), self.optimizer.calls.call("eval_window"), ranks.collective_section("eval_window"):
            try:
                return self._loop.evaluate_bodies(steps)
            except BaseException:
                all_runs.put_back()
                raise

    def forward(self, *inputs: object, **kwargs: object) -> Any:  # override
        """The model's outputs: in training mode with gradients, in evaluation mode without. Raises LoopError where a loop of
        the three calls cannot be followed."""
        if (step := running_step(self)) is not None:
            return step.forward(*inputs, **kwargs)
        if self.module.training:
            tell_bridge(self, "three calls", self.layers.num_layers, self.gradient_accumulation_steps())
            with (
                self._stopping.obeyed(self, ends_step=False),
                self.optimizer.calls.call("forward"),
                ranks.collective_section("forward"),
            ):
                return self._three_calls.forward(inputs, kwargs)
        self._three_calls.refuse_in_step("forward")
        with self._stopping.obeyed(self), self.optimizer.calls.call("forward"), torch.no_grad():
            return self._loop.forward(*inputs, **kwargs)

    def backward(self, loss: object, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:  # override
        """Take a micro-batch's loss, and return it scaled. Raises LoopError where none is expected."""
        if (step := running_step(self)) is not None:
            return step.backward(loss, scale_wrt_gas)
        with (
            self._stopping.obeyed(self, ends_step=False),
            self.optimizer.calls.call("backward"),
            ranks.collective_section("backward"),
        ):
            return self._three_calls.backward(loss, scale_wrt_gas)

    def step(self, lr_kwargs: object = None) -> None:  # override
        """Behind a step's last micro-batch take the optimizer's step, else count. Raises LoopError where none is expected."""
        if (step := running_step(self)) is not None:
            step.step()
            return
        with self._stopping.obeyed(self), self.optimizer.calls.call("step"), ranks.collective_section("step"):
            self._three_calls.step(lr_kwargs)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:  # override
        """As DeepSpeed's; within a micro-step that one's."""
        if (step := running_step(self)) is not None:
            step.is_boundary = is_boundary
        else:
            super().set_gradient_accumulation_boundary(is_boundary)

    def is_gradient_accumulation_boundary(self) -> bool:  # override
        """As DeepSpeed's; within a micro-step that one's."""
        if (step := running_step(self)) is not None:
            return step.is_boundary
        return bool(super().is_gradient_accumulation_boundary())
