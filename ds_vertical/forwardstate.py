"""Let what modules hold belong to the micro-batch whose forward runs, though all forwards of a step share the modules.

[Note: versions] In stock's order micro-batch m begins with what the forward of m-1 has left, and only its own code changes
that until it ends. Here the forwards take turns. So whenever a forward goes on, each item of state that changes gets the
version that this forward has made; when the forward parks, what has changed becomes its version. Where it has made none yet,
there are two kinds of items. One that a single part of the forward changes (running statistics of a block) comes from the
nearest forward before it, which is through with that part: stock's order. One that several parts change (a list that each
block appends to) comes from before the step, as it does in stock's order if forwards leave it as they find it, or begin by
setting it. What each then adds to lists and numbers is added up in the end (`addedup`). Where they do not (a counter that all
blocks count up, and read), no order but stock's will do. Of a generator that is certain, and it is refused here; of other state
the self-check tells. Of what is not added up the modules hold the last micro-batch's afterwards.

[Note: learning] Which items change is learned in the first step, and again when modules, their modes or the form of the
micro-batches change: all state is compared with what it was before, behind every part of each forward. From then on only
those few are handled. An attribute of a module that is set for the first time later is noticed at once (`_Watch`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from greenlet import getcurrent
from torch import nn

from ds_vertical.blockstate import BlockState, Known, Track
from ds_vertical.changes import Changed
from ds_vertical.layers import LayerError, LayerMap
from ds_vertical.modulestate import (
    OUTSIDE,
    Change,
    GeneratorItem,
    Item,
    PlaceItem,
    Slot,
    Snapshot,
    TensorItem,
    deep,
    entry_of,
    global_generators,
    is_state,
    seeded_states,
    survey,
)
from ds_vertical.reachable import containers, owner_key
from ds_vertical.stubs import Coroutine

T = TypeVar("T")
_MOST_RUNS = 8  # of a step
SMALL_NUMEL = 1 << 16  # elements of a buffer that is copied in every step, lest it change for the first time
HORIZONTAL = 'or set vertical_schedule.order to "horizontal", which is exact'


class ForwardState:
    """Of one model: which state its forwards change. It outlives steps; `opened` handles it in one of them.

    `num_decided`: how many training steps have counted so far.
    """

    def __init__(self, model: nn.Module, layers: LayerMap, num_decided: Callable[[], int]) -> None:
        self._num_decided = num_decided
        self.model = model
        self._layers = layers
        self._known: set[Hashable] = set()
        self._modules: dict[int, str] = {}
        self.items: list[Known] = []
        self.handled = True  # switched off by tests of the self-check

    def forget(self) -> None:
        """Learn in the next step."""
        self._known.clear()

    @contextlib.contextmanager
    def opened(self, forms: Sequence[Hashable], seeds: Sequence[int | None], functions: Sequence[Any]) -> Iterator[StepState]:
        """The state of one schedule's forwards. `forms`: what tells the micro-batches' structures apart; `functions`: those of
        the user that the forwards call. After an error in a step that does not count everything is what it was before."""
        kind = _shape_of(self.model), tuple(getattr(each, "__code__", id(each)) for each in functions)
        wanted = {(kind, form) for form in forms} - self._known
        slots: list[Slot] = []
        if self.handled and wanted:
            self._modules = {id(module): path for path, module in self.model.named_modules()}
            slots = survey(self.model, [block.module for block in self._layers.blocks], functions)
        decided = self._num_decided()
        step = StepState(self, self._layers, slots, seeds)
        with _Watch(step, self._modules).watching(), Changed(lambda: step.finish(self._num_decided() != decided)):
            yield step
            step.over = True
        self._known.update(wanted)


class StateMissed(LayerError):
    """State has changed in another way than was known of it. What is known now is right: the step is to be run again."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} has changed during the forward in a way that could not be foreseen; keep what changes in the blocks, or in"
            f" the model's forward, {HORIZONTAL}"
        )


def until_known(run: Callable[[], T], forget: Callable[[], None], say: Callable[[str], None] = lambda _: None) -> T:
    """What a step returns. It is run again where state has changed in an unknown way, as long as each run learns more of it."""
    for _ in range(_MOST_RUNS - 1):
        try:
            return run()
        except StateMissed as missed:  # nothing of the step counts
            say(f"this step is run again: {missed}")
            forget()
    return run()


class StepState:
    """The items of state in one step, or evaluation, and which micro-batch's versions the modules hold."""

    def __init__(self, owner: ForwardState, layers: LayerMap, slots: Sequence[Slot], seeds: Sequence[int | None]) -> None:
        self._owner = owner
        self._layers = layers
        self._snapshot = Snapshot(slots) if slots else None
        self._seeds = seeds
        self._written: set[int] = set()  # tracks of which an attribute was set, since they were looked at
        self._ended: set[int] = set()
        self._layer: int | None = None
        self.over = False
        self.tracks: list[Track] = []
        self._by_key: dict[Hashable, Track] = {}
        for known in owner.items:
            self._add(known, known.item.capture())
        # used at all? each micro-batch's numbers begin with the seed, so this has to be known ahead of the first one
        self._unused = [(item, item.capture()) for item in global_generators() if key_of_item(item) not in self._by_key]
        for item, state in self._unused if slots else ():
            self.note(Change(item, state))
        kept = {id(track.item.tensor) for track in self.tracks if isinstance(track.item, TensorItem)}
        others = (buffer for buffer in owner.model.buffers() if buffer.numel() <= SMALL_NUMEL and id(buffer) not in kept)
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in others]

    # ---- which items there are

    def _add(self, known: Known, base: Any) -> Track:
        item, track = known.item, Track(known, base, base, self._ended)
        self.tracks.append(track)
        self._by_key[key_of_item(item)] = track
        if item.is_global:
            index = GLOBAL_PATHS.index(item.path)
            for micro_batch, seed in enumerate(self._seeds):
                track.own[micro_batch] = base if seed is None else seeded_states(seed)[index]
        return track

    def learn(self, regions: Iterable[int] | None) -> list[Track]:
        """Find what has changed in these regions (None: all) that nobody knew of."""
        if self._snapshot is None:
            return []
        changes = [change for change in self._snapshot.changes(regions) if key_of_item(change.item) not in self._by_key]
        return [self.note(change) for change in changes]

    def note(self, change: Change) -> Track:
        """An item has changed for the first time, or is about to; what it was holds for all forwards."""
        known = self._by_key.get(key_of_item(change.item))
        if known is not None:
            return known
        in_layer = self._layer is not None and self._layer >= 0
        found = Known(change.item, spread=change.item.region == OUTSIDE and in_layer)  # until a whole forward has shown it
        self._owner.items.append(found)
        return self._add(found, change.before)

    def note_attribute(self, owner: dict[str, Any], name: str, path: str, region: int) -> None:
        """An attribute, or a buffer, of a module is about to be set."""
        place = entry_of(owner, name)
        known = self._by_key.get(place.owner)
        if known is None:
            known = self.note(Change(PlaceItem(path, region, place), deep(place, path)))
        self._written.add(id(known))

    # ---- whose turn it is

    def _near(self, layer: int | None) -> set[int] | None:
        """The regions whose state may change, or be read, while a forward goes through a layer and the glue before it; None:
        all, in the suffix."""
        if layer is None:
            return None
        layers = self._layers.layers
        return {OUTSIDE, *layers[max(layer, 0)], *layers[max(layer - 1, 0)]}

    def enter(self, micro_batch: int, layer: int | None) -> None:
        """The forward of a micro-batch goes on: through a layer (below 0: the prefix; None: the suffix). Or its backward."""
        self._layer = layer
        near = self._near(layer)
        for track in self.tracks:
            if near is None or track.item.region in near or isinstance(track.item, PlaceItem):
                track.install(track.version(micro_batch))

    def leave(self, micro_batch: int, layer: int | None) -> None:
        """The forward parks, or has ended."""
        near = self._near(layer)
        found = self.learn(near)
        written, self._written = self._written, set()
        for track in self.tracks:
            if near is None or track.item.region in near or id(track) in written:
                self._look(track, micro_batch, layer)
        if layer is None:
            self._end(micro_batch, found)

    def _look(self, track: Track, micro_batch: int, layer: int | None) -> None:
        now, item, known = track.item.capture(), track.item, track.known
        if item.same(now, track.installed):
            return
        if item.is_generator and not item.is_global and any(index > micro_batch for index in track.own):
            _refuse_shared_generator(item.path)
        track.own[micro_batch] = track.installed = now
        known.writers.add(len(self._layers.layers) if layer is None else layer)
        if len(known.writers) > 1 and not known.spread and not item.is_global:
            known.spread = known.settled = True
            self._unless_others_began(track, micro_batch)

    def _end(self, micro_batch: int, found: Sequence[Track]) -> None:
        """A forward is over: what it has shown of items must be what others began with."""
        self._ended.add(micro_batch)
        for item, state in self._unused if self._snapshot is None else ():
            if not item.same(item.capture(), state):
                raise StateMissed(item.path)
        for track in found:
            if track.item.region != OUTSIDE:
                track.item.region = OUTSIDE  # something else than its block has changed it
                raise StateMissed(track.item.path)
        for track in self.tracks:
            known = track.known
            if micro_batch in track.own and not known.settled and not track.item.is_global:
                known.settled, was_spread = True, known.spread
                known.spread = len(known.writers) > 1
                if was_spread and not known.spread and any(index > micro_batch for index in track.own):
                    raise StateMissed(track.item.path)  # they should have gone on with what this forward has left

    def _unless_others_began(self, track: Track, micro_batch: int) -> None:
        if any(index > micro_batch for index in track.begun):
            raise StateMissed(track.item.path)

    # ---- a block's call

    def at_call(self, block: int, carriers: Sequence[Any]) -> BlockState | None:
        """What a block finds as it is called; None where nothing of it ever changes. `carriers`: objects among its arguments
        that it may write into."""
        if not self._owner.handled:
            return None
        self.learn([block])  # what the code ahead of the call has changed is no doing of the block's
        found = containers(carriers, given=True) if carriers else []
        tracks = [track for track in self.tracks if track.item.region in (OUTSIDE, block)]
        if not found and not tracks and self._snapshot is None:
            return None
        return BlockState(self, block, tracks, found)

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
            track.install(track.base if track.item.is_global else track.final(len(self._seeds)))
        self._owner.items = [known for known in self._owner.items if known.writers or not known.item.is_global]

    def _undo(self) -> None:
        self.learn(None)
        for buffer, before in self._buffers:
            buffer.data.copy_(before)
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
        return "tensor", id(item.tensor)
    assert isinstance(item, GeneratorItem)
    return "generator", item.key


GLOBAL_PATHS = [item.path for item in global_generators()]


def _refuse_shared_generator(path: str) -> None:
    raise LayerError(
        f"{path}: a generator of random numbers that several parts of the forward draw from; layer-major order cannot know"
        " where the next micro-batch's numbers begin: give every block a generator of its own, use torch's default one,"
        f" {HORIZONTAL}"
    )


class _Watch:
    """Tells a step of every attribute that a forward sets on a module of the model, ahead of it."""

    def __init__(self, step: StepState, modules: dict[int, str]) -> None:
        self._step = step
        self._modules = modules
        layers = step._layers
        self._regions = {id(each): index for index, block in enumerate(layers.blocks) for each in block.module.modules()}
        self._set, self._delete = nn.Module.__setattr__, nn.Module.__delattr__

    def watching(self) -> Changed:
        """Within the block modules tell."""
        return Changed(self._put_back, self._take_over)

    def _take_over(self) -> None:
        setter, deleter = self._set, self._delete

        def set_attribute(module: nn.Module, name: str, value: Any) -> None:
            self._note(module, name)
            setter(module, name, value)

        def delete_attribute(module: nn.Module, name: str) -> None:
            self._note(module, name)
            deleter(module, name)

        if self._modules:
            nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign,assignment]
            nn.Module.__delattr__ = delete_attribute  # type: ignore[method-assign]

    def _put_back(self) -> None:
        nn.Module.__setattr__ = self._set  # type: ignore[method-assign]
        nn.Module.__delattr__ = self._delete  # type: ignore[method-assign]

    def _note(self, module: nn.Module, name: str) -> None:
        path = self._modules.get(id(module))
        if path is None or not is_state(name) or not isinstance(getcurrent(), Coroutine):
            return
        own = vars(module)
        if name in own["_parameters"] or name in own["_modules"]:
            return
        owner = own["_buffers"] if name in own["_buffers"] else own
        where = f"{path}.{name}" if path else name
        self._step.note_attribute(owner, name, where, self._regions.get(id(module), OUTSIDE))


def _shape_of(model: nn.Module) -> Hashable:
    """Changes with the modules of a model, their modes, their hooks and the number of their attributes."""
    total = 0
    for module in model.modules():
        own = vars(module)
        hooks = len(own["_forward_hooks"]), len(own["_forward_pre_hooks"])
        total = hash((total, id(module), len(own), len(own["_buffers"]), hooks, own["training"]))
    return total
