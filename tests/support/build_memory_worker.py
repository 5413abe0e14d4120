"""Builds a model of `planned_runs` under zero.Init, and says what that has taken. Run by tests/engine/test_setup_budget.py:

    python tests/support/build_memory_worker.py CONFIG.json NAME DTYPE

Prints {"baseline": bytes of the process ahead of zero.Init, "locked": page-locked bytes once it is open, "peak": the
largest resident set until the model has been built, "left": bytes that are locked behind `initialize`'s check of memory}.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

# run as a script, so this folder is first on the path
import harness
import planned_runs
import torch
from processes import say, status

from ds_vertical.engine.budget.room import host_room
from ds_vertical.io import host
from ds_vertical.model.hf import build_model

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main(file: str, name: str, dtype: str) -> None:
    harness.start_process_group()
    import deepspeed

    import ds_vertical

    build = partial(build_model, name, planned_runs.fields_of(name), lambda config: None, dtype=DTYPES[dtype])
    with torch.device("meta"):
        build()  # what this imports is none of zero.Init's bytes
    prepared = ds_vertical.prepare(json.loads(Path(file).read_text()))
    locked = status("VmLck")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident
    found = {"baseline": host.resident_bytes()}
    with deepspeed.zero.Init(config_dict_or_path=prepared):
        found["locked"] = 1024 * (status("VmLck") - locked)
        model = build()
    found["peak"] = 1024 * status("VmHWM")
    host_room(model.parameters(), None)
    found["left"] = 1024 * (status("VmLck") - locked)
    say("built", found)


if __name__ == "__main__":
    main(*sys.argv[1:])
