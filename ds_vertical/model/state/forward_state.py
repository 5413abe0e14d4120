"""Let what modules hold belong to the micro-batch whose forward runs, though all forwards of a step share the modules.

[Note: versions] In stock's order micro-batch m begins with what the forward of m-1 has left, and only its own code changes
that until it ends. Here the forwards take turns. So whenever a forward goes on, each item of state that changes gets the
version that this forward has made; when the forward parks, what has changed becomes its version. Where it has made none yet,
there are two kinds of items. One that a single part of the forward changes (running statistics of a block) comes from the
nearest forward before it, which is through with that part: stock's order. One that several parts change (a list that each
block appends to) comes from before the step, as it does in stock's order if forwards leave it as they find it, or begin by
setting it. What each then adds to lists and numbers is added up in the end (`accumulated`). Where they do not (a counter that
all blocks count up, and read), no order but stock's will do. Of a generator that is certain, and it is refused here; of other
state the self-check tells. Of what is not added up the modules hold the last micro-batch's afterwards.

[Note: learning] Which items change is learned in the first step, and again when modules, their modes or the form of the
micro-batches change: all state is compared with what it was before, behind every part of each forward. From then on only
those few are handled. Every later step still compares all state behind each prefix, at the end of the first and the last
forward, and where something fails. What has changed and was not known makes the step start over, with that known
(`until_known`): state put back, nothing stepped. So a step counts only if all that was seen to change was known when it began.

[Note: resets] Where the prefix empties a list that a block fills, nothing changes as long as all forwards begin with an empty
one. So a step that has learned of an item starts over with that item filled, as the forward before would have left it. Whoever
changes it then is one of those that change it. What this run computes is thrown away.

[Note: one after the other] With a single micro-batch, or in stock's order ("horizontal"), each forward is over before the next
one begins. Then modules hold what they hold, and only the recompute of a block needs to know what the block found.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from torch import nn

from ds_vertical.errors import LayerError
from ds_vertical.interrupts import Changed
from ds_vertical.model.layers import LayerMap
from ds_vertical.model.state.attribute_watch import AttributeWatch
from ds_vertical.model.state.block_state import BlockState, Known, Track
from ds_vertical.model.state.containers import containers, owner_key
from ds_vertical.model.state.module_state import (
    GeneratorItem,
    Item,
    PlaceItem,
    TensorItem,
    deep,
    global_generators,
    seeded_states,
)
from ds_vertical.model.state.restart import HORIZONTAL, StateMissed
from ds_vertical.model.state.snapshot import Snapshot, StateChange, refuse_large, without_collection
from ds_vertical.model.state.survey import OUTSIDE, entry_of, survey

_MAY_BE_STATES = (
    RuntimeError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    AssertionError,
    ZeroDivisionError,
)  # what wrong state may end in


class ForwardState:
    """Of one model: which state its forwards change. It outlives steps; `opened` handles it in one of them.

    `num_decided`: how many training steps have counted so far. `in_turn`: each forward and its backward are over before the
    next one begins. `snake`: in training every second layer takes the micro-batches last first. `copies`: tensors that state
    holds are written in place, so that what a block finds is copied.
    """

    def __init__(
        self, model: nn.Module, layers: LayerMap, num_decided: Callable[[], int], in_turn: bool = False, snake: bool = False
    ) -> None:
        self._num_decided = num_decided
        self.model = model
        self._layers = layers
        self.in_turn = in_turn
        self.snake = snake
        self._known: set[Hashable] = set()
        self.items: list[Known] = []
        self.copies = False
        self.probes = False  # the next run is only to see who changes what: see [Note: resets]
        self.compares = False  # the self-check wants to know what items hold if nothing is added up
        self.handled = True  # switched off by tests of the self-check

    def forget(self) -> None:
        """Learn in the next step."""
        self._known.clear()

    @contextlib.contextmanager
    def opened(
        self, forms: Sequence[Hashable], seeds: Sequence[int | None], functions: Sequence[Any], training: bool = True
    ) -> Iterator[StepState]:
        """The state of one schedule's forwards. `forms`: what tells the micro-batches' structures apart; `functions`: those of
        the user that the forwards call. After an error in a step that does not count everything is what it was before."""
        kind = _shape_of(self.model), tuple(getattr(each, "__code__", id(each)) for each in functions)
        wanted = {(kind, form) for form in forms} - self._known
        blocks = [block.module for block in self._layers.blocks]
        with without_collection():
            slots, names = survey(self.model, blocks, functions) if self.handled else ([], [])
            snapshot = Snapshot(slots, names, closely=bool(wanted))
        self._keep(snapshot)
        decided = self._num_decided()
        step = StepState(self, self._layers, snapshot, bool(wanted) and self.handled, seeds, self.snake and training)
        modules = {id(module): path for path, module in self.model.named_modules()} if self.handled else {}
        with (
            AttributeWatch(step, modules, self._layers).watching(),
            Changed(lambda: step.finish(self._num_decided() != decided)),
        ):
            try:
                yield step
            except (*_MAY_BE_STATES, LayerError) as error:
                if self._num_decided() == decided and not isinstance(error, StateMissed):
                    step.blame_state(error)
                raise
            step.over = True
        self._known.update(wanted)

    def _keep(self, snapshot: Snapshot) -> None:
        """Drop the items of what the user has replaced since; what stands in its place is known as that was."""
        if not self.items:
            return
        dicts = snapshot.owners
        there: dict[Hashable, Item] = {}
        for item in snapshot.items():
            there.setdefault(key_of_item(item), item)
        gone = [known for known in self.items if not _is_there(known.item, there, dicts)]
        if not gone or not self.handled:
            return
        by_path = {known.item.path: known for known in gone}
        self.items = [known for known in self.items if known not in gone]
        held = {key_of_item(known.item) for known in self.items}
        for key, item in there.items():
            old = by_path.get(item.path)
            if old is not None and key not in held and type(item) is type(old.item):
                item.region = old.item.region
                self.items.append(replace(old, item=item, writers=set(old.writers)))


def _is_there(item: Item, there: Mapping[Hashable, Item], dicts: Collection[int]) -> bool:
    key = key_of_item(item)
    is_name = isinstance(key, tuple) and (key[0] in dicts or isinstance(key[0], type))  # it may not stand for anything now
    return item.is_global or key in there or is_name


class StepState:
    """The items of state in one step, or evaluation, and which micro-batch's versions the modules hold."""

    def __init__(
        self,
        owner: ForwardState,
        layers: LayerMap,
        snapshot: Snapshot,
        learns: bool,
        seeds: Sequence[int | None],
        snake: bool,
    ) -> None:
        self._owner = owner
        self._layers = layers
        self._snapshot = snapshot
        self._learns = learns
        self._seeds = seeds
        self._in_turn = owner.in_turn or len(seeds) == 1
        self._snake = snake and not self._in_turn
        self._written: set[int] = set()  # tracks of which an attribute was set, since they were looked at
        self._ended: set[int] = set()
        self._layer: int | None = None
        self._news: list[str] = []  # paths of what nobody knew of as this step began
        self.over = False
        self.tracks: list[Track] = []
        self._by_key: dict[Hashable, Track] = {}
        for known in owner.items:
            self._add(known, known.item.capture())
        # used at all? each micro-batch's numbers begin with the seed, so this has to be known ahead of the first one
        self._unused = [(item, item.capture()) for item in global_generators() if key_of_item(item) not in self._by_key]
        for item, state in self._unused if learns else ():
            self._note(StateChange(item, state))
        self._probes, owner.probes = owner.probes and learns and not self._in_turn, False
        self.outer_context = {id(value) for value in contextvars.copy_context().values()}  # which the survey has seen
        self._params = list(owner.model.parameters())
        self._flags = [param.requires_grad for param in self._params]

    # ---- which items there are

    def _add(self, known: Known, base: Any) -> Track:
        item, track = known.item, Track(known, base, base)
        self.tracks.append(track)
        self._by_key[key_of_item(item)] = track
        if item.is_global:
            index = GLOBAL_PATHS.index(item.path)
            for micro_batch, seed in enumerate(self._seeds):
                track.own[micro_batch] = base if seed is None else seeded_states(seed)[index]
        return track

    def learn(self, regions: Iterable[int] | None) -> list[Track]:
        """Find what has changed in these regions (None: all) that nobody knew of."""
        return self._find(regions) if self._learns else []

    def _find(self, regions: Iterable[int] | None) -> list[Track]:
        changes = [change for change in self._snapshot.changes(regions) if key_of_item(change.item) not in self._by_key]
        self._news += [change.item.path for change in changes]
        return [self._note(change) for change in changes]

    def _note(self, change: StateChange) -> Track:
        """An item has changed for the first time, or is about to; what it was holds for all forwards."""
        known = self._by_key.get(key_of_item(change.item))
        if known is not None:
            return known
        if change.before is None:
            refuse_large(change.item)
        in_layer = self._layer is not None and self._layer >= 0
        found = Known(change.item, spread=change.item.region == OUTSIDE and in_layer)  # until a whole forward has shown it
        self._owner.items.append(found)
        return self._add(found, change.before)

    def blame_state(self, error: Exception) -> None:
        """Raise StateMissed where something has failed and state has changed that nobody knew of: it may be why."""
        self._find(None)
        if self._probes:
            self._drop_samples()
            raise StateMissed("") from error
        if self._news:
            raise StateMissed(self._news[0]) from error

    def note_attribute(self, owner: dict[str, Any], name: str, path: str, region: int) -> None:
        """An attribute, or a buffer, of a module is about to be set."""
        place = entry_of(owner, name)
        known = self._by_key.get(place.owner)
        if known is None:
            self._news.append(path)
            known = self._note(StateChange(PlaceItem(path, region, place), deep(place, path)))
        self._written.add(id(known))

    # ---- whose turn it is

    def _near(self, layer: int | None) -> set[int] | None:
        """The regions whose state may change, or be read, while a forward goes through a layer and the glue before it; None:
        all, in the prefix and in the suffix."""
        if layer is None or layer < 0:
            return None
        layers = self._layers.layers
        return {OUTSIDE, *layers[layer], *layers[max(layer - 1, 0)]}

    def enter(self, micro_batch: int, layer: int | None) -> None:
        """The forward of a micro-batch goes on: through a layer (below 0: the prefix; None: the suffix). Or its backward."""
        self._layer = layer
        if not self.tracks:
            return
        near = self._near(layer)
        for track in self.tracks:
            if self._in_turn:
                if track.item.is_global and layer is not None and layer < 0 and self._seeds[micro_batch] is not None:
                    track.install(track.own[micro_batch])
            elif near is None or track.item.region in near or isinstance(track.item, PlaceItem):
                sample = self._sampled(track, micro_batch, layer)
                track.install(track.version(micro_batch) if sample is None else sample)

    def _sampled(self, track: Track, micro_batch: int, layer: int | None) -> Any:
        """What the prefix of a later micro-batch begins with where this run is to show whether it resets it."""
        wanted = self._probes and micro_batch > 0 and layer is not None and layer < 0 and micro_batch not in track.own
        return track.known.sample if wanted else None

    def leave(self, micro_batch: int, layer: int | None) -> None:
        """The forward parks, or has ended."""
        near = self._near(layer)
        if self._learns or layer is None or layer < 0:
            self._refuse_thawed()
        is_outermost = len(self._ended) in (0, len(self._seeds) - 1)  # the first forward, and the last one
        looks = self._learns or (near is None and (layer is not None or is_outermost))
        found = self._find(None) if self._owner.handled and looks else []
        if found and not self._learns:
            raise StateMissed(found[0].item.path)  # which part has changed it the next run shows
        if self.tracks:
            self._look_at_tracks(found, near, micro_batch, layer)
        if layer is None:
            self._end(micro_batch)

    def _look_at_tracks(self, found: Sequence[Track], near: set[int] | None, micro_batch: int, layer: int | None) -> None:
        """What has changed of the known items since the forward went on, and of those just found."""
        far = [track for track in self.tracks if near is not None and track.item.region not in near and self._is_changed(track)]
        for track in (*found, *far):
            if near is not None and track.item.region not in near:
                track.item.region = OUTSIDE  # something else than its block has changed it
        self._news += [track.item.path for track in far]
        written, self._written = self._written, set()
        for track in self.tracks:
            if self._in_turn:
                self._look_in_turn(track, layer)
            elif near is None or id(track) in written or (track.item.region in near and not self.is_quiet(track)):
                self._look(track, micro_batch, layer)

    def _is_changed(self, track: Track) -> bool:
        """Of what one block alone is known to change, while another one is under way."""
        item = track.item
        return not self._in_turn and isinstance(item, PlaceItem) and item.capture(track.installed) is not track.installed

    def is_quiet(self, track: Track) -> bool:
        """Whether no code of the layer under way, and of the glue ahead of it, is known to change the item. Who does so for the
        first time is found at the end of the forward."""
        known = track.known
        learned = known.settled and not self._learns and not self._in_turn and isinstance(track.item, PlaceItem)
        return learned and self._layer is not None and self._layer >= 0 and self._layer not in known.writers

    def _look_in_turn(self, track: Track, layer: int | None) -> None:
        """Of Python's and NumPy's generators: whether this forward has used them."""
        if layer is None and track.item.is_global and not track.item.same(track.item.capture(), track.installed):
            track.known.writers.add(0)

    def _look(self, track: Track, micro_batch: int, layer: int | None) -> None:
        item, known = track.item, track.known
        now = item.capture(track.installed)
        if item.same(now, track.installed):
            return
        if self._snake and layer is not None and known.settled and not (known.spread or item.is_global):
            _refuse_snake(item.path)
        if item.is_generator and not item.is_global and any(index > micro_batch for index in track.own):
            (_refuse_snake if self._snake else _refuse_shared_generator)(item.path)
        if self._probes and micro_batch > 0 and layer is not None and layer < 0:
            known.resets |= item.same(now, track.own.get(0, track.base))
        track.own[micro_batch] = track.installed = now
        known.writers.add(len(self._layers.layers) if layer is None else layer)
        if len(known.writers) > 1 and not known.spread and not item.is_global:
            known.spread = known.settled = True
            self._unless_others_began(track, micro_batch)

    def _end(self, micro_batch: int) -> None:
        """A forward is over: what it has shown of items must be what others began with."""
        self._ended.add(micro_batch)
        for item, state in self._unused if not self._learns else ():
            if not item.same(item.capture(), state):
                raise StateMissed(item.path)
        for track in self.tracks if not self._in_turn else ():
            known = track.known
            if micro_batch in track.own and not known.settled and not track.item.is_global:
                known.settled, was_spread = True, known.spread
                known.spread = len(known.writers) > 1
                if was_spread and not known.spread and any(index > micro_batch for index in track.own):
                    self._news.append(track.item.path)  # they should have gone on with what this forward has left
        is_last = len(self._ended) == len(self._seeds)
        if is_last and self._probes:
            self._drop_samples()
            raise StateMissed("")
        if is_last and self._learns:
            self._prepare_trial()
        if self._owner.probes or (self._news and (is_last or not self._learns)):
            raise StateMissed(self._news[0] if self._news else "")

    def _drop_samples(self) -> None:
        for track in self.tracks:
            track.known.sample = None

    def _prepare_trial(self) -> None:
        """See [Note: resets]: once for each item."""
        for track in self.tracks:
            known = track.known
            is_new = not (known.tried or track.item.is_generator or self._in_turn)
            known.sample = track.own.get(0) if is_new else None
            if known.sample is not None:
                known.tried = self._owner.probes = True

    def _refuse_thawed(self) -> None:
        if [param.requires_grad for param in self._params] == self._flags:
            return
        for (name, param), before in zip(self._owner.model.named_parameters(), self._flags, strict=True):
            if param.requires_grad != before:
                raise LayerError(
                    f"the forward has set requires_grad of {name} to {param.requires_grad}; blocks run once more in the"
                    " backward, with what is set then: set it before ds_vertical.initialize, and detach what is to get no"
                    " gradient"
                )

    def _unless_others_began(self, track: Track, micro_batch: int) -> None:
        """The step starts over at its end, so that it learns of all such items at once."""
        if any(index > micro_batch for index in track.begun):
            self._news.append(track.item.path)

    def note_backward(self, micro_batch: int) -> None:
        """A part of its backward is over: what its hooks have written to known places is this micro-batch's."""
        for track in self.tracks:
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

    def at_call(self, block: int, carriers: Sequence[Any]) -> BlockState | None:
        """What a block finds as it is called; None where nothing of it ever changes. `carriers`: objects among its arguments
        that it may write into."""
        if not self._owner.handled or not (self._learns or self.tracks or carriers):
            return None
        self.learn([block])  # what the code ahead of the call has changed is no doing of the block's
        found = containers(carriers, given=True) if carriers else []
        tracks = [t for t in self.tracks if t.item.region in (OUTSIDE, block) or isinstance(t.item, PlaceItem)]
        if not found and not tracks and not self._learns:
            return None
        return BlockState(self, block, tracks, found, self._owner.copies)

    def copy_from_now_on(self, path: str) -> NoReturn:
        """Raise StateMissed: a tensor that a block found in state was written in place afterwards."""
        self._owner.copies = True
        raise StateMissed(path)

    # ---- the end

    def finish(self, counts: bool) -> None:
        """The step has ended. Where it `counts`, or is over without an error, the modules hold what the last micro-batch has
        left, else what they held before. Twice is harmless."""
        if self.over or counts:
            self._conclude()
        else:
            self._undo()

    def _conclude(self) -> None:
        for track in self.tracks:
            if track.item.is_global:
                if any(seed is not None for seed in self._seeds):
                    track.install(track.base)
            elif not self._in_turn:
                track.install(track.final(self._owner.compares))
        self._owner.items = [known for known in self._owner.items if known.writers or not known.item.is_global]

    def _undo(self) -> None:
        if self._owner.handled:
            self._find(None)
        for track in self.tracks:
            track.installed = None
            track.install(track.base)
        for item, state in self._unused:
            item.install(state)


def key_of_item(item: Item) -> Hashable:
    """Tells an item from others while what it stands for lives."""
    if isinstance(item, PlaceItem):
        return owner_key(item.place)
    if isinstance(item, TensorItem):
        return "tensor", id(item.owner)
    assert isinstance(item, GeneratorItem)
    return "generator", item.key


GLOBAL_PATHS = [item.path for item in global_generators()]


def _refuse_shared_generator(path: str) -> None:
    raise LayerError(
        f"{path}: a generator of random numbers that several parts of the forward draw from; layer-major order cannot know"
        " where the next micro-batch's numbers begin: give every block a generator of its own, use torch's default one,"
        f" {HORIZONTAL}"
    )


def _refuse_snake(path: str) -> None:
    raise LayerError(
        f"{path}: what one micro-batch leaves there the next one finds, and vertical_schedule.snake runs every second layer's"
        ' micro-batches last first: write "snake": false'
    )


def _shape_of(model: nn.Module) -> Hashable:
    """Changes with the modules of a model, their modes, their hooks and the number of their attributes."""
    total = 0
    for module in model.modules():
        own = vars(module)
        hooks = len(own["_forward_hooks"]), len(own["_forward_pre_hooks"])
        total = hash((total, id(module), len(own), len(own["_buffers"]), hooks, own["training"]))
    return total
