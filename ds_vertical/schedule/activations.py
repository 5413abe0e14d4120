"""What leaves memory between its uses: layer inputs, gradients between layers, and what a forward keeps for its backward.

[Note: moves] The input of a layer is made by the F before it and used by the layer's F and B; the gradient of a layer's
output is made by the B after it and used by the layer's B (`pre` has a gradient and no input). What is saved leaves memory
as soon as another F or B follows its use: so a LOAD comes ahead of every use but one that directly follows the use before.
It is written once, whatever the number of loads: twice in the vertical order (ahead of F and of B), once for the last
layer's input, for gradients, and where F follows at once. What a layer's F keeps (KSAVE) is made by that F and used by the B.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ds_vertical.errors import ScheduleError
from ds_vertical.schedule.events import Cell, Event, Op
from ds_vertical.types import PRE, SUF, Unit

LOOK_AHEAD: Final = 2  # uses by which a load is ahead of its own
SAVES: Final = {Op.SAVE: Op.LOAD, Op.GSAVE: Op.GLOAD, Op.KSAVE: Op.KLOAD}
DROPS: Final = {Op.SAVE: Op.DROP, Op.GSAVE: Op.GDROP, Op.KSAVE: Op.KDROP}


def is_work(event: Event) -> bool:
    """Whether the event makes or uses what moves: F and B, of `pre` too."""
    return event.op in (Op.F, Op.B) and event.layer != SUF


@dataclass(frozen=True)
class _Life:
    """What a SAVE (or GSAVE, KSAVE) is about, and at which F and B, counted, it is made and used."""

    save: Op
    unit: Unit
    micro_batch: int
    touches: tuple[int, ...]

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """The neighbouring touches between which it is not in memory."""
        return [(a, b) for a, b in zip(self.touches, self.touches[1:], strict=False) if b - a > 1]

    def event(self, op: Op) -> Event:
        return Event(op, self.unit, self.micro_batch)


def _lives(work: Sequence[Event], moved: Collection[int], kept: Collection[Cell]) -> Iterator[_Life]:
    at = {(event.op, event.layer, event.micro_batch): place for place, event in enumerate(work)}
    num_layers = 1 + max((event.layer for event in work if isinstance(event.layer, int)), default=-1)
    units: list[Unit] = [PRE, *range(num_layers)]
    for m in moved:
        for before, unit in zip(units, units[1:], strict=False):
            uses = (at[Op.F, before, m], at[Op.F, unit, m], at[Op.B, unit, m])
            yield _Life(Op.SAVE, unit, m, uses)
            yield _Life(Op.GSAVE, before, m, (at[Op.B, unit, m], at[Op.B, before, m]))
    for layer, m in kept:
        yield _Life(Op.KSAVE, layer, m, (at[Op.F, layer, m], at[Op.B, layer, m]))


def place_activations(
    events: Sequence[Event], moved: Collection[int], ahead: int = LOOK_AHEAD, kept: Collection[Cell] = ()
) -> tuple[Event, ...]:
    """SAVE, LOAD, DROP and GSAVE, GLOAD, GDROP of the micro-batches `moved`, KSAVE, KLOAD, KDROP of the cells `kept`; see
    [Note: moves].

    Loads come in the order of use, `ahead` uses ahead: of each kind at most ahead + 1 are loaded and not yet used. Comes
    last of all passes, since these events stand between other layers' events.
    """
    if ahead < 0:
        raise ScheduleError(f"ahead must be a number of loads >= 0, got {ahead}")
    places = [index for index, event in enumerate(events) if is_work(event)]
    lives = [life for life in _lives([events[index] for index in places], moved, kept) if life.gaps]
    before: dict[int, list[Event]] = {}
    after: dict[int, list[Event]] = {}
    for save, load in SAVES.items():
        own = [life for life in lives if life.save is save]
        for life in own:
            after.setdefault(places[life.gaps[0][0]], []).append(life.event(save))
            after.setdefault(places[life.touches[-1]], []).append(life.event(DROPS[save]))
        loads = sorted(((use, left, life) for life in own for left, use in life.gaps), key=lambda entry: entry[0])
        for number, (_, left, life) in enumerate(loads):
            earliest = loads[max(0, number - ahead)][0]
            if save is Op.KSAVE and number < ahead:  # the first ones are ahead of a use, too
                earliest = max(0, earliest - ahead)
            before.setdefault(places[max(earliest, left + 1)], []).append(life.event(load))
    placed: list[Event] = []
    for index, event in enumerate(events):
        placed += (*before.get(index, ()), event, *after.get(index, ()))
    return tuple(placed)


# ---- the rules


@dataclass
class _Saved:
    """Where it was saved, loaded (None: not in memory) and last used; `touched`: the F or B, counted, that used it."""

    saved: int
    loaded: int | None = None
    used: int | None = None
    touched: int = -2


class Moves:
    """What has moved while a list of events is read from left to right. Methods raise ScheduleError, or return the indices
    of the events that must be complete before."""

    def __init__(self) -> None:
        self._saved: dict[tuple[Op, Unit | None, int | None], _Saved] = {}
        self._count = -1

    def begin_work(self) -> None:
        """An F or B begins: what the one before used and this one does not leaves memory."""
        self._count += 1

    def use(self, save: Op, unit: Unit | None, micro_batch: int | None, index: int) -> list[int]:
        """The F or B at `index` uses what `save` is about."""
        state = self._saved.get((save, unit, micro_batch))
        if state is None:
            return []  # not moved, or not yet
        if state.loaded is None and state.touched != self._count - 1:
            raise ScheduleError(f"needs {Event(SAVES[save], unit, micro_batch)} before it")
        needs = [] if state.loaded is None else [state.loaded]
        state.loaded, state.used, state.touched = None, index, self._count
        return needs

    def save(self, event: Event, index: int) -> None:
        """A SAVE, GSAVE or KSAVE at `index`."""
        key = (event.op, event.layer, event.micro_batch)
        if key in self._saved:
            raise ScheduleError(f"is saved already, by event {self._saved[key].saved}")
        self._saved[key] = _Saved(index)

    def load(self, save: Op, event: Event, index: int) -> list[int]:
        """A LOAD, GLOAD or KLOAD at `index` of what `save` is about."""
        state = self._find(save, event)
        if state.loaded is not None:
            raise ScheduleError(f"is loaded already, by event {state.loaded}")
        state.loaded = index
        return [state.saved, *([] if state.used is None else [state.used])]

    def drop(self, save: Op, event: Event) -> list[int]:
        """A DROP, GDROP or KDROP of what `save` is about."""
        state = self._find(save, event)
        if state.loaded is not None:
            raise ScheduleError(f"was loaded by event {state.loaded} and not used since")
        del self._saved[save, event.layer, event.micro_batch]
        return [state.saved, *([] if state.used is None else [state.used])]

    def _find(self, save: Op, event: Event) -> _Saved:
        state = self._saved.get((save, event.layer, event.micro_batch))
        if state is None:
            raise ScheduleError(f"needs {Event(save, event.layer, event.micro_batch)} before it")
        return state


def find_fault(
    events: Sequence[Event], moved: Collection[int], ahead: int, cells: Collection[Cell] = ()
) -> tuple[int, str] | None:
    """The index of the first event that moves what it should not, loads too far ahead or (len(events)) is missing, and what is
    wrong; None where nothing is. `cells`: those whose kept values move."""
    kinds = {op: save for save in SAVES for op in (save, SAVES[save], DROPS[save])}
    loaded: dict[Op, set[tuple[Unit | None, int | None]]] = {save: set() for save in SAVES}
    kept: dict[tuple[Op, Unit | None, int | None], int] = {}
    for index, event in enumerate(events):
        save = kinds.get(event.op)
        key: tuple[Unit | None, int | None] = (event.layer, event.micro_batch)
        if event.op is Op.F or event.op is Op.B:
            loaded[Op.SAVE].discard(key)
        if event.op is Op.B:
            loaded[Op.GSAVE].discard(key)
            loaded[Op.KSAVE].discard(key)
        if save is None:
            continue
        if save is Op.KSAVE and key not in cells:
            return index, "moves kept values of which the header (kept=) says nothing"
        if save is not Op.KSAVE and event.micro_batch not in moved:
            return index, f"moves micro-batch {event.micro_batch}; the header moves {', '.join(map(str, moved)) or 'none'}"
        if event.op is SAVES[save]:
            loaded[save].add(key)
            if len(loaded[save]) > ahead + 1:
                return index, f"is number {len(loaded[save])} loaded and not yet used; ahead {ahead} allows {ahead + 1}"
        elif event.op is save:
            kept[save, event.layer, event.micro_batch] = index
        else:
            kept.pop((save, event.layer, event.micro_batch), None)
    if kept:
        left = " ".join(str(events[index]) for index in list(kept.values())[:8])
        return len(events), f"never dropped: {left}"
    return None
