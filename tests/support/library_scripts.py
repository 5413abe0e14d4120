"""The scripts in `tests/scripts`, as their libraries' documentation writes them, and the JSON of each arm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from places import ROOT

SCRIPTS = ROOT / "tests" / "scripts"
COMMON = {
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
}
HUGGING_FACE = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "data_types": {"grad_accum_dtype": "fp32"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "trainer": HUGGING_FACE,
    "trl_sft": HUGGING_FACE,
    "lora": HUGGING_FACE,
    "three_calls": {
        **COMMON,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    },
    "accelerate_loop": {**COMMON, "train_micro_batch_size_per_gpu": 2},
}
TRAINING = """--per_device_train_batch_size 1 --gradient_accumulation_steps 4 --num_train_epochs 1 --max_grad_norm 1.0
 --learning_rate 1e-3 --logging_steps 1 --save_strategy no --report_to none --bf16 true --use_cpu true""".split()


def config_of(script: str, folder: Path, vertical: bool) -> Path:
    """Stock's parameters and optimizer in host memory, or ours on SSD, in `folder`."""
    buffers = {"nvme_path": str(folder), "max_in_cpu": 0, "buffer_count": 24, "buffer_size": 2_000_000}
    zero: dict[str, Any] = {"stage": 3, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
    zero["stage3_gather_16bit_weights_on_model_save"] = True
    if vertical:
        zero |= {
            "offload_param": {"device": "nvme", **buffers},
            "offload_optimizer": {"device": "nvme", "nvme_path": str(folder)},
            "vertical_schedule": {},
        }
    else:
        zero |= {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    path = folder / "ds_config.json"
    path.write_text(json.dumps({**CONFIGS[script], "zero_optimization": zero}))
    return path
