"""Whole micro-steps of a user's loop: each runs as its micro-batch's forward, and what it asks of the engine is noted.

A micro-step is the user's code for one micro-batch: it calls the model, makes a loss, calls `engine.backward(loss)` and, in the
last one of the step, `engine.step()`. It may call the model several times, through the engine or past it. All micro-steps of a
step begin before any of them goes on behind its model call. The backward and the optimizer's step happen when the schedule
comes to them, not within the calls.

[Note: the running step] The engine finds the micro-step that calls it in a context variable. The hub runs each forward in a
context of its own, so the variable is the forward's alone, and unset in the hub's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Final, Generic, NoReturn, TypeVar

import torch
from greenlet import getcurrent
from torch import nn
from torch.utils import _pytree as pytree

from ds_vertical.compat import engine as compat_engine
from ds_vertical.distributed.step_shares import StepShares
from ds_vertical.engine.integrations.counted import Counted
from ds_vertical.engine.train_loop import ModelCall
from ds_vertical.errors import LoopError
from ds_vertical.model import batch as micro
from ds_vertical.model.layers import refuse_batch_flags
from ds_vertical.model.micro_batch import Body
from ds_vertical.model.stubs import Coroutine

T = TypeVar("T")
_PAST_THE_ENGINE: Final = (
    "the micro-step has not called the engine's forward before; call engine(...), or the model that the trainer hands over, not"
    " a module of it"
)
_ONCE = (
    "a micro-step under vertical_schedule calls the model, as often as the step's others, engine.backward(loss) once, and the"
    " last one engine.step()"
)

# what to say to code that leaves a micro-batch out by its loss
SKIPPED_WHOLE: Final = (
    "call engine.backward(loss) whatever the loss is, and a step whose gradients are not finite is skipped whole, with the"
    ' weights as they were ("on_nonfinite": "skip", the default)'
)


class GenerationError(LoopError):
    """A micro-step, or the code of an evaluation, has the model generate text."""


class RunningStep:
    """The user's code that is running as a micro-batch's forward: what the engine's calls within it do."""

    what = "a window of an evaluation"

    def __init__(self, call_model: ModelCall) -> None:
        self.call_model = call_model

    def forward(self, *inputs: object, **kwargs: object) -> object:
        """The model's outputs, with which the code goes on once the schedule has run all layers."""
        engine = self.call_model.engine
        return self.call_model(*compat_engine.inputs_of(engine, inputs), **compat_engine.inputs_of(engine, kwargs))

    def backward(self, loss: object, scale_wrt_gas: bool) -> torch.Tensor:
        """Note the loss. Returns it, scaled as DeepSpeed's `backward` scales it. Raises LoopError where none is expected."""
        raise LoopError("engine.backward(): called within an evaluation; call it in a training step")

    def step(self) -> None:
        """Note that the optimizer is to step. Raises LoopError where it is not expected."""
        raise LoopError("engine.step(): called within an evaluation; call it in a training step")

    @property
    def is_boundary(self) -> bool:
        """Whether the micro-batch is the last one of its step."""
        return False

    @is_boundary.setter
    def is_boundary(self, value: bool) -> None:
        """Note what the user's code says."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within the block this is what the engine's calls mean. See [Note: the running step]."""
        token = _running.set(self)
        try:
            yield
        finally:
            _running.reset(token)


_running: ContextVar[RunningStep | None] = ContextVar("ds_vertical_running_step", default=None)


def running_step(engine: object) -> RunningStep | None:
    """The micro-step of this engine that is making a call now; None outside of any."""
    found = _running.get()
    return found if found is not None and found.call_model.engine is engine else None


def refuse_in_a_step(what: str, module: nn.Module) -> None:
    """Raises GenerationError where a micro-step, or the code of an evaluation, calls `what` of its engine's model, or of a part
    of that."""
    step = _running.get()
    if step is None or not any(each is module for each in compat_engine.model_of(step.call_model.engine).modules()):
        return
    raise GenerationError(
        f"{what}: called within {step.what}: it calls the model's layers once for each token, which layer-major order cannot"
        " follow; generate between two steps (in a callback, say), or set vertical_schedule.enabled to false"
    )


class MicroStep(RunningStep, Generic[T]):
    """One micro-step of a window. `run`: the user's code, which may be run again where the step starts over. `entering` is
    called as it begins, and again as it goes on behind each of its model calls. `form`: see `Body`."""

    what = "a micro-step"

    def __init__(
        self, run: Callable[[], T], index: int, window: Window[T], entering: Callable[[int], None], form: Hashable
    ) -> None:
        super().__init__(window.call_model)
        self.index = index
        self._run = run
        self._window = window
        self._entering = entering
        self._form = form
        self._forget()

    def _forget(self) -> None:
        self.results: list[T] = []
        self.num_step_calls = 0
        self._has_called = False
        self._loss: torch.Tensor | None = None
        self._is_boundary: bool | None = None
        self._has_stepped = False

    @property
    def body(self) -> Body:
        """The micro-step as the forward of its micro-batch, which returns the loss of its backward."""
        return Body(self._whole, None, self._form, checked=self._model_call)

    def _whole(self) -> torch.Tensor:
        self._window.runs.begins(self.index)
        self._forget()
        coroutine = getcurrent()
        if isinstance(coroutine, Coroutine):  # calls of the model past the engine are its own, too
            coroutine.micro_batch.calls.behind = partial(self._entering, self.index)
        with self.running():
            self._entering(self.index)
            self.results.append(self._run())
        if self._loss is None:
            raise self._refusal(
                f"it has not called engine.backward(loss). Where that is for a loss that is not finite, {SKIPPED_WHOLE}"
            )
        if self._is_last and not self._has_stepped:
            raise self._refusal("it is the last one of the step, and has not called engine.step()")
        return self._loss

    # ---- what the user's code calls

    def forward(self, *inputs: object, **kwargs: object) -> object:  # override
        """The model's outputs. Raises LayerError for arguments that no layer-major forward can take."""
        refuse_batch_flags(kwargs)
        self._has_called = True
        return super().forward(*inputs, **kwargs)

    def backward(self, loss: object, scale_wrt_gas: bool) -> torch.Tensor:  # override
        """Note the loss, and return it scaled. Raises LoopError for a second one, and for what is no loss."""
        if self._loss is not None:
            raise self._refusal("it calls engine.backward a second time; add the losses, and call it once")
        if not self._has_called:
            raise self._refusal(f"engine.backward(): {_PAST_THE_ENGINE}")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise self._refusal("engine.backward takes the loss as a tensor with one element, computed with gradients")
        self._loss = loss / self.call_model.engine.gradient_accumulation_steps() if scale_wrt_gas else loss
        return self._loss

    def step(self) -> None:  # override
        """Note the call. Raises LoopError ahead of `backward`, and at a boundary that is not the last micro-step's."""
        self.num_step_calls += 1
        if not self.is_boundary:
            return
        if self._loss is None:
            raise self._refusal("it calls engine.step() ahead of engine.backward(loss)")
        if not self._is_last:
            raise self._refusal("it calls engine.step() at a boundary, and more micro-batches of the same step follow")
        self._has_stepped = True

    @property
    def is_boundary(self) -> bool:
        """What the user's code has said, or whether this is the last micro-step."""
        return self._is_last if self._is_boundary is None else self._is_boundary

    @is_boundary.setter
    def is_boundary(self, value: bool) -> None:
        self._is_boundary = value

    @property
    def _is_last(self) -> bool:
        return self.index == len(self._window) - 1

    def _refusal(self, what: str) -> LoopError:
        return LoopError(f"micro-step {self.index} of a step of {len(self._window)}: {what}. ({_ONCE}.)")

    # ---- the self-check

    def _model_call(self) -> Callable[[], torch.Tensor]:
        """The micro-step's model call alone, with a loss of the outputs: the self-check runs it twice, which would count
        twice in the user's metrics otherwise. The user's code is run up to the call, and ended there."""
        self._forget()
        noting = _Noting(self.call_model)
        try:
            with noting.running():
                self._entering(self.index)
                self._run()
        except _Noted as noted:
            inputs, kwargs = noted.call
            return lambda: loss_of_outputs(RunningStep.forward(self, *inputs, **kwargs))
        finally:
            self._window.runs.put_back()
        raise self._refusal("it has not called the engine; call engine(...), or the model that the trainer hands over")


class _Noted(BaseException):
    """Ends a micro-step at its model call; a BaseException, so that the user's code does not handle it."""

    def __init__(self, inputs: tuple[object, ...], kwargs: dict[str, object]) -> None:
        super().__init__()
        self.call = inputs, kwargs


class _Noting(RunningStep):
    what = "a micro-step"

    def forward(self, *inputs: object, **kwargs: object) -> NoReturn:  # override
        raise _Noted(inputs, kwargs)

    def backward(self, loss: object, scale_wrt_gas: bool) -> NoReturn:  # override
        raise LoopError(f"engine.backward(): {_PAST_THE_ENGINE}")


class Runs:
    """The runs of one step or evaluation over the user's code for its micro-batches: of these the last one counts.

    `counted`: what the code had counted ahead of the first one; None: nobody has noted it.
    """

    def __init__(self, counted: Counted | None) -> None:
        self._counted = counted
        self._begun: set[int] = set()  # micro-batches whose code has begun in this run

    def begins(self, index: int) -> None:
        """The code for a micro-batch begins. Where it has begun before, all of them start over."""
        if index in self._begun:
            self._begun.clear()
            self.put_back()
        self._begun.add(index)

    def put_back(self) -> None:
        """What the code has counted so far does not count."""
        if self._counted is not None:
            self._counted.put_back()


class Window(Generic[T]):
    """The micro-steps of one step. `forms`: of each one's micro-batch, see `Body`. `counted`: see `Runs`."""

    def __init__(
        self,
        call_model: ModelCall,
        runs: Sequence[Callable[[], T]],
        forms: Sequence[Hashable],
        entering: Callable[[int], None],
        counted: Counted | None = None,
    ) -> None:
        self.call_model = call_model
        self.runs = Runs(counted)
        pairs = enumerate(zip(runs, forms, strict=True))
        self._steps = [MicroStep(run, index, self, entering, form) for index, (run, form) in pairs]

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def bodies(self) -> list[Body]:
        """One forward for each micro-step."""
        return [step.body for step in self._steps]

    @property
    def results(self) -> list[T]:
        """What each micro-step returned."""
        return [step.results[0] for step in self._steps]

    items: None = None  # the loop has scaled its losses

    def num_sampled(self, shares: StepShares) -> int:
        """Micro-batches of all ranks whose samples count: DeepSpeed counts a full step's for a short one too."""
        return self.call_model.engine.gradient_accumulation_steps() * len(shares.ranks)

    @property
    def num_calls(self) -> int:
        """Calls of `engine.step`."""
        return sum(step.num_step_calls for step in self._steps)


class EvaluatedStep(RunningStep):
    """The user's code for one micro-batch without training, the `index`-th of its window."""

    def __init__(self, call_model: ModelCall, index: int, runs: Runs) -> None:
        super().__init__(call_model)
        self._index = index
        self._runs = runs

    def body(self, run: Callable[[], object], form: Hashable) -> Body:
        """It as the forward of its micro-batch, which returns what the code returns."""

        def whole() -> object:
            self._runs.begins(self._index)
            with self.running():
                return run()

        return Body(whole, None, form)


def loss_of_outputs(outputs: object) -> torch.Tensor:
    """A number that depends on all outputs, for the self-check: the model's own loss, or a sum of the outputs with weights
    that differ from element to element."""
    try:
        return micro.loss_of(outputs, None, None)
    except ValueError:
        pass
    tensors = [each for each in pytree.tree_leaves(outputs) if isinstance(each, torch.Tensor) and each.requires_grad]
    if not tensors:
        raise LoopError("the model's outputs require no gradient: nothing would be trained")
    return torch.stack([_weighted(each) for each in tensors]).sum()


def _weighted(tensor: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(-1, 1, tensor.numel(), device=tensor.device).view(tensor.shape)
    return (tensor.float() * weights).mean()
