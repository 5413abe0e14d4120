"""Scripts that know nothing of ds_vertical, and a JSON whose section is where stock would refuse it."""

from __future__ import annotations

from typing import Any

# as `python SCRIPT`, with the ops that are compiled already
PLAIN = (
    "import runpy, sys; from ds_vertical.compat.ops import cache; cache.activate(); del sys.argv[0];"
    " sys.path.insert(0, sys.argv[0].rpartition('/')[0]); runpy.run_path(sys.argv[0], run_name='__main__')"
)

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "offload_param": {
            "device": "nvme",
            "nvme_path": "/ssd",
            "max_in_cpu": 0,
            "buffer_count": 8,
            "buffer_size": 4096,
        },
        "offload_optimizer": {"device": "nvme", "nvme_path": "/ssd"},
        "vertical_schedule": {},
    },
}

# Stock's names alone; the engine takes whole steps once the script is launched through ds_vertical.
TRAIN = """
import argparse
import deepspeed
import torch
from torch import nn

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=0)
args = parser.parse_args()
torch.manual_seed(1)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])

    def forward(self, hidden):
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden.square().mean()

with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config):
    model = Model()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
engine.train_batch(iter([torch.ones(1, 32), torch.zeros(1, 32)]))
print("engine", type(engine).__name__, flush=True)
"""
