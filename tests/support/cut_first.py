"""Interrupts in the first steps of engines: while a step learns which state its forwards change, and in the check before it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from cut_kinds import state_of
from cutting import Cut, Site, Trials, recorded, surroundings

from ds_vertical.errors import TornStateError
from ds_vertical.model.state.tracks import LearnedState

_MOST = 8  # cuts of one engine
Around = Callable[[Any, Cut], contextlib.AbstractContextManager[object]]  # of an engine's first step


@contextlib.contextmanager
def sites_of_check(engine: Any) -> Iterator[Counter[Site]]:
    """How often each site is passed in the self-checks within the block."""
    found: Counter[Site] = Counter()
    check = engine.self_check._check

    def watched(*args: Any) -> None:
        with recorded() as passed:
            check(*args)
        found.update(passed)

    engine.self_check._check = watched
    try:
        yield found
    finally:
        del engine.self_check._check


@contextlib.contextmanager
def in_check(engine: Any, cut: Cut) -> Iterator[None]:
    """Within the block the self-checks are cut."""
    check = engine.self_check._check

    def watched(*args: Any) -> None:
        with cut:
            check(*args)

    engine.self_check._check = watched
    try:
        yield
    finally:
        del engine.self_check._check


def in_step(_: Any, cut: Cut) -> Cut:
    """The step itself is cut."""
    return cut


class FirstTrials(Trials):
    """As `Trials`, of first steps. Where a step that was cut does not count, modules, generators and the loader are to be as
    before. Then it is cut again on the same engine, which has forgotten what it has learned. `around`: what is cut."""

    def __init__(self, *args: Any, around: Around) -> None:
        super().__init__(*args)
        self._cut_around = around
        self._pending: list[str] = []  # cuts of this engine
        self._begin: dict[str, Any] = {}

    def __exit__(self, *_: object) -> None:  # override
        if self._engine is not None:
            self._end()

    def ready(self) -> tuple[Any, Any]:  # override
        """An engine that has not taken a step."""
        if self._engine is None:
            self._start()
            self._pending = []
            self._around, self._begin = surroundings(self._model), state_of(self._model)
        self._engine._state.learned = LearnedState()
        self._engine._state.forget()
        kinds = self._engine._keeping._now.kinds
        if kinds is not None:  # what it keeps is tried again
            kinds._kinds.clear()
            kinds._own.clear()
        self._engine.self_check._is_done, self._engine.self_check.checked_model = False, None
        return self._engine, self._model

    def cut(self, cut: Cut, action: Callable[[Any], object] | None = None) -> None:  # override
        """Interrupt the first step of an engine, or what `around` says of it."""
        assert action is None
        engine, _ = self.ready()
        self._pending.append(str(cut))
        batches = iter([*self._steps[0], *self._steps[1]])
        try:
            with self._cut_around(engine, cut):
                engine.train_batch(batches)
        except KeyboardInterrupt:
            pass
        except Exception as error:
            self._ended_otherwise(cut, error)
        else:
            self._came_to_an_end(cut)
        if engine.optimizer.live.failure is not None:
            self._is_torn(cut)
        elif engine.global_steps or len(self._pending) == _MOST:
            self._end()
        else:
            self._check_begin(len(list(batches)))

    def _is_torn(self, cut: Cut) -> None:
        try:
            self._step()
        except TornStateError as error:
            self.torn.append(f"{cut}: {error}")
            self.whole += len(self._pending) - 1
            self._drop()
        except Exception as error:
            self._is_wrong(cut, error)
        else:
            self._is_wrong(cut, AssertionError("torn, and nobody says so"))

    def _check_begin(self, num_left: int) -> None:
        now = surroundings(self._model) | state_of(self._model)
        before = self._around | self._begin
        changed = [name for name in now | before if now.get(name) != before.get(name)]
        if num_left not in (len(self._steps[0]) + len(self._steps[1]), len(self._steps[1])):
            changed.append(f"the loader, which has {num_left} batches left")
        if changed:
            self._is_wrong("; ".join(self._pending), AssertionError(f"not as before: {changed}"))

    def _end(self) -> None:
        """Take all steps, the first one too where it does not count yet."""
        names = "; ".join(self._pending)
        try:
            while self._engine.global_steps < len(self._steps):
                self.step()
            self._check_around(self._model)
            if self._digest() != self._reference.digests[len(self._steps) - 1]:
                raise AssertionError("weights, masters or moments differ")
        except Exception as error:
            self._is_wrong(names, error)
            return
        self.whole += len(self._pending)
        self._drop()
