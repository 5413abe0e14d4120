"""Tells of every attribute that a forward sets on, or deletes from, a module of the model, before it does."""

from __future__ import annotations

from typing import Any

from greenlet import getcurrent
from torch import nn

from ds_vertical.interrupts import Changed
from ds_vertical.model.layers import LayerMap
from ds_vertical.model.state.survey import OUTSIDE, is_state
from ds_vertical.model.state.tracks import TrackedState
from ds_vertical.model.stubs import Coroutine


class AttributeWatch:
    """Tells a step's tracks of every attribute that a forward sets on a module of the model, before it does.

    It stands in the place of `nn.Module`'s own `__setattr__` and `__delattr__` meanwhile, and tells only of what a coroutine
    does: the forward of a micro-batch. `modules`: the model's, by id, with their paths.
    """

    def __init__(self, tracked: TrackedState, modules: dict[int, str], layers: LayerMap) -> None:
        self._tracked = tracked
        self._modules = modules
        self._regions = {id(each): index for index, block in enumerate(layers.blocks) for each in block.module.modules()}
        self._set, self._delete = nn.Module.__setattr__, nn.Module.__delattr__

    def watching(self) -> Changed:
        """Within the block the step is told."""
        return Changed(self._put_back, self._take_over)

    def _take_over(self) -> None:
        setter, deleter = self._set, self._delete

        def set_attribute(module: nn.Module, name: str, value: Any) -> None:
            if name != "training" or vars(module).get(name) is not value:  # loops call model.train() in each micro-step
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
        self._tracked.note_attribute(owner, name, where, self._regions.get(id(module), OUTSIDE))
