"""Let what modules hold belong to the micro-batch whose forward runs, though all forwards of a step share the modules.

This file opens the state of one step or evaluation (`ForwardState.opened`); `step_state` handles it while the schedule runs.

[Note: versions] In stock's order the forward of micro-batch m begins with what the forward of m-1 has left, and only its own
code changes that until it ends. Here the forwards take turns on the same modules. So an item of state has versions. Whenever a
forward goes on, each item gets the version that this forward has made. When the forward parks, what has changed becomes its
version. A forward that has made no version of an item yet finds one of two:

- An item that a single part of the forward changes (running statistics of a block): the version of the nearest micro-batch
  before it that has one, whose forward is through with that part. That is stock's order.
- An item that several parts change (a list that each block appends to): the version of before the step. That is stock's order
  if forwards leave the item as they find it, or begin by setting it. Where they do not (a counter that all blocks count up, and
  read), no order but stock's gives stock's values. Of a generator that is certain, and it is refused here; of other state the
  self-check tells.

After the step, what each forward has added to lists and numbers that several parts change is added up (`accumulated`). Every
other item holds the version of the last micro-batch.

[Note: learning] Which items change is learned in the first step, and again when modules, their modes or the form of the
micro-batches change: all state is compared with a snapshot taken before the step, behind every part of each forward. From then
on only those few items are handled. Every later step still compares all state behind each prefix, at the end of the first and
the last forward, and where something fails (of tensors on a device see `snapshot`, [Note: a device's answers]). If something
has changed that was not known, the step starts over with that known (`restart.until_known`): state is put back, and nothing has
been stepped. So a step counts only if all that was seen to change was known when it began.

[Note: resets] Where the prefix empties a list that a block fills, the snapshot shows no change by the prefix as long as all
forwards begin with an empty list. So a step that has learned of an item starts over with that item filled, as the forward
before would have left it. If the prefix changes it then, the prefix is one of the parts that change it. What this run computes
is thrown away.

[Note: one after the other] With a single micro-batch, or in stock's order ("horizontal"), each forward is over before the next
one begins. Then modules hold what they hold, and only the recompute of a block needs to know what the block found. In an
evaluation nothing is computed again. There what a forward changes is noted, so that an error can put it back, and no change
lets it start over, or is refused since there is no copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from ds_vertical.interrupts import Changed
from ds_vertical.model.layers import LayerMap
from ds_vertical.model.state.attribute_watch import AttributeWatch
from ds_vertical.model.state.module_state import Item, key_of_item
from ds_vertical.model.state.restart import StateMissed
from ds_vertical.model.state.snapshot import Snapshot, without_collection
from ds_vertical.model.state.step_state import StepState
from ds_vertical.model.state.survey import survey
from ds_vertical.model.state.tracks import PREFIX, LearnedState, TrackedState


class ForwardState:
    """Which state the forwards of one model change. It outlives steps; `opened` handles that state in one of them.

    `num_decided`: how many training steps have counted so far. `in_turn`: each forward and its backward are over before the
    next one begins. `snake`: in training every second layer takes the micro-batches last first. `agreed`: within the block it
    makes all ranks raise, or none does.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: LayerMap,
        num_decided: Callable[[], int],
        in_turn: bool = False,
        snake: bool = False,
        agreed: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self._num_decided = num_decided
        self._agreed = agreed
        self.model = model
        self._layers = layers
        self.in_turn = in_turn
        self.snake = snake
        self._known: set[Hashable] = set()  # kinds of model, functions and micro-batches for which a step has learned
        self.learned = LearnedState()

    @property
    def unsure(self) -> set[str]:
        """The state that other code than the prefix is known to change, by its paths, with a note where several parts do: some
        code may find other values there than in stock's order. Generators are followed, or refused."""
        known = [each for each in self.learned.items if not each.item.is_generator and each.writers != {PREFIX}]
        return {f"{each.item.path} (several parts)" if each.spread and each.settled else each.item.path for each in known}

    def forget(self) -> None:
        """Let the next step learn anew, whatever its modules and micro-batches are. Items known so far stay known."""
        self._known.clear()

    @contextlib.contextmanager
    def opened(
        self,
        forms: Sequence[Hashable],
        seeds: Sequence[int | None],
        functions: Sequence[Callable[..., object]],
        training: bool = True,
    ) -> Iterator[StepState]:
        """Within the block: the state of one schedule's forwards, from a snapshot taken now.

        `forms` and `seeds` have an entry for each micro-batch: what tells its structure from others (`batch.form_of`), and the
        seed of its random numbers. `functions`: those of the user that the forwards call. After an error in a step that does
        not count, everything holds what it held before. The block explains its errors (`StepState.explained`), and raises
        StateMissed, for the step to start over, on all ranks or on none.
        """
        in_turn = self.in_turn or len(seeds) == 1  # which shows less than forwards that take turns
        kind = _shape_of(self.model), tuple(getattr(each, "__code__", id(each)) for each in functions), in_turn
        wanted = {(kind, form) for form in forms} - self._known
        blocks = [block.module for block in self._layers.blocks]
        with without_collection():
            slots, names, reached = survey(self.model, blocks, functions) if self.learned.handled else ([], [], set())
            snapshot = Snapshot(slots, names, closely=bool(wanted))
        self._keep(snapshot)
        self.learned.reached = reached
        decided = self._num_decided()
        learns = bool(wanted) and self.learned.handled
        tracked = TrackedState(self.learned, snapshot, learns, seeds, in_turn)
        step = StepState(self.learned, self.model, self._layers, tracked, seeds, self.snake and training)
        step.counts = lambda: self._num_decided() != decided
        step.is_stocks = in_turn and not training and all(seed is None for seed in seeds)
        modules = {id(module): path for path, module in self.model.named_modules()} if self.learned.handled else {}
        with AttributeWatch(tracked, modules, self._layers).watching(), Changed(step.finish):
            try:
                yield step
            except StateMissed:
                with self._agreed():
                    if not step.counts():
                        step.refuse_lost()
                raise
            step.over = True
        self._known.update(wanted)

    def _keep(self, snapshot: Snapshot) -> None:
        """Drop the items of what the user has replaced since the last step; what stands in their place is known as they
        were."""
        if not self.learned.items:
            return
        dicts = snapshot.owners
        there: dict[Hashable, Item] = {}
        for item in snapshot.items():
            there.setdefault(key_of_item(item), item)
        gone = [known for known in self.learned.items if not _is_there(known.item, there, dicts)]
        if not gone or not self.learned.handled:
            return
        by_path = {known.item.path: known for known in gone}
        self.learned.items = [known for known in self.learned.items if known not in gone]
        held = {key_of_item(known.item) for known in self.learned.items}
        for key, item in there.items():
            old = by_path.get(item.path)
            if old is not None and key not in held and type(item) is type(old.item):
                item.region = old.item.region
                self.learned.items.append(replace(old, item=item, writers=set(old.writers)))


def _is_there(item: Item, there: Mapping[Hashable, Item], dicts: Collection[int]) -> bool:
    key = key_of_item(item)
    is_name = isinstance(key, tuple) and (key[0] in dicts or isinstance(key[0], type))  # it may not stand for anything now
    return item.is_global or key in there or is_name


def _shape_of(model: nn.Module) -> Hashable:
    """Changes with the modules of a model, their modes, their hooks and the number of their attributes."""
    total = 0
    for module in model.modules():
        own = vars(module)
        hooks = len(own["_forward_hooks"]), len(own["_forward_pre_hooks"])
        total = hash((total, id(module), len(own), len(own["_buffers"]), hooks, own["training"]))
    return total
