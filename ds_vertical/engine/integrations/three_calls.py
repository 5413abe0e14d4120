"""Loops that call `engine(batch)`, `engine.backward(loss)` and `engine.step()` for each micro-batch, in layer-major order.

The first call of the model in a step tells the step's other model calls from the data loader (`look_ahead`), and the schedule
begins with all of them. Where it comes to a micro-batch's HEAD it hands the outputs to the loop, and goes on with the loss that
the loop gives to `engine.backward`. The last `backward` of a step only notes its loss: the sweep backward, the norm and the
optimizer's step run in `engine.step()`, so a learning rate that is set before it counts.

[Note: two sides] The schedule runs in a greenlet of its own, the hub. It is the whole of a step, unchanged, with its blocks
open from the first `forward` to `step`. The alternative was a pass that leaves its blocks at each HEAD and enters them again.
But the state of modules, which one snapshot taken ahead of the step decides, cannot be entered twice, and each block would have
needed a second way in that `train_batch` never takes. A hub that waits keeps the one way that is tested.

[Note: the loop's turn] While the loop's own code runs between two calls nothing that belongs to this thread is the hub's:

- registered changes and `deferred` blocks are set aside (`interrupts.LaidAside`). So Ctrl-C cuts the loop's code at once, and
  the end of another engine's call undoes nothing of this step;
- torch's state of the thread (grad mode, autocast, random streams) is the loop's own (`ThreadState`);
- no call of the engine is under way (`call_guard`): each of the three is a call by itself, over when it returns.

What stays as the schedule has it concerns the model alone: stubs, DeepSpeed's hooks off, installed state, fetched layers. Every
call of the engine that would meet it is refused (`admit`). Each of the three calls says that it would leave all of a schedule
half-way. So where one ends by an error, a refusal or a signal, `restore` ends the hub and puts everything in order: the step
has not been. In a call a firm block stands below the hub's own: no signal cuts a hand-over.
"""

from __future__ import annotations

import contextvars
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Final

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.hooks import RemovableHandle

from ds_vertical import interrupts
from ds_vertical.compat import accelerator
from ds_vertical.compat import engine as compat_engine
from ds_vertical.distributed.step_shares import StepShares
from ds_vertical.engine.call_guard import RUNNING, Calls
from ds_vertical.engine.integrations.micro_steps import SKIPPED_WHOLE, loss_of_outputs
from ds_vertical.engine.self_check.first_step import FirstStepCheck
from ds_vertical.engine.train_loop import VerticalLoop
from ds_vertical.errors import LoopError
from ds_vertical.model import batch as micro
from ds_vertical.model.layers import refuse_batch_flags
from ds_vertical.model.look_ahead import Call, Peekable, Prediction, comes_from, is_fetching, predict
from ds_vertical.model.micro_batch import Body
from ds_vertical.model.state import attribute_watch
from ds_vertical.model.thread_state import ThreadState, inference_guard

_OWN: Final = frozenset(("forward", "backward", "step", "end"))
_AFTER_AN_ERROR: Final = frozenset(("save_checkpoint", "save_16bit_model", "load_checkpoint"))
_DROPPED: Final = "the step's micro-batches so far are dropped"
_hubs: Final[weakref.WeakSet[Hub]] = weakref.WeakSet()  # of this process


class ThreeCalls:
    """What one engine's three calls do in training mode. Each runs within a call of the engine (`Calls.call`).

    `has_heard`: whether a signal is to end the run. `snake`: the JSON's, which is refused.
    """

    def __init__(
        self, loop: VerticalLoop, calls: Calls, check: FirstStepCheck, has_heard: Callable[[], bool], snake: bool
    ) -> None:
        self._loop = loop
        self._snake = snake
        self._calls = calls
        self._check = check
        self._has_heard = has_heard
        self._step: OpenStep | None = None

    def forward(self, inputs: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """The outputs of one micro-batch, with gradients. Raises LoopError where the loop cannot be followed."""
        call = Call(inputs, kwargs)
        if self._step is not None:
            self._calls.leaves(RUNNING)
            try:
                self._step.check(call)
            except LoopError:
                if not self._step.is_left_by(call):
                    raise
                accelerator.log(
                    f"ds_vertical: warning: the loop has gone on to other batches in the middle of a step, {self._step.place};"
                    f" {_DROPPED}, and count for nothing"
                )
                self._end()
        if self._step is None:
            step = self._begin(call)
            self._calls.leaves(RUNNING)
            self._step = step
        return self._step.forward()

    def backward(self, loss: object, scale_wrt_gas: bool) -> torch.Tensor:
        """Take the loss of the micro-batch; returns it as DeepSpeed scales it. Raises LoopError."""
        if self._step is None:
            raise LoopError("engine.backward(loss): there was no engine(...) in training mode before it; call that first")
        self._calls.leaves(RUNNING)
        return self._step.backward(loss, scale_wrt_gas)

    def step(self, lr_kwargs: object) -> None:
        """Behind the last micro-batch of a step: its backward, the norm and the optimizer's step. Raises LoopError."""
        if lr_kwargs:
            raise LoopError("engine.step(lr_kwargs): got arguments for the scheduler; step your scheduler yourself")
        if self._step is None:
            raise LoopError("engine.step(): there was no engine(...) in training mode before it; call that first")
        self._calls.leaves(RUNNING)
        if self._step.step():
            self._step = None

    def admit(self, name: str) -> None:
        """Ahead of any call of the engine: as `refuse_in_step`, but for the three calls themselves, and within a call."""
        if self._step is not None and name not in _OWN and not self._calls.is_mine:
            self.refuse_in_step(name)

    def refuse_in_step(self, name: str) -> None:
        """Raise LoopError in the middle of a step, which is dropped. Where an error has ended the loop, or a signal is to end
        the run, a save or load drops it without raising."""
        if (step := self._step) is None:
            return
        is_over = name in _AFTER_AN_ERROR and (sys.exc_info()[1] is not None or self._has_heard())
        where = step.place
        self.close()
        if not is_over:
            raise LoopError(
                f"engine.{name}(): called in the middle of a step, {where}; {_DROPPED}: make the call after the engine.step()"
                " that ends a step, or once more now if the loop is over"
            )

    def close(self) -> None:
        """Drop the step that is half-way, as if it had not been; harmless where there is none."""
        if self._step is not None:
            with self._calls.call("end"):
                self._calls.leaves(RUNNING)
                self._end()

    def restore(self, level: int, take_back: Callable[[], None]) -> None:
        """As `VerticalLoop.restore`; a step that is half-way ends there."""
        if level == RUNNING:
            self._end()
        self._loop.restore(level, take_back)

    def _end(self) -> None:
        with interrupts.deferred(firmly=True):
            if self._step is not None:
                self._step.end()
            self._step = None

    def _begin(self, call: Call) -> OpenStep:
        engine = self._loop.engine
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            raise LoopError(
                "engine(...): called without gradients in training mode; call engine.eval() before an evaluation, and"
                " engine.train() after it"
            )
        if self._snake:
            raise LoopError(
                "vertical_schedule.snake: got true, and the loop calls engine(...) for one micro-batch after the other, which a"
                ' snake does not keep to; write "snake": false, or call engine.train_batch(data_iter)'
            )
        whole = compat_engine.explicit_boundary(engine) is None
        prediction = predict(call, engine.gradient_accumulation_steps(), whole)
        for each in prediction.calls:
            refuse_batch_flags(dict(each.kwargs))
        self._check.learn_state()
        return OpenStep(self._loop, prediction)


class OpenStep:
    """One step, whose micro-batches the user's loop brings one by one: the loop's side. See [Note: two sides]."""

    def __init__(self, loop: VerticalLoop, prediction: Prediction) -> None:
        self.num_calls = 0  # of engine.step so far
        self._loop = loop
        self._prediction = prediction
        self._index = -1  # of the micro-batch whose outputs the loop has
        self._loss: torch.Tensor | None = None  # of that one, once the loop has given it
        self._num_counted = 0  # calls of engine.step that the engine has counted already
        self._hub = Hub(loop, prediction, self)

    items: None = None  # the loop has scaled its losses

    def num_sampled(self, shares: StepShares) -> int:
        """Micro-batches of all ranks whose samples count: DeepSpeed counts a full step's for a short one too."""
        return self._loop.engine.gradient_accumulation_steps() * len(shares.ranks)

    @property
    def place(self) -> str:
        """Where the loop is, for messages."""
        return f"behind engine{'(...)' if self._loss is None else '.backward'} of {self._named}"

    @property
    def _named(self) -> str:
        return f"micro-batch {self._index + 1} of {len(self._prediction.calls)}"

    @property
    def _is_last(self) -> bool:
        return self._index == len(self._prediction.calls) - 1

    @property
    def is_forwarded(self) -> bool:
        """Whether the loop has the outputs of all micro-batches."""
        return self._is_last

    @property
    def _awaits_loss(self) -> bool:
        return self._index >= 0 and self._loss is None

    # ---- the loop's side

    def is_left_by(self, call: Call) -> bool:
        """Whether the loop has left this step in the middle: its next call is of another loader, or of a new iteration."""
        return self._prediction.source is not None and not comes_from(call, self._prediction.source)

    def check(self, call: Call) -> None:
        """Raise LoopError where this is no call of the next micro-batch's."""
        if self._awaits_loss:
            raise LoopError(
                f"engine(...): called again behind engine(...) of {self._named}, without engine.backward(loss) in between;"
                f" {_DROPPED}: call the model once for each engine.backward(loss). A loop need not skip a micro-batch whose"
                f" loss is not finite: {SKIPPED_WHOLE}. Where a loss adds up several calls of the model, set"
                " vertical_schedule.enabled to false"
            )
        if self._is_last:
            raise LoopError(
                f"engine(...): called again behind engine.backward(loss) of {self._named}, the last one of the step;"
                f" {_DROPPED}: call engine.step() behind each engine.backward(loss)"
            )
        self._prediction.verify(self._index + 1, call)

    def forward(self) -> object:
        """The next micro-batch's outputs."""
        self._index, self._loss = self._index + 1, None
        return self._hub.go_on(None)

    def backward(self, loss: object, scale_wrt_gas: bool) -> torch.Tensor:
        """Take a micro-batch's loss, and let the schedule go on up to the next one's HEAD."""
        if not self._awaits_loss:
            raise LoopError(
                f"engine.backward(loss): called a second time for {self._named}; {_DROPPED}: add the losses, and call it once"
            )
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise LoopError(
                f"engine.backward(loss), {self._named}: the loss must be a tensor with one element, computed from the outputs"
                f" with gradients; {_DROPPED}"
            )
        self._check_boundary()
        engine = self._loop.engine
        self._loss = scaled = loss / engine.gradient_accumulation_steps() if scale_wrt_gas else loss
        if not self._is_last:
            self._hub.go_on(scaled)
        return scaled

    def _check_boundary(self) -> None:
        said = compat_engine.explicit_boundary(self._loop.engine)
        if said in (None, self._is_last):
            return
        raise LoopError(
            f"engine.backward(loss), {self._named}: the loop says that it is{'' if said else ' not'} the last one of its step"
            " (set_gradient_accumulation_boundary; Accelerate sets it from sync_gradients), but by gradient_accumulation_steps"
            f" in the JSON and by the data loader it is{' not' if said else ''}; {_DROPPED}: write the same number there as in"
            " the loop, and with Accelerate wrap each micro-batch in `with accelerator.accumulate(model):`, leave"
            " sync_with_dataloader true, and skip_first_batches of a loader that accelerator.prepare has returned: windows then"
            " end where the loader does"
        )

    def step(self) -> bool:
        """Take the step, where the last micro-batch has its loss; otherwise count. Returns whether the step is over."""
        if self._awaits_loss:
            raise LoopError(
                f"engine.step(): called behind engine(...) of {self._named}, without engine.backward(loss) in between;"
                f" {_DROPPED}: call engine.backward(loss), not loss.backward()"
            )
        engine = self._loop.engine
        with interrupts.deferred():
            self.num_calls += 1
            if not self._is_last:
                engine.micro_steps += 1
                self._num_counted += 1
                return False
            self._forget_counted()  # the step itself counts them all
        said = compat_engine.explicit_boundary(engine)
        self._hub.go_on(self._loss)
        self._loss = None  # and with it what is left of its graph
        if said is not None:
            engine.set_gradient_accumulation_boundary(said)
        return True

    def end(self) -> None:
        """Let the step not have been; harmless where it is over. Within a firm block."""
        self._forget_counted()
        self._hub.end()
        self._loss = None

    def _forget_counted(self) -> None:
        self._loop.engine.micro_steps -= self._num_counted
        self._num_counted = 0


class Hub:
    """The greenlet in which one step runs, from the first micro-batch's forward to `step`. See [Note: two sides]."""

    def __init__(self, loop: VerticalLoop, prediction: Prediction, counts: OpenStep) -> None:
        self._loop = loop
        self._prediction = prediction
        self._counts = counts
        self._num_handed = 0  # micro-batches whose outputs the loop has been given
        self._turn = _Turn(compat_engine.model_of(loop.engine), lambda: counts.place, lambda: counts.is_forwarded)
        self._thread = threading.current_thread()
        self._user = getcurrent()
        self._depth = 0, 0  # registered changes, and `deferred` blocks, that are not the hub's
        self._aside = interrupts.LaidAside()  # those that are, in the loop's turn
        self._hub = greenlet(self._run)
        self._hub.gr_context = contextvars.copy_context()
        _hubs.add(self)

    @property
    def is_open(self) -> bool:
        """Whether the step has begun, and is not over."""
        return bool(self._hub) and not self._hub.dead

    # ---- called by the loop's side

    def go_on(self, value: object) -> object:
        """Let the hub go on with what the loop has brought; returns what it hands over next."""
        with interrupts.deferred(firmly=True):
            return self._enter(partial(self._hub.switch, value))

    def _enter(self, switch: Callable[[], object]) -> object:
        if self._thread is not threading.current_thread():
            raise LoopError(f"the step was begun in thread {self._thread.name!r}; make all calls of a loop in one thread")
        outer = ThreadState.capture()
        guard = inference_guard(False)
        self._user = self._hub.parent = getcurrent()
        self._depth = interrupts.num_open(), interrupts.num_shields()
        self._turn.end()
        try:
            return switch()
        finally:
            self._turn.end() if self._hub.dead else self._turn.begin()
            del guard
            outer.apply()

    def end(self) -> None:
        """End the greenlet where it waits, with all that it has open; harmless where it is over. Within a firm block."""
        if self.is_open:
            self._enter(partial(self._hub.throw, GreenletExit))
        self._turn.end()  # an interrupt may have cut that, and the next one
        self._aside.put_back()

    # ---- the greenlet's own side

    def _run(self, _: object) -> None:
        calls = self._prediction.calls
        bodies = [self._body(index, call) for index, call in enumerate(calls)]
        batches = [call.whole if call.args else call.kwargs for call in calls]
        self._loop.train_window(bodies, self._counts, batches)

    def _body(self, index: int, call: Call) -> Body:
        engine, model = self._loop.engine, self._loop.call_model
        run = partial(model, *compat_engine.inputs_of(engine, call.args), **compat_engine.inputs_of(engine, dict(call.kwargs)))
        form = micro.form_of((call.args, dict(call.kwargs)))
        return Body(run, None, form, checked=lambda: lambda: loss_of_outputs(run()), loss_of=partial(self._loss_of, index))

    def _loss_of(self, index: int, finish: Callable[[], object]) -> torch.Tensor:
        """At a micro-batch's HEAD: let the loop call the model, give it the outputs, and return the loss that it brings."""
        if index < self._num_handed:
            raise LoopError(
                "engine(...): the forwards change state of the model's modules that was not known as the step began (the line"
                f" above names it), so the step must start over, but the loop has outputs already; {_DROPPED}:"
                f" {self._how_to_learn()}, or call engine.train_batch(data_iter)"
            )
        if index > 0:
            self._hand_over(None)  # the backward of the micro-batch before is over
        outputs = finish()
        self._num_handed = index + 1
        self._turn.watch(outputs)
        loss = self._hand_over(outputs)
        assert isinstance(loss, torch.Tensor)
        return loss

    def _how_to_learn(self) -> str:
        """What to write where a step must not start over."""
        if any(each is not self and each.is_open for each in _hubs):
            return (
                "another engine's step is open as well, and two steps that begin in one pass of a loop cannot be told apart"
                " here: let one engine's step begin a micro-batch behind the other's"
            )
        return 'write "self_check": true in vertical_schedule, which learns of such state ahead of the first step'

    def _hand_over(self, value: object) -> object:
        """Let the loop go on with a value; returns what it brings at its next call. See [Note: the loop's turn]."""
        inner = ThreadState.capture()
        try:
            self._aside.lay(*self._depth)
            return self._user.switch(value)
        finally:
            self._aside.put_back()
            inner.apply()


class _Turn:
    """The loop's turn: what its own code must not do between two calls of the engine.

    A backward that it runs by itself would end in the model's gradients. A call past the engine of the model, or of a part with
    parameters, would find weights that are not there, or leave gradients where nobody looks. An attribute that it sets on a
    module would come too late: the blocks have run for the micro-batches that the loop has not come to yet. `place`: where the
    loop is, for messages; `is_forwarded`: whether it has all outputs, and attributes are its own again.

    [Note: hooks in graphs] A graph holds its tensors' hooks where Python's garbage collector does not see them. The open step
    holds the graph of the last loss. If a hook led back to the step, neither would ever be freed, nor would the engine, the
    batches and the model's parameters. So a hook knows its turn by a weak reference.
    """

    def __init__(self, model: nn.Module, place: Callable[[], str], is_forwarded: Callable[[], bool]) -> None:
        self._place = place
        self._is_forwarded = is_forwarded
        self._all_modules = weakref.WeakSet(model.modules())
        self._modules = weakref.WeakSet(each for each in model.modules() if next(each.parameters(), None) is not None)
        self._model = weakref.ref(model)
        self._hook: RemovableHandle | None = None  # on all modules, in the loop's turn

    def begin(self) -> None:
        """The loop's own code runs from here on."""
        if self._hook is None:
            self._hook = register_module_forward_pre_hook(self._refuse_call)
            attribute_watch.begin_telling(self)

    def end(self) -> None:
        """The schedule goes on, or is over; harmless where it is not the loop's turn."""
        attribute_watch.end_telling(self)
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def note(self, module: nn.Module, name: str) -> None:
        """Refuse that the loop changes an attribute of the model. `training` is what `engine(...)` itself looks at."""
        if name != "training" and not self._is_forwarded() and module in self._all_modules:
            raise LoopError(
                f"{type(module).__name__}.{name}: set in the middle of a step, {self._place()}; most blocks have run for"
                " the step's other micro-batches already, and would not see it: set it ahead of the step's first engine(...),"
                " or behind its engine.step()"
            )

    def watch(self, outputs: object) -> None:
        """Refuse a backward of these in the loop's turn. See [Note: hooks in graphs]."""
        refuse = partial(_refuse_backward, weakref.ref(self))
        for tensor in pytree.tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(refuse)

    @property
    def is_on(self) -> bool:
        """Whether the loop's own code runs."""
        return self._hook is not None

    def _refuse_call(self, module: nn.Module, _: object) -> None:
        if module in self._modules:
            name = "engine.module" if module is self._model() else f"a {type(module).__name__} of engine.module"
            raise LoopError(
                f"{name}(...): called past the engine in the middle of a step, {self._place()}, where layer-major order has"
                " given its weights up; call engine(...) where it is the step's next micro-batch, and make any other call"
                " behind the engine.step() that ends the step"
            )


def _refuse_backward(turn: weakref.ref[_Turn], _: torch.Tensor) -> None:
    """A hook: raises LoopError in the loop's turn."""
    watching = turn()
    if watching is not None and watching.is_on:
        raise LoopError(
            "backward(): called on what engine(...) has returned, outside of engine.backward(loss); call that, or"
            " accelerator.backward(loss)"
        )


def see_torch_loaders() -> None:
    """Let the engine see what torch's data loaders yield next, from now on in this process. Twice is harmless."""
    stock = DataLoader.__iter__
    if hasattr(stock, "stock"):
        return

    @wraps(stock)
    def iterate(self: DataLoader[object]) -> Iterator[object]:
        if is_fetching() or get_worker_info() is not None:
            return stock(self)
        return Peekable(stock(self), self)

    iterate.stock = stock  # type: ignore[attr-defined]
    DataLoader.__iter__ = iterate  # type: ignore[method-assign,assignment]
