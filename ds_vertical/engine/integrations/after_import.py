"""Calls a function once a module has been imported by whoever imports it first.

A script sets variables of the environment, and imports torch and transformers after that: both read such variables while they
are imported. So nothing here imports them ahead of the script. Imports neither torch nor deepspeed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_waiting: dict[str, list[Callable[[], None]]] = {}
_running: set[str] = set()  # modules that are being imported, and that somebody waits for


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Call `action` as soon as the module `name` is imported, ahead of the next line of whoever imports it; at once where it
    has been imported. What `action` raises fails that import."""
    if name in sys.modules and name not in _running:
        action()
        return
    if not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _waiting.setdefault(name, []).append(action)


class _Finder:
    """Finds the modules that somebody waits for as Python does, and has their execution followed by what waits."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The module's own spec; None for every other module."""
        spec = PathFinder.find_spec(name, path, target) if name in _waiting else None
        if spec is None or spec.loader is None:
            return None
        loader = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # this module's alone: the class has its own
            _running.add(name)
            try:
                execute(module)
            finally:
                _running.discard(name)
            for action in _waiting.pop(name, ()):
                action()

        setattr(loader, "exec_module", exec_module)  # noqa: B010 - of this one loader
        return spec
