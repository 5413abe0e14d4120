"""Train tiny models with stock DeepSpeed alone, parameters and optimizer on SSD: what tests/upstream/test_patches.py runs as a
process of its own, on the installed DeepSpeed and on a patched copy that comes first on PYTHONPATH.

    python tests/support/stock_training.py FOLDER VARIANT [VARIANT ...]

One JSON object per variant on standard output, written before the next one starts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# run as a script, so this folder is first on the path
import harness
import torch
from torch import nn

from ds_vertical.compat.ops import cache

NUM_STEPS = 4  # the trace that prefetch needs is complete in the third
Shapes = tuple[tuple[int, int], ...]  # (inputs, outputs) of each layer
# The third is under 1 MiB in bf16 and stays in host memory; the others lie on SSD. Its gather is in flight when the
# last layer, which both ends of the turn need, comes into the window of the SSD reads.
MIXED: Shapes = ((768, 768), (768, 768), (768, 640), (640, 896))
ALL_ON_SSD: Shapes = ((768, 768),) * 4


@dataclass(frozen=True)
class Variant:
    """A run: `zero_init` builds the model under zero.Init, as the arms do; prefetch in elements."""

    dtype: str = "bf16"
    zero_init: bool = True
    prefetch_numel: int = 0
    shapes: Shapes = MIXED


VARIANTS = {
    "bf16": Variant(),
    "bf16-prefetch": Variant(prefetch_numel=400_000),
    "fp32": Variant(dtype="fp32", shapes=ALL_ON_SSD),
    "fp32-without-init": Variant(dtype="fp32", zero_init=False, shapes=ALL_ON_SSD),
    "fp32-mixed-without-init": Variant(dtype="fp32", zero_init=False),
}


def build_model(shapes: Shapes) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(inputs, outputs, bias=False) for inputs, outputs in shapes))


def stock_config(folder: Path, variant: Variant) -> dict[str, Any]:
    config = harness.base_config(folder, num_micro_batches=1, dtype=variant.dtype)
    del config["vertical_schedule"]
    config["zero_optimization"]["stage3_prefetch_bucket_size"] = variant.prefetch_numel
    return config


def new_engine(config: dict[str, Any], variant: Variant) -> tuple[Any, nn.Module]:
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=config) if variant.zero_init else nullcontext():
        model = build_model(variant.shapes)
    trainable: Any = list(model.parameters())  # initialize() is annotated as if it took nothing but None
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, config=config)
    return engine, model


def train(folder: Path, variant: Variant) -> dict[str, Any]:
    """Losses, dtypes of the weights and a hash over their bytes after `NUM_STEPS` steps of one micro-batch."""
    import deepspeed

    engine, model = new_engine(stock_config(folder, variant), variant)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(NUM_STEPS):
        inputs = torch.randn(2, variant.shapes[0][0], generator=generator)
        # in whatever dtype the weights are: with fp32 inputs a model that should not be bf16 dies instead of training
        loss = engine(inputs.to(engine.device, next(model.parameters()).dtype)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    weights = harness.read_weights(model).values()
    digest = hashlib.sha256()
    for weight in weights:
        digest.update(weight.contiguous().view(torch.uint8).numpy().tobytes())
    engine.destroy()
    dtypes = sorted({str(weight.dtype) for weight in weights})
    return {"deepspeed": deepspeed.__file__, "losses": losses, "dtypes": dtypes, "weights": digest.hexdigest()}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("variants", nargs="+", choices=tuple(VARIANTS))
    args = parser.parse_args()
    cache.activate()
    harness.start_process_group()
    from deepspeed.accelerator import get_accelerator

    # newer CPUs and all GPUs have fp16, where the dtype that zero.Init is given counts: be one of the others
    get_accelerator().is_fp16_supported = lambda: False  # type: ignore[method-assign]
    for name in args.variants:
        folder = args.folder / name
        folder.mkdir()
        print(json.dumps({"variant": name, **train(folder, VARIANTS[name])}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
