"""The self-check ahead of an engine's first step: whether it runs, and on what.

[Note: single micro-batches] A check of one micro-batch, where the first step has no more, shows nothing of several that take
turns. The next step that has more is checked, too, and evaluations of several stay in stock's order until then. A checkpoint
says that the model was checked in this way only. That is enough for the first step of a run in which no step can have more:
`gradient_accumulation_steps` is 1, and the JSON has no `elastic`. The number may change between two steps
(`engine.set_train_batch_size`), so it is read where it counts, and never kept.

[Note: late state] State that begins to change later, or that further code begins to change, is no part of that check. The step
that shows it starts over. Before it is run again, a further check says whether another order than stock's has stock's values
there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import torch

from ds_vertical.compat import accelerator
from ds_vertical.distributed import ranks
from ds_vertical.engine import metrics
from ds_vertical.engine.assembly import StepParts
from ds_vertical.engine.handlers import LossScale
from ds_vertical.engine.module_hooks import suspended_hooks
from ds_vertical.engine.self_check.check import SelfCheck, generators_kept, model_fingerprint
from ds_vertical.engine.self_check.diagnosis import SelfCheckError
from ds_vertical.engine.self_check.plain_pass import PlainOrderError
from ds_vertical.io import host
from ds_vertical.io.openmp_wait import WATCH
from ds_vertical.model.batch import own_loss
from ds_vertical.model.micro_batch import Body
from ds_vertical.model.thread_state import preserved
from ds_vertical.schedule.passes import TrainingStep

NUM_MICRO_BATCHES: Final = 2
MOST_FURTHER: Final = 8  # checks for state that has become known of
ONE_BY_ONE: Final = " one by one"  # in a checkpoint behind the fingerprint of a model: see [Note: single micro-batches]


class FurtherChecks:
    """The checks of one engine, of its steps or of its evaluations, for state that has become known of: MOST_FURTHER of them.

    A model may give its state a new name in each step, and would be checked in each. `what`: the steps or the evaluations, for
    the log.
    """

    def __init__(self, parts: StepParts, what: str) -> None:
        self._parts = parts
        self._what = what
        self._agreed, self._told = 0, False

    def is_due(self, checked: set[str]) -> bool:
        """Whether a rank knows of state that is not among the `checked`, and a check is left. Where none is, a line in the log
        says so once. Collective."""
        unsure = self._parts.state.unsure
        if not any(ranks.all_gathered(not checked >= unsure)) or self._told:
            return False
        if self._agreed < MOST_FURTHER:
            return True
        self._told = True
        named = next(iter(sorted(unsure - checked)), "state on another rank")
        accelerator.log(
            f"ds_vertical: warning: self_check: {MOST_FURTHER} checks of {self._what} have agreed, each for state that had just"
            f" begun to change; {named} has begun now, and neither that nor further state is checked: keep state under the same"
            " names in each step"
        )
        return False

    def note_agreed(self) -> None:
        """A check that was due has found nothing wrong."""
        self._agreed += 1


class FirstStepCheck:
    """Checks one engine once, where the JSON asks for it, or leaves it open and this model has not been checked. And again
    where state has become known of: see [Note: late state].

    `checked_model`: fingerprint of the model that was checked by this engine, or by the one whose checkpoint was loaded; None
    where neither has checked one, or the check could not follow it. `checked_state`: what these checks have seen of
    `ForwardState.unsure`.
    """

    def __init__(self, parts: StepParts) -> None:
        self.checked_model: str | None = None
        self.checked_state: set[str] = set()
        self._parts = parts
        self._further = FurtherChecks(parts, "training steps")
        self._is_done = False
        self._unfollowed = False  # the last check could not follow the model
        self._saw_single = False  # the last check had one micro-batch, in an order in which several take turns
        self._loaded: tuple[str, bool] | None = None  # a model that a checkpoint calls checked, and whether it is this one

    @property
    def doubt(self) -> str | None:
        """What leaves it open whether layer-major order has stock's values for this model, in words that follow "one after the
        other"; None: a check has agreed, or none is wanted. Costs nothing once it has been asked for."""
        wanted = self._parts.vertical.self_check
        if wanted is False or (metrics.are_recorded() and not wanted):  # `ab` compares the losses itself
            return None
        if self._is_done and self._unfollowed:
            return "since the self-check cannot follow this model"
        if self._is_done and not self._saw_single:
            return None
        if not (self._is_done or wanted) and self._is_known():
            return None
        return "until the self-check ahead of a training step has agreed"

    def _is_known(self) -> bool:
        """Whether the checkpoint that was loaded says that this model was checked, with several micro-batches."""
        if self.checked_model is None:
            return False
        if self._loaded is None or self._loaded[0] != self.checked_model:
            self._loaded = self.checked_model, self.checked_model == self._fingerprint()
        return self._loaded[1]

    def _fingerprint(self) -> str:
        return model_fingerprint(self._parts.module, self._parts.vertical)

    def _are_single(self) -> bool:
        """Whether, as things are, no step can have several micro-batches: see [Note: single micro-batches]."""
        return self._parts.vertical.elastic is None and self._parts.engine.gradient_accumulation_steps() == 1

    def learn_state(self) -> None:
        """Let the check run although a checkpoint says that the model was checked: it shows which state the forwards change
        before the first step, which cannot start over."""
        if not self._is_done and self._parts.vertical.self_check is not False:
            self.checked_model = None

    def run(self, bodies: Sequence[Body], scale_of: Callable[[float], LossScale]) -> None:
        """Before a step over these micro-batches: see `SelfCheck`. `scale_of`: for a number of micro-batches, what the backward
        of each starts from. Where the check cannot run this model, and nobody has asked for it, a line in the log says so.
        Raises SelfCheckError on every rank."""
        wanted = self._parts.vertical.self_check
        if wanted is False or (self._is_done and not self._has_more(bodies)):
            return
        model = self._fingerprint()
        enough = (model, model + ONE_BY_ONE) if self._are_single() else (model,)
        if wanted or self._saw_single or self.checked_model not in enough:
            self._is_done, self.checked_model = False, None  # and stays so where this check fails
            self.checked_state.clear()  # another model's, or another order's
            self._check(bodies, scale_of)
        else:
            self._saw_single = self.checked_model != model  # as in the run that saved the checkpoint
        self._note_done(model)

    def _has_more(self, bodies: Sequence[Body]) -> bool:
        """Whether the last check had one micro-batch, and this step has more. Collective where it had one, unless steps have no
        more."""
        return self._saw_single and not self._are_single() and ranks.largest_of_all_ranks(len(bodies)) > 1

    def _note_done(self, model: str) -> None:
        """A check is over, or not needed. A checkpoint says so where the check could follow the model."""
        self._is_done = True
        self.checked_model = None if self._unfollowed else model + ONE_BY_ONE * self._saw_single

    def run_again(self, bodies: Sequence[Body], scale_of: Callable[[float], LossScale]) -> None:
        """Before a step over these micro-batches is run again, and learns anew: see [Note: late state]. Collective. Raises as
        `run` does."""
        self._parts.start_over()
        if not (self._is_done and self._further.is_due(self.checked_state)):
            return
        self.checked_model = None
        self._is_done = False  # and stays so where this check fails: the next step is checked, too
        self._check(bodies[-NUM_MICRO_BATCHES:], scale_of)  # the last ones: what has begun late goes on in them
        self._further.note_agreed()
        self._note_done(self._fingerprint())

    def bytes_taken(self, bodies: Sequence[Body], scale_of: Callable[[float], LossScale]) -> int | None:
        """The most bytes of the device that forwards and backwards of a step over these micro-batches take, which keep nothing:
        they run once more, and change nothing. None where that would show something else: beside other ranks, in a loop of the
        three calls, where activations move or a step has two halves. Raises what they raise."""
        parts, vertical = self._parts, self._parts.vertical
        parted = ranks.world_size() > 1 or vertical.acco is not None or parts.activations is not None
        if parted or any(body.checked is not None for body in bodies):
            return None
        parts.optimizer.flush()
        order, snake, window = vertical.order, vertical.snake, vertical.prefetch_layers
        step = TrainingStep(parts.layers.num_layers, len(bodies), order, snake, window)
        with self._running():
            return accelerator.taken_by(partial(SelfCheck(parts, step, scale_of(len(bodies))).run_alone, bodies))

    def _check(self, bodies: Sequence[Body], scale_of: Callable[[float], LossScale]) -> None:
        own = min(len(bodies), NUM_MICRO_BATCHES)  # a single one has no other beside it in the steps either
        count = own if ranks.world_size() == 1 else ranks.largest_of_all_ranks(own)  # torch's order gathers for each of them
        with preserved(), generators_kept():
            chosen = [_checked(body) for body in bodies[:own]]
        chosen += [chosen[0]] * (count - own)
        self._unfollowed = self._saw_single = False
        self._compare([replace(body, seed=index) for index, body in enumerate(chosen)], scale_of(count))
        self._saw_single = count == 1 and self._parts.vertical.order == "vertical"
        self.checked_state |= self._parts.state.unsure

    def _compare(self, bodies: list[Body], scale: LossScale) -> None:
        parts, vertical = self._parts, self._parts.vertical
        order, snake, window = vertical.order, vertical.snake, vertical.prefetch_layers
        step = TrainingStep(parts.layers.num_layers, len(bodies), order, snake, window)
        with parts.optimizer.live.agreed("self_check"):
            parts.params.check_open()
            parts.gradients.refuse_strays()
            parts.gradients.refuse_frozen({id(param): name for name, param in parts.module.named_parameters()})
            parts.optimizer.flush()
        check = SelfCheck(parts, step, scale)
        with self._running():
            try:
                line, error = check.run(bodies)
            except PlainOrderError as failure:  # nothing is known to be wrong, and there is nothing to compare with
                if vertical.self_check:
                    raise SelfCheckError(f"{failure}; nothing has been trained") from failure
                self._unfollowed = True
                line, error = f"warning: trained without the check, which cannot follow this model. {failure}", None
        host.trim()  # what whole graphs took is not the steps' memory
        parts.state.forget()
        accelerator.log(f"ds_vertical: {line}")
        with parts.optimizer.live.agreed("self_check"):
            if error is not None:
                raise error

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """In the block schedules run."""
        parts = self._parts
        with (
            parts.optimizer.calls.running(),
            WATCH.watching(),
            suspended_hooks(parts.engine, parts.layers),
            torch.enable_grad(),
            parts.optimizer.live.schedule_running(),
        ):
            yield


def _checked(body: Body) -> Body:
    """What is run of a forward: all of it, or what it makes for the purpose."""
    return body if body.checked is None else replace(body, run=body.checked(), loss_of=own_loss)
