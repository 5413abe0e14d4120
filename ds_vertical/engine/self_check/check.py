"""Before the first step: two micro-batches in torch's own order and in the schedule's, which must agree.

In torch's order each runs from end to end on its own graph (`plain_pass`); then both run as the schedule runs them, with
stores, coroutines and recomputes, and no optimizer step. Compared are each block's output, the losses, each parameter's
gradient and what modules hold afterwards: in bits, or as far as rounding goes. Modules, generators, gradients and what hooks of
the backward reach are then as they were, after an error too.

What two micro-batches cannot show, this cannot find: what happens every hundredth step, or to the third micro-batch only.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import time
import traceback
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from greenlet import getcurrent
from torch import nn

from ds_vertical.engine.handlers import Body, ScheduleRunner
from ds_vertical.engine.self_check.backward_hooks import survey_backward
from ds_vertical.engine.self_check.digests import Digest, digest, digests_of, largest_distance, wrong_gradients
from ds_vertical.engine.self_check.plain_pass import PlainOrder
from ds_vertical.errors import LayerError
from ds_vertical.interrupts import Changed
from ds_vertical.model.layers import LayerMap
from ds_vertical.model.state.module_state import (
    TensorItem,
    global_generators,
    global_generators_seeded,
    key_of_item,
    same_bits,
)
from ds_vertical.model.state.restart import until_known
from ds_vertical.model.state.snapshot import Snapshot, StateChange, refuse_large
from ds_vertical.model.state.survey import survey
from ds_vertical.model.stubs import Coroutine
from ds_vertical.model.thread_state import ThreadState, applied, preserved
from ds_vertical.offload.grad_accumulator import GradientStore
from ds_vertical.schedule.events import Event, Op, Schedule

_MOST_SUSPECTS: Final = 5  # that a message names
_RESOURCES: Final = (torch.OutOfMemoryError, MemoryError, OSError)  # what is lacking there is no difference of the orders
_MEND: Final = "change what the model does there"
_TRAIN: Final = "vertical_schedule.self_check: false trains without this check"


class SelfCheckError(LayerError):
    """The schedule computes something else than torch's own order, or one of the two raises an exception, which is the cause of
    this one. The message names the layer, the micro-batch and the tensor, and what to do."""


@dataclass(frozen=True)
class Difference:
    """`what` differs from torch's own order, as a sentence. `layer`: where (`num_layers`: behind the last; None: nobody's)."""

    what: str
    layer: int | None = None


@dataclass
class Record:
    """What one order has computed: digests by micro-batch and block, or parameter."""

    outputs: dict[tuple[int, int], list[Digest]] = field(default_factory=dict)
    losses: list[Digest] = field(default_factory=list)
    gradients: dict[tuple[int, int], Digest] = field(default_factory=dict)
    around: list[Digest] = field(default_factory=list)

    def note_output(self, micro_batch: int, block: int, output: Any) -> None:
        self.outputs[micro_batch, block] = digests_of(output)

    def note_gradient(self, micro_batch: int, param: nn.Parameter) -> None:
        """And give it up."""
        assert param.grad is not None
        self.gradients[micro_batch, id(param)] = digest(param.grad)
        param.grad = None


@dataclass(frozen=True)
class SelfCheck:
    """What is checked: a model's layers, and how a step over them runs. `folder`: for what does not fit into memory."""

    model: nn.Module
    layers: LayerMap
    sweeps: ScheduleRunner
    gradients: GradientStore
    schedule: Schedule
    scale: Callable[[torch.Tensor], torch.Tensor]
    folder: Path | None

    def run(self, bodies: Sequence[Body]) -> tuple[str, SelfCheckError | None]:
        """Compare both orders over these micro-batches. Returns a line of what it took, and what is wrong."""
        functions = [function for body in bodies for function in body.functions]
        blocks = [block.module for block in self.layers.blocks]
        snapshot = Snapshot(*survey(self.model, blocks, functions))
        put_back = partial(_put_back, snapshot, Snapshot(*survey_backward(self.model)))
        failed = Changed(self.gradients.drop_all, only_if_failed=True)
        with preserved(), _generators_kept(), Changed(put_back), failed:
            start = time.perf_counter()
            plain = self._plain(bodies)
            middle = time.perf_counter()
            left = [(change, change.item.capture()) for change in snapshot.changes()]
            put_back()
            ours, error = self._tried(bodies)
            own = [change.item.capture() for change, _ in left]
            self._choose_last(left, own)
        if ours is not None:
            found = (*self._differences(plain, ours), *_state_differences(left, own, self._of_backward()))
            error = self._differ(found[0]) if found else None
        took = f"{middle - start:.1f} s in torch's order, {time.perf_counter() - middle:.1f} s in the schedule's"
        return f"self_check: {len(bodies)} micro-batches, {took}: {'they differ' if error else 'they agree'}", error

    def _plain(self, bodies: Sequence[Body]) -> Record:
        record = Record()
        number = 0

        def note_output(block: int, output: Any) -> None:
            record.note_output(number, block, output)

        def note_gradient(param: nn.Parameter) -> None:
            record.note_gradient(number, param)

        order = PlainOrder(self.layers, self.sweeps.params, self.folder)
        try:
            with order.opened(note_output, note_gradient):
                for number, body in enumerate(bodies):  # noqa: B007 - the closures read it
                    with _seeded(body.seed):
                        record.losses.append(digest(order.run(body.run, self.scale)))
                    self.gradients.add("pre")
        except Exception as failure:
            phase, block = order.place
            layer = None if block is None else self._layer_of(block)
            where = f"in the {phase}{'' if block is None else f' {self._where(block)}'}, for micro-batch {number}"
            error = self._failed(failure, f"torch's own order raises {_named(failure)} {where}", layer, f"{_MEND}; {_TRAIN}")
            if error is failure:
                raise
            raise error from failure
        record.around = self._sums()
        return record

    def _tried(self, bodies: Sequence[Body]) -> tuple[Record | None, SelfCheckError | None]:
        """What the schedule computes, or that it fails where torch's own order has not."""
        try:
            return self._scheduled(bodies), None
        except Exception as failure:
            where, layer = self._place_of(failure)
            what = f"the schedule raises {_named(failure)} {where}, where torch's own order raises nothing"
            error = self._failed(failure, what, layer, self._remedy)
            if not isinstance(error, SelfCheckError):
                raise
            return None, error

    def _scheduled(self, bodies: Sequence[Body]) -> Record:
        state = self.sweeps.state
        if state is None:
            return self._run_schedule(bodies)
        state.learned.compares = True
        try:
            return until_known(partial(self._run_schedule, bodies), state.forget)
        finally:
            state.learned.compares = False

    def _run_schedule(self, bodies: Sequence[Body]) -> Record:
        record = Record()
        with contextlib.ExitStack() as hooks:
            for number, block in enumerate(self.layers.blocks):
                hooks.callback(block.module.register_forward_hook(_noting(record, number)).remove)
            losses = self.sweeps.check(self.schedule, bodies, self.gradients, self.scale, record.note_gradient)
        record.losses = [digest(loss) for loss in losses]
        record.around = self._sums()
        return record

    def _choose_last(self, left: Sequence[tuple[StateChange, Any]], own: list[Any]) -> None:
        """Where torch's own order shows that forwards set an item anew, and add nothing to it, this is known from now on."""
        known = {} if self.sweeps.state is None else {key_of_item(each.item): each for each in self.sweeps.state.learned.items}
        for index, (change, plain) in enumerate(left):
            each = known.get(key_of_item(change.item))
            if each is None or each.replaced is None or _agrees(change, plain, own[index]):
                continue
            if _agrees(change, plain, each.replaced):
                own[index], each.adds_up = each.replaced, False
        for each in known.values():
            each.replaced = None

    def _of_backward(self) -> set[Hashable]:
        """Keys of what hooks of the backward write to: in another order of the layers, so it is not compared."""
        return (
            {key_of_item(each.item) for each in self.sweeps.state.learned.items if each.backward}
            if self.sweeps.state
            else set()
        )

    def _sums(self) -> list[Digest]:
        pairs = zip(self.gradients.take("pre"), self.gradients.params("pre"), strict=True)
        # fp32 sums of bf16 gradients have bf16's rounding
        coarser = partial(min, key=lambda dtype: torch.finfo(dtype).bits)
        sums = [digest(total, coarser((total.dtype, param.dtype))) for total, param in pairs]
        self.gradients.drop("pre")
        return sums

    # ---- comparing

    def _differences(self, plain: Record, ours: Record) -> Iterator[Difference]:
        for (micro_batch, block), outputs in plain.outputs.items():
            index, distance = largest_distance(ours.outputs.get((micro_batch, block), []), outputs)
            if index >= 0:
                what = f"{self._where(block)}: output tensor {index} of micro-batch {micro_batch} {_differs(distance)}"
                yield Difference(what, self._layer_of(block))
        index, distance = largest_distance(ours.losses, plain.losses)
        if index >= 0:
            what = f"the loss of micro-batch {index} {_differs(distance)}; the outputs of all layers agree"
            yield Difference(what, self.layers.num_layers)
        names = {id(param): name for name, param in self.model.named_parameters()}
        for micro_batch in range(len(plain.losses)):
            for layer in reversed(range(self.layers.num_layers)):
                yield from self._gradient_differences(micro_batch, layer, plain, ours, names)
        around = [names[id(param)] for param in self.gradients.params("pre")]
        sums = (dict(zip(around, record.around, strict=True)) for record in (ours, plain))
        for name, distance in wrong_gradients(*sums).items():
            what = f"outside the layers: the gradient of {name}, summed over micro-batches 0 to {len(plain.losses) - 1},"
            yield Difference(f"{what} {_differs(distance)}; outputs, losses and the layers' gradients agree")

    def _gradient_differences(
        self, micro_batch: int, layer: int, plain: Record, ours: Record, names: dict[int, str]
    ) -> Iterator[Difference]:
        keys = {names.get(id(param), "?"): (micro_batch, id(param)) for param in self.layers.units[layer]}
        both = (
            {name: record.gradients[key] for name, key in keys.items() if key in record.gradients} for record in (ours, plain)
        )
        for name, distance in wrong_gradients(*both).items():
            what = f"the gradient of {name} for micro-batch {micro_batch} {_differs(distance)}; outputs and losses agree"
            yield Difference(f"{self._where(self.layers.layers[layer][0])}: {what}", layer)

    # ---- saying it

    def _layer_of(self, block: int) -> int:
        return next(index for index, blocks in enumerate(self.layers.layers) if block in blocks)

    def _where(self, block: int) -> str:
        return f"layer {self._layer_of(block)} ({self.layers.blocks[block].path})"

    def _differ(self, found: Difference) -> SelfCheckError:
        return self._error(found.what, found.layer, self._remedy)

    @property
    def _remedy(self) -> str:
        other = 'set vertical_schedule.order to "horizontal", which runs one micro-batch after another, or '
        return f"{'' if self.schedule.order == 'horizontal' else other}{_MEND}; {_TRAIN}"

    def _failed(self, failure: Exception, what: str, layer: int | None, remedy: str) -> Exception:
        """What to raise in the place of an exception: our own refusals, and what is lacking, stay and get a note."""
        if isinstance(failure, _RESOURCES) or type(failure).__module__.startswith("ds_vertical."):
            failure.add_note(f"vertical_schedule.self_check: {what}; nothing has been trained; {_TRAIN}")
            return failure
        error = self._error(f"{what}: {_first_line(failure)}", layer, remedy)
        error.__cause__ = failure
        return error

    def _error(self, what: str, layer: int | None, remedy: str) -> SelfCheckError:
        suspects = self._suspects(layer)
        told = f"; what changes there, and may be the cause: {suspects}" if suspects else ""
        return SelfCheckError(f"vertical_schedule.self_check: {what}{told}; nothing has been trained; {remedy}")

    def _suspects(self, layer: int | None) -> str:
        """Items of state of which it is known that their contents change in a layer."""
        if layer is None or self.sweeps.state is None:
            return ""
        blocks = self.layers.layers[layer] if layer < self.layers.num_layers else ()
        items = (each.item for each in self.sweeps.state.learned.items if layer in each.writers or each.item.region in blocks)
        paths = list(dict.fromkeys(item.path for item in items))
        more = f" and {len(paths) - _MOST_SUSPECTS} more" if len(paths) > _MOST_SUSPECTS else ""
        return ", ".join(paths[:_MOST_SUSPECTS]) + more

    def _place_of(self, failure: Exception) -> tuple[str, int | None]:
        """In which layer the schedule was as it failed, told by the event under way."""
        event = _event_of(failure)
        if event is None:
            return "outside the forwards and backwards", None
        of = "" if event.micro_batch is None else f", for micro-batch {event.micro_batch}"
        if event.op is Op.HEAD:
            return f"in the forward behind the last layer, in the loss or in its backward{of}", self.layers.num_layers
        if event.op not in (Op.F, Op.B):
            return f"at {event}", None
        phase = "forward" if event.op is Op.F else "backward"
        if not isinstance(event.layer, int):
            return f"in the {phase} ahead of the first layer{of}", None
        where = self._where(self.layers.layers[event.layer][0])
        return f"in the {phase} of {where}, or of the code between it and the layer ahead of it{of}", event.layer


def _event_of(failure: Exception) -> Event | None:
    """The event that was under way as an exception was raised."""
    for frame, _ in traceback.walk_tb(failure.__traceback__):
        if isinstance(event := frame.f_locals.get("event"), Event):
            return event
    return None


def _named(failure: Exception) -> str:
    return type(failure).__name__


def _first_line(failure: Exception) -> str:
    return str(failure).strip().partition("\n")[0] or "(no message)"


def model_fingerprint(model: nn.Module, settings: Any) -> str:
    """The same for models of the same modules with the same code, under settings that order the arithmetic alike."""
    told = hashlib.sha256(repr((settings.order, settings.snake, settings.blocks_per_layer, torch.__version__)).encode())
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


def _differs(distance: float) -> str:
    if distance == float("inf"):
        return "differs wholly from torch's own order: one of both is missing, of another shape or not finite"
    return f"differs by {distance:.1e} of its norm from torch's own order"


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    state = ThreadState.capture()
    own = state if seed is None else state.seeded(seed)
    with applied(own.without_autocast_cache()), contextlib.nullcontext() if seed is None else global_generators_seeded(seed):
        yield


@contextlib.contextmanager
def _generators_kept() -> Iterator[None]:
    kept = [(item, item.capture()) for item in global_generators()]
    try:
        yield
    finally:
        for item, state in kept:
            item.install(state)


def _put_back(*snapshots: Snapshot) -> None:
    for change in [change for snapshot in snapshots for change in snapshot.changes()]:
        if change.before is None:
            refuse_large(change.item)
        change.item.install(change.before)


def _state_differences(
    left: Sequence[tuple[StateChange, Any]], own: Sequence[Any], but: Collection[Hashable]
) -> Iterator[Difference]:
    """What modules hold after both orders: numbers and tensors; other objects are each order's own. `but`: not compared."""
    for (change, plain), ours in zip(left, own, strict=True):
        if key_of_item(change.item) not in but and not _agrees(change, plain, ours):
            what = f"{change.item.path}, which the forward changes, holds something else afterwards than in torch's own order"
            yield Difference(f"{what}; outputs, losses and gradients agree")


def _agrees(change: StateChange, plain: Any, ours: Any) -> bool:
    item = change.item
    if item.is_generator:
        return item.is_global or item.same(plain, ours)
    if isinstance(item, TensorItem):
        return _close(plain, ours)
    values = [[value for _, contents in pairs for value in contents.values()] for pairs in (plain, ours)]
    return len(values[0]) == len(values[1]) and all(map(_agree, *values))


def _agree(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _close(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_agree, one, other))
    if isinstance(one, bool | int | float | complex | str | bytes):
        return type(one) is type(other) and one == other
    return type(one) is type(other)


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if same_bits(one, other):
        return True
    index, _ = largest_distance([digest(one)], [digest(other)])
    return index < 0
