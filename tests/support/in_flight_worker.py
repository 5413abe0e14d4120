"""One of some ranks that train two steps in host memory: what its executor does in the second one, event by event.

    python tests/support/in_flight_worker.py FOLDER [N]      # with the launcher's variables set; writes FOLDER/rank<R>.json

N: so many ranks are a node.

Per way of running (with overlap and without): for each event its operation, its unit, how many gathers this rank has issued
once the event is over, and what the executor has waited for ahead of it or because of it. Shards in host memory are there at
once, so nothing in it depends on time.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# run as a script, so this folder is first on the path
import harness
import torch
from rank_worker import OddModel, batches, config

from ds_vertical.engine import handlers
from ds_vertical.schedule.events import Event
from ds_vertical.schedule.executor import Executor, InFlight

notes: list[dict[str, Any]] = []
count: Callable[[], int] = int


class Noting(Executor):
    """As the executor, and keeps a note of each event."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._waited: list[str] = []
        self.handlers = {op: self._noted(handler) for op, handler in self.handlers.items()}

    def _noted(self, handler: Callable[[Event], InFlight | None]) -> Callable[[Event], InFlight | None]:
        def call(event: Event) -> InFlight | None:
            ticket = handler(event)
            waited, self._waited = self._waited, []
            notes.append({"op": event.op.name, "unit": str(event.layer), "gathers": count(), "waited": waited})
            return ticket

        return call

    def _wait(self, ticket: InFlight, by: object) -> None:
        super()._wait(ticket, by)
        self._waited.append(ticket.what)


def main(folder: Path, ranks_per_node: int = 1) -> None:
    global count
    start = 0
    torch.set_num_threads(1)
    harness.start_process_group()
    rank, found = int(os.environ["RANK"]), {}
    handlers.Executor = Noting  # type: ignore[misc]
    for overlap in (True, False):
        made = config(folder / "swap", "fp32", tier="cpu")
        made["vertical_schedule"]["overlap"] = overlap
        if ranks_per_node > 1:
            made["zero_optimization"]["zero_hpz_partition_size"] = ranks_per_node
        with harness.running(made, OddModel, vertical=True) as (engine, model):
            count = lambda engine=engine: engine.param_store.gathers.num_issued  # noqa: E731
            for step in batches(rank, torch.distributed.get_world_size())[:2]:
                notes.clear()
                start = count()
                engine.train_batch(iter(step))
            digest = harness.digest(harness.read_weights(model))
            found[str(overlap)] = {"start": start, "events": list(notes), "digest": digest}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
