"""Builds one engine and says what setting its optimizer up has taken. Run by tests/engine/test_setup_budget.py:

    python tests/support/setup_worker.py CONFIG.json NUM_LAYERS WIDTH

Prints {"baseline": bytes of the process beside its parameters, "setup": what the budget adds for the set-up, "peak": the
largest resident set from the check of the budget until the engine makes buffers of its own}.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

# run as a script, so this folder is first on the path
import harness
from models import MixerModel
from processes import say, status

from ds_vertical.engine import memory_check
from ds_vertical.engine.zero3.optimizer import VerticalStage3


def main(config: dict[str, Any], num_layers: int, width: int) -> None:
    found: dict[str, int] = {}
    host_room, start_pipeline = memory_check.host_room, VerticalStage3.start_pipeline

    def from_here(*given: Any) -> tuple[int, int]:
        allowed, found["baseline"] = host_room(*given)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident
        return allowed, found["baseline"]

    def up_to_here(self: VerticalStage3, *given: Any, **named: Any) -> None:
        found["peak"] = 1024 * status("VmHWM")
        start_pipeline(self, *given, **named)

    memory_check.host_room = from_here
    VerticalStage3.start_pipeline = up_to_here
    with harness.running(config, partial(MixerModel, num_layers, width), vertical=True) as (engine, model):
        groups = memory_check.groups_of(model, None, None)
        found["setup"] = memory_check.Forecast(engine.layers, groups, config, engine.vertical).setup_bytes
    say("setup", found)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), *map(int, sys.argv[2:]))
