"""Reads and steps as late, or reads as soon, as they may ever be: what a slow disk would do by luck.

Whoever uses a value before its wait finds none; whoever uses one that was read before a write finds the old one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any


class _Reads:
    """A real queue. `issued`: the names of the files in the order of their reads; `left`: reads not done yet."""

    def __init__(self, native: Any) -> None:
        self.native = native
        self.issued: list[str] = []
        self.left: dict[int, tuple[int, int, bytes, int, int]] = {}
        self.finished: dict[int, Any] = {}

    @classmethod
    def of(cls, engine: Any) -> Any:
        """From now on the engine's reads of parameters."""
        reads = cls(engine._params.reads.native)
        engine._params.reads._native = reads
        return reads

    def read(self, address: int, num_bytes: int, path: bytes, offset: int, folder: int) -> int:
        self.issued.append(os.path.basename(path).decode())
        self.left[len(self.issued)] = (address, num_bytes, path, offset, folder)
        return len(self.issued)

    def wait(self, operation: int) -> Any:
        if operation in self.finished:
            return self.finished.pop(operation)
        return self.native.wait(self.native.read(*self.left.pop(operation)))

    def wait_all(self) -> None:
        """As the real one: what each has come to is told by its own `wait`."""
        for operation in list(self.left):
            self.finished[operation] = self.wait(operation)

    def poll(self, operation: int) -> None:
        return None


class LateReads(_Reads):
    """Reads that start only when they are waited for."""


class SoonReads(_Reads):
    """Reads that are complete when `read` returns."""

    def __init__(self, native: Any) -> None:
        super().__init__(native)
        self.done: dict[int, Any] = {}

    def read(self, address: int, num_bytes: int, path: bytes, offset: int, folder: int) -> int:
        operation = super().read(address, num_bytes, path, offset, folder)
        self.done[operation] = super().wait(operation)
        return operation

    def wait(self, operation: int) -> Any:
        return self.done.pop(operation)


class LateSteps:
    """CPU Adam that computes nothing until somebody waits for a step. `num_parts`: parts computed so far; `num_left`: parts
    that are submitted and not computed, without the one that is next."""

    def __init__(self, engine: Any) -> None:
        optimizer = engine.optimizer
        self.pipeline = optimizer.pipeline
        self.kernel = optimizer.stepper.kernel
        self.num_parts = 0
        self.waited = threading.Event()
        optimizer.stepper.kernel = self
        for name in ("_wait", "wait_idle", "close"):
            setattr(self.pipeline, name, self._opening(getattr(self.pipeline, name)))

    def _opening(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def opened(*args: Any) -> Any:
            self.waited.set()
            try:
                return wait(*args)
            finally:
                self.waited.clear()

        return opened

    @property
    def num_left(self) -> int:
        return len(self.pipeline._submitted) + len(self.pipeline.reads.reading)

    def update(self, *args: Any) -> None:
        assert self.waited.wait(120), "nobody waits for this step"
        self.num_parts += 1
        self.kernel.update(*args)


class LateWrites:
    """A real queue whose writes start only when they are waited for: as late as a write may ever happen."""

    def __init__(self, native: Any) -> None:
        self.native = native
        self.num_asked = 0
        self.left: dict[int, tuple[int, int, bytes, int, int]] = {}

    def write(self, address: int, num_bytes: int, path: bytes, offset: int, folder: int) -> int:
        self.num_asked += 1
        self.left[self.num_asked] = (address, num_bytes, path, offset, folder)
        return self.num_asked

    def wait(self, operation: int) -> Any:
        return self.native.wait(self.native.write(*self.left.pop(operation)))

    def wait_all(self) -> None:
        for operation in list(self.left):
            self.wait(operation)

    def poll(self, operation: int) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)
