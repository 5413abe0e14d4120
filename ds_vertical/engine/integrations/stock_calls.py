"""The stock arm of a script that knows nothing of ds_vertical: its three calls are stock's own, seeded and recorded.

`ds-vertical ab` compares it with the vertical arm of the same script. Both give each micro-batch a random stream of its own,
and both record a step: here from the first forward to the `step()` at the boundary of gradient accumulation. In a loop of the
three calls the stream is that of `engine.forward`; a Trainer's micro-step runs in it whole, with all its calls of the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

import torch

from ds_vertical.compat import engine as compat_engine
from ds_vertical.distributed import ranks
from ds_vertical.distributed.step_shares import NUMBERS, Brought, StepShares
from ds_vertical.engine.metrics import StepRecorder
from ds_vertical.engine.train_loop import TrainLoop, device_use, seeded
from ds_vertical.model import batch as micro
from ds_vertical.model.batch import LossFn
from ds_vertical.model.layers import shares_weights

T = TypeVar("T")
_LOOP: Final = "ds_vertical_stock_calls"  # attribute of an engine that is watched


class StockLoop(TrainLoop):
    """Stock's own forward, backward and step, one micro-batch after the other."""

    def run(self, batches: list[object], loss_fn: LossFn | None) -> list[torch.Tensor]:
        """One step over the micro-batches; returns their losses.

        Stock has collectives in each micro-batch. So a rank that brings fewer than another one runs its last one again, whose
        loss counts 0 times.
        """
        items: list[int] | None = None
        with ranks.all_or_none("train_batch", num_said=NUMBERS) as said:
            items = micro.items_of(loss_fn, batches)
            num_items = None if items is None else sum(items)
            said.own[:] = Brought(len(batches), num_items, self.num_tokens).numbers()
        self.shares = shares = StepShares.of(said.of_all)
        weights, count = shares.weights(items), max(shares.counts)
        idle = count - len(batches)
        factors = [*(weights or [1.0] * len(batches)), *[0.0] * idle]
        losses: list[torch.Tensor] = []
        try:
            for index, batch in enumerate((*batches, *[batches[-1]] * idle)):
                last = index == count - 1
                self.engine.set_gradient_accumulation_boundary(last)
                losses.append(self._micro_batch(index, batch, factors[index], loss_fn))
                if last:
                    self.count_samples(shares.total)
                self.engine.step()
        finally:
            compat_engine.forget_boundary(self.engine)
        del losses[len(batches) :]
        self.note_losses(losses, weights)
        return losses

    def _micro_batch(self, index: int, batch: object, factor: float, loss_fn: LossFn | None) -> torch.Tensor:
        seed = self.seed_of(index)
        with contextlib.nullcontext() if seed is None else seeded(seed):
            loss = micro.loss_of(micro.call_model(self.engine, batch), batch, loss_fn)
            weighted = loss if factor == 1.0 else loss * factor
            self.engine.backward(weighted / self.shares.mean_over, scale_wrt_gas=False)
        return loss.detach()

    def evaluate(self, batches: list[object], loss_fn: LossFn | None) -> list[torch.Tensor]:
        """Losses of the micro-batches without training."""
        return [micro.loss_of(micro.call_model(self.engine, batch), batch, loss_fn) for batch in batches]


class StockCalls(StockLoop):
    """The loop of a stock engine whose script may make the three calls itself."""

    _is_own = False  # whether `train_batch` makes the calls, which records and seeds by itself
    _in_micro_step = False  # whether a Trainer's micro-step runs
    _index = 0  # of the micro-batch in its step
    _open: StepRecorder | None = None  # of a step under way that is recorded

    def watch(self) -> None:
        """Seed and record what the script does through `engine.forward`, `backward` and `step` from here on."""
        engine = self.engine
        setattr(engine, _LOOP, self)
        self._losses: list[torch.Tensor] = []
        self._batches: list[object] = []
        for name in ("forward", "backward", "step"):
            setattr(engine, name, self._unless_own(getattr(engine, name), getattr(self, f"_{name}")))

    def run(self, batches: list[object], loss_fn: LossFn | None) -> list[torch.Tensor]:  # override
        """One step over the micro-batches; returns their losses."""
        self._is_own = True
        try:
            return super().run(batches, loss_fn)
        finally:
            self._is_own = False

    def _unless_own(self, stock: Callable[..., T], watched: Callable[..., T]) -> Callable[..., T]:
        def call(*args: object, **kwargs: object) -> T:
            return stock(*args, **kwargs) if self._is_own else watched(stock, *args, **kwargs)

        return call

    def _forward(self, stock: Callable[..., T], *inputs: object, **kwargs: object) -> T:
        if not (self.module.training and torch.is_grad_enabled()):
            return stock(*inputs, **kwargs)
        if self._in_micro_step:
            return stock(*inputs, **kwargs)
        with self._streamed(kwargs or inputs):
            return stock(*inputs, **kwargs)

    def micro_step(self, batch: object, run: Callable[[], T]) -> T:
        """Run a Trainer's micro-step on a batch, in one stream; returns what it returns."""
        with self._streamed(batch):
            self._in_micro_step = True
            try:
                return run()
            finally:
                self._in_micro_step = False

    @contextlib.contextmanager
    def _streamed(self, batch: object) -> Iterator[None]:
        """Within the block the next micro-batch of the step runs in its random stream, and is recorded. Raises LoopError where
        the ranks have counts, on all of them."""
        if self.elastic is not None:
            self.elastic.refuse_loop()
        recorder = self._metrics()
        if self._index == 0 and recorder is not None:
            recorder.end_at_budget()
            recorder.begin()
            self._losses, self._batches, self._open = [], [], recorder
        if self._open is not None:
            self._batches.append(batch)
        seed = self.seed_of(self._index)
        self._index += 1
        with contextlib.nullcontext() if seed is None else seeded(seed):
            yield

    def _backward(self, stock: Callable[..., torch.Tensor], *args: object, **kwargs: object) -> torch.Tensor:
        scaled = stock(*args, **kwargs)
        if self._open is not None:
            self._losses.append(scaled.detach())
        return scaled

    def _step(self, stock: Callable[..., T], *args: object, **kwargs: object) -> T:
        before = self.engine.global_steps
        returned = stock(*args, **kwargs)
        if self.engine.global_steps != before:
            self._index = 0
            if self._open is not None:
                self._record(self._open)
        return returned

    def _record(self, recorder: StepRecorder) -> None:
        self._open = None
        losses = [float(loss) for loss in self._losses]
        tokens = micro.count_tokens(self._batches)
        name, tied = type(self.engine).__name__, shares_weights(self.module)
        recorder.end(name, losses, tokens, tied, device_use())
        self._host_speed(micro.count_tokens(self._batches[:1]))


def in_micro_step(engine: object, batch: object, run: Callable[[], T]) -> T:
    """A Trainer's micro-step on a batch; where its engine's calls are watched it is one micro-batch of that engine."""
    loop = getattr(engine, _LOOP, None)
    return loop.micro_step(batch, run) if isinstance(loop, StockCalls) else run()
