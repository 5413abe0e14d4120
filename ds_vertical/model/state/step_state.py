"""The state of modules during one step, or evaluation: each forward finds the versions that it has made itself.

`StepState.enter` is called ahead of each part of a forward, and installs the micro-batch's versions. `leave` is called behind
it, and makes what has changed the micro-batch's versions. `forward_state` says which version that is, and why: its notes hold.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from ds_vertical.errors import LayerError, OtherRankError
from ds_vertical.model.layers import LayerMap
from ds_vertical.model.state.block_state import BlockState
from ds_vertical.model.state.module_state import Elements, PlaceItem, Version, equal_values
from ds_vertical.model.state.restart import HORIZONTAL, StateMissed
from ds_vertical.model.state.survey import OUTSIDE
from ds_vertical.model.state.tracks import BETWEEN_CALLS, PREFIX, Known, LearnedState, Track, TrackedState, part_of_forward
from ds_vertical.model.tensor_refs import key_of

_MAY_BE_STATES = (
    RuntimeError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    AssertionError,
    ZeroDivisionError,
)  # what wrong state may end in


class GradFlags:
    """Which parameters require grad as a step begins. A forward must not change it: blocks run once more in the backward.

    But it may while it runs without gradients, and nothing of it runs once more: PEFT freezes an adapter while that is
    disabled. Then the flags are the micro-batch's own, until it has put them back.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._params = list(model.parameters())
        self._flags = self._now()
        self._own: dict[int, list[bool]] = {}

    def _now(self) -> list[bool]:
        return [param.requires_grad for param in self._params]

    def _install(self, flags: Sequence[bool]) -> None:
        for param, flag in zip(self._params, flags, strict=True):
            if param.requires_grad != flag:
                param.requires_grad_(flag)

    def enter(self, micro_batch: int) -> None:
        """A micro-batch's forward goes on: let the flags be its own."""
        if (own := self._own.get(micro_batch)) is not None:
            self._install(own)

    def leave(self, micro_batch: int, is_recomputed: bool, looks: bool) -> None:
        """A micro-batch's forward has parked, or has ended. `looks`: it may have changed the flags. Raises LayerError where it
        has, and runs once more in the backward."""
        had_own = self._own.pop(micro_batch, None) is not None
        if not (looks or had_own):
            return
        if is_recomputed:
            self._check()
        elif (now := self._now()) != self._flags:
            self._own[micro_batch] = now
            self.restore()

    def restore(self) -> None:
        """Let the flags be those of before the step."""
        self._install(self._flags)

    def _check(self) -> None:
        """Raises LayerError, with the parameter's name, where the forward has set `requires_grad` of one."""
        if self._now() == self._flags:
            return
        for (name, param), before in zip(self._model.named_parameters(), self._flags, strict=True):
            if param.requires_grad != before:
                raise LayerError(
                    f"the forward has set requires_grad of {name} to {param.requires_grad}; the backward runs blocks once more,"
                    " with the value of then: set it before ds_vertical.initialize, and detach what is to get no"
                    " gradient"
                )


class ResetTrial:
    """A run of a step that does not count, and shows which items the prefix resets: see `forward_state`, [Note: resets].

    `runs`: the step is such a run. `prepare` makes the next one.
    """

    def __init__(self, learned: LearnedState, learns: bool, in_turn: bool) -> None:
        self._learned = learned
        self.runs, learned.probes = learned.probes and learns and not in_turn, False

    def sample(self, track: Track, micro_batch: int, layer: int | None) -> Version:
        """What the prefix of a later micro-batch is to find in an item in such a run; None: its own version, as always."""
        wanted = self.runs and micro_batch > 0 and layer == PREFIX and micro_batch not in track.own
        return track.known.sample if wanted else None

    def drop_samples(self, tracks: Iterable[Track]) -> None:
        """Forget the samples: the run is over."""
        for track in tracks:
            track.known.sample = None

    def prepare(self, tracks: Iterable[Track], in_turn: bool) -> None:
        """Let the next run be such a run, with what the first forward has left as the sample: once for each item."""
        for track in tracks:
            known = track.known
            is_new = not (known.tried or track.item.is_generator or in_turn)
            known.sample = track.own.get(0) if is_new else None
            if known.sample is not None:
                known.tried = self._learned.probes = True
        # tensors over one memory hold one thing
        sampled = {_memory(track.known.sample) for track in tracks if isinstance(track.known.sample, Elements)}
        for track in tracks:
            if isinstance(track.base, Elements) and _memory(track.base) in sampled:
                track.known.sample = track.own.get(0)


def _memory(elements: Elements) -> int:
    return key_of(elements.memory.untyped_storage())


class StepState:
    """Which micro-batch's versions the modules hold, in one step or evaluation.

    `learns`: all state is compared behind every part of each forward. `seeds`: of each micro-batch's random numbers. `snake`:
    every second layer takes the micro-batches last first. `over` is set once the schedule has run without an error. `counts`
    says whether the step counts by now; `is_stocks`: it is an evaluation in which each forward finds all as in stock's order.
    Whoever opens the step sets these two.
    """

    def __init__(
        self,
        learned: LearnedState,
        model: nn.Module,
        layers: LayerMap,
        tracked: TrackedState,
        seeds: Sequence[int | None],
        snake: bool,
    ) -> None:
        self.over = False
        self.counts: Callable[[], bool] = lambda: False
        self.is_stocks = False
        self._learned = learned
        self._layers = layers
        self.tracked = tracked
        self._tracks = tracked.tracks
        self._learns = tracked.learns
        self._in_turn = tracked.in_turn
        self._seeds = seeds
        self._snake = snake and not self._in_turn
        self._ended: set[int] = set()
        self._trial = ResetTrial(learned, self._learns, self._in_turn)
        self.outer_context = {id(value) for value in contextvars.copy_context().values()}  # which the survey has seen
        self._flags = GradFlags(model)
        self._again: set[int] = set()  # ids of the tracks of which a further call of the model has made a version

    def explained(self, error: Exception) -> Exception:
        """What is to be raised for an error of this rank's own, ahead of the ranks' agreement: a refusal where state has
        changed that cannot be put back; StateMissed where state that has changed may be the error's cause; else the error."""
        is_known = isinstance(error, StateMissed | OtherRankError) or not isinstance(error, _MAY_BE_STATES)
        if is_known or self.counts():
            return error
        try:
            self.refuse_lost()
            if not self.is_stocks:
                self._blame_state()
        except LayerError as instead:
            instead.__cause__ = error
            return instead
        return error

    def refuse_lost(self) -> None:
        """Find all that has changed. Raises LayerError where there is no copy of what it held before."""
        self.tracked.find(None, whole=True)

    def _blame_state(self) -> None:
        """After an error, once all changes are tracked: raise StateMissed where state has changed that was not known of, or
        where a forward may have found a version of it that no stock forward finds."""
        if self._trial.runs:
            self._trial.drop_samples(self._tracks)
            raise StateMissed("")
        if self.tracked.news:
            raise StateMissed(self.tracked.news[0])
        for known in (unsure := _unsure(self._tracks) if self._learns else []):
            known.spread = True
        if unsure:
            raise StateMissed("")

    # ---- whose turn it is

    def enter(self, micro_batch: int, layer: int | None, call: int = 0) -> None:
        """Install a micro-batch's versions: its forward goes on through a layer (below 0: the prefix; None: the suffix) in one
        of its calls of the model, or its backward does."""
        self.tracked.layer, self.tracked.part = layer, part_of_forward(layer, call, self._layers.num_layers)
        self._flags.enter(micro_batch)
        if not self._tracks:
            return
        near = _regions_near(self._layers, layer)
        if near is not None:
            near |= self._learned.reached
        for track in self._tracks:
            if self._in_turn:
                if track.item.is_global and layer == PREFIX and self._seeds[micro_batch] is not None:
                    track.install(track.own[micro_batch])
            elif near is None or track.item.region in near or isinstance(track.item, PlaceItem):
                sample = self._trial.sample(track, micro_batch, layer)
                track.install(track.version(micro_batch) if sample is None else sample)

    def leave(self, micro_batch: int, layer: int | None, call: int = 0, is_recomputed: bool = True) -> None:
        """Keep what has changed as the micro-batch's versions: its forward has parked behind that part, or has ended.
        `is_recomputed`: it computes with gradients.

        Raises StateMissed where something has changed that was not known as the step began, and LayerError for what cannot be
        followed.
        """
        near = _regions_near(self._layers, layer)
        self._flags.leave(micro_batch, is_recomputed, looks=self._learns or layer is None or layer < 0)
        self.tracked.part = part_of_forward(layer, call, self._layers.num_layers)
        is_outermost = len(self._ended) in (0, len(self._seeds) - 1)  # the first forward, and the last one
        looks = self._learns or (near is None and (layer is not None or is_outermost))
        is_last = layer is None and len(self._ended) == len(self._seeds) - 1
        waits = self._learns or layer is None  # for a device's answers: at the end of the first forward and of the last
        looks, refuse = looks and self._learned.handled, not self.is_stocks
        found = self.tracked.find(None, refuse=refuse, whole=is_last, waits=waits) if looks else []
        if found and not (self._learns or self.is_stocks):
            raise StateMissed(found[0].item.path)  # which part has changed it the next run shows
        if self._tracks:
            self._look_at_tracks(found, near, micro_batch, layer)
        if layer is None:
            self._end(micro_batch)

    def _look_at_tracks(self, found: Sequence[Track], near: set[int] | None, micro_batch: int, layer: int | None) -> None:
        """Keep the changes of the known items since the forward went on, and of those just found."""
        far = [
            track
            for track in self._tracks
            if near is not None and track.item.region not in near and not self._in_turn and _is_changed(track)
        ]
        for track in (*found, *far):
            if near is not None and track.item.region not in near:
                track.item.region = OUTSIDE  # something else than its block has changed it
        self.tracked.news += [track.item.path for track in far]
        written, self.tracked.written = self.tracked.written, set()
        for track in self._tracks:
            if self._in_turn:
                self._look_in_turn(track, layer)
            elif near is None or id(track) in written or (track.item.region in near and not self.tracked.is_quiet(track)):
                self._look(track, micro_batch, layer)

    def _look_in_turn(self, track: Track, layer: int | None) -> None:
        """Note whether the forward that has ended has used Python's or NumPy's generator."""
        if layer is None and track.item.is_global and not track.item.same(track.item.capture(), track.installed):
            track.known.writers.add(0)

    def _look(self, track: Track, micro_batch: int, layer: int | None) -> None:
        """Where an item has changed, make that the micro-batch's version, and note the part of the forward that changed it."""
        item, known = track.item, track.known
        now = item.capture(track.installed)
        if item.same(now, track.installed):
            return
        if self._snake and layer is not None and known.settled and not (known.spread or item.is_global):
            _refuse_snake(item.path)
        if item.is_generator and not item.is_global and any(index > micro_batch for index in track.own):
            (_refuse_snake if self._snake else _refuse_shared_generator)(item.path)
        if self._trial.runs and micro_batch > 0 and layer == PREFIX:
            known.resets |= item.same(now, track.own.get(0, track.base))
        track.own[micro_batch] = track.installed = now
        assert self.tracked.part is not None
        known.writers.add(self.tracked.part)
        if self.tracked.part > len(self._layers.layers) or layer == BETWEEN_CALLS:
            self._again.add(id(track))
        if len(known.writers) > 1 and not known.spread and not item.is_global:
            was_settled, known.spread, known.settled = known.settled, True, True
            if was_settled or any(index > micro_batch for index in track.begun):
                self.tracked.news.append(item.path)  # the step starts over at its end, so that it learns of all such items

    def _end(self, micro_batch: int) -> None:
        """A forward is over: what it has shown of items must be what others began with."""
        self._ended.add(micro_batch)
        if self.is_stocks:
            return
        for item, state in self.tracked.unused if self._learned.handled and not self._learns else ():
            if not item.same(item.capture(), state):
                raise StateMissed(item.path)
        news = self.tracked.news
        for track in self._tracks if not self._in_turn else ():
            known = track.known
            if id(track) in self._again and len(known.writers) > 1 and not (track.item.is_global or self._trial.runs):
                _refuse_across_calls(track, micro_batch)
            if micro_batch in track.own and not known.settled and not track.item.is_global:
                known.settled, was_spread = True, known.spread
                known.spread = len(known.writers) > 1
                if was_spread and not known.spread and any(index > micro_batch for index in track.own):
                    news.append(track.item.path)  # they should have gone on with what this forward has left
        is_last = len(self._ended) == len(self._seeds)
        if is_last and self._trial.runs:
            self._trial.drop_samples(self._tracks)
            raise StateMissed("")
        if is_last and self._learns:
            self._trial.prepare(self._tracks, self._in_turn)
        if self._learned.probes or (news and (is_last or not self._learns)):
            raise StateMissed(news[0] if news else "")

    def note_backward(self, micro_batch: int) -> None:
        """A part of a micro-batch's backward is over: what its hooks have written to known places is this micro-batch's.

        Raises StateMissed for an item of which it was not known that the backward writes it.
        """
        for track in self._tracks:
            item, known = track.item, track.known
            if self._in_turn or not isinstance(item, PlaceItem):
                continue
            now = item.capture(track.installed)
            if now is track.installed or item.same(now, track.installed):
                continue
            track.own[micro_batch] = track.installed = now
            known.backward = True
            if not known.spread:
                known.spread = known.settled = True
                raise StateMissed(item.path)

    # ---- a block's call

    def at_call(self, block: int, carriers: Sequence[object]) -> BlockState | None:
        """What a block finds as it is called; None where nothing of it ever changes.

        `carriers`: objects among its arguments, and in context variables, that it may write into.
        """
        if not self._learned.handled or not (self._learns or self._tracks or carriers):
            return None
        self.tracked.learn([block])  # what the code ahead of the call has changed is no doing of the block's
        tracks = [t for t in self._tracks if t.item.region in (OUTSIDE, block) or isinstance(t.item, PlaceItem)]
        if not carriers and not tracks and not self._learns:
            return None
        return BlockState(self.tracked, block, tracks, carriers, self._learned.copies)

    # ---- the end

    def finish(self) -> None:
        """End the step. Where it counts, or is over without an error, the modules hold what the last micro-batch has left,
        else what they held before. Twice is harmless."""
        self._flags.restore()
        if self.over or self.counts():
            self._conclude()
        else:
            self._undo()

    def _conclude(self) -> None:
        for track in self._tracks:
            if track.item.is_global:
                if any(seed is not None for seed in self._seeds):
                    track.install(track.base)
            elif not self._in_turn:
                track.install(track.final(self._learned.compares))
        self._learned.items = [known for known in self._learned.items if known.writers or not known.item.is_global]

    def _undo(self) -> None:
        if self._learned.handled:
            self.tracked.find(None, refuse=False)  # that of which there is no copy has been refused, or stays as it is
        for track in self._tracks:
            track.installed = None
            track.install(track.base)
        for item, state in self.tracked.unused:
            item.install(state)


def _unsure(tracks: Iterable[Track]) -> list[Known]:
    """In a step that learns: the items whose next version may be wrong, because no forward has shown yet whether code further
    on changes them, too."""
    places = [track.known for track in tracks if track.own and not track.item.is_generator]
    return [known for known in places if known.item.region == OUTSIDE and not (known.settled or known.spread)]


def _is_changed(track: Track) -> bool:
    """Of what one block alone is known to change: whether it has changed while another block is under way."""
    return isinstance(track.item, PlaceItem) and track.item.capture(track.installed) is not track.installed


def _regions_near(layers: LayerMap, layer: int | None) -> set[int] | None:
    """The regions whose state may change, or be read, while a forward goes through a layer and the glue before it; None: all,
    in the prefix and in the suffix."""
    if layer is None or layer < 0:
        return None
    blocks = layers.layers
    return {OUTSIDE, *blocks[layer], *blocks[max(layer - 1, 0)]}


def _refuse_across_calls(track: Track, micro_batch: int) -> None:
    """Raises LayerError where several calls of the model have changed an item, and have not put it back."""
    begun, own = track.begun.get(micro_batch, track.base), track.own.get(micro_batch)
    if own is None or track.item.same(begun, own) or (isinstance(track.item, PlaceItem) and equal_values(begun, own)):
        return
    raise LayerError(
        f"{track.item.path}: several calls of the model by one micro-batch's code change it; in stock's order the next"
        " micro-batch goes on with what the last of these calls has left, and in layer-major order its first call comes before"
        f" that: let each call leave it as it found it, {HORIZONTAL}"
    )


def _refuse_shared_generator(path: str) -> None:
    raise LayerError(
        f"{path}: several parts of the forward draw from this generator of random numbers; in layer-major order the next"
        " micro-batch starts before the last draw of this one, so its first number is unknown: give every block a generator of"
        " its own, use torch's default one,"
        f" {HORIZONTAL}"
    )


def _refuse_snake(path: str) -> None:
    raise LayerError(
        f"{path}: each micro-batch goes on with what the one before has left there, but vertical_schedule.snake runs the"
        ' micro-batches of every second layer last first: write "snake": false'
    )
