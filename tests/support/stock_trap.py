"""Train eight linear layers for some steps with stock DeepSpeed alone on a given JSON: what tests/cli/doctor/test_doctor.py
runs to see whether stock really does what `ds_vertical/cli/doctor/stock_traps.py` says.

    python tests/support/stock_trap.py FILE.json NUM_STEPS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import harness
import torch
from torch import nn

WIDTH = 768  # over 1 MiB in bf16: each lies on SSD, alone in a sub-group of fewer elements


def main() -> int:
    config = json.loads(Path(sys.argv[1]).read_text())
    harness.start_process_group()
    import deepspeed

    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8)))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)  # pyright: ignore
    for _ in range(int(sys.argv[2])):
        loss = engine(torch.ones(2, WIDTH, dtype=torch.bfloat16)).float().square().mean()
        engine.backward(loss)
        engine.step()
        print("LOSS", loss.item(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
