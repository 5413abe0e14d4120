"""The log of failures in the store through which the process group was made: one entry after another, read by all ranks."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, dataclass
from typing import Literal

from ds_vertical.distributed.host_peers import Store


@dataclass(frozen=True)
class RankReport:
    """What became of a rank. `section`: the number of the one that it was in last; `what`: its name; `text`: the error. "lost":
    with its host, of which `text` tells."""

    rank: int
    kind: Literal["failed", "left", "gone", "lost"]
    section: int
    what: str
    text: str

    def describe(self) -> str:
        """One clause for an error message."""
        if self.kind == "failed":
            return f"rank {self.rank} failed{f' in {self.what}' if self.what else ''}: {self.text}"
        if self.kind == "left":
            return f"rank {self.rank} has ended without an error: do all ranks have as many batches, and make the same calls?"
        if self.kind == "lost":
            return self.text
        return f"rank {self.rank} is gone without a word ({self.text}): killed, perhaps for want of memory, or ended in C"


class FailureLog:
    """One rank's end of the log. `changed` guards the entries and is notified by the thread that calls `exchange`.

    `entries`: all reports, this rank's own among them, in the order in which they were read. `is_open`: whether the store still
    answers.
    """

    def __init__(self, store: Store, rank: int, world_size: int, changed: threading.Condition) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._changed = changed
        self.entries: list[RankReport] = []
        self.is_open = True
        self._numbers: set[int] = set()  # those of the entries in the store
        self._outbox: list[RankReport] = []
        self._sent: set[int] = set()  # numbers of own entries that not every rank has read yet

    @property
    def has_unsent(self) -> bool:
        """Whether `exchange` has reports of this rank to write into the store, which still answers."""
        return self.is_open and bool(self._outbox)

    def send(self, report: RankReport, patience_s: float) -> None:
        """Hand a report to the thread that calls `exchange`. Returns once all ranks have read it, or after `patience_s`."""
        with self._changed:
            self._outbox.append(report)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not (self.is_open and (self._outbox or self._sent)), patience_s)

    def exchange(self) -> None:
        """Write this rank's reports, read those of all, and see which of the own ones all ranks have read. Raises what the
        store raises: RuntimeError, OSError."""
        while self._outbox:
            entry = self._outbox[0]
            number = self._store.add("count", 1)
            self._store.set(f"entry/{number}", json.dumps(asdict(entry)))
            with self._changed:
                self._outbox.pop(0)
                self._sent.add(number)
        for number in range(1, self._store.add("count", 0) + 1):
            if number not in self._numbers and self._store.check([f"entry/{number}"]):
                entry = RankReport(**json.loads(self._store.get(f"entry/{number}")))
                with self._changed:
                    self._numbers.add(number)
                    self.entries.append(entry)
                self._store.add(f"heard/{number}", 1)
        for number in sorted(self._sent):
            if self._store.add(f"heard/{number}", 0) >= self._world_size - self._num_ended():
                with self._changed:
                    self._sent.discard(number)

    def _num_ended(self) -> int:
        return len({entry.rank for entry in self.entries if entry.kind != "failed" and entry.rank != self._rank})
