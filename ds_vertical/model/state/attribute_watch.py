"""Tells of every attribute that is set on, or deleted from, a module, before it is: a step of what its forwards do.

[Note: several watches] Steps of several engines may be open at once: a loop of the three calls may train two engines in turn,
and their steps may end in any order. So all watches share one pair of functions in the place of `nn.Module`'s own, and these
stay there until the last watch has ended.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from greenlet import getcurrent
from torch import nn

from ds_vertical.interrupts import Changed
from ds_vertical.model.layers import LayerMap
from ds_vertical.model.state.survey import OUTSIDE, is_state
from ds_vertical.model.state.tracks import TrackedState
from ds_vertical.model.stubs import Coroutine


class Told(Protocol):
    """Wants to be told."""

    def note(self, module: nn.Module, name: str) -> None:
        """An attribute of some module is about to change. What this raises ends the assignment."""


def begin_telling(told: Told) -> None:
    """Tell of every module's attributes from now on."""
    _ALL.add(told)


def end_telling(told: Told) -> None:
    """Tell no more; harmless where nothing is told."""
    _ALL.remove(told)


class AttributeWatch:
    """Tells a step's tracks of every attribute that a forward sets on a module of the model, before it does.

    It tells only of what a coroutine does: the forward of a micro-batch. `modules`: the model's, by id, with their paths; where
    there are none, it does nothing.
    """

    def __init__(self, tracked: TrackedState, modules: dict[int, str], layers: LayerMap) -> None:
        self._tracked = tracked
        self._modules = modules
        self._regions = {id(each): index for index, block in enumerate(layers.blocks) for each in block.module.modules()}

    def watching(self) -> Changed:
        """Within the block the step is told."""
        return Changed(lambda: _ALL.remove(self), lambda: _ALL.add(self) if self._modules else None)

    def note(self, module: nn.Module, name: str) -> None:
        """An attribute of some module is about to change."""
        path = self._modules.get(id(module))
        if path is None or not is_state(name) or not isinstance(getcurrent(), Coroutine):
            return
        own = vars(module)
        if name in own["_parameters"] or name in own["_modules"]:
            return
        owner = own["_buffers"] if name in own["_buffers"] else own
        where = f"{path}.{name}" if path else name
        self._tracked.note_attribute(owner, name, where, self._regions.get(id(module), OUTSIDE))


class _Watches:
    """All watches of this process. See [Note: several watches]."""

    def __init__(self) -> None:
        self._watches: list[Told] = []
        self._stock: tuple[Any, Any] | None = None  # nn.Module's own functions, while others stand in their place

    def add(self, watch: Told) -> None:
        """Tell this one, too, from now on."""
        self._watches.append(watch)
        if self._stock is None:
            self._take_over()

    def remove(self, watch: Told) -> None:
        """Tell this one no more; harmless where it is told of nothing."""
        self._watches = [each for each in self._watches if each is not watch]
        if not self._watches and self._stock is not None:
            nn.Module.__setattr__, nn.Module.__delattr__ = self._stock  # type: ignore[method-assign]
            self._stock = None

    def _take_over(self) -> None:
        setter, deleter = self._stock = nn.Module.__setattr__, nn.Module.__delattr__

        def set_attribute(module: nn.Module, name: str, value: Any) -> None:
            if name != "training" or vars(module).get(name) is not value:  # loops call model.train() in each micro-step
                self._note(module, name)
            setter(module, name, value)

        def delete_attribute(module: nn.Module, name: str) -> None:
            self._note(module, name)
            deleter(module, name)

        nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign,assignment]
        nn.Module.__delattr__ = delete_attribute  # type: ignore[method-assign]

    def _note(self, module: nn.Module, name: str) -> None:
        for watch in self._watches:
            watch.note(module, name)


_ALL: Final = _Watches()
