"""Builds one engine and says what setting its optimizer up has taken. Run by tests/engine/test_setup_budget.py:

    python tests/support/setup_worker.py CONFIG.json NUM_LAYERS WIDTH under|outside

"outside": the model is built outside zero.Init, and DeepSpeed makes one at `initialize`.

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

from ds_vertical.engine import api, memory_check
from ds_vertical.engine.zero3.optimizer import VerticalStage3


def main(config: dict[str, Any], num_layers: int, width: int, under_zero_init: bool) -> None:
    found: dict[str, int] = {}
    host_room, start_pipeline = memory_check.host_room, VerticalStage3.start_pipeline
    check_memory = api.check_memory

    def from_here(*given: Any) -> tuple[int, int]:
        allowed, found["baseline"] = host_room(*given)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident
        return allowed, found["baseline"]

    def up_to_here(self: VerticalStage3, *given: Any, **named: Any) -> None:
        found["peak"] = 1024 * status("VmHWM")
        start_pipeline(self, *given, **named)

    def checked(forecast: memory_check.Forecast, *given: Any) -> Any:
        found["setup"] = forecast.setup_bytes
        return check_memory(forecast, *given)

    memory_check.host_room, api.check_memory = from_here, checked
    VerticalStage3.start_pipeline = up_to_here
    build = partial(MixerModel, num_layers, width)
    with harness.running(config, build, vertical=True, under_zero_init=under_zero_init):
        pass
    say("setup", found)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "under")
