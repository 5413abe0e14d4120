"""The items of state that change, with their versions in the step that runs, and the search for further ones.

An item is one piece of state: a place and what stands there, the elements of a tensor, a generator (`module_state`). `Known` is
what the steps so far have shown of an item. `Track` is the item in one step. `TrackedState` has all tracks of that step.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from ds_vertical.model.state.accumulated import sum_of_tensors, sum_up
from ds_vertical.model.state.module_state import Item, PlaceItem, Version, deep, global_generators, key_of_item, seeded_states
from ds_vertical.model.state.restart import StateMissed
from ds_vertical.model.state.snapshot import Snapshot, StateChange, refuse_large
from ds_vertical.model.state.survey import OUTSIDE, entry_of

PREFIX = -1  # the number that stands for the prefix where a layer's is expected
BETWEEN_CALLS = -2  # what lies between the last layer in one call of the model and the first one in the next call
GLOBAL_PATHS = [item.path for item in global_generators()]


def part_of_forward(layer: int | None, call: int, num_layers: int) -> int:
    """The number of a part of the forward, as `Known.writers` has it: of the layer that it goes through (None: the suffix) in
    one of the micro-batch's calls of the model."""
    if layer is None:
        return num_layers
    return layer + call * (num_layers + 1) if layer >= 0 else layer


@dataclass(eq=False)
class Known:
    """What the steps so far have shown of an item that changes.

    `writers`: the parts of the forward that change it, by the layers that they go through (PREFIX, BETWEEN_CALLS; the number of
    layers: the suffix; in a further call of the model the numbers go on from there). `spread`: these are several. `settled`: a
    whole forward has shown it. `adds_up`: after a step the item may hold what all forwards have added to it. `replaced`: what
    the last forward has left, where the item holds such a sum instead. `sample`: what a forward has left in it, for the run
    that shows whether the prefix of the next forward resets it. `tried`: there has been such a run. `resets`: the prefix does.
    `backward`: hooks of the backward write there, too.
    """

    item: Item
    spread: bool = False
    settled: bool = False
    adds_up: bool = True
    replaced: Version = None
    sample: Version = None
    tried: bool = False
    resets: bool = False
    backward: bool = False
    writers: set[int] = field(default_factory=set)


@dataclass(eq=False)
class LearnedState:
    """What is known of one model's state. It outlives steps.

    `copies`: forwards write in place to tensors that blocks find in state, so each call keeps copies of these. `probes`: the
    next run of the step only shows which code changes what, and does not count: see `forward_state`, [Note: resets].
    `reached`: the blocks whose tensors other blocks may read, so that each part of a forward finds its micro-batch's.
    `compares`: the self-check wants to know what items would hold if nothing were added up. `handled`: tests of the self-check
    switch the handling of state off.
    """

    items: list[Known] = field(default_factory=list)
    copies: bool = False
    probes: bool = False
    compares: bool = False
    reached: set[int] = field(default_factory=set)
    handled: bool = True


@dataclass(eq=False)
class Track:
    """An item in the step that runs: its version before the step (`base`), the one that it holds now (`installed`), and `own`,
    the one that each micro-batch's forward has made, by the micro-batch's number.

    `begun`: the versions that micro-batches without one of their own have gone on with.
    """

    known: Known
    base: Version
    installed: Version
    own: dict[int, Version] = field(default_factory=dict)
    begun: dict[int, Version] = field(default_factory=dict)

    @property
    def item(self) -> Item:
        """The item of which these are the versions."""
        return self.known.item

    def version(self, micro_batch: int) -> Version:
        """The version with which a micro-batch's forward goes on: see `forward_state`, [Note: versions]."""
        if micro_batch in self.own:
            return self.own[micro_batch]
        if not (self.known.spread and micro_batch in self.begun):
            before = [] if self.known.spread else [index for index in self.own if index < micro_batch]
            self.begun[micro_batch] = self.own[max(before)] if before else self.base
        return self.begun[micro_batch]

    def final(self, compares: bool) -> Version:
        """What the item holds after the step. `compares`: the last version is kept, too, as `Known.replaced`."""
        last, known = self.own[max(self.own)] if self.own else self.base, self.known
        known.replaced = None
        is_place = isinstance(self.item, PlaceItem)
        if (
            known.spread
            and len(self.own) > 1
            and known.adds_up
            and not (self.item.is_generator or (known.resets and not is_place))
        ):
            own = [self.own[index] for index in sorted(self.own)]
            added: Version = sum_up(self.base, own) if is_place else sum_of_tensors(self.base, own)
            if not self.item.same(added, last):
                known.replaced = last if compares else None
                return added
        return last

    def install(self, version: Version) -> None:
        """Let the item hold a version, unless it does so already."""
        if version is not self.installed:
            self.item.install(version)
            self.installed = version


class TrackedState:
    """The tracks of one step: those of the items that were known as it began, and those that are found while it runs.

    `learns`: state is searched behind every part of each forward. `in_turn`: each forward is over before the next one begins.
    `seeds`: of each micro-batch's random numbers, None where the caller's streams go through all of them. `layer`: the layer
    that the forward under way goes through (below 0: the prefix; None: the suffix, or none is under way). `part`: that layer as
    `Known.writers` has it. `news`: paths of what
    no earlier run knew of. `written`: ids of the tracks of which an attribute was set since `StepState` last looked at them.
    `unused`: Python's and NumPy's generators that no forward is known to draw from, with their states before the step.
    """

    def __init__(
        self, learned: LearnedState, snapshot: Snapshot, learns: bool, seeds: Sequence[int | None], in_turn: bool
    ) -> None:
        self.learns = learns
        self.in_turn = in_turn
        self.layer: int | None = None
        self.part: int | None = None
        self.news: list[str] = []
        self.written: set[int] = set()
        self.tracks: list[Track] = []
        self._learned = learned
        self._snapshot = snapshot
        self._seeds = seeds
        self._by_key: dict[Hashable, Track] = {}
        for known in learned.items:
            self._add(known, known.item.capture())
        # used at all? each micro-batch's numbers begin with the seed, so this has to be known ahead of the first one
        self.unused = [(item, item.capture()) for item in global_generators() if key_of_item(item) not in self._by_key]
        for item, state in self.unused if learns else ():
            self._note(StateChange(item, state))

    def _add(self, known: Known, base: Version) -> Track:
        item, track = known.item, Track(known, base, base)
        self.tracks.append(track)
        self._by_key[key_of_item(item)] = track
        if item.is_global:
            index = GLOBAL_PATHS.index(item.path)
            for micro_batch, seed in enumerate(self._seeds):
                track.own[micro_batch] = base if seed is None else seeded_states(seed)[index]
        return track

    @property
    def follows_state(self) -> bool:
        """Whether any state is known to change, or is searched."""
        return self.learns or bool(self.tracks)

    def learn(self, regions: Iterable[int] | None) -> list[Track]:
        """In a step that learns: find what has changed in these regions (None: all) and has no track. Returns the new
        tracks."""
        return self.find(regions) if self.learns else []

    def find(
        self, regions: Iterable[int] | None, *, refuse: bool = True, whole: bool = False, waits: bool = True
    ) -> list[Track]:
        """Compare these regions (None: all) with the snapshot taken before the step. Returns a new track for each item that has
        changed and had none. `whole`, `waits`: see `Snapshot.changes`.

        Raises LayerError for a tensor that is too large to be kept for each micro-batch; without `refuse` it is left out.
        """
        found = self._snapshot.changes(regions, whole, waits)
        changes = [change for change in found if key_of_item(change.item) not in self._by_key]
        changes = [change for change in changes if refuse or change.before is not None]
        self.news += [change.item.path for change in changes]
        return [self._note(change) for change in changes]

    def _note(self, change: StateChange) -> Track:
        """An item has changed for the first time, or is about to; what it was holds for all forwards."""
        known = self._by_key.get(key_of_item(change.item))
        if known is not None:
            return known
        if change.before is None:
            refuse_large(change.item)
        in_layer = self.layer is not None and self.layer >= 0
        found = Known(change.item, spread=change.item.region == OUTSIDE and in_layer)  # until a whole forward has shown it
        self._learned.items.append(found)
        return self._add(found, change.before)

    def note_attribute(self, owner: dict[str, object], name: str, path: str, region: int) -> None:
        """Note that the forward under way is about to set an attribute, or a buffer, of a module: the entry `name` of
        `owner`."""
        place = entry_of(owner, name)
        known = self._by_key.get(place.owner)
        if known is None:
            self.news.append(path)
            known = self._note(StateChange(PlaceItem(path, region, place), deep(place, path)))
        self.written.add(id(known))

    def is_quiet(self, track: Track) -> bool:
        """Whether no code of the layer under way, and of the glue ahead of it, is known to change the item. Code that does so
        for the first time is found at the end of the forward."""
        known = track.known
        learned = known.settled and not self.learns and not self.in_turn and isinstance(track.item, PlaceItem)
        return learned and self.layer is not None and self.layer >= 0 and self.part not in known.writers

    def copy_from_now_on(self, path: str) -> NoReturn:
        """Raise StateMissed: a tensor that a block found in state was written in place afterwards, so copies are needed."""
        self._learned.copies = True
        raise StateMissed(path)
