"""Before the first step: two micro-batches in torch's own order and in the schedule's, which must agree.

In torch's order each runs from end to end on its own graph (`plain_pass`); then both run as the schedule runs them, with
stores, coroutines, recomputes and sums, and no optimizer step. Compared are each block's output, the losses, each parameter's
gradient and what modules hold afterwards: in bits, or as far as rounding goes. Modules, generators, gradients and what hooks of
the backward reach are then as they were, after an error too.

[Note: sums] A sum of gradients is held against the gradients that it is made of, by their digests. So in memory is what a step
has there, and is budgeted for: the sums of one layer, or of all of them with the horizontal order. Sums outside the layers are
made alike in both orders, so torch's own order holds its own against its gradients.

What two micro-batches cannot show, this cannot find: what happens every hundredth step, or to the third micro-batch only.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from greenlet import getcurrent
from torch import nn

from ds_vertical.engine.assembly import StepParts
from ds_vertical.engine.handlers import ScheduleRunner
from ds_vertical.engine.self_check.backward_hooks import survey_backward
from ds_vertical.engine.self_check.comparison import Comparison, Record, agrees, state_differences
from ds_vertical.engine.self_check.diagnosis import Diagnosis, SelfCheckError
from ds_vertical.engine.self_check.digests import Digest, digest
from ds_vertical.engine.self_check.plain_pass import PlainOrder
from ds_vertical.interrupts import Changed
from ds_vertical.model.layers import LayerMap
from ds_vertical.model.micro_batch import Body
from ds_vertical.model.state.module_state import global_generators, global_generators_seeded, key_of_item
from ds_vertical.model.state.restart import until_known
from ds_vertical.model.state.snapshot import Snapshot, StateChange, refuse_large
from ds_vertical.model.state.survey import survey
from ds_vertical.model.stubs import Coroutine
from ds_vertical.model.thread_state import ThreadState, applied, preserved
from ds_vertical.offload.grad_accumulator import GradientStore
from ds_vertical.schedule.passes import TrainingStep, build_training
from ds_vertical.types import Unit

_VERSION: Final = 2  # of what a check that agrees has shown: 1 may be of a single micro-batch, or of a model not followed


@dataclass(frozen=True)
class SelfCheck:
    """What is checked: a model's layers, and how a step over them runs."""

    parts: StepParts
    step: TrainingStep
    scale: Callable[[torch.Tensor], torch.Tensor]

    @property
    def layers(self) -> LayerMap:
        """Of the model."""
        return self.parts.layers

    @property
    def runner(self) -> ScheduleRunner:
        """What runs the steps."""
        return self.parts.runner

    @property
    def gradients(self) -> GradientStore:
        """The sums of the steps."""
        return self.parts.gradients

    @property
    def _diagnosis(self) -> Diagnosis:
        return Diagnosis(self.layers, self.step.order, self.runner.state)

    @property
    def _around(self) -> tuple[Unit, ...]:
        return self.layers.outside.units

    def _agreed(self) -> contextlib.AbstractContextManager[object]:
        return self.parts.optimizer.live.agreed("self_check")

    def run(self, bodies: Sequence[Body]) -> tuple[str, Exception | None]:
        """Compare both orders over these micro-batches. Returns a line of what it took, and what is wrong."""
        with self._agreed():
            snapshot, undo = _state_now(self.parts, bodies)
        failed = Changed(self.gradients.drop_all, only_if_failed=True)
        with preserved(), generators_kept(), Changed(partial(undo, refuse=False)), failed:
            start = time.perf_counter()
            plain = self._plain(bodies)
            middle = time.perf_counter()
            left = [(change, change.item.capture()) for change in snapshot.changes()]
            with self._agreed():
                undo()
            ours, error = self._tried(bodies)
            own = [change.item.capture() for change, _ in left]
            self._choose_last(left, own)
            with self._agreed():
                undo()
                if error is not None and not isinstance(error, SelfCheckError):
                    raise error
        if ours is not None:
            around = [param for unit in self._around for param in self.gradients.params(unit)]
            comparison = Comparison(self.parts.module, self.layers, around)
            found = (*comparison.differences(plain, ours), *state_differences(left, own, self._of_backward()))
            error = self._diagnosis.of_difference(found[0]) if found else None
        took = f"{middle - start:.1f} s in torch's order, {time.perf_counter() - middle:.1f} s in the schedule's"
        what = "1 micro-batch" if len(bodies) == 1 else f"{len(bodies)} micro-batches"
        return f"self_check: {what}, {took}: {'they differ' if error else 'they agree'}", error

    def run_alone(self, bodies: Sequence[Body]) -> None:
        """Run the schedule alone over these micro-batches, and compare nothing. All is then as it was, after an error, too."""
        _, undo = _state_now(self.parts, bodies)
        schedule = build_training(replace(self.step, outside=self.parts.outside_of(1)))
        with preserved(), generators_kept(), Changed(partial(undo, refuse=False)), Changed(self.gradients.drop_all):
            run = partial(self.runner.check, schedule, bodies, self.gradients, self.scale, _Deaf())
            until_known(run, self.parts.start_over)

    def _plain(self, bodies: Sequence[Body]) -> Record:
        record = Record(self.parts.optimizer.gradient_accumulation_dtype)
        number = 0

        def note_output(block: int, output: Any) -> None:
            record.note_output(number, block, output)

        def note_gradient(param: nn.Parameter) -> None:
            record.note_gradient(number, param)
            param.grad = None

        order = PlainOrder(self.layers, self.runner.params, self.parts.folder)
        try:
            with order.opened(note_output, note_gradient):
                for number, body in enumerate(bodies):  # noqa: B007 - the closures read it
                    with _seeded(body.seed):
                        record.losses.append(digest(order.run(body.run, self.scale)))
                    for unit in self._around:
                        for param in self.gradients.params(unit):
                            if param.grad is not None:
                                record.note_gradient(number, param)
                        self.gradients.add(unit)
        except Exception as failure:
            error = self._diagnosis.of_plain_order(failure, order.place, number)
            if error is failure:
                raise
            raise error from failure
        for unit in self._around:
            for param, total in zip(self.gradients.params(unit), self.gradients.take(unit), strict=True):
                record.note_sum(param, total, self.gradients.rounding(param))
        record.around = self._sums()
        return record

    def _tried(self, bodies: Sequence[Body]) -> tuple[Record | None, Exception | None]:
        """What the schedule computes, or that it fails where torch's own order has not."""
        try:
            return self._scheduled(bodies), None
        except Exception as failure:
            return None, self._diagnosis.of_schedule(failure)

    def _scheduled(self, bodies: Sequence[Body]) -> Record:
        state = self.runner.state
        if state is None:
            return self._run_schedule(bodies)
        state.learned.compares = True
        try:
            return until_known(partial(self._run_schedule, bodies), self.parts.start_over)
        finally:
            state.learned.compares = False

    def _run_schedule(self, bodies: Sequence[Body]) -> Record:
        record = Record(self.parts.optimizer.gradient_accumulation_dtype)
        with contextlib.ExitStack() as hooks:
            for number, block in enumerate(self.layers.blocks):
                hooks.callback(block.module.register_forward_hook(_noting(record, number)).remove)
            schedule = build_training(replace(self.step, outside=self.parts.outside_of(1)))
            losses = self.runner.check(schedule, bodies, self.gradients, self.scale, record)
        record.losses = [digest(loss) for loss in losses]
        record.around = self._sums()
        return record

    def _choose_last(self, left: Sequence[tuple[StateChange, Any]], own: list[Any]) -> None:
        """Where torch's own order shows that forwards set an item anew, and add nothing to it, this is known from now on."""
        known = {} if self.runner.state is None else {key_of_item(each.item): each for each in self.runner.state.learned.items}
        for index, (change, plain) in enumerate(left):
            each = known.get(key_of_item(change.item))
            if each is None or each.replaced is None or agrees(change, plain, own[index]):
                continue
            if agrees(change, plain, each.replaced):
                own[index], each.adds_up = each.replaced, False
        for each in known.values():
            each.replaced = None

    def _of_backward(self) -> set[Hashable]:
        """Keys of what hooks of the backward write to: in another order of the layers, so it is not compared."""
        return (
            {key_of_item(each.item) for each in self.runner.state.learned.items if each.backward}
            if self.runner.state
            else set()
        )

    def _sums(self) -> list[Digest]:
        """Of what is outside the layers."""
        pairs = [
            pair for unit in self._around for pair in zip(self.gradients.take(unit), self.gradients.params(unit), strict=True)
        ]
        # fp32 sums of bf16 gradients have bf16's rounding
        coarser = partial(min, key=lambda dtype: torch.finfo(dtype).bits)
        sums = [digest(total, coarser((total.dtype, param.dtype, self.gradients.rounding(param)))) for total, param in pairs]
        for unit in self._around:
            self.gradients.drop(unit)
        self.gradients.free()
        return sums


def _state_now(parts: StepParts, bodies: Sequence[Body]) -> tuple[Snapshot, Callable[..., None]]:
    """What the modules hold, and what puts that back."""
    functions = [function for body in bodies for function in body.functions]
    blocks = [block.module for block in parts.layers.blocks]
    snapshot = Snapshot(*survey(parts.module, blocks, functions)[:2])
    return snapshot, partial(put_state_back, snapshot, Snapshot(*survey_backward(parts.module)))


class _Deaf:
    """Notes no gradients."""

    def note_gradient(self, micro_batch: int, param: nn.Parameter) -> None:
        """One of a micro-batch's."""

    def note_sum(self, param: nn.Parameter, total: torch.Tensor, rounded: torch.dtype) -> None:
        """Their sum."""


def model_fingerprint(model: nn.Module, settings: Any) -> str:
    """The same for models of the same modules with the same code, under settings that order the arithmetic alike, and for
    checks that show as much: a checkpoint of an older build is checked once more."""
    facts = _VERSION, settings.order, settings.snake, settings.blocks_per_layer, torch.__version__
    told = hashlib.sha256(repr(facts).encode())
    for path, module in model.named_modules():
        told.update(f"{path} {_code_of(type(module))}".encode())
    return told.hexdigest()


@functools.cache
def _code_of(cls: type) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):  # made in an interactive session, say
        return f"{cls.__module__}.{cls.__qualname__}"


def _noting(record: Record, block: int) -> Callable[[nn.Module, Any, Any], None]:
    def note(module: nn.Module, args: Any, output: Any) -> None:
        current = getcurrent()
        if isinstance(current, Coroutine):
            record.note_output(current.micro_batch.index, block, output)

    return note


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    state = ThreadState.capture()
    own = state if seed is None else state.seeded(seed)
    with applied(own.without_autocast_cache()), contextlib.nullcontext() if seed is None else global_generators_seeded(seed):
        yield


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Python's and NumPy's random streams are as they were, after the block."""
    kept = [(item, item.capture()) for item in global_generators()]

    def put_back() -> None:
        for item, state in kept:
            item.install(state)

    with Changed(put_back):
        yield


def put_state_back(*snapshots: Snapshot, refuse: bool = True) -> None:
    """Let all state hold what it held as the snapshots were taken. Raises LayerError for a tensor of which there is no copy;
    without `refuse` it stays as it is."""
    changes = [change for snapshot in snapshots for change in snapshot.changes(whole=refuse)]
    for change in changes:
        if change.before is not None:
            change.item.install(change.before)
    for change in changes if refuse else ():
        if change.before is None:
            refuse_large(change.item)
