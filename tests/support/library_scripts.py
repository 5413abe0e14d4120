"""The scripts in `tests/scripts`, as their libraries' documentation writes them, and the JSON of each arm."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
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
# tests/deepspeed/ds_config_zero3.json of transformers, to which `config_of` adds where parameters and state rest
ZERO3: dict[str, Any] = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"pin_memory": True},
        "offload_param": {"pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "trainer": ZERO3,
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
    made = copy.deepcopy(CONFIGS[script])
    zero = made.setdefault("zero_optimization", {"stage": 3, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0})
    zero["stage3_gather_16bit_weights_on_model_save"] = True
    tier: dict[str, Any] = {"device": "nvme", "nvme_path": str(folder)} if vertical else {"device": "cpu"}
    for name in ("offload_param", "offload_optimizer"):
        zero[name] = zero.get(name, {}) | tier
    if vertical:
        zero["offload_param"] |= {"max_in_cpu": 0, "buffer_count": 24, "buffer_size": 2_000_000}
        zero["vertical_schedule"] = {}
    path = folder / "ds_config.json"
    path.write_text(json.dumps(made))
    return path


def pretrained_model(folder: Path) -> Path:
    """A Llama as `save_pretrained` writes it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 256, "intermediate_size": 2816, "num_hidden_layers": 3}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    model.save_pretrained(folder)
    return folder
