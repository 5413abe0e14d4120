"""One of two ranks that train with several ways to keep what backwards read, in several tiers.

python tests/support/kept_rank_worker.py FOLDER      # with the launcher's variables set; writes FOLDER/rank<R>.pt
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Final

# run as a script, so this folder is first on the path
import torch
from harness import run_arm, start_process_group
from rank_worker import OddModel, batches, config

WAYS: Final[dict[str, dict[str, Any]]] = {
    "none": {"keep": "none"},
    "free": {"keep": "free", "keep_share": 0.5},
    "products": {"keep": "products", "keep_device": "ssd", "keep_share": 0.5},
    "everything": {"keep": "everything", "keep_device": "ssd", "keep_share": 0.5, "keep_host_share": 0.5},
    "all on SSD": {"device": "ssd", "keep": "everything", "keep_device": "ssd"},
    "one rank falls": {"keep": "free"},
}


class HookedModel(OddModel):
    """Of whose blocks no operation can be left out of a recompute."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            for module in list(block.modules())[1:]:
                module.register_forward_hook(lambda *_: None)


def main(folder: Path) -> None:
    """Of each way what the run has computed, its kinds of calls, and the cells that each tier has held in the last step."""
    torch.set_num_threads(1)
    start_process_group()
    rank, found = int(os.environ["RANK"]), dict[str, dict[str, Any]]()
    for name, activations in WAYS.items():
        kept: dict[str, Any] = {"cells": {}, "policies": []}

        def note(engine: Any, step: int, kept: dict[str, Any] = kept) -> None:
            if engine.kept is not None:
                kept["cells"] = {tier.value: cells for tier, cells in engine.kept.cells if cells}
                kept["policies"] = sorted({kind.policy for kind in engine._runner.kinds.found if kind.is_tried})

        made = config(folder / "swap", "fp32", delay=0.3)
        made["vertical_schedule"] |= {"activations": activations}
        build = HookedModel if name == "one rank falls" and rank == 1 else OddModel
        found[name] = vars(run_arm(made, build, batches(rank, 2), vertical=True, between=note)) | kept
    torch.save(found, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
