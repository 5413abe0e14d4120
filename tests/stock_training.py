"""Train a tiny model with stock DeepSpeed alone, parameters and optimizer on SSD: what tests/test_patches.py runs as a
process of its own, once on the installed DeepSpeed and once on a patched copy that comes first on PYTHONPATH.

    python tests/stock_training.py FOLDER [--dtype bf16|fp32] [--zero-init] [--prefetch NUMEL]

Prints one JSON object: which DeepSpeed ran, the losses, the weights' dtypes and a hash over their bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

# run as a script, so this folder is first on the path
import harness
import torch
from torch import nn

from ds_vertical import opcache

NUM_STEPS = 4  # the trace that prefetch needs is complete in the third
# (inputs, outputs) of each layer. In bf16 the third stays in host memory, being under 1 MiB, and the others lie on SSD:
# its gather is in flight when the last layer, which both ends of the turn need, comes into the window of the SSD reads
SHAPES = ((768, 768), (768, 768), (768, 640), (640, 896))


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(inputs, outputs, bias=False) for inputs, outputs in SHAPES))


def stock_config(folder: Path, dtype: str, prefetch_numel: int) -> dict[str, Any]:
    config = harness.base_config(folder, num_micro_batches=1, dtype=dtype)
    del config["vertical_schedule"]
    config["zero_optimization"]["stage3_prefetch_bucket_size"] = prefetch_numel
    return config


def train(folder: Path, dtype: str, zero_init: bool, prefetch_numel: int) -> dict[str, Any]:
    """Losses and the hash of all weights (model dtype) after `NUM_STEPS` steps of one micro-batch."""
    opcache.activate()
    harness.start_process_group()
    import deepspeed

    config = stock_config(folder, dtype, prefetch_numel)
    with deepspeed.zero.Init(config_dict_or_path=config) if zero_init else nullcontext():
        model = build_model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(NUM_STEPS):
        inputs = torch.randn(2, SHAPES[0][0], generator=generator).to(engine.module[0].weight.dtype)
        loss = engine(inputs).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    digest = hashlib.sha256()
    for weight in harness.read_weights(model).values():
        digest.update(weight.contiguous().view(torch.uint8).numpy().tobytes())
    engine.destroy()
    return {"deepspeed": deepspeed.__file__, "losses": losses, "weights": digest.hexdigest()}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--zero-init", action="store_true")
    parser.add_argument("--prefetch", type=int, default=0)
    args = parser.parse_args()
    result = train(args.folder, args.dtype, args.zero_init, args.prefetch)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
