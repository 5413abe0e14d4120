"""What each event of a schedule does: one table of handlers for a training step, one for an evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import torch

from ds_vertical.distributed.collective_replay import CollectiveReplay, Others
from ds_vertical.engine.zero3.interface import GradientNotes, Optimizer, Params
from ds_vertical.engine.zero3.read_ahead import ReadAheadRoom, StepHints, entering_bytes, host_bytes_held
from ds_vertical.errors import StepLeft
from ds_vertical.io.host import memory_bytes
from ds_vertical.io.ticket import Ticket
from ds_vertical.model.autograd_segments import watching_hooks
from ds_vertical.model.forward_coroutine import ForwardPass
from ds_vertical.model.kept.kinds import KeptKinds
from ds_vertical.model.kept.probe import Probe
from ds_vertical.model.layers import LayerMap
from ds_vertical.model.micro_batch import Body, MicroBatch
from ds_vertical.model.state.forward_state import ForwardState
from ds_vertical.model.state.step_state import StepState
from ds_vertical.model.stubs import OutsideWatch, Stubs
from ds_vertical.model.thread_state import ThreadState, preserved
from ds_vertical.offload.activation_store import ActivationStore
from ds_vertical.offload.grad_accumulator import GradientStore
from ds_vertical.offload.kept_store import KeptStore, cell_of
from ds_vertical.schedule.events import EARLY, Event, Op, Schedule, Unit
from ds_vertical.schedule.executor import Executor, Handler
from ds_vertical.schedule.levels import arrivals
from ds_vertical.schedule.trace import Tracer
from ds_vertical.types import PRE, SUF, Tier

Stores = tuple[ActivationStore | None, KeptStore | None]  # of what passes between layers, and of what forwards keep
LossScale = Callable[[torch.Tensor], torch.Tensor]  # of a micro-batch's loss what its backward starts from; both 0-d


@dataclass(frozen=True)
class PassParts:
    """What the handlers of one pass over the layers work on.

    `leave`: see `ScheduleRunner`. `replay`: takes part in the other ranks' collectives where this rank's part of the pass
    fails; None where there is one rank. `state`: of the modules; it explains errors.
    """

    schedule: Schedule
    micro_batches: Sequence[MicroBatch]
    params: Params
    leave: Callable[[], bool]
    replay: CollectiveReplay | None
    state: StepState | None = None
    bodies: Sequence[Body] = ()  # for their losses
    watch: OutsideWatch | None = None  # where units outside the layers are away at times


@dataclass(eq=False)
class ScheduleRunner:
    """Runs schedules over one model: holds what every pass of one engine shares.

    `params` may be replaced between two passes. `others`: the ranks of the run, None where there is one. `leave` is asked after
    each layer, ahead of the norm: where it returns True (on all ranks) the pass ends there, in StepLeft. `state`: what the
    modules hold that belongs to one forward; None: nothing is. `kinds`: how block calls of training steps keep what their
    backward needs; None: nothing is kept. `kept`: where that rests. `probe`: measures what could be kept. `room`: for state
    that is read before the norm; None: there is none.
    """

    layers: LayerMap
    params: Params
    _: KW_ONLY
    overlap: bool
    tracer: Tracer | None = None
    activations: ActivationStore | None = None
    others: Others | None = None
    leave: Callable[[], bool] = lambda: False
    state: ForwardState | None = None
    kinds: KeptKinds | None = None
    kept: KeptStore | None = None
    probe: Probe | None = None
    room: ReadAheadRoom | None = None
    _live: Sequence[MicroBatch] = field(default=(), init=False)  # of the pass under way, or of one that was cut

    def train(
        self,
        schedule: Schedule,
        bodies: Sequence[Body],
        gradients: GradientStore,
        optimizer: Optimizer,
        scale: LossScale,
    ) -> list[torch.Tensor]:
        """One training step. Each body returns its loss; backward starts from `scale(loss)`. Returns the losses."""
        replay = self._replay()
        with preserved(), watching_hooks(), self._stubs() as stubs, self._state_of(schedule, bodies, replay) as modules:
            gradients.expect(len(bodies), schedule.calls)
            watch = self._watch(schedule)
            shared = ForwardPass(self.layers, stubs, True, modules, schedule.calls, self.kinds, self.probe, watch)
            micro_batches = self._micro_batches(bodies, shared, moved=schedule.moved)
            parts = PassParts(schedule, micro_batches, self.params, self.leave, replay, modules, bodies, watch)
            measures = partial(host_bytes_held, schedule, micro_batches, self._stores), partial(entering_bytes, micro_batches)
            tell = StepHints(schedule, optimizer, self.room, *measures).tell if self.overlap else lambda _: None
            training = _Training(parts, gradients, scale, optimizer, self._stores, tell)
            self._run(parts, training.handlers(), gradients, optimizer, self.tracer)
        return training.losses

    def check(
        self, schedule: Schedule, bodies: Sequence[Body], gradients: GradientStore, scale: LossScale, notes: GradientNotes
    ) -> list[torch.Tensor]:
        """Forwards and backwards of a training step, and this rank's sums, nothing else. Those of a layer are given up once
        `notes` has heard of them, those outside the layers are left to the caller. Returns the losses."""
        replay = self._replay(only_gathers=True)
        with preserved(), watching_hooks(), self._stubs() as stubs, self._state_of(schedule, bodies, replay) as modules:
            gradients.expect(len(bodies), schedule.calls)
            watch = self._watch(schedule)
            shared = ForwardPass(self.layers, stubs, True, modules, schedule.calls, watch=watch)
            micro_batches = self._micro_batches(bodies, shared)
            parts = PassParts(schedule, micro_batches, self.params, lambda: False, replay, modules, bodies, watch)
            checking = _Checking(parts, gradients, scale, notes)
            self._run(parts, checking.handlers(), gradients)
        return checking.losses

    def evaluate(self, schedule: Schedule, bodies: Sequence[Body]) -> list[Any]:
        """One forward-only pass. Returns what each body returned. Without any it fetches layers with the other ranks alone."""
        replay = self._replay()
        with preserved(), self._stubs() as stubs, self._state_of(schedule, bodies, replay, training=False) as modules:
            micro_batches = self._micro_batches(bodies, ForwardPass(self.layers, stubs, False, modules, schedule.calls))
            parts = PassParts(schedule, micro_batches, self.params, self.leave, replay, modules)
            evaluation = _Evaluation(parts)
            self._run(parts, evaluation.handlers())
        if len(bodies) == 1 and bodies[0].seed is None:
            micro_batches[0].leave_random_numbers()  # the caller's go on where this forward has left them, as in stock
        return evaluation.results

    @property
    def _stores(self) -> Stores:
        return self.activations, self.kept

    def _watch(self, schedule: Schedule) -> OutsideWatch | None:
        return OutsideWatch(self.layers, schedule.outside.apart) if schedule.outside.apart else None

    def _replay(self, only_gathers: bool = False) -> CollectiveReplay | None:
        return None if self.others is None else CollectiveReplay(self.others, only_gathers)

    @contextlib.contextmanager
    def _state_of(
        self, schedule: Schedule, bodies: Sequence[Body], replay: CollectiveReplay | None, training: bool = True
    ) -> Iterator[StepState | None]:
        """See `ForwardState.opened`. Where that refuses the state on this rank alone, all ranks raise."""
        if self.state is None:
            yield None
            return
        functions = list(dict.fromkeys(function for body in bodies for function in body.functions))
        state = self.state.opened([body.form for body in bodies], [body.seed for body in bodies], functions, training)
        with contextlib.ExitStack() as stack:
            try:
                modules = stack.enter_context(state)
            except Exception as error:
                if replay is not None:
                    replay.accompany(schedule, self.overlap, error)
                raise
            yield modules

    def _stubs(self) -> Stubs:
        return Stubs(self.layers, None if self.state is None else self.state.model)

    def _micro_batches(self, bodies: Sequence[Body], shared: ForwardPass, moved: Collection[int] = ()) -> list[MicroBatch]:
        state = ThreadState.capture()
        states = [state if body.seed is None else state.seeded(body.seed) for body in bodies]
        self._live = live = [MicroBatch(body.run, shared, states[i], i, run_on=i in moved) for i, body in enumerate(bodies)]
        return live

    def end_forwards(self) -> None:
        """Close the forwards of the last pass, wherever an interrupt has cut it: none outlives its pass."""
        with contextlib.ExitStack() as ends:
            for micro_batch in self._live:
                ends.callback(micro_batch.close)
        self._live = ()

    def _run(
        self,
        parts: PassParts,
        handlers: Mapping[Op, Handler],
        gradients: GradientStore | None = None,
        optimizer: Optimizer | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        gathers, following, held = self.params.gathers, parts.schedule.next_backward, partial(self._held_bytes, gradients)
        beside = {op: gathers.beside(handler) for op, handler in handlers.items()}
        before: dict[Op, Handler] = {}
        if optimizer is not None:
            before[Op.NORM] = lambda event: optimizer.left() if event.step_offset else optimizer.early_writes()
            before[Op.REDUCE] = lambda event: gathers.lead(following.get(event))
        executor = Executor(beside, before=before, overlap=self.overlap, held_bytes=held, counters=memory_bytes, tracer=tracer)
        try:
            executor.run(parts.schedule)
            self.params.gathers.issue_all()  # of copies for the next step: on all ranks, or on none
            if parts.replay is not None:
                parts.replay.conclude()
            self._live = ()
        except BaseException as error:
            try:
                self._clean_up(gradients, optimizer)
            except Exception as later:  # the first one is the cause
                error.add_note(f"and while that was cleaned up: {type(later).__name__}: {later}")
            finally:
                if isinstance(error, Exception):
                    self._tell(parts, error)
            raise

    def _held_bytes(self, gradients: GradientStore | None) -> dict[str, int]:
        """Per tier, for the message of a failure."""
        held: dict[str, int] = {Tier.HOST: self.params.host_bytes, Tier.DEVICE: gradients.num_bytes if gradients else 0}
        for store in self._stores:
            for tier, count in (store.num_bytes if store is not None else {}).items():
                held[tier] = held.get(tier, 0) + count
        return held

    def _tell(self, parts: PassParts, error: Exception) -> None:
        """Tell the other ranks of this rank's own error, by what is to be raised for it. Raises that where it is another
        one."""
        state = None if getattr(error, "ends_run", False) else parts.state
        explained = error if state is None else state.explained(error)
        if parts.replay is not None:
            parts.replay.accompany(parts.schedule, self.overlap, explained)
        if explained is not error:
            raise explained from error

    def _clean_up(self, gradients: GradientStore | None, optimizer: Optimizer | None) -> None:
        """After an error: each is called, the last one first, whatever another one raises."""
        with contextlib.ExitStack() as cleanup:
            if gradients is not None:
                cleanup.callback(gradients.drop_all)
            cleanup.callback(self.params.release_all)
            if optimizer is not None:
                cleanup.callback(optimizer.abandon)  # before the release: steps write into buffers handed over
            cleanup.callback(self.end_forwards)
            for store in self._stores:
                if store is not None:
                    cleanup.callback(store.abandon)  # before the forwards end: see there


class _Pass:
    """Handlers that training and evaluation share."""

    def __init__(self, parts: PassParts) -> None:
        self.fused = parts.schedule.fused
        self.outside = parts.schedule.outside.units
        self._coming = arrivals(parts.schedule.events, levels=parts.schedule.copied is not None)
        self._spreading: dict[Unit, Ticket] = {}
        self._watch = parts.watch
        self.recalled: Collection[Unit] = ()  # whose early step is to find their values
        self.micro_batches, self.params = parts.micro_batches, parts.params
        self.leave, self.replay = parts.leave, parts.replay

    def handlers(self) -> dict[Op, Handler]:
        return {Op.FETCH: self.fetch, Op.SPREAD: self.spread, Op.RELEASE: self.release, Op.F: self.forward}

    def micro_batch(self, event: Event) -> MicroBatch:
        assert event.micro_batch is not None
        return self.micro_batches[event.micro_batch]

    def watching(self, event: Event) -> contextlib.AbstractContextManager[None]:
        """Within the block parameters are used in their own place alone, while the event's forward runs."""
        assert event.layer is not None
        return contextlib.nullcontext() if self._watch is None else self._watch.watching(event.layer)

    def fetch(self, event: Event) -> Ticket | None:
        return self._fetch(_unit(event), None)

    def _fetch(self, unit: Unit, step: Ticket | None) -> Ticket | None:
        """Where a SPREAD follows, `spread` returns the ticket instead: whoever uses the unit waits for it."""
        arrival = self._coming[unit].popleft()
        ticket = self.params.fetch(unit, step, arrival)
        if not arrival.spreads:
            return ticket
        self._spreading[unit] = ticket
        return None

    def spread(self, event: Event) -> Ticket | None:
        return self._spreading.pop(_unit(event))

    def release(self, event: Event) -> None:
        unit = _unit(event)
        coming = self._coming[unit]
        is_fetched = not isinstance(unit, int) and bool(coming) and not coming[0].from_copy
        self.params.release(unit, is_fetched or (unit in self.recalled and not coming))
        if self.leave():
            if self.replay is not None:
                self.replay.leave()
            self.params.gathers.issue_all()
            if self.replay is not None:
                self.replay.conclude()
            raise StepLeft

    def forward(self, event: Event) -> None:
        with self.watching(event):
            if event.layer == PRE:
                self.micro_batch(event).start(event.call)
            else:
                assert isinstance(event.layer, int)
                self.micro_batch(event).advance(event.layer, keep_graph=event in self.fused)


class _Evaluation(_Pass):
    def __init__(self, parts: PassParts) -> None:
        super().__init__(parts)
        self.results: list[Any] = [None] * len(self.micro_batches)

    def forward(self, event: Event) -> None:
        if self.results and event.layer == SUF:
            assert event.micro_batch is not None
            self.results[event.micro_batch] = self.micro_batch(event).finish()
        elif self.results:
            super().forward(event)


class _WithBackward(_Pass):
    """Handlers that training and the self-check share."""

    def __init__(self, parts: PassParts, gradients: GradientStore, scale: LossScale) -> None:
        super().__init__(parts)
        self.gradients = gradients
        self.scale = scale
        self.bodies = parts.bodies
        self.losses: list[torch.Tensor] = [torch.empty(0)] * len(parts.micro_batches)

    def head(self, event: Event) -> None:
        """Suffix, loss and the suffix's backward: one micro-batch's logits alive at a time."""
        assert event.micro_batch is not None
        micro_batch, body = self.micro_batch(event), self.bodies[event.micro_batch]
        loss = body.loss_of(partial(self._finish, event))
        self.gradients.refuse_own_backward()
        self.losses[event.micro_batch] = loss.detach()
        micro_batch.backward_suffix(self.scale(loss if body.weight == 1.0 else loss * body.weight))
        self.add_outside()

    def _finish(self, event: Event) -> object:
        """The forward's suffix alone is watched: `loss_of` may let a loop's own code run, ahead of it and behind it."""
        with self.watching(event):
            return self.micro_batch(event).finish()

    def add_outside(self) -> None:
        """Sum the gradients of parameters outside the layers: the suffix, the glue before a layer and the prefix use them."""
        for unit in self.outside:
            self.gradients.add(unit)


class _Training(_WithBackward):
    def __init__(
        self,
        parts: PassParts,
        gradients: GradientStore,
        scale: LossScale,
        optimizer: Optimizer,
        stores: Stores,
        tell: Callable[[Event], None],
    ) -> None:
        super().__init__(parts, gradients, scale)
        self.tell, self._crosses, self._leaves = tell, parts.schedule.copied is not None, parts.schedule.delayed
        self.activations, self.kept = stores
        self.optimizer = optimizer
        self._stepped: dict[Unit, Ticket] = {}  # delayed steps that make what a unit's fetch brings
        if parts.params.recalls:
            self.recalled = {_unit(event) for event in parts.schedule.events if event.op is Op.STEP and event.part == EARLY}

    def handlers(self) -> dict[Op, Handler]:
        stores = [store for store in (self.activations, self.kept) if store is not None]
        moves: dict[Op, Handler] = {}
        for store in stores:
            moves |= store.handlers(lambda index: self.micro_batches[index].boundary)
        return (
            super().handlers()
            | moves
            | {
                Op.HEAD: self.head,
                Op.B: self.backward,
                Op.REDUCE: self.reduce,
                Op.CROSS: lambda event: self.optimizer.reducing(_unit(event), event.ahead),
                Op.HOLD: self.hold,
                Op.NORM: self.norm,
                Op.STEP: self.step,
                Op.COMMIT: lambda _: self.optimizer.conclude_early(),
                Op.MAKE: lambda event: self.optimizer.step_unit(_unit(event)),
            }
        )

    def forward(self, event: Event) -> None:
        if not isinstance(event.layer, int):
            super().forward(event)
            return
        cell = cell_of(event)
        self.tell(event)
        if self.activations is not None:
            self.activations.require(*cell)
        super().forward(event)
        if (self.activations is None and self.kept is None) or event in self.fused:
            return
        if self.activations is not None:
            self.activations.leave(*cell, self.micro_batch(event).boundary)
        if self.kept is not None:
            self.kept.note(cell, self.micro_batch(event).boundary)

    def fetch(self, event: Event) -> Ticket | None:
        if event.ahead:
            return self.params.fetch_ahead(_unit(event))
        unit = _unit(event)
        return self._fetch(unit, self.optimizer.stepped_ahead(unit) or self._stepped.pop(unit, None))

    def spread(self, event: Event) -> Ticket | None:
        """Ahead: of what the step leaves to the next one there are no values yet; the next one spreads it."""
        unit, copies = _unit(event), self.params.copies
        if not event.ahead:
            return super().spread(event)
        return None if copies is None or (self._leaves and self.optimizer.is_left(unit)) else copies.renew(unit)

    def head(self, event: Event) -> None:
        self.tell(event)
        super().head(event)

    def backward(self, event: Event) -> None:
        micro_batch = self.micro_batch(event)
        if event.layer == PRE:
            micro_batch.backward_prefix()
        else:
            assert isinstance(event.layer, int) and event.micro_batch is not None
            if self.activations is not None:
                self.activations.require(event.layer, event.micro_batch)
            with self.gradients.adding(event.layer):
                micro_batch.backward_layer(event.layer)
            if self.kept is not None:
                self.kept.forget(cell_of(event))
            self.gradients.add(event.layer)
        self.add_outside()

    def reduce(self, event: Event) -> Ticket | None:
        unit = _unit(event)
        sums, flat = self.gradients.hand_over(unit), self.gradients.flat(unit)
        if self.optimizer.reduce_unit(unit, sums, flat, self.gradients.reserve.put_back):
            self.gradients.give_away(unit)
        else:
            self.gradients.drop(unit)
        return None if self._crosses else self.optimizer.reducing(unit)  # over levels, CROSS ends what begins here

    def hold(self, event: Event) -> Ticket | None:
        return self.optimizer.hold_unit(_unit(event))

    def norm(self, event: Event) -> None:
        self.gradients.free()
        self.params.gathers.issue_all()  # of what is fetched ahead of NORM@-1: all ranks have begun it, whatever they decide
        with contextlib.nullcontext() if self.replay is None else self.replay.deciding(event):
            (self.optimizer.open_left if event.step_offset else self.optimizer.open_step)()

    def step(self, event: Event) -> Ticket | None:
        optimizer = self.optimizer
        late = optimizer.step_ahead if event.ahead else optimizer.step_unit
        ticket = (optimizer.step_early if event.part == EARLY else late)(_unit(event))
        if ticket is not None and event.step_offset < 0:
            self._stepped[_unit(event)] = ticket
        self.tell(event)
        return ticket


class _Checking(_WithBackward):
    """Of a step, what computes: gradients are looked at as they come and as they are summed, and nothing is stepped."""

    def __init__(self, parts: PassParts, gradients: GradientStore, scale: LossScale, notes: GradientNotes) -> None:
        super().__init__(parts, gradients, scale)
        self.notes = notes

    def handlers(self) -> dict[Op, Handler]:
        nothing: dict[Op, Handler] = dict.fromkeys(Op, lambda _: None)
        return nothing | super().handlers() | {Op.HEAD: self.head, Op.B: self.backward, Op.REDUCE: self.reduce}

    def backward(self, event: Event) -> None:
        micro_batch = self.micro_batch(event)
        if event.layer == PRE:
            micro_batch.backward_prefix()
        else:
            assert isinstance(event.layer, int) and event.micro_batch is not None
            with self.gradients.heard_by(partial(self.notes.note_gradient, event.micro_batch)):
                with self.gradients.adding(event.layer):
                    micro_batch.backward_layer(event.layer)
                self.gradients.add(event.layer)
        self.add_outside()

    def reduce(self, event: Event) -> None:
        unit = _unit(event)
        if not isinstance(unit, int):
            return
        params = self.gradients.params(unit)
        for param, total in zip(params, self.gradients.hand_over(unit), strict=True):
            self.notes.note_sum(param, total, self.gradients.rounding(param))
        self.gradients.drop(unit)


def _unit(event: Event) -> Unit:
    assert event.layer is not None
    return event.layer
