"""Access to one rank's live state: which thread is in a schedule, whether the state is whole, whether the ranks agree on it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, Protocol

from ds_vertical.distributed import ranks
from ds_vertical.engine.call_guard import Calls
from ds_vertical.errors import StorageError
from ds_vertical.interrupts import Changed
from ds_vertical.io.checksums import ChecksumError
from ds_vertical.offload.consistency import WHOLE, StateGuard

_INSIDE: Final = "called within a step or an evaluation, where state is on its way; call it between two"


class Transfers(Protocol):
    """Moves or computes state; what failed there first is its `error`."""

    @property
    def error(self) -> BaseException | None:
        """The first failure; None where there was none."""
        ...


class LiveState:
    """Parameters, masters and moments of one rank, as calls of the engine meet them.

    `num_inside`: schedules and gathers that run at present, during which no use of the state flushes. `apart`: one of the
    ranks has failed, and the ranks have not agreed since then that all is well.
    """

    def __init__(self, condition: StateGuard, calls: Calls) -> None:
        self.num_inside = 0
        self.apart = False
        self._condition = condition
        self._calls = calls
        self._is_torn: Callable[[], bool] = lambda: False
        self._transfers: tuple[Transfers, ...] = ()

    def watch(self, is_torn: Callable[[], bool], *transfers: Transfers) -> None:
        """From now on an error of `transfers` is a failure of the state; `is_torn`: whether discarded steps have torn it."""
        self._is_torn, self._transfers = is_torn, transfers

    def inside(self) -> Changed:
        """Within the block a use of the state does not flush."""
        before = self.num_inside
        return Changed(partial(setattr, self, "num_inside", before), partial(setattr, self, "num_inside", before + 1))

    @property
    def is_inside(self) -> bool:
        """Whether this thread is in a step or an evaluation."""
        return self.num_inside > 0 and self._calls.is_mine

    def refuse_inside(self, call: str) -> None:
        """Raise RuntimeError where this thread is in a step or an evaluation. `call`: the user's, for the message."""
        if self.is_inside:
            raise RuntimeError(f"{call}: {_INSIDE}")

    def refuse_compressed_inside(self, call: str) -> None:
        """As `refuse_inside`, for what only compressed masters forbid there."""
        if self.is_inside:
            key = "vertical_schedule.optimizer_compression"
            raise RuntimeError(f'{call} with "{key}": true: {_INSIDE}, or write "{key}": false')

    @property
    def failure(self) -> BaseException | None:
        """What kept a step from being completed: a transfer or computation of state or of new parameters."""
        failure = self._condition.failure
        for transfers in self._transfers:
            failure = failure or transfers.error
        return failure

    def check_whole(self) -> None:
        """Raise where a step failed in part: what failed, if no call has raised it yet, else TornStateError."""
        if failure := self.failure:
            self._condition.refuse(failure)

    @contextlib.contextmanager
    def schedule_running(self) -> Iterator[None]:
        """Within the block the schedule fetches parameters, and knows what is due: no flush. The caller has called
        `check_whole` where all ranks raise what it raises. What fails later fails the schedule: so the others learn of it."""
        with self.inside():
            try:
                yield
            except BaseException as error:
                if self._is_torn() or isinstance(error, ChecksumError):
                    self._condition.tear(error)
                if self.failure is not None:
                    self._condition.tell(error)
                elif isinstance(error, (OSError, StorageError)):
                    error.add_note(WHOLE)
                raise

    @contextlib.contextmanager
    def agreed(self, what: str, then: Callable[[], None] = lambda: None, num_said: int = 0) -> Iterator[ranks.Said]:
        """As `ranks.all_or_none`. After another rank's failure nothing is done with it that it may not be there for."""
        self.apart = ranks.world_size() > 1
        with ranks.all_or_none(what, then, num_said) as said:
            yield said
        self.apart = False
