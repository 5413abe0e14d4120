"""One of two ranks whose model keeps state that begins to change in the second step, on rank 0 alone: `state_worker.py FOLDER`.

Prints one line of JSON: losses, a digest of the weights, what the blocks have counted, lines that say that a step started over.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

# run as a script, so this folder is first on the path
import harness
import torch
from stateful import Base, Block, batches, config_in

RANK = int(os.environ["RANK"])


class CountingBlock(Block):
    """Counts from the first step on; `seen` grows on rank 0 alone, from the second one on."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.calls, self.seen, self.start = 0, list[float](), False

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.calls += 1
        if self.start and RANK == 0:
            self.seen.append(x.mean().item())
        return self.body(x * (1 + 0.05 * self.calls))


class Counting(Base):
    block = CountingBlock


def main(folder: str) -> None:
    said, losses = io.StringIO(), []
    config = config_in(Path(folder), params="cpu", optimizer="cpu", section={"self_check": True})
    with contextlib.redirect_stderr(said), harness.running(config, Counting, vertical=True) as (engine, model):
        for index, step in enumerate(batches(3)):
            losses.append(engine.train_batch(iter(step)).item())
            for block in model.blocks if index == 0 else ():
                block.start = True
        found = {
            "losses": losses,
            "weights": harness.digest(harness.read_weights(model)),
            "calls": [block.calls for block in model.blocks],
            "seen": [len(block.seen) for block in model.blocks],
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
