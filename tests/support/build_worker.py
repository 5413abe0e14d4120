"""Builds a model under zero.Init, initializes and trains one step, in a process that may be held to so much memory.

    python tests/support/build_worker.py CONFIG.json

Writes to CONFIG.json what has come of it: "trained" or "refused", the words of the refusal, and this process's peak of resident
memory in bytes.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

# run as a script, so this folder is first on the path
import harness
from models import MixerModel, token_batches
from processes import status

from ds_vertical.errors import MemoryBudgetError


def main(file: Path) -> None:
    harness.start_process_group()
    config = json.loads(file.read_text())
    try:
        with harness.running(config, partial(MixerModel, 3, width=1024), vertical=True) as (engine, _):
            engine.train_batch(iter(token_batches(1, 2, rows=1, shortest=4)[0]))
        found = ["trained", ""]
    except MemoryBudgetError as error:
        found = ["refused", str(error)]
    file.write_text(json.dumps([*found, 1024 * status("VmHWM")]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
